"""A tensor of a checkpoint as its user holds it: lazy, sliceable, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsdformat.boxes import Box, whole
from dsdformat.errors import ArgumentError
from dsdformat.format.codecs import CODECS
from dsdformat.format.decoding import Hooks, decode_tree
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.manifest import Mesh
from dsdformat.format.values import TensorRef
from dsdformat.garbage import paused_gc
from dsdformat.tensors import TensorTable

__all__ = ["ChunkInfo", "TensorEntry", "TensorSlice", "box_of", "tree_of"]

Index = int | slice | tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One chunk, as a person sees it.

    Attributes:
        box: In elements of the global shape.
        file: Label of the data file.
        byte_offset, stored_nbytes: Where it lies in the file.
        nbytes: Decoded length.
        codec: Name of the codec.
    """

    box: Box
    file: str
    byte_offset: int
    stored_nbytes: int
    nbytes: int
    codec: str


class TensorEntry:
    """A tensor of a checkpoint that is open. Reads nothing until asked."""

    __slots__ = ("_table", "index")

    def __init__(self, table: TensorTable, index: int) -> None:
        self._table = table
        self.index = index

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorEntry:
        return self

    def __repr__(self) -> str:
        return f"TensorEntry({self.name!r}, {self.dtype}, {list(self.shape)})"

    @property
    def name(self) -> str:
        """The display name: the parts of the path, escaped, joined by `/`."""
        return self._table.name(self.index)

    @property
    def path(self) -> tuple[Any, ...]:
        """The first path that leads to the tensor."""
        return self._table.path(self.index)

    @property
    def paths(self) -> list[tuple[Any, ...]]:
        """All paths that lead to the tensor: several if it is tied."""
        return self._table.paths(self.index)

    @property
    def dtype(self) -> str:
        """The logical dtype, as `bfloat16`."""
        return self._table.dtype(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._table.columns.shape(self.index)

    @property
    def nbytes(self) -> int:
        """Length of the packed bytes."""
        return whole(self.shape).numel * DTYPES[self.dtype].itemsize

    @property
    def placements(self) -> tuple[Mesh, tuple[str, ...]] | None:
        """Provenance: the mesh and the placement per axis, or None if it was not sharded."""
        number = self._table.columns.layout[self.index]
        if number == 0:
            return None
        if number > len(self._table.body.layouts):
            self._table.row(self.index)  # raises `bad_reference`
        layout = self._table.body.layouts[number - 1]
        return self._table.body.meshes[layout.mesh], layout.placements

    @property
    def chunks(self) -> list[ChunkInfo]:
        """The chunks, in ascending order of their offsets."""
        row, files = self._table.row(self.index), self._table.body.files
        return [
            ChunkInfo(
                c.box,
                files[c.file].label,
                c.byte_offset,
                c.stored_nbytes,
                c.nbytes,
                CODECS[c.codec],
            )
            for c in row.chunks
        ]

    def check(self) -> None:
        """Check the table of chunks: that they tile the tensor, and lie in the data files.

        Reads no data; reading checks it too.

        Raises:
            FormatError: what is wrong with it.
        """
        self._table.chunk_table(self.index)

    def __getitem__(self, index: Index) -> TensorSlice:
        """Name a box by integers and slices of step 1. Reads nothing."""
        return TensorSlice(self, box_of(self.shape, index))

    def read(
        self, box: Box | None = None, *, into: Any = None, verify: bool | None = None
    ) -> memoryview:
        """Read one box; see `Checkpoint.read`."""
        return self._table.read(self.index, box, into, verify)

    def map(self, *, writable: bool = False) -> memoryview:
        """Return the tensor's bytes in the file, without a copy and without verification.

        Pages are read when they are touched. Valid after the checkpoint is closed, and when the
        file loses its name; whoever cuts the file itself short ends the processes that touch what
        was cut off (SIGBUS).

        Args:
            writable: Whether the view may be written to. Pages that are written are copied
                first: the file never changes. Views of one file of one open checkpoint see
                each other's writes only where they overlap.

        Raises:
            ArgumentError: `cannot_map`: compressed, several chunks, or a storage without maps.
            FormatError: `file_size_mismatch`.

        Ranks: local.
        Memory: none of its own, but pages that are written to.
        """
        return self._table.map(self.index, writable=writable)

    def content_digest(self) -> str:
        """Return the content digest: the same for every layout, codec and number of ranks.

        Read from the manifest where the leaves are known, else computed from the data.

        Ranks: local.
        Memory: 4 MiB and what reading that much takes.
        """
        return self._table.content_digest(self.index).hex()

    def known_content_digest(self) -> str | None:
        """Return the content digest where the manifest alone gives it, else None.

        Ranks: local.
        Memory: 32 bytes for each 4 MiB of the tensor.
        """
        known = self._table.known_content_digest(self.index)
        return None if known is None else known.hex()


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of a tensor, not yet read."""

    entry: TensorEntry
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box; a dim that was indexed by an integer is 1."""
        return self.box.shape

    def read(self, *, into: Any = None, verify: bool | None = None) -> memoryview:
        """Read the box; see `Checkpoint.read`."""
        return self.entry.read(self.box, into=into, verify=verify)


def box_of(shape: tuple[int, ...], index: Index) -> Box:
    """Return the box that integers and slices of step 1 take from a tensor.

    Raises:
        ArgumentError: `box_out_of_bounds`, or `bad_argument` for other steps.
    """
    steps = index if isinstance(index, tuple) else (index,)
    if len(steps) > len(shape):
        raise ArgumentError(f"{len(steps)} indices for {len(shape)} dims", code="box_out_of_bounds")
    offset, extent = [], []
    for dim, size in enumerate(shape):
        step = steps[dim] if dim < len(steps) else slice(None)
        if isinstance(step, slice):
            low, high, stride = step.indices(size)
            if stride != 1:
                raise ArgumentError("slices have step 1", code="bad_argument")
            offset.append(low)
            extent.append(max(0, high - low))
            continue
        if not -size <= step < size:
            raise ArgumentError(
                f"index {step} is not inside of dim {dim}, {size} long", code="box_out_of_bounds"
            )
        offset.append(step % size)
        extent.append(1)
    return Box(tuple(offset), tuple(extent))


def tree_of(table: TensorTable, hooks: Hooks | None = None) -> Any:
    """Return the nested state of a checkpoint, with a `TensorEntry` at each tensor.

    Args:
        table: Of the checkpoint.
        hooks: What a framework makes of named constants, scalars, sizes and tensors.
    """
    entries: dict[int, TensorEntry] = {}

    def entry(ref: TensorRef) -> TensorEntry:
        return entries.setdefault(ref.index, TensorEntry(table, ref.index))

    with paused_gc():
        return decode_tree(table.body.tree, hooks or Hooks(tensor=entry)).root
