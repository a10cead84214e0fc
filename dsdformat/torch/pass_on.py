"""Give all ranks of a group the boxes of tensors that one of them has, in bounded messages.

A large box goes from memory to memory without a copy where both lie in one piece; small ones go
together. The ranks take turns, so that none gives all of its own while others wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dsdformat.boxes import Box, row_boxes
from dsdformat.limits import MIB
from dsdformat.torch.buffers import as_bytes, box_view, copy_elements, typed
from dsdformat.torch.comm import Comm

__all__ = ["MESSAGE_NBYTES", "Part", "pass_on"]

MESSAGE_NBYTES = 16 * MIB
_ALONE_NBYTES = MIB  # boxes from here on are messages of their own
_ALIGN = 16


class Part(NamedTuple):
    """A box of a tensor that one rank has, and all want.

    Attributes:
        tensor: Its number.
        box: In elements of it.
    """

    tensor: int
    box: Box


def pass_on(comm: Comm, tensors: Sequence[torch.Tensor], given: Sequence[Sequence[Part]]) -> None:
    """Copy boxes of tensors from the rank that has them to all others.

    Args:
        comm: The group.
        tensors: Strided, on any device; of the same shapes and dtypes on all ranks.
        given: For each rank the boxes that it gives; the same on all ranks.

    Ranks: collective over the group.
    Memory: a message of 16 MiB where boxes are small, or do not lie in one piece.
    """
    streams = [_messages(tensors, parts) for parts in given]
    for turn in itertools.zip_longest(*streams):
        for giver, message in enumerate(turn):
            if message is not None:
                _send(comm, tensors, message, giver)


def _messages(tensors: Sequence[torch.Tensor], parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Cut what one rank gives into messages."""
    small: list[Part] = []
    total = 0
    for tensor, box in parts:
        nbytes = box.numel * tensors[tensor].element_size()
        if nbytes >= _ALONE_NBYTES:
            for row in row_boxes(box.shape, nbytes, MESSAGE_NBYTES):
                yield [Part(tensor, _moved(row, box.offset))]
            continue
        if small and total + nbytes > MESSAGE_NBYTES:
            yield small
            small, total = [], 0
        small.append(Part(tensor, box))
        total += _aligned(nbytes)
    if small:
        yield small


def _send(comm: Comm, tensors: Sequence[torch.Tensor], message: Sequence[Part], giver: int) -> None:
    views = [box_view(tensors[one.tensor], one.box) for one in message]
    if len(views) == 1 and _is_straight(views[0], comm.device):
        comm.broadcast(as_bytes(views[0]), giver)
        return
    sizes = [view.numel() * view.element_size() for view in views]
    starts = [0, *itertools.accumulate(map(_aligned, sizes[:-1]))]
    total = starts[-1] + sizes[-1]  # as long as the view where there is one, straight elsewhere
    buffer = torch.empty(total, dtype=torch.uint8, device=comm.device)
    places = [
        typed(buffer[at : at + nbytes], view.dtype).view(view.shape)
        for view, at, nbytes in zip(views, starts, sizes, strict=True)
    ]
    if comm.rank == giver:
        for view, place in zip(views, places, strict=True):
            copy_elements(view, place)
    comm.broadcast(buffer, giver)
    if comm.rank != giver:
        for view, place in zip(views, places, strict=True):
            copy_elements(place, view)


def _is_straight(view: torch.Tensor, device: torch.device) -> bool:
    whole = view.is_contiguous() and not view.is_conj() and not view.is_neg()
    return whole and view.device == device


def _moved(box: Box, offset: Sequence[int]) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offset, offset, strict=True)), box.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
