"""What becomes of the inert records in a tree: refused, left out, or kept as plain values.

Decides also what constants of torch and numpy are in the format, and where each thing lies, so
that a refusal can say so.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, timedelta, timezone
from pathlib import PurePath
from typing import Any, Literal

from dsdformat.convert.faults import fault
from dsdformat.convert.numpy_names import NumpyDtype
from dsdformat.convert.pickles.nodes import ABSENT, Global
from dsdformat.convert.pickles.resolving import Made, Unknown
from dsdformat.convert.plain_names import StateDict
from dsdformat.convert.storages import Storage
from dsdformat.convert.tensor import ForeignTensor
from dsdformat.convert.torch_constants import named_constant
from dsdformat.errors import ConvertError, printable
from dsdformat.format.paths import render_path
from dsdformat.format.values import Named, Scalar, Size, find_key_fault
from dsdformat.limits import DEPTH_MAX

__all__ = ["Finding", "Policy", "Settled", "settle"]

Policy = Literal["refuse", "drop", "record"]
Path = tuple[Any, ...]

_SHOWN_MAX = 10
_DROP = object()
_ATTRIBUTES = "__dict__"  # in paths to what Python keeps on an object
# What the format holds as it is.
_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, Named, Scalar, Size),
    *(date, timedelta, PurePath, ForeignTensor),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in the tree that is not converted as it is.

    Attributes:
        path: Where it lies.
        name: Dotted name of its class or function, or what it is.
        reason: Why it is not read, or "" for a name that is not on the closed list.
        lost: Whether a value is left out or changed, and not only attributes of an object.
    """

    path: Path
    name: str
    reason: str = ""
    lost: bool = True

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"{render_path(self.path)}: {printable(self.name)}{reason}"


@dataclass
class Settled:
    """A tree that the format can hold.

    Attributes:
        tree: Values of the format, with a `ForeignTensor` at each tensor.
        findings: What is not in it as it was, in the order of the tree.
        attributes: What Python keeps on ordered dicts beside their items, as `_metadata` of a
            state dict, by path.
    """

    tree: Any = None
    findings: list[Finding] = field(default_factory=list)
    attributes: dict[Path, Any] = field(default_factory=dict)


def settle(tree: Any, policy: Policy, where: str) -> Settled:
    """Make a tree one of values that the format can hold.

    Args:
        tree: What `resolve` gave.
        policy: What to do with what is not on the closed list: `refuse` all; `drop` it from
            dicts, and put None in its place elsewhere; or `record` it as a dict of its name and
            what it was made from.
        where: Name of the file, for errors.

    Raises:
        ConvertError: `unknown_global` with the places and names, or `foreign_too_large`.
    """
    settler = _Settler(policy, where)
    settler.settled.tree = settler.walk(tree, ())
    if settler.settled.tree is _DROP:
        settler.settled.tree = None
    refused = [one for one in settler.settled.findings if one.lost]
    if refused and policy == "refuse":
        raise _refusal(where, refused)
    return settler.settled


def _refusal(where: str, findings: list[Finding]) -> ConvertError:
    shown = "; ".join(map(str, findings[:_SHOWN_MAX]))
    if len(findings) > _SHOWN_MAX:
        shown += f"; and {len(findings) - _SHOWN_MAX} more"
    names = list(dict.fromkeys(finding.name for finding in findings))
    one = fault("unknown_global", where, f"holds what is not read: {shown}")
    return ConvertError(
        one.message,
        code=one.code,
        hint="leave it out with unknown='drop', or keep it as plain values with unknown='record'",
        where=where,
        names=names,
    )


