"""torchsnapshot in a single process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.formats.format import Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["TORCHSNAPSHOT"]


def save(path: Path, state: State) -> None:
    """Take a snapshot of model and optimizer."""
    from torchsnapshot import Snapshot

    Snapshot.take(str(path), tree_of(state))


def load(path: Path, state: State) -> None:
    """Restore model and optimizer."""
    from torchsnapshot import Snapshot

    Snapshot(str(path)).restore(tree_of(state))


def read_one(path: Path, state: State, index: int) -> None:
    """Read one tensor in place."""
    from torchsnapshot import Snapshot

    name = state.name(index)
    Snapshot(str(path)).read_object(f"0/model/{name}", obj_out=state.module.state_dict()[name])


def tree_of(state: State) -> dict[str, Any]:
    """Return the state as it is passed to torchsnapshot."""
    if state.optimizer is None:
        return {"model": state.module}
    return {"model": state.module, "optimizer": state.optimizer}


TORCHSNAPSHOT = Format(
    name="torchsnapshot",
    needs=("torchsnapshot",),
    save=save,
    loads={"torchsnapshot": load},
    read_ones={"torchsnapshot": read_one},
    save_takes=2.3,
    load_takes=2.2,
)
