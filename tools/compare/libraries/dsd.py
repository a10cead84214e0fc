"""dsdformat, in the shape that scenarios ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import dsdformat.numpy
import dsdformat.torch as dsd

MANIFEST = "manifest.dsd"  # the file that tells a reader what there is


def save(folder: Path, state: dict[str, Any], **options: Any) -> None:
    """Save modules, optimizers, tensors and values."""
    dsd.save(folder / "checkpoint", state, **options)


def load(folder: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Load into a state; return it with the values that are stored."""
    return {**state, **dsd.load(folder / "checkpoint", state, **options)}


def read(folder: Path) -> dict[str, Any]:
    """Load all there is, with no state to load into."""
    return dsd.load(folder / "checkpoint")


def overwrite(folder: Path, state: dict[str, Any]) -> None:
    """Save over what is there."""
    save(folder, state, overwrite=True)


def save_alone(folder: Path, arrays: dict[str, Any]) -> None:
    """Save on one rank of several; torch's tensors are arrays to numpy."""
    dsdformat.numpy.save(folder / "checkpoint", {name: one.numpy() for name, one in arrays.items()})


def save_training(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save a model and its optimizer."""
    save(folder, {"model": model, "optimizer": optimizer})


def load_training(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a model and its optimizer."""
    load(folder, {"model": model, "optimizer": optimizer})


def load_on_meta(folder: Path, source: nn.Module, model: nn.Module) -> None:
    """Save a model, and load it into one on the meta device."""
    save(folder, {"model": source})
    load(folder, {"model": model}, device="cpu")


def save_labelled(folder: Path, tensors: dict[str, torch.Tensor], labels: dict[str, str]) -> None:
    """Save tensors, and strings beside them."""
    save(folder, tensors, user=labels)


def save_tied(folder: Path, state: dict[str, Any], alias: str) -> None:
    """Save a state in which one name is an alias of another; which one makes no difference."""
    del alias
    save(folder, {"model": state})


def save_two_files(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> list[Path]:
    """Save two states in one checkpoint, and return their files."""
    save(folder, {"first": first, "second": second})
    return [folder / "checkpoint" / f"{name}.safetensors" for name in ("first", "second")]


def load_first(folder: Path, first: dict[str, Any]) -> None:
    """Load one of the two states."""
    load(folder, {"first": first}, strict=False)


def broadcast(tensor: torch.Tensor) -> None:
    """Give all ranks what rank 0 has."""
    dsd.broadcast({"tensor": tensor}, {"tensor": tensor})


def through_a_folder(folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """Save and load."""
    save(folder, tensors)
    return read(folder)


def through_a_map(folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """Save, and load without copying."""
    overwrite(folder, tensors)
    return dsd.load(folder / "checkpoint", mmap=True)


ROUTES = (through_a_folder, through_a_map)
