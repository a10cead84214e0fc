"""The frame of a manifest: head, page table, seal (spec section 6), and the section names.

Pure: takes and gives bytes. Reading pages from a file is `storage/pages.py`.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from dsdformat.errors import Problem
from dsdformat.format.codecs import compress_piece
from dsdformat.format.digests import DIGEST_NBYTES, digest
from dsdformat.limits import BODY_NBYTES_MAX, HEAD_NBYTES_MAX, MANIFEST_LABEL, PAGE_NBYTES

__all__ = [
    "FEATURES",
    "FORMAT_VERSION",
    "HEAD_FIELDS",
    "MAGIC",
    "PAGE_FIELDS",
    "SECTIONS",
    "SECTION_FIELDS",
    "Head",
    "Section",
    "check_prefix",
    "emit_manifest",
    "parse_head",
]

MAGIC = bytes.fromhex("894453440D0A1A0A")
FORMAT_VERSION = (1, 0)
FEATURES = frozenset({"planes", "zstd"})
SECTIONS = ("body", "tensors", "shapes", "chunks", "boxes", "digests", "frames")

_FEATURE = re.compile(r"[a-z][a-z0-9-]{0,31}\Z")
_SECTION = re.compile(rb"[a-z][a-z0-9_-]{0,7}\Z")
_IGNORABLE = 1


@dataclass(frozen=True, slots=True)
class Field:
    """One row of a byte table of the spec."""

    name: str
    offset: int
    nbytes: int
    type: str


HEAD_FIELDS = (
    Field("magic", 0, 8, "bytes"),
    Field("major", 8, 2, "u16"),
    Field("minor", 10, 2, "u16"),
    Field("head_nbytes", 12, 4, "u32"),
    Field("manifest_nbytes", 16, 8, "u64"),
    Field("features_nbytes", 24, 4, "u32"),
    Field("section_count", 28, 4, "u32"),
    Field("page_count", 32, 4, "u32"),
    Field("reserved", 36, 4, "bytes"),
)
SECTION_FIELDS = (
    Field("name", 0, 8, "bytes"),
    Field("flags", 8, 4, "u32"),
    Field("pages", 12, 4, "u32"),
    Field("decoded_nbytes", 16, 8, "u64"),
)
PAGE_FIELDS = (
    Field("stored_nbytes", 0, 4, "u32"),
    Field("digest", 4, 32, "bytes"),
)


def _layout(fields: Sequence[Field]) -> struct.Struct:
    codes = {"u16": "H", "u32": "I", "u64": "Q"}
    return struct.Struct(
        "<" + "".join(codes.get(field.type, f"{field.nbytes}s") for field in fields)
    )


HEAD, SECTION, PAGE = _layout(HEAD_FIELDS), _layout(SECTION_FIELDS), _layout(PAGE_FIELDS)
FIXED_NBYTES = HEAD.size
_HEAD_NBYTES_MIN = FIXED_NBYTES + DIGEST_NBYTES


@dataclass(frozen=True, slots=True)
class Section:
    """A section's row: where its pages begin in the page table, and its decoded length."""

    name: str
    ignorable: bool
    first_page: int
    pages: int
    nbytes: int

    def page_nbytes(self, page: int) -> int:
        """Decoded length of the section's page with this number, from 0."""
        return min(PAGE_NBYTES, self.nbytes - page * PAGE_NBYTES)


@dataclass(frozen=True, slots=True)
class Head:
    """A head that was checked against the spec.

    Attributes:
        minor: Minor format version.
        root: The root digest.
        features: Names of required features.
        sections: By name; all of `SECTIONS` are there.
        page_offsets: Where each page begins in the file, and at the end where the last one ends.
        page_digests: 32 bytes per page.
    """

    minor: int
    root: bytes
    features: tuple[str, ...]
    sections: dict[str, Section]
    page_offsets: tuple[int, ...]
    page_digests: bytes


def check_prefix(prefix: bytes, file_nbytes: int) -> int:
    """Check the fixed part (R-6.1 to R-6.4) and return `head_nbytes`.

    Args:
        prefix: The first 40 bytes of the file, or all if it is shorter.
        file_nbytes: Length of the file.
    """
    if prefix[:8] != MAGIC:
        _fail("bad_magic", f"not a manifest: it begins with {prefix[:8].hex(' ') or 'nothing'}", 0)
    major, minor = prefix[8:10], prefix[10:12]
    if len(major) == 2 and int.from_bytes(major, "little") != FORMAT_VERSION[0]:
        _refuse_major(int.from_bytes(major, "little"), int.from_bytes(minor, "little"))
    if len(prefix) < FIXED_NBYTES:
        _fail("truncated", f"the manifest is cut short at {file_nbytes} bytes", file_nbytes)
    _, _, _, head_nbytes, manifest_nbytes, *_ = HEAD.unpack(prefix[:FIXED_NBYTES])
    if file_nbytes < max(head_nbytes, manifest_nbytes):
        message = (
            f"the manifest is cut short: {file_nbytes} of {max(head_nbytes, manifest_nbytes)} bytes"
        )
        _fail("truncated", message, file_nbytes)
    if not _HEAD_NBYTES_MIN <= head_nbytes <= HEAD_NBYTES_MAX:
        _fail("bad_head", f"head_nbytes is {head_nbytes}, expected 72 to {HEAD_NBYTES_MAX}", 12)
    return int(head_nbytes)


