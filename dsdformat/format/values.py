"""The closed set of values that a tree may hold, and its encoding (spec section 11).

Decides which Python types can be stored and how each is written. Encoding visits children in the
canonical order of the tree, so a caller that numbers tensors as it meets them numbers them as the
spec wants. Anything not listed here is refused at save, with its path; nothing is ever looked up
or imported by a name from a file.
"""

from __future__ import annotations

import cmath
import functools
import math
import pathlib
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import Any, NamedTuple, NoReturn

from dsdformat.errors import UnsupportedValueError, shorten
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.packing import emit
from dsdformat.format.paths import Path, render_path
from dsdformat.limits import DEPTH_MAX, INT63_MAX, INT_MAX, INT_MIN

__all__ = [
    "Encoded",
    "Leaf",
    "Neighbours",
    "Named",
    "Scalar",
    "Size",
    "TensorRef",
    "encode",
    "encode_key",
    "encoded_key",
    "find_key_fault",
]

# Called for a value of no known type: gives a `TensorRef`, or a value that is known, or what is
# `Encoded` already, or NotImplemented.
Leaf = Callable[[Any, Path], Any]

# Called with the keys and values in a container, its path, and what encodes one of them; gives all
# of them encoded. For those who know a quicker way for many.
Neighbours = Callable[[Sequence[Any], Sequence[Any], Path, Callable[[Any, Any], Any]], list[Any]]

KIND = re.compile(r"[a-z][a-z0-9_.]{0,63}\Z")

# fmt: off
TAGS = frozenset({
    "complex", "counter", "date", "datetime", "defaultdict", "deque", "dict", "frozenset", "int",
    "list", "name", "odict", "path", "scalar", "set", "size", "tensor", "timedelta", "tuple",
})
# fmt: on


@dataclass(frozen=True, slots=True)
class Named:
    """A named constant of a framework, such as `Named("torch.dtype", "bfloat16")`. Inert."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar of an array library: logical dtype and little-endian bytes."""

    dtype: str
    data: bytes


class Size(tuple[int, ...]):
    """A tensor's size, kept apart from a plain tuple."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Size({list(self)})"


class Encoded(NamedTuple):
    """What a leaf hook has encoded itself."""

    value: Any


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A leaf of the tree: the tensor with this index.

    Attributes:
        index: Row in the tensor table.
        attributes: Hints, as (name, value) pairs in ascending order.
    """

    index: int
    attributes: tuple[tuple[str, Any], ...] = ()


def encode(
    value: Any, *, leaf: Leaf | None = None, neighbours: Neighbours | None = None, path: Path = ()
) -> Any:
    """Turn a value into what `packing.emit` writes.

    Args:
        value: Any nesting of the values of the spec.
        leaf: What to do with other types; see `Leaf`. It is called in the order of the tree.
        neighbours: What to do with all that a container holds; see `Neighbours`. Likewise.
        path: Where the value lies, for errors.

    Raises:
        UnsupportedValueError: `unsupported_value` with the path, or `value_too_deep`.
    """
    return _Encoder(leaf, neighbours, list(path), depth=1).encode(value)


def encode_key(key: Any, path: Path = (), depth: int = 1) -> Any:
    """Encode a key value: what may be a dict key or an element of a set (R-11.4)."""
    if type(key) is str and key.isascii():  # most are
        return key
    fault = find_key_fault(key)
    if fault:
        raise UnsupportedValueError(
            f"{render_path(path)}: {fault} cannot be a dict key or an element of a set: "
            f"{shorten(key)}",
            path_in_tree=render_path(path),
        )
    return _Encoder(None, None, list(path), depth).encode(key)


def encoded_key(key: Any) -> bytes:
    """Return the canonical bytes of a key value."""
    return emit(encode_key(key))


def find_key_fault(key: Any) -> str | None:
    """Say what in a value forbids it as a key, or None if nothing does."""
    kind = type(key)
    if kind in (float, complex):
        return "a NaN" if cmath.isnan(key) else None
    if kind in (tuple, frozenset):
        return next((fault for fault in map(find_key_fault, key) if fault), None)
    if kind in (type(None), bool, int, str, bytes):
        return None
    return f"a value of type {kind.__name__}"


