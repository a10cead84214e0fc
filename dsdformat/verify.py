"""Check everything in a checkpoint, and report all that is wrong (spec section 18)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dsdformat.blocks import BlockReader, Workers
from dsdformat.errors import FormatError, Problem, raise_problems
from dsdformat.format.checks import ChunkPlace, TensorRow, check_columns, check_tensor
from dsdformat.format.digests import Hasher
from dsdformat.format.frame import SECTIONS
from dsdformat.format.manifest import DataFile, SideFile
from dsdformat.format.payload import HeaderEntry, chunk_key, emit_header, header_json
from dsdformat.limits import MIB
from dsdformat.reader import Checkpoint
from dsdformat.sections import MANIFEST_LABEL
from dsdformat.storage.base import Storage

__all__ = ["Report", "verify_storage"]

Progress = Callable[[int, int], None]


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
    digest: bytes | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Do all stages of the spec on a checkpoint; see `dsdformat.verify`."""
    try:
        checkpoint = Checkpoint(storage, digest=digest, threads=threads)
    except FormatError as error:
        storage.close()
        return Report(storage.name, problems=error.problems)
    with checkpoint:
        verifier = _Verifier(checkpoint, storage, progress)
        try:
            problems = verifier.run()
        except FormatError as error:  # a page of a column
            problems = list(error.problems)
        listed = {MANIFEST_LABEL, *checkpoint.data_files, *checkpoint.side_files}
        return Report(
            storage.name,
            root=checkpoint.root,
            tensors=len(checkpoint),
            chunks=checkpoint._columns.chunks,
            files=len(checkpoint.data_files),
            nbytes=sum(checkpoint.data_files.values()),
            problems=tuple(problems),
            unlisted=tuple(label for label in storage.labels() if label not in listed),
        )


# A chunk in its data file: byte offset, stored length, index, tensor, and what it takes to read.
_FileChunk = tuple[int, int, int, int]


class _Verifier:
    def __init__(self, checkpoint: Checkpoint, storage: Storage, progress: Progress | None) -> None:
        self.checkpoint = checkpoint
        self.storage = storage
        self.body = checkpoint._body
        self.columns = checkpoint._columns
        self.blocks: BlockReader = checkpoint._blocks
        self.workers: Workers = checkpoint._workers
        self.progress = progress
        self.total = sum(file.nbytes for file in self.body.files)
        self.done = 0

    def run(self) -> list[Problem]:
        """Stages 4 to 6; each only if the one before found nothing."""
        checkpoint = self.checkpoint
        self._read_unknown_sections()
        problems = check_columns(
            self.body,
            self.columns,
            checkpoint.features,
            checkpoint._manifest.compressed,
            checkpoint._decoded.paths,
            checkpoint._name,
        )
        if problems:
            return problems
        chunks = self._chunks_by_file()
        for index, file in enumerate(self.body.files):
            problems += self._file_problems(index, file, chunks[index])
        for side in self.body.sides:
            problems += self._side_problems(side)
        if not problems:
            for index in range(len(self.body.files)):
                problems += self._block_problems(chunks[index])
        return problems

    def _read_unknown_sections(self) -> None:
        manifest = self.checkpoint._manifest
        for name, nbytes in manifest.section_nbytes().items():
            for at in range(0, nbytes if name not in SECTIONS else 0, MIB):
                manifest.read(name, at, min(at + MIB, nbytes))

    def _chunks_by_file(self) -> list[list[_FileChunk]]:
        """List the chunks of each file in storage order, as (offset, stored, chunk, tensor)."""
        chunks: list[list[_FileChunk]] = [[] for _ in self.body.files]
        for tensor in range(self.columns.tensors):
            for place in self._row(tensor).chunks:
                entry = (place.byte_offset, place.stored_nbytes, tensor, place.index)
                chunks[place.file].append(entry)
        for entries in chunks:
            entries.sort()
        return chunks

    def _row(self, tensor: int) -> TensorRow:
        row, problems = check_tensor(self.body, self.columns, tensor, self.checkpoint._name(tensor))
        assert row is not None, problems
        return row

    def _file_problems(self, index: int, file: DataFile, chunks: list[_FileChunk]) -> list[Problem]:
        try:
            self.blocks.check_file(index)
        except FormatError as error:
            return list(error.problems)
        text = header_json(self._header_entries(file, chunks), file.metadata)
        expected = emit_header(text, file.header_nbytes) or b""
        buffer = bytearray(file.header_nbytes)
        self.storage.read_into(file.label, 0, memoryview(buffer))
        actual = bytes(buffer)
        if expected == actual:
            return []
        at = _first_difference(expected, actual)
        message = (
            f"the header of {file.label} is not the one that the manifest implies: it differs "
            f"from byte {at} on"
        )
        hint = "other safetensors readers would see other tensors; restore the file"
        return [Problem("header_mismatch", message, where=file.label, byte_offset=at, hint=hint)]

    def _header_entries(self, file: DataFile, chunks: list[_FileChunk]) -> Iterator[HeaderEntry]:
        paths = self.checkpoint._decoded.paths
        for _, stored, tensor, index in chunks:
            row = self._row(tensor)
            place = row.chunks[index]
            path: Any = paths[tensor][len(file.prefix) :]
            key = chunk_key(path, row.shape, place.box, place.codec)
            yield HeaderEntry(key, row.dtype, place.box.shape, place.codec, stored)

    def _side_problems(self, side: SideFile) -> list[Problem]:
        try:
            nbytes = self.storage.nbytes(side.label)
        except FormatError as error:
            return list(error.problems)
        if nbytes != side.nbytes:
            message = f"{side.label} has {nbytes} bytes, the manifest says {side.nbytes}"
            return [Problem("file_size_mismatch", message, where=side.label)]
        hasher = Hasher()
        for at in range(0, nbytes, MIB):
            buffer = memoryview(bytearray(min(MIB, nbytes - at)))
            self.storage.read_into(side.label, at, buffer)
            hasher.update(buffer)
        if hasher.digest() == side.digest:
            return []
        message = f"the side file {side.label} was changed"
        return [Problem("side_checksum_mismatch", message, where=side.label)]

    def _block_problems(self, chunks: list[_FileChunk]) -> list[Problem]:
        found: dict[_FileChunk, list[Problem]] = {}

        def task(entry: _FileChunk) -> Callable[[], None]:
            def check() -> None:
                row = self._row(entry[2])
                place: ChunkPlace = row.chunks[entry[3]]
                found[entry] = self.blocks.find_block_problems(entry[2], row, place)
                self._advance(place.stored_nbytes)

            return check

        self.workers.run(task(entry) for entry in chunks)
        return [problem for entry in chunks for problem in found[entry]]

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _first_difference(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
