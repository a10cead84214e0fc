"""Read tensors of a checkpoint, or boxes of them, into tensors of this process.

A destination in host memory and of the stored dtype is read into as it is, whatever its strides.
Any other is filled through bounded buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsdformat.boxes import Box, row_boxes, whole_box
from dsdformat.format.dtypes import DTYPES
from dsdformat.garbage import paused_gc
from dsdformat.limits import MIB
from dsdformat.plan.load_plan import Wanted
from dsdformat.torch.buffers import as_bits, box_view, bytes_of, empty, overlaps_itself
from dsdformat.torch.origin import Entry, Origin
from dsdformat.torch.plain_tensors import PlainTensors

__all__ = [
    "Move",
    "Moves",
    "can_cast",
    "copy_twins",
    "distinct",
    "fill",
    "mark_changed",
    "put",
    "read",
    "verify_whole",
]

GROUP_NBYTES = 32 * MIB
_Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(slots=True, eq=False)  # not frozen, which would take four times as long to make
class Move:
    """A tensor, or a box of one, to be read.

    Attributes:
        index: The tensor's number in the checkpoint.
        stored: Its dtype there.
        into: A strided tensor of the box's shape, on any device.
        place: The box, in elements of the tensor.
        is_plain: Whether `into` is known to be a block of host memory, row-major, of that dtype.
    """

    index: int
    stored: torch.dtype
    into: torch.Tensor
    place: Box
    is_plain: bool = False

    @classmethod
    def of_all(cls, index: int, stored: torch.dtype, into: torch.Tensor) -> Move:
        """Read all of a tensor."""
        return cls(index, stored, into, whole_box(tuple(into.shape)))

    @property
    def is_straight(self) -> bool:
        """Whether the file's elements are those of the destination, in memory of the host."""
        into = self.into
        return self.is_plain or (
            self.stored == into.dtype
            and into.is_cpu
            and not into.is_conj()
            and not into.is_neg()
            and (into.is_contiguous() or not overlaps_itself(into))
        )

    @property
    def nbytes(self) -> int:
        """Length of the stored bytes."""
        return self.into.numel() * self.stored.itemsize

    @property
    def key(self) -> _Key:
        """What is equal for moves that give the same bits."""
        return self.index, self.place.offset, self.place.shape, self.into.dtype

    def wanted(self) -> Wanted:
        """What is read if the destination is straight."""
        if self.is_plain or self.into.is_contiguous():
            return Wanted(self.index, self.place)
        width = self.stored.itemsize
        return Wanted(self.index, self.place, tuple(step * width for step in self.into.stride()))

    def part(self, box: Box) -> Box:
        """Return where the tensor has a box of the destination."""
        offset = tuple(a + b for a, b in zip(self.place.offset, box.offset, strict=True))
        return Box(offset, box.shape)


class Moves(Sequence[Move]):
    """What is to be read into which tensors: plain ones, all of them whole, and others.

    Attributes:
        plain: Plain ones, as columns.
        others: Any, one by one.
    """

    def __init__(self, others: Sequence[Move] = (), plain: PlainTensors | None = None) -> None:
        self.plain = plain or PlainTensors()
        self.others = list(others)
        self._listed: list[Move] | None = None

    @classmethod
    def of(cls, moves: Sequence[Move]) -> Moves:
        """Return moves as columns, as far as they are."""
        return moves if isinstance(moves, Moves) else cls(moves)

    def __len__(self) -> int:
        return len(self.plain) + len(self.others)

    def __iter__(self) -> Iterator[Move]:
        """Make a move of each plain tensor, the same one each time, then list the others."""
        return iter(self._all())

    def __getitem__(self, number: Any) -> Any:
        return self._all()[number]

    def _all(self) -> list[Move]:
        if self._listed is None or len(self._listed) != len(self):
            plain = self.plain
            rows = zip(plain.indexes, plain.tensors, plain.shapes, strict=True)
            self._listed = [
                *(
                    Move(index, into.dtype, into, whole_box(tuple(shape)), is_plain=True)
                    for index, into, shape in rows
                ),
                *self.others,
            ]
        return self._listed

    @property
    def are_distinct(self) -> bool:
        """Whether no tensor of the checkpoint is read twice."""
        indexes = {*self.plain.indexes, *(move.index for move in self.others)}
        return len(indexes) == len(self)

    def tensors(self) -> list[torch.Tensor]:
        """List what is read into."""
        return [*self.plain.tensors, *(move.into for move in self.others)]


