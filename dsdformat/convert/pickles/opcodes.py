"""The closed list of pickle opcodes, of protocols 0 to 5, and how their literals are read.

What is not listed is refused: the extension registry, buffers out of band, persistent ids as
text, strings of protocol 0 that are written as Python source, and what takes from the stack what
was made: picklers write that for objects that contain themselves, and others to hide a call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from dsdformat.convert.pickles.stream import ByteStream
from dsdformat.limits import MIB, PICKLE_INT_NBYTES_MAX, PICKLE_NBYTES_MAX

__all__ = ["COSTS", "LITERALS", "OPCODES", "REFUSED", "name_of"]

# fmt: off
OPCODES: dict[str, int] = {
    "MARK": 0x28, "STOP": 0x2E,
    "FLOAT": 0x46, "INT": 0x49, "BININT": 0x4A, "BININT1": 0x4B, "LONG": 0x4C, "BININT2": 0x4D,
    "NONE": 0x4E, "BINPERSID": 0x51, "REDUCE": 0x52, "BINSTRING": 0x54, "SHORT_BINSTRING": 0x55,
    "UNICODE": 0x56, "BINUNICODE": 0x58, "APPEND": 0x61, "BUILD": 0x62, "GLOBAL": 0x63,
    "DICT": 0x64, "EMPTY_DICT": 0x7D, "APPENDS": 0x65, "GET": 0x67, "BINGET": 0x68,
    "INST": 0x69, "LONG_BINGET": 0x6A, "LIST": 0x6C, "EMPTY_LIST": 0x5D, "OBJ": 0x6F,
    "PUT": 0x70, "BINPUT": 0x71, "LONG_BINPUT": 0x72, "SETITEM": 0x73, "TUPLE": 0x74,
    "EMPTY_TUPLE": 0x29, "SETITEMS": 0x75, "BINFLOAT": 0x47,
    "PROTO": 0x80, "NEWOBJ": 0x81, "TUPLE1": 0x85, "TUPLE2": 0x86, "TUPLE3": 0x87,
    "NEWTRUE": 0x88, "NEWFALSE": 0x89, "LONG1": 0x8A, "LONG4": 0x8B,
    "BINBYTES": 0x42, "SHORT_BINBYTES": 0x43,
    "SHORT_BINUNICODE": 0x8C, "BINUNICODE8": 0x8D, "BINBYTES8": 0x8E, "EMPTY_SET": 0x8F,
    "ADDITEMS": 0x90, "FROZENSET": 0x91, "NEWOBJ_EX": 0x92, "STACK_GLOBAL": 0x93,
    "MEMOIZE": 0x94, "FRAME": 0x95, "BYTEARRAY8": 0x96,
}
REFUSED: dict[int, str] = {
    0x30: "POP", 0x31: "POP_MARK", 0x32: "DUP", 0x50: "PERSID", 0x53: "STRING",
    0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4",
    0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER",
}
# What an opcode takes of memory at least: an object, its place in a container, a memo's entry.
_OBJECTS = {
    "MARK": 120, "EMPTY_LIST": 120, "LIST": 120, "EMPTY_DICT": 200, "DICT": 200,
    "EMPTY_SET": 200, "FROZENSET": 200, "TUPLE": 120, "TUPLE1": 72, "TUPLE2": 80, "TUPLE3": 88,
    "REDUCE": 140, "NEWOBJ": 140, "NEWOBJ_EX": 140, "OBJ": 140, "INST": 200, "GLOBAL": 200,
    "STACK_GLOBAL": 80, "BINPERSID": 60, "MEMOIZE": 100, "PUT": 100, "BINPUT": 100,
    "LONG_BINPUT": 100,
}
# fmt: on
_NAMES = {code: name for name, code in OPCODES.items()} | REFUSED
COSTS = [_OBJECTS.get(_NAMES.get(code, ""), 40) for code in range(256)]


def name_of(opcode: int) -> str:
    """Return how an opcode is called in the documentation of pickle."""
    return _NAMES.get(opcode, f"0x{opcode:02x}")


def _long(nbytes: int) -> Callable[[ByteStream], int]:
    def read(stream: ByteStream) -> int:
        length = stream.number(nbytes)
        if length > PICKLE_INT_NBYTES_MAX:
            raise stream.fault("foreign_too_large", f"an integer of {length} bytes")
        return int.from_bytes(stream.take(length), "little", signed=True)

    return read


def _bytes(nbytes: int) -> Callable[[ByteStream], bytes]:
    def read(stream: ByteStream) -> bytes:
        length = stream.number(nbytes)
        if length > PICKLE_NBYTES_MAX:
            raise stream.fault("foreign_too_large", f"a string of {length} bytes")
        return stream.take(length)

    return read


def _text(nbytes: int) -> Callable[[ByteStream], str]:
    data = _bytes(nbytes)

    def read(stream: ByteStream) -> str:
        try:
            return data(stream).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise stream.fault("pickle_malformed", "a string is not UTF-8") from None

    return read


def _number_line(stream: ByteStream) -> bytes:
    return stream.line(2 * PICKLE_INT_NBYTES_MAX)


def _integer(stream: ByteStream, text: bytes) -> int:
    try:
        return int(text.decode("ascii"))
    except ValueError:
        raise stream.fault("pickle_malformed", "an integer is not one") from None


def _int(stream: ByteStream) -> int | bool:
    text = _number_line(stream)
    return text == b"01" if text in (b"00", b"01") else _integer(stream, text)


def _decimal(stream: ByteStream) -> int:
    return _integer(stream, _number_line(stream).removesuffix(b"L"))


def _float(stream: ByteStream) -> float:
    try:
        return float(_number_line(stream).decode("ascii"))
    except ValueError:
        raise stream.fault("pickle_malformed", "a number is not one") from None


def _binfloat(stream: ByteStream) -> float:
    value: float = struct.unpack(">d", stream.take(8))[0]
    return value


def _unicode(stream: ByteStream) -> str:
    try:
        return stream.line(MIB).decode("raw-unicode-escape")
    except UnicodeDecodeError:
        raise stream.fault("pickle_malformed", "a string has a bad escape") from None


def _bytearray(stream: ByteStream) -> bytearray:
    return bytearray(_bytes(8)(stream))


# What an opcode pushes without looking at the stack. Strings of Python 2 are those of its users:
# names, in ASCII or UTF-8.
_LITERALS: dict[str, Callable[[ByteStream], Any]] = {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "INT": _int,
    "LONG": _decimal,
    "FLOAT": _float,
    "BINFLOAT": _binfloat,
    "BININT": lambda stream: int.from_bytes(stream.take(4), "little", signed=True),
    "BININT1": lambda stream: stream.byte(),
    "BININT2": lambda stream: stream.number(2),
    "LONG1": _long(1),
    "LONG4": _long(4),
    "UNICODE": _unicode,
    "BINUNICODE": _text(4),
    "SHORT_BINUNICODE": _text(1),
    "BINUNICODE8": _text(8),
    "BINSTRING": _text(4),
    "SHORT_BINSTRING": _text(1),
    "BINBYTES": _bytes(4),
    "SHORT_BINBYTES": _bytes(1),
    "BINBYTES8": _bytes(8),
    "BYTEARRAY8": _bytearray,
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_LIST": lambda _: [],
}
LITERALS = {OPCODES[name]: read for name, read in _LITERALS.items()}
