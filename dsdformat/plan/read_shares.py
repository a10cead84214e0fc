"""Which of the ranks that want the same box reads which part of it.

Pure, and of the standard library. All ranks that want a box compute the same from it, without a
word: what is stored of it is cut into parts, and each part has one reader.

The rule:

- A part is what lies in one chunk; of a large chunk, runs of its blocks, so that no block is read
  by two ranks. Such a run is at least 16 MiB, and a twentieth of what each rank would read.
- A rank reads what it has written itself, if all parts were written by these ranks, as is known
  where as many ranks read as have written, and none of them gets more than a quarter too much.
  So a job that resumes with the layout that it had opens no files of others.
- Else the largest part comes first, and goes to the rank that has the least to read so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dsdformat.boxes import Box, row_boxes
from dsdformat.limits import MIB
from dsdformat.plan.block_shares import within
from dsdformat.plan.load_plan import Chunks

__all__ = [
    "PIECE_NBYTES",
    "ReadPart",
    "cut_reads",
    "cut_rows",
    "is_even",
    "piece_nbytes",
    "share_out",
    "share_out_counts",
]

PIECE_NBYTES = 16 * MIB
_SHARE = 20
_SLACK_NBYTES = 32 * MIB


class ReadPart(NamedTuple):
    """Something that one rank reads.

    Attributes:
        boxes: In elements of the tensor; they lie in one chunk.
        nbytes: Of all of them.
        file: Index of the data file.
    """

    boxes: tuple[Box, ...]
    nbytes: int
    file: int


def piece_nbytes(total_nbytes: int, ranks: int) -> int:
    """Return how long runs of blocks are, if ranks share that much."""
    return max(PIECE_NBYTES, total_nbytes // ranks // _SHARE)


def cut_rows(box: Box, itemsize: int, nbytes: int) -> Iterator[ReadPart]:
    """Cut a box of which no blocks are known into rows, of about that many bytes at most."""
    if 0 in box.shape:
        return
    for rows in row_boxes(box.shape, box.numel * itemsize, nbytes):
        offset = tuple(a + b for a, b in zip(box.offset, rows.offset, strict=True))
        yield ReadPart((Box(offset, rows.shape),), rows.numel * itemsize, 0)


def cut_reads(table: Chunks, box: Box, block_nbytes: int, nbytes: int) -> Iterator[ReadPart]:
    """Cut a box into parts of about that many bytes at most; each block is in one of them."""
    if 0 in box.shape:
        return
    itemsize = table.dtype.itemsize
    for place in table.meeting(box):
        common = place.box.intersect(box)
        if common is None or 0 in common.shape:
            continue
        if common.numel * itemsize <= nbytes:
            yield ReadPart((common,), common.numel * itemsize, place.file)
            continue
        step = max(nbytes - nbytes % block_nbytes, block_nbytes)
        for start in range(0, place.nbytes, step):
            stop = min(start + step, place.nbytes)
            boxes = tuple(within(place, start // itemsize, stop // itemsize, common))
            if boxes:
                numel = sum(one.numel for one in boxes)
                yield ReadPart(boxes, numel * itemsize, place.file)


def share_out(nbytes: Sequence[int], writers: Sequence[int | None], ranks: int) -> list[int]:
    """Choose a reader for each part.

    Args:
        nbytes: Of the parts, in the order that all ranks agree on.
        writers: Which of the ranks has written each part; None for none of them.
        ranks: How many there are.

    Returns:
        For each part the place of its reader among the ranks.
    """
    known = [writer for writer in writers if writer is not None]
    if len(known) == len(nbytes) and is_even(nbytes, known, ranks):
        return known
    readers = [0] * len(nbytes)
    heap = [(0, place) for place in range(ranks)]
    for number in sorted(range(len(nbytes)), key=lambda one: -nbytes[one]):
        load, place = heap[0]
        readers[number] = place
        heapq.heapreplace(heap, (load + nbytes[number], place))
    return readers


def share_out_counts(counts: Mapping[int, int], ranks: int) -> dict[int, list[int]]:
    """Choose readers as `share_out` does where nobody's writers are known, for parts told by size.

    Args:
        counts: How many parts there are, by their bytes.
        ranks: How many there are.

    Returns:
        By bytes, how many of the parts each of the ranks reads.

    Complexity: linear in sizes times ranks; not in parts, unless they are far smaller than others.
    """
    found: dict[int, list[int]] = {}
    heap = [(0, place) for place in range(ranks)]
    most = 0
    for nbytes in sorted(counts, reverse=True):
        left, taken = counts[nbytes], [0] * ranks
        while left:
            rounds = left // ranks if most - heap[0][0] < nbytes else 0
            if rounds:  # each rank gets one in turn, and they are as far apart as before
                taken = [one + rounds for one in taken]
                heap = [(load + rounds * nbytes, place) for load, place in heap]
                most += rounds * nbytes
                left -= rounds * ranks
                continue
            load, place = heap[0]
            heapq.heapreplace(heap, (load + nbytes, place))
            most = max(most, load + nbytes)
            taken[place] += 1
            left -= 1
        found[nbytes] = taken
    return found


def is_even(nbytes: Sequence[int], readers: Sequence[int], ranks: int) -> bool:
    """Whether no rank reads more than a quarter too much, or a little."""
    loads = [0] * ranks
    for size, reader in zip(nbytes, readers, strict=True):
        loads[reader] += size
    mean = sum(loads) // ranks
    return max(loads) <= mean + max(mean // 4, _SLACK_NBYTES)
