"""What tests of size share: measuring processes, and targets that keep no zeros."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# For the modules beside this file that are no tests.
sys.path.insert(0, str(HERE))


@pytest.fixture
def measure(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """`measure("step", *args)` runs a function of `measuring.py` in a process of its own.

    Gives the figures that it prints as JSON, and prints them too.
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not tell a process its memory")

    def measure(step: str, *args: object) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(HERE / "measuring.py"), step, *map(str, args)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        with capsys.disabled():
            shown = ", ".join(f"{name} {value:.6g}" for name, value in figures.items())
            print(f"\n{step}: {shown}")
        return dict(figures)

    return measure


@pytest.fixture
def big_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for large files, which is removed at once."""
    yield tmp_path / "checkpoint"
    shutil.rmtree(tmp_path, ignore_errors=True)
