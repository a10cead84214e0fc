"""What tests of converters share: a canary for what is executed, refusals, and quick saves."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsdformat import DsdError

sys.path.insert(0, str(Path(__file__).resolve().parent))

MIB = 2**20


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save without waiting for the disk, which takes most of the time; `storage/` tests that."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(autouse=True)
def _canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if anything that a file asks for is done: all payloads make a file `canary`."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "canary").exists(), "the file was executed"


@pytest.fixture
def refused() -> Callable[..., str]:
    """`refused(call)` gives the code that a call is refused with: soon, and with little memory."""

    def refused(call: Callable[[], Any], *, peak: int = 4 * MIB, seconds: float = 10) -> str:
        tracemalloc.start()
        start = time.process_time()
        try:
            with pytest.raises(DsdError) as caught:
                call()
            spent = time.process_time() - start
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < peak
        assert spent < seconds
        return caught.value.code

    return refused
