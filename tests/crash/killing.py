"""Kill a save at each of its steps: `python -m tests.crash.killing SAVE FOLDER`.

For each step a child is forked, saves in a folder of its own, and ends itself with `os._exit`, so
that no handler, no `finally` and no lock survives, and what it wrote stays as the system has it.
Of a write it does the first half, and ends at the next step. Prints how many children died.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from tests.crash.saves import SAVES, Save
from tests.crash.steps import Step, watched

KILLED, FAILED = 9, 3


def kill(save: Save, root: Path, number: int) -> int:
    """Save in a child that dies at one of its steps; return how it ended."""

    def before(count: int, step: Step) -> int | None:
        if count == number and step.kind == "write":
            return len(step.data) // 2
        if count >= number:
            os._exit(KILLED)
        return None

    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            with watched(root, before, can_exchange=save.can_exchange):
                save.save(root)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(name: str, folder: Path) -> None:
    (save,) = [one for one in SAVES if one.name == name]
    os.fsync = lambda fd: None  # a killed process loses nothing of what the system has
    for count, number in enumerate(itertools.count(1, save.every)):
        root = folder / f"{number:03}"
        save.prepare(root)
        status = kill(save, root, number)
        if status != KILLED:
            print(count, status)
            return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
