"""What a new folder may replace: only what its writer knows to be a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from dsdformat.errors import listed, printable
from dsdformat.limits import MANIFEST_LABEL, SIGNATURES_LABEL

__all__ = ["Guard", "folder_guard", "no_checkpoint", "only_checkpoint"]

# Says why what is at a path may not be replaced, or nothing if it may.
Guard = Callable[[Path], str | None]

# Files of folders of checkpoints of any kind; others are a person's.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".index.json")
_NAMES = (".metadata", MANIFEST_LABEL, SIGNATURES_LABEL)
# And of folders of ours alone.
_OWN_SUFFIXES = (".safetensors", ".safetensors.index.json")


def no_checkpoint(path: Path) -> str | None:
    """Say that a path is no checkpoint of ours, if that is so."""
    found = path.is_dir() and (path / MANIFEST_LABEL).exists()
    return None if found else "is not a checkpoint"


def only_checkpoint(path: Path) -> str | None:
    """Say that a path is no checkpoint of ours, or holds other files too, if that is so."""
    return no_checkpoint(path) or _fault(path, _NAMES, _OWN_SUFFIXES)


def folder_guard(new: Iterable[str]) -> Guard:
    """Say which folders a new one may replace: those in which nothing would be lost.

    Args:
        new: Names of the files that are written.
    """
    names = {*new, *_NAMES}

    def fault(path: Path) -> str | None:
        return _fault(path, names, _SUFFIXES) if path.is_dir() else "is not a folder"

    return fault


def _fault(path: Path, names: Container[str], suffixes: tuple[str, ...]) -> str | None:
    """Say what a folder holds that is not to be lost."""
    kept = [
        name
        for name in sorted(os.listdir(path))
        if (path / name).is_dir() or (name not in names and not name.endswith(suffixes))
    ]
    return f"holds {listed(list(map(printable, kept)))}, which is not written" if kept else None
