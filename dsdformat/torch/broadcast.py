"""Give each rank its shards of whole tensors that one rank has, in bounded buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsdformat.errors import MismatchError
from dsdformat.garbage import young_gc
from dsdformat.torch.comm import Comm
from dsdformat.torch.exchange import exchange, places, share
from dsdformat.torch.routes import BUCKET_NBYTES, Form, Routes, Spread
from dsdformat.torch.sharding import is_spread, local_of, sharding_of

__all__ = ["broadcast", "fill_from_first"]


def broadcast(
    whole: Mapping[str, torch.Tensor] | None,
    into: Mapping[str, Any],
    *,
    group: Any = None,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> None:
    """Fill tensors and DTensors on all ranks from the whole tensors of the group's rank 0.

    Each rank receives the boxes that it holds, and nothing else.

    Args:
        whole: On rank 0 of the group, a tensor for each name, of the same global shape and dtype
            as the one to be filled. Not looked at on other ranks.
        into: What is filled: of equal names, shapes, dtypes and placements on all ranks, in the
            same order. Meshes of DTensors have the group's ranks, or are left out of it.
        group: The process group; the default one if None.
        bucket_nbytes: How many bytes are moved at once.

    Raises:
        RankDisagreementError: `ranks_disagree`: ranks passed different tensors.
        DistributedError: `rank_failed`: what rank 0 has does not fit; nothing was changed.

    Ranks: collective over the group.
    Memory: two buckets on rank 0; on others their part of one.
    """
    comm = Comm(group)
    forms: dict[str, Form] = {
        name: (tuple(one.shape), local_of(one).dtype) for name, one in into.items()
    }
    with young_gc():
        comm.check_agreement(_fingerprint(into), "what is broadcast")
        with comm.together("broadcast"):
            if comm.is_coordinator:
                _check_whole(whole or {}, forms)
        fill_from_first(comm, whole, into, forms, bucket_nbytes)


def fill_from_first(
    comm: Comm,
    whole: Mapping[str, torch.Tensor] | None,
    into: Mapping[str, Any],
    forms: Mapping[str, Form],
    bucket_nbytes: int = BUCKET_NBYTES,
) -> None:
    """As `broadcast`, for what was checked before; dtypes are converted after they are sent.

    Args:
        comm: The group.
        whole: On rank 0.
        into: What is filled.
        forms: Of what is sent, in the same order on all ranks.
        bucket_nbytes: How many bytes are moved at once.

    Ranks: collective over the group.
    """
    given = whole or {}
    shards = {name: given[name].detach() for name in forms if name in given}
    spread = [name for name in forms if is_spread(into[name])]
    same = [name for name in forms if not is_spread(into[name])]
    sources = {name: Spread.only(shape, 0, comm.world_size) for name, (shape, _) in forms.items()}
    if spread:
        targets = places(comm, {name: sharding_of(into[name]) for name in spread})
        routes = Routes(_some(forms, spread), _some(sources, spread), targets)
        local = {name: local_of(into[name]) for name in spread}
        exchange(comm, routes, shards, local, bucket_nbytes)
    if same:
        routes = Routes(_some(forms, same), _some(sources, same), None)
        local = {name: into[name].detach() for name in same}
        share(comm, routes, shards, local, bucket_nbytes)


def _some(table: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: table[name] for name in names}


def _check_whole(whole: Mapping[str, torch.Tensor], forms: Mapping[str, Form]) -> None:
    for name, (shape, dtype) in forms.items():
        given = whole.get(name)
        if given is None:
            raise MismatchError(f"{name}: rank 0 has no such tensor", code="state_mismatch")
        if (tuple(given.shape), given.dtype) != (shape, dtype):
            raise MismatchError(
                f"{name}: shape {list(given.shape)} and {given.dtype} given, {list(shape)} and "
                f"{dtype} wanted",
                code="state_mismatch",
            )


def _fingerprint(into: Mapping[str, Any]) -> list[Any]:
    return [
        [
            name,
            list(one.shape),
            str(local_of(one).dtype),
            sharding_of(one).describe() if is_spread(one) else None,
        ]
        for name, one in into.items()
    ]
