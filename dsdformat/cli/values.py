"""Values of a tree for people and for JSON, and the names under which they lie. Pure.

In JSON, null, booleans, strings, lists, dicts of string keys and integers of 64 bits are
themselves. A float is a number, or "NaN", "Infinity" or "-Infinity". Everything else is an object
whose first key begins with `$` and says what it is:

    {"$int": "36893488147419103232"}          an integer beyond 64 bits
    {"$complex": [0.5, -1.0]}
    {"$bytes": "00ff"}                         hexadecimal
    {"$tuple": […]}, {"$set": […]}, {"$frozenset": […]}, {"$size": […]}
    {"$deque": […], "maxlen": 3}
    {"$dict": [[key, value], …]}               a key is not a string, or begins with `$`
    {"$odict": [[key, value], …]}, {"$counter": …}, {"$defaultdict": …}
    {"$scalar": "float32", "value": 0.5, "bytes": "0000003f"}
    {"$name": "float32", "kind": "torch.dtype"}
    {"$datetime": "2026-11-30T12:00:00+01:00", "fold": 0}, {"$date": "2026-11-30"}
    {"$timedelta": [days, seconds, microseconds]}
    {"$path": "/data/run", "kind": "posix"}

Sets, and dicts of other than string keys, are in the canonical order of the format. `value` of a
scalar is null where the standard library has no such number.
"""

from __future__ import annotations

import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta
from typing import Any

from dsdformat import Named, Scalar, Size, TensorEntry
from dsdformat.convert import ForeignTensor, StoredTensor
from dsdformat.format.paths import emit_name
from dsdformat.format.values import PATH_CLASSES, encoded_key
from dsdformat.limits import INT_MAX, INT_MIN

__all__ = [
    "float_json",
    "holds_tensors",
    "is_branch",
    "is_tensor",
    "iter_children",
    "iter_values",
    "name_of",
    "short_text",
    "type_name",
    "value_json",
]

_TENSORS = (TensorEntry, StoredTensor, ForeignTensor)
_DIGITS_BITS = 4096  # bits of the longest integer that is shown in decimal
_SCALARS = {"bool": "?", "float16": "e", "float32": "f", "float64": "d"} | {
    f"{kind}{8 * struct.calcsize(f'<{code}')}": code.upper() if kind == "uint" else code
    for kind in ("int", "uint")
    for code in "bhiq"
}


def name_of(path: Iterable[Any]) -> str:
    """Return the display name of a path."""
    return emit_name(tuple(path), encoded_key)


def iter_children(node: Any) -> Iterator[tuple[Any, Any]]:
    """List the steps and values right below a container; nothing below anything else."""
    if isinstance(node, Mapping):
        yield from node.items()
    elif type(node) in (list, tuple, deque):
        yield from enumerate(node)


def is_tensor(node: Any) -> bool:
    """Whether a leaf is a tensor, of a checkpoint of ours or of another kind."""
    return isinstance(node, _TENSORS)


def holds_tensors(node: Any) -> bool:
    """Whether a tensor lies somewhere in a value."""
    return is_tensor(node) or any(holds_tensors(at) for _, at in iter_children(node))


def is_branch(node: Any) -> bool:
    """Whether a value is listed by its children: a dict, or what holds a dict or a tensor.

    So `(0.9, 0.999)` is one value to a person, and so is an empty dict.
    """
    if isinstance(node, Mapping):
        return len(node) > 0
    return any(is_tensor(at) or is_branch(at) for _, at in iter_children(node))


def iter_values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """List the values below a branch that are neither branches nor tensors, with their names."""
    for step, value in iter_children(node):
        name = prefix + name_of((step,))
        if is_branch(value):
            yield from iter_values(value, name + "/")
        elif not is_tensor(value):
            yield name, value


def type_name(value: Any) -> str:
    """Return the format's word for the type of a value, as `odict`."""
    return "path" if isinstance(value, pathlib.PurePath) else _TYPES[type(value)]


def float_json(value: float) -> float | str:
    """Return a float as JSON has it: special ones are strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def value_json(value: Any) -> Any:
    """Return a value as the module's docstring says."""
    kind = type(value)
    if kind in (type(None), bool, str):
        return value
    if isinstance(value, pathlib.PurePath):
        kinds = [name for name, cls in PATH_CLASSES.items() if type(value) is cls]
        return {"$path": str(value), "kind": kinds[0]}
    return _JSON[kind](value)


def short_text(value: Any, limit: int = 60) -> str:
    """Return a value as a person writes it, in one line of at most `limit` characters."""
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return text[: limit - 1] + "…"
    return text


def _ordered(keys: Iterable[Any]) -> list[Any]:
    return sorted(keys, key=encoded_key)


