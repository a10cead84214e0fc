"""torch.distributed.checkpoint in a single process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.formats.format import Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["DCP", "alone"]


def save(path: Path, state: State) -> None:
    """Save the state dicts; its own fsync is off, as the bench flushes all files anyway."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    writer = FileSystemWriter(path, sync_files=False)
    dcp_save(tree_of(state), storage_writer=writer, **alone(dcp_save))


def load(path: Path, state: State) -> None:
    """Load into the state dicts, then give them to model and optimizer."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    tree = tree_of(state)
    dcp_load(tree, checkpoint_id=path, **alone(dcp_load))  # in place: the model is done
    if state.optimizer is not None:
        set_optimizer_state_dict(state.module, state.optimizer, tree["optimizer"])


def read_one(path: Path, state: State, index: int) -> None:
    """Load a state dict of one tensor."""
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    parameter = list(state.module.parameters())[index].detach()
    dcp_load({"model": {state.name(index): parameter}}, checkpoint_id=path, **alone(dcp_load))


def alone(function: Callable[..., Any]) -> dict[str, bool]:
    """Say that there is one process; torch 2.6 knows no such option, and finds out itself."""
    return {"no_dist": True} if "no_dist" in inspect.signature(function).parameters else {}


def tree_of(state: State) -> dict[str, Any]:
    """Return the state dicts. Those of a fresh optimizer are made by it, with zeros for moments."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    tree: dict[str, Any] = {"model": state.module.state_dict()}
    if state.optimizer is not None:
        tree["optimizer"] = get_optimizer_state_dict(state.module, state.optimizer)
    return tree


DCP = Format(
    name="dcp", needs=("torch",), save=save, loads={"dcp": load}, read_ones={"dcp": read_one}
)