class _Settler:
    def __init__(self, policy: Policy, where: str) -> None:
        self.policy = policy
        self.where = where
        self.settled = Settled()

    def walk(self, value: Any, path: Path) -> Any:
        """Return what a value becomes, or `_DROP`."""
        if len(path) >= DEPTH_MAX:
            place = render_path(path[:3])
            raise fault("foreign_too_large", self.where, f"{place}… is nested too deep")
        handler = _CONTAINERS.get(type(value))
        if handler is not None:
            return handler(self, value, path)
        if type(value) is Unknown:
            return self.unknown(value, path)
        if type(value) is ForeignTensor and value.extra is not None:
            self.note(path, "attributes of the tensor", lost=False)
            self.walk(value.extra, (*path, _ATTRIBUTES))
        if isinstance(value, _VALUES):
            return value
        found = _constant(value)
        return found if found is not None else self.unknown(_other(value), path)

    def note(self, path: Path, name: str, reason: str = "", *, lost: bool = True) -> None:
        self.settled.findings.append(Finding(path, name, reason, lost))

    def unknown(self, value: Unknown, path: Path) -> Any:
        self.note(path, value.name, value.reason)
        if self.policy == "record":
            return self.record(value, path)
        return _DROP

    def record(self, value: Unknown, path: Path) -> dict[str, Any]:
        """Return the name of a value and what it was made from, as plain values."""
        record: dict[str, Any] = {"name": value.name}
        made = value.made
        if made is not None:
            for name, part in _parts(made):
                found = self.walk(part, (*path, name))
                record[name] = None if found is _DROP else found
        return record

    def mapping(self, value: Any, path: Path) -> list[tuple[Any, Any]]:
        result = []
        for key, item in value.items():
            fitting = self.key(key, path)
            if fitting is not _DROP:
                found = self.walk(item, (*path, fitting))
                if found is not _DROP:
                    result.append((fitting, found))
        return result

    def key(self, key: Any, path: Path) -> Any:
        """Return what a key becomes, or `_DROP`."""
        if find_key_fault(key) is None:
            return key
        name = key.dotted if type(key) is Global else getattr(key, "name", type(key).__name__)
        self.note(path, str(name), "as a key")
        return f"{name}" if self.policy == "record" and type(key) is Global else _DROP

    def sequence(self, value: Any, path: Path) -> Iterator[Any]:
        for index, item in enumerate(value):
            found = self.walk(item, (*path, index))
            yield None if found is _DROP else found

    def elements(self, value: Any, path: Path) -> Iterator[Any]:
        for item in value:
            fitting = self.key(item, path)
            if fitting is not _DROP:
                yield fitting

    def ordered(self, value: Any, path: Path) -> Any:
        return OrderedDict(self.mapping(value, path))

    def state_dict(self, value: StateDict, path: Path) -> Any:
        self.settled.attributes[path] = self.walk(value.attributes, (*path, _ATTRIBUTES))
        return self.ordered(value, path)


def _parts(made: Made) -> Iterator[tuple[str, Any]]:
    for name in ("args", "kwargs", "state", "items"):
        part = getattr(made, name)
        if part is not ABSENT and part:
            yield name, part
    if made.pairs:
        yield "pairs", [list(pair) for pair in made.pairs]


def _constant(value: Any) -> Any:
    """Return the constant of the format that a name or dtype stands for, or None."""
    if type(value) is Global:
        return named_constant(value)
    if type(value) is NumpyDtype and not value.big:
        return Named("numpy.dtype", value.name)
    return None


def _other(value: Any) -> Unknown:
    if type(value) is Global:
        return Unknown(value.dotted, "a class or function")
    if type(value) is NumpyDtype:
        return Unknown("numpy.dtype", "a big-endian dtype")
    if type(value) is Storage:
        return Unknown("torch.UntypedStorage", "a storage")
    if type(value) is timezone:
        return Unknown("datetime.timezone", "a time zone")
    if type(value) is bytearray:
        return Unknown("builtins.bytearray", "a bytearray")
    return Unknown(f"{type(value).__module__}.{type(value).__qualname__}")


_CONTAINERS: dict[type, Callable[[_Settler, Any, Path], Any]] = {
    dict: lambda settler, value, path: dict(settler.mapping(value, path)),
    OrderedDict: _Settler.ordered,
    StateDict: _Settler.state_dict,
    Counter: lambda settler, value, path: Counter(dict(settler.mapping(value, path))),
    defaultdict: lambda settler, value, path: defaultdict(None, settler.mapping(value, path)),
    list: lambda settler, value, path: list(settler.sequence(value, path)),
    tuple: lambda settler, value, path: tuple(settler.sequence(value, path)),
    deque: lambda settler, value, path: deque(settler.sequence(value, path), value.maxlen),
    set: lambda settler, value, path: set(settler.elements(value, path)),
    frozenset: lambda settler, value, path: frozenset(settler.elements(value, path)),
}
