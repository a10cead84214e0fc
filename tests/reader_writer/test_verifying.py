"""Verifying: a report that counts, names places, and says all that is wrong in one stage."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from vectors.builder import build
from vectors.samples import two

import dsdformat
from dsdformat import ChecksumError, FormatError, LayoutError, Report, TensorSource
from dsdformat.storage.memory import MemoryStorage
from dsdformat.verify import verify_storage

Files = dict[str, bytes]


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("threads", [None, 1, 4])
def test_the_report_of_a_good_checkpoint_counts_what_is_there(small_folder, small_files, threads):
    (small_folder / "notes.txt").write_bytes(b"mine")
    (small_folder / "logs").mkdir()
    report = dsdformat.verify(small_folder, threads=threads)
    assert report.ok
    assert (report.tensors, report.chunks, report.files) == (3, 3, 2)
    assert report.nbytes == sum(
        len(data) for label, data in small_files.items() if label.endswith(".safetensors")
    )
    assert report.unlisted == ("logs", "notes.txt")
    with dsdformat.open(small_folder) as checkpoint:
        assert report.root == checkpoint.root
    report.raise_if_bad()


@pytest.fixture
def many_files(save) -> Files:
    return save(
        {
            section: {
                f"t{n}": TensorSource.of("uint8", (n * 99,), bytes(n * 99)) for n in range(60)
            }
            for section in ("a", "b")
        },
        block_nbytes=4096,
    )


def progress_of(files: Files, threads: int) -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    report = verify_storage(
        MemoryStorage(files), threads=threads, progress=lambda *call: calls.append(call)
    )
    report.raise_if_bad()
    return calls


def test_progress_never_goes_back(many_files):
    calls = progress_of(many_files, 1)
    assert len(calls) > 1
    assert calls == sorted(calls)


@pytest.mark.parametrize("threads", [1, 4])
def test_progress_ends_at_the_whole(many_files, threads):
    total = sum(len(data) for label, data in many_files.items() if label != "manifest.dsd")
    calls = progress_of(many_files, threads)
    assert {whole for _, whole in calls} == {total}
    assert max(done for done, _ in calls) == total


def test_an_error_of_the_progress_function_is_raised(small_folder, count_descriptors):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = count_descriptors()
    with pytest.raises(KeyboardInterrupt):
        dsdformat.verify(small_folder, progress=stop)
    assert count_descriptors() == before


def test_a_bad_report_raises_the_error_of_its_first_problem(small_files):
    data = flipped(small_files["model.safetensors"], -1)
    report = verify_storage(MemoryStorage({**small_files, "model.safetensors": data}))
    assert not report.ok
    with pytest.raises(ChecksumError) as error:
        report.raise_if_bad()
    assert error.value.problems == report.problems


def test_a_path_without_a_checkpoint_is_a_report_too(tmp_path):
    report = dsdformat.verify(tmp_path / "nothing")
    assert [problem.code for problem in report.problems] == ["no_manifest"]
    assert (report.root, report.tensors) == (None, 0)


def test_an_empty_folder_is_no_checkpoint(tmp_path):
    assert [p.code for p in dsdformat.verify(tmp_path).problems] == ["no_manifest"]


def test_damage_in_several_files_is_reported_for_each(small_files):
    changed = {
        **small_files,
        "model.safetensors": flipped(small_files["model.safetensors"], 4000),
        "optimizer.safetensors": small_files["optimizer.safetensors"][:-1],
        "config.json": flipped(small_files["config.json"], 0),
    }
    report = verify_storage(MemoryStorage(changed), threads=1)
    assert [(problem.code, problem.where) for problem in report.problems] == [
        ("header_mismatch", "model.safetensors"),
        ("file_size_mismatch", "optimizer.safetensors"),
        ("side_checksum_mismatch", "config.json"),
    ]


def test_many_small_tensors_that_are_damaged_are_each_named(save, rng):
    """Small tensors are read together; each has its digest all the same."""
    state = {f"t{n:02}": TensorSource.of("uint8", (64,), rng.randbytes(64)) for n in range(50)}
    files = save(state)
    data = bytearray(files["model.safetensors"])
    bad = [3, 4, 49]
    for number in bad:
        data[4096 + 64 * number + 63] ^= 0x80
    report = verify_storage(MemoryStorage({**files, "model.safetensors": data}), threads=1)
    assert [p.entry for p in report.problems] == [f"t{number:02}" for number in bad]
    assert {(p.code, p.block, p.byte_end - p.byte_offset) for p in report.problems} == {
        ("checksum_mismatch", 0, 64)
    }


def test_blocks_are_not_looked_at_where_a_file_is_not_as_it_must_be(small_files):
    changed = {
        **small_files,
        "model.safetensors": flipped(small_files["model.safetensors"], -1),
        "config.json": b"",
    }
    report = verify_storage(MemoryStorage(changed), threads=1)
    assert [problem.code for problem in report.problems] == ["file_size_mismatch"]


def test_all_tensors_with_a_fault_are_reported_together():
    def holes(columns: dict[str, list[int]]) -> None:
        columns["boxes"] = [0, 0, 3, 8, 0, 4]  # a row less of one tensor, an element of the other

    report = verify_storage(MemoryStorage(build(two(), columns=holes).files), threads=1)
    assert [(p.code, p.entry) for p in report.problems] == [
        ("chunk_hole", "a"),
        ("chunk_hole", "b"),
    ]
    with pytest.raises(LayoutError):
        report.raise_if_bad()


@pytest.mark.parametrize("name", ["tensors", "shapes", "chunks", "boxes", "digests", "frames"])
def test_a_damaged_page_is_named_with_its_section(small_files, name):
    from dsdformat.format.frame import parse_head

    manifest = small_files["manifest.dsd"]
    head = parse_head(manifest[: int.from_bytes(manifest[12:16], "little")], len(manifest))
    at = head.page_offsets[head.sections[name].first_page]
    changed = {**small_files, "manifest.dsd": flipped(manifest, at)}
    (problem,) = verify_storage(MemoryStorage(changed), threads=1).problems
    assert problem.code == "page_checksum_mismatch"
    assert (problem.where, problem.path) == ("manifest.dsd", f"$.{name}")
    assert problem.byte_offset <= at < problem.byte_end


def test_a_report_of_nothing_is_good():
    assert Report("c").ok


def test_a_checkpoint_that_was_copied_is_as_good(small_folder, tmp_path):
    shutil.copytree(small_folder, tmp_path / "copy")
    first, second = dsdformat.verify(small_folder), dsdformat.verify(tmp_path / "copy")
    assert (second.ok, second.root) == (True, first.root)


# What a foreign folder may hold instead of a manifest (B124, B132)


def as_pickle(_: bytes) -> bytes:
    return (
        b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    )


def as_json(_: bytes) -> bytes:
    return b'{"tensors": []}'


def as_zip(_: bytes) -> bytes:
    return b"PK\x03\x04" + bytes(60)


def as_safetensors(_: bytes) -> bytes:
    return b"\x02\x00\x00\x00\x00\x00\x00\x00{}"


def as_older_magic(manifest: bytes) -> bytes:
    return b"\x88" + manifest[1:]


def with_unix_line_ends(manifest: bytes) -> bytes:
    return manifest.replace(b"\r\n", b"\n")


def with_dos_line_ends(manifest: bytes) -> bytes:
    return manifest.replace(b"\n", b"\r\n")


def as_seven_bits(manifest: bytes) -> bytes:
    return bytes(byte & 0x7F for byte in manifest)


def as_text(manifest: bytes) -> bytes:
    return manifest.decode("latin-1").encode("utf-8")


FOREIGN = [
    *(as_pickle, as_json, as_zip, as_safetensors, as_older_magic),
    *(with_unix_line_ends, with_dos_line_ends, as_seven_bits, as_text),
]


@pytest.mark.parametrize("change", FOREIGN)
def test_another_kind_of_file_is_no_manifest(small_files, load, change: Callable[[bytes], bytes]):
    changed = {**small_files, "manifest.dsd": change(small_files["manifest.dsd"])}
    with pytest.raises(FormatError) as error:
        load(changed)
    assert error.value.code == "bad_magic"


def test_a_newer_version_is_refused_and_both_versions_are_said(small_files, load):
    """B116."""
    manifest = bytearray(small_files["manifest.dsd"])
    manifest[8:12] = (2).to_bytes(2, "little") + (3).to_bytes(2, "little")
    with pytest.raises(FormatError, match=r"made by format 2\.3, this reads 1\.x") as error:
        load({**small_files, "manifest.dsd": bytes(manifest)})
    assert error.value.code == "unknown_major"
