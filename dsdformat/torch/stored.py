"""The tree of a checkpoint as `load` walks it: tensors that are not read yet among plain values."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dsdformat.errors import shorten
from dsdformat.format.decoding import Hooks
from dsdformat.format.values import Named, Scalar, TensorRef
from dsdformat.renaming import Path, display
from dsdformat.selection import Selection
from dsdformat.torch.dtypes import find_value
from dsdformat.torch.origin import Entry, Origin
from dsdformat.torch.sources import COMPOSITE, FLAVOUR, NUMPY, numpy_side

__all__ = [
    "ABSENT",
    "VALUES",
    "Composite",
    "Live",
    "NamedLeaf",
    "Path",
    "Stored",
    "as_array",
    "as_tensor",
    "describe",
    "display",
    "find_items",
    "is_container",
    "is_numpy",
    "leaves",
    "named_leaves",
    "named_value",
    "names_of",
    "pruned",
    "read_tree",
    "rebuilt",
    "without_tensors",
]


@dataclass(slots=True, unsafe_hash=True)  # not frozen, which takes three times as long to make
class Stored:
    """A reference to a tensor of the checkpoint.

    Attributes:
        entry: The tensor.
        attributes: The hints of this reference.
    """

    entry: Entry
    attributes: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Display name of the tensor; made anew each time, since few are asked for."""
        return self.entry.name

    @property
    def index(self) -> int:
        """The tensor's number: equal for tied names."""
        return self.entry.index

    def __str__(self) -> str:
        return f"{self.entry.dtype} {list(self.entry.shape)}"


@dataclass(frozen=True)
class Composite:
    """A tensor that is stored by its components.

    Attributes:
        kind: As `composites.find_kind` says.
        parts: The components: values, `Stored` and `Composite`.
    """

    kind: str
    parts: Mapping[str, Any]

    def __str__(self) -> str:
        return f"a tensor of kind {self.kind.removeprefix('torch.')}"


_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, tuple, deque, Composite})


@dataclass
class Live:
    """What the state has, where it is returned beside what is stored."""

    value: Any


_NO_HINTS: Mapping[str, Any] = MappingProxyType({})


def read_tree(checkpoint: Origin) -> dict[str, Any]:
    """Return the nested state, with a `Stored` at each tensor and a `Composite` at others."""
    bare = [Stored(entry, _NO_HINTS) for entry in checkpoint]
    composites: list[Named] = []

    def tensor(ref: TensorRef) -> Stored:
        one = bare[ref.index]
        return Stored(one.entry, dict(ref.attributes)) if ref.attributes else one

    def named(value: Named) -> Any:
        if value.kind == COMPOSITE:
            composites.append(value)
        return named_value(value)

    hooks = replace(VALUES, named=named, tensor=tensor, bare=bare.__getitem__)
    raw: dict[str, Any] = checkpoint.tree(hooks)
    return _composed(raw) if composites else raw


def named_value(value: Named) -> Any:
    """Return the value of torch or numpy that a name stands for; the name where there is none."""
    found = find_value(value)
    return numpy_side().named_of(value) if found is value and "numpy" in value.kind else found


def _scalar(value: Scalar) -> Any:
    return numpy_side().scalar_of(value)


# Make the values of torch and numpy that are stored.
VALUES = Hooks(named=named_value, scalar=_scalar, size=torch.Size)


def _is_composite(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) == 2
        and type(value[0]) is Named
        and value[0].kind == COMPOSITE
        and type(value[1]) is dict
    )


def _composed(value: Any) -> Any:
    if _is_composite(value):
        return Composite(value[0].name, _composed(value[1]))
    items = find_items(value)
    return (
        value if items is None else rebuilt(value, [(key, _composed(item)) for key, item in items])
    )


def is_container(value: Any) -> bool:
    """Whether a value is a container that may hold tensors; `find_items` lists its children."""
    return type(value) in _CONTAINERS


def find_items(value: Any) -> list[tuple[Any, Any]] | None:
    """List keys and children of a container that may hold tensors; None for anything else."""
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        return list(value.items())
    if type(value) in (list, tuple, deque):
        return list(enumerate(value))
    return list(value.parts.items()) if type(value) is Composite else None


