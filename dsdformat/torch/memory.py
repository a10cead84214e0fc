"""Which memory live tensors lie in, so that one is not read over another."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dsdformat.limits import DEPTH_MAX
from dsdformat.torch.buffers import OWN_CLASSES
from dsdformat.torch.compat import is_lazy
from dsdformat.torch.fqn import named_tensors
from dsdformat.torch.introspect import Kind, find_children, kind_of
from dsdformat.torch.sharding import local_of

__all__ = ["Memory"]

Span = tuple[int, int]


class Memory:
    """The memory of the modules and tensors of a state, and of what is claimed beside it.

    Where anything lies is looked up when something is claimed first: a load of modules alone
    claims nothing, and 12 µs a tensor would be a third of all that it takes.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state: Mapping[str, Any] | None = state  # until it was looked at
        self._assigned: list[tuple[Sequence[Any], Sequence[int]]] = []
        self._owners: dict[tuple[int, Span], int | None] = {}  # what lies where, and from what
        self._taken: dict[int, _Spans] = {}  # by storage

    def assign(self, tensors: Sequence[Any], indexes: Sequence[int]) -> None:
        """Note which stored tensors some of the state's own tensors get; neither may change."""
        self._assigned.append((tensors, indexes))

    def _look(self) -> None:
        """Find out where the state's own tensors lie, and what those get that were assigned."""
        state, self._state = self._state, None
        for tensor in _tensors(state, 0) if state is not None else ():
            grad = None if is_lazy(tensor) or not tensor.is_leaf else tensor.grad
            for one in (tensor, grad):
                if one is not None:
                    self._take(_find_span(one), None)
        for tensors, indexes in self._assigned:
            for tensor, index in zip(tensors, indexes, strict=True):
                self._take(_find_span(tensor), index)
        self._assigned.clear()

    def claim(self, tensor: Any, index: int) -> bool:
        """Claim the memory of a tensor for a stored tensor; return whether it may be read into.

        It may not if anything else lies there. The same tensor may be claimed again for the same
        stored one.
        """
        found = _find_span(tensor)
        if found is None or not local_of(tensor).numel():
            return not local_of(tensor).numel()
        self._look()
        storage, span = found
        if (storage, span) in self._owners:
            return self._owners[storage, span] == index
        if storage in self._taken and self._taken[storage].meets(span):
            return False
        self._take(found, index)
        return True

    def _take(self, found: tuple[int, Span] | None, index: int | None) -> None:
        if found is None:
            return
        storage, span = found
        if (storage, span) not in self._owners:
            if storage not in self._taken:
                self._taken[storage] = _Spans()
            self._taken[storage].add(span)
        self._owners[storage, span] = index


class _Spans:
    """Ranges of bytes, united where they meet."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def meets(self, span: Span) -> bool:
        """Whether any byte of a range is taken."""
        at = bisect.bisect_right(self._ends, span[0])
        return at < len(self._starts) and self._starts[at] < span[1]

    def add(self, span: Span) -> None:
        """Take a range."""
        first = bisect.bisect_left(self._ends, span[0])
        last = bisect.bisect_right(self._starts, span[1])
        start = min([span[0], *self._starts[first:last][:1]])
        end = max([span[1], *self._ends[first:last][-1:]])
        self._starts[first:last], self._ends[first:last] = [start], [end]


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


def _find_span(tensor: Any) -> tuple[int, Span] | None:
    """Return the storage of a tensor, and which bytes of it; None if it has no memory."""
    if isinstance(tensor, torch.Tensor) and (is_lazy(tensor) or tensor.is_nested):
        return None
    local = local_of(tensor)
    if local.layout != torch.strided or local.is_meta or type(local) not in OWN_CLASSES:
        return None
    width = local.element_size()
    first = int(local.storage_offset()) * width
    if local.is_contiguous():
        reach = local.numel() or 1
    else:
        steps = zip(local.shape, local.stride(), strict=True)
        reach = sum((size - 1) * step for size, step in steps if size) + 1
    return local.untyped_storage().data_ptr(), (first, first + reach * width)
