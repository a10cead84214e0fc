"""What the tests of crashes share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.saves import Save

ROOM_NBYTES = 1 << 30


@pytest.fixture(autouse=True)
def no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush nothing: what a crash leaves is simulated, and thousands of flushes take minutes."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where the system has one with room: thousands of saves go there."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < ROOM_NBYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="dsdformat-crash-", dir=memory) as made:
        yield Path(made)


@pytest.fixture
def roots(folder: Path) -> Callable[[Save], Path]:
    """`roots(save)` makes a fresh root with what is there before a save."""
    count = iter(range(1_000_000))

    def root(save: Save) -> Path:
        made = folder / str(next(count))
        save.prepare(made)
        return made

    return root
