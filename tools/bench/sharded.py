"""A model that ranks hold together: a transformer under FSDP2, and an AdamW that has taken a step.

Filled from the pattern of `states.py`, so that each rank can check its shards by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

from bench.states import State, pieces, take_step

__all__ = ["ShardedState", "build_sharded"]

WIDTH, WORDS, BLOCKS = 1024, 24_000, 18
MULTIPLE = 16  # so that columns can be cut evenly


class Block(nn.Module):
    """What a block of a transformer has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Model(nn.Module):
    """What a transformer has."""

    def __init__(self, words: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)


@dataclass(frozen=True, slots=True)
class ShardedState(State):
    """What ranks save together, or load into."""

    def shards(self) -> list[Tensor]:
        """List what this rank has of each tensor; step counters are whole."""
        return [local_of(tensor) for tensor in self.tensors()]

    def nbytes(self) -> int:
        """Count the bytes of all whole tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def fill(self) -> None:
        """Give each shard its part of the pattern; step counters stay."""
        for index, tensor in self._spread():
            local_of(tensor).copy_(wanted(index, tensor))

    def blank(self) -> None:
        """Touch each shard, and take away what it held."""
        for _, tensor in self._spread():
            local_of(tensor).fill_(1)

    def check(self) -> None:
        """Raise if a shard does not hold its part of the pattern."""
        for index, tensor in self._spread():
            if not torch.equal(local_of(tensor), wanted(index, tensor)):
                raise ValueError(f"tensor {index} of the state is not what was saved")

    def check_whole(self, tensors: list[Tensor]) -> None:
        """Raise if whole tensors, in the order of `tensors`, are not those of the pattern."""
        for index, tensor in enumerate(tensors):
            flat = tensor.reshape(-1)
            if tensor.ndim and not all(
                torch.equal(piece, part) for piece, part in pieces(flat, index)
            ):
                raise ValueError(f"tensor {index} of the file is not what was saved")

    def _spread(self) -> Iterator[tuple[int, DTensor]]:
        for index, tensor in enumerate(self.tensors()):
            if isinstance(tensor, DTensor):
                yield index, tensor


def build_sharded(size: float, *, columns: bool = False) -> ShardedState:
    """Build it, 3.0 GB at full size, on all ranks of the default group.

    Args:
        size: Scale of its bytes.
        columns: Whether matrices are cut along their columns, and not their rows.
    """
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    width = MULTIPLE * max(1, round(WIDTH * size**0.4 / MULTIPLE))
    words, blocks = round(WORDS * size**0.6), max(1, round(BLOCKS * size**0.2))
    with torch.device("meta"):
        module = Model(words, width, blocks)
    place: Any = place_columns if columns else None
    for part in [*module.blocks, module]:
        fully_shard(part, mesh=mesh, shard_placement_fn=place)
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        local_of(parameter.detach()).zero_()
    state = ShardedState(module, AdamW(module.parameters(), lr=1e-3))
    take_step(state)
    state.fill()
    return state


def place_columns(parameter: nn.Parameter) -> Shard:
    """Cut matrices along their columns."""
    return Shard(min(1, parameter.ndim - 1))


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wanted(index: int, tensor: DTensor) -> Tensor:
    """Return what the pattern says that this rank's shard holds."""
    (placement,) = tensor.placements
    assert isinstance(placement, Shard)
    begin, stop = share(tensor.shape[placement.dim])
    first, last = (begin, stop) if placement.dim == 0 else (0, tensor.shape[0])
    row = tensor.shape[1:].numel()
    rows = torch.empty((last - first) * row)
    at = 0
    for _, part in pieces(rows, index, first * row):
        rows[at : at + part.numel()] = part
        at += part.numel()
    whole = rows.view(last - first, *tensor.shape[1:])
    return whole if placement.dim == 0 else whole[:, begin:stop]


def share(length: int) -> tuple[int, int]:
    """Return where this rank's part of a dim begins and ends."""
    step = -(-length // distributed.get_world_size())
    begin = min(length, distributed.get_rank() * step)
    return begin, min(length, begin + step)
