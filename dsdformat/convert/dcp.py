"""Folders of `torch.distributed.checkpoint`: no process group, no torch, no unpickler.

Reads the metadata and the values; a tensor's chunks are found where they lie in their files, in
both forms of items, those of `torch.save` and those of safetensors, when they are read.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsdformat.convert.archive import MAGIC
from dsdformat.convert.dcp_metadata import ChunkPlace, DcpEntry, DcpMetadata, read_metadata
from dsdformat.convert.dcp_names import CHANNELS_LAST, Info
from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, Folder, MemoryBytes, Window, read_bytes
from dsdformat.convert.pickles.resolving import Unknown
from dsdformat.convert.safetensors_header import SafetensorsHeader, read_header
from dsdformat.convert.tensor import ForeignTensor, Part, View, packed_strides
from dsdformat.convert.torch_stream import is_torch_stream, read_torch_stream
from dsdformat.convert.torch_zip import TorchArchive, read_torch_archive
from dsdformat.errors import printable
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import MIB

__all__ = ["METADATA_NAME", "DcpFolder"]

METADATA_NAME = ".metadata"
_SMALL_NBYTES = MIB


class DcpFolder:
    """A DCP folder.

    Attributes:
        metadata: What it holds.
        tree: Its state; see `resolving.resolve`.
    """

    def __init__(self, folder: Folder) -> None:
        """Read the metadata and all values.

        Raises:
            ConvertError: `dcp_metadata`, `dcp_chunks`, `dcp_item` or `foreign_path`; what the
                items of values raise, see `read_torch_archive`.
            FormatError: `missing_file` or `not_regular_file`.

        Memory: see `read_metadata`; the values.
        """
        self._folder = folder
        self._files: dict[str, Bytes] = {}
        self._headers: dict[tuple[str, int], SafetensorsHeader] = {}
        self._tied: dict[str, list[Part]] = {}
        self._lock = threading.Lock()
        source = folder.file(METADATA_NAME)
        self.metadata: DcpMetadata = read_metadata(source)
        for info in self.metadata.infos():
            self._window(info)
        items = [(entry, self._leaf(entry)) for entry in self.metadata.entries]
        self.tree = nested(items, source.name)

    def verify(self) -> int:
        """Compare all items of `torch.save` with their CRC-32; return how many bytes that were.

        Raises:
            ConvertError: `foreign_checksum`.
        """
        windows = map(self._window, self.metadata.infos())
        return sum(read_torch_archive(one).verify() for one in windows if _begins_as_zip(one))

    def _leaf(self, entry: DcpEntry) -> Any:
        if entry.info is not None:
            return self._value(entry, entry.info)
        assert entry.dtype is not None
        if entry.dtype not in DTYPES:
            return Unknown(f"torch.{entry.dtype}", "a dtype that the format does not have")
        if entry.layout != "strided":
            return Unknown(f"torch.{entry.layout}", "a tensor that is not strided")
        attributes = {"dim_order": list(CHANNELS_LAST)} if entry.channels_last else {}
        return ForeignTensor(entry.dtype, entry.shape, self._parts(entry), attributes)

    def _parts(self, entry: DcpEntry) -> list[Part]:
        """Return the chunks of a tensor: the same ones for names of the same items."""
        places = [
            (one.box.offset, one.box.shape, one.info.path, one.info.byte_offset)
            for one in entry.chunks
        ]
        key = repr((entry.dtype, entry.shape, places))  # whose hash nobody can foresee
        found = self._tied.get(key)
        if found is not None and all(map(self._is_archive, entry.chunks)):
            return found
        parts = [
            Part(chunk.box, functools.cache(functools.partial(self._open, entry, chunk)))
            for chunk in entry.chunks
        ]
        if entry.chunks:
            self._tied[key] = parts
        return parts

    def _is_archive(self, chunk: ChunkPlace) -> bool:
        """Whether an item is of `torch.save`; others tell tensors apart by their names."""
        return _begins_as_zip(self._window(chunk.info))

    def _value(self, entry: DcpEntry, info: Info) -> Any:
        window: Bytes = self._window(info)
        if window.nbytes <= _SMALL_NBYTES:
            window = MemoryBytes(read_bytes(window, 0, window.nbytes), window.name)
        if _begins_as_zip(window):
            return read_torch_archive(window).tree
        if is_torch_stream(window):
            return read_torch_stream(window)
        raise self._bad(entry, info, "is no file of torch.save")

    def _open(self, entry: DcpEntry, chunk: ChunkPlace) -> View:
        """Find the elements of a chunk in its item."""
        window = self._window(chunk.info)
        if not _begins_as_zip(window):
            return self._open_safetensors(entry, chunk)
        tensor = _tensor_of(read_torch_archive(window))
        if tensor is None:
            raise self._bad(entry, chunk.info, "is no tensor")
        if (tensor.dtype, tensor.shape) != (entry.dtype, chunk.box.shape):
            raise self._mismatch(entry, chunk, tensor.dtype, tensor.shape)
        return tensor.parts[0].open()

    def _open_safetensors(self, entry: DcpEntry, chunk: ChunkPlace) -> View:
        """Find a chunk in the safetensors file that begins where its item is said to."""
        info = chunk.info
        file = self._file(info.path)
        rest = Window(file, info.byte_offset, file.nbytes - info.byte_offset, "safetensors")
        with self._lock:
            header = self._headers.get((info.path, info.byte_offset))
            if header is None:
                header = self._headers[info.path, info.byte_offset] = read_header(rest)
        found = header.entries.get(entry.name)
        if found is None:
            raise self._bad(entry, info, "is not in the safetensors file")
        if (found.dtype, found.shape) != (entry.dtype, chunk.box.shape):
            raise self._mismatch(entry, chunk, found.kind, found.shape)
        if found.nbytes != info.nbytes:
            raise self._bad(entry, info, f"has {found.nbytes} bytes, not {info.nbytes}")
        return View(rest, found.byte_offset, packed_strides(found.shape))

    def _file(self, name: str) -> Bytes:
        with self._lock:
            if name not in self._files:
                self._files[name] = self._folder.file(name)
            return self._files[name]

    def _window(self, info: Info) -> Window:
        return Window(self._file(info.path), info.byte_offset, info.nbytes, "an item")

    def _bad(self, entry: DcpEntry, info: Info, message: str) -> Exception:
        place = f"the item of {printable(entry.name)} at byte {info.byte_offset}"
        return fault("dcp_item", f"{self._folder.name}/{info.path}", f"{place} {message}")

    def _mismatch(
        self, entry: DcpEntry, chunk: ChunkPlace, kind: str, shape: tuple[int, ...]
    ) -> Exception:
        got, wanted = f"{kind} {list(shape)}", f"{entry.dtype} {list(chunk.box.shape)}"
        return self._bad(entry, chunk.info, f"is {got}, and the metadata say {wanted}")


def _begins_as_zip(source: Bytes) -> bool:
    head = memoryview(bytearray(4))
    return source.read_into(0, head) == 4 and bytes(head) == MAGIC


def _tensor_of(archive: TorchArchive) -> ForeignTensor | None:
    return archive.tree if type(archive.tree) is ForeignTensor else None


# The tree


@dataclass(slots=True)
class _Branch:
    items: dict[str | int, Any]


def nested(items: list[tuple[DcpEntry, Any]], where: str) -> Any:
    """Return the state of which these are the leaves: an integer in a path is a list's index.

    Raises:
        ConvertError: `dcp_metadata`: two leaves are in each other's way, or a list has holes.
    """
    root = _Branch({})
    for entry, leaf in items:
        branch = root
        for step, following in _pairs(entry.path):
            found = branch.items.setdefault(step, _Branch({}))
            if type(found) is not _Branch or type(following) is not _kind(found, following):
                raise _conflict(entry, where)
            branch = found
        if entry.path[-1] in branch.items:
            raise _conflict(entry, where)
        branch.items[entry.path[-1]] = leaf
    return _grown(root, where, ())


def _pairs(path: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    return zip(path, path[1:], strict=False)


def _kind(branch: _Branch, following: Any) -> type:
    """Return the type of the steps below a branch."""
    return type(next(iter(branch.items), following))


def _conflict(entry: DcpEntry, where: str) -> Exception:
    message = f"the path of {printable(entry.name)} is in the way of another"
    return fault("dcp_metadata", where, message)


def _grown(branch: _Branch, where: str, path: tuple[Any, ...]) -> Any:
    items = {
        step: _grown(item, where, (*path, step)) if type(item) is _Branch else item
        for step, item in branch.items.items()
    }
    if not path or type(next(iter(items))) is str:
        return items
    if sorted(items) != list(range(len(items))):
        raise fault("dcp_metadata", where, f"a list has {len(items)} items, and others' indices")
    return [items[index] for index in range(len(items))]
