"""Options by name: which entries are meant, how they are called, and what holds for each.

Names are display names, as `dsd ls` prints them: `model/layers.0.weight`. A glob is as in a shell,
but `*` also matches `/` and `.`; one that names a branch means all that is below it.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsdformat.errors import ArgumentError, EntryNotFoundError, shorten

__all__ = ["Renames", "Selection", "by_name"]

Rename = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str | None]


class Selection:
    """The entries that are meant: all, or those whose names match a glob."""

    def __init__(self, globs: str | Iterable[str] | None) -> None:
        self._globs = [] if globs is None else _texts(globs)
        self._match = None if globs is None else _matcher(self._globs)
        self.met = globs is None  # whether anything that was asked for is meant

    @property
    def everything(self) -> bool:
        """Whether no entry is left out."""
        return self._match is None

    def __contains__(self, name: str) -> bool:
        if self._match is None:
            return True
        found = self._match(name)
        self.met = self.met or found
        return found

    def check_used(self, names: Sequence[str]) -> None:
        """Check that each glob matches something.

        Raises:
            EntryNotFoundError: `entry_not_found`, with names that are spelled alike.
        """
        if not self.everything and not self._globs:
            raise EntryNotFoundError("nothing is what an empty select matches", name="")
        exact = _ancestry(names) if len(self._globs) > 1 else set()
        for glob in self._globs:
            if glob.rstrip("/") not in exact and not any(map(_matcher([glob]), names)):
                raise EntryNotFoundError(
                    f"nothing in the checkpoint matches {shorten(glob)}",
                    name=glob,
                    close_matches=difflib.get_close_matches(glob, names[:3000], n=3, cutoff=0.3),
                )


class Renames:
    """What entries of the checkpoint are called in the state that they are loaded into."""

    def __init__(self, rename: Any) -> None:
        self._function: Callable[[str], str | None] | None = None
        self._exact: Mapping[str, str] = {}
        self._prefixes: Sequence[tuple[str, str]] = ()
        if callable(rename):
            self._function = rename
        elif isinstance(rename, Mapping):
            self._exact = {_text(old): _text(new) for old, new in rename.items()}
        elif isinstance(rename, Sequence) and not isinstance(rename, str):
            self._prefixes = [_pair(pair) for pair in rename]
        elif rename is not None:
            raise ArgumentError(
                "rename is a mapping of names, pairs of prefixes, or a function of the name, "
                f"got {shorten(rename)}",
                code="bad_argument",
            )
        self._used: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._function or self._exact or self._prefixes)

    def name(self, stored: str) -> str | None:
        """Return what a stored entry is called, or None if it is to be left out."""
        if self._function is not None:
            wanted = self._function(stored)
            if wanted is not None and type(wanted) is not str:
                raise ArgumentError(
                    f"rename gave {shorten(wanted)} for {shorten(stored)}, expected a name or None",
                    code="bad_argument",
                )
            return wanted
        if stored in self._exact:
            self._used.add(stored)
            return self._exact[stored]
        for old, new in self._prefixes:
            if stored.startswith(old):
                self._used.add(old)
                return new + stored[len(old) :]
        return stored

    def check_used(self, names: Sequence[str]) -> None:
        """Check that each name and prefix to be replaced was met.

        Raises:
            EntryNotFoundError: `entry_not_found`, with names that are spelled alike.
        """
        for old in [*self._exact, *(old for old, _ in self._prefixes)]:
            if old not in self._used:
                raise EntryNotFoundError(
                    f"rename: nothing in the checkpoint is called {shorten(old)}",
                    name=old,
                    close_matches=difflib.get_close_matches(old, names[:3000], n=3),
                )


def by_name(option: Any, default: Any, check: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Turn an option that may differ from name to name into a function of the name.

    Args:
        option: One value; a mapping from globs to values, of which the first that matches
            counts; a function of the name; or None.
        default: The value where nothing else says one.
        check: Returns a value as it is used, or raises.
    """
    if option is None:
        return lambda _: default
    if isinstance(option, Mapping):
        rules = [(_matcher([_text(glob)]), check(value)) for glob, value in option.items()]
        return lambda name: next((value for match, value in rules if match(name)), default)
    if callable(option) and not isinstance(option, type):
        return lambda name: default if (value := option(name)) is None else check(value)
    value = check(option)
    return lambda _: value


def _matcher(globs: Sequence[str]) -> Callable[[str], bool]:
    plain = frozenset(glob.rstrip("/") for glob in globs)
    patterns = [re.compile(fnmatch.translate(glob)) for glob in globs if _WILD.search(glob)]
    branches = tuple(glob.rstrip("/") + "/" for glob in globs if _WILD.search(glob))

    def match(name: str) -> bool:
        return (
            not plain.isdisjoint(_ancestry([name]))
            or name.startswith(branches)
            or any(pattern.match(name) for pattern in patterns)
        )

    return match


_WILD = re.compile(r"[*?\[]")


def _ancestry(names: Iterable[str]) -> set[str]:
    """Return the names, and those of all branches that they lie in."""
    result: set[str] = set()
    for name in names:
        result.add(name)
        branch = name.rpartition("/")[0]
        while branch and branch not in result:
            result.add(branch)
            branch = branch.rpartition("/")[0]
    return result


def _texts(globs: Any) -> list[str]:
    if isinstance(globs, str):
        return [globs]
    if not isinstance(globs, Iterable):
        raise ArgumentError(
            f"select is a glob or several, got {shorten(globs)}", code="bad_argument"
        )
    return [_text(glob) for glob in globs]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ArgumentError(f"expected a name, got {shorten(value)}", code="bad_argument")
    return value


def _pair(pair: Any) -> tuple[str, str]:
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise ArgumentError(
            f"rename takes pairs of prefixes, got {shorten(pair)}",
            code="bad_argument",
            hint='as in [("model/backbone.", "model/encoder.")]',
        )
    return _text(pair[0]), _text(pair[1])
