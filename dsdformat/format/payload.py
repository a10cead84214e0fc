"""Data files: the derived safetensors header, and where chunks lie (spec section 10).

Pure. A header is a function of the manifest, so this module only emits; nothing here parses JSON.
"""

from __future__ import annotations

import json.encoder
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dsdformat.boxes import Box
from dsdformat.format.codecs import CODECS, RAW
from dsdformat.format.dtypes import Dtype, payload_shape
from dsdformat.format.paths import Path, emit_key, emit_key_suffix
from dsdformat.format.values import encoded_key
from dsdformat.limits import HEADER_ALIGNMENT, SIZE_CLASSES

__all__ = [
    "HeaderEntry",
    "chunk_key",
    "emit_entries",
    "emit_entry",
    "emit_form",
    "emit_header",
    "header_json",
    "header_nbytes",
    "join_entries",
    "size_class",
    "size_classes",
]


class HeaderEntry(NamedTuple):
    """One chunk as a safetensors header names it.

    Attributes:
        key: Payload key.
        dtype: The tensor's.
        shape: Of the chunk's box.
        codec: Of the chunk.
        nbytes: Stored length.
    """

    key: str
    dtype: Dtype
    shape: Sequence[int]
    codec: int
    nbytes: int


def chunk_key(path: Path, shape: Sequence[int], box: Box, codec: int) -> str:
    """Return the payload key of a chunk of the tensor at this path below the file's prefix."""
    part = None if box.shape == tuple(shape) else box
    name = None if codec == RAW else CODECS[codec]
    return emit_key(path, encoded_key) + emit_key_suffix(part, name)


def header_json(
    entries: Iterable[HeaderEntry], metadata: Mapping[str, str], *, most: int | None = None
) -> bytes:
    """Return the JSON text of a header for chunks in storage order, without padding.

    Args:
        entries: The chunks.
        metadata: Free strings.
        most: How long the text may be; of one that is longer, enough is returned to be longer
            too. Each chunk of a tensor has its whole name in the header.
    """
    parts = []
    at = size = 0
    for key, dtype, box_shape, codec, nbytes in entries:
        form = emit_form(dtype, box_shape, codec, nbytes)
        parts.append(emit_entry(key, form, at, at + nbytes))
        at += nbytes
        size += len(parts[-1])
        if most is not None and size > most:
            break
    return join_entries(parts, metadata)


def join_entries(entries: Iterable[str], metadata: Mapping[str, str]) -> bytes:
    """Return the JSON text of a header that has these entries, in storage order."""
    pairs = ",".join(f"{_quoted(key)}:{_quoted(text)}" for key, text in sorted(metadata.items()))
    first = [f'"__metadata__":{{{pairs}}}'] if pairs else []
    return ("{" + ",".join([*first, *entries]) + "}").encode()


def emit_form(dtype: Dtype, box_shape: Sequence[int], codec: int, nbytes: int) -> str:
    """Return what a header says of a chunk behind its key, up to where its bytes lie."""
    stored_as = dtype.stored_as if codec == RAW else "U8"
    shape = payload_shape(dtype, box_shape) if codec == RAW else [nbytes]
    return f'{{"dtype":"{stored_as}","shape":[{",".join(map(str, shape))}],"data_offsets":['


def emit_entry(key: str, form: str, begin: int, end: int) -> str:
    """Return a chunk's key and value in a header; its bytes are counted from the header's end."""
    return f"{_quoted(key)}:{form}{begin},{end}]}}"


def emit_entries(
    keys: Iterable[str], forms: Iterable[str], begins: Iterable[int], ends: Iterable[int]
) -> list[str]:
    """Return the entries of chunks in storage order; see `emit_entry`.

    Args:
        keys: Payload keys.
        forms: What `emit_form` gives for each.
        begins, ends: As in `emit_entry`.
    """
    columns = zip(map(_quoted, keys), forms, begins, ends, strict=True)
    return [f"{key}:{form}{begin},{end}]}}" for key, form, begin, end in columns]


def header_nbytes(text_nbytes: int) -> int:
    """Return where data begins behind a JSON text of this length: a multiple of 4096."""
    return -(-(8 + text_nbytes) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT


def emit_header(text: bytes, nbytes: int) -> bytes | None:
    """Return the first `nbytes` bytes of a data file, or None if the JSON does not fit."""
    room = nbytes - 8
    if len(text) > room:
        return None
    return room.to_bytes(8, "little") + text.ljust(room, b" ")


def size_class(nbytes: int) -> int:
    """Return the largest size class that divides a chunk's decoded length (R-10.8)."""
    return _CLASS_OF.get(nbytes & -nbytes, SIZE_CLASSES[0])


def size_classes(lengths: Iterable[int]) -> list[int]:
    """Return the size class of each chunk; see `size_class`."""
    return [_CLASS_OF.get(nbytes & -nbytes, SIZE_CLASSES[0]) for nbytes in lengths]


# By the largest power of two that divides a length; those that are not here are above all classes.
_CLASS_OF = {
    1 << bit: next(size for size in SIZE_CLASSES if size <= 1 << bit)
    for bit in range(SIZE_CLASSES[0].bit_length())
}


_quoted = json.encoder.encode_basestring  # what `json.dumps` writes of a string, not only ASCII
