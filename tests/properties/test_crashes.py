"""Saves that succeed, fail and die, in any order: a reader always sees a whole checkpoint.

A death is simulated in this process: from some call to the system on, every further one dies too,
so no clean-up runs; then all descriptors are closed, as the system would do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
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
from dsdformat.storage import target

CALLS = ("open", "pwritev", "fsync", "mkdir", "rename")


class DeathError(BaseException):
    """The process was killed here."""


class Mortal:
    """Stands for the modules `os` and `shutil` in `target.py`, and dies at a given call."""

    def __init__(self, calls_to_live: int) -> None:
        self.left = calls_to_live
        self.descriptors: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        return self._counted(call) if name in CALLS else call

    def open(self, *args: Any, **kwargs: Any) -> int:
        fd = self._counted(os.open)(*args, **kwargs)
        self.descriptors.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._live()
        self.descriptors.discard(fd)
        os.close(fd)

    def rmtree(self, path: Path, **options: Any) -> None:
        """Remove a folder file by file; death may come in between."""
        self._live()
        for child in sorted(Path(path).iterdir() if Path(path).is_dir() else ()):
            self._counted(child.unlink)()
        self._counted(shutil.rmtree)(path, **options)

    def bury(self) -> None:
        for fd in self.descriptors:
            os.close(fd)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            self._live()
            return call(*args, **kwargs)

        return counted

    def _live(self) -> None:
        if self.left < 0:
            raise DeathError


@contextlib.contextmanager
def mortal(calls_to_live: int, *, can_exchange: bool) -> Iterator[Mortal]:
    body = Mortal(calls_to_live)
    exchange = body._counted(target._exchange if can_exchange else lambda a, b: False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "os", body)
        patch.setattr(target, "shutil", body)
        patch.setattr(target, "_exchange", exchange)
        try:
            yield body
        finally:
            body.bury()


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

    @rule(calls=st.integers(0, 26), can_exchange=st.booleans())
    def die(self, calls: int, can_exchange: bool) -> None:
        state = self.state()
        with mortal(calls, can_exchange=can_exchange) as body:
            try:
                self.save(state, overwrite=True)
            except DeathError:
                pass
            else:
                assert body.left >= 0
        found = self.found()
        assert found in (self.seen, self.number)
        self.seen, self.clean = found, body.left >= 0

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
