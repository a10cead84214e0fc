"""Canonical names of parameters and buffers: those that the model has when nothing wraps it.

Found by walking modules, never by replacing text: a user's own module that is called `module` or
`_orig_mod` keeps its name. Knows nothing of files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

import torch
from torch import nn

from dsdformat.torch.compat import find_wrapped

__all__ = [
    "canonical_name",
    "holds_meta",
    "named_modules",
    "named_tensors",
    "stray_tensors",
    "unwrapped",
]

_OF_MODULES = frozenset({bool, int, type(None), dict, OrderedDict, set})  # what each has
EXTRA_STATE = "_extra_state"
FLAT_PARAM = "_flat_param"  # of FSDP1: part of how it wraps


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module inside of the wrappers around it.

    A wrapper that holds something of its own beside the module stays.
    """
    wrapped = find_wrapped(module)
    while wrapped is not None and not _extras(module, wrapped[0]):
        module = wrapped[1]
        wrapped = find_wrapped(module)
    return module


def _extras(wrapper: nn.Module, child: str) -> list[str]:
    """List what a wrapper holds beside the module that it wraps."""
    parts = (wrapper._parameters, wrapper._buffers, wrapper._modules)
    names = [name for part in parts for name in part.keys()]  # noqa: SIM118 -- of scripted modules
    return [name for name in names if name not in (child, FLAT_PARAM)]


def named_tensors(module: nn.Module, *, persistent: bool = True) -> list[tuple[str, torch.Tensor]]:
    """List parameters and buffers with their canonical names; a tied one once for each name.

    Args:
        module: Any module, wrapped or not.
        persistent: Whether to leave out the buffers that no state dict holds.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for prefix, one in named_modules(module):
        for name, parameter in one._parameters.items():
            if parameter is not None:
                found.append((prefix + name, parameter))
        for name, buffer in one._buffers.items():
            if buffer is not None and not (persistent and name in _hidden(one)):
                found.append((prefix + name, buffer))
    return found


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List modules with the canonical prefix of what is in them; a shared one for each place."""
    found: list[tuple[str, nn.Module]] = []
    _add_modules(found, module, "")
    return found


def _add_modules(found: list[tuple[str, nn.Module]], module: nn.Module, prefix: str) -> None:
    found.append((prefix, module))
    if not module._modules:
        return
    wrapped = find_wrapped(module)
    for name, child in module._modules.items():
        if child is not None:
            dropped = wrapped is not None and name == wrapped[0]
            _add_modules(found, child, prefix if dropped else f"{prefix}{name}.")


def stray_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List tensors that are plain attributes of modules, which no state dict holds."""
    return [
        (prefix + name, value)
        for prefix, one in named_modules(module)
        if not _has_extra_state(one)  # else they may be that
        for name, value in vars(one).items()
        if isinstance(value, torch.Tensor)
    ]


def holds_meta(module: nn.Module) -> bool:
    """Whether a tensor of a module is on meta, whatever it is to it."""
    found: list[torch.Tensor | None] = []
    for _, part in named_modules(module):
        found += part._parameters.values()
        found += part._buffers.values()
        found += [
            one
            for one in vars(part).values()
            if type(one) not in _OF_MODULES and isinstance(one, torch.Tensor)
        ]
    return bool([one for one in found if one is not None and not one.is_cpu and one.is_meta])


def _hidden(module: nn.Module) -> Container[str]:
    """Return the names of buffers that are not persistent."""
    hidden: Container[str] = getattr(module, "_non_persistent_buffers_set", ())
    return hidden


def _child(module: nn.Module, name: str) -> nn.Module | None:
    """Return a child by its name; scripted modules have dicts of another kind."""
    return module._modules[name] if name in module._modules else None  # noqa: SIM401


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
            name, inner = wrapped
            if parts[0] in _extras(module, name) and not _leads(inner, parts):
                return ".".join([*result, *parts])
            module = inner
            # The wrapper's own name, unless it was left out and a user's module has the same.
            if parts[0] == name and (_leads(module, parts[1:]) or not _leads(module, parts)):
                parts = parts[1:]
            continue
        child = _child(module, parts[0]) if len(parts) > 1 else None
        if child is None:
            return ".".join([*result, *parts])
        result.append(parts[0])
        module, parts = child, parts[1:]


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


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
            or (parts[0] == EXTRA_STATE and _has_extra_state(module))
        )
    child = _child(module, parts[0])
    return child is not None and _leads(child, parts[1:])
