"""What an optimizer keeps under the names of parameters, renamed as these are. Pure.

Knows the form of `spec/pytorch.md`, and that of torch's own state dicts by name: `state` by name,
and groups that list names as `params` or `param_names`.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsdformat.errors import ArgumentError, listed, printable
from dsdformat.renaming import Moved, display

__all__ = ["follow_parameters", "is_optimizer", "iter_optimizers"]

Path = tuple[Any, ...]
Name = Callable[[str], str | None]
_NAMED = ("params", "param_names")
_BY_LEAD = ("shared_state", "own_keys")


def is_optimizer(value: Any) -> bool:
    """Whether a value is the state of an optimizer, in any of its forms."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), (Mapping, list))
    )


def iter_optimizers(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """List the optimizers in a tree, with their paths."""
    if is_optimizer(tree):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from iter_optimizers(item, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from iter_optimizers(item, (*path, index))


def follow_parameters(old: Any, new: Any, moved: Moved) -> Any:
    """Return a tree with the names in its optimizers changed as those of its parameters were.

    Args:
        old: The tree as it was.
        new: The tree in which entries have other names; those in optimizers are the old ones.
        moved: What entries were called.

    Raises:
        ArgumentError: `bad_argument`: a name is that of several entries that moved differently.
    """
    places = _places(old)
    return _followed(new, lambda names: _new_names(names, places, moved))


def _followed(node: Any, rename: Callable[[list[str]], dict[str, str | None]]) -> Any:
    if is_optimizer(node):
        names = rename(list(dict.fromkeys(_names(node))))
        return _renamed(node, lambda name: names.get(name, name))
    if type(node) in (dict, OrderedDict):
        return type(node)((key, _followed(item, rename)) for key, item in node.items())
    if type(node) in (list, tuple):
        return type(node)(_followed(item, rename) for item in node)
    return node


def _places(tree: Any) -> dict[str, list[Path]]:
    """Return where in dicts, but for optimizers, each key of a leaf lies."""
    places: dict[str, list[Path]] = {}

    def walk(node: Any, path: Path) -> None:
        if is_optimizer(node):
            return
        for key, item in node.items():
            if isinstance(item, Mapping):
                walk(item, (*path, key))
            elif type(key) is str:
                places.setdefault(key, []).append((*path, key))

    walk(tree, ())
    return places


def _new_names(
    names: list[str], places: Mapping[str, list[Path]], moved: Moved
) -> dict[str, str | None]:
    """Return what the names of one optimizer's parameters are now; None for what was left out."""
    counts = Counter(path[:-1] for name in names for path in places.get(name, ()))
    found: dict[str, tuple[str, str] | None] = {}
    unlike = []
    for name in names:
        paths = sorted(places.get(name, ()), key=lambda path: -counts[path[:-1]])
        if not paths and (meant := _sectioned(name, places)) is not None:
            paths = [meant]
        if not paths:
            continue
        # The module is where most of the names are; where that is open, all must be renamed alike.
        likely = [path for path in paths if counts[path[:-1]] == counts[paths[0][:-1]]]
        now = [moved.place(display(path)) for path in likely]
        if len({one and one[1] for one in now}) > 1:
            unlike.append(name)
        found[name] = now[0]
    if unlike:
        raise ArgumentError(
            f"an optimizer has {listed([printable(name) for name in unlike])}, "
            "which are names in several sections that would not be renamed alike",
            code="bad_argument",
            hint="rename these entries alike in all sections",
        )
    several = len({one[0] for one in found.values() if one is not None}) > 1
    return {
        name: None if one is None else f"{one[0]}/{one[1]}" if several and one[0] else one[1]
        for name, one in found.items()
    }


def _sectioned(name: str, places: Mapping[str, list[Path]]) -> Path | None:
    """Find the entry that a name with a section in front, `generator/head.weight`, means."""
    for path in places.get(name.rpartition("/")[2], ()):
        if display(path[:-1]) + "/" + path[-1] == name:
            return path
    return None


def _names(optimizer: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in optimizer["state"] if type(name) is str)
    groups = optimizer["param_groups"]
    for group in groups.values() if isinstance(groups, Mapping) else groups:
        for key in _NAMED if isinstance(group, Mapping) else ():
            listed_names = group.get(key)
            if type(listed_names) is list:
                yield from (name for name in listed_names if type(name) is str)
    for key in _BY_LEAD:
        kept = optimizer.get(key)
        yield from (name for name in kept or () if type(name) is str)


def _renamed(optimizer: Any, name: Name) -> Any:
    result = copy.copy(optimizer)
    result["state"] = _keys_renamed(optimizer["state"], name)
    groups = optimizer["param_groups"]
    if isinstance(groups, Mapping):
        changed = ((_group_key(key, name), _group(group, name)) for key, group in groups.items())
        make: Any = type(groups)
        result["param_groups"] = make(pair for pair in changed if pair[0] is not None)
    else:
        result["param_groups"] = [_group(group, name) for group in groups]
    for key in _BY_LEAD:
        if isinstance(optimizer.get(key), Mapping):
            result[key] = _keys_renamed(optimizer[key], name)
    return result


def _keys_renamed(kept: Any, name: Name) -> Any:
    pairs = ((name(key) if type(key) is str else key, item) for key, item in kept.items())
    return type(kept)((key, item) for key, item in pairs if key is not None)


def _group(group: Any, name: Name) -> Any:
    if not isinstance(group, dict):
        return group
    result = copy.copy(group)
    for key in _NAMED:
        if type(group.get(key)) is list:
            new = [name(one) if type(one) is str else one for one in group[key]]
            result[key] = [one for one in new if one is not None]
    return result


def _group_key(key: Any, name: Name) -> Any:
    """Return the key of a group: a name, or for an empty group a name and a number."""
    if type(key) is str:
        return name(key)
    if type(key) is tuple and len(key) == 2 and type(key[0]) is str:
        return (name(key[0]) or "", key[1])
    return key
