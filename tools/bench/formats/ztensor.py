"""zTensor: one file, each tensor on a page of its own with a digest that reading does not check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.formats.format import Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["ZTENSOR"]


def save(path: Path, state: State) -> None:
    """Save the model's state dict."""
    from ztensor import Writer

    from bench.formats.plain import bytes_of

    tensors = dict(sorted(state.module.state_dict().items()))  # the order that it insists on
    with Writer(str(path)) as writer:
        for name, view in zip(tensors, bytes_of(list(tensors.values())), strict=True):
            writer.add(name, view, list(tensors[name].shape), "f32")


def load(path: Path, state: State) -> None:
    """Copy each tensor out of the mapped file into its parameter."""
    import torch
    import ztensor

    with ztensor.open(str(path)) as file:
        for name, parameter in state.module.state_dict().items():
            parameter.copy_(torch.from_dlpack(file[name]))


def load_verified(path: Path, state: State) -> None:
    """Compare all bytes with their digests, then load."""
    import ztensor

    with ztensor.open(str(path)) as file:
        file.verify(deep=True)
    load(path, state)


def read_one(path: Path, state: State, index: int) -> None:
    """Copy one tensor out of the mapped file."""
    import torch
    import ztensor

    name = state.name(index)
    with ztensor.open(str(path)) as file:
        state.module.state_dict()[name].copy_(torch.from_dlpack(file[name]))


ZTENSOR = Format(
    name="ztensor",
    needs=("torch", "ztensor"),
    save=save,
    loads={"ztensor": load, "ztensor (verified)": load_verified},
    read_ones={"ztensor": read_one},
    has_optimizers=False,
)
