"""Chunk columns of many writers, put together so that those of one tensor can be taken out.

Pure, and of the standard library. A thousand ranks send some million rows; no object is made of a
row, and each step over a column is a single call. Writers whose tensors have as many chunks each
are a band: rows of a matrix, of which a tensor has some columns. Tensors that few of them have, as
what is replicated and written by one, are first taken out; those chunks are listed by tensor.
"""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dsdformat.format.codecs import RAW
from dsdformat.format.manifest import ChunkRows
from dsdformat.plan.lanes import column_of, long_of, shifted

__all__ = ["Band", "Pool", "WriterChunks", "bands_of", "joined_rows"]

_NUMBER_NBYTES = 8
_FEW = 8  # writers of which no band is made


@dataclass(frozen=True, slots=True)
class WriterChunks:
    """What one writer has.

    Attributes:
        index: Of each of its tensors the merged one.
        counts: How many chunks each of its tensors has.
        rows: The chunks, in the order of its tensors.
        files: Of each of its files the number among those of all writers.
        blocks, frames: Of each of its files, how far its rows in the tables of digests and
            frames lie from where they will be.
    """

    index: Sequence[int]
    counts: array[int]
    rows: ChunkRows
    files: Sequence[int]
    blocks: Sequence[int]
    frames: Sequence[int]


def bands_of(
    writers: Sequence[WriterChunks], shapes: Sequence[Sequence[int]]
) -> tuple[list[Band], Pool]:
    """Put the chunks of all writers into bands, and what is left into a pool.

    Args:
        writers: In the order of ranks.
        shapes: Of the merged tensors.
    """
    groups: dict[int, list[WriterChunks]] = {}
    for writer in writers:  # those that share the list of their tensors
        groups.setdefault(id(writer.index), []).append(writer)
    pool = Pool(shapes)
    return [band for some in groups.values() for band in _bands(some, shapes, pool)], pool


class _Form:
    """How many chunks each tensor of some writers has, and where they are among all of a writer.

    Attributes:
        index: Of each tensor the merged one.
        counts: Of each tensor.
        starts: Of the chunks of each tensor the first, and the number of all.
        number_starts: The same for the numbers of boxes.
        widths: Of each tensor how many numbers a box has.
    """

    def __init__(
        self, index: Sequence[int], counts: array[int], shapes: Sequence[Sequence[int]]
    ) -> None:
        self.index, self.counts = index, counts
        self.widths = [2 * len(shapes[tensor]) for tensor in index]
        self.starts = list(itertools.accumulate(counts, initial=0))
        widths = map(operator.mul, self.widths, counts)
        self.number_starts = list(itertools.accumulate(widths, initial=0))


def _bands(
    writers: Sequence[WriterChunks], shapes: Sequence[Sequence[int]], pool: Pool
) -> Iterable[Band]:
    """Make bands of writers with one list of tensors; what is in none goes into the pool."""
    index = writers[0].index
    longs = [long_of(writer.counts) for writer in writers]
    totals = column_of(sum(longs), "I", len(index))
    rare = [at for at, total in enumerate(totals) if 0 < 2 * total < len(writers)]
    mask = array("I", [0xFFFFFFFF]) * len(index)
    for at in rare:
        mask[at] = 0
    often = long_of(mask)
    alike = Counter(long & often for long in longs)
    bands: dict[int, Band] = {}
    for writer, long in zip(writers, longs, strict=True):
        kept = long & often
        if not kept or alike[kept] < _FEW:
            pool.add(writer)
            continue
        if kept not in bands:
            bands[kept] = Band(_Form(index, column_of(kept, "I", len(index)), shapes))
        band, left = bands[kept], writer
        if kept != long:
            left, taken = _parted(writer, [at for at in rare if writer.counts[at]], band.form)
            pool.add(taken)
        band.add(left)
    return bands.values()


def _parted(
    writer: WriterChunks, rare: Sequence[int], form: _Form
) -> tuple[WriterChunks, WriterChunks]:
    """Take the chunks of some tensors from a writer; return what is left, and what was taken.

    Args:
        writer: It.
        rare: Which of its tensors, ascending.
        form: Of what is left.
    """
    left, taken = _empty_rows(), _empty_rows()
    row = number = 0  # where what follows begins
    rows_taken = numbers_taken = 0
    for at in rare:
        start, first = form.starts[at] + rows_taken, form.number_starts[at] + numbers_taken
        count = writer.counts[at]
        _extend(left, _slice(writer.rows, row, start, number, first))
        row, number = start + count, first + count * form.widths[at]
        _extend(taken, _slice(writer.rows, start, row, first, number))
        rows_taken, numbers_taken = rows_taken + count, numbers_taken + number - first
    rows = writer.rows
    _extend(left, _slice(rows, row, len(rows.file), number, len(rows.numbers)))
    index = [writer.index[at] for at in rare]
    counts = array("I", [writer.counts[at] for at in rare])
    return (
        replace(writer, counts=form.counts, rows=left),
        replace(writer, index=index, counts=counts, rows=taken),
    )


