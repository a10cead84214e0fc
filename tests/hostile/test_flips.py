"""Damage to a small checkpoint, a bit or a length: a verifier finds it and says where.

Every bit of every file is flipped, one at a time; every length of every file is tried.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dsdformat import Box, Checkpoint, DsdError, PartWriter, TensorSource, Writer, writer
from dsdformat.errors import Problem
from dsdformat.format.dtypes import DTYPES
from dsdformat.storage.memory import MemoryStorage, MemoryTarget
from dsdformat.verify import verify_storage

Files = dict[str, bytes]
LABELS = ["manifest.dsd", "model.safetensors", "optimizer.safetensors", "config.json"]
DATA_LABELS = LABELS[1:3]


@dataclass(frozen=True)
class Block:
    """Where a block lies, as the verifier must name it."""

    where: str
    start: int
    end: int
    entry: str
    number: int
    raw: bool

    def is_named_by(self, problem: Problem) -> bool:
        place = (problem.where, problem.entry, problem.chunk, problem.block)
        code = "checksum_mismatch" if self.raw else "stored_checksum_mismatch"
        return (problem.code, *place) == (code, self.where, self.entry, 0, self.number)


@pytest.fixture(scope="module")
def blocks(small_files: Files) -> list[Block]:
    found = []
    with Checkpoint(MemoryStorage(small_files), threads=1) as checkpoint:
        for entry in checkpoint:
            (chunk,) = entry.chunks
            at = chunk.byte_offset
            for number, stored in enumerate(stored_lengths(checkpoint, entry.index)):
                raw = chunk.codec == "raw"
                found.append(Block(chunk.file, at, at + stored, entry.name, number, raw))
                at += stored
    return found


def stored_lengths(checkpoint: Checkpoint, tensor: int) -> list[int]:
    (place,) = checkpoint.table.row(tensor).chunks
    if place.frames:
        return list(place.frames)
    size = checkpoint.block_nbytes
    return [min(size, place.nbytes - at) for at in range(0, place.nbytes, size)]


def problems_of(files: Files) -> tuple[Problem, ...]:
    return verify_storage(MemoryStorage(files), threads=1).problems


def with_flips(data: bytes, flips: Iterator[tuple[int, int]]) -> Iterator[tuple[int, bytearray]]:
    """The data with one bit flipped, for each (byte, bit); the same buffer each time."""
    changed = bytearray(data)
    for at, bit in flips:
        changed[at] ^= 1 << bit
        yield at, changed
        changed[at] ^= 1 << bit


def every_bit(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((at, bit) for at in range(start, stop) for bit in range(8))


def header_of(data: bytes) -> tuple[int, int]:
    """Where the header's text ends, and where its padding ends."""
    return data.rindex(b"}", 0, 4096) + 1, 8 + int.from_bytes(data[:8], "little")


# What the checkpoint is


def test_the_small_checkpoint_is_whole(small_files):
    assert sorted(small_files) == sorted(LABELS)
    assert problems_of(small_files) == ()


def test_the_small_checkpoint_has_blocks_of_each_kind(blocks):
    found = [(block.entry, block.number, block.raw) for block in blocks]
    assert found == [
        ("model/raw", 0, True),
        ("model/raw", 1, True),
        ("model/text", 0, False),
        ("model/text", 1, False),
        ("optimizer/moment", 0, False),
        ("optimizer/moment", 1, False),
    ]


# Every bit


def test_every_bit_of_the_manifest_is_pinned(small_files):
    data = small_files["manifest.dsd"]
    missed = [
        at
        for at, changed in with_flips(data, every_bit(0, len(data)))
        if {p.where for p in problems_of({**small_files, "manifest.dsd": changed})}
        != {"manifest.dsd"}
    ]
    assert missed == []


@pytest.mark.parametrize("label", DATA_LABELS)
def test_every_bit_of_a_header_is_pinned(small_files, label):
    text_end, _ = header_of(small_files[label])
    flips = with_flips(small_files[label], every_bit(0, text_end))
    assert [at for at, changed in flips if not is_header_problem(small_files, label, changed)] == []


@pytest.mark.parametrize("label", DATA_LABELS)
def test_every_bit_of_padding_is_pinned(small_files, label):
    flips = with_flips(small_files[label], every_bit(*header_of(small_files[label])))
    assert [at for at, changed in flips if not is_header_problem(small_files, label, changed)] == []


def is_header_problem(files: Files, label: str, changed: bytearray) -> bool:
    found = problems_of({**files, label: changed})
    return [(p.code, p.where) for p in found] == [("header_mismatch", label)]


@pytest.mark.parametrize("label", DATA_LABELS)
def test_every_bit_of_the_data_is_pinned_and_its_block_named(small_files, blocks, label):
    mine = [block for block in blocks if block.where == label]
    assert max(block.end for block in mine) == len(small_files[label])
    missed = []
    for block in mine:
        for at, changed in with_flips(small_files[label], every_bit(block.start, block.end)):
            found = problems_of({**small_files, label: changed})
            if len(found) != 1 or not block.is_named_by(found[0]):
                missed.append(at)
    assert missed == []


