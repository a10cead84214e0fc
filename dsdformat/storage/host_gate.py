"""A gate at which processes of one machine wait for each other, and tell each other a number.

Each has a pipe that the others write to. Where processes are more than cores, a step that all end
together takes milliseconds by a network's stack, and far less so.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from collections import deque
from collections.abc import Sequence

__all__ = ["HostGate"]

_NUMBER = struct.Struct("<II")  # who tells it, and what
_READ_NBYTES = 512 * _NUMBER.size

# Of a gate: process, and descriptor there.
Place = tuple[int, int]


class HostGate:
    """The gate of this process.

    Attributes:
        place: What others need to find it.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: the system has no such pipes.
        """
        if not hasattr(os, "pipe2"):
            raise OSError("this system has no pipes that others find")
        self._pipe, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._own = 0
        self._pipes: list[int] = [write]  # by process; to this one none is written
        self._heard: list[deque[int]] = [deque()]
        self._gone: set[int] = set()
        self.place: Place = (os.getpid(), write)

    def join(self, places: Sequence[Place], own: int) -> None:
        """Find the gates of all.

        Args:
            places: Of the processes that wait for each other, this one among them.
            own: Which one this is.

        Raises:
            OSError: one is not there.
        """
        pipes = [-1] * len(places)
        pipes[own] = self._pipes[0]
        self._own, self._pipes = own, pipes
        self._heard = [deque() for _ in places]
        for number, (process, fd) in enumerate(places):
            if number != own:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
                pipes[number] = os.open(f"/proc/{process}/fd/{fd}", flags)

    def tell(self, number: int) -> None:
        """Tell all others a number: this process is here.

        Raises:
            OSError: one is gone.
        """
        self._heard[self._own].append(number)
        for other, fd in enumerate(self._pipes):
            if other != self._own:
                os.write(fd, _NUMBER.pack(self._own, number))

    def hear(self, seconds: float) -> list[int] | None:
        """Wait until all have told a number once more.

        Returns:
            What each has told, this one too; None if some have not in this time.

        Raises:
            OSError: one is gone that has not.
        """
        end = time.monotonic() + seconds
        self._drain()
        while missing := [number for number, heard in enumerate(self._heard) if not heard]:
            if not self._gone.isdisjoint(missing):
                raise OSError(f"process {min(self._gone.intersection(missing))} has left the gate")
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._wait(missing, left)
        return [heard.popleft() for heard in self._heard]

    def close(self) -> None:
        """Leave the gate; who waits for this process is told."""
        fds, self._pipes = [self._pipe, *self._pipes], []
        for fd in fds:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _wait(self, missing: Sequence[int], seconds: float) -> None:
        """Wait for a number, or for one of these to be gone: then nobody reads its pipe."""
        waiting = select.poll()
        waiting.register(self._pipe, select.POLLIN)
        for number in missing:
            waiting.register(self._pipes[number], 0)
        ready = {fd for fd, _ in waiting.poll(1000 * seconds)}
        self._drain()  # one that is gone may have told its number before
        self._gone.update(number for number in missing if self._pipes[number] in ready)

    def _drain(self) -> None:
        """Take what others have told."""
        with contextlib.suppress(BlockingIOError):
            while raw := os.read(self._pipe, _READ_NBYTES):
                for who, number in _NUMBER.iter_unpack(raw):
                    self._heard[who].append(number)
