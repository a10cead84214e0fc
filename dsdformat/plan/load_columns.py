"""A plan to read boxes, as columns: what is read, and who takes what of it.

Pure, and of the standard library. `load_plan` makes it, `blocks` carries it out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dsdformat.boxes import Box
from dsdformat.plan.copies import Copy

__all__ = ["PAGE_NBYTES", "ChunkColumns", "CopyColumns", "LoadPlan", "RangeColumns"]

PAGE_NBYTES = 4096


class _Columns:
    """Arrays of one length, one for each slot."""

    __slots__: tuple[str, ...] = ()

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, array("Q"))


class ChunkColumns(_Columns):
    """Chunks of which something is read.

    Attributes:
        tensor, number: Of the chunk.
        codec, file, byte_offset: Of the chunk.
        first_block, first_frame: Its rows in the tables of digests and frames.
        first_copy, copies: Which copies take something from it.
    """

    __slots__ = (
        *("tensor", "number", "codec", "file", "byte_offset"),
        *("first_block", "first_frame", "first_copy", "copies"),
    )
    tensor: array[int]
    number: array[int]
    codec: array[int]
    file: array[int]
    byte_offset: array[int]
    first_block: array[int]
    first_frame: array[int]
    first_copy: array[int]
    copies: array[int]


class RangeColumns(_Columns):
    """What is read of chunks: blocks, or parts of raw ones that are not verified.

    Attributes:
        chunk: Row in `ChunkColumns`.
        start, nbytes: Where it lies in the decoded bytes of the chunk.
        file, byte_offset, stored_nbytes: Where it lies in a data file.
    """

    __slots__ = ("byte_offset", "chunk", "file", "nbytes", "start", "stored_nbytes")
    chunk: array[int]
    start: array[int]
    nbytes: array[int]
    file: array[int]
    byte_offset: array[int]
    stored_nbytes: array[int]


class CopyColumns(_Columns):
    """What wanted boxes take from chunks.

    Attributes:
        wanted: Which box, in the order in which they were given.
        src, dst, run: As in `Copy`.
    """

    __slots__ = ("dst", "run", "src", "wanted")
    wanted: array[int]
    src: array[int]
    dst: array[int]
    run: array[int]


@dataclass(slots=True)
class LoadPlan:
    """Which bytes are read for some wanted boxes, as columns, and how many.

    A *read* is one range of a file: a large one alone, or small ones together.

    Attributes:
        block_nbytes: Of the checkpoint.
        verify: Whether blocks are compared with their digests.
        chunks, ranges, copies: The columns.
        many: Copies of several runs, by their row.
        scattered: Ranges of which runs are read one by one; to the copy that they are for.
        order: Ranges by file and byte offset.
        read_at: Where in `order` each read begins, and at the end where the last one ends.
        wanted_nbytes: Bytes of the wanted boxes.
        range_nbytes: Bytes of the ranges, as they are stored.
        gap_nbytes: Bytes between ranges, which are read and dropped.
        room: Of each wanted box, how many bytes its destination has, from the first element.
        whole: How many of the first chunks are raw, one block, and what one packed box takes: of
            each, chunk, range and copy have one row.
        strided: Wanted boxes whose destination may go on behind that.
        others: Wanted boxes, by number, that whoever made the plan reads in another way, since
            what is stored are not packed bytes; they count as read once. Empty for ours.
    """

    block_nbytes: int
    verify: bool
    chunks: ChunkColumns = field(default_factory=ChunkColumns)
    ranges: RangeColumns = field(default_factory=RangeColumns)
    copies: CopyColumns = field(default_factory=CopyColumns)
    many: dict[int, Copy] = field(default_factory=dict)
    scattered: dict[int, int] = field(default_factory=dict)
    order: Sequence[int] = ()
    read_at: array[int] = field(default_factory=lambda: array("Q", [0]))
    wanted_nbytes: int = 0
    range_nbytes: int = 0
    gap_nbytes: int = 0
    room: dict[int, int] = field(default_factory=dict)
    whole: int = 0
    strided: set[int] = field(default_factory=set)
    others: dict[int, tuple[int, Box, tuple[int, ...] | None]] = field(default_factory=dict)

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read from data files."""
        return self.range_nbytes + self.gap_nbytes

    @property
    def files(self) -> int:
        """Number of data files that are read from."""
        return len(set(self.ranges.file))

    @property
    def tasks(self) -> int:
        """Number of reads, where one of several runs counts as one."""
        return len(self.read_at) - 1

    @property
    def reads(self) -> int:
        """Number of ranges of files that are read."""
        return self.tasks + sum(self.runs_of(row).runs - 1 for row in self.scattered)

    def rows(self, read: int) -> Sequence[int]:
        """Return the ranges of a read, in ascending order of their places."""
        return self.order[self.read_at[read] : self.read_at[read + 1]]

    def extents(self) -> Iterator[tuple[int, int, int]]:
        """List file, byte offset and length of each read, in the order of files and offsets."""
        ranges = self.ranges
        for read in range(len(self.read_at) - 1):
            first, last = self.rows(read)[0], self.rows(read)[-1]
            file, begin = ranges.file[first], ranges.byte_offset[first]
            if first in self.scattered:
                runs = self.runs_of(first)
                yield from ((file, begin + src - runs.src, runs.run) for src, _ in runs.places())
            else:
                yield file, begin, ranges.byte_offset[last] + ranges.stored_nbytes[last] - begin

    def runs_of(self, row: int) -> Copy:
        """Return what of a scattered range is read one by one: runs a page apart, and more."""
        return self.many[self.scattered[row]].split(PAGE_NBYTES)[0]

    def copy(self, row: int) -> Copy:
        """Return the copy of a row."""
        copies = self.copies
        return self.many.get(row) or Copy(copies.src[row], copies.dst[row], copies.run[row])
