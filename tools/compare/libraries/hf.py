"""torch's distributed checkpoint in Hugging Face's layout: safetensors files and an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter


def save_tied(folder: Path, state: dict[str, Any], alias: str) -> None:
    """Save a state in which one name is an alias of another; of tied names it takes one."""
    files = {name: number for number, name in enumerate(state, start=1)}
    kept = {name: value for name, value in state.items() if name != alias}
    writer = HuggingFaceStorageWriter(
        str(folder / "checkpoint"),
        fqn_to_index_mapping=files,
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(kept, storage_writer=writer)


def save_two_files(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> list[Path]:
    """Save two states in one checkpoint, and return their files."""
    place = folder / "checkpoint"
    files = {**dict.fromkeys(first, 1), **dict.fromkeys(second, 2)}
    writer = HuggingFaceStorageWriter(str(place), fqn_to_index_mapping=files)
    dcp.save({**first, **second}, storage_writer=writer)
    index = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
    return [place / index[next(iter(state))] for state in (first, second)]


def load_first(folder: Path, first: dict[str, Any]) -> None:
    """Load one of the two states."""
    dcp.load(first, storage_reader=HuggingFaceStorageReader(str(folder / "checkpoint")))
