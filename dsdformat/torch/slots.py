"""What an optimizer will keep for its parameters, found without a step: a rehearsal on meta.

A program that loads into a state dict needs entries to load into, also of an optimizer that has
not stepped yet. A copy of the optimizer takes one step over parameters on the meta device, where
nothing is computed; the live one is not touched.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch

from dsdformat.torch.sharding import as_dtensor, is_dtensor, local_of

__all__ = ["initial_state"]


def initial_state(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return zeros in the form of what the first step will make, for each trainable parameter.

    Values that are no tensors are those of after one step. Empty for an optimizer that keeps
    nothing, and for one that cannot step on meta tensors.

    Ranks: local.
    Memory: the result.
    """
    rehearsal, twins = _rehearsal(optimizer)
    try:
        with torch.no_grad():
            inspect.unwrap(type(rehearsal).step)(rehearsal)  # without hooks of steps
    except Exception:  # a user's optimizer may need data; then nothing is known of it
        return {}
    result = {}
    for twin, parameter in twins.items():
        state = rehearsal.state.get(twin)
        if state:
            result[parameter] = {key: _zeros(value, parameter) for key, value in state.items()}
    return result


def _rehearsal(
    optimizer: torch.optim.Optimizer,
) -> tuple[torch.optim.Optimizer, dict[torch.Tensor, torch.Tensor]]:
    """Copy an optimizer, with parameters on meta in the place of its own."""
    twins: dict[torch.Tensor, torch.Tensor] = {}
    rehearsal = copy.copy(optimizer)
    rehearsal.state = defaultdict(dict)
    rehearsal.param_groups = []
    for group in optimizer.param_groups:
        parameters = []
        for parameter in group["params"]:
            local = local_of(parameter)
            twin = torch.empty_like(local, device="meta").requires_grad_(parameter.requires_grad)
            if parameter.requires_grad:
                twin.grad = torch.empty_like(twin)
                twins[twin] = parameter
            parameters.append(twin)
        # Fused and capturable kernels exist on devices only; what they keep is the same.
        plain = {"foreach": False, "fused": False, "capturable": False}
        options = {key: plain.get(key, value) for key, value in group.items()}
        lr = options.get("lr")
        options["lr"] = float(lr) if isinstance(lr, torch.Tensor) else lr
        rehearsal.param_groups.append({**options, "params": parameters})
    return rehearsal, twins


def _zeros(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, list):
        return [_zeros(item, parameter) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    local = local_of(parameter)
    if value.shape != local.shape or value.dim() == 0:
        return torch.zeros(value.shape, dtype=value.dtype, device=_device(value, local))
    dtype = value.dtype
    if dtype.is_floating_point:  # averages of gradients are of the gradients' dtype
        dtype = getattr(parameter, "grad_dtype", None) or dtype
    zeros = torch.zeros(value.shape, dtype=dtype, device=local.device)
    return as_dtensor(zeros, parameter, parameter.shape) if is_dtensor(parameter) else zeros


def _device(value: torch.Tensor, local: torch.Tensor) -> torch.device:
    return local.device if value.is_meta else value.device
