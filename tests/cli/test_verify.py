"""`dsd verify`: a report, and an exit code."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import dsdformat.numpy
from dsdformat.cli import verify

GOLDEN = """\
step-10: ok
  root     ROOT
  checked  3 tensors, 3 chunks, 2 data files
  size     8.1 KiB in TIME
"""
GOLDEN_BAD = """\
step-10: bad, 1 problem
  root  ROOT

checksum_mismatch
  checksum mismatch in block 0 of chunk 0 of model/norm.weight (model.safetensors, bytes \
4144..4148): expected blake3 DIGEST16…, got DIGEST16…
  file      model.safetensors, bytes 4144..4148
  entry     model/norm.weight, chunk 0, block 0
  expected  DIGEST64
  actual    DIGEST64
  hint      the file was damaged after it was written; restore it from another copy
"""


@pytest.fixture
def root(step10):
    with dsdformat.open(step10) as checkpoint:
        return checkpoint.root


def normal(text, root):
    text = text.replace(root, "ROOT")
    text = re.sub(r"in \d+ ms|in \d+\.\d s, .*/s", "in TIME", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "DIGEST64", text)
    return re.sub(r"\b[0-9a-f]{16}…", "DIGEST16…", text)


def test_a_good_checkpoint_is_reported_so(dsd, step10, root):
    result = dsd("verify", step10)
    assert (result.code, normal(result.out, root), result.err) == (0, GOLDEN, "")


def test_a_damaged_block_is_reported_with_its_place_and_both_digests(dsd, step10, root, damage):
    damage("step-10/model.safetensors", -1)
    result = dsd("verify", step10)
    assert (result.code, normal(result.out, root), result.err) == (1, GOLDEN_BAD, "")


def test_the_json_document_of_a_good_checkpoint(dsd, step10, root):
    document = dsd("verify", step10, "--json").json
    assert document.pop("seconds") >= 0
    assert document.pop("nbytes") > 8000
    assert document == {
        "checkpoint": "step-10",
        "ok": True,
        "root": root,
        "tensors": 3,
        "chunks": 3,
        "files": 2,
        "problems": [],
        "unlisted": [],
    }


def test_the_json_document_of_a_damaged_checkpoint(dsd, step10, damage):
    damage("step-10/model.safetensors", -1)
    result = dsd("verify", step10, "--json")
    assert (result.code, result.err, result.json["ok"]) == (1, "", False)
    (problem,) = result.json["problems"]
    assert len(problem.pop("expected")) == len(problem.pop("actual")) == 64
    assert problem.pop("message").startswith("checksum mismatch in block 0 of chunk 0 of model/")
    assert problem.pop("hint").startswith("the file was damaged")
    assert problem == {
        "code": "checksum_mismatch",
        "path": None,
        "where": "model.safetensors",
        "byte_offset": 4144,
        "byte_end": 4148,
        "entry": "model/norm.weight",
        "chunk": 0,
        "block": 0,
    }


def test_a_truncated_manifest_is_bad(dsd, step10):
    manifest = Path("step-10/manifest.dsd")
    manifest.write_bytes(manifest.read_bytes()[:-10])
    result = dsd("verify", step10)
    assert result.code == 1
    assert "\ntruncated\n" in result.out
    assert "root" not in result.out.splitlines()[1]


def test_another_root_digest_is_bad_and_the_right_one_is_fine(dsd, step10, root):
    result = dsd("verify", step10, "--digest", "0" * 64)
    assert result.code == 1
    assert "\ndigest_mismatch\n" in result.out
    assert f"  actual    {root}\n" in result.out
    assert dsd("verify", step10, "--digest", root.upper()).code == 0


def test_a_digest_that_is_none_is_a_usage_error(dsd, step10):
    result = dsd("verify", step10, "--digest", "abc")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error[bad_argument]: a root digest is 64 hexadecimal digits")


def test_a_folder_that_is_not_there_is_bad(dsd, tmp_path):
    result = dsd("verify", tmp_path / "nothing")
    assert result.code == 1
    assert "\nno_manifest\n" in result.out


def test_a_missing_file_and_a_changed_side_file_are_both_reported(dsd, tmp_path):
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add_tensor("w", b"\0", dtype="uint8", shape=(1,))
        writer.add_file("config.json", b"{}")
    (tmp_path / "c" / "model.safetensors").unlink()
    (tmp_path / "c" / "config.json").write_bytes(b"[]")
    result = dsd("verify", tmp_path / "c", "--json")
    codes = [problem["code"] for problem in result.json["problems"]]
    assert codes == ["missing_file", "side_checksum_mismatch"]


def test_unlisted_files_are_a_note_and_no_problem(dsd, step10):
    for number in range(7):
        shutil.copy("step-10/manifest.dsd", f"step-10/extra{number}")
    result = dsd("verify", step10)
    assert result.code == 0
    assert result.out.endswith(
        "note: not part of the checkpoint: extra0, extra1, extra2, extra3, extra4 and 2 more\n"
    )
    assert len(dsd("verify", step10, "--json").json["unlisted"]) == 7


def test_many_problems_are_cut_in_text_and_whole_in_json(dsd, tmp_path, damage, monkeypatch):
    monkeypatch.setattr(verify, "PROBLEMS_SHOWN", 2)
    dsdformat.numpy.save(tmp_path / "c", {f"w{n}": np.zeros(1, np.uint8) for n in range(5)})
    for number in range(1, 6):
        damage(tmp_path / "c" / "model.safetensors", -number)
    out = dsd("verify", tmp_path / "c").out
    assert out.count("\nchecksum_mismatch\n") == 2
    assert out.endswith("\nand 3 more; --json lists all\n")
    assert len(dsd("verify", tmp_path / "c", "--json").json["problems"]) == 5


def test_threads_are_at_least_one(dsd, step10):
    assert dsd("verify", step10, "--threads", "1").code == 0
    assert dsd("verify", step10, "--threads", "0").code == 2


def test_progress_appears_on_a_terminal_and_is_wiped(run_in_terminal, step10):
    shown = run_in_terminal("verify", Path(step10).absolute())
    assert "verifying" in shown
    assert "\x1b[2K" in shown.rpartition("verifying")[2]
    assert "step-10: ok" in shown
