"""The bytes of a pickle, one opcode's worth at a time. Knows lengths, and no meaning."""

from __future__ import annotations

from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, read_exactly
from dsdformat.errors import ConvertError
from dsdformat.limits import MIB, PICKLE_NBYTES_MAX

__all__ = ["ByteStream"]

_BUFFER = MIB // 4


class ByteStream:
    """Reads on from a place in some bytes, through a buffer.

    Attributes:
        name: How messages call it.
        buffer: Some of the bytes.
        at: Where the next byte is in the buffer; its length if it has to be filled again.
        base: Where the buffer begins in the whole.
    """

    __slots__ = ("_end", "_source", "at", "base", "buffer", "name")

    def __init__(self, source: Bytes, byte_offset: int = 0) -> None:
        self.name = source.name
        self._source = source
        self.buffer = b""
        self.at = 0
        self.base = byte_offset
        self._end = byte_offset + PICKLE_NBYTES_MAX

    @property
    def position(self) -> int:
        """Where the next byte lies."""
        return self.base + self.at

    @property
    def left(self) -> int:
        """How many bytes follow."""
        return self._source.nbytes - self.position

    def byte(self) -> int:
        """Return the next byte."""
        if self.at == len(self.buffer):
            self._refill(1)
        value = self.buffer[self.at]
        self.at += 1
        return value

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes; that they are there is checked before they are allocated."""
        end = self.at + nbytes
        if end <= len(self.buffer):
            piece = self.buffer[self.at : end]
            self.at = end
            return piece
        self._refill(nbytes)
        self.at = nbytes
        return self.buffer[:nbytes]

    def number(self, nbytes: int) -> int:
        """Return the next bytes as an unsigned little-endian integer."""
        return int.from_bytes(self.take(nbytes), "little")

    def line(self, limit: int) -> bytes:
        """Return what comes before the next line feed, which is taken too."""
        found = self.buffer.find(b"\n", self.at)
        if found < 0:
            wanted = min(limit + 1, self.left)
            if wanted > len(self.buffer) - self.at:
                self._refill(wanted)
            found = self.buffer.find(b"\n", self.at)
        if found < 0 or found - self.at > limit:
            if self.left > limit:
                raise self.fault("foreign_too_large", f"a line is longer than {limit} bytes")
            raise self._ended()
        piece = self.buffer[self.at : found]
        self.at = found + 1
        return piece

    def fault(self, code: str, message: str) -> ConvertError:
        """Make an error that names the place."""
        return fault(code, self.name, f"byte {self.position}: {message}")

    def _refill(self, nbytes: int) -> None:
        """Have at least so many bytes in the buffer."""
        left = self.left
        if nbytes > left:
            raise self._ended()
        if self.position + nbytes > self._end:
            raise self.fault("foreign_too_large", f"more than {PICKLE_NBYTES_MAX} bytes of pickle")
        rest = self.buffer[self.at :]
        buffer = bytearray(min(max(nbytes, _BUFFER), left))
        buffer[: len(rest)] = rest
        base = self.position
        read_exactly(self._source, base + len(rest), memoryview(buffer)[len(rest) :])
        self.buffer, self.at, self.base = bytes(buffer), 0, base

    def _ended(self) -> ConvertError:
        return self.fault("pickle_malformed", "the pickle is cut short")
