"""The manifest's body and columns as frozen values (spec sections 7, 9, 10, 14).

Pure. What a body must be is checked by `bodies` and `decoding`. `Columns` gives one tensor's rows
at a time, from sections that a caller reads lazily.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from dsdformat.boxes import Box
from dsdformat.errors import Problem
from dsdformat.format.bodies import (
    BODY_KEYS,
    FILE_KEYS,
    LAYOUT_KEYS,
    MESH_KEYS,
    SIDE_KEYS,
)
from dsdformat.format.digests import DIGEST_NBYTES
from dsdformat.format.packing import emit
from dsdformat.limits import NDIM_MAX

__all__ = [
    "Body",
    "ChunkRows",
    "Columns",
    "DataFile",
    "Layout",
    "Mesh",
    "SideFile",
    "emit_body",
    "parse_body",
]

TENSOR_NBYTES = 16
FRAME_NBYTES = 4 + DIGEST_NBYTES
_WINDOW_CHUNKS = 2048
_PIECE_ROWS = 8192


@dataclass(frozen=True, slots=True)
class DataFile:
    """A safetensors file of chunks; lengths in bytes."""

    label: str
    nbytes: int
    header_nbytes: int
    prefix: tuple[str, ...]
    metadata: Mapping[str, str]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class SideFile:
    """Any other file of the checkpoint."""

    label: str
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Mesh:
    """Provenance: an array of ranks; `ranks` is row-major over `shape`."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Provenance: how a tensor was sharded, one placement per axis of a mesh."""

    mesh: int
    placements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """The decoded body; `tree` is as `packing.parse` gives it, not yet decoded."""

    tree: Any
    block_nbytes: int
    dtypes: tuple[str, ...] = ()
    files: tuple[DataFile, ...] = ()
    sides: tuple[SideFile, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    layouts: tuple[Layout, ...] = ()
    user: Mapping[str, str] = field(default_factory=dict)
    extensions: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1


def parse_body(raw: Any) -> Body:
    """Return a body that `packing.parse` gave, and that has no problems, typed."""
    return Body(
        tree=raw["tree"],
        block_nbytes=raw["block_nbytes"],
        dtypes=tuple(raw["dtypes"]),
        files=tuple(_record(DataFile, FILE_KEYS, row) for row in raw["files"]),
        sides=tuple(_record(SideFile, SIDE_KEYS, row) for row in raw["sides"]),
        meshes=tuple(_record(Mesh, MESH_KEYS, row) for row in raw["meshes"]),
        layouts=tuple(_record(Layout, LAYOUT_KEYS, row) for row in raw["layouts"]),
        user=raw["user"],
        extensions=raw["extensions"],
        world_size=raw["world_size"],
    )


def emit_body(body: Body) -> bytes:
    """Write a body as canonical msgpack. `tree` and `extensions` are encoded already."""
    raw = {key: getattr(body, key) for key in BODY_KEYS}
    for key, keys in (
        ("files", FILE_KEYS),
        ("sides", SIDE_KEYS),
        ("meshes", MESH_KEYS),
        ("layouts", LAYOUT_KEYS),
    ):
        raw[key] = [{k: _plain(getattr(row, k)) for k in keys} for row in raw[key]]
    raw["dtypes"] = list(raw["dtypes"])
    raw["user"] = dict(sorted(raw["user"].items()))
    raw["extensions"] = dict(sorted(raw["extensions"].items()))
    return emit(raw)


def _record(kind: type[Any], keys: tuple[str, ...], row: dict[str, Any]) -> Any:
    values = {key: tuple(row[key]) if type(row[key]) is list else row[key] for key in keys}
    return kind(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(sorted(value.items())) if isinstance(value, Mapping) else value


class ChunkRows(NamedTuple):
    """The chunks of one tensor, as columns.

    Attributes:
        first: Index of the first one.
        file, codec, byte_offset, first_block, first_frame: One number per chunk.
        numbers: Of each chunk its offset and its shape.
    """

    first: int
    file: array[int]
    codec: array[int]
    byte_offset: array[int]
    first_block: array[int]
    first_frame: array[int]
    numbers: array[int]

    def box(self, chunk: int, ndim: int) -> Box:
        """The box of the tensor's chunk with this number."""
        at = 2 * ndim * chunk
        numbers = self.numbers[at : at + 2 * ndim]
        return Box.of_unsigned(tuple(numbers[:ndim]), tuple(numbers[ndim:]))

    def boxes(self, ndim: int) -> list[Box]:
        """The boxes of all chunks of the tensor."""
        return [self.box(chunk, ndim) for chunk in range(len(self.file))]


class _Window(NamedTuple):
    """Rows of consecutive chunks, kept since the next tensor is often the next one."""

    first: int
    stop: int
    first_box: int
    columns: tuple[array[int], ...]


ReadSection = Callable[[str, int, int], bytes]


class Columns:
    """Rows of the columnar sections, read when they are needed.

    The two columns of tensors are kept whole; those of chunks, digests and frames are read for
    one tensor at a time.

    Memory: 40 bytes per tensor and 8 per dim.
    """

    def __init__(
        self, nbytes: Mapping[str, int], read: ReadSection, tensors: int | None = None
    ) -> None:
        """Check the sections' lengths against each other (R-7.3), then decode those of tensors.

        Args:
            nbytes: Decoded length of each section.
            read: Gives the bytes `[start, stop)` of a section.
            tensors: How many tensors the tree has, where that is known: a table of another
                length is refused without being held (R-11.9).
        """
        self._read = read
        self.tensors, rest = divmod(nbytes["tensors"], TENSOR_NBYTES)
        if rest:
            _wrong_length("tensors", nbytes["tensors"], "a multiple of 16")
        self.blocks = nbytes["digests"] // DIGEST_NBYTES
        self.frames = nbytes["frames"] // FRAME_NBYTES
        self._check_lengths(nbytes)
        if tensors is not None and tensors != self.tensors:
            message = f"the tree refers to {tensors} tensors, the table has {self.tensors}"
            raise Problem("bad_tensor_reference", message, path="$.tree").error()
        self.dtype, self.ndim, self.chunk_count, self.layout = (
            self._tensor_column(column, 0, self.tensors) for column in range(4)
        )
        if self.tensors and max(self.ndim) > NDIM_MAX:  # before their shapes are decoded
            message = f"a tensor has {max(self.ndim)} dims, at most {NDIM_MAX} are allowed"
            raise Problem("limit_exceeded", message, path="$.tensors").error()
        self._shapes = _u64(read("shapes", 0, nbytes["shapes"]))
        self._window = _Window(0, 0, 0, (array("Q"),) * 6)

    def with_counts(self, counts: bytes, nbytes: Mapping[str, int], read: ReadSection) -> Columns:
        """Return the columns of sections that have the same tensors, with other chunks.

        Args:
            counts: The column of chunk counts there; all else in the tables of tensors and shapes
                has the same bytes, and what was decoded of it is shared.
            nbytes, read: As above, of the other sections.
        """
        other = object.__new__(Columns)
        other.__dict__.update(self.__dict__)
        other._read = read
        other.blocks = nbytes["digests"] // DIGEST_NBYTES
        other.frames = nbytes["frames"] // FRAME_NBYTES
        other._window = _Window(0, 0, 0, (array("Q"),) * 6)
        column = _u32(counts)
        if column != self.chunk_count:
            other.chunk_count, other.chunks = column, sum(column)
            other._box_numbers = 2 * sum(map(operator.mul, self.ndim, column))
            for name in ("_chunk_at", "_box_at"):
                other.__dict__.pop(name, None)
        other._check_rest(nbytes)
        return other

    def _check_lengths(self, nbytes: Mapping[str, int]) -> None:
        """Add up dims, chunks and boxes, a piece of the table at a time (R-7.3)."""
        dims = chunks = boxes = 0
        for start in range(0, self.tensors, _PIECE_ROWS):
            stop = min(start + _PIECE_ROWS, self.tensors)
            ndim = self._tensor_column(1, start, stop)
            count = self._tensor_column(2, start, stop)
            dims, chunks = dims + sum(ndim), chunks + sum(count)
            boxes += sum(map(operator.mul, ndim, count))
        if nbytes["shapes"] != 8 * dims:
            _wrong_length("shapes", nbytes["shapes"], f"{8 * dims} from the counts")
        self.chunks, self._box_numbers = chunks, 2 * boxes
        self._check_rest(nbytes)

    def _check_rest(self, nbytes: Mapping[str, int]) -> None:
        for name, expected in (
            ("chunks", 32 * self.chunks),
            ("boxes", 8 * self._box_numbers),
            ("digests", DIGEST_NBYTES * self.blocks),
            ("frames", FRAME_NBYTES * self.frames),
        ):
            if nbytes[name] != expected:
                _wrong_length(name, nbytes[name], f"{expected} from the counts")

    @functools.cached_property
    def _shape_at(self) -> array[int]:
        return _starts(self.ndim)

    @functools.cached_property
    def _chunk_at(self) -> array[int]:
        return _starts(self.chunk_count)

    @functools.cached_property
    def _box_at(self) -> array[int]:
        return _starts(map(operator.mul, self.ndim, self.chunk_count))

    def _tensor_column(self, column: int, start: int, stop: int) -> array[int]:
        base = 4 * column * self.tensors
        return _u32(self._read("tensors", base + 4 * start, base + 4 * stop))

    def shape(self, tensor: int) -> tuple[int, ...]:
        """The global shape of a tensor."""
        return tuple(self._shapes[self._shape_at[tensor] : self._shape_at[tensor + 1]])

    def shapes(self, tensors: Sequence[int]) -> list[tuple[int, ...]]:
        """The global shapes of some tensors; quicker than one by one if they are neighbours."""
        first, stop = min(tensors, default=0), max(tensors, default=-1) + 1
        if stop - first > 2 * len(tensors):
            return list(map(self.shape, tensors))
        sizes = iter(self._shapes[self._shape_at[first] : self._shape_at[stop]])
        dims = self.ndim[first:stop]
        if len(set(dims)) == 1 and dims[0]:
            near = list(zip(*[sizes] * dims[0], strict=True))
        else:
            near = [tuple(itertools.islice(sizes, ndim)) for ndim in dims]
        return [near[tensor - first] for tensor in tensors]

    def without_elements(self) -> list[int]:
        """The tensors that have a dim of 0, few or none."""
        if 0 not in self._shapes:
            return []
        return [tensor for tensor in range(self.tensors) if 0 in self.shape(tensor)]

    def rows(self, tensor: int) -> ChunkRows:
        """The chunks of a tensor."""
        first, stop = self._chunk_at[tensor], self._chunk_at[tensor + 1]
        window = self._window
        if not window.first <= first <= stop <= window.stop:
            window = self._window = self._read_window(tensor)
        *columns, boxes = window.columns
        low, high = first - window.first, stop - window.first
        box_low = 2 * (self._box_at[tensor] - window.first_box)
        box_high = 2 * (self._box_at[tensor + 1] - window.first_box)
        file, codec, byte_offset, first_block, first_frame = (c[low:high] for c in columns)
        numbers = boxes[box_low:box_high]
        return ChunkRows(first, file, codec, byte_offset, first_block, first_frame, numbers)

    def only_row(self, tensor: int) -> tuple[int, int, int, int, int, tuple[int, ...]]:
        """The row of the only chunk of a tensor: as in `ChunkRows`, without lists of one."""
        first = self._chunk_at[tensor]
        window = self._window
        if not window.first <= first < window.stop:
            window = self._window = self._read_window(tensor)
        file, codec, byte_offset, first_block, first_frame, boxes = window.columns
        at, box = first - window.first, 2 * (self._box_at[tensor] - window.first_box)
        numbers = tuple(boxes[box : box + 2 * self.ndim[tensor]])
        return file[at], codec[at], byte_offset[at], first_block[at], first_frame[at], numbers

    def rows_of(self, first: int, stop: int) -> ChunkRows:
        """The chunks of consecutive tensors, one after another; nothing of it is kept."""
        return ChunkRows(self._chunk_at[first], *self._read_rows(first, stop))

    def digests(self, first: int, count: int) -> bytes:
        """The digests of some blocks, 32 bytes each."""
        return self._read("digests", DIGEST_NBYTES * first, DIGEST_NBYTES * (first + count))

    def frame_rows(self, first: int, count: int) -> tuple[array[int], bytes]:
        """The stored lengths and the digests of some frames."""
        lengths = _u32(self._read("frames", 4 * first, 4 * (first + count)))
        base = 4 * self.frames + DIGEST_NBYTES * first
        return lengths, self._read("frames", base, base + DIGEST_NBYTES * count)

    def _read_window(self, tensor: int) -> _Window:
        """Read the rows of a tensor, and of those after it while they are few."""
        first = self._chunk_at[tensor]
        last = bisect.bisect_right(self._chunk_at, first + _WINDOW_CHUNKS) - 1
        last = min(max(last, tensor + 1), self.tensors)
        rows = self._read_rows(tensor, last)
        return _Window(first, self._chunk_at[last], self._box_at[tensor], rows)

    def _read_rows(self, first: int, stop: int) -> tuple[array[int], ...]:
        """Read the columns of the chunks of consecutive tensors, and the numbers of their boxes."""
        low, high = self._chunk_at[first], self._chunk_at[stop]
        return (
            _u32(self._column(0, 4, low, high)),
            _u32(self._column(4, 4, low, high)),
            _u64(self._column(8, 8, low, high)),
            _u64(self._column(16, 8, low, high)),
            _u64(self._column(24, 8, low, high)),
            _u64(self._read("boxes", 16 * self._box_at[first], 16 * self._box_at[stop])),
        )

    def _column(self, before: int, width: int, first: int, stop: int) -> bytes:
        base = before * self.chunks
        return self._read("chunks", base + width * first, base + width * stop)


def pack_u32(values: array[int]) -> bytes:
    """Write a column of u32."""
    return _packed("I", values)


def pack_u64(values: array[int]) -> bytes:
    """Write a column of u64."""
    return _packed("Q", values)


def _packed(code: str, values: array[int]) -> bytes:
    if values.typecode != code or sys.byteorder == "big":
        values = _little(array(code, values))
    return values.tobytes()


def _u32(raw: bytes) -> array[int]:
    return _little(array("I", raw))


def _u64(raw: bytes) -> array[int]:
    return _little(array("Q", raw))


def _little(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _starts(counts: Any) -> array[int]:
    return array("Q", itertools.accumulate(counts, initial=0))


def _wrong_length(name: str, nbytes: int, expected: str) -> NoReturn:
    raise Problem(
        "bad_section_length",
        f"section {name} has {nbytes} bytes, expected {expected}",
        path=f"$.{name}",
    ).error()
