"""Folders that all ranks of a launch see."""

from __future__ import annotations

from pathlib import Path

from torch import distributed


def shared(name: str) -> str:
    """A path that all ranks have, in the folder of the launch."""
    store = distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(Path(store.path).parent / name)
