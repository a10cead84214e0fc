"""Flat shards of fairscale's FSDP: one file for each rank, or one with all, to parameters by name.

Such a file has weights, in which flat parameters lie, and metadata that says which parameters
those are. A parameter's pieces are read where they lie in the files. So are those of what an
optimizer keeps for each element. What else the ranks have must be the same on all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsdformat.boxes import Box, flat_boxes
from dsdformat.convert.faults import fault
from dsdformat.convert.flat_optimizers import has_numbers_of_flat, join_optimizers
from dsdformat.convert.foreign import AnyTensor, Foreign, Kind, is_mapping, rebuilt, walk_tree
from dsdformat.convert.optimizer_forms import STATE
from dsdformat.convert.packed import packed_blocks
from dsdformat.convert.settling import Finding, Policy, Settled
from dsdformat.convert.tensor import ForeignTensor, Part, View, packed_strides
from dsdformat.errors import ArgumentError, ConvertError, MismatchError, printable, shorten
from dsdformat.flat_joining import differ, join_shards
from dsdformat.flat_layout import FlatLayout
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.paths import render_path

__all__ = ["find_flat", "join_files", "joined"]

_PARAMS, _BUFFERS = "param_metadata", "buffer_names"
_FLAT_NAME = re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?\Z")
_HINT = (
    "choose what is the same on all ranks with select, or leave the rest out with unknown='drop'"
)


@dataclass(frozen=True, slots=True)
class _Flat:
    """Where a state has weights and their metadata."""

    weights: Any
    metadata: Any


def find_flat(tree: Any) -> _Flat | None:
    """Find weights and metadata under two keys of a state; None if there is no metadata."""
    if not is_mapping(tree):
        return None
    described = [key for key, item in tree.items() if _is_metadata(item)]
    if len(described) != 1:
        return None
    weighty = [key for key, item in tree.items() if key != described[0] and _is_weights(item)]
    flat = [key for key in weighty if any(map(_is_flat_name, tree[key]))] or weighty
    return _Flat(flat[0], described[0]) if len(flat) == 1 else None


def joined(opened: Foreign, policy: Policy) -> Foreign:
    """Return a checkpoint with parameters in place of the flat ones of one file, if it has any.

    Args:
        opened: A file of torch; others are given back as they are.
        policy: What to do with flat parameters of which nothing is known: `refuse`; else keep them.

    Raises:
        ConvertError: `flat_shards`: the file has flat parameters and nothing says what is in them,
            or it is that of one of several ranks.
    """
    if opened.kind not in (Kind.TORCH_ZIP, Kind.TORCH_STREAM):
        return opened
    if find_flat(opened.tree) is not None:
        return join_files([opened], policy)
    if policy != "refuse":
        return opened
    for path, leaf in walk_tree(opened.tree):
        flat = isinstance(leaf, AnyTensor) and len(leaf.shape) == 1
        if flat and any(map(_is_flat_name, path)):
            raise fault(
                "flat_shards",
                opened.name,
                f"{render_path(path)} is of a flat parameter, and nothing says what lies in it",
                hint="save a full or a sharded state dict, or the metadata beside the weights; "
                "unknown='record' keeps it as it is",
            )
    return opened


def join_files(files: Sequence[Foreign], policy: Policy) -> Foreign:
    """Join what the ranks have saved, in the order of the ranks.

    Args:
        files: One for each rank, open; they stay open until the result is closed.
        policy: What to do with values that differ on the ranks: `refuse`; else leave them out.

    Raises:
        ConvertError: `flat_shards`: a file has no metadata, or the files do not fit together.
    """
    name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    flats = [find_flat(one.tree) for one in files]
    for one, flat in zip(files, flats, strict=True):
        if flat is None:
            raise fault("flat_shards", one.name, "has no weights with metadata of flat parameters")
    places = [flat for flat in flats if flat is not None]
    try:
        state = join_shards(
            [one.tree[flat.weights] for one, flat in zip(files, places, strict=True)],
            [one.tree[flat.metadata] for one, flat in zip(files, places, strict=True)],
            _Pieces(),
        )
    except (ArgumentError, MismatchError) as error:
        hint = error.hint if len(files) > 1 else "give the files of all ranks, in their order"
        raise ConvertError(
            f"{printable(name)}: {error.message}", code="flat_shards", hint=hint, where=name
        ) from None
    findings = [finding for one in files for finding in one.findings]
    rest = _Rest(files, places)
    tree = rest.tree(state)
    if len(files) > 1:
        rest.add_alone(files[0].tree[places[0].metadata])
    if rest.findings and policy == "refuse":
        lines = "\n".join(map(str, rest.findings[:10]))
        raise fault("flat_shards", name, f"these are not joined:\n{lines}", hint=_HINT)

    def verify(part: int, of: int) -> int:
        return sum(one.verify(part, of) for one in files)

    def close() -> None:
        for one in files:
            one.close()

    settled = Settled(tree, [*findings, *rest.findings])
    return Foreign(Kind.FLAT_SHARDS, name, settled, verify=verify, close=close)


class _Rest:
    """What the files have beside weights and metadata."""

    def __init__(self, files: Sequence[Foreign], places: Sequence[_Flat]) -> None:
        self.files = files
        self.places = places
        self.findings: list[Finding] = []

    def tree(self, state: dict[str, Any]) -> Any:
        first, place = self.files[0].tree, self.places[0]
        items: list[tuple[Any, Any]] = []
        for key, item in first.items():
            if key == place.weights:
                items.append((key, state))
            elif key != place.metadata:
                self.add(items, key, item)
        return rebuilt(first, items)

    def add(self, items: list[tuple[Any, Any]], key: Any, item: Any) -> None:
        values = [one.tree.get(key) for one in self.files]
        reason = "it differs on the ranks"
        if all(map(has_numbers_of_flat, values)):
            try:
                items.append((key, self.optimizer(values)))
                return
            except MismatchError as error:
                reason = error.message
        if _keeps_flat(values) or not all(_same(item, other) for other in values[1:]):
            self.findings.append(Finding((key,), "a value of each rank", reason))
        else:
            items.append((key, item))

    def optimizer(self, values: Sequence[Any]) -> dict[Any, Any]:
        both = list(zip(self.files, self.places, strict=True))
        weights = [one.tree[place.weights] for one, place in both]
        metadata = [one.tree[place.metadata] for one, place in both]
        return join_optimizers(values, weights, metadata, _Pieces(), _same)

    def add_alone(self, metadata: Any) -> None:
        """Tell of wrappers whose parameters are not shared by the ranks, as experts."""
        for instance in metadata[_PARAMS]:
            if instance.get("no_broadcast_optim_state"):
                path = (self.places[0].weights, instance["fsdp_path"])
                reason = "it has other parameters on each rank, and only those of rank 0 are kept"
                self.findings.append(Finding(path, "an expert", reason))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of the first elements of a flat tensor."""

    tensor: AnyTensor
    numel: int


