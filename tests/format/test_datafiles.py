"""The plan of data files: which chunk goes where, and when another file begins."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest

from dsdformat.boxes import Box, whole
from dsdformat.chunks import Chunks
from dsdformat.errors import UnsupportedValueError
from dsdformat.file_plans import plan_files
from dsdformat.format.codecs import PLANES, RAW
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.paths import Path
from dsdformat.format.payload import emit_header, header_json, size_class
from dsdformat.limits import FILE_CHUNKS_MAX, HEADER_NBYTES_MAX

HF = {"format": "pt"}


def chunks_of(paths: Iterable[Path], sizes: Iterable[int] = itertools.repeat(8)) -> Chunks:
    """Whole tensors of bytes, with these paths and lengths."""
    chunks = Chunks()
    for index, (path, nbytes) in enumerate(zip(paths, sizes, strict=False)):
        shape = (nbytes,)
        chunks.add(index, path, DTYPES["uint8"], shape, whole(shape), RAW, b"")
    return chunks


def sized(*sizes: int) -> Chunks:
    return chunks_of([(f"t{index}",) for index in range(len(sizes))], sizes)


def test_each_top_level_key_with_tensors_below_has_a_file():
    plans = plan_files(chunks_of([("b", "x"), ("a", "x"), ("c",), ("b", "y")]), HF, 4096)
    assert [(plan.prefix, plan.keys) for plan in plans] == [
        ((), ["c"]),
        (("a",), ["x"]),
        (("b",), ["x", "y"]),
    ]


def test_a_state_without_tensors_has_no_files():
    assert plan_files(Chunks(), HF, 4096) == []


# spec
@pytest.mark.parametrize("seed", range(10))
def test_chunks_lie_in_falling_order_of_size_class_and_below_whole_pages_of_length(seed):
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 2, 3, 8, 12, 64, 100, 256, 4096, 8192, 10_000)) for _ in range(40)]
    (plan,) = plan_files(sized(*sizes), HF, 4096)
    order = []
    for tensor, nbytes in zip(plan.rows, plan.lengths, strict=True):
        size = size_class(nbytes)
        order.append((-size, 0 if size == 4096 else -nbytes, tensor))
    assert order == sorted(order)


# spec, B110
@pytest.mark.parametrize("seed", range(10))
def test_each_raw_chunk_is_aligned_to_its_size_class(seed):
    rng = random.Random(seed)
    sizes = [rng.choice((1, 2, 3, 8, 12, 64, 100, 256, 4096, 8192, 10_000)) for _ in range(40)]
    (plan,) = plan_files(sized(*sizes), HF, 4096)
    starts = list(itertools.accumulate(plan.lengths, initial=plan.header_nbytes))
    assert plan.byte_offset == starts[:-1]
    for start, nbytes in zip(plan.byte_offset, plan.lengths, strict=True):
        assert start % size_class(nbytes) == 0


# spec


def test_another_file_begins_before_one_has_too_many_chunks():
    plans = plan_files(sized(*[8] * 10), HF, 4096, chunks_max=4)
    assert [len(plan.rows) for plan in plans] == [4, 4, 2]


@pytest.mark.parametrize("header_max", [4096, 8192, 65_536])
def test_another_file_begins_before_a_header_is_too_long(header_max):
    chunks = chunks_of((f"layers.{index}." + "x" * (index % 300),) for index in range(200))
    plans = plan_files(chunks, HF, 4096, header_max=header_max)
    assert len(plans) > 1
    assert max(plan.header_nbytes for plan in plans) <= header_max


# B103
def test_a_name_that_fits_into_no_header_is_refused_with_its_place():
    chunks = chunks_of([("model", "short"), ("model", "x" * 9000)])
    with pytest.raises(UnsupportedValueError, match="needs a header of 12288 bytes, at most 8192"):
        plan_files(chunks, HF, 4096, header_max=8192)
    with pytest.raises(UnsupportedValueError) as caught:
        plan_files(chunks, HF, 4096, header_max=8192)
    assert caught.value.path_in_tree == f"$.model['{'x' * 78}…]"
    assert caught.value.hint == "use a shorter name"
    assert len(plan_files(chunks, HF, 4096, header_max=12_288)) == 2


# B103
def test_metadata_that_fits_into_no_header_is_refused():
    with pytest.raises(UnsupportedValueError, match="the metadata .* at most 8192"):
        plan_files(sized(8), {"note": "x" * 9000}, 4096, header_max=8192)


def test_no_chunk_is_lost_where_files_roll_over():
    plans = plan_files(sized(*[8] * 100), HF, 4096, chunks_max=7, header_max=4096)
    assert sorted(row for plan in plans for row in plan.rows) == list(range(100))


def test_the_caps_are_those_of_the_spec():
    assert (FILE_CHUNKS_MAX, HEADER_NBYTES_MAX) == (65_536, 64 * 2**20)


LONG_KEYS = [
    pytest.param(("a", "\x01" * 50), id="control-characters"),
    pytest.param(("a", "%@" * 50), id="escapes"),
    pytest.param(("a", "é" * 50), id="not-ascii"),
    pytest.param(("a", b"\xff" * 50), id="bytes"),
    pytest.param(("a", -(2**63)), id="numbers"),
    pytest.param(("a", 2**500), id="long-numbers"),
    pytest.param(("a", *[1.5] * 30), id="floats"),
    pytest.param(("a", *[1j] * 30), id="complex"),
    pytest.param(
        ("a", *[frozenset()] * 30),
        id="frozensets",
    ),
    pytest.param(("a", *[""] * 120), id="many-parts"),
]


@pytest.mark.parametrize("path", LONG_KEYS)
def test_the_room_for_a_key_is_an_upper_bound(path):
    plans = plan_files(chunks_of([path] * 400), {}, 4096, header_max=8192)
    assert len(plans) > 1
    assert all(len(plan.rows) == 1 or plan.header_nbytes <= 8192 for plan in plans)


def test_long_metadata_leaves_less_room_in_a_header():
    chunks = chunks_of((f"layers.{index}",) for index in range(40))
    plans = plan_files(chunks, {"note": "x" * 7000}, 4096, header_max=8192)
    assert max(plan.header_nbytes for plan in plans) <= 8192


def test_a_header_has_room_for_compressed_chunks_that_get_longer():
    """Planes that do not compress are longer than the data by their lengths."""
    dtype = DTYPES["float64"]
    chunks = Chunks()
    chunks.add(0, ("w",), dtype, (10_000,), whole((10_000,)), PLANES, b"")
    (plan,) = plan_files(chunks, HF, 4096)
    assert chunks.stored_bound(0, 4096) == 80_000 + 4 * 8 * 20
    assert emit_header(header_json([], HF), plan.header_nbytes) is not None


def test_parts_of_a_tensor_stay_in_the_order_of_their_offsets():
    boxes = [Box((at,), (8,)) for at in range(0, 80, 8)]
    chunks = Chunks()
    for box in boxes:
        chunks.add(0, ("w",), DTYPES["uint8"], (80,), box, RAW, b"")
    (plan,) = plan_files(chunks, HF, 4096)
    assert plan.rows == list(range(10))
    assert plan.keys == [f"w@[{at}:{at + 8}]" for at in range(0, 80, 8)]
