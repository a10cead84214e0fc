"""Which rank writes which boxes: every element once, evenly by bytes, without any communication.

Pure. Each rank calls this with the tensors that it holds some of, in an order that all agree on,
and finds its own share. Ranks that hold the same box find the same writer for it, since they
reckon with the same tensors:

- Tensors are taken by the set of ranks over which they are spread, the largest sets first. What a
  rank has to write of tensors of a set counts for all sets that lie within it. All ranks of a set
  know its tensors and those of sets around it; what only some know counts for nothing. So the
  stages of a pipeline, which know nothing of each other, are each even in itself.
- A box that one rank holds is written by it.
- The others follow by the number of their holders, those with the fewest first; the largest box
  first; each goes to the holder that has the least to write so far, of equal ones the lowest rank.
- A box that would upset the balance is cut: by rows, into pieces of at least 16 MiB, and at least
  a twentieth of what each of these ranks would have to write. A row is one of the outermost dim
  in memory, and pieces are whole pages where rows allow it.
- Boxes that overlap in part are cut into cells first; see `overlaps`.
- A tensor without elements is written, as nothing, by the lowest rank of its set.

The shares of all ranks differ by no more than the largest piece, a tenth or 32 MiB, if each box
has all ranks of its set as holders; and as little as the rest allows if not.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsdformat.boxes import Box, flat_boxes, whole
from dsdformat.limits import MIB
from dsdformat.plan.holders import Kind, Member, Numbers, RankNumbers, find_kinds
from dsdformat.plan.overlaps import held_within
from dsdformat.plan.sharding import Held, MeshSharding, Sharding

__all__ = ["SPLIT_NBYTES", "plan_save"]

SPLIT_NBYTES = 16 * MIB
_SHARE = 20  # so that a box of a tenth of a rank's share is cut into two
_PAGE_NBYTES = 4096


def plan_save(
    tensors: Sequence[tuple[Sharding, int]], rank: int, *, piece_nbytes: int = SPLIT_NBYTES
) -> list[list[Held]]:
    """Choose what a rank writes.

    Args:
        tensors: How each is spread, and bytes of one element; in the order that all ranks agree
            on. Tensors that the rank holds nothing of make no difference.
        rank: The global rank that asks.
        piece_nbytes: Boxes are cut into pieces of no less.

    Returns:
        For each tensor what of its shard the rank writes; none, mostly, of what others have too.
        Of a tensor without elements, the one box is the whole of it.

    Ranks: local. All holders of a box must call it alike.
    Complexity: linear in the tensors; and, where ranks hold the same boxes, in the ranks.
    """
    result: list[list[Held]] = [[] for _ in tensors]
    groups = _find_groups(tensors, rank, result)
    shards = _Shards(rank)
    for at, group in enumerate(groups):
        later = any(other.is_shared for other in groups[at + 1 :])
        loads = np.zeros(len(group.ranks), np.int64)
        for around in groups[:at]:
            loads += around.loads_of(group.ranks)
        share = _Share(group, rank, piece_nbytes, loads.copy())
        for task in share.tasks(all_sets=later):
            result[task.member.number] += _pieces(task, shards.of(task.member))
        group.loads = share.loads - loads
    return result


class _Task(NamedTuple):
    """One of some pieces of what a rank holds of a tensor."""

    member: Member
    piece: int = 0
    pieces: int = 1


@dataclass(slots=True)
class _Group:
    """Tensors that are spread over one set of ranks.

    Attributes:
        ranks: Ascending.
        kinds: By the number of holders.
        loads: Bytes of them that each rank writes, once that is known.
    """

    ranks: tuple[int, ...]
    kinds: list[Kind]
    loads: Numbers | None = None

    @property
    def is_shared(self) -> bool:
        """Whether some boxes have several holders."""
        return any(kind.copies > 1 for kind in self.kinds)

    def loads_of(self, ranks: Sequence[int]) -> Numbers:
        """Return the loads of some ranks; zeros if the group does not have all of them."""
        assert self.loads is not None
        if not set(ranks) <= set(self.ranks):
            return np.zeros(len(ranks), np.int64)
        return self.loads[np.searchsorted(self.ranks, ranks)]


class _Share:
    """The share of one rank in a group.

    Attributes:
        loads: Bytes that each rank has to write so far.
    """

    def __init__(self, group: _Group, rank: int, piece_nbytes: int, loads: Numbers) -> None:
        self.loads = loads
        self._kinds = group.kinds
        self._place = group.ranks.index(rank)
        self._piece_nbytes = piece_nbytes

    def tasks(self, *, all_sets: bool) -> Iterator[_Task]:
        """List what the rank does.

        Args:
            all_sets: Whether the loads of all ranks must be known at the end.
        """
        for number, kind in enumerate(self._kinds):
            rest = self._kinds[number + 1 :]
            matters = all_sets or any(other.copies > 1 for other in rest)
            mine = np.argwhere(kind.holders == self._place)
            if kind.copies > 1:
                yield from self._shared(kind, mine, all_sets=matters)
                continue
            if matters:
                np.add.at(self.loads, kind.holders[:, 0], kind.totals())
            if len(mine):
                yield from map(_Task, kind.members)

    def _shared(self, kind: Kind, mine: NDArray[np.intp], *, all_sets: bool) -> Iterator[_Task]:
        """Give each box, or piece, to the holder that has the least to write, the largest first."""
        nbytes = kind.nbytes()
        piece_nbytes = max(self._piece_nbytes, int(nbytes.sum()) // kind.holders.size // _SHARE)
        pieces = np.clip(nbytes.max(axis=1) // piece_nbytes, 1, kind.copies)
        own, turn = mine[0].tolist() if len(mine) else (-1, -1)
        for column in range(len(kind.holders)) if all_sets else ([own] if own >= 0 else []):
            ranks = kind.holders[column]
            each = nbytes[:, column] // pieces
            order = np.argsort(-each, kind="stable")
            items = zip(order.tolist(), each[order].tolist(), pieces[order].tolist(), strict=True)
            heap = _Heap(self.loads[ranks].tolist())
            for row, size, count in items:
                if not nbytes[row, column]:
                    continue
                for piece in range(count):
                    if heap.add(size) == turn and column == own:
                        yield _Task(kind.members[row], piece, count)
            self.loads[ranks] = heap.loads()


class _Heap:
    """The loads of some ranks: load and place as one number, the least in front."""

    def __init__(self, loads: Sequence[int]) -> None:
        self._count = len(loads)
        self._heap = [load * self._count + place for place, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def add(self, nbytes: int) -> int:
        """Give that much to the rank with the least load, and return its place."""
        first = self._heap[0]
        heapq.heapreplace(self._heap, first + nbytes * self._count)
        return first % self._count

    def loads(self) -> list[int]:
        """Return the loads by place."""
        loads = [0] * self._count
        for one in self._heap:
            loads[one % self._count] = one // self._count
        return loads


class _Shards:
    """What a rank holds of tensors; equal tensors are looked at once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers = RankNumbers()
        self._positions: dict[int, int] = {}
        self._known: dict[tuple[Any, ...], list[Held]] = {}

    def of(self, member: Member) -> list[Held]:
        """Return what the rank holds of a tensor, or of a cell of it."""
        sharding = member.sharding
        number = self._numbers.of(sharding.ranks)
        if number not in self._positions:
            self._positions[number] = sharding.ranks.index(self._rank)
        position = self._positions[number]
        if isinstance(sharding, MeshSharding):
            key = (number, sharding.mesh_shape, sharding.placements, sharding.shape)
            if key not in self._known:
                self._known[key] = sharding.held(position)
            return self._known[key]
        held = sharding.held(position)
        if member.cell is None:
            return held
        box = member.cell.box
        return held_within(next(one for one in held if box.intersect(one.outer) == box), box)