def parse_head(head: bytes, file_nbytes: int, expected_root: bytes | None = None) -> Head:
    """Check the head (R-6.5 to R-6.11, R-7.1, R-7.2, R-17.1) and return what it says.

    Args:
        head: The first `head_nbytes` bytes of the file.
        file_nbytes: Length of the file.
        expected_root: The root digest that it must have, or None.
    """
    root = head[-DIGEST_NBYTES:]
    actual = digest(memoryview(head)[:-DIGEST_NBYTES])
    _, _, minor, _, manifest_nbytes, features_nbytes, section_count, page_count, reserved = (
        HEAD.unpack(head[:FIXED_NBYTES])
    )
    if actual != root:
        raise Problem(
            "seal_mismatch",
            f"the head of {MANIFEST_LABEL} was changed: "
            f"expected blake3 {root.hex()}, got {actual.hex()}",
            where=MANIFEST_LABEL,
            byte_offset=0,
            byte_end=len(head),
            expected=root.hex(),
            actual=actual.hex(),
        ).error()
    tables = FIXED_NBYTES + SECTION.size * section_count
    names_at = tables + PAGE.size * page_count
    if names_at + features_nbytes + DIGEST_NBYTES != len(head):
        _fail("bad_head", "the head's counts do not add up to its length", 24)
    if reserved != bytes(4):
        _fail("bad_head", "the reserved bytes are not zero", 36)
    rows = _parse_sections(head[FIXED_NBYTES:tables], page_count)
    pages = list(PAGE.iter_unpack(memoryview(head)[tables:names_at]))
    stored = [nbytes for nbytes, _ in pages]
    offsets = list(itertools.accumulate(stored, initial=len(head)))
    if offsets[-1] != manifest_nbytes:
        _fail("bad_head", f"manifest_nbytes is {manifest_nbytes}, pages end at {offsets[-1]}", 16)
    if file_nbytes > manifest_nbytes:
        _fail("trailing_bytes", f"{file_nbytes - manifest_nbytes} bytes follow", manifest_nbytes)
    _check_page_lengths(rows, stored)
    features = _parse_features(head[names_at : names_at + features_nbytes], names_at)
    if expected_root is not None and expected_root != root:
        raise Problem(
            "digest_mismatch",
            f"another checkpoint: expected root digest {expected_root.hex()}, got {root.hex()}",
            where=MANIFEST_LABEL,
            expected=expected_root.hex(),
            actual=root.hex(),
        ).error()
    sections = _check_sections(rows)
    return Head(
        minor=minor,
        root=root,
        features=features,
        sections=sections,
        page_offsets=tuple(offsets),
        page_digests=b"".join(row for _, row in pages),
    )


def emit_manifest(
    sections: Sequence[tuple[str, Iterable[bytes]]],
    features: Iterable[str],
    *,
    compress: bool,
) -> tuple[bytes, list[bytes], bytes]:
    """Make a manifest from its decoded sections.

    Args:
        sections: Name and content, the content in pieces of any length.
        features: Required features, but for `zstd`, which is added if a page is compressed.
        compress: Whether to store pages compressed where that is shorter.

    Returns:
        The head with its seal, the stored pages, and the root digest.
    """
    rows: list[bytes] = []
    table: list[bytes] = []
    stored: list[bytes] = []
    zstd = False
    for name, pieces in sections:
        nbytes, count = 0, 0
        for page in _cut(pieces):
            packed = compress_piece(page) if compress else page
            zstd = zstd or len(packed) < len(page)
            stored.append(packed)
            table.append(PAGE.pack(len(packed), digest(packed)))
            nbytes, count = nbytes + len(page), count + 1
        rows.append(SECTION.pack(name.encode(), 0, count, nbytes))
    names = sorted({*features, "zstd"} if zstd else set(features))
    text = b"".join(name.encode() + b"\n" for name in names)
    inner = b"".join(rows) + b"".join(table) + text
    head_nbytes = FIXED_NBYTES + len(inner) + DIGEST_NBYTES
    total = head_nbytes + sum(map(len, stored))
    counts = (len(text), len(rows), len(table), bytes(4))
    head = HEAD.pack(MAGIC, *FORMAT_VERSION, head_nbytes, total, *counts) + inner
    root = digest(head)
    return head + root, stored, root


