"""dsdformat: verified as by default, and without digests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.formats.format import Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["DSD"]


def save(path: Path, state: State) -> None:
    """Save; this is atomic and durable."""
    import dsdformat.torch as dsd

    dsd.save(path, tree_of(state))


def load(path: Path, state: State) -> None:
    """Load in place, and compare all bytes with their digests."""
    import dsdformat.torch as dsd

    dsd.load(path, tree_of(state))


def load_unverified(path: Path, state: State) -> None:
    """Load in place."""
    import dsdformat.torch as dsd

    dsd.load(path, tree_of(state), verify=False)


def read_one(path: Path, state: State, index: int) -> None:
    """Load one parameter in place, verified."""
    import dsdformat.torch as dsd

    dsd.load(path, tree_of(state), select=f"model/{state.name(index)}")


def read_one_entry(path: Path, state: State, index: int) -> None:
    """Read one tensor through the core, verified."""
    import dsdformat
    from bench.formats.plain import bytes_of

    parameter = list(state.module.parameters())[index]
    with dsdformat.open(path) as checkpoint:
        checkpoint.tensor(f"model/{state.name(index)}").read(into=bytes_of([parameter])[0])


def map_one_entry(path: Path, state: State, index: int) -> None:
    """Map one tensor, and copy it to its place."""
    import torch

    import dsdformat

    parameter = list(state.module.parameters())[index]
    with dsdformat.open(path, verify=False) as checkpoint, torch.no_grad():
        view = checkpoint.tensor(f"model/{state.name(index)}").map(writable=True)
        parameter.copy_(torch.frombuffer(view, dtype=parameter.dtype).view(parameter.shape))


def tree_of(state: State) -> dict[str, Any]:
    """Return the state as it is passed to dsdformat."""
    if state.optimizer is None:
        return {"model": state.module}
    return {"model": state.module, "optimizer": state.optimizer}


DSD = Format(
    name="dsdformat",
    needs=("dsdformat.torch",),
    save=save,
    loads={"dsdformat": load, "dsdformat (unverified)": load_unverified},
    read_ones={
        "dsdformat": read_one,
        "dsdformat (open, read)": read_one_entry,
        "dsdformat (unverified, map)": map_one_entry,
    },
    is_durable=True,
)
