"""Writing a checkpoint to a folder of a file system, and making it visible in one step.

Decides where a checkpoint is made before it exists, what a crash leaves, and how an old one is
replaced (spec section 15). A folder `.NAME.dsd-partial-TOKEN` belongs to the process that holds
a lock on it; one that nobody holds is a leftover, and the next writer to NAME removes it. Where
there are no locks, a leftover is what has not changed for a day.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import cast

from dsdformat.errors import ArgumentError, StorageError
from dsdformat.storage.base import completed
from dsdformat.storage.guards import Guard, no_checkpoint
from dsdformat.storage.local import replaced_path, storage_errors
from dsdformat.storage.sink import FileSink

__all__ = [
    "FileSink",
    "FileTarget",
    "JoinedTarget",
    "LocalTarget",
    "locks",
    "make_partial",
    "replace_file",
]

_EXCHANGE, _AT_FDCWD = 2, -100
_STALE_SECONDS = 24 * 3600


class _Staged:
    """Something that is made in a folder beside its final name, which this process has locked."""

    def __init__(self, path: str | os.PathLike[str], overwrite: bool, guard: Guard) -> None:
        if "\0" in os.fspath(path):
            raise ArgumentError("a path cannot hold a NUL", code="bad_argument")
        self._path = Path(os.path.realpath(path))
        self._overwrite = overwrite
        self._guard = guard
        self.past_cache = False
        self._published = False
        with storage_errors(self._path):
            _make_folders(self._path.parent)
            _sync_entries(self._path.parent)
            _clean(self._path, guard)
            self._check_replaceable()
            self.staging, self._lock = make_partial(self._path)

    @property
    def name(self) -> str:
        """How messages call what is made."""
        return str(self._path)

    def create(self, label: str) -> FileSink:
        """Begin a new file in the folder."""
        return FileSink(self.staging / label, past_cache=self.past_cache)

    def abort(self) -> None:
        """Remove what was written; do nothing once it is visible."""
        if not self._published:
            _remove(self.staging)
        self._unlock()

    def _check_replaceable(self) -> None:
        path = self._path
        if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
            return
        fault = self._guard(path)
        if fault is not None:
            raise StorageError(
                f"{path} exists and {fault}; it is never replaced",
                code="not_replaceable",
                hint="choose another path, or remove it first",
            )
        if not self._overwrite:
            raise StorageError(
                f"{path} exists",
                code="already_exists",
                hint="pass overwrite=True to replace it once the new one is complete",
            )

    def _publish(self, staged: Path) -> None:
        """Give what was made its name, in one step."""
        self._check_replaceable()
        old = None
        if staged.is_dir() and self._path.is_dir() and any(self._path.iterdir()):
            old = _replace(self._path, staged)
        elif staged.is_dir() or self._overwrite:
            os.rename(staged, self._path)
        else:
            _rename_new(staged, self._path)
        self._published = True
        _sync_folder(self._path.parent)
        self._unlock()
        if old is not None:  # it goes only after the new name is on the disk
            _remove(old)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                os.close(lock)


class LocalTarget(_Staged):
    """A folder that is made beside its final name."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        guard: Guard | None = None,
    ) -> None:
        """Check the final name, clean up after writers that died, and begin.

        Args:
            path: The final name.
            overwrite: Whether to replace what is there, once the new folder is complete.
            guard: Says what may be replaced; checkpoints of ours if None.

        Raises:
            StorageError: `already_exists`, `not_replaceable` or `io_error`.
        """
        super().__init__(path, overwrite, guard or no_checkpoint)

    def commit(self) -> None:
        """Make the checkpoint exist under its name, in one step.

        Raises:
            StorageError: `already_exists` if another writer was faster; nothing is changed.
        """
        with storage_errors(self._path):
            _sync_folder(self.staging)
            self._publish(self.staging)


