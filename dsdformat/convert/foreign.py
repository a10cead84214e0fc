"""One face for all foreign checkpoints: names, tensors that are read when asked, values.

A `Foreign` is to a converter what a `Checkpoint` is to a loader, and gives what a `Writer` takes.
Knows nothing of kinds of files; those are made by `kinds.open`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from types import TracebackType
from typing import Any

from dsdformat.boxes import Box
from dsdformat.convert.settling import Finding, Settled
from dsdformat.convert.tensor import ForeignTensor
from dsdformat.errors import EntryNotFoundError, shorten
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key
from dsdformat.sources import TensorSource

__all__ = ["ROOT", "Foreign", "Kind", "replaced", "walk_tree"]

Path = tuple[Any, ...]
ROOT = "value"  # the key of a state that is no dict of string keys
# How containers are made anew: of pairs, and of the old one with new items.
_MAPPINGS: dict[type, Callable[[Any], Any]] = {
    dict: dict,
    OrderedDict: OrderedDict,
    Counter: lambda pairs: Counter(dict(pairs)),
    defaultdict: lambda pairs: defaultdict(None, pairs),
}
_SEQUENCES: dict[type, Callable[[Any, Any], Any]] = {
    list: lambda _, items: list(items),
    tuple: lambda _, items: tuple(items),
    deque: lambda old, items: deque(items, old.maxlen),
}


class Kind(Enum):
    """A kind of checkpoint that can be read."""

    DSD = "a dsdformat checkpoint"
    TORCH_ZIP = "a file of torch.save"
    TORCH_STREAM = "a file of torch.save, in the form before torch 1.6"
    DCP = "a folder of torch.distributed.checkpoint"
    SAFETENSORS = "a safetensors file"
    SAFETENSORS_FOLDER = "a folder of safetensors files"
    SAFETENSORS_SHARDS = "a folder of safetensors files with chunks of tensors"
    TORCH_FOLDER = "a folder of files of torch.save with an index"
    NPZ = "a .npz file"


class Foreign:
    """A foreign checkpoint that is open for reading. A context manager.

    Attributes:
        kind: What it is.
        name: How messages call it.
        tree: Its state: values of the format, with a `ForeignTensor` at each tensor. The same
            object at two places is a tied tensor.
        findings: What is not in the tree as it was in the file; empty if all is.
        attributes: What Python keeps on ordered dicts beside their items, as `_metadata` of a
            module's state dict, by path.
        metadata: Free strings of the file, as `__metadata__` of safetensors.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        settled: Settled,
        *,
        metadata: dict[str, str] | None = None,
        verify: Callable[[int, int], None] | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.tree = settled.tree
        self.findings: tuple[Finding, ...] = tuple(settled.findings)
        self.attributes = settled.attributes
        self.metadata = metadata or {}
        self._verify = verify
        self._close = close
        self._paths: dict[int, list[Path]] = {}
        self._tensors: dict[str, ForeignTensor] = {}
        for path, leaf in walk_tree(self.tree):
            if type(leaf) is ForeignTensor:
                self._paths.setdefault(id(leaf.parts), []).append(path)
                self._tensors[emit_name(path, encoded_key)] = leaf

    def __enter__(self) -> Foreign:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of tensors, tied ones counted once."""
        return len(self._paths)

    def __iter__(self) -> Iterator[tuple[str, ForeignTensor]]:
        """Yield display names and tensors, in the order of the tree; tied ones once a name."""
        return iter(self._tensors.items())

    def paths(self, tensor: ForeignTensor) -> list[Path]:
        """Return all paths that lead to a tensor: several if it is tied."""
        return self._paths.get(id(tensor.parts), [])

    def tensor(self, name: str) -> ForeignTensor:
        """Return the tensor of a display name.

        Raises:
            EntryNotFoundError: `entry_not_found`.
        """
        found = self._tensors.get(name)
        if found is None:
            raise EntryNotFoundError(f"no tensor {shorten(name)} in {self.name}", name=name)
        return found

    def read(self, name: str, box: Box | None = None, *, into: Any = None) -> memoryview:
        """Read one box of a tensor; see `ForeignTensor.read`."""
        return self.tensor(name).read(box, into=into)

    def state(self) -> dict[str, Any]:
        """Return what `Writer.add` takes: the tree with a reference to a source at each tensor.

        Tied tensors refer to one source, whose bytes are read when the writer gets there. A tree
        that is no dict of string keys lies under the key `value`.

        Memory: that of the values; when written, 4 MiB, or 40 MiB for a tensor that is not
        contiguous in its file.
        """
        sources: dict[int, TensorSource] = {}

        def leaf(value: Any) -> Any:
            if type(value) is not ForeignTensor:
                return value
            source = sources.get(id(value.parts))
            if source is None:
                source = sources[id(value.parts)] = value.source()
            return value.reference(source)

        state = replaced(self.tree, leaf)
        plain = type(state) in (dict, OrderedDict) and all(type(key) is str for key in state)
        return state if plain else {ROOT: state}

    def verify(self, part: int = 0, of: int = 1) -> None:
        """Compare all data with the checksums that the file has of them, if it has any.

        Args:
            part, of: Which of so many parts of the data to compare, if not all of them.

        Raises:
            ConvertError: `foreign_checksum`.

        Memory: 4 MiB.
        """
        if self._verify is not None:
            self._verify(part, of)

    def close(self) -> None:
        """Close the files. Values stay valid; tensors cannot be read any more."""
        if self._close is not None:
            self._close()


def walk_tree(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a tree with their paths; an empty container is a leaf."""
    items: Any = ()
    if type(tree) in _MAPPINGS:
        items = tree.items()
    elif type(tree) in _SEQUENCES:
        items = enumerate(tree)
    empty = True
    for step, item in items:
        empty = False
        yield from walk_tree(item, (*path, step))
    if empty:
        yield path, tree


def replaced(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a tree with other leaves."""
    kind = type(value)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]([(key, replaced(item, leaf)) for key, item in value.items()])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](value, (replaced(item, leaf) for item in value))
    return leaf(value)
