"""What the commands say of one tensor: its shape, size and placements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dsdformat import Mesh, TensorEntry
from dsdformat.cli.render import format_size
from dsdformat.convert import AnyTensor
from dsdformat.format.dtypes import DTYPES

__all__ = [
    "Placements",
    "check_dtype",
    "distinct",
    "mesh_json",
    "mesh_text",
    "nbytes_of",
    "numel_of",
    "placements_json",
    "placements_text",
    "summary_text",
]

# A mesh, and one placement per axis of it.
Placements = tuple[Mesh, tuple[str, ...]]


def numel_of(entry: TensorEntry | AnyTensor) -> int:
    """Return the number of elements."""
    return math.prod(entry.shape)


def check_dtype(entry: TensorEntry | AnyTensor) -> None:
    """Raise what is wrong with a tensor whose dtype is not in the table."""
    if isinstance(entry, TensorEntry) and entry.dtype not in DTYPES:
        entry.chunks  # noqa: B018  checks the row


def nbytes_of(entry: TensorEntry | AnyTensor) -> int:
    """Return the length of the packed bytes."""
    check_dtype(entry)
    return entry.nbytes


def summary_text(entry: TensorEntry | AnyTensor) -> str:
    """Return dtype, shape and size in one line."""
    return f"{entry.dtype} {list(entry.shape)}, {format_size(nbytes_of(entry))}"


def distinct(texts: Iterable[str]) -> list[str]:
    """Return each text once, in the order of first meeting."""
    return list(dict.fromkeys(texts))


def mesh_text(mesh: Mesh) -> str:
    """Return a mesh for people: `dp=2 × tp=4`."""
    return " × ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))


def placements_text(placements: Placements) -> str:
    """Return placements for people: `dp=2 × tp=4: replicate, shard(0)`."""
    return f"{mesh_text(placements[0])}: {', '.join(placements[1])}"


def mesh_json(mesh: Mesh) -> dict[str, Any]:
    """Return a mesh as JSON has it."""
    return {"axes": list(mesh.axes), "shape": list(mesh.shape), "ranks": list(mesh.ranks)}


def placements_json(placements: Placements | None) -> dict[str, Any] | None:
    """Return placements as JSON has them; null for a tensor that was not sharded."""
    if placements is None:
        return None
    return {"mesh": mesh_json(placements[0]), "placements": list(placements[1])}
