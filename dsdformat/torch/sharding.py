"""How a live tensor is spread over ranks: what torch says of it, in our terms."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsdformat.boxes import Box, whole
from dsdformat.errors import MismatchError, UnsupportedValueError
from dsdformat.plan.mesh import Placement, Replicate, Shard
from dsdformat.plan.sharding import BoxSharding, Held, MeshSharding, Sharding
from dsdformat.torch.buffers import OWN_CLASSES, box_view

__all__ = [
    "FlatShard",
    "as_dtensor",
    "check_shard",
    "held_view",
    "is_dtensor",
    "is_spread",
    "is_tensor",
    "dtensor_of",
    "local_of",
    "process_groups",
    "ranks_of_mesh",
    "sharding_of",
    "sharding_of_placements",
    "tensors_in",
]

_SHARDINGS = 1024  # kept for each mesh: many tensors have one shape
_ranks_of_meshes: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
_shardings_of_meshes: weakref.WeakKeyDictionary[Any, dict[Any, MeshSharding]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, eq=False)
class FlatShard:
    """What this rank holds of a tensor that lies in flat shards; alike a tensor where it counts.

    Attributes:
        sharding: Over the ranks of the flat shards.
        shard: Elements in the order of memory, of one dim; shared with the flat shard.
        group: The process group of the ranks of the sharding, if it is one.
        mesh, placements: Of the DTensor that stands for it outside.
        requires_grad: Of the parameter.
    """

    sharding: Sharding
    shard: torch.Tensor
    group: Any = None
    mesh: Any = None
    placements: tuple[Any, ...] = ()
    requires_grad: bool = False

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return torch.Size(self.sharding.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.dtype

    @property
    def device(self) -> torch.device:
        return self.shard.device

    @property
    def is_meta(self) -> bool:
        return self.shard.is_meta

    def dim(self) -> int:
        """Number of dims of the whole tensor."""
        return len(self.sharding.shape)

    def detach(self) -> FlatShard:
        """Return the same; it never has a history."""
        return self


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor. Loads nothing of torch."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def _is_sharded_tensor(value: Any) -> bool:
    package = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return package is not None and isinstance(value, package.ShardedTensor)


def is_spread(value: Any) -> bool:
    """Whether a value is a tensor of which this rank holds a shard."""
    if type(value) in OWN_CLASSES:  # by far the most, and asked for each many times
        return False
    return isinstance(value, FlatShard) or is_dtensor(value) or _is_sharded_tensor(value)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, whole or spread."""
    return type(value) in OWN_CLASSES or isinstance(value, torch.Tensor) or is_spread(value)


def tensors_in(value: Any) -> Iterator[Any]:
    """List the tensors in nested dicts, lists, tuples and sets."""
    if is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)


def sharding_of(tensor: Any) -> Sharding:
    """Return how a tensor is spread of which `is_spread` holds.

    Raises:
        UnsupportedValueError: it has partial values, which must be reduced first.
    """
    if isinstance(tensor, FlatShard):
        return tensor.sharding
    if not is_dtensor(tensor):
        return _sharding_of_sharded(tensor)
    return sharding_of_placements(tensor.shape, tensor.device_mesh, tensor.placements)


def sharding_of_placements(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any]
) -> MeshSharding:
    """Return how a DTensor of this shape would be spread; mostly an object that is there."""
    known = _shardings_of_meshes.setdefault(mesh, {})
    # With types, as torch 2.6 takes a strided shard for equal to a plain one.
    key = tuple(shape), *((type(one), one) for one in placements)
    found = known.get(key)
    if found is None:
        found = MeshSharding(
            tuple(shape), ranks_of_mesh(mesh), tuple(mesh.shape), tuple(map(_placement, placements))
        )
        if len(known) < _SHARDINGS:
            known[key] = found
    return found


def ranks_of_mesh(mesh: Any) -> tuple[int, ...]:
    """Return the global ranks of a device mesh, row-major; the same object for each call.

    A mesh may make its tensor of ranks anew whenever it is asked, which takes longer than all else
    that is asked of a DTensor.
    """
    ranks = _ranks_of_meshes.get(mesh)
    if ranks is None:
        ranks = _ranks_of_meshes[mesh] = tuple(mesh.mesh.flatten().tolist())
    return ranks


