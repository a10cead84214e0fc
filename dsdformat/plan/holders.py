"""Which ranks hold the same boxes, and how many bytes of each tensor: columns over sets of ranks.

Pure. Along the axes of a mesh that replicate a tensor, ranks hold the same; so do ranks with the
same piece of a flat tensor. Tensors for which these sets of ranks are the same are one `Kind`,
and what each set holds of each of them is one array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsdformat.plan.mesh import Placement, Replicate
from dsdformat.plan.overlaps import Cell, find_cells
from dsdformat.plan.sharding import FlatSharding, MeshSharding, Sharding

__all__ = ["Kind", "Member", "Numbers", "RankNumbers", "find_kinds", "mesh_numels"]

Numbers = NDArray[np.int64]

_BLOCK_NUMBERS = 1 << 20


class Member(NamedTuple):
    """A tensor, or one cell of it, that some sets of ranks hold.

    Attributes:
        number: Of the tensor, in the order that all ranks agree on.
        sharding: Of the tensor.
        itemsize: Bytes of one element.
        cell: Which part; None for what each set holds, whatever that is.
    """

    number: int
    sharding: Sharding
    itemsize: int
    cell: Cell | None = None


@dataclass(slots=True)
class Kind:
    """Tensors that the same sets of ranks hold.

    Attributes:
        holders: A row for each set: places of its ranks among all, ascending.
        members: The tensors, in the order that all ranks agree on.
    """

    holders: Numbers
    members: list[Member] = field(default_factory=list)

    @property
    def copies(self) -> int:
        """Number of ranks in each set."""
        return int(self.holders.shape[1])

    def nbytes(self) -> Numbers:
        """Return what each set holds: a row for each member, a column for each set."""
        result = np.empty((len(self.members), len(self.holders)), np.int64)
        for rows in _bundles(self.members):
            some = [self.members[row] for row in rows]
            result[rows] = _numels(some) * _column(one.itemsize for one in some)
        return result

    def totals(self) -> Numbers:
        """Return what each set holds of all members, in bounded memory."""
        alike: dict[Any, list[Member]] = {}
        for row, member in enumerate(self.members):
            sharding, key = member.sharding, None
            if isinstance(sharding, MeshSharding):
                key = (sharding.shape, sharding.placements)
            alike.setdefault(key or row, []).append(member)
        first = [members[0] for members in alike.values()]
        weights = [sum(one.itemsize for one in members) for members in alike.values()]
        total = np.zeros(len(self.holders), np.int64)
        step = max(1, _BLOCK_NUMBERS // len(self.holders))
        for rows in _bundles(first):
            for low in range(0, len(rows), step):
                some = rows[low : low + step]
                numels = _numels([first[row] for row in some])
                total += (numels * _column(weights[row] for row in some)).sum(axis=0)
        return total


def find_kinds(members: Sequence[Member], ranks: Sequence[int]) -> list[Kind]:
    """Put tensors together that the same sets of ranks hold.

    Args:
        members: Tensors with elements, all of them spread over these ranks.
        ranks: In ascending order.

    Returns:
        The kinds, those with the smallest sets first.
    """
    kinds: dict[Any, Kind] = {}
    places = {rank: place for place, rank in enumerate(ranks)}
    known: dict[tuple[Any, ...], Numbers] = {}
    numbers = RankNumbers()
    for member in members:
        key = _kind_key(member.sharding, numbers)
        if key is not None and key not in known:
            known[key] = _placed(_holders(member.sharding), member.sharding.ranks, places)
        if key is not None and known[key].size:
            kinds.setdefault(key, Kind(known[key])).members.append(member)
            continue
        for cell in find_cells(member.sharding):
            holders = _placed(np.array([cell.holders]), member.sharding.ranks, places)
            kind = kinds.setdefault(("cell", *holders[0].tolist()), Kind(holders))
            kind.members.append(member._replace(cell=cell))
    return sorted(kinds.values(), key=lambda kind: kind.copies)


class RankNumbers:
    """Numbers for lists of ranks: equal lists have one. Each object is looked at once."""

    def __init__(self) -> None:
        self._by_id: dict[int, int] = {}
        self._by_value: dict[tuple[int, ...], int] = {}

    def of(self, ranks: tuple[int, ...]) -> int:
        """Return the number of a list that stays alive."""
        number = self._by_id.get(id(ranks))
        if number is None:
            number = self._by_value.setdefault(ranks, len(self._by_value))
            self._by_id[id(ranks)] = number
        return number


def mesh_numels(
    shapes: Numbers, mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> Numbers:
    """Count the elements of shards.

    Args:
        shapes: Global shapes, a row each.
        mesh_shape, placements: As in `MeshSharding`.

    Returns:
        A row for each shape; a column for each coordinate of the axes that shard, row-major.
    """
    axes = [
        (count, one)
        for count, one in zip(mesh_shape, placements, strict=True)
        if not isinstance(one, Replicate)
    ]
    depth = len(axes)
    sizes: list[Any] = [shapes[:, dim].reshape(-1, *[1] * depth) for dim in range(shapes.shape[1])]
    for axis, (count, one) in enumerate(axes):
        index = np.arange(count).reshape(*[-1 if at == axis else 1 for at in range(depth)])
        size = sizes[one.dim]
        parts = [_piece(size, one.split_factor, np.int64(part)) for part in range(one.split_factor)]
        sizes[one.dim] = sum(_piece(part, count, index) for part in parts)
    numels = np.ones((len(shapes), *[count for count, _ in axes]), np.int64)
    for size in sizes:
        numels *= size
    return numels.reshape(len(shapes), -1)


def _piece(size: Any, count: int, index: Any) -> Any:
    """Return the length of one of `count` pieces, cut as `torch.chunk` cuts."""
    step = -(-size // count)
    return np.clip(size - index * step, 0, step)


def _kind_key(sharding: Sharding, numbers: RankNumbers) -> tuple[Any, ...] | None:
    """Return what tells whether shardings have the same sets of ranks, if that is seen at once."""
    if isinstance(sharding, MeshSharding):
        mask = tuple(isinstance(one, Replicate) for one in sharding.placements)
        return ("mesh", numbers.of(sharding.ranks), sharding.mesh_shape, mask)
    if isinstance(sharding, FlatSharding):
        return ("flat", numbers.of(sharding.ranks), sharding.pieces)
    return None


def _holders(sharding: Sharding) -> Numbers:
    """Return positions of the ranks of each set, a row each; nothing if sets differ in size."""
    if isinstance(sharding, MeshSharding):
        copied = [isinstance(one, Replicate) for one in sharding.placements]
        axes = sorted(range(len(copied)), key=copied.__getitem__)
        copies = math.prod(n for n, one in zip(sharding.mesh_shape, copied, strict=True) if one)
        positions = np.arange(len(sharding.ranks)).reshape(sharding.mesh_shape)
        return positions.transpose(axes).reshape(-1, copies)
    assert isinstance(sharding, FlatSharding)
    pieces = np.array(sharding.pieces, np.int64)
    counts = np.unique(pieces, return_counts=True)[1]
    if counts.min() != counts.max():
        return np.empty((0, 0), np.int64)
    return np.argsort(pieces, kind="stable").reshape(len(counts), -1)


def _placed(holders: Numbers, ranks: Sequence[int], places: dict[int, int]) -> Numbers:
    """Turn positions in a sharding into places of ranks, ascending in each set."""
    found = np.array([places[rank] for rank in ranks], np.int64)
    return np.sort(found[holders], axis=1)


def _bundles(members: Sequence[Member]) -> Iterable[list[int]]:
    """Put members together that `_numels` counts in one go."""
    bundles: dict[Any, list[int]] = {}
    for row, member in enumerate(members):
        sharding = member.sharding
        key: Any = member.cell is None
        if isinstance(sharding, MeshSharding):
            key = (sharding.placements, len(sharding.shape))
        bundles.setdefault(key, []).append(row)
    return bundles.values()


def _column(values: Iterable[int]) -> Numbers:
    return np.array([[value] for value in values], np.int64)


def _numels(members: Sequence[Member]) -> Numbers:
    """Count what sets hold of members of one bundle."""
    first = members[0].sharding
    if members[0].cell is not None:
        return np.array([[one.cell.box.numel] for one in members if one.cell], np.int64)
    if isinstance(first, MeshSharding):
        shapes = np.array([one.sharding.shape for one in members], np.int64)
        shapes = shapes.reshape(len(members), len(first.shape))
        return mesh_numels(shapes, first.mesh_shape, first.placements)
    flat = [one.sharding for one in members if isinstance(one.sharding, FlatSharding)]
    pieces = np.unique(np.array(flat[0].pieces, np.int64))[None, :]
    starts, lengths = _column(one.start for one in flat), _column(one.piece_numel for one in flat)
    numels = _column(math.prod(one.shape) for one in flat)
    low: Numbers = np.clip(pieces * lengths - starts, 0, numels)
    high: Numbers = np.clip((pieces + 1) * lengths - starts, 0, numels)
    return high - low
