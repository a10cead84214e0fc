"""The chunks of one writer, as columns: what they are of, and where their bytes come from.

A model has tens of thousands of tensors of which most are one small chunk each. An object for each
of them takes longer than to write it, so here nothing is made of a chunk: it is a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from dsdformat.boxes import Box
from dsdformat.format.codecs import PLANES
from dsdformat.format.dtypes import DTYPES, Dtype
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key
from dsdformat.sources import Data, SourceRun, bytes_view, is_bytes, iter_blocks
from dsdformat.storage.base import Buffer

__all__ = ["Chunks"]


class Chunks:
    """Chunks to write, in the order of tensors and offsets; each column has one item for each.

    Attributes:
        tensor: Number of the tensor, in this writer's order.
        parent, step: The tensor's path: that of the container it is in, and its key there.
        dtype, shape: Of the tensor.
        box: Which part of the tensor it is; None for all of it.
        codec: Number of the codec.
        nbytes: Decoded length.
        data: Where the bytes come from.
        start: Where they begin in `data`, which is a buffer of bytes; None if `data` is theirs
            alone.
    """

    def __init__(self) -> None:
        self.tensor: list[int] = []
        self.parent: list[tuple[Any, ...]] = []
        self.step: list[Any] = []
        self.dtype: list[Dtype] = []
        self.shape: list[tuple[int, ...]] = []
        self.box: list[Box | None] = []
        self.codec: list[int] = []
        self.nbytes: list[int] = []
        self.data: list[Data] = []
        self.start: list[int | None] = []

    def __len__(self) -> int:
        return len(self.tensor)

    def add(
        self,
        tensor: int,
        path: Sequence[Any],
        dtype: Dtype,
        shape: tuple[int, ...],
        box: Box,
        codec: int,
        data: Data,
    ) -> None:
        """Add one chunk."""
        parent = tuple(path[:-1])
        if self.parent and self.parent[-1] == parent:
            parent = self.parent[-1]  # so that `containers` sees neighbours
        self.tensor.append(tensor)
        self.parent.append(parent)
        self.step.append(path[-1])
        self.dtype.append(dtype)
        self.shape.append(shape)
        self.box.append(None if box.shape == shape else box)
        self.codec.append(codec)
        self.nbytes.append(math.prod(box.shape) * dtype.itemsize)
        self.data.append(data)
        self.start.append(None)

    def add_run(
        self,
        tensor: int,
        parent: tuple[Any, ...],
        steps: Sequence[Any],
        run: SourceRun,
        codecs: Sequence[int],
    ) -> None:
        """Add whole tensors that are neighbours in a container, numbered from `tensor` on."""
        count = len(steps)
        self.tensor += range(tensor, tensor + count)
        self.parent += [parent] * count
        self.step += steps
        self.dtype += map(DTYPES.__getitem__, run.dtypes)
        self.shape += run.shapes
        self.box += [None] * count
        self.codec += codecs
        self.nbytes += run.nbytes
        self.data += [run.data] * count
        self.start += run.starts

    def path(self, row: int) -> tuple[Any, ...]:
        """The path of a chunk's tensor."""
        return (*self.parent[row], self.step[row])

    def name(self, row: int) -> str:
        """The display name of a chunk's tensor."""
        return emit_name(self.path(row), encoded_key)

    def containers(self) -> Iterator[tuple[tuple[Any, ...], int, int]]:
        """List the containers of tensors: the path, and the rows of neighbours in it."""
        first = 0
        for _, same in itertools.groupby(self.parent, id):
            stop = first + len(list(same))
            yield self.parent[first], first, stop
            first = stop

    def view(self, row: int) -> memoryview:
        """Return the bytes of a chunk whose data is a buffer.

        Raises:
            MismatchError: `data_mismatch` if there are more or fewer than the box has.
        """
        data: Any = self.data[row]
        start, nbytes = self.start[row], self.nbytes[row]
        if start is not None:
            view: memoryview = data[start : start + nbytes]
            return view
        # Without a name, which takes as long as all else here.
        if type(data) is memoryview and data.shape == (nbytes,) and is_bytes(data):
            return data
        return bytes_view(data, nbytes, self.name(row))

    def views(self, rows: Sequence[int]) -> list[memoryview]:
        """Return the bytes of some chunks, each as `view`."""
        datas: list[Any] = self.data
        starts, lengths = self.start, self.nbytes
        return [
            datas[row][start : start + lengths[row]]
            if (start := starts[row]) is not None
            else self.view(row)
            for row in rows
        ]

    def blocks(self, row: int, block_nbytes: int) -> Iterator[Buffer]:
        """Cut the data of a chunk into blocks, as `iter_blocks`."""
        data = self.data[row] if self.start[row] is None else self.view(row)
        return iter_blocks(data, self.nbytes[row], block_nbytes, self.name(row))

    def stored_bound(self, row: int, block_nbytes: int) -> int:
        """The most bytes that a stored chunk can have."""
        nbytes = self.nbytes[row]
        if self.codec[row] != PLANES:
            return nbytes
        return nbytes + 4 * self.dtype[row].word * -(-nbytes // block_nbytes)
