"""Encoded trees: find their tensors, renumber them, merge what several writers have.

Pure. Works on what `values.encode` gives, where each composite value is a map or a tagged array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsdformat.errors import MismatchError, shorten
from dsdformat.format.packing import emit
from dsdformat.format.paths import render_path

__all__ = ["merge_trees", "renumber"]

_PAIRS = frozenset({"dict", "odict", "counter", "defaultdict"})
_ITEMS = {"list": 1, "tuple": 1, "deque": 2}


def renumber(tree: Any, number: Callable[[Any], Any]) -> Any:
    """Return a tree in which each tensor reference holds what `number` makes of its index.

    Called in the order of the tree, so numbering by first meeting is what the spec wants.
    """
    if type(tree) is dict:
        return {key: renumber(item, number) for key, item in tree.items()}
    if type(tree) is not list:
        return tree
    tag = tree[0]
    if tag == "tensor":
        return ["tensor", number(tree[1]), *tree[2:]]
    if tag in _PAIRS:
        return [tag, *([key, renumber(item, number)] for key, item in tree[1:])]
    if tag in _ITEMS:
        at = _ITEMS[tag]
        return [*tree[:at], *(renumber(item, number) for item in tree[at:])]
    return tree


def merge_trees(trees: list[Any], union: Callable[[list[Any]], Any], path: list[Any]) -> Any:
    """Merge the encoded trees of several writers.

    Dicts of string keys are united; lists, tuples and other dicts must have the same form;
    plain values must be equal.

    Args:
        trees: At least one; None is a value like any other.
        union: Makes one tensor index of those that meet at a path.
        path: Where the trees lie, for errors.

    Raises:
        MismatchError: `state_conflict`, with the path.
    """
    first = trees[0]
    if len(trees) == 1 and not _holds_tensors(first):
        return first
    kind = type(first)
    if any(type(tree) is not kind for tree in trees):
        _conflict(path, trees)
    if kind is dict:
        return _merge_maps(trees, union, path)
    if kind is not list:
        if any(emit(tree) != emit(first) for tree in trees):
            _conflict(path, trees)
        return first
    tag = first[0]
    if any(tree[0] != tag for tree in trees):
        _conflict(path, trees)
    if tag == "tensor":
        if any(tree[2:] != first[2:] for tree in trees):
            _conflict(path, trees)
        return ["tensor", union([tree[1] for tree in trees]), *first[2:]]
    if tag in _PAIRS or tag in _ITEMS:
        return _merge_arrays(trees, union, path)
    if any(emit(tree) != emit(first) for tree in trees):
        _conflict(path, trees)
    return first


def _merge_maps(trees: list[Any], union: Callable[[list[Any]], Any], path: list[Any]) -> Any:
    result = {}
    for key in sorted({key for tree in trees for key in tree}):
        path.append(key)
        result[key] = merge_trees([tree[key] for tree in trees if key in tree], union, path)
        path.pop()
    return result


def _merge_arrays(trees: list[Any], union: Callable[[list[Any]], Any], path: list[Any]) -> Any:
    first = trees[0]
    pairs = first[0] in _PAIRS
    at = 1 if pairs else _ITEMS[first[0]]
    if any(len(tree) != len(first) or tree[:at] != first[:at] for tree in trees):
        _conflict(path, trees)
    if pairs and any(
        emit([pair[0] for pair in tree[1:]]) != emit([pair[0] for pair in first[1:]])
        for tree in trees
    ):
        _conflict(path, trees)
    result = list(first[:at])
    for index in range(at, len(first)):
        path.append(first[index][0] if pairs else index - at)
        items = [tree[index][1] if pairs else tree[index] for tree in trees]
        merged = merge_trees(items, union, path)
        result.append([first[index][0], merged] if pairs else merged)
        path.pop()
    return result


def _holds_tensors(tree: Any) -> bool:
    return type(tree) in (dict, list)


def _describe(tree: Any) -> str:
    if type(tree) is dict:
        return "a dict with the keys " + shorten(sorted(tree))
    return "a tensor" if type(tree) is list and tree[0] == "tensor" else shorten(tree)


def _conflict(path: list[Any], trees: list[Any]) -> None:
    distinct = dict.fromkeys(map(_describe, trees))
    shown = " and ".join(list(distinct)[:2])
    raise MismatchError(
        f"{render_path(path)}: writers disagree: {shown}",
        code="state_conflict",
        hint="all writers must give the same value, or each a path of its own",
    )
