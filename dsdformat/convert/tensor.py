"""A tensor of a foreign file: dtype, shape, and where its bytes lie. Reads nothing until asked.

Decides how stored bytes become the packed row-major little-endian bytes of the format: strides,
byte order, and the bits for conjugation and negation that torch keeps beside the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dsdformat.boxes import Box, flat_boxes, whole
from dsdformat.convert.files import Bytes
from dsdformat.convert.numbers import find_numpy
from dsdformat.convert.strided import Dim, copy_strided
from dsdformat.destinations import writable_bytes
from dsdformat.errors import ArgumentError
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import MIB
from dsdformat.sources import Data, Reference, TensorSource

__all__ = ["ForeignTensor", "Part", "View", "packed_strides"]

_SLAB_NBYTES = 4 * MIB
_SLAB_STRIDED_NBYTES = 32 * MIB
_FLIPPED = bytes(byte ^ 0x80 for byte in range(256))


@dataclass(frozen=True, slots=True)
class View:
    """Elements in stored bytes. That they are all inside was checked.

    Attributes:
        source: What they lie in.
        byte_offset: Of the first element.
        strides: Steps between elements, in elements, one per dim.
        big: Whether they are stored big-endian.
        conj: Whether the values are the conjugates of what is stored.
        neg: Whether the values are the negatives of what is stored.
    """

    source: Bytes
    byte_offset: int
    strides: tuple[int, ...]
    big: bool = False
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of a foreign tensor.

    Attributes:
        box: In elements of the global shape.
        open: Gives where its elements lie; called when they are read.
    """

    box: Box
    open: Callable[[], View]


