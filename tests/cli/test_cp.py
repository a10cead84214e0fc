"""`dsd cp`: a copy that is the same to the last byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import dsdformat


def test_a_copy_has_the_same_files_ranks_and_root(dsd, sharded, tmp_path):
    (sharded / "not-ours.txt").write_text("x")
    assert dsd("cp", sharded, tmp_path / "copy").code == 0
    names = sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert names == sorted(path.name for path in sharded.iterdir() if path.suffix != ".txt")
    for name in names:
        assert (tmp_path / "copy" / name).read_bytes() == (sharded / name).read_bytes()
    with dsdformat.open(sharded) as one, dsdformat.open(tmp_path / "copy") as two:
        assert (one.root, one.world_size) == (two.root, two.world_size)
        assert two.tensor("model/weight").placements == one.tensor("model/weight").placements


def test_a_digest_says_which_checkpoint_it_must_be(dsd, step10):
    root = dsdformat.open(step10).root
    assert dsd("cp", step10, "a", "--digest", root).code == 0
    result = dsd("cp", step10, "b", "--digest", "0" * 64)
    assert (result.code, Path("b").exists()) == (1, False)
    assert result.err.startswith("error[digest_mismatch]: ")


def test_damage_that_happens_while_it_is_copied_is_found(dsd, step10, monkeypatch):
    write = dsdformat.storage.target.FileSink.write_at

    def flipped(self, byte_offset, pieces):
        data = bytearray(b"".join(pieces))
        data[-1] ^= "model" in self._path.name
        write(self, byte_offset, [data])

    monkeypatch.setattr("dsdformat.storage.target.FileSink.write_at", flipped)
    result = dsd("cp", step10, "copy")
    assert (result.code, Path("copy").exists()) == (1, False)
    assert "model/norm.weight" in result.err


def test_a_checkpoint_is_not_copied_onto_itself(dsd, step10):
    result = dsd("cp", step10, "../" + Path.cwd().name + "/step-10", "--overwrite")
    assert (result.code, dsd("verify", step10).code) == (2, 0)


def test_another_kind_of_file_is_not_copied(dsd, tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones(1))
    result = dsd("cp", tmp_path / "a.npz", tmp_path / "b")
    assert result.code == 2
    assert "hint: dsd convert makes one of it" in result.err
