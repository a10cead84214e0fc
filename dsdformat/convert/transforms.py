"""Trees made of trees: a branch, a part, several as one, other names. Reads no data.

A tree is a nested state with an `AnyTensor` at each tensor, as `Foreign.tree`. What comes out is a
tree again, so these compose, and `rewriting.write` streams what comes out in the end.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsdformat.convert.followers import follow_parameters
from dsdformat.convert.foreign import AnyTensor, rooted, walk_tree
from dsdformat.errors import EntryNotFoundError, MismatchError, listed, printable, shorten
from dsdformat.format.packing import emit
from dsdformat.format.values import encode
from dsdformat.renaming import display, entry_names, renamed
from dsdformat.selection import Renames, Selection

__all__ = ["branch", "extract", "merge", "rename", "rename_rules"]

Path = tuple[Any, ...]
_ABSENT: Any = object()


def branch(tree: Any, name: str) -> dict[str, Any]:
    """Return what lies at a name, as a tree.

    Raises:
        EntryNotFoundError: `entry_not_found`.

    Ranks: local.
    """
    node: Any = rooted(tree)
    for part in name.split("/"):
        children = node.items() if isinstance(node, Mapping) else ()
        node = next((child for key, child in children if display((key,)) == part), _ABSENT)
        if node is _ABSENT:
            raise EntryNotFoundError(f"nothing is called {shorten(name)}", name=name)
    return rooted(node)


def extract(tree: Any, select: Selection | str | Iterable[str]) -> dict[str, Any]:
    """Return the part of a tree that is selected. A list is kept whole, or not.

    Args:
        tree: What to take from.
        select: Globs of names, as `dsdformat.torch.load` takes them.

    Raises:
        EntryNotFoundError: `entry_not_found`: a glob matches nothing.

    Ranks: local.
    """
    selection = select if isinstance(select, Selection) else Selection(select)
    tree = rooted(tree)
    selection.check_used([display(path) for path, _ in walk_tree(tree)])
    kept = _part(tree, (), selection)
    return {} if kept is _ABSENT else rooted(kept)


def merge(trees: Sequence[Any]) -> dict[str, Any]:
    """Return one tree of several, dicts united key by key.

    Entries that several have are refused, but for values that are equal, their types too.

    Raises:
        MismatchError: `state_conflict`, with the names.

    Ranks: local.
    """
    conflicts: list[str] = []
    result: Any = {}
    for number, tree in enumerate(trees):
        result = _united(result, rooted(tree), (), conflicts) if number else rooted(tree)
    if conflicts:
        raise MismatchError(
            f"several have {listed([printable(name) for name in conflicts])}",
            code="state_conflict",
            hint="rename the entries of one, or extract what is wanted of it first",
        )
    return result  # type: ignore[no-any-return]


def rename(tree: Any, renames: Renames | Mapping[str, str] | Callable[[str], str | None]) -> Any:
    """Return a tree with its entries under other names.

    What an optimizer keeps follows its parameters: the names in its state and its groups are
    changed with those of the entries that they are the names of.

    Args:
        tree: What to rename in.
        renames: From display name to display name; see `rename_rules` for prefixes and branches.

    Raises:
        ArgumentError: two entries would have one name; or an optimizer's name is that of several
            parameters that are not renamed alike.
        EntryNotFoundError: a name to be replaced is not there.

    Ranks: local.
    """
    tree = rooted(tree)
    rules = renames if isinstance(renames, Renames) else Renames(renames)
    result, moved = renamed(tree, rules)
    return follow_parameters(tree, result, moved)


def rename_rules(tree: Any, rules: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function from old to new names.

    Args:
        tree: What is to be renamed.
        rules: From old to new: a name of an entry; that of a container, for all below it; or a
            beginning and `*`, for all that begin so, to a beginning and `*`.

    Raises:
        EntryNotFoundError: nothing is called so.
        ArgumentError: `*` stands on one side alone.

    Ranks: local.
    """
    names = list(entry_names(rooted(tree)))
    known = frozenset(names)
    exact: dict[str, str] = {}
    prefixes: list[tuple[str, str]] = []
    for old, new in rules.items():
        if old in known:
            exact[old] = new
            continue
        begin, put = (old[:-1], new[:-1]) if _are_prefixes(old, new) else (old + "/", new + "/")
        if not any(name.startswith(begin) for name in names):
            raise _not_found(old, names)
        prefixes.append((begin, put))

    def new_name(name: str) -> str:
        if name in exact:
            return exact[name]
        return next((put + name[len(b) :] for b, put in prefixes if name.startswith(b)), name)

    return new_name


def _are_prefixes(old: str, new: str) -> bool:
    return old.endswith("*") and new.endswith("*")


def _not_found(name: str, names: list[str]) -> EntryNotFoundError:
    close = difflib.get_close_matches(name, names[:3000], n=3)
    return EntryNotFoundError(f"nothing is called {shorten(name)}", name=name, close_matches=close)


def _part(value: Any, path: Path, selection: Selection) -> Any:
    if type(value) in (dict, OrderedDict) and value:
        children = ((key, _part(item, (*path, key), selection)) for key, item in value.items())
        kept = [(key, item) for key, item in children if item is not _ABSENT]
        return type(value)(kept) if kept else _ABSENT
    met = (display(place) in selection for place, _ in walk_tree(value, path))
    return value if any(met) else _ABSENT


def _united(old: Any, new: Any, path: Path, conflicts: list[str]) -> Any:
    if type(old) in (dict, OrderedDict) and type(new) in (dict, OrderedDict):
        result = type(old)(old)
        for key, value in new.items():
            both = key in old
            result[key] = _united(old[key], value, (*path, key), conflicts) if both else value
        return result
    if not _is_same_value(old, new):
        conflicts.append(display(path))
    return old


def _is_same_value(old: Any, new: Any) -> bool:
    """Whether two entries are the same value; a tensor is never the same without its data."""
    if any(isinstance(leaf, AnyTensor) for tree in (old, new) for _, leaf in walk_tree(tree)):
        return False
    return bool(emit(encode(old)) == emit(encode(new)))
