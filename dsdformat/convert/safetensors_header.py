"""The header of a safetensors file, read strictly: entries that fill the file, each name once.

Decides which logical dtype each type of safetensors is. Types of less than a byte are known only
where the format has them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, read_bytes
from dsdformat.errors import printable, shorten
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import INT63_MAX, JSON_NBYTES_MAX, NDIM_MAX

__all__ = ["KINDS", "HeaderEntry", "SafetensorsHeader", "parse_json", "read_header"]

_METADATA = "__metadata__"
# Logical dtypes by the names that safetensors has for them.
KINDS = {
    row.stored_as: row.name for row in DTYPES.values() if row.shape_rule == "s" and row.itemsize
}
KINDS |= {"U8": "uint8", "F16": "float16", "F64": "float64"}
_PACKED = "F4"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a pair, or alone


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor of a safetensors file.

    Attributes:
        name: Its key.
        dtype: Logical name, or None for a type that the format does not have.
        kind: Name of the type in the file.
        shape: In elements of `dtype`.
        byte_offset: Where its data begin in the file.
        nbytes: Their length.
    """

    name: str
    dtype: str | None
    kind: str
    shape: tuple[int, ...]
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of a safetensors file.

    Attributes:
        entries: Its tensors by name, in the order of the header.
        metadata: Its free strings.
    """

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]


def read_header(source: Bytes) -> SafetensorsHeader:
    """Read the header of a safetensors file, and compare it with the file.

    Raises:
        ConvertError: `header_malformed`, `foreign_too_large` or `foreign_truncated`.

    Memory: up to about ten times the header.
    """
    return _Reader(source).read()


def parse_json(source: Bytes, byte_offset: int, nbytes: int) -> dict[str, Any]:
    """Parse a JSON object strictly: no key twice, no NaN, no lone surrogates, no huge integers.

    Raises:
        ConvertError: `header_malformed` or `foreign_too_large`.
    """

    def bad(message: str) -> NoReturn:
        raise fault("header_malformed", source.name, message)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            bad(f"its JSON has the key {shorten(twice)} twice")
        return result

    if nbytes > JSON_NBYTES_MAX:
        raise fault("foreign_too_large", source.name, f"{nbytes} bytes of JSON")
    data = read_bytes(source, byte_offset, nbytes, "its JSON")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_constant=lambda name: bad(f"its JSON holds {name}"),
        )
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            bad("its JSON is not UTF-8")
        if type(error) in (ValueError, json.JSONDecodeError, RecursionError):
            bad(f"its JSON does not parse: {printable(str(error))}")
        raise
    if type(value) is not dict:
        bad("its JSON is no object")
    if _SURROGATE.search(data) and not _is_text(value):
        bad("its JSON holds a lone surrogate")
    return value


class _Reader:
    def __init__(self, source: Bytes) -> None:
        self.source = source
        self.begin = 0

    def bad(self, message: str) -> NoReturn:
        raise fault("header_malformed", self.source.name, message)

    def read(self) -> SafetensorsHeader:
        nbytes = int.from_bytes(read_bytes(self.source, 0, 8, "the length of its header"), "little")
        if nbytes > JSON_NBYTES_MAX:
            raise fault("foreign_too_large", self.source.name, f"a header of {nbytes} bytes")
        if read_bytes(self.source, 8, min(nbytes, 1), "its header") != b"{":
            self.bad("its header does not begin with {")
        raw = parse_json(self.source, 8, nbytes)
        self.begin = 8 + nbytes
        metadata = raw.pop(_METADATA, {})
        if type(metadata) is not dict or any(type(text) is not str for text in metadata.values()):
            self.bad("its metadata are no strings")
        entries = {name: self.entry(name, value) for name, value in raw.items()}
        self.check_filled(entries)
        return SafetensorsHeader(entries, metadata)

    def entry(self, name: str, value: Any) -> HeaderEntry:
        shown = printable(name)
        if type(value) is not dict or set(value) != {"dtype", "shape", "data_offsets"}:
            self.bad(f"{shown} has no dtype, shape and data_offsets")
        kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if type(kind) is not str or not _is_sizes(shape) or len(shape) > NDIM_MAX:
            self.bad(f"{shown} has no dtype or shape")
        if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self.bad(f"{shown} has the data_offsets {shorten(offsets)}")
        begin, end = offsets
        if kind == _PACKED and shape and shape[-1] % 2 == 0:
            dtype: str | None = "float4_e2m1fn_x2"
            shape = [*shape[:-1], shape[-1] // 2]
        else:
            dtype = KINDS.get(kind) if kind != _PACKED else None
        if dtype is not None and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
            self.bad(f"{shown} has {end - begin} bytes for {shape} of {kind}")
        return HeaderEntry(name, dtype, kind, tuple(shape), self.begin + begin, end - begin)

    def check_filled(self, entries: dict[str, HeaderEntry]) -> None:
        """Refuse entries that overlap, leave holes, or do not end with the file."""
        at = self.begin
        for entry in sorted(entries.values(), key=lambda one: (one.byte_offset, one.nbytes)):
            if entry.byte_offset != at:
                what = "overlaps what lies before it" if entry.byte_offset < at else "leaves a hole"
                self.bad(f"{printable(entry.name)} {what}")
            at += entry.nbytes
        if at > self.source.nbytes:
            raise fault("foreign_truncated", self.source.name, f"ends before byte {at}")
        if at != self.source.nbytes:
            self.bad(f"{self.source.nbytes - at} bytes follow the last tensor")


def _is_text(value: Any) -> bool:
    """Whether all strings of a JSON value can be written."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _is_sizes(value: Any) -> bool:
    return type(value) is list and all(type(n) is int and 0 <= n <= INT63_MAX for n in value)
