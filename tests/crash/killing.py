"""Kill saves at each of their steps: `python -m tests.crash.killing`, with `SAVE FOLDER` as lines.

For each step a child is forked, saves in a folder of its own, and ends itself with `os._exit`, so
that no handler, no `finally` and no lock survives, and what it wrote stays as the system has it.
Of a write it does the first half, and ends at the next step. Prints how many children died, and
how the one after them ended.
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


def kill_everywhere(save: Save, folder: Path) -> tuple[int, int]:
    """Kill a save at each step; return how many died, and how the one ended that did not."""
    for count in itertools.count():
        root = folder / f"{count + 1:03}"
        save.prepare(root)
        status = kill(save, root, count + 1)
        if status != KILLED:
            return count, status
    raise AssertionError("a save has no end")


def main() -> None:
    os.fsync = lambda fd: None  # a killed process loses nothing of what the system has
    for line in sys.stdin:
        name, folder = line.rstrip("\n").split(" ", 1)
        (save,) = [one for one in SAVES if one.name == name]
        print(*kill_everywhere(save, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
