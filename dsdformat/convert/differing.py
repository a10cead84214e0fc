"""How the elements of two tensors of one shape differ: how many, by how much, and where first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsdformat.boxes import Box, whole
from dsdformat.convert.foreign import AnyTensor
from dsdformat.convert.numbers import as_array, as_numbers, has_numbers, need_numpy, pieces, widened
from dsdformat.format.dtypes import DTYPES

__all__ = ["NumbersDiffer", "find_difference"]

Read = Callable[[Box], memoryview]


@dataclass(slots=True)
class NumbersDiffer:
    """How the elements of two tensors differ.

    Elements of one dtype are compared as bits: NaN is equal to the same NaN, and -0.0 differs
    from 0.0, by 0. Those of two dtypes are compared as numbers, and NaN is equal to NaN.

    Attributes:
        elements: How many there are.
        differing: How many differ.
        max_abs: The greatest absolute difference, exact for integers; None where there is none
            that is a number, or elements have no numbers.
        nan: How many of those that differ are NaN in either; these are left out of `max_abs`.
        first: Where the first that differs is.
        a, b: What it is in each; None where elements have no numbers.
    """

    elements: int
    differing: int = 0
    max_abs: Any = None
    nan: int = 0
    first: tuple[int, ...] | None = None
    a: Any = None
    b: Any = None


def find_difference(read_a: Read, read_b: Read, a: AnyTensor, b: AnyTensor) -> NumbersDiffer:
    """Read two tensors of one shape, and compare their elements.

    Raises:
        ChecksumError, ConvertError: what is read is damaged.
        DependencyError: `missing_dependency`: numbers need numpy.

    Memory: about 100 MiB, however large they are.
    """
    np = need_numpy()
    box = whole(a.shape)
    found = NumbersDiffer(box.numel)
    itemsize = max(DTYPES[a.dtype].itemsize, DTYPES[b.dtype].itemsize)
    with np.errstate(all="ignore"):
        for piece in pieces(box, itemsize):
            data = read_a(piece), read_b(piece)
            if a.dtype == b.dtype:
                differ = _bits_differ(np, *data, DTYPES[a.dtype].itemsize)
            elif has_numbers(a.dtype) and has_numbers(b.dtype):
                differ = _numbers_differ(
                    np, as_numbers(data[0], a.dtype), as_numbers(data[1], b.dtype)
                )
            else:
                return found
            if len(differ):
                _add(np, found, differ, piece, [(data[0], a.dtype), (data[1], b.dtype)])
    return found


def _bits_differ(np: Any, a: memoryview, b: memoryview, itemsize: int) -> Any:
    """Return the places of elements whose bytes differ."""
    if bytes(a) == bytes(b):
        return ()
    word = min(itemsize, 8)
    differ = np.frombuffer(a, f"u{word}") != np.frombuffer(b, f"u{word}")
    if itemsize > word:
        differ = differ.reshape(-1, itemsize // word).any(axis=1)
    return np.flatnonzero(differ)


def _numbers_differ(np: Any, a: Any, b: Any) -> Any:
    """Return the places of elements that are different numbers; integers are compared exactly."""
    if not {a.dtype.kind, b.dtype.kind} & set("fc"):
        return np.flatnonzero(a != b)
    return np.flatnonzero((a != b) & ~(np.isnan(a) & np.isnan(b)))


def _add(
    np: Any,
    found: NumbersDiffer,
    differ: Any,
    piece: Box,
    sides: list[tuple[memoryview, str]],
) -> None:
    numbers = [
        widened(as_array(data, dtype)[differ], dtype) for data, dtype in sides if has_numbers(dtype)
    ]
    if found.first is None:
        place = np.unravel_index(differ[0], piece.shape) if piece.shape else ()
        found.first = tuple(int(at) + start for at, start in zip(place, piece.offset, strict=True))
        if len(numbers) == 2:
            found.a, found.b = (one[0].item() for one in numbers)
    found.differing += len(differ)
    if len(numbers) == 2:
        _add_distance(np, found, *numbers)


def _add_distance(np: Any, found: NumbersDiffer, a: Any, b: Any) -> None:
    kinds = {a.dtype.kind, b.dtype.kind}
    if kinds <= set("biu"):
        _add_most(found, _integers_apart(np, a, b))
        return
    distances = np.abs(a - b)
    nan = np.isnan(distances)
    found.nan += int(nan.sum())
    distances = distances[~nan]
    if len(distances):
        _add_most(found, float(distances.max()))


def _integers_apart(np: Any, a: Any, b: Any) -> int:
    """Return the greatest distance between integers, exactly."""
    if np.result_type(a, b).kind == "f":  # int64 and uint64, which have no common dtype
        return max(abs(int(x) - int(y)) for x, y in zip(a, b, strict=True))
    wide = "int64" if "i" in {a.dtype.kind, b.dtype.kind} else "uint64"
    a, b = a.astype(wide), b.astype(wide)
    # The greater less the less, modulo 2^64, is exact.
    high, low = np.maximum(a, b).view("uint64"), np.minimum(a, b).view("uint64")
    return int((high - low).max())


def _add_most(found: NumbersDiffer, distance: Any) -> None:
    found.max_abs = distance if found.max_abs is None else max(found.max_abs, distance)