class Band:
    """Chunks of writers whose tensors have as many each: rows of a matrix.

    Attributes:
        form: Of each row.
        places: Of each merged tensor that has chunks, its number on the writers.
    """

    def __init__(self, form: _Form) -> None:
        self.form = form
        self.places = {
            tensor: at
            for at, (tensor, count) in enumerate(zip(form.index, form.counts, strict=True))
            if count
        }
        self._cells = _empty_rows()

    def add(self, writer: WriterChunks) -> None:
        """Add the row of a writer."""
        _extend(self._cells, _placed(writer))

    def rows(self, tensor: int) -> list[ChunkRows]:
        """Return the chunks of a tensor: the first one of each writer, and so on."""
        at, form = self.places[tensor], self.form
        width = form.widths[at]
        first = form.number_starts[at]
        return [
            self._column(form.starts[at] + number, first + number * width, width)
            for number in range(form.counts[at])
        ]

    def _column(self, column: int, start: int, width: int) -> ChunkRows:
        """Return a chunk of each writer.

        Args:
            column: Number of the chunk on a writer.
            start: Where its box begins.
            width: How many numbers it has.
        """
        _, *cells, numbers = self._cells
        step, number_step = self.form.starts[-1], self.form.number_starts[-1]
        found = [cell[column::step] for cell in cells]
        boxes = array("Q", bytes(_NUMBER_NBYTES * width)) * len(found[0])
        for number in range(width):
            boxes[number::width] = numbers[start + number :: number_step]
        return ChunkRows._make([0, *found, boxes])


class Pool:
    """Chunks of any writers, with those of each tensor listed."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._widths = [2 * len(shape) for shape in shapes]
        self._chosen = [array("Q") for _ in shapes]
        self._starts = array("Q")
        self._cells = _empty_rows()

    def add(self, writer: WriterChunks) -> None:
        """Add all chunks of a writer."""
        owners = list(
            itertools.chain.from_iterable(map(itertools.repeat, writer.index, writer.counts))
        )
        first, begin = len(self._cells.file), len(self._cells.numbers)
        widths = map(self._widths.__getitem__, owners)
        self._starts.extend(itertools.accumulate(widths, initial=begin))
        self._starts.pop()
        numbers = range(first, first + len(owners))
        deque(map(array.append, map(self._chosen.__getitem__, owners), numbers), maxlen=0)
        _extend(self._cells, _placed(writer))

    def rows(self, tensor: int) -> list[ChunkRows]:
        """Return the chunks of a tensor, if there are any."""
        chosen, width = self._chosen[tensor], self._widths[tensor]
        if not chosen:
            return []
        _, *cells, numbers = self._cells
        found = [array(cell.typecode, map(cell.__getitem__, chosen)) for cell in cells]
        boxes = array("Q")
        for start in map(self._starts.__getitem__, chosen):
            boxes.extend(numbers[start : start + width])
        return [ChunkRows._make([0, *found, boxes])]


def joined_rows(several: Sequence[ChunkRows]) -> ChunkRows:
    """Return the chunks of one after those of another."""
    if len(several) == 1:
        return several[0]
    joined = _empty_rows()
    for rows in several:
        _extend(joined, rows)
    return joined


def _placed(writer: WriterChunks) -> ChunkRows:
    """Return the chunks of a writer with files, blocks and frames numbered among all."""
    rows = writer.rows
    file, block, frame = array("I"), array("Q"), array("Q")
    is_packed = rows.codec != array("I", bytes(4 * len(rows.codec)))
    for start, stop, number in _runs(rows.file.tobytes()):
        file.extend(array("I", [writer.files[number]]) * (stop - start))
        block.extend(shifted(rows.first_block[start:stop], writer.blocks[number]))
        if is_packed:
            pairs = zip(rows.codec[start:stop], rows.first_frame[start:stop], strict=True)
            by = writer.frames[number]
            frame.extend([at + by if codec != RAW else 0 for codec, at in pairs])
    if not is_packed:
        frame = rows.first_frame
    return rows._replace(file=file, first_block=block, first_frame=frame)


@functools.lru_cache(maxsize=64)
def _runs(files: bytes) -> tuple[tuple[int, int, int], ...]:
    """List the runs of a column of files, of which many writers have the same.

    Returns:
        Where each begins and ends, and its number.
    """
    runs, at = [], 0
    for number, same in itertools.groupby(array("I", files)):
        begin, at = at, at + sum(1 for _ in same)
        runs.append((begin, at, number))
    return tuple(runs)


def _empty_rows() -> ChunkRows:
    """Return the columns of no chunks."""
    return ChunkRows(0, array("I"), array("I"), *(array("Q") for _ in range(4)))


def _extend(rows: ChunkRows, more: ChunkRows) -> None:
    for column, other in zip(rows[1:], more[1:], strict=True):
        column.extend(other)


def _slice(rows: ChunkRows, start: int, stop: int, first: int, last: int) -> ChunkRows:
    """Return some chunks: from `start`, whose numbers begin at `first`."""
    _, *cells, numbers = rows
    return ChunkRows._make([0, *(cell[start:stop] for cell in cells), numbers[first:last]])
