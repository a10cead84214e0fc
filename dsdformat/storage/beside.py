"""A checkpoint that is put into a folder which has other files, as torch's own writer does.

Nothing that is there is touched. The data files get their names first, and the manifest is the
last: until then the folder is no checkpoint (spec R-15.5). They get them as links, so that who
cleans up after a crash knows which of the files are those of the save that did not end.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from dsdformat.errors import StorageError, listed, printable
from dsdformat.limits import MANIFEST_LABEL
from dsdformat.storage.guards import only_checkpoint
from dsdformat.storage.local import storage_errors
from dsdformat.storage.partials import remove_folder
from dsdformat.storage.renames import rename_new, sync_folder
from dsdformat.storage.target import LocalTarget

__all__ = ["BesideTarget"]


class BesideTarget(LocalTarget):
    """As `LocalTarget`; but a folder of other files gets the checkpoint beside them.

    A checkpoint that lies beside other files is not replaced, for these would go with it.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """As `LocalTarget`.

        Raises:
            StorageError: `already_exists`, `not_replaceable` or `io_error`.
        """
        super().__init__(path, overwrite=overwrite, guard=only_checkpoint)

    def commit(self) -> None:
        """Make the checkpoint exist under its name, in one step.

        Raises:
            StorageError: `not_replaceable` if a file of one of its names is there.
        """
        if not self._has_others():
            super().commit()
            return
        with storage_errors(self._path):
            sync_folder(self.staging)
            self._put()
            self._published = True
            remove_folder(self.staging)
        self._unlock()

    def _check_replaceable(self) -> None:
        if not self._has_others():
            super()._check_replaceable()

    def _has_others(self) -> bool:
        """Whether there is a folder of files that is no checkpoint."""
        path = self._path
        if not path.is_dir() or os.path.lexists(path / MANIFEST_LABEL):
            return False
        return any(path.iterdir())

    def _put(self) -> None:
        """Give the files their names in the folder, the manifest last."""
        names = sorted(os.listdir(self.staging), key=lambda name: (name == MANIFEST_LABEL, name))
        self._check_free(names)
        done: list[Path] = []
        try:
            for name in names:
                if name == MANIFEST_LABEL:
                    sync_folder(self._path)
                rename_new(self.staging / name, self._path / name)
                done.append(self._path / name)
            sync_folder(self._path)
        except BaseException:
            for path in reversed(done):
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    def _check_free(self, names: list[str]) -> None:
        taken = [printable(name) for name in names if os.path.lexists(self._path / name)]
        if taken:
            raise StorageError(
                f"{self._path} holds {listed(taken)}, and is not a checkpoint",
                code="not_replaceable",
                hint="choose another path, or remove what is meant",
            )
