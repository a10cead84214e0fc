"""Byte planes of one block (spec section 12, codec 2): split before compression, joined after it.

Where numpy is installed it does the work, with shifts that narrow or widen: a plane is bits
`8j - 1` to `8j + 6` of a word whose sign is to be the lowest bit, so that splitting needs no
rotation. The standard library alone takes about ten times as long, and gives the same planes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["join_planes", "split_planes"]

Buffer = bytes | bytearray | memoryview

_NUMPY_MIN = 256 * 1024  # from here on numpy is worth its import
_SLICE = 256 * 1024  # of a block that numpy works on at a time: fits the cache, and few calls
_WORDS = (2, 4, 8)


def split_planes(block: Buffer, word: int, *, rotate: bool) -> Sequence[Buffer]:
    """Return the byte planes of a block, the lowest first.

    Args:
        block: Whole words, little-endian.
        word: Bytes of one.
        rotate: Whether the sign bit becomes the lowest.

    Memory: one block.
    """
    if word in _WORDS and (numpy := _find_numpy(len(block))) is not None:
        return _split_arrays(numpy, block, word, rotate=rotate)
    data = _rotate(bytes(block), word, left=1) if rotate else bytes(block)
    return [data[plane::word] for plane in range(word)]


def join_planes(
    planes: Sequence[Buffer], word: int, *, rotate: bool, into: memoryview | None = None
) -> memoryview:
    """Return the block that was split into planes.

    Args:
        planes: As `split_planes` returns them.
        word, rotate: As there.
        into: Writable, as long as the block; allocated here if None.

    Memory: the block if it is allocated here, and 256 KiB; two blocks without numpy.
    """
    nbytes = len(planes[0]) * word
    if word in _WORDS and (numpy := _find_numpy(nbytes)) is not None:
        return _join_arrays(numpy, planes, word, into, rotate=rotate)
    out = bytearray(nbytes)
    for index, plane in enumerate(planes):
        out[index::word] = plane
    joined = memoryview(_rotate(out, word, left=8 * word - 1) if rotate else out)
    if into is None:
        return joined
    into[:] = joined
    return into


def _split_arrays(numpy: Any, block: Buffer, word: int, *, rotate: bool) -> list[memoryview]:
    words = numpy.frombuffer(block, f"<u{word}")
    planes = numpy.empty((word, len(words)), numpy.uint8)
    drop = functools.partial(numpy.right_shift, casting="unsafe")
    for start in range(0, len(words), _SLICE // word):
        some, out = words[start : start + _SLICE // word], planes[:, start:]
        for index in range(1, word):
            drop(some, some.dtype.type(8 * index - rotate), out=out[index, : len(some)])
        lowest = out[0, : len(some)]
        numpy.copyto(lowest, some, casting="unsafe")
        if rotate:
            sign = numpy.empty_like(lowest)
            drop(some, some.dtype.type(8 * word - 1), out=sign)
            numpy.add(lowest, lowest, out=lowest)
            numpy.bitwise_or(lowest, sign, out=lowest)
    return [memoryview(plane) for plane in planes]


def _join_arrays(
    numpy: Any, planes: Sequence[Buffer], word: int, into: memoryview | None, *, rotate: bool
) -> memoryview:
    parts = [numpy.frombuffer(plane, numpy.uint8) for plane in planes]
    target = numpy.empty(word * len(parts[0]), numpy.uint8)
    if into is not None:
        target = numpy.frombuffer(into, numpy.uint8)
    words = target.view(f"<u{word}")
    number = words.dtype.type
    for start in range(0, len(words), _SLICE // word):
        out = words[start : start + _SLICE // word]
        numpy.copyto(out, parts[-1][start : start + len(out)])
        for part in parts[-2::-1]:
            numpy.left_shift(out, number(8), out=out)
            numpy.bitwise_or(out, part[start : start + len(out)], out=out)
        if rotate:
            sign = out << number(8 * word - 1)
            numpy.right_shift(out, number(1), out=out)
            numpy.bitwise_or(out, sign, out=out)
    return memoryview(target)


def _find_numpy(nbytes: int) -> Any:
    """Return numpy where it is loaded, or installed and there is much to do; else None."""
    if "numpy" not in sys.modules and nbytes < _NUMPY_MIN:
        return None
    try:
        import numpy
    except ImportError:
        return None
    return numpy


_INTEGER_SLICE = 64 * 1024  # the integers below stay in the cache


def _rotate(data: bytes | bytearray, word: int, *, left: int) -> bytes:
    """Rotate each word of `word` bytes left by `left` bits."""
    out = []
    for at in range(0, len(data), _INTEGER_SLICE):
        piece = data[at : at + _INTEGER_SLICE]
        high, low = _masks(len(piece) // word, word, left)
        number = int.from_bytes(piece, "little")
        turned = ((number << left) & high) | ((number >> (8 * word - left)) & low)
        out.append(turned.to_bytes(len(piece), "little"))
    return b"".join(out)


@functools.lru_cache(maxsize=64)
def _masks(count: int, word: int, left: int) -> tuple[int, int]:
    bits = 8 * word
    low = (1 << left) - 1
    high = ((1 << bits) - 1) ^ low
    return tuple(  # type: ignore[return-value]
        int.from_bytes(mask.to_bytes(word, "little") * count, "little") for mask in (high, low)
    )