def fill(checkpoint: Origin, moves: Sequence[Move]) -> None:
    """Read the tensors, what is wanted twice once.

    Raises:
        ChecksumError: `checksum_mismatch`; the destinations are then undefined.

    Ranks: local.
    Memory: 32 MiB where destinations are not straight; else one block per thread.
    """
    first = distinct(moves)
    read(checkpoint, first)
    copy_twins(moves, first)
    mark_changed(moves)


def distinct(moves: Sequence[Move]) -> Sequence[Move]:
    """Leave out what has the key of another one; of several, one that is straight stays."""
    if Moves.of(moves).are_distinct:  # mostly
        return moves
    first: dict[_Key, Move] = {}
    for move in moves:
        known = first.setdefault(move.key, move)
        if known is not move and move.is_straight and not known.is_straight:
            first[move.key] = move
    return list(first.values())


def read(checkpoint: Origin, moves: Sequence[Move]) -> None:
    """Read boxes that are all different; see `fill`."""
    straight: list[Move] = []
    staged: list[Move] = []
    plain, others = Moves.of(moves).plain, Moves.of(moves).others
    for move in others:
        (straight if move.is_straight else staged).append(move)
    if plain or straight:
        with paused_gc():
            plan = checkpoint.plan_boxes(plain.wanted([move.wanted() for move in straight]))
            places = plain.memory([_memory(move.into) for move in straight])
        checkpoint.read_boxes(plan, places)
    _fill_staged(checkpoint, staged)


def copy_twins(moves: Sequence[Move], first: Sequence[Move]) -> None:
    """Copy what was read to where the same is wanted."""
    if len(first) == len(moves):
        return
    sources = {move.key: move for move in first}
    for move in moves:
        source = sources[move.key]
        if source is not move:
            put(move.into, source.into)


def mark_changed(moves: Sequence[Move]) -> None:
    """Let autograd know that these tensors have other values."""
    changed = Moves.of(moves).tensors()
    torch.autograd.graph.increment_version(changed)  # those of inference mode have no version


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor of the host, from its first element as far as it reaches."""
    if tensor.is_contiguous() or not tensor.numel():
        return bytes_of(tensor.contiguous())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * step for size, step in steps)
    return bytes_of(as_bits(tensor).as_strided((reach,), (1,)))


def _fill_staged(checkpoint: Origin, moves: Sequence[Move]) -> None:
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


def _fill_group(checkpoint: Origin, moves: Sequence[Move]) -> None:
    """Read small boxes together, then copy each to its place."""
    pinned = any(move.into.is_cuda for move in moves)
    staged = [_host(move.into.shape, move.stored, pinned) for move in moves]
    wanted = [Wanted(move.index, move.place) for move in moves]
    checkpoint.read_boxes(wanted, [bytes_of(buffer) for buffer in staged])
    for move, source in zip(moves, staged, strict=True):
        put(move.into, source)


def _fill_slabs(checkpoint: Origin, move: Move) -> None:
    """Read one large box, some rows at a time."""
    buffer: torch.Tensor | None = None
    for box in row_boxes(move.into.shape, move.nbytes, GROUP_NBYTES):
        if buffer is None or buffer.shape != box.shape:
            buffer = _host(box.shape, move.stored, move.into.is_cuda)
        checkpoint.read_boxes([Wanted(move.index, move.part(box))], [bytes_of(buffer)])
        put(box_view(move.into, box), buffer)


def put(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another of its shape: bit by bit if dtypes are equal, else converted."""
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


def verify_whole(entry: Entry) -> None:
    """Read a tensor once, and compare it with its digests; for tensors that are mapped.

    Memory: 4 MiB.
    """
    itemsize = DTYPES[entry.dtype].itemsize
    scratch = memoryview(bytearray(min(entry.nbytes, 4 * MIB)))
    for box in row_boxes(entry.shape, entry.nbytes, 4 * MIB):
        entry.read(box, into=scratch[: box.numel * itemsize])
