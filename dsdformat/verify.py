"""Check everything in a checkpoint, and report all that is wrong (spec section 18)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsdformat.blocks import BATCH_NBYTES, SMALL_NBYTES, BlockReader
from dsdformat.errors import FormatError, Problem, raise_problems
from dsdformat.format.checks import StoredChunk, check_columns
from dsdformat.format.codecs import RAW
from dsdformat.format.digests import DIGEST_NBYTES, Hasher, digest
from dsdformat.format.manifest import DataFile, SideFile
from dsdformat.format.payload import HeaderEntry, chunk_key, header_json
from dsdformat.garbage import paused_gc
from dsdformat.headers import find_difference, header_problem
from dsdformat.limits import MANIFEST_LABEL, MIB, SIGNATURES_LABEL
from dsdformat.reader import Checkpoint
from dsdformat.storage.base import Storage
from dsdformat.workers import Task, Workers

__all__ = ["Report", "verify_storage", "find_side_problems"]

Progress = Callable[[int, int], None]
_PIECE_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Report:
    """What a verifier found.

    Attributes:
        name: The folder.
        root: The root digest in hexadecimal, or None if the head is damaged.
        tensors, chunks, files: How many there are, as far as the manifest could be read.
        nbytes: Bytes of the data files.
        problems: Every defect of the first stage that has one; empty for a good checkpoint.
        unlisted: Files in the folder that the checkpoint does not know; they do no harm.
    """

    name: str
    root: str | None = None
    tensors: int = 0
    chunks: int = 0
    files: int = 0
    nbytes: int = 0
    problems: tuple[Problem, ...] = ()
    unlisted: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def raise_if_bad(self) -> None:
        """Raise the error of the first problem, carrying all; do nothing if there is none."""
        raise_problems(self.problems)


def verify_storage(
    storage: Storage,
    *,
    expected_root: bytes | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Do all stages of the spec on a checkpoint; see `dsdformat.verify`."""
    try:
        checkpoint = Checkpoint(storage, digest=expected_root, threads=threads, check_pages=True)
    except FormatError as error:
        storage.close()
        return Report(storage.name, problems=error.problems)
    except BaseException:
        storage.close()
        raise
    with checkpoint:
        verifier = _Verifier(checkpoint, storage, progress)
        try:
            problems = verifier.run()
        except FormatError as error:  # a page of a column
            problems = list(error.problems)
        listed = {MANIFEST_LABEL, SIGNATURES_LABEL, *checkpoint.data_files, *checkpoint.side_files}
        return Report(
            storage.name,
            root=checkpoint.root,
            tensors=len(checkpoint),
            chunks=checkpoint.chunk_count,
            files=len(checkpoint.data_files),
            nbytes=sum(checkpoint.data_files.values()),
            problems=tuple(problems),
            unlisted=tuple(label for label in storage.labels() if label not in listed),
        )


