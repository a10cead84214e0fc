"""Blocks that one rank reads for several: who reads which, and what ranks want of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dsdformat.boxes import Box
from dsdformat.plan.block_shares import Block, Met, boxes_of_block
from dsdformat.reader import Checkpoint
from dsdformat.torch.buffers import box_view, typed
from dsdformat.torch.comm import Comm
from dsdformat.torch.moves import Move, read

__all__ = ["BlockRoles", "Piece", "aligned", "list_pieces", "within"]

_ALIGN = 16


class Piece(NamedTuple):
    """What a wanted box has of a block, if it lies in one part of it.

    Attributes:
        part: Number of the part: a block is several boxes where it does not end with a row.
        wish: Number of the box that is wanted.
        box: In elements of the tensor.
    """

    part: int
    wish: int
    box: Box


@dataclass(eq=False)
class BlockRoles:
    """What this rank reads for others, and others for it.

    Attributes:
        comm: The ranks that load together.
        checkpoint: What they load from.
        met: For each rank, the blocks it reads that this rank wants some of, in their order;
            for this one, all that it reads.
        takers: Of the blocks that this rank reads, which ranks want some; it is one of them.
        moves: What this rank wants of each tensor, in an order that depends on nothing else.
    """

    comm: Comm
    checkpoint: Checkpoint
    met: list[dict[Block, Met]] = field(init=False)
    takers: dict[Block, tuple[int, ...]] = field(default_factory=dict)
    moves: dict[int, list[Move]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.met = [{} for _ in range(self.comm.world_size)]

    def parts(self, met: Met) -> list[Box]:
        """Return the boxes of a block, one after another."""
        itemsize = self.checkpoint.table.chunk_table(met.block.tensor).dtype.itemsize
        return boxes_of_block(met.place, met.block.number, itemsize, self.checkpoint.block_nbytes)

    def views(self, met: Met, parts: Sequence[Box], data: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a block in its memory."""
        stored = self.moves[met.block.tensor][0].stored
        elements, views, at = typed(data, stored), [], 0
        for part in parts:
            views.append(elements[at : at + part.numel].view(part.shape))
            at += part.numel
        return views

    def pieces(self, met: Met, parts: Sequence[Box]) -> Iterator[Piece]:
        """List what this rank wants of the parts of a block."""
        return list_pieces(parts, [one.place for one in self.moves[met.block.tensor]])

    def read(self, blocks: Sequence[tuple[Met, Sequence[Box], Sequence[torch.Tensor]]]) -> None:
        """Read blocks, each into the views of its parts.

        Raises:
            ChecksumError: `checksum_mismatch`.

        Ranks: local.
        """
        moves = [
            Move(met.block.tensor, view.dtype, view, part)
            for met, parts, views in blocks
            for part, view in zip(parts, views, strict=True)
        ]
        read(self.checkpoint, moves)


def list_pieces(parts: Sequence[Box], wishes: Sequence[Box]) -> Iterator[Piece]:
    """List what of the parts of a block is wanted, in an order that all ranks know."""
    for number, part in enumerate(parts):
        for wish, wanted in enumerate(wishes):
            common = part.intersect(wanted)
            if common is not None:
                yield Piece(number, wish, common)


def within(tensor: torch.Tensor, around: Box, box: Box) -> torch.Tensor:
    """Return the view of a box in a tensor that is another box."""
    at = tuple(a - b for a, b in zip(box.offset, around.offset, strict=True))
    return box_view(tensor, Box(at, box.shape))


def aligned(nbytes: int) -> int:
    """Round up to where the next elements may begin, of any dtype."""
    return -(-nbytes // _ALIGN) * _ALIGN
