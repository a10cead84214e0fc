"""What a module's own state dict has, under canonical names; and its own way to load one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dsdformat.errors import UnsupportedValueError, listed, shorten
from dsdformat.torch.buffers import OWN_CLASSES
from dsdformat.torch.compat import find_wrapped, is_lazy
from dsdformat.torch.fqn import canonical_name, named_tensors, unwrapped
from dsdformat.torch.introspect import own_method

__all__ = ["call_loader", "versioned_entries"]


def versioned_entries(
    module: nn.Module, tensors: Mapping[str, Any]
) -> tuple[list[tuple[str, str, Any]], Any]:
    """Return the module's state dict as (key, FQN, value) triples, and versions of its modules.

    Parameters and buffers are the live objects, unless the module's own `state_dict` makes others.

    Args:
        module: Wrapped or not.
        tensors: Its tensors, by FQN.

    Raises:
        UnsupportedValueError: a lazy module without a shape; an unusable state dict.
    """
    module = unwrapped(module)
    lazy = []
    if not OWN_CLASSES.issuperset(map(type, tensors.values())):
        lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy:
        raise UnsupportedValueError(
            f"{listed(lazy)} of a lazy module have no shape yet",
            hint="call the module once, so that it makes its parameters",
        )
    with torch.no_grad():
        call = own_method(module, "state_dict")
        if getattr(call, "__func__", None) is nn.Module.state_dict:
            entries = call(keep_vars=True)
        else:  # may take no arguments
            entries = call()
    if not isinstance(entries, Mapping) or not {str}.issuperset(map(type, entries)):
        raise UnsupportedValueError(
            f"state_dict() of {type(module).__name__} is not a mapping with string keys: "
            f"{shorten(entries)}"
        )
    versions = getattr(entries, "_metadata", None)
    if not any(find_wrapped(one) for one in module.modules()):
        return [(key, key, value) for key, value in entries.items()], versions
    known: dict[int, list[str]] = {}
    for name, tensor in named_tensors(module):
        known.setdefault(id(tensor), []).append(name)
    triples = [
        (key, _name_of(module, key, known.get(id(value))), value) for key, value in entries.items()
    ]
    return triples, versions


def _name_of(module: nn.Module, key: str, names: Sequence[str] | None) -> str:
    """Return the FQN of a key of a state dict, whose value may be a tensor with these names."""
    name = canonical_name(module, key)
    # What a hook has renamed keeps the name that the hook gave.
    renamed = names is None or len(names) > 1 or len(key) < len(names[0])
    return name if renamed or names is None or not key.endswith(_last(names[0])) else names[0]


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def call_loader(method: Callable[..., Any], entries: Any) -> None:
    """Call a module's `load_state_dict`, whose names were compared already."""
    parameters = inspect.signature(method).parameters.values()
    kinds = {one.kind for one in parameters}
    strict = (
        any(one.name == "strict" for one in parameters) or inspect.Parameter.VAR_KEYWORD in kinds
    )
    if strict:
        method(entries, strict=False)
    else:
        method(entries)
