"""Move tensors between ranks of one machine, through memory that all of them see.

A rank packs what it gives into its own memory, of which the others copy what is theirs. Through a
network's stack the same bytes are copied twice more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from dsdformat.limits import KIB, MIB
from dsdformat.torch.comm import Comm
from dsdformat.torch.common_memory import CommonMemory, common_memory
from dsdformat.torch.routes import Routes

__all__ = ["exchange_in_memory"]

BUCKET_NBYTES = 128 * MIB
LEAST_NBYTES = 16 * MIB  # of all tensors; to make memory takes longer than to send less
_ALIGN = 16
PADDING_NBYTES = 64 * KIB  # for where boxes begin; what needs more is sent


def exchange_in_memory(
    comm: Comm,
    routes: Routes,
    shards: Mapping[str, torch.Tensor],
    into: Mapping[str, torch.Tensor],
    bucket_nbytes: int,
) -> bool:
    """Do as `exchange` does, if the ranks are on one machine and it is worth it.

    Returns:
        Whether it was done; the same on all ranks.

    Ranks: collective over the group.
    Memory: a bucket of at most 128 MiB on a rank that gives; nothing on others, but that the pages
        they have read show in them too.
    """
    if comm.world_size == 1 or routes.nbytes_of_all() < LEAST_NBYTES:
        return False
    half = max(1, min(bucket_nbytes, BUCKET_NBYTES) // 2)
    most = min(half, routes.given_nbytes(comm.rank)) + PADDING_NBYTES
    room = _table_nbytes(comm) + most // _ALIGN * _ALIGN
    memory = common_memory(comm, 2 * room)
    if memory is None:
        return False
    with contextlib.closing(memory):
        _exchange(comm, routes, shards, into, half, memory)
    return True


def _exchange(
    comm: Comm,
    routes: Routes,
    shards: Mapping[str, torch.Tensor],
    into: Mapping[str, torch.Tensor],
    half: int,
    memory: CommonMemory,
) -> None:
    """Exchange, where all have memory.

    Ranks: collective over the group.
    """
    table = _table_nbytes(comm)
    whole = [torch.frombuffer(view, dtype=torch.uint8) for view in memory.views]
    halves = [torch.split(one, len(one) // 2) for one in whole]
    for number, parts in enumerate(routes.rounds(half)):
        views = [both[number % 2] for both in halves]
        own = parts[comm.rank]
        sent = [
            routes.nbytes(own, rank) if rank != comm.rank else 0 for rank in range(comm.world_size)
        ]
        fits = table + sum(sent) <= len(views[comm.rank])
        buffer = views[comm.rank][table:] if fits else torch.empty(sum(sent), dtype=torch.uint8)
        buffer = buffer[: sum(sent)]
        for rank, part in enumerate(torch.split(buffer, sent)):
            if sent[rank]:
                routes.pack(own, rank, shards, part)
        _write_table(views[comm.rank], sent)
        # A half is filled anew only when all were here once more, and so have read it.
        if all(memory.meet(int(fits))):
            received = [_part(view, table, comm.rank) for view in views]
        else:
            received = comm.exchange(buffer, sent, [_size(view, comm.rank) for view in views])
        for rank, part in enumerate(received):
            if rank != comm.rank and part.numel():
                routes.unpack(parts[rank], comm.rank, part, into)
        routes.copy(own, comm.rank, shards, into)


def _table_nbytes(comm: Comm) -> int:
    """How long the table is of how much is for each rank."""
    return _ALIGN * comm.world_size


def _write_table(view: torch.Tensor, sent: Sequence[int]) -> None:
    """Write how much is for each rank."""
    view[: 8 * len(sent)].view(torch.int64).copy_(torch.tensor(sent))


def _size(view: torch.Tensor, rank: int) -> int:
    return int(view[8 * rank : 8 * (rank + 1)].view(torch.int64).item())


def _part(view: torch.Tensor, table: int, rank: int) -> torch.Tensor:
    """Return what is for a rank."""
    sizes = view[: 8 * (rank + 1)].view(torch.int64).tolist()
    begin = table + sum(sizes[:rank])
    return view[begin : begin + sizes[rank]]