class _Pieces:
    """Joins tensors of files."""

    def flat(self, value: Any, key: str, rank: int) -> _Piece:
        tensor = self.whole(value, key, rank)
        return _Piece(tensor, _numel(tensor))

    def numel(self, piece: _Piece) -> int:
        return piece.numel

    def dtype(self, piece: _Piece) -> str:
        return piece.tensor.dtype

    def head(self, piece: _Piece, numel: int) -> _Piece:
        return _Piece(piece.tensor, numel)

    def cut(self, pieces: Sequence[_Piece], layout: FlatLayout) -> list[ForeignTensor]:
        result, begin = [], 0
        for shape, numel in zip(layout.shapes, layout.numels, strict=True):
            result.append(ForeignTensor(self.dtype(pieces[0]), shape, _parts(pieces, shape, begin)))
            begin += numel
        return result

    def whole(self, value: Any, key: str, rank: int) -> AnyTensor:
        if not isinstance(value, AnyTensor):
            differ(f"{shorten(key)} of rank {rank} is no tensor, but a {type(value).__name__}")
        return value

    def memory(self, value: Any) -> Any:
        known = isinstance(value, AnyTensor) and value.nbytes
        return (value.identity, tuple(value.shape)) if known else None


def _parts(pieces: Sequence[_Piece], shape: tuple[int, ...], begin: int) -> list[Part]:
    """Return where the elements of a parameter lie, which begins at a place in all pieces."""
    parts, numel, at = [], FlatLayout("_", ("_",), (shape,)).numel, 0
    for piece in pieces:
        start, stop = max(at, begin), min(at + piece.numel, begin + numel)
        place = start - at
        for box in flat_boxes(shape, start - begin, stop - begin):
            parts.append(_part(piece.tensor, box, place))
            place += box.numel
        at += piece.numel
    return parts


