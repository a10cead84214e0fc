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
    change = _change if rng.random() < 0.4 else _change_value
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not ops:
            break
        change(ops, int(rng.random() * len(ops)), rng, others)
    return b"".join(ops)


def _change_value(
    ops: list[bytes], at: int, rng: random.Random, others: Sequence[bytes] = ()
) -> None:
    """Put one value in the place of another: what is on the stack stays as many."""
    places = [place for place in range(at, len(ops)) if _is_value(ops[place])]
    if not places:
        _change(ops, at, rng, others)
        return
    at, kind = places[0], rng.random()
    if kind < 0.3 and (ops[at][0] in _PREFIX or ops[at][0] in _FIXED):
        ops[at] = _argued(ops[at], rng)
    elif kind < 0.5 and ops[at][:1] == b"c":
        ops[at] = rng.choice(_names())
    elif kind < 0.6 and others:
        ops[at] = rng.choice(
            [op for op in split_pickle(rng.choice(others)) if _is_value(op)] or [b"N"]
        )
    elif kind < 0.75:
        ops[at] = rng.choice([op for op in ops if _is_value(op)])
    elif kind < 0.8:
        ops[at] = _call(ops, rng)
    else:
        ops[at] = rng.choice(_VALUES)


_VALUES = (
    *(b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"K\0", b"K\1", b"K\2", b"M\xff\xff"),
    *(b"J" + struct.pack("<i", number) for number in (-1, -2, 2**31 - 1, -(2**31))),
    *(b"\x8a" + bytes([9]) + number.to_bytes(9, "little") for number in (2**31, 2**63, 2**64)),
    *(b"G" + struct.pack(">d", number) for number in (0.0, -1.0, 1e300, float("nan"))),
    *(b"X" + struct.pack("<I", len(t)) + t for t in (b"", b"a", b"0", b"cpu", b"..", b"a/b")),
    *(b"K\1\x85", b"K\2K\3\x86", b"K\0K\0\x86", b"NN\x86", b"]K\1a", b"}K\1K\2s", b"C\1\0"),
)
_PUSHES = frozenset(b"NKMJGXUTBC\x88\x89\x8a\x8c)]}hjIFLSVc")


def _is_value(op: bytes) -> bool:
    """Whether an opcode puts one value on the stack, and does nothing else."""
    return op[:1] != b"" and op[0] in _PUSHES


@functools.cache
def _names() -> list[bytes]:
    return [word for word in _words() if word[:1] == b"c"]


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
    literals = [op for op in ops if op[0] in _PREFIX or op[0] in b"KMJGN\x88\x89)"]
    args = b"".join(rng.choice(literals or [b"N"]) for _ in range(rng.randrange(6)))
    return rng.choice(_names()) + b"(" + args + b"t" + rng.choice((b"R", b"R", b"\x81"))


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
