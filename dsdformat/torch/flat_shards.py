"""Join what fairscale's FSDP has sharded into the state dict of the plain model: `consolidate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import shorten
from dsdformat.flat_joining import differ, join_shards
from dsdformat.flat_layout import FlatLayout
from dsdformat.torch.buffers import OWN_CLASSES
from dsdformat.torch.flat_layout import pack

__all__ = ["consolidate"]


def consolidate(
    shard_weights: Sequence[Mapping[str, Any]],
    shard_metadata: Sequence[Mapping[str, Any]],
    *,
    strict: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the state dict of a model that fairscale's FSDP has sharded.

    Args:
        shard_weights: What `local_state_dict()` gave on each rank, in the order of the ranks.
        shard_metadata: What `local_metadata_dict()` gave on each. Neither need be trusted.
        strict: Whether parameters that the metadata lists must be in the weights, and tensors in
            the weights must be in the metadata; if not, both are left out. What only some of the
            ranks have is an error in any case.

    Returns:
        Names and tensors: parameters, with tied ones as one tensor, and the buffers of rank 0.
        Buffers that no rank has were not persistent, and are left out. The parameters of an
        instance that is not shared by the ranks, as an expert, are those of rank 0.

    Raises:
        ArgumentError: `bad_argument`: the metadata is not of this form.
        MismatchError: `state_mismatch`: the weights are not what the metadata says, or the ranks
            say different things.

    Ranks: local.
    Memory: the result; tensors of one rank alone are views of its weights.
    """
    return join_shards(shard_weights, shard_metadata, _Tensors(), strict=strict)


class _Tensors:
    """Joins tensors of torch."""

    def flat(self, value: Any, key: str, rank: int) -> torch.Tensor:
        return self.whole(value, key, rank).reshape(-1)

    def numel(self, piece: torch.Tensor) -> int:
        return piece.numel()

    def dtype(self, piece: torch.Tensor) -> str:
        return str(piece.dtype)

    def head(self, piece: torch.Tensor, numel: int) -> torch.Tensor:
        return piece[:numel]

    def cut(self, pieces: Sequence[torch.Tensor], layout: FlatLayout) -> list[torch.Tensor]:
        return layout.cut(pieces[0] if len(pieces) == 1 else pack(pieces))

    def whole(self, value: Any, key: str, rank: int) -> torch.Tensor:
        if not _is_plain(value):
            differ(
                f"{shorten(key)} of rank {rank} is no plain tensor, but a {type(value).__name__}"
            )
        tensor: torch.Tensor = value.detach()
        return tensor

    def memory(self, value: Any) -> Any:
        if not _is_plain(value) or not value.numel():
            return None
        return value.data_ptr(), value.dtype, str(value.device), tuple(value.shape), value.stride()


def _is_plain(value: Any) -> bool:
    plain = type(value) in OWN_CLASSES and value.layout == torch.strided
    return plain and not value.is_quantized
