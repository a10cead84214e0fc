"""Read blocks that several ranks want in part once, and give each rank what it wants of them.

Where ranks want other boxes than those that were written, as columns of what is stored by rows,
each would read most blocks of the others. Instead one rank reads a block, verifies it, and the
others get their parts: out of memory that they all see if they are on one machine, which saves
copies; else in messages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from dsdformat.format.codecs import RAW
from dsdformat.format.digests import digest
from dsdformat.plan.block_shares import Block, Met, blocks_met, find_partial, rest_of
from dsdformat.plan.read_shares import share_out
from dsdformat.reader import Checkpoint
from dsdformat.torch.alike import KEY_NBYTES, find_alike
from dsdformat.torch.block_memory import BlockMemory
from dsdformat.torch.block_messages import BlockMessages
from dsdformat.torch.block_pieces import BlockRoles, within
from dsdformat.torch.comm import Comm, group_order
from dsdformat.torch.common_memory import common_memory
from dsdformat.torch.moves import Move

__all__ = ["BlockMoves"]


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
        self._roles = BlockRoles(comm, checkpoint)

    def _blocks(self, move: Move) -> Iterator[Met]:
        """List the blocks of a box; none of one that has all of the chunks it meets."""
        checkpoint = self._checkpoint
        table = checkpoint.table.chunk_table(move.index)
        if 0 in move.place.shape or not any(
            move.place.cuts(place.box) for place in table.meeting(move.place)
        ):
            return iter(())
        found = blocks_met(move.index, table, move.place, checkpoint.block_nbytes)
        verifies = checkpoint.table.verifies
        return (one for one in found if verifies or one.place.codec != RAW)

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
        roles = self._roles
        for block, reader in sorted(readers.items()):
            roles.met[reader][block] = partial[block]
        roles.takers = {block: shared[block] for block in roles.met[comm.rank]}
        rest: list[Move] = []
        for key, move in self._moves.items():
            taken = {one.block for one in self._met[key]} & shared.keys()
            if taken:
                roles.moves.setdefault(move.index, []).append(move)
                rest += self._rest(move, taken)
            else:
                rest.append(move)
        for some in roles.moves.values():
            some.sort(key=_order)
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
                yield Move(move.index, move.stored, within(move.into, move.place, box), box)

    def run(self) -> None:
        """Read the blocks that this rank is to read, and get what it wants of those of others.

        Raises:
            DistributedError: `rank_failed`, on every rank; they may have got some blocks.

        Ranks: collective over the group.
        Memory: 48 MiB on one machine, where the pages of other ranks show in each that has read
            them; else 60 MiB. More where a block is longer than 12 MiB.
        """
        here = BlockMemory(self._roles)
        memory = common_memory(self._comm, here.nbytes)
        if memory is None:
            BlockMessages(self._roles).run()
        else:
            with contextlib.closing(memory):
                here.run(memory)


def _order(move: Move) -> tuple[object, ...]:
    return move.place.offset, move.place.shape, str(move.into.dtype)


def _key(block: Block) -> bytes:
    return digest(repr(tuple(block)).encode())[:KEY_NBYTES]
