"""Writing a checkpoint to a folder of a file system, and making it visible in one step.

Decides when an old one may be replaced, and what the steps of a commit are (spec section 15).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from dsdformat.errors import ArgumentError, StorageError
from dsdformat.storage.guards import Guard, no_checkpoint
from dsdformat.storage.local import storage_errors
from dsdformat.storage.partials import clean_leftovers, make_partial, remove_folder
from dsdformat.storage.renames import (
    make_folders,
    rename_new,
    replace_folder,
    sync_entries,
    sync_folder,
)
from dsdformat.storage.sink import FileSink

__all__ = ["FileSink", "FileTarget", "JoinedTarget", "LocalTarget"]


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
            make_folders(self._path.parent)
            sync_entries(self._path.parent)
            clean_leftovers(self._path, guard)
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
            remove_folder(self.staging)
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
            old = replace_folder(self._path, staged)
        elif staged.is_dir() or self._overwrite:
            os.rename(staged, self._path)
        else:
            rename_new(staged, self._path)
        self._published = True
        sync_folder(self._path.parent)
        self._unlock()
        if old is not None:  # it goes only after the new name is on the disk
            remove_folder(old)

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
            sync_folder(self.staging)
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
            remove_folder(self.staging)


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
