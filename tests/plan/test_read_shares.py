"""Which of the ranks that want a box reads which part of it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from dsdformat import Box
from dsdformat.boxes import whole
from dsdformat.format.checks import ChunkPlace
from dsdformat.format.codecs import RAW
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import MIB
from dsdformat.plan.chunk_tables import ChunkTable
from dsdformat.plan.read_shares import cut_reads, piece_nbytes, share_out, share_out_counts

BLOCK = 64


def table_of(shape: tuple[int, ...], boxes: list[Box]) -> ChunkTable:
    """A table of float32 chunks, of file 0, 1 and so on."""
    places = [
        ChunkPlace(number, box, number, RAW, 4096, 4 * box.numel, 4 * box.numel, 0)
        for number, box in enumerate(boxes)
    ]
    return ChunkTable(DTYPES["float32"], shape, len(places), None, places.__getitem__)


def rows(shape: tuple[int, ...], *ends: int) -> list[Box]:
    return [
        Box((start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:]))
        for start, stop in zip((0, *ends), (*ends, shape[0]), strict=True)
    ]


def block_numbers(chunk: Box) -> np.ndarray:
    """The block of each element of a chunk."""
    return (np.arange(chunk.numel) * 4 // BLOCK).reshape(chunk.shape)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def drawn(chance: random.Random) -> tuple[tuple[int, ...], list[Box], Box]:
    """Draw a shape, the chunks that it is stored in, and a box of it."""
    shape = tuple(chance.randint(1, 23) for _ in range(chance.randint(1, 3)))
    ends = sorted(chance.sample(range(1, shape[0]), min(shape[0] - 1, chance.randint(0, 3))))
    chunks = rows(shape, *ends)
    start = tuple(chance.randrange(size) for size in shape)
    box = Box(start, tuple(chance.randint(1, n - at) for n, at in zip(shape, start, strict=True)))
    return shape, chunks, box


@pytest.mark.parametrize("seed", range(60))
def test_parts_cover_a_box_once_and_share_no_block(seed):
    chance = random.Random(seed)
    shape, chunks, box = drawn(chance)
    parts = list(cut_reads(table_of(shape, chunks), box, BLOCK, chance.choice((1, 100, 700))))
    taken = np.zeros(shape, int)
    owners: dict[tuple[int, int], int] = {}
    for number, part in enumerate(parts):
        chunk = chunks[part.file]
        assert part.nbytes == sum(4 * one.numel for one in part.boxes)
        for one in part.boxes:
            taken[slices(one)] += 1
            inner = Box(
                tuple(a - b for a, b in zip(one.offset, chunk.offset, strict=True)), one.shape
            )
            for block in np.unique(block_numbers(chunk)[slices(inner)]).tolist():
                assert owners.setdefault((part.file, block), number) == number
    wanted = np.zeros(shape, int)
    wanted[slices(box)] = 1
    assert (taken == wanted).all()


def test_a_large_chunk_is_cut_at_blocks_and_a_small_one_is_not():
    table = table_of((100, 16), rows((100, 16), 99))
    parts = list(cut_reads(table, whole((100, 16)), BLOCK, 50 * BLOCK))
    assert [part.nbytes for part in parts] == [50 * BLOCK, 49 * BLOCK, BLOCK]
    assert [part.file for part in parts] == [0, 0, 1]


@pytest.mark.parametrize("shape", [(0,), (3, 0)], ids=str)
def test_what_has_no_elements_is_read_by_nobody(shape):
    assert list(cut_reads(table_of(shape, [whole(shape)]), whole(shape), BLOCK, 100)) == []


def test_what_has_no_dims_is_read_by_one():
    (part,) = cut_reads(table_of((), [whole(())]), whole(()), BLOCK, 100)
    assert part.boxes == (Box((), ()),)


def test_ranks_read_what_they_have_written():
    nbytes = [math.floor(1.1**number) * MIB for number in range(40)]
    writers = [number % 4 for number in range(40)]
    assert share_out(nbytes, writers, 4) == writers


@pytest.mark.parametrize("writers", [[0] * 40, [None] * 40, [0, 1, 2, None] * 10])
def test_readers_are_even_where_writers_are_not_or_not_known(writers):
    nbytes = [(1 + number % 7) * 16 * MIB for number in range(40)]
    readers = share_out(nbytes, writers, 4)
    loads = [
        sum(size for size, reader in zip(nbytes, readers, strict=True) if reader == one)
        for one in range(4)
    ]
    assert max(loads) - min(loads) <= 16 * MIB


def test_pieces_are_large_and_many_enough_to_be_even():
    assert piece_nbytes(100 * MIB, 2) == 16 * MIB
    assert piece_nbytes(4096 * MIB, 2) == 4096 * MIB // 40


def test_nothing_is_shared_out_if_there_is_nothing():
    assert share_out([], [], 3) == []


@pytest.mark.parametrize("seed", range(60))
def test_parts_told_by_size_are_shared_out_as_parts_are(seed):
    chance = random.Random(seed)
    ranks = chance.randint(1, 7)
    sizes = chance.sample(range(1, 40), chance.randint(0, 4))
    counts = {size: chance.randint(1, 30) for size in sizes}
    flat = [size for size, count in counts.items() for _ in range(count)]
    expected = {size: [0] * ranks for size in sizes}
    for size, reader in zip(flat, share_out(flat, [None] * len(flat), ranks), strict=True):
        expected[size][reader] += 1
    assert share_out_counts(counts, ranks) == expected
