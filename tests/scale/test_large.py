"""Tensors of more than 2 GiB, files of more than 4: read in parts, in little memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from sparse import SparseTarget, marked_zeros

import dsdformat
from dsdformat import Box, Checkpoint, Writer
from dsdformat.storage.local import LocalStorage
from dsdformat.storage.memory import CountingStorage

MIB, GIB = 1 << 20, 1 << 30
BLOCK = 4 * MIB
HEADER = 4096
COLUMNS = 64 * 1024
SIZES = {"a": 2 * GIB + 256 * MIB, "b": 2 * GIB}
# In bytes of the tensor: at both ends, on both sides of 2**31, and where the file reaches 2**32.
FILE_4_GIB = 4 * GIB - HEADER - SIZES["a"]
MARKS = {
    "a": {0: b"begin", 2**31 - 4: b"straddle", SIZES["a"] - 3: b"end"},
    "b": {0: b"begin", FILE_4_GIB - 4: b"straddle", SIZES["b"] - 3: b"end"},
}
PLACES = [
    pytest.param(name, at, data, id=f"{name} at {at}")
    for name, marks in MARKS.items()
    for at, data in marks.items()
]


@pytest.fixture(scope="module")
def giant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two large tensors in one file; nearly all of it is a hole."""
    folder = tmp_path_factory.mktemp("giant")
    path = folder / "checkpoint"
    with Writer(SparseTarget(path)) as writer:
        for name, nbytes in SIZES.items():
            data = marked_zeros(nbytes, MARKS[name])
            shape = (nbytes // COLUMNS, COLUMNS)
            writer.add_tensor(["model", name], data, dtype="uint8", shape=shape)
    blocks = (path / "model.safetensors").stat().st_blocks
    if blocks * 512 > GIB:
        shutil.rmtree(folder)
        pytest.skip("this file system has no holes")
    yield path
    shutil.rmtree(folder)


def rows_around(at: int, nbytes: int) -> Box:
    first, last = at // COLUMNS, (at + nbytes - 1) // COLUMNS
    return Box((first, 0), (last - first + 1, COLUMNS))


def test_the_file_is_as_large_as_it_says(giant):
    assert (giant / "model.safetensors").stat().st_size == HEADER + sum(SIZES.values()) > 4 * GIB
    with dsdformat.open(giant) as checkpoint:
        assert [entry.nbytes for entry in checkpoint] == list(SIZES.values())


@pytest.mark.parametrize(("name", "at", "data"), PLACES)
def test_bytes_on_both_sides_of_a_power_of_two_are_read(giant, name, at, data):
    box = rows_around(at, len(data))
    with dsdformat.open(giant) as checkpoint:
        rows = checkpoint.read(f"model/{name}", box)
    start = at - box.offset[0] * COLUMNS
    assert bytes(rows[start : start + len(data)]) == data
    assert bytes(rows).count(0) == len(rows) - len(data)


@pytest.mark.parametrize(("name", "at", "data"), PLACES)
def test_a_slice_is_read_and_verified_from_the_blocks_that_it_touches(giant, name, at, data):
    box = rows_around(at, len(data))
    low = box.offset[0] * COLUMNS // BLOCK
    high = -(-(box.end[0] * COLUMNS) // BLOCK)
    storage = CountingStorage(LocalStorage(giant))
    with Checkpoint(storage) as checkpoint:
        entry = checkpoint.tensor(f"model/{name}")
        opened = sum(nbytes for _, _, nbytes in storage.reads)
        del storage.reads[:]
        entry.read(box)
    assert opened < MIB
    read = [(at, nbytes) for label, at, nbytes in storage.reads if label != "manifest.dsd"]
    assert [nbytes for at, nbytes in read if at < HEADER] == [HEADER]
    reads = [(at, at + nbytes) for at, nbytes in read if at >= HEADER]
    begin = HEADER + (SIZES["a"] if name == "b" else 0)
    assert sum(end - start for start, end in reads) == (high - low) * BLOCK
    assert min(reads)[0] == begin + low * BLOCK
    assert max(end for _, end in reads) == begin + high * BLOCK
    assert sum(n for label, _, n in storage.reads if label == "manifest.dsd") < MIB


def test_a_slice_of_a_damaged_tensor_is_read_unless_it_touches_the_damage(giant):
    at = SIZES["a"] // 2
    with open(giant / "model.safetensors", "r+b") as file:
        file.seek(HEADER + at)
        file.write(b"\x01")
    try:
        with dsdformat.open(giant) as checkpoint:
            entry = checkpoint.tensor("model/a")
            entry.read(rows_around(at - BLOCK, 1))
            entry.read(rows_around(at + BLOCK, 1))
            with pytest.raises(dsdformat.ChecksumError) as caught:
                entry.read(rows_around(at, 1))
        assert (caught.value.entry, caught.value.block) == ("model/a", at // BLOCK)
    finally:
        with open(giant / "model.safetensors", "r+b") as file:
            file.seek(HEADER + at)
            file.write(b"\x00")


def test_a_large_tensor_is_mapped(giant):
    with dsdformat.open(giant) as checkpoint:
        view = checkpoint.tensor("model/b").map()
    assert len(view) == SIZES["b"]
    for at, data in MARKS["b"].items():
        assert bytes(view[at : at + len(data)]) == data


def test_safetensors_reads_the_large_file(giant):
    with safe_open(giant / "model.safetensors", "np") as opened:
        for name, marks in MARKS.items():
            rows = opened.get_slice(name)
            assert rows.get_shape() == [SIZES[name] // COLUMNS, COLUMNS]
            for at, data in marks.items():
                box = rows_around(at, len(data))
                found = rows[box.offset[0] : box.end[0]]
                start = at - box.offset[0] * COLUMNS
                assert found.reshape(-1)[start : start + len(data)].tobytes() == data


@pytest.mark.slow
def test_every_byte_of_the_large_file_is_verified(giant):
    assert dsdformat.verify(giant).problems == ()


@pytest.mark.slow
def test_a_tensor_of_a_gigabyte_is_written_and_read_in_little_memory(measure, big_folder):
    written = measure("write_streamed", big_folder, 1024)
    assert written["peak_mib"] < 64
    read = measure("read_into_buffers", big_folder)
    assert read["read_all_mib"] < 64
    assert read["read_mib"] < 64
    assert measure("verify_large", big_folder)["peak_mib"] < 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        "rows",
        "one_row",
    ],
)
def test_a_large_array_that_is_not_packed_is_saved_in_little_memory(big_folder, measure, form):
    assert measure("save_strided", big_folder, form, 512)["peak_mib"] < 64


def test_a_tensor_of_2_to_the_62_bytes_is_refused_before_anything_is_allocated(tmp_path):
    with Writer(SparseTarget(tmp_path / "checkpoint")) as writer:
        writer.add_tensor("w", np.zeros(1, np.uint8), dtype="uint8", shape=(1,))
        with pytest.raises(dsdformat.ArgumentError):
            writer.add_tensor("x", b"", dtype="float64", shape=(2**31, 2**31))
