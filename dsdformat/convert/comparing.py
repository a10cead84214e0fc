"""Compare two checkpoints of any kinds: names, dtypes, shapes, values, data, and what is tied.

Data is compared by content digests where a manifest gives them, and is then not read; else it is
streamed, a few megabytes at a time. What is told of numbers is decided in `differing`.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dsdformat.boxes import whole
from dsdformat.convert.content import known_digest, tensor_digest
from dsdformat.convert.differing import NumbersDiffer, find_difference
from dsdformat.convert.foreign import AnyTensor, Foreign, rooted
from dsdformat.convert.kinds import open_any
from dsdformat.convert.numbers import pieces
from dsdformat.convert.optimizer_forms import optimizer_forms
from dsdformat.convert.optimizer_naming import with_optimizers
from dsdformat.convert.outputs import Progress
from dsdformat.convert.transforms import branch
from dsdformat.errors import FormatError, raise_problems
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.packing import emit
from dsdformat.format.values import encode
from dsdformat.renaming import display
from dsdformat.selection import Selection

__all__ = ["Change", "Difference", "What", "diff"]

PathLike = str | os.PathLike[str]
Path = tuple[Any, ...]
What = Literal["type", "dtype", "shape", "data", "value", "order"]
_Side = dict[str, Any]
_SEQUENCES = (list, tuple, deque)


@dataclass(frozen=True, slots=True)
class Change:
    """An entry that both checkpoints have, and that is not the same.

    Attributes:
        name: Its display name.
        what: The first thing that differs: the `type` of entry or container, the `dtype`, the
            `shape`, the `data` of a tensor, a `value`, or the kind of dict or `order` of keys.
        a, b: What each has: a value, a tensor, or the name of a type.
        numbers: How the elements differ, if that was asked for and they have numbers.
    """

    name: str
    what: What
    a: Any
    b: Any
    numbers: NumbersDiffer | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """How two checkpoints differ.

    Attributes:
        only_a, only_b: Names of entries that the other lacks, in the order of the tree.
        changes: Entries that differ, in the order of the first one's tree.
        ties: Names that are tied in one and not in the other, as both have them: for each the
            names that it is tied with in the first, and in the second.
        tensors, values: How many entries were compared.
        nbytes_read: How much data was read; none where digests say it all.
    """

    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    ties: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = ()
    tensors: int = 0
    values: int = 0
    nbytes_read: int = 0

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.only_a or self.only_b or self.changes or self.ties)


def diff(
    a: PathLike | Foreign,
    b: PathLike | Foreign,
    *,
    select: Selection | str | Iterable[str] | None = None,
    stats: bool = False,
    ties: bool = True,
    order: bool = False,
    branch_a: str | None = None,
    branch_b: str | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare two checkpoints, of any kinds, layouts and codecs.

    Two tensors are the same if their dtypes, shapes and bytes are: NaN is equal to the same NaN,
    and -0.0 is not equal to 0.0. Values are the same if their types are too. Placements, codecs,
    hints of tensors and user metadata are not compared. Optimizers that kinds of files have in
    different forms, by numbers in one and by names in the other, are compared by names, if no
    branch is given and both files tell them all.

    Args:
        a, b: Paths, or what `open_any` gives.
        select: Globs of names to compare; everything if None.
        stats: Whether to tell how many elements differ, and by how much.
        ties: Whether to compare which names are one tensor.
        order: Whether to compare the kinds of dicts too, and the order of keys in ordered ones,
            which kinds of files keep in part.
        branch_a, branch_b: Names of containers to compare, in place of the whole.
        progress: Called with bytes done and bytes to read in all.

    Raises:
        ChecksumError, ConvertError: data that is read is damaged.
        EntryNotFoundError: a branch is not there.

    Ranks: local.
    Memory: the values, and about 16 MiB; with `stats` 100 MiB.
    """
    with contextlib.ExitStack() as stack:
        first, second = (
            one
            if isinstance(one, Foreign)
            else stack.enter_context(open_any(one, unknown="record"))
            for one in (a, b)
        )
        if branch_a is None and branch_b is None:
            first, second = _of_one_form(first, second)
        selection = select if isinstance(select, Selection) else Selection(select)
        comparer = _Comparer((first.name, second.name), selection, stats=stats, progress=progress)
        sides = [
            branch(one.tree, name) if name else rooted(one.tree)
            for one, name in ((first, branch_a), (second, branch_b))
        ]
        return comparer.run(*sides, ties=ties, order=order)


