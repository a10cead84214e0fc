"""Files that lie beside the data of a model and belong to it: its config, tokenizer, card.

Decides which are carried along: by the endings that such files have, never out of another folder,
never what could be run.
"""

from __future__ import annotations

import os

from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, Folder
from dsdformat.errors import printable, raise_problems
from dsdformat.reader import Checkpoint
from dsdformat.storage.base import Storage
from dsdformat.verify import find_side_problems

__all__ = ["find_sides", "own_sides"]

_INDEX = ".index.json"
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
# In caches of models a file is a link to one among `blobs`, two folders up.
_BLOBS = os.path.join("..", "..", "blobs")


def find_sides(folder: Folder) -> dict[str, Bytes]:
    """Return the files of a folder that belong to a model beside its data, by name.

    Raises:
        ConvertError: `foreign_path`: one is a link that leads out of the folder, and not into the
            blobs of a cache of models.
    """
    root = os.path.realpath(folder.name)
    allowed = {root, os.path.realpath(os.path.join(root, _BLOBS))}
    result = {}
    for name in folder.names():
        path = os.path.join(folder.name, name)
        if not _is_side(name) or not os.path.isfile(path):
            continue
        if os.path.dirname(os.path.realpath(path)) not in allowed:
            raise fault(
                "foreign_path",
                folder.name,
                f"{printable(name)} is a link that leads out of the folder",
                hint="put the file itself there, or convert without side files",
            )
        result[name] = folder.file(name)
    return result


def own_sides(checkpoint: Checkpoint) -> dict[str, Bytes]:
    """Return the side files of a checkpoint of ours, compared with their digests.

    Its index, if it has one, says where tensors are in its own files, and is left out.

    Raises:
        FormatError: `missing_file`, `file_size_mismatch` or `side_checksum_mismatch`.
    """
    storage = checkpoint.table.storage
    sides = [one for one in checkpoint.table.body.sides if not one.label.endswith(_INDEX)]
    for side in sides:
        raise_problems(find_side_problems(storage, side))
    return {side.label: _StoredSide(storage, side.label, side.nbytes) for side in sides}


def _is_side(name: str) -> bool:
    wanted = name.endswith(_SUFFIXES) or name in _NAMES
    return wanted and not name.endswith(_INDEX) and not name.startswith(".")


class _StoredSide:
    """A file of a checkpoint."""

    def __init__(self, storage: Storage, label: str, nbytes: int) -> None:
        self.name = label
        self.nbytes = nbytes
        self._storage, self._label = storage, label

    def read_into(self, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place; return how many bytes there were."""
        return self._storage.read_into(self._label, byte_offset, into)
