"""Changes of values as msgpack holds them: parts put in, taken out, moved, and made odd."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

from vectors.wire import big_int, pack

from dsdformat.errors import DsdError
from dsdformat.format.packing import parse
from dsdformat.format.values import TAGS
from fuzz.bytewise import NUMBERS, mutated

__all__ = ["changed_value", "emitted", "mutated_values", "parsed", "value_seeds"]

_NODES_MAX = 400
_TAGS = (*sorted(TAGS), "", "Tensor", "numpy")
_TEXTS = (
    *("", "a", "/", "@", "%", "%40", ".", "..", "__metadata__", "\0", "\x7f", "é", "\U0001f600"),
    *("model.safetensors", "manifest.dsd", "MANIFEST.DSD", "a/b", "\\", "C:", "@zstd", "@[0:1]"),
    *("float32", "bool", "complex64", "int4", "float4_e2m1fn_x2", "shard(0)", "replicate"),
    *("posix", "windows", "pure_windows", "torch.dtype", "a" * 40, "a" * 300, "\ufeff", "\ud7ff"),
)
# What a tree may hold, good and bad, in its encoding.
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -33, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.0, 0.5),
    *(float("inf"), float("nan"), 1e308, "", "a", b"", b"\x00", b"\x01" * 4, [], {}, [[]]),
    *({"": {}}, ["list"], ["tuple"], ["set"], ["frozenset"], ["dict"], ["odict"], ["counter"]),
    *(["tensor", 0], ["tensor", 1], ["tensor", -1], ["tensor", 0, {"flavour": "numpy"}]),
    *(["tensor", 0, {"dim_order": ["list", 1, 0]}], ["tensor", 0, {}], ["tensor", 0, {"a": []}]),
    *(big_int(2**64), big_int(-(2**63) - 1), big_int(2**2000), ["int", b""], ["int", b"\x01"]),
    *(["complex", 1.0, 0.0], ["complex", 0.0, -0.0], ["complex", float("nan"), 1.0]),
    *(["dict", [1, 2]], ["dict", ["a", 1]], ["dict", [None, 0], [False, 1]], ["dict", [0.0, 1]]),
    *(["set", 1, 2], ["set", 2, 1], ["set", 1, 1.0], ["set", ["tuple", 1], ["frozenset"]]),
    *(["frozenset", ["frozenset", ["frozenset"]]], ["deque", None, 1], ["deque", 1, 1, 2]),
    *(["deque", 2**63 - 1], ["size", 0, 2**63 - 1], ["size", 2**63], ["size", True]),
    *(["scalar", "float32", b"\0\0\x80?"], ["scalar", "int4", b"\xff"], ["scalar", "x", b""]),
    *(["name", "torch.dtype", "bfloat16"], ["name", "Torch", "a"], ["name", "a\n", ""]),
    *(["datetime", 1, 1, 1, 0, 0, 0, 0, 0, None], ["datetime", 9999, 12, 31, 23, 59, 59, 0, 1, -1]),
    *(["datetime", 2000, 2, 29, 0, 0, 0, 0, 0, 86_399_999_999], ["date", 1900, 2, 29]),
    *(["date", 9999, 12, 31], ["timedelta", -999_999_999, 0, 0], ["timedelta", 0, 86_400, 0]),
    *(["path", "posix", "/", "a"], ["path", "windows", "C:\\", "a"], ["path", "posix", "", ".."]),
    *(["path", "windows", "\\\\a\\b\\", "c"], ["path", "windows", "", "C:"]),
    *(["path", "pure_windows", "\\", "nul"], ["path", "pure_posix", "//", "a", "b"]),
)


def value_seeds() -> list[bytes]:
    """Each odd value, and one that holds all of them."""
    odd = [pack(value) for value in _ODD]
    return [*odd, pack(["list", *_ODD]), pack({str(at): one for at, one in enumerate(_ODD)})]


def parsed(data: bytes) -> Any:
    """The value that bytes hold; None if they are not canonical."""
    try:
        return parse(data)
    except DsdError:
        return None


def emitted(value: Any) -> bytes:
    """The canonical bytes of a value."""
    return pack(value)


def mutated_values(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Msgpack with its values changed, or where it is none or by chance, with its bytes changed."""
    if rng.random() < 0.2:
        return mutated(data, rng, others)
    value = parsed(data)
    donor = parsed(rng.choice(others)) if others and rng.random() < 0.3 else None
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = changed_value(value, rng, donor)
    return emitted(value)


