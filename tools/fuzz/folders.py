"""A whole checkpoint as one input, and changes of it: digests above a change are made right.

Two ways: bytes of a file are changed, and the digests of blocks, pages and the head follow; or a
vector is made again by its own generator, with a change at one of its layers.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vectors.builder import LAYERS, build
from vectors.cases import Case
from vectors.collect import all_cases
from vectors.declare import Block, Head, Page, Section, StoredChunk
from vectors.spectext import SPEC
from vectors.wire import digest

from dsdformat.errors import DsdError
from dsdformat.format.codecs import RAW, decode_block
from dsdformat.format.dtypes import DTYPES, Dtype
from dsdformat.format.packing import parse
from dsdformat.limits import MANIFEST_LABEL
from dsdformat.reader import Checkpoint
from dsdformat.storage.memory import MemoryStorage
from fuzz.bytewise import NUMBERS, mutated
from fuzz.manifests import cut, joined, mutated_manifest
from fuzz.values import changed_value, emitted, mutated_values

__all__ = [
    "Files",
    "digested",
    "folder_seeds",
    "manifest_seeds",
    "mutated_folder",
    "packed",
    "unpacked",
]

VECTORS = SPEC / "vectors"

Files = dict[str, bytes]
Numbered = dict[int, bytes]
_LABEL_NBYTES_MAX = 255
_FOLDER_NBYTES_MAX = 16 * 1024


def packed(files: Files) -> bytes:
    """The files of a folder in a row: of each its label and its bytes, behind their lengths."""
    pieces = []
    for label, data in sorted(files.items()):
        name = label.encode()[:_LABEL_NBYTES_MAX]
        pieces.append(struct.pack("<BI", len(name), len(data)) + name + data)
    return b"".join(pieces)


def unpacked(data: bytes) -> Files:
    """The files of a folder; what is cut short is as long as it is."""
    files, at = {}, 0
    while at + 5 <= len(data):
        label_nbytes, nbytes = struct.unpack_from("<BI", data, at)
        at += 5
        label = data[at : at + label_nbytes].decode("latin-1")
        files[label] = data[at + label_nbytes : at + label_nbytes + nbytes]
        at += label_nbytes + nbytes
    return files


# The vectors


@functools.cache
def _vectors() -> dict[str, Files]:
    """The files of the vectors that are files alone, and small, by their folders."""
    found = {}
    for case in sorted(VECTORS.glob("*/*/case.json")):
        spec = json.loads(case.read_text("utf-8"))
        paths = sorted((case.parent / "checkpoint").iterdir())
        nbytes = sum(path.stat().st_size for path in paths)
        if nbytes <= _FOLDER_NBYTES_MAX and not {"setup", "options"} & set(spec):
            name = f"{case.parent.parent.name}/{case.parent.name}"
            found[name] = {path.name: path.read_bytes() for path in paths}
    return found


@functools.cache
def _cases() -> list[Case]:
    """The same vectors, as their generator declares them."""
    names = _vectors()
    return [case for case in all_cases() if case.folder in names]


def folder_seeds() -> list[bytes]:
    """The vectors as folders."""
    return [packed(files) for files in _vectors().values()]


def manifest_seeds() -> list[bytes]:
    """The manifests of the vectors."""
    found = (files.get(MANIFEST_LABEL, b"") for files in _vectors().values())
    return [data for data in found if len(data) <= _FOLDER_NBYTES_MAX // 2]


# Changes


def mutated_folder(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A folder with a change of one of its files, or a vector made again with a change."""
    if rng.random() < 0.4:
        made = _made_again(rng)
        if made is not None:
            return made
    files = unpacked(data)
    if not files:
        return mutated(data, rng, others)
    kind = rng.random()
    if kind < 0.4 and MANIFEST_LABEL in files:
        files[MANIFEST_LABEL] = mutated_manifest(files[MANIFEST_LABEL], rng)
        return packed(files)
    label = rng.choice(sorted(files))
    if kind < 0.8:
        files[label] = mutated(files[label], rng)
        return packed(digested(files) if rng.random() < 0.85 else files)
    if kind < 0.9 and others:
        theirs = unpacked(rng.choice(others))
        files[label] = theirs.get(label, files[label])
        return packed(digested(files))
    return mutated(data, rng, others)


