"""The process of one repetition: takes a job as JSON in its only argument, leaves a row in a file.

Started by `runs.py`; nothing else imports torch or a contender.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.case import Scene, UnmeasurableError
from bench.cases import find_case
from bench.measure import measure, prepare
from bench.ranks import run_ranks
from bench.rows import Row
from bench.team import team_of

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """What a child does.

    Attributes:
        folder: Empty, and the child's own.
        fixture: Where the contender's fixture is, or is to be.
        prepares: Whether to write the fixture, rather than measure.
        realtime: Whether to run before all ordinary processes.
        result: File for the row; of a fixture there is one only if it cannot be written.
    """

    case: str
    contender: str
    size: float
    folder: str
    fixture: str
    prepares: bool
    realtime: bool
    result: str

    def to_json(self) -> str:
        """Return the job as an argument."""
        return json.dumps(asdict(self))


def main() -> None:
    """Do the job."""
    warnings.simplefilter("ignore")
    job = Job(**json.loads(sys.argv[1]))
    contender = find_case(job.case).contender(job.contender)
    scene = Scene(job.size, Path(job.folder), Path(job.fixture))
    if job.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    count = contender.saved_by if job.prepares else contender.ranks
    work = partial(do, job, scene)
    if count == 1:
        work()
    else:
        run_ranks(count, Path(job.folder) / "group", work)


def do(job: Job, scene: Scene) -> None:
    """Do the job, on each rank if there are some."""
    case = find_case(job.case)
    contender = case.contender(job.contender)
    if job.prepares:
        try:
            prepare(contender, scene)
        except UnmeasurableError as error:
            leave(Row(case.name, contender.name, skipped=str(error)), job)
        return
    row = measure(case, contender, scene)
    if team_of(contender.ranks).is_first:
        leave(row, job)


def leave(row: Row, job: Job) -> None:
    """Leave a row for the parent."""
    Path(job.result).write_text(json.dumps(row.to_dict()), encoding="utf-8")


if __name__ == "__main__":
    main()
