"""Names that the metadata of a DCP folder may call, and the records they stand for.

A closed table of its own: the classes of `torch.distributed.checkpoint`, sizes, dtypes, layouts,
and paths, in the forms of torch 2.0 to 2.13. Nothing of torch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsdformat.convert.pickles.keys import ValueFault
from dsdformat.convert.pickles.nodes import ABSENT, Global
from dsdformat.convert.pickles.resolving import Made, Maker, Rules, Unknown
from dsdformat.convert.plain_names import PLAIN_NAMES
from dsdformat.convert.storages import torch_dtype_name
from dsdformat.convert.torch_constants import TORCH_CONSTANTS
from dsdformat.format.values import Named, Size

__all__ = [
    "CHANNELS_LAST",
    "DCP_RULES",
    "BytesMeta",
    "Chunk",
    "Index",
    "Info",
    "Metadata",
    "TensorMeta",
]

CHANNELS_LAST = (0, 2, 3, 1)  # how the dims of such a tensor lie


@dataclass(frozen=True, slots=True)
class Chunk:
    """`ChunkStorageMetadata`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Properties:
    """`TensorProperties`: a dtype of torch, the name of a layout, and of a memory format."""

    dtype: str
    layout: str
    memory_format: str


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """`TensorStorageMetadata`."""

    properties: Properties
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class BytesMeta:
    """`BytesStorageMetadata`."""


@dataclass(frozen=True, slots=True)
class Index:
    """`MetadataIndex`, without its hint."""

    fqn: str
    offset: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Info:
    """`_StorageInfo`."""

    path: str
    byte_offset: int
    nbytes: int
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """`Metadata`.

    Attributes:
        entries: `state_dict_metadata`: what there is, by FQN.
        storage: `storage_data`: where it lies.
        planner: `planner_data`: whatever the planner kept.
    """

    entries: dict[str, TensorMeta | BytesMeta]
    storage: dict[Index, Info]
    planner: Any


def _fields(made: Made, *needed: str) -> dict[str, Any]:
    """Return the state of a dataclass, which is all that is set on it."""
    state, made.state = made.state, ABSENT
    if made.bare():
        raise ValueFault("arguments")
    if type(state) is not dict or not set(needed) <= set(state):
        raise ValueFault(f"a state without {', '.join(needed)}")
    return state


def _size(value: Any) -> tuple[int, ...]:
    """Return a size; writers of their own put lists and tuples in its place."""
    if type(value) not in (Size, tuple, list):
        raise ValueFault("a size that is none")
    if any(type(n) is not int or not 0 <= n < 2**63 for n in value):
        raise ValueFault("a size that is none")
    return tuple(value)


def _chunk(made: Made) -> Chunk:
    fields = _fields(made, "offsets", "sizes")
    return Chunk(_size(fields["offsets"]), _size(fields["sizes"]))


def _properties(made: Made) -> Properties:
    state, made.state = made.state, ABSENT
    if made.bare() or type(state) is not tuple or len(state) != 5:
        raise ValueFault("a state that is not that of properties")
    dtype, layout, _, memory_format, _ = state
    name = torch_dtype_name(dtype.name) if type(dtype) is Global else None
    if name is None or dtype.module != "torch":
        raise ValueFault("a dtype that is none")
    layout_name = layout.name if type(layout) is Named else "an unknown layout"
    return Properties(name, layout_name, getattr(memory_format, "name", "any"))


def _tensor(made: Made) -> TensorMeta:
    fields = _fields(made, "properties", "size", "chunks")
    properties, chunks = fields["properties"], fields["chunks"]
    if type(properties) is not Properties or type(chunks) not in (list, tuple):
        raise ValueFault("properties or chunks that are none")
    if any(type(chunk) is not Chunk for chunk in chunks):
        raise ValueFault("chunks that are none")
    return TensorMeta(properties, _size(fields["size"]), tuple(chunks))


def _bytes(made: Made) -> BytesMeta:
    if made.state in (None, {}):
        made.state = ABSENT
    if made.bare():
        raise ValueFault("arguments")
    return BytesMeta()


def _index(made: Made) -> Index:
    fields = _fields(made, "fqn")
    fqn, offset = fields["fqn"], fields.get("offset")
    if type(fqn) is not str:
        raise ValueFault("a name that is no string")
    return Index(fqn, None if offset is None else _size(offset))


def _info(made: Made) -> Info:
    fields = _fields(made, "relative_path", "offset", "length")
    path, transforms = fields["relative_path"], fields.get("transform_descriptors") or ()
    numbers = fields["offset"], fields["length"]
    if type(path) is not str or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueFault("a path, offset or length that is none")
    if type(transforms) not in (list, tuple) or any(type(one) is not str for one in transforms):
        raise ValueFault("transforms that are no names")
    return Info(path, *numbers, tuple(transforms))


def _metadata(made: Made) -> Metadata:
    fields = _fields(made, "state_dict_metadata", "storage_data")
    entries, storage = fields["state_dict_metadata"], fields["storage_data"]
    if type(entries) is not dict or type(storage) is not dict:
        raise ValueFault("tables that are no dicts")
    for name, entry in entries.items():
        if type(name) is not str or type(entry) not in (TensorMeta, BytesMeta):
            raise ValueFault("an entry that is neither a tensor nor bytes")
    for index, info in storage.items():
        if type(index) is not Index or type(info) is not Info:
            raise ValueFault("a place that is none")
    return Metadata(entries, storage, fields.get("planner_data"))


def _memory_format(made: Made) -> Any:
    """The memory format of properties."""
    args = made.bare()
    if len(args) != 1 or args[0] not in (0, 1, 2):
        raise ValueFault("a memory format that is none")
    return Named("torch.memory_format", "channels_last" if args[0] == 1 else "any")


def _enum_member(made: Made) -> Any:
    """`getattr(_MEM_FORMAT_ENCODING, name)`, as Python 3.11.0 pickles members of enums."""
    args = made.args
    if len(args) == 2 and type(args[0]) is Global and args[0].name in _ENUMS:
        return Named("torch.memory_format", "any")
    return Unknown(made.name, made=made)


_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.3
_ENUMS = ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")
_CALLS: dict[tuple[str, str], Maker] = {
    (_METADATA, "Metadata"): _metadata,
    (_METADATA, "MetadataIndex"): _index,
    (_METADATA, "TensorStorageMetadata"): _tensor,
    (_METADATA, "BytesStorageMetadata"): _bytes,
    (_METADATA, "ChunkStorageMetadata"): _chunk,
    (_METADATA, "TensorProperties"): _properties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    (_SHARDED, "TensorProperties"): _properties,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _memory_format,
    ("builtins", "getattr"): _enum_member,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _info,
}
DCP_RULES = Rules({**PLAIN_NAMES, **TORCH_CONSTANTS, **_CALLS})
