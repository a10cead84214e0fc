"""Merge the trees of many writers, looking at each distinct piece of them once.

Pure. A thousand ranks of one mesh have trees that are equal but for a few values. So a tree is
sent in pieces, each one encoded; what is the same bytes on several writers is parsed, compared
and numbered for all of them together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dsdformat.errors import MismatchError
from dsdformat.format.decoding import decode_tree
from dsdformat.format.packing import emit, parse
from dsdformat.format.paths import emit_name
from dsdformat.format.trees import merge_trees, renumber
from dsdformat.format.values import encoded_key

__all__ = [
    "Group",
    "MergedTree",
    "Piece",
    "cut_tree",
    "index_tensors",
    "joined_tree",
    "merge_pieces",
    "tensor_name",
]

# An encoded subtree, or the keys of a map, each with a piece.
Piece = Any

_CUT_NBYTES = 4096
_CUT_KEYS = 64
_CUT_DEPTH = 8  # far from the limit of nesting, which counts anew within a piece
_FEW = 8


@dataclass(slots=True)
class Group:
    """Writers that have the same piece.

    Attributes:
        writers: Their numbers, ascending.
        tensors: Of each tensor in the piece its index on these writers, and the merged one.
    """

    writers: tuple[int, ...]
    tensors: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class MergedTree:
    """The tree of all writers.

    Attributes:
        tree: Encoded; tensors are numbered in the order of the tree.
        count: Number of tensors.
        groups: What says which tensors of the writers these are.
    """

    tree: Any = None
    count: int = 0
    groups: list[Group] = field(default_factory=list)


def cut_tree(tree: dict[str, Any] | list[Any]) -> Piece:
    """Cut an encoded tree into pieces: small ones, and maps of many keys, which seldom differ."""
    if type(tree) is not dict:
        return emit(tree)
    return {key: _cut(item, _CUT_DEPTH) for key, item in tree.items()}


def joined_tree(piece: Piece) -> Any:
    """Return the encoded tree that was cut."""
    if type(piece) is dict:
        return {key: joined_tree(item) for key, item in piece.items()}
    return parse(piece)


def merge_pieces(pieces: Sequence[Piece]) -> MergedTree:
    """Merge the trees of all writers, cut into pieces.

    Raises:
        MismatchError: `state_conflict` with the path, as `format.trees.merge_trees`.

    Complexity: linear in the bytes of all pieces, which are hashed; and in the tensors of pieces
    that differ.
    """
    merge = _Merge()
    merge.result.tree = merge.merged(list(enumerate(pieces)))
    return merge.result


def _cut(tree: Any, depth: int) -> Piece:
    raw = emit(tree)
    is_map = depth > 0 and type(tree) is dict
    if not is_map or len(raw) <= _CUT_NBYTES or len(tree) > _CUT_KEYS:
        return raw
    return {key: _cut(item, depth - 1) for key, item in tree.items()}


class _Merge:
    def __init__(self) -> None:
        self.result = MergedTree()
        self.path: list[Any] = []
        self.known: dict[tuple[Any, ...], int] = {}

    def merged(self, pieces: list[tuple[int, Piece]]) -> Any:
        """Merge what some writers have at one place."""
        distinct: dict[bytes, list[int]] = {}
        maps = []
        for writer, piece in pieces:
            if type(piece) is dict:
                maps.append((writer, piece))
            else:
                distinct.setdefault(piece, []).append(writer)
        if maps or len(distinct) > _FEW:
            opened = {raw: piece for raw in distinct if (piece := _opened(raw)) is not None}
            if len(opened) == len(distinct):
                maps += [(writer, opened[raw]) for raw in distinct for writer in distinct[raw]]
                return self.merged_maps(sorted(maps, key=_writer_of))
            for writer, piece in maps:  # a map and none: the conflict is found below
                distinct.setdefault(emit(joined_tree(piece)), []).append(writer)
        trees = []
        for raw, writers in distinct.items():
            number = len(self.result.groups)
            self.result.groups.append(Group(tuple(writers)))
            trees.append(renumber(parse(raw), functools.partial(_keyed, number)))
        return merge_trees(trees, self.union, self.path)

    def merged_maps(self, maps: list[tuple[int, dict[str, Piece]]]) -> dict[str, Any]:
        """Merge key by key."""
        by_key: dict[str, list[tuple[int, Piece]]] = {}
        for writer, piece in maps:
            for key, item in piece.items():
                by_key.setdefault(key, []).append((writer, item))
        result = {}
        for key in sorted(by_key):
            self.path.append(key)
            result[key] = self.merged(by_key[key])
            self.path.pop()
        return result

    def union(self, keys: list[tuple[int, int]]) -> int:
        """Return the merged index of tensors that meet at a path; tied ones have one."""
        groups = self.result.groups
        index = self.known.setdefault(self._identity(keys), self.result.count)
        if index == self.result.count:
            self.result.count += 1
        for group, tensor in keys:
            groups[group].tensors.append((tensor, index))
        return index

    def _identity(self, keys: list[tuple[int, int]]) -> tuple[Any, ...]:
        """Say which tensors of which writers these are, in whichever groups they are met."""
        groups = self.result.groups
        if len(keys) == 1:
            ((group, tensor),) = keys
            return ((tensor, groups[group].writers),)
        by_tensor: dict[int, list[int]] = {}
        for group, tensor in keys:
            by_tensor.setdefault(tensor, []).extend(groups[group].writers)
        return tuple((tensor, tuple(sorted(by_tensor[tensor]))) for tensor in sorted(by_tensor))


def index_tensors(merged: MergedTree, counts: Sequence[int]) -> list[Sequence[int]]:
    """Return for each writer the merged index of each of its tensors.

    Writers with the same indexes share one list.

    Args:
        merged: The tree of all writers.
        counts: How many tensors each writer has.

    Raises:
        MismatchError: `state_conflict`: a tensor is in no place of the tree, or tied on some
            writers and not on others.
    """
    of_writer: list[list[int]] = [[] for _ in counts]
    for number, group in enumerate(merged.groups):
        if group.tensors:
            for writer in group.writers:
                of_writer[writer].append(number)
    known: dict[tuple[int, ...], Sequence[int]] = {}
    result = []
    for writer, numbers in enumerate(of_writer):
        key = (counts[writer], *numbers)
        if key not in known:
            known[key] = _indexes(merged, numbers, writer, counts[writer])
        result.append(known[key])
    return result


def tensor_name(tree: Any, index: int) -> str:
    """Return the display name of a tensor of an encoded tree, for an error."""
    return emit_name(decode_tree(tree).paths[index], encoded_key)


def _indexes(merged: MergedTree, numbers: list[int], writer: int, count: int) -> Sequence[int]:
    indexes = [-1] * count
    for number in numbers:
        for tensor, index in merged.groups[number].tensors:
            if not 0 <= tensor < count:
                raise MismatchError(
                    f"rank {writer} refers to tensor {tensor} of {count}", code="state_conflict"
                )
            if indexes[tensor] not in (-1, index):
                name = tensor_name(merged.tree, index)
                raise MismatchError(
                    f"{name}: tied to another tensor on rank {writer}, and not on all writers",
                    code="state_conflict",
                )
            indexes[tensor] = index
    if -1 in indexes:
        message = f"rank {writer} has a tensor that is at no place of its state"
        raise MismatchError(message, code="state_conflict")
    return indexes


def _opened(raw: bytes) -> dict[str, Piece] | None:
    """Return the keys of a piece that is a map, and what each has; None if it is no map."""
    if not 0x80 <= raw[0] <= 0x8F and raw[0] not in (0xDE, 0xDF):
        return None
    return {key: emit(item) for key, item in parse(raw).items()}


def _writer_of(pair: tuple[int, Any]) -> int:
    return pair[0]


def _keyed(group: int, tensor: int) -> tuple[int, int]:
    return group, tensor
