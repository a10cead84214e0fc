"""Write a pickle: the opcodes of protocol 2 that a state needs, one method for each.

The other direction of `machine`: it knows opcodes and nothing of what they build. What calls it
says which names are called, and with what. Strings and names are written once, and then referred
to. Bytes go out in pieces of bounded size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

from dsdformat.convert.pickles.opcodes import OPCODES
from dsdformat.limits import KIB

__all__ = ["Emitter"]

_PIECE_NBYTES = 64 * KIB
_PROTOCOL = 2
_LONG1_NBYTES_MAX = 255
_OP = {name: bytes([code]) for name, code in OPCODES.items()}
_TUPLES = {0: _OP["EMPTY_TUPLE"], 1: _OP["TUPLE1"], 2: _OP["TUPLE2"], 3: _OP["TUPLE3"]}
_ATOMS = {None: _OP["NONE"], True: _OP["NEWTRUE"], False: _OP["NEWFALSE"]}


class Emitter:
    """Writes one pickle."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        """Begin.

        Args:
            write: Takes the bytes of the pickle, in order.
        """
        self._write = write
        self._buffer = bytearray(_OP["PROTO"] + bytes([_PROTOCOL]))
        self._memo: dict[Any, int] = {}
        self._count = 0

    def end(self) -> None:
        """End the pickle, whose value is the one on the stack."""
        self._put(_OP["STOP"])
        self._flush()

    # Atoms

    def atom(self, value: bool | None) -> None:
        """Push None, True or False."""
        self._put(_ATOMS[value])

    def integer(self, value: int) -> None:
        """Push an integer."""
        if 0 <= value < 256:
            self._put(_OP["BININT1"], bytes([value]))
        elif 0 <= value < 2**16:
            self._put(_OP["BININT2"], struct.pack("<H", value))
        elif -(2**31) <= value < 2**31:
            self._put(_OP["BININT"], struct.pack("<i", value))
        else:
            nbytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
            data = value.to_bytes(nbytes, "little", signed=True)
            if nbytes <= _LONG1_NBYTES_MAX:
                self._put(_OP["LONG1"], bytes([nbytes]), data)
            else:
                self._put(_OP["LONG4"], struct.pack("<i", nbytes), data)

    def real(self, value: float) -> None:
        """Push a float."""
        self._put(_OP["BINFLOAT"], struct.pack(">d", value))

    def text(self, value: str) -> None:
        """Push a string."""
        if not self.recall(value):
            data = value.encode("utf-8", "surrogatepass")
            self._put(_OP["BINUNICODE"], struct.pack("<I", len(data)), data)
            self.remember(value)

    def data(self, value: bytes) -> None:
        """Push bytes as protocol 2 has them: a string of which each character is a byte."""
        text = value.decode("latin-1").encode()
        self.name("_codecs", "encode")
        self._put(_OP["BINUNICODE"], struct.pack("<I", len(text)), text)
        self.text("latin1")
        self.tuple(2)
        self.call()

    def long_data(self, nbytes: int, pieces: Iterable[Any]) -> None:
        """Push bytes that are not at hand as a whole, by an opcode of a later protocol."""
        self._put(_OP["BINBYTES8"], struct.pack("<Q", nbytes))
        for piece in pieces:
            self._put(piece)

    def name(self, module: str, qualname: str) -> None:
        """Push what a name stands for."""
        if not self.recall((module, qualname)):
            self._put(_OP["GLOBAL"], f"{module}\n{qualname}\n".encode())
            self.remember((module, qualname))

    # Containers and calls

    def mark(self) -> None:
        """Push a mark, up to which `tuple`, `append` and `set_items` take what is on the stack."""
        self._put(_OP["MARK"])

    def tuple(self, count: int | None = None) -> None:
        """Make a tuple of so many things, at most 3; of those above the mark if None."""
        self._put(_OP["TUPLE"] if count is None else _TUPLES[count])

    def new_list(self) -> None:
        """Push an empty list."""
        self._put(_OP["EMPTY_LIST"])

    def new_dict(self) -> None:
        """Push an empty dict."""
        self._put(_OP["EMPTY_DICT"])

    def append(self) -> None:
        """Append what is above the mark to what is below it."""
        self._put(_OP["APPENDS"])

    def set_items(self) -> None:
        """Set the pairs above the mark in what is below it."""
        self._put(_OP["SETITEMS"])

    def call(self) -> None:
        """Call a name with a tuple."""
        self._put(_OP["REDUCE"])

    def create(self) -> None:
        """Make an object of a class with a tuple, without its `__init__`."""
        self._put(_OP["NEWOBJ"])

    def build(self) -> None:
        """Give an object its state."""
        self._put(_OP["BUILD"])

    def persist(self) -> None:
        """Push what a persistent id stands for."""
        self._put(_OP["BINPERSID"])

    # The memo

    def remember(self, key: Any) -> None:
        """Keep what is on top of the stack under a key."""
        index = self._memo[key] = self._count
        self._count += 1
        self._refer("BINPUT", "LONG_BINPUT", index)

    def recall(self, key: Any) -> bool:
        """Push what was kept under a key; return whether there is any."""
        index = self._memo.get(key)
        if index is None:
            return False
        self._refer("BINGET", "LONG_BINGET", index)
        return True

    def _refer(self, short: str, long: str, index: int) -> None:
        if index < 256:
            self._put(_OP[short], bytes([index]))
        else:
            self._put(_OP[long], struct.pack("<I", index))

    def _put(self, *pieces: Any) -> None:
        for piece in pieces:
            if len(piece) > _PIECE_NBYTES:
                self._flush()
                self._write(piece)
            else:
                self._buffer += piece
        if len(self._buffer) >= _PIECE_NBYTES:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            self._write(bytes(self._buffer))
            self._buffer.clear()
