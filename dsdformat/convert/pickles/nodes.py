"""What a pickle says, as inert records: nothing here is looked up, called or hashed.

A graph of these is what `machine` makes of a pickle. Plain atoms (None, bool, int, float, str,
bytes, bytearray), lists and tuples stand for themselves. Dicts and sets are lists of what goes
into them, so that no key of a file is hashed before it was looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ABSENT", "ATOMS", "Call", "Elements", "Global", "Pairs", "Stored"]

ATOMS = frozenset({type(None), bool, int, float, str, bytes, bytearray})


class _Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a module that the pickle refers to."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        """Both in one, for messages."""
        return f"{self.module}.{self.name}"


class Call:
    """A call that the pickle asks for, and what it puts into the result; never made.

    Attributes:
        function: What is called: a `Global`, or any other node.
        args: The positional arguments.
        kwargs: The keyword arguments, a `Pairs`, or None.
        state: What is to be set on the result, or `ABSENT`.
        items: What is appended or added to it.
        pairs: What is set in it: keys and values, one after another.
    """

    __slots__ = ("args", "function", "items", "kwargs", "pairs", "state")

    def __init__(self, function: Any, args: Any, kwargs: Any = None) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.state: Any = ABSENT
        self.items: list[Any] | None = None
        self.pairs: list[Any] | None = None

    def extend(self, items: list[Any]) -> None:
        """Append or add items to the result."""
        if self.items is None:
            self.items = []
        self.items.extend(items)

    def set(self, flat: list[Any]) -> None:
        """Set keys and values, one after another, in the result."""
        if self.pairs is None:
            self.pairs = []
        self.pairs.extend(flat)


class Pairs:
    """A dict: keys and values, one after another."""

    __slots__ = ("flat",)

    def __init__(self, flat: list[Any]) -> None:
        self.flat = flat


class Elements:
    """A set."""

    __slots__ = ("frozen", "items")

    def __init__(self, items: list[Any], *, frozen: bool) -> None:
        self.items = items
        self.frozen = frozen


class Stored:
    """A persistent id: what lies outside of the pickle."""

    __slots__ = ("pid",)

    def __init__(self, pid: Any) -> None:
        self.pid = pid
