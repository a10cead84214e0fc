"""One repetition: set up, warm up, time one call, check its result."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from bench.case import Case, Contender, Scene, Trial, UnmeasurableError
from bench.memory import Meter, prime, tidy
from bench.rows import Row

__all__ = ["measure", "prepare"]

WARM_UP_SIZE = 0.001
WARM_UP_CALLS = 2


def measure(case: Case, contender: Contender, scene: Scene) -> Row:
    """Time one call of a contender in this process.

    The contender has done the same on a tiny state before, so that late imports and thread pools
    are not part of the figures.
    """
    row = Row(case.name, contender.name)
    try:
        _warm_up(contender, scene.folder / "warm-up")
        trial = contender.arrange(replace(scene, folder=_made(scene.folder / "trial")))
        return _timed(row, trial, scene.folder)
    except UnmeasurableError as error:
        return replace(row, skipped=str(error))


def prepare(contender: Contender, scene: Scene) -> None:
    """Write the fixture of a contender."""
    if contender.prepare is not None:
        _made(scene.fixture.parent)
        contender.prepare(scene)


def _timed(row: Row, trial: Trial, folder: Path) -> Row:
    takes = trial.nbytes * 5 // 4 if trial.takes_nbytes is None else trial.takes_nbytes
    trial.settle()
    tidy()
    prime(folder, takes)
    with Meter() as meter:
        began = time.perf_counter()
        trial.call()
        durable = returned = time.perf_counter()
        if trial.flush is not None:
            trial.flush()
            durable = time.perf_counter()
    trial.check()
    usage = meter.usage
    return replace(
        row,
        nbytes=trial.nbytes,
        call_s=returned - began,
        total_s=durable - began,
        peak_nbytes=max(0, usage.peak_nbytes - trial.made_nbytes),
        anon_nbytes=usage.anon_nbytes,
        file_nbytes=usage.file_nbytes,
        cpu_s=usage.cpu_s,
        other=usage.other,
        columns=dict(trial.columns()),
    )


def _warm_up(contender: Contender, folder: Path) -> None:
    fixture = folder / "fixture" / "checkpoint"
    prepare(contender, Scene(WARM_UP_SIZE, folder, fixture))
    for number in range(WARM_UP_CALLS):
        trial = contender.arrange(Scene(WARM_UP_SIZE, _made(folder / str(number)), fixture))
        trial.call()
        if trial.flush is not None:
            trial.flush()
        trial.check()
    shutil.rmtree(folder)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
