"""Write tensors that many ranks hold into files that they share, each tensor whole in its place.

A rank writes what it holds by position, straight from its shard, where that fills whole blocks of
64 KiB. Of a block that several ranks have bytes of, one rank is the owner, to which the others
send theirs: file systems such as NFS write whole pages, and two ranks that write into one page
lose bytes of each other. So rows that ranks share out are written by rows, and what is cut along
columns is put together in chunks of 4 MiB, in rounds that move a bounded amount. It is long, since
the two ends of a message, which must agree to the byte, are kept in sight of each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dsdformat.boxes import Box, flat_boxes
from dsdformat.limits import KIB, MIB
from dsdformat.plan.sharding import Held
from dsdformat.storage.target import FileSink
from dsdformat.torch.buffers import as_bits, bytes_of, is_packed
from dsdformat.torch.comm import Comm
from dsdformat.torch.sharding import held_view
from dsdformat.workers import Task, Workers

__all__ = ["BUCKET_NBYTES", "CommonFiles", "Place", "Shard"]

BLOCK_NBYTES = 64 * KIB  # the largest page of a common system
CHUNK_NBYTES = 4 * MIB  # what one rank puts together at a time
BUCKET_NBYTES = 128 * MIB  # what a rank sends and receives in a round
LONG_NBYTES = 4 * BLOCK_NBYTES  # runs of this length are written by themselves
PIECE_NBYTES = 8 * MIB
_RUN, _BOX = 0, 1

Ints = list[int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a whole tensor lies; known to all ranks.

    Attributes:
        file: Number of the file.
        byte_offset: Of its first element in the file.
        shape: Of the whole tensor.
        itemsize: Bytes of an element, as they are written.
    """

    file: int
    byte_offset: int
    shape: tuple[int, ...]
    itemsize: int

    def at(self, element: int) -> int:
        """Return where an element lies in the file, counted in row-major order."""
        return self.byte_offset + element * self.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """A box that this rank writes.

    Attributes:
        tensor: Number of the tensor.
        held: The box, and where the shard holds it.
        local: The shard.
        dtype: Of the file.
    """

    tensor: int
    held: Held
    local: torch.Tensor
    dtype: torch.dtype

    def read(self, box: Box) -> memoryview:
        """Return the packed bytes of a box: a view of the shard if they lie so."""
        view = held_view(self.held, box, self.local).detach()
        if view.dtype != self.dtype:
            view = view.to(self.dtype)
        return bytes_of(view if is_packed(view) else as_bits(view).cpu().contiguous())


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes that this rank has, in one row in a file.

    Attributes:
        file, begin, end: Where they go.
        read: Gives those between two places in the file, in pieces.
    """

    file: int
    begin: int
    end: int
    read: Callable[[int, int], Iterator[memoryview]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes that the owner of their chunk writes.

    Attributes:
        head: What tells the owner where they go.
        nbytes: How many there are.
        read: Gives them.
    """

    head: Ints
    nbytes: int
    read: Callable[[], Iterator[memoryview]]


