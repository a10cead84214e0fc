"""The byte runs that carry what a chunk and a wanted box share, from one to the other.

Pure. A chunk's bytes are packed and row-major; the destination may have any strides. However many
runs there are, a `Copy` is a few numbers: what has to touch each run does it when the bytes are
there, and only for those that are.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dsdformat.boxes import Box
from dsdformat.plan.runs import Level, move_runs

__all__ = ["Copy", "Level", "find_copy", "packed_strides"]


class Copy(NamedTuple):
    """Equal runs of bytes, evenly spaced along a few levels.

    Attributes:
        src: Where the first run begins in the decoded bytes of the chunk.
        dst: Where it goes, from the first element of the wanted box.
        run: Bytes of each run.
        levels: The outermost first; none if there is one run.
    """

    src: int
    dst: int
    run: int
    levels: tuple[Level, ...] = ()

    @property
    def runs(self) -> int:
        """Number of runs."""
        return math.prod(level.times for level in self.levels)

    @property
    def nbytes(self) -> int:
        """Bytes that are carried."""
        return self.run * self.runs

    @property
    def src_end(self) -> int:
        """Where the last run ends in the chunk."""
        return self.src + self.run + sum((n - 1) * step for n, step, _ in self.levels)

    def split(self, gap_nbytes: int) -> tuple[Copy, Copy]:
        """Take runs together that have less than so many bytes between them.

        Returns:
            A copy whose runs are what is taken together, with the gaps inside; and one that
            carries such a run, from its beginning to the beginning of its place.
        """
        extent, depth = self.run, len(self.levels)
        while depth and self.levels[depth - 1].src_step - extent < gap_nbytes:
            depth -= 1
            times, step, _ = self.levels[depth]
            extent += (times - 1) * step
        outer = Copy(self.src, self.dst, extent, self.levels[:depth])
        return outer, Copy(0, 0, self.run, self.levels[depth:])

    def spans(self, gap_nbytes: int) -> Iterator[tuple[int, int]]:
        """List the ranges of the chunk from the first run to the last, cut at wide gaps.

        Args:
            gap_nbytes: Gaps of that many bytes and more are left out; those below are not.

        Yields:
            Begin and end, ascending; no more than there are gaps to leave out, and one.
        """
        outer, _ = self.split(gap_nbytes)
        for begin, _ in outer.places():
            yield begin, begin + outer.run

    def move(self, data: memoryview, low: int, into: memoryview) -> None:
        """Carry what of the runs lies in `data`, the bytes of the chunk from `low` on."""
        move_runs(self.levels, self.run, data, self.src - low, into, self.dst)

    def places(self) -> Iterator[tuple[int, int]]:
        """List where each run begins, in the chunk and in its place."""
        sources = [range(0, n * step, step) for n, step, _ in self.levels]
        places = [range(0, n * step, step) if step else [0] * n for n, _, step in self.levels]
        pairs = zip(itertools.product(*sources), itertools.product(*places), strict=True)
        for src, dst in pairs:
            yield self.src + sum(src), self.dst + sum(dst)


def find_copy(
    chunk: Box, wanted: Box, itemsize: int, strides: Sequence[int] | None = None
) -> Copy | None:
    """Return how what two boxes share is carried, or None if they share no element.

    Args:
        chunk: Whose packed row-major bytes are the source.
        wanted: What goes to the destination.
        itemsize: Bytes of one element.
        strides: Bytes from one element of the destination to the next, for each dim; those of
            packed row-major bytes if None.
    """
    if chunk.offset == wanted.offset and chunk.shape == wanted.shape and strides is None:
        nbytes = chunk.numel * itemsize
        return Copy(0, 0, nbytes) if nbytes else None
    low = tuple(map(max, chunk.offset, wanted.offset))
    ends = map(min, map(operator.add, chunk.offset, chunk.shape), wanted.end)
    counts = tuple(map(operator.sub, ends, low))
    if counts and min(counts) <= 0:
        return None
    sources = packed_strides(chunk.shape, itemsize)
    places = packed_strides(wanted.shape, itemsize) if strides is None else strides
    src = sum(map(operator.mul, map(operator.sub, low, chunk.offset), sources))
    dst = sum(map(operator.mul, map(operator.sub, low, wanted.offset), places))
    run, levels = _levels(counts, sources, places, itemsize)
    return Copy(src, dst, run, levels)


def packed_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """Return the strides of packed row-major bytes."""
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def _levels(
    counts: Sequence[int], sources: Sequence[int], places: Sequence[int], itemsize: int
) -> tuple[int, tuple[Level, ...]]:
    """Join dims as far as their elements follow one another on both sides."""
    run = itemsize
    levels: list[Level] = []  # the innermost first
    for count, src_step, dst_step in zip(
        reversed(counts), reversed(sources), reversed(places), strict=True
    ):
        if count == 1:
            continue
        if not levels and src_step == dst_step == run:
            run *= count
        elif levels and (src_step, dst_step) == _extent(levels[-1]):
            levels[-1] = levels[-1]._replace(times=count * levels[-1].times)
        else:
            levels.append(Level(count, src_step, dst_step))
    return run, tuple(reversed(levels))


def _extent(level: Level) -> tuple[int, int]:
    return level.times * level.src_step, level.times * level.dst_step
