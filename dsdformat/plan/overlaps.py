"""Boxes that ranks hold in whatever shape, cut so that each element is in one: cells with holders.

Pure. Where ranks hold equal boxes or boxes apart, those are the cells. Where boxes overlap in
part, they are taken in turn, those that the fewest ranks hold first, then the smallest, then by
offset; each keeps what none before it has. So a rank that alone holds a piece of what another
one holds too writes that piece, and the other the rest. A cell's holders are all ranks of which
some box contains it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dsdformat.boxes import Box, cut_dims, is_tiling
from dsdformat.limits import CUT_DIMS_MAX
from dsdformat.plan.copies import packed_strides
from dsdformat.plan.sharding import Held, Sharding

__all__ = ["Cell", "find_cells", "held_within"]


class Cell(NamedTuple):
    """A box that is in one piece on each of its holders.

    Attributes:
        box: In elements of the tensor.
        holders: Positions in the sharding, ascending.
    """

    box: Box
    holders: tuple[int, ...]


def find_cells(sharding: Sharding) -> list[Cell]:
    """Cut what ranks hold of a tensor into cells, each element that is held in exactly one.

    Complexity: the square of the number of different boxes where some overlap, at some ns.
    """
    holders: dict[Box, list[int]] = {}
    for position in range(len(sharding.ranks)):
        for held in sharding.held(position):
            if held.outer.numel:
                holders.setdefault(held.outer, []).append(position)
    boxes = list(holders)
    if _are_apart(sharding.shape, boxes):
        cells = [Cell(box, tuple(holders[box])) for box in boxes]
    else:
        cells = list(_cut_overlaps(holders))
    return sorted(cells, key=lambda cell: cell.box.offset)


def held_within(held: Held, box: Box) -> list[Held]:
    """Say where a shard holds a part of a box that it holds.

    Returns:
        One `Held`; several where the part is not contiguous in a flat shard.
    """
    outer, inner, order = held
    if box == outer:
        return [held]
    offset = tuple(b - o for b, o in zip(box.offset, outer.offset, strict=True))
    if len(inner.shape) == len(outer.shape) and order is None and inner.shape == outer.shape:
        place = tuple(i + o for i, o in zip(inner.offset, offset, strict=True))
        return [Held(box, Box(place, box.shape))]
    dims = order or tuple(range(len(outer.shape)))
    whole = [outer.shape[dim] for dim in dims]
    strides = packed_strides(whole, 1)
    loose = len(dims)  # dims behind it are whole, so they and this one's range are contiguous
    while loose and box.shape[dims[loose - 1]] == whole[loose - 1]:
        loose -= 1
    fixed, found = dims[: max(loose - 1, 0)], []
    for index in itertools.product(*(range(box.shape[dim]) for dim in fixed)):
        at = dict(zip(fixed, index, strict=True))
        start = tuple(o + at.get(dim, 0) for dim, o in enumerate(box.offset))
        shape = tuple(1 if dim in at else size for dim, size in enumerate(box.shape))
        steps = zip(dims, strides, strict=True)
        begin = sum((start[dim] - outer.offset[dim]) * stride for dim, stride in steps)
        range_ = Box((inner.offset[0] + begin,), (math.prod(shape),))
        found.append(Held(Box(start, shape), range_, order))
    return found


def _are_apart(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes are seen to tile the shape, so that none overlap."""
    if len(boxes) <= 1:
        return True
    dims = cut_dims(shape, boxes)
    return len(dims) <= CUT_DIMS_MAX and is_tiling(shape, boxes, dims)


def _cut_overlaps(holders: dict[Box, list[int]]) -> Iterator[Cell]:
    boxes = sorted(holders, key=lambda box: (len(holders[box]), box.numel, box.offset))
    low = np.array([box.offset for box in boxes], np.int64)
    high = np.array([box.end for box in boxes], np.int64)
    for turn, box in enumerate(boxes):
        apart = (low >= high[turn]) | (high <= low[turn])
        met = np.flatnonzero(~apart.any(axis=1)).tolist()
        rest = [box]
        for other in met:
            if other < turn:
                rest = [piece for one in rest for piece in _without(one, boxes[other])]
        for piece in rest:
            whole = [boxes[other] for other in met if piece.intersect(boxes[other]) == piece]
            found = {position for one in whole for position in holders[one]}
            yield Cell(piece, tuple(sorted(found)))


def _without(box: Box, other: Box) -> Iterator[Box]:
    """Cut what another box has not into boxes."""
    shared = box.intersect(other)
    if shared is None:
        yield box
        return
    low, high = list(box.offset), list(box.end)
    for dim in range(len(low)):
        for begin, end in ((low[dim], shared.offset[dim]), (shared.end[dim], high[dim])):
            if begin < end:
                offset, stop = low.copy(), high.copy()
                offset[dim], stop[dim] = begin, end
                yield Box(tuple(offset), tuple(map(operator.sub, stop, offset)))
        low[dim], high[dim] = shared.offset[dim], shared.end[dim]
