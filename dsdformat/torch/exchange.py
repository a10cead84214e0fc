"""Move tensors between ranks: from where they are to where they are wanted, in bounded rounds."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsdformat.plan.sharding import Sharding
from dsdformat.torch.comm import Comm
from dsdformat.torch.routes import BUCKET_NBYTES, Routes, Spread

__all__ = ["exchange", "places", "share"]


def places(comm: Comm, shardings: Mapping[str, Sharding]) -> dict[str, Spread]:
    """Return where each rank is in the sharding of each tensor.

    Ranks may have meshes of their own, as parts of a larger one, each with all of the tensor; then
    the shardings differ in their ranks alone.

    Ranks: collective over the group.
    """
    meshes = list(dict.fromkeys(one.ranks for one in shardings.values()))
    own = comm.ranks[comm.rank]
    table = comm.gather_values([ranks.index(own) if own in ranks else None for ranks in meshes])
    found = [tuple(row[number] for row in table) for number in range(len(meshes))]
    numbers = {ranks: number for number, ranks in enumerate(meshes)}
    return {name: Spread(one, found[numbers[one.ranks]]) for name, one in shardings.items()}


def exchange(
    comm: Comm,
    routes: Routes,
    shards: Mapping[str, torch.Tensor],
    into: Mapping[str, torch.Tensor],
    bucket_nbytes: int = BUCKET_NBYTES,
) -> None:
    """Copy what each rank wants into its shards; each rank is sent that alone.

    Args:
        comm: The group that the routes were made for.
        routes: Equal on all ranks.
        shards: What this rank has, by name.
        into: What this rank wants; dtypes are converted as `copy_` does.
        bucket_nbytes: How many bytes a rank sends or receives at once.

    Ranks: collective over the group.
    Memory: two buckets on a rank that sends all, else less than two.
    """
    for parts in routes.rounds(bucket_nbytes):
        own = parts[comm.rank]
        sent = [routes.nbytes(own, target) for target in range(comm.world_size)]
        buffer = torch.empty(sum(sent), dtype=torch.uint8, device=comm.device)
        for target, part in enumerate(torch.split(buffer, sent)):
            routes.pack(own, target, shards, part)
        sizes = [routes.nbytes(pieces, comm.rank) for pieces in parts]
        for pieces, part in zip(parts, comm.exchange(buffer, sent, sizes), strict=True):
            routes.unpack(pieces, comm.rank, part, into)


def share(
    comm: Comm,
    routes: Routes,
    shards: Mapping[str, torch.Tensor],
    into: Mapping[str, torch.Tensor],
    bucket_nbytes: int = BUCKET_NBYTES,
) -> None:
    """Copy all of the tensors into whole tensors of all ranks; see `exchange`.

    Ranks: collective over the group.
    Memory: two buckets.
    """
    for parts in routes.rounds(bucket_nbytes):
        sizes = [routes.nbytes(pieces, None) for pieces in parts]
        own = torch.empty(sizes[comm.rank], dtype=torch.uint8, device=comm.device)
        routes.pack(parts[comm.rank], None, shards, own)
        for rank, buffer in comm.share(own, sizes):
            routes.unpack(parts[rank], None, buffer, into)
