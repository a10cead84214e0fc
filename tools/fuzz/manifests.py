"""Changes of manifests: of the body's values, of columns, of the head; sealed anew.

A manifest is cut into its decoded sections, some are changed, and the pages, the page table, the
counts and the seal are made again, so that the change is all that is wrong.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

from vectors.builder import PAGE_NBYTES, add_up, make_pages, pack_head
from vectors.declare import Head, Section, SectionRow
from vectors.wire import digest

from dsdformat.errors import DsdError
from dsdformat.format.codecs import compress_piece, decompress_piece
from dsdformat.format.frame import MAGIC
from fuzz.bytewise import NBYTES_MAX, NUMBERS, mutated
from fuzz.values import changed_value, emitted, mutated_values, parsed

__all__ = ["Cut", "cut", "joined", "mutated_manifest"]

_FIXED = struct.Struct("<8sHHIQIII4s")
_ROW = struct.Struct("<8sIIQ")
_NAMES = (b"body", b"tensors", b"shapes", b"chunks", b"boxes", b"digests", b"frames")
_FEATURES = (b"", b"zstd\n", b"planes\n", b"planes\nzstd\n", b"zstd\nzstd\n", b"later\n", b"zstd")
_WIDTH = {b"tensors": 4, b"shapes": 8, b"chunks": 4, b"boxes": 8, b"digests": 32, b"frames": 4}


class Cut:
    """A manifest in its parts: minor version, features, and decoded sections."""

    def __init__(self, minor: int, features: bytes, sections: list[Section]) -> None:
        self.minor = minor
        self.features = features
        self.sections = sections


def cut(manifest: bytes) -> Cut | None:
    """Cut a manifest into its parts; None if its head does not say where they are."""
    if len(manifest) < _FIXED.size or manifest[:8] != MAGIC:
        return None
    _, _, minor, head_nbytes, _, features_nbytes, rows, pages, _ = _FIXED.unpack_from(manifest)
    tables = _FIXED.size + _ROW.size * rows
    names = tables + 36 * pages
    if names + features_nbytes + 32 != head_nbytes or head_nbytes > len(manifest):
        return None
    stored = [manifest[tables + 36 * page :][:4] for page in range(pages)]
    lengths = iter([int.from_bytes(one, "little") for one in stored])
    at, sections = head_nbytes, []
    for name, flags, count, nbytes in _ROW.iter_unpack(manifest[_FIXED.size : tables]):
        data = b""
        for page in range(count):
            length = next(lengths, 0)
            if at + length > len(manifest) or not length:
                break
            wanted = min(PAGE_NBYTES, nbytes - page * PAGE_NBYTES)
            data += _decoded(manifest[at : at + length], wanted)
            at += length
        sections.append(Section(name.rstrip(b"\0"), data, flags))
    return Cut(minor, manifest[names : names + features_nbytes], sections)


def _decoded(stored: bytes, nbytes: int) -> bytes:
    try:
        return decompress_piece(stored, nbytes) if 0 < nbytes <= PAGE_NBYTES else stored
    except DsdError:
        return stored


def joined(parts: Cut, *, compress: bool = False) -> bytes:
    """A manifest of its parts, with right lengths, digests and seal."""
    page = compress_piece if compress else bytes
    pages = [make_pages(section.data, page) for section in parts.sections]
    rows = [
        SectionRow(one.name[:8], one.flags, -(-len(one.data) // PAGE_NBYTES), len(one.data))
        for one in parts.sections
    ]
    flat = [piece for section in pages for piece in section]
    head = Head(rows, [(len(one.stored), one.digest) for one in flat], parts.features)
    head.minor = parts.minor
    data = pack_head(add_up(head))
    return data + digest(data) + b"".join(one.stored for one in flat)


def mutated_manifest(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A manifest with a change of its bytes, its head, its body or its columns, sealed anew."""
    kind = rng.random()
    if kind < 0.04:
        return mutated(data, rng, others)
    if kind < 0.14:
        return _head_changed(data, rng)
    parts = cut(data)
    if parts is None or not parts.sections:
        return _head_changed(data, rng)
    donor = _donor(others, rng) if rng.random() < 0.2 else None
    for _ in range(rng.choice((1, 1, 2))):
        _change(parts, rng, donor)
    compress = rng.random() < 0.1
    if compress and b"zstd" not in parts.features:
        parts.features += b"zstd\n"
    return joined(parts, compress=compress)[: 2 * NBYTES_MAX]


def _donor(others: Sequence[bytes], rng: random.Random) -> Cut | None:
    parts = cut(rng.choice(others)) if others else None
    return parts if parts is not None and parts.sections else None


