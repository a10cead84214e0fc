"""The safetensors library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.formats.format import Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["SAFETENSORS"]


def save(path: Path, state: State) -> None:
    """Save the model's state dict."""
    from safetensors.torch import save_file

    save_file(state.module.state_dict(), path)


def load(path: Path, state: State) -> None:
    """Copy each tensor out of the mapped file into its parameter."""
    from safetensors import safe_open

    wanted = state.module.state_dict()
    with safe_open(path, framework="pt") as file:
        for name, parameter in wanted.items():
            parameter.copy_(file.get_tensor(name))


def load_file_and_dict(path: Path, state: State) -> None:
    """Load the file, then the module's state dict."""
    from safetensors.torch import load_file

    state.module.load_state_dict(load_file(path))


def read_one(path: Path, state: State, index: int) -> None:
    """Copy one tensor out of the mapped file."""
    import torch
    from safetensors import safe_open

    parameter = list(state.module.parameters())[index]
    with safe_open(path, framework="pt") as file, torch.no_grad():
        parameter.copy_(file.get_tensor(state.name(index)))


SAFETENSORS = Format(
    name="safetensors",
    needs=("safetensors",),
    save=save,
    loads={"safetensors (safe_open)": load, "safetensors (load_file)": load_file_and_dict},
    read_ones={"safetensors (safe_open)": read_one},
    has_optimizers=False,
)
