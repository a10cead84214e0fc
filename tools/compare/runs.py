"""Runs cases in fresh processes, and says what came out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compare.case import Case, Library
from compare.child import POLL_S, Job

__all__ = ["RIGHT", "Row", "run_all", "run_case"]

RIGHT = "right"
LIMIT_S = 30.0  # for a scenario, from when all its ranks are ready
START_LIMIT_S = 180.0  # for importing torch, on a machine that does other work too
TOOLS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a case: one text for each library."""

    case: Case
    peer: str
    ours: str


def run_all(
    cases: Sequence[Case], *, limit_s: float, jobs: int, tell: Callable[[Row], None]
) -> list[Row]:
    """Run cases, some at a time; return rows in their order."""

    def run(case: Case) -> Row:
        row = run_case(case, limit_s=limit_s)
        tell(row)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, cases))


def run_case(case: Case, *, limit_s: float = LIMIT_S) -> Row:
    """Run a case with both libraries."""
    peer, ours = (outcome_of(case, library, limit_s) for library in case.pair.libraries)
    return Row(case, peer, ours)


def outcome_of(case: Case, library: Library, limit_s: float) -> str:
    """Run a case with one library, as often as it wants, until it does not come out right."""
    if not library.is_installed():
        return f"{library.needs} is not installed"
    outcome = RIGHT
    with tempfile.TemporaryDirectory(prefix="dsd-compare-") as place:
        folder = Path(place) / "scene"
        folder.mkdir()
        for index in range(case.times):
            desk = Path(place) / f"desk{index}"
            desk.mkdir()
            outcome = join(_run(jobs_of(case, library, folder, desk), desk, limit_s))
            if outcome != RIGHT:
                break
    return outcome


def jobs_of(case: Case, library: Library, folder: Path, desk: Path) -> list[Job]:
    """Return what each rank of a case does."""
    return [
        Job(
            module=case.scenario.__module__,
            function=case.scenario.__name__,
            library=library.module,
            rank=rank,
            ranks=case.ranks,
            folder=str(folder),
            desk=str(desk),
        )
        for rank in range(case.ranks)
    ]


def join(outcomes: Sequence[str]) -> str:
    """Say what ranks say, in one text; what all say once, and of others what is not right."""
    if len(set(outcomes)) == 1:
        return outcomes[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text != RIGHT)


def _run(jobs: Sequence[Job], desk: Path, limit_s: float) -> list[str]:
    """Start a process for each job, wait for them, and return what each came to."""
    processes = [_start(job, desk) for job in jobs]
    try:
        _wait(processes, desk, limit_s)
        return [_said(process, desk, rank) for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(job: Job, desk: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (desk / f"{job.rank}.words").open("wb") as words:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "compare.child", job.to_json()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], desk: Path, limit_s: float) -> None:
    """Wait until all have ended, or the time is over."""
    deadline = time.monotonic() + START_LIMIT_S
    started = False
    while any(process.poll() is None for process in processes):
        if not started and len(list(desk.glob("*.ready"))) == len(processes):
            started = True
            deadline = time.monotonic() + limit_s
        if time.monotonic() > deadline or _all_that_can(processes, desk):
            return
        time.sleep(POLL_S)


def _all_that_can(processes: Sequence[subprocess.Popen[bytes]], desk: Path) -> bool:
    """Whether each rank has said something or died; those that wait for the dead never end."""
    return all(
        (desk / f"{rank}.json").exists() or process.poll() is not None
        for rank, process in enumerate(processes)
    )


def _said(process: subprocess.Popen[bytes], desk: Path, rank: int) -> str:
    with suppress(FileNotFoundError):
        return str(json.loads((desk / f"{rank}.json").read_text(encoding="utf-8")))
    code = process.poll()
    if code is None:
        return "hangs"
    if code < 0:
        return f"crashes ({signal.Signals(-code).name})"
    words = (desk / f"{rank}.words").read_text(encoding="utf-8", errors="replace").strip()
    return f"exits with {code}: {words.splitlines()[-1] if words else 'no output'}"
