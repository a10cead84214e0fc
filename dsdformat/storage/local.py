"""Checkpoints in a folder of a local or mounted file system: reading.

Files are opened relative to the folder's descriptor, without following links, so that a folder
that is replaced meanwhile is never mixed with its successor. Writing is `target.py`.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsdformat.errors import ArgumentError, Problem, StorageError

__all__ = ["LocalStorage", "find_names", "replaced_path", "storage_errors"]

OPEN_FILES_MAX = 64
_REPLACED = ".dsd-replaced"
_READ_MAX = 1 << 30  # Linux moves at most 2 GiB - 4 KiB in one call
_BUFFERS_MAX = 1024  # of one call, IOV_MAX of Linux
if "SC_IOV_MAX" in getattr(os, "sysconf_names", ()) and os.sysconf("SC_IOV_MAX") > 0:
    _BUFFERS_MAX = min(_BUFFERS_MAX, os.sysconf("SC_IOV_MAX"))


class LocalStorage:
    """A checkpoint's folder on a file system."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the folder.

        Where the folder is missing and a writer was stopped between the two renames of a
        replacement, the old checkpoint beside it is opened instead (spec R-15.3).
        """
        self._path = Path(path)
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()
        self._folder: int | None = None
        self._closed = self._replaced = False
        self._name = self._path
        for last in (False, False, False, True):
            self._path = _find_folder(self._name)
            if os.open not in os.supports_dir_fd:
                break
            with storage_errors(self._path):
                try:
                    self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    break
                except FileNotFoundError:  # it was replaced just now
                    if last:
                        raise

    @property
    def name(self) -> str:
        """How messages call the folder."""
        return str(self._path)

    def is_replaced(self) -> bool:
        """Whether another folder has its name by now; once closed, whether one had it then.

        Its files may be gone: who sees one missing can open the other.
        """
        if self._folder is not None:
            try:
                here = os.stat(self._name)
            except OSError:
                return False
            self._replaced = not os.path.samestat(here, os.fstat(self._folder))
        return self._replaced

    def labels(self) -> list[str]:
        """List the files of the folder, in ascending order."""
        with storage_errors(self._path):
            return sorted(os.listdir(self._path if self._folder is None else self._folder))

    def nbytes(self, label: str) -> int:
        """Return the length of a file."""
        with self._opened(label) as file, storage_errors(self._path / label):
            return os.fstat(file.fd).st_size

    def read_into(self, label: str, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place in a file; return how many bytes there were."""
        done = 0
        file = self._acquire(label)
        try:
            while done < len(into):
                count = file.read(byte_offset + done, [into[done : done + _READ_MAX]])
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise _storage_error(error, self._path / label) from error
        finally:
            file.release()
        return done

    def read_into_many(self, label: str, byte_offset: int, into: Sequence[memoryview]) -> int:
        """Fill buffers, one after another, from a place on; return how many bytes there were."""
        done, left = 0, _Unfilled(into)
        file = self._acquire(label)
        try:
            while some := left.next():
                count = file.read(byte_offset + done, some)
                if count == 0:
                    break
                done += count
                left.fill(count)
        except OSError as error:
            raise _storage_error(error, self._path / label) from error
        finally:
            file.release()
        return done

    def map(self, label: str, *, writable: bool = False) -> memoryview | None:
        """Return a map of a file; one that is writable is copy-on-write."""
        with self._opened(label) as file, storage_errors(self._path / label):
            return file.map(writable)

    def close(self) -> None:
        """Close all files; reads that are under way finish first."""
        self.is_replaced()
        with self._lock:
            self._closed = True
            files, self._files = list(self._files.values()), OrderedDict()
            folder, self._folder = self._folder, None
        for file in files:
            file.release()
        if folder is not None:
            os.close(folder)

    @contextlib.contextmanager
    def _opened(self, label: str) -> Iterator[_File]:
        file = self._acquire(label)
        try:
            yield file
        finally:
            file.release()

    def _acquire(self, label: str) -> _File:
        with self._lock:
            if self._closed:
                raise ArgumentError(f"{self._path} was closed", code="closed")
            file = self._files.get(label)
            if file is None:
                file = self._files[label] = self._open(label)
            self._files.move_to_end(label)
            file.acquire()
            spare = None
            if len(self._files) > OPEN_FILES_MAX:
                spare = self._files.popitem(last=False)[1]
        if spare is not None:
            spare.release()
        return file

    def _open(self, label: str) -> _File:
        path = self._path / label
        flags = os.O_RDONLY
        for flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
            flags |= getattr(os, flag, 0)
        try:
            if self._folder is None:
                if path.is_symlink():
                    raise OSError(errno.ELOOP, "a symbolic link", str(path))
                fd = os.open(path, flags)
            else:
                fd = os.open(label, flags, dir_fd=self._folder)
        except FileNotFoundError:
            raise self._missing(label) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK, errno.EISDIR):
                raise _not_regular(path) from None
            raise _storage_error(error, path) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _not_regular(path)
        return _File(fd)

    def _missing(self, label: str) -> Exception:
        hint = None
        if self.is_replaced():
            hint = "the checkpoint was replaced while it was read; open it again"
        text = f"{self._path} has no file {label}"
        return Problem("missing_file", text, where=label, hint=hint).error()


