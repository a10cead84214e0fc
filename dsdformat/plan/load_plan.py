"""Which bytes of which data files are read for some boxes, and where they go.

Pure, and of the standard library. This is the one place that has the rule: reading one box, many
whole tensors, or the shards of a rank is planned here, and so is asking beforehand what it costs.
The columns are arrays of the standard library, so that the core needs no numpy: chunks that meet
a box are found in O(log n), and each of them takes less to plan than to read and hash.

The rule:

- What is verified is read in whole blocks, since a digest is of one; so is what is compressed.
  Each block is read and hashed once, however many boxes want some of it.
- What is raw and not verified is read as exact ranges. Runs with gaps between them are one range
  where the gaps are shorter than a page, which is read anyway, or where runs and gaps are within
  the bound; else each run is read by itself.
- Small ranges of one file are read together: those without a gap, then those with the smallest
  gaps, as long as all that is read is within the bound.

The bound is on bytes read over bytes wanted. Whole blocks may exceed it; no gap is read then.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from dsdformat.boxes import Box, whole_box
from dsdformat.errors import ArgumentError
from dsdformat.format.checks import ChunkPlace, WholeChunks
from dsdformat.format.codecs import RAW
from dsdformat.format.dtypes import Dtype
from dsdformat.limits import KIB
from dsdformat.plan.copies import Copy, find_copy
from dsdformat.plan.load_columns import PAGE_NBYTES, LoadPlan

__all__ = [
    "BATCH_NBYTES",
    "BOUND",
    "SMALL_NBYTES",
    "Chunks",
    "LoadPlan",
    "LoadPlanner",
    "Wanted",
    "WantedBoxes",
]

BOUND = 1.05
SMALL_NBYTES = 64 * KIB  # what is smaller is read together with its neighbours
BATCH_NBYTES = 1024 * KIB
_APART = SMALL_NBYTES + 1


class Wanted(NamedTuple):
    """A box of a tensor that is wanted.

    Attributes:
        tensor: Index of the tensor.
        box: In elements of the global shape.
        strides: Bytes from one element of the destination to the next, for each dim; None where
            it holds the packed row-major bytes of the box.
    """

    tensor: int
    box: Box
    strides: tuple[int, ...] | None = None


class WantedBoxes(Sequence[Wanted]):
    """Whole tensors that are wanted, as columns, and other boxes after them.

    An object for each of many small tensors would take as long to plan as to read them.

    Attributes:
        tensors: Indexes of tensors that are wanted whole and packed, each once.
        shapes: Their shapes.
        others: Boxes of any tensors.
    """

    def __init__(
        self,
        tensors: Sequence[int],
        shapes: Sequence[Sequence[int]],
        others: Sequence[Wanted] = (),
    ) -> None:
        self.tensors = tensors
        self.shapes = shapes
        self.others = others

    def __len__(self) -> int:
        return len(self.tensors) + len(self.others)

    def __iter__(self) -> Iterator[Wanted]:
        yield from map(self._whole, self.tensors, self.shapes)
        yield from self.others

    def __getitem__(self, number: Any) -> Any:
        return list(self)[number]

    @staticmethod
    def _whole(tensor: int, shape: Sequence[int]) -> Wanted:
        return Wanted(tensor, whole_box(tuple(shape)))


class Chunks(Protocol):
    """The chunks of one tensor, as a planner needs them: a `ChunkTable`, or what is alike."""

    @property
    def dtype(self) -> Dtype:
        """Of the tensor."""

    def meeting(self, box: Box) -> Iterator[ChunkPlace]:
        """List the chunks that may meet a box that has elements."""


class LoadPlanner:
    """Makes a plan of boxes that are added a tensor at a time.

    Several planners may be fed side by side, so that what several ranks would read is found
    while each chunk table is decoded once.

    Complexity: each chunk that meets a box takes some microseconds, and so does each block.
    Memory: 72 bytes for each chunk that meets a box, 48 for each block, 32 for each box of both.
    """

    def __init__(self, block_nbytes: int, *, verify: bool, bound: float | None = BOUND) -> None:
        """Begin a plan.

        Args:
            block_nbytes: Of the checkpoint.
            verify: Whether what is read will be compared with digests.
            bound: On bytes read over bytes wanted; see the head of this module. None to read
                each range by itself.
        """
        self._plan = LoadPlan(block_nbytes, verify)
        self._bound = bound

    def add(self, tensor: int, table: Chunks, boxes: Sequence[tuple[int, Wanted]]) -> None:
        """Add all boxes that are wanted of one tensor, each with its number.

        Raises:
            ArgumentError: `bad_argument`: strides that are none of these boxes.
        """
        itemsize, plan = table.dtype.itemsize, self._plan
        met: dict[int, tuple[ChunkPlace, list[tuple[int, Copy]]]] = {}
        for number, (_, box, strides) in boxes:
            plan.room[number] = _room(box, itemsize, strides)
            if strides is not None:
                plan.strided.add(number)
            if 0 in box.shape:
                continue
            for place in table.meeting(box):
                copy = find_copy(place.box, box, itemsize, strides)
                if copy is None:
                    continue
                if len(boxes) == 1:
                    self._add_chunk(tensor, place, [(number, copy)])
                else:
                    met.setdefault(place.number, (place, []))[1].append((number, copy))
        for place, copies in met.values():
            self._add_chunk(tensor, place, copies)

    def add_whole(self, numbers: Sequence[int], found: WholeChunks) -> None:
        """Add tensors that are each one raw chunk, wanted whole by one box and packed.

        Args:
            numbers: Of the wanted boxes.
            found: The chunks.
        """
        single = [nbytes <= self._plan.block_nbytes for nbytes in found.nbytes]
        if all(single):
            self._add_whole(numbers, found)
            return
        for some in (single, [not one for one in single]):
            self._add_whole(list(itertools.compress(numbers, some)), found.chosen(some))

    def _add_whole(self, numbers: Sequence[int], found: WholeChunks) -> None:
        plan, chunks, copies = self._plan, self._plan.chunks, self._plan.copies
        count, first, first_copy = len(numbers), len(chunks.tensor), len(copies.wanted)
        if not count:
            return
        nothing = array("Q", bytes(8 * count))
        for column, values in (
            (chunks.tensor, found.tensor),
            (chunks.number, nothing),
            (chunks.codec, nothing),
            (chunks.file, found.file),
            (chunks.byte_offset, found.byte_offset),
            (chunks.first_block, found.first_block),
            (chunks.first_frame, nothing),
            (chunks.first_copy, range(first_copy, first_copy + count)),
            (chunks.copies, itertools.repeat(1, count)),
            (copies.wanted, numbers),
            (copies.src, nothing),
            (copies.dst, nothing),
            (copies.run, found.nbytes),
        ):
            column.extend(values)
        plan.room.update(zip(numbers, found.nbytes, strict=True))
        plan.wanted_nbytes += sum(found.nbytes)
        if max(found.nbytes) <= plan.block_nbytes:
            self._add_single(first, found)
            return
        _, files, places, lengths, _ = found
        for row, (file, at, nbytes) in enumerate(zip(files, places, lengths, strict=True), first):
            for start in range(0, nbytes, plan.block_nbytes):
                some = min(plan.block_nbytes, nbytes - start)
                self._add_range(row, file, at + start, some, start, some)

    def _add_single(self, first: int, found: WholeChunks) -> None:
        """Add chunks that are one block each: by columns, in a tenth of the time."""
        plan, ranges, count = self._plan, self._plan.ranges, len(found.file)
        if first == len(ranges.chunk) == plan.whole:
            plan.whole += count
        ranges.chunk.extend(range(first, first + count))
        ranges.file.extend(found.file)
        ranges.byte_offset.extend(found.byte_offset)
        ranges.stored_nbytes.extend(found.nbytes)
        ranges.start.extend(array("Q", bytes(8 * count)))
        ranges.nbytes.extend(found.nbytes)

    def finish(self) -> LoadPlan:
        """Put the ranges in order, and choose what is read together."""
        plan, ranges = self._plan, self._plan.ranges
        order = sorted(range(len(ranges.file)), key=ranges.byte_offset.__getitem__)
        if len(set(ranges.file)) > 1:
            order.sort(key=ranges.file.__getitem__)
        plan.order = order
        plan.range_nbytes = sum(ranges.stored_nbytes) + sum(
            plan.runs_of(row).nbytes - ranges.stored_nbytes[row] for row in plan.scattered
        )
        if self._bound is None:
            plan.read_at = array("Q", range(len(order) + 1))
        else:
            gaps = _gaps(plan)
            _cut_reads(plan, gaps, _gap_limit(plan, gaps, self._bound))
        return plan

    def _add_chunk(
        self, tensor: int, place: ChunkPlace, copies: Sequence[tuple[int, Copy]]
    ) -> None:
        plan = self._plan
        chunks, columns = plan.chunks, plan.copies
        row = len(chunks.tensor)
        chunks.tensor.append(tensor)
        chunks.number.append(place.number)
        chunks.codec.append(place.codec)
        chunks.file.append(place.file)
        chunks.byte_offset.append(place.byte_offset)
        chunks.first_block.append(place.first_block)
        chunks.first_frame.append(place.first_frame)
        chunks.first_copy.append(len(columns.wanted))
        chunks.copies.append(len(copies))
        for number, copy in copies:
            if copy.levels:
                plan.many[len(columns.wanted)] = copy
            columns.wanted.append(number)
            columns.src.append(copy.src)
            columns.dst.append(copy.dst)
            columns.run.append(copy.run)
            plan.wanted_nbytes += copy.nbytes
        if plan.verify or place.codec != RAW:
            for number in _blocks(place, copies, plan.block_nbytes):
                self._add_block(row, place, number)
        else:
            self._add_exact(row, place, copies)

    def _add_block(self, row: int, place: ChunkPlace, number: int) -> None:
        start = number * self._plan.block_nbytes
        nbytes = min(self._plan.block_nbytes, place.nbytes - start)
        if place.codec == RAW:
            self._add_range(row, place.file, place.byte_offset + start, nbytes, start, nbytes)
        else:
            at = place.byte_offset + place.frame_at[number]
            self._add_range(row, place.file, at, place.frames[number], start, nbytes)

    def _add_exact(self, row: int, place: ChunkPlace, copies: Sequence[tuple[int, Copy]]) -> None:
        """Add what copies need, but each byte once, in ranges that are no longer than a block."""
        spans = []
        first = self._plan.chunks.first_copy[row]
        for number, (_, copy) in enumerate(copies, first):
            nbytes, runs = copy.src_end - copy.src, copy.split(PAGE_NBYTES)[0]
            if not runs.levels or nbytes <= (self._bound or 1) * copy.nbytes:
                spans.append((copy.src, copy.src_end))
                continue
            self._plan.scattered[len(self._plan.ranges.file)] = number
            at = place.byte_offset + copy.src
            self._add_range(row, place.file, at, nbytes, copy.src, nbytes)
        step = self._plan.block_nbytes
        for low, high in _joined(spans):
            for start in range(low - low % step, high, step):
                begin, end = max(start, low), min(start + step, high)
                nbytes, at = end - begin, place.byte_offset + begin
                self._add_range(row, place.file, at, nbytes, begin, nbytes)

    def _add_range(
        self, row: int, file: int, byte_offset: int, stored_nbytes: int, start: int, nbytes: int
    ) -> None:
        ranges = self._plan.ranges
        ranges.chunk.append(row)
        ranges.file.append(file)
        ranges.byte_offset.append(byte_offset)
        ranges.stored_nbytes.append(stored_nbytes)
        ranges.start.append(start)
        ranges.nbytes.append(nbytes)


def _room(box: Box, itemsize: int, strides: Sequence[int] | None) -> int:
    """Return how many bytes a destination has, from the first element of a box to its last."""
    if strides is None:
        return box.numel * itemsize
    empty = 0 in box.shape
    steps = [(size, by) for size, by in zip(box.shape, strides, strict=False) if size > 1]
    too_short = not empty and any(by < itemsize for _, by in steps)
    if len(strides) != len(box.shape) or too_short:
        message = f"strides {list(strides)} do not fit a box of shape {list(box.shape)}"
        raise ArgumentError(message, code="bad_argument")
    return 0 if empty else itemsize + sum((size - 1) * by for size, by in steps)


def _blocks(
    place: ChunkPlace, copies: Sequence[tuple[int, Copy]], block_nbytes: int
) -> Iterable[int]:
    """List the blocks of a chunk that hold something of these copies, ascending."""
    if place.nbytes <= block_nbytes:
        return (0,)
    spans = [span for _, copy in copies for span in copy.spans(block_nbytes)]
    numbers = [range(low // block_nbytes, (high - 1) // block_nbytes + 1) for low, high in spans]
    return numbers[0] if len(numbers) == 1 else sorted(set(itertools.chain(*numbers)))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Unite ranges that overlap or touch."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


def _gap_limit(plan: LoadPlan, gaps: Sequence[int], bound: float) -> int:
    """Return how long gaps may be, so that reading those up to it keeps to the bound."""
    room = int(bound * plan.wanted_nbytes) - plan.range_nbytes
    some = sorted(gap for gap in gaps if 0 < gap < _APART) if room > 0 else []
    taken = bisect_right(list(itertools.accumulate(some)), room)
    if taken < len(some):  # of gaps of one length all or none
        taken = bisect_left(some, some[taken])
    return some[taken - 1] if taken else 0


def _gaps(plan: LoadPlan) -> list[int]:
    """List for each range the bytes since the one before; many where they stay apart anyhow."""
    ranges, order, scattered = plan.ranges, plan.order, plan.scattered
    places = list(map(ranges.byte_offset.__getitem__, order))
    lengths = list(map(ranges.stored_nbytes.__getitem__, order))
    ends = list(map(operator.add, places, lengths))
    if max(lengths, default=0) <= SMALL_NBYTES and not scattered and len(set(ranges.file)) == 1:
        between = list(map(operator.sub, places[1:], ends))
        if min(between, default=0) >= 0:  # nothing lies over another: mostly
            return [_APART, *between]
    small = [nbytes <= SMALL_NBYTES for nbytes in lengths]
    if scattered:
        small = [one and row not in scattered for one, row in zip(small, order, strict=True)]
    files = list(map(ranges.file.__getitem__, order))
    after = zip(files, ends, small, strict=True)  # the one before, for all but the first
    rows = zip(files[1:], places[1:], small[1:], strict=True)
    gaps = [
        at - end if low and high and file == last and at >= end else _APART
        for (file, at, high), (last, end, low) in zip(rows, after, strict=False)
    ]
    return [_APART, *gaps] if order else gaps


def _cut_reads(plan: LoadPlan, gaps: Sequence[int], gap_limit: int) -> None:
    """Begin a read at each range that is not read together with the one before."""
    places, begin = plan.ranges.byte_offset, 0
    del plan.read_at[:]
    for index, (row, gap) in enumerate(zip(plan.order, gaps, strict=True)):
        at = places[row]
        if gap > gap_limit or at - begin >= BATCH_NBYTES:
            plan.read_at.append(index)
            begin = at
        else:
            plan.gap_nbytes += gap
    plan.read_at.append(len(gaps))