def _of_one_form(a: Foreign, b: Foreign) -> tuple[Foreign, Foreign]:
    """Give optimizers names, where they have other forms in one than in the other."""
    if optimizer_forms(a.tree) == optimizer_forms(b.tree):
        return a, b
    (named_a, numbers_a), (named_b, numbers_b) = (
        with_optimizers(one, "named", source=one) for one in (a, b)
    )
    return (a, b) if numbers_a or numbers_b else (named_a, named_b)


class _Comparer:
    def __init__(
        self,
        names: tuple[str, str],
        selection: Selection,
        *,
        stats: bool,
        progress: Progress | None,
    ) -> None:
        self._names = names
        self._selection = selection
        self._stats = stats
        self._progress = progress
        self._done = self._total = 0
        self._changes: dict[str, Change] = {}
        self._same: dict[tuple[int, int], NumbersDiffer | bool] = {}

    def run(self, a: Any, b: Any, *, ties: bool, order: bool) -> Difference:
        found_a, found_b = self._entries(a), self._entries(b)
        common = [name for name in found_a if name in found_b]
        to_read = []
        for name in common:
            if self._differs_at_once(name, found_a[name], found_b[name]):
                to_read.append(name)
        if order:
            self._compare_orders(a, b)
        pairs = [(found_a[name], found_b[name]) for name in to_read]
        distinct = {(a.identity, b.identity): (a, b) for a, b in pairs}
        self._total = sum(self._cost(*pair) for pair in distinct.values())
        for name in to_read:
            self._compare_data(name, found_a[name], found_b[name])
        tensors = sum(_is_tensor(found_a[name]) for name in common)
        return Difference(
            only_a=tuple(name for name in found_a if name not in found_b),
            only_b=tuple(name for name in found_b if name not in found_a),
            changes=tuple(self._changes[name] for name in _in_order(self._changes, found_a)),
            ties=tuple(_ties(found_a, found_b)) if ties else (),
            tensors=tensors,
            values=len(common) - tensors,
            nbytes_read=self._done,
        )

    def _entries(self, tree: Any) -> _Side:
        entries = ((display(path), leaf) for path, leaf in _iter_entries(tree, ()))
        return {name: leaf for name, leaf in entries if name in self._selection}

    def _differs_at_once(self, name: str, a: Any, b: Any) -> bool:
        """Note what differs without a look at data; say whether data has to be looked at."""
        if not (_is_tensor(a) and _is_tensor(b)):
            if isinstance(a, Mapping) and isinstance(b, Mapping):  # both are empty
                return False
            if _is_tensor(a) or _is_tensor(b) or type(a) is not type(b):
                self._note(name, "type", a, b)
            elif emit(encode(a)) != emit(encode(b)):
                self._note(name, "value", a, b)
            return False
        if a.shape != b.shape:
            self._note(name, "shape", a, b)
        elif a.dtype != b.dtype:
            self._note(name, "dtype", a, b)
            return self._stats
        else:
            known = known_digest(a), known_digest(b)
            if None in known:
                return True
            if known[0] != known[1]:
                self._note(name, "data", a, b)
                return self._stats
        return False

    def _cost(self, a: AnyTensor, b: AnyTensor) -> int:
        if a.dtype == b.dtype and not self._stats:
            return sum(one.nbytes for one in (a, b) if known_digest(one) is None)
        return a.nbytes + b.nbytes

    def _compare_data(self, name: str, a: AnyTensor, b: AnyTensor) -> None:
        """Read two tensors of one shape, and note how they differ; tied ones are read once."""
        pair = a.identity, b.identity
        if pair not in self._same:
            self._same[pair] = self._read(a, b)
        found = self._same[pair]
        what: What = "data" if a.dtype == b.dtype else "dtype"
        if isinstance(found, NumbersDiffer):
            if found.differing or what == "dtype":
                self._note(name, what, a, b, found)
        elif not found:
            self._note(name, what, a, b)

    def _read(self, a: AnyTensor, b: AnyTensor) -> NumbersDiffer | bool:
        """Return how two tensors differ, or whether they are the same."""
        if self._stats:
            return find_difference(self._reader(0, a), self._reader(1, b), a, b)
        known = known_digest(a), known_digest(b)
        if known != (None, None):
            with self._told_where(1 if known[1] is None else 0):
                return tensor_digest(a, self._told) == tensor_digest(b, self._told)
        read_a, read_b = self._reader(0, a), self._reader(1, b)
        boxes = list(pieces(whole(a.shape), DTYPES[a.dtype].itemsize))
        return all(bytes(read_a(box)) == bytes(read_b(box)) for box in boxes)

    def _reader(self, side: int, tensor: AnyTensor) -> Callable[[Any], memoryview]:
        def read(box: Any) -> memoryview:
            with self._told_where(side):
                data = tensor.read(box)
            self._told(len(data))
            return data

        return read

    @contextlib.contextmanager
    def _told_where(self, side: int) -> Iterator[None]:
        """Say in an error which of the two checkpoints is damaged."""
        try:
            yield
        except FormatError as error:
            name = self._names[side]
            raise_problems([replace(p, message=f"{name}: {p.message}") for p in error.problems])

    def _told(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    def _compare_orders(self, a: Any, b: Any) -> None:
        first, second = dict(_iter_dicts(a, ())), dict(_iter_dicts(b, ()))
        for path in first.keys() & second.keys():
            one, other = first[path], second[path]
            name = display(path)
            if type(one) is not type(other):
                self._note(name, "type", type(one).__name__, type(other).__name__)
            elif type(one) is OrderedDict and list(one) != list(other):
                self._note(name, "order", list(one), list(other))

    def _note(
        self, name: str, what: What, a: Any, b: Any, numbers: NumbersDiffer | None = None
    ) -> None:
        self._changes[name] = Change(name, what, a, b, numbers)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, AnyTensor)


