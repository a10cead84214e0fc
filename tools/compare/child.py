"""The process of one rank: takes a job as JSON in its only argument, leaves an outcome in a file.

It stays until all ranks have left theirs, so that nobody is told by a closed connection what a
library should have told.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from compare.case import Scene, WrongError

__all__ = ["Job"]

GROUP_TIMEOUT = timedelta(minutes=10)  # longer than any limit here: what hangs is seen to hang
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """What a child does.

    Attributes:
        module, function: The scenario.
        library: A module, which it asks.
        rank, ranks: Of this process; several are in one group.
        folder: The scene's.
        desk: Where the ranks of one run leave what they have to say.
    """

    module: str
    function: str
    library: str
    rank: int
    ranks: int
    folder: str
    desk: str

    def to_json(self) -> str:
        """Return the job as an argument."""
        return json.dumps(asdict(self))


def main() -> None:
    """Do the job."""
    warnings.simplefilter("ignore")
    job = Job(**json.loads(sys.argv[1]))
    scenario = getattr(importlib.import_module(job.module), job.function)
    library = importlib.import_module(job.library)
    desk = Path(job.desk)
    if job.ranks > 1:
        join_group(job.rank, job.ranks, desk / "store")
    (desk / f"{job.rank}.ready").touch()
    try:
        scenario(library, Scene(Path(job.folder), job.rank))
        outcome = "right"
    except WrongError as wrong:
        outcome = f"wrong: {wrong}"
    except BaseException as error:
        outcome = told(error)
    leave(desk / f"{job.rank}.json", outcome)
    while len(list(desk.glob("*.json"))) < job.ranks:
        time.sleep(POLL_S)
    sys.stdout.flush()
    os._exit(0)  # threads of a group that others have left are not to be waited for


def told(error: BaseException) -> str:
    """Say what was raised; of DCP's errors, which hold those of all ranks, the first cause."""
    causes = list(getattr(error, "failures", {}).values())
    text = f"{type(error).__name__}: "
    if causes and isinstance(causes[0], tuple):
        return text + told(causes[0][0])
    return f"{text}{error}"


def join_group(rank: int, ranks: int, store: Path) -> None:
    """Make the default process group."""
    from torch import distributed

    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(store), ranks),
        rank=rank,
        world_size=ranks,
        timeout=GROUP_TIMEOUT,
    )


def leave(path: Path, outcome: str) -> None:
    """Write a file that others see only when it is whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(outcome), encoding="utf-8")
    partial.rename(path)


if __name__ == "__main__":
    main()
