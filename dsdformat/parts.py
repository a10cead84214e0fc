"""What each writer wrote, carried to the coordinator as bytes, and merged into one manifest.

Pure. A part has the form of a manifest whose tensors need not be complete, so carrying it needs
no second encoding, and reading it is as strict as reading a checkpoint.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsdformat.boxes import Box, cut_dims
from dsdformat.datafiles import ChunkJob
from dsdformat.errors import MismatchError, Problem, raise_problems, shorten
from dsdformat.format.bodies import find_body_problems
from dsdformat.format.checks import find_tiling_fault
from dsdformat.format.codecs import PLANES, RAW
from dsdformat.format.decoding import decode_tree
from dsdformat.format.digests import DIGEST_NBYTES, digest
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.frame import FIXED_NBYTES, Head, check_prefix, emit_manifest, parse_head
from dsdformat.format.manifest import (
    Body,
    Columns,
    DataFile,
    Layout,
    Mesh,
    emit_body,
    pack_u32,
    pack_u64,
    parse_body,
)
from dsdformat.format.packing import parse
from dsdformat.format.paths import emit_name
from dsdformat.format.trees import merge_trees, renumber
from dsdformat.format.values import encoded_key
from dsdformat.limits import CUT_DIMS_MAX

__all__ = ["ChunkRecord", "Part", "TensorRecord", "check_complete", "emit_sections", "merge_parts"]


@dataclass(slots=True, eq=False)
class ChunkRecord:
    """One chunk that was written; `file` is an index into the part's files."""

    box: Box
    file: int
    codec: int
    byte_offset: int
    stored_nbytes: int
    digests: bytes
    frames: Sequence[int] = ()
    frame_digests: bytes = b""


@dataclass(slots=True, eq=False)
class TensorRecord:
    """One tensor: what all writers must agree on, and the chunks."""

    dtype: str
    shape: tuple[int, ...]
    layout: tuple[Mesh, tuple[str, ...]] | None
    name: str
    chunks: list[ChunkRecord] = field(default_factory=list)


@dataclass(slots=True)
class Part:
    """What one writer wrote, or all together.

    Attributes:
        tree: Encoded; tensors are numbered in the order of the tree.
        tensors: In that order.
        files: With their final lengths.
        block_nbytes: Of the checkpoint.
        world_size: Number of writers.
    """

    tree: Any
    tensors: list[TensorRecord]
    files: list[DataFile]
    block_nbytes: int
    world_size: int

    def to_bytes(self) -> bytes:
        """Write the part, for the coordinator."""
        body, sections = emit_sections(self)
        head, pages, _ = emit_manifest([("body", [emit_body(body)]), *sections], (), compress=False)
        return head + b"".join(pages)

    @staticmethod
    def from_bytes(raw: bytes, rank: int) -> Part:
        """Read a part that a writer sent.

        Raises:
            FormatError: it was damaged on the way.
        """
        head = parse_head(raw[: check_prefix(raw[:FIXED_NBYTES], len(raw))], len(raw))
        _check_pages(head, raw)
        nbytes = {name: section.nbytes for name, section in head.sections.items()}

        def read(name: str, start: int, stop: int) -> bytes:
            # Pages are raw and contiguous, so a section is one range of bytes.
            at = head.page_offsets[head.sections[name].first_page]
            return raw[at + start : at + stop]

        fields = parse(read("body", 0, nbytes["body"]))
        raise_problems(find_body_problems(fields))
        body = parse_body(fields)
        columns = Columns(nbytes, read)
        paths = decode_tree(body.tree).paths
        if len(paths) != columns.tensors:
            message = f"the part of rank {rank} names {len(paths)} of {columns.tensors} tensors"
            raise Problem("bad_tensor_reference", message, path="$.tree").error()
        tensors = [_tensor_record(body, columns, *pair) for pair in enumerate(paths)]
        return Part(body.tree, tensors, list(body.files), body.block_nbytes, body.world_size)


def records_of(jobs: Iterable[ChunkJob], tensors: list[TensorRecord]) -> None:
    """File what became of chunks under their tensors, in ascending order of offsets."""
    for job in jobs:
        tensors[job.tensor].chunks.append(
            ChunkRecord(
                job.box,
                job.file,
                job.codec,
                job.byte_offset,
                job.stored_nbytes,
                bytes(job.digests),
                tuple(job.frames),
                bytes(job.frame_digests),
            )
        )
    for tensor in tensors:
        tensor.chunks.sort(key=lambda chunk: chunk.box.offset)


