"""Plain tensors that are read whole, as columns: many small ones, without objects for each.

A plain tensor is a packed block of host memory, of the stored shape and dtype. Whoever finds some
that are asks whole columns, and where anything differs goes the way of other tensors, one by one,
which says what it is: nothing here tells of a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from dsdformat.destinations import Destinations
from dsdformat.plan.load_plan import Wanted, WantedBoxes
from dsdformat.torch.buffers import bytes_of, bytes_of_all
from dsdformat.torch.stored import Stored

__all__ = ["PlainTensors", "Run"]

_HOST = torch.device("cpu")


class Run(NamedTuple):
    """Some stored tensors, and the plain ones that they are read into, as columns.

    Attributes:
        stored: What the checkpoint has.
        indexes: Their numbers, each once.
        tensors: What is read into.
        addresses: Where those begin, each once.
        shapes, dtypes: Of both.
        name: Gives the display name of one of them, by its number here.
    """

    stored: Sequence[Stored]
    indexes: Sequence[int]
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[torch.dtype]
    name: Callable[[int], str]

    def memories(self) -> Iterator[tuple[Any, ...]]:
        """Say of each what tensors share that are the same memory, as `placing` does."""
        for address, shape, dtype in zip(self.addresses, self.shapes, self.dtypes, strict=True):
            yield address, _HOST, tuple(shape), None, dtype


class PlainTensors:
    """The plain tensors of one load.

    Attributes:
        indexes: Numbers of the stored tensors, each once.
        tensors: What they are read into, none of which begins where another does.
        shapes: Of both.
    """

    def __init__(self) -> None:
        self.indexes: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.shapes: list[tuple[int, ...]] = []
        self._known: list[set[int]] = [set(), set()]

    def __len__(self) -> int:
        return len(self.tensors)

    def add(self, run: Run) -> bool:
        """Add some, if none is stored or lies where another one does."""
        news = set(run.indexes), set(run.addresses)
        for known, new in zip(self._known, news, strict=True):
            if len(new) < len(run.tensors) or not known.isdisjoint(new):
                return False
        for known, new in zip(self._known, news, strict=True):
            known.update(new)
        self.indexes += run.indexes
        self.tensors += run.tensors
        self.shapes += run.shapes
        return True

    def wanted(self, others: Sequence[Wanted]) -> WantedBoxes:
        """Return what is read of them, and other boxes behind."""
        return WantedBoxes(self.indexes, self.shapes, others)

    def memory(self, others: Sequence[memoryview]) -> Destinations:
        """Return their memory, and what belongs to other boxes behind."""
        return _Memory(self.tensors, others)


class _Memory(Destinations):
    """The memory of plain tensors, made as buffers when it is read into, and other buffers."""

    def __init__(self, tensors: Sequence[torch.Tensor], others: Sequence[memoryview]) -> None:
        super().__init__(others)
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors) + len(self._views)

    def __getitem__(self, number: int) -> memoryview:
        count = len(self._tensors)
        return bytes_of(self._tensors[number]) if number < count else self._views[number - count]

    def some(self, numbers: Iterable[int]) -> list[memoryview]:
        """Return the memory of several; in a third of the time if all are plain tensors."""
        numbers = list(numbers)
        if max(numbers, default=0) >= len(self._tensors):
            return super().some(numbers)
        return bytes_of_all(list(map(self._tensors.__getitem__, numbers)))
