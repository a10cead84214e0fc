"""What each rank of a mesh would read and hold, before there is any rank: columns over ranks.

Pure. Tensors that are stored, cut and placed alike are planned once, and ranks that hold the same
once, by the rules of `load_plan`, of `read_shares` and of blocks that are shared: a thousand ranks
times thousands of tensors take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsdformat.boxes import Box
from dsdformat.format.checks import ChunkPlace
from dsdformat.format.codecs import RAW
from dsdformat.format.dtypes import Dtype
from dsdformat.limits import BLOCK_NBYTES_DEFAULT, MIB
from dsdformat.plan.block_readers import BlockSet, share_blocks
from dsdformat.plan.block_shares import BUCKET_NBYTES, is_worth_it
from dsdformat.plan.block_tally import BlockTally
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
            once if they share reads. Of a block only what is wanted counts, whoever reads it.
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
        share_reads: Whether ranks that want the same boxes read each of them once, and, if blocks
            would else be read too often, those that want parts of the same blocks each of these.
        writers: The rank that wrote each data file, if as many ranks have written; then tensors
            of one key must lie in the same files.

    Complexity: for each kind of tensor (stored, cut and placed alike) some 30 µs for each set of
    ranks that hold the same of it, and as much for each part that one of them reads for others;
    and as `BlockTally`.
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
    needed = extra = 0
    for axes, group in groups.items():
        numbers, least, more = _numbers(rules, axes, group)
        columns += numbers
        needed += least
        extra += more
    passed = any(map(rules.shared, groups))
    wanted_nbytes, read_nbytes, held_nbytes = columns.reshape(3, -1)
    packed = any(one.stored.ratio != 1 for one in wanted)
    reading = _THREADS * (2 * block_nbytes if packed else MIB)
    buffers = reading + _STAGED_NBYTES if wanted else 0
    buffers = max(buffers, _PASSED_NBYTES) if passed else buffers
    if share_reads and is_worth_it([(int(wanted_nbytes.sum()), extra)]):
        changes = _block_changes(rules, groups)
        if changes is not None:
            read_nbytes = read_nbytes + changes
            buffers = max(buffers, 5 * max(BUCKET_NBYTES, block_nbytes) + reading)
    return RankTable(
        dict(mesh), len(wanted), wanted_nbytes, read_nbytes, held_nbytes, needed, buffers
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

    def alone(self, axes: Sequence[int]) -> bool:
        """Whether what is cut along these axes is wanted by one rank each."""
        return math.prod(self.others(axes)) == 1

    def shared(self, axes: Sequence[int]) -> bool:
        """Whether ranks read for each other what is cut along these axes alone."""
        return self.share_reads and not self.alone(axes)

    def read_nbytes(self, stored: StoredAs, boxes: Sequence[Box]) -> int:
        """Return how many bytes are read for some boxes of a tensor."""
        planner = LoadPlanner(self.block_nbytes, verify=stored.verified)
        planner.add(0, stored.chunks, [(at, Wanted(0, box)) for at, box in enumerate(boxes)])
        return round(planner.finish().range_nbytes * stored.ratio)

    def coordinates(self, axes: Sequence[int]) -> Iterator[list[int]]:
        """List the coordinates of the first rank at each position along these axes."""
        cut = [self.sizes[axis] for axis in axes]
        for position in range(math.prod(cut)):
            coordinate = [0] * len(self.sizes)
            for axis, index in zip(axes, coordinate_of(position, cut), strict=True):
                coordinate[axis] = index
            yield coordinate

    def tally(self, own: Sequence[_Own]) -> BlockTally:
        """Return what is wanted of the blocks of a tensor by ranks that hold this of it."""
        one = own[0].kind.one
        return BlockTally(
            one.stored.chunks, one.shape, [some.boxes for some in own], self.block_nbytes
        )


class _Kind(NamedTuple):
    """Tensors that are stored, cut and placed alike: one of them, and how many there are."""

    one: WantedTensor
    number: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element as it is stored."""
        return self.one.stored.chunks.dtype.itemsize

    def is_in_blocks(self, axes: Sequence[int]) -> bool:
        """Whether whole blocks are read of what is cut along these axes, some of them in part."""
        return bool(axes) and self.one.stored.verified


def _cut_axes(one: WantedTensor, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        axis
        for axis, (placement, size) in enumerate(zip(one.placements, sizes, strict=True))
        if isinstance(placement, Shard) and size > 1
    )


def _numbers(
    rules: _Rules, axes: tuple[int, ...], kinds: Sequence[_Kind]
) -> tuple[Numbers, int, int]:
    """Count for tensors that are cut along the same axes.

    Returns:
        Bytes wanted, read and held by each rank, how many all have to read, and how many of whole
        blocks nobody wants where each reads by itself.
    """
    sizes, others, shared = rules.sizes, rules.others(axes), rules.shared(axes)
    cut = [size if axis in axes else 1 for axis, size in enumerate(sizes)]
    alone = np.zeros((3, math.prod(cut)), np.int64)
    extra = 0
    for kind in kinds:
        own = [_Own.of(kind, sizes, one) for one in rules.coordinates(axes)]
        numel = np.array([one.numel for one in own], np.int64)
        alone[0] += numel * kind.itemsize
        alone[2] += numel * kind.one.itemsize
        if kind.is_in_blocks(axes):
            nbytes, more = rules.tally(own).count()
            read = np.rint(nbytes * kind.one.stored.ratio).astype(np.int64)
            alone[1] += kind.number * read
            extra += kind.number * more * math.prod(others)
        elif not shared:
            alone[1] += [kind.number * rules.read_nbytes(*one[1:]) for one in own]
    numbers = np.broadcast_to(alone.reshape(3, *cut), (3, *sizes)).copy()
    if shared:
        numbers[1] = _shared(rules, axes, kinds)
    return numbers, int(alone[0].sum()) * (1 if shared else math.prod(others)), extra


def _shared(rules: _Rules, axes: Sequence[int], kinds: Sequence[_Kind]) -> Numbers:
    """Count what is read by each rank, where those at one position along the axes share reads."""
    sizes = rules.sizes
    numbers = np.zeros(sizes, np.int64)
    world = np.arange(math.prod(sizes)).reshape(sizes)
    known: dict[Hashable, Sequence[int]] = {}
    for coordinate in rules.coordinates(axes):
        place = tuple(
            index if axis in axes else slice(None) for axis, index in enumerate(coordinate)
        )
        own = [_Own.of(kind, sizes, coordinate) for kind in kinds]
        wanted = sum(one.numel * one.kind.itemsize for one in own)
        ranks = world[place].ravel().tolist()
        numbers[place] = np.reshape(_shares(rules, own, wanted, ranks, known), rules.others(axes))
    return numbers


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


def _block_changes(rules: _Rules, groups: Mapping[tuple[int, ...], list[_Kind]]) -> Numbers | None:
    """Return how much more ranks read, or less, if they share blocks; None if there are none."""

    def find() -> Iterator[BlockSet]:
        for axes, kinds in groups.items():
            for kind in kinds:
                if rules.alone(axes) and kind.is_in_blocks(axes):
                    own = [_Own.of(kind, rules.sizes, one) for one in rules.coordinates(axes)]
                    partial = rules.tally(own).partial()
                    yield BlockSet(partial, kind.number, kind.one.stored.ratio)

    return share_blocks(find(), math.prod(rules.sizes), rules.writers)


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
