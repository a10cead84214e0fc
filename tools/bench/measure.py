"""One repetition: set up, warm up, time one call, check its result."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from bench.case import Case, Contender, Scene, Trial, UnmeasurableError
from bench.memory import Meter, prime, tidy
from bench.rows import Row
from bench.team import Team, team_of

__all__ = ["measure", "prepare"]

WARM_UP_SIZE = 0.001
WARM_UP_CALLS = 2


def measure(case: Case, contender: Contender, scene: Scene) -> Row:
    """Time one call of a contender in this process; on several ranks, each makes this call.

    The contender has done the same on a tiny state before, so that late imports and thread pools
    are not part of the figures.
    """
    row = Row(case.name, contender.name)
    team = team_of(contender.ranks)
    try:
        _warm_up(team, contender, scene.folder / "warm-up")
        trial = contender.arrange(replace(scene, folder=_made(scene.folder / "trial")))
        return _timed(team, row, trial, scene.folder)
    except UnmeasurableError as error:
        return replace(row, skipped=str(error))


def prepare(contender: Contender, scene: Scene) -> None:
    """Write the fixture of a contender."""
    if contender.prepare is not None:
        _made(scene.fixture.parent)
        contender.prepare(scene)


def _timed(team: Team, row: Row, trial: Trial, folder: Path) -> Row:
    _settle(team, trial, folder)
    with Meter() as meter:
        team.wait()
        began = time.perf_counter()
        trial.call()
        durable = returned = time.perf_counter()
        if trial.flush is not None:
            trial.flush()
            durable = time.perf_counter()
    team.wait()
    trial.check()
    row = replace(row, nbytes=trial.nbytes, columns=dict(trial.columns()))
    row = team.row(row, (began, returned, durable), meter.usage)
    return replace(row, peak_nbytes=max(0, row.peak_nbytes - trial.made_nbytes))


def _settle(team: Team, trial: Trial, folder: Path) -> None:
    takes = trial.nbytes * 5 // 4 if trial.takes_nbytes is None else trial.takes_nbytes
    team.wait()
    if team.is_first:
        trial.settle()
    tidy()
    team.wait()
    if team.is_first:
        prime(folder, takes)
    team.wait()


def _warm_up(team: Team, contender: Contender, folder: Path) -> None:
    fixture = _made(folder) / "fixture" / "checkpoint"
    prepare(contender, Scene(WARM_UP_SIZE, folder, fixture))
    for number in range(WARM_UP_CALLS):
        team.wait()
        trial = contender.arrange(Scene(WARM_UP_SIZE, _made(folder / str(number)), fixture))
        trial.call()
        if trial.flush is not None:
            trial.flush()
        team.wait()
        trial.check()
    team.wait()
    if team.is_first:
        shutil.rmtree(folder)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
