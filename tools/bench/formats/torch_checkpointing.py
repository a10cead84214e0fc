"""torch_checkpointing, saving in the call."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.formats.format import Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["TORCH_CHECKPOINTING", "manager", "tree_of"]


def save(path: Path, state: State) -> None:
    """Save the state dicts of model and optimizer."""
    with closing(manager()) as one:
        one.save(str(path), tree_of(state))


def load(path: Path, state: State) -> None:
    """Load into the model's state dict, and the optimizer's as a new one that it is given."""
    with closing(manager()) as one:
        loaded = one.load(str(path), into=tree_of(state))
    if state.optimizer is not None:
        state.optimizer.load_state_dict(loaded["optimizer"])


def tree_of(state: State) -> dict[str, Any]:
    """Return the state dicts."""
    tree: dict[str, Any] = {"model": state.module.state_dict()}
    if state.optimizer is not None:
        tree["optimizer"] = state.optimizer.state_dict()
    return tree


def manager(saver: Any = None) -> Any:
    """Make what saves and loads; without O_DIRECT, which fails on file systems such as ext4.

    Args:
        saver: How it saves; in the call if None.
    """
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    saver = saver or SyncCheckpointSaverConfig()
    return CheckpointManager.Config(save=saver, storage_config=storage).build()


TORCH_CHECKPOINTING = Format(
    name="torch_checkpointing",
    needs=("torch_checkpointing",),
    save=save,
    loads={"torch_checkpointing": load},
    save_takes=2.3,
    load_takes=2.3,
)
