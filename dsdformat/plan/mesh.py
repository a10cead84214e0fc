"""Which boxes of a tensor a rank holds, from its place in a mesh and the placements.

Pure. The rules are those of torch's DTensor: `Shard` cuts as `torch.chunk` does, so that the last
ranks may hold less or nothing; `_StridedShard` cuts into `split_factor` parts first and takes its
piece of each; placements apply in the order of the mesh's axes, each to what the one before left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsdformat.boxes import Box
from dsdformat.errors import ArgumentError

__all__ = ["Placement", "Replicate", "Shard", "coordinate_of", "local_boxes", "local_shape"]

# Ranges of indices of one dim, as (start, length), in the order in which a shard holds them.
Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank of the axis holds the same."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranks of the axis hold pieces along a dim.

    Attributes:
        dim: Of the tensor.
        split_factor: The number of parts that are each cut over the axis; 1 for a plain shard.
    """

    dim: int
    split_factor: int = 1

    def __str__(self) -> str:
        if self.split_factor == 1:
            return f"shard({self.dim})"
        return f"strided_shard({self.dim},{self.split_factor})"


Placement = Replicate | Shard


def coordinate_of(position: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinate of a position in the row-major order of a mesh."""
    coordinate = []
    for size in reversed(mesh_shape):
        position, index = divmod(position, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


def local_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> list[tuple[Box, Box]]:
    """List what a rank holds of a tensor.

    Args:
        shape: Global shape.
        mesh_shape: Number of ranks along each axis.
        placements: One for each axis.
        coordinate: Of the rank.

    Returns:
        Pairs of a box of the tensor and the box of the shard that holds it. One pair, unless
        strided shards leave several ranges; none where the shard is empty.

    Raises:
        ArgumentError: `bad_argument`: these do not fit together.
    """
    runs = _runs(shape, mesh_shape, placements, coordinate)
    placed = [list(_placed(dim_runs)) for dim_runs in runs]
    pairs = []
    for choice in itertools.product(*placed):
        lengths = tuple(length for _, _, length in choice)
        if 0 in lengths:
            continue
        outer = Box(tuple(start for start, _, _ in choice), lengths)
        pairs.append((outer, Box(tuple(at for _, at, _ in choice), lengths)))
    return pairs


def local_shape(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> tuple[int, ...]:
    """Return the shape of what a rank holds of a tensor."""
    runs = _runs(shape, mesh_shape, placements, coordinate)
    return tuple(sum(length for _, length in dim_runs) for dim_runs in runs)


def _runs(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> list[Runs]:
    if not len(mesh_shape) == len(placements) == len(coordinate):
        raise ArgumentError(
            f"{len(placements)} placements and {len(coordinate)} coordinates for a mesh of "
            f"{len(mesh_shape)} axes",
            code="bad_argument",
        )
    runs: list[Runs] = [[(0, size)] for size in shape]
    for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not 0 <= index < count:
            raise ArgumentError(f"coordinate {index} of {count}", code="bad_argument")
        if isinstance(placement, Replicate):
            continue
        if not 0 <= placement.dim < len(shape) or placement.split_factor < 1:
            raise ArgumentError(
                f"{placement} of a tensor with {len(shape)} dims", code="bad_argument"
            )
        runs[placement.dim] = _cut(runs[placement.dim], count, index, placement.split_factor)
    return runs


def _cut(runs: Runs, count: int, index: int, split_factor: int) -> Runs:
    """Return the piece of one rank."""
    size = sum(length for _, length in runs)
    result: Runs = []
    for part in range(split_factor):
        low, high = _chunk(0, size, split_factor, part)
        result.extend(_slice(runs, *_chunk(low, high, count, index)))
    return _joined(result)


def _chunk(low: int, high: int, count: int, index: int) -> tuple[int, int]:
    """Return one of `count` pieces of a range, cut as `torch.chunk` cuts."""
    step = -(-(high - low) // count)
    return min(high, low + index * step), min(high, low + (index + 1) * step)


def _slice(runs: Runs, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Cut positions of a shard out of its ranges."""
    at = 0
    for start, length in runs:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            yield start + first - at, last - first
        at += length


def _joined(runs: Runs) -> Runs:
    result: Runs = []
    for start, length in runs:
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return result or [(0, 0)]


def _placed(runs: Runs) -> Iterator[tuple[int, int, int]]:
    """Add to each range where the shard holds it."""
    at = 0
    for start, length in runs:
        yield start, at, length
        at += length