class _Encoder:
    def __init__(
        self, leaf: Leaf | None, neighbours: Neighbours | None, path: list[Any], depth: int
    ) -> None:
        self.leaf = leaf
        self.neighbours = neighbours
        self.path = path
        self.depth = depth  # of the msgpack array or map around the value

    def encode(self, value: Any) -> Any:
        method = _ENCODERS.get(type(value))
        if method is not None:
            if self.depth >= DEPTH_MAX and type(value) not in _FLAT:
                self._too_deep()
            return method(self, value)
        if self.depth >= DEPTH_MAX:
            self._too_deep()
        if isinstance(value, pathlib.PurePath):
            return self._path(value)
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        result = NotImplemented if self.leaf is None else self.leaf(value, tuple(self.path))
        if type(result) is TensorRef:
            return self._reference(result)
        if type(result) is Encoded:
            return result.value
        if type(result) not in _ENCODERS:
            self.refuse(value)
        return self.encode(result)

    def refuse(self, value: Any, why: str = "") -> NoReturn:
        kind = type(value)
        what = why or f"a value of type {kind.__module__}.{kind.__qualname__}"
        if isinstance(value, (type, *_FUNCTIONS)) and not why:
            what = f"a {'class' if isinstance(value, type) else 'function'}"
        place = render_path(self.path)
        raise UnsupportedValueError(
            f"{place}: {what} cannot be stored without pickle: {shorten(value)}",
            path_in_tree=place,
            hint=_hint(value),
        )

    def child(self, step: Any, value: Any, levels: int = 1) -> Any:
        self.path.append(step)
        self.depth += levels
        if self.depth > DEPTH_MAX:
            self._too_deep()
        result = self.encode(value)
        self.depth -= levels
        self.path.pop()
        return result

    def children(self, steps: Sequence[Any], values: Sequence[Any], levels: int = 1) -> list[Any]:
        """Encode all that a container holds."""

        def one(step: Any, value: Any) -> Any:
            return self.child(step, value, levels)

        # So deep down each is to be refused with its own path.
        if self.neighbours is None or not steps or self.depth + levels >= DEPTH_MAX:
            return list(map(one, steps, values))
        return self.neighbours(steps, values, self.path, one)

    def _too_deep(self) -> NoReturn:
        place = render_path(self.path[:3])
        raise UnsupportedValueError(
            f"{place}…: nested too deep to be stored, or contains itself",
            code="value_too_deep",
            path_in_tree=place,
        )

    def _as_is(self, value: Any) -> Any:
        return value

    def _int(self, value: int) -> Any:
        if INT_MIN <= value <= INT_MAX:
            return value
        if self.depth >= DEPTH_MAX:
            self._too_deep()
        nbytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
        return ["int", value.to_bytes(nbytes, "little", signed=True)]

    def _float(self, value: float) -> float:
        return math.nan if math.isnan(value) else value

    def _complex(self, value: complex) -> Any:
        return ["complex", self._float(value.real), self._float(value.imag)]

    def _str(self, value: str) -> str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                self.refuse(value, "a string with lone surrogates")
        return value

    def _dict(self, value: dict[Any, Any]) -> Any:
        if set(map(type, value)) - {str}:
            return ["dict", *self._pairs(value, ordered=True)]
        keys = sorted(value)
        if not "".join(keys).isascii():
            deque(map(self._str, keys), maxlen=0)
        return dict(zip(keys, self.children(keys, [value[key] for key in keys]), strict=True))

    def _odict(self, value: OrderedDict[Any, Any]) -> Any:
        return ["odict", *self._pairs(value, ordered=False)]

    def _counter(self, value: Counter[Any]) -> Any:
        return ["counter", *self._pairs(value, ordered=True)]

    def _defaultdict(self, value: defaultdict[Any, Any]) -> Any:
        return ["defaultdict", *self._pairs(value, ordered=True)]

    def _pairs(self, value: Mapping[Any, Any], *, ordered: bool) -> list[Any]:
        keys = [(encode_key(key, self.path, self.depth + 2), key) for key in value]
        if ordered:
            keys.sort(key=lambda pair: emit(pair[0]))
        steps = [key for _, key in keys]
        children = self.children(steps, [value[key] for key in steps], levels=2)
        return [[encoded, child] for (encoded, _), child in zip(keys, children, strict=True)]

    def _sequence(self, tag: str, value: Collection[Any]) -> list[Any]:
        return [tag, *self.children(range(len(value)), list(value))]

    def _list(self, value: list[Any]) -> Any:
        return self._sequence("list", value)

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        return self._sequence("tuple", value)

    def _deque(self, value: deque[Any]) -> Any:
        tag, *items = self._sequence("deque", value)
        return [tag, value.maxlen, *items]

    def _set(self, value: set[Any] | frozenset[Any]) -> Any:
        keys = [encode_key(key, self.path, self.depth + 1) for key in value]
        return [type(value).__name__, *sorted(keys, key=emit)]

    def _size(self, value: Size) -> Any:
        if any(type(item) is not int or not 0 <= item <= INT63_MAX for item in value):
            self.refuse(value, "a size with other numbers than 0 to 2**63-1")
        return ["size", *value]

    def _named(self, value: Named) -> Any:
        kind, name = value.kind, value.name
        if type(kind) is not str or type(name) is not str or not KIND.match(kind):
            self.refuse(value, "a named constant of this form")
        return ["name", kind, self._str(name)]

    def _scalar(self, value: Scalar) -> Any:
        row = DTYPES.get(value.dtype) if type(value.dtype) is str else None
        if row is None or type(value.data) is not bytes or len(value.data) != row.itemsize:
            self.refuse(value, "a scalar of this form")
        return ["scalar", value.dtype, value.data]

    def _datetime(self, value: datetime) -> Any:
        offset = None
        if value.tzinfo is not None:
            delta = value.utcoffset()
            if type(value.tzinfo) is not timezone or value.tzinfo.tzname(None) != (
                timezone(delta or timedelta()).tzname(None)
            ):
                self.refuse(value, "a datetime with a named time zone")
            offset = (delta or timedelta()) // timedelta(microseconds=1)
        day = [value.year, value.month, value.day]
        clock = [value.hour, value.minute, value.second, value.microsecond, value.fold]
        return ["datetime", *day, *clock, offset]

    def _date(self, value: date) -> Any:
        return ["date", value.year, value.month, value.day]

    def _timedelta(self, value: timedelta) -> Any:
        return ["timedelta", value.days, value.seconds, value.microseconds]

    def _path(self, value: pathlib.PurePath) -> Any:
        kind = _PATH_KINDS.get(type(value))
        if kind is None:
            self.refuse(value)
        parts = value.parts[1:] if value.anchor else value.parts
        for part in (value.anchor, *parts):
            self._str(part)
        if find_path_fault([kind, value.anchor, *parts]):
            self.refuse(value, "a path of this form")
        return ["path", kind, value.anchor, *parts]

    def _ref(self, value: TensorRef) -> Any:
        # Who names tensors decides what a reference means.
        return self._reference(value) if self.leaf is None else self._leaf(value)

    def _reference(self, value: TensorRef) -> Any:
        if not value.attributes:
            return ["tensor", value.index]
        attributes = {
            name: self.child(name, item, levels=2) for name, item in sorted(value.attributes)
        }
        return ["tensor", value.index, attributes]


