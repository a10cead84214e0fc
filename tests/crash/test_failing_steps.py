"""A save one step of which fails: the error, what is there after, and what the next save does."""

from __future__ import annotations

import errno
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
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


def run(save: Save, root: Path, before: Before) -> BaseException | None:
    """Save; return the exception that came of it."""
    try:
        with watched(root, before, can_exchange=save.can_exchange):
            save.save(root)
    except BaseException as error:
        return error
    return None


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Let the garbage collector pass over what other tests have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def leaks(few_objects: None, count_descriptors: Callable[[], int]) -> Callable[[], list[str]]:
    """`leaks()`: what has become more since it was last asked."""
    gc.collect()
    last = [count_descriptors(), threading.active_count()]

    def leaks() -> list[str]:
        now = [count_descriptors(), threading.active_count()]
        more, last[:] = [one - other for one, other in zip(now, last, strict=True)], now
        return [f"leaked {more[0]} descriptors, {more[1]} threads"] if max(more) > 0 else []

    return leaks


# Says what is wrong with the error of a save, given the step at which it was disturbed.
Judge = Callable[[BaseException | None, Step, Path], list[str]]


@pytest.fixture
def disturb(
    roots: Callable[[Save], Path], leaks: Callable[[], list[str]]
) -> Callable[..., dict[str, list[str]]]:
    """`disturb(save, before, judge)` lets a save go wrong at each step; says what is wrong then."""

    def disturb(
        save: Save, before: Callable[[int], Before], judge: Judge, *kinds: str
    ) -> dict[str, list[str]]:
        wrong = {}
        for number, step in enumerate(steps_of(save, roots(save)), 1):
            if kinds and step.kind not in kinds:
                continue
            root = roots(save)
            error = run(save, root, before(number))
            found = [*leaks(), *judge(error, step, root)]
            found += faults_after(root, save, committed=error is None)
            if found:
                wrong[f"{number} {step.kind} {step.path}"] = found
        return wrong

    return disturb


def is_error(code: int, error: BaseException) -> bool:
    return isinstance(error, StorageError) and error.errno == code


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_step_that_fails_is_a_storage_error_or_of_no_matter(save, code, disturb):
    def judge(error: BaseException | None, step: Step, root: Path) -> list[str]:
        if error is None:
            return [] if save.word_of(root) == "new" else ["no error, and no new checkpoint"]
        found = [] if is_error(code, error) else [repr(error)]
        left = [name for name in names_in((root / save.path).parent) if name.startswith(".")]
        # A failed clean-up leaves something, and so does a commit of which it is unknown
        # whether it is durable: what was replaced is kept.
        if left and save.word_of(root) != "new":
            found.append(f"left {left}")
        return found

    assert disturb(save, functools.partial(fail, code), judge) == {}


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_medium_that_is_gone_for_good_gives_the_first_error(save, disturb):
    def judge(error: BaseException | None, step: Step, root: Path) -> list[str]:
        return [] if error is None or is_error(errno.EIO, error) else [repr(error)]

    assert disturb(save, functools.partial(fail, errno.EIO, then_all=True), judge) == {}


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_an_interrupt_at_any_step_leaves_the_old_or_the_new_checkpoint(save, disturb):
    def interrupt(number: int) -> Before:
        def before(count: int, step: Step) -> None:
            if count == number:
                raise KeyboardInterrupt

        return before

    def judge(error: BaseException | None, step: Step, root: Path) -> list[str]:
        # While a folder is removed, Python itself loses one that comes at a close.
        return [] if isinstance(error, KeyboardInterrupt) or step.kind == "close" else [repr(error)]

    assert disturb(save, interrupt, judge) == {}


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_disk_that_fills_up_in_any_write_leaves_what_was_there(save, disturb):
    def fill(number: int) -> Before:
        """Take half of a write, and nothing after it."""

        def before(count: int, step: Step) -> int | None:
            taken = len(step.data) // 2 if count == number else 0
            if count >= number and step.kind == "write" and not taken:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return taken or None

        return before

    def judge(error: BaseException | None, step: Step, root: Path) -> list[str]:
        found = [] if error is not None and is_error(errno.ENOSPC, error) else [repr(error)]
        left = names_in((root / save.path).parent)
        return found if left == ["c"] * save.replaces else [*found, f"left {left}"]

    assert disturb(save, fill, judge, "write") == {}


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_any_write_of_which_the_system_takes_half_is_continued(save, disturb):
    def halve(number: int) -> Before:
        return lambda count, step: (len(step.data) + 1) // 2 if count == number else None

    def judge(error: BaseException | None, step: Step, root: Path) -> list[str]:
        return [] if error is None else [repr(error)]

    assert disturb(save, halve, judge, "write") == {}


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
