"""The libraries that save and load one state on several ranks, each as its manual says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.formats import dsd, plain

if TYPE_CHECKING:
    from bench.sharded import ShardedState

__all__ = ["RANK_FORMATS", "Call", "RankFormat"]

Call = Callable[[Path, "ShardedState"], object]


class RankFormat(NamedTuple):
    """The calls of one library; all ranks make them.

    Attributes:
        save: Writes a state, durable, to a path that does not exist yet.
        loads: Ways to load into an existing state, by the contender's name.
        is_for_any: Whether what some ranks saved is loaded by any number, in any layout.
    """

    name: str
    save: Call
    loads: Mapping[str, Call]
    is_for_any: bool = True


# Plain calls


def save_plain(path: Path, state: ShardedState) -> None:
    """Write what each rank has to a file of its own."""
    path.mkdir(exist_ok=True)
    own = own_file(path)
    fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        plain.move(lambda views, _: os.writev(fd, views), plain.bytes_of(state.shards()))
        os.fsync(fd)
    finally:
        os.close(fd)


def load_plain(path: Path, state: ShardedState) -> None:
    """Read the file back."""
    plain.read(own_file(path), plain.bytes_of(state.shards()), 0)


def own_file(path: Path) -> Path:
    """Return the file of this rank."""
    from torch import distributed

    return path / str(distributed.get_rank())


# dsdformat


def load_by_itself(path: Path, state: ShardedState) -> None:
    """Load with each rank reading all that it wants."""
    import dsdformat.torch as ours

    ours.load(path, dsd.tree_of(state), share_reads=False)


# torch.distributed.checkpoint


def save_dcp(path: Path, state: ShardedState) -> None:
    """Save the state dicts; DCP flushes its files."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer = get_state_dict(state.module, state.optimizer)
    tree = {"model": model, "optimizer": optimizer}
    save(tree, storage_writer=FileSystemWriter(path))


def load_dcp(path: Path, state: ShardedState) -> None:
    """Load into the state dicts, then give them to model and optimizer."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model, optimizer = get_state_dict(state.module, state.optimizer)
    tree: dict[str, Any] = {"model": model, "optimizer": optimizer}
    load(tree, checkpoint_id=path)
    set_state_dict(
        state.module,
        state.optimizer,
        model_state_dict=tree["model"],
        optim_state_dict=tree["optimizer"],
    )


RANK_FORMATS = (
    RankFormat("raw", save_plain, {"raw": load_plain}, is_for_any=False),
    RankFormat(
        "dsdformat",
        dsd.save,
        {
            "dsdformat": dsd.load,
            "dsdformat (reads not shared)": load_by_itself,
            "dsdformat (unverified)": dsd.load_unverified,
        },
    ),
    RankFormat("dcp", save_dcp, {"dcp": load_dcp}),
)
