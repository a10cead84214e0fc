"""Which bytes go from which rank to which, in rounds that move a bounded amount.

All ranks of a group compute the same rounds from names, shapes, dtypes and shardings alone. In a
round each rank that has something gives about an equal part of a bucket, so that none waits for
another, and no rank gets more than a bucket of what it holds once. In the buffer from one rank to
another the boxes lie one after another, each at a multiple of 16 bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dsdformat.boxes import Box, row_boxes
from dsdformat.plan.sharding import Held, Sharding, on_each
from dsdformat.torch.buffers import copy_elements, typed
from dsdformat.torch.sharding import held_view

__all__ = ["BUCKET_NBYTES", "Form", "Piece", "Round", "Routes", "Spread"]

BUCKET_NBYTES = 256 << 20
_ALIGN = 16

Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Spread:
    """How a tensor is spread over the ranks of a group.

    Attributes:
        sharding: Over ranks of its own.
        positions: For each rank of the group, its position in the sharding; None if it has none.
    """

    sharding: Sharding
    positions: tuple[int | None, ...]

    @classmethod
    def of(cls, sharding: Sharding, ranks: Sequence[int]) -> Spread:
        """Find the positions of these global ranks."""
        return cls(sharding, _positions(sharding.ranks, tuple(ranks)))

    @classmethod
    def only(cls, shape: Sequence[int], rank: int, world_size: int) -> Spread:
        """Return the spread of a tensor that one rank of the group has whole."""
        places = tuple(0 if one == rank else None for one in range(world_size))
        return cls(on_each(shape, (rank,)), places)

    def copies(self) -> int:
        """Return how often the ranks of the group hold the tensor, at least once."""
        count = sum(position is not None for position in self.positions)
        return max(1, -(-self.sharding.copies() * count // len(self.sharding.ranks)))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that one rank gives.

    Attributes:
        name: Of the tensor.
        box: In elements of the tensor.
        held: Where the shard of that rank has it.
    """

    name: str
    box: Box
    held: Held


Round = list[list[Piece]]  # for each rank


