"""Plan the data files of one writer, and write them: hash, compress, place, flush.

The plan is pure: which chunk goes into which file, in which order (spec R-10.8, R-10.9). Writing
holds a bounded number of blocks, whatever the size of a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsdformat.blocks import BATCH_NBYTES, SMALL_NBYTES
from dsdformat.boxes import Box
from dsdformat.errors import UnsupportedValueError, shorten
from dsdformat.format.codecs import PLANES, RAW, encode_block
from dsdformat.format.digests import DIGEST_NBYTES, digest
from dsdformat.format.dtypes import Dtype
from dsdformat.format.paths import emit_name, render_path
from dsdformat.format.payload import (
    HeaderEntry,
    chunk_key,
    emit_header,
    header_json,
    header_nbytes,
    size_class,
)
from dsdformat.format.values import encoded_key
from dsdformat.limits import FILE_CHUNKS_MAX, HEADER_ALIGNMENT, HEADER_NBYTES_MAX
from dsdformat.sources import Data, bytes_view, is_bytes, iter_blocks
from dsdformat.storage.base import Buffer, Sink, Target, all_completed
from dsdformat.workers import Task, Workers

__all__ = [
    "ChunkJob",
    "FilePlan",
    "FileWriter",
    "end_file",
    "plan_files",
    "share_of",
    "write_chunks",
    "write_files",
]


@dataclass(slots=True, eq=False)
class ChunkJob:
    """One chunk to write, and what became of it.

    Attributes:
        tensor: Index of the tensor, in this writer's order.
        path: The tensor's path.
        dtype, shape: Of the tensor.
        box: Of the chunk.
        codec: Number of the codec.
        data: Where the bytes come from.
        key: The payload key, once planned.
        file: The file, once counted; an index into this writer's files.
        byte_offset, stored_nbytes: Where it lies: of a raw chunk once planned, else once written.
        digests: 32 bytes per block, once written.
        frames: Stored lengths of blocks; empty for raw chunks.
        frame_digests: 32 bytes per frame.
        first_block, first_frame: Where they begin among those of the file, once counted.
        nbytes: Decoded length.
    """

    tensor: int
    path: tuple[Any, ...]
    dtype: Dtype
    shape: tuple[int, ...]
    box: Box
    codec: int
    data: Data
    key: str = ""
    file: int = 0
    byte_offset: int = 0
    stored_nbytes: int = 0
    digests: bytes | bytearray = b""
    frames: Sequence[int] = ()
    frame_digests: bytes = b""
    first_block: int = 0
    first_frame: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = math.prod(self.box.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """The tensor's display name."""
        return emit_name(self.path, encoded_key)

    def view(self) -> memoryview:
        """Return the bytes of data that is a buffer.

        Raises:
            MismatchError: `data_mismatch` if there are more or fewer than the box has.
        """
        data = self.data
        # Without a name, which takes as long as all else here.
        if type(data) is memoryview and data.shape == (self.nbytes,) and is_bytes(data):
            return data
        return bytes_view(data, self.nbytes, self.name)

    def blocks(self, block_nbytes: int) -> Iterator[Buffer]:
        """Cut the data into blocks, as `iter_blocks`."""
        return iter_blocks(self.data, self.nbytes, block_nbytes, self.name)

    def stored_bound(self, block_nbytes: int) -> int:
        """The most bytes that the stored chunk can have."""
        if self.codec != PLANES:
            return self.nbytes
        return self.nbytes + 4 * self.dtype.word * -(-self.nbytes // block_nbytes)


@dataclass(slots=True)
class FilePlan:
    """A data file to write: its chunks in storage order, and the room for its header.

    `header` is its JSON where that is known before the data: if nothing is compressed.
    """

    prefix: tuple[str, ...]
    jobs: list[ChunkJob]
    metadata: dict[str, str]
    header_nbytes: int = 0
    nbytes: int = 0
    label: str = ""
    header: bytes | None = None


_FLUSHED_AT_ONCE = 8

# Writes data files that are planned and have labels, and fills in where their chunks lie.
FileWriter = Callable[[Sequence[FilePlan], Target, int, Workers], None]


def plan_files(
    jobs: Sequence[ChunkJob],
    metadata: dict[str, str],
    block_nbytes: int,
    *,
    chunks_max: int = FILE_CHUNKS_MAX,
    header_max: int = HEADER_NBYTES_MAX,
) -> list[FilePlan]:
    """Spread chunks over files: one for each top-level key, more where one would be too full.

    Args:
        jobs: In the order of tensors, and in a tensor of offsets.
        metadata: For the headers.
        block_nbytes: Of the checkpoint.
        chunks_max, header_max: When to begin another file.

    Raises:
        UnsupportedValueError: a name, or the metadata, is too long for any header.
    """
    groups: dict[tuple[str, ...], list[ChunkJob]] = defaultdict(list)
    for job in jobs:
        path = job.path
        groups[path[:1] if len(path) > 1 and type(path[0]) is str else ()].append(job)
    plans: list[FilePlan] = []
    room = header_max - 8 - len(header_json((), metadata))
    for prefix in sorted(groups):
        ordered = sorted(groups[prefix], key=_rank_in_file)
        for job in ordered:
            job.key = chunk_key(job.path[len(prefix) :], job.shape, job.box, job.codec)
        for piece in _fill_files(ordered, chunks_max, room):
            plan = FilePlan(prefix, piece, metadata)
            text = header_json(_entries(plan, block_nbytes), metadata)
            plan.header_nbytes = header_nbytes(len(text))
            if plan.header_nbytes > header_max:
                raise _too_long(plan, header_max)
            if {job.codec for job in piece} == {RAW}:
                plan.header = text
            _place_raw(plan)
            plans.append(plan)
    return plans


def _place_raw(plan: FilePlan) -> None:
    """Say where raw chunks lie: one after another, those that are compressed behind them."""
    at = plan.header_nbytes
    for job in plan.jobs:
        if job.codec == RAW:
            job.byte_offset, job.stored_nbytes = at, job.nbytes
            at += job.nbytes


def write_files(
    plans: Sequence[FilePlan], target: Target, block_nbytes: int, workers: Workers
) -> None:
    """Write data files one after another, flush some at once, and fill in where chunks lie.

    Memory: two blocks per thread, and none for raw chunks that are buffers.
    """
    for first in range(0, len(plans), _FLUSHED_AT_ONCE):
        with all_completed(workers.run) as sinks:
            for plan in plans[first : first + _FLUSHED_AT_ONCE]:
                sinks.append(target.create(plan.label))
                write_chunks(plan, plan.jobs, sinks[-1], block_nbytes, workers)
                end_file(plan, sinks[-1])


def share_of(plans: Sequence[FilePlan], part: int, of: int) -> list[list[ChunkJob]]:
    """Return which chunks of each file one of several processes writes.

    Raw chunks are shared by their bytes, each process a run of them. Where a compressed chunk
    lies depends on those before it, so all of one file are the share of one process.
    """
    total = sum(job.nbytes for plan in plans for job in plan.jobs if job.codec == RAW)
    shares: list[list[ChunkJob]] = []
    done = 0
    for number, plan in enumerate(plans):
        share = []
        for job in plan.jobs:
            owner = number % of
            if job.codec == RAW:
                owner = min(of - 1, done * of // max(total, 1))
                done += job.nbytes
            if owner == part:
                share.append(job)
        shares.append(share)
    return shares


def write_chunks(
    plan: FilePlan, share: Sequence[ChunkJob], sink: Sink, block_nbytes: int, workers: Workers
) -> None:
    """Write some chunks of a file that others may write into too; fill in where those lie.

    Memory: as `write_files`.
    """
    at = plan.header_nbytes + sum(job.nbytes for job in plan.jobs if job.codec == RAW)
    workers.run(_raw_tasks([job for job in share if job.codec == RAW], sink, block_nbytes))
    _write_compressed([job for job in share if job.codec != RAW], at, sink, block_nbytes, workers)


def end_file(plan: FilePlan, sink: Sink | None) -> None:
    """Count a file whose chunks are all written; write its header if there is a sink."""
    if sink is not None:
        text = plan.header or header_json(_entries(plan, None), plan.metadata)
        header = emit_header(text, plan.header_nbytes)
        assert header is not None, "the room for a header was planned too small"
        sink.write_at(0, [header])
    plan.nbytes = plan.header_nbytes + sum(job.stored_nbytes for job in plan.jobs)


def _rank_in_file(job: ChunkJob) -> tuple[int, int]:
    """Raw chunks in falling order of size class, then compressed ones (R-10.8).

    Whole pages keep their order, so that a layer's tensors stay together; of the others the
    largest comes first, and so lies at a page boundary too.
    """
    if job.codec != RAW:
        return 0, 0
    size = size_class(job.nbytes)
    return -size, 0 if size == HEADER_ALIGNMENT else -job.nbytes


def _fill_files(
    jobs: list[ChunkJob], chunks_max: int, header_room: int
) -> Iterator[list[ChunkJob]]:
    piece: list[ChunkJob] = []
    room = header_room
    for job in jobs:
        # The key in its longest escape, numbers and punctuation: an upper bound.
        cost = 6 * len(job.key.encode()) + 64 + 24 * (len(job.shape) + 3)
        if piece and (len(piece) >= chunks_max or cost > room):
            yield piece
            piece, room = [], header_room
        piece.append(job)
        room -= cost
    if piece:
        yield piece


def _too_long(plan: FilePlan, header_max: int) -> UnsupportedValueError:
    """Say why a header is too long although the file has one chunk alone."""
    job = plan.jobs[0]
    if len(job.key.encode()) > sum(len(part) for pair in plan.metadata.items() for part in pair):
        what, hint = f"the name of {shorten(job.name)}", "use a shorter name"
    else:
        what, hint = "the metadata for the headers", "store long values in the state"
    return UnsupportedValueError(
        f"{what} needs a header of {plan.header_nbytes} bytes, at most {header_max}",
        path_in_tree=render_path(job.path),
        hint=hint,
    )


def _entries(plan: FilePlan, bound_block: int | None) -> Iterator[HeaderEntry]:
    """List header entries; with a block size, as long as compressed chunks can become."""
    for job in plan.jobs:
        nbytes = job.stored_nbytes if bound_block is None else job.stored_bound(bound_block)
        yield HeaderEntry(job.key, job.dtype, job.box.shape, job.codec, nbytes)


def _raw_tasks(jobs: list[ChunkJob], sink: Sink, block_nbytes: int) -> Iterator[Task]:
    batch: list[tuple[ChunkJob, Buffer]] = []
    held = 0
    small_nbytes = min(SMALL_NBYTES, block_nbytes)
    for job in jobs:
        small = 0 < job.nbytes <= small_nbytes
        # A batch is written in one piece, so nothing else may lie in between.
        if batch and job.nbytes and not (small and held < BATCH_NBYTES):
            yield _batch_task(batch, sink)
            batch, held = [], 0
        if small:
            piece = _only(job.blocks(block_nbytes)) if callable(job.data) else job.view()
            batch.append((job, piece))
            held += job.nbytes
            continue
        job.digests = bytearray(DIGEST_NBYTES * -(-job.nbytes // block_nbytes))
        for block, piece in enumerate(job.blocks(block_nbytes)):
            yield _block_task(job, block, piece, job.byte_offset + block * block_nbytes, sink)
    if batch:
        yield _batch_task(batch, sink)


def _only(pieces: Iterator[Buffer]) -> Buffer:
    first, *rest = pieces  # the generator's last check runs at its end
    assert not rest
    return first


def _block_task(job: ChunkJob, block: int, piece: Buffer, byte_offset: int, sink: Sink) -> Task:
    digests = job.digests
    assert isinstance(digests, bytearray)

    def write() -> None:
        at = DIGEST_NBYTES * block
        digests[at : at + DIGEST_NBYTES] = digest(piece)
        sink.write_at(byte_offset, [piece])

    return write


def _batch_task(batch: list[tuple[ChunkJob, Buffer]], sink: Sink) -> Task:
    def write() -> None:
        for job, piece in batch:
            job.digests = digest(piece)
        sink.write_at(batch[0][0].byte_offset, [piece for _, piece in batch])

    return write


@dataclass(slots=True, eq=False)
class _Compressing:
    """Neighbouring blocks that one task compresses, of one chunk or several.

    Attributes:
        blocks: Each with its chunk.
        stored: What each is compressed to, once done.
        digests: Of each block, and of what is stored, once done.
    """

    blocks: list[tuple[ChunkJob, Buffer]]
    stored: list[bytes] = field(default_factory=list)
    digests: list[tuple[bytes, bytes]] = field(default_factory=list)

    def run(self) -> None:
        for job, piece in self.blocks:
            stored = encode_block(piece, job.codec, job.dtype)
            self.stored.append(stored)
            self.digests.append((digest(piece), digest(stored)))


def _write_compressed(
    jobs: list[ChunkJob], begin: int, sink: Sink, block_nbytes: int, workers: Workers
) -> None:
    """Compress blocks in threads, of one chunk or several at once; write them in their order."""
    at, frames, digests = begin, list[int](), list[tuple[bytes, bytes]]()
    todo = _compressing(jobs, block_nbytes)
    while group := list(itertools.islice(todo, 2 * workers.count)):
        workers.run(one.run for one in group)
        sink.write_at(at, [piece for one in group for piece in one.stored])
        lengths = [len(piece) for one in group for piece in one.stored]
        at += sum(lengths)
        frames += lengths
        digests += [sums for one in group for sums in one.digests]
        group.clear()  # before more is taken
    first = 0
    for job in jobs:
        stop = first + -(-job.nbytes // block_nbytes)
        job.frames = frames[first:stop]
        job.digests = b"".join(of_block for of_block, _ in digests[first:stop])
        job.frame_digests = b"".join(of_frame for _, of_frame in digests[first:stop])
        job.byte_offset, job.stored_nbytes = begin, sum(job.frames)
        begin, first = begin + job.stored_nbytes, stop


def _compressing(jobs: list[ChunkJob], block_nbytes: int) -> Iterator[_Compressing]:
    """Yield what a task compresses as soon as it is enough."""
    blocks: list[tuple[ChunkJob, Buffer]] = []
    held = 0
    for job in jobs:
        for piece in job.blocks(block_nbytes):
            if blocks and held + len(piece) > BATCH_NBYTES:
                yield _Compressing(blocks)
                blocks, held = [], 0
            blocks.append((job, piece))
            held += len(piece)
            del piece  # and with the task it is gone
            if held >= BATCH_NBYTES:
                yield _Compressing(blocks)
                blocks, held = [], 0
    if blocks:
        yield _Compressing(blocks)
