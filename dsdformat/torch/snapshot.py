"""A copy of a state in host memory, as `load` would give it: nothing in it is shared with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from dsdformat.torch.buffers import as_bits, empty, memory_order
from dsdformat.torch.builder import array_over
from dsdformat.torch.capture import capture
from dsdformat.torch.composites import find_kind
from dsdformat.torch.dtypes import torch_dtype
from dsdformat.torch.introspect import is_array, local_tensor
from dsdformat.torch.sources import array_identity, numpy_side, tensor_identity
from dsdformat.torch.stored import find_items, rebuilt

__all__ = ["Copies", "snapshot"]


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
    return Copies().copy(capture(state))  # type: ignore[no-any-return]


class Copies:
    """Copies what it is given; what is the same memory becomes one copy."""

    def __init__(self) -> None:
        self._made: dict[Any, torch.Tensor] = {}
        self._alive: list[Any] = []  # so that nothing else gets the memory of a source

    def copy(self, value: Any) -> Any:
        """Copy a value, or a container and all that is in it."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if is_array(value):
            return self._array(value)
        items = find_items(value)
        if items is None:
            return copy.deepcopy(value)
        return rebuilt(value, [(key, self.copy(item)) for key, item in items])

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor as this rank has it."""
        self._alive.append(tensor)
        if find_kind(tensor) is not None:
            key: Any = id(tensor)
            if key not in self._made:
                self._made[key] = tensor.detach().clone().cpu()
            return self._made[key]
        local = local_tensor(tensor, ())
        key = tensor_identity(local, tensor)
        if key not in self._made:
            made = empty(local.shape, local.dtype, order=memory_order(local))
            as_bits(made).copy_(as_bits(local))
            self._made[key] = made
        return self._made[key]

    def _array(self, array: Any) -> Any:
        self._alive.append(array)
        name = numpy_side().name_of(array.dtype)
        dtype = torch_dtype(name) if name is not None else None
        if name is None or dtype is None:  # nothing but other arrays can be tied to it
            return array.copy(order="K")
        key = array_identity(array, name)
        if key not in self._made:
            made = empty(array.shape, dtype)
            array_over(made, name)[...] = array
            self._made[key] = made
        return array_over(self._made[key], name)
