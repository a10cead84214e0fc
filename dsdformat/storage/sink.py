"""A file that is written on a file system, and made durable.

What was written goes to the disk early, beside what is still to come: the flush at the end then
finds little left to do. Large pieces go there past the page cache if that is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from dsdformat.errors import StorageError
from dsdformat.limits import MIB
from dsdformat.storage.base import Buffer
from dsdformat.storage.direct import DirectFile, takes_direct
from dsdformat.storage.local import storage_errors

__all__ = ["FileSink"]

PIECES_MAX = 1024  # IOV_MAX of Linux
_EARLY_NBYTES = 8 * MIB
_START_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_DIRECT_NBYTES = MIB  # from here on a piece is worth a wait for the disk


class FileSink:
    """A new file on a file system, or one that another process has begun.

    With `past_cache`, large pieces that come alone are written past the page cache, on file systems
    that are known to do that well.
    """

    def __init__(self, path: Path, *, new: bool = True, past_cache: bool = False) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._late_nbytes = 0  # written, and not sent to the disk
        self._direct: DirectFile | None = None
        flags = os.O_WRONLY | (os.O_CREAT | os.O_EXCL if new else 0)
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        with storage_errors(path):
            self._fd = os.open(path, flags, 0o666)
        self._past_cache = past_cache and takes_direct(self._fd)

    def write_at(self, byte_offset: int, pieces: Sequence[Buffer]) -> None:
        """Write pieces one after another, beginning at a place in the file."""
        views = list(map(_as_bytes, pieces))
        if self._past_cache and len(views) == 1 and len(views[0]) >= _DIRECT_NBYTES:
            self._write_past_cache(byte_offset, views[0])
        else:
            self._write_cached(byte_offset, views)

    def resize(self, nbytes: int) -> None:
        """Give the file a length; what was not written is zeros."""
        with storage_errors(self._path):
            os.ftruncate(self._fd, nbytes)

    def close(self) -> None:
        """Make the file durable and close it."""
        with storage_errors(self._path):
            try:
                os.fsync(self._fd)
            finally:
                self._close_all()

    def discard(self) -> None:
        """Close the file as it is."""
        with contextlib.suppress(OSError):
            self._close_all()

    def _write_past_cache(self, byte_offset: int, view: memoryview) -> None:
        done = range(0)
        direct = self._find_direct()
        if direct is not None:
            with storage_errors(self._path):
                done = direct.write(byte_offset, view)
            self._past_cache = len(done) > 0  # refused once, refused always
        self._write_cached(byte_offset, [view[: done.start]])
        self._write_cached(byte_offset + done.stop, [view[done.stop :]])

    def _find_direct(self) -> DirectFile | None:
        with self._lock:
            if self._direct is None and self._past_cache:
                try:
                    self._direct = DirectFile(self._path)
                except OSError:  # the kind is right, but not how it is mounted
                    self._past_cache = False
            return self._direct

    def _close_all(self) -> None:
        direct, self._direct = self._direct, None
        try:
            if direct is not None:
                direct.close()
        finally:  # also where an interrupt has come
            os.close(self._fd)

    def _write_cached(self, byte_offset: int, views: Sequence[memoryview]) -> None:
        views = list(filter(len, views))
        end = byte_offset
        with storage_errors(self._path):
            for at in range(0, len(views), PIECES_MAX):
                end = self._write(end, views[at : at + PIECES_MAX])
        self._send(end - byte_offset)

    def _write(self, byte_offset: int, views: list[memoryview]) -> int:
        while views:
            count = self._write_some(byte_offset, views)
            if count == 0:
                raise StorageError(f"{self._path}: the system took no bytes")
            byte_offset += count
            if count == sum(map(len, views)):  # all, as ever
                break
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]
        return byte_offset

    def _write_some(self, byte_offset: int, views: list[memoryview]) -> int:
        if hasattr(os, "pwritev"):
            return os.pwritev(self._fd, views, byte_offset)
        with self._lock:
            os.lseek(self._fd, byte_offset, os.SEEK_SET)
            return os.write(self._fd, views[0])

    def _send(self, nbytes: int) -> None:
        """Let the disk begin with what was written; `close` waits, and tells what went wrong.

        Flushed in the end only, 1 GiB takes 1.4 times as long.
        """
        with self._lock:
            self._late_nbytes += nbytes
            if self._late_nbytes < _EARLY_NBYTES:
                return
            self._late_nbytes = 0
        start = _sync_file_range()
        if start is not None:
            start(self._fd, 0, 0, _START_WRITE)


def _as_bytes(piece: Buffer) -> memoryview:
    view = piece if type(piece) is memoryview else memoryview(piece)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Look up the call that begins to write a range of a file, where the system has it."""
    import ctypes

    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[[int, int, int, int], int]", call)