def _int_text(value: int) -> str:
    return str(value) if value.bit_length() <= _DIGITS_BITS else hex(value)


def _int_json(value: int) -> Any:
    return value if INT_MIN <= value <= INT_MAX else {"$int": _int_text(value)}


def _dict_json(value: Mapping[Any, Any]) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: value_json(item) for key, item in value.items()}
    return {"$dict": _pairs_json(value)}


def _pairs_json(value: Mapping[Any, Any]) -> list[Any]:
    return [[value_json(key), value_json(item)] for key, item in value.items()]


def _items_json(value: Iterable[Any]) -> list[Any]:
    return [value_json(item) for item in value]


def _scalar_json(value: Scalar) -> Any:
    number = _scalar_number(value)
    shown = float_json(number) if type(number) is float else number
    return {"$scalar": value.dtype, "value": shown, "bytes": value.data.hex()}


def _scalar_number(value: Scalar) -> Any:
    if value.dtype == "bfloat16":  # the upper half of a float32
        return struct.unpack("<f", b"\0\0" + value.data)[0]
    code = _SCALARS.get(value.dtype)
    return struct.unpack(f"<{code}", value.data)[0] if code else None


def _pieces(value: Any, limit: int) -> Iterator[str]:
    """Write a value piece by piece, so that a long one is not written to its end."""
    kind = type(value)
    if kind in _BRACKETS:
        yield from _container_pieces(value, *_BRACKETS[kind], limit)
    elif kind in (str, bytes):
        yield repr(value[: limit + 1])
    elif isinstance(value, pathlib.PurePath):
        yield str(value)
    else:
        yield _TEXTS.get(kind, repr)(value)


def _container_pieces(value: Any, opening: str, closing: str, limit: int) -> Iterator[str]:
    yield opening
    items = _ordered(value) if isinstance(value, (set, frozenset)) else value
    for number, item in enumerate(items):
        yield ", " if number else ""
        yield from _pieces(item, limit)
        if isinstance(value, Mapping):
            yield ": "
            yield from _pieces(value[item], limit)
    yield "," + closing if type(value) is tuple and len(value) == 1 else closing


def _scalar_text(value: Scalar) -> str:
    number = _scalar_number(value)
    return f"{value.dtype}({value.data.hex() if number is None else number})"


# fmt: off
_TYPES: dict[type, str] = {
    type(None): "none", bool: "bool", int: "int", float: "float", complex: "complex", str: "str",
    bytes: "bytes", dict: "dict", OrderedDict: "odict", Counter: "counter",
    defaultdict: "defaultdict", list: "list", tuple: "tuple", set: "set", frozenset: "frozenset",
    deque: "deque", Size: "size", Scalar: "scalar", Named: "name", datetime: "datetime",
    date: "date", timedelta: "timedelta", TensorEntry: "tensor", StoredTensor: "tensor",
    ForeignTensor: "tensor",
}
_BRACKETS: dict[type, tuple[str, str]] = {
    dict: ("{", "}"), OrderedDict: ("odict{", "}"), Counter: ("counter{", "}"),
    defaultdict: ("defaultdict{", "}"), list: ("[", "]"), tuple: ("(", ")"), set: ("set{", "}"),
    frozenset: ("frozenset{", "}"), deque: ("deque[", "]"), Size: ("size[", "]"),
}
_TEXTS: dict[type, Callable[[Any], str]] = {
    int: _int_text, Scalar: _scalar_text,
    Named: lambda value: f"{value.kind}({value.name!r})",
    datetime: lambda value: str(value.isoformat(" ")), date: str, timedelta: str,
}
_JSON: dict[type, Callable[[Any], Any]] = {
    int: _int_json, float: float_json, Scalar: _scalar_json, dict: _dict_json, list: _items_json,
    complex: lambda value: {"$complex": [float_json(value.real), float_json(value.imag)]},
    bytes: lambda value: {"$bytes": value.hex()},
    OrderedDict: lambda value: {"$odict": _pairs_json(value)},
    Counter: lambda value: {"$counter": _pairs_json(value)},
    defaultdict: lambda value: {"$defaultdict": _pairs_json(value)},
    tuple: lambda value: {"$tuple": _items_json(value)},
    Size: lambda value: {"$size": list(value)},
    set: lambda value: {"$set": _items_json(_ordered(value))},
    frozenset: lambda value: {"$frozenset": _items_json(_ordered(value))},
    deque: lambda value: {"$deque": _items_json(value), "maxlen": value.maxlen},
    Named: lambda value: {"$name": value.name, "kind": value.kind},
    datetime: lambda value: {"$datetime": value.isoformat(), "fold": value.fold},
    date: lambda value: {"$date": value.isoformat()},
    timedelta: lambda value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
}
# fmt: on