def _find_groups(
    tensors: Sequence[tuple[Sharding, int]], rank: int, result: list[list[Held]]
) -> list[_Group]:
    """Put the tensors of a rank together by their sets of ranks, the largest sets first.

    Those without elements have their writer at once.
    """
    members: dict[int, list[Member]] = {}
    sets: dict[int, tuple[int, ...]] = {}
    by_set: dict[tuple[int, ...], int] = {}
    numbers = RankNumbers()
    for number, (sharding, itemsize) in enumerate(tensors):
        listed = numbers.of(sharding.ranks)
        if listed not in sets:
            sets[listed] = tuple(sorted(sharding.ranks))
            by_set.setdefault(sets[listed], listed)
        ranks = sets[listed]
        if 0 in sharding.shape:
            if rank == ranks[0]:
                result[number].append(Held(whole(sharding.shape), whole(sharding.shape)))
        else:
            members.setdefault(by_set[ranks], []).append(Member(number, sharding, itemsize))
    groups = [
        _Group(sets[listed], find_kinds(some, sets[listed]))
        for listed, some in members.items()
        if rank in set(sets[listed])
    ]
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def _pieces(task: _Task, held: Sequence[Held]) -> list[Held]:
    """Return what the rank writes of each box."""
    if task.pieces == 1:
        return list(held)
    return [
        part
        for one in held
        for box in _cut_rows(one, task.member.itemsize, task.pieces)[task.piece]
        for part in held_within(one, box)
    ]


def _cut_rows(held: Held, itemsize: int, count: int) -> list[list[Box]]:
    """Cut a box by rows, in the order of memory, into lists of boxes: one each, mostly."""
    box = held.outer
    dims = held.order or tuple(range(len(box.shape)))
    depth, rows = 0, 1  # rows of the first dims, as many as it takes to have enough
    while depth < len(dims) and rows < count:
        rows *= box.shape[dims[depth]]
        depth += 1
    row_nbytes = itemsize * math.prod(box.shape[dim] for dim in dims[depth:])
    ends = _cut_evenly(rows, count, _PAGE_NBYTES // math.gcd(row_nbytes, _PAGE_NBYTES))
    outer = [box.shape[dim] for dim in dims[:depth]]
    lists = []
    for begin, end in itertools.pairwise(ends):
        boxes = []
        for piece in flat_boxes(outer, begin, end):
            offset, shape = list(box.offset), list(box.shape)
            for dim, at, size in zip(dims, piece.offset, piece.shape, strict=False):
                offset[dim], shape[dim] = offset[dim] + at, size
            boxes.append(Box(tuple(offset), tuple(shape)))
        lists.append(boxes)
    return lists


def _cut_evenly(rows: int, parts: int, unit: int) -> list[int]:
    """Return where parts end, from 0 on; whole units each, where a part has two and more."""
    if rows < 2 * unit * parts:
        unit = 1
    return [rows * part // parts // unit * unit for part in range(parts)] + [rows]
