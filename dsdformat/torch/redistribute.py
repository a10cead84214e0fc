"""Copy tensors into others however both are spread, and make tensors in the form of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsdformat.torch.buffers import OWN_CLASSES, copy_elements, empty
from dsdformat.torch.comm import Comm, group_order
from dsdformat.torch.distribute import fill_shard
from dsdformat.torch.exchange import exchange, places, share
from dsdformat.torch.gather import fingerprint
from dsdformat.torch.routes import Form, Routes
from dsdformat.torch.sharding import (
    FlatShard,
    as_dtensor,
    dtensor_of,
    is_dtensor,
    is_spread,
    local_of,
    process_groups,
    sharding_of,
    sharding_of_placements,
)

__all__ = ["as_dtensors", "copy_all", "has_no_data", "host_copy", "materialized", "must_move"]


def must_move(value: Any, live: Any) -> bool:
    """Whether other ranks are needed to copy a tensor into a live one."""
    if not is_spread(value):
        return False
    return not is_spread(live) or sharding_of(value) != sharding_of(live)


def copy_all(values: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Copy tensors into live ones of the same names and global shapes, however both are spread.

    Args:
        values: Whole tensors, which each rank has, and such of which each rank has a shard.
        live: What is filled. Dtypes are converted as `copy_` does.

    Raises:
        RankDisagreementError: `ranks_disagree`: ranks passed different tensors.

    Ranks: local; collective over the ranks of all meshes if `must_move` holds for a pair.
    Memory: none; two buckets if something moves.
    """
    moving: dict[str, Any] = {}
    for name, target in live.items():
        value = values[name]
        if value is target:
            continue
        if must_move(value, target):
            moving[name] = value
        elif is_spread(value):
            copy_elements(local_of(value), local_of(target))
        else:
            fill_shard(value, target)
    for names in _by_ranks(moving, live):
        _move({name: moving[name] for name in names}, {name: live[name] for name in names})


def _by_ranks(values: Mapping[str, Any], live: Mapping[str, Any]) -> list[list[str]]:
    """Part names by the ranks that take part, in an order that is the same on all of them."""
    parts: dict[tuple[int, ...], list[str]] = {}
    for name, value in values.items():
        pair = (one for one in (value, live[name]) if is_spread(one))
        ranks = {rank for one in pair for rank in sharding_of(one).ranks}
        parts.setdefault(tuple(sorted(ranks)), []).append(name)
    return [parts[ranks] for ranks in sorted(parts, key=group_order)]


def _move(values: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    everything = [*values.values(), *live.values()]
    spread = [one for one in everything if is_spread(one)]
    ranks = {rank for one in spread for rank in sharding_of(one).ranks}
    comm = Comm.of_ranks(ranks, process_groups(spread))
    forms: dict[str, Form] = {
        name: (tuple(value.shape), local_of(value).dtype) for name, value in values.items()
    }
    sources = places(comm, {name: sharding_of(one) for name, one in values.items()})
    comm.check_agreement(fingerprint(forms, sources), "what is set")
    shards = {name: local_of(value) for name, value in values.items()}
    into = {name: local_of(tensor) for name, tensor in live.items()}
    for cut in (True, False):
        names = [name for name, tensor in live.items() if is_spread(tensor) is cut]
        if not names:
            continue
        parts = {name: forms[name] for name in names}, {name: sources[name] for name in names}
        if cut:
            targets = places(comm, {name: sharding_of(live[name]) for name in names})
            exchange(comm, Routes(*parts, targets), shards, into)
        else:
            share(comm, Routes(*parts, None), shards, into)


def as_dtensors(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the values, with DTensors in the place of shards that lie in flat ones.

    Ranks: collective over the ranks of those; local if there are none.
    Memory: the shards, and two buckets.
    """
    made: dict[int, Any] = {}
    flat: dict[str, FlatShard] = {}
    into: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, FlatShard) and id(value) not in made:
            made[id(value)] = into[repr(key)] = _dtensor_like(value)
            flat[repr(key)] = value
    copy_all(flat, into)
    return {key: made.get(id(value), value) for key, value in values.items()}


def _dtensor_like(value: FlatShard) -> torch.Tensor:
    """Make a DTensor without values for what lies in flat shards."""
    sharding = sharding_of_placements(value.shape, value.mesh, value.placements)
    position = sharding.ranks.index(torch.distributed.get_rank())
    shard = empty(sharding.shard_shape(position), value.dtype, value.device)
    return dtensor_of(shard, value.mesh, value.placements, value.shape)


def has_no_data(tensor: Any) -> bool:
    """Whether what this rank has of a tensor is on the meta device."""
    return local_of(tensor).is_meta


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
    if tensor.layout != torch.strided or type(tensor) not in OWN_CLASSES:
        return tensor.clone().cpu()
    copy = empty(tensor.shape, tensor.dtype)
    copy_elements(tensor, copy)
    return copy
