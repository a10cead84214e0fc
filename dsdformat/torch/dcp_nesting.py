"""The nested state that flat names of DCP stand for.

A planner flattens a state and keeps the path of each name: strings for keys of dicts, integers
for indices of lists. Writers unite dicts, but lists must have the same form on all of them; so a
rank that stores something of a list files all items of the list, others' tensors without chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsdformat.errors import MismatchError
from dsdformat.format.paths import render_path

__all__ = ["ABSENT", "Path", "completed", "find_path", "has_index", "nested"]

Path = tuple[str | int, ...]


def find_path(planner_data: Any, name: str) -> Path:
    """Return the path of a flat name; the name alone where the planner tells none."""
    path = planner_data.get(name) if isinstance(planner_data, Mapping) else None
    if type(path) is not tuple or not path or type(path[0]) is not str:
        return (name,)
    return path if all(type(step) in (str, int) for step in path) else (name,)


def has_index(path: Path) -> bool:
    """Whether a path leads through a list."""
    return any(type(step) is int for step in path)


def completed(
    own: Mapping[Path, Any], others: Iterable[Path], stand_in: Callable[[Path], Any]
) -> dict[Path, Any]:
    """Add what must be there for lists to have the same form on all ranks.

    Args:
        own: What this rank stores, by path.
        others: The paths of the rest of the state, as far as this rank knows it.
        stand_in: Gives what is filed at one of them, or `ABSENT`.

    Returns:
        All of `own`, stand-ins for other items of the same lists, and `BRANCH` where an item
        of them is a dict of which this rank stores nothing.
    """
    result = dict(own)
    lists = {path[:depth] for path in own for depth in _indices(path)}
    rest = [path for path in others if path not in own and has_index(path)]
    while True:
        inner = {path[:depth] for path in rest for depth in _lists_in_lists(path, lists)}
        if inner <= lists:
            break
        lists |= inner
    for path in rest:
        for depth in _indices(path):
            if path[:depth] not in lists:
                continue
            if depth == len(path) - 1:
                result[path] = stand_in(path)
            elif type(path[depth + 1]) is str:
                result.setdefault(path[: depth + 1], BRANCH)
    return {path: value for path, value in result.items() if value is not ABSENT}


def nested(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Return the nested state of these leaves; an item of a list that no path has is None.

    Raises:
        MismatchError: `state_conflict`: a leaf lies where another's path leads through.
    """
    root = _Node()
    for path, value in leaves.items():
        node = root
        for step in path if value is BRANCH else path[:-1]:
            child = node.items.setdefault(step, _Node())
            if not isinstance(child, _Node):
                raise _conflict(path)
            node = child
        if value is BRANCH:
            continue
        if path[-1] in node.items:
            raise _conflict(path)
        node.items[path[-1]] = value
    grown: dict[str, Any] = root.grown(())
    return grown


BRANCH, ABSENT = object(), object()


@dataclass(slots=True)
class _Node:
    items: dict[str | int, Any] = field(default_factory=dict)

    def grown(self, path: Path) -> Any:
        """Return the dict or list of a node and all below it."""
        items = {
            step: item.grown((*path, step)) if isinstance(item, _Node) else item
            for step, item in self.items.items()
        }
        indices = [step for step in items if isinstance(step, int)]
        if not indices:
            return items
        if len(indices) < len(items):
            raise _conflict(path)
        return [items.get(index) for index in range(1 + max(indices))]


def _indices(path: Path) -> Iterable[int]:
    """List the depths at which a path has an index of a list."""
    return (depth for depth, step in enumerate(path) if type(step) is int)


def _lists_in_lists(path: Path, lists: set[Path]) -> Iterable[int]:
    """List the depths at which a path leads through a list that is an item of one of these."""
    depths = list(_indices(path))
    return (depth for depth in depths if depth - 1 in depths and path[: depth - 1] in lists)


def _conflict(path: Path) -> MismatchError:
    return MismatchError(
        f"{render_path(path)}: two entries of the state are in each other's way",
        code="state_conflict",
    )
