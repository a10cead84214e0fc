"""Checkpoints in memory, and a storage that counts what is read. For tests and planning."""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping, Sequence

from dsdformat.errors import Problem, StorageError
from dsdformat.storage.base import Buffer, Storage, read_each

__all__ = ["CountingStorage", "MemoryStorage", "MemoryTarget"]


class MemoryStorage:
    """A folder that is a mapping from label to bytes."""

    def __init__(self, files: Mapping[str, Buffer], name: str = "memory") -> None:
        self._files = files
        self._name = name

    @property
    def name(self) -> str:
        """How messages call the folder."""
        return self._name

    def labels(self) -> list[str]:
        """List the files of the folder, in ascending order."""
        return sorted(self._files)

    def nbytes(self, label: str) -> int:
        """Return the length of a file."""
        return len(self._file(label))

    def read_into(self, label: str, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place in a file; return how many bytes there were."""
        piece = memoryview(self._file(label))[byte_offset : byte_offset + len(into)]
        into[: len(piece)] = piece
        return len(piece)

    def read_into_many(self, label: str, byte_offset: int, into: Sequence[memoryview]) -> int:
        """Fill buffers, one after another, from a place on; return how many bytes there were."""
        return read_each(self, label, byte_offset, into)

    def map(self, label: str, *, writable: bool = False) -> memoryview | None:
        """Return a read-only view of a file, or a copy of it that is writable."""
        data = self._file(label)
        return memoryview(bytearray(data)) if writable else memoryview(data).toreadonly()

    def close(self) -> None:
        """Do nothing: memory needs no closing."""

    def _file(self, label: str) -> Buffer:
        if label not in self._files:
            raise Problem("missing_file", f"{self._name} has no file {label}", where=label).error()
        return self._files[label]


class MemoryTarget:
    """Collects a checkpoint in `files`, which is filled at commit."""

    def __init__(self, files: dict[str, bytearray], *, overwrite: bool = False) -> None:
        if files and not overwrite:
            raise StorageError("memory is not empty", code="already_exists")
        self.files = files
        self.past_cache = False  # there is none
        self._staged: dict[str, bytearray] = {}

    @property
    def name(self) -> str:
        """How messages call the final folder."""
        return "memory"

    def create(self, label: str) -> _MemorySink:
        """Begin a new file."""
        if label in self._staged:
            raise StorageError(f"{label} exists", errno=errno.EEXIST)
        self._staged[label] = bytearray()
        return _MemorySink(self._staged[label])

    def commit(self) -> None:
        """Replace the files by the new ones."""
        self.files.clear()
        self.files.update(self._staged)

    def abort(self) -> None:
        """Forget what was written."""
        self._staged.clear()


class _MemorySink:
    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._lock = threading.Lock()

    def write_at(self, byte_offset: int, pieces: Sequence[Buffer]) -> None:
        with self._lock:
            for piece in pieces:
                end = byte_offset + len(piece)
                if len(self._data) < end:
                    self._data.extend(bytes(end - len(self._data)))
                self._data[byte_offset:end] = piece
                byte_offset = end

    def close(self) -> None:
        pass

    def discard(self) -> None:
        pass


class CountingStorage:
    """Pass everything on to another storage, and keep a list of the reads.

    Attributes:
        reads: (label, byte_offset, nbytes) of each read.
    """

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.reads: list[tuple[str, int, int]] = []

    @property
    def name(self) -> str:
        """How messages call the folder."""
        return self._inner.name

    def labels(self) -> list[str]:
        """List the files of the folder, in ascending order."""
        return self._inner.labels()

    def nbytes(self, label: str) -> int:
        """Return the length of a file."""
        return self._inner.nbytes(label)

    def read_into(self, label: str, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place in a file, and note it."""
        self.reads.append((label, byte_offset, len(into)))
        return self._inner.read_into(label, byte_offset, into)

    def read_into_many(self, label: str, byte_offset: int, into: Sequence[memoryview]) -> int:
        """Fill buffers from a place in a file on, and note it as one read."""
        self.reads.append((label, byte_offset, sum(map(len, into))))
        return self._inner.read_into_many(label, byte_offset, into)

    def map(self, label: str, *, writable: bool = False) -> memoryview | None:
        """Return a map of a file, or None."""
        return self._inner.map(label, writable=writable)

    def close(self) -> None:
        """Close the other storage."""
        self._inner.close()