def _cut(pieces: Iterable[bytes]) -> Iterable[bytes]:
    """Cut what lies in pieces into pages; a byte is copied once, or twice between two pieces."""
    rest = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        if rest:
            missing = PAGE_NBYTES - len(rest)
            rest += view[:missing]
            view = view[missing:]
            if len(rest) < PAGE_NBYTES:
                continue
            yield bytes(rest)
            rest.clear()
        whole = len(view) - len(view) % PAGE_NBYTES
        for at in range(0, whole, PAGE_NBYTES):
            yield bytes(view[at : at + PAGE_NBYTES])
        rest += view[whole:]
    if rest:
        yield bytes(rest)


def _parse_sections(table: bytes, page_count: int) -> list[tuple[bytes, int, Section]]:
    rows = []
    first = 0
    for raw, flags, pages, nbytes in SECTION.iter_unpack(table):
        if pages != -(-nbytes // PAGE_NBYTES):
            _fail("bad_head", f"a section of {nbytes} bytes has {pages} pages", FIXED_NBYTES)
        name = raw.rstrip(b"\0").decode("ascii", "replace")
        rows.append((raw, flags, Section(name, bool(flags & _IGNORABLE), first, pages, nbytes)))
        first += pages
    if first != page_count:
        _fail("bad_head", f"sections have {first} pages, page_count is {page_count}", 32)
    return rows


def _check_page_lengths(rows: list[tuple[bytes, int, Section]], stored: list[int]) -> None:
    for _, _, section in rows:
        for page in range(section.pages):
            nbytes = stored[section.first_page + page]
            if not 0 < nbytes <= section.page_nbytes(page):
                _fail("bad_head", f"page {page} of {section.name} is stored in {nbytes} bytes", 0)


def _parse_features(text: bytes, at: int) -> tuple[str, ...]:
    lines = text.split(b"\n")
    names = [line.decode("latin-1") for line in lines[:-1]]
    if lines[-1] or any(not _FEATURE.match(name) for name in names):
        _fail("bad_head", "a feature name is malformed", at)
    if any(a >= b for a, b in zip(names, names[1:], strict=False)):
        _fail("bad_head", "feature names are not in ascending order", at)
    unknown = [name for name in names if name not in FEATURES]
    if unknown:
        _fail(
            "unknown_feature",
            f"the checkpoint needs features that this reader does not know: {', '.join(unknown)}",
            at,
            "install a newer version of dsdformat",
        )
    return tuple(names)


def _check_sections(rows: list[tuple[bytes, int, Section]]) -> dict[str, Section]:
    at = FIXED_NBYTES
    names = [raw for raw, _, _ in rows]
    for index, (raw, flags, section) in enumerate(rows):
        known = index < len(SECTIONS)
        if flags & ~_IGNORABLE or (known and flags):
            _fail("bad_sections", f"section {section.name!r} has flags {flags:#x}", at)
        if not known and not _SECTION.match(raw.rstrip(b"\0")):
            _fail("bad_sections", f"{raw!r} is not the name of a section", at)
        if known and raw != SECTIONS[index].encode().ljust(8, b"\0"):
            _fail("bad_sections", f"section {index} is {raw!r}, not {SECTIONS[index]!r}", at)
    if len(rows) < len(SECTIONS) or len(set(names)) < len(names):
        _fail("bad_sections", "sections are missing or repeated", at)
    for _, _, section in rows[len(SECTIONS) :]:
        if not section.ignorable:
            _fail("unknown_section", f"section {section.name!r} is not known", at)
    if rows[0][2].nbytes > BODY_NBYTES_MAX:
        _fail("limit_exceeded", f"the body has {rows[0][2].nbytes} bytes, at most 1 GiB", at)
    return {section.name: section for _, _, section in rows}


def _refuse_major(major: int, minor: int) -> NoReturn:
    _fail(
        "unknown_major",
        f"made by format {major}.{minor}, this reads {FORMAT_VERSION[0]}.x",
        8,
        "install a version of dsdformat that reads it",
    )


def _fail(code: str, message: str, byte_offset: int, hint: str | None = None) -> NoReturn:
    raise Problem(
        code,
        f"{message} ({MANIFEST_LABEL}, byte {byte_offset})",
        where=MANIFEST_LABEL,
        byte_offset=byte_offset,
        hint=hint,
    ).error()