def _head_changed(data: bytes, rng: random.Random) -> bytes:
    """The manifest with bytes of its head changed, and sealed where the head then ends."""
    nbytes = int.from_bytes(data[12:16], "little")
    if not 72 <= nbytes <= len(data):
        return mutated(data, rng)
    head = data[: nbytes - 32]
    start = rng.choice((0, 8, 16, 40))
    changed = head[:start] + mutated(head[start:], rng)
    if rng.random() < 0.8:  # then the lengths are right, and it is sealed where it ends
        total = len(changed) + 32 + len(data) - nbytes
        changed = changed[:12] + struct.pack("<IQ", len(changed) + 32, total) + changed[24:]
    return changed + digest(changed) + data[nbytes:]


def _change(parts: Cut, rng: random.Random, donor: Cut | None) -> None:
    kind = rng.random()
    sections = parts.sections
    index = int(rng.random() * len(sections))
    if kind < 0.4:
        _change_body(sections[0], rng, donor)
    elif kind < 0.75:
        _change_numbers(sections[index], rng)
    elif kind < 0.83:
        sections[index].data = mutated(sections[index].data, rng)
    elif kind < 0.88 and donor is not None:
        sections[index].data = donor.sections[index % len(donor.sections)].data
    elif kind < 0.92:
        parts.features = rng.choice(_FEATURES)
    elif kind < 0.95:
        _change_sections(sections, rng)
    else:
        _change_rows(sections, rng)


def _change_body(body: Section, rng: random.Random, donor: Cut | None) -> None:
    other = parsed(donor.sections[0].data) if donor else None
    value = parsed(body.data) if rng.random() < 0.9 else None
    if value is None:
        body.data = mutated_values(body.data, rng)
        return
    if isinstance(value, dict) and "tree" in value and rng.random() < 0.5:
        value["tree"] = changed_value(value["tree"], rng, other)
    elif isinstance(value, dict) and rng.random() < 0.8 and value:
        key = rng.choice(list(value))  # so that a large tree does not take all changes
        value[key] = changed_value(value[key], rng)
    else:
        value = changed_value(value, rng, other)
    body.data = emitted(value)


def _change_numbers(section: Section, rng: random.Random) -> None:
    """Set numbers of a column; its length stays, so that they are looked at."""
    data = bytearray(section.data)
    width = rng.choice((_WIDTH.get(section.name, 4), 4, 8))
    places = len(data) // width
    for _ in range(rng.choice((1, 1, 2, 3)) if places else 0):
        at = width * int(rng.random() * places)
        old = int.from_bytes(data[at : at + width], "little")
        kind = rng.random()
        if kind < 0.4:
            new = old + rng.choice((-8, -4, -1, 1, 4, 8))
        elif kind < 0.7:
            start = width * int(rng.random() * places)
            new = int.from_bytes(data[start : start + width], "little")
        else:
            new = rng.choice(NUMBERS)
        data[at : at + width] = (new % 256**width).to_bytes(width, "little")
    section.data = bytes(data)


def _change_sections(sections: list[Section], rng: random.Random) -> None:
    kind = rng.randrange(4)
    index = int(rng.random() * len(sections))
    if kind == 0:
        sections[index].flags = rng.choice((0, 1, 2, 3, 1 << 31))
    elif kind == 1:
        name = rng.choice((b"extra", b"body", b"later-1", b"Extra", b"", b"abcdefgh", b"a\0b"))
        sections.append(Section(name, rng.randbytes(rng.randrange(40)), rng.choice((1, 1, 0, 2))))
    elif kind == 2 and len(sections) > 1:
        del sections[index]
    else:
        sections[index].name = mutated(sections[index].name, rng)[:8]


def _change_rows(sections: list[Section], rng: random.Random) -> None:
    """Add or remove a row of a table, in all columns of its section."""
    section = sections[int(rng.random() * len(sections))]
    width = _WIDTH.get(section.name, 0)
    columns = {b"tensors": (4, 4, 4, 4), b"chunks": (4, 4, 8, 8, 8), b"frames": (4, 32)}
    widths = columns.get(section.name, (width,) if width else ())
    count = len(section.data) // sum(widths) if widths else 0
    if not count:
        return
    row, add, at, out = int(rng.random() * count), rng.random() < 0.5, 0, b""
    for one in widths:
        column = section.data[at : at + one * count]
        at += one * count
        piece = column[row * one : (row + 1) * one]
        out += column[: row * one] + piece * (2 * add) + column[(row + 1) * one :]
    section.data = out
