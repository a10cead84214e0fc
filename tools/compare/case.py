"""What is compared: a case, the two libraries it asks, and how a scenario says what is wrong.

A case is one scenario, a function of a library and a scene, that is run with each of two
libraries. It returns if what came out is right, and raises `WrongError` if not; whatever else is
raised is an outcome too. To add a case, decorate its scenario in a module of `cases/`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "HERE",
    "Case",
    "Library",
    "Pair",
    "Scenario",
    "Scene",
    "Subject",
    "WrongError",
    "expect",
    "expect_equal",
    "expect_refusal",
    "refusal_of",
]

HERE = "found here"  # the source of what no public issue reports


class WrongError(Exception):
    """Say what is wrong with a result."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a scenario plays.

    Attributes:
        folder: Shared by the ranks, and by the runs of a case that has several; empty at first.
        rank: Of this process.
    """

    folder: Path
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Library:
    """Who is asked: a module whose functions scenarios call.

    Attributes:
        label: What tables call it.
        module: Its name, imported where scenarios run.
        needs: Another module, without which it is left out.
    """

    label: str
    module: str
    needs: str = "torch"

    def is_installed(self) -> bool:
        """Whether what it needs can be imported."""
        return importlib.util.find_spec(self.needs) is not None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two libraries that offer the same functions: a peer, and dsdformat."""

    peer: Library
    ours: Library

    @property
    def libraries(self) -> tuple[Library, Library]:
        """Both, the peer first."""
        return self.peer, self.ours


Scenario = Callable[[Any, Scene], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario.

    Attributes:
        name: Of the scenario's function, with hyphens.
        wanted: What is right, in a few words.
        source: Who reports that it is not: `owner/name#number`, or `HERE`.
        pair: Who is asked.
        scenario: Called on each rank.
        ranks: How many processes, in one group if they are several.
        times: How often the scenario is run, each time in fresh processes.
    """

    name: str
    wanted: str
    source: str
    pair: Pair
    scenario: Scenario
    ranks: int = 1
    times: int = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """Cases of one kind, in the order in which they are written."""

    title: str
    cases: list[Case] = field(default_factory=list)

    def case(
        self, wanted: str, *, source: str, pair: Pair, ranks: int = 1, times: int = 1
    ) -> Callable[[Scenario], Scenario]:
        """Make the function below a case of this subject."""

        def add(scenario: Scenario) -> Scenario:
            name = scenario.__name__.replace("_", "-")
            self.cases.append(Case(name, wanted, source, pair, scenario, ranks, times))
            return scenario

        return add


# What scenarios say


def expect(holds: bool, wrong: str) -> None:
    """Go on if something holds, else say what is wrong."""
    if not holds:
        raise WrongError(wrong)


def expect_equal(found: object, wanted: object, what: str) -> None:
    """Go on if a value is the right one, else show both."""
    if found != wanted:
        raise WrongError(f"{what} is {found}, not {wanted}")


def expect_refusal(call: Callable[[], object], *words: str, otherwise: str) -> None:
    """Go on if a call raises an error that has all these words; another one is raised on.

    Args:
        call: What is to be refused.
        words: What a person has to be told.
        otherwise: What is wrong if it is not refused.
    """
    error = refusal_of(call)
    if error is None:
        raise WrongError(otherwise)
    if not all(word in str(error) for word in words):
        raise error


def refusal_of(call: Callable[[], object]) -> BaseException | None:
    """Return what a call raises; None if it returns.

    Of all that can be raised: DCP's own error is not an Exception.
    """
    try:
        call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error
    return None
