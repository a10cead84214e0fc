"""Files on the disk and in the page cache: made durable, warmed, dropped, counted."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from bench.case import UnmeasurableError

__all__ = ["drop", "flush", "stored_nbytes", "warm"]

PIECE_NBYTES = 8 << 20


def files_under(path: Path) -> list[Path]:
    """List a file, or all files under a folder."""
    return [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]


def stored_nbytes(path: Path) -> int:
    """Count the bytes of all files."""
    return sum(one.stat().st_size for one in files_under(path))


def flush(path: Path) -> None:
    """Make a file, or a folder with all in it, durable, and its name too."""
    files = files_under(path)
    folders = {one.parent for one in files} | {path.parent}
    for one in [*files, *sorted(folders, reverse=True)]:
        fd = os.open(one, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def warm(path: Path) -> None:
    """Read all files, so that their pages are cached."""
    piece = bytearray(PIECE_NBYTES)
    for one in files_under(path):
        with one.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def drop(path: Path) -> None:
    """Drop the pages of all files from the cache.

    Raises:
        UnmeasurableError: the file system keeps them.
    """
    os.sync()  # only clean pages can go
    for one in files_under(path):
        fd = os.open(one, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    kept = sum(map(cached_nbytes, files_under(path)))
    if kept > stored_nbytes(path) // 100:
        raise UnmeasurableError(
            f"{kept >> 10} KiB stay cached after POSIX_FADV_DONTNEED, so nothing is cold here"
        )


def cached_nbytes(path: Path) -> int:
    """Count how much of a file is in the page cache."""
    nbytes = path.stat().st_size
    if nbytes == 0:
        return 0
    pages = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        begin = ctypes.c_ubyte.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(begin))
        code = libc.mincore(address, ctypes.c_size_t(nbytes), found)
        del begin
    if code:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in found) * mmap.PAGESIZE
