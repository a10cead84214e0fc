"""What many ranks want of blocks, counted at once, as each of them would count it."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from dsdformat import Box
from dsdformat.plan.block_readers import BlockSet, share_blocks
from dsdformat.plan.block_shares import Block, Met, blocks_met, find_partial
from dsdformat.plan.block_tally import BlockTally
from dsdformat.plan.chunk_tables import ChunkTable
from dsdformat.plan.mesh import Replicate, Shard, coordinate_of, local_boxes
from dsdformat.plan.read_shares import share_out
from tests.plan.test_read_shares import BLOCK, rows, table_of


def scene(seed: int) -> tuple[ChunkTable, list[list[Box]]]:
    """A tensor that was written by rows, and what the ranks of a mesh want of it."""
    chance = random.Random(seed)
    shape = tuple(chance.randint(1, 23) for _ in range(chance.randint(1, 3)))
    ends = sorted(chance.sample(range(1, shape[0]), min(shape[0] - 1, chance.randint(0, 3))))
    sizes = [chance.randint(1, 4) for _ in range(2)]
    placements = [Shard(chance.randrange(len(shape)), chance.randint(1, 3)) for _ in sizes]
    boxes = [
        [box for box, _ in local_boxes(shape, sizes, placements, coordinate_of(rank, sizes))]
        for rank in range(sizes[0] * sizes[1])
    ]
    return table_of(shape, rows(shape, *ends)), boxes


def met_by(table: ChunkTable, own: list[Box], tensor: int = 0) -> list[Met]:
    return list(itertools.chain(*(blocks_met(tensor, table, box, BLOCK) for box in own)))


@pytest.mark.parametrize("cells", [1, 1 << 18])
@pytest.mark.parametrize("seed", range(40))
def test_ranks_read_the_blocks_that_they_meet(seed, cells, monkeypatch):
    monkeypatch.setattr("dsdformat.plan.block_tally._CELLS", cells)
    table, boxes = scene(seed)
    found = BlockTally(table, table.shape, boxes, BLOCK)
    met = [met_by(table, own) for own in boxes]
    read = [sum({one.block: one.nbytes for one in mine}.values()) for mine in met]
    assert found.count().read_nbytes.tolist() == read
    wanted = sum(4 * box.numel for own in boxes for box in own)
    assert found.count().extra_nbytes == sum(read) - wanted
    holders: dict[tuple[int, int, int], list[int]] = {}
    for rank, mine in enumerate(met):
        for block, one in find_partial(mine).items():
            holders.setdefault((*block[1:], one.nbytes), []).append(rank)
    several = [(tuple(ranks), *key) for key, ranks in holders.items() if len(ranks) > 1]
    assert found.partial() == Counter((ranks, file, nbytes) for ranks, file, _, nbytes in several)


@pytest.mark.parametrize("writers", [None, [0, 1, 2, 3], [3, 0, 0, 1], [1, 5, 1, 9]])
@pytest.mark.parametrize("seed", range(20))
def test_readers_are_those_that_ranks_choose(seed, writers):
    table, boxes = scene(seed)
    number = seed % 3 + 1
    partial = BlockTally(table, table.shape, boxes, BLOCK).partial()
    changes = share_blocks([BlockSet(partial, number, 1.0)], len(boxes), writers)
    groups: dict[tuple[int, ...], list[Met]] = {}
    blocks: dict[Block, list[int]] = {}
    known: dict[Block, Met] = {}
    for rank, own in enumerate(boxes):
        for tensor in range(number):
            for block, one in find_partial(met_by(table, own, tensor)).items():
                blocks.setdefault(block, []).append(rank)
                known[block] = one
    for block, ranks in sorted(blocks.items()):
        if len(ranks) > 1:
            groups.setdefault(tuple(ranks), []).append(known[block])
    expected = np.zeros(len(boxes), int)
    for ranks, some in groups.items():
        places = {rank: place for place, rank in enumerate(ranks)}
        wrote = [places.get(writers[one.place.file]) if writers else None for one in some]
        for one, reader in zip(
            some, share_out([one.nbytes for one in some], wrote, len(ranks)), strict=True
        ):
            expected[list(ranks)] -= one.nbytes
            expected[ranks[reader]] += one.nbytes
    assert (changes is None) == (not groups)
    assert changes is None or changes.tolist() == expected.tolist()


def test_compressed_blocks_cost_what_is_stored_of_them():
    table = table_of((4, 16), rows((4, 16)))  # a block for each row
    boxes = [[Box((0, 0), (4, 8))], [Box((0, 8), (4, 8))]]
    found = BlockTally(table, table.shape, boxes, BLOCK).partial()
    assert found == {((0, 1), 0, 64): 4}
    changes = share_blocks([BlockSet(found, 10, 0.25)], 2, None)
    assert changes is not None
    assert changes.tolist() == [-320, -320]
    assert share_blocks([BlockSet({}, 1, 1.0)], 2, None) is None


def test_what_nobody_wants_or_is_empty_has_no_blocks():
    empty = BlockTally(table_of((0, 4), []), (0, 4), [[], []], BLOCK)
    assert empty.count().read_nbytes.tolist() == [0, 0]
    assert not empty.partial()
    placements = (Replicate(), Shard(0))
    shape = (1, 16)
    boxes = [
        [box for box, _ in local_boxes(shape, (1, 2), placements, (0, rank))] for rank in (0, 1)
    ]
    found = BlockTally(table_of(shape, rows(shape)), shape, boxes, BLOCK).count()
    assert found.read_nbytes.tolist() == [64, 0]
    assert found.extra_nbytes == 0
