"""Move tensors between ranks: from where they are to where they are wanted, in bounded rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dsdformat.plan.sharding import Sharding
from dsdformat.torch.buffers import Scratch
from dsdformat.torch.comm import Comm, Pending
from dsdformat.torch.exchange_memory import exchange_in_memory
from dsdformat.torch.routes import BUCKET_NBYTES, Piece, Round, Routes, Spread

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
    Memory: two buckets on a rank that sends all, else less than two; on one machine as
        `exchange_in_memory`.
    """
    if exchange_in_memory(comm, routes, shards, into, bucket_nbytes):
        return
    # Half a bucket is on its way while the next one is packed, and the one before unpacked.
    scratch = [(Scratch(comm.device), Scratch(comm.device)) for _ in range(2)]
    last: tuple[Round, Pending] | None = None
    received: Sequence[torch.Tensor] = ()
    for number, parts in enumerate(routes.rounds(max(1, bucket_nbytes // 2))):
        outgoing, incoming = scratch[number % 2]
        own = parts[comm.rank]
        sent = [_nbytes(comm, routes, own, target) for target in range(comm.world_size)]
        buffer = outgoing.take(sum(sent))
        for target, part in enumerate(torch.split(buffer, sent)):
            if sent[target]:
                routes.pack(own, target, shards, part)
        sizes = [
            routes.nbytes(pieces, comm.rank) if rank != comm.rank else 0
            for rank, pieces in enumerate(parts)
        ]
        if last is not None:
            received = last[1].wait()
        pending = comm.begin_exchange(buffer, sent, sizes, incoming.take(sum(sizes)))
        if last is not None:
            _unpack(comm, routes, last[0], received, into)
        routes.copy(own, comm.rank, shards, into)
        last = parts, pending
    if last is not None:
        _unpack(comm, routes, last[0], last[1].wait(), into)


def _nbytes(comm: Comm, routes: Routes, pieces: Sequence[Piece], target: int) -> int:
    """Return how much this rank sends to another one; what it has it does not send."""
    return routes.nbytes(pieces, target) if target != comm.rank else 0


def _unpack(
    comm: Comm,
    routes: Routes,
    parts: Round,
    received: Sequence[torch.Tensor],
    into: Mapping[str, torch.Tensor],
) -> None:
    for pieces, part in zip(parts, received, strict=True):
        if part.numel():
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
