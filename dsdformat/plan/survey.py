"""What each rank of a mesh would read and hold, before there is any rank: columns over ranks.

Pure. Tensors that are stored, cut and placed alike are planned once, and ranks that hold the same
once, by the rules of `load_plan` and of `read_shares`: a thousand ranks times thousands of tensors
take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsdformat.boxes import Box
from dsdformat.format.checks import ChunkPlace
from dsdformat.format.codecs import RAW
from dsdformat.format.dtypes import Dtype
from dsdformat.limits import BLOCK_NBYTES_DEFAULT, MIB
from dsdformat.plan.load_plan import Chunks, LoadPlanner, Wanted
from dsdformat.plan.mesh import Placement, Shard, coordinate_of, local_boxes
from dsdformat.plan.read_shares import ReadPart, cut_reads, cut_rows, piece_nbytes, share_out

__all__ = ["RankTable", "StoredAs", "Unpacked", "WantedTensor", "survey"]

_THREADS = 8
_STAGED_NBYTES = 32 * MIB  # where what is read is cast, or goes to another device
_PASSED_NBYTES = 64 * MIB  # what goes from rank to rank, at most

Numbers = NDArray[np.int64]


class StoredAs(NamedTuple):
    """How a tensor is stored.

    Attributes:
        key: Equal for tensors that are stored alike.
        chunks: Where its elements are.
        verified: Whether whole blocks are read.
        ratio: Stored bytes over decoded ones.
        by_rows: Whether ranks that share its reads cut it by rows, as nothing is known of blocks.
    """

    key: Hashable
    chunks: Chunks
    verified: bool
    ratio: float = 1.0
    by_rows: bool = False


class WantedTensor(NamedTuple):
    """A stored tensor that the ranks of a mesh want.

    Attributes:
        stored: How it is stored.
        shape: Global shape.
        itemsize: Bytes of an element in memory.
        placements: One for each axis.
    """

    stored: StoredAs
    shape: tuple[int, ...]
    itemsize: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, eq=False)
class RankTable:
    """What each rank reads and holds, a number for each rank in the row-major order of the mesh.

    Attributes:
        mesh: Sizes of the axes by name.
        tensors: How many are loaded.
        wanted_nbytes: Stored bytes of what a rank holds.
        read_nbytes: Bytes that it reads from storage. What it gets from ranks that read for it is
            not among them. Gaps between small pieces that are read along, at most a twentieth
            more, are not counted.
        held_nbytes: Memory of the shards.
        needed_nbytes: What all ranks together have to read: what they want, and what several want
            once if they share reads.
        buffer_nbytes: Memory that reading takes beside the shards, at most.
    """

    mesh: Mapping[str, int]
    tensors: int
    wanted_nbytes: Numbers
    read_nbytes: Numbers
    held_nbytes: Numbers
    needed_nbytes: int
    buffer_nbytes: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.wanted_nbytes)

    @property
    def peak_nbytes(self) -> Numbers:
        """Memory that each rank needs at most, for what is loaded and to load it."""
        peak: Numbers = self.held_nbytes + self.buffer_nbytes
        return peak

    @property
    def over_read(self) -> float:
        """Bytes that all ranks read over those they have to; 1 if nothing is wanted."""
        needed = self.needed_nbytes
        return int(self.read_nbytes.sum()) / needed if needed else 1.0

    def alike(self) -> Iterator[range]:
        """List runs of ranks for which all numbers are equal."""
        columns = np.stack([self.wanted_nbytes, self.read_nbytes, self.held_nbytes])
        changes = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
        starts = [0, *changes.tolist(), self.world_size]
        for low, high in zip(starts, starts[1:], strict=False):
            yield range(low, high)


def survey(
    mesh: Mapping[str, int],
    wanted: Sequence[WantedTensor],
    *,
    block_nbytes: int = BLOCK_NBYTES_DEFAULT,
    share_reads: bool = True,
    writers: Sequence[int] | None = None,
) -> RankTable:
    """Count what each rank of a mesh reads and holds of some tensors.

    Args:
        mesh: Sizes of the axes by name.
        wanted: The tensors.
        block_nbytes: Of the checkpoint.
        share_reads: Whether ranks that want the same boxes read each of them once.
        writers: The rank that wrote each data file, if as many ranks have written; then tensors
            of one key must lie in the same files.

    Complexity: for each kind of tensor (stored, cut and placed alike) some 30 µs for each set of
    ranks that hold the same of it, and as much for each part that one of them reads for others.
    """
    sizes = tuple(mesh.values())
    columns = np.zeros((3, *sizes), np.int64)
    rules = _Rules(sizes, block_nbytes, share_reads, writers)
    kinds: dict[Hashable, list[WantedTensor]] = {}
    for one in wanted:
        key = (one.stored.key, one.stored.ratio, one.shape, one.itemsize, one.placements)
        kinds.setdefault(key, []).append(one)
    groups: dict[tuple[int, ...], list[_Kind]] = {}
    for alike in kinds.values():
        groups.setdefault(_cut_axes(alike[0], sizes), []).append(_Kind(alike[0], len(alike)))
    needed = 0
    for axes, group in groups.items():
        numbers, least = _numbers(rules, axes, group)
        columns += numbers
        needed += least
    passed = any(map(rules.shared, groups))
    wanted_nbytes, read_nbytes, held_nbytes = columns.reshape(3, -1)
    packed = any(one.stored.ratio != 1 for one in wanted)
    buffers = _THREADS * (2 * block_nbytes if packed else MIB) + _STAGED_NBYTES if wanted else 0
    return RankTable(
        dict(mesh),
        len(wanted),
        wanted_nbytes,
        read_nbytes,
        held_nbytes,
        needed,
        max(buffers, _PASSED_NBYTES) if passed else buffers,
    )


class _Rules(NamedTuple):
    """What holds for all tensors of a survey; see `survey`."""

    sizes: tuple[int, ...]
    block_nbytes: int
    share_reads: bool
    writers: Sequence[int] | None

    def others(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the other axes: along them ranks hold the same."""
        return tuple(size for axis, size in enumerate(self.sizes) if axis not in axes)

    def shared(self, axes: Sequence[int]) -> bool:
        """Whether ranks read for each other what is cut along these axes alone."""
        return self.share_reads and math.prod(self.others(axes)) > 1

    def read_nbytes(self, stored: StoredAs, boxes: Sequence[Box]) -> int:
        """Return how many bytes are read for some boxes of a tensor."""
        planner = LoadPlanner(self.block_nbytes, verify=stored.verified)
        planner.add(0, stored.chunks, [(at, Wanted(0, box)) for at, box in enumerate(boxes)])
        return round(planner.finish().range_nbytes * stored.ratio)


