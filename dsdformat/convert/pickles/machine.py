"""A pickle machine that does nothing: it builds a graph of inert records from a pickle.

Decides what the opcodes mean for the stack and the memo, as pickle's documentation says, and
nothing about what the names in it mean: see `resolving`. No name is looked up, nothing is called,
and no key is hashed. A stack that runs short, a memo entry that is not there, a frame that ends
within an opcode, and everything else that no pickler writes, is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

from dsdformat.convert.files import Bytes
from dsdformat.convert.pickles.effects import EFFECTS
from dsdformat.convert.pickles.nodes import Stored
from dsdformat.convert.pickles.opcodes import COSTS, LITERALS, OPCODES, REFUSED, name_of
from dsdformat.convert.pickles.state import State
from dsdformat.convert.pickles.stream import ByteStream
from dsdformat.garbage import paused_gc
from dsdformat.limits import PICKLE_MEMORY_MAX

__all__ = ["Parsed", "parse_pickle"]

PROTOCOL_MAX = 5


class Parsed:
    """A pickle as a graph.

    Attributes:
        root: What it stands for.
        stored: Its persistent ids, in the order of the pickle.
        end: The place behind it, in bytes.
    """

    def __init__(self, root: Any, stored: list[Stored], end: int) -> None:
        self.root = root
        self.stored = stored
        self.end = end


def parse_pickle(
    source: Bytes, byte_offset: int = 0, *, memory_max: int = PICKLE_MEMORY_MAX
) -> Parsed:
    """Parse the pickle that begins at a place.

    Args:
        source: What it lies in.
        byte_offset: Where it begins.
        memory_max: How much memory its objects may take, as estimated.

    Raises:
        ConvertError: `pickle_malformed`, `pickle_opcode` or `foreign_too_large`.

    Memory: up to about 50 times the pickle, and never much more than `memory_max`.
    """
    machine = _Machine(ByteStream(source, byte_offset), memory_max)
    with paused_gc():
        root = machine.run()
    return Parsed(root, machine.pids, machine.stream.position)


class _Machine(State):
    def run(self) -> Any:
        """Run until STOP; return what it leaves."""
        stream, effects, literals = self.stream, EFFECTS, LITERALS
        stop, proto = OPCODES["STOP"], OPCODES["PROTO"]
        start = stream.position
        while True:
            at = stream.at
            if self.frame_end is not None and stream.base + at >= self.frame_end:
                self._leave_frame()
            if at < len(stream.buffer):
                opcode = stream.buffer[at]
                stream.at = at + 1
            else:
                opcode = stream.byte()
            self.budget -= COSTS[opcode]
            if self.budget < 0:
                raise stream.fault("foreign_too_large", "its objects need too much memory")
            effect = effects.get(opcode)
            if effect is not None:
                effect(self)
                continue
            literal = literals.get(opcode)
            if literal is not None:
                self.stack.append(literal(stream))
            elif opcode == stop:
                return self._result()
            elif opcode == proto:
                self._proto(stream.position == start + 1)
            else:
                self._refuse(opcode)

    def _result(self) -> Any:
        if self.marks or len(self.stack) != 1:
            self.malformed("the pickle leaves more or less than one value")
        if self.frame_end is not None and self.frame_end != self.stream.position:
            self.malformed("a frame does not end where the pickle does")
        return self.stack[0]

    def _proto(self, first: bool) -> None:
        protocol = self.stream.byte()
        if not first:
            self.malformed("a protocol is named within the pickle")
        if protocol > PROTOCOL_MAX:
            raise self.stream.fault("pickle_opcode", f"pickle protocol {protocol} is not known")

    def _leave_frame(self) -> None:
        if self.stream.position != self.frame_end:
            self.malformed("a frame ends within an opcode")
        self.frame_end = None

    def _refuse(self, opcode: int) -> NoReturn:
        known = opcode in REFUSED
        message = f"opcode {name_of(opcode)} is not {'accepted' if known else 'known'}"
        raise self.stream.fault("pickle_opcode" if known else "pickle_malformed", message)