class CommonFiles:
    """Files that ranks write together."""

    def __init__(
        self,
        comm: Comm,
        open_file: Callable[[int], FileSink],
        sizes: Sequence[int],
        places: Sequence[Place],
        *,
        bucket_nbytes: int = BUCKET_NBYTES,
    ) -> None:
        """Begin.

        Args:
            comm: The ranks.
            open_file: Opens a file, by its number, on this rank.
            sizes: Lengths of the files.
            places: Where each tensor lies.
            bucket_nbytes: How many bytes a rank sends and receives at once, together.
        """
        self.written = 0  # bytes, by this rank
        self._comm = comm
        self._open = open_file
        self._sinks: dict[int, FileSink] = {}
        self._sizes = sizes
        self._places = places
        counts = (-(-size // CHUNK_NBYTES) for size in sizes)
        self._first_chunks = list(itertools.accumulate(counts, initial=0))
        self._round = max(1, bucket_nbytes // (2 * CHUNK_NBYTES))

    def write(self, shards: Sequence[Shard], heads: Mapping[int, bytes]) -> None:
        """Write boxes of this rank, and what stands before the tensors of some files.

        Raises:
            DistributedError: `rank_failed`, on every rank.

        Ranks: collective over the group.
        Memory: 8 MiB for each of up to four threads, where shards are not packed in host memory;
            and in rounds half a bucket in each direction.
        """
        parts: dict[int, list[_Part]] = {}
        with self._comm.together("export"):
            self._write_own(shards, heads, parts)
        self._write_common(parts)

    def close(self) -> None:
        """Make what this rank wrote durable, and close the files."""
        while self._sinks:
            self._sinks.popitem()[1].close()

    def discard(self) -> None:
        """Close the files as they are."""
        while self._sinks:
            self._sinks.popitem()[1].discard()

    def _sink(self, file: int) -> FileSink:
        sink = self._sinks.get(file)
        if sink is None:
            sink = self._sinks[file] = self._open(file)
        return sink

    # What fills whole blocks

    def _write_own(
        self, shards: Sequence[Shard], heads: Mapping[int, bytes], parts: dict[int, list[_Part]]
    ) -> None:
        """Write whole blocks; list what is left, by chunk."""
        workers = Workers(min(4, torch.get_num_threads()))
        try:
            workers.run(self._own_tasks(shards, heads, parts))
        finally:
            workers.close()

    def _own_tasks(
        self, shards: Sequence[Shard], heads: Mapping[int, bytes], parts: dict[int, list[_Part]]
    ) -> Iterator[Task]:
        runs = itertools.chain(
            (_Run(file, 0, len(head), partial(_sliced, head)) for file, head in heads.items()),
            (run for shard in shards for run in self._runs_of(shard, parts)),
        )
        for run in runs:
            begin, end = self._whole_blocks(run)
            self.written += end - begin
            for at in range(begin, end, PIECE_NBYTES):
                stop = min(at + PIECE_NBYTES, end)
                yield partial(self._write_run, self._sink(run.file), run, at, stop)
            for edge in ((run.begin, begin), (end, run.end)):
                if edge[0] < edge[1]:
                    self._add_edge(run, *edge, parts)

    def _write_run(self, sink: FileSink, run: _Run, begin: int, end: int) -> None:
        for piece in run.read(begin, end):
            sink.write_at(begin, [piece])
            begin += len(piece)

    def _whole_blocks(self, run: _Run) -> tuple[int, int]:
        """Return the blocks that a run fills; nothing, at their border, if it fills none."""
        begin = -(-run.begin // BLOCK_NBYTES) * BLOCK_NBYTES
        if begin > run.end:
            return run.end, run.end
        last = run.end == self._sizes[run.file]  # no other bytes follow in this block
        return begin, run.end if last else run.end // BLOCK_NBYTES * BLOCK_NBYTES

    def _add_edge(self, run: _Run, begin: int, end: int, parts: dict[int, list[_Part]]) -> None:
        chunk = self._first_chunks[run.file] + begin // CHUNK_NBYTES
        head = [_RUN, run.file, begin, end - begin]
        parts.setdefault(chunk, []).append(_Part(head, end - begin, partial(run.read, begin, end)))

    def _runs_of(self, shard: Shard, parts: dict[int, list[_Part]]) -> Iterator[_Run]:
        """Yield the runs of a box, if they are long; else list its parts in each chunk."""
        place, box = self._places[shard.tensor], shard.held.outer
        if not box.numel:
            return
        lead = _leading_dims(box, place.shape)
        rows = math.prod(box.shape[:lead])
        count = box.numel // rows
        if rows > 1 and count * place.itemsize < LONG_NBYTES:
            self._add_boxes(shard, place, parts)
            return
        steps = _steps(place.shape)
        read = partial(_elements, shard, place)
        for row in itertools.product(*map(range, box.shape[:lead])):
            first = sum(
                (begin + more) * step
                for begin, more, step in zip(
                    box.offset, (*row, *[0] * len(steps)), steps, strict=False
                )
            )
            yield _Run(place.file, place.at(first), place.at(first + count), read)

    def _add_boxes(self, shard: Shard, place: Place, parts: dict[int, list[_Part]]) -> None:
        """Cut a box along the borders of chunks."""
        box, steps = shard.held.outer, _steps(place.shape)
        first, last = _index(box.offset, steps), _index([at - 1 for at in box.end], steps)
        begin = place.at(first)
        while begin <= place.at(last):
            end = min((begin // CHUNK_NBYTES + 1) * CHUNK_NBYTES, place.at(last + 1))
            chunk = self._first_chunks[place.file] + begin // CHUNK_NBYTES
            elements = ((at - place.byte_offset) // place.itemsize for at in (begin, end))
            for around in flat_boxes(place.shape, *elements):
                shared = around.intersect(box)
                if shared is not None and shared.numel:
                    head = [_BOX, shard.tensor, *around.offset, *around.shape]
                    head += [*shared.offset, *shared.shape]
                    part = _Part(head, shared.numel * place.itemsize, partial(_one, shard, shared))
                    parts.setdefault(chunk, []).append(part)
            begin = end

    # What several ranks have bytes of

    def _write_common(self, parts: dict[int, list[_Part]]) -> None:
        """Give each chunk to one rank, some chunks at a time."""
        comm = self._comm
        own = np.array(sorted(parts), dtype="<i8").tobytes()
        told = set(comm.gather_values(own))
        chunks = sorted({int(one) for raw in told for one in np.frombuffer(raw, "<i8")})
        for first in range(0, len(chunks), self._round):
            messages: list[list[_Part]] = [[] for _ in range(comm.world_size)]
            for number, chunk in enumerate(chunks[first : first + self._round], first):
                messages[number % comm.world_size] += parts.pop(chunk, ())
            sent = [_message_nbytes(message) for message in messages]
            buffer = torch.empty(0, dtype=torch.uint8)
            with comm.together("export"):
                buffer = _packed(messages, sum(sent))
            received = self._exchanged(buffer, sent)
            with comm.together("export"):
                self._put_together(received)

    def _exchanged(self, buffer: torch.Tensor, sent: Sequence[int]) -> list[memoryview]:
        comm = self._comm
        if comm.world_size == 1:
            return [bytes_of(buffer)]
        words = torch.tensor(sent, dtype=torch.int64).view(torch.uint8).to(comm.device)
        eight = [8] * comm.world_size
        sizes = [
            int(word.cpu().view(torch.int64).item()) for word in comm.exchange(words, eight, eight)
        ]
        parts = comm.exchange(buffer.to(comm.device), sent, sizes)
        return [bytes_of(part.cpu().contiguous()) for part in parts]

    def _put_together(self, messages: Sequence[memoryview]) -> None:
        """Write the chunks of this rank, each from what all ranks sent of it."""
        chunks: dict[tuple[int, int], list[tuple[Ints, memoryview]]] = {}
        for message in messages:
            for head, data in _unpacked(message, self._places):
                chunks.setdefault(self._chunk_of(head), []).append((head, data))
        buffer: Any = np.empty(CHUNK_NBYTES, np.uint8)
        view = memoryview(buffer)
        for (file, start), found in chunks.items():
            length = min(CHUNK_NBYTES, self._sizes[file] - start)
            for head, data in found:
                region, raw = self._region(head, data, start, buffer)
                region[...] = raw
            ranges = [(0, length)]
            if sum(len(data) for _, data in found) < length:  # the rest was written as blocks
                ranges = self._ranges(found, start)
            for begin, end in ranges:
                self._sink(file).write_at(start + begin, [view[begin:end]])
                self.written += end - begin

    def _ranges(
        self, found: Sequence[tuple[Ints, memoryview]], start: int
    ) -> list[tuple[int, int]]:
        """Return which ranges of a chunk are there."""
        if all(head[0] == _RUN for head, _ in found):  # what rows leave: told by their ends
            return _joined(
                sorted((head[2] - start, head[2] + head[3] - start) for head, _ in found)
            )
        there = np.zeros(CHUNK_NBYTES + 2, np.int8)
        for head, data in found:
            region, _ = self._region(head, data, start, there[1:-1])
            region[...] = 1
        edges = np.flatnonzero(np.diff(there)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _chunk_of(self, head: Ints) -> tuple[int, int]:
        """Return the file and the place of the chunk that some bytes belong to."""
        if head[0] == _RUN:
            file, begin = head[1], head[2]
        else:
            place = self._places[head[1]]
            offset = head[2 : 2 + len(place.shape)]
            steps = _steps(place.shape)
            file = place.file
            begin = place.at(_index(offset, steps))
        return file, begin // CHUNK_NBYTES * CHUNK_NBYTES

    def _region(self, head: Ints, data: memoryview, start: int, array: Any) -> tuple[Any, Any]:
        """Return the view of a chunk where some bytes belong, and the bytes in its shape."""
        raw = np.frombuffer(data, np.uint8)
        if head[0] == _RUN:
            begin = head[2] - start
            return array[begin : begin + len(raw)], raw
        place = self._places[head[1]]
        ndim, width = len(place.shape), place.itemsize
        around, shared = _two_boxes(head[2:], ndim)
        begin = place.at(_index(around.offset, _steps(place.shape))) - start
        where = tuple(
            slice(a - b, a - b + size)
            for a, b, size in zip(shared.offset, around.offset, shared.shape, strict=True)
        )
        view = array[begin : begin + around.numel * width].reshape(*around.shape, width)
        return view[where], raw.reshape(*shared.shape, width)


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ascending ranges where one begins at the end of another."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _leading_dims(box: Box, shape: Sequence[int]) -> int:
    """Return how many dims count the runs of a box: those before the last that it cuts."""
    dim = len(shape)
    while dim and box.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    return max(dim - 1, 0)


def _steps(shape: Sequence[int]) -> list[int]:
    """Return how many elements lie between neighbours along each dim."""
    steps = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    return steps


def _index(at: Sequence[int], steps: Sequence[int]) -> int:
    """Return the number of an element in row-major order."""
    return sum(one * step for one, step in zip(at, steps, strict=True))


def _sliced(data: bytes, begin: int, end: int) -> Iterator[memoryview]:
    yield memoryview(data)[begin:end]


def _elements(shard: Shard, place: Place, begin: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor between two places in the file."""
    elements = ((at - place.byte_offset) // place.itemsize for at in (begin, end))
    for box in flat_boxes(place.shape, *elements):
        yield shard.read(box)


def _one(shard: Shard, box: Box) -> Iterator[memoryview]:
    yield shard.read(box)


# A message: how many numbers, the numbers of all heads, then the data of all parts.


def _message_nbytes(parts: Sequence[_Part]) -> int:
    if not parts:
        return 0
    return sum(8 * len(part.head) + part.nbytes for part in parts) + 8


def _packed(messages: Sequence[Sequence[_Part]], nbytes: int) -> torch.Tensor:
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    buffer, at = bytes_of(tensor), 0

    def put(data: Any) -> None:
        nonlocal at
        buffer[at : at + len(data)] = data
        at += len(data)

    for parts in filter(None, messages):
        heads = [number for part in parts for number in part.head]
        put(np.array([len(heads), *heads], "<i8").tobytes())
        for part in parts:
            for piece in part.read():
                put(piece)
    assert at == nbytes
    return tensor


def _unpacked(message: memoryview, places: Sequence[Place]) -> Iterator[tuple[Ints, memoryview]]:
    if not len(message):
        return
    count = int.from_bytes(message[:8], "little")
    numbers = np.frombuffer(message[8 : 8 + 8 * count], "<i8").tolist()
    at, data = 0, message[8 + 8 * count :]
    while at < count:
        place = places[numbers[at + 1]] if numbers[at] == _BOX else None
        ndim = len(place.shape) if place else 0
        head = numbers[at : at + (2 + 4 * ndim if place else 4)]
        at += len(head)
        nbytes = _two_boxes(head[2:], ndim)[1].numel * place.itemsize if place else head[3]
        yield head, data[:nbytes]
        data = data[nbytes:]


def _two_boxes(numbers: Ints, ndim: int) -> tuple[Box, Box]:
    parts = [tuple(numbers[at : at + ndim]) for at in range(0, 4 * ndim, ndim)]
    return Box(parts[0], parts[1]), Box(parts[2], parts[3])
