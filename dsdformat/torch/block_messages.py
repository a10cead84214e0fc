"""Blocks that one rank reads and others get their parts of, in messages.

In rounds that move a bounded amount, of which the next is read while the last is on its way.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dsdformat.boxes import Box
from dsdformat.plan.block_shares import BUCKET_NBYTES, Met
from dsdformat.torch.alike import trade
from dsdformat.torch.block_pieces import BlockRoles, Piece, aligned, list_pieces, within
from dsdformat.torch.buffers import Scratch, copy_elements, typed
from dsdformat.torch.comm import Comm, Pending
from dsdformat.torch.moves import Move, put

__all__ = ["BlockMessages"]


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
    takers: dict[int, list[Piece]]

    def nbytes(self, rank: int) -> int:
        """Return how long a message to a rank is."""
        width = self.stored.itemsize
        return sum(aligned(piece.box.numel * width) for piece in self.takers.get(rank, ()))


class BlockMessages:
    """The messages of one rank."""

    def __init__(self, roles: BlockRoles) -> None:
        self._roles = roles
        self._comm = roles.comm
        self._moves_of = roles.moves
        self._reads: list[_Read] = []

    def _ask(self) -> None:
        """Tell each reader the boxes that are wanted, those of each tensor once."""
        comm, roles = self._comm, self._roles
        asked = []
        for rank, expected in enumerate(roles.met):
            tensors = sorted({block.tensor for block in expected}) if rank != comm.rank else []
            asked.append(_emit([move for one in tensors for move in roles.moves[one]]))
        wishes = [_parse(raw) for raw in trade(comm, asked)]
        for block, met in roles.met[comm.rank].items():
            wishes[comm.rank][block.tensor] = [one.place for one in roles.moves[block.tensor]]
            parts = roles.parts(met)
            takers = {
                rank: list(list_pieces(parts, wishes[rank][block.tensor]))
                for rank in roles.takers[block]
            }
            stored = roles.moves[block.tensor][0].stored
            self._reads.append(_Read(met, stored, parts, takers))

    def run(self) -> None:
        """Read, send, and get.

        Raises:
            DistributedError: `rank_failed`, on every rank; they may have got some blocks.

        Ranks: collective over the group.
        Memory: five times `BUCKET_NBYTES`.
        """
        comm = self._comm
        self._ask()
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
        memory = _Cursor(blocks.take(sum(aligned(one.met.nbytes) for one in some)))
        views = [
            self._roles.views(one.met, one.parts, memory.take_bytes(one.met.nbytes)) for one in some
        ]
        self._roles.read([(one.met, one.parts, own) for one, own in zip(some, views, strict=True)])
        places = [_Cursor(part) for part in torch.split(buffer, list(sent))]
        for one, own in zip(some, views, strict=True):
            moves = self._moves_of[one.met.block.tensor]
            for rank, pieces in one.takers.items():
                for part, wish, box in pieces:
                    source = within(own[part], one.parts[part], box)
                    if rank == self._comm.rank:
                        put(within(moves[wish].into, moves[wish].place, box), source)
                    else:
                        copy_elements(source, places[rank].take(box.shape, one.stored))

    def _awaited(self, rank: int) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
        """List what this rank gets from another one, in the order in which it is sent."""
        for block, met in self._roles.met[rank].items():
            moves = self._moves_of[block.tensor]
            for _, wish, box in self._roles.pieces(met, self._roles.parts(met)):
                yield within(moves[wish].into, moves[wish].place, box), moves[wish].stored


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
        self._at += aligned(nbytes)
        return part

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the next bytes, as a tensor."""
        part = self.take_bytes(dtype.itemsize * math.prod(shape))
        return typed(part, dtype).view(tuple(shape))


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
