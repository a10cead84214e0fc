"""Copies of a state in host memory, for a save that goes on while training does.

As torch's stagers, but nothing is shared with the state, whatever device and type it is of: what
lies in host memory is copied too, and containers keep their types.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from dsdformat.torch.buffers import as_bits, empty, memory_order
from dsdformat.torch.composites import find_kind
from dsdformat.torch.sharding import is_spread
from dsdformat.torch.sources import tensor_identity
from dsdformat.torch.stored import find_items, rebuilt

__all__ = ["staged"]


def staged(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state dict of this rank, with shards where it has shards.

    Tensors that are the same memory are one copy.

    Ranks: local.
    Memory: the copy.
    """
    copied: dict[str, Any] = _Copies().copy(state)
    return copied


class _Copies:
    def __init__(self) -> None:
        self._made: dict[Any, torch.Tensor] = {}

    def copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        items = find_items(value)
        if items is None:
            return copy.deepcopy(value)
        return rebuilt(value, [(key, self.copy(item)) for key, item in items])

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_spread(tensor) or find_kind(tensor) is not None or _is_special(tensor):
            with torch.no_grad():
                return tensor.detach().to("cpu", copy=True)
        key = tensor_identity(tensor, tensor)
        if key not in self._made:
            plain = tensor.detach()
            made = empty(plain.shape, plain.dtype, order=memory_order(plain))
            as_bits(made).copy_(as_bits(plain))
            self._made[key] = made
        return self._made[key]


def _is_special(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no strided memory of its own."""
    return (
        tensor.is_meta
        or tensor.is_quantized
        or type(tensor).__torch_dispatch__ is not (torch.Tensor.__torch_dispatch__)
    )
