"""Copies of a state in host memory, for a save that goes on while training does.

As torch's stagers, but nothing is shared with the state, whatever device and type it is of: what
lies in host memory is copied too, and containers keep their types.
"""

from __future__ import annotations

from typing import Any

import torch

from dsdformat.torch.composites import find_kind
from dsdformat.torch.sharding import is_spread
from dsdformat.torch.snapshot import Copies

__all__ = ["staged"]


def staged(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state dict of this rank, with shards where it has shards.

    Tensors that are the same memory are one copy.

    Ranks: local.
    Memory: the copy.
    """
    copied: dict[str, Any] = _Copies().copy(state)
    return copied


class _Copies(Copies):
    """Copies that keep what is spread, and what is no strided block, as it is."""

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_spread(tensor) or find_kind(tensor) is not None or _is_special(tensor):
            with torch.no_grad():
                return tensor.detach().to("cpu", copy=True)
        return super().tensor(tensor)


def _is_special(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no strided memory of its own."""
    return (
        tensor.is_meta
        or tensor.is_quantized
        or type(tensor).__torch_dispatch__ is not (torch.Tensor.__torch_dispatch__)
    )
