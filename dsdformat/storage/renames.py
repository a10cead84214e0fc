"""Names of files and folders: given in one step, and durable.

A name is durable once the folder that has it is flushed. What of this a system lacks (an
exchange of two names, links, flushes of folders) is noticed, and done without.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from dsdformat.errors import StorageError
from dsdformat.storage.base import completed
from dsdformat.storage.local import replaced_path, storage_errors
from dsdformat.storage.sink import FileSink

__all__ = [
    "make_folders",
    "rename_new",
    "replace_file",
    "replace_folder",
    "sync_entries",
    "sync_folder",
]

_EXCHANGE, _AT_FDCWD = 2, -100


def replace_file(path: Path, data: bytes) -> None:
    """Write a file beside the others of a folder, in one step, in the place of one of that name."""
    made = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    sink = FileSink(made)
    try:
        with completed(sink):
            sink.write_at(0, [data])
        with storage_errors(path):
            os.rename(made, path)
            sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink()
        raise


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, durably."""
    missing = list(itertools.takewhile(lambda one: not one.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_entries(path: Path) -> None:
    """Flush the entries of a folder and of those above it: who made them may not have.

    A checkpoint is lost with any folder above it. Up to the root of the file system, and those
    that cannot be read left out.
    """
    device = path.stat().st_dev
    for folder in (path, *path.parents[:-1]):
        above = folder.parent.stat()
        if above.st_dev != device:
            break
        with contextlib.suppress(PermissionError):
            _sync_entry(folder, folder.stat().st_ino, device)


@functools.lru_cache(1024)
def _sync_entry(folder: Path, _inode: int, _device: int) -> None:
    """Flush the entry of a folder; it is durable then for as long as the folder is there."""
    sync_folder(folder.parent)


def replace_folder(path: Path, staging: Path) -> Path:
    """Put the new folder in the place of the old one; return where the old one is now."""
    if exchange(staging, path):
        return staging
    replaced = replaced_path(path)
    os.rename(path, replaced)
    try:
        os.rename(staging, path)
    except OSError:
        os.rename(replaced, path)
        raise
    return replaced


def rename_new(staged: Path, path: Path) -> None:
    """Give a file a name that nothing has; by a link, since a rename would replace a file."""
    try:
        os.link(staged, path)
    except FileExistsError:
        raise StorageError(f"{path} exists", code="already_exists") from None
    except OSError:  # a file system without links
        os.rename(staged, path)


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False where the system cannot."""
    import ctypes

    call = _renameat2()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(b))


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    """Look up the system call, once: each look-up takes memory that is never given back."""
    import ctypes

    try:
        return cast("Callable[..., int]", ctypes.CDLL(None, use_errno=True).renameat2)
    except (AttributeError, OSError, TypeError):
        return None


def sync_folder(path: Path) -> None:
    """Flush the names in a folder, where the file system has such a flush."""
    with _folder(path) as fd:
        if fd is None:
            return
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int | None]:
    if not hasattr(os, "O_DIRECTORY"):
        yield None
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)
