"""Digests of a few elements of each tensor: cheap, and mostly enough to tell tensors apart.

What ranks have made or trained for themselves differs nearly everywhere. Elements are taken at
equal distances, the first and the last among them, and small tensors whole. What differs in some
elements only may be missed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from dsdformat.format.digests import digest
from dsdformat.torch.buffers import as_bits, bytes_of

__all__ = ["ELEMENTS", "sample_digest_of_array", "sample_digests"]

ELEMENTS = 256


def sample_digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return a digest for each strided tensor that has data; equal for equal tensors.

    Ranks: local.
    Memory: 256 elements of each. Of those on a device one copy is made for each dtype.
    """
    parts: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        some = _some_elements(tensor.detach())
        parts.setdefault((some.device, some.dtype), []).append((number, some))
    result = [b""] * len(tensors)
    for those in parts.values():
        together = torch.cat([some for _, some in those]).cpu()
        pieces = torch.split(together, [some.numel() for _, some in those])
        for (number, _), piece in zip(those, pieces, strict=True):
            result[number] = digest(bytes_of(piece))
    return result


def sample_digest_of_array(array: Any) -> bytes:
    """Return such a digest of a numpy array without objects in it."""
    return digest(array.flat[_places(array.size, torch.device("cpu")).numpy()].tobytes())


def _some_elements(tensor: torch.Tensor) -> torch.Tensor:
    places = _places(tensor.numel(), tensor.device)
    bits = as_bits(tensor)
    if bits.is_contiguous():
        return bits.view(-1)[places]
    return bits[torch.unravel_index(places, bits.shape)]


@functools.lru_cache(maxsize=256)
def _places(numel: int, device: torch.device) -> torch.Tensor:
    count = min(numel, ELEMENTS)
    places = torch.arange(count) * max(numel - 1, 0) // max(count - 1, 1)
    return places.to(device)
