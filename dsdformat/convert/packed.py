"""The bytes of a whole tensor of any checkpoint, in order, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsdformat.boxes import Box, flat_boxes, whole
from dsdformat.convert.copying import PIECE_NBYTES, cut
from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.foreign import AnyTensor
from dsdformat.convert.strided import Dim, copy_strided
from dsdformat.convert.tensor import packed_strides
from dsdformat.format.dtypes import DTYPES

__all__ = ["packed_blocks"]


def packed_blocks(
    tensor: AnyTensor, order: Sequence[int] | None = None, box: Box | None = None
) -> Iterator[memoryview]:
    """Yield the packed little-endian bytes of a box of a tensor, in one buffer.

    Each block is valid until the next is asked for.

    Args:
        tensor: Of a checkpoint of any kind.
        order: In which order its dims lie, from the outermost; row-major if None.
        box: The whole tensor if None.

    Raises:
        What `tensor.read` raises.

    Memory: 8 MiB, or 64 MiB for a tensor that is not stored by rows; twice that in another order.
    """
    box = whole(tensor.shape) if box is None else box
    order = range(len(box.shape)) if order is None else order
    plain = list(order) == list(range(len(box.shape)))
    itemsize = DTYPES[tensor.dtype].itemsize
    shape = [box.shape[dim] for dim in order]
    buffer = memoryview(b"")
    for start, stop in _ranges(tensor, box, plain, itemsize):
        if len(buffer) < (stop - start) * itemsize:
            buffer = memoryview(bytearray((stop - start) * itemsize))
        at = 0
        for piece in flat_boxes(shape, start, stop):
            end = at + piece.numel * itemsize
            part = _moved(piece, order, box)
            if plain:
                tensor.read(part, into=buffer[at:end])
            else:
                _transpose(tensor.read(part), part.shape, order, itemsize, buffer[at:end])
            at = end
        yield buffer[:at]


def _ranges(tensor: AnyTensor, box: Box, plain: bool, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cut the elements of a box into ranges to be read one at a time."""
    if plain and box.shape == tensor.shape:
        yield from cut(tensor, itemsize)
        return
    step = max(1, PIECE_NBYTES // itemsize)
    for start in range(0, box.numel, step):
        yield start, min(start + step, box.numel)


def _moved(piece: Box, order: Sequence[int], box: Box) -> Box:
    """Return a box of the dims in another order as one of the tensor."""
    place = [0] * len(order)
    for at, dim in enumerate(order):
        place[dim] = at
    return Box(
        tuple(piece.offset[place[dim]] + begin for dim, begin in enumerate(box.offset)),
        tuple(piece.shape[place[dim]] for dim in range(len(order))),
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
