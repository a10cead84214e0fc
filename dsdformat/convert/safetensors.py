"""safetensors: one file, several with an index, or several that hold chunks of the same tensors.

The third is what `HuggingFaceStorageWriter` of torch leaves without consolidation: each file says
in its metadata where in its tensor each chunk begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from dsdformat.boxes import Box, cut_dims, is_tiling, whole
from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, Folder, MemoryBytes
from dsdformat.convert.pickles.resolving import Unknown
from dsdformat.convert.safetensors_header import HeaderEntry, parse_json, read_header
from dsdformat.convert.tensor import ForeignTensor, Part, View, packed_strides
from dsdformat.errors import FormatError, Problem, printable
from dsdformat.limits import CUT_DIMS_MAX
from dsdformat.modelfiles import TIES_KEY, parse_ties

__all__ = [
    "INDEX_SUFFIX",
    "SHARDING_KEY",
    "missing_files",
    "read_index",
    "read_indexed",
    "read_safetensors",
    "read_sharded",
    "tied",
]

INDEX_SUFFIX = ".index.json"
SHARDING_KEY = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_NAMES_MAX = 5


def read_safetensors(source: Bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors of a file by name, and its free strings.

    Raises:
        ConvertError: what `read_header` raises.

    Memory: the header.
    """
    header = read_header(source)
    tree = {name: _leaf(source, entry) for name, entry in header.entries.items()}
    return tree, header.metadata


def tied(
    tree: dict[str, Any], metadata: Iterable[Mapping[str, str]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors with the names that were left out of files, and free strings without these.

    Args:
        tree: Tensors by name.
        metadata: Free strings of each file. Where they name what is not there, they mean nothing.
    """
    named = dict(tree)
    rest: dict[str, str] = {}
    for strings in metadata:
        rest.update(strings)
        for name, kept in parse_ties(strings).items():
            if kept in tree:
                named.setdefault(name, tree[kept])
    rest.pop(TIES_KEY, None)
    return named, rest


def _leaf(source: Bytes, entry: HeaderEntry) -> Any:
    if entry.dtype is None:
        return Unknown(f"safetensors {entry.kind}", "a dtype that the format does not have")
    return ForeignTensor(entry.dtype, entry.shape, [_part(source, entry, whole(entry.shape))])


def _part(source: Bytes, entry: HeaderEntry, box: Box) -> Part:
    view = View(source, entry.byte_offset, packed_strides(entry.shape))
    return Part(box, lambda: view)


def read_index(source: Bytes) -> dict[str, str]:
    """Return which file each tensor is in, as an index says.

    Raises:
        ConvertError: `header_malformed` or `index_malformed`.
    """
    names = parse_json(source, 0, source.nbytes).get("weight_map")
    if type(names) is not dict or any(type(file) is not str for file in names.values()):
        raise fault("index_malformed", source.name, "has no weight_map from names to files")
    return names


def read_indexed(
    where: str, weight_map: Mapping[str, str], trees: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return all tensors of a folder, in the order of its index.

    Args:
        where: Name of the index.
        weight_map: What `read_index` gives.
        trees: What each file holds.

    Raises:
        ConvertError: `index_malformed`: index and files do not name the same tensors.
    """
    absent = [name for name, file in weight_map.items() if name not in trees[file]]
    if absent:
        raise _disagree(where, absent, "are in the index, and not in their files")
    there = [(name, file) for file, tree in trees.items() for name in tree]
    extra = [name for name, file in there if weight_map.get(name) != file]
    if extra:
        raise _disagree(where, extra, "are in files that the index does not say")
    return {name: trees[file][name] for name, file in weight_map.items()}


def missing_files(where: str, weight_map: Mapping[str, str], there: set[str]) -> FormatError:
    """Return an error that names files of an index that are not there, and their tensors."""
    absent = [name for name, file in weight_map.items() if file not in there]
    files = list(dict.fromkeys(weight_map[name] for name in absent))
    verb = "is" if len(files) == 1 else "are"
    message = f"{where}: {_listed(files)} {verb} not there, and should have {_listed(absent)}"
    return Problem("missing_file", message, where=files[0]).error()


def _disagree(where: str, names: list[str], what: str) -> Exception:
    return fault("index_malformed", where, f"{_listed(names)} {what}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(printable, names[:_NAMES_MAX]))
    return f"{shown} and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else shown


def read_sharded(folder: Folder, files: Iterable[str]) -> dict[str, Any]:
    """Return the tensors of files that hold chunks, by name.

    Raises:
        ConvertError: `dcp_chunks` or `dcp_metadata`; what `read_header` raises.

    Memory: the headers.
    """
    chunks: dict[str, list[tuple[HeaderEntry, Part]]] = {}
    for file in files:
        source = folder.file(file)
        header = read_header(source)
        offsets = _saved_offsets(source, header.metadata)
        for name, entry in header.entries.items():
            offset = offsets.get(name, {}).get(_OFFSETS)
            plain = type(offset) is list and all(type(n) is int and 0 <= n < 2**63 for n in offset)
            if not plain or len(offset) != len(entry.shape):
                message = f"does not say where {printable(name)} begins"
                raise fault("dcp_metadata", source.name, message)
            part = _part(source, entry, Box(tuple(offset), entry.shape))
            chunks.setdefault(name, []).append((entry, part))
    return {name: _assembled(folder.name, name, found) for name, found in chunks.items()}


def _saved_offsets(source: Bytes, metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get(SHARDING_KEY, "").encode()
    offsets = parse_json(MemoryBytes(text, source.name), 0, len(text)) if text else {}
    if any(type(value) is not dict for value in offsets.values()):
        raise fault("dcp_metadata", source.name, f"its {SHARDING_KEY} is malformed")
    return offsets


def _assembled(where: str, name: str, chunks: list[tuple[HeaderEntry, Part]]) -> Any:
    entry = chunks[0][0]
    if entry.dtype is None:
        return Unknown(f"safetensors {entry.kind}", "a dtype that the format does not have")
    boxes = [part.box for _, part in chunks]
    same = {(one.dtype, len(one.shape)) for one, _ in chunks}
    if len(same) > 1:
        raise fault("dcp_chunks", where, f"chunks of {printable(name)} have several dtypes")
    shape = tuple(functools.reduce(lambda a, b: list(map(max, a, b)), (box.end for box in boxes)))
    full = [(box, part) for box, (_, part) in zip(boxes, chunks, strict=True) if box.numel]
    if 0 not in shape:
        tiles = [box for box, _ in full]
        dims = cut_dims(shape, tiles)
        if len(dims) > CUT_DIMS_MAX or not is_tiling(shape, tiles, dims):
            what = f"chunks of {printable(name)} overlap, or leave holes"
            raise fault("dcp_chunks", where, what)
    return ForeignTensor(entry.dtype, shape, [part for _, part in full])
