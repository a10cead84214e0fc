"""Tilings that columns of boxes show at a glance, and the boxes of one that meet a wanted box.

Pure, and of the standard library: columns are arrays, and each step over one is a single call.
Ranks cut tensors into a grid, or into ranges of their row-major elements; both are recognized
here. What is neither may tile too: `format.checks` has the rule, which looks at any set of boxes.
"""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dsdformat.boxes import Box
from dsdformat.limits import CUT_DIMS_MAX
from dsdformat.plan.copies import packed_strides

__all__ = ["FlatTiling", "GridTiling", "Tiling", "find_tiling", "flat_offsets"]

# A column for each dim.
Columns = Sequence["array[int]"]


@dataclass(frozen=True, slots=True)
class GridTiling:
    """Each dim is cut into intervals; the boxes are all their combinations, in row-major order.

    Attributes:
        starts: Of the intervals of each dim, ascending.
    """

    starts: Sequence[Sequence[int]]

    def find(self, box: Box) -> Sequence[int]:
        """List the boxes that meet a box that has elements, ascending; in O(log n) and these."""
        spans = []
        step = 1  # from one interval of a dim to the next
        dims = list(zip(self.starts, box.offset, box.shape, strict=True))
        for starts, low, size in reversed(dims):
            if len(starts) > 1:
                first, stop = bisect_right(starts, low) - 1, bisect_left(starts, low + size)
                spans.append(range(first * step, stop * step, step))
                step *= len(starts)
        if len(spans) == 1:
            return spans[0]
        return list(map(sum, itertools.product(*reversed(spans))))


@dataclass(frozen=True, slots=True)
class FlatTiling:
    """The boxes are ranges of the row-major elements, one after another.

    Attributes:
        strides: Elements from one index of a dim to the next.
        starts: First element of each box, ascending.
    """

    strides: Sequence[int]
    starts: Sequence[int]

    def find(self, box: Box) -> Sequence[int]:
        """List the boxes that may meet a box that has elements, ascending; in O(log n)."""
        low = sum(map(operator.mul, box.offset, self.strides))
        high = low + sum((size - 1) * by for size, by in zip(box.shape, self.strides, strict=True))
        return range(bisect_right(self.starts, low) - 1, bisect_right(self.starts, high))


Tiling = GridTiling | FlatTiling


def find_tiling(shape: Sequence[int], offsets: Columns, sizes: Columns) -> Tiling | None:
    """Recognize boxes that tile a shape, in ascending order of their offsets.

    Args:
        shape: Of the tensor; no dim is 0.
        offsets, sizes: Of the boxes, a column per dim.

    Returns:
        The tiling; None if these boxes are of no kind that is known here, or do not tile.

    Complexity: linear in the boxes, and 10 ns for each number.
    """
    if any(0 in column for column in sizes):
        return None
    count = len(offsets[0]) if shape else 1
    cut = [
        dim
        for dim, size in enumerate(shape)
        if sizes[dim] != array("Q", [size]) * count or any(offsets[dim])
    ]
    if len(cut) > CUT_DIMS_MAX:
        return None
    if not cut:
        return GridTiling([[0]] * len(shape)) if count == 1 else None
    if len(cut) > 1:
        flat = _find_flat(shape, offsets, sizes)
        if flat is not None:
            return flat
    return _find_grid(shape, offsets, sizes, cut)


def flat_offsets(shape: Sequence[int], offsets: Columns) -> Sequence[int]:
    """Return numbers that order boxes of a shape as their offsets do.

    For boxes that have elements and lie in the shape.
    """
    used = [dim for dim, column in enumerate(offsets) if any(column)]
    if len(used) <= 1:
        return offsets[used[0] if used else 0]
    return _dot(packed_strides(shape, 1), offsets)


def _dot(strides: Sequence[int], columns: Sequence[Sequence[int]]) -> Sequence[int]:
    total: Sequence[int] = columns[-1]
    for stride, column in zip(strides[:-1], columns[:-1], strict=True):
        if any(column):
            terms = map(operator.mul, column, itertools.repeat(stride))
            total = list(map(operator.add, terms, total))
    return total


def _find_flat(shape: Sequence[int], offsets: Columns, sizes: Columns) -> FlatTiling | None:
    """Each box begins where the one before ends, and is as long as from its first to its last."""
    strides = packed_strides(shape, 1)
    starts = list(_dot(strides, offsets))
    lengths: Sequence[int] = sizes[0]
    for column in sizes[1:]:
        lengths = list(map(operator.mul, lengths, column))
    ends = list(itertools.accumulate(lengths))
    if starts[0] != 0 or ends[-1] != math.prod(shape) or starts[1:] != ends[:-1]:
        return None
    # From its first element to its last there are as many as it has: nothing lies in between.
    reach = map(operator.sub, _dot(strides, sizes), itertools.repeat(sum(strides) - 1))
    if list(reach) != list(lengths):
        return None
    return FlatTiling(strides, starts)


def _find_grid(
    shape: Sequence[int], offsets: Columns, sizes: Columns, cut: Sequence[int]
) -> GridTiling | None:
    starts = [sorted(set(offsets[dim])) if dim in cut else [0] for dim in range(len(shape))]
    counts = list(map(len, starts))
    count = len(offsets[0])
    if math.prod(counts) != count or any(some[0] for some in starts):
        return None
    for dim in cut:
        inner = math.prod(counts[dim + 1 :])
        ends = [*starts[dim][1:], shape[dim]]
        lengths = list(map(operator.sub, ends, starts[dim]))
        for values, column in ((starts[dim], offsets[dim]), (lengths, sizes[dim])):
            if min(values) < 0 or _spread(values, inner, count) != column:
                return None
    return GridTiling(starts)


def _spread(values: Sequence[int], inner: int, count: int) -> array[int]:
    """Repeat each value `inner` times, and all that up to `count`."""
    column = array("Q", values)
    if inner > 1:
        column = array("Q", [value for value in values for _ in range(inner)])
    return column * (count // len(column))