class _Verifier:
    def __init__(self, checkpoint: Checkpoint, storage: Storage, progress: Progress | None) -> None:
        self.checkpoint = checkpoint
        self.storage = storage
        self.table = checkpoint.table
        self.body = self.table.body
        self.columns = self.table.columns
        self.blocks: BlockReader = self.table.blocks
        self.workers: Workers = self.table.workers
        self.progress = progress
        self.total = sum(file.nbytes for file in self.body.files)
        self.done = 0
        self.lock = threading.Lock()

    def run(self) -> list[Problem]:
        """Stages 4 to 6; each only if the one before found nothing."""
        checkpoint = self.checkpoint
        with paused_gc():
            order, problems = check_columns(
                self.body,
                self.columns,
                checkpoint.features,
                self.table.manifest.compressed,
                self.table.decoded.paths,
                self.table.name,
            )
        if problems:
            return problems
        chunks: list[list[StoredChunk]] = [[] for _ in self.body.files]
        for entry in order:
            chunks[entry.file].append(entry)
        del order
        for index, file in enumerate(self.body.files):
            problems += self._file_problems(index, file, chunks[index])
        for side in self.body.sides:
            problems += find_side_problems(self.storage, side)
        if not problems:
            for entries in chunks:
                problems += self._block_problems(entries)
        return problems

    def _file_problems(
        self, index: int, file: DataFile, chunks: list[StoredChunk]
    ) -> list[Problem]:
        try:
            self.blocks.check_file(index)
        except FormatError as error:
            return list(error.problems)
        entries = self._header_entries(file, chunks)
        text = header_json(entries, file.metadata, most=file.header_nbytes)
        at = find_difference(self.storage, file, text)
        self._advance(file.header_nbytes)
        return [] if at is None else [header_problem(file, at)]

    def _header_entries(self, file: DataFile, chunks: list[StoredChunk]) -> Iterator[HeaderEntry]:
        paths = self.table.decoded.paths
        for entry in chunks:
            row = self.table.row(entry.tensor)
            box = row.chunks[entry.chunk].box
            path: Any = paths[entry.tensor][len(file.prefix) :]
            key = chunk_key(path, row.shape, box, entry.codec)
            yield HeaderEntry(key, row.dtype, box.shape, entry.codec, entry.stored_nbytes)

    def _block_problems(self, chunks: list[StoredChunk]) -> list[Problem]:
        found: dict[int, list[Problem]] = {}

        def task(number: int, piece: _Piece) -> Task:
            def check() -> None:
                found[number] = self._piece_problems(piece)
                self._advance(piece.nbytes)

            return check

        self.workers.run(task(*one) for one in enumerate(_pieces(chunks)))
        return [problem for number in sorted(found) for problem in found[number]]

    def _piece_problems(self, piece: _Piece) -> list[Problem]:
        """Check some blocks of one chunk, or many small chunks with one read."""
        entries = piece.entries
        if len(entries) > 1:
            entries = self._mismatches(entries)
        problems: list[Problem] = []
        for entry in entries:
            row = self.table.row(entry.tensor)
            place = row.chunks[entry.chunk]
            blocks = piece.blocks or range(entry.blocks)
            problems += self.blocks.find_block_problems(entry.tensor, row, place, blocks)
        return problems

    def _mismatches(self, group: list[StoredChunk]) -> list[StoredChunk]:
        """Find the small raw chunks, side by side, that do not have their digests."""
        begin, last = group[0].byte_offset, group[-1]
        buffer = memoryview(bytearray(last.byte_offset + last.stored_nbytes - begin))
        self.storage.read_into(self.body.files[last.file].label, begin, buffer)
        # In storage order the digests of neighbours are neighbours too.
        table = self.columns.digests(group[0].first_block, len(group))
        return [
            entry
            for number, entry in enumerate(group)
            if digest(buffer[entry.byte_offset - begin :][: entry.stored_nbytes])
            != table[DIGEST_NBYTES * number : DIGEST_NBYTES * (number + 1)]
        ]

    def _advance(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)


class _Piece(NamedTuple):
    """What one task verifies: small raw chunks side by side, or some blocks of one chunk."""

    entries: list[StoredChunk]
    blocks: range | None
    nbytes: int


def _pieces(chunks: list[StoredChunk]) -> Iterator[_Piece]:
    """Cut chunks in storage order into pieces of like size."""
    group: list[StoredChunk] = []
    for entry in chunks:
        small = entry.codec == RAW and entry.blocks == 1 and entry.stored_nbytes <= SMALL_NBYTES
        if group and (not small or entry.byte_offset - group[0].byte_offset >= BATCH_NBYTES):
            yield _Piece(group, None, sum(one.stored_nbytes for one in group))
            group = []
        if small:
            group.append(entry)
            continue
        done = 0
        for first in range(0, entry.blocks, _PIECE_BLOCKS):
            blocks = range(first, min(first + _PIECE_BLOCKS, entry.blocks))
            end = entry.stored_nbytes * blocks.stop // entry.blocks
            yield _Piece([entry], blocks, end - done)
            done = end
    if group:
        yield _Piece(group, None, sum(one.stored_nbytes for one in group))


def find_side_problems(storage: Storage, side: SideFile) -> list[Problem]:
    """Compare a side file with the manifest.

    Memory: 1 MiB.
    """
    try:
        nbytes = storage.nbytes(side.label)
    except FormatError as error:
        return list(error.problems)
    if nbytes != side.nbytes:
        message = f"{side.label} has {nbytes} bytes, the manifest says {side.nbytes}"
        return [Problem("file_size_mismatch", message, where=side.label)]
    hasher = Hasher()
    for at in range(0, nbytes, MIB):
        buffer = memoryview(bytearray(min(MIB, nbytes - at)))
        storage.read_into(side.label, at, buffer)
        hasher.update(buffer)
    if hasher.digest() == side.digest:
        return []
    message = f"the side file {side.label} was changed"
    return [Problem("side_checksum_mismatch", message, where=side.label)]
