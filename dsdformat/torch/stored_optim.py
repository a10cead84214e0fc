"""The state of an optimizer as a checkpoint has it, checked, under the names that it has now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsdformat.errors import shorten
from dsdformat.torch.optim import GROUPS, OWN, PARAMS, SHARED, STATE

__all__ = ["StoredOptimizer", "find_fault"]


def find_fault(stored: Any) -> str | None:
    """Say what in a stored value is not as the state of an optimizer is, or None."""
    if not isinstance(stored, dict):
        return f"a {type(stored).__name__}"
    for key in (STATE, GROUPS, SHARED, OWN):
        if not isinstance(stored.get(key, {} if key in (SHARED, OWN) else None), dict):
            return f"a dict without a dict {key}"
    for key in (SHARED, OWN):
        for lead, kept in stored.get(key, {}).items():
            if type(lead) is not str or not isinstance(kept, dict):
                return f"a dict with {shorten(lead)} in {key}"
            taken = [one for one in kept if one in (STATE, GROUPS)]
            if taken:  # what torch itself keeps there
                return f"a dict with {shorten(taken[0])} in {key}"
    others = [key for key in stored if key not in (STATE, GROUPS, SHARED, OWN)]
    if others:
        return f"a dict with the key {shorten(others[0])}"
    for name, state in stored[STATE].items():
        if type(name) is not str or not isinstance(state, dict):
            return f"an entry {shorten(name)} that is no dict"
    return _find_group_fault(stored[GROUPS])


def _find_group_fault(groups: Mapping[Any, Any]) -> str | None:
    members: set[str] = set()
    for key, group in groups.items():
        params = group.get(PARAMS) if isinstance(group, dict) else None
        if type(params) is not list or any(type(name) is not str for name in params):
            return f"a group {shorten(key)} without a list of names"
        if members.intersection(params):
            return f"a parameter in two groups, {shorten(sorted(members.intersection(params))[0])}"
        members.update(params)
        if not params and _lead_of(key) is None:
            return f"an empty group {shorten(key)}"
    return None


def _lead_of(key: Any) -> Any:
    """Return the first name of the optimizer that an empty group is of; None for another key."""
    known = type(key) is tuple and len(key) == 2 and type(key[0]) is str
    return key[0] if known else None


class StoredOptimizer:
    """What the checkpoint has of an optimizer, under the names that it has now."""

    def __init__(self, stored: dict[Any, Any], renamed: Callable[[str], str | None]) -> None:
        self.states: dict[str, dict[Any, Any]] = {}
        for old, state in stored[STATE].items():
            name = renamed(old)
            if name is not None:
                self.states[name] = state
        self.groups: dict[str, Any] = {}  # name of a parameter -> key of its group
        self.values: dict[Any, dict[Any, Any]] = stored[GROUPS]
        for key, group in self.values.items():
            names = (renamed(old) for old in group[PARAMS])
            self.groups.update((name, key) for name in names if name is not None)
        self.empty: dict[str, list[Any]] = {}  # first name of an optimizer -> keys of groups
        for key, group in self.values.items():
            if not group[PARAMS]:
                self.empty.setdefault(renamed(_lead_of(key)) or "", []).append(key)
        self.shared = {renamed(old) or "": kept for old, kept in stored.get(SHARED, {}).items()}
        self.own = {renamed(old) or "": kept for old, kept in stored.get(OWN, {}).items()}

    def names(self) -> Iterator[str]:
        """List the parameters that the checkpoint knows."""
        yield from dict.fromkeys([*self.groups, *self.states])