def test_every_bit_of_a_side_file_is_pinned(small_files):
    data = small_files["config.json"]
    missed = [
        at
        for at, changed in with_flips(data, every_bit(0, len(data)))
        if [(p.code, p.where) for p in problems_of({**small_files, "config.json": changed})]
        != [("side_checksum_mismatch", "config.json")]
    ]
    assert missed == []


def test_damage_in_two_blocks_is_two_problems(small_files, blocks):
    changed = bytearray(small_files["model.safetensors"])
    mine = [block for block in blocks if block.where == "model.safetensors"]
    for block in (mine[0], mine[-1]):
        changed[block.start] ^= 1
    found = problems_of({**small_files, "model.safetensors": changed})
    assert [block for block in mine if any(block.is_named_by(p) for p in found)] == [
        mine[0],
        mine[-1],
    ]


def test_a_zeroed_block_is_found(small_files, blocks):
    """B106: a hole in the file, as a crash of the system may leave."""
    block = blocks[0]
    data = small_files[block.where]
    changed = data[: block.start] + bytes(block.end - block.start) + data[block.end :]
    (problem,) = problems_of({**small_files, block.where: changed})
    assert block.is_named_by(problem)


# Other checkpoints: pages that are compressed, files of two writers


@pytest.fixture
def with_compressed_pages(save, monkeypatch) -> Files:
    """A manifest with compressed pages, which only large ones have."""
    monkeypatch.setattr(writer, "_COMPRESS_PAGES_FROM", 0)
    text = TensorSource.of("uint8", (100,), bytes(100))
    return save({"model": {f"layers.{number}": text for number in range(20)}, "text": "ab" * 500})


def test_every_bit_and_every_length_of_a_manifest_with_compressed_pages_is_pinned(
    with_compressed_pages,
):
    files, data = with_compressed_pages, with_compressed_pages["manifest.dsd"]
    assert b"ab" * 500 not in data
    flips = [changed.copy() for _, changed in with_flips(data, every_bit(0, len(data)))]
    cuts = [data[:length] for length in range(len(data))]
    for changed in (*flips, *cuts):
        found = problems_of({**files, "manifest.dsd": changed})
        assert {problem.where for problem in found} == {"manifest.dsd"}


@pytest.fixture
def of_two_writers() -> Files:
    """Two writers, each with its box of a tensor in each codec."""
    files: dict[str, bytearray] = {}
    target = MemoryTarget(files)
    options = {"world_size": 2, "threads": 1, "block_nbytes": 4096}
    first, second = Writer(target, **options), PartWriter(target, rank=1, **options)
    for rank, one in enumerate((first, second)):
        for codec in ("raw", "zstd", "planes+zstd"):
            box = Box((60 * rank,), (60,))
            data = (b"\x80\x3f\0\1" * 30)[: 2 * 60]
            one.add_tensor(
                ["model", codec], data, dtype="bfloat16", shape=(120,), box=box, codec=codec
            )
    first.write()
    first.commit([second.finish()])
    return {label: bytes(data) for label, data in files.items()}


def test_the_bytes_and_lengths_of_the_files_of_two_writers_are_pinned(of_two_writers):
    """Each byte of the manifest and of the chunks, and some of the headers."""
    files = of_two_writers
    assert sorted(files) == [
        "manifest.dsd",
        "model-00000-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
    ]
    for label, data in files.items():
        header = 0 if label == "manifest.dsd" else 4096
        places = [*range(0, header, 11), *range(header, len(data))]
        for _, changed in with_flips(data, ((at, at % 8) for at in places)):
            assert {p.where for p in problems_of({**files, label: changed})} == {label}
        for length in places[::2]:
            found = problems_of({**files, label: data[:length]})
            assert {p.where for p in found} == {label}


def test_two_writers_files_that_changed_places_are_found(of_two_writers):
    """Of equal lengths and headers: only the digests of blocks tell them apart."""
    one, other = sorted(of_two_writers)[1:]
    swapped = {**of_two_writers, one: of_two_writers[other], other: of_two_writers[one]}
    assert {problem.where for problem in problems_of(swapped)} == {one, other}


# Each codec, on data of each kind: blocks that shrink, and those that are stored as they are

NOISE = random.Random(7).randbytes(96)
BLOCKS = {
    "raw-noise": ("raw", "uint8", NOISE[:40]),
    "raw-text": ("raw", "uint8", b"abcd" * 10),
    "raw-of-two-numbers": ("raw", "complex64", NOISE[:32]),
    "zstd-text": ("zstd", "uint8", b"abcd" * 20),
    "zstd-noise": ("zstd", "uint8", NOISE[:40]),
    "zstd-of-several-bytes": ("zstd", "float32", b"\0\0\x80\x3f" * 16),
    "planes-of-one-byte": ("planes+zstd", "uint8", b"ab" * 40),
    "planes-of-noise": ("planes+zstd", "bfloat16", NOISE[:48]),
    "planes-of-both-kinds": (
        "planes+zstd",
        "bfloat16",
        b"".join(bytes((low, 0x3F)) for low in NOISE),
    ),
    "planes-of-four-bytes": ("planes+zstd", "float32", b"\1\2\x80\x3f" * 24),
    "planes-of-eight-bytes": ("planes+zstd", "float64", struct.pack("<24d", *[1.5, -2.0] * 12)),
}


