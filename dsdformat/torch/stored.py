"""The tree of a checkpoint as `load` walks it: tensors that are not read yet among plain values."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsdformat.errors import ArgumentError, shorten
from dsdformat.format.decoding import Hooks
from dsdformat.format.paths import emit_name
from dsdformat.format.values import Named, Scalar, TensorRef, encoded_key
from dsdformat.torch.dtypes import find_value
from dsdformat.torch.origin import Entry, Origin
from dsdformat.torch.selection import Renames, Selection
from dsdformat.torch.sources import COMPOSITE, FLAVOUR, NUMPY, numpy_side

__all__ = [
    "ABSENT",
    "VALUES",
    "Composite",
    "Moved",
    "Path",
    "Stored",
    "as_array",
    "as_tensor",
    "describe",
    "display",
    "find_items",
    "is_numpy",
    "leaves",
    "named_value",
    "names_of",
    "pruned",
    "read_tree",
    "rebuilt",
    "renamed",
    "unescaped",
    "without_tensors",
]

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Stored:
    """A reference to a tensor of the checkpoint.

    Attributes:
        entry: The tensor.
        attributes: The hints of this reference.
        name: Display name of the tensor.
    """

    entry: Entry
    attributes: Mapping[str, Any]
    name: str

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


def read_tree(checkpoint: Origin) -> dict[str, Any]:
    """Return the nested state, with a `Stored` at each tensor and a `Composite` at others."""
    entries = list(checkpoint)
    names = [entry.name for entry in entries]

    def tensor(ref: TensorRef) -> Stored:
        return Stored(entries[ref.index], dict(ref.attributes), names[ref.index])

    raw: dict[str, Any] = checkpoint.tree(replace(VALUES, tensor=tensor))
    return _composed(raw) if _has_composites(raw) else raw


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


def _has_composites(value: Any) -> bool:
    return _is_composite(value) or any(_has_composites(item) for _, item in find_items(value) or ())


def _composed(value: Any) -> Any:
    if _is_composite(value):
        return Composite(value[0].name, _composed(value[1]))
    items = find_items(value)
    return (
        value if items is None else rebuilt(value, [(key, _composed(item)) for key, item in items])
    )


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


def display(path: Path) -> str:
    """Return the display name of a path."""
    return emit_name(path, encoded_key)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """List tensors and values with their paths. An empty container is a leaf."""
    items = None if type(value) is Composite else find_items(value)
    if not items:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, (*path, key))


class Moved:
    """What entries were called before they were renamed."""

    def __init__(self, renames: Renames | None = None) -> None:
        self._renames = renames
        self._names: dict[Path, dict[str, str]] = {}  # branch now -> last parts, before and now
        self._whole: dict[str, str] = {}

    def note(self, old: Path, new: Path) -> None:
        """Note one entry."""
        self._whole[display(old)] = display(new)
        if type(old[-1]) is str and type(new[-1]) is str:
            self._names.setdefault(new[:-1], {})[old[-1]] = new[-1]

    def of(self, module: Path | None) -> Callable[[str], str | None]:
        """Return what the names of an optimizer's parameters are now, from what they were.

        Args:
            module: Where the module is that they are FQNs of; None or the root if they are
                display names.
        """
        if not self._renames:
            return lambda name: name
        known = self._names.get(module, {}) if module else self._whole
        return lambda name: known[name] if name in known else self._asked(name, module)

    def _asked(self, name: str, module: Path | None) -> str | None:
        """Rename what the module's section does not have."""
        assert self._renames is not None
        prefix = f"{display(module)}/" if module else ""
        full = self._renames.name(display((*module, name)) if module else name)
        if full is None or not full.startswith(prefix):
            return None
        return unescaped(full[len(prefix) :]) if module else full


def renamed(tree: dict[str, Any], renames: Renames) -> tuple[dict[str, Any], Moved]:
    """Return the tree with its entries under other names, and what they were called.

    Only dicts with string keys have names that can change; what lies in a list goes with it, and
    what an optimizer keeps goes with the optimizer: its names follow those of the parameters.

    Raises:
        ArgumentError: two entries would have one name.
        EntryNotFoundError: a name to be replaced is not there.
    """
    moved = Moved(renames or None)
    if not renames:
        return tree, moved
    result: dict[str, Any] = {}
    names = []
    for path, kinds, value in _named_leaves(tree, (), ()):
        wanted, name = _wanted(path, value, renames)
        names.append(name)
        if wanted is None:
            continue
        steps = path if wanted == name else tuple(map(unescaped, wanted.split("/")))
        node: Any = result
        for depth, step in enumerate(steps[:-1]):
            kind = kinds[depth + 1] if depth + 1 < len(kinds) else dict
            node = node.setdefault(step, kind()) if isinstance(node, dict) else None
        both = isinstance(node, dict) and _is_optimizer(node.get(steps[-1]))
        if both and _is_optimizer(value):
            node[steps[-1]] = _united(node[steps[-1]], value)
            continue
        if not isinstance(node, dict) or steps[-1] in node:
            raise ArgumentError(
                f"rename: {shorten(wanted)} is the name of two entries, of which one was {name}",
                code="bad_argument",
            )
        node[steps[-1]] = value
        moved.note(path, steps)
    renames.check_used(names)
    return result, moved


def _wanted(path: Path, value: Any, renames: Renames) -> tuple[str | None, str]:
    """Return what an entry, or the whole of an optimizer, is called now, and what before."""
    name = display(path)
    if not _is_optimizer(value):
        return renames.name(name), name
    inner = renames.name(f"{name}/state")
    if inner is None or not inner.endswith("/state"):
        return None, name
    return inner.removesuffix("/state"), name


def _united(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Unite the states of two optimizers, which work on different parameters."""
    result = dict(one)
    for key, value in other.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not (old.keys() & value.keys()):
            result[key] = type(old)({**old, **value})
        elif key in result:
            raise ArgumentError(
                f"rename: two optimizers that have the same in {shorten(key)} have one name",
                code="bad_argument",
            )
        else:
            result[key] = value
    return result


def _is_optimizer(value: Any) -> bool:
    return type(value) is dict and type(value.get("param_groups")) is OrderedDict


def _named_leaves(
    value: Any, path: Path, kinds: tuple[type, ...]
) -> Iterator[tuple[Path, tuple[type, ...], Any]]:
    """List what lies below dicts of string keys, with the types of the dicts on the way."""
    plain = type(value) in (dict, OrderedDict) and value and all(type(key) is str for key in value)
    if plain and not (path and _is_optimizer(value)):
        for key, item in value.items():
            yield from _named_leaves(item, (*path, key), (*kinds, type(value)))
    else:
        yield path, kinds, value


def unescaped(part: str) -> str:
    """Return the key whose display name this is."""
    return part.replace("%2F", "/").replace("%40", "@").replace("%25", "%")


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
    return Stored(stored.entry, {FLAVOUR: NUMPY}, stored.name)


def as_tensor(stored: Stored) -> Stored:
    """Return a reference to the same tensor, to be made a tensor of torch."""
    rest = {key: value for key, value in stored.attributes.items() if key != FLAVOUR}
    return Stored(stored.entry, rest, stored.name)


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
