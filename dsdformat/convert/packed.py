"""The bytes of a whole tensor of any checkpoint, in order, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from dsdformat.boxes import Box, flat_boxes, whole
from dsdformat.convert.copying import PIECE_NBYTES, cut
from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.foreign import AnyTensor, read_range
from dsdformat.convert.strided import Dim, copy_strided
from dsdformat.convert.tensor import packed_strides
from dsdformat.format.dtypes import DTYPES

__all__ = ["packed_blocks"]


def packed_blocks(tensor: AnyTensor, order: Sequence[int] | None = None) -> Iterator[memoryview]:
    """Yield the packed little-endian bytes of a tensor; of a long one, a block ahead is read.

    Each block is valid until the next is asked for.

    Args:
        tensor: Of a checkpoint of any kind.
        order: In which order its dims lie, from the outermost; row-major if None.

    Raises:
        What `tensor.read` raises.

    Memory: 16 MiB, or 128 MiB for a tensor that is not stored by rows; more by half in another
        order.
    """
    if tensor.nbytes <= PIECE_NBYTES:
        yield from _blocks(tensor, order, 1)
        return
    blocks = _blocks(tensor, order, 2)
    with ThreadPoolExecutor(1) as reader:
        future = reader.submit(next, blocks, None)
        while (block := future.result()) is not None:
            future = reader.submit(next, blocks, None)
            yield block


def _blocks(tensor: AnyTensor, order: Sequence[int] | None, count: int) -> Iterator[memoryview]:
    """Yield the bytes in so many buffers by turns."""
    order = range(len(tensor.shape)) if order is None else order
    plain = list(order) == list(range(len(tensor.shape)))
    itemsize = DTYPES[tensor.dtype].itemsize
    shape = [tensor.shape[dim] for dim in order]
    buffers = [memoryview(b"")] * count
    for number, (start, stop) in enumerate(_ranges(tensor, plain, itemsize)):
        buffer = buffers[number % count]
        if len(buffer) < (stop - start) * itemsize:
            buffer = memoryview(bytearray((stop - start) * itemsize))
            buffers[number % count] = buffer
        if plain:
            yield read_range(tensor, start, stop, buffer)
            continue
        at = 0
        for piece in flat_boxes(shape, start, stop):
            end, part = at + piece.numel * itemsize, _moved(piece, order)
            _transpose(tensor.read(part), part.shape, order, itemsize, buffer[at:end])
            at = end
        yield buffer[:at]


def _ranges(tensor: AnyTensor, plain: bool, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cut the elements of a tensor into ranges to be read one at a time."""
    if plain:
        yield from cut(tensor, itemsize)
        return
    step, count = max(1, PIECE_NBYTES // itemsize), whole(tensor.shape).numel
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _moved(piece: Box, order: Sequence[int]) -> Box:
    """Return a box of the dims in another order as one of the tensor."""
    place = [0] * len(order)
    for at, dim in enumerate(order):
        place[dim] = at
    return Box(
        tuple(piece.offset[at] for at in place),
        tuple(piece.shape[at] for at in place),
    )


def _transpose(
    data: memoryview, shape: Sequence[int], order: Sequence[int], itemsize: int, into: memoryview
) -> None:
    """Put packed elements into another order of dims."""
    source = packed_strides(shape)
    target = packed_strides([shape[dim] for dim in order])
    dims = [
        Dim(shape[dim], source[dim] * itemsize, step * itemsize)
        for dim, step in zip(order, target, strict=True)
    ]
    copy_strided(MemoryBytes(data), 0, dims, itemsize, into, 0)
