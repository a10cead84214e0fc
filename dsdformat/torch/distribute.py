"""Cut whole tensors, which each rank has, to the shards of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsdformat.errors import MismatchError
from dsdformat.torch.buffers import box_view, copy_elements
from dsdformat.torch.comm import global_rank
from dsdformat.torch.sharding import held_view, is_spread, local_of, sharding_of

__all__ = ["distribute"]


def distribute(whole: Mapping[str, torch.Tensor], into: Mapping[str, Any]) -> None:
    """Copy whole tensors into DTensors and other tensors of the same names.

    Args:
        whole: On each rank the same; tensors of any dtype, which is converted as `copy_` does.
        into: What is filled; each name is in `whole`, with the same global shape.

    Raises:
        MismatchError: `state_mismatch`: shapes differ; nothing was changed.

    Ranks: local.
    Memory: none.
    """
    for name, target in into.items():
        if tuple(whole[name].shape) != tuple(target.shape):
            raise MismatchError(
                f"{name}: shape {list(whole[name].shape)} given, {list(target.shape)} wanted",
                code="state_mismatch",
            )
    for name, target in into.items():
        fill_shard(whole[name], target)


def fill_shard(whole: torch.Tensor, target: Any) -> None:
    """Copy what this rank holds of a whole tensor into a tensor or DTensor."""
    if not is_spread(target):
        copy_elements(whole.detach(), target.detach())
        return
    sharding, shard = sharding_of(target), local_of(target)
    rank = global_rank()
    if rank in sharding.ranks:
        for held in sharding.held(sharding.ranks.index(rank)):
            view = held_view(held, held.outer, shard)
            copy_elements(box_view(whole.detach(), held.outer), view)
