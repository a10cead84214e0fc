"""What is measured: a case, its contenders, and the single calls that are timed.

A case asks one question, such as "how long until a model is safely on the disk". Contenders
answer it in their own ways; one of them, the baseline, is the plain system call for the same
bytes. A trial is one contender's call, set up so that nothing but the call itself is left to do.
To add a case, write a function that returns a `Trial`, and list the `Case` in `cases/__init__.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Case", "Contender", "Scene", "Trial", "UnmeasurableError"]


class UnmeasurableError(Exception):
    """This machine or file system cannot answer the question; the row says why."""


def do_nothing() -> None:
    """Stand where a trial has nothing to do."""


def no_columns() -> Mapping[str, float]:
    """Add no columns."""
    return {}


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a trial plays.

    Attributes:
        size: Scale of the case's state; 1.0 is the full size.
        folder: Empty, and the trial's own.
        fixture: What the contender's `prepare` wrote, in another process; absent if it has none.
    """

    size: float
    folder: Path
    fixture: Path


@dataclass(frozen=True, slots=True)
class Trial:
    """One call, ready to be timed.

    Attributes:
        call: What is timed.
        nbytes: How much data it moves.
        made_nbytes: How much of its result it has to allocate; this is no overhead.
        takes_nbytes: New memory, page cache included, that the call takes; that much is made ready
            before it. 1.25 times `nbytes` if None.
        settle: Last preparations, as dropping the page cache; right before the call. On several
            ranks, the first does it for all.
        flush: Makes the result durable, where the call does not; timed with the call. None if
            nothing is to be durable, or the call sees to it.
        check: Raises if the result is wrong; after the call.
        columns: What else the table shows; after the call.
    """

    call: Callable[[], object]
    nbytes: int
    made_nbytes: int = 0
    takes_nbytes: int | None = None
    settle: Callable[[], None] = do_nothing
    flush: Callable[[], None] | None = None
    check: Callable[[], None] = do_nothing
    columns: Callable[[], Mapping[str, float]] = no_columns


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to answer the question of a case.

    Attributes:
        arrange: Sets up a trial; not timed.
        needs: Modules without which it is left out.
        fixture: Name of what `prepare` writes; contenders may share one, across cases too.
        prepare: Writes the fixture at `scene.fixture`; runs once, in a process of its own.
        ranks: How many processes make the call together, each with its part of the state; they
            are a process group of torch.
        saved_by: How many write the fixture.
    """

    name: str
    arrange: Callable[[Scene], Trial]
    needs: tuple[str, ...] = ()
    fixture: str = ""
    prepare: Callable[[Scene], None] | None = None
    ranks: int = 1
    saved_by: int = 1

    def missing(self) -> list[str]:
        """Name the modules that are needed and not installed."""
        return [module for module in self.needs if not is_installed(module)]


@dataclass(frozen=True, slots=True)
class Case:
    """A question, and who answers it.

    Attributes:
        baseline: The contender whose time the ratios are over.
        note: What a reader of the table must know, in a sentence or two.
    """

    name: str
    title: str
    contenders: tuple[Contender, ...]
    baseline: str = "raw"
    note: str = field(default="", kw_only=True)

    def contender(self, name: str) -> Contender:
        """Return the contender of a name."""
        return next(one for one in self.contenders if one.name == name)


def is_installed(module: str) -> bool:
    """Whether a module can be imported, without importing more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
