"""What all ranks of a mesh want of the blocks of a tensor, counted for many ranks at once.

Pure. `block_shares` lists the blocks that one rank wants; here the same is counted with columns
over ranks and blocks, for ranks that are not there. Chunks of which the same ranks want the same
parts are counted once: so are most where columns are wanted of what a thousand ranks wrote by rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsdformat.boxes import Box, whole
from dsdformat.format.checks import ChunkPlace
from dsdformat.plan.load_plan import Chunks

__all__ = ["BlockTally", "Partial", "Tally"]

_CELLS = 1 << 18  # ranks times blocks that are looked at together

Numbers = NDArray[np.int64]


class Tally(NamedTuple):
    """Bytes of blocks.

    Attributes:
        read_nbytes: What each rank reads by itself: all blocks of which it wants something.
        extra_nbytes: How much of that, of all ranks, is not wanted.
    """

    read_nbytes: Numbers
    extra_nbytes: int


class Partial(NamedTuple):
    """Blocks that the same ranks want in part.

    Attributes:
        ranks: Two or more, ascending.
        file: Where the blocks are.
        nbytes: Of each block.
    """

    ranks: tuple[int, ...]
    file: int
    nbytes: int


class _Met(NamedTuple):
    """What the ranks that want something of a chunk want of it.

    Attributes:
        shape: Of the chunk.
        ranks: For each box, ascending.
        low, high: Where each box begins and ends in the chunk, in elements.
    """

    shape: tuple[int, ...]
    ranks: Numbers
    low: Numbers
    high: Numbers

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for chunks that are wanted alike."""
        return self.shape, self.ranks.tobytes(), self.low.tobytes(), self.high.tobytes()


