"""Where the boxes of one tensor are: on which ranks, and where in the shard of each.

Pure. Three ways of spreading a tensor: over a mesh by placements, as ranges of flat shards, and
by a table of boxes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dsdformat.boxes import Box, flat_boxes
from dsdformat.plan.mesh import Placement, Replicate, coordinate_of, local_boxes, local_shape

__all__ = ["BoxSharding", "FlatSharding", "Held", "MeshSharding", "Sharding", "on_each"]


class Held(NamedTuple):
    """A box that a rank holds.

    Attributes:
        outer: In elements of the tensor.
        inner: Where the shard holds it: a box of equal shape, or a range of a flat shard.
        order: Of dims in a flat shard, outermost first; None for row-major.
    """

    outer: Box
    inner: Box
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Sharding(ABC):
    """How a tensor is spread.

    Attributes:
        shape: Global shape.
        ranks: Global ranks that hold some of it; a rank's position is its place in here.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @abstractmethod
    def held(self, position: int) -> list[Held]:
        """List what a rank holds."""

    @abstractmethod
    def is_first(self, position: int) -> bool:
        """Whether a rank is the first of those that hold the same boxes."""

    @abstractmethod
    def shard_shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of the shard of a rank."""

    @abstractmethod
    def describe(self) -> Any:
        """Return plain values that are equal on all ranks, and tell shardings apart."""

    def copies(self) -> int:
        """Return how often the tensor is held, over all ranks."""
        numel = math.prod(self.shape)
        held = sum(one.outer.numel for p in range(len(self.ranks)) for one in self.held(p))
        return -(-held // numel) if numel else 1


@dataclass(frozen=True)
class MeshSharding(Sharding):
    """Spread over a mesh.

    Attributes:
        mesh_shape: Number of ranks along each axis; `ranks` are those of the mesh, row-major.
        placements: One for each axis.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, as shardings are looked up often, and have long lists of ranks."""
        return hash((self.shape, self.ranks, self.mesh_shape, self.placements))

    @cached_property
    def _held(self) -> dict[int, tuple[Held, ...]]:
        """What one position holds, that was asked for last: a rank asks for its own again."""
        return {}

    def held(self, position: int) -> list[Held]:
        found = self._held.get(position)
        if found is None:
            coordinate = coordinate_of(position, self.mesh_shape)
            pairs = local_boxes(self.shape, self.mesh_shape, self.placements, coordinate)
            found = tuple(Held(outer, inner) for outer, inner in pairs)
            self._held.clear()
            self._held[position] = found
        return list(found)

    def is_first(self, position: int) -> bool:
        coordinate = coordinate_of(position, self.mesh_shape)
        return all(
            index == 0
            for index, placement in zip(coordinate, self.placements, strict=True)
            if isinstance(placement, Replicate)
        )

    def shard_shape(self, position: int) -> tuple[int, ...]:
        coordinate = coordinate_of(position, self.mesh_shape)
        return local_shape(self.shape, self.mesh_shape, self.placements, coordinate)

    def describe(self) -> Any:
        return [list(self.mesh_shape), [str(one) for one in self.placements]]

    def copies(self) -> int:
        sizes = zip(self.mesh_shape, self.placements, strict=True)
        return math.prod(size for size, one in sizes if isinstance(one, Replicate))


@dataclass(frozen=True)
class FlatSharding(Sharding):
    """A range of a flat tensor that is cut into pieces of equal length.

    Attributes:
        start: Where the flat tensor has the first element of this one.
        piece_numel: Elements of each piece.
        pieces: Which piece each rank has.
        order: Of dims in memory, outermost first; None for row-major.
    """

    start: int
    piece_numel: int
    pieces: tuple[int, ...]
    order: tuple[int, ...] | None = None

    def local_range(self, position: int) -> tuple[int, int]:
        """Return the part of the tensor that a rank holds: elements, in the order of memory."""
        low = self.pieces[position] * self.piece_numel - self.start
        numel = math.prod(self.shape)
        return min(max(low, 0), numel), min(max(low + self.piece_numel, 0), numel)

    def held(self, position: int) -> list[Held]:
        start, stop = self.local_range(position)
        order = self.order
        shape = self.shape if order is None else tuple(self.shape[dim] for dim in order)
        result, at = [], 0
        for box in flat_boxes(shape, start, stop):
            inner = Box((at,), (box.numel,))
            result.append(Held(box if order is None else _permuted(box, order), inner, order))
            at += box.numel
        return result

    def is_first(self, position: int) -> bool:
        return self.pieces.index(self.pieces[position]) == position

    def shard_shape(self, position: int) -> tuple[int, ...]:
        start, stop = self.local_range(position)
        return (stop - start,)

    def describe(self) -> Any:
        return [self.start, self.piece_numel, list(self.order or ())]


@dataclass(frozen=True)
class BoxSharding(Sharding):
    """Spread by a table.

    Attributes:
        table: What each rank holds.
        shapes: Of the shards.
    """

    table: tuple[tuple[Held, ...], ...]
    shapes: tuple[tuple[int, ...], ...]

    def held(self, position: int) -> list[Held]:
        return list(self.table[position])

    def is_first(self, position: int) -> bool:
        mine = [one.outer for one in self.table[position]]
        others = self.table[:position]
        return all([one.outer for one in row] != mine for row in others)

    def shard_shape(self, position: int) -> tuple[int, ...]:
        return self.shapes[position]

    def describe(self) -> Any:
        return [[[list(one.outer.offset), list(one.outer.shape)] for one in r] for r in self.table]


def on_each(shape: Sequence[int], ranks: Sequence[int]) -> MeshSharding:
    """Return the sharding of a tensor that each rank has whole."""
    return MeshSharding(tuple(shape), tuple(ranks), (len(ranks),), (Replicate(),))


def _permuted(box: Box, order: Sequence[int]) -> Box:
    """Return a box of the tensor for one of its dims in another order."""
    at = [order.index(dim) for dim in range(len(order))]
    return Box(tuple(box.offset[i] for i in at), tuple(box.shape[i] for i in at))
