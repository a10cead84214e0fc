"""Whole states: from the shards of all ranks to a file of rank 0, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import files
from bench.formats import plain

if TYPE_CHECKING:
    from torch import Tensor

    from bench.sharded import ShardedState

__all__ = ["BROADCASTS", "GATHERS", "Ready", "whole_file"]

PIECE_NBYTES = 64 << 20

# Gets ready, and returns the call.
Ready = Callable[[Path, "ShardedState"], Callable[[], object]]


def gather_plain(path: Path, state: ShardedState) -> Callable[[], None]:
    """Send all shards to rank 0 in pieces, which writes each as it comes."""
    from torch import distributed

    own, found = pieces_of(state)

    def call() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666) if found else -1
        for nbytes in piece_sizes(state):
            parts = [one[:nbytes] for one in found]
            distributed.gather(own[:nbytes], parts or None, dst=0)
            if parts:
                plain.move(lambda views, _: os.writev(fd, views), plain.bytes_of(parts))
        if found:
            os.fsync(fd)
            os.close(fd)

    return call


def export(path: Path, state: ShardedState) -> Callable[[], object]:
    """Write one safetensors file of whole tensors from all ranks; this is atomic and durable."""
    import dsdformat.torch as dsd

    return lambda: dsd.export_safetensors(path, named(state), max_shard_bytes=1 << 40)


def gather_dicts(path: Path, state: ShardedState, *, own: bool) -> Callable[[], None]:
    """Get the state dicts whole on rank 0, and write them with torch.save."""
    import torch
    from torch import distributed

    module = functions(own)
    options = module.StateDictOptions(full_state_dict=True, cpu_offload=True)

    def call() -> None:
        model, optimizer = module.get_state_dict(state.module, state.optimizer, options=options)
        if distributed.get_rank() == 0:
            torch.save({"model": model, "optimizer": optimizer}, path)
            files.flush(path)

    return call


def named(state: ShardedState) -> dict[str, Any]:
    """Return all tensors as one flat state dict."""
    assert state.optimizer is not None
    found: dict[str, Any] = {}
    for name, parameter in state.module.named_parameters():
        found[f"model.{name}"] = parameter
        for key, one in state.optimizer.state[parameter].items():
            found[f"optimizer.{name}.{key}"] = one
    return found


def scatter_plain(path: Path, state: ShardedState, *, reads: bool) -> Callable[[], None]:
    """Send each rank as much as its shards, from a file of rank 0 or from its memory."""
    from torch import distributed

    own, given = pieces_of(state)

    def call() -> None:
        at = 0
        for nbytes in piece_sizes(state):
            parts = [one[:nbytes] for one in given]
            if parts and reads:
                plain.read(path, plain.bytes_of(parts), at)
                at += nbytes * len(parts)
            distributed.scatter(own[:nbytes], parts or None, src=0)

    return call


def broadcast_dicts(path: Path, state: ShardedState, *, own: bool) -> Callable[[], None]:
    """Map the file of torch.save on rank 0, and set the state dicts from there."""
    import torch
    from torch import distributed

    module = functions(own)
    options = module.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def call() -> None:
        whole: Mapping[str, Any] = {"model": {}, "optimizer": {}}
        if distributed.get_rank() == 0:
            whole = torch.load(path, mmap=True, weights_only=True)
        # Not set_state_dict of torch, which hangs where the model's dict is empty.
        module.set_model_state_dict(state.module, whole["model"], options=options)
        module.set_optimizer_state_dict(
            state.module, state.optimizer, whole["optimizer"], options=options
        )

    return call


def functions(own: bool) -> Any:
    """Return the module of state dicts that is ours, or torch's; they have the same names."""
    if own:
        from dsdformat.torch import state_dict
    else:
        from torch.distributed.checkpoint import state_dict  # type: ignore[no-redef]
    return state_dict


def pieces_of(state: ShardedState) -> tuple[Tensor, list[Tensor]]:
    """Return memory for a piece of this rank, and on rank 0 for one of each; it is touched."""
    import torch
    from torch import distributed

    length = max(piece_sizes(state))
    own = torch.ones(length, dtype=torch.uint8)
    world = distributed.get_world_size()
    first = distributed.get_rank() == 0
    return own, [torch.ones_like(own) for _ in range(world)] if first else []


def piece_sizes(state: ShardedState) -> list[int]:
    """Cut what one rank has into pieces."""
    from torch import distributed

    nbytes = state.nbytes() // distributed.get_world_size()
    return [min(PIECE_NBYTES, nbytes - at) for at in range(0, nbytes, PIECE_NBYTES)]


def whole_file(path: Path, state: ShardedState) -> None:
    """Write a file that all of `BROADCASTS` read."""
    gather_dicts(path, state, own=False)()


GATHERS: Mapping[str, Ready] = {
    "raw": gather_plain,
    "dsdformat (export)": export,
    "dsdformat (get_state_dict)": partial(gather_dicts, own=True),
    "torch (get_state_dict)": partial(gather_dicts, own=False),
}
BROADCASTS: Mapping[str, Ready] = {
    "raw": partial(scatter_plain, reads=False),
    "raw (read, scatter)": partial(scatter_plain, reads=True),
    "dsdformat (set_state_dict)": partial(broadcast_dicts, own=True),
    "torch (set_state_dict)": partial(broadcast_dicts, own=False),
}
