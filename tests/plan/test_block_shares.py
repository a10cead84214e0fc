"""Which blocks a rank wants in part, and what it has of each."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dsdformat import Box
from dsdformat.boxes import whole
from dsdformat.plan.block_shares import (
    Block,
    blocks_met,
    boxes_of_block,
    find_partial,
    rest_of,
)
from tests.plan.test_read_shares import BLOCK, block_numbers, drawn, rows, slices, table_of


@pytest.mark.parametrize("seed", range(60))
def test_what_a_box_has_of_each_block_is_counted_by_element(seed):
    chance = random.Random(seed)
    shape, chunks, box = drawn(chance)
    owner = np.zeros((*shape, 2), int)  # chunk and block of each element
    for number, chunk in enumerate(chunks):
        owner[slices(chunk)] = np.stack(
            [np.full(chunk.shape, number), block_numbers(chunk)], axis=-1
        )
    found = list(blocks_met(7, table_of(shape, chunks), box, BLOCK))
    counted = {
        Block(7, *map(int, key)): 4 * int(count)
        for key, count in zip(
            *np.unique(owner[slices(box)].reshape(-1, 2), axis=0, return_counts=True), strict=True
        )
    }
    assert {one.block: one.wanted_nbytes for one in found} == counted
    for one in found:
        parts = boxes_of_block(one.place, one.block.number, 4, BLOCK)
        assert sum(4 * part.numel for part in parts) == one.nbytes
        for part in parts:
            assert (owner[slices(part)] == one.block[1:]).all()
    some = found[::2]  # what is left of the box without these blocks
    taken = np.zeros(shape, int)
    for number in range(len(chunks)):
        mine = [one for one in some if one.block.chunk == number]
        numbers = [one.block.number for one in mine]
        if mine:
            for part in rest_of(mine[0].place, box, numbers, 4, BLOCK):
                taken[slices(part)] += 1
    wanted = np.zeros(shape, int)
    for one in some:
        mask = (owner == one.block[1:]).all(axis=-1)
        wanted[slices(box)] |= mask[slices(box)]
    assert (taken == wanted).all()


def test_a_block_that_several_boxes_of_a_rank_cover_together_is_not_partial():
    table = table_of((4, 16), rows((4, 16)))  # a block for each row
    left, right = Box((0, 0), (2, 8)), Box((0, 8), (1, 8))
    met = [one for box in (left, right) for one in blocks_met(0, table, box, BLOCK)]
    partial = find_partial(met)
    assert list(partial) == [Block(0, 0, 1)]
    assert partial[Block(0, 0, 1)].wanted_nbytes == 32
    assert find_partial(blocks_met(0, table, whole((4, 16)), BLOCK)) == {}
    assert list(blocks_met(0, table, Box((0, 0), (0, 16)), BLOCK)) == []
