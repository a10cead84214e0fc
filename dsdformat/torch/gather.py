"""Join the shards of tensors to whole ones, in bounded buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsdformat.garbage import young_gc
from dsdformat.torch.buffers import empty
from dsdformat.torch.comm import Comm, group_order
from dsdformat.torch.exchange import exchange, share
from dsdformat.torch.routes import BUCKET_NBYTES, Form, Routes, Spread
from dsdformat.torch.sharding import (
    check_shard,
    is_spread,
    local_of,
    process_groups,
    sharding_of,
)

__all__ = ["fingerprint", "gather", "gather_on"]


def gather(
    tensors: Mapping[str, Any],
    *,
    to: int | None = None,
    device: torch.device | str | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> dict[str, torch.Tensor]:
    """Return DTensors as whole tensors, each joined from the shards of its mesh.

    Args:
        tensors: Of the same names, shapes, dtypes and meshes on all ranks of a mesh, in the same
            order. Those that are no DTensors are returned as they are. A tensor that is there
            under several names is joined once.
        to: The rank that gets them, by its position in the tensor's mesh; all if None.
        device: Where whole tensors are made; where the shards are if None.
        bucket_nbytes: How many bytes are moved at once.

    Returns:
        Whole tensors; on ranks that get none, only what is no DTensor.

    Raises:
        RankDisagreementError: `ranks_disagree`: ranks passed different tensors.
        DistributedError: `rank_failed`: a shard is not what its placements say.

    Ranks: collective over the mesh of each DTensor.
    Memory: the result, and up to two buckets on ranks that receive; other ranks their part of one.
    """
    with young_gc():
        return _gather_by_mesh(
            tensors, lambda ranks: None if to is None else ranks[to], device, bucket_nbytes
        )


def gather_on(
    tensors: Mapping[str, Any], rank: int, device: torch.device | str | None = None
) -> dict[str, torch.Tensor]:
    """As `gather`, to one global rank; of a mesh without it, to the mesh's first rank."""
    return _gather_by_mesh(
        tensors, lambda ranks: rank if rank in ranks else ranks[0], device, BUCKET_NBYTES
    )


def _gather_by_mesh(
    tensors: Mapping[str, Any],
    receiver_of: Callable[[tuple[int, ...]], int | None],
    device: torch.device | str | None,
    bucket_nbytes: int,
) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    meshes: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if not is_spread(tensor):
            result[name] = tensor.detach()
        else:
            meshes.setdefault(sharding_of(tensor).ranks, {})[name] = tensor
    for ranks, group in sorted(meshes.items(), key=lambda item: group_order(item[0])):
        comm = Comm.of_ranks(ranks, process_groups(group.values()))
        receiver = receiver_of(ranks)
        to = None if receiver is None else comm.ranks.index(receiver)
        result.update(_gather(comm, group, to, device, bucket_nbytes))
    return {name: result[name] for name in tensors if name in result}


def _gather(
    comm: Comm,
    tensors: Mapping[str, Any],
    to: int | None,
    device: torch.device | str | None,
    bucket_nbytes: int,
) -> dict[str, torch.Tensor]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    tensors = {tied[0]: tensors[tied[0]] for tied in names.values()}
    shards = {name: local_of(tensor) for name, tensor in tensors.items()}
    forms: dict[str, Form] = {
        name: (tuple(tensor.shape), shards[name].dtype) for name, tensor in tensors.items()
    }
    sources = {name: Spread.of(sharding_of(one), comm.ranks) for name, one in tensors.items()}
    ties = [tied for tied in names.values() if len(tied) > 1]
    comm.check_agreement([*fingerprint(forms, sources), *ties], "what is gathered")
    with comm.together("gather"):
        for name, tensor in tensors.items():
            check_shard(name, tensor, sources[name].sharding, comm.ranks[comm.rank])
    result: dict[str, torch.Tensor] = {}
    if to is None or comm.rank == to:
        for name, (shape, dtype) in forms.items():
            result[name] = empty(shape, dtype, device or shards[name].device)
    if to is None:
        share(comm, Routes(forms, sources, None), shards, result, bucket_nbytes)
    else:
        targets = {
            name: Spread.only(shape, to, comm.world_size) for name, (shape, _) in forms.items()
        }
        exchange(comm, Routes(forms, sources, targets), shards, result, bucket_nbytes)
    first = {name: tied[0] for tied in names.values() for name in tied}
    return {name: result[one] for name, one in first.items() if one in result}


def fingerprint(forms: Mapping[str, Form], spreads: Mapping[str, Spread]) -> list[Any]:
    """Return what must be equal on all ranks before anything is moved: plain values."""
    return [
        [name, list(shape), str(dtype), spreads[name].sharding.describe()]
        for name, (shape, dtype) in forms.items()
    ]
