"""What a leaf of a state is, and which strided tensor of this process holds its bytes."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dsdformat.errors import ArgumentError, UnsupportedValueError, shorten
from dsdformat.format.paths import render_path
from dsdformat.limits import DEPTH_MAX

__all__ = [
    "Kind",
    "as_mapping",
    "find_children",
    "holds_leaves",
    "is_array",
    "kind_of",
    "local_tensor",
]


class Kind(enum.Enum):
    """What `save` and `load` do with an object of a state."""

    MODULE = "a module"
    MODULES = "the parts of one model"
    OPTIMIZER = "an optimizer"
    OPTIMIZERS = "the parts of one optimizer"
    STATEFUL = "an object with state_dict and load_state_dict"
    TENSOR = "a tensor"
    ARRAY = "a numpy array"
    OTHER = "a value or a container"


def kind_of(value: Any) -> Kind:
    """Say what an object of a state is."""
    if isinstance(value, torch.Tensor):
        return Kind.TENSOR
    if isinstance(value, nn.Module):
        return Kind.MODULE
    if isinstance(value, torch.optim.Optimizer):
        return Kind.OPTIMIZER
    if type(value) in (list, tuple) and value:
        if all(isinstance(item, nn.Module) for item in value):
            return Kind.MODULES
        if all(isinstance(item, torch.optim.Optimizer) for item in value):
            return Kind.OPTIMIZERS
        return Kind.OTHER
    if is_array(value):
        return Kind.ARRAY
    return Kind.STATEFUL if _is_stateful(value) else Kind.OTHER


def is_array(value: Any) -> bool:
    """Whether a value is a numpy array. Does not load numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_stateful(value: Any) -> bool:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def own_method(owner: Any, name: str) -> Any:
    """Return a method of an object, but not what `patch_…_state_dict` has put in its place."""
    method = getattr(owner, name)
    return getattr(type(owner), name).__get__(owner) if hasattr(method, PATCHED) else method


# Marks functions that are in the place of an object's `state_dict` or `load_state_dict`.
PATCHED = "_dsd_patched"


def find_children(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return keys and children of a container in which leaves may lie; None for anything else."""
    if type(value) in (dict, OrderedDict, defaultdict):
        return iter(list(value.items()))
    return iter(enumerate(value)) if type(value) in (list, tuple) else None


def holds_leaves(value: Any, depth: int = 0, seen: set[int] | None = None) -> bool:
    """Whether a value is, or holds at any depth, more than plain values."""
    if kind_of(value) is not Kind.OTHER:
        return True
    children = find_children(value) if depth < DEPTH_MAX else None
    seen = set() if seen is None else seen
    if children is None or id(value) in seen:
        return False
    seen.add(id(value))
    return any(holds_leaves(item, depth + 1, seen) for _, item in children)


def local_tensor(tensor: torch.Tensor, place: Sequence[Any]) -> torch.Tensor:
    """Return the plain tensor that holds a tensor's bytes, without its history.

    Raises:
        UnsupportedValueError: a DTensor over several ranks.
    """
    package = sys.modules.get("torch.distributed.tensor")
    if package is None or not isinstance(tensor, package.DTensor):
        return tensor.detach()
    if tensor.device_mesh.size() == 1:
        local: torch.Tensor = tensor.detach().to_local()
        return local
    raise UnsupportedValueError(
        f"{render_path(place)}: a DTensor over {tensor.device_mesh.size()} ranks cannot be stored "
        "by one of them",
        path_in_tree=render_path(place),
    )


def as_mapping(state: Any) -> Mapping[str, Any]:
    """Check that a state is a mapping with string keys."""
    if isinstance(state, Mapping) and all(type(key) is str for key in state):
        return state
    hint = None
    if isinstance(state, (nn.Module, torch.optim.Optimizer)):
        hint = 'give it a name, as in {"model": model}'
    raise ArgumentError(
        f"a state is a mapping with string keys, got {shorten(state)}",
        code="bad_argument",
        hint=hint,
    )
