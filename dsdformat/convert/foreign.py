"""One face for all checkpoints that are converted: names, tensors that are read when asked, values.

A `Foreign` is to a converter what a `Checkpoint` is to a loader, and gives what a `Writer` takes.
Knows nothing of kinds of files; those are made by `kinds.open_foreign`, and ours by `own.open_own`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from dsdformat.boxes import Box, flat_boxes
from dsdformat.convert.files import Bytes
from dsdformat.convert.numbers import Readable
from dsdformat.convert.settling import Finding, Settled
from dsdformat.errors import EntryNotFoundError, shorten
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key
from dsdformat.reader import Checkpoint
from dsdformat.sources import Reference, TensorSource

__all__ = [
    "AnyTensor",
    "Foreign",
    "Kind",
    "children",
    "is_mapping",
    "mapped_tree",
    "read_range",
    "rebuilt",
    "rooted",
    "state_of",
    "walk_tree",
]

Path = tuple[Any, ...]
_ROOT = "value"
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
    FLAT_SHARDS = "files of fairscale's FSDP, one for each rank"


class _QuickCheck(type(Protocol)):  # type: ignore[misc]  # the metaclass of protocols
    """Tells instances by one attribute of their class; a protocol would evaluate all of them."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(type(instance), "identity")


@runtime_checkable
class AnyTensor(Readable, Protocol, metaclass=_QuickCheck):
    """A tensor to be converted: a `ForeignTensor`, or a `StoredTensor` of ours."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Hints that are stored with a reference: `dim_order`, `flavour`."""

    @property
    def identity(self) -> int:
        """What is equal for tied tensors, also if their hints differ."""

    def is_packed(self) -> bool:
        """Whether each stored piece is row-major as it lies."""

    def tiles(self) -> list[Box]:
        """Return the boxes that are stored, each in one piece."""

    def source(self) -> TensorSource:
        """Return what a `Writer` stores of it."""

    def reference(self, source: TensorSource) -> Reference:
        """Return a reference to a source of it, with the hints."""


class Foreign(AbstractContextManager["Foreign"]):
    """A checkpoint that is open for reading, in another format or ours. A context manager.

    Attributes:
        kind: What it is.
        name: How messages call it.
        tree: Its state: values of the format, with an `AnyTensor` at each tensor. Those of one
            `identity` are tied.
        findings: What is not in the tree as it was in the file; empty if all is.
        attributes: What Python keeps on ordered dicts beside their items, as `_metadata` of a
            module's state dict, by path.
        metadata: Free strings of the file, as `__metadata__` of safetensors.
        checkpoint: The checkpoint itself if it is ours, else None.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        settled: Settled,
        *,
        metadata: dict[str, str] | None = None,
        verify: Callable[[int, int], int] | None = None,
        close: Callable[[], None] | None = None,
        checkpoint: Checkpoint | None = None,
        sides: Callable[[], dict[str, Bytes]] | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.tree = settled.tree
        self.findings: tuple[Finding, ...] = tuple(settled.findings)
        self.attributes = settled.attributes
        self.metadata = metadata or {}
        self.checkpoint = checkpoint
        self._verify = verify
        self._close = close
        self._sides = sides
        self._paths: dict[int, list[Path]] = {}
        self._tensors: dict[str, AnyTensor] = {}
        for path, leaf in walk_tree(self.tree):
            if isinstance(leaf, AnyTensor):
                self._paths.setdefault(leaf.identity, []).append(path)
                self._tensors[emit_name(path, encoded_key)] = leaf

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of tensors, tied ones counted once."""
        return len(self._paths)

    def __iter__(self) -> Iterator[tuple[str, AnyTensor]]:
        """Yield display names and tensors, in the order of the tree; tied ones once a name."""
        return iter(self._tensors.items())

    def paths(self, tensor: AnyTensor) -> list[Path]:
        """Return all paths that lead to a tensor: several if it is tied."""
        return self._paths.get(tensor.identity, [])

    def tensor(self, name: str) -> AnyTensor:
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
        return state_of(self.tree)

    def verify(self, part: int = 0, of: int = 1) -> int:
        """Compare all data with the checksums that the file has of them, if it has any.

        Args:
            part, of: Which of so many parts of the data to compare, if not all of them.

        Returns:
            How many bytes were compared; 0 if there are no checksums.

        Raises:
            ConvertError: `foreign_checksum`.

        Memory: 4 MiB.
        """
        return 0 if self._verify is None else self._verify(part, of)

    def side_files(self) -> dict[str, Bytes]:
        """Return the files that belong to a model beside its data, as `config.json`, by name.

        Raises:
            ConvertError: `foreign_path`: one of them is a link that leads elsewhere.
        """
        return {} if self._sides is None else self._sides()

    def close(self) -> None:
        """Close the files. Values stay valid; tensors cannot be read any more."""
        if self._close is not None:
            self._close()


def read_range(tensor: AnyTensor, start: int, stop: int, into: memoryview) -> memoryview:
    """Read elements that follow each other in row-major order; return what they fill.

    Args:
        tensor: Of a checkpoint of any kind.
        start, stop: The first element, and behind the last, counted in row-major order.
        into: Long enough.

    Raises:
        What `tensor.read` raises.
    """
    boxes = flat_boxes(tensor.shape, start, stop)
    together = getattr(tensor, "read_boxes", None)
    if together is not None and len(boxes) > 1:  # one of ours, which then reads a block once
        filled: memoryview = together(boxes, into)
        return filled
    itemsize, at = DTYPES[tensor.dtype].itemsize, 0
    for box in boxes:
        end = at + box.numel * itemsize
        tensor.read(box, into=into[at:end])
        at = end
    return into[:at]


def walk_tree(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a tree with their paths; an empty container is a leaf."""
    items = children(tree)
    if not items:
        yield path, tree
        return
    for step, item in items:
        yield from walk_tree(item, (*path, step))


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the steps and items of a container; None for a leaf."""
    if is_mapping(value):
        return list(value.items())
    return list(enumerate(value)) if type(value) in _SEQUENCES else None


def is_mapping(value: Any) -> bool:
    """Whether a container is one of dicts, and not of sequences."""
    return type(value) in _MAPPINGS


def rebuilt(value: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a container like this one with other steps and items."""
    if is_mapping(value):
        return _MAPPINGS[type(value)](items)
    return _SEQUENCES[type(value)](value, [item for _, item in items])


def rooted(tree: Any) -> dict[str, Any]:
    """Return a tree as a state is: what is no dict of string keys lies under the key `value`."""
    plain = type(tree) in (dict, OrderedDict) and all(type(key) is str for key in tree)
    return tree if plain else {_ROOT: tree}


def state_of(
    tree: Any, source_of: Callable[[AnyTensor], TensorSource] = lambda tensor: tensor.source()
) -> dict[str, Any]:
    """Return what `Writer.add` takes; see `Foreign.state`.

    Args:
        tree: Values of the format, with an `AnyTensor` at each tensor.
        source_of: Gives what is stored of a tensor; called once for tied ones.
    """
    sources: dict[int, TensorSource] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, AnyTensor):
            return value
        source = sources.get(value.identity)
        if source is None:
            source = sources[value.identity] = source_of(value)
        return value.reference(source)

    return rooted(mapped_tree(tree, leaf))


def mapped_tree(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a tree with other leaves."""
    items = children(value)
    if items is None:
        return leaf(value)
    return rebuilt(value, [(step, mapped_tree(item, leaf)) for step, item in items])
