"""Values that each rank has for itself, as the states of its random generators.

They are stored as a dict from ranks, as text, to values; every rank gets its own back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsdformat.limits import DEPTH_MAX
from dsdformat.torch.introspect import find_children
from dsdformat.torch.stored import rebuilt

__all__ = ["PerRank", "chosen", "unmarked"]

Path = tuple[Any, ...]


class PerRank:
    """Marks a value, or anything else a state may hold, as that of this rank alone.

    `save(path, {"rng": PerRank(rng_state())})` keeps it for each rank, as a dict from ranks, and
    `load(path, {"rng": PerRank(None)})["rng"]` gives each rank its own. On another number of ranks,
    rank `r` gets what was that of rank `r` modulo the number that was saved, so that none is
    without; it is for the program to tell streams apart then.

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
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a stored tree and a state with the value of one rank in the place of each mark.

    What is stored in the place of a mark and is no dict of ranks stays as it is.
    """

    def visit(live: Any, path: Path) -> Any:
        if isinstance(live, PerRank):
            nonlocal tree
            tree = _with_choice(tree, path, rank)
            return live.value
        return _rebuilt(live, path, visit)

    state = {key: visit(value, (key,)) for key, value in state.items()}
    return tree, state


def _rebuilt(value: Any, path: Path, visit: Any) -> Any:
    """Return a container with its children visited; the same one if none of them changes."""
    children = find_children(value) if len(path) < DEPTH_MAX else None
    if children is None:
        return value
    items = [(key, item, visit(item, (*path, key))) for key, item in children]
    if all(new is old for _, old, new in items):
        return value
    return rebuilt(value, [(key, new) for key, _, new in items])


def _with_choice(stored: Any, path: Sequence[Any], rank: int) -> Any:
    if not path:
        ranks = isinstance(stored, Mapping) and set(stored) == set(map(str, range(len(stored))))
        return stored[str(rank % len(stored))] if ranks and stored else stored
    if isinstance(stored, Mapping) and path[0] in stored:
        changed = type(stored)(stored)  # type: ignore[call-arg]
        changed[path[0]] = _with_choice(stored[path[0]], path[1:], rank)  # type: ignore[index]
        return changed
    if type(stored) in (list, tuple) and type(path[0]) is int and path[0] < len(stored):
        items = list(stored)
        items[path[0]] = _with_choice(items[path[0]], path[1:], rank)
        return type(stored)(items)
    return stored
