"""Which blocks ranks want in part, so that one can read each of them for all that do.

Pure, and of the standard library. What is verified is read in whole blocks. Where ranks want other
boxes than those that were written, as columns of what is stored by rows, several want some of the
same block. What a rank wants of a box is told apart here: blocks of which it wants all, and those
of which it wants a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dsdformat.boxes import Box, flat_boxes
from dsdformat.format.checks import ChunkPlace
from dsdformat.limits import MIB
from dsdformat.plan.chunk_tables import ChunkTable
from dsdformat.plan.copies import Copy, find_copy
from dsdformat.plan.load_plan import BOUND

__all__ = [
    "BUCKET_NBYTES",
    "Block",
    "Met",
    "blocks_met",
    "boxes_of_block",
    "find_partial",
    "is_worth_it",
    "rest_of",
    "within",
]

BUCKET_NBYTES = 12 * MIB  # that a rank reads in a round, and sends to others, and gets


class Block(NamedTuple):
    """One block of a chunk; sorts as blocks are stored within a tensor.

    Attributes:
        tensor: Number of the tensor.
        chunk: Of the chunk in its tensor.
        number: Of the block in its chunk.
    """

    tensor: int
    chunk: int
    number: int


class Met(NamedTuple):
    """A block that meets a box.

    Attributes:
        block: Which one.
        place: Its chunk.
        nbytes: Of the block.
        wanted_nbytes: What the box has of it.
    """

    block: Block
    place: ChunkPlace
    nbytes: int
    wanted_nbytes: int


def blocks_met(tensor: int, table: ChunkTable, box: Box, block_nbytes: int) -> Iterator[Met]:
    """List the blocks of a tensor that a box has something of."""
    if 0 in box.shape:
        return
    itemsize = table.dtype.itemsize
    for place in table.meeting(box):
        copy = find_copy(place.box, box, itemsize)
        if copy is None:
            continue
        for low, high in copy.spans(block_nbytes):
            for number in range(low // block_nbytes, -(-high // block_nbytes)):
                start = number * block_nbytes
                stop = min(start + block_nbytes, place.nbytes)
                wanted = min(high, stop) - max(low, start)
                if len(copy.levels) == 1:
                    wanted = _carried(copy, start, stop)
                elif copy.levels:
                    boxes = within(place, start // itemsize, stop // itemsize, box)
                    wanted = itemsize * sum(one.numel for one in boxes)
                if wanted:
                    yield Met(Block(tensor, place.number, number), place, stop - start, wanted)


def _carried(copy: Copy, start: int, stop: int) -> int:
    """Count the bytes of runs along one level that lie in a range of the chunk."""
    ((times, step, _),) = copy.levels
    first = max(0, -(-(start + 1 - copy.src - copy.run) // step))
    last = min(times - 1, (stop - 1 - copy.src) // step)
    if first > last:
        return 0
    before = max(0, start - (copy.src + first * step))
    behind = max(0, copy.src + last * step + copy.run - stop)
    return copy.run * (last - first + 1) - before - behind


def find_partial(met: Iterable[Met]) -> dict[Block, Met]:
    """Return the blocks of which all boxes of a rank together have some, but not all.

    Args:
        met: Of boxes that share no element.
    """
    found: dict[Block, Met] = {}
    for one in met:
        known = found.get(one.block)
        wanted = one.wanted_nbytes + (known.wanted_nbytes if known else 0)
        found[one.block] = one._replace(wanted_nbytes=wanted)
    return {block: one for block, one in found.items() if one.wanted_nbytes < one.nbytes}


def boxes_of_block(place: ChunkPlace, number: int, itemsize: int, block_nbytes: int) -> list[Box]:
    """Return the boxes of the tensor whose packed bytes, one after another, are a block."""
    start = number * block_nbytes // itemsize
    stop = min((number + 1) * block_nbytes, place.nbytes) // itemsize
    return [_moved(box, place.box.offset) for box in flat_boxes(place.box.shape, start, stop)]


def rest_of(
    place: ChunkPlace, box: Box, numbers: Sequence[int], itemsize: int, block_nbytes: int
) -> Iterator[Box]:
    """List what a box has of some blocks of a chunk, which are ascending."""
    at = 0
    while at < len(numbers):
        count = 1
        while at + count < len(numbers) and numbers[at + count] == numbers[at] + count:
            count += 1
        start = numbers[at] * block_nbytes // itemsize
        stop = min((numbers[at] + count) * block_nbytes, place.nbytes) // itemsize
        yield from within(place, start, stop, box)
        at += count


def is_worth_it(costs: Sequence[tuple[int, int]]) -> bool:
    """Whether ranks that want so much, and would read so much more, read too much together."""
    wanted, extra = sum(one for one, _ in costs), sum(one for _, one in costs)
    return wanted + extra > BOUND * wanted


def within(place: ChunkPlace, start: int, stop: int, box: Box) -> Iterator[Box]:
    """List what of a range of a chunk's elements lies in a box."""
    for part in flat_boxes(place.box.shape, start, stop):
        common = _moved(part, place.box.offset).intersect(box)
        if common is not None and 0 not in common.shape:
            yield common


def _moved(box: Box, offset: Sequence[int]) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offset, offset, strict=True)), box.shape)
