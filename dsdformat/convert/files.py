"""Bytes of a foreign file, read by position: a file, a part of one, or memory.

Decides how files are opened: through `storage`, by plain names below one folder. A link is
followed to the file that it leads to, since caches of models are made of links; what is no
regular file is refused. Every length is compared with what is there before anything is allocated.
"""

from __future__ import annotations

import os
from typing import Protocol

from dsdformat.convert.faults import fault
from dsdformat.errors import Problem, printable
from dsdformat.storage.local import LocalStorage, storage_errors

__all__ = [
    "Bytes",
    "FileBytes",
    "Folder",
    "MemoryBytes",
    "Window",
    "find_file",
    "read_bytes",
    "read_exactly",
]

PathLike = str | os.PathLike[str]
_FORBIDDEN = ("/", "\\", "\0", ":")


class Bytes(Protocol):
    """Bytes of a known length. Safe to read from several threads."""

    @property
    def name(self) -> str:
        """How messages call them."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def read_into(self, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place; return how many bytes there were."""


class MemoryBytes:
    """Bytes in memory."""

    def __init__(self, data: bytes | bytearray | memoryview, name: str = "memory") -> None:
        self.name = name
        self._data = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self.nbytes = len(self._data)

    def read_into(self, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place; return how many bytes there were."""
        piece = self._data[byte_offset : byte_offset + len(into)]
        into[: len(piece)] = piece
        return len(piece)


class Window:
    """A part of other bytes.

    Attributes:
        whole: What it is a part of.
        byte_offset: Where it begins in the whole.
    """

    def __init__(self, whole: Bytes, byte_offset: int, nbytes: int, name: str = "") -> None:
        """Name a part.

        Raises:
            ConvertError: `foreign_truncated`: it is not inside of the whole.
        """
        if byte_offset < 0 or nbytes < 0 or byte_offset + nbytes > whole.nbytes:
            raise fault(
                "foreign_truncated",
                whole.name,
                f"{name or 'a part'} is said to be bytes {byte_offset}..{byte_offset + nbytes} "
                f"of {whole.nbytes}",
                hint="the file is cut short, or damaged",
            )
        self.name = f"{whole.name}: {name}" if name else whole.name
        self.byte_offset, self.nbytes = byte_offset, nbytes
        self.whole = whole

    def read_into(self, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place; return how many bytes there were."""
        room = max(0, self.nbytes - byte_offset)
        return self.whole.read_into(self.byte_offset + byte_offset, into[:room])


class FileBytes:
    """A file of a folder."""

    def __init__(self, storage: LocalStorage, label: str, path: str) -> None:
        self.name = path
        self._storage, self._label = storage, label
        self.nbytes = storage.nbytes(label)

    def read_into(self, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place; return how many bytes there were."""
        return self._storage.read_into(self._label, byte_offset, into)

    def map(self, *, writable: bool = False) -> memoryview | None:
        """Return a map of the file; one that is writable is copy-on-write."""
        return self._storage.map(self._label, writable=writable)


class Folder:
    """A folder of foreign files; a context manager."""

    def __init__(self, path: PathLike) -> None:
        self.name = os.fspath(path)
        self._storages: dict[str, LocalStorage] = {}

    def names(self) -> list[str]:
        """List what the folder holds, in ascending order."""
        with storage_errors(self.name):
            return sorted(os.listdir(self.name))

    def file(self, name: str) -> Bytes:
        """Open a file of the folder.

        Args:
            name: A plain name. One that comes from a file is not trusted: it may not lead out.

        Raises:
            ConvertError: `foreign_path`: not a plain name.
            FormatError: `missing_file` or `not_regular_file`.
            StorageError: the operating system reported an error.
        """
        if name in ("", ".", "..") or any(char in name for char in _FORBIDDEN) or _is_no_text(name):
            raise fault(
                "foreign_path",
                self.name,
                f"{printable(ascii(name))} is not the plain name of a file in the folder",
                hint="files are read from one folder alone",
            )
        path = os.path.join(self.name, name)
        parent, label = os.path.split(os.path.realpath(path))
        if not os.path.isdir(parent):
            raise Problem("missing_file", f"{path} does not exist", where=label).error()
        if parent not in self._storages:
            self._storages[parent] = LocalStorage(parent)
        return FileBytes(self._storages[parent], label, path)

    def close(self) -> None:
        """Close all files."""
        for storage in self._storages.values():
            storage.close()


def _is_no_text(name: str) -> bool:
    """Whether the operating system has no bytes for a name: it holds lone surrogates."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return True
    return False


def find_file(source: Bytes, byte_offset: int) -> tuple[FileBytes, int] | None:
    """Return the file that a place in some bytes lies in, and where; None if they are in none."""
    while isinstance(source, Window):
        byte_offset += source.byte_offset
        source = source.whole
    return (source, byte_offset) if isinstance(source, FileBytes) else None


def read_exactly(source: Bytes, byte_offset: int, into: memoryview) -> None:
    """Fill a buffer.

    Raises:
        ConvertError: `foreign_truncated`: there is not so much.
    """
    if source.read_into(byte_offset, into) != len(into):
        raise fault(
            "foreign_truncated",
            source.name,
            f"ends before byte {byte_offset + len(into)}",
            hint="the file is cut short, or was changed while it was read",
        )


def read_bytes(source: Bytes, byte_offset: int, nbytes: int, what: str = "it") -> bytes:
    """Return some bytes, of which it is checked first that they are there.

    Raises:
        ConvertError: `foreign_truncated`.

    Memory: the bytes, twice.
    """
    if byte_offset < 0 or nbytes < 0 or byte_offset + nbytes > source.nbytes:
        raise fault(
            "foreign_truncated",
            source.name,
            f"{what} needs bytes {byte_offset}..{byte_offset + nbytes} of {source.nbytes}",
            hint="the file is cut short, or damaged",
        )
    buffer = bytearray(nbytes)
    read_exactly(source, byte_offset, memoryview(buffer))
    return bytes(buffer)
