"""What each rank of a mesh would read and hold, before there is any rank: columns over ranks.

Pure. Tensors that are stored, cut and placed alike are planned once, and ranks that hold the same
once, by the rule of `load_plan`: a thousand ranks times thousands of tensors take seconds.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsdformat.boxes import Box
from dsdformat.errors import ArgumentError, shorten
from dsdformat.format.checks import ChunkPlace
from dsdformat.format.codecs import RAW
from dsdformat.format.dtypes import Dtype
from dsdformat.limits import BLOCK_NBYTES_DEFAULT, MIB
from dsdformat.plan.load_plan import Chunks, LoadPlanner, Wanted
from dsdformat.plan.mesh import Placement, Replicate, Shard, coordinate_of, local_boxes

__all__ = [
    "RankTable",
    "Rule",
    "StoredAs",
    "Unpacked",
    "WantedTensor",
    "check_mesh",
    "place",
    "survey",
]

# Axes along which parameters are cut by rows unless a rule says otherwise, as FSDP2 does.
_SHARDING = ("fsdp", "shard", "dp_shard", "dp_shard_cp")
_WORLD_SIZE_MAX = 1 << 20
_THREADS = 8
_STAGED_NBYTES = 32 * MIB  # where what is read is cast, or goes to another device

Numbers = NDArray[np.int64]


class Rule(NamedTuple):
    """How tensors are placed along one axis of a mesh.

    Attributes:
        glob: Of display names; `*` also matches `/` and `.`.
        dim: The dim that is cut, from the end if negative; None for replicas.
        axis: Name of the axis.
    """

    glob: str
    dim: int | None
    axis: str


class StoredAs(NamedTuple):
    """How a tensor is stored.

    Attributes:
        key: Equal for tensors that are stored alike.
        chunks: Where its elements are.
        verified: Whether whole blocks are read.
        ratio: Stored bytes over decoded ones.
    """

    key: Hashable
    chunks: Chunks
    verified: bool
    ratio: float = 1.0


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
        read_nbytes: Bytes that are read for them. Gaps between small ones that are read along, at
            most a twentieth more, are not counted; nor is that ranks may read for each other.
        held_nbytes: Memory of the shards.
        buffer_nbytes: Memory that reading takes beside them, at most.
    """

    mesh: Mapping[str, int]
    tensors: int
    wanted_nbytes: Numbers
    read_nbytes: Numbers
    held_nbytes: Numbers
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
        """Bytes read over bytes wanted, of all ranks; 1 if nothing is wanted."""
        wanted = int(self.wanted_nbytes.sum())
        return int(self.read_nbytes.sum()) / wanted if wanted else 1.0

    def alike(self) -> Iterator[range]:
        """List runs of ranks for which all numbers are equal."""
        columns = np.stack([self.wanted_nbytes, self.read_nbytes, self.held_nbytes])
        changes = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
        starts = [0, *changes.tolist(), self.world_size]
        for low, high in zip(starts, starts[1:], strict=False):
            yield range(low, high)


