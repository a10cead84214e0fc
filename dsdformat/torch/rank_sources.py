"""What one of several ranks stores: of each tensor the boxes that are its to write, and ties."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsdformat.boxes import Box, whole
from dsdformat.errors import ArgumentError
from dsdformat.format.bodies import find_layout_fault
from dsdformat.format.manifest import Mesh
from dsdformat.plan.kept_plans import KeptPlans
from dsdformat.plan.mesh import Replicate
from dsdformat.plan.sharding import BoxSharding, FlatSharding, Held, MeshSharding, Sharding, on_each
from dsdformat.sources import Data, Reference, TensorSource, source_of
from dsdformat.torch.agreement import Holders
from dsdformat.torch.buffers import data_of, memory_order
from dsdformat.torch.comm import Comm, fingerprint
from dsdformat.torch.dtypes import logical_dtype
from dsdformat.torch.rank_tensors import RankTensor, RankTensors, has_boxes, identity_of
from dsdformat.torch.sharding import held_view, is_dtensor, is_tensor
from dsdformat.torch.sources import ORDER, Adapter

__all__ = ["RankAdapter", "families_of", "mesh_rows", "plan_boxes"]

# For the ranks of a mesh those of all meshes that have what it has.
Families = Mapping[tuple[int, ...], Sequence[tuple[int, ...]]]
_Layout = tuple[Mesh, tuple[str, ...]] | None

_plans = KeptPlans()


class RankAdapter(Adapter):
    """Turns what a state holds into what one rank stores of it."""

    def __init__(
        self,
        comm: Comm,
        tensors: RankTensors,
        plans: Sequence[Sequence[Held]],
        holders: Holders,
    ) -> None:
        """Begin.

        Args:
            comm: The ranks that save together.
            tensors: Of the state.
            plans: Of each what this rank writes.
            holders: Which ranks have what.
        """
        super().__init__()
        self._comm = comm
        self._tensors = tensors
        self._plans = {
            one.identity: (one, plan) for one, plan in zip(tensors.once, plans, strict=True)
        }
        self._arrays = {one.path: holders.of(one.name)[0] == comm.rank for one in tensors.others}
        self._layouts: dict[Any, _Layout] = {}

    def __call__(self, value: Any, place: Sequence[Any]) -> Any:
        known = self._tensors.by_id.get(id(value))
        if known is not None:
            return self._reference(known.identity)
        if is_tensor(value) and has_boxes(value):  # a part of one that is put together
            identity = identity_of(value)
            if identity in self._plans:
                self._alive.append(value)
                return self._reference(identity)
        made = super().__call__(value, place)
        if isinstance(made, (Reference, TensorSource)) and not self._writes(place):
            source = source_of(made)
            assert isinstance(source, TensorSource)  # there are no runs
            return Reference(self._empty(source), made.attributes)
        return made

    def runs(self, values: Sequence[Any]) -> Iterator[tuple[int, None]]:
        """Give no runs: of most tensors this rank stores a part, or nothing."""
        yield len(values), None

    def _reference(self, identity: Any) -> TensorSource | Reference:
        one, plan = self._plans[identity]
        source = self._sources.get(identity)
        if source is None:
            source = self._sources[identity] = self._made(one, plan)
        order = None if one.sharding is not None else memory_order(one.local)
        return source if order is None else Reference(source, {ORDER: order})

    def _made(self, one: RankTensor, plan: Sequence[Held]) -> TensorSource:
        name, shape = logical_dtype(one.local.dtype), tuple(one.tensor.shape)
        assert name is not None  # `has_boxes` has looked
        layout = self._layout(one) if is_dtensor(one.tensor) else None
        return TensorSource.of_sound(name, shape, _chunks(one.local, shape, plan), layout)

    def _layout(self, one: RankTensor) -> _Layout:
        """Return where a DTensor came from, for people: its mesh and placements."""
        sharding, mesh = one.sharding, one.tensor.device_mesh
        assert isinstance(sharding, MeshSharding)  # that of a DTensor
        key = id(mesh), sharding.placements
        if key not in self._layouts:
            self._layouts[key] = _layout_of(self._comm, mesh, sharding)
        return self._layouts[key]

    def _writes(self, place: Sequence[Any]) -> bool:
        """Whether this rank writes what is at a place, or below one."""
        path = tuple(place)
        known = (path[:count] for count in range(len(path), 0, -1))
        return next((self._arrays[one] for one in known if one in self._arrays), True)

    def _empty(self, source: TensorSource) -> TensorSource:
        """Return the same tensor without data, which another rank writes."""
        key = ("empty", id(source))
        if key not in self._sources:
            self._alive.append(source)
            self._sources[key] = TensorSource(source.dtype, source.shape, [])
        return self._sources[key]


def plan_boxes(
    comm: Comm, tensors: Sequence[RankTensor], holders: Holders, families: Families
) -> Sequence[Sequence[Held]]:
    """Choose which boxes of each tensor this rank writes; all ranks together write each once.

    Args:
        comm: The ranks that write together.
        tensors: In the order of all ranks.
        holders: Which ranks have what.
        families: As `families_of`.

    Ranks: local. All call it alike.
    """
    known: dict[Any, Sharding] = {}  # of what is not spread
    own = comm.ranks[comm.rank]
    spreads = []
    for one in tensors:
        sharding = one.sharding
        if sharding is None:
            sharding = _on_writers(comm, one, holders.writers(one.name), known)
        else:
            meshes = families.get(sharding.ranks, ())
            if len(meshes) > 1:
                sharding = _repeated(sharding, meshes)
            if not isinstance(sharding, MeshSharding):
                sharding = _of_holders(sharding, own)
        spreads.append((sharding, one.local.dtype.itemsize))
    return _plans.plan(spreads, own)


def mesh_rows(comm: Comm, tensors: Sequence[RankTensor]) -> list[Any]:
    """Return what a rank tells others of the meshes that some of the ranks make.

    The first rank of a mesh tells what is on it.
    """
    own = comm.ranks[comm.rank]
    on_mesh: dict[tuple[int, ...], list[RankTensor]] = {}
    for one in tensors:
        if one.sharding is not None and len(one.sharding.ranks) < comm.world_size:
            on_mesh.setdefault(one.sharding.ranks, []).append(one)
    return [
        [list(ranks), fingerprint([_described(one) for one in some])]
        for ranks, some in on_mesh.items()
        if min(ranks) == own
    ]


def _described(one: RankTensor) -> list[Any]:
    assert one.sharding is not None
    return [one.name, list(one.sharding.shape), one.sharding.describe()]


def families_of(told: Sequence[Any]) -> Families:
    """Find meshes that have the same tensors, as the parts of a larger mesh along one axis.

    Args:
        told: The `mesh_rows` of all ranks.

    Returns:
        For the ranks of each mesh those of all that have what it has, in order.
    """
    found: dict[bytes, list[tuple[int, ...]]] = {}
    for rows in told:
        for ranks, one in rows:
            found.setdefault(one, []).append(tuple(ranks))
    return {ranks: sorted(meshes) for meshes in found.values() for ranks in meshes}


def _on_writers(
    comm: Comm, one: RankTensor, writers: Sequence[int], known: dict[Any, Sharding]
) -> Sharding:
    """Return how a tensor is spread that some ranks have whole: one object for equal ones."""
    shape = tuple(one.tensor.shape)
    key = shape, writers if type(writers) is range else tuple(writers)
    if key not in known:
        known[key] = on_each(shape, tuple(comm.ranks[rank] for rank in writers))
    return known[key]


def _repeated(sharding: Sharding, meshes: Sequence[tuple[int, ...]]) -> Sharding:
    """Return how a tensor is spread that each of several meshes has."""
    ranks = tuple(itertools.chain(*meshes))
    if isinstance(sharding, MeshSharding):
        shape = (len(meshes), *sharding.mesh_shape)
        return MeshSharding(sharding.shape, ranks, shape, (Replicate(), *sharding.placements))
    if isinstance(sharding, FlatSharding):
        return replace(sharding, ranks=ranks, pieces=sharding.pieces * len(meshes))
    assert isinstance(sharding, BoxSharding)
    table, shapes = sharding.table * len(meshes), sharding.shapes * len(meshes)
    return BoxSharding(sharding.shape, ranks, table, shapes)


def _of_holders(sharding: Sharding, rank: int) -> Sharding:
    """Leave out ranks that hold nothing of a tensor, since they may not know of it.

    An optimizer over FSDP1's parameters has no state for those of which this rank has no element.
    """
    if isinstance(sharding, FlatSharding):
        piece = sharding.pieces[sharding.ranks.index(rank)]
        pairs = zip(sharding.ranks, sharding.pieces, strict=True)
        ranks = tuple(one for one, other in pairs if other == piece)
        return replace(sharding, ranks=ranks, pieces=(piece,) * len(ranks))
    if isinstance(sharding, BoxSharding):
        rows = zip(sharding.ranks, sharding.table, sharding.shapes, strict=True)
        kept = [row for row in rows if row[1]]
        if kept:
            ranks, table, shapes = zip(*kept, strict=True)
            return BoxSharding(sharding.shape, ranks, table, shapes)
    return sharding


def _chunks(
    local: torch.Tensor, shape: tuple[int, ...], plan: Sequence[Held]
) -> list[tuple[Box, Data]]:
    if 0 in shape:
        return [(whole(shape), memoryview(b"")) for _ in plan]
    return [(held.outer, data_of(held_view(held, held.outer, local))) for held in plan]


def _layout_of(comm: Comm, mesh: Any, sharding: MeshSharding) -> _Layout:
    if not set(sharding.ranks) <= set(comm.ranks):
        return None
    axes = mesh.mesh_dim_names or tuple(map(str, range(len(sharding.mesh_shape))))
    ranks = tuple(comm.ranks.index(rank) for rank in sharding.ranks)
    made = Mesh(tuple(axes), sharding.mesh_shape, ranks)
    placements = tuple(str(one) for one in sharding.placements)
    fault = find_layout_fault(made, placements)
    if fault:
        raise ArgumentError(fault, code="bad_argument")
    return made, placements
