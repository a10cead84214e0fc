"""What writers wrote, as columns, and carried to the coordinator as bytes.

Pure. A part has the form of a manifest whose tensors need not be complete, so carrying it needs
no second encoding, and reading it is as strict as reading a checkpoint. What is equal on many
writers is carried so that it is recognized by its bytes: the tree in pieces, the layouts as one.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dsdformat.errors import Problem, raise_problems
from dsdformat.format.bodies import find_body_problems
from dsdformat.format.codecs import PLANES, RAW
from dsdformat.format.decoding import decode_tree
from dsdformat.format.digests import DIGEST_NBYTES, digest
from dsdformat.format.frame import FIXED_NBYTES, Head, check_prefix, emit_manifest, parse_head
from dsdformat.format.manifest import (
    Body,
    ChunkRows,
    Columns,
    DataFile,
    Layout,
    Mesh,
    ReadSection,
    emit_body,
    pack_u32,
    pack_u64,
    parse_body,
)
from dsdformat.format.packing import emit, parse
from dsdformat.plan.part_checks import (
    PieceChecks,
    check_carried,
    check_counts,
    check_layouts,
    check_rows,
    check_tensors,
)
from dsdformat.plan.tree_merge import Piece, cut_tree, joined_tree

__all__ = [
    "FileSums",
    "Part",
    "TensorColumns",
    "emit_sections",
    "first_rows",
    "needed_features",
    "read_parts",
]

_CARRIED = "part"  # the extension that holds what is carried in another form


@dataclass(slots=True)
class TensorColumns:
    """Tensors: what all writers must agree on, and provenance.

    Attributes:
        dtypes, shapes: One of each for each tensor.
        layouts: Of tensors that have one, by number: a mesh and one placement per axis.
    """

    dtypes: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    layouts: dict[int, tuple[Mesh, tuple[str, ...]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dtypes)


class FileSums(NamedTuple):
    """What is known of the blocks of one data file, in storage order.

    Attributes:
        digests: 32 bytes for each block.
        frame_nbytes: Stored lengths of the compressed ones.
        frame_digests: 32 bytes for each compressed one.
    """

    digests: bytes
    frame_nbytes: array[int]
    frame_digests: bytes


@dataclass(slots=True)
class Part:
    """What one writer wrote, or all together.

    Attributes:
        tree: Encoded; tensors are numbered in the order of the tree. None if it is in pieces.
        tensors: In that order.
        counts: How many chunks each tensor has.
        chunks: In the order of tensors and offsets.
        files: With their final lengths, in the order of labels.
        sums: Of each file.
        block_nbytes: Of the checkpoint.
        world_size: Number of writers.
        pieces: The tree as it is carried.
    """

    tree: Any
    tensors: TensorColumns
    counts: array[int]
    chunks: ChunkRows
    files: list[DataFile]
    sums: list[FileSums]
    block_nbytes: int
    world_size: int
    pieces: Piece = None

    def to_bytes(self) -> bytes:
        """Write the part, for the coordinator."""
        body, sections = emit_sections(self)
        carried = {
            "counts": [
                [len(one.digests) // DIGEST_NBYTES, len(one.frame_nbytes)] for one in self.sums
            ],
            "layouts": emit(_plain_layouts(body)),
            "tree": cut_tree(body.tree),
        }
        body = replace(body, tree={}, meshes=(), layouts=(), extensions={_CARRIED: carried})
        head, pages, _ = emit_manifest([("body", [emit_body(body)]), *sections], (), compress=False)
        return head + b"".join(pages)

    @staticmethod
    def from_bytes(raw: bytes, rank: int) -> Part:
        """Read a part that a writer sent, or a whole manifest; see `read_parts`."""
        return _PartReader().read(raw, rank)


def read_parts(parts: Iterable[bytes]) -> list[Part]:
    """Read the parts of ranks 1, 2 and so on.

    Raises:
        FormatError: one was damaged on the way.

    Memory: the columns; what is equal on many writers once.
    """
    reader = _PartReader()
    return [reader.read(raw, rank) for rank, raw in enumerate(parts, 1)]


def emit_sections(part: Part) -> tuple[Body, list[tuple[str, Iterable[bytes]]]]:
    """Make the body and the columnar sections of a part."""
    tensors = part.tensors
    dtypes = sorted(set(tensors.dtypes))
    numbers, meshes, layouts = _number_layouts(tensors)
    body = Body(
        tree=joined_tree(part.pieces) if part.tree is None else part.tree,
        block_nbytes=part.block_nbytes,
        dtypes=tuple(dtypes),
        files=tuple(part.files),
        meshes=meshes,
        layouts=layouts,
        world_size=part.world_size,
    )
    index = {name: number for number, name in enumerate(dtypes)}
    columns = [
        array("I", map(index.__getitem__, tensors.dtypes)),
        array("I", map(len, tensors.shapes)),
        part.counts,
        numbers,
    ]
    shapes = array("Q", itertools.chain.from_iterable(tensors.shapes))
    frame_nbytes = array("I", itertools.chain.from_iterable(one.frame_nbytes for one in part.sums))
    rows = part.chunks
    wide = (rows.byte_offset, rows.first_block, rows.first_frame)
    return body, [
        ("tensors", map(pack_u32, columns)),
        ("shapes", [pack_u64(shapes)]),
        ("chunks", [pack_u32(rows.file), pack_u32(rows.codec), *map(pack_u64, wide)]),
        ("boxes", [pack_u64(rows.numbers)]),
        ("digests", [one.digests for one in part.sums]),
        ("frames", [pack_u32(frame_nbytes), *(one.frame_digests for one in part.sums)]),
    ]


def needed_features(part: Part) -> set[str]:
    """Return the features that the codecs of the chunks need."""
    codecs = set(part.chunks.codec) - {RAW}
    return ({"zstd"} if codecs else set()) | ({"planes"} if PLANES in codecs else set())


class _Layouts(NamedTuple):
    """Meshes and layouts that many parts have."""

    meshes: tuple[Mesh, ...]
    layouts: tuple[Layout, ...]


class _PartReader:
    """Reads parts, and decodes once what many of them have alike."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, _Layouts] = {}
        self._known: dict[Any, tuple[TensorColumns, Columns]] = {}
        self._pieces = PieceChecks()

    def read(self, raw: bytes, rank: int) -> Part:
        """Read one part.

        Raises:
            FormatError: it was damaged on the way, or is no part.
        """
        head = parse_head(raw[: check_prefix(raw[:FIXED_NBYTES], len(raw))], len(raw))
        _check_pages(head, raw)
        nbytes = {name: section.nbytes for name, section in head.sections.items()}

        def read(name: str, start: int, stop: int) -> bytes:
            # Pages are raw and contiguous, so a section is one range of bytes.
            at = head.page_offsets[head.sections[name].first_page]
            return raw[at + start : at + stop]

        def view(name: str) -> memoryview:
            at = head.page_offsets[head.sections[name].first_page]
            return memoryview(raw)[at : at + nbytes[name]]

        fields = parse(read("body", 0, nbytes["body"]))
        raise_problems(find_body_problems(fields))
        carried = fields["extensions"].pop(_CARRIED, None)
        body = parse_body(fields)
        if carried is not None:
            check_carried(carried, len(fields["files"]))
            self._pieces.check(carried["tree"])
            meshes, layouts = self._shared_layouts(carried["layouts"], fields)
            body = replace(body, meshes=meshes, layouts=layouts)
        told = (body.meshes, body.layouts) if carried is None else carried["layouts"]
        tensors, columns = self._shared_tensors((body.dtypes, told), body, nbytes, read)
        chunks = _all_rows(columns.chunks, view("chunks"), view("boxes"))
        check_rows(body, columns, chunks)
        if carried is None:
            _check_tree(body.tree, columns.tensors, rank)
            counts = _count(len(body.files), chunks, columns)
        else:
            counts = carried["counts"]
            check_counts(counts, columns)
        return Part(
            tree=body.tree if carried is None else None,
            tensors=tensors,
            counts=columns.chunk_count,
            chunks=chunks,
            files=list(body.files),
            sums=_cut_sums(counts, columns),
            block_nbytes=body.block_nbytes,
            world_size=body.world_size,
            pieces=None if carried is None else carried["tree"],
        )

    def _shared_layouts(self, raw: bytes, fields: dict[str, Any]) -> _Layouts:
        """Return the meshes and layouts of a part: one object for parts that agree on them."""
        if raw not in self._layouts:
            plain = parse(raw)
            check_layouts(plain)
            raise_problems(find_body_problems(fields | plain))
            body = parse_body(fields | plain)
            self._layouts[raw] = _Layouts(body.meshes, body.layouts)
        return self._layouts[raw]

    def _shared_tensors(
        self, key: Any, body: Body, nbytes: Mapping[str, int], read: ReadSection
    ) -> tuple[TensorColumns, Columns]:
        """Return the tensors of a part, one object for parts that agree on them, and its columns.

        Args:
            key: What is equal where dtypes, meshes and layouts are.
            body, nbytes, read: Of the part.
        """
        raw, shapes = (read(name, 0, nbytes[name]) for name in ("tensors", "shapes"))
        first, last = len(raw) // 2, len(raw) * 3 // 4  # counts lie between, and may differ
        key = key, len(raw), digest(b"".join((raw[:first], raw[last:], shapes)))
        known = self._known.get(key)
        if known is not None:
            return known[0], known[1].with_counts(raw[first:last], nbytes, read)
        columns = Columns(nbytes, read)
        check_tensors(body, columns)
        known = self._known[key] = _tensors(body, columns), columns
        return known


