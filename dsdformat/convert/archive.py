"""Zip files, read strictly: what the directory lists is all that the file holds.

Accepts what `torch.save` and numpy write, and what other zip writers make of the same files.
Entries lie one behind the other from the first byte to the directory, and the file ends with the
directory's end, so no other reader finds other entries in it. Nothing is inflated here.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, Window, read_bytes, read_exactly
from dsdformat.errors import printable
from dsdformat.limits import ARCHIVE_DIRECTORY_NBYTES_MAX, MIB

__all__ = [
    "DEFLATED",
    "MAGIC",
    "STORED",
    "Archive",
    "Entry",
    "find_name_fault",
    "list_names",
    "read_archive",
]

MAGIC = b"PK\x03\x04"
STORED, DEFLATED = 0, 8

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")

_DESCRIPTOR, _UTF8 = 0x8, 0x800
_FLAGS = _DESCRIPTOR | _UTF8 | 0x6  # and how hard the compressor tried
_DESCRIPTOR_NBYTES_MAX = 24
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_ZIP64 = 1
_DRIVE = re.compile(r"[A-Za-z]:")
_NAME_MAX = 4096


@dataclass(slots=True)
class Entry:
    """One entry, as the directory has it.

    Attributes:
        name: Plain relative path.
        header_offset: Where its local header begins.
        byte_offset: Where its data begin.
        stored_nbytes: Length of the data in the file.
        nbytes: Length of the data, decompressed.
        method: `STORED` or `DEFLATED`.
        crc: CRC-32 of the decompressed data.
        flags: As in the file.
    """

    name: str
    header_offset: int
    byte_offset: int
    stored_nbytes: int
    nbytes: int
    method: int
    crc: int
    flags: int

    @property
    def end(self) -> int:
        """The place behind the data."""
        return self.byte_offset + self.stored_nbytes


class Archive:
    """A zip file.

    Attributes:
        source: Its bytes.
        entries: What it holds, without folders, by name, in the order of the file.
    """

    def __init__(self, source: Bytes, entries: dict[str, Entry]) -> None:
        self.source = source
        self.entries = entries

    def data(self, entry: Entry) -> Window:
        """Return the data of a stored entry.

        Raises:
            ConvertError: `archive_compressed`: it is not stored.
        """
        if entry.method != STORED:
            raise fault(
                "archive_compressed",
                self.source.name,
                f"{printable(entry.name)} is compressed",
                hint="unpack it, and pack it again without compression (zip -0)",
            )
        return Window(self.source, entry.byte_offset, entry.nbytes, printable(entry.name))

    def check_crc(self, entry: Entry) -> int:
        """Compare the data of a stored entry with its CRC-32, if it has one (torch can do without).

        Returns:
            How many bytes were compared.

        Raises:
            ConvertError: `foreign_checksum`.

        Memory: 4 MiB.
        """
        data, crc = self.data(entry), 0
        if not entry.crc:
            return 0
        buffer = memoryview(bytearray(min(4 * MIB, data.nbytes)))
        for at in range(0, data.nbytes, 4 * MIB):
            piece = buffer[: min(4 * MIB, data.nbytes - at)]
            read_exactly(data, at, piece)
            crc = zlib.crc32(piece, crc)
        if crc != entry.crc:
            raise fault(
                "foreign_checksum",
                self.source.name,
                f"{printable(entry.name)} has CRC-32 {crc:08x}, expected {entry.crc:08x}",
                hint="the data are damaged",
            )
        return data.nbytes


def read_archive(source: Bytes) -> Archive:
    """Read the directory of a zip file, and compare it with the file.

    Raises:
        ConvertError: `archive_malformed`, `archive_overlap`, `archive_duplicate`, `archive_name`,
            `archive_compressed` (an encrypted entry, or an unknown method) or `foreign_too_large`.

    Memory: the directory, and 500 bytes per entry.
    """
    return _Reader(source).archive()


def list_names(source: Bytes) -> list[str]:
    """Return the names in the directory of a zip file, which is not compared with the file.

    Raises:
        ConvertError: as `read_archive`.

    Memory: the directory.
    """
    return [entry.name for entry in _Reader(source).directory()[0]]


def find_name_fault(name: str) -> str | None:
    """Say why an entry cannot have a name, if that is so."""
    parts = name.removesuffix("/").split("/")
    plain = name.isprintable() and "\\" not in name and len(name.encode()) <= _NAME_MAX
    if plain and not _DRIVE.match(name) and not any(part in ("", ".", "..") for part in parts):
        return None
    return "is no plain relative path"


class _Reader:
    def __init__(self, source: Bytes) -> None:
        self.source = source

    def bad(self, message: str, code: str = "archive_malformed") -> NoReturn:
        raise fault(
            code, self.source.name, printable(message), hint="the zip file is damaged, or forged"
        )

    def directory(self) -> tuple[list[Entry], int]:
        """Return what the directory lists, and where it begins."""
        count, start, end = self.find_directory()
        data = read_bytes(self.source, start, end - start, "the directory of the zip file")
        return list(self.listed(data, count)), start

    def archive(self) -> Archive:
        found, start = self.directory()
        entries = sorted(found, key=lambda entry: entry.header_offset)
        placed: dict[str, Entry] = {}
        names = set()
        before: Entry | None = None
        for entry in entries:
            if entry.name in names:
                self.bad(f"{entry.name} is there twice", "archive_duplicate")
            names.add(entry.name)
            before = self.placed(entry, before)
            if before.end > start:
                self.bad(f"{entry.name} reaches into the directory", "archive_overlap")
            if not entry.name.endswith("/"):
                placed[entry.name] = before
        self.read_behind(before, start, 0, "the directory")
        return Archive(self.source, placed)

    def find_directory(self) -> tuple[int, int, int]:
        """Return how many entries there are, and where the directory begins and ends."""
        nbytes = self.source.nbytes
        if nbytes < _END.size:
            self.bad("too short for a zip file")
        end = nbytes - _END.size
        fields = _END.unpack(read_bytes(self.source, end, _END.size))
        magic, disk, first_disk, here, count, length, start, comment = fields
        if magic != b"PK\x05\x06" or comment:
            self.bad("does not end with the end of a zip directory")
        if (disk, first_disk) not in ((0, 0), (_FULL16, _FULL16)) or here != count:
            self.bad("is one of several disks")
        numbers = (count, length, start)
        found = self.find_end64(end)
        if found is None:
            if _FULL16 in (count, disk) or _FULL32 in (length, start):
                self.bad("has no zip64 end of directory, and needs one")
        else:
            full = zip(numbers, found[:3], (_FULL16, _FULL32, _FULL32), strict=True)
            if any(small not in (large, limit) for small, large, limit in full):
                self.bad("has two ends of directory that differ")
            numbers, end = found[:3], found[3]
        count, length, start = numbers
        if start + length != end:
            self.bad("the directory does not lie before its end")
        if length > ARCHIVE_DIRECTORY_NBYTES_MAX or count > length // _CENTRAL.size:
            code = "foreign_too_large" if count <= length // _CENTRAL.size else "archive_malformed"
            self.bad(f"a directory of {count} entries in {length} bytes", code)
        return count, start, end

    def find_end64(self, end: int) -> tuple[int, int, int, int] | None:
        """Return count, length and start of the directory, and where its zip64 end lies."""
        at = end - _LOCATOR.size
        if at < _END64.size:
            return None
        locator = _LOCATOR.unpack(read_bytes(self.source, at, _LOCATOR.size))
        if locator[0] != b"PK\x06\x07":
            return None
        _, disk, offset, disks = locator
        if disk or disks != 1 or offset + _END64.size != at:
            self.bad("the zip64 end of directory is not where it is said to be")
        fields = _END64.unpack(read_bytes(self.source, offset, _END64.size))
        magic, length, _, _, disk, first_disk, here, count, nbytes, start = fields
        if magic != b"PK\x06\x06" or length != _END64.size - 12 or disk or first_disk:
            self.bad("the zip64 end of directory is malformed")
        if here != count:
            self.bad("is one of several disks")
        return count, nbytes, start, offset

    def listed(self, data: bytes, count: int) -> Iterator[Entry]:
        """Yield the entries of the directory; where their data begin is not known yet."""
        at = 0
        for _ in range(count):
            if at + _CENTRAL.size > len(data):
                self.bad("the directory is shorter than its number of entries")
            fields = _CENTRAL.unpack_from(data, at)
            magic, _, _, flags, method, _, _, crc, stored, nbytes = fields[:10]
            name_nbytes, extra_nbytes, comment, disk, _, _, offset = fields[10:]
            at += _CENTRAL.size
            end = at + name_nbytes + extra_nbytes
            if magic != b"PK\x01\x02" or comment or end > len(data):
                self.bad("an entry of the directory is malformed")
            name = self.name(data[at : at + name_nbytes])
            extra = data[at + name_nbytes : end]
            nbytes, stored, offset = self.widened(extra, (nbytes, stored, offset), name)
            if disk not in (0, _FULL16):
                self.bad(f"{name} lies on another disk")
            self.check_method(name, flags, method, stored, nbytes)
            yield Entry(name, offset, 0, stored, nbytes, method, crc, flags)
            at = end
        if at != len(data):
            self.bad("the directory is longer than its entries")

    def name(self, data: bytes) -> str:
        try:
            name = data.decode("utf-8")
        except UnicodeDecodeError:
            self.bad(f"the name {printable(ascii(data))} is not UTF-8", "archive_name")
        fault = find_name_fault(name)
        if fault is not None:
            self.bad(f"{printable(ascii(name))} {fault}", "archive_name")
        return name

    def check_method(self, name: str, flags: int, method: int, stored: int, nbytes: int) -> None:
        if flags & ~_FLAGS or method not in (STORED, DEFLATED):
            what = "encrypted" if flags & 1 else f"packed by method {method}, flags {flags:#x}"
            self.bad(f"{name} is {what}", "archive_compressed")
        if method == STORED and stored != nbytes:
            self.bad(f"{name} is stored, and has two lengths: {stored}, {nbytes}")
        if name.endswith("/") and nbytes:
            self.bad(f"the folder {name} has data")

    def widened(self, extra: bytes, fields: tuple[int, ...], name: str) -> tuple[int, ...]:
        """Return fields of 32 bits with those in place that only fit into the zip64 extra field."""
        if _FULL32 not in fields:
            return fields
        wide = iter(self.zip64(extra, name))
        try:
            return tuple(next(wide) if field == _FULL32 else field for field in fields)
        except (StopIteration, RuntimeError):
            self.bad(f"{name} lacks a length in its zip64 field")

    def zip64(self, extra: bytes, name: str) -> list[int]:
        at = 0
        while at + 4 <= len(extra):
            kind, nbytes = struct.unpack_from("<2H", extra, at)
            at += 4
            if at + nbytes > len(extra):
                self.bad(f"an extra field of {name} is cut short")
            if kind == _ZIP64:
                words = struct.iter_unpack("<Q", extra[at : at + (nbytes & ~7)])
                return [value for (value,) in words]
            at += nbytes
        return []

    def placed(self, entry: Entry, before: Entry | None) -> Entry:
        """Compare an entry with its local header, and find where its data begin."""
        encoded = entry.name.encode()
        nbytes = _LOCAL.size + len(encoded)
        head = self.read_behind(before, entry.header_offset, nbytes, entry.name)
        fields = _LOCAL.unpack_from(head)
        magic, _, flags, method, _, _, crc, stored, length, name_nbytes, extra_nbytes = fields
        if magic != MAGIC or name_nbytes != len(encoded) or head[_LOCAL.size :] != encoded:
            self.bad(f"the directory says that {entry.name} is where something else is")
        if (flags, method) != (entry.flags, entry.method):
            self.bad(f"{entry.name} has other flags in its header than in the directory")
        begin = entry.header_offset + nbytes
        if _FULL32 in (stored, length):
            extra = read_bytes(self.source, begin, extra_nbytes, "a header in the zip file")
            length, stored = self.widened(extra, (length, stored), entry.name)
        said, lengths = (crc, stored, length), (entry.stored_nbytes, entry.nbytes)
        later = flags & _DESCRIPTOR and said in ((0, 0, 0), (0, *lengths))
        if said != (entry.crc, *lengths) and not later:
            self.bad(f"{entry.name} has other lengths in its header than in the directory")
        entry.byte_offset = begin + extra_nbytes
        return entry

    def read_behind(self, before: Entry | None, begin: int, nbytes: int, name: str) -> bytes:
        """Read what follows an entry, and refuse bytes between that are not its descriptor."""
        at = before.end if before else 0
        if begin < at:
            self.bad(f"{name} overlaps what lies before it", "archive_overlap")
        gap = begin - at
        if gap > _DESCRIPTOR_NBYTES_MAX:
            self.bad(f"{gap} bytes before {name} belong to nothing", "archive_overlap")
        data = read_bytes(self.source, at, gap + nbytes, "a header in the zip file")
        if gap and not (before and data[:gap] in _descriptors(before)):
            self.bad(f"{gap} bytes before {name} belong to nothing", "archive_overlap")
        return data[gap:]


def _descriptors(entry: Entry) -> Iterator[bytes]:
    """List what may stand behind the data of an entry that announces it."""
    if not entry.flags & _DESCRIPTOR:
        return
    for form in ("<I2I", "<I2Q"):
        if form.endswith("Q") or max(entry.stored_nbytes, entry.nbytes) < _FULL32:
            plain = struct.pack(form, entry.crc, entry.stored_nbytes, entry.nbytes)
            yield plain
            yield b"PK\x07\x08" + plain
