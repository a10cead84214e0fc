"""From the graph of a pickle to values: closed rules for known names, inert records for the rest.

Decides the order (children first, without recursion), how deep and how large a graph may be, what
can be a key, and that nothing contains itself. What a known name means is in the rules:
`plain_names`, `numpy_names`, `torch_names`, `dcp_names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsdformat.convert.faults import fault
from dsdformat.convert.pickles.keys import ValueFault, checked_key, distinct
from dsdformat.convert.pickles.nodes import ABSENT, ATOMS, Call, Elements, Global, Pairs, Stored
from dsdformat.errors import ConvertError, printable
from dsdformat.garbage import paused_gc
from dsdformat.limits import (
    PICKLE_DEPTH_MAX,
    PICKLE_NODES_FREE,
    PICKLE_NODES_MAX,
    PICKLE_SHARED_MAX,
)

_FLAT_MAX = 8

__all__ = ["Made", "Maker", "Rules", "Unknown", "renamed", "resolve"]


@dataclass(slots=True)
class Made:
    """A call with everything in it resolved.

    Attributes:
        name: What is called, dotted.
        args, kwargs, items, pairs: As in `nodes.Call`; None where there are none.
        state: What is set on the result, or `ABSENT`.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[Any, Any] | None = None
    state: Any = ABSENT
    items: list[Any] | None = None
    pairs: list[tuple[Any, Any]] | None = None

    def bare(self) -> tuple[Any, ...]:
        """Return the arguments of a call that has nothing else.

        Raises:
            ValueFault: it has.
        """
        if self.kwargs or self.items or self.pairs or self.state is not ABSENT:
            raise ValueFault("more than arguments")
        return self.args


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """A value that is not on the closed list: inert.

    Attributes:
        name: Dotted name of its class or function.
        reason: Why it is not read, where the name is known; else "".
        made: What it would have been made from, or None.
    """

    name: str
    reason: str = ""
    made: Made | None = None


Maker = Callable[[Made], Any]


def _not_stored(_pid: Any) -> Any:
    return Unknown("a persistent id")


@dataclass(frozen=True)
class Rules:
    """What names mean.

    Attributes:
        calls: By module and name, what makes the value of a call.
        stored: Makes the value of a persistent id.
    """

    calls: Mapping[tuple[str, str], Maker]
    stored: Callable[[Any], Any] = _not_stored

    def find(self, function: Any) -> Maker | None:
        """Return what makes the value of a call, or None if it is not known."""
        return (
            self.calls.get((function.module, function.name)) if type(function) is Global else None
        )


# Names of Python 2, and names that have moved.
_RENAMED = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "torch.tensor": "torch._tensor",
    "pathlib._local": "pathlib",
}


def renamed(function: Any) -> Any:
    """Return the name that is used today; what is no name as it is."""
    module = _RENAMED.get(function.module) if type(function) is Global else None
    return function if module is None else Global(module, function.name)


def resolve(root: Any, rules: Rules, where: str) -> Any:
    """Return the value of a graph.

    Known names become what the rules make of them; a `Global` that stands for itself stays one;
    others become `Unknown`. Shared nodes become shared values.

    Args:
        root: A node of `nodes`.
        rules: What names mean.
        where: Name of the file, for errors.

    Raises:
        ConvertError: `pickle_value`, `pickle_malformed`, `pickle_cycle` or `foreign_too_large`,
            or what the rules raise.

    Memory: about that of the graph.
    """
    with paused_gc():
        return _Resolver(rules, where).resolve(root)


