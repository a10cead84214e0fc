"""`.npz` files of numpy: a zip of `.npy` files, stored or deflated. Arrays of numbers alone.

A deflated array is inflated as it is read, in order, with a bounded buffer, and never beyond the
length that its own header gives.
"""

from __future__ import annotations

import math
import re
import threading
import zlib
from typing import Any, NoReturn

from dsdformat.boxes import whole
from dsdformat.convert.archive import DEFLATED, Archive, Entry, read_archive
from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, Window, read_bytes
from dsdformat.convert.numpy_names import parse_typestr
from dsdformat.convert.pickles.resolving import Unknown
from dsdformat.convert.tensor import ForeignTensor, Part, View, packed_strides
from dsdformat.errors import printable
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import INT63_MAX, KIB, NDIM_MAX

__all__ = ["NPY_SUFFIX", "read_npz", "verify_npz"]

NPY_SUFFIX = ".npy"
_MAGIC = b"\x93NUMPY"
_HEADER_NBYTES_MAX = 64 * KIB
_HEADER = re.compile(
    r"\{'descr': (?P<descr>'[^'\\]*'|\[.*\]), 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>[0-9, ]*)\), \} *\n\Z"
)
_PIECE = 256 * KIB


def read_npz(source: Bytes) -> dict[str, Any]:
    """Return the arrays of a file by name.

    Raises:
        ConvertError: what `read_archive` raises; `header_malformed` or `unknown_kind`.

    Memory: the directory of the zip file.
    """
    archive = read_archive(source)
    tree = {}
    for name, entry in archive.entries.items():
        if not name.endswith(NPY_SUFFIX):
            raise fault("unknown_kind", source.name, f"{printable(name)} is no .npy file")
        tree[name.removesuffix(NPY_SUFFIX)] = _array(archive, entry)
    return tree


def verify_npz(source: Bytes, part: int = 0, of: int = 1) -> int:
    """Compare all arrays, or one part of so many, with their CRC-32.

    Returns:
        How many bytes were compared.

    Raises:
        ConvertError: `foreign_checksum`, or `archive_malformed` for what does not inflate.

    Memory: 4 MiB.
    """
    archive, compared = read_archive(source), 0
    for entry in list(archive.entries.values())[part::of]:
        if entry.method != DEFLATED:
            compared += archive.check_crc(entry)
            continue
        data, buffer = Inflated(source, entry), memoryview(bytearray(_PIECE))
        for at in range(0, entry.nbytes, _PIECE):
            compared += data.read_into(at, buffer)
    return compared


def _array(archive: Archive, entry: Entry) -> Any:
    if entry.method == DEFLATED:
        data: Bytes = Inflated(archive.source, entry)
    else:
        data = archive.data(entry)

    def bad(message: str) -> NoReturn:
        raise fault("header_malformed", archive.source.name, f"{printable(entry.name)} {message}")

    head = read_bytes(data, 0, min(12, data.nbytes))
    width = 2 if head[6:7] == b"\x01" else 4
    if len(head) < 12 or head[:6] != _MAGIC or head[6] not in (1, 2, 3):
        bad("is no .npy file")
    length = int.from_bytes(head[8 : 8 + width], "little")
    begin = 8 + width + length
    if length > _HEADER_NBYTES_MAX or begin > data.nbytes:
        bad(f"has a header of {length} bytes")
    match = _HEADER.match(read_bytes(data, 8 + width, length).decode("latin-1"))
    if match is None:
        bad("has a malformed header")
    dtype = parse_typestr(match["descr"].strip("'"))
    if dtype is None:
        return Unknown("numpy.ndarray", f"an array of {printable(match['descr'])[:40]}")
    shape = tuple(int(n) for n in re.findall("[0-9]{1,19}", match["shape"]))
    nbytes = math.prod(shape[: NDIM_MAX + 1]) * DTYPES[dtype.name].itemsize
    if len(shape) > NDIM_MAX or nbytes > INT63_MAX or nbytes != data.nbytes - begin:
        bad(f"has {data.nbytes - begin} bytes for {list(shape)} of {dtype.name}")
    strides = packed_strides(shape)
    if match["fortran"] == "True":
        strides = packed_strides(shape[::-1])[::-1]
    view = View(data, begin, strides, dtype.big)
    return ForeignTensor(
        dtype.name, shape, [Part(whole(shape), lambda: view)], {"flavour": "numpy"}
    )


class Inflated:
    """The data of a deflated entry. Reads in order; one that goes back begins anew."""

    def __init__(self, source: Bytes, entry: Entry) -> None:
        self.name = f"{source.name}: {printable(entry.name)}"
        self.nbytes = entry.nbytes
        self._data = Window(source, entry.byte_offset, entry.stored_nbytes, printable(entry.name))
        self._crc = entry.crc
        self._lock = threading.Lock()
        self._restart()

    def read_into(self, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place; return how many bytes there were."""
        with self._lock:
            if byte_offset < self._at:
                self._restart()
            while self._at < byte_offset:
                self._inflate(min(_PIECE, byte_offset - self._at))
            done = 0
            wanted = min(len(into), self.nbytes - byte_offset)
            while done < wanted:
                piece = self._inflate(min(_PIECE, wanted - done))
                into[done : done + len(piece)] = piece
                done += len(piece)
            return done

    def _restart(self) -> None:
        self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
        self._at, self._taken, self._sum = 0, 0, 0

    def _inflate(self, nbytes: int) -> bytes:
        """Return at least one and at most so many of the following bytes."""
        stream, piece = self._stream, b""
        try:
            while not piece:
                data = stream.unconsumed_tail
                if not data and not stream.eof:
                    count = min(_PIECE, self._data.nbytes - self._taken)
                    data = read_bytes(self._data, self._taken, count)
                    self._taken += count
                piece = stream.decompress(data, nbytes)
                if not piece and (stream.eof or not data):
                    self._bad("inflates to less than it announces")
        except zlib.error as error:
            self._bad(f"does not inflate: {printable(str(error))}")
        self._at += len(piece)
        self._sum = zlib.crc32(piece, self._sum)
        if self._at == self.nbytes:
            self._finish()
        return piece

    def _finish(self) -> None:
        """Check what can be seen when all is read: that nothing follows, and the checksum."""
        stream = self._stream
        rest = stream.unconsumed_tail or read_bytes(
            self._data, self._taken, min(_PIECE, self._data.nbytes - self._taken)
        )
        try:
            longer = not stream.eof and stream.decompress(rest, 1)
        except zlib.error as error:
            self._bad(f"does not inflate: {printable(str(error))}")
        if longer or not stream.eof or stream.unused_data:
            self._bad("inflates to more than it announces")
        if self._sum != self._crc:
            raise fault(
                "foreign_checksum", self.name, f"CRC-32 {self._sum:08x}, not {self._crc:08x}"
            )

    def _bad(self, message: str) -> NoReturn:
        raise fault("archive_malformed", self.name, message, hint="the file is damaged, or forged")
