"""Join the shards of tensors to whole ones, in bounded buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsdformat.torch.buckets import BUCKET_NBYTES, Routes
from dsdformat.torch.buffers import empty
from dsdformat.torch.comm import Comm
from dsdformat.torch.sharding import is_dtensor, local_of, sharding_of

__all__ = ["gather"]


def gather(
    tensors: Mapping[str, torch.Tensor],
    *,
    to: int | None = None,
    device: torch.device | str | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> dict[str, torch.Tensor]:
    """Return DTensors as whole tensors, each joined from the shards of its mesh.

    Args:
        tensors: Of the same names, shapes, dtypes and meshes on all ranks of a mesh, in the same
            order. Those that are no DTensors are returned as they are.
        to: The rank that gets them, by its position in the tensor's mesh; all if None.
        device: Where whole tensors are made; where the shards are if None.
        bucket_nbytes: How many bytes are moved at once.

    Returns:
        Whole tensors; on ranks that get none, only what is no DTensor.

    Raises:
        RankDisagreementError: `ranks_disagree`: ranks passed different tensors.

    Ranks: collective over the mesh of each DTensor.
    Memory: the result, and a bucket for each rank that receives; other ranks their part of one.
    """
    result: dict[str, torch.Tensor] = {}
    meshes: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            meshes.setdefault(sharding_of(tensor).ranks, {})[name] = tensor
        else:
            result[name] = tensor.detach()
    for ranks, group in meshes.items():
        result.update(_gather(Comm.of_ranks(ranks), group, to, device, bucket_nbytes))
    return {name: result[name] for name in tensors if name in result}


def _gather(
    comm: Comm,
    tensors: Mapping[str, Any],
    to: int | None,
    device: torch.device | str | None,
    bucket_nbytes: int,
) -> dict[str, torch.Tensor]:
    shardings = {name: sharding_of(tensor) for name, tensor in tensors.items()}
    shards = {name: local_of(tensor) for name, tensor in tensors.items()}
    forms = {name: (one.shape, shards[name].dtype) for name, one in shardings.items()}
    places = {name: one.positions(comm.ranks) for name, one in shardings.items()}
    routes = Routes(forms, shardings, places, once=True)
    comm.check_agreement(routes.fingerprint(), "what is gathered")
    result: dict[str, torch.Tensor] = {}
    if to is None or comm.rank == to:
        for name, (shape, dtype) in forms.items():
            result[name] = empty(shape, dtype, device or shards[name].device)
    for bucket in routes.buckets(bucket_nbytes):
        nbytes = routes.buffer_nbytes(bucket)
        if nbytes == 0:
            continue
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=comm.device)
        routes.pack(bucket, comm.rank, shards, buffer, whole=False)
        parts = comm.all_gather(buffer) if to is None else comm.gather(buffer, to)
        for rank, part in enumerate(parts or ()):
            routes.unpack(bucket, rank, part, result, whole=True)
    return result
