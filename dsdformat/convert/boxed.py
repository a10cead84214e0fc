"""A box of a tensor with the face of a tensor, so that it can be written as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dsdformat.boxes import Box, whole
from dsdformat.convert.foreign import AnyTensor
from dsdformat.convert.packed import packed_blocks
from dsdformat.format.dtypes import DTYPES
from dsdformat.sources import Reference, TensorSource

__all__ = ["BoxTensor"]


@dataclass(frozen=True, eq=False)
class BoxTensor:
    """A box of a tensor.

    Attributes:
        inside: The tensor.
        box: In its elements.
    """

    inside: AnyTensor
    box: Box

    @property
    def dtype(self) -> str:
        """Logical name in the registry."""
        return self.inside.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the box."""
        return self.box.shape

    @property
    def nbytes(self) -> int:
        """Length of the packed bytes."""
        return self.box.numel * DTYPES[self.dtype].itemsize

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Hints: those of the tensor."""
        return self.inside.attributes

    @property
    def identity(self) -> int:
        """What is equal for tied tensors: a box is tied to nothing."""
        return id(self)

    def is_packed(self) -> bool:
        """Whether each stored piece is row-major as it lies."""
        return self.inside.is_packed()

    def tiles(self) -> list[Box]:
        """Return what the box has of the boxes that are stored."""
        found = (self.box.intersect(tile) for tile in self.inside.tiles())
        return [
            Box(tuple(a - b for a, b in zip(one.offset, self.box.offset, strict=True)), one.shape)
            for one in found
            if one is not None
        ]

    def read(self, box: Box | None = None, *, into: Any = None) -> memoryview:
        """Read one box of the box as packed row-major little-endian bytes."""
        inner = whole(self.shape) if box is None else box
        offset = tuple(a + b for a, b in zip(inner.offset, self.box.offset, strict=True))
        return self.inside.read(Box(offset, inner.shape), into=into)

    def source(self) -> TensorSource:
        """Return what a `Writer` stores of it."""
        data = partial(packed_blocks, self) if self.nbytes else b""
        return TensorSource.of(self.dtype, self.shape, data)

    def reference(self, source: TensorSource) -> Reference:
        """Return a reference to a source of it, with the hints."""
        return Reference(source, dict(self.attributes))