def _made_again(rng: random.Random) -> bytes | None:
    """A vector made by its generator, with a change at one layer on top of its own."""
    case = rng.choice(_cases())
    layer = rng.choice(LAYERS[:8])
    change = functools.partial(_HOOKS[layer], rng=rng)
    own: Callable[[Any], Any] | None = case.hooks.get(layer)

    def hook(value: Any) -> Any:
        if own is not None and rng.random() < 0.5:
            result = own(value)
            value = value if result is None else result
        changed = change(value)
        return value if changed is None else changed

    try:
        return packed(build(case.checkpoint, **{**case.hooks, layer: hook}).files)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error):
        return None  # the generator cannot write this down: it is no input
    except (UnicodeError, OverflowError, RecursionError):
        return None


def _chunks(chunks: list[StoredChunk], rng: random.Random) -> None:
    """Change stored bytes with their digest, or where a chunk lies or what it says it is."""
    if not chunks:
        return
    chunk = rng.choice(chunks)
    kind = rng.random()
    if kind < 0.6 and chunk.blocks:
        block = rng.choice(chunk.blocks)
        block.stored = mutated(block.stored, rng) or b"\0"
        block.stored_digest = digest(block.stored)
        if not chunk.codec:
            block.digest = block.stored_digest
        if rng.random() < 0.5:
            _decode(chunk, block)
        if rng.random() < 0.8:
            _lay_down(chunks)
    elif kind < 0.75:
        chunk.byte_offset = max(0, chunk.byte_offset + rng.choice((-64, -8, -1, 1, 8, 64)))
    elif kind < 0.85:
        chunk.codec = rng.choice((0, 1, 2, 3))
    else:
        other = rng.choice(chunks)
        chunk.blocks, other.blocks = other.blocks, chunk.blocks


def _decode(chunk: StoredChunk, block: Block) -> None:
    """Give a block the digest of what it decodes to, if it does."""
    if chunk.codec in (1, 2):
        dtype = DTYPES[chunk.tensor.dtype]
        found = _decoded(block.stored, chunk.codec, dtype, len(block.decoded))
        block.digest = digest(found)


def _lay_down(chunks: list[StoredChunk]) -> None:
    ends: dict[int, int] = {}
    for chunk in sorted(chunks, key=lambda one: (one.file, one.byte_offset)):
        chunk.byte_offset = ends.get(chunk.file, 0)
        ends[chunk.file] = chunk.byte_offset + len(chunk.stored)


def _body(body: dict[str, Any], rng: random.Random) -> Any:
    return changed_value(copy.deepcopy(body), rng)  # the tree is the vector's own


def _columns(columns: dict[str, list[Any]], rng: random.Random) -> None:
    for name in rng.sample(sorted(columns), rng.choice((1, 1, 2))):
        column = columns[name]
        if not column:
            continue
        at = int(rng.random() * len(column))
        if isinstance(column[at], bytes):
            column[at] = mutated(column[at], rng)[:32].ljust(32, b"\0")
            continue
        limit = 2**32 if name in _NARROW else 2**64
        kind = rng.random()
        new = column[at] + rng.choice((-1, 1, 2)) if kind < 0.4 else rng.choice(NUMBERS)
        column[at] = (rng.choice(column) if kind > 0.8 else new) % limit
        if rng.random() < 0.1:
            column.insert(at, column[at])


_NARROW = {"dtype", "ndim", "chunk_count", "layout", "file", "codec", "stored_nbytes"}


