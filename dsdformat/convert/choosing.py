"""Choose what of a checkpoint is converted: branches and entries by name, and tensors alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from dsdformat.convert.foreign import AnyTensor, Foreign, children, is_mapping, rebuilt, walk_tree
from dsdformat.convert.settling import Settled
from dsdformat.errors import UnsupportedValueError
from dsdformat.format.paths import emit_name, render_path
from dsdformat.format.values import encoded_key
from dsdformat.selection import Selection

__all__ = ["choose"]

Path = tuple[Any, ...]
_WILD = re.compile(r"[*?\[]")
_GONE = object()


def choose(
    opened: Foreign, select: str | Iterable[str] | None, *, drop_values: bool
) -> tuple[Foreign, tuple[str, ...]]:
    """Return a checkpoint with less in it, and the names of values that were left out.

    Args:
        opened: What there is; it stays open, and is what is read.
        select: Globs of names; all if None. The branch that they have in common is the new root.
        drop_values: Whether to leave out all that is no tensor.

    Raises:
        EntryNotFoundError: `entry_not_found`: a glob matches nothing.
        UnsupportedValueError: items of a list would be left out.
    """
    if select is None and not drop_values:
        return opened, ()
    globs = [select] if isinstance(select, str) else None if select is None else list(select)
    selection = Selection(globs)
    leaves = [(path, emit_name(path, encoded_key), leaf) for path, leaf in walk_tree(opened.tree)]
    selection.check_used([name for _, name, _ in leaves])
    kept, left_out = set(), []
    for path, name, leaf in leaves:
        if name in selection:
            if drop_values and not isinstance(leaf, AnyTensor):
                left_out.append(name)
            else:
                kept.add(path)
    tree = _pruned(opened.tree, (), kept)
    root = _root(globs or [], [path for path, name, _ in leaves if name in selection])
    for step in root:
        tree = {} if tree is _GONE else tree[step]
    attributes = {
        path[len(root) :]: value
        for path, value in opened.attributes.items()
        if path[: len(root)] == root
    }
    settled = Settled({} if tree is _GONE else tree, list(opened.findings), attributes)
    return Foreign(opened.kind, opened.name, settled, metadata=opened.metadata), tuple(left_out)


def _root(globs: list[str], paths: list[Path]) -> Path:
    """Return the deepest branch of dicts that all globs name, and that all chosen paths share."""
    depths = []
    for glob in globs:
        parts = glob.rstrip("/").split("/")
        wild = [number for number, part in enumerate(parts) if _WILD.search(part)]
        depths.append(wild[0] if wild else len(parts))
    depth = min(depths, default=0)
    depth = min([depth, *(len(path) - 1 for path in paths)])
    first = paths[0][:depth] if paths else ()
    while any(path[: len(first)] != first for path in paths):
        first = first[:-1]
    return first


def _pruned(value: Any, path: Path, kept: set[Path]) -> Any:
    """Return a tree with these leaves alone, or `_GONE`."""
    if path in kept:
        return value
    items = [(step, _pruned(item, (*path, step), kept)) for step, item in children(value) or ()]
    there = [(step, item) for step, item in items if item is not _GONE]
    if not there:
        return _GONE
    if len(there) < len(items) and not is_mapping(value):
        place = render_path((*path, next(step for step, item in items if item is _GONE)))
        raise UnsupportedValueError(
            f"{place} would be left out of a list, and those behind it would move",
            path_in_tree=place,
            hint="choose the whole list, or nothing of it",
        )
    return rebuilt(value, there)
