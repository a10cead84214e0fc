"""The metadata of a DCP folder: read with the closed machine, and checked as a whole.

Decides what a folder holds: names and their places in the tree, dtypes, shapes, chunks that tile
them, and where each item lies. Of the pickle, what does not bear on that (ids of the save, what a
planner of its own kept) is parsed, and not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from dsdformat.boxes import Box, cut_dims, is_tiling
from dsdformat.convert.dcp_names import DCP_RULES, BytesMeta, Index, Info, Metadata, TensorMeta
from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes
from dsdformat.convert.pickles.machine import parse_pickle
from dsdformat.convert.pickles.resolving import resolve
from dsdformat.convert.storages import itemsize_of
from dsdformat.errors import printable, shorten
from dsdformat.limits import CUT_DIMS_MAX, DEPTH_MAX, INT63_MAX, NDIM_MAX

__all__ = ["ChunkPlace", "DcpEntry", "DcpMetadata", "read_metadata"]

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk of a tensor, and the item that holds it."""

    box: Box
    info: Info


@dataclass(frozen=True, slots=True)
class DcpEntry:
    """One name of the folder.

    Attributes:
        name: As DCP calls it.
        path: Where it lies in the state.
        dtype: Of a tensor: a name of torch; None for a value.
        layout: Of a tensor: a name of torch, or "".
        shape: Of a tensor.
        chunks: Of a tensor: those that are not empty; they tile it.
        info: Of a value: the item that holds it.
        channels_last: Whether the tensor lies so in the state.
    """

    name: str
    path: Path
    dtype: str | None = None
    layout: str = ""
    shape: tuple[int, ...] = ()
    chunks: tuple[ChunkPlace, ...] = ()
    info: Info | None = None
    channels_last: bool = False


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a folder holds, in the order of the metadata."""

    entries: list[DcpEntry]

    def infos(self) -> Iterable[Info]:
        """Yield where all items lie."""
        for entry in self.entries:
            if entry.info is not None:
                yield entry.info
            for chunk in entry.chunks:
                yield chunk.info


def read_metadata(source: Bytes) -> DcpMetadata:
    """Read and check the metadata.

    Raises:
        ConvertError: `dcp_metadata` or `dcp_chunks`; what `parse_pickle` and `resolve` raise.

    Memory: up to about 100 times the file.
    """
    parsed = parse_pickle(source)
    if parsed.end != source.nbytes:
        raise fault("pickle_malformed", source.name, "bytes follow the pickle")
    root = resolve(parsed.root, DCP_RULES, source.name)
    if type(root) is not Metadata:
        raise fault("dcp_metadata", source.name, "is not the metadata of a DCP folder")
    return _Reader(source.name, root).read()


class _Reader:
    def __init__(self, where: str, metadata: Metadata) -> None:
        self.where = where
        self.metadata = metadata
        planner = metadata.planner
        self.paths: dict[Any, Any] = planner if type(planner) is dict else {}

    def read(self) -> DcpMetadata:
        entries = [self.entry(name, meta) for name, meta in self.metadata.entries.items()]
        return DcpMetadata(entries)

    def bad(self, message: str, code: str = "dcp_metadata") -> NoReturn:
        raise fault(code, self.where, message)

    def entry(self, name: str, meta: TensorMeta | BytesMeta) -> DcpEntry:
        path = self.path(name)
        if isinstance(meta, BytesMeta):
            return DcpEntry(name, path, info=self.info(name, None))
        self.check_shape(name, meta)
        chunks = self.chunks(name, meta)
        properties = meta.properties
        return DcpEntry(
            name,
            path,
            properties.dtype,
            properties.layout,
            meta.size,
            chunks,
            channels_last=properties.memory_format == "channels_last" and len(meta.size) == 4,
        )

    def path(self, name: str) -> Path:
        """Return where an entry lies in the state, as the planner has it; else its name alone."""
        path = self.paths.get(name, (name,))
        if type(path) is not tuple or not 0 < len(path) < DEPTH_MAX or type(path[0]) is not str:
            self.bad(f"{printable(name)} has no path: {shorten(path)}")
        if any(type(step) not in (str, int) for step in path):
            self.bad(f"{printable(name)} has no path: {shorten(path)}")
        return path

    def info(self, name: str, offset: tuple[int, ...] | None) -> Info:
        info = self.metadata.storage.get(Index(name, offset))
        if info is None:
            place = "" if offset is None else f" at {list(offset)}"
            self.bad(f"says nowhere where {printable(name)}{place} is stored")
        if info.transforms:
            self.bad(
                f"{printable(name)} was written through the extension "
                f"{printable(info.transforms[0])}, which is not read",
                "dcp_item",
            )
        return info

    def check_shape(self, name: str, meta: TensorMeta) -> None:
        nbytes = itemsize_of(meta.properties.dtype)
        for size in meta.size:
            nbytes *= size or 1
            if nbytes > INT63_MAX or len(meta.size) > NDIM_MAX:
                self.bad(f"{printable(name)} has the shape {shorten(list(meta.size))}")

    def chunks(self, name: str, meta: TensorMeta) -> tuple[ChunkPlace, ...]:
        shape, boxes = meta.size, []
        for chunk in meta.chunks:
            if len(chunk.offsets) != len(chunk.sizes):
                self.bad(f"a chunk of {printable(name)} has no box", "dcp_chunks")
            box = Box(chunk.offsets, chunk.sizes)
            if not box.fits(shape):
                self.bad(
                    f"a chunk of {printable(name)} is {box}, outside of {list(shape)}",
                    "dcp_chunks",
                )
            if box.numel:
                boxes.append(box)
        if 0 not in shape:
            self.check_tiling(name, shape, boxes)
        return tuple(ChunkPlace(box, self.info(name, box.offset)) for box in boxes)

    def check_tiling(self, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
        dims = cut_dims(shape, boxes)
        if len(dims) > CUT_DIMS_MAX:
            self.bad(f"{printable(name)} is cut along {len(dims)} dims", "foreign_too_large")
        if boxes and is_tiling(shape, boxes, dims):
            return
        count, total = sum(box.numel for box in boxes), math.prod(shape)
        what = f"{len(boxes)} chunks of {printable(name)}, {count} of {total} elements"
        self.bad(f"{what}: they overlap, or leave holes", "dcp_chunks")
