"""The part of a writer whose data files are written: its chunks, as columns."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

from dsdformat.datafiles import ChunkJob, FilePlan
from dsdformat.format.codecs import RAW
from dsdformat.format.digests import DIGEST_NBYTES
from dsdformat.format.manifest import ChunkRows
from dsdformat.plan.part import (
    FileSums,
    Part,
    TensorRecord,
    emit_sections,
    needed_features,
    read_parts,
)
from dsdformat.plan.part_merge import check_complete, merge_parts

__all__ = [
    "Part",
    "TensorRecord",
    "check_complete",
    "emit_sections",
    "merge_parts",
    "needed_features",
    "part_of",
    "read_parts",
]


def part_of(
    jobs: Sequence[ChunkJob],
    plans: Sequence[FilePlan],
    tensors: Sequence[TensorRecord],
    **fields: Any,
) -> Part:
    """Make the part of a writer whose files are written.

    Args:
        jobs: All chunks, in the order of tensors and offsets.
        plans: The files, in the order of labels.
        tensors: In the order of the tree.
        fields: The other attributes of the part.
    """
    sums = _file_sums(plans)
    counts = array("I", bytes(4 * len(tensors)))
    numbers: list[int] = []
    for job in jobs:
        counts[job.tensor] += 1
        numbers += job.box.offset
        numbers += job.box.shape
    chunks = ChunkRows(
        first=0,
        file=array("I", [job.file for job in jobs]),
        codec=array("I", [job.codec for job in jobs]),
        byte_offset=array("Q", [job.byte_offset for job in jobs]),
        first_block=array("Q", [job.first_block for job in jobs]),
        first_frame=array("Q", [job.first_frame for job in jobs]),
        numbers=array("Q", numbers),
    )
    return Part(tensors=tensors, counts=counts, chunks=chunks, sums=sums, **fields)


def _file_sums(plans: Sequence[FilePlan]) -> list[FileSums]:
    """Number files, blocks and frames in storage order, and join their digests."""
    sums = []
    blocks = frames = 0
    for number, plan in enumerate(plans):
        for job in plan.jobs:
            job.file, job.first_block = number, blocks
            blocks += len(job.digests) // DIGEST_NBYTES
            if job.codec != RAW:
                job.first_frame = frames
                frames += len(job.frames)
        digests = b"".join(job.digests for job in plan.jobs)
        frame_nbytes = array("I", itertools.chain.from_iterable(job.frames for job in plan.jobs))
        sums.append(FileSums(digests, frame_nbytes, b"".join(j.frame_digests for j in plan.jobs)))
    return sums
