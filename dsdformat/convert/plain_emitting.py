"""What plain values of Python are in a pickle: names that are called, and with what.

The other direction of `plain_names`, and as closed: what is not listed here is refused, with its
place. By default only those are written that `torch.load(weights_only=True)` reads.
"""

from __future__ import annotations

import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from typing import Any, NoReturn

from dsdformat.convert.pickles.emitting import Emitter
from dsdformat.errors import UnsupportedValueError
from dsdformat.format.paths import render_path
from dsdformat.format.values import PATH_CLASSES, Size, encoded_key

__all__ = ["PlainEmitter", "refuse", "refuse_dtype"]

Path = tuple[Any, ...]

_BUILTINS = "__builtin__"  # as protocol 2 calls it; every reader knows
_SAFE_INT_NBYTES_MAX = 255
_HINT = "pass weights_only=False to write what torch.load(weights_only=False) alone reads"
_PATH_NAMES = {
    cls: f"{'Pure' if kind.startswith('pure') else ''}"
    f"{'Windows' if kind.endswith('windows') else 'Posix'}Path"
    for kind, cls in PATH_CLASSES.items()
}


class PlainEmitter:
    """Writes values into a pickle."""

    def __init__(
        self,
        emitter: Emitter,
        *,
        weights_only: bool,
        attributes: Mapping[Path, Any] | None = None,
    ) -> None:
        """Begin.

        Args:
            emitter: Takes the opcodes.
            weights_only: Whether to refuse what `torch.load(weights_only=True)` does not read.
            attributes: What Python keeps on ordered dicts, by path; see `Foreign`.
        """
        self.emitter = emitter
        self._weights_only = weights_only
        self._attributes = attributes or {}

    def write(self, value: Any, path: Path = ()) -> None:
        """Write a value.

        Raises:
            UnsupportedValueError: `unsupported_value` or `unsupported_dtype`, with its place.
        """
        handler = _HANDLERS.get(type(value))
        if handler is not None:
            handler(self, value, path)
        elif isinstance(value, pathlib.PurePath):
            self._path(value, path)
        else:
            self.write_other(value, path)

    def write_other(self, value: Any, path: Path) -> None:
        """Write a value that is no plain one."""
        refuse(path, f"a value of type {type(value).__name__}")

    def write_tuple(self, value: tuple[Any, ...], path: Path) -> None:
        """Write a tuple."""
        if len(value) <= 3:
            for index, item in enumerate(value):
                self.write(item, (*path, index))
            self.emitter.tuple(len(value))
        else:
            self.above_mark(value, path)
            self.emitter.tuple()

    def call(self, module: str, qualname: str, args: Sequence[Any], path: Path) -> None:
        """Write the call of a name with these values, at most 3."""
        self.emitter.name(module, qualname)
        for arg in args:
            self.write(arg, path)
        self.emitter.tuple(len(args))
        self.emitter.call()

    def above_mark(self, values: Iterable[Any], path: Path) -> None:
        """Write values above a mark."""
        self.emitter.mark()
        for index, item in enumerate(values):
            self.write(item, (*path, index))

    def check_full(self, path: Path, what: str) -> None:
        """Refuse what the restricted reader of torch does not read, where that is wanted."""
        if self._weights_only:
            refuse(path, f"{what}, which torch.load(weights_only=True) does not read,", _HINT)

    # Atoms

    def _atom(self, value: Any, _path: Path) -> None:
        self.emitter.atom(value)

    def _int(self, value: int, path: Path) -> None:
        if value.bit_length() // 8 + 1 > _SAFE_INT_NBYTES_MAX:
            self.check_full(path, "an integer of more than 255 bytes")
        self.emitter.integer(value)

    def _float(self, value: float, _path: Path) -> None:
        self.emitter.real(value)

    def _str(self, value: str, _path: Path) -> None:
        self.emitter.text(value)

    def _bytes(self, value: bytes, _path: Path) -> None:
        self.emitter.data(value)

    def _complex(self, value: complex, path: Path) -> None:
        self.call(_BUILTINS, "complex", (value.real, value.imag), path)

    # Containers

    def _items(self, value: Mapping[Any, Any], path: Path) -> None:
        """Set items in what is on the stack."""
        if not value:
            return
        self.emitter.mark()
        for key, item in value.items():
            if _has_frozenset(key):
                self.check_full((*path, key), "a frozenset")
            self.write(key, path)
            self.write(item, (*path, key))
        self.emitter.set_items()

    def _dict(self, value: dict[Any, Any], path: Path) -> None:
        self.emitter.new_dict()
        self._items(value, path)

    def _ordered(self, value: OrderedDict[Any, Any], path: Path) -> None:
        self.call("collections", "OrderedDict", (), path)
        self._items(value, path)
        if path in self._attributes:
            self.write(self._attributes[path], (*path, "__dict__"))
            self.emitter.build()

    def _counter(self, value: Counter[Any], path: Path) -> None:
        self.call("collections", "Counter", (dict(value),), path)

    def _default(self, value: defaultdict[Any, Any], path: Path) -> None:
        self.check_full(path, "a defaultdict")
        self.call("collections", "defaultdict", (), path)
        self._items(value, path)

    def _list(self, value: Iterable[Any], path: Path) -> None:
        self.emitter.new_list()
        self.above_mark(value, path)
        self.emitter.append()

    def _tuple(self, value: tuple[Any, ...], path: Path) -> None:
        self.write_tuple(value, path)

    def _deque(self, value: deque[Any], path: Path) -> None:
        self.check_full(path, "a deque")
        args: tuple[Any, ...] = ((),) if value.maxlen is None else ((), value.maxlen)
        self.call("collections", "deque", args, path)
        self.above_mark(value, path)
        self.emitter.append()

    def _set(self, value: set[Any] | frozenset[Any], path: Path) -> None:
        if type(value) is frozenset or any(map(_has_frozenset, value)):
            self.check_full(path, "a frozenset")
        items = sorted(value, key=encoded_key)
        self.call(_BUILTINS, type(value).__name__, (items,), path)

    def _size(self, value: Size, path: Path) -> None:
        self.call("torch", "Size", (tuple(value),), path)

    # Times and paths

    def _timedelta(self, value: timedelta, path: Path) -> None:
        self.check_full(path, "a timedelta")
        args = (value.days, value.seconds, value.microseconds)
        self.call("datetime", "timedelta", args, path)

    def _timezone(self, value: timezone, path: Path) -> None:
        self.call("datetime", "timezone", (value.utcoffset(None),), path)

    def _date(self, value: date, path: Path) -> None:
        self.check_full(path, "a date")
        data = value.year.to_bytes(2) + bytes([value.month, value.day])
        self.call("datetime", "date", (data,), path)

    def _datetime(self, value: datetime, path: Path) -> None:
        self.check_full(path, "a datetime")
        day = value.year.to_bytes(2) + bytes([value.month | value.fold << 7, value.day])
        clock = bytes([value.hour, value.minute, value.second]) + value.microsecond.to_bytes(3)
        zone = () if value.tzinfo is None else (value.tzinfo,)
        self.call("datetime", "datetime", (day + clock, *zone), path)

    def _path(self, value: pathlib.PurePath, path: Path) -> None:
        self.check_full(path, "a path")
        name = _PATH_NAMES.get(type(value))
        if name is None:
            refuse(path, f"a path of the class {type(value).__name__}")
        self.emitter.name("pathlib", name)
        self.above_mark(value.parts, path)
        self.emitter.tuple()
        self.emitter.call()


