"""FullyShardedDataParallel (FSDP1), through its public functions alone.

What they return is copied before it is given away: on the CPU the gathered tensors of torch 2.13
share one buffer, and its own offloading to the host returns or frees memory that is still in use.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dsdformat.torch.fqn import canonical_name
from dsdformat.torch.introspect import own_method
from dsdformat.torch.slots import initial_state

__all__ = [
    "fsdp_modules",
    "group_names",
    "load_model",
    "model_entries",
    "optimizer_entries",
    "optimizer_to_load",
]


def fsdp_modules(module: nn.Module) -> list[Any]:
    """List the FSDP1 modules in a module. Loads nothing of torch."""
    package = sys.modules.get("torch.distributed.fsdp")
    if package is None:
        return []
    found: list[Any] = package.FullyShardedDataParallel.fsdp_modules(module)
    return found


def model_entries(model: nn.Module, *, full: bool, first_only: bool) -> dict[str, Any]:
    """Return the model's state dict under canonical names.

    Args:
        model: Has FSDP1 modules in it.
        full: Whether tensors are whole, else the shards that FSDP1 gives.
        first_only: Whether, of whole tensors, only rank 0 of the process group gets any.

    Ranks: collective over the process group of the FSDP1 modules.
    Memory: on each rank, the largest FSDP1 module whole.
    """
    with _state_dict_type(model, full=full, first_only=first_only):
        entries = own_method(model, "state_dict")()
    return {
        canonical_name(model, key): _owned(value) if full else value
        for key, value in entries.items()
    }


def load_model(model: nn.Module, entries: Mapping[str, Any], *, full: bool, strict: bool) -> Any:
    """Load what `model_entries` gives.

    Ranks: collective over the process group of the FSDP1 modules.
    """
    with _state_dict_type(model, full=full, first_only=False):
        keys = {canonical_name(model, key): key for key in _raw_keys(model)}
        raw = {keys.get(name, name): value for name, value in entries.items()}
        return own_method(model, "load_state_dict")(raw, strict=strict)


def optimizer_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool, first_only: bool
) -> dict[str, Any]:
    """Return an optimizer's state dict under canonical names; empty on ranks that get none.

    Ranks: collective over the process group of the FSDP1 modules.
    """
    kind = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
    raw = own_method(optimizer, "state_dict")()
    if not raw["state"]:
        raw["state"] = _numbered(optimizer, initial_state(optimizer))
    with _state_dict_type(model, full=full, first_only=first_only):
        entries = kind.optim_state_dict(model, optimizer, raw, group=_group(model))
    if not entries:
        return {}
    states = {
        canonical_name(model, name): _owned(state) if full else dict(state)
        for name, state in entries["state"].items()
    }
    groups = [
        {**group, "params": [canonical_name(model, name) for name in group["params"]]}
        for group in entries["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the canonical names in each group, also of what one flat parameter holds.

    Ranks: collective over the process group of the FSDP1 modules.
    """
    kind = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
    raw = {**own_method(optimizer, "state_dict")(), "state": {}}
    with _state_dict_type(model, full=False, first_only=False):
        entries = kind.optim_state_dict(model, optimizer, raw, group=_group(model))
    return [
        [canonical_name(model, name) for name in group["params"]]
        for group in entries["param_groups"]
    ]


def optimizer_to_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    entries: Mapping[str, Any],
    *,
    full: bool,
    first_only: bool,
) -> dict[str, Any]:
    """Turn entries under canonical names into a state dict of this rank's flat shards.

    Args:
        model: Has FSDP1 modules in it.
        optimizer: Works on the model.
        entries: Nested, by names.
        full: Whether tensors are whole.
        first_only: Whether only rank 0 has any; others get their parts of it.

    Ranks: collective over the process group of the FSDP1 modules.
    """
    kind = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
    wrapped = {canonical_name(model, name): _clean(name) for name, _ in model.named_parameters()}
    states = {wrapped.get(name, name): state for name, state in entries["state"].items()}
    groups = [
        {**group, "params": [wrapped.get(name, name) for name in group["params"]]}
        for group in entries["param_groups"]
    ]
    named = {"state": states, "param_groups": groups} if groups else {}
    with _state_dict_type(model, full=full, first_only=first_only):
        result: dict[str, Any] = kind.optim_state_dict_to_load(
            model, optimizer, named, group=_group(model)
        )
    return result


def _numbered(
    optimizer: torch.optim.Optimizer, states: Mapping[torch.Tensor, Any]
) -> dict[int, Any]:
    """Return entries under the numbers that parameters have in a state dict of torch."""
    parameters = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
    return {number: states[one] for number, one in enumerate(parameters) if one in states}


@contextmanager
def _state_dict_type(model: nn.Module, *, full: bool, first_only: bool) -> Iterator[None]:
    package: Any = sys.modules["torch.distributed.fsdp"]
    if full:
        settings = (
            package.StateDictType.FULL_STATE_DICT,
            package.FullStateDictConfig(offload_to_cpu=False, rank0_only=first_only),
            package.FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=first_only),
        )
    else:
        settings = (
            package.StateDictType.SHARDED_STATE_DICT,
            package.ShardedStateDictConfig(offload_to_cpu=False),
            package.ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
    with warnings.catch_warnings():
        # It announces its end, and has no other public function for this.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        with package.FullyShardedDataParallel.state_dict_type(model, *settings):
            yield


def _group(model: nn.Module) -> Any:
    """Return the process group that the optimizer's state is spread over; None for hybrids."""
    package: Any = sys.modules["torch.distributed.fsdp"]
    first = fsdp_modules(model)[0]
    hybrid = (
        package.ShardingStrategy.HYBRID_SHARD,
        package.ShardingStrategy._HYBRID_SHARD_ZERO2,
    )
    group = None if first.sharding_strategy in hybrid else first.process_group
    return None if isinstance(group, tuple) else group


def _raw_keys(model: nn.Module) -> Sequence[str]:
    """List the keys that the model's state dict has, without making one."""
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, _ in model.named_buffers()]
    return [_clean(name) for name in names]


def _clean(name: str) -> str:
    """Leave out the names that FSDP1 and activation checkpointing leave out of state dicts."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def _owned(value: Any) -> Any:
    """Copy gathered tensors out of buffers that they share."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _owned(item) for key, item in value.items()}
    return value
