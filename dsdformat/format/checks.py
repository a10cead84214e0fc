"""Whole-manifest rules over the columns: bounds, tiling, storage order, references (stage 4).

Pure. `check_tensor` is what a reader does before it uses a tensor; `check_columns` does that for
every tensor, and the rules that need all of them. Both list every problem they find. It is long,
so that the rules of a tensor are one list, which a reader and a verifier cannot have in two forms.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from dsdformat.boxes import Box, cut_dims, is_tiling, whole
from dsdformat.errors import Problem, printable
from dsdformat.format.codecs import CODECS, PLANES, RAW, ZSTD
from dsdformat.format.dtypes import DTYPES, Dtype
from dsdformat.format.manifest import Body, ChunkRows, Columns
from dsdformat.limits import CUT_DIMS_MAX, INT63_MAX, NDIM_MAX

__all__ = [
    "ChunkPlace",
    "StoredChunk",
    "TensorRow",
    "WholeChunks",
    "check_columns",
    "check_tensor",
    "find_prefix_problem",
    "find_tiling_fault",
    "find_whole",
    "find_whole_chunks",
    "find_wholes",
]

NameOf = Callable[[int], str]
_RUN_MIN, _RUN_ROWS = 16, 8192  # of tensors whose rows are looked at together


class ChunkPlace(NamedTuple):
    """One chunk, checked: its box and where it lies.

    Attributes:
        number: Of the chunk in its tensor.
        box: In elements of the global shape.
        file: Index of the data file.
        codec: Number of the codec.
        byte_offset: In the file.
        stored_nbytes: Length in the file.
        nbytes: Decoded length.
        first_block: Row of its first digest.
        frames: Stored lengths of its blocks; empty for raw chunks.
        frame_at: Where the stored blocks begin in the stored chunk, and where the last one ends.
        first_frame: Row of its first frame.
    """

    number: int
    box: Box
    file: int
    codec: int
    byte_offset: int
    stored_nbytes: int
    nbytes: int
    first_block: int
    frames: tuple[int, ...] = ()
    frame_at: tuple[int, ...] = ()
    first_frame: int = 0


class TensorRow(NamedTuple):
    """One tensor, checked."""

    dtype: Dtype
    shape: tuple[int, ...]
    layout: int
    chunks: tuple[ChunkPlace, ...]


class WholeChunks(NamedTuple):
    """Tensors whose only chunk is raw, whole and in bounds, as columns.

    Attributes:
        tensor: Number of each.
        file, byte_offset, nbytes: Where its chunk lies.
        first_block: Row of the chunk's first digest.
    """

    tensor: array[int]
    file: array[int]
    byte_offset: array[int]
    nbytes: array[int]
    first_block: array[int]

    @classmethod
    def none(cls) -> WholeChunks:
        """Begin with nothing."""
        return cls(*(array("Q") for _ in cls._fields))

    def extend(self, *columns: Iterable[int]) -> None:
        """Add tensors: columns in the order of the attributes."""
        for own, more in zip(self, columns, strict=True):
            own.extend(iter(more))  # which need not be of 64 bits

    def chosen(self, which: Sequence[bool]) -> WholeChunks:
        """Return those tensors that are to stay."""
        return WholeChunks(*(array("Q", itertools.compress(own, which)) for own in self))


class StoredChunk(NamedTuple):
    """One chunk in storage order (R-9.13): sorts by its first four numbers."""

    file: int
    byte_offset: int
    stored_nbytes: int
    position: int
    tensor: int
    chunk: int
    codec: int
    first_block: int
    blocks: int
    first_frame: int
    frames: int


def check_tensor(
    body: Body, columns: Columns, tensor: int, name_of: NameOf
) -> tuple[TensorRow | None, list[Problem]]:
    """Check one tensor's row and chunks (R-9.1 to R-9.11), and the bounds of what they point at.

    Returns:
        The tensor, or None if it has problems; and the problems.
    """
    place = find_whole(body, columns, tensor)
    if place is not None:
        return _simple_row(body, columns, tensor, place), []
    row, problems = _check_row(body, columns, tensor, name_of)
    if row is not None:
        problems += _index_problems(body, columns, row, name_of(tensor))
        problems = problems or list(_range_problems(body, row, name_of(tensor)))
    return (None if problems else row), problems


def _check_row(
    body: Body, columns: Columns, tensor: int, name_of: NameOf
) -> tuple[TensorRow | None, list[Problem]]:
    name = name_of(tensor)
    rows = columns.rows(tensor)
    problems = list(_reference_problems(body, columns, rows, tensor, name))
    if problems:
        return None, problems
    dtype = DTYPES[body.dtypes[columns.dtype[tensor]]]
    shape = columns.shape(tensor)
    boxes = rows.boxes(len(shape))
    problems = _first_problems(dtype, shape, rows, boxes, name)
    if problems:
        return None, problems
    places = tuple(
        _place(body, columns, rows, chunk, box, box.numel * dtype.itemsize)
        for chunk, box in enumerate(boxes)
    )
    return TensorRow(dtype, shape, columns.layout[tensor], places), []


def check_columns(
    body: Body,
    columns: Columns,
    features: Iterable[str],
    zstd_pages: bool,
    paths: list[tuple[object, ...]],
    name_of: NameOf,
) -> tuple[list[StoredChunk], list[Problem]]:
    """Check every tensor, then storage order, prefixes, features and references.

    Args:
        features: Those that the head lists.
        zstd_pages: Whether some page of the manifest is compressed.
        paths: For each tensor its first path, from the tree.
        name_of: Gives a tensor's name, for messages.

    Returns:
        All chunks in storage order, and the problems.
    """
    problems: list[Problem] = []
    indexes: list[Problem] = []
    order: list[StoredChunk] = []
    places = find_wholes(body, columns, range(columns.tensors))
    for tensor, place in enumerate(places):
        row = None if place is None else _simple_row(body, columns, tensor, place)
        if row is None:
            row, found = _check_row(body, columns, tensor, name_of)
            problems += found
            if row is not None:
                indexes += _index_problems(body, columns, row, name_of(tensor))
        if row is not None:
            order += _stored_chunks(body, row, tensor, len(order))
    if problems:
        return [], problems
    order.sort()
    indexes = indexes or list(_block_index_problems(columns, order, name_of))
    return order, [
        *indexes,
        *([] if indexes else _byte_range_problems(body, order, name_of)),
        *_prefix_problems(body, order, paths, name_of),
        *_feature_problems({entry.codec for entry in order}, features, zstd_pages),
        *_dtype_problems(body, set(columns.dtype)),
    ]


def _stored_chunks(body: Body, row: TensorRow, tensor: int, first: int) -> Iterator[StoredChunk]:
    for place in row.chunks:
        yield StoredChunk(
            place.file,
            place.byte_offset,
            place.stored_nbytes,
            first + place.number,
            tensor,
            place.number,
            place.codec,
            place.first_block,
            -(-place.nbytes // body.block_nbytes),
            place.first_frame,
            len(place.frames),
        )


def _simple_row(
    body: Body, columns: Columns, tensor: int, found: tuple[int, int, int, int]
) -> TensorRow:
    """Return a tensor whose only chunk is raw, whole and in bounds, as `find_whole` has found."""
    shape, (file, at, nbytes, first_block) = columns.shape(tensor), found
    every = Box.of_unsigned((0,) * len(shape), shape)
    place = ChunkPlace(0, every, file, RAW, at, nbytes, nbytes, first_block)
    dtype = DTYPES[body.dtypes[columns.dtype[tensor]]]
    return TensorRow(dtype, shape, columns.layout[tensor], (place,))


def find_whole(body: Body, columns: Columns, tensor: int) -> tuple[int, int, int, int] | None:
    """Return where a tensor lies whose only chunk is raw, whole and in bounds; None for others.

    Returns:
        File, byte offset, length, and row of the first digest.
    """
    return next(find_wholes(body, columns, (tensor,)))


def find_wholes(
    body: Body, columns: Columns, tensors: Iterable[int]
) -> Iterator[tuple[int, int, int, int] | None]:
    """Find for some tensors what `find_whole` does.

    By far the most common case, and what makes a million tensors bearable: no object is made, and
    what is the same for all of them is looked up once.
    """
    sizes = [DTYPES[name].itemsize for name in body.dtypes]
    files, layouts, blocks = body.files, len(body.layouts), columns.blocks
    dtype, layout, counts = columns.dtype, columns.layout, columns.chunk_count
    for tensor in tensors:
        number = dtype[tensor]
        if counts[tensor] != 1 or number >= len(sizes) or layout[tensor] > layouts:
            yield None
            continue
        file, codec, at, first_block, first_frame, box = columns.only_row(tensor)
        if codec != RAW or first_frame or file >= len(files):
            yield None
            continue
        shape = columns.shape(tensor)
        nbytes = math.prod(shape) * sizes[number]
        data = files[file]
        good = (
            box == (0,) * len(shape) + shape
            and 0 < nbytes <= INT63_MAX
            and data.header_nbytes <= at <= data.nbytes - nbytes
            and first_block + -(-nbytes // body.block_nbytes) <= blocks
        )
        yield (file, at, nbytes, first_block) if good else None


def find_whole_chunks(body: Body, columns: Columns, tensors: Sequence[int]) -> WholeChunks:
    """Return those of some tensors, in ascending order, that are as `find_whole` wants them.

    Consecutive ones are looked at together, by columns, where all of them are: that takes a fifth
    of the time.

    Memory: that of the result, and 8,192 rows.
    """
    found = WholeChunks.none()
    for low, high in _runs(tensors):
        some = tensors[low:high]
        if not _add_run(found, body, columns, some[0], some[-1] + 1):
            places = zip(some, find_wholes(body, columns, some), strict=True)
            for tensor, place in places:
                if place is not None:
                    found.extend(*zip((tensor, *place), strict=True))
    return found


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut ascending numbers into runs of consecutive ones that are not too long."""
    low = 0
    while low < len(numbers):
        high = min(low + _RUN_ROWS, len(numbers))
        if numbers[high - 1] - numbers[low] != high - 1 - low:
            inside = range(low + 1, high)
            high = next(n for n in inside if numbers[n] != numbers[n - 1] + 1)
        yield low, high
        low = high


