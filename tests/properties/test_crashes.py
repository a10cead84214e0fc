"""Saves that succeed, fail and die, in any order: a reader always sees a whole checkpoint.

A death is simulated in this process; `tests/crash` says how, and tries every step of single saves.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import dsdformat
import dsdformat.numpy
from dsdformat.errors import NotACheckpointError, StorageError, UnsupportedValueError
from tests.crash.steps import die


class Saves(RuleBasedStateMachine):
    """Saves to one name; `seen` is the number of the state that a reader must find there."""

    def __init__(self) -> None:
        super().__init__()
        self.parent = Path(tempfile.mkdtemp())
        self.path = self.parent / "checkpoint"
        self.seen: int | None = None
        self.number = 0
        self.clean = True

    def teardown(self) -> None:
        shutil.rmtree(self.parent)

    def state(self) -> dict[str, Any]:
        self.number += 1
        weights = np.full(1000, self.number)
        return {"model": {"w": weights}, "optimizer": {"m": weights * 2}, "number": self.number}

    def save(self, state: Any, **options: Any) -> None:
        dsdformat.numpy.save(self.path, state, threads=1, **options)

    def found(self) -> int | None:
        try:
            state = dsdformat.numpy.load(self.path, threads=1)
        except NotACheckpointError:
            return None
        number = state["number"]
        assert (state["model"]["w"] == number).all()
        assert (state["optimizer"]["m"] == 2 * number).all()
        assert dsdformat.verify(self.path, threads=1).unlisted == ()
        return int(number)

    @rule()
    def replace(self) -> None:
        self.save(self.state(), overwrite=True)
        self.seen, self.clean = self.number, True

    @rule()
    def save_without_replacing(self) -> None:
        if self.seen is None:
            self.save(self.state())
            self.seen = self.number
        else:
            with pytest.raises(StorageError, match="overwrite=True"):
                self.save(self.state())
        # What died before is cleaned up by the next writer, whatever comes of it.
        self.clean = True

    @rule()
    def save_what_cannot_be_stored(self) -> None:
        with pytest.raises(UnsupportedValueError):
            self.save({**self.state(), "zz": object()}, overwrite=True)
        self.clean = True

    @rule(number=st.integers(1, 60), can_exchange=st.booleans())
    def die(self, number: int, can_exchange: bool) -> None:
        state = self.state()
        _, died = die(
            self.parent,
            number,
            lambda: self.save(state, overwrite=True),
            can_exchange=can_exchange,
        )
        found = self.found()
        assert found in ((self.seen, self.number) if died else (self.number,))
        self.seen, self.clean = found, not died

    @precondition(lambda self: self.seen is not None)
    @rule()
    def remove(self) -> None:
        for folder in self.parent.iterdir():
            shutil.rmtree(folder)
        self.seen, self.clean = None, True

    @invariant()
    def a_reader_finds_the_last_whole_checkpoint(self) -> None:
        assert self.found() == self.seen

    @invariant()
    def nothing_is_left_beside_it(self) -> None:
        if self.clean:
            names = {path.name for path in self.parent.iterdir()}
            assert names <= {"checkpoint"}


TestSaves = Saves.TestCase
TestSaves.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