class BlockTally:
    """What ranks want of a tensor.

    Complexity: for each chunk some 20 µs, or 2 µs if it is wanted as it is; 0.1 µs for each rank
    that wants some of it; and 50 ns for each rank and block, once for chunks that are wanted alike:
    1,024 columns of 32,768 blocks take 2 s.
    Memory: 16 MiB, 40 bytes for each box, and as much again for each rank that wants some of a
    chunk, of chunks that are not wanted alike.
    """

    def __init__(
        self,
        chunks: Chunks,
        shape: Sequence[int],
        boxes: Sequence[Sequence[Box]],
        block_nbytes: int,
    ) -> None:
        """Begin.

        Args:
            chunks: Of the tensor.
            shape: Of it; it has dims.
            boxes: What each rank wants; those of one share no element.
            block_nbytes: Of the checkpoint.
        """
        self._chunks = chunks
        self._shape = tuple(shape)
        self._world_size = len(boxes)
        self._block_nbytes = block_nbytes
        self._boxes = flat = [(rank, box) for rank, own in enumerate(boxes) for box in own]
        ndim = len(self._shape)
        self._ranks = np.array([rank for rank, _ in flat], np.int64)
        self._low = np.array([box.offset for _, box in flat], np.int64).reshape(-1, ndim)
        self._high = np.array([box.end for _, box in flat], np.int64).reshape(-1, ndim)
        # Boxes are looked for along the dim that tells them apart best.
        starts = [len(np.unique(self._low[:, dim])) for dim in range(ndim)]
        self._dim = dim = int(np.argmax(starts))
        order = np.argsort(self._low[:, dim], kind="stable")
        self._order = order.tolist()
        self._starts = self._low[order, dim].tolist()
        self._ends = np.maximum.accumulate(self._high[order, dim]).tolist()

    def count(self) -> Tally:
        """Count what ranks would read if each read by itself."""
        read = np.zeros(self._world_size, np.int64)
        extra = 0
        known: dict[object, tuple[Numbers, Numbers, int]] = {}
        for place, some in self._places():
            if len(some) == 1 and self._boxes[some[0]][1] == place.box:
                read[self._boxes[some[0]][0]] += place.nbytes
                continue
            met = self._meet(place, some)
            key = met.key
            if key not in known:
                known[key] = self._count(met)
            ranks, nbytes, more = known[key]
            read[ranks] += nbytes
            extra += more
        return Tally(read, extra)

    def partial(self) -> Counter[Partial]:
        """Count the blocks that several ranks want in part."""
        found: Counter[Partial] = Counter()
        known: dict[object, Counter[tuple[tuple[int, ...], int]]] = {}
        for place, some in self._places():
            if len(some) == 1:
                continue
            met = self._meet(place, some)
            key = met.key
            if key not in known:
                known[key] = self._partial(met)
            for (ranks, nbytes), count in known[key].items():
                found[Partial(ranks, place.file, nbytes)] += count
        return found

    def _places(self) -> Iterator[tuple[ChunkPlace, list[int]]]:
        """List chunks, and numbers of the boxes that may want something of each."""
        if 0 in self._shape:
            return
        dim = self._dim
        for place in self._chunks.meeting(whole(self._shape)):
            at = place.box.offset[dim]
            first = bisect_right(self._ends, at)
            stop = bisect_left(self._starts, at + place.box.shape[dim])
            if first < stop:
                yield place, self._order[first:stop]

    def _meet(self, place: ChunkPlace, numbers: list[int]) -> _Met:
        """Find what is wanted of a chunk, if not by all of these boxes."""
        box, some = place.box, np.sort(numbers)
        offset = np.array(box.offset, np.int64)
        low = np.maximum(self._low[some] - offset, 0)
        high = np.minimum(self._high[some] - offset, box.shape)
        has = (low < high).all(axis=1)
        return _Met(box.shape, self._ranks[some[has]], low[has], high[has])

    def _count(self, met: _Met) -> tuple[Numbers, Numbers, int]:
        """Return who wants something of a chunk, what each reads, and how much for nothing."""
        itemsize = self._chunks.dtype.itemsize
        ranks = np.unique(met.ranks)
        read = np.zeros(len(ranks), np.int64)
        extra = 0
        for sizes, wanted in self._blocks(met):
            blocks = np.where(wanted > 0, sizes, 0)
            read += blocks.sum(axis=1)
            extra += int((blocks - wanted).sum())
        return ranks, read * itemsize, extra * itemsize

    def _partial(self, met: _Met) -> Counter[tuple[tuple[int, ...], int]]:
        """Count the blocks of a chunk that several ranks want in part, by ranks and bytes."""
        found: Counter[tuple[tuple[int, ...], int]] = Counter()
        ranks = np.unique(met.ranks)
        if len(ranks) < 2:
            return found
        itemsize = self._chunks.dtype.itemsize
        names: dict[bytes, tuple[int, ...]] = {}
        for sizes, wanted in self._blocks(met):
            some = (wanted > 0) & (wanted < sizes)
            for number in np.flatnonzero(some.sum(axis=0) > 1).tolist():
                column = some[:, number]
                key = column.tobytes()
                if key not in names:
                    names[key] = tuple(ranks[column].tolist())
                found[names[key], int(sizes[number]) * itemsize] += 1
        return found

    def _blocks(self, met: _Met) -> Iterator[tuple[Numbers, Numbers]]:
        """List runs of blocks: their sizes, and what each rank wants of each, in elements."""
        if not len(met.ranks):
            return
        total = math.prod(met.shape)
        block = self._block_nbytes // self._chunks.dtype.itemsize
        edges = np.minimum(np.arange(-(-total // block) + 1) * block, total)
        first_of_rank = np.flatnonzero(np.diff(met.ranks, prepend=-1))
        step = max(1, _CELLS // len(met.ranks))
        for at in range(0, len(edges) - 1, step):
            some = edges[at : at + step + 1]
            wanted = np.diff(_before(met, some), axis=1)
            yield np.diff(some), np.add.reduceat(wanted, first_of_rank, axis=0)


def _before(met: _Met, places: Numbers) -> Numbers:
    """Count the elements of each box that lie before places in the row-major order of a chunk."""
    count = np.zeros((len(met.ranks), len(places)), np.int64)
    inside = np.ones(count.shape, bool)
    rest = places
    sizes = met.high - met.low
    for dim in range(len(met.shape)):
        at, rest = np.divmod(rest, math.prod(met.shape[dim + 1 :]))
        low, high = met.low[:, dim, None], met.high[:, dim, None]
        inner = sizes[:, dim + 1 :].prod(axis=1)[:, None]
        count += np.where(inside, np.clip(at - low, 0, high - low) * inner, 0)
        inside &= (at >= low) & (at < high)
    return count
