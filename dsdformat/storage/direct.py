"""Writing past the page cache, on file systems that are known to do it well.

Who copies into the page cache pays a processor for it, twice: to copy, and to send the pages to the
disk. Past it, the disk takes the bytes from where they are. The one who writes waits for the disk
instead, and files that are in use stay cached. That is worth it to whoever has no hurry.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from mmap import PAGESIZE
from pathlib import Path

__all__ = ["DirectFile", "takes_direct"]

# Local ones that write in place. Others take such writes too, and send each to a server before the
# next, or copy all the same.
_KINDS = ("ext4", "xfs")
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """A file that is open already, opened once more to be written past the page cache."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            OSError: it cannot be opened so.
        """
        self._fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def write(self, byte_offset: int, piece: memoryview) -> range:
        """Write the whole pages that a piece covers in the file.

        Pages of which it has a part are left to the page cache, where others have theirs.

        Returns:
            Which bytes of the piece were written; none where the system does not take them so, as
            from memory that lies otherwise in its pages than the file.

        Raises:
            OSError: the medium failed.
        """
        at = first = -byte_offset % PAGESIZE
        end = first + max(0, len(piece) - first) // PAGESIZE * PAGESIZE
        while at < end:
            try:
                count = os.pwritev(self._fd, [piece[at:end]], byte_offset + at)
            except OSError as error:
                if error.errno in _REFUSED:
                    break
                raise
            if count < PAGESIZE:  # the disk is full, and who writes the rest is told so
                break
            at += count // PAGESIZE * PAGESIZE
        return range(first, at)

    def close(self) -> None:
        """Close it; what was written is durable once the file is flushed."""
        with contextlib.suppress(OSError):
            os.close(self._fd)


def takes_direct(fd: int) -> bool:
    """Whether an open file is on a file system that does this well."""
    if not hasattr(os, "O_DIRECT"):
        return False
    return _kind_of(os.fstat(fd).st_dev) in _KINDS


@functools.lru_cache(64)
def _kind_of(device: int) -> str:
    """Return the kind of a file system that is mounted, or nothing."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", errors="replace") as mounts:
        for line in mounts:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2:3] == [number]:
                return rest.split()[0]
    return ""