class Routes:
    """The ways of some tensors from the ranks that have them to those that want them."""

    def __init__(
        self,
        forms: Mapping[str, Form],
        sources: Mapping[str, Spread],
        targets: Mapping[str, Spread] | None,
    ) -> None:
        """Begin.

        Args:
            forms: Global shape of each tensor and the dtype in which it is sent, in the order of
                all ranks.
            sources: Where they are. Of ranks that hold the same boxes, the first one gives.
            targets: Where they are wanted; None if all ranks want all of them.
        """
        self.forms = forms
        self.sources = sources
        self.targets = targets
        self._held: dict[tuple[int, int], list[Held]] = {}
        self._known: dict[Sharding, int] = {}
        self._source_ids = {name: self._id(one.sharding) for name, one in sources.items()}
        self._target_ids = {name: self._id(one.sharding) for name, one in (targets or {}).items()}
        self.world_size = max((len(one.positions) for one in sources.values()), default=0)

    def rounds(self, bucket_nbytes: int) -> Iterator[Round]:
        """Cut all tensors into rounds, each rank's in the order of names."""
        givers = sum(any(True for _ in self._given(rank)) for rank in range(self.world_size))
        quota = max(1, bucket_nbytes // (max(1, givers) * self._copies()))
        streams = [self._rounds_of(rank, quota) for rank in range(self.world_size)]
        while True:
            parts = [next(stream, []) for stream in streams]
            if not any(parts):
                return
            yield parts

    def _copies(self) -> int:
        """Return how often what a rank gives is wanted at most; it is sent that often."""
        if self.targets is None:
            return 1
        return max((one.copies() for one in self.targets.values()), default=1)

    def _rounds_of(self, rank: int, quota: int) -> Iterator[list[Piece]]:
        pieces: list[Piece] = []
        total = 0
        for name, held in self._given(rank):
            width = self.forms[name][1].itemsize
            for box in row_boxes(held.outer.shape, held.outer.numel * width, quota):
                nbytes = _aligned(box.numel * width)
                if pieces and total + nbytes > quota:
                    yield pieces
                    pieces, total = [], 0
                pieces.append(Piece(name, _moved(box, held.outer.offset), held))
                total += nbytes
        if pieces:
            yield pieces

    def _given(self, rank: int) -> Iterator[tuple[str, Held]]:
        """List the boxes that a rank is the one to give."""
        for name, spread in self.sources.items():
            position = spread.positions[rank]
            if position is None or spread.positions.index(position) != rank:
                continue  # it has none, or one before it has the same
            for held in self._of(self._source_ids[name], spread.sharding, position, once=True):
                if held.outer.numel:
                    yield name, held

    def nbytes_of_all(self) -> int:
        """Return how long all tensors are."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.forms.values())

    def given_nbytes(self, rank: int) -> int:
        """Return how much a rank gives, sent as often as it is wanted."""
        given = sum(
            held.outer.numel * self.forms[name][1].itemsize for name, held in self._given(rank)
        )
        return given * self._copies()

    def nbytes(self, pieces: Sequence[Piece], target: int | None) -> int:
        """Return how long the buffer of these pieces is, to one rank or to all."""
        return sum(
            _aligned(box.numel * self.forms[piece.name][1].itemsize)
            for piece in pieces
            for box, _ in self._wanted(piece, target)
        )

    def pack(
        self,
        pieces: Sequence[Piece],
        target: int | None,
        shards: Mapping[str, torch.Tensor],
        buffer: torch.Tensor,
    ) -> None:
        """Copy what one rank, or all, want of these pieces of this rank into a buffer."""
        for view, box, piece, _ in self._views(pieces, target, buffer):
            copy_elements(held_view(piece.held, box, shards[piece.name]), view)

    def copy(
        self,
        pieces: Sequence[Piece],
        rank: int,
        shards: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy what a rank itself wants of these pieces of it; dtypes are converted."""
        for piece in pieces:
            for box, held in self._wanted(piece, rank):
                source = held_view(piece.held, box, shards[piece.name])
                copy_elements(source, held_view(held, box, into[piece.name]))

    def unpack(
        self,
        pieces: Sequence[Piece],
        target: int | None,
        buffer: torch.Tensor,
        shards: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy a buffer into shards of a rank, or into whole tensors; dtypes are converted."""
        for view, box, piece, held in self._views(pieces, target, buffer):
            copy_elements(view, held_view(held, box, shards[piece.name]))

    def _views(
        self, pieces: Sequence[Piece], target: int | None, buffer: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Box, Piece, Held]]:
        at = 0
        for piece in pieces:
            dtype = self.forms[piece.name][1]
            for box, held in self._wanted(piece, target):
                nbytes = box.numel * dtype.itemsize
                view = typed(buffer[at : at + nbytes], dtype).view(box.shape)
                yield view, box, piece, held
                at += _aligned(nbytes)

    def _wanted(self, piece: Piece, target: int | None) -> Iterable[tuple[Box, Held]]:
        """List what a rank wants of a piece, and where its shard has it."""
        if self.targets is None or target is None:
            shape = self.forms[piece.name][0]
            all_of = Box((0,) * len(shape), shape)
            return [(piece.box, Held(all_of, all_of))]
        spread = self.targets[piece.name]
        position = spread.positions[target]
        if position is None:
            return ()
        return (
            (common, held)
            for held in self._of(self._target_ids[piece.name], spread.sharding, position)
            if (common := piece.box.intersect(held.outer)) is not None and common.numel
        )

    def _id(self, sharding: Sharding) -> int:
        """Number the shardings, so that equal ones are looked at once."""
        return self._known.setdefault(sharding, len(self._known))

    def _of(
        self, number: int, sharding: Sharding, position: int, *, once: bool = False
    ) -> list[Held]:
        key = (~number if once else number), position
        if key not in self._held:
            left_out = once and not sharding.is_first(position)
            self._held[key] = [] if left_out else sharding.held(position)
        return self._held[key]


@functools.lru_cache(maxsize=64)
def _positions(held: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int | None, ...]:
    at = {rank: position for position, rank in enumerate(held)}
    return tuple(at.get(rank) for rank in ranks)


def _moved(box: Box, offset: Sequence[int]) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offset, offset, strict=True)), box.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
