"""How tensors of any checkpoint are stored, to plan what a mesh would read. No torch needed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from dsdformat.boxes import Box
from dsdformat.convert.entries import ForeignEntry
from dsdformat.convert.reading import ForeignReader
from dsdformat.format.checks import ChunkPlace
from dsdformat.format.codecs import RAW
from dsdformat.format.dtypes import DTYPES, Dtype
from dsdformat.limits import BLOCK_NBYTES_DEFAULT
from dsdformat.plan.survey import StoredAs, Unpacked
from dsdformat.reader import Checkpoint

__all__ = ["Layouts"]


class Layouts:
    """How the tensors of a checkpoint that is open are stored.

    Attributes:
        block_nbytes: What is read at once where it is verified or compressed.
    """

    def __init__(self, origin: Checkpoint | ForeignReader, *, verify: bool = True) -> None:
        """Begin.

        Args:
            origin: What is read.
            verify: Whether reads of ours would be verified.
        """
        self._origin = origin
        self._verify = verify
        self._known: dict[Any, StoredAs] = {}
        self._foreign: list[ForeignEntry] = []
        self.block_nbytes = BLOCK_NBYTES_DEFAULT
        if isinstance(origin, Checkpoint):
            self.block_nbytes = origin.block_nbytes
        else:
            self._foreign = list(origin)

    def writers(self, world_size: int) -> list[int] | None:
        """Return the rank that wrote each data file, if so many ranks wrote; else None.

        Args:
            world_size: How many ranks would read; they prefer what they have written.
        """
        if not isinstance(self._origin, Checkpoint) or self._origin.world_size != world_size:
            return None
        return [file.rank for file in self._origin.table.body.files]

    def of(self, index: int) -> StoredAs:
        """Return how a tensor is stored.

        Raises:
            FormatError: its chunk table breaks the spec; those of tensors alike are not looked at.
        """
        if isinstance(self._origin, Checkpoint):
            return self._of_ours(self._origin, index)
        entry = self._foreign[index]
        key = (entry.dtype, entry.shape, tuple(part.box for part in entry.tensor.parts))
        if key not in self._known:
            self._known[key] = StoredAs(key, _ForeignChunks(entry), verified=False, by_rows=True)
        return self._known[key]

    def _of_ours(self, checkpoint: Checkpoint, index: int) -> StoredAs:
        table = checkpoint.table
        rows = table.columns.rows(index)
        packed = any(rows.codec)
        files = rows.file.tobytes() if checkpoint.world_size > 1 else b""
        boxes = rows.numbers.tobytes()
        key = (table.dtype(index), table.columns.shape(index), boxes, files, packed)
        if key not in self._known:
            chunks: Any = table.chunk_table(index)
            chunks = Unpacked(chunks.dtype, chunks) if packed else chunks
            self._known[key] = StoredAs(key, chunks, self._verify or packed)
        known = self._known[key]
        return known._replace(ratio=_ratio(table.row(index).chunks)) if packed else known


def _ratio(chunks: Sequence[ChunkPlace]) -> float:
    """Return stored bytes over decoded ones."""
    nbytes = sum(chunk.nbytes for chunk in chunks)
    return sum(chunk.stored_nbytes for chunk in chunks) / nbytes if nbytes else 1.0


class _ForeignChunks:
    """The chunks of a foreign tensor, as if each lay packed; nothing is opened to find out."""

    def __init__(self, entry: ForeignEntry) -> None:
        self._entry = entry

    @functools.cached_property
    def dtype(self) -> Dtype:
        """Of the tensor."""
        return DTYPES[self._entry.dtype]

    def meeting(self, box: Box) -> Iterator[ChunkPlace]:
        """List the chunks that meet a box."""
        for number, part in self._entry.meeting(box):
            nbytes = part.box.numel * self.dtype.itemsize
            yield ChunkPlace(number, part.box, 0, RAW, 0, nbytes, nbytes, 0)
