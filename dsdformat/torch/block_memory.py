"""Blocks that one rank reads and others take their parts of, in memory that all ranks see.

Each rank has room for two rounds. It reads blocks into one of them while the others take theirs
from what it read before, and is told by the step they all end what is ready, and what is done.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsdformat.limits import MIB
from dsdformat.plan.block_shares import Block, Met
from dsdformat.torch.block_pieces import BlockRoles, aligned, within
from dsdformat.torch.common_memory import CommonMemory
from dsdformat.torch.moves import put

__all__ = ["BlockMemory"]

# That a rank reads in a round. Where ranks are more than cores, a step that all end together takes
# some ms until the last of them had its turn, so rounds are long.
ROUND_NBYTES = 24 * MIB
_BLOCKS_MAX = 1000  # in a round
_ROW = 4  # numbers: tensor, chunk and number of a block, and where it is
_LIST_NBYTES = 8 * (2 + _ROW * _BLOCKS_MAX)  # how many there are, and their rows


class BlockMemory:
    """The rounds of one rank.

    Attributes:
        nbytes: How much memory it needs.
    """

    def __init__(self, roles: BlockRoles) -> None:
        self._roles = roles
        self._rounds = list(self._cut())
        longest = max(
            (sum(aligned(one.nbytes) for one in some) for some in self._rounds), default=0
        )
        self.nbytes = 2 * (_LIST_NBYTES + longest)

    def _cut(self) -> Iterator[list[Met]]:
        roles = self._roles
        some: list[Met] = []
        total = 0
        for one in roles.met[roles.comm.rank].values():
            if some and (total + one.nbytes > ROUND_NBYTES or len(some) == _BLOCKS_MAX):
                yield some
                some, total = [], 0
            some.append(one)
            total += one.nbytes
        if some:
            yield some

    def run(self, memory: CommonMemory) -> None:
        """Read, and take.

        Args:
            memory: Of this rank as long as it needs.

        Raises:
            DistributedError: `rank_failed`, on every rank; they may have got some blocks.

        Ranks: collective over the group.
        """
        comm = self._roles.comm
        halves = [_halves(view) for view in memory.views]
        number, goes_on = 0, True
        while goes_on:
            with comm.together("load", memory.meet) as step:
                for rank, both in enumerate(halves):
                    if number:
                        self._take(rank, both[(number - 1) % 2])
                step.told = number < len(self._rounds)
                self._read(self._rounds[number] if step.told else [], halves[comm.rank][number % 2])
            number, goes_on = number + 1, any(step.heard)

    def _read(self, some: list[Met], half: torch.Tensor) -> None:
        """Read blocks into memory, and list them there."""
        rows, blocks, at = [len(some)], [], _LIST_NBYTES
        for one in some:
            parts = self._roles.parts(one)
            views = self._roles.views(one, parts, half[at : at + one.nbytes])
            blocks.append((one, parts, views))
            rows += [*one.block, at]
            at += aligned(one.nbytes)
        self._roles.read(blocks)
        half[: 8 * len(rows)].view(torch.int64).copy_(torch.tensor(rows))

    def _take(self, rank: int, half: torch.Tensor) -> None:
        """Put what this rank wants of the blocks that a rank has read in place."""
        wanted = self._roles.met[rank]
        numbers = half[:_LIST_NBYTES].view(torch.int64)
        count = int(numbers[0])
        for tensor, chunk, number, at in numbers[1 : 1 + _ROW * count].view(-1, _ROW).tolist():
            met = wanted.get(Block(tensor, chunk, number))
            if met is None:
                continue
            moves, parts = self._roles.moves[tensor], self._roles.parts(met)
            views = self._roles.views(met, parts, half[at : at + met.nbytes])
            for part, wish, box in self._roles.pieces(met, parts):
                source = within(views[part], parts[part], box)
                put(within(moves[wish].into, moves[wish].place, box), source)


def _halves(view: memoryview) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.frombuffer(view, dtype=torch.uint8)
    middle = len(both) // 2
    return both[:middle], both[middle:]
