"""The spec agrees with itself, with its vectors, with the package and with these tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_spec_is_consistent():
    done = run_tool("check_spec.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_vectors_are_what_their_generator_makes():
    done = run_tool("make_vectors.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    ["README.md", "dsd-1.md", "example.md", "rationale.md", "threats.md", "CHANGES.md"],
)
def test_the_spec_has_its_parts(name):
    assert (ROOT / "spec" / name).read_text("utf-8").startswith("# ")
