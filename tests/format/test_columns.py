"""The columns of a manifest: golden bytes, and counts that lie."""

from __future__ import annotations

import struct

import pytest

from dsdformat import TensorSource
from dsdformat.boxes import Box
from dsdformat.errors import FormatError
from dsdformat.format.frame import parse_head
from dsdformat.format.manifest import Columns


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