def merge_parts(parts: Sequence[Part]) -> Part:
    """Merge what all writers wrote.

    Raises:
        MismatchError: `state_conflict` where they disagree.
    """
    if len(parts) == 1:
        return _sorted_files(parts[0])
    _check_agreement(parts)
    files: list[DataFile] = []
    merged: list[TensorRecord] = []
    trees = []
    for number, part in enumerate(parts):
        _shift_files(part, len(files))
        files += part.files
        trees.append(renumber(part.tree, functools.partial(_keyed, number)))

    def union(keys: list[tuple[int, int]]) -> int:
        merged.append(_union([parts[number].tensors[index] for number, index in keys]))
        return len(merged) - 1

    tree = merge_trees(trees, _tied(union), [])
    order: list[TensorRecord] = []
    numbers: dict[int, int] = {}

    def number_of(index: int) -> int:
        if index not in numbers:
            numbers[index] = len(order)
            order.append(merged[index])
        return numbers[index]

    tree = renumber(tree, number_of)
    whole = Part(tree, order, files, parts[0].block_nbytes, parts[0].world_size)
    return _sorted_files(whole)


def check_complete(part: Part) -> None:
    """Check that the chunks of each tensor tile it.

    Raises:
        MismatchError: `chunks_incomplete`, naming the first tensors.
    """
    faults = [fault for tensor in part.tensors if (fault := _find_gap(tensor))]
    if faults:
        more = f"\n… and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise MismatchError(
            "\n".join(faults[:5]) + more,
            code="chunks_incomplete",
            hint="every element must be written by exactly one writer",
        )


def emit_sections(part: Part) -> tuple[Body, list[tuple[str, Iterable[bytes]]]]:
    """Make the body and the columnar sections of a part."""
    dtypes = sorted({tensor.dtype for tensor in part.tensors})
    meshes: dict[Mesh, int] = {}
    layouts: dict[Layout, int] = {}
    numbers = []
    for tensor in part.tensors:
        if tensor.layout is None:
            numbers.append(0)
            continue
        mesh, placements = tensor.layout
        layout = Layout(meshes.setdefault(mesh, len(meshes)), tuple(placements))
        numbers.append(layouts.setdefault(layout, len(layouts)) + 1)
    body = Body(
        tree=part.tree,
        block_nbytes=part.block_nbytes,
        dtypes=tuple(dtypes),
        files=tuple(part.files),
        meshes=tuple(meshes),
        layouts=tuple(layouts),
        world_size=part.world_size,
    )
    index = {name: number for number, name in enumerate(dtypes)}
    tensors = [
        array("I", (index[tensor.dtype] for tensor in part.tensors)),
        array("I", (len(tensor.shape) for tensor in part.tensors)),
        array("I", (len(tensor.chunks) for tensor in part.tensors)),
        array("I", numbers),
    ]
    shapes = array("Q", (size for tensor in part.tensors for size in tensor.shape))
    chunks = [chunk for tensor in part.tensors for chunk in tensor.chunks]
    order = storage_order(chunks)
    first_block, first_frame = _first_rows(chunks, order)
    frames = [chunk for chunk in order if chunk.codec != RAW]
    sections: list[tuple[str, Iterable[bytes]]] = [
        ("tensors", map(pack_u32, tensors)),
        ("shapes", [pack_u64(shapes)]),
        (
            "chunks",
            [
                pack_u32(array("I", (chunk.file for chunk in chunks))),
                pack_u32(array("I", (chunk.codec for chunk in chunks))),
                pack_u64(array("Q", (chunk.byte_offset for chunk in chunks))),
                pack_u64(first_block),
                pack_u64(first_frame),
            ],
        ),
        ("boxes", [pack_u64(array("Q", _box_numbers(chunks)))]),
        ("digests", (chunk.digests for chunk in order)),
        (
            "frames",
            [
                pack_u32(array("I", (n for chunk in frames for n in chunk.frames))),
                *(chunk.frame_digests for chunk in frames),
            ],
        ),
    ]
    return body, sections


def storage_order(chunks: Sequence[ChunkRecord]) -> list[ChunkRecord]:
    """Sort chunks by file, byte offset, stored length, index (R-9.13)."""
    keyed = [
        (chunk.file, chunk.byte_offset, chunk.stored_nbytes, index, chunk)
        for index, chunk in enumerate(chunks)
    ]
    keyed.sort()
    return [entry[4] for entry in keyed]


def needed_features(part: Part) -> set[str]:
    """Return the features that the codecs of the chunks need."""
    codecs = {chunk.codec for tensor in part.tensors for chunk in tensor.chunks} - {RAW}
    return ({"zstd"} if codecs else set()) | ({"planes"} if PLANES in codecs else set())


