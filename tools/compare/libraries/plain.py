"""torch.save and torch.load, in the shape that scenarios ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def save(folder: Path, state: dict[str, Any]) -> None:
    """Save a state."""
    torch.save(state, folder / "checkpoint.pt")


def read(folder: Path) -> dict[str, Any]:
    """Load all there is, as torch does by default: without running what a pickle says."""
    state: dict[str, Any] = torch.load(folder / "checkpoint.pt")
    return state


def load_on_meta(folder: Path, source: nn.Module, model: nn.Module) -> None:
    """Save a model, and load it into one on the meta device."""
    save(folder, source.state_dict())
    model.load_state_dict(read(folder), assign=True)
