"""The part of a writer whose data files are written: its chunks, as columns."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

from dsdformat.chunks import Chunks
from dsdformat.file_plans import FilePlan
from dsdformat.format.digests import DIGEST_NBYTES
from dsdformat.format.manifest import ChunkRows
from dsdformat.plan.chunk_merge import whole_boxes
from dsdformat.plan.part import (
    FileSums,
    Part,
    TensorColumns,
    emit_sections,
    needed_features,
    read_parts,
)
from dsdformat.plan.part_merge import check_complete, merge_parts

__all__ = [
    "Part",
    "TensorColumns",
    "check_complete",
    "emit_sections",
    "merge_parts",
    "needed_features",
    "part_of",
    "read_parts",
]


def part_of(
    chunks: Chunks, plans: Sequence[FilePlan], tensors: TensorColumns, **fields: Any
) -> Part:
    """Make the part of a writer whose files are written.

    Args:
        chunks: All of them.
        plans: The files, in the order of labels.
        tensors: In the order of the tree.
        fields: The other attributes of the part.
    """
    counts = array("I", bytes(4 * len(tensors)))
    for tensor in chunks.tensor:
        counts[tensor] += 1
    count = len(chunks)
    rows = ChunkRows(
        first=0,
        file=array("I", bytes(4 * count)),
        codec=array("I", chunks.codec),
        byte_offset=array("Q", bytes(8 * count)),
        first_block=array("Q", bytes(8 * count)),
        first_frame=array("Q", bytes(8 * count)),
        numbers=_boxes(chunks),
    )
    return Part(tensors=tensors, counts=counts, chunks=rows, sums=_file_sums(plans, rows), **fields)


def _boxes(chunks: Chunks) -> array[int]:
    """Return offset and shape of each chunk."""
    if chunks.box.count(None) == len(chunks):
        return whole_boxes(chunks.shape)
    numbers: list[int] = []
    for box, shape in zip(chunks.box, chunks.shape, strict=True):
        numbers += (0,) * len(shape) if box is None else box.offset
        numbers += shape if box is None else box.shape
    return array("Q", numbers)


def _file_sums(plans: Sequence[FilePlan], rows: ChunkRows) -> list[FileSums]:
    """Number files, blocks and frames in storage order, and join their digests.

    Args:
        plans: The files.
        rows: Of all chunks; is told where each lies.
    """
    sums = []
    blocks = frames = 0
    for number, plan in enumerate(plans):
        for row, at, found in zip(plan.rows, plan.byte_offset, plan.digests, strict=True):
            rows.byte_offset[row], rows.first_block[row] = at, blocks
            blocks += len(found) // DIGEST_NBYTES
        if number:
            for row in plan.rows:
                rows.file[row] = number
        if any(plan.frames):
            for row, some in zip(plan.rows, plan.frames, strict=True):
                if some:
                    rows.first_frame[row] = frames
                    frames += len(some)
        frame_nbytes = array("I", itertools.chain.from_iterable(plan.frames))
        sums.append(FileSums(b"".join(plan.digests), frame_nbytes, b"".join(plan.frame_digests)))
    return sums
