"""Words that the writers of one checkpoint leave for each other, as files in a folder beside it.

This is how ranks that write in the background agree: they share the folder anyway, and so need no
connection, no port, no order of calls and no thread of a process group, and none of them can be
in the way of what training sends. A rank holds a lock on a file of its own as long as it lives.
That tells of its death at once, but only on the same machine, since file systems over a network may
keep locks to one machine; elsewhere, and without locks, nobody is ever taken for dead.

The folder is a `.NAME.dsd-partial-TOKEN` as the unfinished checkpoint is (spec section 15), so
that what is left of ranks that were killed is removed by the next writer to NAME.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
from pathlib import Path

from dsdformat.errors import StorageError
from dsdformat.storage.local import storage_errors
from dsdformat.storage.partials import locks, make_partial
from dsdformat.storage.sink import FileSink

__all__ = ["Mailbox"]

_WORD, _ALIVE = "word-", "alive-"
_RANK = re.compile("[0-9]{1,9}")
_RESERVED_NBYTES = 4096


class Mailbox:
    """The side of one rank.

    Attributes:
        folder: Where it is; what other ranks pass to `join`.
    """

    def __init__(self, folder: Path, rank: int, lock: int | None = None) -> None:
        """Be there: as long as this is open, others find this rank alive."""
        self.folder = folder
        self._rank = rank
        self._locks = [] if lock is None else [lock]
        try:
            with storage_errors(folder):
                self._locks.append(_be_alive(folder / f"{_ALIVE}{rank}"))
                # Room for a word that tells of a full disk.
                _write(folder / f"draft-{rank}", bytes(_RESERVED_NBYTES))
        except BaseException:
            self.close()
            raise

    @classmethod
    def begin(cls, path: str | os.PathLike[str]) -> Mailbox:
        """Make a mailbox for the writers to a path. For rank 0.

        Raises:
            StorageError: `io_error`.
        """
        real = Path(os.path.realpath(path))
        with storage_errors(real):
            folder, lock = make_partial(real)
        return cls(folder, 0, lock)

    @classmethod
    def join(cls, folder: str, rank: int) -> Mailbox:
        """Join the mailbox that rank 0 has made.

        Raises:
            StorageError: `io_error`: it is not there, or the medium failed.
        """
        return cls(Path(folder), rank)

    def leave(self, word: bytes) -> None:
        """Leave the word of this rank; others see all of it or nothing.

        Raises:
            StorageError: `io_error`.
        """
        place = self.folder / f"{_WORD}{self._rank}"
        with storage_errors(place):
            draft = place.with_name(f"draft-{self._rank}")
            _write(draft, word)
            os.replace(draft, place)

    def words(self) -> set[int]:
        """Return the ranks that have left a word; none if the folder is gone.

        Raises:
            StorageError: `io_error`.
        """
        with storage_errors(self.folder), contextlib.suppress(FileNotFoundError):
            with os.scandir(self.folder) as entries:
                ranks = [entry.name.removeprefix(_WORD) for entry in entries]
            return {int(rank) for rank in ranks if _RANK.fullmatch(rank)}
        return set()

    def word(self, rank: int) -> bytes | None:
        """Return the word of a rank; None if there is none.

        Raises:
            StorageError: `io_error`.
        """
        place = self.folder / f"{_WORD}{rank}"
        with storage_errors(place), contextlib.suppress(FileNotFoundError):
            return place.read_bytes()
        return None

    def is_alive(self, rank: int) -> bool:
        """Whether a rank may still live: False if it is known to have ended.

        Raises:
            StorageError: `io_error`.
        """
        fcntl, machine = locks(), _machine()
        place = self.folder / f"{_ALIVE}{rank}"
        try:
            with storage_errors(place):
                fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        try:
            if fcntl is None or os.read(fd, len(machine) + 1) != machine:
                return True
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it is held
            return True
        finally:
            os.close(fd)
        return False

    def close(self) -> None:
        """Leave; the last one removes the folder, and what the dead have left in it."""
        with contextlib.suppress(OSError):
            (self.folder / f"{_ALIVE}{self._rank}").unlink(missing_ok=True)
        self._unlock()
        with contextlib.suppress(OSError):
            names = os.listdir(self.folder)
            if not any(name.startswith(_ALIVE) for name in names):
                shutil.rmtree(self.folder, ignore_errors=True)

    def bury(self, rank: int) -> None:
        """Remove what shows that a dead rank was there."""
        with contextlib.suppress(OSError):
            (self.folder / f"{_ALIVE}{rank}").unlink(missing_ok=True)

    def _unlock(self) -> None:
        while self._locks:
            with contextlib.suppress(OSError):
                os.close(self._locks.pop())


def _write(place: Path, data: bytes) -> None:
    """Write a file, over the one that may be there, so that a short one takes no more room."""
    sink = FileSink(place, new=not place.exists())
    try:
        sink.write_at(0, [data])
        sink.resize(len(data))
    finally:
        sink.discard()


def _be_alive(place: Path) -> int:
    """Make the file that shows a rank to be there, hold it, and say in it on which machine."""
    fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    fcntl = locks()
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(fd, _machine())
    except BaseException:
        os.close(fd)
        raise
    return fd


def _machine() -> bytes:
    """Return what tells this machine, since it was started, from others."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return platform.node().encode()
