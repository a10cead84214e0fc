"""Write a zip file as torch writes them: entries stored, in order, each at an aligned place.

The other direction of `archive`. Nothing is sought back: lengths are known before, and the
checksum of an entry follows its data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsdformat.convert.archive import MAGIC

__all__ = ["ALIGNMENT", "ArchiveWriter"]

ALIGNMENT = 64

_FLAGS = 0x808  # names in UTF-8, and a descriptor behind the data
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_WIDE = _FULL32  # from here on a number is in the zip64 field, and all ones in its place
_ZIP64, _PADDING = 1, 0x4246  # the latter is "FB", as torch calls it
_VERSION = 45  # zip64
_NUL_DAY = 0x21  # 1 January 1980, the first day that there is


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    offset: int
    nbytes: int
    crc: int


class ArchiveWriter:
    """A zip file that is being written.

    Attributes:
        nbytes: How much was written.
    """

    def __init__(self, write: Callable[[Any], Any]) -> None:
        """Begin.

        Args:
            write: Takes the bytes of the file, in order.
        """
        self.nbytes = 0
        self._sink = write
        self._entries: list[_Entry] = []

    def add(self, name: str, nbytes: int, blocks: Iterable[Any]) -> None:
        """Write an entry.

        Args:
            name: Plain relative path.
            nbytes: How many bytes it has.
            blocks: Its bytes, in pieces of any size: exactly so many.
        """
        encoded, offset = name.encode(), self.nbytes
        self._write(_header(encoded, offset, nbytes))
        begin, crc = self.nbytes, 0
        for block in blocks:
            crc = zlib.crc32(block, crc)
            self._write(block)
        if self.nbytes - begin != nbytes:
            raise AssertionError(f"{name} has {self.nbytes - begin} bytes, not {nbytes}")
        form = "<4s3I" if nbytes < _WIDE else "<4sI2Q"
        self._write(struct.pack(form, b"PK\x07\x08", crc, nbytes, nbytes))
        self._entries.append(_Entry(encoded, offset, nbytes, crc))

    def leave(self, name: str, nbytes: int) -> None:
        """Leave room for an entry that another process writes; its checksum is told to `end`."""
        encoded, offset = name.encode(), self.nbytes
        descriptor = 16 if nbytes < _WIDE else 24
        self.nbytes += len(_header(encoded, offset, nbytes)) + nbytes + descriptor
        self._entries.append(_Entry(encoded, offset, nbytes, 0))

    @property
    def checksums(self) -> list[int]:
        """Of the entries, in their order; 0 for those that were left."""
        return [entry.crc for entry in self._entries]

    def end(self, checksums: Sequence[int] = ()) -> None:
        """Write the directory, which ends the file.

        Args:
            checksums: Of all entries, if some were left.
        """
        if checksums:
            rows = zip(self._entries, checksums, strict=True)
            self._entries = [replace(entry, crc=crc) for entry, crc in rows]
        start = self.nbytes
        for entry in self._entries:
            self._write(_listed(entry))
        count, length, end = len(self._entries), self.nbytes - start, self.nbytes
        if count >= _FULL16 or max(start, length) >= _WIDE:
            numbers = (count, count, length, start)
            self._write(struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, *numbers))
            self._write(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        count = min(count, _FULL16)
        numbers = (count, count, _narrow(length), _narrow(start))
        self._write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, *numbers, 0))

    def _write(self, data: Any) -> None:
        self._sink(data)
        self.nbytes += len(data)


def _header(name: bytes, offset: int, nbytes: int) -> bytes:
    """Return a local header, with so much padding that the data begin at an aligned place."""
    wide = nbytes >= _WIDE
    extra = struct.pack("<2H2Q", _ZIP64, 16, nbytes, nbytes) if wide else b""
    length = _FULL32 if wide else 0
    gap = -(offset + 30 + len(name) + len(extra) + 4) % ALIGNMENT
    extra += struct.pack("<2H", _PADDING, gap) + b"Z" * gap
    numbers = (_VERSION if wide else 0, _FLAGS, 0, 0, _NUL_DAY, 0, length, length)
    return struct.pack("<4s5H3I2H", MAGIC, *numbers, len(name), len(extra)) + name + extra


def _listed(entry: _Entry) -> bytes:
    wide = [number for number in (entry.nbytes, entry.nbytes, entry.offset) if number >= _WIDE]
    extra = b""
    if wide:
        extra = struct.pack(f"<2H{len(wide)}Q", _ZIP64, 8 * len(wide), *wide)
    nbytes, offset = _narrow(entry.nbytes), _narrow(entry.offset)
    version = _VERSION if wide else 0
    numbers = (version, version, _FLAGS, 0, 0, _NUL_DAY, entry.crc, nbytes, nbytes)
    rest = (len(entry.name), len(extra), 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *numbers, *rest) + entry.name + extra


def _narrow(number: int) -> int:
    return number if number < _WIDE else _FULL32
