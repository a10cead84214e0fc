"""What a checkpoint holds, added up: tensors, values, chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dsdformat import Checkpoint, TensorEntry
from dsdformat.cli.entries import Placements, nbytes_of, numel_of
from dsdformat.cli.values import holds_tensors, is_tensor, iter_values, name_of
from dsdformat.convert import AnyTensor, Foreign
from dsdformat.convert.foreign import rooted, walk_tree

__all__ = [
    "Codecs",
    "Stored",
    "Sum",
    "TensorSums",
    "ValueSums",
    "add_chunks",
    "add_foreign_tensors",
    "add_tensors",
    "add_tree_values",
    "add_values",
]


@dataclass(slots=True)
class Sum:
    """How much there is of some tensors."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0

    def add(self, elements: int, nbytes: int) -> None:
        """Count one more tensor."""
        self.tensors += 1
        self.elements += elements
        self.nbytes += nbytes


@dataclass(slots=True)
class TensorSums:
    """All tensors.

    Attributes:
        total: Of all.
        tied: How many names there are beyond the first one of each tensor.
        sections: By top-level key; None is of tensors that lie at the top themselves.
        dtypes: By logical dtype.
        placements: By mesh and placements, those that were sharded.
    """

    total: Sum = field(default_factory=Sum)
    tied: int = 0
    sections: dict[str | None, Sum] = field(default_factory=dict)
    dtypes: dict[str, Sum] = field(default_factory=dict)
    placements: dict[Placements, Sum] = field(default_factory=dict)


@dataclass(slots=True)
class ValueSums:
    """All values.

    Attributes:
        top: By name, the top-level entries without a tensor in them.
        counts: By top-level key, the number of values beside its tensors.
    """

    top: dict[str, Any] = field(default_factory=dict)
    counts: dict[str | None, int] = field(default_factory=dict)


@dataclass(slots=True)
class Stored:
    """How much there is of some chunks, decoded and in the data files."""

    chunks: int = 0
    nbytes: int = 0
    stored_nbytes: int = 0


# Chunks by the name of their codec.
Codecs = dict[str, Stored]


def add_tensors(checkpoint: Checkpoint) -> TensorSums:
    """Add up the tensors; reads no chunk table."""
    found = TensorSums()
    for entry, layout in zip(checkpoint, checkpoint.table.columns.layout, strict=True):
        path = entry.path
        section = name_of(path[:1]) if len(path) > 1 else None
        elements, nbytes = numel_of(entry), nbytes_of(entry)
        found.total.add(elements, nbytes)
        found.sections.setdefault(section, Sum()).add(elements, nbytes)
        found.dtypes.setdefault(entry.dtype, Sum()).add(elements, nbytes)
        if layout:
            placements = _placements(checkpoint, entry, layout)
            found.placements.setdefault(placements, Sum()).add(elements, nbytes)
        found.tied += len(entry.paths) - 1
    return found


def add_foreign_tensors(source: Foreign) -> TensorSums:
    """Add up the tensors of another kind of file."""
    found = TensorSums()
    met: set[int] = set()
    for path, leaf in walk_tree(rooted(source.tree)):
        if not isinstance(leaf, AnyTensor):
            continue
        if leaf.identity in met:
            found.tied += 1
            continue
        met.add(leaf.identity)
        section = name_of(path[:1]) if len(path) > 1 else None
        elements = numel_of(leaf)
        found.total.add(elements, leaf.nbytes)
        found.sections.setdefault(section, Sum()).add(elements, leaf.nbytes)
        found.dtypes.setdefault(leaf.dtype, Sum()).add(elements, leaf.nbytes)
    return found


def add_values(checkpoint: Checkpoint) -> ValueSums:
    """Gather and count the values."""
    return add_tree_values(checkpoint.tree())


def add_tree_values(tree: Any) -> ValueSums:
    """Gather and count the values of a tree."""
    found = ValueSums()
    for key, node in rooted(tree).items():
        name = name_of((key,))
        if not holds_tensors(node):
            found.top[name] = node
        elif not is_tensor(node):
            found.counts[name] = sum(1 for _ in iter_values(node))
    return found


def add_chunks(checkpoint: Checkpoint) -> Codecs:
    """Add up the chunks; reads every chunk table."""
    found: Codecs = {}
    for entry in checkpoint:
        for chunk in entry.chunks:
            stored = found.setdefault(chunk.codec, Stored())
            stored.chunks += 1
            stored.nbytes += chunk.nbytes
            stored.stored_nbytes += chunk.stored_nbytes
    return found


def _placements(checkpoint: Checkpoint, entry: TensorEntry, layout: int) -> Placements:
    """Look up a layout without the chunks, which `entry.placements` would read and check."""
    body = checkpoint.table.body
    if layout > len(body.layouts):
        entry.chunks  # noqa: B018  raises what is wrong
    found = body.layouts[layout - 1]
    return body.meshes[found.mesh], found.placements