def _sharding_of_sharded(tensor: Any) -> Sharding:
    """Return how a ShardedTensor is spread, which is what FSDP1 gives without a mesh."""
    held: dict[int, tuple[Held, ...]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for one in tensor.metadata().shards_metadata:
        rank, shape = one.placement.rank(), tuple(one.shard_sizes)
        if rank in held:
            raise UnsupportedValueError(f"a ShardedTensor with two shards on rank {rank}")
        held[rank] = (Held(Box(tuple(one.shard_offsets), shape), whole(shape)),)
        shapes[rank] = shape
    ranks = tuple(sorted(held))
    return BoxSharding(
        tuple(tensor.size()),
        ranks,
        tuple(held[rank] for rank in ranks),
        tuple(shapes[rank] for rank in ranks),
    )


def local_of(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor: the tensor itself if it is not spread."""
    if type(tensor) in OWN_CLASSES:
        whole_one: torch.Tensor = tensor.detach()
        return whole_one
    if isinstance(tensor, FlatShard):
        return tensor.shard
    if is_dtensor(tensor):
        if torch.is_grad_enabled():  # then torch notes how to go back, which takes thrice as long
            with torch.no_grad():
                return local_of(tensor)
        local: torch.Tensor = tensor.to_local().detach()
        return local
    if _is_sharded_tensor(tensor):
        shards = tensor.local_shards()
        return shards[0].tensor.detach() if shards else torch.empty(0, dtype=tensor.dtype)
    plain: torch.Tensor = tensor.detach()
    return plain


def process_groups(tensors: Iterable[Any]) -> list[Any]:
    """List the process groups over which tensors are spread, as far as they have any."""
    found: dict[int, Any] = {}
    for tensor in tensors:
        if isinstance(tensor, FlatShard) and tensor.group is not None:
            found[id(tensor.group)] = tensor.group
        elif is_dtensor(tensor) and tensor.device_mesh.ndim == 1:
            group = tensor.device_mesh.get_group()
            found[id(group)] = group
    return list(found.values())


def held_view(held: Held, box: Box, shard: torch.Tensor) -> torch.Tensor:
    """Return the view of one box of a tensor in the shard that holds it.

    Args:
        held: What the shard holds.
        box: In elements of the tensor; lies in `held.outer`.
        shard: Of the rank.
    """
    if box == held.outer and held.order is None and box.shape == held.inner.shape == shard.shape:
        return shard  # mostly all that it has
    view = box_view(shard, held.inner)
    if view.dim() != len(held.outer.shape) or held.order is not None:
        order = held.order or tuple(range(len(held.outer.shape)))
        view = view.view([held.outer.shape[dim] for dim in order])
        view = view.permute([order.index(dim) for dim in range(len(order))])
    at = tuple(b - o for b, o in zip(box.offset, held.outer.offset, strict=True))
    return box_view(view, Box(at, box.shape))


def check_shard(name: str, tensor: Any, sharding: Sharding, rank: int) -> None:
    """Check that this rank holds what its placements say.

    Raises:
        MismatchError: `state_mismatch`.
    """
    if rank not in sharding.ranks:
        return
    wanted = sharding.shard_shape(sharding.ranks.index(rank))
    found = tuple(local_of(tensor).shape)
    if found != wanted:
        raise MismatchError(
            f"{name}: rank {rank} holds a shard of shape {list(found)}, but placements of a "
            f"tensor of shape {list(sharding.shape)} give it {list(wanted)}",
            code="state_mismatch",
            hint="make DTensors with the global shape and stride that they have",
        )


def as_dtensor(local: torch.Tensor, like: Any, shape: Sequence[int]) -> torch.Tensor:
    """Make a DTensor of this rank's shard, spread as another one is."""
    return dtensor_of(local, like.device_mesh, like.placements, shape)


def dtensor_of(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int]
) -> torch.Tensor:
    """Make a DTensor of this rank's shard."""
    from torch.distributed.tensor import DTensor

    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        local, mesh, tuple(placements), run_check=False, shape=size, stride=stride
    )


def _placement(placement: Any) -> Placement:
    if placement.is_replicate():
        return Replicate()
    if placement.is_partial():
        raise UnsupportedValueError(
            f"a DTensor with {placement} holds sums that are not added up yet",
            hint="redistribute it to Shard or Replicate first",
        )
    return Shard(placement.dim, getattr(placement, "split_factor", 1))
