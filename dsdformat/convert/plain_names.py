"""Names of Python's own library that a pickle may call, and the values they stand for.

A closed table. None of the classes is called with anything that was not checked, and only those
are here whose values the format can hold.
"""

from __future__ import annotations

import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from typing import Any

from dsdformat.convert.pickles.keys import ValueFault, checked_key, distinct
from dsdformat.convert.pickles.nodes import ABSENT, Global
from dsdformat.convert.pickles.resolving import Made, Maker, Unknown
from dsdformat.format.values import PATH_CLASSES, find_path_fault

__all__ = ["PLAIN_NAMES", "StateDict"]

_DAY = timedelta(days=1)


class StateDict(OrderedDict[Any, Any]):
    """An ordered dict that has attributes, as `_metadata` of a module's state dict.

    Attributes:
        attributes: What they are; values of the pickle.
    """

    attributes: dict[Any, Any]


def _keyed(pairs: Any) -> list[tuple[Any, Any]]:
    """Return pairs of keys and values that came as arguments."""
    if type(pairs) not in (list, tuple):
        raise ValueFault("no list of pairs")
    if any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueFault("a list of what are no pairs")
    return [(checked_key(key), value) for key, value in pairs]


def _unique(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    distinct([key for key, _ in pairs])
    return pairs


def _only(made: Made, *parts: str) -> None:
    """Refuse parts of a call that this function does not take."""
    given = {
        "kwargs": bool(made.kwargs),
        "state": made.state is not ABSENT,
        "items": bool(made.items),
        "pairs": bool(made.pairs),
    }
    for name, there in given.items():
        if there and name not in parts:
            raise ValueFault(f"{name} that it does not take")


def _ordered(made: Made) -> Any:
    _only(made, "pairs", "state")
    if len(made.args) > 1:
        raise ValueFault("too many arguments")
    pairs = _unique((_keyed(made.args[0]) if made.args else []) + (made.pairs or []))
    if made.state is ABSENT or made.state == {}:
        return OrderedDict(pairs)
    if type(made.state) is not dict:
        raise ValueFault("a state that is no dict")
    result = StateDict(pairs)
    result.attributes = made.state
    return result


def _default(made: Made) -> Any:
    _only(made, "pairs")
    if len(made.args) > 1:
        raise ValueFault("too many arguments")
    if made.args and type(made.args[0]) not in (Global, type(None)):
        return Unknown(made.name, "a defaultdict whose factory is no plain name", made)
    return defaultdict(None, _unique(made.pairs or []))


def _counter(made: Made) -> Any:
    _only(made, "pairs")
    start = made.args[0] if len(made.args) == 1 else {}
    if len(made.args) > 1 or type(start) is not dict:
        raise ValueFault("arguments that are no dict")
    return Counter(dict(_unique([*start.items(), *(made.pairs or [])])))


def _deque(made: Made) -> Any:
    _only(made, "items")
    start, maxlen = (*made.args, *((), None)[len(made.args) :])[:2]
    if len(made.args) > 2 or type(start) not in (list, tuple):
        raise ValueFault("arguments that are no list")
    items = [*start, *(made.items or [])]
    if maxlen is not None and not (type(maxlen) is int and len(items) <= maxlen < 2**63):
        raise ValueFault("a maxlen that does not fit")
    return deque(items, maxlen)


def _elements(made: Made) -> set[Any]:
    args = made.bare()
    if len(args) > 1 or (args and type(args[0]) not in (list, tuple)):
        raise ValueFault("arguments that are no list")
    return distinct([checked_key(item) for item in (args[0] if args else ())])


def _complex(made: Made) -> Any:
    args = made.bare()
    if len(args) != 2 or any(type(arg) not in (float, int) for arg in args):
        raise ValueFault("arguments that are no two numbers")
    return complex(float(args[0]), float(args[1]))


def _bytes(made: Made) -> Any:
    if made.bare():
        raise ValueFault("arguments")
    return b""


def _encoded(made: Made) -> Any:
    """Bytes as protocol 2 writes them: a string whose characters are the bytes."""
    args = made.bare()
    if len(args) != 2 or type(args[0]) is not str or args[1] != "latin1":
        raise ValueFault("arguments that do not stand for bytes")
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        raise ValueFault("a string with characters that are no bytes") from None


# Times


def _ints(args: tuple[Any, ...], count: int) -> tuple[int, ...]:
    if len(args) != count or any(type(arg) is not int for arg in args):
        raise ValueFault(f"arguments that are not {count} integers")
    return args


def _timedelta(made: Made) -> Any:
    days, seconds, micros = _ints(made.bare(), 3)
    if not (abs(days) <= 999_999_999 and 0 <= seconds < 86_400 and 0 <= micros < 10**6):
        raise ValueFault("numbers that are out of range")
    return timedelta(days, seconds, micros)


def _timezone(made: Made) -> Any:
    args = made.bare()
    if len(args) not in (1, 2) or type(args[0]) is not timedelta or not -_DAY < args[0] < _DAY:
        raise ValueFault("an offset that is out of range")
    return Unknown(made.name, "a named time zone", made) if len(args) == 2 else timezone(args[0])


def _date(made: Made) -> Any:
    data = _state(made.bare()[:1], 4)
    if len(made.args) != 1:
        raise ValueFault("too many arguments")
    return _in_range(date, int.from_bytes(data[:2]), data[2], data[3])


def _datetime(made: Made) -> Any:
    args = made.bare()
    data = _state(args[:1], 10)
    zone = args[1] if len(args) == 2 else None
    if len(args) > 2:
        raise ValueFault("too many arguments")
    if zone is not None and type(zone) is not timezone:
        return Unknown(made.name, "a datetime with a named time zone", made)
    day = int.from_bytes(data[:2]), data[2] & 0x7F, data[3]
    clock = data[4], data[5], data[6], int.from_bytes(data[7:10])
    return _in_range(datetime, *day, *clock, zone, fold=data[2] >> 7)


def _state(args: tuple[Any, ...], nbytes: int) -> bytes:
    if len(args) != 1 or type(args[0]) is not bytes or len(args[0]) != nbytes:
        raise ValueFault(f"arguments that are not {nbytes} bytes")
    return args[0]


def _in_range(kind: Any, *args: Any, **options: Any) -> Any:
    try:
        return kind(*args, **options)
    except ValueError:
        raise ValueFault("a day or time that does not exist") from None


# Paths


def _path(kind: str) -> Maker:
    def make(made: Made) -> Any:
        parts = made.bare()
        if any(type(part) is not str or "\0" in part for part in parts):
            raise ValueFault("arguments that are no strings")
        pure = pathlib.PureWindowsPath if kind.endswith("windows") else pathlib.PurePosixPath
        path = pure(*parts)
        rest = path.parts[1:] if path.anchor else path.parts
        if find_path_fault([kind, path.anchor, *rest]):
            return Unknown(made.name, "a path of an unusual form", made)
        return PATH_CLASSES[kind](*parts)

    return make


def _bytearray(made: Made) -> Any:
    return Unknown(made.name, "a bytearray", made)


PLAIN_NAMES: dict[tuple[str, str], Maker] = {
    ("collections", "OrderedDict"): _ordered,
    ("collections", "defaultdict"): _default,
    ("collections", "Counter"): _counter,
    ("collections", "deque"): _deque,
    ("builtins", "set"): _elements,
    ("builtins", "frozenset"): lambda made: frozenset(_elements(made)),
    ("builtins", "complex"): _complex,
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytearray,
    ("_codecs", "encode"): _encoded,
    ("datetime", "datetime"): _datetime,
    ("datetime", "date"): _date,
    ("datetime", "timedelta"): _timedelta,
    ("datetime", "timezone"): _timezone,
    ("pathlib", "PurePosixPath"): _path("pure_posix"),
    ("pathlib", "PureWindowsPath"): _path("pure_windows"),
    ("pathlib", "PosixPath"): _path("posix"),
    ("pathlib", "WindowsPath"): _path("windows"),
}
