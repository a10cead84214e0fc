"""Whether the headers of data files say of tensors what the manifest says, for readers.

Nothing is taken from a header: the manifest implies it (spec section 10). But other safetensors
readers go by it, and what they would see otherwise is not handed out as sound (R-10.11).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from dsdformat.blocks import BlockReader
from dsdformat.errors import Problem, printable
from dsdformat.format.checks import TensorRow
from dsdformat.format.codecs import RAW
from dsdformat.format.decoding import Tree
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.manifest import Body, Columns, DataFile
from dsdformat.format.paths import Path, emit_key, emit_keys
from dsdformat.format.payload import (
    chunk_key,
    emit_entries,
    emit_entry,
    emit_form,
    join_entries,
)
from dsdformat.format.values import encoded_key
from dsdformat.limits import HEADER_NBYTES_MAX, MIB
from dsdformat.plan.load_columns import ChunkColumns, LoadPlan
from dsdformat.storage.base import Storage

__all__ = ["HeaderChecks", "find_difference", "header_problem"]

_SHARE = 32  # a header is read if it is no more than one part in so many of what is read


class Table(Protocol):
    """What is asked of a checkpoint: a `TensorTable`."""

    @property
    def storage(self) -> Storage: ...
    @property
    def body(self) -> Body: ...
    @property
    def columns(self) -> Columns: ...
    @property
    def decoded(self) -> Tree: ...
    @property
    def blocks(self) -> BlockReader: ...
    def name(self, index: int) -> str: ...
    def row(self, index: int) -> TensorRow: ...


class HeaderChecks:
    """Compares the headers of one checkpoint with its manifest, as its data files are read."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def check(self, plan: LoadPlan) -> None:
        """Compare what headers say of the chunks that a plan reads with what the manifest implies.

        The header of a file that is read whole is compared to the last byte. Where a part is read
        it is the entries of that part; and none if the header is long against it: a box of a
        tensor that a thousand ranks wrote takes little of each of a thousand files.

        Raises:
            FormatError: `header_mismatch`.

        Memory: the header of one file, twice.
        """
        ranges = plan.ranges
        for file, rows in itertools.groupby(plan.order, ranges.file.__getitem__):
            some = list(rows)
            data = self._table.body.files[file]
            lengths = list(map(ranges.stored_nbytes.__getitem__, some))
            nbytes = sum(lengths)
            whole = nbytes == data.nbytes - data.header_nbytes
            if data.header_nbytes > HEADER_NBYTES_MAX:
                continue
            if not whole and _SHARE * data.header_nbytes > nbytes:
                continue
            if max(some) < plan.whole:
                entries = self._whole_entries(data, plan.chunks, some, lengths)
            else:
                chunks = dict.fromkeys(map(ranges.chunk.__getitem__, some))
                entries = self._entries(data, plan.chunks, chunks)
            if whole:
                self._check_whole(file, entries)
            else:
                self._check_part(file, entries)

    def _check_whole(self, index: int, entries: Iterable[_Entry]) -> None:
        self._table.blocks.check_file(index)
        file = self._table.body.files[index]
        empty = self._empty_entries(index)
        if empty:  # at the places of others, before them
            entries = heapq.merge(empty, entries, key=operator.itemgetter(0))
        text = join_entries(map(_ENTRY, entries), file.metadata)
        at = find_difference(self._table.storage, file, text)
        if at is not None:
            raise header_problem(file, at).error()

    def _check_part(self, index: int, entries: Iterable[_Entry]) -> None:
        file = self._table.body.files[index]
        header = self._read(index)
        room = (file.header_nbytes - 8).to_bytes(8, "little")
        last = len(header.rstrip(b" ")) - 1
        if not header.startswith(room + b"{") or header[last] != ord("}"):
            raise header_problem(file, 0).error()
        header[8] = header[last] = ord(",")  # so that each entry is between two of them
        at = 8
        for _, tensor, entry in entries:
            text = f",{entry},".encode()
            found = header.find(text, at)  # both are in storage order
            if found < 0:
                raise header_problem(file, at, self._table.name(tensor)).error()
            at = found + len(text) - 1

    def _read(self, index: int) -> bytearray:
        self._table.blocks.check_file(index)
        file = self._table.body.files[index]
        header = bytearray(file.header_nbytes)
        count = self._table.storage.read_into(file.label, 0, memoryview(header))
        if count < len(header):
            raise header_problem(file, count).error()
        return header

    def _entries(
        self, file: DataFile, table: ChunkColumns, chunks: Iterable[int]
    ) -> Iterator[_Entry]:
        """List what the header says of chunks that have bytes."""
        columns, paths, prefix = self._table.columns, self._table.decoded.paths, len(file.prefix)
        tensors, codecs, places = table.tensor, table.codec, table.byte_offset
        dtypes, counts, shape_of = columns.dtype, columns.chunk_count, columns.shape
        form_of = functools.cache(self._form)
        for chunk in chunks:
            tensor, codec, at = tensors[chunk], codecs[chunk], places[chunk]
            dtype, shape = dtypes[tensor], shape_of(tensor)
            if codec == RAW and counts[tensor] == 1:  # as most are, and many alike
                key = emit_key(paths[tensor][prefix:], encoded_key)
                form, nbytes = form_of(dtype, shape)
            else:
                box = columns.rows(tensor).box(table.number[chunk], len(shape))
                key = chunk_key(paths[tensor][prefix:], shape, box, codec)
                form, nbytes = self._form(dtype, box.shape, codec, table.first_frame[chunk])
            begin = at - file.header_nbytes
            yield at, tensor, emit_entry(key, form, begin, begin + nbytes)

    def _whole_entries(
        self, file: DataFile, table: ChunkColumns, chunks: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[_Entry]:
        """List the same of chunks that are raw and all of their tensor, in a third of the time.

        Args:
            file, table, chunks: As in `_entries`.
            lengths: Of the chunks, in bytes.
        """
        columns, room = self._table.columns, file.header_nbytes
        tensors = list(map(table.tensor.__getitem__, chunks))
        places = list(map(table.byte_offset.__getitem__, chunks))
        keys = _keys(map(self._table.decoded.paths.__getitem__, tensors), len(file.prefix))
        dtypes = map(columns.dtype.__getitem__, tensors)
        kinds = zip(dtypes, columns.shapes(tensors), strict=True)
        forms = [form for form, _ in itertools.starmap(functools.cache(self._form), kinds)]
        begins = [at - room for at in places]
        texts = emit_entries(keys, forms, begins, map(operator.add, begins, lengths))
        return zip(places, tensors, texts, strict=True)

    def _empty_entries(self, index: int) -> list[_Entry]:
        """List what the header of a file says of tensors without elements, in storage order."""
        columns, file, found = self._table.columns, self._table.body.files[index], []
        for tensor in columns.without_elements():
            row = self._table.row(tensor)
            if row.chunks[0].file == index:
                key = emit_key(self._table.decoded.paths[tensor][len(file.prefix) :], encoded_key)
                form, _ = self._form(columns.dtype[tensor], row.shape)
                at = row.chunks[0].byte_offset
                begin = at - file.header_nbytes
                found.append((at, tensor, emit_entry(key, form, begin, begin)))
        return sorted(found)

    def _form(
        self, number: int, shape: tuple[int, ...], codec: int = RAW, first_frame: int = 0
    ) -> tuple[str, int]:
        """Return what a header says of a chunk behind its key, and the chunk's stored length."""
        dtype = DTYPES[self._table.body.dtypes[number]]
        nbytes = math.prod(shape) * dtype.itemsize
        if codec != RAW:
            blocks = -(-nbytes // self._table.body.block_nbytes)
            nbytes = sum(self._table.columns.frame_rows(first_frame, blocks)[0])
        return emit_form(dtype, shape, codec, nbytes), nbytes


def _keys(paths: Iterable[Path], prefix: int) -> list[str]:
    """Return the payload keys of tensors; most are in the container that the file is for."""
    paths = list(paths)
    if set(map(len, paths)) == {prefix + 1}:
        return emit_keys((), [path[-1] for path in paths], encoded_key)
    return [emit_key(path[prefix:], encoded_key) for path in paths]


# Where a chunk begins, its tensor, and what the header says of it.
_Entry = tuple[int, int, str]
_ENTRY = operator.itemgetter(2)


def header_problem(file: DataFile, byte_offset: int, name: str | None = None) -> Problem:
    """Say that a header is not the one that the manifest implies, from which byte on."""
    which = f" for {printable(name)}" if name is not None else ""
    return Problem(
        "header_mismatch",
        f"the header of {file.label} is not the one that the manifest implies{which}: it differs "
        f"from byte {byte_offset} on",
        where=file.label,
        byte_offset=byte_offset,
        entry=name,
        hint="other safetensors readers would see other tensors; restore the file",
    )


def find_difference(storage: Storage, file: DataFile, text: bytes) -> int | None:
    """Return the first byte of a header that is not as the manifest implies, or None.

    Args:
        storage: The folder.
        file: Of which all is there.
        text: The JSON text that is implied; of one that does not fit, any that does not fit either.

    Memory: 1 MiB, and the text.
    """
    room = file.header_nbytes - 8
    expected = room.to_bytes(8, "little") + text
    for at in range(0, file.header_nbytes, MIB):
        buffer = memoryview(bytearray(min(MIB, file.header_nbytes - at)))
        storage.read_into(file.label, at, buffer)
        wanted = expected[at : at + MIB].ljust(len(buffer), b" ")
        if wanted != buffer:
            pairs = enumerate(zip(wanted, buffer, strict=False))  # the text may be too long
            return at + next((place for place, (a, b) in pairs if a != b), len(wanted))
    return None if len(expected) <= file.header_nbytes else file.header_nbytes
