"""A machine that loses its power at any step of a save: what a reader sees when it is back.

`power.py` says what a disk keeps. Spec R-15.1 says in which order a writer flushes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from dsdformat import DsdError
from tests.crash.power import Cut, Disk
from tests.crash.saves import SAVES, Save, contents, faults_after, sum_of
from tests.crash.steps import Step, die, watched

Roots = Callable[[Save], Path]


def cuts() -> list[Cut]:
    """Ways in which what was not flushed is there or not, the usual ones first."""
    plain = [("lost", "kept"), ("lost", "lost"), ("kept", "lost")]
    return [*(Cut(*one) for one in plain), *(Cut("some", "some", seed) for seed in range(3))]


def steps_of(save: Save, root: Path) -> list[Step]:
    with watched(root, can_exchange=save.can_exchange) as steps:
        save.save(root)
    return steps.done


def test_the_steps_that_are_seen_make_the_checkpoint(roots, folder):
    """Nothing reaches the disk by a call that is not seen here."""
    for save in SAVES:
        root, again = roots(save), folder / f"again-{save}"
        disk = Disk(root)
        disk.run(steps_of(save, root)).restore(again, Cut("kept", "kept"))
        assert contents(again) == contents(root)


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_power_cut_leaves_the_old_or_the_new_checkpoint_and_the_next_save_cleans_up(
    save, roots, folder
):
    wrong, seen = {}, set()
    disk = Disk(roots(save))
    steps = steps_of(save, roots(save))
    assert len(steps) > 15
    for number in disk.run_each(steps):
        committed = number == len(steps)
        for variant, cut in enumerate(cuts()):
            left = folder / f"{number}-{variant}"
            disk.restore(left, cut)
            end = sum_of(left), committed
            found = [] if end in seen else faults_after(left, save, committed=committed)
            seen.add(end)
            if found:
                wrong[f"{number} {steps[:number][-1:]} {cut}"] = found
    assert wrong == {}


@pytest.mark.parametrize(
    "name", ["new-in-new-folders", "replace", "replace-by-renames", "file", "replace-file"]
)
def test_a_power_cut_in_a_save_after_one_that_was_killed_leaves_a_checkpoint(name, roots, folder):
    """The next save takes nothing for durable that the killed one had not flushed yet."""
    (save,) = [one for one in SAVES if one.name == name]
    wrong, copy = {}, roots(save)
    allowed = {"old" if save.replaces else None, "new", "next"}
    for killed in range(1, len(steps_of(save, roots(save))) + 2):
        root = roots(save)
        killed_save = functools.partial(save.save, root)
        first, _ = die(root, killed, killed_save, can_exchange=save.can_exchange)
        with watched(root, can_exchange=save.can_exchange) as second:
            save.save_next(root)
        begun = [step.kind for step in second.done].index("write")
        disk = Disk(copy).run(first)
        for number in disk.run_each(second.done):
            if 0 < number < begun:
                continue
            for variant, cut in enumerate(cuts()):
                left = folder / f"{killed}-{number}-{variant}"
                disk.restore(left, cut)
                found = words_of(save, left)
                if found not in (allowed if number < len(second.done) else {"next"}):
                    wrong[f"{killed} {first[-1:]} {number} {second.done[:number][-1:]} {cut}"] = (
                        found
                    )
    assert wrong == {}


def words_of(save: Save, root: Path) -> str | None:
    """What is there says, or what is wrong with it."""
    try:
        return save.word_of(root)
    except (DsdError, AssertionError) as error:
        return str(error)