class _Kind(NamedTuple):
    """Tensors that are stored, cut and placed alike: one of them, and how many there are."""

    one: WantedTensor
    number: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element as it is stored."""
        return self.one.stored.chunks.dtype.itemsize


def _cut_axes(one: WantedTensor, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        axis
        for axis, (placement, size) in enumerate(zip(one.placements, sizes, strict=True))
        if isinstance(placement, Shard) and size > 1
    )


def _numbers(rules: _Rules, axes: tuple[int, ...], kinds: Sequence[_Kind]) -> tuple[Numbers, int]:
    """Count for tensors that are cut along the same axes.

    Returns:
        Bytes wanted, read and held by each rank, and how many all have to read.
    """
    sizes, others, shared = rules.sizes, rules.others(axes), rules.shared(axes)
    cut = [sizes[axis] for axis in axes]
    numbers = np.zeros((3, *sizes), np.int64)
    needed = 0
    known: dict[Hashable, Sequence[int]] = {}
    for position in range(math.prod(cut)):
        place: list[Any] = [slice(None)] * len(sizes)
        coordinate = [0] * len(sizes)
        for axis, index in zip(axes, coordinate_of(position, cut), strict=True):
            place[axis] = coordinate[axis] = index
        own = [_Own.of(kind, sizes, coordinate) for kind in kinds]
        wanted = sum(one.numel * one.kind.itemsize for one in own)
        numbers[(0, *place)] = wanted
        numbers[(2, *place)] = sum(one.numel * one.kind.one.itemsize for one in own)
        if shared:
            ranks = np.arange(math.prod(sizes)).reshape(sizes)[tuple(place)].ravel().tolist()
            read = np.reshape(_shares(rules, own, wanted, ranks, known), others)
        else:
            read = np.asarray(sum(one.kind.number * rules.read_nbytes(*one[1:]) for one in own))
        numbers[(1, *place)] = read
        needed += wanted if shared else wanted * math.prod(others)
    return numbers, needed


class _Own(NamedTuple):
    """What some ranks hold of each tensor of a kind, and how the tensors are stored."""

    kind: _Kind
    stored: StoredAs
    boxes: list[Box]

    @staticmethod
    def of(kind: _Kind, sizes: Sequence[int], coordinate: Sequence[int]) -> _Own:
        """Return what the rank of a coordinate holds."""
        one = kind.one
        pairs = local_boxes(one.shape, sizes, one.placements, coordinate)
        return _Own(kind, one.stored, [box for box, _ in pairs])

    @property
    def numel(self) -> int:
        """Number of elements, of all tensors of the kind."""
        return self.kind.number * sum(box.numel for box in self.boxes)


class _Cost(NamedTuple):
    """What one rank reads for others: its decoded bytes, those it reads, and who has written it."""

    nbytes: int
    read_nbytes: int
    writer: int | None


def _shares(
    rules: _Rules,
    own: Sequence[_Own],
    nbytes: int,
    ranks: Sequence[int],
    known: dict[Hashable, Sequence[int]],
) -> Sequence[int]:
    """Return what each of some ranks reads, which all want the same.

    Args:
        rules: Those of the survey.
        own: What each of them holds.
        nbytes: Of all of it.
        ranks: Their numbers, ascending.
        known: What is found, by what it depends on.
    """
    piece = piece_nbytes(nbytes, len(ranks))
    places = {rank: place for place, rank in enumerate(ranks)}
    costs = tuple(
        (_Cost(part.nbytes, read, _writer(rules, part, places)), one.kind.number)
        for one in own
        for part, read in _parts(rules, one, piece)
    )
    if costs not in known:
        flat = [cost for cost, number in costs for _ in range(number)]
        readers = share_out([c.nbytes for c in flat], [c.writer for c in flat], len(ranks))
        totals = [0] * len(ranks)
        for cost, reader in zip(flat, readers, strict=True):
            totals[reader] += cost.read_nbytes
        known[costs] = totals
    return known[costs]


def _writer(rules: _Rules, part: ReadPart, places: Mapping[int, int]) -> int | None:
    return None if rules.writers is None else places.get(rules.writers[part.file])


def _parts(rules: _Rules, own: _Own, piece: int) -> Iterator[tuple[ReadPart, int]]:
    """Cut what several ranks want of a tensor, and say how many bytes are read for each part."""
    stored = own.stored
    for box in own.boxes:
        if stored.by_rows:
            parts = cut_rows(box, own.kind.itemsize, piece)
        else:
            parts = cut_reads(stored.chunks, box, rules.block_nbytes, piece)
        for part in parts:
            yield part, rules.read_nbytes(stored, part.boxes)


class Unpacked(NamedTuple):
    """Compressed chunks as they would be if they were not.

    Attributes:
        dtype: Of the tensor.
        chunks: As they are.
    """

    dtype: Dtype
    chunks: Chunks

    def meeting(self, box: Box) -> Iterator[ChunkPlace]:
        """List the chunks that may meet a box."""
        for place in self.chunks.meeting(box):
            yield place._replace(codec=RAW, stored_nbytes=place.nbytes, frames=(), frame_at=())
