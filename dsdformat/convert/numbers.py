"""Packed bytes of any dtype as numbers of numpy, a few megabytes at a time.

Decides what number an element of each dtype is. Imports numpy only when it is asked for numbers;
where numpy is not installed, and for dtypes that have no numbers, there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from dsdformat.boxes import Box
from dsdformat.errors import DependencyError
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import MIB

__all__ = [
    "Readable",
    "as_array",
    "as_numbers",
    "find_numpy",
    "has_numbers",
    "need_numpy",
    "pieces",
    "widened",
]

PIECE_NBYTES = 4 * MIB
_PACKED = ("float4_e2m1fn_x2",)  # several numbers in one element
_SMALL_BITS = {f"{sign}int{bits}": bits for sign in ("", "u") for bits in range(1, 8)}


class Readable(Protocol):
    """A tensor of any checkpoint, as far as all have the same face: it is read when asked."""

    @property
    def dtype(self) -> str:
        """Logical name in the registry."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""

    @property
    def nbytes(self) -> int:
        """Length of the packed bytes."""

    def read(self, box: Box | None = None, *, into: Any = None) -> memoryview:
        """Read one box as packed row-major little-endian bytes."""


def find_numpy() -> Any:
    """Return numpy, or None where it, or ml_dtypes, cannot be imported."""
    try:
        import ml_dtypes  # noqa: F401
        import numpy as np
    except ImportError:
        return None
    return np


def need_numpy() -> Any:
    """Return numpy.

    Raises:
        DependencyError: `missing_dependency`.
    """
    np = find_numpy()
    if np is None:
        raise DependencyError(
            "numbers need numpy and ml_dtypes, which are not installed",
            code="missing_dependency",
            hint="pip install 'dsdformat[numpy]'",
        )
    return np


def has_numbers(dtype: str) -> bool:
    """Whether an element of a dtype is one number."""
    return dtype in DTYPES and dtype not in _PACKED


def as_array(data: Any, dtype: str) -> Any:
    """Return packed bytes as a flat array of the dtype itself, without a copy where there is one.

    Integers of less than 8 bits become int8 or uint8, and complex32 complex64, which are copies.
    """
    np = need_numpy()
    if dtype in _SMALL_BITS:
        kept = np.frombuffer(data, "uint8")
        unused = 8 - _SMALL_BITS[dtype]
        if dtype.startswith("u"):
            return kept & (255 >> unused)
        return (kept << unused).view("int8") >> unused
    if dtype == "complex32":
        return np.frombuffer(data, "<f2").astype("float32").view("complex64")
    from dsdformat.numpy import dtype_of

    return np.frombuffer(data, dtype_of(dtype).newbyteorder("<"))


def widened(array: Any, dtype: str) -> Any:
    """Return what `as_array` gave of a dtype as bool, integers, float64 or complex128."""
    with need_numpy().errstate(all="ignore"):  # a signalling NaN is a number like any other here
        if "float" in dtype:
            return array.astype("float64")
        return array.astype("complex128") if "complex" in dtype else array


def as_numbers(data: Any, dtype: str) -> Any:
    """Return packed bytes as a flat array of bool, integers, float64 or complex128."""
    return widened(as_array(data, dtype), dtype)


def pieces(box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a box into such as can be read at once, in row-major order: by halves of its dims."""
    if box.numel * itemsize <= PIECE_NBYTES:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    half = box.shape[dim] // 2
    for start, size in ((0, half), (half, box.shape[dim] - half)):
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        shape = (*box.shape[:dim], size, *box.shape[dim + 1 :])
        yield from pieces(Box(offset, shape), itemsize)
