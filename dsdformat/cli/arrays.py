"""The elements of a box of a tensor, as numbers.

Numbers need numpy; without it, and for dtypes that have none, an element is the hexadecimal digits
of its bytes as they are stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from dsdformat import Box
from dsdformat.convert.numbers import Readable, as_numbers, find_numpy, has_numbers
from dsdformat.format.dtypes import DTYPES

__all__ = ["find_edge", "has_numpy", "kept_shape", "read_box", "read_edges"]

SHOWN_MAX = 256
_EDGES = (3, 2, 1)


def has_numpy() -> bool:
    """Whether numbers can be had."""
    return find_numpy() is not None


def read_box(tensor: Readable, box: Box) -> list[Any]:
    """Return the elements of a box in row-major order, as Python's numbers or as digits.

    Memory: the box, some times over.
    """
    array = _read_numbers(tensor, box)
    if array is not None:
        elements: list[Any] = array.tolist()
        return elements
    data, itemsize = bytes(tensor.read(box)), DTYPES[tensor.dtype].itemsize
    return [data[at : at + itemsize].hex() for at in range(0, len(data), itemsize)]


def find_edge(shape: Sequence[int], whole_max: int) -> int | None:
    """Choose how many elements to show at either end of each dim.

    Args:
        shape: Of the box.
        whole_max: Up to how many elements a box is shown whole.

    Returns:
        0 where it is; None where there are too many dims to show any element.
    """
    if math.prod(shape) <= whole_max:
        return 0
    return next((e for e in _EDGES if math.prod(kept_shape(shape, e)) <= SHOWN_MAX), None)


def kept_shape(shape: Sequence[int], edge: int) -> list[int]:
    """Return a shape without what lies between the edges."""
    return [min(size, 2 * edge) for size in shape] if edge else list(shape)


def read_edges(tensor: Readable, box: Box, edge: int) -> list[Any]:
    """Return the elements of a box that lie at the edges of all dims, in row-major order."""
    if box.numel == 0:
        return []
    kept = kept_shape(box.shape, edge)
    out: list[Any] = [None] * math.prod(kept)
    for part in itertools.product(*map(_ends, box.offset, box.shape, kept)):
        source = Box(tuple(start for start, _, _ in part), tuple(size for _, _, size in part))
        places = itertools.product(*(range(at, at + size) for _, at, size in part))
        for place, element in zip(places, read_box(tensor, source), strict=True):
            out[_flat_index(place, kept)] = element
    return out


def _read_numbers(tensor: Readable, box: Box) -> Any:
    """Return the elements as a flat array; None where there are no numbers."""
    if not has_numpy() or not has_numbers(tensor.dtype):
        return None
    return as_numbers(tensor.read(box), tensor.dtype)


def _ends(offset: int, size: int, kept: int) -> list[tuple[int, int, int]]:
    """List the runs of a dim that are kept, as (start, place among the kept, length)."""
    if kept == size:
        return [(offset, 0, size)]
    edge = kept // 2
    return [(offset, 0, edge), (offset + size - edge, edge, edge)]


def _flat_index(place: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for at, size in zip(place, shape, strict=True):
        index = index * size + at
    return index
