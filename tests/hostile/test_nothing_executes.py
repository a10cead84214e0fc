"""Nothing that is in a file is executed, imported or looked up by name, whatever reads it.

`audited.py` runs all of it under an audit hook of Python. What the sources of the package may
name is checked by `tools/check_layers.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("torch", reason="what torch saves is among what is read")

OPERATIONS = [
    *("use_core", "use_numpy", "use_torch", "use_signed", "use_convert", "use_command"),
]
PROOFS = {
    "pickle": "pickle.find_class",
    "torch": "pickle.find_class",
    "system": "os.system",
    "program": "subprocess.Popen",
    "socket": "socket.__new__",
    "import": "marshal.loads",
    "eval": "compile",
    "exec": "compile",
}


def audited(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.hostile.audited", str(folder), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_importing_saving_loading_verifying_and_converting_execute_nothing(tmp_path):
    done = audited(tmp_path)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("imported ")
    assert int(first.split()[1]) > 150
    assert rest == OPERATIONS
    assert not (tmp_path / "canary").exists()


def test_the_hook_sees_what_would_execute(tmp_path):
    done = audited(tmp_path, "prove")
    assert done.returncode == 0, done.stderr
    assert dict(line.split() for line in done.stdout.splitlines()) == PROOFS
    assert not (tmp_path / "canary").exists()