def _add_run(found: WholeChunks, body: Body, columns: Columns, first: int, stop: int) -> bool:
    """Add consecutive tensors if all are good; the rules are those of `find_wholes`."""
    if stop - first < _RUN_MIN:
        return False
    sizes, numbers = [DTYPES[name].itemsize for name in body.dtypes], columns.dtype[first:stop]
    if (
        columns.chunk_count[first:stop] != array("I", [1]) * (stop - first)
        or max(numbers) >= len(sizes)
        or max(columns.layout[first:stop]) > len(body.layouts)
    ):
        return False
    rows, shapes = columns.rows_of(first, stop), columns.shapes(range(first, stop))
    nbytes = list(map(operator.mul, map(math.prod, shapes), map(sizes.__getitem__, numbers)))
    if not _are_whole(body, columns, rows, shapes, nbytes):
        return False
    found.extend(range(first, stop), rows.file, rows.byte_offset, nbytes, rows.first_block)
    return True


def _are_whole(
    body: Body,
    columns: Columns,
    rows: ChunkRows,
    shapes: Sequence[tuple[int, ...]],
    nbytes: Sequence[int],
) -> bool:
    """Whether chunks, one of each tensor, are raw, all of the tensor, and in bounds."""
    if any(rows.codec) or any(rows.first_frame) or max(rows.file) >= len(body.files):
        return False
    zeros = [(0,) * ndim for ndim in range(NDIM_MAX + 1)]
    boxes = [zeros[len(shape)] + shape for shape in shapes]
    if rows.numbers != array("Q", itertools.chain.from_iterable(boxes)):
        return False
    if min(nbytes) <= 0 or max(nbytes) > INT63_MAX:
        return False
    begins = [file.header_nbytes for file in body.files]
    ends = [file.nbytes for file in body.files]
    if any(map(operator.lt, rows.byte_offset, map(begins.__getitem__, rows.file))):
        return False
    last = map(operator.add, rows.byte_offset, nbytes)
    if any(map(operator.gt, last, map(ends.__getitem__, rows.file))):
        return False
    if max(nbytes) <= body.block_nbytes:
        after = max(rows.first_block) + 1
    else:
        blocks = [-(-count // body.block_nbytes) for count in nbytes]
        after = max(map(operator.add, rows.first_block, blocks))
    return after <= columns.blocks


def _reference_problems(
    body: Body, columns: Columns, rows: ChunkRows, tensor: int, name: str
) -> Iterator[Problem]:
    """R-9.1."""
    if columns.dtype[tensor] >= len(body.dtypes):
        yield _bad("bad_reference", f"dtype {columns.dtype[tensor]} is not in the table", name)
    if columns.layout[tensor] > len(body.layouts):
        yield _bad("bad_reference", f"layout {columns.layout[tensor]} is not in the table", name)
    for chunk, file in enumerate(rows.file):
        if file >= len(body.files):
            yield _bad("bad_reference", f"data file {file} is not in the table", name, chunk)


def _first_problems(
    dtype: Dtype, shape: tuple[int, ...], rows: ChunkRows, boxes: list[Box], name: str
) -> list[Problem]:
    """What breaks the first of R-9.4 to R-9.9 and R-9.11 that is broken."""
    checks = [_shape_problems(shape, dtype, name), _tiling_problems(shape, boxes, name)]
    if not _are_sound(dtype, shape, rows, boxes):
        checks[1:1] = [
            _bounds_problems(shape, boxes, name),
            _emptiness_problems(shape, rows, boxes, name),
        ]
        checks.append(_codec_problems(dtype, rows, name))
    return next((found for check in checks if (found := list(check))), [])


def _shape_problems(shape: tuple[int, ...], dtype: Dtype, name: str) -> Iterator[Problem]:
    nbytes = math.prod(size for size in shape if size) * dtype.itemsize
    if nbytes > INT63_MAX or any(size > INT63_MAX for size in shape):
        yield _bad("shape_overflow", f"shape {list(shape)} has more than 2**63-1 bytes", name)


def _are_sound(dtype: Dtype, shape: tuple[int, ...], rows: ChunkRows, boxes: list[Box]) -> bool:
    """Whether bounds, emptiness and codecs are right, looking at columns instead of at each."""
    codecs = set(rows.codec)
    if 0 in shape or not boxes:
        return False
    if not codecs <= CODECS.keys() or (PLANES in codecs and dtype.itemsize == 1):
        return False
    return all(box.fits(shape) and 0 not in box.shape for box in boxes)


def _bounds_problems(shape: tuple[int, ...], boxes: list[Box], name: str) -> Iterator[Problem]:
    for chunk, box in enumerate(boxes):
        if not box.fits(shape):
            message = f"box {box} is not inside of the shape {list(shape)}"
            yield _bad("chunk_out_of_bounds", message, name, chunk)


def _emptiness_problems(
    shape: tuple[int, ...], rows: ChunkRows, boxes: list[Box], name: str
) -> Iterator[Problem]:
    for chunk, box in enumerate(boxes):
        if 0 not in shape:
            if 0 in box.shape:
                yield _bad("empty_chunk", f"box {box} has no elements", name, chunk)
        elif box != whole(shape) or rows.codec[chunk] != RAW or len(boxes) != 1:
            message = "a tensor without elements has one raw chunk that is the whole tensor"
            yield _bad("empty_chunk", message, name, chunk)


def _codec_problems(dtype: Dtype, rows: ChunkRows, name: str) -> Iterator[Problem]:
    for chunk, codec in enumerate(rows.codec):
        if codec not in CODECS:
            yield _bad("unknown_codec", f"codec {codec} is not known", name, chunk)
        elif codec == PLANES and dtype.itemsize == 1:
            yield _bad("codec_mismatch", f"{CODECS[codec]} does not fit {dtype.name}", name, chunk)


def _tiling_problems(shape: tuple[int, ...], boxes: list[Box], name: str) -> Iterator[Problem]:
    if 0 in shape:
        if not boxes:
            yield _bad("empty_chunk", "a tensor without elements has one chunk", name)
        return
    if not boxes:
        yield _bad("chunk_hole", "no chunks", name)
        return
    order = [box.offset for box in boxes]
    if any(a >= b for a, b in zip(order, order[1:], strict=False)):
        yield _bad("chunk_order", "chunks are not in the order of their offsets", name)
        return
    code = find_tiling_fault(shape, boxes)
    if code == "limit_exceeded":
        cut = len(cut_dims(shape, boxes))
        yield _bad(code, f"cut along {cut} dims, at most {CUT_DIMS_MAX}", name)
    elif code == "chunk_overlap":
        yield _bad(code, "some elements lie in more than one chunk", name)
    elif code == "chunk_hole":
        missing = math.prod(shape) - sum(box.numel for box in boxes)
        yield _bad(code, f"{missing} elements lie in no chunk", name)


def find_tiling_fault(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """Return the code of how boxes in bounds fail to tile a shape (R-9.8, R-9.9), or None."""
    dims = cut_dims(shape, boxes)
    if len(dims) > CUT_DIMS_MAX:
        return "limit_exceeded"
    if is_tiling(shape, boxes, dims):
        return None
    held = sum(box.numel for box in boxes)
    return "chunk_overlap" if held >= math.prod(shape) else "chunk_hole"


def _place(
    body: Body, columns: Columns, rows: ChunkRows, chunk: int, box: Box, nbytes: int
) -> ChunkPlace:
    codec, first_frame = rows.codec[chunk], rows.first_frame[chunk]
    blocks = -(-nbytes // body.block_nbytes)
    frames: tuple[int, ...] = ()
    stored = nbytes
    if codec != RAW and first_frame + blocks <= columns.frames:
        frames = tuple(columns.frame_rows(first_frame, blocks)[0])
        stored = sum(frames)
    return ChunkPlace(
        chunk,
        box,
        rows.file[chunk],
        codec,
        rows.byte_offset[chunk],
        stored,
        nbytes,
        rows.first_block[chunk],
        frames,
        tuple(itertools.accumulate(frames, initial=0)),
        first_frame,
    )


def _index_problems(body: Body, columns: Columns, row: TensorRow, name: str) -> Iterator[Problem]:
    """What chunks say of digests and frames, as far as one tensor shows (R-9.12, R-9.15)."""
    for place in row.chunks:
        blocks = -(-place.nbytes // body.block_nbytes)
        if place.first_block + blocks > columns.blocks:
            yield _bad("bad_block_index", "digests lie behind the table's end", name, place.number)
        elif place.codec == RAW:
            if place.first_frame:
                yield _bad("bad_block_index", "a raw chunk has a frame", name, place.number)
        elif len(place.frames) != blocks:
            yield _bad("bad_block_index", "frames lie behind the table's end", name, place.number)
        elif not all(_frame_lengths_fit(place, body.block_nbytes, row.dtype)):
            message = "the length of a frame is out of range"
            yield _bad("bad_block_index", message, name, place.number)


def _range_problems(body: Body, row: TensorRow, name: str) -> Iterator[Problem]:
    """Whether chunks lie in the data of their files (R-10.2, as far as one tensor shows)."""
    for place in row.chunks:
        file, end = body.files[place.file], place.byte_offset + place.stored_nbytes
        if place.byte_offset < file.header_nbytes or end > file.nbytes:
            message = (
                f"bytes {place.byte_offset}..{end} are not inside of the data of {file.label}, "
                f"{file.header_nbytes}..{file.nbytes}"
            )
            yield _bad("byte_range_mismatch", message, name, place.number)


def _frame_lengths_fit(place: ChunkPlace, block_nbytes: int, dtype: Dtype) -> Iterator[bool]:
    extra = 0 if place.codec == ZSTD else 4 * dtype.word
    for block, stored in enumerate(place.frames):
        decoded = min(block_nbytes, place.nbytes - block * block_nbytes)
        yield 0 < stored <= decoded + extra


def _block_index_problems(
    columns: Columns, order: list[StoredChunk], name_of: NameOf
) -> Iterator[Problem]:
    block, frame = 0, 0
    for entry in order:
        if entry.first_block != block:
            message = f"first_block is {entry.first_block}, expected {block}"
            yield _bad("bad_block_index", message, name_of(entry.tensor), entry.chunk)
            return
        if entry.codec != RAW and entry.first_frame != frame:
            message = f"first_frame is {entry.first_frame}, expected {frame}"
            yield _bad("bad_block_index", message, name_of(entry.tensor), entry.chunk)
            return
        block += entry.blocks
        frame += entry.frames
    if (block, frame) != (columns.blocks, columns.frames):
        message = (
            f"chunks have {block} blocks and {frame} frames, "
            f"the tables {columns.blocks} and {columns.frames}"
        )
        yield Problem("bad_block_index", message, path="$.digests")


def _byte_range_problems(
    body: Body, order: list[StoredChunk], name_of: NameOf
) -> Iterator[Problem]:
    ends = [file.header_nbytes for file in body.files]
    for entry in order:
        at = entry.byte_offset
        if at != ends[entry.file]:
            label = body.files[entry.file].label
            message = f"begins at byte {at} of {label}, not at {ends[entry.file]}"
            yield _bad("byte_range_mismatch", message, name_of(entry.tensor), entry.chunk)
        ends[entry.file] = at + entry.stored_nbytes
    for file, end in zip(body.files, ends, strict=True):
        if end != file.nbytes:
            message = f"the chunks of {file.label} end at byte {end}, the file at {file.nbytes}"
            yield Problem("byte_range_mismatch", message, where=file.label, byte_offset=end)


def find_prefix_problem(
    body: Body, path: tuple[object, ...], file: int, chunk: int, name_of: Callable[[], str]
) -> Problem | None:
    """Check that a tensor lies under the prefix of a data file that holds a chunk (R-10.5)."""
    prefix = body.files[file].prefix
    if len(path) > len(prefix) and path[: len(prefix)] == prefix:
        return None
    message = f"does not lie under {list(prefix)}, as {body.files[file].label} says"
    return _bad("prefix_mismatch", message, name_of(), chunk)


def _prefix_problems(
    body: Body, order: list[StoredChunk], paths: list[tuple[object, ...]], name_of: NameOf
) -> Iterator[Problem]:
    for entry in order:
        name = functools.partial(name_of, entry.tensor)
        problem = find_prefix_problem(body, paths[entry.tensor], entry.file, entry.chunk, name)
        if problem is not None:
            yield problem


def _feature_problems(
    codecs: set[int], features: Iterable[str], zstd_pages: bool
) -> Iterator[Problem]:
    needed = {"planes"} if PLANES in codecs else set()
    if zstd_pages or codecs - {RAW}:
        needed.add("zstd")
    if needed != set(features):
        message = f"features {sorted(features)} are listed, {sorted(needed)} are used"
        yield Problem("feature_mismatch", message, path="$")


def _dtype_problems(body: Body, used: set[int]) -> Iterator[Problem]:
    for index, name in enumerate(body.dtypes):
        if index not in used:
            yield Problem("bad_body", f"$.dtypes[{index}]: no tensor is {name}", path="$.dtypes")


def _bad(code: str, message: str, name: str, chunk: int | None = None) -> Problem:
    shown = printable(name)
    where = shown if chunk is None else f"chunk {chunk} of {shown}"
    return Problem(code, f"{where}: {message}", entry=name, chunk=chunk)