class _Resolver:
    def __init__(self, rules: Rules, where: str) -> None:
        self.rules = rules
        self.where = where
        self.done: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}  # values within, shared ones as often as they are met
        self.parts = 0  # the same, shared ones once
        self.open: dict[int, int] = {}  # from the root down to the node at hand: how deep
        self.unread: list[int] = []  # of these, those that are no known call

    def resolve(self, root: Any) -> Any:
        stack, done, opened = [root], self.done, self.open
        while stack:
            node = stack[-1]
            key = id(node)
            if key in done or _is_flat(node):
                stack.pop()
            elif key in opened:
                stack.pop()
                self._close(node)
                self._finish(node)
            else:
                self._open(node)
                for child in _children(node):
                    if type(child) in ATOMS or id(child) in done or _is_flat(child):
                        continue
                    if id(child) in opened:
                        self._check_cycle(child)
                    else:
                        stack.append(child)
        return self.get(root)

    def fault(self, code: str, message: str) -> ConvertError:
        return fault(code, self.where, f"in its pickle, {message}")

    def get(self, node: Any) -> Any:
        """Return the value of a node; of one that is open, what stands for it within itself."""
        kind = type(node)
        if kind in ATOMS or node is ABSENT:
            return node
        if kind is Global:
            return renamed(node)
        found = self.done.get(id(node), ABSENT)
        if found is not ABSENT:
            return found
        return Unknown("a value within itself") if id(node) in self.open else node

    def _open(self, node: Any) -> None:
        depth = len(self.open)
        if depth >= PICKLE_DEPTH_MAX:
            raise self.fault("foreign_too_large", "its objects are nested too deep")
        self.open[id(node)] = depth
        if type(node) is Call and self.rules.find(renamed(node.function)) is None:
            self.unread.append(depth)

    def _close(self, node: Any) -> None:
        depth = self.open.pop(id(node))
        if self.unread and self.unread[-1] == depth:
            self.unread.pop()

    def _check_cycle(self, node: Any) -> None:
        """Refuse what contains itself, but for objects that are not read anyway."""
        if not self.unread or self.unread[-1] < self.open[id(node)]:
            raise self.fault("pickle_cycle", f"{_describe(node)} contains itself")

    def _finish(self, node: Any) -> None:
        sizes, children = self.sizes, _children(node)
        size = 1 + sum(sizes.get(id(child), 1) for child in children)
        self.parts += 1 + len(children)
        if size > min(PICKLE_NODES_MAX, max(PICKLE_NODES_FREE, PICKLE_SHARED_MAX * self.parts)):
            raise self.fault("foreign_too_large", "shared objects unfold to too many values")
        sizes[id(node)] = size
        try:
            self.done[id(node)] = self._make(node)
        except ValueFault as error:
            message = f"{_describe(node)} has {error}" if error.code == "pickle_value" else error
            raise self.fault(error.code, str(message)) from None

    def _make(self, node: Any) -> Any:
        kind = type(node)
        if kind is tuple:
            return tuple(map(self.get, node))
        if kind is list:
            return list(map(self.get, node))
        if kind is Pairs:
            return self._dict(node.flat)
        if kind is Elements:
            items = [checked_key(self.get(item)) for item in node.items]
            unique = distinct(items)
            return frozenset(unique) if node.frozen else unique
        if kind is Stored:
            return self.rules.stored(self.get(node.pid))
        return self._call(node)

    def _call(self, node: Call) -> Any:
        function = self.get(node.function)
        name = function.dotted if type(function) is Global else _name_of(function)
        made = Made(name, self.get(node.args), state=self.get(node.state))
        if node.kwargs is not None:
            made.kwargs = self._dict(node.kwargs.flat)
        if node.items is not None:
            made.items = list(map(self.get, node.items))
        if node.pairs is not None:
            made.pairs = self._pairs(node.pairs)
        maker = self.rules.find(function)
        return Unknown(name, made=made) if maker is None else maker(made)

    def _pairs(self, flat: list[Any]) -> list[tuple[Any, Any]]:
        return [
            (checked_key(self.get(flat[index])), self.get(flat[index + 1]))
            for index in range(0, len(flat), 2)
        ]

    def _dict(self, flat: list[Any]) -> dict[Any, Any]:
        pairs = self._pairs(flat)
        distinct([key for key, _ in pairs])
        return dict(pairs)


def _children(node: Any) -> Sequence[Any]:
    kind = type(node)
    if kind is tuple or kind is list:
        return node  # type: ignore[no-any-return]
    if kind is Pairs:
        return node.flat  # type: ignore[no-any-return]
    if kind is Elements:
        return node.items  # type: ignore[no-any-return]
    if kind is Stored:
        return (node.pid,)
    parts = [node.function, node.args, node.kwargs, node.state]
    return [part for part in parts if part is not ABSENT] + (node.items or []) + (node.pairs or [])


def _is_flat(node: Any) -> bool:
    """Whether a node is its own value: an atom, a name, or a short tuple of atoms."""
    kind = type(node)
    if kind is tuple:
        return len(node) <= _FLAT_MAX and all(type(item) in ATOMS for item in node)
    return kind in ATOMS or kind is Global


def _describe(node: Any) -> str:
    if type(node) is Call and type(node.function) is Global:
        return printable(node.function.dotted)
    names = {list: "a list", tuple: "a tuple", Pairs: "a dict", Elements: "a set"}
    return names.get(type(node), "an object")


def _name_of(function: Any) -> str:
    return f"the result of {function.name}" if type(function) is Unknown else "no name"
