"""A writer that is killed at any step of a save: what a reader sees, and what the next save does.

Spec section 15 says what must be there after. Nothing that a process did is lost when it dies:
what is lost when the machine does is in `test_power_cuts.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dsdformat
from dsdformat import FormatError
from tests.conftest import ROOT
from tests.crash.saves import SAVES, Save, faults_after


def kill_everywhere(save: Save, folder: Path) -> list[Path]:
    """Kill a save at each step; return the roots of those that died, in the order of steps."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.killing", save.name, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    count, status = map(int, done.stdout.split())
    roots = sorted(folder.iterdir())
    assert (status, len(roots)) == (0, count + 1), done.stderr
    assert save.word_of(roots.pop()) == "new"
    return roots


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_killed_save_leaves_the_old_or_the_new_checkpoint_and_the_next_one_cleans_up(
    tmp_path, save
):
    roots = kill_everywhere(save, tmp_path)
    assert len(roots) > 20 // save.every
    faults = {root.name: faults_after(root, save) for root in roots}
    assert {step: found for step, found in faults.items() if found} == {}


def test_a_save_that_never_ended_is_no_checkpoint_and_the_error_says_why(tmp_path):
    save = SAVES[0]
    root = kill_everywhere(save, tmp_path)[10]
    with pytest.raises(FormatError, match="not been completed") as error:
        dsdformat.open(root / save.path)
    assert error.value.code == "no_manifest"
