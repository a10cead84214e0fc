"""Copy tensors from where they are read to places in files, in pieces, by several threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dsdformat.boxes import Box, whole
from dsdformat.convert.foreign import AnyTensor, read_range
from dsdformat.convert.numbers import find_numpy
from dsdformat.convert.outputs import Meter
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import MIB
from dsdformat.storage.base import Sink
from dsdformat.workers import Workers

__all__ = ["PIECE_NBYTES", "Copy", "copy_tensors", "cut"]

PIECE_NBYTES = 8 * MIB
WIDE_NBYTES = 64 * MIB  # of a tensor that is not stored as ranges of rows: fewer, longer reads


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor, and where its packed bytes go.

    Attributes:
        tensor: Where they are read.
        sink: The file.
        byte_offset: Where they begin in it.
    """

    tensor: AnyTensor
    sink: Sink
    byte_offset: int


def copy_tensors(
    copies: Sequence[Copy], meter: Meter, threads: int, *, part: int = 0, of: int = 1
) -> None:
    """Copy tensors; each piece is written as soon as it is read.

    Args:
        copies: All of them.
        meter: Its `total` becomes how much is copied here.
        threads: How many read and write.
        part, of: Which of so many parts of the bytes to copy, if not all of them.

    Raises:
        DsdError: what reading a tensor raises, or writing a file; other threads have ended.

    Memory: per thread a piece: 8 MiB, or 64 MiB of tensors that are not stored by rows.
    """
    workers = Workers(threads)
    if of == 1:
        meter.total = sum(copy.tensor.nbytes for copy in copies)
    else:
        meter.total = sum(piece.nbytes for piece in _pieces(copies, part, of))
    buffers = _Buffers()
    try:
        workers.run(
            partial(_copy_piece, piece, meter, buffers) for piece in _pieces(copies, part, of)
        )
    finally:
        workers.close()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of elements of a tensor that is copied at once."""

    copy: Copy
    start: int
    stop: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.itemsize


def _pieces(copies: Sequence[Copy], part: int, of: int) -> Iterator[_Piece]:
    """Yield a run of all pieces: those that begin in one of so many parts of the bytes."""
    total = sum(copy.tensor.nbytes for copy in copies)
    done = 0
    for copy in copies:
        if done * of >= total * (part + 1):
            return
        done += copy.tensor.nbytes
        if done * of < total * part:
            continue
        at, itemsize = done - copy.tensor.nbytes, DTYPES[copy.tensor.dtype].itemsize
        for start, stop in cut(copy.tensor, itemsize):
            if total * part <= (at + start * itemsize) * of < total * (part + 1):
                yield _Piece(copy, start, stop, itemsize)


def _copy_piece(piece: _Piece, meter: Meter, buffers: _Buffers) -> None:
    copy, buffer = piece.copy, buffers.of(piece.nbytes)
    data = read_range(copy.tensor, piece.start, piece.stop, buffer)
    copy.sink.write_at(copy.byte_offset + piece.start * piece.itemsize, [data])
    meter.add(len(data))


class _Buffers:
    """A buffer for each thread, as long as the longest piece so far."""

    def __init__(self) -> None:
        self._local = threading.local()

    def of(self, nbytes: int) -> memoryview:
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._local.buffer = memoryview(bytearray(nbytes))
        return buffer[:nbytes]


def cut(tensor: AnyTensor, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cut a tensor's elements, in row-major order, into ranges to be read one at a time.

    A range begins where a stored piece does, if those are ranges of rows, so that no block of
    such a piece is read, and hashed, for two ranges. Of pieces that are not, many rows are read
    at once.
    """
    count = whole(tensor.shape).numel
    row = math.prod(tensor.shape[1:])
    tiles = tensor.tiles()
    wide = not tensor.is_packed() or any(box.shape[1:] != tensor.shape[1:] for box in tiles)
    step = max(1, (WIDE_NBYTES if wide else PIECE_NBYTES) // itemsize)
    if wide:
        find_numpy()  # once it is loaded, it carries short runs
    if wide and row and step > row:
        step -= step % row
    begin = 0
    for end in [*_borders(tiles, row), count]:
        if end - begin >= step // 4 or end == count:
            for start in range(begin, end, step):
                yield start, min(start + step, end)
            begin = max(begin, end)


def _borders(tiles: Sequence[Box], row: int) -> list[int]:
    """Return where rows begin that are the first of a stored piece."""
    return sorted({box.offset[0] * row for box in tiles if box.offset and box.offset[0]})