def _cut_sums(counts: Iterable[Sequence[int]], columns: Columns) -> list[FileSums]:
    """Cut the tables of digests and frames by files.

    Args:
        counts: Of each file the number of blocks, and that of frames.
        columns: What has the tables.
    """
    sums = []
    block = frame = 0
    for blocks, frames in counts:
        digests = columns.digests(block, blocks)
        sums.append(FileSums(digests, *columns.frame_rows(frame, frames)))
        block, frame = block + blocks, frame + frames
    return sums


def _count(files: int, rows: ChunkRows, columns: Columns) -> list[Sequence[int]]:
    """Return how many blocks and frames each file has, from where those of its chunks begin."""
    packed = [number for number, codec in enumerate(rows.codec) if codec != RAW]
    packed_files = [rows.file[number] for number in packed]
    packed_frames = [rows.first_frame[number] for number in packed]
    blocks = _bases(files, rows.file, rows.first_block, columns.blocks)
    frames = _bases(files, packed_files, packed_frames, columns.frames)
    return [(blocks[n + 1] - blocks[n], frames[n + 1] - frames[n]) for n in range(files)]


def _bases(files: int, owners: Sequence[int], firsts: Sequence[int], total: int) -> list[int]:
    """Return the first row of each file in a table, and the number of all rows.

    Args:
        files: Number of files.
        owners: The file of each chunk.
        firsts: The first row of each chunk; in the order of files, they ascend.
        total: Number of all rows.
    """
    bases = [total] * (files + 1)
    for owner, first in zip(owners, firsts, strict=True):
        bases[owner] = min(bases[owner], first)
    for file in reversed(range(files)):  # one without chunks is empty
        bases[file] = min(bases[file], bases[file + 1])
    return bases


