"""Turn tensors into the form that a state wants: whole or sharded, in place or new, on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsdformat.torch.buffers import as_bits, empty
from dsdformat.torch.comm import Comm, is_distributed
from dsdformat.torch.distribute import fill_shard
from dsdformat.torch.sharding import as_dtensor, is_dtensor, local_of, sharding_of

__all__ = ["copy_into", "group_of", "host_copy", "like_parameter", "materialized"]


def group_of(tensors: Mapping[str, Any] | Any) -> Comm:
    """Return the ranks that hold a state together: those of its DTensors, or all.

    Ranks: collective over them, the first time.
    """
    if not is_distributed():
        return Comm()
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    ranks = {rank for value in values if is_dtensor(value) for rank in sharding_of(value).ranks}
    return Comm.of_ranks(sorted(ranks)) if ranks else Comm()


def copy_into(value: torch.Tensor, live: torch.Tensor) -> None:
    """Copy a tensor of the same global shape into a live one, however both are spread.

    Ranks: local, unless the two are DTensors that are spread differently; then collective.
    """
    if is_dtensor(value):
        if is_dtensor(live) and sharding_of(value) != sharding_of(live):
            value = value.redistribute(live.device_mesh, live.placements)  # type: ignore[attr-defined]
        elif not is_dtensor(live):
            value = value.full_tensor()  # type: ignore[attr-defined]
    if is_dtensor(value):
        local_of(live).copy_(local_of(value))
    else:
        fill_shard(value, live)


def like_parameter(
    value: torch.Tensor, parameter: torch.Tensor | None, device: torch.device | None
) -> torch.Tensor:
    """Return a new tensor of an optimizer's state, spread as its parameter is if it has its shape.

    Args:
        value: Whole, or a DTensor.
        parameter: Or None where the value belongs to none.
        device: Where it is to be; where it is if None.

    Ranks: local, unless a DTensor is spread differently; then collective.
    """
    same = parameter is not None and value.dim() > 0 and value.shape == parameter.shape
    if is_dtensor(parameter) and same:
        assert parameter is not None
        if is_dtensor(value):
            moved = value.redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
            shard = local_of(moved)
            return as_dtensor(
                shard.to(local_of(parameter).device, copy=True), parameter, value.shape
            )
        shard = torch.empty_like(local_of(parameter), dtype=value.dtype)
        target = as_dtensor(shard, parameter, value.shape)
        fill_shard(value, target)
        return target
    if is_dtensor(value):
        value = value.full_tensor()  # type: ignore[attr-defined]
    copied: torch.Tensor = value.detach().to(device or value.device, copy=True)
    return copied


def materialized(live: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor with memory in the form of one on meta."""
    local = local_of(live)
    new = torch.empty_like(local, device=device)
    return as_dtensor(new, live, live.shape) if is_dtensor(live) else new


def host_copy(value: Any) -> Any:
    """Return a value with its tensors copied to host memory; nothing is shared."""
    if is_dtensor(value):
        return as_dtensor(_host(local_of(value)), value, value.shape)
    if isinstance(value, torch.Tensor):
        return _host(value.detach())
    if isinstance(value, dict):
        return {key: host_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(host_copy(item) for item in value)
    return value


def _host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor.clone().cpu()
    copy = empty(tensor.shape, tensor.dtype)
    as_bits(copy).copy_(as_bits(tensor))
    return copy
