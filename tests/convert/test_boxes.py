"""Boxes of foreign tensors, whatever their strides and parts; and what reading them takes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from exactly import saved
from hypothesis import given, settings
from hypothesis import strategies as st

import dsdformat
from dsdformat import Box
from dsdformat.boxes import whole
from dsdformat.convert import open_foreign, strided
from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.strided import Dim, copy_strided
from dsdformat.convert.tensor import ForeignTensor, Part, View, packed_strides

MIB = 2**20
ITEMS = {1: "uint8", 2: "int16", 4: "float32", 8: "float64", 16: "complex128"}


@st.composite
def layouts(draw):
    """An itemsize, an offset, and a size and stride for each of some dims."""
    itemsize = draw(st.sampled_from(sorted(ITEMS)))
    dims = draw(
        st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0, 1, 2, 3, 7, 20])), max_size=4)
    )
    return itemsize, draw(st.integers(0, 5)), dims


@settings(deadline=None, max_examples=200)
@given(layouts(), st.sampled_from([16, 64, 1000, 8 * MIB]), st.sampled_from([1, 64, 4096]))
def test_any_strides_are_copied_through_any_window(layout, window, small):
    itemsize, offset, dims = layout
    shape, steps = [n for n, _ in dims], [step for _, step in dims]
    count = offset + 1 + sum((n - 1) * step for n, step in dims)
    raw = np.random.default_rng(1).integers(0, 256, count * itemsize, dtype=np.uint8)
    words = raw.view(f"V{itemsize}")[offset:]
    expected = np.lib.stride_tricks.as_strided(words, shape, [step * itemsize for step in steps])
    into = bytearray(math.prod(shape) * itemsize)
    places = zip(shape, steps, packed_strides(shape), strict=True)
    copied = [Dim(n, src * itemsize, dst * itemsize) for n, src, dst in places]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "WINDOW_NBYTES", window)
        patch.setattr(strided, "_SMALL", small)
        source = MemoryBytes(raw.tobytes())
        copy_strided(source, offset * itemsize, copied, itemsize, memoryview(into), 0)
    assert bytes(into) == np.ascontiguousarray(expected).tobytes()


@st.composite
def cuts(draw):
    """A shape of up to three dims, cut along the first two, and a box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    at = [draw(st.integers(0, n)) for n in shape[:2]]
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    size = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    return shape, at, Box(offset, size)


def parts_of(array: np.ndarray, at: list[int], flags: dict[str, bool]) -> list[Part]:
    """Cut an array into parts with bytes, strides and byte order of their own."""
    parts = []
    edges = [(0, at[0], array.shape[0])]
    edges += [(0, at[1], array.shape[1])] if len(at) > 1 else []
    ranges = [[(a, b) for a, b in zip(e, e[1:], strict=False) if a < b] for e in edges]
    columns = ranges[1] if len(ranges) > 1 else [None]
    for top, bottom in ranges[0]:
        for column in columns:
            index = (slice(top, bottom), *([slice(*column)] if column else []))
            piece = array[index]
            offset = (top, *([column[0]] if column else []), *(0,) * (array.ndim - len(index)))
            stored = np.asfortranarray(piece)
            if flags.get("big"):
                stored = np.asfortranarray(stored.astype(stored.dtype.newbyteorder(">")))
            steps = tuple(step // array.itemsize for step in stored.strides)
            view = View(MemoryBytes(stored.tobytes(order="F")), 0, steps, **flags)
            parts.append(Part(Box(offset, piece.shape), partial(lambda view: view, view)))
    return parts


@pytest.mark.parametrize(
    "flags", [{}, {"big": True}, {"conj": True}, {"neg": True, "big": True}], ids=str
)
@pytest.mark.parametrize("dtype", ["int32", "float64", "complex64"])
@settings(deadline=None, max_examples=40)
@given(case=cuts())
def test_any_box_is_put_together_from_parts(dtype, flags, case):
    shape, at, box = case
    if dtype == "int32" and set(flags) - {"big"}:
        return
    array = (np.arange(math.prod(shape)) + 1).reshape(shape).astype(dtype)
    if dtype == "complex64":
        array = array + 2j * array
    tensor = ForeignTensor(dtype, shape, parts_of(array, at, flags))
    expected = array.conj() if flags.get("conj") else -array if flags.get("neg") else array
    slices = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
    assert bytes(tensor.read(box)) == expected[slices].astype(dtype).tobytes()
    data = b"".join(bytes(block) for part in tensor.parts for block in tensor.blocks(part))
    assert len(data) == tensor.nbytes


def test_a_box_outside_or_a_buffer_that_does_not_fit_is_refused(tmp_path):
    with open_foreign(saved({"w": torch.ones(2, 3)}, tmp_path / "x.pt")) as foreign:
        tensor = foreign.tensor("w")
        for box in (Box((0, 0), (3, 3)), Box((0,), (1,)), Box((2, 3), (1, 0))):
            with pytest.raises(dsdformat.ArgumentError):
                tensor.read(box)
        for into in (bytearray(23), bytes(24), memoryview(bytearray(48))[::2], 5):
            with pytest.raises(dsdformat.ArgumentError):
                tensor.read(into=into)
        into = bytearray(24)
        assert tensor.read(into=into).obj is into


def test_a_file_that_is_cut_while_it_is_read_is_told(tmp_path):
    path = saved({"w": torch.ones(1000)}, tmp_path / "x.pt")
    with open_foreign(path) as foreign:
        with path.open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(dsdformat.ConvertError) as caught:
            foreign.read("w")
    assert caught.value.code == "foreign_truncated"


# Memory


def converted(path: Path, folder: Path) -> None:
    with open_foreign(path) as foreign, dsdformat.create(folder, threads=1) as writer:
        writer.add(foreign.state())


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_converting_takes_a_few_blocks(tmp_path, peak_nbytes, zipped):
    state = {str(index): torch.full((16 * MIB,), index, dtype=torch.uint8) for index in range(4)}
    path = saved(state, tmp_path / "x.pt", zipped=zipped)
    assert peak_nbytes(lambda: converted(path, tmp_path / "out")) < 32 * MIB


def test_converting_a_transposed_tensor_takes_a_slab(tmp_path, peak_nbytes):
    weight = torch.arange(16 * MIB, dtype=torch.float32).reshape(4096, 4096).t()
    path = saved({"w": weight}, tmp_path / "x.pt")
    assert peak_nbytes(lambda: converted(path, tmp_path / "out")) < 60 * MIB
    with dsdformat.open(tmp_path / "out") as checkpoint:
        row = checkpoint.read("w", Box((7, 0), (1, 4096)))
    assert bytes(row) == weight[7].contiguous().numpy().tobytes()


def test_opening_reads_no_tensor(tmp_path, peak_nbytes):
    state = {"w": torch.zeros(64 * MIB, dtype=torch.uint8)}
    path = saved(state, tmp_path / "x.pt")
    assert peak_nbytes(lambda: open_foreign(path).close()) < MIB
    box = Box((5,), (7,))
    with open_foreign(path) as foreign:
        assert peak_nbytes(lambda: foreign.read("w", box)) < MIB


def test_an_empty_or_whole_box_is_the_same_as_none(tmp_path):
    with open_foreign(saved({"w": torch.arange(6.0)}, tmp_path / "x.pt")) as foreign:
        tensor = foreign.tensor("w")
        assert tensor.read(whole(tensor.shape)) == tensor.read()
        assert bytes(tensor.read(Box((3,), (0,)))) == b""
