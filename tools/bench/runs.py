"""The order of things: fixtures first, then all contenders of a case in turn, each in a process.

Repetitions are interleaved: every contender once, then every contender again in another order,
so that what changes on the machine meanwhile hits them alike.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.case import Case, Contender
from bench.child import Job
from bench.rows import Row

__all__ = ["Run"]

CHILD_SECONDS = 900
TOOLS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Run:
    """How cases are run.

    Attributes:
        folder: Empty, on the file system to measure; fixtures are kept there from case to case.
        size: Scale of the states.
        repetitions: Of each contender.
        realtime: Whether children run before all ordinary processes.
        tell: Called with a line for each repetition that ends.
    """

    folder: Path
    size: float
    repetitions: int
    realtime: bool
    tell: Callable[[str], None]

    def rows(self, case: Case, contenders: Sequence[Contender]) -> Iterator[Row]:
        """Run some contenders of a case; yield a row for each repetition."""
        ready = []
        for contender in contenders:
            row = self._prepare(case, contender)
            if row is None:
                ready.append(contender)
            else:
                self.tell(line_of(row))
                yield row
        for repetition in range(self.repetitions):
            order = random.Random(repetition).sample(ready, len(ready))
            for contender in order:
                row = self._measure(case, contender)
                self.tell(line_of(row))
                yield replace(row, repetition=repetition)

    def _prepare(self, case: Case, contender: Contender) -> Row | None:
        """Write a fixture that is not there yet; return a row if the contender is left out."""
        row = Row(case.name, contender.name)
        missing = contender.missing()
        if missing:
            return replace(row, skipped=f"{', '.join(missing)} is not installed")
        if contender.prepare is None or self._fixture(contender).exists():
            return None
        error, left = self._start(case, contender, prepares=True)
        return replace(row, error=f"no fixture: {error}") if error else left

    def _measure(self, case: Case, contender: Contender) -> Row:
        error, row = self._start(case, contender, prepares=False)
        return row or Row(case.name, contender.name, error=error or "no result")

    def _start(self, case: Case, contender: Contender, *, prepares: bool) -> tuple[str, Row | None]:
        """Run one child; return what went wrong, or its row."""
        folder, result = self.folder / "child", self.folder / "row.json"
        result.unlink(missing_ok=True)
        folder.mkdir()
        job = Job(
            case=case.name,
            contender=contender.name,
            size=self.size,
            folder=str(folder),
            fixture=str(self._fixture(contender)),
            prepares=prepares,
            realtime=self.realtime and not prepares,
            result=str(result),
        )
        try:
            error = run_child(job)
        finally:
            shutil.rmtree(folder)
            os.sync()  # what this child wrote is not the next one's burden
        if error or (prepares and not result.exists()):
            return error, None
        return "", Row(**json.loads(result.read_text(encoding="utf-8")))

    def _fixture(self, contender: Contender) -> Path:
        return self.folder / "fixtures" / (contender.fixture or contender.name) / "checkpoint"


def run_child(job: Job) -> str:
    """Run a job in a fresh interpreter; return the end of its output if it failed."""
    places = [str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, places))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bench.child", job.to_json()],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {CHILD_SECONDS} s"
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return f"exit code {done.returncode}: {lines[-1] if lines else 'no output'}"


def line_of(row: Row) -> str:
    """Tell of a row in one line."""
    head = f"{row.case} {row.contender}: "
    if row.skipped:
        return f"{head}skipped: {row.skipped}"
    if row.error:
        return f"{head}FAILED: {row.error}"
    peak = row.peak_nbytes / (1 << 20)
    return f"{head}{row.total_s:.4f} s, peak {peak:.0f} MiB, others {row.other:.0%}"
