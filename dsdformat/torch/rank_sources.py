"""What one of several ranks stores: of each tensor the boxes that are its to write, and ties."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsdformat.boxes import whole
from dsdformat.format.digests import digest
from dsdformat.format.manifest import Mesh
from dsdformat.format.packing import emit
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encode, encoded_key
from dsdformat.plan.kept_plans import KeptPlans
from dsdformat.plan.mesh import Replicate
from dsdformat.plan.sharding import BoxSharding, FlatSharding, Held, MeshSharding, Sharding, on_each
from dsdformat.sources import Reference, TensorSource, source_of
from dsdformat.torch.agreement import Holders
from dsdformat.torch.buffers import data_of, memory_order
from dsdformat.torch.comm import Comm
from dsdformat.torch.composites import find_kind, refusal
from dsdformat.torch.dtypes import logical_dtype
from dsdformat.torch.introspect import is_array
from dsdformat.torch.sharding import (
    FlatShard,
    held_view,
    is_dtensor,
    is_spread,
    is_tensor,
    local_of,
    sharding_of,
)
from dsdformat.torch.sources import ORDER, Adapter, tensor_identity
from dsdformat.torch.stored import leaves

__all__ = ["RankAdapter", "has_boxes", "identity_of", "named_tensors_of", "plan_boxes"]

Path = tuple[Any, ...]

_plans = KeptPlans()


def named_tensors_of(plain: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List the tensors of a captured state that boxes are written of, each once, by name."""
    found: dict[Any, tuple[str, Any]] = {}
    named = ((emit_name(path, encoded_key), leaf) for path, leaf in leaves(plain))
    for name, leaf in sorted(((n, one) for n, one in named if has_boxes(one)), key=_first):
        found.setdefault(identity_of(leaf), (name, leaf))
    return list(found.values())


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def has_boxes(leaf: Any) -> bool:
    """Whether a leaf is a tensor that boxes are written of: strided, with data."""
    if is_spread(leaf):
        return True
    if not is_tensor(leaf) or leaf.is_meta or refusal(leaf) is not None:
        return False
    return find_kind(leaf) is None and logical_dtype(leaf.dtype) is not None


def identity_of(tensor: Any) -> Any:
    """Return what is equal for tied tensors."""
    return (
        id(tensor) if isinstance(tensor, FlatShard) else tensor_identity(local_of(tensor), tensor)
    )


class RankAdapter(Adapter):
    """Turns what a state holds into what one rank stores of it."""

    def __init__(
        self,
        comm: Comm,
        tensors: Sequence[tuple[str, Any]],
        holders: Holders,
        arrays: Mapping[Path, bool],
    ) -> None:
        """Plan what this rank writes.

        Args:
            comm: The ranks that save together.
            tensors: Names and tensors, in the order of all ranks.
            holders: Which ranks have what.
            arrays: Places of arrays, and of tensors that are not one block, and whether this rank
                writes them.

        Ranks: collective over the group.
        """
        super().__init__()
        self._comm = comm
        self._arrays = arrays
        plans = plan_boxes(comm, tensors, holders)
        self._planned = {
            identity_of(one): (one, plan) for (_, one), plan in zip(tensors, plans, strict=True)
        }

    def __call__(self, value: Any, place: Sequence[Any]) -> Any:
        identity = _identity_or_none(value) if is_tensor(value) else None
        if identity in self._planned:
            return self._reference(value, identity)
        made = super().__call__(value, place)
        if isinstance(made, (Reference, TensorSource)) and not self._writes(place):
            source = source_of(made)
            assert isinstance(source, TensorSource)  # there are no runs
            return Reference(self._empty(source), made.attributes)
        return made

    def runs(self, values: Sequence[Any]) -> Iterator[tuple[int, None]]:
        """Give no runs: of most tensors this rank stores a part, or nothing."""
        yield len(values), None

    def _reference(self, tensor: Any, identity: Any) -> Reference:
        source = self._sources.get(identity)
        if source is None:
            one, plan = self._planned[identity]
            source = _source(self._comm, one, plan)
            self._sources[identity] = source
            self._alive.append(one)
        self._alive.append(tensor)
        order = None if is_spread(tensor) else memory_order(tensor.detach())
        return Reference(source, {} if order is None else {ORDER: order})

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
    comm: Comm, tensors: Sequence[tuple[str, Any]], holders: Holders
) -> Sequence[Sequence[Held]]:
    """Choose which boxes of each tensor this rank writes; all ranks together write each once.

    Args:
        comm: The ranks that write together.
        tensors: Names and tensors, in the order of all ranks.
        holders: Which ranks have what.

    Ranks: collective over the group.
    """
    families = _families(comm, tensors)
    spreads = [
        (_sharding(comm, name, one, holders, families), _width(one)) for name, one in tensors
    ]
    return _plans.plan(spreads, comm.ranks[comm.rank])


