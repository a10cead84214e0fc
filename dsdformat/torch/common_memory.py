"""Memory of each rank that all ranks of a group see, where all are on one machine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from dsdformat.storage.host_gate import HostGate
from dsdformat.storage.host_memory import HostMemory, find_memory
from dsdformat.torch.comm import Comm

__all__ = ["CommonMemory", "common_memory"]


class CommonMemory:
    """Memory of each rank, and a gate at which they wait for each other.

    Attributes:
        views: The memory of each rank.
    """

    def __init__(self, comm: Comm, views: Sequence[memoryview], gate: HostGate) -> None:
        self.views = views
        self._comm = comm
        self._gate = gate

    def meet(self, number: int) -> list[int]:
        """Wait until all are here; return what each has told, this rank's number too.

        What ranks have written to memory before is there for all.

        Raises:
            DistributedError: `ranks_absent`.

        Ranks: collective over the group.
        """
        heard: list[int] | None = None
        told = False

        def have_come(seconds: float) -> bool:
            nonlocal heard, told
            if not told:
                told = True
                self._gate.tell(number)
            heard = self._gate.hear(seconds)
            return heard is not None

        self._comm.wait_until(have_come)
        assert heard is not None
        return heard

    def close(self) -> None:
        """Leave the gate; the memory stays as long as somebody has it."""
        self._gate.close()


def common_memory(comm: Comm, nbytes: int) -> CommonMemory | None:
    """Make memory on each rank that all ranks see.

    Args:
        comm: The group.
        nbytes: How much this rank makes; at least 16.

    Returns:
        The memory of all, to be closed in the end; what it holds is undefined. None on all ranks
        if some do not see each other's, or if the group moves memory of a GPU, which goes its own
        way.

    Ranks: collective over the group.
    Memory: `nbytes`, of which nothing is left behind when the last rank lets go of it or ends.
    """
    if comm.device.type != "cpu":
        return None
    own: HostMemory | None = None
    gate: HostGate | None = None
    memory: CommonMemory | None = None
    try:
        with contextlib.suppress(OSError):
            own = HostMemory(nbytes)
            gate = HostGate()
        places = comm.gather_values([own and own.place, gate and gate.place])
        views = [view for one, _ in places if one and (view := find_memory(one)) is not None]
        complete = len(views) == comm.world_size and _join(gate, comm, [one for _, one in places])
        # Heard by all before anybody hides what others look for.
        if all(comm.gather_values(complete)) and gate is not None:
            memory = CommonMemory(comm, views, gate)
    finally:
        if own is not None:
            own.hide()
        if memory is None and gate is not None:
            gate.close()
    return memory


def _join(gate: HostGate | None, comm: Comm, places: Sequence[Any]) -> bool:
    """Find the gates of all ranks; return whether they are there."""
    if gate is None or None in places:
        return False
    try:
        gate.join(places, comm.rank)
    except OSError:
        return False
    return True