class FileTarget(_Staged):
    """One file that is made beside its final name."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """As `LocalTarget`; only a regular file is replaced."""
        super().__init__(path, overwrite, _no_file)

    @property
    def label(self) -> str:
        """Name of the file."""
        return self._path.name

    def sink(self) -> FileSink:
        """Begin the file."""
        return self.create(self.label)

    def commit(self) -> None:
        """Make the file exist under its name, in one step; see `LocalTarget.commit`."""
        with storage_errors(self._path):
            self._publish(self.staging / self.label)
            _remove(self.staging)


def _no_file(path: Path) -> str | None:
    return None if path.is_file() else "is not a file"


class JoinedTarget:
    """The unfinished folder of a coordinator, seen by another writer."""

    def __init__(self, staging: Path) -> None:
        if not staging.is_dir():
            raise StorageError(
                f"{staging} is not there: the coordinator has ended, "
                "or this rank sees other storage"
            )
        self._staging = staging
        self.past_cache = False

    @property
    def name(self) -> str:
        """How messages call the folder."""
        return str(self._staging)

    def create(self, label: str) -> FileSink:
        """Begin a new file in the folder."""
        return FileSink(self._staging / label, past_cache=self.past_cache)

    def join(self, label: str) -> FileSink:
        """Write into a file that the coordinator has begun."""
        return FileSink(self._staging / label, new=False, past_cache=self.past_cache)

    def commit(self) -> None:
        """Do nothing: the coordinator commits."""

    def abort(self) -> None:
        """Do nothing: the coordinator removes the folder."""


def replace_file(path: Path, data: bytes) -> None:
    """Write a file beside the others of a folder, in one step, in the place of one of that name."""
    made = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    sink = FileSink(made)
    try:
        with completed(sink):
            sink.write_at(0, [data])
        with storage_errors(path):
            os.rename(made, path)
            _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink()
        raise


def _make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, durably."""
    missing = list(itertools.takewhile(lambda one: not one.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync_folder(folder.parent)


def _sync_entries(path: Path) -> None:
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
    _sync_folder(folder.parent)


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


def _clean(path: Path, guard: Guard) -> None:
    """Remove what writers to this path left that died, and undo half a replacement.

    What is removed may be the old checkpoint, and the new name not on the disk yet: it is flushed
    before, or a power cut could leave the old name, of a folder whose files are gone.
    """
    replaced = replaced_path(path)
    prefix = f".{path.name}.dsd-partial-"
    leftovers = [path.parent / one for one in os.listdir(path.parent) if one.startswith(prefix)]
    if replaced.is_dir() or leftovers:
        _sync_folder(path.parent)
    if replaced.is_dir():
        if path.is_dir() and any(path.iterdir()) and guard(path) is None:
            _remove(replaced)
        elif not os.path.lexists(path):
            os.rename(replaced, path)
    for leftover in leftovers:
        with contextlib.suppress(BlockingIOError, FileNotFoundError, NotADirectoryError):
            lock = _lock(leftover)
            if lock is not None or _is_stale(leftover):
                _remove(leftover)
            if lock is not None:
                os.close(lock)


def _remove(folder: Path) -> None:
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


def _replace(path: Path, staging: Path) -> Path:
    """Put the new folder in the place of the old one; return where the old one is now."""
    if _exchange(staging, path):
        return staging
    replaced = replaced_path(path)
    os.rename(path, replaced)
    try:
        os.rename(staging, path)
    except OSError:
        os.rename(replaced, path)
        raise
    return replaced


def _rename_new(staged: Path, path: Path) -> None:
    """Give a file a name that nothing has; by a link, since a rename would replace a file."""
    try:
        os.link(staged, path)
    except FileExistsError:
        raise StorageError(f"{path} exists", code="already_exists") from None
    except OSError:  # a file system without links
        os.rename(staged, path)


def _exchange(a: Path, b: Path) -> bool:
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


def _sync_folder(path: Path) -> None:
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