class _File:
    """An open descriptor that lives until the cache and all readers let go of it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1
        self._lock = threading.Lock()
        self._maps: dict[bool, memoryview] = {}

    def read(self, byte_offset: int, into: Sequence[memoryview]) -> int:
        """Fill some of the buffers, one after another; nothing is read at the file's end."""
        if hasattr(os, "preadv"):
            return os.preadv(self.fd, into, byte_offset)
        first = next(filter(None, into), memoryview(b""))
        with self._lock:
            os.lseek(self.fd, byte_offset, os.SEEK_SET)
            data = os.read(self.fd, len(first))
        first[: len(data)] = data
        return len(data)

    def map(self, writable: bool) -> memoryview:
        """Map the file once; all who ask share it, so that maps take one descriptor."""
        with self._lock:
            if writable not in self._maps:
                access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
                empty = os.fstat(self.fd).st_size == 0
                nothing = bytearray() if writable else b""
                whole = nothing if empty else mmap.mmap(self.fd, 0, access=access)
                self._maps[writable] = memoryview(whole)
            return self._maps[writable]

    def acquire(self) -> None:
        with self._lock:
            self.users += 1

    def release(self) -> None:
        with self._lock:
            self.users -= 1
            last = self.users == 0
        if last:
            os.close(self.fd)


class _Unfilled:
    """Buffers that are filled one after another, by calls that may stop anywhere."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._into = into
        self._some: Sequence[memoryview] = ()
        self._first = 0  # that is not full
        self._held = 0  # of its bytes

    def next(self) -> Sequence[memoryview]:
        """Return what is to be filled next, as much as one call takes; nothing at the end."""
        self._some = self._into[self._first : self._first + _BUFFERS_MAX]
        if self._held:
            self._some = [self._some[0][self._held :], *self._some[1:]]
        return self._some

    def fill(self, count: int) -> None:
        """Note how many bytes of that were filled."""
        if count == sum(map(len, self._some)):  # as mostly
            self._first, self._held = self._first + len(self._some), 0
            return
        count += self._held
        while self._first < len(self._into) and count >= len(self._into[self._first]):
            count -= len(self._into[self._first])
            self._first += 1
        self._held = count


def _find_folder(path: Path) -> Path:
    """Return the folder, or the old checkpoint beside it while the new one takes its name."""
    replaced = replaced_path(path)
    for _ in range(3):  # the new one may take the name, and the old one go, between two looks
        if _is_folder(path):
            return path
        if os.path.lexists(path):
            break
        if _is_folder(replaced):
            return replaced
    raise _no_folder(path)


def _is_folder(path: Path) -> bool:
    with storage_errors(path):
        return path.is_dir()


def _no_folder(path: Path) -> Exception:
    if os.path.lexists(path):
        return Problem(
            "no_manifest",
            f"{path} is not a folder",
            hint="a checkpoint is a folder; give the folder, not a file in it",
        ).error()
    unfinished = any(path.parent.glob(f".{glob.escape(path.name)}.dsd-partial-*"))
    hint = "a save to it has not been completed" if unfinished else None
    return Problem("no_manifest", f"{path} does not exist", hint=hint).error()


def replaced_path(path: Path) -> Path:
    """Where the old checkpoint lies while a new one takes its name, without an exchange."""
    return path.parent / f".{path.name}{_REPLACED}"


def find_names(folder: Path) -> set[str]:
    """List the folders in a folder, without hidden ones; none if it is missing.

    One whose checkpoint is about to be replaced is listed, as it can be opened.
    """
    names: set[str] = set()
    with storage_errors(folder):
        try:
            entries = os.scandir(folder)
        except FileNotFoundError:
            return names
        with entries:
            folders = [entry.name for entry in entries if entry.is_dir()]
    for name in folders:
        if not name.startswith("."):
            names.add(name)
        elif name.endswith(_REPLACED):
            names.add(name[1 : -len(_REPLACED)])
    return names


@contextlib.contextmanager
def storage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the system into a `StorageError` that names the file."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise _storage_error(error, path) from error


def _storage_error(error: OSError, path: str | os.PathLike[str]) -> StorageError:
    hint = None
    if error.errno == errno.ENOSPC:
        hint = "free some space; what was written so far is removed, an older checkpoint is whole"
    return StorageError(
        f"{os.fspath(path)}: {error.strerror or error}", errno=error.errno, hint=hint
    )


def _not_regular(path: Path) -> Exception:
    return Problem(
        "not_regular_file",
        f"{path} is a link, a folder or a special file; only regular files are read",
        where=path.name,
        hint="copy the file itself into the folder",
    ).error()
