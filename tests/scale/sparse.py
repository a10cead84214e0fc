"""A target that leaves holes where zeros are written, and data that is made while it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dsdformat.storage.base import Buffer
from dsdformat.storage.target import FileSink, LocalTarget

__all__ = ["SparseTarget", "marked_zeros"]

PIECE = 4 << 20


class SparseTarget(LocalTarget):
    """A folder whose files have holes: large, and small on the disk."""

    def create(self, label: str) -> FileSink:
        return _SparseSink(self.staging / label)


class _SparseSink(FileSink):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._end = 0

    def write_at(self, byte_offset: int, pieces: Sequence[Buffer]) -> None:
        for piece in pieces:
            if len(piece) % 8 or np.frombuffer(piece, np.uint64).any():
                super().write_at(byte_offset, [piece])
            byte_offset += len(piece)
        self._end = max(self._end, byte_offset)

    def close(self) -> None:
        os.truncate(self._path, self._end)
        super().close()


def marked_zeros(nbytes: int, marks: dict[int, bytes]) -> Callable[[], Iterator[memoryview]]:
    """Zeros, but for some bytes at some places; a few megabytes at a time, of one buffer."""

    def pieces() -> Iterator[memoryview]:
        zeros = memoryview(bytes(PIECE))
        for start in range(0, nbytes, PIECE):
            size = min(PIECE, nbytes - start)
            inside = {at: data for at, data in marks.items() if start - 64 < at < start + size}
            if not inside:
                yield zeros[:size]
                continue
            piece = bytearray(size)
            for at, data in inside.items():
                for index, byte in enumerate(data):
                    if start <= at + index < start + size:
                        piece[at + index - start] = byte
            yield memoryview(piece)

    return pieces
