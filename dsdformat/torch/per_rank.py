"""Values that each rank has for itself, as the states of its random generators.

They are stored as a dict from ranks, as text, to values; every rank gets its own back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key
from dsdformat.limits import DEPTH_MAX
from dsdformat.torch.introspect import find_children
from dsdformat.torch.stored import Live, rebuilt

__all__ = ["PerRank", "chosen", "unmarked"]

Path = tuple[Any, ...]


class PerRank:
    """Marks a value, or anything else a state may hold, as that of this rank alone.

    `save(path, {"rng": PerRank(rng_state())})` keeps it for each rank, as a dict from ranks, and
    `load(path, {"rng": PerRank(None)})["rng"]` gives each rank its own. On more ranks than have
    saved, those that are new keep what they have: `PerRank(value)` gives `value` back, and the
    report lists the name under `fresh`. On fewer, what was of the others is not loaded.

    Attributes:
        value: What was marked.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        """Mark a value; an object that is loaded in place is loaded in place."""
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def unmarked(state: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], list[Path]]:
    """Return a state with `{"rank": value}` in the place of each mark, and where marks are."""
    places: list[Path] = []

    def visit(value: Any, path: Path) -> Any:
        if isinstance(value, PerRank):
            places.append(path)
            return {str(rank): value.value}
        return _rebuilt(value, path, visit)

    return {key: visit(value, (key,)) for key, value in state.items()}, places


def chosen(
    tree: dict[str, Any], state: Mapping[str, Any], rank: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return a stored tree and a state with the value of one rank in the place of each mark.

    What is stored in the place of a mark and is no dict of ranks stays as it is.

    Returns:
        The tree; the state; and the names of marks under which the rank has nothing, in whose
        place the tree has the live value, and the state None.
    """
    fresh: list[str] = []

    def visit(live: Any, path: Path) -> Any:
        if not isinstance(live, PerRank):
            return _rebuilt(live, path, visit)
        nonlocal tree
        stored = _at(tree, path)
        if not isinstance(stored, Mapping) or set(stored) != set(map(str, range(len(stored)))):
            return live.value
        is_there = str(rank) in stored
        tree = _with(tree, path, stored[str(rank)] if is_there else Live(live.value))
        if is_there:
            return live.value
        fresh.append(emit_name(path, encoded_key))
        return None

    state = {key: visit(value, (key,)) for key, value in state.items()}
    return tree, state, fresh


def _rebuilt(value: Any, path: Path, visit: Any) -> Any:
    """Return a container with its children visited; the same one if none of them changes."""
    children = find_children(value) if len(path) < DEPTH_MAX else None
    if children is None:
        return value
    items = [(key, item, visit(item, (*path, key))) for key, item in children]
    if all(new is old for _, old, new in items):
        return value
    return rebuilt(value, [(key, new) for key, _, new in items])


def _at(stored: Any, path: Path) -> Any:
    """Return what is stored at a path; None if nothing is."""
    for step in path:
        children = dict(find_children(stored) or ())
        if step not in children:
            return None
        stored = children[step]
    return stored


def _with(stored: Any, path: Path, value: Any) -> Any:
    """Return what is stored with another value at a path, which is there."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    changed = list(stored) if type(stored) in (list, tuple) else type(stored)(stored)
    changed[step] = _with(stored[step], rest, value)
    return type(stored)(changed) if type(stored) is tuple else changed
