"""torch.save and torch.load of state dicts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.formats.format import Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["TORCH_PICKLE"]


def save(path: Path, state: State) -> None:
    """Save the state dicts of model and optimizer."""
    import torch

    tree = {"model": state.module.state_dict()}
    if state.optimizer is not None:
        tree["optimizer"] = state.optimizer.state_dict()
    torch.save(tree, path)


def load(path: Path, state: State, *, mmap: bool) -> None:
    """Load the state dicts, then give them to model and optimizer."""
    import torch

    tree = torch.load(path, weights_only=True, mmap=mmap)
    state.module.load_state_dict(tree["model"])
    if state.optimizer is not None:
        state.optimizer.load_state_dict(tree["optimizer"])
        if mmap:  # the moments are in the mapped file still, unread; others have them in memory
            for kept in state.optimizer.state.values():
                kept.update({name: moment.clone() for name, moment in kept.items()})


def read_one(path: Path, state: State, index: int) -> None:
    """Copy one tensor out of the mapped file."""
    import torch

    tree = torch.load(path, weights_only=True, mmap=True)
    parameter = list(state.module.parameters())[index]
    with torch.no_grad():
        parameter.copy_(tree["model"][state.name(index)])


TORCH_PICKLE = Format(
    name="torch.save",
    needs=("torch",),
    save=save,
    loads={
        "torch.load": partial(load, mmap=False),
        "torch.load (mmap)": partial(load, mmap=True),
    },
    read_ones={"torch.load (mmap)": read_one},
)
