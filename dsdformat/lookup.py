"""Find the entries of one checkpoint by their display names and paths."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from dsdformat.entries import tree_of
from dsdformat.errors import EntryNotFoundError, shorten
from dsdformat.format.paths import emit_name, parse_name, parse_step
from dsdformat.format.values import encoded_key
from dsdformat.tensors import TensorTable

__all__ = ["Lookup"]


class Lookup:
    """Names and paths of one checkpoint; tables of them are made when they are first needed."""

    def __init__(self, table: TensorTable) -> None:
        self._table = table

    def index(self, name: str) -> int | None:
        """Return the number of the tensor that has this display name, or None."""
        index = self._index_by_path.get(parse_name(name))
        if index is not None:  # paths that are equal may be displayed in two ways, as 1 and True
            names = (emit_name(path, encoded_key) for path in self._table.paths(index))
            return index if name in names else None
        # Steps that are neither strings nor integers are displayed so, and no others.
        return self._index_by_name.get(name) if "@x" in name else None

    def find(self, name: str) -> Any:
        """Return what has a display name: a value, a container, or a `TensorEntry`.

        Raises:
            EntryNotFoundError: `entry_not_found`.
        """
        node = self._root
        for part in name.split("/"):
            step = _find_step(node, part)
            if step is _ABSENT:
                self._not_found(name)
            node = node[step]
        return node

    def find_path(self, path: tuple[Any, ...]) -> Any:
        """Return what lies at a path; see `find`."""
        node = self._root
        for step in path:
            if not _has_child(node, step):
                self._not_found(path)
            node = node[step]
        return node

    @functools.cached_property
    def _root(self) -> Any:
        return tree_of(self._table)

    @functools.cached_property
    def _index_by_path(self) -> dict[tuple[Any, ...], int]:
        """The numbers of tensors by path; of paths that are equal, that of one."""
        decoded = self._table.decoded
        known = {path: index for index, path in enumerate(decoded.paths)}
        for index, paths in decoded.aliases.items():
            known.update(dict.fromkeys(paths, index))
        return known

    @functools.cached_property
    def _index_by_name(self) -> dict[str, int]:
        """The numbers of tensors by display name, which takes many times as long."""
        return dict(self._named())

    def _named(self) -> Iterator[tuple[str, int]]:
        """List the display names of all tensors, and their numbers."""
        for index in range(len(self._table)):
            for path in self._table.paths(index):
                yield emit_name(path, encoded_key), index

    def _not_found(self, name: str | tuple[Any, ...]) -> NoReturn:
        text = name if isinstance(name, str) else "/".join(map(str, name))
        some = [one for one, _ in itertools.islice(self._named(), 3000)]
        raise EntryNotFoundError(
            f"no entry {shorten(name)} in {self._table.storage.name}",
            name=text,
            close_matches=difflib.get_close_matches(text, some, n=3),
        )


_ABSENT = object()


def _has_child(node: Any, step: Any) -> bool:
    if isinstance(node, Mapping):
        try:
            return step in node
        except TypeError:  # not hashable
            return False
    return isinstance(node, (list, tuple, deque)) and type(step) is int and 0 <= step < len(node)


def _find_step(node: Any, part: str) -> Any:
    """Return the key or index of a node that is displayed as this part, or `_ABSENT`."""
    step = parse_step(part)
    if _has_child(node, step) and _part_name(step) == part:
        return step
    keys = node if isinstance(node, Mapping) and part.startswith("@x") else ()
    return next((key for key in keys if _part_name(key) == part), _ABSENT)


def _part_name(step: Any) -> str:
    return emit_name((step,), encoded_key)