def changed_value(value: Any, rng: random.Random, donor: Any = None) -> Any:
    """The value with one of its parts changed; containers are changed in place.

    Args:
        value: As `packing.parse` gives it.
        rng: Decides everything.
        donor: Another value, of which a part may be taken.
    """
    places = _places(value)
    if not places:
        return _other(value, rng)
    holder, step = places[int(rng.random() * len(places))]
    part = holder[step]
    kind = rng.random()
    if kind < 0.35:
        holder[step] = _other(part, rng)
    elif kind < 0.5:
        source, at = rng.choice(_places(donor) or places)
        holder[step] = _copied(source[at])
    elif kind < 0.6:
        for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 1, 60))):
            part = rng.choice(([part], {"a": part}, ["tuple", part], [rng.choice(_TAGS), part]))
        holder[step] = part
    elif kind < 0.75:
        del holder[step]
    else:
        _put(holder, step, rng)
    return value


def _put(holder: Any, step: Any, rng: random.Random) -> None:
    """Repeat a part, swap two, or put something odd beside one."""
    if isinstance(holder, dict):
        key = rng.choice(_TEXTS) if rng.random() < 0.6 else _text(step, rng)
        holder[key] = holder.pop(step) if rng.random() < 0.5 else _copied(holder[step])
        return
    kind = rng.random()
    if kind < 0.35:
        count = rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 1, 3000))
        if count == 1 or not isinstance(holder[step], (list, dict)):
            holder[step:step] = [_copied(holder[step]) for _ in range(count)]
    elif kind < 0.65:
        other = int(rng.random() * len(holder))
        holder[step], holder[other] = holder[other], holder[step]
    else:
        holder.insert(step, _copied(rng.choice(_ODD)))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each part of a value, as its container and the step to it; the first some hundreds."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo and len(found) < _NODES_MAX:
        holder = todo.pop()
        if isinstance(holder, dict):
            found += [(holder, key) for key in holder]
            todo += holder.values()
        elif isinstance(holder, list):
            found += [(holder, index) for index in range(len(holder))]
            todo += holder
    return found


def _other(part: Any, rng: random.Random) -> Any:
    """A value in the place of another, often of its type."""
    if rng.random() < 0.3:
        return _copied(rng.choice(_ODD))
    match part:
        case bool() | None:
            return rng.choice((None, True, False, 0, 1))
        case int():
            return _integer(part, rng)
        case float():
            return struct.unpack(">d", mutated(struct.pack(">d", part), rng)[:8].ljust(8, b"\0"))[0]
        case str():
            return rng.choice(_TAGS) if part in TAGS and rng.random() < 0.7 else _text(part, rng)
        case bytes():
            return mutated(part, rng)
    return _copied(rng.choice(_ODD))


def _integer(part: int, rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.4:
        number = part + rng.choice((-2, -1, 1, 2))
    elif kind < 0.7:
        number = rng.choice(NUMBERS) * rng.choice((1, 1, 1, -1))
    else:
        number = part ^ 1 << int(rng.random() * 64)
    return number if -(2**63) <= number < 2**64 else 2**64 - 1


def _text(part: str, rng: random.Random) -> str:
    kind = rng.random()
    at = int(rng.random() * (len(part) + 1))
    if kind < 0.3:
        return rng.choice(_TEXTS)
    if kind < 0.5:
        return part[:at] + part[at + 1 :]
    if kind < 0.7:
        return part.swapcase()
    return part[:at] + rng.choice(_TEXTS) + part[at:]


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value