@dataclass(frozen=True, eq=False)
class ForeignTensor:
    """A tensor of a foreign file. The same object at two places of a tree is a tied tensor.

    Attributes:
        dtype: Logical name in the registry.
        shape: Global shape.
        parts: Chunks that tile it.
        attributes: Hints that are stored with a reference: `dim_order`, `flavour`.
        extra: What Python keeps on the object beside its data, as in the file; not converted.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[Part]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    extra: Any = None

    def __repr__(self) -> str:
        return f"ForeignTensor({self.dtype}, {list(self.shape)})"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Length of the packed bytes."""
        return whole(self.shape).numel * self.itemsize

    @property
    def identity(self) -> int:
        """What is equal for tied tensors, also if their hints differ."""
        return id(self.parts)

    def is_packed(self) -> bool:
        """Whether each part is row-major as it lies."""
        return all(part.open().strides == packed_strides(part.box.shape) for part in self.parts)

    def tiles(self) -> list[Box]:
        """Return the boxes of the parts."""
        return [part.box for part in self.parts]

    def read(
        self, box: Box | None = None, *, into: Any = None, strides: Sequence[int] | None = None
    ) -> memoryview:
        """Read one box as packed row-major little-endian bytes.

        Args:
            box: In elements of the shape; the whole tensor if None.
            into: A writable buffer of exactly the box's bytes; allocated here if None.
            strides: Bytes from one element in `into` to the next, for each dim, if they are not
                to be packed; it then is as long as they reach, or longer.

        Returns:
            A view of `into`, as bytes.

        Raises:
            ArgumentError: `box_out_of_bounds` or `bad_argument`.
            ConvertError: what is stored is not what the file says, or was cut short.

        Memory: `into`, and a window of 8 MiB where the elements are not contiguous.
        """
        box = whole(self.shape) if box is None else box
        if not box.fits(self.shape):
            raise ArgumentError(
                f"box {box} is not inside of the shape {list(self.shape)}",
                code="box_out_of_bounds",
            )
        steps = None if strides is None else [step // self.itemsize for step in strides]
        view = writable_bytes(into, box.numel * self.itemsize, longer=steps is not None)
        if box.numel:
            self._read(self.parts, box, view, steps)
        return view

    def blocks(self, part: Part) -> Iterator[memoryview]:
        """Yield the bytes of a part in order, a few megabytes at a time, in one buffer.

        Each is valid until the next is asked for.
        """
        box = part.box
        plain = part.open().strides == packed_strides(box.shape) if box.numel else True
        limit = _SLAB_NBYTES if plain else _SLAB_STRIDED_NBYTES
        if not plain:
            find_numpy()  # once it is loaded, it carries short runs
        step, count = max(1, limit // self.itemsize), box.numel
        buffer = memoryview(bytearray(min(step, count) * self.itemsize))
        for start in range(0, count, step):
            at = 0
            for piece in flat_boxes(box.shape, start, min(start + step, count)):
                end = at + piece.numel * self.itemsize
                self._read([part], Box(_sum(piece.offset, box.offset), piece.shape), buffer[at:end])
                at = end
            yield buffer[:at]

    def source(self) -> TensorSource:
        """Return what a `Writer` stores of it, a chunk for each part."""
        chunks: list[tuple[Box, Data]] = [(whole(self.shape), b"")]
        if 0 not in self.shape:
            chunks = [(part.box, partial(self.blocks, part)) for part in self.parts]
        return TensorSource(self.dtype, self.shape, chunks)

    def reference(self, source: TensorSource) -> Reference:
        """Return a reference to a source of it, with the hints."""
        return Reference(source, dict(self.attributes))

    def _read(
        self,
        parts: Sequence[Part],
        box: Box,
        into: memoryview,
        steps: Sequence[int] | None = None,
    ) -> None:
        for part in parts:
            shared = part.box.intersect(box)
            if shared is not None and shared.numel:
                self._copy(part.open(), part.box, shared, box, into, steps)

    def _copy(
        self,
        view: View,
        part: Box,
        shared: Box,
        box: Box,
        into: memoryview,
        steps: Sequence[int] | None = None,
    ) -> None:
        """Copy what a part and a box share to its place in the box, which is packed if no steps."""
        itemsize = self.itemsize
        packed_box = steps is None
        steps = packed_strides(box.shape) if steps is None else steps
        first = sum(
            (at - begin) * step
            for at, begin, step in zip(shared.offset, part.offset, view.strides, strict=True)
        )
        at = sum(
            (a - b) * step for a, b, step in zip(shared.offset, box.offset, steps, strict=True)
        )
        byte_offset = view.byte_offset + first * itemsize
        swapped = view.big or view.conj or view.neg
        if swapped and not (packed_box and shared == box):
            # Into a buffer of its own first: the bytes are changed where they lie packed.
            packed = memoryview(bytearray(shared.numel * itemsize))
            self._copy(view, part, shared, shared, packed)
            inner = [
                Dim(size, s * itemsize, d * itemsize)
                for size, s, d in zip(
                    shared.shape, packed_strides(shared.shape), steps, strict=True
                )
            ]
            copy_strided(_Packed(packed), 0, inner, itemsize, into, at * itemsize)
            return
        dims = [
            Dim(size, s * itemsize, d * itemsize)
            for size, s, d in zip(shared.shape, view.strides, steps, strict=True)
        ]
        copy_strided(view.source, byte_offset, dims, itemsize, into, at * itemsize)
        if swapped:
            _mend(into, self.dtype, view)


class _Packed:
    """Bytes in memory, without a copy."""

    name = "memory"

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.nbytes = len(data)

    def read_into(self, byte_offset: int, into: memoryview) -> int:
        into[:] = self._data[byte_offset : byte_offset + len(into)]
        return len(into)


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the steps of a row-major tensor of this shape, in elements."""
    steps = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * max(1, shape[dim + 1])
    return tuple(steps)


def _mend(data: memoryview, dtype: str, view: View) -> None:
    """Make packed bytes little-endian, conjugate and negate them, where they lie."""
    row = DTYPES[dtype]
    word = row.word
    if view.big and word > 1:
        for byte in range(word // 2):
            other = word - 1 - byte
            low, high = bytes(data[byte::word]), bytes(data[other::word])
            data[byte::word], data[other::word] = high, low
    if view.conj and word != row.itemsize:
        _flip(data, row.itemsize - 1, row.itemsize)
    if view.neg:
        _flip(data, word - 1, word)


def _flip(data: memoryview, first: int, step: int) -> None:
    """Flip the sign bits in each so many bytes."""
    data[first::step] = bytes(data[first::step]).translate(_FLIPPED)


def _sum(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))