def _identity_or_none(value: Any) -> Any:
    return identity_of(value) if has_boxes(value) else None


def _families(
    comm: Comm, tensors: Sequence[tuple[str, Any]]
) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Find meshes that have the same tensors, as the parts of a larger mesh along one axis.

    Returns:
        For the ranks of each mesh those of all that have what it has, in order.

    Ranks: collective over the group. The first rank of a mesh tells what is on it.
    """
    names: dict[tuple[int, ...], list[Any]] = {}
    for name, tensor in tensors:
        if is_spread(tensor):
            sharding = sharding_of(tensor)
            row = [name, list(sharding.shape), sharding.describe()]
            names.setdefault(sharding.ranks, []).append(row)
    own = comm.ranks[comm.rank]
    told = [
        [list(ranks), digest(emit(encode(rows)))]
        for ranks, rows in names.items()
        if min(ranks) == own and len(ranks) < comm.world_size
    ]
    found: dict[bytes, list[tuple[int, ...]]] = {}
    for rows in comm.gather_values(told):
        for ranks, one in rows:
            found.setdefault(one, []).append(tuple(ranks))
    return {ranks: sorted(meshes) for meshes in found.values() for ranks in meshes}


def _sharding(
    comm: Comm,
    name: str,
    tensor: Any,
    holders: Holders,
    families: Mapping[tuple[int, ...], Sequence[tuple[int, ...]]],
) -> Sharding:
    if is_spread(tensor):
        sharding = sharding_of(tensor)
        meshes = families.get(sharding.ranks, [sharding.ranks])
        return _of_holders(_repeated(sharding, meshes), comm.ranks[comm.rank])
    return on_each(tuple(tensor.shape), tuple(comm.ranks[rank] for rank in holders.writers(name)))


def _repeated(sharding: Sharding, meshes: Sequence[tuple[int, ...]]) -> Sharding:
    """Return how a tensor is spread that each of several meshes has."""
    if len(meshes) == 1:
        return sharding
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


def _width(tensor: Any) -> int:
    width: int = tensor.dtype.itemsize
    return width


def _source(comm: Comm, tensor: Any, plan: Sequence[Held]) -> TensorSource:
    local = local_of(tensor)
    name = logical_dtype(local.dtype)
    assert name is not None  # `has_boxes` has looked
    shape = tuple(tensor.shape)
    chunks = list(_chunks(local, shape, plan))
    return TensorSource(name, shape, chunks, layout=_layout(comm, tensor))


def _chunks(local: torch.Tensor, shape: tuple[int, ...], plan: Sequence[Held]) -> Iterator[Any]:
    for held in plan:
        if 0 in shape:
            yield whole(shape), b""
        else:
            yield held.outer, data_of(held_view(held, held.outer, local))


def _layout(comm: Comm, tensor: Any) -> tuple[Mesh, tuple[str, ...]] | None:
    """Return where the tensor came from, for people: its mesh and placements."""
    if not is_dtensor(tensor):
        return None
    sharding = sharding_of(tensor)
    assert isinstance(sharding, MeshSharding)  # that of a DTensor
    if not set(sharding.ranks) <= set(comm.ranks):
        return None
    axes = tensor.device_mesh.mesh_dim_names or tuple(map(str, range(len(sharding.mesh_shape))))
    ranks = tuple(comm.ranks.index(rank) for rank in sharding.ranks)
    mesh = Mesh(tuple(axes), sharding.mesh_shape, ranks)
    return mesh, tuple(str(one) for one in sharding.placements)


def arrays_of(comm: Comm, plain: Mapping[str, Any], holders: Holders) -> dict[Path, bool]:
    """Return where arrays and composite tensors are, and whether this rank writes them."""
    return {
        path: holders.of(emit_name(path, encoded_key))[0] == comm.rank
        for path, leaf in leaves(plain)
        if is_array(leaf) or (is_tensor(leaf) and not has_boxes(leaf))
    }
