"""Read, verify and decode the blocks of chunks, in threads.

Decides how bytes move from data files to a caller's buffer: whole blocks straight to their place
where the place is contiguous, through a scratch block where it is not. Every block is compared
with its digest before a byte of it counts, unless the caller said otherwise.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from dsdformat.boxes import Box, copy_runs
from dsdformat.errors import ArgumentError, FormatError, Problem, shorten
from dsdformat.format.checks import ChunkPlace, TensorRow
from dsdformat.format.codecs import RAW, decode_block
from dsdformat.format.digests import DIGEST_NBYTES, Hasher, digest
from dsdformat.format.manifest import Body, Columns
from dsdformat.limits import KIB
from dsdformat.storage.base import Storage

__all__ = ["BlockReader", "Request", "Task", "Workers"]

Task = Callable[[], None]
_PIECE = 512 * KIB  # read, then hashed while it is in the cache
_PARALLEL_MIN = 1024 * KIB
SMALL_NBYTES = 64 * KIB  # what is smaller is read, written and verified in batches
BATCH_NBYTES = 1024 * KIB


class Workers:
    """Threads that start when first needed.

    Attributes:
        count: How many; 1 runs everything in the caller's thread.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is not None and (type(count) is not int or count < 1):
            raise ArgumentError(
                f"threads is {shorten(count)}, expected 1 or more", code="bad_argument"
            )
        self.count = count or min(8, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def run(self, tasks: Iterable[Task]) -> None:
        """Run tasks, at most twice as many in flight as there are threads.

        Raises:
            The first exception of a task, after those in flight have ended.
        """
        todo = iter(tasks)
        first = list(itertools.islice(todo, 2))
        if self.count == 1 or len(first) < 2:
            for task in itertools.chain(first, todo):
                task()
            return
        pool = self._started()
        running: set[Future[None]] = set()
        try:
            for task in itertools.chain(first, todo):
                if len(running) >= 2 * self.count:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                running.add(pool.submit(task))
            for future in running:
                future.result()
        finally:
            for future in running:
                future.cancel()
            wait(running)

    def close(self) -> None:
        """Stop the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _started(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.count, "dsdformat")
            return self._pool


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of one chunk.

    Attributes:
        tensor: Index of the tensor.
        row, chunk: The tensor and the chunk.
        number: Of the block in its chunk.
        start: Where it begins in the decoded chunk, in bytes.
        nbytes: Decoded length.
        byte_offset, stored_nbytes: Where its stored bytes lie in the data file.
    """

    tensor: int
    row: TensorRow
    chunk: ChunkPlace
    number: int
    start: int
    nbytes: int
    byte_offset: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """A box of a tensor that is wanted, and the buffer for its packed bytes."""

    tensor: int
    row: TensorRow
    box: Box
    into: memoryview


class BlockReader:
    """Reads blocks of one checkpoint."""

    def __init__(
        self,
        storage: Storage,
        body: Body,
        columns: Columns,
        workers: Workers,
        name_of: Callable[[int], str],
    ) -> None:
        self._storage = storage
        self._body = body
        self._columns = columns
        self._workers = workers
        self._name_of = name_of
        self._checked: set[int] = set()

    def read(self, request: Request, *, verify: bool) -> None:
        """Fill a request's buffer with the packed row-major bytes of its box.

        Raises:
            FormatError: `checksum_mismatch` and others of stages 5 and 6; the buffer is then
                undefined.

        Memory: one block per thread; none for raw chunks that are contiguous in the buffer.
        """
        tasks = self._tasks(request, verify=verify)
        if len(request.into) < _PARALLEL_MIN:
            for task in tasks:
                task()
        else:
            self._workers.run(tasks)

    def read_many(self, requests: Iterable[Request], *, verify: bool) -> None:
        """Fill many buffers; small raw tensors that lie together are read together.

        Memory: as `read`, plus 1 MiB per thread.
        """
        small_max = min(SMALL_NBYTES, self._body.block_nbytes)  # one digest each
        small: list[_Small] = []
        large: list[Request] = []
        for request in requests:
            chunks = request.row.chunks
            whole = len(chunks) == 1 and len(request.into) == chunks[0].nbytes
            if whole and chunks[0].codec == RAW and 0 < chunks[0].nbytes <= small_max:
                place = chunks[0]
                small.append((place.file, place.byte_offset, request.tensor, request))
            elif len(request.into):
                large.append(request)
        small.sort(key=operator.itemgetter(0, 1, 2))
        batches = (self._batch_task(batch, verify=verify) for batch in _batches(small))
        rest = (task for request in large for task in self._tasks(request, verify=verify))
        self._workers.run(itertools.chain(batches, rest))

    def check_file(self, index: int) -> None:
        """Compare the length of a data file with the manifest, once (R-10.3)."""
        if index in self._checked:
            return
        file = self._body.files[index]
        nbytes = self._storage.nbytes(file.label)
        if nbytes != file.nbytes:
            raise Problem(
                "file_size_mismatch",
                f"{file.label} has {nbytes} bytes, the manifest says {file.nbytes}",
                where=file.label,
                byte_offset=min(nbytes, file.nbytes),
                hint="the file was cut short or replaced; restore it from another copy",
            ).error()
        self._checked.add(index)

    def find_block_problems(
        self, tensor: int, row: TensorRow, chunk: ChunkPlace, numbers: range
    ) -> list[Problem]:
        """Read and check some blocks of a chunk, for a verifier.

        Memory: one block, and its decoded form where it is compressed.
        """
        problems: list[Problem] = []
        for number in numbers:
            block = self._block(tensor, row, chunk, number)
            try:
                if chunk.codec == RAW:
                    self._check_raw(block)
                else:
                    self._decoded(block, verify=True)
            except FormatError as error:
                problems += error.problems
        return problems

    def _block(self, tensor: int, row: TensorRow, chunk: ChunkPlace, number: int) -> _Block:
        start = number * self._body.block_nbytes
        nbytes = min(self._body.block_nbytes, chunk.nbytes - start)
        at, stored = chunk.byte_offset + start, nbytes
        if chunk.codec != RAW:
            at = chunk.byte_offset + chunk.frame_at[number]
            stored = chunk.frames[number]
        return _Block(tensor, row, chunk, number, start, nbytes, at, stored)

    def _tasks(self, request: Request, *, verify: bool) -> Iterator[Task]:
        for chunk in request.row.chunks:
            shared = chunk.box.intersect(request.box)
            if shared is not None and shared.numel:
                self.check_file(chunk.file)
                yield from self._chunk_tasks(request, chunk, verify=verify)

    def _chunk_tasks(self, request: Request, chunk: ChunkPlace, *, verify: bool) -> Iterator[Task]:
        runs = copy_runs(chunk.box, request.box, request.row.dtype.itemsize)
        src, dst, nbytes = next(runs)
        if next(runs, None) is not None:
            yield lambda: self._scatter(request, chunk, verify=verify)
            return
        size = self._body.block_nbytes
        for number in range(src // size, (src + nbytes - 1) // size + 1):
            block = self._block(request.tensor, request.row, chunk, number)
            low = max(src, block.start)
            high = min(src + nbytes, block.start + block.nbytes)
            target = request.into[dst + low - src : dst + high - src]
            yield self._run_task(block, low - block.start, target, verify=verify)

    def _run_task(self, block: _Block, start: int, target: memoryview, *, verify: bool) -> Task:
        """Read a contiguous part of a block: straight to its place where nothing is in between."""
        if block.chunk.codec == RAW and (len(target) == block.nbytes or not verify):
            return lambda: self._read_raw(block, start, target, verify=verify)

        def copy() -> None:
            target[:] = self._decoded(block, verify=verify)[start : start + len(target)]

        return copy

    def _batch_task(self, batch: list[_Small], *, verify: bool) -> Task:
        def read() -> None:
            file, begin, *_ = batch[0]
            self.check_file(file)
            end = batch[-1][1] + len(batch[-1][3].into)
            buffer = memoryview(bytearray(end - begin))
            self._fill(file, begin, buffer)
            table = b""
            if verify:  # neighbours in a file are neighbours in the table of digests
                table = self._columns.digests(batch[0][3].row.chunks[0].first_block, len(batch))
            for number, (_, at, tensor, request) in enumerate(batch):
                data = buffer[at - begin : at - begin + len(request.into)]
                expected = table[DIGEST_NBYTES * number : DIGEST_NBYTES * (number + 1)]
                if verify and digest(data) != expected:
                    self._compare(self._block(tensor, request.row, request.row.chunks[0], 0), b"")
                request.into[:] = data

        return read

    def _scatter(self, request: Request, chunk: ChunkPlace, *, verify: bool) -> None:
        """Copy many short runs, block by block."""
        size = self._body.block_nbytes
        into = request.into
        current, data = -1, memoryview(b"")
        for src, dst, nbytes in copy_runs(chunk.box, request.box, request.row.dtype.itemsize):
            at, end = src, src + nbytes
            while at < end:
                number, start = divmod(at, size)
                if number != current:
                    block = self._block(request.tensor, request.row, chunk, number)
                    data = self._decoded(block, verify=verify)
                    current = number
                count = min(end - at, len(data) - start)
                into[dst + at - src : dst + at - src + count] = data[start : start + count]
                at += count

    def _decoded(self, block: _Block, *, verify: bool) -> memoryview:
        """Return the decoded bytes of a block."""
        stored = memoryview(bytearray(block.stored_nbytes))
        if block.chunk.codec == RAW:
            self._read_raw(block, 0, stored, verify=verify)
            return stored
        self._fill(block.chunk.file, block.byte_offset, stored)
        if verify:
            _, expected = self._columns.frame_rows(block.chunk.first_frame + block.number, 1)
            if (actual := digest(stored)) != expected:
                raise self._mismatch("stored_checksum_mismatch", block, expected, actual)
        try:
            data = decode_block(stored, block.chunk.codec, block.row.dtype, block.nbytes)
        except FormatError as error:
            raise self._undecodable(block, error) from None
        if verify:
            self._compare(block, digest(data))
        return memoryview(data)

    def _read_raw(self, block: _Block, start: int, target: memoryview, *, verify: bool) -> None:
        at = block.byte_offset + start
        if not verify:
            self._fill(block.chunk.file, at, target)
            return
        hasher = Hasher()
        for begin in range(0, len(target), _PIECE):
            piece = target[begin : begin + _PIECE]
            self._fill(block.chunk.file, at + begin, piece)
            hasher.update(piece)
        self._compare(block, hasher.digest())

    def _check_raw(self, block: _Block) -> None:
        hasher = Hasher()
        buffer = memoryview(bytearray(min(_PIECE, block.nbytes)))
        for start in range(0, block.nbytes, _PIECE):
            piece = buffer[: min(_PIECE, block.nbytes - start)]
            self._fill(block.chunk.file, block.byte_offset + start, piece)
            hasher.update(piece)
        self._compare(block, hasher.digest())

    def _fill(self, file: int, byte_offset: int, target: memoryview) -> None:
        label = self._body.files[file].label
        count = self._storage.read_into(label, byte_offset, target)
        if count < len(target):
            raise Problem(
                "file_size_mismatch",
                f"{label} ends at byte {byte_offset + count}, before the chunk does",
                where=label,
                byte_offset=byte_offset + count,
            ).error()

    def _compare(self, block: _Block, actual: bytes) -> None:
        expected = self._columns.digests(block.chunk.first_block + block.number, 1)
        if actual != expected:
            raise self._mismatch("checksum_mismatch", block, expected, actual)

    def _mismatch(self, code: str, block: _Block, expected: bytes, actual: bytes) -> FormatError:
        stored = "stored bytes of " if code.startswith("stored") else ""
        message = (
            f"checksum mismatch in {stored}{self._describe(block)}: "
            f"expected blake3 {expected.hex()[:16]}…, got {actual.hex()[:16]}…"
        )
        return Problem(
            code,
            message,
            expected=expected.hex(),
            actual=actual.hex(),
            hint="the file was damaged after it was written; restore it from another copy",
            **self._place(block),
        ).error()

    def _undecodable(self, block: _Block, error: FormatError) -> FormatError:
        message = f"{self._describe(block)}: {error.message}"
        return Problem(error.code, message, **self._place(block)).error()

    def _describe(self, block: _Block) -> str:
        place = self._place(block)
        return (
            f"block {block.number} of chunk {block.chunk.number} of {place['entry']} "
            f"({place['where']}, bytes {place['byte_offset']}..{place['byte_end']})"
        )

    def _place(self, block: _Block) -> dict[str, Any]:
        return {
            "where": self._body.files[block.chunk.file].label,
            "byte_offset": block.byte_offset,
            "byte_end": block.byte_offset + block.stored_nbytes,
            "entry": self._name_of(block.tensor),
            "chunk": block.chunk.number,
            "block": block.number,
        }


# A small tensor: data file, byte offset, index, request.
_Small = tuple[int, int, int, Request]


def _batches(small: list[_Small]) -> Iterator[list[_Small]]:
    """Cut tensors in storage order into runs without gaps, of about 1 MiB."""
    batch: list[_Small] = []
    begin = end = 0
    for entry in small:
        file, at, _, request = entry
        follows = bool(batch) and file == batch[-1][0] and at == end
        if not follows or end - begin >= BATCH_NBYTES:
            if batch:
                yield batch
            batch, begin = [], at
        batch.append(entry)
        end = at + len(request.into)
    if batch:
        yield batch
