"""Boxes of an n-dimensional tensor, in elements: intersect, tile, and the byte runs of a copy.

Pure. Knows nothing of files: byte positions here are relative to the packed row-major bytes of
a box.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsdformat.errors import ArgumentError

__all__ = ["Box", "cut_dims", "flat_boxes", "is_tiling", "row_boxes", "whole", "whole_box"]


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box: `offset` and `shape`, one number per dim, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            message = f"offset has {len(self.offset)} dims, shape {len(self.shape)}"
            raise ArgumentError(message, code="bad_argument")
        if self.offset and (min(self.offset) < 0 or min(self.shape) < 0):
            message = f"negative number in box {self.offset} + {self.shape}"
            raise ArgumentError(message, code="bad_argument")

    @classmethod
    def of_unsigned(cls, offset: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Make a box of as many offsets as sizes, none negative, without looking at them."""
        box = object.__new__(cls)
        object.__setattr__(box, "offset", offset)
        object.__setattr__(box, "shape", shape)
        return box

    @property
    def end(self) -> tuple[int, ...]:
        """The first index behind the box, per dim."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a box without dims."""
        return math.prod(self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box has as many dims as the shape and lies inside it."""
        if self.shape == shape and not any(self.offset):  # most do
            return True
        return len(self.shape) == len(shape) and all(
            o + s <= n for o, s, n in zip(self.offset, self.shape, shape, strict=True)
        )

    def cuts(self, other: Box) -> bool:
        """Whether it has some elements of another box, and not all of them."""
        if self.offset == other.offset and self.shape == other.shape:
            return False
        common = self.intersect(other)
        return common is not None and common != other

    def intersect(self, other: Box) -> Box | None:
        """Return the box that both share, or None if they share no element."""
        low = tuple(map(max, self.offset, other.offset))
        size = tuple(min(a, b) - c for a, b, c in zip(self.end, other.end, low, strict=True))
        return None if size and min(size) <= 0 else Box(low, size)

    def __str__(self) -> str:
        ranges = (f"{o}:{e}" for o, e in zip(self.offset, self.end, strict=True))
        return "[" + ",".join(ranges) + "]"


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


@functools.lru_cache(maxsize=4096)
def whole_box(shape: tuple[int, ...]) -> Box:
    """Return `whole`, mostly as an object that is there: a model has many tensors of few shapes."""
    return whole(shape)


def cut_dims(shape: Sequence[int], boxes: Sequence[Box]) -> list[int]:
    """List the dims that some box does not span."""
    return [dim for dim, size in enumerate(shape) if any(box.shape[dim] != size for box in boxes)]


def is_tiling(shape: Sequence[int], boxes: Sequence[Box], dims: Sequence[int]) -> bool:
    """Whether the boxes, all in bounds, hold each element of the shape exactly once.

    Counts signed corners: the mixed derivative of a box's indicator function is a sum of signed
    point masses at its corners, and determines the function. So the boxes add up to the whole
    if and only if their corners do. One pass; overlap and hole both show.

    Args:
        shape: Of the tensor; no dim is 0.
        boxes: In bounds, none empty.
        dims: The result of `cut_dims`: only these matter.
    """
    if not dims:
        return len(boxes) == 1
    if len(dims) == 1:
        return _is_chain(shape[dims[0]], boxes, dims[0])
    balance: dict[tuple[int, ...], int] = {}
    _add_corners(balance, whole(shape), dims, -1)
    for box in boxes:
        _add_corners(balance, box, dims, 1)
    return not any(balance.values())


def _add_corners(
    balance: dict[tuple[int, ...], int], box: Box, dims: Sequence[int], sign: int
) -> None:
    ends = [((box.offset[d], 1), (box.offset[d] + box.shape[d], -1)) for d in dims]
    for corner in itertools.product(*ends):
        point = tuple(at for at, _ in corner)
        balance[point] = balance.get(point, 0) + sign * math.prod(s for _, s in corner)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut a range of a row-major tensor into boxes, at most 2·ndim-1 of them.

    Args:
        shape: Of the tensor.
        start: First element, counted in row-major order.
        stop: Behind the last element.

    Returns:
        Boxes in row-major order: their elements, one box after another, are the range.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        inner = flat_boxes(shape[1:], start - first * row, stop - first * row)
        return [_under(first, box) for box in inner]
    boxes: list[Box] = []
    if start % row:
        boxes += [_under(first, box) for box in flat_boxes(shape[1:], start - first * row, row)]
        first += 1
    end = stop // row
    if end > first:
        boxes.append(Box((first, *[0] * (len(shape) - 1)), (end - first, *shape[1:])))
    if stop % row:
        boxes += [_under(end, box) for box in flat_boxes(shape[1:], 0, stop - end * row)]
    return boxes


def row_boxes(shape: Sequence[int], nbytes: int, slab_nbytes: int) -> Iterator[Box]:
    """Cut a tensor into boxes of about a slab at most, in the order of its row-major bytes."""
    offset = [0] * len(shape)
    yield from _row_boxes(tuple(shape), nbytes, slab_nbytes, offset, 0)


def _row_boxes(
    shape: tuple[int, ...], nbytes: int, slab_nbytes: int, offset: list[int], dim: int
) -> Iterator[Box]:
    head = (1,) * dim
    if nbytes <= slab_nbytes or dim == len(shape):
        yield Box(tuple(offset), (*head, *shape[dim:]))
        return
    count = shape[dim]
    rows = slab_nbytes * count // nbytes
    if rows == 0:  # even one is too large
        for row in range(count):
            offset[dim] = row
            yield from _row_boxes(shape, nbytes // count, slab_nbytes, offset, dim + 1)
        offset[dim] = 0
        return
    for start in range(0, count, rows):
        offset[dim] = start
        yield Box(tuple(offset), (*head, min(rows, count - start), *shape[dim + 1 :]))
    offset[dim] = 0


def _under(index: int, box: Box) -> Box:
    return Box((index, *box.offset), (1, *box.shape))


def _is_chain(size: int, boxes: Sequence[Box], dim: int) -> bool:
    at = 0
    for box in sorted(boxes, key=lambda b: b.offset[dim]):
        if box.offset[dim] != at:
            return False
        at += box.shape[dim]
    return at == size