def _sections(sections: list[Section], rng: random.Random) -> None:
    at = rng.randrange(len(sections))
    section = sections[at]
    if rng.random() < 0.7:
        sections[at] = replace(section, data=mutated(section.data, rng))
    else:
        sections[at] = replace(section, flags=rng.choice((0, 1, 2)))


def _pages(pages: list[list[Page]], rng: random.Random) -> None:
    flat = [page for section in pages for page in section]
    if flat:
        page = rng.choice(flat)
        page.stored = mutated(page.stored, rng) or b"\0"
        page.digest = digest(page.stored)


def _head(head: Head, rng: random.Random) -> None:
    name = rng.choice(("major", "minor", "head_nbytes", "manifest_nbytes", "features_nbytes"))
    name = rng.choice((name, "section_count", "page_count"))
    limit = {"major": 2**16, "minor": 2**16, "manifest_nbytes": 2**64}.get(name, 2**32)
    setattr(head, name, (getattr(head, name) + rng.choice((-1, 1, *NUMBERS))) % limit)


_HOOKS: dict[str, Callable[..., Any]] = {
    "chunks": _chunks,
    "body": _body,
    "body_bytes": mutated_values,
    "columns": _columns,
    "sections": _sections,
    "pages": _pages,
    "head": _head,
    "head_bytes": mutated,
}


# Digests


def digested(files: Files) -> Files:
    """The folder with digests of blocks and of side files as the files now are, sealed anew."""
    parts = cut(files.get(MANIFEST_LABEL, b""))
    if parts is None or len(parts.sections) < 7:
        return files
    try:
        with Checkpoint(MemoryStorage(files), threads=1) as checkpoint:
            digests, frames = _block_digests(checkpoint, files)
            raw = checkpoint.table.manifest.read("body", 0, len(parts.sections[0].data))
    except DsdError:
        return files
    parts.sections[0].data = _sides_digested(raw, files)
    _put(parts.sections[5], 0, digests)
    _put(parts.sections[6], 4 * (len(parts.sections[6].data) // 36), frames)
    return {**files, MANIFEST_LABEL: joined(parts)}


def _block_digests(checkpoint: Checkpoint, files: Files) -> tuple[Numbered, Numbered]:
    """By number, the digests of all blocks as they decode, and of frames as they are stored."""
    digests: Numbered = {}
    frames: Numbered = {}
    size = checkpoint.block_nbytes
    for entry in checkpoint:
        try:
            row = checkpoint.table.row(entry.index)
        except DsdError:
            continue
        first_frames = checkpoint.table.columns.rows(entry.index).first_frame
        for place in row.chunks:
            data = files.get(checkpoint.table.body.files[place.file].label, b"")
            at, number = place.byte_offset, 0
            while number * size < place.nbytes and at < len(data):
                wanted = min(size, place.nbytes - number * size)
                length = place.frames[number] if number < len(place.frames) else wanted
                stored = data[at : at + length]
                found = stored
                if place.codec != RAW:
                    frames[first_frames[place.number] + number] = digest(stored)
                    found = _decoded(stored, place.codec, row.dtype, wanted)
                digests[place.first_block + number] = digest(found)
                at, number = at + length, number + 1
    return digests, frames


def _decoded(stored: bytes, codec: int, dtype: Dtype, nbytes: int) -> bytes:
    try:
        return decode_block(stored, codec, dtype, nbytes)
    except DsdError:
        return stored


def _put(section: Section, begin: int, found: Numbered) -> None:
    data = bytearray(section.data)
    for number, one in found.items():
        at = begin + 32 * number
        if at + 32 <= len(data):
            data[at : at + 32] = one
    section.data = bytes(data)


def _sides_digested(raw: bytes, files: Files) -> bytes:
    body = parse(raw)
    if not body["sides"]:
        return raw
    for side in body["sides"]:
        if side["label"] in files:
            side["digest"] = digest(files[side["label"]])
    return emitted(body)
