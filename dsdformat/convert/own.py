"""A checkpoint of ours with the face of a foreign one, so that a converter knows one face only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dsdformat import folders
from dsdformat.boxes import Box, flat_boxes
from dsdformat.convert.foreign import Foreign, Kind
from dsdformat.convert.packed import packed_blocks
from dsdformat.convert.settling import Settled
from dsdformat.convert.sides import own_sides
from dsdformat.entries import TensorEntry
from dsdformat.folders import PathLike
from dsdformat.format.decoding import Hooks
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.values import TensorRef
from dsdformat.limits import MIB
from dsdformat.plan.load_plan import Wanted
from dsdformat.reader import Checkpoint
from dsdformat.signing import Keys
from dsdformat.sources import Data, Reference, TensorSource
from dsdformat.tensors import TensorTable

__all__ = ["StoredTensor", "open_own"]

_SLAB_NBYTES = 4 * MIB


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A reference to a tensor of a checkpoint of ours; has what a `ForeignTensor` has.

    Attributes:
        entry: The tensor.
        table: The tensors of its checkpoint.
        attributes: Hints that are stored with this reference: `dim_order`, `flavour`.
    """

    entry: TensorEntry
    table: TensorTable
    attributes: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"StoredTensor({self.dtype}, {list(self.shape)})"

    @property
    def dtype(self) -> str:
        """Logical name in the registry."""
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.entry.shape

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Length of the packed bytes."""
        return self.entry.nbytes

    @property
    def identity(self) -> int:
        """What is equal for names of one tensor."""
        return id(self.entry)

    def is_packed(self) -> bool:
        """Whether each chunk is row-major as it lies: always."""
        return True

    def tiles(self) -> list[Box]:
        """Return the boxes of the chunks."""
        return [chunk.box for chunk in self.entry.chunks]

    def read(self, box: Box | None = None, *, into: Any = None) -> memoryview:
        """Read one box as packed row-major little-endian bytes; see `Checkpoint.read`."""
        return self.entry.read(box, into=into)

    def source(self) -> TensorSource:
        """Return what a `Writer` stores of it: one chunk, whatever ranks have written."""
        data: Data = partial(packed_blocks, self) if self.nbytes else b""
        return TensorSource.of(self.dtype, self.shape, data)

    def as_stored(self) -> TensorSource:
        """Return a source with the chunks and the codec that the tensor has; no placements."""
        if not self.nbytes:
            return TensorSource.of(self.dtype, self.shape, b"")
        chunks = self.entry.chunks
        data: list[tuple[Box, Data]] = [
            (chunk.box, partial(self._blocks, chunk.box)) for chunk in chunks
        ]
        return TensorSource(self.dtype, self.shape, data, codec=chunks[0].codec)

    def reference(self, source: TensorSource) -> Reference:
        """Return a reference to a source of it, with the hints."""
        return Reference(source, dict(self.attributes))

    def read_boxes(self, boxes: Sequence[Box], buffer: memoryview) -> memoryview:
        """Read boxes one behind the other, each block once; return what they fill."""
        views, at = [], 0
        for box in boxes:
            end = at + box.numel * self.itemsize
            views.append(buffer[at:end])
            at = end
        table = self.table
        (plan,) = table.plan([[Wanted(self.entry.index, box) for box in boxes]], None)
        table.run(plan, views)
        return buffer[:at]

    def _blocks(self, box: Box) -> Iterator[memoryview]:
        step, count = max(1, _SLAB_NBYTES // self.itemsize), box.numel
        buffer = memoryview(bytearray(min(step, count) * self.itemsize))
        for start in range(0, count, step):
            pieces = flat_boxes(box.shape, start, min(start + step, count))
            yield self.read_boxes([_moved(piece, box) for piece in pieces], buffer)


def _moved(piece: Box, box: Box) -> Box:
    """Return a box of a box as one of the whole."""
    offset = tuple(a + b for a, b in zip(piece.offset, box.offset, strict=True))
    return Box(offset, piece.shape)


def open_own(
    path: PathLike,
    *,
    verify_data: bool = True,
    digest: str | None = None,
    pubkey: Keys | None = None,
    threads: int | None = None,
) -> Foreign:
    """Open a checkpoint of ours as a converter sees it. Its user metadata is `metadata`.

    Args:
        path: The checkpoint's folder.
        verify_data: Whether to compare blocks with their digests when they are read.
        digest, pubkey: What it must be; see `dsdformat.open`.
        threads: How many threads read; up to 8 if None.

    Raises:
        FormatError, StorageError: as `dsdformat.open`.

    Ranks: local.
    Memory: the tree; no tensor.
    """
    checkpoint = folders.open(
        path, verify=verify_data, digest=digest, pubkey=pubkey, threads=threads
    )
    try:
        return Foreign(
            Kind.DSD,
            checkpoint.table.storage.name,
            Settled(_tree_of(checkpoint)),
            metadata=dict(checkpoint.user),
            verify=lambda part, _of: _verify(path, threads) if part == 0 else 0,
            close=checkpoint.close,
            checkpoint=checkpoint,
            sides=lambda: own_sides(checkpoint),
        )
    except BaseException:
        checkpoint.close()
        raise


def _verify(path: PathLike, threads: int | None) -> int:
    report = folders.verify(path, threads=threads)
    report.raise_if_bad()
    return report.nbytes


def _tree_of(checkpoint: Checkpoint) -> Any:
    entries: dict[int, TensorEntry] = {}

    def tensor(ref: TensorRef) -> StoredTensor:
        entry = entries.setdefault(ref.index, TensorEntry(checkpoint.table, ref.index))
        return StoredTensor(entry, checkpoint.table, dict(ref.attributes))

    return checkpoint.tree(replace(Hooks(), tensor=tensor))