@pytest.mark.parametrize(("codec", "dtype", "data"), BLOCKS.values(), ids=BLOCKS)
def test_every_bit_and_every_length_of_a_block_in_each_codec_is_pinned(save, codec, dtype, data):
    source = TensorSource.of(dtype, (len(data) // DTYPES[dtype].itemsize,), data, codec=codec)
    files = save({"w": source})
    (label,) = set(files) - {"manifest.dsd"}
    whole, begin = files[label], header_of(files[label])[1]
    code = {"checksum_mismatch"} if codec == "raw" else {"stored_checksum_mismatch"}
    for number, (_, changed) in enumerate(with_flips(whole, every_bit(begin, len(whole)))):
        (problem,) = problems_of({**files, label: changed})
        assert ({problem.code}, problem.where, problem.entry) == (code, label, "w")
        if number % 9 == 0:  # each bit in turn, of each byte
            assert read_everything({**files, label: changed}) == {"w": problem.code}
    for length in range(begin - 2, len(whole)):
        (problem,) = problems_of({**files, label: whole[:length]})
        assert (problem.code, problem.where) == ("file_size_mismatch", label)
    assert read_everything(files) == {"w": data}


# Every length


@pytest.mark.parametrize("label", LABELS)
def test_a_file_that_is_cut_anywhere_is_found(small_files, label):
    data = small_files[label]
    missed = []
    for length in range(len(data)):
        found = problems_of({**small_files, label: data[:length]})
        codes = {problem.code for problem in found}
        if label != "manifest.dsd":
            expected = {"file_size_mismatch"}
        else:
            expected = {"bad_magic"} if length < 8 else {"truncated"}
        if codes != expected or {problem.where for problem in found} != {label}:
            missed.append(length)
    assert missed == []


@pytest.mark.parametrize("byte", range(0, 256, 15))
@pytest.mark.parametrize("label", LABELS)
def test_a_byte_more_at_the_end_of_a_file_is_found(small_files, label, byte):
    found = problems_of({**small_files, label: small_files[label] + bytes([byte])})
    code = "trailing_bytes" if label == "manifest.dsd" else "file_size_mismatch"
    assert [(p.code, p.where) for p in found] == [(code, label)]


@pytest.mark.parametrize("junk", [b"\0", b"\x80\x04.", b"#!/bin/sh\n", b"PK\x03\x04"], ids=repr)
@pytest.mark.parametrize("label", LABELS)
def test_junk_in_front_of_a_file_is_found(small_files, label, junk):
    """B132: a file is only what the format explains."""
    found = problems_of({**small_files, label: junk + small_files[label]})
    assert {p.code for p in found} == {
        "bad_magic" if label == "manifest.dsd" else "file_size_mismatch"
    }


@pytest.mark.parametrize("label", LABELS)
def test_a_file_that_is_gone_is_found(small_files, label):
    rest = {name: data for name, data in small_files.items() if name != label}
    code = "no_manifest" if label == "manifest.dsd" else "missing_file"
    assert [(p.code, p.where) for p in problems_of(rest)] == [(code, label)]


def test_a_file_that_is_not_listed_does_no_harm_and_is_named(small_files):
    report = verify_storage(MemoryStorage({**small_files, "notes.txt": b""}), threads=1)
    assert (report.ok, report.unlisted) == (True, ("notes.txt",))


# Reading


def read_everything(files: Files) -> dict[str, bytes | str]:
    """The bytes of each tensor, or the code of the error; never another exception."""
    found: dict[str, bytes | str] = {}
    try:
        with Checkpoint(MemoryStorage(files), threads=1) as checkpoint:
            for entry in checkpoint:
                try:
                    found[entry.name] = bytes(entry.read())
                except DsdError as error:
                    found[entry.name] = error.code
    except DsdError as error:
        found["open"] = error.code
    return found


@pytest.mark.parametrize("label", LABELS[:3])
def test_a_flipped_bit_never_gives_wrong_bytes(small_files, small_tensors, label):
    """What is read is right, or an error; a header is of no concern to a reader."""
    data = small_files[label]
    start = 0 if label == "manifest.dsd" else header_of(data)[1]
    wrong = []
    for at, changed in with_flips(data, every_bit(start, len(data))):
        for name, got in read_everything({**small_files, label: changed}).items():
            if isinstance(got, bytes) and got != small_tensors[name]:
                wrong.append((at, name))
    assert wrong == []
