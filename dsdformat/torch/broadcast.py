"""Give each rank its shards of whole tensors that one rank has, in bounded buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsdformat.plan.mesh import Replicate
from dsdformat.torch.buckets import BUCKET_NBYTES, Routes
from dsdformat.torch.comm import Comm
from dsdformat.torch.sharding import Sharding, is_dtensor, local_of, sharding_of

__all__ = ["broadcast"]


def broadcast(
    whole: Mapping[str, torch.Tensor] | None,
    into: Mapping[str, torch.Tensor],
    *,
    group: Any = None,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> None:
    """Fill tensors and DTensors on all ranks from the whole tensors of the group's rank 0.

    Each rank receives the boxes that it holds, and nothing else.

    Args:
        whole: On rank 0 of the group, a tensor for each name, of the same global shape and dtype
            as the one to be filled. Not looked at on other ranks.
        into: What is filled: of equal names, shapes, dtypes and placements on all ranks, in the
            same order. Meshes of DTensors have the group's ranks, or are left out of it.
        group: The process group; the default one if None.
        bucket_nbytes: How many bytes are moved at once.

    Raises:
        RankDisagreementError: `ranks_disagree`: ranks passed different tensors.

    Ranks: collective over the group.
    Memory: one bucket on rank 0; on others their part of one.
    """
    comm = Comm(group)
    comm.check_agreement(_fingerprint(into), "what is broadcast")
    spread = {name: tensor for name, tensor in into.items() if is_dtensor(tensor)}
    same = {name: tensor for name, tensor in into.items() if name not in spread}
    if spread:
        _scatter(comm, whole, spread, bucket_nbytes)
    if same:
        _repeat(comm, whole, same, bucket_nbytes)


def _scatter(
    comm: Comm,
    whole: Mapping[str, torch.Tensor] | None,
    into: Mapping[str, torch.Tensor],
    bucket_nbytes: int,
) -> None:
    """Send each rank what it holds of DTensors."""
    shards = {name: local_of(tensor) for name, tensor in into.items()}
    shardings = {name: sharding_of(tensor) for name, tensor in into.items()}
    forms = {name: (one.shape, shards[name].dtype) for name, one in shardings.items()}
    routes = Routes(forms, shardings, _places(comm, shardings), once=False)
    # A box is sent as often as it is held, so that much smaller a bucket is.
    copies = max(one.replicas * comm.world_size // len(one.ranks) for one in shardings.values())
    for bucket in routes.buckets(max(1, bucket_nbytes // copies)):
        nbytes = routes.buffer_nbytes(bucket)
        if nbytes == 0:
            continue
        own = torch.empty(nbytes, dtype=torch.uint8, device=comm.device)
        parts = None
        if comm.is_coordinator:
            assert whole is not None
            parts = [torch.empty_like(own) for _ in range(comm.world_size)]
            for rank, part in enumerate(parts):
                routes.pack(bucket, rank, whole, part, whole=True)
        comm.scatter(parts, own, 0)
        routes.unpack(bucket, comm.rank, own, shards, whole=False)


def _repeat(
    comm: Comm,
    whole: Mapping[str, torch.Tensor] | None,
    into: Mapping[str, torch.Tensor],
    bucket_nbytes: int,
) -> None:
    """Send all ranks the same."""
    targets = {name: tensor.detach() for name, tensor in into.items()}
    forms = {name: (tuple(one.shape), one.dtype) for name, one in targets.items()}
    shardings = {
        name: Sharding(shape, (0,), (1,), (Replicate(),)) for name, (shape, _) in forms.items()
    }
    routes = Routes(forms, shardings, {name: [0] for name in forms}, once=False)
    for bucket in routes.buckets(bucket_nbytes):
        buffer = torch.empty(routes.buffer_nbytes(bucket), dtype=torch.uint8, device=comm.device)
        if comm.is_coordinator:
            assert whole is not None
            routes.pack(bucket, 0, whole, buffer, whole=True)
        comm.broadcast(buffer, 0)
        routes.unpack(bucket, 0, buffer, targets, whole=True)


def _places(comm: Comm, shardings: Mapping[str, Sharding]) -> dict[str, list[int]]:
    """Return where in the mesh of each tensor each rank is; ranks may have meshes of their own."""
    meshes = list(dict.fromkeys(one.ranks for one in shardings.values()))
    own = [ranks.index(comm.ranks[comm.rank]) for ranks in meshes]
    table = comm.gather_values(own)
    return {
        name: [row[meshes.index(one.ranks)] for row in table] for name, one in shardings.items()
    }


def _fingerprint(into: Mapping[str, torch.Tensor]) -> list[Any]:
    return [
        [
            name,
            list(tensor.shape),
            str(tensor.dtype),
            [str(one) for one in sharding_of(tensor).placements] if is_dtensor(tensor) else None,
        ]
        for name, tensor in into.items()
    ]
