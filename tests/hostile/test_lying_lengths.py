"""Lengths that lie, and small files that ask for much memory (B128, B133, B135).

Each checkpoint is sealed anew, so that only the lie is wrong. What is measured is what Python
allocates, its peak, while the checkpoint is opened, read and verified.
"""

from __future__ import annotations

import importlib
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from vectors import zstd
from vectors.builder import build
from vectors.declare import Checkpoint as Declared
from vectors.declare import Chunk, DataFile, Head, Page, Section, Tensor
from vectors.samples import compressed, one, two
from vectors.wire import digest

import dsdformat
from dsdformat import Checkpoint, DsdError
from dsdformat.errors import Problem
from dsdformat.format.bodies import find_body_problems
from dsdformat.storage.memory import MemoryStorage
from dsdformat.verify import verify_storage

MIB = 2**20
Files = dict[str, bytes]
Hook = Callable[[object], object]


def attempt(files: Files) -> str | None:
    """Open, read everything, verify; give the code of the first error."""
    code = None
    try:
        with Checkpoint(MemoryStorage(files), threads=1) as checkpoint:
            for entry in checkpoint:
                entry.read()
    except DsdError as error:
        code = error.code
    report = verify_storage(MemoryStorage(files), threads=1)
    return code or (report.problems[0].code if report.problems else None)


def put(**values: int) -> Hook:
    def hook(target: object) -> None:
        for name, value in values.items():
            setattr(target, name, value)

    return hook


def column(name: str, value: int, index: int = 0) -> Hook:
    def hook(columns: dict[str, list[int]]) -> None:
        columns[name][index] = value

    return hook


def file_entry(**values: int) -> Hook:
    def hook(body: dict[str, list[dict[str, int]]]) -> None:
        body["files"][0].update(values)

    return hook