def find_path_fault(items: list[Any]) -> str | None:
    """Say which rule of R-11.7 the kind, anchor and parts of a path break, or None."""
    if len(items) < 2 or not all(type(item) is str for item in items):
        return "kind, anchor and parts of a path are strings"
    kind, anchor, *parts = items
    if kind not in PATH_CLASSES:
        return f"{shorten(kind)} is not a kind of path"
    windows = kind.endswith("windows")
    forbidden = "/\0\\:" if windows else "/\0"
    for part in parts:
        if part in ("", ".") or any(char in part for char in forbidden):
            return f"{shorten(part)} cannot be a part of a path"
    if not (_is_windows_anchor(anchor) if windows else anchor in ("", "/", "//")):
        return f"{shorten(anchor)} cannot be the anchor of a path"
    return None


def _is_windows_anchor(anchor: str) -> bool:
    if anchor in ("", "\\"):
        return True
    if len(anchor) in (2, 3) and anchor[1] == ":":
        return anchor[0].isascii() and anchor[0].isalpha() and anchor[2:] in ("", "\\")
    if not (anchor.startswith("\\\\") and anchor.endswith("\\")):
        return False
    names = anchor[2:-1].split("\\")
    return len(names) == 2 and all(
        name not in ("", ".") and not any(char in name for char in "/:?\0") for name in names
    )


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)


def _hint(value: Any) -> str:
    if isinstance(value, tuple):
        return "a named tuple can be stored as a plain tuple or dict"
    if hasattr(value, "state_dict"):
        return "store its state_dict() instead of the object"
    return "store a number, a string or a container in its place, and build the object at load"


# fmt: off
_FLAT = frozenset({type(None), bool, bytes, int, float, str})
_ENCODERS: dict[type, Callable[[_Encoder, Any], Any]] = {
    type(None): _Encoder._as_is, bool: _Encoder._as_is, bytes: _Encoder._as_is,
    int: _Encoder._int, float: _Encoder._float, complex: _Encoder._complex, str: _Encoder._str,
    dict: _Encoder._dict, OrderedDict: _Encoder._odict, Counter: _Encoder._counter,
    defaultdict: _Encoder._defaultdict, list: _Encoder._list, tuple: _Encoder._tuple,
    deque: _Encoder._deque, set: _Encoder._set, frozenset: _Encoder._set, Size: _Encoder._size,
    Named: _Encoder._named, Scalar: _Encoder._scalar, datetime: _Encoder._datetime,
    date: _Encoder._date, timedelta: _Encoder._timedelta, TensorRef: _Encoder._ref,
}
# fmt: on


class ForeignPosixPath(pathlib.PurePosixPath):
    """A concrete POSIX path that was read on Windows; it is stored as what it was."""


class ForeignWindowsPath(pathlib.PureWindowsPath):
    """A concrete Windows path that was read elsewhere; it is stored as what it was."""


_ON_WINDOWS = isinstance(pathlib.Path(), pathlib.WindowsPath)
PATH_CLASSES: dict[str, type[pathlib.PurePath]] = {
    "pure_posix": pathlib.PurePosixPath,
    "pure_windows": pathlib.PureWindowsPath,
    "posix": ForeignPosixPath if _ON_WINDOWS else pathlib.PosixPath,
    "windows": pathlib.WindowsPath if _ON_WINDOWS else ForeignWindowsPath,
}
_PATH_KINDS = {cls: kind for kind, cls in PATH_CLASSES.items()}
