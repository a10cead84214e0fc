"""tools/fuzz: faults are seen, a seed decides all inputs, and what is changed is sealed anew."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("the fuzz program reads /proc, and limits memory", allow_module_level=True)

from fuzz import archives, cli, codecs, engine, folders, foreign, manifests, parts, pickles, values
from fuzz.engine import Outcome, Run, attempt, limits
from fuzz.peer import Peer, find_node
from fuzz.rules import BrokenRuleError
from fuzz.targets import TARGETS, Target, choose_targets
from vectors import zstd

from dsdformat.storage.memory import MemoryStorage
from dsdformat.verify import verify_storage

VALUES, FOLDER = choose_targets(["values", "folder"])


def planted(error: BaseException | None = None, **options: object) -> Target:
    """A target that accepts what begins with an even byte, and else fails as told."""

    def read(data: bytes) -> tuple[str, ...]:
        if data[:1] and data[0] % 2 and error is not None:
            raise error
        return ()

    return dataclasses.replace(VALUES, read=read, **options)


# The engine


def test_a_target_refuses_a_bad_input_and_accepts_a_good_one():
    assert attempt(VALUES, b"\xc1").codes == ("msgpack_malformed",)
    assert attempt(VALUES, b"\xc0").codes == ()


@pytest.mark.parametrize("error", [KeyError("planted"), BrokenRuleError("planted")])
def test_a_planted_fault_is_found_and_saved(tmp_path, error):
    run = Run(planted(error), 1, [b"\0"])
    run.feed(count=200)
    (finding,) = run.findings.values()
    assert finding.kind.startswith(f"{type(error).__name__} at ")
    assert finding.data[0] % 2 == 1
    saved = finding.save(tmp_path)
    assert saved.read_bytes() == finding.data
    assert "planted" in saved.with_suffix(".txt").read_text()


def test_an_input_that_takes_too_long_is_found(monkeypatch):
    monkeypatch.setattr(engine, "SECONDS_MAX", 0.05)

    def loop(_data: bytes) -> tuple[str, ...]:
        while True:
            pass

    with limits():
        outcome = attempt(dataclasses.replace(VALUES, read=loop), b"")
    assert outcome.finding is not None
    assert outcome.finding.kind.startswith("TooSlowError")


def test_an_input_that_takes_too_much_memory_is_found():
    def take(_data: bytes) -> tuple[str, ...]:
        return (str(len(bytearray(4 * engine.EXTRA_NBYTES_MAX))),)

    with limits() as renew:
        renew()
        outcome = attempt(dataclasses.replace(VALUES, read=take), b"")
    assert outcome.finding is not None
    assert outcome.finding.kind.startswith("MemoryError")


@pytest.mark.parametrize(
    "name", ["manifest", "folder", "values", "codec", "safetensors", "part", "meta"]
)
def test_a_seed_decides_all_inputs(name):
    (target,) = choose_targets([name])

    def inputs(seed: int) -> list[bytes]:
        found: list[bytes] = []
        run = Run(target, seed, target.seeds()[:30])
        run.feed(count=130, tell=lambda data, _: found.append(data))
        return found

    assert inputs(1) == inputs(1)
    assert inputs(1)[30:] != inputs(2)[30:]


def test_targets_have_names_of_their_own_and_seeds():
    names = [target.name for target in TARGETS]
    assert len(set(names)) == len(names)
    with pytest.raises(SystemExit, match="no such target: nothing"):
        choose_targets(["nothing"])


# Changes that are reached


def valid_folders() -> list[folders.Files]:
    found = map(folders.unpacked, folders.folder_seeds())
    return [files for files in found if verify_storage(MemoryStorage(files), threads=1).ok]


def test_a_manifest_that_is_cut_and_joined_is_the_same():
    uncompressed = 0
    for files in valid_folders():
        manifest = files["manifest.dsd"]
        parts = manifests.cut(manifest)
        assert parts is not None
        again = manifests.joined(parts)
        uncompressed += again == manifest
        assert verify_storage(MemoryStorage({**files, "manifest.dsd": again}), threads=1).ok or (
            b"zstd" in parts.features
        )
    assert uncompressed > 100


def test_a_manifest_that_was_changed_keeps_its_seal():
    """So most changes are refused, or accepted, for what they say."""
    rng = random.Random(1)
    seeds = folders.manifest_seeds()
    target = choose_targets(["manifest"])[0]
    changed = [manifests.mutated_manifest(rng.choice(seeds), rng, seeds) for _ in range(300)]
    codes = [attempt(target, data).codes for data in changed]
    assert codes.count(("seal_mismatch",)) < 60
    assert len(set(codes)) > 15


def test_a_folder_whose_data_were_changed_is_digested_anew():
    reached = 0
    for files in valid_folders()[:40]:
        label = next((name for name in files if name.endswith(".safetensors")), None)
        if label is not None and files[label][-1:]:
            changed = {**files, label: files[label][:-1] + bytes([files[label][-1] ^ 1])}
            assert not verify_storage(MemoryStorage(changed), threads=1).ok
            again = folders.digested(changed)
            reached += verify_storage(MemoryStorage(again), threads=1).ok
    assert reached > 20


def test_files_are_packed_and_unpacked():
    files = {"manifest.dsd": b"\0" * 300, "a": b"", "model.safetensors": b"abc"}
    assert folders.unpacked(folders.packed(files)) == files


def test_values_that_are_changed_are_canonical_again():
    rng = random.Random(1)
    seeds = values.value_seeds()
    changed = [values.mutated_values(rng.choice(seeds), rng, seeds) for _ in range(500)]
    assert sum(values.parsed(data) is not None for data in changed) > 300


def test_pickles_are_split_at_their_opcodes():
    data = b"\x80\x02}q\x00(X\x01\x00\x00\x00aK\x01cos\nsystem\nq\x01u."
    ops = pickles.split_pickle(data)
    assert b"".join(ops) == data
    assert b"cos\nsystem\n" in ops
    assert b"X\x01\x00\x00\x00a" in ops


def test_parts_that_are_not_changed_are_merged():
    assert parts.read_part(parts.part_seeds()[0]) == ()
    assert parts.read_part(parts.part_seeds()[1]) == ()


def test_zip_files_are_put_together_again():
    members = (("a/data.pkl", 0, b"abc"), ("a/b", 8, b"abc" * 50))
    assert archives.unzipped(archives.zipped(members)) == members


def test_a_header_that_is_changed_has_a_right_length():
    rng = random.Random(1)
    for seed in foreign.safetensors_seeds():
        changed = [foreign.mutated_safetensors(seed, rng) for _ in range(50)]
        right = [int.from_bytes(data[:8], "little") <= len(data) - 8 for data in changed]
        assert sum(right) > 30


def test_frames_without_entropy_coding_are_told_apart():
    text = b"abcdefgh" * 40
    assert not codecs.is_coded(zstd.hand_frame(text + bytes(100)))
    assert codecs.is_coded(zstd.strong(b"the quick brown fox " * 40))
    block = codecs.unpacked(codecs.packed(1, "uint8", 64, b"abc"))
    assert block == codecs.Block(1, "uint8", 64, b"abc")


# The other reader


@pytest.mark.node
@pytest.mark.skipif(find_node() is None, reason="needs node and the JavaScript reader")
def test_readers_that_do_not_agree_are_found():
    node = find_node()
    assert node is not None
    with Peer(VALUES, node) as peer:
        peer.tell(b"\xc0", Outcome((), ""))
        peer.tell(b"\xc1", Outcome(("msgpack_malformed",), ""))
        peer.tell(b"\xc1", Outcome(("bad_value",), ""))
        peer.tell(b"\xc1", Outcome((), ""))
    assert (peer.read, peer.renamed) == (4, 1)
    assert list(peer.findings) == ["Python (), JavaScript ('msgpack_malformed',)"]


@pytest.mark.node
@pytest.mark.skipif(find_node() is None, reason="needs node and the JavaScript reader")
def test_a_reader_that_ends_is_found_and_started_again():
    node = find_node()
    assert node is not None
    with Peer(VALUES, node) as peer:
        peer.tell(b"\xc0", Outcome((), ""))
        peer.flush()
        peer._process.kill()
        peer._process.wait()
        peer._sent = [(b"\xc2", ())]
        peer.flush()
        peer.tell(b"\xc3", Outcome((), ""))
        peer.flush()
    assert peer.read == 2
    assert [finding.data for finding in peer.findings.values()] == [b"\xc2"]


@pytest.mark.node
@pytest.mark.skipif(find_node() is None, reason="needs node and the JavaScript reader")
def test_a_folder_is_read_by_both():
    node = find_node()
    assert node is not None
    run = Run(FOLDER, 1, [folders.packed(files) for files in valid_folders()[:10]])
    with Peer(FOLDER, node) as peer:
        run.feed(count=40, tell=peer.tell)
    assert peer.read == 40
    assert not peer.findings


# The program


def test_runs_go_on_from_the_corpus_and_count(tmp_path: Path, capsys):
    for _ in range(2):
        options = ["run", "--seconds", "0.3", "--piece", "0.3", "--folder", str(tmp_path)]
        assert cli.main([*options, "--no-peer", "signatures"]) == 0
    totals = json.loads((tmp_path / "totals.json").read_text())
    assert totals["signatures"]["pieces"] == 2
    assert totals["signatures"]["inputs"] > 100
    assert "| signatures |" in capsys.readouterr().out


def test_a_smoke_run_says_what_it_did(capsys):
    assert cli.main(["smoke", "--here", "signatures"]) == 0
    assert "signatures: 20000 inputs, 0 findings" in capsys.readouterr().out


def test_a_saved_input_is_read_again(tmp_path: Path, capsys):
    (tmp_path / "one").write_bytes(b"\xc1")
    assert cli.main(["replay", "values", str(tmp_path / "one")]) == 0
    assert "one: msgpack_malformed" in capsys.readouterr().out
