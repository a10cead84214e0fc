"""Read blocks that several ranks want in part once, and send each rank what it wants of them.

Where ranks want other boxes than those that were written, as columns of what is stored by rows,
each would read most blocks of the others. Instead one rank reads a block, verifies it, and sends
the others their parts, in rounds that move a bounded amount.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsdformat.boxes import Box
from dsdformat.format.codecs import RAW
from dsdformat.format.digests import digest
from dsdformat.plan.block_shares import (
    BUCKET_NBYTES,
    Block,
    Met,
    blocks_met,
    boxes_of_block,
    find_partial,
    rest_of,
)
from dsdformat.plan.read_shares import share_out
from dsdformat.reader import Checkpoint
from dsdformat.torch.alike import KEY_NBYTES, find_alike, trade
from dsdformat.torch.buffers import Scratch, box_view, copy_elements, typed
from dsdformat.torch.comm import Comm, Pending, group_order
from dsdformat.torch.moves import Move, put, read

__all__ = ["BlockMoves"]

_ALIGN = 16


class _Piece(NamedTuple):
    """What a wanted box has of a block, if it lies in one part of it.

    Attributes:
        part: Number of the part: a block is several boxes where it does not end with a row.
        wish: Number of the box that is wanted.
        box: In elements of the tensor.
    """

    part: int
    wish: int
    box: Box


@dataclass(frozen=True)
class _Read:
    """A block that this rank reads for others.

    Attributes:
        met: Which one.
        stored: Its dtype.
        parts: Its boxes.
        takers: For each rank that wants some of it, what.
    """

    met: Met
    stored: torch.dtype
    parts: list[Box]
    takers: dict[int, list[_Piece]]

    def nbytes(self, rank: int) -> int:
        """Return how long a message to a rank is."""
        width = self.stored.itemsize
        return sum(_aligned(piece.box.numel * width) for piece in self.takers.get(rank, ()))


class BlockMoves:
    """What a rank wants, seen as blocks of a checkpoint.

    Attributes:
        wanted_nbytes: How much it wants.
        extra_nbytes: How much more it would read by itself, as blocks are read whole.
    """

    def __init__(self, comm: Comm, checkpoint: Checkpoint, moves: Sequence[Move]) -> None:
        """Find the blocks of boxes that are all different.

        Ranks: local.
        """
        self._comm = comm
        self._checkpoint = checkpoint
        self._met = {id(move): list(self._blocks(move)) for move in moves}
        self._moves = {id(move): move for move in moves}
        self.wanted_nbytes = sum(move.nbytes for move in moves)
        partial = find_partial(itertools.chain(*self._met.values()))
        self.extra_nbytes = sum(one.nbytes - one.wanted_nbytes for one in partial.values())
        self._reads: list[_Read] = []
        self._expected: list[list[tuple[Block, Met]]] = [[] for _ in range(comm.world_size)]
        self._moves_of: dict[int, list[Move]] = {}

    def _blocks(self, move: Move) -> Iterator[Met]:
        table = self._checkpoint.table
        found = blocks_met(
            move.index,
            table.chunk_table(move.index),
            move.place,
            self._checkpoint.block_nbytes,
        )
        return (one for one in found if table.verifies or one.place.codec != RAW)

    def keep(self, moves: Sequence[Move]) -> None:
        """Leave out what is not among these moves, as it is read in another way."""
        kept = {id(move) for move in moves}
        self._met = {key: met for key, met in self._met.items() if key in kept}
        self._moves = {key: move for key, move in self._moves.items() if key in kept}

    def share(self) -> list[Move]:
        """Agree who reads which blocks; return what this rank reads for itself.

        Ranks: collective over the group.
        """
        comm = self._comm
        partial = find_partial(itertools.chain(*self._met.values()))
        blocks = sorted(partial)
        holders = find_alike(comm, [_key(block) for block in blocks])
        shared = {
            block: ranks for block, ranks in zip(blocks, holders, strict=True) if len(ranks) > 1
        }
        readers = self._readers(shared, partial)
        for block, reader in sorted(readers.items()):
            if reader != comm.rank:
                self._expected[reader].append((block, partial[block]))
        rest: list[Move] = []
        for key, move in self._moves.items():
            taken = {one.block for one in self._met[key]} & shared.keys()
            if taken:
                self._moves_of.setdefault(move.index, []).append(move)
                rest += self._rest(move, taken)
            else:
                rest.append(move)
        for some in self._moves_of.values():
            some.sort(key=_order)
        self._ask(shared, readers, partial)
        return rest

    def _readers(
        self, shared: dict[Block, tuple[int, ...]], partial: dict[Block, Met]
    ) -> dict[Block, int]:
        """Choose who reads each block; ranks that want it choose alike."""
        groups: dict[tuple[int, ...], list[Block]] = {}
        for block, ranks in shared.items():
            groups.setdefault(ranks, []).append(block)
        body, world_size = self._checkpoint.table.body, self._checkpoint.world_size
        alike = world_size == self._comm.world_size
        result: dict[Block, int] = {}
        for ranks, some in sorted(groups.items(), key=lambda item: group_order(item[0])):
            places = {rank: place for place, rank in enumerate(ranks)}
            files = (body.files[partial[block].place.file] for block in some)
            writers = [places.get(file.rank) if alike else None for file in files]
            sizes = [partial[block].nbytes for block in some]
            chosen = share_out(sizes, writers, len(ranks))
            result.update(zip(some, (ranks[place] for place in chosen), strict=True))
        return result

    def _rest(self, move: Move, taken: set[Block]) -> Iterator[Move]:
        """List what is left of a move when some of its blocks are read for it."""
        chunks: dict[int, list[Met]] = {}
        for one in self._met[id(move)]:
            if one.block not in taken:
                chunks.setdefault(one.block.chunk, []).append(one)
        block_nbytes = self._checkpoint.block_nbytes
        for some in chunks.values():
            numbers = [one.block.number for one in some]
            for box in rest_of(
                some[0].place, move.place, numbers, move.stored.itemsize, block_nbytes
            ):
                yield Move(move.index, move.stored, _within(move.into, move.place, box), box)

    def _ask(
        self,
        shared: dict[Block, tuple[int, ...]],
        readers: dict[Block, int],
        partial: dict[Block, Met],
    ) -> None:
        """Tell each reader the boxes that are wanted, those of each tensor once."""
        comm = self._comm
        asked = []
        for rank in range(comm.world_size):
            tensors = sorted({block.tensor for block, _ in self._expected[rank]})
            asked.append(_emit([move for one in tensors for move in self._moves_of[one]]))
        wishes = [_parse(raw) for raw in trade(comm, asked)]
        for block in sorted(block for block, reader in readers.items() if reader == comm.rank):
            wishes[comm.rank][block.tensor] = [one.place for one in self._moves_of[block.tensor]]
            parts = self._parts(partial[block])
            takers = {
                rank: list(_pieces(parts, wishes[rank][block.tensor])) for rank in shared[block]
            }
            stored = self._moves_of[block.tensor][0].stored
            self._reads.append(_Read(partial[block], stored, parts, takers))

    def _parts(self, met: Met) -> list[Box]:
        itemsize = self._checkpoint.table.chunk_table(met.block.tensor).dtype.itemsize
        return boxes_of_block(met.place, met.block.number, itemsize, self._checkpoint.block_nbytes)

    def run(self) -> None:
        """Read the blocks that this rank is to read, and send and get what is wanted of them.

        Raises:
            DistributedError: `rank_failed`, on every rank; they may have got some blocks.

        Ranks: collective over the group.
        Memory: five times `BUCKET_NBYTES`.
        """
        comm = self._comm
        rounds = list(self._rounds())
        blocks = Scratch()
        scratch = [(Scratch(comm.device), Scratch(comm.device)) for _ in range(2)]
        awaited = [self._awaited(rank) for rank in range(comm.world_size)]
        last: Pending | None = None  # what is on its way while the next blocks are read
        for number in range(max(comm.gather_values(len(rounds)))):
            outgoing, incoming = scratch[number % 2]
            some = rounds[number] if number < len(rounds) else []
            sent = [
                sum(one.nbytes(rank) for one in some) if rank != comm.rank else 0
                for rank in range(comm.world_size)
            ]
            buffer = outgoing.take(sum(sent))
            with comm.together("load"):
                self._read(some, blocks, buffer, sent)
            sizes = _sizes(comm, sent)
            received = last.wait() if last is not None else []
            last = comm.begin_exchange(buffer, sent, sizes, incoming.take(sum(sizes)))
            self._unpack(received, awaited)
        self._unpack(last.wait() if last is not None else [], awaited)

    def _unpack(
        self,
        received: Sequence[torch.Tensor],
        awaited: Sequence[Iterator[tuple[torch.Tensor, torch.dtype]]],
    ) -> None:
        """Put what other ranks have sent in place."""
        for rank, message in enumerate(received):
            cursor = _Cursor(message)
            while rank != self._comm.rank and not cursor.is_done:
                into, stored = next(awaited[rank])
                put(into, cursor.take(into.shape, stored))

    def _rounds(self) -> Iterator[list[_Read]]:
        """Cut what this rank reads so that neither it nor those that want it get too much."""
        some: list[_Read] = []
        total, sent = 0, [0] * self._comm.world_size
        for one in self._reads:
            limit = BUCKET_NBYTES // len(one.takers)  # as many may send to each of them
            sizes = {rank: one.nbytes(rank) for rank in one.takers}
            full = total + one.met.nbytes > BUCKET_NBYTES or any(
                sent[rank] + size > limit for rank, size in sizes.items()
            )
            if some and full:
                yield some
                some, total, sent = [], 0, [0] * self._comm.world_size
            some.append(one)
            total += one.met.nbytes
            for rank, size in sizes.items():
                sent[rank] += size
        if some:
            yield some

    def _read(
        self, some: Sequence[_Read], blocks: Scratch, buffer: torch.Tensor, sent: Sequence[int]
    ) -> None:
        """Read blocks; put what is wanted of them in place, or into the messages to others."""
        memory = _Cursor(blocks.take(sum(_aligned(one.met.nbytes) for one in some)))
        views = [list(_views_of(one, memory.take_bytes(one.met.nbytes))) for one in some]
        read(
            self._checkpoint,
            [
                Move(one.met.block.tensor, one.stored, view, part)
                for one, own in zip(some, views, strict=True)
                for view, part in zip(own, one.parts, strict=True)
            ],
        )
        places = [_Cursor(part) for part in torch.split(buffer, list(sent))]
        for one, own in zip(some, views, strict=True):
            moves = self._moves_of[one.met.block.tensor]
            for rank, pieces in one.takers.items():
                for part, wish, box in pieces:
                    source = _within(own[part], one.parts[part], box)
                    if rank == self._comm.rank:
                        put(_within(moves[wish].into, moves[wish].place, box), source)
                    else:
                        copy_elements(source, places[rank].take(box.shape, one.stored))

    def _awaited(self, rank: int) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
        """List what this rank gets from another one, in the order in which it is sent."""
        for block, met in self._expected[rank]:
            moves = self._moves_of[block.tensor]
            for _, wish, box in _pieces(self._parts(met), [move.place for move in moves]):
                yield _within(moves[wish].into, moves[wish].place, box), moves[wish].stored


class _Cursor:
    """Hands out the bytes of a message one after another."""

    def __init__(self, message: torch.Tensor) -> None:
        self._message = message
        self._at = 0

    @property
    def is_done(self) -> bool:
        """Whether all was handed out."""
        return self._at >= self._message.numel()

    def take_bytes(self, nbytes: int) -> torch.Tensor:
        """Return the next bytes."""
        part = self._message[self._at : self._at + nbytes]
        self._at += _aligned(nbytes)
        return part

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the next bytes, as a tensor."""
        part = self.take_bytes(dtype.itemsize * math.prod(shape))
        return typed(part, dtype).view(tuple(shape))


