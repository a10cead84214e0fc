"""Changes of pickles, opcode by opcode: taken out, repeated, swapped, and given other arguments."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Sequence

from dsdformat.convert.dcp_names import DCP_RULES
from dsdformat.convert.numpy_names import NUMPY_NAMES
from dsdformat.convert.pickles.opcodes import OPCODES, REFUSED
from dsdformat.convert.plain_names import PLAIN_NAMES
from dsdformat.convert.torch_names import TorchNames
from fuzz.bytewise import NUMBERS, mutated

__all__ = ["mutated_pickle", "split_pickle"]

_PLAIN = {"K": 1, "M": 2, "J": 4, "G": 8, "h": 1, "j": 4, "q": 1, "r": 4, "\x80": 1, "\x95": 8}
_SIZED = {"T": 4, "U": 1, "X": 4, "B": 4, "C": 1, "\x8a": 1, "\x8b": 4, "\x8c": 1, "\x8d": 8}
_FIXED = {ord(code): nbytes for code, nbytes in _PLAIN.items()}
_PREFIX = {ord(code): nbytes for code, nbytes in _SIZED.items()} | {0x8E: 8, 0x96: 8}
_LINES = {ord(code): 1 for code in "FILSVgpP"} | {ord("c"): 2, ord("i"): 2}
_FRAME, _PROTO = 0x95, 0x80
_CODES = (*OPCODES.values(), *REFUSED)


def _doubled(times: int) -> bytes:
    """A list of lists, each of which holds the one before twice."""
    lists = [b"](h%ch%ceq%c" % (at, at, at + 1) for at in range(200, 200 + times)]
    return b"(]q%c" % 200 + b"".join(lists) + b"l"


@functools.cache
def _words() -> tuple[bytes, ...]:
    """Opcodes with arguments that mean something to a reader."""
    calls = TorchNames(lambda _: None, 0).calls  # type: ignore[arg-type, return-value]
    known = sorted({*PLAIN_NAMES, *NUMPY_NAMES, *DCP_RULES.calls, *calls})
    names = [f"c{module}\n{name}\n".encode() for module, name in known]
    numbers = [b"J" + struct.pack("<i", n) for n in (0, 1, -1, 2**31 - 1, -(2**31))]
    large = [b"\x8a\x09" + n.to_bytes(9, "little") for n in NUMBERS if n < 2**71]
    bare = [bytes([code]) for code in b")]}\x8f(tsubRQeaN\x88\x89\x81\x90\x91\x93\x94\x85\x86\x87."]
    texts = [b"X" + struct.pack("<I", len(t)) + t for t in (b"", b"storage", b"cpu", b"0", b"a/b")]
    bare.append(_doubled(20))
    lines = [b"I01\n", b"I00\n", b"G" + bytes(8), b"cos\nsystem\n"]
    return (*names, *numbers, *large, *bare, *texts, *lines)


@functools.lru_cache(maxsize=4096)
def split_pickle(data: bytes) -> tuple[bytes, ...]:
    """The opcodes of a pickle, each with its argument; what is none comes last, as it is.

    Frames are left out: they would be wrong after each change.
    """
    found, at = [], 0
    while at < len(data):
        end = _end(data, at)
        if data[at] != _FRAME or end > len(data):
            found.append(data[at:end])
        at = end
    return tuple(found)


def _end(data: bytes, at: int) -> int:
    code = data[at]
    if code in _FIXED:
        return at + 1 + _FIXED[code]
    if code in _PREFIX:
        width = _PREFIX[code]
        return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
    end = at + 1
    for _ in range(_LINES.get(code, 0)):
        found = data.find(b"\n", end)
        end = len(data) if found < 0 else found + 1
    return end


def mutated_pickle(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A pickle with one to four of its opcodes changed, or by chance with its bytes changed."""
    if rng.random() < 0.15:
        return mutated(data, rng, others)
    ops = list(split_pickle(data))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not ops:
            break
        _change(ops, int(rng.random() * len(ops)), rng, others)
    return b"".join(ops)


def _change(ops: list[bytes], at: int, rng: random.Random, others: Sequence[bytes]) -> None:
    kind = rng.random()
    if kind < 0.15:
        del ops[at]
    elif kind < 0.25:
        ops.insert(at, ops[at])
    elif kind < 0.35:
        other = int(rng.random() * len(ops))
        ops[at], ops[other] = ops[other], ops[at]
    elif kind < 0.5:
        ops[at] = rng.choice(_words())
    elif kind < 0.6:
        ops.insert(at, rng.choice(_words()) if rng.random() < 0.5 else _call(ops, rng))
    elif kind < 0.7:
        donor = split_pickle(rng.choice(others)) if others else ops
        start = int(rng.random() * len(donor))
        ops[at : at + rng.randrange(3)] = donor[start : start + 1 + int(rng.random() * 12)]
    elif kind < 0.75:
        ops[at] = bytes([rng.choice(_CODES)]) + ops[at][1:]
    else:
        ops[at] = _argued(ops[at], rng)


def _call(ops: list[bytes], rng: random.Random) -> bytes:
    """A call of a known name with any arguments, as one piece."""
    names = [word for word in _words() if word[:1] == b"c"]
    literals = [op for op in ops if op[0] in _PREFIX or op[0] in b"KMJGN\x88\x89)"]
    args = b"".join(rng.choice(literals or [b"N"]) for _ in range(rng.randrange(6)))
    return rng.choice(names) + b"(" + args + b"t" + rng.choice((b"R", b"R", b"\x81"))


def _argued(op: bytes, rng: random.Random) -> bytes:
    """An opcode with another argument, and a right length before it."""
    code = op[0]
    if code in _PREFIX:
        width = _PREFIX[code]
        text = mutated(op[1 + width :], rng)[: 256**width - 1]
        return op[:1] + len(text).to_bytes(width, "little") + text
    if code in _FIXED:
        width = _FIXED[code]
        if rng.random() < 0.5:
            number = int.from_bytes(op[1:], "little") + rng.choice((-1, 1, 2))
        else:
            number = rng.choice(NUMBERS)
        return op[:1] + (number % 256**width).to_bytes(width, "little")
    if code in _LINES:
        return op[:1] + mutated(op[1:-1], rng) + b"\n"
    return bytes([rng.choice(_CODES)])
