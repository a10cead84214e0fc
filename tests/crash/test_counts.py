"""What the README says of how many steps these tests stop at."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.crash.saves import SAVES
from tests.crash.test_failing_steps import CODES, steps_of
from tests.crash.test_power_cuts import cuts


def test_saves_are_stopped_at_as_many_steps_as_the_readme_says(roots):
    pytest.importorskip("torch", reason="some kinds of saves need torch")
    steps = [step for save in SAVES for step in steps_of(save, roots(save))]
    writes = [step for step in steps if step.kind == "write"]
    # Killed; failing with each code, for good, and by an interrupt; without power; and a disk that
    # is full in a write, or takes half of it.
    ends = len(steps) * (1 + len(CODES) + 2 + len(cuts())) + 2 * len(writes)
    text = (ROOT / "README.md").read_text()
    said = re.search(r"Saves of (\d+) kinds, .* (\d+) steps: .* these ([\d,]+) ends", text)
    assert said is not None
    assert int(said[1]) == len(SAVES)
    assert int(said[2]) <= len(steps)
    assert int(said[3].replace(",", "")) <= ends
    print(f"{len(SAVES)} kinds of saves, {len(steps)} steps, {ends} ends")
