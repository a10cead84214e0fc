"""Memory that processes of one machine have in common.

It has no name in a file system. Others open it by the number of the process that made it and of
its descriptor there, and it goes with the last process that has it, however that one ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

__all__ = ["HostMemory", "find_memory"]

_TOKEN_NBYTES = 16

# Of some memory: the machine, what it begins with at first, process, descriptor, and length.
Place = tuple[bytes, bytes, int, int, int]


class HostMemory:
    """Memory of this process that others may find.

    Attributes:
        view: Its bytes.
        place: What others need to find it; values of the format.
    """

    def __init__(self, nbytes: int) -> None:
        """Make it; all of it is there at once, so that no access fails later.

        Raises:
            OSError: the system does not have such memory, or not enough of it.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name")
        self._fd = os.memfd_create("dsdformat", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
            self.view = memoryview(mmap.mmap(self._fd, nbytes))
            token = os.urandom(_TOKEN_NBYTES)
            self.view[:_TOKEN_NBYTES] = token
            self.place: Place = (_machine(), token, os.getpid(), self._fd, nbytes)
        except BaseException:
            self.hide()
            raise

    def hide(self) -> None:
        """Let nobody find it any more; who has found it keeps it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def find_memory(place: Place) -> memoryview | None:
    """Return the memory at a place; None if it is not there, or on another machine."""
    machine, token, process, number, nbytes = place
    with contextlib.suppress(OSError, ValueError):
        if machine != _machine():  # numbers mean other things there
            return None
        fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            view = memoryview(mmap.mmap(fd, nbytes))
        finally:
            os.close(fd)
        if bytes(view[:_TOKEN_NBYTES]) == token:
            return view
    return None


def _machine() -> bytes:
    """Return what is equal for processes that see each other by their numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return boot + os.readlink(b"/proc/self/ns/pid")