def refuse(path: Path, what: str, hint: str | None = None) -> NoReturn:
    """Refuse what cannot be in a file of torch."""
    place = render_path(path)
    raise UnsupportedValueError(
        f"{place}: {what} cannot be written into a file of torch.save",
        path_in_tree=place,
        hint=hint or "leave it out, or keep it in a checkpoint of ours",
    )


def refuse_dtype(path: Path, what: str) -> NoReturn:
    """Refuse a dtype that cannot be in a file of torch."""
    place = render_path(path)
    raise UnsupportedValueError(f"{place}: {what}", code="unsupported_dtype", path_in_tree=place)


def _has_frozenset(key: Any) -> bool:
    return type(key) is frozenset or (type(key) is tuple and any(map(_has_frozenset, key)))


_HANDLERS: dict[type, Callable[[PlainEmitter, Any, Path], None]] = {
    type(None): PlainEmitter._atom,
    bool: PlainEmitter._atom,
    int: PlainEmitter._int,
    float: PlainEmitter._float,
    complex: PlainEmitter._complex,
    str: PlainEmitter._str,
    bytes: PlainEmitter._bytes,
    dict: PlainEmitter._dict,
    OrderedDict: PlainEmitter._ordered,
    Counter: PlainEmitter._counter,
    defaultdict: PlainEmitter._default,
    list: PlainEmitter._list,
    tuple: PlainEmitter._tuple,
    deque: PlainEmitter._deque,
    set: PlainEmitter._set,
    frozenset: PlainEmitter._set,
    Size: PlainEmitter._size,
    timedelta: PlainEmitter._timedelta,
    timezone: PlainEmitter._timezone,
    date: PlainEmitter._date,
    datetime: PlainEmitter._datetime,
}
