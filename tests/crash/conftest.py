"""What the tests of crashes share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.saves import Save


@pytest.fixture(autouse=True)
def no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush nothing: what a crash leaves is simulated, and thousands of flushes take minutes."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def roots(tmp_path: Path) -> Callable[[Save], Path]:
    """`roots(save)` makes a fresh root with what is there before a save."""
    count = iter(range(1_000_000))

    def root(save: Save) -> Path:
        made = tmp_path / str(next(count))
        save.prepare(made)
        return made

    return root
