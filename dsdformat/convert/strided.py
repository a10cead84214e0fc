"""Copy a strided box of elements from bytes that are read by position into a buffer.

Decides how much is read at a time: what is contiguous on both sides goes straight into its place,
the rest through a window of bounded size that holds mostly what is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dsdformat.convert.files import Bytes, read_exactly
from dsdformat.limits import KIB, MIB
from dsdformat.plan.runs import Level, move_runs

__all__ = ["Dim", "copy_strided"]

WINDOW_NBYTES = 8 * MIB
_SPARSE = 4  # bytes read per byte wanted, at most, where a window is used
_SMALL = 4 * KIB  # a read of so much costs as much as one of less


class Dim(NamedTuple):
    """One dim of a copy: how many steps, and how long each is in bytes."""

    size: int
    src: int
    dst: int


def copy_strided(
    source: Bytes,
    byte_offset: int,
    dims: Sequence[Dim],
    itemsize: int,
    into: memoryview,
    at: int,
) -> None:
    """Copy elements.

    Args:
        source: What they lie in; that all of it is inside was checked.
        byte_offset: Of the first element there.
        dims: No step is negative; those of the source may be zero, or overlap.
        itemsize: Bytes of an element, and what all steps are multiples of.
        into: Bytes that are written to.
        at: Of the first element there.

    Raises:
        ConvertError: `foreign_truncated`.

    Memory: a window of 8 MiB, unless both sides are contiguous.
    """
    if any(dim.size == 0 for dim in dims):
        return
    _Copy(source, into, itemsize).run(byte_offset, _merged(dims), at)


def _merged(dims: Sequence[Dim]) -> list[Dim]:
    """Sort dims by their step in the source, falling, and join those that continue each other."""
    result: list[Dim] = []
    for dim in sorted((d for d in dims if d.size != 1), key=lambda d: (-d.src, -d.dst)):
        outer = result[-1] if result else None
        if outer and outer.src == dim.size * dim.src and outer.dst == dim.size * dim.dst:
            result[-1] = Dim(outer.size * dim.size, dim.src, dim.dst)
        else:
            result.append(dim)
    return result


class _Copy:
    def __init__(self, source: Bytes, into: memoryview, itemsize: int) -> None:
        self.source = source
        self.into = into
        self.itemsize = itemsize
        self.window = memoryview(bytearray())

    def run(self, byte_offset: int, dims: list[Dim], at: int) -> None:
        """Copy, a window or a contiguous run at a time."""
        itemsize = self.itemsize
        if not dims or (len(dims) == 1 and dims[0].src == dims[0].dst == itemsize):
            nbytes = math.prod(dim.size for dim in dims) * itemsize
            read_exactly(self.source, byte_offset, self.into[at : at + nbytes])
            return
        span = self._span(dims)
        if self._fits(span, dims):
            self._through_window(byte_offset, span, dims, at)
            return
        outer, inner = dims[0], dims[1:]
        step = self._steps(outer, inner)
        for start in range(0, outer.size, step):
            count = min(step, outer.size - start)
            part = [Dim(count, outer.src, outer.dst), *inner] if count > 1 else inner
            self.run(byte_offset + start * outer.src, part, at + start * outer.dst)

    def _span(self, dims: Sequence[Dim]) -> int:
        """Bytes of the source from the first to the last element."""
        return self.itemsize + sum((dim.size - 1) * dim.src for dim in dims)

    def _fits(self, span: int, dims: Sequence[Dim]) -> bool:
        wanted = math.prod(dim.size for dim in dims if dim.src) * self.itemsize
        return span <= WINDOW_NBYTES and span <= max(_SMALL, _SPARSE * wanted)

    def _steps(self, outer: Dim, inner: list[Dim]) -> int:
        """How many steps of the outermost dim one window takes."""
        if outer.src == 0:
            return outer.size  # cannot be: such a dim is last, and alone it fits
        if not self._fits(self._span(inner), inner):
            return 1
        count = max(1, (WINDOW_NBYTES - self._span(inner)) // outer.src)
        part = [Dim(min(count, outer.size - 1), outer.src, outer.dst), *inner]
        return part[0].size if self._fits(self._span(part), part) else 1

    def _through_window(self, byte_offset: int, span: int, dims: list[Dim], at: int) -> None:
        if len(self.window) < span:
            self.window = memoryview(bytearray(span))
        window = self.window[:span]
        read_exactly(self.source, byte_offset, window)
        levels, run = [Level(*dim) for dim in dims], self.itemsize
        if levels[-1].src_step == levels[-1].dst_step == run:
            run *= levels.pop().times
        move_runs(levels, run, window, 0, self.into, at)
