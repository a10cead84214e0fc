"""Cut tensors into pieces, and pieces into buckets, so that collectives move a bounded amount.

All ranks of a group compute the same buckets from names, shapes, dtypes and placements alone. In
the buffer of a rank the boxes that it holds of a bucket lie one after another, each at a multiple
of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsdformat.boxes import Box
from dsdformat.torch.buffers import as_bits, box_view, row_boxes
from dsdformat.torch.sharding import Sharding

__all__ = ["BUCKET_NBYTES", "Piece", "Routes"]

BUCKET_NBYTES = 256 << 20
_ALIGN = 16

Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor.

    Attributes:
        name: Of the tensor.
        box: In elements of its global shape.
        nbytes: Length of the box.
    """

    name: str
    box: Box
    nbytes: int


class Routes:
    """Which rank of a group holds what of some tensors.

    Attributes:
        forms: Global shape and dtype of each tensor.
    """

    def __init__(
        self,
        forms: Mapping[str, Form],
        shardings: Mapping[str, Sharding],
        places: Mapping[str, Sequence[int]],
        *,
        once: bool,
    ) -> None:
        """Begin.

        Args:
            forms: Global shape and dtype of each tensor, in the order of all ranks.
            shardings: How they are spread over a mesh.
            places: For each tensor, the position in its mesh of each rank of the group.
            once: Whether only the first rank that holds a box counts as its holder.
        """
        self.forms = forms
        self._shardings = shardings
        self._places = places
        self._once = once
        self._boxes: dict[tuple[str, int], list[tuple[Box, Box]]] = {}

    def fingerprint(self) -> list[Any]:
        """Return what must be equal on all ranks before anything is moved: plain values."""
        return [
            [name, list(shape), str(dtype), [str(p) for p in self._shardings[name].placements]]
            for name, (shape, dtype) in self.forms.items()
        ]

    def buckets(self, bucket_nbytes: int) -> Iterator[list[Piece]]:
        """Cut all tensors into buckets, in their order."""
        bucket: list[Piece] = []
        held = 0
        for name, (shape, dtype) in self.forms.items():
            nbytes = dtype.itemsize
            for size in shape:
                nbytes *= size
            for box in row_boxes(shape, nbytes, bucket_nbytes):
                piece = Piece(name, box, box.numel * dtype.itemsize)
                if bucket and held + piece.nbytes > bucket_nbytes:
                    yield bucket
                    bucket, held = [], 0
                bucket.append(piece)
                held += piece.nbytes
        if bucket:
            yield bucket

    def buffer_nbytes(self, bucket: Sequence[Piece]) -> int:
        """Return the length of buffers that are equally long on all ranks."""
        return max(
            sum(
                _aligned(common.numel * self.forms[piece.name][1].itemsize)
                for piece in bucket
                for common, _ in self._held(piece, rank)
            )
            for rank in range(len(self._places[bucket[0].name]))
        )

    def pack(
        self,
        bucket: Sequence[Piece],
        rank: int,
        sources: Mapping[str, torch.Tensor],
        buffer: torch.Tensor,
        *,
        whole: bool,
    ) -> None:
        """Copy what a rank holds of a bucket into a buffer.

        Args:
            bucket: The pieces.
            rank: Whose boxes are meant.
            sources: Shards of that rank, or whole tensors.
            buffer: Bytes.
            whole: Whether the sources are whole tensors.
        """
        for view, common, inner, name in self._views(bucket, rank, buffer):
            view.copy_(as_bits(box_view(sources[name], common if whole else inner)))

    def unpack(
        self,
        bucket: Sequence[Piece],
        rank: int,
        buffer: torch.Tensor,
        targets: Mapping[str, torch.Tensor],
        *,
        whole: bool,
    ) -> None:
        """Copy the buffer of a rank into shards of that rank, or into whole tensors."""
        for view, common, inner, name in self._views(bucket, rank, buffer):
            as_bits(box_view(targets[name], common if whole else inner)).copy_(view)

    def _views(
        self, bucket: Sequence[Piece], rank: int, buffer: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Box, Box, str]]:
        at = 0
        for piece in bucket:
            bits = as_bits(torch.empty(0, dtype=self.forms[piece.name][1])).dtype
            for common, inner in self._held(piece, rank):
                nbytes = common.numel * bits.itemsize
                view = buffer[at : at + nbytes].view(bits).view(common.shape)
                yield view, common, inner, piece.name
                at += _aligned(nbytes)

    def _held(self, piece: Piece, rank: int) -> Iterator[tuple[Box, Box]]:
        """List what a rank holds of a piece: boxes of the tensor, and where its shard has them."""
        for outer, inner in self._boxes_of(piece.name, rank):
            common = piece.box.intersect(outer)
            if common is not None and common.numel:
                moved = zip(common.offset, outer.offset, inner.offset, strict=True)
                yield common, Box(tuple(c - o + i for c, o, i in moved), common.shape)

    def _boxes_of(self, name: str, rank: int) -> list[tuple[Box, Box]]:
        key = name, rank
        if key not in self._boxes:
            sharding, position = self._shardings[name], self._places[name][rank]
            counts = not self._once or sharding.is_first(position)
            self._boxes[key] = sharding.boxes(position) if counts else []
        return self._boxes[key]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