def _first_rows(
    chunks: Sequence[ChunkRecord], order: Sequence[ChunkRecord]
) -> tuple[array[int], array[int]]:
    block, frame = 0, 0
    first: dict[int, tuple[int, int]] = {}
    for chunk in order:
        first[id(chunk)] = (block, frame if chunk.codec != RAW else 0)
        block += len(chunk.digests) // DIGEST_NBYTES
        frame += len(chunk.frames)
    rows = [first[id(chunk)] for chunk in chunks]
    return array("Q", (row[0] for row in rows)), array("Q", (row[1] for row in rows))


def _box_numbers(chunks: Iterable[ChunkRecord]) -> Iterator[int]:
    for chunk in chunks:
        yield from chunk.box.offset
        yield from chunk.box.shape


def _find_gap(tensor: TensorRecord) -> str | None:
    boxes = [chunk.box for chunk in tensor.chunks]
    if not boxes:
        return f"{tensor.name}: no writer has a chunk of it"
    if not all(box.fits(tensor.shape) for box in boxes):
        return f"{tensor.name}: a box is not inside of the shape {list(tensor.shape)}"
    if 0 in tensor.shape:
        return None if len(boxes) == 1 else f"{tensor.name}: empty, and added by several writers"
    code = find_tiling_fault(tensor.shape, boxes)
    if code is None:
        return None
    if code == "limit_exceeded":
        cut = len(cut_dims(tensor.shape, boxes))
        return f"{tensor.name}: cut along {cut} dims, at most {CUT_DIMS_MAX}"
    if code == "chunk_overlap":
        return f"{tensor.name}: some elements were written more than once"
    needed = math.prod(tensor.shape)
    missing = needed - sum(box.numel for box in boxes)
    return f"{tensor.name}: {missing} of {needed} elements were written by no one"


def _union(tensors: list[TensorRecord]) -> TensorRecord:
    first = tensors[0]
    for other in tensors[1:]:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise MismatchError(
                f"{first.name}: writers disagree: {first.dtype}{list(first.shape)} and "
                f"{other.dtype}{list(other.shape)}",
                code="state_conflict",
            )
    chunks = [chunk for tensor in tensors for chunk in tensor.chunks]
    chunks.sort(key=lambda chunk: chunk.box.offset)
    layout = next((tensor.layout for tensor in tensors if tensor.layout), None)
    return TensorRecord(first.dtype, first.shape, layout, first.name, chunks)


def _tied(union: Any) -> Any:
    """Remember unions, so that tied paths that meet the same tensors stay one tensor."""
    known: dict[tuple[Any, ...], int] = {}

    def once(keys: list[Any]) -> int:
        key = tuple(keys)
        if key not in known:
            known[key] = union(keys)
        return known[key]

    return once


def _keyed(part: int, tensor: int) -> tuple[int, int]:
    return part, tensor


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


def _check_pages(head: Head, raw: bytes) -> None:
    for index, (begin, end) in enumerate(itertools.pairwise(head.page_offsets)):
        at = DIGEST_NBYTES * index
        if digest(raw[begin:end]) != head.page_digests[at : at + DIGEST_NBYTES]:
            message = f"a part was damaged on its way to the coordinator, at byte {begin}"
            raise Problem("page_checksum_mismatch", message, byte_offset=begin).error()


def _shift_files(part: Part, by: int) -> None:
    for tensor in part.tensors:
        for chunk in tensor.chunks:
            chunk.file += by


def _sorted_files(part: Part) -> Part:
    order = sorted(range(len(part.files)), key=lambda index: part.files[index].label)
    place = {old: new for new, old in enumerate(order)}
    for tensor in part.tensors:
        for chunk in tensor.chunks:
            chunk.file = place[chunk.file]
    return replace(part, files=[part.files[index] for index in order])


def _tensor_record(body: Body, columns: Columns, index: int, path: tuple[Any, ...]) -> TensorRecord:
    number = columns.layout[index]
    layout = None
    if number:
        row = body.layouts[number - 1]
        layout = (body.meshes[row.mesh], row.placements)
    dtype, shape = body.dtypes[columns.dtype[index]], columns.shape(index)
    record = TensorRecord(dtype, shape, layout, emit_name(path, encoded_key))
    rows = columns.rows(index)
    for chunk in range(columns.chunk_count[index]):
        box = rows.box(chunk, len(shape))
        nbytes = box.numel * DTYPES[dtype].itemsize
        count = -(-nbytes // body.block_nbytes)
        lengths: Sequence[int] = ()
        sums = b""
        if rows.codec[chunk] != RAW:
            lengths, sums = columns.frame_rows(rows.first_frame[chunk], count)
        record.chunks.append(
            ChunkRecord(
                box,
                rows.file[chunk],
                rows.codec[chunk],
                rows.byte_offset[chunk],
                sum(lengths) if lengths else nbytes,
                columns.digests(rows.first_block[chunk], count),
                tuple(lengths),
                sums,
            )
        )
    return record
