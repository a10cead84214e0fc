"""The plain system calls: `writev` all tensors to one file, `preadv` them back, on one thread.

Nothing is written beside the tensors, so nothing can tell what is in the file: a limit, not a
format. What Python takes to get at the bytes of a tensor is part of the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bench.formats.format import Format

if TYPE_CHECKING:
    from torch import Tensor

    from bench.states import State

__all__ = ["PLAIN"]

BATCH = 1024  # IOV_MAX of Linux


def save(path: Path, state: State) -> None:
    """Write all tensors, one after another."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        move(lambda views, _: os.writev(fd, views), bytes_of(state.tensors()))
    finally:
        os.close(fd)


def load(path: Path, state: State) -> None:
    """Read all tensors in place; make those of a fresh optimizer first."""
    make_moments(state)
    read(path, bytes_of(state.tensors()), 0)


def read_one(path: Path, state: State, index: int) -> None:
    """Read one parameter in place."""
    tensors = [one.detach() for one in state.module.parameters()]
    read(path, bytes_of([tensors[index]]), sum(one.nbytes for one in tensors[:index]))


def make_moments(state: State) -> None:
    """Give an AdamW that has not taken a step what it would keep after one."""
    import torch

    if state.optimizer is None:
        return
    for parameter in state.module.parameters():
        if not state.optimizer.state.get(parameter):
            state.optimizer.state[parameter] = {
                "step": torch.ones(()),
                "exp_avg": torch.empty_like(parameter),
                "exp_avg_sq": torch.empty_like(parameter),
            }


def bytes_of(tensors: Sequence[Tensor]) -> list[memoryview]:
    """View contiguous tensors as their bytes."""
    import torch

    views = (tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors)
    return [memoryview(cast("bytearray", view)) for view in views]


def read(path: Path, views: list[memoryview], byte_offset: int) -> None:
    """Fill buffers from a file, beginning at a place in it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        move(lambda batch, done: os.preadv(fd, batch, byte_offset + done), views)
    finally:
        os.close(fd)


def move(step: Callable[[list[memoryview], int], int], views: list[memoryview]) -> None:
    """Pass all buffers to a system call, as many at once as it takes, and again what is left."""
    done = first = 0
    while first < len(views):
        batch = views[first : first + BATCH]
        count = step(batch, done)
        if count == 0:
            raise EOFError(f"the file ends {sum(map(len, views[first:]))} bytes early")
        done += count
        for view in batch:
            if count < len(view):
                views[first] = view[count:]
                break
            count -= len(view)
            first += 1


PLAIN = Format(name="raw", needs=(), save=save, loads={"raw": load}, read_ones={"raw": read_one})
