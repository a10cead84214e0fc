"""The chunks of one tensor as a planner needs them: those that meet a box, found without a walk.

Pure, and of the standard library. A tensor that a thousand ranks wrote has a thousand chunks, of
which a reader wants a few: nothing is made for the others, not even to check them.
"""

from __future__ import annotations

import functools
import math
import operator
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dsdformat.boxes import Box
from dsdformat.format.checks import ChunkPlace, TensorRow, find_prefix_problem
from dsdformat.format.codecs import RAW
from dsdformat.format.dtypes import DTYPES, Dtype
from dsdformat.format.manifest import Body, ChunkRows, Columns
from dsdformat.limits import INT63_MAX
from dsdformat.plan.tilings import Tiling, find_tiling

__all__ = ["ChunkTable", "find_sound_table", "table_of_row"]

_FEW = 8  # chunks that are looked at one by one
_KEPT_CHUNKS = 64  # of a tensor whose tiling is kept


class ChunkTable(NamedTuple):
    """The chunks of one tensor, checked.

    Attributes:
        dtype, shape: Of the tensor.
        chunks: Number of chunks.
        tiling: Where to look for the chunks that meet a box; None to look at each.
        place: Gives the chunk of a number.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    chunks: int
    tiling: Tiling | None
    place: Callable[[int], ChunkPlace]

    def meeting(self, box: Box) -> Iterator[ChunkPlace]:
        """List the chunks that may meet a box that has elements, in ascending order."""
        numbers = range(self.chunks) if self.tiling is None else self.tiling.find(box)
        return map(self.place, numbers)


def table_of_row(row: TensorRow) -> ChunkTable:
    """Return the chunks of a tensor that `format.checks` has looked at."""
    chunks = row.chunks
    tiling = None
    if len(chunks) > _FEW and 0 not in row.shape:
        dims = range(len(row.shape))
        offsets = [array("Q", [one.box.offset[dim] for one in chunks]) for dim in dims]
        sizes = [array("Q", [one.box.shape[dim] for one in chunks]) for dim in dims]
        tiling = find_tiling(row.shape, offsets, sizes)
    return ChunkTable(row.dtype, row.shape, len(chunks), tiling, chunks.__getitem__)


def find_sound_table(
    body: Body, columns: Columns, tensor: int, path: tuple[Any, ...]
) -> ChunkTable | None:
    """Return a tensor of raw chunks that pass every check of one tensor; None to look closer.

    The rules are those of `format.checks`; this is quick to see that none is broken, where many
    ranks wrote one chunk each.

    Complexity: linear in the chunks, about 0.3 µs each.
    """
    number, layout = columns.dtype[tensor], columns.layout[tensor]
    if number >= len(body.dtypes) or layout > len(body.layouts):
        return None
    dtype, shape = DTYPES[body.dtypes[number]], columns.shape(tensor)
    if 0 in shape or not shape or math.prod(shape) * dtype.itemsize > INT63_MAX:
        return None
    rows = columns.rows(tensor)
    if not rows.file or any(rows.codec) or any(rows.first_frame):
        return None
    ndim = len(shape)
    look = _known_tiling if len(rows.file) <= _KEPT_CHUNKS else _tiling_of
    tiling, lengths = look(shape, dtype.itemsize, rows.numbers.tobytes())
    if tiling is None:
        return None
    if not _are_in_bounds(body, columns, rows, lengths):
        return None
    some = {body.files[index].prefix: index for index in set(rows.file)}
    if any(find_prefix_problem(body, path, file, 0, str) for file in some.values()):
        return None

    def place(chunk: int) -> ChunkPlace:
        return ChunkPlace(
            chunk,
            rows.box(chunk, ndim),
            rows.file[chunk],
            RAW,
            rows.byte_offset[chunk],
            lengths[chunk],
            lengths[chunk],
            rows.first_block[chunk],
        )

    return ChunkTable(dtype, shape, len(lengths), tiling, place)


def _tiling_of(
    shape: tuple[int, ...], itemsize: int, numbers: bytes
) -> tuple[Tiling | None, Sequence[int]]:
    """Return how boxes tile a shape, if that is seen, and how many bytes each has.

    Args:
        shape: Of the tensor.
        itemsize: Bytes of an element.
        numbers: Of each box its offset and its shape, as of `ChunkRows`.
    """
    column, ndim = array("Q", numbers), len(shape)
    offsets = [column[dim :: 2 * ndim] for dim in range(ndim)]
    sizes = [column[ndim + dim :: 2 * ndim] for dim in range(ndim)]
    tiling = find_tiling(shape, offsets, sizes)
    return tiling, () if tiling is None else _lengths(itemsize, sizes)


# Layers are alike: most tensors of one shape were written in the same boxes.
_known_tiling = functools.lru_cache(maxsize=256)(_tiling_of)


def _lengths(itemsize: int, sizes: Sequence[array[int]]) -> Sequence[int]:
    """Return the bytes of boxes; most dims are as long in all of them."""
    count = len(sizes[0])
    varying = []
    for column in sizes:
        if column == array("Q", column[:1]) * count:
            itemsize *= column[0]
        else:
            varying.append(column)
    lengths: Sequence[int] = [itemsize] * count
    for column in varying:
        lengths = list(map(operator.mul, lengths, column))
    return lengths


def _are_in_bounds(body: Body, columns: Columns, rows: ChunkRows, lengths: Sequence[int]) -> bool:
    """Whether files, their bytes and digests are there (R-9.1, R-9.12, R-10.2)."""
    if max(rows.file) >= len(body.files):
        return False
    most = -(-max(lengths) // body.block_nbytes)
    if max(rows.first_block) + most > columns.blocks:  # unless that one is shorter
        blocks = [-(-nbytes // body.block_nbytes) for nbytes in lengths]
        if max(map(operator.add, rows.first_block, blocks)) > columns.blocks:
            return False
    files = [body.files[index] for index in rows.file]
    if any(map(operator.lt, rows.byte_offset, [file.header_nbytes for file in files])):
        return False
    ends = map(operator.add, rows.byte_offset, lengths)
    return not any(map(operator.gt, ends, [file.nbytes for file in files]))