def _iter_entries(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """List tensors and values; a list or tuple without tensors is one value, as an empty dict."""
    if isinstance(node, Mapping) and node:
        for key, item in node.items():
            yield from _iter_entries(item, (*path, key))
    elif isinstance(node, _SEQUENCES) and _holds_more(node):
        for index, item in enumerate(node):
            yield from _iter_entries(item, (*path, index))
    else:
        yield path, node


def _holds_more(node: Any) -> bool:
    """Whether a list or tuple holds a tensor or a dict."""
    return any(
        _is_tensor(item)
        or isinstance(item, Mapping)
        or (isinstance(item, _SEQUENCES) and _holds_more(item))
        for item in node
    )


def _iter_dicts(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, Mapping):
        yield path, node
        for key, item in node.items():
            yield from _iter_dicts(item, (*path, key))
    elif isinstance(node, _SEQUENCES):
        for index, item in enumerate(node):
            yield from _iter_dicts(item, (*path, index))


def _in_order(changes: Mapping[str, Any], names: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in names if name in changes)
    yield from (name for name in changes if name not in names)


def _ties(a: _Side, b: _Side) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Compare which of the names that both have are one tensor; each is told once."""
    common = {name for name in a if name in b and _is_tensor(a[name]) and _is_tensor(b[name])}
    first, second = _groups(a, common), _groups(b, common)
    for name in a:
        if name in common and first[name] != second[name]:
            others = [tuple(n for n in group[name] if n != name) for group in (first, second)]
            yield name, others[0], others[1]


def _groups(side: _Side, common: set[str]) -> dict[str, list[str]]:
    by_identity: dict[int, list[str]] = {}
    groups = {}
    for name in sorted(common):
        groups[name] = by_identity.setdefault(side[name].identity, [])
        groups[name].append(name)
    return groups
