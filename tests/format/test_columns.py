"""The columns of a manifest: golden bytes, and counts that lie."""

from __future__ import annotations

import functools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsdformat import TensorSource
from dsdformat.boxes import Box
from dsdformat.errors import FormatError
from dsdformat.format.checks import find_whole_chunks, find_wholes
from dsdformat.format.frame import parse_head
from dsdformat.format.manifest import Body, Columns, parse_body
from dsdformat.format.packing import parse
from dsdformat.storage.memory import MemoryTarget
from dsdformat.writer import Writer


def sections_of(manifest: bytes) -> dict[str, bytes]:
    """The sections of a manifest whose pages are not compressed."""
    head_nbytes = int.from_bytes(manifest[12:16], "little")
    head = parse_head(manifest[:head_nbytes], len(manifest))
    at = {name: head.page_offsets[one.first_page] for name, one in head.sections.items()}
    return {name: manifest[at[name] :][: one.nbytes] for name, one in head.sections.items()}


def columns_of(sections: dict[str, bytes]) -> Columns:
    nbytes = {name: len(data) for name, data in sections.items()}
    return Columns(nbytes, lambda name, start, stop: sections[name][start:stop])


@pytest.fixture
def two_tensors(save) -> dict[str, bytes]:
    """A scalar, and a matrix of two chunks: the first columns raw, the others of two blocks."""
    halves = [(Box((0, 0), (2, 1)), b"ab"), (Box((0, 1), (2, 3000)), bytes(6000))]
    state = {
        "a": TensorSource.of("float32", (), b"1234"),
        "b": TensorSource("uint8", (2, 3001), halves),
    }
    return sections_of(save(state, block_nbytes=4096)["manifest.dsd"])


def test_the_columns_have_their_bytes(two_tensors):
    assert two_tensors["tensors"] == struct.pack("<8I", 0, 1, 0, 2, 1, 2, 0, 0)
    assert two_tensors["shapes"] == struct.pack("<2Q", 2, 3001)
    assert two_tensors["boxes"] == struct.pack("<8Q", 0, 0, 2, 1, 0, 1, 2, 3000)
    # file, codec, byte_offset, first_block, first_frame of the three chunks. By size class the
    # order in the file is: 6,000 bytes (8), 4 bytes (4), 2 bytes (2).
    assert two_tensors["chunks"] == struct.pack(
        "<6I9Q", 0, 0, 0, 0, 0, 0, 4096 + 6000, 4096 + 6004, 4096, 2, 3, 0, 0, 0, 0
    )
    assert len(two_tensors["digests"]) == 32 * 4
    assert two_tensors["frames"] == b""


def test_the_columns_are_read_row_by_row(two_tensors):
    columns = columns_of(two_tensors)
    assert (columns.tensors, columns.chunks, columns.blocks, columns.frames) == (2, 3, 4, 0)
    assert [columns.shape(0), columns.shape(1)] == [(), (2, 3001)]
    assert list(columns.rows(1).byte_offset) == [4096 + 6004, 4096]
    assert columns.rows(1).box(1, 2) == Box((0, 1), (2, 3000))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(name, change, id=f"{name}{change:+}")
        for name in ("tensors", "shapes", "chunks", "boxes", "digests", "frames")
        for change in (-1, 1, 8)
        if (name, change) != ("frames", -1)  # it is empty
    ],
)
def test_a_section_of_another_length_is_refused(two_tensors, name, change):
    data = two_tensors[name]
    two_tensors[name] = data[:change] if change < 0 else data + bytes(change)
    with pytest.raises(FormatError) as error:
        columns_of(two_tensors)
    assert (error.value.code, error.value.path) == ("bad_section_length", f"$.{name}")


LYING = [
    pytest.param([(0, 2**32 - 1, 1, 0)], id="ndim"),
    pytest.param([(0, 1, 2**32 - 1, 0)], id="chunk-count"),
    pytest.param([(0, 2**32 - 1, 2**32 - 1, 0)], id="both"),
    pytest.param(
        [(0, 2**32 - 1, 2**32 - 1, 0)] * 2,
        id="both-twice",
    ),
]


@pytest.mark.parametrize("rows", LYING)
def test_counts_that_lie_are_refused_before_anything_is_allocated(two_tensors, rows, peak_nbytes):
    two_tensors["tensors"] = struct.pack(
        f"<{4 * len(rows)}I", *(row[at] for at in range(4) for row in rows)
    )

    def attempt() -> None:
        with pytest.raises(FormatError) as error:
            columns_of(two_tensors)
        assert error.value.code in ("bad_section_length", "limit_exceeded")

    assert peak_nbytes(attempt) < 100_000


# Whole tensors, by rows and by columns


@functools.cache
def many_tensors() -> tuple[Body, dict[str, bytes]]:
    """Tensors of several shapes and two dtypes, one of them empty, one of two chunks."""
    state = {
        f"{number:02}": TensorSource.of("uint8", (number % 3 + 1, 5), bytes(5 * (number % 3 + 1)))
        for number in range(40)
    }
    state["17"] = TensorSource.of("float32", (), b"1234")
    state["30"] = TensorSource.of("uint8", (0, 5), b"")
    halves = [(Box((0,), (1,)), b"a"), (Box((1,), (6000,)), bytes(6000))]
    state["33"] = TensorSource("uint8", (6001,), halves)
    files: dict[str, bytearray] = {}
    writer = Writer(MemoryTarget(files), threads=1, block_nbytes=4096)
    writer.add(state)
    writer.commit()
    sections = sections_of(bytes(files["manifest.dsd"]))
    return parse_body(parse(sections["body"])), sections


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["dtype", "layout", "shapes", "chunks", "boxes"]),
            st.integers(0, 10_000),
            st.sampled_from([0, 1, 2, 4096, 2**32 - 1]),
        ),
        max_size=2,
    ),
    st.sets(st.integers(0, 39)),
)
def test_whole_tensors_are_the_same_by_columns_and_by_rows(changes, left_out):
    body, sections = many_tensors()
    sections = {name: bytearray(data) for name, data in sections.items()}
    for column, row, number in changes:
        section = sections["tensors" if column in ("dtype", "layout") else column]
        count = 40 if column in ("dtype", "layout") else len(section) // 4
        at = 4 * (row % count) + (3 * 160 if column == "layout" else 0)
        section[at : at + 4] = struct.pack("<I", number)
    columns = columns_of({name: bytes(data) for name, data in sections.items()})
    tensors = [number for number in range(40) if number not in left_out]
    places = zip(tensors, find_wholes(body, columns, tensors), strict=True)
    found = find_whole_chunks(body, columns, tensors)
    assert list(zip(*found, strict=True)) == [(n, *place) for n, place in places if place]


def test_shapes_of_some_tensors_are_those_of_each():
    columns = columns_of(many_tensors()[1])
    for some in ([], [3], [39, 0], range(40), range(16), [5, 4, 4], [17, 16]):
        assert columns.shapes(some) == list(map(columns.shape, some))
