"""What can this machine do at most? Each contender is one thing, for as many bytes as `save` has.

Read these figures first: no library is faster than what it is made of here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import files
from bench.case import Case, Contender, Scene, Trial, UnmeasurableError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LIMITS"]

FULL_NBYTES = 1 << 30
PIECE_NBYTES = 8 << 20
MIB = 1 << 20
SYNC_FILE_RANGE_WRITE = 2


def nbytes_at(size: float) -> int:
    """Return how many bytes are moved; whole MiB."""
    return max(1, round(FULL_NBYTES * size / MIB)) * MIB


def touched(nbytes: int) -> NDArray[Any]:
    """Return memory that is there, and not all the same."""
    import numpy as np

    return np.arange(nbytes // 4, dtype=np.uint32).view(np.uint8)


def pieces_of(data: NDArray[Any]) -> list[memoryview]:
    """Cut memory into pieces of 8 MiB."""
    view = memoryview(data)
    return [view[at : at + PIECE_NBYTES] for at in range(0, len(view), PIECE_NBYTES)]


def arrange_copy(scene: Scene) -> Trial:
    """Copy into touched memory."""
    import numpy as np

    source = touched(nbytes_at(scene.size))
    target = np.ones_like(source)
    return Trial(lambda: np.copyto(target, source), len(source))


def arrange_fault(scene: Scene) -> Trial:
    """Take new pages, without a write."""
    nbytes = nbytes_at(scene.size)
    taken: list[mmap.mmap] = []
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE

    def call() -> None:
        taken.append(mmap.mmap(-1, nbytes, flags=flags))

    return Trial(call, nbytes, made_nbytes=nbytes)


def arrange_hash(threads: int, scene: Scene) -> Trial:
    """Hash with BLAKE3, a piece at a time, the pieces shared out."""
    import blake3

    pieces = pieces_of(touched(nbytes_at(scene.size)))

    def share(first: int) -> None:
        for piece in pieces[first::threads]:
            blake3.blake3(piece).digest()

    def call() -> None:
        others = [threading.Thread(target=share, args=(one,)) for one in range(1, threads)]
        for one in others:
            one.start()
        share(0)
        for one in others:
            one.join()

    return Trial(call, sum(map(len, pieces)))


def write_file(scene: Scene) -> None:
    """Write what is read."""
    scene.fixture.write_bytes(touched(nbytes_at(scene.size)))


def arrange_read(settle: Callable[[Path], None], scene: Scene) -> Trial:
    """Read a file into touched memory."""
    import numpy as np

    target = np.ones(nbytes_at(scene.size), np.uint8)
    pieces = pieces_of(target)

    def call() -> None:
        fd = os.open(scene.fixture, os.O_RDONLY)
        for number, piece in enumerate(pieces):
            os.preadv(fd, [piece], number * PIECE_NBYTES)
        os.close(fd)

    def check() -> None:
        if not np.array_equal(target, touched(len(target))):
            raise ValueError("what was read is not what was written")

    return Trial(call, len(target), settle=lambda: settle(scene.fixture), check=check)


def arrange_write(behind: Callable[[int, int, int], None], scene: Scene) -> Trial:
    """Write a file and flush it; `behind` is called for each piece that is written."""
    pieces = pieces_of(touched(nbytes_at(scene.size)))
    path = scene.folder / "file"

    def call() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        for number, piece in enumerate(pieces):
            os.pwritev(fd, [piece], number * PIECE_NBYTES)
            behind(fd, number * PIECE_NBYTES, len(piece))
        os.close(fd)

    return Trial(call, sum(map(len, pieces)), flush=lambda: files.flush(path))


def leave(fd: int, byte_offset: int, nbytes: int) -> None:
    """Let the kernel begin when it likes."""


def begin_writing(fd: int, byte_offset: int, nbytes: int) -> None:
    """Have the kernel begin to write a piece to the disk, and do not wait."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None:
        raise UnmeasurableError("this system has no sync_file_range")
    arguments = ctypes.c_int64(byte_offset), ctypes.c_int64(nbytes), SYNC_FILE_RANGE_WRITE
    if call(fd, *arguments):
        raise OSError(ctypes.get_errno(), "sync_file_range")


def reader(name: str, settle: Callable[[Path], None]) -> Contender:
    """Make a contender that reads."""
    return Contender(
        name,
        partial(arrange_read, settle),
        needs=("numpy",),
        fixture="limits/file",
        prepare=write_file,
    )


LIMITS = Case(
    "limits",
    "what the machine does at most",
    (
        Contender("memcpy", arrange_copy, needs=("numpy",)),
        Contender("page faults", arrange_fault),
        Contender("blake3 (1 thread)", partial(arrange_hash, 1), needs=("numpy", "blake3")),
        Contender("blake3 (2 threads)", partial(arrange_hash, 2), needs=("numpy", "blake3")),
        reader("pread (cached)", files.warm),
        reader("pread (not cached)", files.drop),
        Contender("write + fsync", partial(arrange_write, leave), needs=("numpy",)),
        Contender(
            "write + fsync (early write-back)",
            partial(arrange_write, begin_writing),
            needs=("numpy",),
        ),
    ),
    baseline="memcpy",
    note="Pieces of 8 MiB. `call` of a write is without the fsync.",
)
