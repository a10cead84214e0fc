"""The second reader, in JavaScript, takes every vector as this one does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READER = ROOT / "tools" / "reader_js"


def find_node() -> str:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (READER / "node_modules").is_dir():
        pytest.skip("the reader's packages are not installed: run `npm ci` in tools/reader_js")
    return node


@pytest.mark.node
def test_the_javascript_reader_takes_every_vector_alike():
    command = [find_node(), READER / "run_vectors.mjs", ROOT / "spec" / "vectors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].endswith(", 0 failed")


@pytest.mark.node
def test_the_javascript_reader_reads_what_the_library_writes(small_folder, small_tensors):
    import dsdformat

    command = [find_node(), READER / "dsd_read.mjs", small_folder, "--verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    with dsdformat.open(small_folder) as checkpoint:
        for entry in checkpoint:
            assert entry.content_digest() in done.stdout
        assert checkpoint.root in done.stdout
        assert checkpoint.content_digest() in done.stdout
