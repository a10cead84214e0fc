"""What a rank that saves with others has: the name, memory and spread of each tensor, asked once.

To ask torch for it takes longer than all else that is planned for a tensor, and each step of a
save wants some of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from dsdformat.plan.sharding import Sharding
from dsdformat.torch.composites import find_kind, refusal
from dsdformat.torch.dtypes import logical_dtype
from dsdformat.torch.introspect import is_array
from dsdformat.torch.sharding import (
    FlatShard,
    is_spread,
    is_tensor,
    local_of,
    sharding_of,
)
from dsdformat.torch.sources import tensor_identity
from dsdformat.torch.stored import NamedLeaf

__all__ = ["RankTensor", "RankTensors", "has_boxes", "identity_of"]


@dataclass(frozen=True, slots=True, eq=False)
class RankTensor:
    """A tensor that boxes are written of.

    Attributes:
        name: Display name; of one that is tied, the first.
        tensor: As the state has it.
        local: What this rank holds of it.
        sharding: How it is spread; None if this rank has it whole.
        identity: What is equal for tied tensors.
    """

    name: str
    tensor: Any
    local: torch.Tensor
    sharding: Sharding | None
    identity: Any

    @classmethod
    def of(cls, name: str, tensor: Any) -> RankTensor:
        """Look at a tensor of which `has_boxes` holds."""
        local = local_of(tensor)
        sharding = sharding_of(tensor) if is_spread(tensor) else None
        return cls(name, tensor, local, sharding, _identity(tensor, local))


@dataclass(slots=True)
class RankTensors:
    """Those of a captured state.

    Attributes:
        once: Each once, in the order of names.
        by_id: The same for each tensor of the state, by its id.
        others: Arrays, and tensors that are not one block.
    """

    once: list[RankTensor] = field(default_factory=list)
    by_id: dict[int, RankTensor] = field(default_factory=dict)
    others: list[NamedLeaf] = field(default_factory=list)
    _alive: Sequence[NamedLeaf] = ()

    @classmethod
    def among(cls, leaves: Sequence[NamedLeaf]) -> RankTensors:
        """Look at the leaves of a state."""
        made = cls(_alive=leaves)
        with torch.no_grad():  # see `local_of`
            made._look(leaves)
        return made

    def _look(self, leaves: Iterable[NamedLeaf]) -> None:
        found: dict[Any, RankTensor] = {}
        tensors: list[RankTensor] = []
        for one in leaves:
            leaf = one.leaf
            if has_boxes(leaf):
                tensors.append(RankTensor.of(one.name, leaf))
            elif is_array(leaf) or is_tensor(leaf):
                self.others.append(one)
        for tensor in sorted(tensors, key=attrgetter("name")):
            self.by_id[id(tensor.tensor)] = found.setdefault(tensor.identity, tensor)
        self.once = list(found.values())


def has_boxes(leaf: Any) -> bool:
    """Whether a leaf is a tensor that boxes are written of: strided, with data."""
    if is_spread(leaf):
        return True
    if not is_tensor(leaf) or leaf.is_meta or refusal(leaf) is not None:
        return False
    return find_kind(leaf) is None and logical_dtype(leaf.dtype) is not None


def identity_of(tensor: Any) -> Any:
    """Return what is equal for tied tensors."""
    return _identity(tensor, local_of(tensor))


def _identity(tensor: Any, local: torch.Tensor) -> Any:
    return id(tensor) if isinstance(tensor, FlatShard) else tensor_identity(local, tensor)
