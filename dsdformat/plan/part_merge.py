"""Merge what all writers wrote into one part, and check that nothing is missing.

Pure. Trees are merged by `tree_merge`, chunks by `chunk_merge`; here they meet.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dsdformat.errors import MismatchError, shorten
from dsdformat.plan.chunk_merge import WriterChunks, find_gaps, merge_rows, whole_boxes
from dsdformat.plan.part import FileSums, Part, TensorColumns, first_rows
from dsdformat.plan.tree_merge import cut_tree, index_tensors, merge_pieces, tensor_name

__all__ = ["check_complete", "merge_parts"]


def merge_parts(parts: Sequence[Part]) -> Part:
    """Merge what all writers wrote.

    Raises:
        MismatchError: `state_conflict` where they disagree.

    Complexity: linear in the chunks, as `merge_rows`, and in the bytes of all trees.
    Memory: the merged columns, and about as much again.
    """
    if len(parts) == 1:
        return parts[0]
    _check_agreement(parts)
    merged = merge_pieces(
        [cut_tree(part.tree) if part.pieces is None else part.pieces for part in parts]
    )
    indexes = index_tensors(merged, [len(part.tensors) for part in parts])
    tensors = _united(parts, indexes, merged.tree, merged.count)
    labeled = [pair for part in parts for pair in zip(part.files, part.sums, strict=True)]
    order = sorted(range(len(labeled)), key=lambda number: labeled[number][0].label)
    files = [labeled[number][0] for number in order]
    sums = [labeled[number][1] for number in order]
    counts, chunks = merge_rows(_writer_chunks(parts, indexes, order, sums), tensors.shapes)
    first = parts[0]
    return Part(
        merged.tree, tensors, counts, chunks, files, sums, first.block_nbytes, first.world_size
    )


def check_complete(part: Part) -> None:
    """Check that the chunks of each tensor tile it.

    Raises:
        MismatchError: `chunks_incomplete`, naming the first tensors.
    """
    shapes = part.tensors.shapes
    if part.counts == array("I", [1]) * len(shapes) and part.chunks.numbers == whole_boxes(shapes):
        return  # most are whole
    faults = list(find_gaps(shapes, part.counts, part.chunks.numbers))
    if faults:
        shown = "\n".join(f"{tensor_name(part.tree, index)}: {gap}" for index, gap in faults[:5])
        more = f"\n… and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise MismatchError(
            shown + more,
            code="chunks_incomplete",
            hint="every element must be written by exactly one writer",
        )


def _writer_chunks(
    parts: Sequence[Part],
    indexes: Sequence[Sequence[int]],
    order: Sequence[int],
    sums: Sequence[FileSums],
) -> list[WriterChunks]:
    """Say where the chunks of each writer go.

    Args:
        parts: Of the writers.
        indexes: Of each writer's tensors the merged ones.
        order: Which of all writers' files are the merged ones.
        sums: Of the merged files.
    """
    place = array("I", bytes(4 * len(order)))
    for new, old in enumerate(order):
        place[old] = new
    blocks, frames = first_rows(sums)
    writers = []
    end = 0
    for part, index in zip(parts, indexes, strict=True):
        begin, end = end, end + len(part.files)
        files = place[begin:end]
        own_blocks, own_frames = first_rows(part.sums)
        block_shifts = [blocks[file] - own for file, own in zip(files, own_blocks, strict=False)]
        frame_shifts = [frames[file] - own for file, own in zip(files, own_frames, strict=False)]
        writers.append(
            WriterChunks(index, part.counts, part.chunks, files, block_shifts, frame_shifts)
        )
    return writers


def _united(
    parts: Sequence[Part], indexes: Sequence[Sequence[int]], tree: Any, count: int
) -> TensorColumns:
    """Return the merged tensors; parts that share both lists are looked at once."""
    united = TensorColumns([""] * count, [()] * count)
    dtypes, shapes, layouts = united.dtypes, united.shapes, united.layouts
    seen = set()
    for part, index in zip(parts, indexes, strict=True):
        if (id(part.tensors), id(index)) in seen:
            continue
        seen.add((id(part.tensors), id(index)))
        for number, dtype, shape in zip(
            index, part.tensors.dtypes, part.tensors.shapes, strict=True
        ):
            if not dtypes[number]:
                dtypes[number], shapes[number] = dtype, shape
            elif (dtypes[number], shapes[number]) != (dtype, shape):
                raise MismatchError(
                    f"{tensor_name(tree, number)}: writers disagree: "
                    f"{dtypes[number]}{list(shapes[number])} and {dtype}{list(shape)}",
                    code="state_conflict",
                )
        for tensor, layout in part.tensors.layouts.items():
            layouts.setdefault(index[tensor], layout)
    return united


def _check_agreement(parts: Sequence[Part]) -> None:
    """Refuse parts of different checkpoints, and two parts of one rank."""
    options = {(part.block_nbytes, part.world_size) for part in parts}
    labels = [file.label.lower() for part in parts for file in part.files]
    if len(options) > 1:
        raise MismatchError(
            "writers disagree on block_nbytes or world_size: " + shorten(sorted(options)),
            code="state_conflict",
        )
    if len(set(labels)) < len(labels):
        repeated = sorted(label for label, count in Counter(labels).items() if count > 1)
        raise MismatchError(
            f"two writers have the same rank: both wrote {repeated[0]}", code="state_conflict"
        )
