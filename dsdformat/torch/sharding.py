"""How a live tensor is spread over ranks: what torch says of a DTensor, in our terms."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsdformat.boxes import Box
from dsdformat.errors import UnsupportedValueError
from dsdformat.plan.mesh import Placement, Replicate, Shard, coordinate_of, local_boxes, local_shape

__all__ = ["Sharding", "as_dtensor", "is_dtensor", "local_of", "sharding_of"]


@dataclass(frozen=True)
class Sharding:
    """Where the boxes of one tensor are.

    Attributes:
        shape: Global shape.
        ranks: Global ranks of the mesh, row-major.
        mesh_shape: Number of ranks along each axis.
        placements: One for each axis.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]

    def boxes(self, position: int) -> list[tuple[Box, Box]]:
        """List what a rank holds: boxes of the tensor, and where they are in its shard.

        Args:
            position: Of the rank in `ranks`.
        """
        coordinate = coordinate_of(position, self.mesh_shape)
        return local_boxes(self.shape, self.mesh_shape, self.placements, coordinate)

    def shard_shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of the shard of a rank."""
        coordinate = coordinate_of(position, self.mesh_shape)
        return local_shape(self.shape, self.mesh_shape, self.placements, coordinate)

    def positions(self, ranks: Sequence[int]) -> list[int]:
        """Return where in the mesh these global ranks are."""
        return [self.ranks.index(rank) for rank in ranks]

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same boxes."""
        sizes = zip(self.mesh_shape, self.placements, strict=True)
        return math.prod(size for size, one in sizes if isinstance(one, Replicate))

    def is_first(self, position: int) -> bool:
        """Whether a rank is the first of those that hold the same boxes."""
        coordinate = coordinate_of(position, self.mesh_shape)
        return all(
            index == 0
            for index, placement in zip(coordinate, self.placements, strict=True)
            if isinstance(placement, Replicate)
        )


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor. Loads nothing of torch."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def sharding_of(tensor: Any) -> Sharding:
    """Return how a DTensor is spread.

    Raises:
        UnsupportedValueError: it has partial values, which must be reduced first.
    """
    mesh = tensor.device_mesh
    return Sharding(
        tuple(tensor.shape),
        tuple(mesh.mesh.flatten().tolist()),
        tuple(mesh.shape),
        tuple(_placement(one) for one in tensor.placements),
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: the tensor itself if it is no DTensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


def as_dtensor(local: torch.Tensor, like: Any, shape: Sequence[int]) -> torch.Tensor:
    """Make a DTensor of this rank's shard, spread as another one is."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    result: torch.Tensor = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride
    )
    return result


def _placement(placement: Any) -> Placement:
    if placement.is_replicate():
        return Replicate()
    if placement.is_partial():
        raise UnsupportedValueError(
            f"a DTensor with {placement} holds sums that are not added up yet",
            hint="redistribute it to Shard or Replicate first",
        )
    return Shard(placement.dim, getattr(placement, "split_factor", 1))