def check_mesh(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the axes of a mesh.

    Raises:
        ArgumentError: `bad_argument`.
    """
    fine = isinstance(mesh, Mapping) and all(
        type(name) is str and type(size) is int and size >= 1 for name, size in mesh.items()
    )
    if not fine or math.prod(mesh.values()) > _WORLD_SIZE_MAX:
        raise ArgumentError(
            f"a mesh has sizes by the names of its axes, and up to {_WORLD_SIZE_MAX:,} ranks; "
            f"got {shorten(mesh)}",
            code="bad_argument",
        )
    return dict(mesh)


def place(
    name: str,
    shape: Sequence[int],
    mesh: Mapping[str, int],
    rules: Iterable[Rule] = (),
    *,
    by_rows: bool = True,
) -> tuple[Placement, ...]:
    """Return the placements of a tensor: of the first rule for each axis that has its name.

    Args:
        name: Display name.
        shape: Global shape.
        mesh: Sizes of the axes by name.
        rules: What is said of some.
        by_rows: Whether axes called `fsdp`, `shard` or `dp_shard` cut what has no rule by rows,
            after the other axes have cut it, as FSDP2 does; else there are replicas.

    Raises:
        ArgumentError: `bad_argument`: a rule with a dim that the tensor does not have.
    """
    dims: dict[str, int | None] = dict.fromkeys(mesh)
    ruled: set[str] = set()
    for rule in rules:
        if rule.axis in dims and rule.axis not in ruled and fnmatch.fnmatchcase(name, rule.glob):
            ruled.add(rule.axis)
            dims[rule.axis] = _dim(rule, name, len(shape))
    cut = by_rows and bool(shape)
    late = [axis for axis in mesh if cut and axis in _SHARDING and axis not in ruled]
    dims.update(dict.fromkeys(late, 0))
    axes = list(mesh)
    placements: list[Placement] = []
    for number, axis in enumerate(axes):
        dim = dims[axis]
        if dim is None:
            placements.append(Replicate())
            continue
        after = [one for one in axes[number + 1 :] if one not in late and dims[one] == dim]
        factor = math.prod(mesh[one] for one in after) if axis in late else 1
        placements.append(Shard(dim, factor))
    return tuple(placements)


def _dim(rule: Rule, name: str, ndim: int) -> int | None:
    if rule.dim is None or ndim == 0:
        return None
    if not -ndim <= rule.dim < ndim:
        raise ArgumentError(
            f"{shorten(name)} has {ndim} dims, and the rule {shorten(rule.glob)} cuts dim "
            f"{rule.dim} along {rule.axis}",
            code="bad_argument",
        )
    return rule.dim % ndim


def survey(
    mesh: Mapping[str, int],
    wanted: Sequence[WantedTensor],
    *,
    block_nbytes: int = BLOCK_NBYTES_DEFAULT,
) -> RankTable:
    """Count what each rank of a mesh reads and holds of some tensors.

    Args:
        mesh: Sizes of the axes by name.
        wanted: The tensors.
        block_nbytes: Of the checkpoint.

    Complexity: for each kind of tensor (stored, cut and placed alike) some 30 µs for each set of
    ranks that hold the same of it.
    """
    sizes = tuple(mesh.values())
    columns = np.zeros((3, *sizes), np.int64)
    kinds: dict[Hashable, list[WantedTensor]] = {}
    for one in wanted:
        key = (one.stored.key, one.stored.ratio, one.shape, one.itemsize, one.placements)
        kinds.setdefault(key, []).append(one)
    for alike in kinds.values():
        columns += len(alike) * _numbers(alike[0], sizes, block_nbytes)
    wanted_nbytes, read_nbytes, held_nbytes = columns.reshape(3, -1)
    packed = any(one.stored.ratio != 1 for one in wanted)
    each = 2 * block_nbytes if packed else MIB
    return RankTable(
        dict(mesh),
        len(wanted),
        wanted_nbytes,
        read_nbytes,
        held_nbytes,
        _THREADS * each + _STAGED_NBYTES if wanted else 0,
    )


def _numbers(one: WantedTensor, sizes: Sequence[int], block_nbytes: int) -> Numbers:
    """Return bytes wanted, read and held by each rank, of one tensor."""
    axes = [number for number, kind in enumerate(one.placements) if isinstance(kind, Shard)]
    cut = [sizes[number] for number in axes]
    numbers = np.zeros((3, math.prod(cut)), np.int64)
    coordinate = [0] * len(sizes)
    itemsize = one.stored.chunks.dtype.itemsize
    for position in range(numbers.shape[1]):
        for axis, index in zip(axes, coordinate_of(position, cut), strict=True):
            coordinate[axis] = index
        pairs = local_boxes(one.shape, sizes, one.placements, coordinate)
        boxes = [Wanted(0, outer) for outer, _ in pairs]
        planner = LoadPlanner(block_nbytes, verify=one.stored.verified)
        planner.add(0, one.stored.chunks, list(enumerate(boxes)))
        numel = sum(box.box.numel for box in boxes)
        read = round(planner.finish().range_nbytes * one.stored.ratio)
        numbers[:, position] = numel * itemsize, read, numel * one.itemsize
    spread = [size if number in axes else 1 for number, size in enumerate(sizes)]
    each: Numbers = numbers.reshape(3, *spread)
    return each


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
