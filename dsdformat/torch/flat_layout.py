"""Copy tensors into a flat one; which parameters lie where is a `FlatLayout`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsdformat.flat_layout import FlatLayout
from dsdformat.torch.buffers import as_bits, empty

__all__ = ["FlatLayout", "pack"]


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors of one dtype and device, bit for bit, into a new flat one."""
    dtype, device = tensors[0].dtype, tensors[0].device
    flat = empty((sum(tensor.numel() for tensor in tensors),), dtype, device)
    parts = torch.split(as_bits(flat), [tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        part.view(tensor.shape).copy_(as_bits(tensor.detach()))
    return flat
