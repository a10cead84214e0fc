"""Memory of each rank that all ranks of a group see, where all are on one machine."""

from __future__ import annotations

import contextlib

from dsdformat.storage.host_memory import HostMemory, find_memory
from dsdformat.torch.comm import Comm

__all__ = ["common_memory"]


def common_memory(comm: Comm, nbytes: int) -> list[memoryview] | None:
    """Make memory on each rank that all ranks see.

    Args:
        comm: The group.
        nbytes: How much this rank makes; at least 16.

    Returns:
        The memory of each rank; what it holds is undefined. None on all of them if some do not
        see each other's, or if the group moves memory of a GPU, which goes its own way.

    Ranks: collective over the group.
    Memory: `nbytes`, of which nothing is left behind when the last rank lets go of it or ends.
    """
    if comm.device.type != "cpu":
        return None
    own: HostMemory | None = None
    with contextlib.suppress(OSError):
        own = HostMemory(nbytes)
    try:
        places = comm.gather_values(own and own.place)
        found = [place and find_memory(place) for place in places]
        views = [one for one in found if one is not None]
        # Heard by all before anybody hides what others look for.
        complete = all(comm.gather_values(len(views) == comm.world_size))
    finally:
        if own is not None:
            own.hide()
    return views if complete else None
