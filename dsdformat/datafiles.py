"""Write the data files of one writer: hash, compress, place, flush.

What goes where is planned by `file_plans`. Writing holds a bounded number of blocks, whatever the
size of a tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dsdformat.blocks import BATCH_NBYTES, SMALL_NBYTES
from dsdformat.file_plans import FilePlan
from dsdformat.format.codecs import RAW, encode_block
from dsdformat.format.digests import DIGEST_NBYTES, digest, digests
from dsdformat.format.dtypes import Dtype
from dsdformat.format.payload import emit_header
from dsdformat.storage.base import Buffer, Sink, Target, all_completed
from dsdformat.workers import Task, Workers

__all__ = ["FileWriter", "end_file", "write_chunks", "write_files"]

_FLUSHED_AT_ONCE = 8

# Writes data files that are planned and have labels, and fills in where their chunks lie.
FileWriter = Callable[[Sequence[FilePlan], Target, int, Workers], None]


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
                write_chunks(plan, range(len(plan.rows)), sinks[-1], block_nbytes, workers)
                end_file(plan, sinks[-1])


def write_chunks(
    plan: FilePlan, share: Sequence[int], sink: Sink, block_nbytes: int, workers: Workers
) -> None:
    """Write some chunks of a file that others may write into too; fill in where those lie.

    Args:
        plan: The file.
        share: Places of the chunks in it, ascending.
        sink: The file.
        block_nbytes: Of the checkpoint.
        workers: Who hashes, compresses and writes.

    Memory: as `write_files`.
    """
    codecs = plan.codecs
    raw = [place for place in share if codecs[place] == RAW]
    workers.run(_raw_tasks(plan, raw, sink, block_nbytes))
    if len(raw) < len(share):
        packed = [place for place in share if codecs[place] != RAW]
        _write_compressed(plan, packed, sink, block_nbytes, workers)


def end_file(plan: FilePlan, sink: Sink | None) -> None:
    """Count a file whose chunks are all written; write its header if there is a sink."""
    if sink is not None:
        text = plan.header or plan.header_text(plan.stored_nbytes)
        header = emit_header(text, plan.header_nbytes)
        assert header is not None, "the room for a header was planned too small"
        sink.write_at(0, [header])
    plan.nbytes = plan.header_nbytes + sum(plan.stored_nbytes)


@dataclass(slots=True, eq=False)
class _Batch:
    """Small raw chunks that lie one after another: they are written in one piece.

    Attributes:
        plan: Their file.
        places: Theirs in it.
        made: Of those whose data is a function, what it gave.
        nbytes: How long all are together.
    """

    plan: FilePlan
    places: list[int] = field(default_factory=list)
    made: dict[int, Buffer] = field(default_factory=dict)
    nbytes: int = 0

    def write(self, sink: Sink) -> None:
        """Hash the chunks, and write them."""
        plan, places = self.plan, self.places
        rows = [plan.rows[place] for place in places]
        pieces: Sequence[Buffer]
        if self.made:
            view, made = plan.chunks.view, self.made
            pieces = [made[row] if row in made else view(row) for row in rows]
        else:
            pieces = plan.chunks.views(rows)
        for place, one in zip(places, digests(pieces), strict=True):
            plan.digests[place] = one
        sink.write_at(plan.byte_offset[places[0]], pieces)


def _raw_tasks(
    plan: FilePlan, places: Sequence[int], sink: Sink, block_nbytes: int
) -> Iterator[Task]:
    chunks, rows, small_nbytes = plan.chunks, plan.rows, min(SMALL_NBYTES, block_nbytes)
    datas, lengths = chunks.data, chunks.nbytes
    batch = _Batch(plan)
    for place in places:
        row = rows[place]
        nbytes = lengths[row]
        small = 0 < nbytes <= small_nbytes
        # A batch is written in one piece, so nothing else may lie in between.
        if batch.places and nbytes and not (small and batch.nbytes < BATCH_NBYTES):
            yield functools.partial(batch.write, sink)
            batch = _Batch(plan)
        if small:
            if callable(datas[row]):
                batch.made[row] = _only(chunks.blocks(row, block_nbytes))
            batch.places.append(place)
            batch.nbytes += nbytes
            continue
        found = plan.digests[place] = bytearray(DIGEST_NBYTES * -(-nbytes // block_nbytes))
        at = plan.byte_offset[place]
        for block, piece in enumerate(chunks.blocks(row, block_nbytes)):
            yield _block_task(found, block, piece, at + block * block_nbytes, sink)
    if batch.places:
        yield functools.partial(batch.write, sink)


def _only(pieces: Iterator[Buffer]) -> Buffer:
    first, *rest = pieces  # the generator's last check runs at its end
    assert not rest
    return first


def _block_task(found: bytearray, block: int, piece: Buffer, byte_offset: int, sink: Sink) -> Task:
    def write() -> None:
        at = DIGEST_NBYTES * block
        found[at : at + DIGEST_NBYTES] = digest(piece)
        sink.write_at(byte_offset, [piece])

    return write


@dataclass(slots=True, eq=False)
class _Compressing:
    """Neighbouring blocks that one task compresses, of one chunk or several.

    Attributes:
        blocks: Each with codec and dtype of its chunk.
        stored: What each is compressed to, once done.
        digests: Of each block, and of what is stored, once done.
    """

    blocks: list[tuple[int, Dtype, Buffer]]
    stored: list[bytes] = field(default_factory=list)
    digests: list[tuple[bytes, bytes]] = field(default_factory=list)

    def run(self) -> None:
        for codec, dtype, piece in self.blocks:
            stored = encode_block(piece, codec, dtype)
            self.stored.append(stored)
            self.digests.append((digest(piece), digest(stored)))


def _write_compressed(
    plan: FilePlan, places: Sequence[int], sink: Sink, block_nbytes: int, workers: Workers
) -> None:
    """Compress blocks in threads, of one chunk or several at once; write them in their order."""
    begin = at = plan.header_nbytes + plan.raw_nbytes
    frames, sums = list[int](), list[tuple[bytes, bytes]]()
    todo = _compressing(plan, places, block_nbytes)
    while group := list(itertools.islice(todo, 2 * workers.count)):
        workers.run(one.run for one in group)
        sink.write_at(at, [piece for one in group for piece in one.stored])
        lengths = [len(piece) for one in group for piece in one.stored]
        at += sum(lengths)
        frames += lengths
        sums += [pair for one in group for pair in one.digests]
        group.clear()  # before more is taken
    first = 0
    for place in places:
        stop = first + -(-plan.chunks.nbytes[plan.rows[place]] // block_nbytes)
        plan.frames[place] = frames[first:stop]
        plan.digests[place] = b"".join(of_block for of_block, _ in sums[first:stop])
        plan.frame_digests[place] = b"".join(of_frame for _, of_frame in sums[first:stop])
        plan.byte_offset[place], plan.stored_nbytes[place] = begin, sum(frames[first:stop])
        begin, first = begin + plan.stored_nbytes[place], stop


def _compressing(
    plan: FilePlan, places: Sequence[int], block_nbytes: int
) -> Iterator[_Compressing]:
    """Yield what a task compresses as soon as it is enough."""
    blocks: list[tuple[int, Dtype, Buffer]] = []
    held = 0
    chunks = plan.chunks
    for row in map(plan.rows.__getitem__, places):
        for piece in chunks.blocks(row, block_nbytes):
            if blocks and held + len(piece) > BATCH_NBYTES:
                yield _Compressing(blocks)
                blocks, held = [], 0
            blocks.append((chunks.codec[row], chunks.dtype[row], piece))
            held += len(piece)
            del piece  # and with the task it is gone
            if held >= BATCH_NBYTES:
                yield _Compressing(blocks)
                blocks, held = [], 0
    if blocks:
        yield _Compressing(blocks)
