"""Where wanted boxes go: writable buffers, as bytes, by the numbers of the boxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dsdformat.errors import ArgumentError
from dsdformat.plan.load_columns import LoadPlan

__all__ = ["Destinations", "destinations_of", "writable_bytes"]


class Destinations:
    """The destinations of the boxes of one plan, each as long as the plan wants it.

    A subclass may make each of them when it is asked for: many thousand buffers that are made
    beforehand are no longer in the cache when they are read into. From any thread.
    """

    def __init__(self, views: Sequence[memoryview] = ()) -> None:
        self._views = views

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, number: int) -> memoryview:
        return self._views[number]

    def some(self, numbers: Iterable[int]) -> list[memoryview]:
        """Return several; of a subclass, this may be quicker."""
        return [self[number] for number in numbers]


def destinations_of(into: Sequence[Any] | Destinations, plan: LoadPlan) -> Destinations:
    """Return buffers as the destinations of a plan.

    Raises:
        ArgumentError: `bad_argument` for buffers that do not fit.
    """
    if len(into) != len(plan.room):
        message = f"{len(into)} buffers for {len(plan.room)} boxes"
        raise ArgumentError(message, code="bad_argument")
    if isinstance(into, Destinations):
        return into
    return Destinations(
        [
            writable_bytes(buffer, plan.room[number], longer=number in plan.strided)
            for number, buffer in enumerate(into)
        ]
    )


def writable_bytes(into: Any, nbytes: int, *, longer: bool = False) -> memoryview:
    """Return a buffer as bytes: of that length, or of any greater one if it may be longer."""
    if into is None:
        return memoryview(bytearray(nbytes))
    try:
        view = into if type(into) is memoryview else memoryview(into)
    except TypeError:
        raise ArgumentError(
            f"into is not a buffer but a {type(into).__name__}", code="bad_argument"
        ) from None
    if view.readonly or not view.c_contiguous:
        raise ArgumentError("into is not writable and contiguous", code="bad_argument")
    if view.nbytes != nbytes and not (longer and view.nbytes > nbytes):
        raise ArgumentError(
            f"into has {view.nbytes} bytes, the box has {nbytes}", code="bad_argument"
        )
    if not nbytes:
        return memoryview(bytearray())
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
