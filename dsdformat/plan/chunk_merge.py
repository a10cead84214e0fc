"""Join the chunk columns of many writers, tensor by tensor, each in the order of offsets.

Pure, and of the standard library. A thousand ranks send some million rows; no object is made of a
row, and each step over a column is a single call.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from dsdformat.boxes import Box, cut_dims
from dsdformat.format.checks import find_tiling_fault
from dsdformat.format.manifest import ChunkRows
from dsdformat.limits import CUT_DIMS_MAX
from dsdformat.plan.chunk_bands import Band, WriterChunks, bands_of, joined_rows
from dsdformat.plan.tilings import find_tiling, flat_offsets

__all__ = ["WriterChunks", "find_gap", "find_gaps", "merge_rows", "whole_boxes"]

_SHAPES_KEPT = 32

Found = TypeVar("Found")


def merge_rows(
    writers: Sequence[WriterChunks], shapes: Sequence[Sequence[int]]
) -> tuple[array[int], ChunkRows]:
    """Join the chunks of all writers.

    Args:
        writers: In the order of ranks.
        shapes: Of the merged tensors.

    Returns:
        How many chunks each tensor has, and the chunks in the order of tensors and offsets.

    Complexity: linear in the chunks: about 0.2 µs for one of a tensor of which most writers that
    know it have as many, 1 µs for others; and n log n where those of a tensor are not in order.
    Memory: 56 bytes for each chunk beside the result, and 16 for each of its dims.
    """
    bands, pool = bands_of(writers, shapes)
    of_tensor: dict[int, list[Band]] = {}
    for band in bands:
        for tensor in band.places:
            of_tensor.setdefault(tensor, []).append(band)
    orders = _ByShape(_order)
    merged, counts = joined_rows(()), array("I")
    for tensor, shape in enumerate(shapes):
        found = [rows for band in of_tensor.get(tensor, ()) for rows in band.rows(tensor)]
        rows = _arranged(shape, joined_rows(found + pool.rows(tensor)), orders)
        counts.append(len(rows.file))
        for column, more in zip(merged[1:], rows[1:], strict=True):
            column.extend(more)
    return counts, merged


def find_gaps(
    shapes: Sequence[Sequence[int]], counts: Sequence[int], numbers: array[int]
) -> Iterator[tuple[int, str]]:
    """Say of which tensors the chunks do not tile them, and how they fail to.

    Args:
        shapes: Of the tensors.
        counts: How many chunks each has.
        numbers: Of their boxes, in the order of tensors and offsets.

    Complexity: linear in the chunks: 10 ns for each where tensors of one shape have the same boxes.
    """
    gaps = _ByShape(lambda shape, boxes: find_gap(shape, len(boxes) // (2 * len(shape)), boxes))
    at = 0
    for tensor, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        end = at + 2 * len(shape) * count
        boxes = numbers[at:end]
        gap = gaps.of(shape, boxes) if shape else find_gap(shape, count, boxes)
        if gap is not None:
            yield tensor, gap
        at = end


def find_gap(shape: Sequence[int], count: int, numbers: array[int]) -> str | None:
    """Say how boxes, in the order of their offsets, fail to tile a shape; None if they tile it.

    Args:
        shape: Of the tensor.
        count: Number of boxes.
        numbers: Of each box its offset and its shape.
    """
    ndim = len(shape)
    if count == 1 and numbers.tolist() == [*[0] * ndim, *shape]:
        return None
    if count > 1 and ndim and 0 not in shape:
        offsets = [numbers[dim :: 2 * ndim] for dim in range(ndim)]
        sizes = [numbers[ndim + dim :: 2 * ndim] for dim in range(ndim)]
        if find_tiling(shape, offsets, sizes) is not None:
            return None
    boxes = []
    for chunk in range(count):
        box = numbers[2 * ndim * chunk : 2 * ndim * (chunk + 1)]
        boxes.append(Box(tuple(box[:ndim]), tuple(box[ndim:])))
    return _find_gap(tuple(shape), boxes)


def whole_boxes(shapes: Sequence[Sequence[int]]) -> array[int]:
    """Return offset and shape of each tensor as one box."""
    zeros = {ndim: (0,) * ndim for ndim in set(map(len, shapes))}
    pairs = ((zeros[len(shape)], shape) for shape in shapes)
    return array("Q", itertools.chain.from_iterable(itertools.chain.from_iterable(pairs)))


class _ByShape(Generic[Found]):
    """Keeps for each shape what was found of its boxes last; tensors of one mostly have the same.

    To compare boxes takes a hundredth of looking at them.
    """

    def __init__(self, find: Callable[[Sequence[int], array[int]], Found]) -> None:
        self._find = find
        self._known: dict[Sequence[int], tuple[array[int], Found]] = {}

    def of(self, shape: Sequence[int], numbers: array[int]) -> Found:
        """Return what is found of boxes."""
        last = self._known.get(shape)
        if last is not None and last[0] == numbers:
            return last[1]
        found = self._find(shape, numbers)
        if last is not None or len(self._known) < _SHAPES_KEPT:
            self._known[shape] = numbers, found
        return found


def _arranged(
    shape: Sequence[int], rows: ChunkRows, orders: _ByShape[list[int] | None]
) -> ChunkRows:
    """Put the chunks of one tensor in the order of their offsets."""
    ndim = len(shape)
    if len(rows.file) < 2 or ndim == 0 or 0 in shape:
        return rows
    _, *cells, numbers = rows
    order = orders.of(shape, numbers)
    if order is None:
        return rows
    found = [array(cell.typecode, map(cell.__getitem__, order)) for cell in cells]
    boxes = array("Q")
    for at in order:
        boxes.extend(numbers[2 * ndim * at : 2 * ndim * (at + 1)])
    return ChunkRows._make([0, *found, boxes])


def _order(shape: Sequence[int], numbers: array[int]) -> list[int] | None:
    """Return the order of boxes by their offsets; None if they are in it."""
    ndim = len(shape)
    keys = flat_offsets(shape, [numbers[dim :: 2 * ndim] for dim in range(ndim)])
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return None if order == list(range(len(keys))) else order


def _find_gap(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    if not boxes:
        return "no writer has a chunk of it"
    if not all(box.fits(shape) for box in boxes):
        return f"a box is not inside of the shape {list(shape)}"
    if 0 in shape:
        return None if len(boxes) == 1 else "empty, and added by several writers"
    code = find_tiling_fault(shape, boxes)
    if code is None:
        return None
    if code == "limit_exceeded":
        return f"cut along {len(cut_dims(shape, boxes))} dims, at most {CUT_DIMS_MAX}"
    if code == "chunk_overlap":
        return "some elements were written more than once"
    needed = math.prod(shape)
    missing = needed - sum(box.numel for box in boxes)
    return f"{missing} of {needed} elements were written by no one"
