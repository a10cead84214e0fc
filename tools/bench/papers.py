"""Checkpoints on paper: what many ranks would write, as parts and manifests without any data.

For planning, which reads tables only. Digests are zeros, and data files are not there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dsdformat import Checkpoint
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.frame import emit_manifest
from dsdformat.format.manifest import Body, ChunkRows, DataFile, Mesh, emit_body
from dsdformat.plan.part import FileSums, Part, TensorColumns, emit_sections
from dsdformat.plan.part_merge import merge_parts
from dsdformat.plan.save_plan import plan_save
from dsdformat.plan.sharding import Held, MeshSharding, Sharding
from dsdformat.storage.memory import MemoryStorage

__all__ = ["PaperTensor", "make_part", "manifest_of", "on_paper", "opened", "rows_manifest"]

HEADER_NBYTES = 4096
BLOCK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PaperTensor:
    """A tensor, and how it is spread over the ranks that write it."""

    name: str
    sharding: Sharding
    dtype: str = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize


def make_part(
    tensors: Sequence[PaperTensor],
    plan: Sequence[Sequence[Held]],
    rank: int,
    world_size: int,
    block_nbytes: int = BLOCK_NBYTES,
) -> Part:
    """Make the part of a rank: one data file, with its chunks in the order of tensors.

    Args:
        tensors: In the order of their names.
        plan: What the rank writes of each.
    """
    byte_offset, first_block, numbers = array("Q"), array("Q"), array("Q")
    at, block = HEADER_NBYTES, 0
    for tensor, boxes in zip(tensors, plan, strict=True):
        for box in sorted((held.outer for held in boxes), key=lambda box: box.offset):
            byte_offset.append(at)
            first_block.append(block)
            numbers.extend((*box.offset, *box.shape))
            nbytes = box.numel * tensor.itemsize
            at, block = at + nbytes, block - -nbytes // block_nbytes
    count = len(byte_offset)
    label = f"model-{rank:05d}-of-{world_size:05d}.safetensors"
    return Part(
        tree=tree_of(tuple(tensor.name for tensor in tensors)),
        tensors=columns_of(tuple(tensors)),
        counts=array("I", map(len, plan)),
        chunks=ChunkRows(
            first=0,
            file=array("I", bytes(4 * count)),
            codec=array("I", bytes(4 * count)),
            byte_offset=byte_offset,
            first_block=first_block,
            first_frame=array("Q", bytes(8 * count)),
            numbers=numbers,
        ),
        files=[DataFile(label, at, HEADER_NBYTES, ("model",), {"format": "pt"}, rank)],
        sums=[FileSums(bytes(32 * block), array("I"), b"")],
        block_nbytes=block_nbytes,
        world_size=world_size,
    )


def on_paper(
    tensors: Sequence[PaperTensor], world_size: int, block_nbytes: int = BLOCK_NBYTES
) -> Checkpoint:
    """Return what the ranks would write together, opened."""
    spread = [(tensor.sharding, tensor.itemsize) for tensor in tensors]
    parts = [
        make_part(tensors, plan_save(spread, rank), rank, world_size, block_nbytes)
        for rank in range(world_size)
    ]
    return opened(manifest_of(merge_parts(parts)))


def manifest_of(part: Part, *, compress: bool = False) -> bytes:
    """Write a manifest, as a writer does that has zstandard if asked."""
    body, sections = emit_sections(part)
    pieces = [("body", [emit_body(body)]), *sections]
    head, pages, _ = emit_manifest(pieces, (), compress=compress)
    return head + b"".join(pages)


def rows_manifest(tensors: int, ranks: int, rows: int, columns: int) -> bytes:
    """Make a manifest of float32 matrices, of which each rank has some rows in its file.

    As `on_paper` would, but in one step for all chunks.

    Args:
        tensors: Number of matrices.
        ranks: Number of ranks.
        rows: Of each matrix on each rank.
        columns: Of each matrix.
    """
    chunks, nbytes = tensors * ranks, 4 * rows * columns
    blocks = -(-nbytes // BLOCK_NBYTES)
    rank, tensor = np.arange(chunks) % ranks, np.arange(chunks) // ranks
    boxes = np.zeros((chunks, 4), "<u8")
    boxes[:, 0], boxes[:, 2], boxes[:, 3] = rank * rows, rows, columns
    files = tuple(
        DataFile(
            f"model-{one:05d}-of-{ranks:05d}.safetensors",
            HEADER_NBYTES + tensors * nbytes,
            HEADER_NBYTES,
            ("model",),
            {"format": "pt"},
            one,
        )
        for one in range(ranks)
    )
    names = tuple(f"layers.{number:05d}.weight" for number in range(tensors))
    body = Body(tree_of(names), BLOCK_NBYTES, ("float32",), files, world_size=ranks)
    sections = [
        ("body", emit_body(body)),
        ("tensors", np.repeat(np.array([0, 2, ranks, 0], "<u4"), tensors).tobytes()),
        ("shapes", np.tile(np.array([ranks * rows, columns], "<u8"), tensors).tobytes()),
        (
            "chunks",
            rank.astype("<u4").tobytes()
            + bytes(4 * chunks)
            + (HEADER_NBYTES + tensor * nbytes).astype("<u8").tobytes()
            + ((rank * tensors + tensor) * blocks).astype("<u8").tobytes()
            + bytes(8 * chunks),
        ),
        ("boxes", boxes.tobytes()),
        ("digests", bytes(32 * chunks * blocks)),
        ("frames", b""),
    ]
    pieces = [(name, [content]) for name, content in sections]
    head, pages, _ = emit_manifest(pieces, (), compress=False)
    return head + b"".join(pages)


def opened(manifest: bytes) -> Checkpoint:
    """Open a checkpoint of which nothing but the manifest is there."""
    return Checkpoint(MemoryStorage({"manifest.dsd": manifest}), threads=1)


@cache
def tree_of(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the encoded tree; one object for all ranks."""
    assert list(names) == sorted(names)
    return {"model": {name: ["tensor", index] for index, name in enumerate(names)}}


@cache
def columns_of(tensors: tuple[PaperTensor, ...]) -> TensorColumns:
    """Return what all ranks agree on; one object for all of them."""
    layouts = {number: layout_of(one.sharding) for number, one in enumerate(tensors)}
    return TensorColumns(
        [one.dtype for one in tensors],
        [one.sharding.shape for one in tensors],
        {number: layout for number, layout in layouts.items() if layout is not None},
    )


def layout_of(sharding: Sharding) -> tuple[Mesh, tuple[str, ...]] | None:
    """Return the provenance of a tensor on a mesh."""
    if not isinstance(sharding, MeshSharding):
        return None
    placements = tuple(str(one) for one in sharding.placements)
    return mesh_of(sharding.ranks, sharding.mesh_shape), placements


@cache
def mesh_of(ranks: tuple[int, ...], shape: tuple[int, ...]) -> Mesh:
    """Return the mesh of some ranks; one object for all tensors."""
    return Mesh(tuple(f"axis{number}" for number in range(len(shape))), shape, ranks)
