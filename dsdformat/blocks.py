"""Read, verify and decode the blocks of chunks, in threads.

Carries out what `plan.load_plan` has planned: raw blocks go straight to their place where that is
contiguous, in pieces that are hashed while they are in the cache; all else goes through a scratch
buffer. Every block is compared with its digest, unless the caller said otherwise.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from dsdformat.block_faults import Block, BlockFaults, cut_short
from dsdformat.destinations import Destinations
from dsdformat.errors import FormatError, Problem
from dsdformat.format.checks import ChunkPlace, TensorRow
from dsdformat.format.codecs import RAW, decode_block
from dsdformat.format.digests import DIGEST_NBYTES, Hasher, digest, digests
from dsdformat.format.dtypes import DTYPES, Dtype
from dsdformat.format.manifest import DataFile
from dsdformat.limits import KIB
from dsdformat.plan.copies import Copy
from dsdformat.plan.load_columns import PAGE_NBYTES
from dsdformat.plan.load_plan import BATCH_NBYTES, SMALL_NBYTES, LoadPlan
from dsdformat.storage.base import Storage
from dsdformat.workers import Workers

__all__ = ["BATCH_NBYTES", "SMALL_NBYTES", "BlockReader"]

_PIECE = 1024 * KIB  # read, then hashed while it is in the cache; smaller ones cost more calls
_PARALLEL_MIN = 1024 * KIB
_TINY_NBYTES = 16 * KIB  # threads that hash less wait for the interpreter as long as they hash
_BATCH_MAX = BATCH_NBYTES + SMALL_NBYTES  # how long small blocks are that are read together


class Files(Protocol):
    """What a reader asks of a manifest's body; of chunks that lie elsewhere, others know it."""

    @property
    def block_nbytes(self) -> int:
        """Decoded length of a block."""

    @property
    def dtypes(self) -> Sequence[str]:
        """Logical dtypes, by number."""

    @property
    def files(self) -> Sequence[DataFile]:
        """The data files, by number."""


class Tables(Protocol):
    """What a reader asks of a manifest's columns."""

    @property
    def dtype(self) -> Sequence[int]:
        """Number of the dtype of each tensor."""

    def digests(self, first: int, count: int) -> bytes:
        """Return the digests of some blocks."""

    def frame_rows(self, first: int, count: int) -> tuple[array[int], bytes]:
        """Return stored lengths and digests of some compressed blocks."""


