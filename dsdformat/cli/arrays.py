"""The elements of a box of a tensor: read, as numbers, and in statistics.

Numbers need numpy; without it, and for the few dtypes that numpy and ml_dtypes lack, an element is
the hexadecimal digits of its bytes as they are stored. Statistics read a few megabytes at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsdformat import Box, TensorEntry
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import MIB

__all__ = ["Stats", "find_edge", "find_stats", "has_numpy", "kept_shape", "read_box", "read_edges"]

SHOWN_MAX = 256
_EDGES = (3, 2, 1)
_PIECE_NBYTES = 8 * MIB


@dataclass(slots=True)
class Stats:
    """What the finite elements of a box have in common.

    Attributes:
        low, high: The least and the greatest; None where there is no order, or no element.
        total, count: Their sum and number.
        nan, infinite: How many elements are left out.
    """

    low: Any = None
    high: Any = None
    total: Any = 0
    count: int = 0
    nan: int = 0
    infinite: int = 0

    @property
    def mean(self) -> Any:
        """Their mean; None where there is no element."""
        return self.total / self.count if self.count else None


def has_numpy() -> bool:
    """Whether numbers can be had."""
    return _numpy() is not None


def read_box(entry: TensorEntry, box: Box) -> list[Any]:
    """Return the elements of a box in row-major order, as Python's numbers or as digits.

    Memory: the box, some times over.
    """
    array = _read_array(entry, box)
    if array is not None:
        elements: list[Any] = array.tolist()
        return elements
    data, itemsize = bytes(entry.read(box)), DTYPES[entry.dtype].itemsize
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


def read_edges(entry: TensorEntry, box: Box, edge: int) -> list[Any]:
    """Return the elements of a box that lie at the edges of all dims, in row-major order."""
    if box.numel == 0:
        return []
    kept = kept_shape(box.shape, edge)
    out: list[Any] = [None] * math.prod(kept)
    for part in itertools.product(*map(_ends, box.offset, box.shape, kept)):
        source = Box(tuple(start for start, _, _ in part), tuple(size for _, _, size in part))
        places = itertools.product(*(range(at, at + size) for _, at, size in part))
        for place, element in zip(places, read_box(entry, source), strict=True):
            out[_flat_index(place, kept)] = element
    return out


def find_stats(entry: TensorEntry, box: Box) -> Stats | None:
    """Read a box, and return its statistics; None where there are no numbers.

    Memory: about 100 MiB, however large the box.
    """
    np = _numpy()
    if np is None or _dtype(entry.dtype).names:
        return None
    stats = Stats()
    with np.errstate(all="ignore"):
        for piece in _pieces(box, DTYPES[entry.dtype].itemsize):
            _add(stats, np, _read_array(entry, piece))
    return stats


def _add(stats: Stats, np: Any, elements: Any) -> None:
    kind = elements.dtype.kind
    if kind in "fc":
        finite = np.isfinite(elements)
        if not finite.all():
            nan = int(np.isnan(elements).sum())
            stats.nan += nan
            stats.infinite += elements.size - int(finite.sum()) - nan
            elements = elements[finite]
    if elements.size == 0:
        return
    stats.count += elements.size
    stats.total += elements.sum(dtype=elements.dtype if kind in "fc" else "float64").item()
    if kind != "c":
        low, high = elements.min().item(), elements.max().item()
        stats.low = low if stats.low is None else min(stats.low, low)
        stats.high = high if stats.high is None else max(stats.high, high)


def _read_array(entry: TensorEntry, box: Box) -> Any:
    """Return the elements as a flat array of a dtype that Python has; None without numbers."""
    np, name = _numpy(), entry.dtype
    if np is None or (dtype := _dtype(name)).names:
        return None
    array = np.frombuffer(entry.read(box), dtype.newbyteorder("<"))
    with np.errstate(all="ignore"):  # a signalling NaN is a number like any other here
        if "float" in name:
            return array.astype("float64")
        if "complex" in name:
            return array.astype("complex128")
        return array.astype("int8") if dtype.kind == "V" else array


def _pieces(box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a box into such as can be read at once, by halves of its first dims."""
    if box.numel * itemsize <= _PIECE_NBYTES:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    half = box.shape[dim] // 2
    for start, size in ((0, half), (half, box.shape[dim] - half)):
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        shape = (*box.shape[:dim], size, *box.shape[dim + 1 :])
        yield from _pieces(Box(offset, shape), itemsize)


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


def _numpy() -> Any:
    """Return numpy, or None where it, or ml_dtypes, is not installed."""
    try:
        import ml_dtypes  # noqa: F401
        import numpy as np
    except ModuleNotFoundError:
        return None
    return np


def _dtype(name: str) -> Any:
    from dsdformat.numpy import dtype_of

    return dtype_of(name)
