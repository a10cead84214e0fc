"""The collectives of torch that a call makes, seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import distributed

COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "recv",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


@contextmanager
def watched(
    note: Callable[[str, tuple[Any, ...]], None], names: Sequence[str] = COLLECTIVES
) -> Iterator[None]:
    """Hand the name and the arguments of each collective that is called to a function."""
    kept = {name: getattr(distributed, name) for name in names}

    def noting(name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            note(name, args)
            return kept[name](*args, **kwargs)

        return function

    for name in names:
        setattr(distributed, name, noting(name))
    try:
        yield
    finally:
        for name in names:
            setattr(distributed, name, kept[name])


@contextmanager
def counted() -> Iterator[list[str]]:
    """Note the names of the collectives that are called."""
    calls: list[str] = []
    with watched(lambda name, _: calls.append(name)):
        yield calls