def rebuilt(like: Any, items: list[tuple[Any, Any]]) -> Any:
    """Make a container of the same type with other children."""
    kind = type(like)
    if kind is Composite:
        return Composite(like.kind, dict(items))
    if kind is defaultdict:
        return defaultdict(like.default_factory, items)
    if kind is Counter:
        return Counter(dict(items))  # it would count pairs
    if kind is deque:
        return deque((item for _, item in items), like.maxlen)
    if kind in (list, tuple):
        return kind(item for _, item in items)
    return kind(items)


def describe(value: Any) -> str:
    """Say what a stored value is, for a message."""
    if isinstance(value, (Stored, Composite)):
        return str(value) if type(value) is Composite else f"a tensor, {value}"
    if isinstance(value, dict):
        return f"a dict with the keys {shorten(list(value))}"
    if find_items(value) is not None:
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value, {shorten(value)}"


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """List tensors and values with their paths. An empty container is a leaf."""
    items = None if type(value) is Composite else find_items(value)
    if not items:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, (*path, key))


class NamedLeaf(NamedTuple):
    """A leaf, where it is, and its display name."""

    path: Path
    name: str
    leaf: Any


def named_leaves(value: Any, path: Path = ()) -> list[NamedLeaf]:
    """List what `leaves` lists, with names; what lies together has the first of it made once."""
    found: list[NamedLeaf] = []

    def visit(value: Any, path: Path, name: str) -> None:
        items = None if type(value) is Composite else find_items(value)
        if not items:
            found.append(NamedLeaf(path, name, value))
            return
        prefix = f"{name}/" if path else ""
        for key, item in items:
            visit(item, (*path, key), prefix + display((key,)))

    visit(value, path, display(path))
    return found


ABSENT = object()


def without_tensors(value: Any) -> Any:
    """Return the plain values in dicts of a tree, or `ABSENT`; a list with tensors goes whole."""
    if isinstance(value, dict) and value:
        items = [(key, without_tensors(item)) for key, item in value.items()]
        kept = [(key, item) for key, item in items if item is not ABSENT]
        return rebuilt(value, kept) if kept else ABSENT
    return ABSENT if any(True for _ in _stored(value, ())) else value


def pruned(value: Any, selection: Selection, path: Path = ()) -> Any:
    """Return the part of a tree that is selected, or `ABSENT`. A list is kept whole, or not."""
    return value if selection.everything else _pruned(value, path, selection)


def _pruned(value: Any, path: Path, selection: Selection) -> Any:
    if type(value) in (dict, OrderedDict) and value:
        children = [(key, _pruned(item, (*path, key), selection)) for key, item in value.items()]
        kept = [(key, item) for key, item in children if item is not ABSENT]
        return type(value)(kept) if kept else ABSENT
    return value if any(display(one) in selection for one, _ in leaves(value, path)) else ABSENT


def as_array(stored: Stored) -> Stored:
    """Return a reference to the same tensor, to be made a numpy array."""
    return Stored(stored.entry, {FLAVOUR: NUMPY})


def as_tensor(stored: Stored) -> Stored:
    """Return a reference to the same tensor, to be made a tensor of torch."""
    rest = {key: value for key, value in stored.attributes.items() if key != FLAVOUR}
    return Stored(stored.entry, rest)


def names_of(tree: Any) -> dict[int, list[str]]:
    """Return the display names that each tensor of a tree has, in the order of the tree."""
    names: dict[int, list[str]] = {}
    for path, leaf in _stored(tree, ()):
        names.setdefault(leaf.index, []).append(display(path))
    return names


def _stored(value: Any, path: Path) -> Iterator[tuple[Path, Stored]]:
    if isinstance(value, Stored):
        yield path, value
    for key, item in find_items(value) or ():
        yield from _stored(item, (*path, key))


def is_numpy(stored: Stored) -> bool:
    """Whether the tensor was a numpy array."""
    return stored.attributes.get(FLAVOUR) == NUMPY
