"""torch's distributed checkpoint, in the shape that scenarios ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

MANIFEST = ".metadata"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Save modules, optimizers, tensors and values."""
    dcp.save(state, checkpoint_id=folder / "checkpoint")


overwrite = save


def save_alone(folder: Path, tensors: dict[str, Any]) -> None:
    """Save on one rank of several."""
    dcp.save(tensors, checkpoint_id=folder / "checkpoint", no_dist=True)


def load(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Load into a state, and return it."""
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    return state


def save_training(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save a model and its optimizer, by their state dicts."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save(folder, {"model": model_state, "optimizer": optimizer_state})


def load_training(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a model and its optimizer, by their state dicts."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = load(folder, {"model": model_state, "optimizer": optimizer_state})
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def read(folder: Path) -> dict[str, Any]:
    """Load a tensor of 1,000 elements: what is there has to be known."""
    return load(folder, {"w": torch.zeros(1000)})
