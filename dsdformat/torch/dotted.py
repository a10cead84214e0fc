"""Optimizer state in one flat dict of dotted names, as torch's state dicts have it, and back.

`state.<fqn>.<name>` and `param_groups.<fqn>.<key>`, one for each parameter of a group. A group
without parameters has `param_groups.[<number>].<key>`; an FQN cannot begin with a bracket.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from dsdformat.errors import MismatchError, shorten

__all__ = ["flatten", "unflatten"]

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat form of a nested state dict by names."""
    flat: dict[str, Any] = {}
    for name, state in nested[STATE].items():
        if not state:
            flat[f"{STATE}.{name}"] = {}  # says that there is none yet
        _flatten_into(flat, f"{STATE}.{name}", state)
    for number, group in enumerate(nested[GROUPS]):
        for name in group[PARAMS] or [f"[{number}]"]:
            for key, value in group.items():
                if key != PARAMS:
                    flat[f"{GROUPS}.{name}.{key}"] = value
    return flat


def _flatten_into(flat: dict[str, Any], prefix: str, values: Mapping[Any, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            _flatten_into(flat, f"{prefix}.{key}", value)
        else:
            flat[f"{prefix}.{key}"] = value


def unflatten(flat: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the nested form of a flat one.

    Args:
        flat: What `flatten` gives.
        groups: The names of the parameters of each group, as they are now.

    Raises:
        MismatchError: `state_mismatch`: a key is of neither kind, or the parameters of one group
            have different values.
    """
    known = {name for names in groups for name in names}
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, rest = key.partition(".")
        if section == STATE and rest:
            name, path = _split(rest, known)
            _set(states.setdefault(name, {}), path, value)
        elif section == GROUPS and "." in rest:
            name, path = _split(rest, known)
            options.setdefault(name, {})[".".join(path)] = value
        else:
            raise MismatchError(
                f"{shorten(key)} is no key of a flat optimizer state", code="state_mismatch"
            )
    result: list[dict[str, Any]] = []
    for number, names in enumerate(groups):
        stored = [name for name in names or [f"[{number}]"] if name in options]
        _check_equal(stored, options)
        values = options[stored[0]] if stored else {}
        result.append({PARAMS: [name for name in stored if names], **values})
    used = {name for group in result for name in group[PARAMS]}
    others = (name for name in options if name not in used and not name.startswith("["))
    result.extend({PARAMS: [name], **options[name]} for name in others)
    return {STATE: states, GROUPS: result}


def _split(rest: str, known: Container[str]) -> tuple[str, list[str]]:
    """Part a dotted key into a name and what follows; the longest name that is known counts."""
    parts = rest.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        if name in known:
            return name, parts[count:]
    if rest.startswith("["):
        return parts[0], parts[1:]
    return ".".join(parts[:-1]), parts[-1:]


def _set(state: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        state = state.setdefault(part, {})
    if path:
        state[path[-1]] = value


def _check_equal(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> None:
    for name in names[1:]:
        first = options[names[0]]
        for key, value in options[name].items():
            if key not in first or not _equal(first[key], value):
                raise MismatchError(
                    f"parameters of one group differ in {key}: {shorten(first.get(key))} for "
                    f"{names[0]}, {shorten(value)} for {name}",
                    code="state_mismatch",
                )


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors of several elements
        return one is other
