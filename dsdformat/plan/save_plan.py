"""Which rank writes which boxes: each element once, and about the same bytes on each rank.

Pure, and without a word between ranks: all ranks that hold a tensor know how it is spread, and
come to the same result. What several ranks hold goes to the one that has least to write, boxes
with the fewest holders first, then the largest; a large one is cut, so that its holders share it.
Ranks of another set, as those of another pipeline stage, may not be known, so bytes are counted
for each set of ranks by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsdformat.boxes import Box, whole
from dsdformat.limits import MIB
from dsdformat.plan.mesh import Replicate
from dsdformat.plan.sharding import FlatSharding, Held, MeshSharding, Sharding

__all__ = ["SPLIT_NBYTES", "plan_save"]

SPLIT_NBYTES = 16 * MIB  # no part of a box that is cut is smaller

Loads = np.ndarray[Any, np.dtype[np.int64]]


def plan_save(tensors: Sequence[tuple[Sharding, int]], rank: int) -> list[list[Held]]:
    """Return what one rank writes of each tensor.

    Args:
        tensors: How each is spread, and bytes of an element; in the order that all ranks have.
        rank: Global rank.

    Returns:
        For each tensor, boxes and where the shard of this rank has them.

    Cost: one pass over the tensors, and for replicated ones over the ranks of their set.
    """
    return _Plan(tensors, rank).run()


class _Plan:
    def __init__(self, tensors: Sequence[tuple[Sharding, int]], rank: int) -> None:
        self.tensors = tensors
        self.rank = rank
        self.result: list[list[Held]] = [[] for _ in tensors]
        self._loads: dict[tuple[int, ...], Loads] = {}
        self._places: dict[tuple[int, ...], tuple[tuple[int, ...], Loads]] = {}

    def run(self) -> list[list[Held]]:
        known: dict[int, tuple[int, int]] = {}
        keys = []
        for number, (sharding, width) in enumerate(self.tensors):
            if id(sharding) not in known:
                known[id(sharding)] = sharding.copies(), math.prod(sharding.shape)
            copies, numel = known[id(sharding)]
            keys.append((copies, -numel * width, number))
        for _, size, number in sorted(keys):
            sharding, width = self.tensors[number]
            if size == 0:
                self._add_empty(number, sharding)
            elif isinstance(sharding, MeshSharding):
                self._add_mesh(number, sharding, width)
            elif isinstance(sharding, FlatSharding):
                self._add_flat(number, sharding, width)
            else:
                self._add_table(number, sharding)
        return self.result

    def _position(self, sharding: Sharding) -> int | None:
        return sharding.ranks.index(self.rank) if self.rank in sharding.ranks else None

    def _add_empty(self, number: int, sharding: Sharding) -> None:
        if sharding.ranks[0] == self.rank:
            box = whole(sharding.shape)
            self.result[number].append(Held(box, box))

    def _load_of(self, ranks: tuple[int, ...]) -> tuple[Loads, Loads]:
        """Return the bytes of a set of ranks, and where in them each rank of this order is."""
        if ranks not in self._places:
            order = tuple(sorted(ranks))
            at = {one: index for index, one in enumerate(order)}
            self._places[ranks] = order, np.array([at[one] for one in ranks])
        order, places = self._places[ranks]
        if order not in self._loads:
            self._loads[order] = np.zeros(len(order), np.int64)
        return self._loads[order], places

    def _add_mesh(self, number: int, sharding: MeshSharding, width: int) -> None:
        loads, places = self._load_of(sharding.ranks)
        shape = sharding.mesh_shape
        axes = tuple(
            axis for axis, one in enumerate(sharding.placements) if isinstance(one, Replicate)
        )
        axes = tuple(axis for axis in axes if shape[axis] > 1)
        position = self._position(sharding)
        held = [] if position is None else sharding.held(position)
        parts = math.prod(size for axis, size in enumerate(shape) if axis not in axes)
        nbytes = -(-math.prod(sharding.shape) * width // parts)  # of the box of each rank
        if not axes:
            loads[places] += nbytes
            self.result[number].extend(held)
            return
        grid = loads[places].reshape(shape)
        others = tuple(axis for axis in range(len(shape)) if axis not in axes)
        coordinate = None if position is None else np.unravel_index(position, shape)
        replicas = math.prod(shape[axis] for axis in axes)
        pieces = max(1, min(replicas, nbytes // SPLIT_NBYTES))
        for piece in range(pieces):
            means = grid.sum(axis=others) if others else grid
            chosen = np.unravel_index(int(means.argmin()), means.shape)
            index: list[Any] = [slice(None)] * len(shape)
            for axis, at in zip(axes, chosen, strict=True):
                index[axis] = at
            grid[tuple(index)] += nbytes // pieces
            mine = coordinate is not None and all(
                coordinate[axis] == at for axis, at in zip(axes, chosen, strict=True)
            )
            if mine:
                cut = (part for one in held for part in _piece(one, pieces, piece))
                self.result[number].extend(cut)
        loads[places] = grid.reshape(-1)

    def _add_flat(self, number: int, sharding: FlatSharding, width: int) -> None:
        loads, places = self._load_of(sharding.ranks)
        holders: dict[int, list[int]] = {}
        for position, piece in enumerate(sharding.pieces):
            holders.setdefault(piece, []).append(position)
        for positions in holders.values():
            start, stop = sharding.local_range(positions[0])
            if start == stop:
                continue
            chosen = min(positions, key=lambda one: (loads[places[one]], sharding.ranks[one]))
            loads[places[chosen]] += (stop - start) * width
            if sharding.ranks[chosen] == self.rank:
                self.result[number].extend(sharding.held(chosen))

    def _add_table(self, number: int, sharding: Sharding) -> None:
        """Give each rank what no rank before it has; boxes may overlap in part."""
        position = self._position(sharding)
        if position is None:
            return
        before = [one.outer for p in range(position) for one in sharding.held(p)]
        for held in sharding.held(position):
            left = [held.outer]
            for other in before:
                left = [rest for box in left for rest in _without(box, other)]
            self.result[number].extend(part for box in left for part in _held_part(held, box))


def _piece(held: Held, pieces: int, piece: int) -> Iterator[Held]:
    """Cut a box along its longest leading dim, and yield one of the parts."""
    shape = held.outer.shape
    dim = next((d for d, size in enumerate(shape) if size >= pieces), None)
    if pieces == 1 or dim is None:
        if piece == 0:
            yield held
        return
    step = -(-shape[dim] // pieces)
    low, high = min(piece * step, shape[dim]), min((piece + 1) * step, shape[dim])
    if low < high:
        yield Held(_rows(held.outer, dim, low, high), _rows(held.inner, dim, low, high))


def _rows(box: Box, dim: int, low: int, high: int) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    offset[dim] += low
    shape[dim] = high - low
    return Box(tuple(offset), tuple(shape))


def _without(box: Box, other: Box) -> Iterator[Box]:
    """Cut a box out of another, and yield what is left."""
    common = box.intersect(other)
    if common is None:
        yield box
        return
    for dim in range(len(box.shape)):
        low, high = box.offset[dim], box.end[dim]
        inner, outer = common.offset[dim], common.end[dim]
        if low < inner:
            yield _rows(box, dim, 0, inner - low)
        if outer < high:
            yield _rows(box, dim, outer - low, high - low)
        box = _rows(box, dim, inner - low, outer - low)


def _held_part(held: Held, box: Box) -> Iterator[Held]:
    """Return where a shard has parts of a box that it holds; rows of them in a flat shard."""
    if box == held.outer:
        yield held
        return
    offset = tuple(a - b for a, b in zip(box.offset, held.outer.offset, strict=True))
    if len(held.inner.shape) == len(held.outer.shape) and len(box.shape) != 1:
        at = tuple(a + b for a, b in zip(offset, held.inner.offset, strict=True))
        yield Held(box, Box(at, box.shape))
        return
    start = held.inner.offset[0]
    steps = [math.prod(held.outer.shape[dim + 1 :]) for dim in range(len(box.shape))]
    for index in np.ndindex(*box.shape[:-1]):
        first = sum(s * (o + i) for s, o, i in zip(steps, offset, (*index, 0), strict=True))
        at = tuple(o + i for o, i in zip(box.offset, (*index, 0), strict=True))
        row = Box(at, (*[1] * len(index), box.shape[-1]))
        yield Held(row, Box((start + first,), (box.shape[-1],)))
