"""What a call does, seen from outside: the collectives of torch, and reads of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import distributed

import dsdformat
from dsdformat.storage.local import LocalStorage

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
    "reduce_scatter_tensor",
    "scatter",
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


Read = tuple[str, int, int]


@contextmanager
def reads() -> Iterator[list[Read]]:
    """Note label, byte offset and length of what is read from folders, by this process."""
    noted: list[Read] = []
    kept, kept_many = LocalStorage.read_into, LocalStorage.read_into_many

    def read_into(self: LocalStorage, label: str, byte_offset: int, into: memoryview) -> int:
        noted.append((label, byte_offset, len(into)))
        return kept(self, label, byte_offset, into)

    def read_into_many(
        self: LocalStorage, label: str, byte_offset: int, into: Sequence[memoryview]
    ) -> int:
        noted.append((label, byte_offset, sum(map(len, into))))
        return kept_many(self, label, byte_offset, into)

    LocalStorage.read_into = read_into  # type: ignore[method-assign]
    LocalStorage.read_into_many = read_into_many  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        LocalStorage.read_into = kept  # type: ignore[method-assign]
        LocalStorage.read_into_many = kept_many  # type: ignore[method-assign]


def data_reads(noted: list[Read], path: str) -> list[Read]:
    """What of these reads is data of tensors: no manifest, and no headers of data files."""
    with dsdformat.open(path) as checkpoint:
        headers = {one.label: one.header_nbytes for one in checkpoint.table.body.files}
    return [one for one in noted if one[0] in headers and one[1] >= headers[one[0]]]