def _views_of(one: _Read, data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the parts of a block in its memory."""
    at = 0
    for part in one.parts:
        nbytes = part.numel * one.stored.itemsize
        yield typed(data[at : at + nbytes], one.stored).view(part.shape)
        at += nbytes


def _pieces(parts: Sequence[Box], wishes: Sequence[Box]) -> Iterator[_Piece]:
    """List what of the parts of a block is wanted, in an order that all ranks know."""
    for number, part in enumerate(parts):
        for wish, wanted in enumerate(wishes):
            common = part.intersect(wanted)
            if common is not None:
                yield _Piece(number, wish, common)


def _within(tensor: torch.Tensor, around: Box, box: Box) -> torch.Tensor:
    """Return the view of a box in a tensor that is another box."""
    at = tuple(a - b for a, b in zip(box.offset, around.offset, strict=True))
    return box_view(tensor, Box(at, box.shape))


def _order(move: Move) -> tuple[object, ...]:
    return move.place.offset, move.place.shape, str(move.into.dtype)


def _key(block: Block) -> bytes:
    return digest(repr(tuple(block)).encode())[:KEY_NBYTES]


def _emit(moves: Sequence[Move]) -> bytes:
    rows = array("q")
    for move in moves:
        box = move.place
        rows.extend((move.index, len(box.shape), *box.offset, *box.shape))
    return rows.tobytes()


def _parse(raw: bytes) -> dict[int, list[Box]]:
    """Return the boxes of each tensor that another rank asks for."""
    rows = array("q")
    rows.frombytes(raw)
    found: dict[int, list[Box]] = {}
    at = 0
    while at < len(rows):
        tensor, ndim = rows[at : at + 2]
        middle, end = at + 2 + ndim, at + 2 + 2 * ndim
        box = Box(tuple(rows[at + 2 : middle]), tuple(rows[middle:end]))
        found.setdefault(tensor, []).append(box)
        at = end
    return found


def _sizes(comm: Comm, sent: Sequence[int]) -> list[int]:
    """Return how much each rank sends to this one."""
    lengths = torch.tensor(sent, dtype=torch.int64).view(torch.uint8).to(comm.device)
    alike = [8] * comm.world_size
    return [
        int(one.clone().view(torch.int64).item()) for one in comm.exchange(lengths, alike, alike)
    ]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
