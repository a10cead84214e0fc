"""A tensor of a foreign checkpoint as a loader holds it, and how its chunks lie in files."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dsdformat.boxes import Box, whole
from dsdformat.convert.files import FileBytes, find_file
from dsdformat.convert.tensor import ForeignTensor, Part, View, packed_strides
from dsdformat.errors import ArgumentError
from dsdformat.format.checks import ChunkPlace
from dsdformat.format.codecs import RAW
from dsdformat.format.digests import tensor_content_digest
from dsdformat.format.dtypes import DTYPES, Dtype
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key
from dsdformat.plan.copies import packed_strides as byte_strides
from dsdformat.plan.load_plan import Wanted
from dsdformat.plan.tilings import Tiling, find_tiling
from dsdformat.tensors import digest_leaves

__all__ = ["ForeignEntry", "PackedChunks"]

_FEW = 8  # chunks that are looked at one by one
Pairs = Sequence[tuple[int, Wanted]]


class ForeignEntry:
    """A tensor of a foreign checkpoint, as `TensorEntry` is one of ours.

    Attributes:
        index: Its number.
        tensor: What is read.
        path: The first path that leads to it.
    """

    def __init__(
        self,
        index: int,
        tensor: ForeignTensor,
        path: tuple[Any, ...],
        number_of: Callable[[FileBytes], int],
    ) -> None:
        self.index = index
        self.tensor = tensor
        self.path = path
        self._number_of = number_of

    def __deepcopy__(self, memo: dict[int, Any]) -> ForeignEntry:
        return self

    def __repr__(self) -> str:
        return f"ForeignEntry({self.name!r}, {self.dtype}, {list(self.shape)})"

    @property
    def name(self) -> str:
        """The display name."""
        return emit_name(self.path, encoded_key)

    @property
    def dtype(self) -> str:
        """The logical dtype."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        """Length of the packed bytes."""
        return self.tensor.nbytes

    def check(self, box: Box | None = None) -> None:
        """Look at the chunks that meet a box, or at all.

        Raises:
            ConvertError: what is stored there is not what the file says.
        """
        for _, part in self.meeting(whole(self.shape) if box is None else box):
            part.open()

    def read(
        self, box: Box | None = None, *, into: Any = None, verify: bool | None = None
    ) -> memoryview:
        """Read one box; see `ForeignTensor.read`. Nothing is verified."""
        del verify
        return self.tensor.read(box, into=into)

    def map(self, *, writable: bool = False) -> memoryview:
        """Return the tensor's bytes in the file, without a copy; see `TensorEntry.map`.

        Raises:
            ArgumentError: `cannot_map`: they are not packed in one file.
        """
        if len(self.tensor.parts) == 1 and 0 not in self.shape:
            view = self.tensor.parts[0].open()
            found = _file_of(view)
            if found and _order_of(view, self.shape, self.tensor.itemsize) == self._plain:
                data = found[0].map(writable=writable)
                if data is not None:
                    return data[found[1] : found[1] + self.nbytes]
        raise ArgumentError(
            f"{self.name} cannot be mapped: its bytes are not packed in one file",
            code="cannot_map",
            hint="read it instead",
        )

    def content_digest(self) -> str:
        """Return the content digest, as that of a tensor of ours; its data are read, once.

        Memory: 4 MiB and what reading that much takes.
        """
        return self._content_digest

    @functools.cached_property
    def _content_digest(self) -> str:
        itemsize = self.tensor.itemsize
        leaves = digest_leaves(itemsize, self.shape, lambda box, into: self.read(box, into=into))
        return tensor_content_digest(self.dtype, self.shape, leaves).hex()

    def meeting(self, box: Box) -> Iterator[tuple[int, Part]]:
        """List the chunks that share elements with a box, with their numbers."""
        parts = self.tensor.parts
        if 0 in box.shape:
            return
        for number in self._numbers(box):
            shared = parts[number].box.intersect(box)
            if shared is not None and shared.numel:
                yield number, parts[number]

    def _numbers(self, box: Box) -> Iterable[int]:
        """List the chunks that may meet a box, ascending."""
        ascending, tiling = self._tiled
        if tiling is None:
            return range(len(self.tensor.parts))
        return sorted(ascending[place] for place in tiling.find(box))

    def packed(self, pairs: Pairs) -> tuple[PackedChunks, Pairs] | None:
        """Return the chunks as they lie in files, and boxes with their dims in the same order.

        Args:
            pairs: Boxes, each with its number; chunks that meet none of them are not looked at.

        Returns:
            None where what meets the boxes is not packed in files.

        Raises:
            ArgumentError: `box_out_of_bounds`.
            ConvertError: what is stored is not what the file says.
        """
        parts, itemsize = self.tensor.parts, self.tensor.itemsize
        for _, one in pairs:
            if not one.box.fits(self.shape):
                raise ArgumentError(
                    f"box {one.box} is not inside of {self.name} of shape {list(self.shape)}",
                    code="box_out_of_bounds",
                )
        numbers = {number for _, one in pairs for number, _ in self.meeting(one.box)}
        places: list[ChunkPlace] = []
        order = self._plain
        for number in sorted(numbers):
            view, box = parts[number].open(), parts[number].box
            lies, place = _order_of(view, box.shape, itemsize), _file_of(view)
            if lies is None or place is None or (len(parts) > 1 and lies != self._plain):
                return None
            order, nbytes = lies, box.numel * itemsize
            file = self._number_of(place[0])
            row = (number, _in_order(box, order), file, RAW, place[1], nbytes, nbytes, 0)
            places.append(ChunkPlace(*row))
        chunks = PackedChunks(DTYPES[self.dtype], places)
        return chunks, [(number, self._turned(one, order)) for number, one in pairs]

    def _turned(self, one: Wanted, order: tuple[int, ...]) -> Wanted:
        if order == self._plain:
            return one
        strides = one.strides or byte_strides(one.box.shape, self.tensor.itemsize)
        return Wanted(one.tensor, _in_order(one.box, order), tuple(strides[dim] for dim in order))

    @property
    def _plain(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    @functools.cached_property
    def _tiled(self) -> tuple[Sequence[int], Tiling | None]:
        """The chunks in the order of their offsets, and where to look for those that meet a box."""
        parts = self.tensor.parts
        if len(parts) <= _FEW or 0 in self.shape:
            return (), None
        ascending = sorted(range(len(parts)), key=lambda number: parts[number].box.offset)
        boxes = [parts[number].box for number in ascending]
        offsets = [array("Q", [box.offset[dim] for box in boxes]) for dim in self._plain]
        sizes = [array("Q", [box.shape[dim] for box in boxes]) for dim in self._plain]
        return ascending, find_tiling(self.shape, offsets, sizes)


class PackedChunks:
    """Some chunks of a tensor that lie packed in files, for a `LoadPlanner`.

    Attributes:
        dtype: Of the tensor.
    """

    def __init__(self, dtype: Dtype, places: Sequence[ChunkPlace]) -> None:
        self.dtype = dtype
        self._places = places

    def meeting(self, box: Box) -> Iterator[ChunkPlace]:
        """List the chunks that may meet a box."""
        del box
        return iter(self._places)


def _file_of(view: View) -> tuple[FileBytes, int] | None:
    """Return the file that elements lie in, and where the first one is."""
    return find_file(view.source, view.byte_offset)


def _order_of(view: View, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Return the order of dims, outermost first, in which elements lie packed; None if not."""
    if view.conj or view.neg or (view.big and itemsize > 1):
        return None
    if view.strides == packed_strides(shape):
        return tuple(range(len(shape)))
    steps = [step if size > 1 else 0 for size, step in zip(shape, view.strides, strict=True)]
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-steps[dim], dim)))
    packed = packed_strides([shape[dim] for dim in order])
    fits = all(
        shape[dim] == 1 or view.strides[dim] == step
        for dim, step in zip(order, packed, strict=True)
    )
    return order if fits else None


def _in_order(box: Box, order: Sequence[int]) -> Box:
    return Box(tuple(box.offset[dim] for dim in order), tuple(box.shape[dim] for dim in order))