def _part(tensor: AnyTensor, box: Box, place: int) -> Part:
    """Return a part whose elements lie in a flat tensor from a place on."""

    def open_view() -> View:
        strides, at = packed_strides(box.shape), place * DTYPES[tensor.dtype].itemsize
        if not isinstance(tensor, ForeignTensor) or len(tensor.parts) != 1:
            return View(_Elements(tensor), at, strides)
        view = tensor.parts[0].open()
        if view.strides != packed_strides(tensor.shape):
            return View(_Elements(tensor), at, strides)
        return replace(view, byte_offset=view.byte_offset + at, strides=strides)

    return Part(box, open_view)


class _Elements:
    """The elements of a tensor that is not contiguous, as bytes that are read by position."""

    def __init__(self, tensor: AnyTensor) -> None:
        self.name = "a flat parameter"
        self.nbytes = tensor.nbytes
        self._tensor = tensor

    def read_into(self, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place; return how many bytes there were."""
        itemsize, end = DTYPES[self._tensor.dtype].itemsize, byte_offset + len(into)
        first, stop = byte_offset // itemsize, min(-(-end // itemsize), self.nbytes // itemsize)
        pieces = (self._tensor.read(box) for box in flat_boxes(self._tensor.shape, first, stop))
        data = b"".join(pieces)[byte_offset - first * itemsize :][: len(into)]
        into[: len(data)] = data
        return len(data)


def _numel(tensor: AnyTensor) -> int:
    return tensor.nbytes // DTYPES[tensor.dtype].itemsize


def _keeps_flat(values: Sequence[Any]) -> bool:
    """Whether some values are an optimizer's, and keep nothing but flat tensors by number."""
    if not all(map(has_numbers_of_flat, values)):
        return False
    tensors = [
        leaf
        for value in values
        for _, leaf in walk_tree(value[STATE])
        if isinstance(leaf, AnyTensor) and leaf.shape
    ]
    return bool(tensors) and all(len(one.shape) == 1 for one in tensors)


def _is_metadata(value: Any) -> bool:
    return is_mapping(value) and _PARAMS in value and _BUFFERS in value


def _is_weights(value: Any) -> bool:
    return is_mapping(value) and any(isinstance(item, AnyTensor) for item in value.values())


def _is_flat_name(name: Any) -> bool:
    return type(name) is str and _FLAT_NAME.search(name) is not None


def _same(one: Any, other: Any) -> bool:
    """Whether two values of two files are the same; of tensors, only small ones are."""
    left, right = list(walk_tree(one)), list(walk_tree(other))
    if len(left) != len(right) or type(one) is not type(other):
        return False
    return all(a[0] == b[0] and _same_leaf(a[1], b[1]) for a, b in zip(left, right, strict=True))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, AnyTensor):
        like = isinstance(other, AnyTensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return like and _same_bytes(one, other)
    return type(one) is type(other) and bool(one == other)


def _same_bytes(one: AnyTensor, other: AnyTensor) -> bool:
    pairs = zip(packed_blocks(one), packed_blocks(other), strict=False)
    return all(a == b for a, b in pairs)
