"""What tests of the runtime share: `exact`, which says what is the same, and quick saves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save without waiting for the disk, which takes most of the time; `storage/` tests that."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