class BlockReader:
    """Reads blocks of one checkpoint."""

    def __init__(
        self,
        storage: Storage,
        body: Files,
        columns: Tables,
        workers: Workers,
        name_of: Callable[[int], str],
    ) -> None:
        self._storage = storage
        self._body = body
        self._columns = columns
        self._workers = workers
        self._faults = BlockFaults(body.files, name_of)
        self._checked: set[int] = set()
        self._spare: list[bytearray] = []  # one for each thread that has read small blocks

    def run(self, plan: LoadPlan, into: Destinations) -> None:
        """Read what a plan says.

        Args:
            plan: Of boxes of this checkpoint.
            into: The destination of each wanted box.

        Raises:
            FormatError: `checksum_mismatch` and others of stages 5 and 6; what the destinations
                hold is then undefined.

        Memory: for each thread 1 MiB, or one block, stored and decoded, where it is compressed.
        """
        tasks = (functools.partial(self._read, plan, into, read) for read in range(plan.tasks))
        raw = plan.whole == len(plan.order)
        tiny = raw and plan.verify and plan.range_nbytes < _TINY_NBYTES * plan.whole
        if tiny or plan.wanted_nbytes < _PARALLEL_MIN:
            for task in tasks:
                task()
        else:
            self._workers.run(tasks)

    def check_file(self, index: int, *, anew: bool = False) -> None:
        """Compare the length of a data file with the manifest, once (R-10.3), or once more."""
        if index in self._checked and not anew:
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
            block = self._block(tensor, row.dtype, chunk, number)
            try:
                if chunk.codec == RAW:
                    self._stream(block, (), verify=True)
                else:
                    self._decode(block, self._stored(block), verify=True)
            except FormatError as error:
                problems += error.problems
        return problems

    def _block(self, tensor: int, dtype: Dtype, chunk: ChunkPlace, number: int) -> Block:
        start = number * self._body.block_nbytes
        nbytes = min(self._body.block_nbytes, chunk.nbytes - start)
        at, stored = chunk.byte_offset + start, nbytes
        if chunk.codec != RAW:
            at, stored = chunk.byte_offset + chunk.frame_at[number], chunk.frames[number]
        return Block(
            *(tensor, chunk.number, number, dtype, chunk.codec, chunk.file),
            *(start, nbytes, at, stored),
            digest=chunk.first_block + number,
            frame=chunk.first_frame + number,
        )

    def _block_of(self, plan: LoadPlan, row: int) -> Block:
        chunks, ranges = plan.chunks, plan.ranges
        chunk, start = ranges.chunk[row], ranges.start[row]
        number = start // self._body.block_nbytes
        tensor = chunks.tensor[chunk]
        return Block(
            tensor=tensor,
            chunk=chunks.number[chunk],
            number=number,
            dtype=DTYPES[self._body.dtypes[self._columns.dtype[tensor]]],
            codec=chunks.codec[chunk],
            file=chunks.file[chunk],
            start=start,
            nbytes=ranges.nbytes[row],
            byte_offset=ranges.byte_offset[row],
            stored_nbytes=ranges.stored_nbytes[row],
            digest=chunks.first_block[chunk] + number,
            frame=chunks.first_frame[chunk] + number,
        )

    def _read(self, plan: LoadPlan, into: Destinations, read: int) -> None:
        rows = plan.rows(read)
        self.check_file(plan.ranges.file[rows[0]])
        if len(rows) > 1:
            self._read_together(plan, into, rows)
            return
        row = rows[0]
        block, takers = self._block_of(plan, row), _takers(plan, into, row)
        if row in plan.scattered:
            one = plan.scattered[row]
            self._read_runs(block, plan.copy(one), into[plan.copies.wanted[one]])
        elif block.codec == RAW:
            self._stream(block, takers, verify=plan.verify)
        else:
            straight = _find_straight(takers, block.start, block.nbytes)
            target = straight and _target_of(straight, block.start, block.nbytes)
            data = self._decode(block, self._stored(block), verify=plan.verify, into=target)
            _hand_out(data, block.start, [one for one in takers if one is not straight])

    def _read_together(self, plan: LoadPlan, into: Destinations, rows: Sequence[int]) -> None:
        """Read small blocks of one file at once, and hand them out when all are verified."""
        ranges, chunks, last = plan.ranges, plan.chunks, rows[-1]
        begin = ranges.byte_offset[rows[0]]
        nbytes = ranges.byte_offset[last] + ranges.stored_nbytes[last] - begin
        if max(rows) < plan.whole and self._read_in_place(plan, into, rows, begin, nbytes):
            return
        # Memory that was used just now: fresh pages take as long as reading into them.
        held = self._spare.pop() if self._spare else bytearray(max(nbytes, _BATCH_MAX))
        buffer = memoryview(held)[:nbytes]
        self._fill(ranges.file[last], begin, buffer)
        at, lengths = ranges.byte_offset, ranges.stored_nbytes
        pieces = [buffer[(start := at[row] - begin) : start + lengths[row]] for row in rows]
        raw = [index for index, row in enumerate(rows) if chunks.codec[ranges.chunk[row]] == RAW]
        if plan.verify:
            self._compare_small(plan, [rows[one] for one in raw], [pieces[one] for one in raw])
        for index in set(range(len(rows))).difference(raw):
            block = self._block_of(plan, rows[index])
            pieces[index] = self._decode(block, pieces[index], verify=plan.verify)
        _hand_out_rows(plan, into, rows, pieces)
        if len(held) == _BATCH_MAX:
            self._spare.append(held)

    def _read_in_place(
        self,
        plan: LoadPlan,
        into: Destinations,
        rows: Sequence[int],
        begin: int,
        nbytes: int,
    ) -> bool:
        """Read whole chunks right to where they belong; return whether they are there, and good.

        They are looked at by columns. What is not good, or had others between, or whose buffers
        lie over each other, is read once more by who looks at each.
        """
        wanted = plan.copies.wanted
        views = into.some(map(wanted.__getitem__, rows))
        if sum(map(len, views)) != nbytes:
            return False
        label = self._body.files[plan.ranges.file[rows[0]]].label
        count = self._storage.read_into_many(label, begin, views)
        if count < nbytes:
            raise cut_short(label, begin + count)
        if not plan.verify:
            return True
        blocks = list(map(plan.chunks.first_block.__getitem__, rows))
        if blocks != list(range(blocks[0], blocks[0] + len(rows))):
            return False
        return b"".join(digests(views)) == self._columns.digests(blocks[0], len(rows))

    def _compare_small(
        self, plan: LoadPlan, rows: Sequence[int], pieces: Sequence[memoryview]
    ) -> None:
        """Compare raw blocks with their digests."""
        for row, found, wanted in zip(
            rows, map(digest, pieces), self._digests_of(plan, rows), strict=True
        ):
            if found != wanted:
                raise self._faults.mismatch(
                    "checksum_mismatch", self._block_of(plan, row), wanted, found
                )

    def _digests_of(self, plan: LoadPlan, rows: Sequence[int]) -> Iterator[bytes]:
        """Give the digests of blocks: neighbours in a file are so in the table too (R-9.13)."""
        blocks, chunk_of, starts = plan.chunks.first_block, plan.ranges.chunk, plan.ranges.start
        size = self._body.block_nbytes
        numbers = [blocks[chunk_of[row]] + starts[row] // size for row in rows]
        first, last = min(numbers, default=0), max(numbers, default=0)
        near = last - first < 2 * len(rows)
        table = self._columns.digests(first, last - first + 1) if near else b""
        for number in numbers:
            at = DIGEST_NBYTES * (number - first)
            yield table[at : at + DIGEST_NBYTES] if near else self._columns.digests(number, 1)

    def _read_runs(self, block: Block, copy: Copy, into: memoryview) -> None:
        """Read runs that are far apart one by one, and nothing in between."""
        outer, inner = copy.split(PAGE_NBYTES)
        for src, dst in outer.places():
            piece = block._replace(
                start=0, nbytes=outer.run, byte_offset=block.byte_offset + src - block.start
            )
            self._stream(piece, [(inner, into[dst:])], verify=False)

    def _stream(self, block: Block, takers: Sequence[_Taker], *, verify: bool) -> None:
        """Read a raw block piece by piece: straight to its place where nothing is in between."""
        hasher = Hasher() if verify else None
        scratch = memoryview(b"")
        whole = not verify and _find_straight(takers, block.start, block.nbytes) is not None
        step = block.nbytes if whole else _PIECE
        for start in range(0, block.nbytes, step):
            nbytes = min(step, block.nbytes - start)
            straight = _find_straight(takers, block.start + start, nbytes)
            if straight is None:
                scratch = scratch or memoryview(bytearray(nbytes))
                piece = scratch[:nbytes]
            else:
                copy, into = straight
                at = copy.dst + block.start + start - copy.src
                piece = into[at : at + nbytes]
            self._fill(block.file, block.byte_offset + start, piece)
            if hasher is not None:
                hasher.update(piece)
            _hand_out(piece, block.start + start, [one for one in takers if one is not straight])
        if hasher is not None:
            self._compare(block, hasher.digest())

    def _stored(self, block: Block) -> memoryview:
        stored = memoryview(bytearray(block.stored_nbytes))
        self._fill(block.file, block.byte_offset, stored)
        return stored

    def _decode(
        self, block: Block, stored: memoryview, *, verify: bool, into: memoryview | None = None
    ) -> memoryview:
        """Return the decoded bytes of a block, both forms compared with their digests."""
        if verify:
            _, expected = self._columns.frame_rows(block.frame, 1)
            if (actual := digest(stored)) != expected:
                raise self._faults.mismatch("stored_checksum_mismatch", block, expected, actual)
        try:
            data = decode_block(stored, block.codec, block.dtype, block.nbytes, into)
        except FormatError as error:
            raise self._faults.undecodable(block, error) from None
        if verify:
            self._compare(block, digest(data))
        return memoryview(data)

    def _fill(self, file: int, byte_offset: int, target: memoryview) -> None:
        label = self._body.files[file].label
        count = self._storage.read_into(label, byte_offset, target)
        if count < len(target):
            raise cut_short(label, byte_offset + count)

    def _compare(self, block: Block, actual: bytes) -> None:
        expected = self._columns.digests(block.digest, 1)
        if actual != expected:
            raise self._faults.mismatch("checksum_mismatch", block, expected, actual)


# How something of a chunk is carried, and where to.
_Taker = tuple[Copy, memoryview]


def _takers(plan: LoadPlan, into: Destinations, row: int) -> list[_Taker]:
    """List who takes something from the chunk of a range."""
    chunk = plan.ranges.chunk[row]
    first = plan.chunks.first_copy[chunk]
    copies = range(first, first + plan.chunks.copies[chunk])
    return [(plan.copy(one), into[plan.copies.wanted[one]]) for one in copies]


def _find_straight(takers: Sequence[_Taker], start: int, nbytes: int) -> _Taker | None:
    """Return who takes a range of a chunk as it is, so that it can be read right there."""
    for taker in takers:
        copy, _ = taker
        if not copy.levels and copy.src <= start and start + nbytes <= copy.src + copy.run:
            return taker
    return None


def _target_of(straight: _Taker, start: int, nbytes: int) -> memoryview:
    """Return where a range of a chunk goes."""
    copy, into = straight
    at = copy.dst + start - copy.src
    return into[at : at + nbytes]


def _hand_out_rows(
    plan: LoadPlan, into: Destinations, rows: Sequence[int], pieces: Sequence[memoryview]
) -> None:
    """Hand out small ranges; most have one taker, of one run."""
    chunk_of, starts, wanted = plan.ranges.chunk, plan.ranges.start, plan.copies.wanted
    takers, first_copy = plan.chunks.copies, plan.chunks.first_copy
    sources, places, runs = plan.copies.src, plan.copies.dst, plan.copies.run
    for row, data in zip(rows, pieces, strict=True):
        chunk, start = chunk_of[row], starts[row]
        one = first_copy[chunk]
        if takers[chunk] > 1 or one in plan.many:
            _hand_out(data, start, _takers(plan, into, row))
            continue
        src, end = sources[one], start + len(data)
        low, high = max(src, start), min(src + runs[one], end)
        at = places[one] - src
        part = data if (low, high) == (start, end) else data[low - start : high - start]
        into[wanted[one]][at + low : at + high] = part


def _hand_out(data: memoryview, start: int, takers: Iterable[_Taker]) -> None:
    for copy, into in takers:
        copy.move(data, start, into)
