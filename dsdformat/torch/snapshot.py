"""A copy of a state in host memory, as `load` would give it: nothing in it is shared with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsdformat.torch.buffers import as_bits, empty, memory_order
from dsdformat.torch.capture import capture
from dsdformat.torch.composites import find_kind
from dsdformat.torch.introspect import is_array, local_tensor
from dsdformat.torch.stored import find_items, rebuilt

__all__ = ["snapshot"]


def snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state to host memory, as plain nested values.

    Saving the copy gives the same checkpoint, digest for digest, as saving the state now.

    Args:
        state: As `save` takes it.

    Returns:
        Nested values with new tensors and arrays; tied tensors are one tensor.

    Raises:
        UnsupportedValueError: as `save`, for optimizers without modules and tensors without data.

    Ranks: local.
    Memory: the copy.
    """
    copies: dict[Any, Any] = {}
    return _copied(capture(state), copies)  # type: ignore[no-any-return]


def _copied(value: Any, copies: dict[Any, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return _copied_tensor(value, copies)
    if is_array(value):
        key = id(value)
        if key not in copies:
            copies[key] = value.copy(order="K"), value
        return copies[key][0]
    items = find_items(value)
    return value if items is None else rebuilt(value, [(k, _copied(v, copies)) for k, v in items])


def _copied_tensor(tensor: torch.Tensor, copies: dict[Any, Any]) -> torch.Tensor:
    kind = find_kind(tensor)
    if kind is not None:
        key: Any = id(tensor)
        if key not in copies:
            copies[key] = tensor.detach().clone().cpu(), tensor
        return copies[key][0]  # type: ignore[no-any-return]
    local = local_tensor(tensor, ())
    address = local.data_ptr() if local.numel() else id(tensor)
    key = address, local.device, local.shape, local.stride(), local.dtype, local.is_conj()
    key = (*key, local.is_neg())
    if key not in copies:
        copy = empty(local.shape, local.dtype, order=memory_order(local))
        as_bits(copy).copy_(as_bits(local))
        copies[key] = copy, tensor
    return copies[key][0]  # type: ignore[no-any-return]
