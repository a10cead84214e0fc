"""Which memory live tensors lie in, so that one is not read over another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsdformat.limits import DEPTH_MAX
from dsdformat.torch.compat import is_lazy
from dsdformat.torch.fqn import named_tensors
from dsdformat.torch.introspect import Kind, find_children, kind_of
from dsdformat.torch.sharding import local_of

__all__ = ["Memory"]

Span = tuple[int, int]


class Memory:
    """The memory of the modules and tensors of a state, and of what is claimed beside it."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._spans: dict[int, list[tuple[Span, int | None]]] = {}  # by storage
        for tensor in _tensors(state, 0):
            grad = None if is_lazy(tensor) or not tensor.is_leaf else tensor.grad
            for one in (tensor, grad):
                if one is not None and _has_memory(one):
                    storage, span = _span(one)
                    self._spans.setdefault(storage, []).append((span, None))

    def assign(self, tensor: torch.Tensor, index: int) -> None:
        """Note which stored tensor one of the state's own tensors gets."""
        if _has_memory(tensor):
            storage, span = _span(tensor)
            spans = self._spans.setdefault(storage, [])
            if (span, None) in spans:
                spans.remove((span, None))
            spans.append((span, index))

    def claim(self, tensor: torch.Tensor, index: int) -> bool:
        """Claim the memory of a tensor for a stored tensor; return whether it may be read into.

        It may not if anything else lies there. The same tensor may be claimed again for the same
        stored one.
        """
        if not _has_memory(tensor) or not tensor.numel():
            return not tensor.numel()
        storage, span = _span(tensor)
        spans = self._spans.setdefault(storage, [])
        for other, owner in spans:
            if other == span and owner == index:
                return True
            if other[0] < span[1] and span[0] < other[1]:
                return False
        spans.append((span, index))
        return True


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    kind = kind_of(value)
    if kind is Kind.TENSOR:
        yield value
    elif kind in (Kind.MODULE, Kind.MODULES):
        for module in [value] if kind is Kind.MODULE else value:
            yield from (tensor for _, tensor in named_tensors(module, persistent=False))
    elif kind is Kind.OTHER and depth < DEPTH_MAX:
        for _, item in find_children(value) or ():
            yield from _tensors(item, depth + 1)


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_nested:
        return False
    local = local_of(tensor)
    return (
        local.layout == torch.strided
        and not local.is_meta
        and type(local) in (torch.Tensor, torch.nn.Parameter)
    )


def _span(tensor: torch.Tensor) -> tuple[int, Span]:
    local = local_of(tensor)
    width = local.element_size()
    first = int(local.storage_offset()) * width
    steps = zip(local.shape, local.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in steps if size) + 1
    return local.untyped_storage().data_ptr(), (first, first + reach * width)
