"""Run every block of the README, in order, and compare what it prints with what it says.

Python blocks share one namespace. In console blocks, lines after `$` are commands; `…` stands for
anything in a line, and a line that is only `…` for any lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETUP = ("pip install", "tools/demo", "tools/test")


def test_every_block_of_the_readme_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    pytest.importorskip("cryptography", reason="the README signs a checkpoint")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "100")
    blocks = BLOCK.findall(README.read_text("utf-8"))
    assert len(blocks) >= 5
    namespace: dict[str, object] = {}
    for kind, text in blocks:
        if kind == "python":
            run_python(text, namespace)
        elif not any(word in text for word in SETUP):
            run_console(text)


def run_python(text: str, namespace: dict[str, object]) -> None:
    """Run a block; `# prints:` comments at its end say what it prints."""
    code, _, expected = text.partition("# prints:\n")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), namespace)
    wanted = [line.removeprefix("#").removeprefix(" ") for line in expected.splitlines()]
    assert_alike(printed.getvalue().splitlines(), wanted)


def run_console(text: str) -> None:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        done = subprocess.run(
            command,
            shell=True,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        assert_alike(done.stdout.splitlines(), expected.splitlines(), command)


def assert_alike(actual: list[str], expected: list[str], command: str = "") -> None:
    actual = [line.rstrip() for line in actual]
    expected = [line.rstrip() for line in expected]
    pattern = "\n".join(
        "(?:.*\n)*.*" if line == "…" else re.escape(line).replace("…", ".*") for line in expected
    ).strip()
    text = "\n".join(actual).strip()
    if not re.fullmatch(pattern, text):
        pytest.fail(f"{command}\nprinted:\n{text}\n\nthe README says:\n" + "\n".join(expected))
