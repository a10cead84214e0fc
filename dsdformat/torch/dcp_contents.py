"""What a checkpoint holds, as planners of DCP see it: flat names, and how each is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dsdformat.errors import EntryNotFoundError, MismatchError, shorten
from dsdformat.reader import Checkpoint
from dsdformat.torch.dcp_nesting import Path
from dsdformat.torch.dtypes import torch_dtype
from dsdformat.torch.stored import Composite, Stored, is_numpy, read_tree

__all__ = ["Contents", "is_plain_tensor"]


class Contents:
    """The leaves of a checkpoint by the names that DCP gives them.

    A name is the path joined by dots. Dicts are always walked, lists where something in them is a
    tensor or a dict; any other value is one leaf.

    Attributes:
        leaves: Tensors that are not read yet, and values, by name.
        paths: The path of each, as the planner that saved it would have told it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the tree.

        Raises:
            MismatchError: `state_conflict`: two leaves have one name.

        Memory: the tree; for each tensor one chunk, whatever is stored.
        """
        self.leaves: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self._branches: dict[str, Any] = {}
        for path, value, is_leaf in _walk(read_tree(checkpoint), ()):
            name = ".".join(map(str, path))
            if not is_leaf:
                self._branches.setdefault(name, value)
                continue
            if name in self.leaves:
                raise MismatchError(
                    f"two entries of {checkpoint.table.storage.name} are both {shorten(name)} for "
                    "DCP, which joins keys by dots",
                    code="state_conflict",
                    hint="read it with dsdformat.torch.load",
                )
            self.leaves[name] = value
            self.paths[name] = path

    def metadata(self) -> Metadata:
        """Return what planners plan with: each tensor as one chunk, since any box can be read."""
        entries = {name: _entry(leaf) for name, leaf in self.leaves.items()}
        return Metadata(_Entries(entries, self._branches), planner_data=dict(self.paths))

    def value(self, name: str) -> tuple[Path, Any]:
        """Return the path and what lies there: a leaf, or a dict or list with all below it.

        Raises:
            EntryNotFoundError: there is nothing of that name.
        """
        if name in self.leaves:
            return self.paths[name], self.leaves[name]
        if name in self._branches:
            return (name,), self._branches[name]
        raise EntryNotFoundError(f"no entry {shorten(name)} in the checkpoint", name=name)

    def is_branch(self, name: str) -> bool:
        """Whether a name is not that of a leaf."""
        return name not in self.leaves


class _Entries(dict[str, Any]):
    """What there is by name; asked for it, also a dict or list, as one value.

    So a planner that does not flatten finds what it looks for, and a list comes back whole into a
    state whose own is still empty. Listed are leaves only.
    """

    def __init__(self, leaves: Mapping[str, Any], branches: Mapping[str, Any]) -> None:
        super().__init__(leaves)
        self._branches = branches

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._branches

    def __missing__(self, name: str) -> Any:
        if name in self._branches:
            return BytesStorageMetadata()
        raise KeyError(name)


def is_plain_tensor(leaf: Any) -> bool:
    """Whether a leaf is a tensor that torch has, in one strided block."""
    return isinstance(leaf, Stored) and not is_numpy(leaf) and _dtype(leaf) is not None


def _dtype(leaf: Stored) -> torch.dtype | None:
    return torch_dtype(leaf.entry.dtype)


def _entry(leaf: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not is_plain_tensor(leaf):
        return BytesStorageMetadata()
    dtype = _dtype(leaf)
    assert dtype is not None
    size = torch.Size(leaf.entry.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Any, bool]]:
    """List branches and leaves as torch's `traverse_state_dict` would walk them."""
    if isinstance(value, Mapping):
        items: Any = ((str(key), item) for key, item in value.items())
    elif type(value) is list and not _is_terminal(value):
        items = enumerate(value)
    else:
        yield path, value, True
        return
    if path:
        yield path, value, False
    for step, item in items:
        yield from _walk(item, (*path, step))


def _is_terminal(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    return type(value) is not list or not any(
        _is_tensor(item) or (isinstance(item, (Mapping, list)) and not _is_terminal(item))
        for item in value
    )


def _is_tensor(item: Any) -> bool:
    return type(item) is Composite or (isinstance(item, Stored) and not is_numpy(item))
