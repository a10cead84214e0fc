"""Canonical names of parameters and buffers: those that the model has when nothing wraps it.

Found by walking modules, never by replacing text: a user's own module that is called `module` or
`_orig_mod` keeps its name. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from dsdformat.torch.compat import find_wrapped

__all__ = ["canonical_name", "named_tensors", "unwrapped"]

EXTRA_STATE = "_extra_state"


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module inside of the wrappers around it."""
    wrapped = find_wrapped(module)
    while wrapped is not None:
        module = wrapped[1]
        wrapped = find_wrapped(module)
    return module


def named_tensors(
    module: nn.Module, *, persistent: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """List parameters and buffers with their canonical names; a tied one once for each name.

    Args:
        module: Any module, wrapped or not.
        persistent: Whether to leave out the buffers that no state dict holds.
    """
    return _walk(module, "", persistent)


def _walk(module: nn.Module, prefix: str, persistent: bool) -> Iterator[tuple[str, torch.Tensor]]:
    module = unwrapped(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and not (persistent and name in module._non_persistent_buffers_set):
            yield prefix + name, buffer
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.", persistent)


def canonical_name(module: nn.Module, key: str) -> str:
    """Return the canonical name of a key of the module's state dict.

    The names of wrappers are left out where the key has them; some wrappers leave them out
    themselves. What hooks of the user's have added to a state dict keeps its name.
    """
    parts = key.split(".")
    result: list[str] = []
    while True:
        wrapped = find_wrapped(module)
        if wrapped is not None:
            name, module = wrapped
            # The wrapper's own name, unless it was left out and a user's module has the same.
            if parts[0] == name and (_leads(module, parts[1:]) or not _leads(module, parts)):
                parts = parts[1:]
            continue
        child = module._modules.get(parts[0]) if len(parts) > 1 else None
        if child is None:
            return ".".join([*result, *parts])
        result.append(parts[0])
        module, parts = child, parts[1:]


def _leads(module: nn.Module, parts: Sequence[str]) -> bool:
    """Whether a key leads to something that the module has."""
    if not parts:
        return False
    wrapped = find_wrapped(module)
    if wrapped is not None:
        name, inner = wrapped
        return _leads(inner, parts) or (parts[0] == name and _leads(inner, parts[1:]))
    if len(parts) == 1:
        return (
            parts[0] in module._parameters
            or parts[0] in module._buffers
            or (parts[0] == EXTRA_STATE)
        )
    child = module._modules.get(parts[0])
    return child is not None and _leads(child, parts[1:])
