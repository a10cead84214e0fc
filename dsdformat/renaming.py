"""Entries of a tree under other names, and what an optimizer keeps for them with them. Pure.

Names are display names. Only dicts with string keys have names that can change; what lies in a
list goes with it, and an optimizer of the form in `spec/pytorch.md` goes as one: the names that
its entries have follow those of the parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from dsdformat.errors import ArgumentError, shorten
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key
from dsdformat.selection import Renames

__all__ = ["Moved", "Path", "display", "entry_names", "renamed", "unescaped"]

Path = tuple[Any, ...]


def display(path: Path) -> str:
    """Return the display name of a path."""
    return emit_name(path, encoded_key)


class Moved:
    """What entries were called before they were renamed."""

    def __init__(self, renames: Renames | None = None) -> None:
        self._renames = renames
        self._names: dict[Path, dict[str, str]] = {}  # branch now -> last parts, before and now
        self._whole: dict[str, str] = {}

    def note(self, old: Path, new: Path) -> None:
        """Note one entry."""
        self._whole[display(old)] = display(new)
        if type(old[-1]) is str and type(new[-1]) is str:
            self._names.setdefault(new[:-1], {})[old[-1]] = new[-1]

    def of(self, module: Path | None) -> Callable[[str], str | None]:
        """Return what the names of an optimizer's parameters are now, from what they were.

        Args:
            module: Where the module is that they are FQNs of; None or the root if they are
                display names.
        """
        if not self._renames:
            return lambda name: name
        known = self._names.get(module, {}) if module else self._whole
        return lambda name: known[name] if name in known else self._asked(name, module)

    def place(self, old: str) -> tuple[str, str] | None:
        """Return where an entry is now: the name of its section, and its key; None if nowhere."""
        if self._renames and old not in self._whole:
            return None
        section, _, part = self._whole.get(old, old).rpartition("/")
        return section, unescaped(part)

    def _asked(self, name: str, module: Path | None) -> str | None:
        """Rename what the module's section does not have."""
        assert self._renames is not None
        prefix = f"{display(module)}/" if module else ""
        full = self._renames.name(display((*module, name)) if module else name)
        if full is None or not full.startswith(prefix):
            return None
        return unescaped(full[len(prefix) :]) if module else full


def renamed(tree: dict[str, Any], renames: Renames) -> tuple[dict[str, Any], Moved]:
    """Return the tree with its entries under other names, and what they were called.

    Only dicts with string keys have names that can change; what lies in a list goes with it, and
    what an optimizer keeps goes with the optimizer: its names follow those of the parameters.

    Raises:
        ArgumentError: two entries would have one name.
        EntryNotFoundError: a name to be replaced is not there.
    """
    moved = Moved(renames or None)
    if not renames:
        return tree, moved
    result: dict[str, Any] = {}
    names = []
    for path, kinds, value in _named_leaves(tree, (), ()):
        wanted, name = _wanted(path, value, renames)
        names.append(name)
        if wanted is None:
            continue
        steps = path if wanted == name else tuple(map(unescaped, wanted.split("/")))
        node: Any = result
        for depth, step in enumerate(steps[:-1]):
            kind = kinds[depth + 1] if depth + 1 < len(kinds) else dict
            node = node.setdefault(step, kind()) if isinstance(node, dict) else None
        both = isinstance(node, dict) and _is_optimizer(node.get(steps[-1]))
        if both and _is_optimizer(value):
            node[steps[-1]] = _united(node[steps[-1]], value)
            continue
        if not isinstance(node, dict) or steps[-1] in node:
            raise ArgumentError(
                f"rename: {shorten(wanted)} is the name of two entries, of which one was {name}",
                code="bad_argument",
            )
        node[steps[-1]] = value
        moved.note(path, steps)
    renames.check_used(names)
    return result, moved


def entry_names(tree: dict[str, Any]) -> Iterator[str]:
    """List the names that `renamed` can change; an optimizer has one, that of its state."""
    for path, _, value in _named_leaves(tree, (), ()):
        name = display(path)
        yield f"{name}/state" if _is_optimizer(value) else name


def _wanted(path: Path, value: Any, renames: Renames) -> tuple[str | None, str]:
    """Return what an entry, or the whole of an optimizer, is called now, and what before."""
    name = display(path)
    if not _is_optimizer(value):
        return renames.name(name), name
    inner = renames.name(f"{name}/state")
    if inner is None or not inner.endswith("/state"):
        return None, name
    return inner.removesuffix("/state"), name


def _united(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Unite the states of two optimizers, which work on different parameters."""
    result = dict(one)
    for key, value in other.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not (old.keys() & value.keys()):
            result[key] = type(old)({**old, **value})
        elif key in result:
            raise ArgumentError(
                f"rename: two optimizers that have the same in {shorten(key)} have one name",
                code="bad_argument",
            )
        else:
            result[key] = value
    return result


def _is_optimizer(value: Any) -> bool:
    if type(value) is not dict:
        return False
    groups = value.get("param_groups")
    if type(groups) is dict:  # of ranks that had different groups
        named = (type(group) is dict and "params" in group for group in groups.values())
        return type(value.get("state")) is dict and all(named)
    return type(groups) is OrderedDict


def _named_leaves(
    value: Any, path: Path, kinds: tuple[type, ...]
) -> Iterator[tuple[Path, tuple[type, ...], Any]]:
    """List what lies below dicts of string keys, with the types of the dicts on the way."""
    plain = type(value) in (dict, OrderedDict) and value and all(type(key) is str for key in value)
    if plain and not (path and _is_optimizer(value)):
        for key, item in value.items():
            yield from _named_leaves(item, (*path, key), (*kinds, type(value)))
    else:
        yield path, kinds, value


def unescaped(part: str) -> str:
    """Return the key whose display name this is."""
    return part.replace("%2F", "/").replace("%40", "@").replace("%25", "%")
