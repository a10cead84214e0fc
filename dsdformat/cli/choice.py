"""What of a checkpoint a command is asked for: names and globs, as they were typed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dsdformat.cli.escapes import unescape
from dsdformat.convert.foreign import walk_tree
from dsdformat.renaming import display
from dsdformat.selection import Selection

__all__ = ["names_in", "typed_globs", "typed_name"]


def names_in(*trees: Any) -> list[str]:
    """List the display names of all leaves, each once."""
    return list(dict.fromkeys(display(path) for tree in trees for path, _ in walk_tree(tree)))


def typed_globs(globs: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return globs as they are meant: a name may be typed as it was printed, with escapes."""
    return [typed_name(glob, names) for glob in globs]


def typed_name(glob: str, names: Sequence[str]) -> str:
    """Return a name or glob as it is meant."""
    plain = unescape(glob)
    if plain == glob:
        return glob
    selection = Selection(glob)
    return glob if any(name in selection for name in names) else plain
