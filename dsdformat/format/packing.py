"""Canonical msgpack out, strict msgpack in (spec section 8).

Emitting uses the msgpack library. Parsing is our own, since no library sees a duplicate key, an
unsorted map or a number in a longer form than it needs, and none says at which byte.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import msgpack

from dsdformat.errors import FormatError, Problem
from dsdformat.limits import DEPTH_MAX

__all__ = ["emit", "parse"]

_NAN = struct.pack(">d", math.nan)
_TENSOR = b"\x92\xa6tensor"
_NOT_TEXT = frozenset(
    bytes([head]) for head in range(256) if head not in (*range(0xA0, 0xC0), 0xC1, 0xD9, 0xDA, 0xDB)
)
_UNSIGNED = frozenset(bytes([head]) for head in (*range(0x80), 0xCC, 0xCD, 0xCE, 0xCF))
_WIDTHS = {0xCC: (1, 2**7), 0xCD: (2, 2**8), 0xCE: (4, 2**16)}  # of integers, and the least
_ENTRY_MAX = 2 + 255 + 8 + 5  # bytes of a key and a tensor, as `_read_tensors` reads them
_packer_options = {"use_bin_type": True, "strict_types": True}


def emit(value: Any) -> bytes:
    """Write None, bool, int, float, str, bytes, list and dict as msgpack.

    The caller has sorted the keys of dicts, and made every NaN `math.nan`; the library writes
    the shortest forms.
    """
    packed = msgpack.packb(value, **_packer_options)
    assert isinstance(packed, bytes)
    return packed


def parse(data: bytes) -> Any:
    """Read one msgpack value in canonical form.

    Raises:
        FormatError: `msgpack_malformed`, `msgpack_not_canonical`, `duplicate_key` or
            `limit_exceeded`, with the byte offset and the path of the place.

    Memory: proportional to `data`; declared lengths are compared with what is left first.
    """
    return _Parser(data).run()


class _Frame:
    """An array or map that is being filled."""

    __slots__ = ("keyed", "items", "key", "left", "last_key")

    def __init__(self, items: Any, left: int, keyed: bool) -> None:
        self.items = items
        self.left = left
        self.keyed = keyed
        self.key: str | None = None
        self.last_key: str | None = None


class _Parser:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[_Frame] = []

    def run(self) -> Any:
        data, stack = self.data, self.stack
        frame: _Frame | None = None
        while True:
            if frame is not None and frame.keyed and frame.key is None:
                self._read_key(frame)
            at = self.at
            value: Any
            if data.startswith(_TENSOR, at) and data[at + 8 : at + 9] in _UNSIGNED:
                # A leaf that may occur a million times: no frame, two comparisons.
                if len(stack) >= DEPTH_MAX:
                    self._fail("limit_exceeded", f"nested deeper than {DEPTH_MAX}")
                self.at = at + 8
                value = ["tensor", self._read_value()]
            else:
                value = self._read_value()
            if type(value) is _Frame:
                if len(stack) >= DEPTH_MAX:
                    self._fail("limit_exceeded", f"nested deeper than {DEPTH_MAX}")
                if value.left:
                    stack.append(value)
                    frame = value
                    if frame.keyed:
                        self._read_tensors(frame)
                    continue
                value = value.items
            while True:
                if frame is None:
                    if self.at != len(data):
                        self._fail("msgpack_malformed", f"{len(data) - self.at} bytes too many")
                    return value
                if frame.keyed:
                    frame.items[frame.key] = value
                    frame.key = None
                else:
                    frame.items.append(value)
                frame.left -= 1
                if frame.left:
                    break
                value = frame.items
                stack.pop()
                frame = stack[-1] if stack else None

    def _read_tensors(self, frame: _Frame) -> None:
        """Read the first entries of a map while they are tensors: there may be a million.

        No faults are told here. What is not as it should be, what is anything else, the last entry
        and those at the end of the data are left to who reads any value.
        """
        data, items, at, last = self.data, frame.items, self.at, ""
        end = len(data) - _ENTRY_MAX
        left = frame.left if len(self.stack) < DEPTH_MAX else 0
        while left > 1 and at < end:
            head = data[at]
            if 0xA0 <= head < 0xC0:
                start, stop = at + 1, at + head - 0x9F
            elif head == 0xD9 and data[at + 1] >= 2**5:
                start, stop = at + 2, at + 2 + data[at + 1]
            else:
                break
            after = stop + 9
            if data[stop : stop + 8] != _TENSOR:
                break
            number = data[stop + 8]
            if number >= 0x80:
                width, least = _WIDTHS.get(number, (0, 1))
                number = int.from_bytes(data[after : after + width], "big")
                if number < least:
                    break
                after += width
            try:
                key = data[start:stop].decode()
            except UnicodeDecodeError:
                break
            if key <= last and items:
                break
            items[key] = ["tensor", number]
            last, at, left = key, after, left - 1
        if items:
            self.at, frame.left, frame.last_key = at, left, last

    def _read_key(self, frame: _Frame) -> None:
        begin = self.at
        if self.data[begin : begin + 1] in _NOT_TEXT:
            self._fail("msgpack_not_canonical", "a map key is not a string")
        key = self._read_value()
        # Code points sort as UTF-8 bytes do.
        if frame.last_key is not None and key <= frame.last_key:
            self.at = begin
            if key in frame.items:
                self._fail("duplicate_key", f"the key {key[:200]!r} occurs twice")
            self._fail("msgpack_not_canonical", f"the key {key[:200]!r} is out of order")
        frame.key = frame.last_key = key

    def _read_value(self) -> Any:
        at = self.at
        try:
            head = self.data[at]
        except IndexError:
            self._fail("msgpack_malformed", "the data ends early")
        if head < 0x80:
            self.at = at + 1
            return head
        if head >= 0xE0:
            self.at = at + 1
            return head - 256
        if head < 0x90:
            return self._open(head & 0x0F, at + 1, keyed=True)
        if head < 0xA0:
            return self._open(head & 0x0F, at + 1, keyed=False)
        if head < 0xC0:
            end = at + 1 + (head & 0x1F)
            try:
                text = self.data[at + 1 : end].decode()
            except UnicodeDecodeError:
                return self._text(at + 1, head & 0x1F)
            if end > len(self.data):
                return self._text(at + 1, head & 0x1F)
            self.at = end
            return text
        return _READERS[head - 0xC0](self, at + 1)

    def _open(self, count: int, at: int, *, keyed: bool) -> _Frame:
        if count * (2 if keyed else 1) > len(self.data) - at:
            self._fail("msgpack_malformed", f"{count} elements are declared, fewer bytes are left")
        self.at = at
        return _Frame({} if keyed else [], count, keyed)

    def _text(self, at: int, nbytes: int) -> str:
        try:
            return self._bytes(at, nbytes).decode("utf-8")
        except UnicodeDecodeError:
            self.at = at
            self._fail("msgpack_malformed", "a string is not UTF-8")

    def _bytes(self, at: int, nbytes: int) -> bytes:
        end = at + nbytes
        if end > len(self.data):
            self._fail("msgpack_malformed", f"{nbytes} bytes are declared, fewer are left")
        self.at = end
        return self.data[at:end]

    def _number(self, at: int, nbytes: int, *, signed: bool = False) -> int:
        end = at + nbytes
        if end > len(self.data):
            self._fail("msgpack_malformed", "the data ends early")
        self.at = end
        return int.from_bytes(self.data[at:end], "big", signed=signed)

    def _fail(self, code: str, message: str) -> NoReturn:
        place = "$" + "".join(_step(frame) for frame in self.stack)
        raise _error(code, message, place, self.at)


def _error(code: str, message: str, place: str, at: int) -> FormatError:
    problem = Problem(
        code, f"{message} (manifest body, byte {at}, at {place})", path=place, byte_offset=at
    )
    return problem.error()


def _step(frame: _Frame) -> str:
    if not frame.keyed:
        return f"[{len(frame.items)}]"
    return "" if frame.key is None else f".{frame.key[:40]}"


_Reader = Callable[[_Parser, int], Any]


def _constant(value: bool | None) -> _Reader:
    def read(parser: _Parser, at: int) -> bool | None:
        parser.at = at
        return value

    return read


def _refuse(code: str, message: str) -> _Reader:
    def read(parser: _Parser, at: int) -> NoReturn:
        parser.at = at - 1
        parser._fail(code, message)

    return read


def _sized(width: int, least: int, finish: Callable[[_Parser, int, int], Any]) -> _Reader:
    def read(parser: _Parser, at: int) -> Any:
        count = parser._number(at, width)
        if count < least:
            parser.at = at - 1
            parser._fail("msgpack_not_canonical", f"length {count} has a shorter form")
        return finish(parser, at + width, count)

    return read


def _integer(width: int, least: int, most: int, *, signed: bool) -> _Reader:
    def read(parser: _Parser, at: int) -> int:
        value = parser._number(at, width, signed=signed)
        if least <= value <= most:
            return value
        parser.at = at - 1
        parser._fail("msgpack_not_canonical", f"the integer {value} has another canonical form")

    return read


def _float64(parser: _Parser, at: int) -> float:
    raw = parser._bytes(at, 8)
    value: float = struct.unpack(">d", raw)[0]
    if math.isnan(value) and raw != _NAN:
        parser.at = at - 1
        parser._fail("msgpack_not_canonical", "a NaN is not 7FF8000000000000")
    return value


def _array(parser: _Parser, at: int, count: int) -> _Frame:
    return parser._open(count, at, keyed=False)


def _map(parser: _Parser, at: int, count: int) -> _Frame:
    return parser._open(count, at, keyed=True)


_EXT = _refuse("msgpack_not_canonical", "extension types are not allowed")
_READERS: tuple[_Reader, ...] = (
    _constant(None),
    _refuse("msgpack_malformed", "the byte C1 is not a type"),
    _constant(False),
    _constant(True),
    _sized(1, 0, _Parser._bytes),
    _sized(2, 2**8, _Parser._bytes),
    _sized(4, 2**16, _Parser._bytes),
    _EXT,
    _EXT,
    _EXT,
    _refuse("msgpack_not_canonical", "floats are 64 bits wide"),
    _float64,
    _integer(1, 2**7, 2**8 - 1, signed=False),
    _integer(2, 2**8, 2**16 - 1, signed=False),
    _integer(4, 2**16, 2**32 - 1, signed=False),
    _integer(8, 2**32, 2**64 - 1, signed=False),
    _integer(1, -(2**7), -33, signed=True),
    _integer(2, -(2**15), -(2**7) - 1, signed=True),
    _integer(4, -(2**31), -(2**15) - 1, signed=True),
    _integer(8, -(2**63), -(2**31) - 1, signed=True),
    _EXT,
    _EXT,
    _EXT,
    _EXT,
    _EXT,
    _sized(1, 2**5, _Parser._text),
    _sized(2, 2**8, _Parser._text),
    _sized(4, 2**16, _Parser._text),
    _sized(2, 2**4, _array),
    _sized(4, 2**16, _array),
    _sized(2, 2**4, _map),
    _sized(4, 2**16, _map),
)