def decoded_nbytes(section: int, nbytes: int) -> Hook:
    def hook(head: Head) -> None:
        head.rows[section].decoded_nbytes = nbytes
        head.rows[section].pages = -(-nbytes // 65_536) % 2**32

    return hook


HUGE = [2**31 - 1, 2**31 + 1, 2**32 - 1]
LARGE = [*HUGE, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
LIES = [
    *(
        ("head", f"{name}-{n}", put(**{name: n}))
        for name in ("head_nbytes", "features_nbytes", "section_count", "page_count")
        for n in HUGE
    ),
    *(("head", f"manifest_nbytes-{n}", put(manifest_nbytes=n)) for n in LARGE),
    *(
        ("head", f"section-{section}-{n}", decoded_nbytes(section, n))
        for section in range(7)
        for n in LARGE
    ),
    *(
        ("columns", f"{name}-{n}", column(name, n))
        for name in ("dtype", "ndim", "chunk_count", "layout", "file", "codec")
        for n in HUGE
    ),
    *(
        ("columns", f"{name}-{n}", column(name, n))
        for name in ("shapes", "boxes", "byte_offset", "first_block", "first_frame")
        for n in LARGE
    ),
    *(("columns", f"box-{n}", column("boxes", n, 1)) for n in LARGE),
    *(
        ("body", f"{name}-{n}", file_entry(**{name: n}))
        for name in ("nbytes", "header_nbytes")
        for n in LARGE
    ),
    *(("body", f"both-{n}", file_entry(nbytes=n, header_nbytes=n)) for n in LARGE),
]


@pytest.mark.parametrize(
    ("layer", "hook"), [pytest.param(layer, hook, id=name) for layer, name, hook in LIES]
)
@pytest.mark.parametrize("codec", [0, 1])
def test_a_length_that_lies_is_refused_without_allocating(layer, hook, codec, peak_nbytes):
    data = bytes(9000)
    base = compressed(data, codec=1) if codec else two()
    files = build(base, **{layer: hook}).files
    codes: list[str | None] = []
    assert peak_nbytes(lambda: codes.append(attempt(files))) < MIB
    assert codes != [None]


def test_a_shape_and_a_box_that_both_lie_do_not_allocate(peak_nbytes):
    """B135: the manifest says more than the file can hold; digests and lengths are missing."""

    def larger(columns: dict[str, list[int]]) -> None:
        columns["shapes"][0] = 2**40
        columns["boxes"][1] = 2**40

    files = build(one("uint8", (9000,)), columns=larger).files
    codes: list[str | None] = []
    assert peak_nbytes(lambda: codes.append(attempt(files))) < MIB
    assert codes == ["bad_block_index"]


def test_a_dtype_that_is_wider_than_the_data_is_refused():
    """B135: the dtype says eight bytes, the file holds four of each element."""

    def wider(body: dict[str, list[str]]) -> None:
        body["dtypes"] = ["float64"]

    assert attempt(build(one("float32", (9000,)), body=wider).files) == "bad_block_index"


SHAPES = {
    "large": ((3, 2), (2**33, 2), "bad_block_index"),
    "past 63 bits": ((3, 2), (2**63 + 5, 2), "shape_overflow"),
    "past 63 bits, without elements": ((0, 2), (0, 2**63 + 5), "shape_overflow"),
}


@pytest.mark.parametrize(("shape", "told", "code"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("runtime", ["numpy", "torch"])
def test_a_shape_that_lies_is_refused_before_a_runtime_allocates(
    tmp_path, shape, told, code, runtime
):
    """The box lies with it, so that they fit each other."""
    module = importlib.import_module(f"dsdformat.{runtime}")

    def larger(columns: dict[str, list[int]]) -> None:
        columns["shapes"][:] = told
        columns["boxes"][2:] = told

    for label, data in build(one("float32", shape), columns=larger).files.items():
        (tmp_path / label).write_bytes(data)
    with pytest.raises(DsdError) as caught:
        module.load(tmp_path)
    assert caught.value.code == code


# Bombs


def bomb_of(nbytes: int, declared: int) -> bytes:
    """A frame of zeros that inflate to `nbytes`, and that declares something else."""
    count = nbytes // zstd.BLOCK_MAX
    blocks = zstd.rle_block(0, zstd.BLOCK_MAX, last=False) * (count - 1)
    return zstd.header(declared) + blocks + zstd.rle_block(0, zstd.BLOCK_MAX, last=True)


@pytest.mark.parametrize("nbytes", [2**18, 1000 * 2**17], ids=["256-kib", "125-mib"])
def test_a_block_that_inflates_to_more_than_it_may_is_stopped(nbytes, peak_nbytes):
    bomb = bomb_of(nbytes, 4096)
    assert len(bomb) < 4096
    files = build(compressed(bytes(4096), piece=lambda data: bomb)).files
    codes: list[str | None] = []
    assert peak_nbytes(lambda: codes.append(attempt(files))) < MIB
    assert codes == ["bad_compressed_data"]


def test_a_page_that_inflates_to_more_than_it_may_is_stopped(peak_nbytes):
    declared = one()
    declared.user["note"] = "x" * 50_000

    def first_page(pages: list[list[Page]]) -> None:
        stored = bomb_of(2**27, len(pages[0][0].stored))
        pages[0][0] = Page(stored, digest(stored))

    files = build(declared, pages=first_page).files
    codes: list[str | None] = []
    assert peak_nbytes(lambda: codes.append(attempt(files))) < MIB
    assert codes == ["bad_compressed_data"]


ZERO_PAGE = zstd.header(65_536) + zstd.rle_block(0, 65_536, last=True)


def page(data: bytes) -> bytes:
    """Pages of zeros in 14 bytes."""
    return ZERO_PAGE if data == bytes(65_536) else data


def section(number: int, data: bytes) -> Callable[[list[Section]], None]:
    def hook(sections: list[Section]) -> None:
        sections[number].data = data

    return hook


def test_a_table_of_tensors_that_the_tree_does_not_have_does_not_allocate(peak_nbytes):
    """32 MiB of zeros: a manifest of 30 KB for a tree of one tensor."""
    files = build(one(page=page), sections=section(1, bytes(32 * MIB))).files
    assert len(files["manifest.dsd"]) < 30_000
    codes: list[str | None] = []
    assert peak_nbytes(lambda: codes.append(attempt(files))) < MIB
    assert codes != [None]


def test_more_dims_than_are_allowed_do_not_allocate(peak_nbytes):
    def many_dims(sections: list[Section]) -> None:
        sections[1].data = struct.pack("<4I", 0, MIB, 1, 0)
        sections[2].data = bytes(8 * MIB)
        sections[4].data = bytes(16 * MIB)

    files = build(one(page=page), sections=many_dims).files
    assert len(files["manifest.dsd"]) < 30_000
    codes: list[str | None] = []
    assert peak_nbytes(lambda: codes.append(attempt(files))) < MIB
    assert codes == ["limit_exceeded"]


def test_a_header_of_a_sparse_file_does_not_allocate(tmp_path: Path, peak_nbytes):
    """A file of 64 MiB that takes no room on the disk, and is all header."""
    nbytes = 64 * MIB
    lie = file_entry(nbytes=nbytes, header_nbytes=nbytes)
    for label, data in build(Declared([], {"a": 1}), body=lie).files.items():
        (tmp_path / label).write_bytes(data)
    os.truncate(tmp_path / "model.safetensors", nbytes)
    codes: list[str] = []

    def verify() -> None:
        codes.extend(problem.code for problem in dsdformat.verify(tmp_path, threads=1).problems)

    assert peak_nbytes(verify) < 4 * MIB
    assert codes == ["header_mismatch"]


# What is honest stays bounded too


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes+zstd"])
def test_reading_into_a_buffer_takes_a_block_or_two(save, load, peak_nbytes, codec):
    nbytes = 8 * MIB
    data = (b"abcdefgh" * (nbytes // 8))[:nbytes]
    source = dsdformat.TensorSource.of("float32", (nbytes // 4,), data, codec=codec)
    files = save({"w": source}, block_nbytes=MIB)
    into = bytearray(nbytes)
    with load(files) as checkpoint:
        peak = peak_nbytes(lambda: checkpoint.read("w", into=into))
    assert into == data
    assert peak < (MIB if codec == "raw" else 8 * MIB)


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes+zstd"])
def test_verifying_takes_a_block_or_two(save, peak_nbytes, codec):
    nbytes = 8 * MIB
    data = (b"abcdefgh" * (nbytes // 8))[:nbytes]
    source = dsdformat.TensorSource.of("float32", (nbytes // 4,), data, codec=codec)
    files = save({"w": source}, block_nbytes=MIB)
    peak = peak_nbytes(lambda: verify_storage(MemoryStorage(files), threads=1).raise_if_bad())
    assert peak < (2 * MIB if codec == "raw" else 8 * MIB)


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes+zstd"])
def test_writing_a_stream_takes_a_block_or_two(tmp_path, peak_nbytes, codec):
    piece, count = bytes(range(256)) * 256, 16 * 16

    def write() -> None:
        with dsdformat.create(tmp_path / "c", block_nbytes=MIB, threads=1, codec=codec) as writer:
            shape = (math.prod((len(piece), count)) // 4,)
            writer.add_tensor(
                "w", lambda: (piece for _ in range(count)), dtype="int32", shape=shape
            )

    assert peak_nbytes(write) < 8 * MIB


def test_a_mesh_of_a_long_shape_is_refused_without_multiplying_it_out():
    """Each number is allowed by itself; their product has 13 million bits, and takes minutes."""
    axes, shape = [""] * 200_000, [2**64 - 1] * 200_000
    body = {"meshes": [{"axes": axes, "ranks": [], "shape": shape}]}
    problems = [problem.message for problem in find_body_problems(body)]
    assert "$.meshes[0]: axes, shape and ranks do not fit each other" in problems


def test_a_header_is_not_derived_beyond_its_length(peak_nbytes):
    """A long name is in the header once for each chunk: 15 MB of text for a file of 1 KiB."""
    count = 500
    tensor = Tensor("uint8", (count,), bytes(count), [Chunk((at,), (1,)) for at in range(count)])
    file = DataFile(header=lambda _: struct.pack("<Q", 56) + b"{}".ljust(56))
    files = build(Declared([tensor], {"a" * 30_000: ["tensor", 0]}, files=[file])).files
    codes: list[str] = []

    def verify() -> None:
        codes.extend(one.code for one in verify_storage(MemoryStorage(files), threads=1).problems)

    assert peak_nbytes(verify) < 2 * MIB
    assert codes == ["header_mismatch"]


def test_a_long_key_is_not_repeated_for_each_fault_below_it(peak_nbytes):
    """One key of 100 KB above a thousand bad values: messages show its beginning."""
    body = build(Declared([], {"a" * 100_000: ["list", *[["bogus"]] * 1000]})).files
    problems: list[Problem] = []

    def verify() -> None:
        problems.extend(verify_storage(MemoryStorage(body), threads=1).problems)

    assert peak_nbytes(verify) < 3 * MIB
    assert len(problems) == 1000
    assert max(len(problem.message) for problem in problems) < 400
