"""A writer that is killed at any step of a save: what a reader sees, and what the next save does.

Spec section 15 says what must be there after. Nothing that a process did is lost when it dies:
what is lost when the machine does is in `test_power_cuts.py`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dsdformat
from dsdformat import FormatError
from tests.conftest import ROOT
from tests.crash.saves import SAVES, Save, faults_after


@pytest.fixture(scope="module")
def killer() -> Iterator[Callable[[Save, Path], list[Path]]]:
    """`killer(save, folder)` kills a save at each step, and lists the roots in the order of steps.

    All are forked from one process, which has imported what they import.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "tests.crash.killing"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def kill_everywhere(save: Save, folder: Path) -> list[Path]:
            print(save.name, folder, file=process.stdin, flush=True)
            count, status = map(int, process.stdout.readline().split())
            roots = sorted(folder.iterdir())
            assert (status, len(roots)) == (0, count + 1)
            assert save.word_of(roots.pop()) == "new"
            return roots

        yield kill_everywhere


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_killed_save_leaves_the_old_or_the_new_checkpoint_and_the_next_one_cleans_up(
    folder, save, killer
):
    roots = killer(save, folder)
    assert len(roots) > 20
    faults = {root.name: faults_after(root, save) for root in roots}
    assert {step: found for step, found in faults.items() if found} == {}


def test_a_save_that_never_ended_is_no_checkpoint_and_the_error_says_why(folder, killer):
    save = SAVES[0]
    root = killer(save, folder)[10]
    with pytest.raises(FormatError, match="not been completed") as error:
        dsdformat.open(root / save.path)
    assert error.value.code == "no_manifest"
