"""Write the metadata of a DCP folder: the pickle that `dcp_names` and `dcp_metadata` read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsdformat.boxes import Box
from dsdformat.convert.dcp_metadata import DcpEntry
from dsdformat.convert.dcp_names import Info
from dsdformat.convert.pickles.emitting import Emitter
from dsdformat.convert.plain_emitting import PlainEmitter
from dsdformat.format.values import Size

__all__ = ["DCP_VERSION", "emit_metadata"]

DCP_VERSION = "1.0.0"  # of torch 2.7 and later; older ones do not look

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def emit_metadata(entries: Sequence[DcpEntry], write: Callable[[Any], Any]) -> None:
    """Write the metadata.

    Args:
        entries: In the order that a reader gives them in.
        write: Takes the bytes, in order.

    Memory: that of the entries.
    """
    emitter = Emitter(write)
    _Metadata(emitter).metadata(entries)
    emitter.end()


class _Metadata:
    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.plain = PlainEmitter(emitter, weights_only=True).write

    def metadata(self, entries: Sequence[DcpEntry]) -> None:
        self.record(
            (_METADATA, "Metadata"),
            {
                "state_dict_metadata": lambda: self.table(entries, self.entry),
                "planner_data": lambda: self.table(entries, self.path),
                "storage_data": lambda: self.storage(entries),
                "storage_meta": lambda: self.plain(None),
                "version": lambda: self.plain(DCP_VERSION),
            },
        )

    def record(self, name: tuple[str, str], fields: Mapping[str, Callable[[], Any]]) -> None:
        """Push an object of a dataclass."""
        emitter = self.emitter
        emitter.name(*name)
        emitter.tuple(0)
        emitter.create()
        if fields:
            emitter.new_dict()
            emitter.mark()
            for field, push in fields.items():
                emitter.text(field)
                push()
            emitter.set_items()
            emitter.build()

    def table(self, entries: Sequence[DcpEntry], push: Callable[[DcpEntry], Any]) -> None:
        """Push a dict by names."""
        self.emitter.new_dict()
        self.emitter.mark()
        for entry in entries:
            self.emitter.text(entry.name)
            push(entry)
        self.emitter.set_items()

    def entry(self, entry: DcpEntry) -> None:
        if entry.dtype is None:
            self.record((_METADATA, "BytesStorageMetadata"), {})
            return
        self.record(
            (_METADATA, "TensorStorageMetadata"),
            {
                "properties": lambda: self.properties(entry),
                "size": lambda: self.plain(Size(entry.shape)),
                "chunks": lambda: self.chunks([chunk.box for chunk in entry.chunks]),
            },
        )

    def properties(self, entry: DcpEntry) -> None:
        emitter = self.emitter
        emitter.name(_METADATA, "TensorProperties")
        emitter.tuple(0)
        emitter.create()
        emitter.mark()
        emitter.name("torch", str(entry.dtype))
        self.call("torch.serialization", "_get_layout", "torch.strided")
        emitter.atom(False)
        self.call(_METADATA, "_MEM_FORMAT_ENCODING", int(entry.channels_last))
        emitter.atom(False)
        emitter.tuple()
        emitter.build()

    def call(self, module: str, qualname: str, arg: Any) -> None:
        """Push the result of a call, which is one object however often it is pushed."""
        key = (module, qualname, arg)
        if not self.emitter.recall(key):
            self.emitter.name(module, qualname)
            self.plain(arg)
            self.emitter.tuple(1)
            self.emitter.call()
            self.emitter.remember(key)

    def chunks(self, boxes: Sequence[Box]) -> None:
        emitter = self.emitter
        emitter.new_list()
        emitter.mark()
        for box in boxes:
            self.chunk(box)
        emitter.append()

    def chunk(self, box: Box) -> None:
        self.record(
            (_METADATA, "ChunkStorageMetadata"),
            {
                "offsets": lambda: self.plain(Size(box.offset)),
                "sizes": lambda: self.plain(Size(box.shape)),
            },
        )

    def path(self, entry: DcpEntry) -> None:
        self.plain(entry.path)

    def storage(self, entries: Sequence[DcpEntry]) -> None:
        self.emitter.new_dict()
        self.emitter.mark()
        for entry in entries:
            if entry.info is not None:
                self.index(entry.name, None, None)
                self.info(entry.info)
            for number, chunk in enumerate(entry.chunks):
                self.index(entry.name, number, chunk.box.offset)
                self.info(chunk.info)
        self.emitter.set_items()

    def index(self, name: str, number: int | None, offset: tuple[int, ...] | None) -> None:
        fields: dict[str, Callable[[], Any]] = {
            "fqn": lambda: self.plain(name),
            "index": lambda: self.plain(number),
        }
        if offset is not None:
            fields["offset"] = lambda: self.plain(Size(offset))
        self.record((_METADATA, "MetadataIndex"), fields)

    def info(self, info: Info) -> None:
        self.record(
            (_FILESYSTEM, "_StorageInfo"),
            {
                "relative_path": lambda: self.plain(info.path),
                "offset": lambda: self.plain(info.byte_offset),
                "length": lambda: self.plain(info.nbytes),
            },
        )
