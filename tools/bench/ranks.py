"""Ranks on this machine: processes that are forked from this one, and talk over gloo."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

__all__ = ["run_ranks"]

GROUP_SECONDS = 120
WORK_SECONDS = 900  # then a rank ends, if nobody has ended it
PATIENCE_SECONDS = 5.0  # for ranks when another one has failed: they may wait for it


def run_ranks(count: int, folder: Path, work: Callable[[], object]) -> None:
    """Do some work on each rank of a new group.

    Torch is imported before they are forked, once; each then works on one thread, as those do
    that torchrun starts.

    Args:
        count: Number of ranks.
        folder: Where they find each other.
        work: What each does.

    Raises:
        RuntimeError: a rank failed; its traceback is on stderr.
    """
    import torch
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    alive = {fork(rank, count, folder, work): rank for rank in range(count)}
    failed: list[int] = []
    deadline = float("inf")
    try:
        while alive:
            pid, status = os.waitpid(-1, os.WNOHANG if failed else 0)
            if pid:
                rank = alive.pop(pid)
                if status:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + PATIENCE_SECONDS)
            elif time.monotonic() > deadline:
                break
            else:
                time.sleep(0.01)
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if failed:
        said = [path.read_text() for path in sorted(folder.glob("*.error"))]
        raise RuntimeError("; ".join(said) or f"rank {failed[0]} was killed")


def fork(rank: int, count: int, folder: Path, work: Callable[[], object]) -> int:
    """Start a rank; return its process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        warnings.simplefilter("ignore")
        signal.alarm(WORK_SECONDS)
        join(rank, count, folder)
        work()
        leave()
        code = 0
    except BaseException as error:
        traceback.print_exc()
        said = f"rank {rank}: {type(error).__name__}: {error}".splitlines()
        (folder / f"{rank}.error").write_text(said[0])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def join(rank: int, count: int, folder: Path) -> None:
    """Make the process group."""
    from torch import distributed

    store = distributed.FileStore(str(folder / "store"), count)
    timeout = timedelta(seconds=GROUP_SECONDS)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=timeout
    )


def leave() -> None:
    """End it, when all are here."""
    from torch import distributed

    distributed.barrier()
    distributed.destroy_process_group()
