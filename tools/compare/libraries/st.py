"""safetensors, in the shape that scenarios ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import torch as st

Tensors = dict[str, torch.Tensor]


def save(folder: Path, tensors: Tensors, **options: Any) -> None:
    """Save tensors."""
    st.save_file(tensors, folder / "model.safetensors", **options)


def read(folder: Path) -> Tensors:
    """Load all tensors."""
    return st.load_file(folder / "model.safetensors")


def save_labelled(folder: Path, tensors: Tensors, labels: dict[str, str]) -> None:
    """Save tensors, and strings beside them."""
    save(folder, tensors, metadata=labels)


def through_a_file(folder: Path, tensors: Tensors) -> Tensors:
    """Save and load."""
    save(folder, tensors)
    return read(folder)


def through_bytes(_: Path, tensors: Tensors) -> Tensors:
    """Save and load in memory."""
    return st.load(st.save(tensors))


ROUTES = (through_a_file, through_bytes)
