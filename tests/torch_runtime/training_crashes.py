"""What the training scripts beside this file share: their options, their log, and how they die.

A script is a child process of a test. It logs each loss exactly, and at its end prints the root
digest of what it has trained. It dies by SIGKILL, as from a scheduler or the kernel, at the place
that a test names: after a step, or while the save of that step opens a file. The audit hook makes
the second exact, where another thread with a clock would not.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["Run", "read_text"]


class Run:
    """One process of a training, as the command line asks for it."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path, help="of the checkpoint and the log")
        parser.add_argument("--seed", type=int, required=True)
        parser.add_argument("--steps", type=int, required=True)
        parser.add_argument("--save-every", type=int, metavar="STEPS")
        parser.add_argument("--die-at", type=int, metavar="STEP")
        parser.add_argument("--die-opening", metavar="FILE", help="in the save of that step")
        parser.add_argument("--leave-out", default="", metavar="KEY", help="of what is resumed")
        parser.add_argument("--weights", type=Path, help="folder of a trained model")
        options = parser.parse_args()
        self.seed: int = options.seed
        self.steps: int = options.steps
        self.leave_out: str = options.leave_out
        self.weights: Path = options.weights
        self.path: Path = options.folder / "checkpoint"
        self._log: Path = options.folder / "losses"
        self._save_every: int | None = options.save_every
        self._die_at: int | None = options.die_at
        self._die_opening: str | None = options.die_opening
        self._step = 0
        sys.addaudithook(self._audit)

    def settle(self) -> None:
        """Make torch repeat itself, and seed all that gives random numbers."""
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(self.seed)
        np.random.seed(self.seed)
        random.seed(self.seed)

    def saves_at(self, step: int) -> bool:
        self._step = step
        return self._save_every is not None and step % self._save_every == 0

    def log(self, step: int, loss: float) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{step} {loss.hex()}\n")

    def may_die(self, step: int) -> None:
        if step == self._die_at and self._die_opening is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or self._die_opening is None or self._step != self._die_at:
            return
        path = Path(os.fsdecode(args[0])) if isinstance(args[0], str | bytes | Path) else Path()
        if path.name == self._die_opening and ".dsd-partial-" in path.parent.name:
            os.kill(os.getpid(), signal.SIGKILL)


def read_text() -> str:
    """Some English that each Python brings along: what `help()` prints."""
    return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
