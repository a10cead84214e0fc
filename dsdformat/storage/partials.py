"""Folders in which checkpoints are made before they exist: whose they are, and what is left over.

A folder `.NAME.dsd-partial-TOKEN` belongs to the process that holds a lock on it; one that nobody
holds is a leftover, and the next writer to NAME removes it. Where there are no locks, a leftover
is what has not changed for a day.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from pathlib import Path
from types import ModuleType

from dsdformat.limits import MANIFEST_LABEL
from dsdformat.storage.guards import Guard
from dsdformat.storage.local import replaced_path
from dsdformat.storage.renames import sync_folder

__all__ = ["clean_leftovers", "locks", "make_partial", "remove_folder"]

_STALE_SECONDS = 24 * 3600


def make_partial(path: Path) -> tuple[Path, int | None]:
    """Make a folder beside a final name that belongs to this process, and its lock if there is one.

    The next writer to that name removes it, once nobody holds the lock.
    """
    while True:
        staging = path.parent / f".{path.name}.dsd-partial-{os.urandom(4).hex()}"
        try:
            staging.mkdir()
        except FileExistsError:
            continue
        try:
            return staging, _lock(staging)
        except (BlockingIOError, FileNotFoundError):
            continue  # another writer took it for a leftover, between mkdir and the lock
        except BaseException:
            with contextlib.suppress(OSError):
                staging.rmdir()
            raise


def clean_leftovers(path: Path, guard: Guard) -> None:
    """Remove what writers to this path left that died, and undo half a replacement.

    What is removed may be the old checkpoint, and the new name not on the disk yet: it is flushed
    before, or a power cut could leave the old name, of a folder whose files are gone.
    """
    replaced = replaced_path(path)
    prefix = f".{path.name}.dsd-partial-"
    leftovers = [path.parent / one for one in os.listdir(path.parent) if one.startswith(prefix)]
    if replaced.is_dir() or leftovers:
        sync_folder(path.parent)
    if replaced.is_dir():
        if path.is_dir() and any(path.iterdir()) and guard(path) is None:
            remove_folder(replaced)
        elif not os.path.lexists(path):
            os.rename(replaced, path)
    for leftover in leftovers:
        with contextlib.suppress(BlockingIOError, FileNotFoundError, NotADirectoryError):
            lock = _lock(leftover)
            if lock is not None or _is_stale(leftover):
                _take_back(leftover, path)
                remove_folder(leftover)
            if lock is not None:
                os.close(lock)


def _take_back(leftover: Path, path: Path) -> None:
    """Remove what a writer that died had put into a folder of other files, without the manifest."""
    if not path.is_dir() or os.path.lexists(path / MANIFEST_LABEL):
        return
    for name in os.listdir(leftover):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(leftover / name), os.lstat(path / name)):
                (path / name).unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder that is no checkpoint any more; what cannot be removed is a leftover."""
    with contextlib.suppress(OSError):  # `rmtree` still raises where a folder cannot be closed
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """Lock a folder for this process; None where the system or the file system has no locks.

    Raises:
        BlockingIOError: another process holds it.
        FileNotFoundError: it is gone.
    """
    fcntl = locks()
    if fcntl is None:
        return None
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
            return None
        raise
    return fd


def _is_stale(folder: Path) -> bool:
    """Whether nothing in a folder has changed for a day: all that tells where locks do not."""
    with os.scandir(folder) as entries:
        times = [folder.stat().st_mtime, *(entry.stat().st_mtime for entry in entries)]
    return time.time() - max(times) > _STALE_SECONDS


def locks() -> ModuleType | None:
    """Return the module that locks files; None where the system has none."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl
