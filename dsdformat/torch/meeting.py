"""Wait until all ranks of a group make one call, with a limit, and name those that do not.

A collective on one rank alone waits as long as its group does: half an hour, for most. A counter in
the store of the default process group tells in time, at the cost of two requests for each rank.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

from dsdformat.errors import DistributedError, RankDisagreementError
from dsdformat.torch.comm import Comm
from dsdformat.torch.compat import default_store

__all__ = ["meet"]

_GIVEN_UP = 1 << 40  # added to a counter by a rank that waits no longer
_turns: dict[tuple[Any, tuple[int, ...]], int] = {}


def meet(comm: Comm, call: str, timeout: timedelta) -> None:
    """Wait until all ranks of the group are here.

    Args:
        comm: The group.
        call: What is called, for the message.
        timeout: How long a rank waits.

    Raises:
        DistributedError: `ranks_absent`, with the ranks that did not come.
        RankDisagreementError: `ranks_disagree`: ranks are here with different calls.

    Ranks: collective over the group.
    """
    if comm.world_size == 1:
        return
    store, own = default_store(), comm.ranks[comm.rank]
    while True:
        key = _next_key(store, comm)
        store.set(f"{key}/{own}", call)
        store.add(f"{key}/{call}", 1)
        count = store.add(key, 1)
        if count < _GIVEN_UP:  # else others have met here in vain, and gone on
            break
    if count == comm.world_size:
        store.set(f"{key}/all", "")
        _compare(store, key, comm, call)
        return
    try:
        store.wait([f"{key}/all"], timeout)
    except Exception:  # each store has a kind of its own
        if store.add(key, _GIVEN_UP) % _GIVEN_UP != comm.world_size:
            raise _absent(store, key, comm, call, timeout) from None
    _compare(store, key, comm, call)


def _compare(store: Any, key: str, comm: Comm, call: str) -> None:
    """Check that all ranks, which are here, make the same call."""
    if store.add(f"{key}/{call}", 0) == comm.world_size:
        return
    calls = {rank: store.get(f"{key}/{rank}").decode() for rank in comm.ranks}
    other = next(rank for rank, one in calls.items() if one != call)
    raise RankDisagreementError(
        f"rank {comm.ranks[comm.rank]} calls {call}, and rank {other} calls {calls[other]}",
        code="ranks_disagree",
        failures={},
        hint="all ranks that hold the model make the same calls, in the same order",
    )


def _next_key(store: Any, comm: Comm) -> str:
    turn = _turns.get((id(store), comm.ranks), 0)
    _turns[id(store), comm.ranks] = turn + 1
    ranks = hashlib.sha256(repr(comm.ranks).encode()).hexdigest()[:16]
    return f"dsdformat/{ranks}/{turn}"


def _absent(store: Any, key: str, comm: Comm, call: str, timeout: timedelta) -> DistributedError:
    absent = [rank for rank in comm.ranks if not store.check([f"{key}/{rank}"])]
    shown = ", ".join(map(str, absent[:10])) + (", …" if len(absent) > 10 else "")
    return DistributedError(
        f"{call}: after {timeout.total_seconds():g} s, {len(absent)} of {comm.world_size} ranks "
        f"have not made this call: {shown}",
        code="ranks_absent",
        failures={},
        hint="it is collective: all ranks that hold the model call it, in the same order",
    )
