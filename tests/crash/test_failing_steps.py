"""A save one step of which fails: the error, what is there after, and what the next save does."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dsdformat.errors import StorageError
from tests.crash.saves import SAVES, Save, faults_after, names_in
from tests.crash.steps import Before, Step, watched

CODES = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EINTR]


def fail(code: int, number: int, *, then_all: bool = False) -> Before:
    """Let one step fail, or all from one on."""

    def before(count: int, step: Step) -> int | None:
        if count == number or (then_all and count > number):
            raise OSError(code, os.strerror(code))
        return None

    return before


def steps_of(save: Save, root: Path) -> list[Step]:
    with watched(root, can_exchange=save.can_exchange) as steps:
        save.save(root)
    assert steps.descriptors() == []
    return steps.begun


def chosen(save: Save, steps: list[Step], turn: int) -> list[tuple[int, Step]]:
    """Number the steps; of some saves every few alone, others in each turn."""
    return list(enumerate(steps, 1))[turn % save.every :: save.every]


def run(save: Save, root: Path, before: Before) -> BaseException | None:
    """Save; return the exception that came of it."""
    try:
        with watched(root, before, can_exchange=save.can_exchange):
            save.save(root)
    except BaseException as error:
        return error
    return None


@pytest.fixture
def leaks(count_descriptors: Callable[[], int]) -> Callable[[], list[str]]:
    """`leaks()`: what has become more since it was last asked."""
    gc.collect()  # what other tests have left
    last = [count_descriptors(), threading.active_count()]

    def leaks() -> list[str]:
        now = [count_descriptors(), threading.active_count()]
        more, last[:] = [one - other for one, other in zip(now, last, strict=True)], now
        return [f"leaked {more[0]} descriptors, {more[1]} threads"] if max(more) > 0 else []

    return leaks


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_step_that_fails_is_a_storage_error_or_of_no_matter(save, code, roots, leaks):
    wrong = {}
    for number, step in chosen(save, steps_of(save, roots(save)), CODES.index(code)):
        root = roots(save)
        error = run(save, root, fail(code, number))
        found = leaks()
        if error is not None and getattr(error, "errno", None) != code:
            found.append(repr(error))
        if error is not None and not isinstance(error, StorageError):
            found.append(f"not a StorageError: {error!r}")
        if error is None and save.word_of(root) != "new":
            found.append("no error, and no new checkpoint")
        left = [name for name in names_in((root / save.path).parent) if name.startswith(".")]
        # A failed clean-up leaves something, and so does a commit of which it is unknown
        # whether it is durable: what was replaced is kept.
        if left and error is not None and save.word_of(root) != "new":
            found.append(f"left {left}")
        found += faults_after(root, save, committed=error is None)
        if found:
            wrong[f"{number} {step.kind} {step.path}"] = found
    assert wrong == {}


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_medium_that_is_gone_for_good_gives_the_first_error(save, roots, leaks):
    wrong = {}
    for number, step in chosen(save, steps_of(save, roots(save)), 4):
        root = roots(save)
        error = run(save, root, fail(errno.EIO, number, then_all=True))
        found = leaks()
        if not (isinstance(error, StorageError) and error.errno == errno.EIO) and error is not None:
            found.append(repr(error))
        found += faults_after(root, save, committed=error is None)
        if found:
            wrong[f"{number} {step.kind} {step.path}"] = found
    assert wrong == {}


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_an_interrupt_at_any_step_leaves_the_old_or_the_new_checkpoint(save, roots, leaks):
    wrong = {}
    for number, step in chosen(save, steps_of(save, roots(save)), 5):
        root = roots(save)

        def interrupt(count: int, step: Step, number: int = number) -> None:
            if count == number:
                raise KeyboardInterrupt

        error = run(save, root, interrupt)
        found = leaks()
        # While a folder is removed, Python itself loses one that comes at a close.
        if not isinstance(error, KeyboardInterrupt) and step.kind != "close":
            found.append(repr(error))
        found += faults_after(root, save)
        if found:
            wrong[f"{number} {step.kind} {step.path}"] = found
    assert wrong == {}


@pytest.mark.parametrize("taken", [1, 999, 4097])
@pytest.mark.parametrize("save", SAVES, ids=str)
def test_writes_of_which_the_system_takes_a_part_are_continued(save, taken, roots):
    root = roots(save)

    def short(count: int, step: Step) -> int | None:
        return min(taken, len(step.data)) if step.kind == "write" and count % 3 else None

    assert run(save, root, short) is None
    assert faults_after(root, save, committed=True) == []


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_write_of_which_the_system_takes_nothing_is_an_error(save, roots):
    root = roots(save)
    error = run(save, root, lambda count, step: 0 if step.kind == "write" else None)
    assert isinstance(error, StorageError)
    assert "took no bytes" in str(error)
    assert save.word_of(root) == ("old" if save.replaces else None)
    assert faults_after(root, save) == []