def _all_rows(chunks: int, raw: memoryview, boxes: memoryview) -> ChunkRows:
    at = 4 * chunks
    return ChunkRows(
        first=0,
        file=_unpacked("I", raw[:at]),
        codec=_unpacked("I", raw[at : 2 * at]),
        byte_offset=_unpacked("Q", raw[2 * at : 4 * at]),
        first_block=_unpacked("Q", raw[4 * at : 6 * at]),
        first_frame=_unpacked("Q", raw[6 * at :]),
        numbers=_unpacked("Q", boxes),
    )


def _unpacked(code: str, raw: bytes | memoryview) -> array[int]:
    column = array(code)
    column.frombytes(raw)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def first_rows(sums: Sequence[FileSums]) -> tuple[list[int], list[int]]:
    """Return where each file's rows begin in the tables of digests and of frames."""
    blocks = itertools.accumulate((len(one.digests) // DIGEST_NBYTES for one in sums), initial=0)
    frames = itertools.accumulate((len(one.frame_nbytes) for one in sums), initial=0)
    return list(blocks), list(frames)


def _number_layouts(
    tensors: TensorColumns,
) -> tuple[array[int], tuple[Mesh, ...], tuple[Layout, ...]]:
    """Number the layouts of tensors from 1, 0 for none; each object of a mesh is looked at once."""
    meshes: dict[Mesh, int] = {}
    layouts: dict[tuple[int, tuple[str, ...]], int] = {}
    known: dict[int, int] = {}
    numbers = array("I", bytes(4 * len(tensors)))
    for tensor, (mesh, placements) in sorted(tensors.layouts.items(), key=_first):
        if id(mesh) not in known:
            known[id(mesh)] = meshes.setdefault(mesh, len(meshes))
        layout = (known[id(mesh)], tuple(placements))
        numbers[tensor] = layouts.setdefault(layout, len(layouts)) + 1
    return numbers, tuple(meshes), tuple(Layout(*layout) for layout in layouts)


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def _plain_layouts(body: Body) -> dict[str, Any]:
    """Return the meshes and layouts of a body as they are encoded there."""
    layouts = [{"mesh": one.mesh, "placements": list(one.placements)} for one in body.layouts]
    meshes = [
        {"axes": list(one.axes), "ranks": list(one.ranks), "shape": list(one.shape)}
        for one in body.meshes
    ]
    return {"layouts": layouts, "meshes": meshes}


def _tensors(body: Body, columns: Columns) -> TensorColumns:
    dtypes = list(map(body.dtypes.__getitem__, columns.dtype))
    shapes = list(map(columns.shape, range(columns.tensors)))
    layouts = {}
    for tensor, number in enumerate(columns.layout):
        if number:
            row = body.layouts[number - 1]
            layouts[tensor] = body.meshes[row.mesh], row.placements
    return TensorColumns(dtypes, shapes, layouts)


def _check_tree(tree: Any, tensors: int, rank: int) -> None:
    decoded = decode_tree(tree)
    raise_problems(decoded.problems)
    named = len(decoded.paths)
    if named != tensors:
        message = f"the part of rank {rank} names {named} of {tensors} tensors"
        raise Problem("bad_tensor_reference", message, path="$.tree").error()


def _check_pages(head: Head, raw: bytes) -> None:
    view = memoryview(raw)
    for index, (begin, end) in enumerate(itertools.pairwise(head.page_offsets)):
        at = DIGEST_NBYTES * index
        if digest(view[begin:end]) != head.page_digests[at : at + DIGEST_NBYTES]:
            message = f"a part was damaged on its way to the coordinator, at byte {begin}"
            raise Problem("page_checksum_mismatch", message, byte_offset=begin).error()
