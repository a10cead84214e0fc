"""Read tensors of a checkpoint into tensors of this process: straight, or through bounded buffers.

A destination that is packed, in host memory and of the stored dtype is read into as it is. Any
other is filled slab by slab.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsdformat.boxes import Box
from dsdformat.limits import MIB
from dsdformat.reader import Checkpoint
from dsdformat.torch.buffers import as_bits, box_view, bytes_of, empty, is_packed, row_boxes

__all__ = ["Move", "can_cast", "fill", "verify_whole"]

GROUP_NBYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor to be read.

    Attributes:
        index: The tensor's number in the checkpoint.
        stored: Its dtype there.
        into: A strided tensor of its shape, on any device.
    """

    index: int
    stored: torch.dtype
    into: torch.Tensor

    @property
    def is_straight(self) -> bool:
        """Whether the bytes of the file are those of the destination."""
        return self.stored == self.into.dtype and is_packed(self.into)

    @property
    def nbytes(self) -> int:
        """Length of the stored bytes."""
        return self.into.numel() * self.stored.itemsize


def fill(checkpoint: Checkpoint, moves: Sequence[Move]) -> None:
    """Read the tensors, each stored one once.

    Raises:
        ChecksumError: `checksum_mismatch`; the destinations are then undefined.

    Ranks: local.
    Memory: 32 MiB where destinations are not straight; else one block per thread.
    """
    first: dict[int, Move] = {}
    again: list[Move] = []
    for move in sorted(moves, key=lambda move: not move.is_straight):
        if move.index in first:
            again.append(move)
        else:
            first[move.index] = move
    straight = {index: bytes_of(m.into) for index, m in first.items() if m.is_straight}
    if straight:
        checkpoint.read_all(straight)
    _fill_staged(checkpoint, [move for move in first.values() if not move.is_straight])
    for move in moves:
        if not move.into.is_inference():
            torch.autograd.graph.increment_version(move.into)
    for move in again:
        source = first[move.index]
        if source.into.dtype == move.into.dtype == move.stored:
            _copy(move.into, source.into)
        else:  # the first one was cast, or is this one's stored form
            _fill_staged(checkpoint, [move])


def _fill_staged(checkpoint: Checkpoint, moves: Sequence[Move]) -> None:
    small: list[Move] = []
    held = 0
    for move in moves:
        if move.nbytes > GROUP_NBYTES // 2:
            _fill_slabs(checkpoint, move)
            continue
        if held + move.nbytes > GROUP_NBYTES:
            _fill_group(checkpoint, small)
            small, held = [], 0
        small.append(move)
        held += move.nbytes
    _fill_group(checkpoint, small)


def _fill_group(checkpoint: Checkpoint, moves: Sequence[Move]) -> None:
    """Read whole small tensors together, then copy each to its place."""
    pinned = any(move.into.is_cuda for move in moves)
    staged = [_host(move.into.shape, move.stored, pinned) for move in moves]
    checkpoint.read_all({m.index: bytes_of(s) for m, s in zip(moves, staged, strict=True)})
    for move, source in zip(moves, staged, strict=True):
        _copy(move.into, source)


def _fill_slabs(checkpoint: Checkpoint, move: Move) -> None:
    """Read one large tensor, a box of its rows at a time."""
    entry = checkpoint.table
    buffer: torch.Tensor | None = None
    for box in row_boxes(move.into.shape, move.nbytes, GROUP_NBYTES):
        if buffer is None or buffer.shape != box.shape:
            buffer = _host(box.shape, move.stored, move.into.is_cuda)
        entry.read(move.index, box, bytes_of(buffer), None)
        _copy(box_view(move.into, box), buffer)


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    if into.dtype == source.dtype and not into.is_conj() and not into.is_neg():
        as_bits(into).copy_(as_bits(source))
    else:
        with torch.inference_mode(into.is_inference()):
            into.copy_(source)


@functools.cache
def can_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether torch converts between two dtypes."""
    try:
        torch.empty(1, dtype=stored).to(wanted)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _host(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    buffer = empty(shape, dtype)
    return buffer.pin_memory() if pinned and buffer.numel() else buffer


def verify_whole(checkpoint: Checkpoint, index: int) -> None:
    """Read a tensor once, and compare it with its digests; for tensors that are mapped.

    Memory: 4 MiB.
    """
    table = checkpoint.table
    row = table.row(index)
    nbytes = Box((0,) * len(row.shape), row.shape).numel * row.dtype.itemsize
    scratch = memoryview(bytearray(min(nbytes, 4 * MIB)))
    for box in row_boxes(row.shape, nbytes, 4 * MIB):
        table.read(index, box, scratch[: box.numel * row.dtype.itemsize], None)
