"""Starts the ranks of a test as processes that talk over gloo, and stops them when they hang.

A server, which has imported torch and done nothing else, forks the ranks: a fork costs a tenth of
what an interpreter costs that has to import torch, and carries no threads of pytest's into them.
Run as a script, this file is that server. A launch runs one or several calls, one after another on
all of its ranks; it ends with the first call that fails on any of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent

LIMIT_S = 60  # for one call, from the end of the one before
GROUP_TIMEOUT_S = 20
_PATIENCE_S = 5.0  # for ranks when another has ended
_TEXT_MAX = 20_000
KILLED = "\nkilled by SIGKILL\n"


@dataclass(frozen=True)
class Call:
    """A function of a module, and what it is called with; all of it can be pickled."""

    module: str
    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """Ranks to be started.

    Attributes:
        calls: What each rank runs.
        world_size: How many ranks there are.
        folder: Where they put what they have to say.
        limit_s: For each call.
        group_timeout_s: Of the process group.
        killed: Ranks that are killed on purpose; None is what they return.
    """

    calls: tuple[Call, ...]
    world_size: int
    folder: Path
    limit_s: float = LIMIT_S
    group_timeout_s: float = GROUP_TIMEOUT_S
    killed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """What came of one call: a value from each rank, or what went wrong."""

    values: tuple[Any, ...] = ()
    failure: str | None = None
    skipped: str | None = None


class RanksFailedError(Exception):
    """Report what each rank says."""


# The side of pytest


class Launcher:
    """Keeps a server, and asks it to start ranks."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, launch: Launch) -> list[Outcome]:
        """Run the calls; list the outcomes of those that were begun."""
        launch.folder.mkdir(parents=True, exist_ok=True)
        (launch.folder / "launch").write_bytes(pickle.dumps(launch))
        server = self._started()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(os.fsencode(launch.folder) + b"\n")
        server.stdin.flush()
        if server.stdout.readline() != b"done\n":
            self.close()
            raise RanksFailedError("the server of the ranks has died")
        return list(_outcomes(launch))

    def run_all(self, launches: Callable[[Sequence[Call]], Launch], calls: Sequence[Call]) -> Any:
        """Run all calls, in a new launch after each that fails; yield an outcome for each."""
        rest = list(calls)
        while rest:
            outcomes = self.run(launches(rest))
            yield from outcomes
            rest = rest[len(outcomes) :]

    def close(self) -> None:
        """End the server, which ends all ranks."""
        server, self._server = self._server, None
        if server is not None:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.close()
            server.wait(timeout=30)
            server.stdout.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    "MKL_NUM_THREADS": "1",
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                    # Freed buffers go back at once, so that resident memory can be measured.
                    "MALLOC_MMAP_THRESHOLD_": "65536",
                },
            )
        return self._server


def _outcomes(launch: Launch) -> Iterator[Outcome]:
    reports = [_report(launch.folder, rank) for rank in range(launch.world_size)]
    for rank in launch.killed:
        if KILLED in _words(launch, rank).read_text(errors="replace"):
            reports[rank] = [("ok", None)] * len(launch.calls)
    for index in range(len(launch.calls)):
        rows = [report[index] if index < len(report) else None for report in reports]
        if all(row is not None and row[0] == "ok" for row in rows):
            yield Outcome(tuple(row[1] for row in rows if row is not None))
            continue
        skips = [row[1] for row in rows if row is not None and row[0] == "skip"]
        if len(skips) == len(rows):
            yield Outcome(skipped=skips[0])
            continue
        gaps = [row[1] for row in rows if row is not None and row[0] == "gap"]
        if gaps:
            yield Outcome(skipped=gaps[0])
            if len(gaps) == len(rows):
                continue
            return  # some ranks were left alone
        yield Outcome(failure="\n".join(_all_said(launch, rows)))
        return


def _report(folder: Path, rank: int) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    path = folder / f"rank{rank}"
    if path.exists():
        with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                rows.append(pickle.load(file))
    return rows


def _all_said(launch: Launch, rows: Sequence[tuple[str, Any] | None]) -> Iterator[str]:
    known: dict[str, int] = {}
    for rank, row in enumerate(rows):
        said = _said(_words(launch, rank), row)
        title = said.splitlines()[0]
        first = known.setdefault(title if row is not None else said, rank)
        told = said if first == rank else f"as rank {first}: {title}"
        yield f"---- rank {rank} of {launch.world_size}: {told}"


def _words(launch: Launch, rank: int) -> Path:
    """Where the standard streams of a rank go."""
    return launch.folder / f"rank{rank}.err"


def _said(words: Path, row: tuple[str, Any] | None) -> str:
    if row is not None:
        return "is done" if row[0] == "ok" else str(row[1])
    return f"did not end\n{words.read_text(errors='replace').strip()[-_TEXT_MAX:]}"


# The side of the server


def serve() -> None:
    """Start launches until the standard input ends."""
    _import_early()
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin.buffer:
        folder = Path(os.fsdecode(line.rstrip(b"\n")))
        _supervise(pickle.loads((folder / "launch").read_bytes()))
        os.write(out, b"done\n")


def _import_early() -> None:
    sys.modules["tests.ranks.launching"] = sys.modules["__main__"]
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    for name in (
        "torch._dynamo",  # the first optimizer imports it
        "torch.distributed",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed._composable.replicate",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.distributed.checkpoint.state_dict",
        "torch.nn.parallel",
        "dsdformat.torch.state_dict",
        "pytest",
        "tests.ranks.layouts",
        "tests.torch_runtime.exact",
    ):
        importlib.import_module(name)
    gc.freeze()


def _supervise(launch: Launch) -> None:
    """Start the ranks, and wait until all have ended or one call takes too long."""
    alive = {_fork(launch, rank): rank for rank in range(launch.world_size)}
    reports = [launch.folder / f"rank{rank}" for rank in range(launch.world_size)]
    deadline, seen = time.monotonic() + launch.limit_s, 0
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = alive.pop(pid)
            if status:
                with reports[rank].with_suffix(".err").open("a") as words:
                    words.write(_ended(status))
            # Others may wait for it in vain, if not in gloo, which tells them.
            if rank not in launch.killed:
                deadline = min(deadline, time.monotonic() + _PATIENCE_S)
            continue
        size = sum(path.stat().st_size for path in reports if path.exists())
        if size != seen and len(alive) == launch.world_size:
            deadline, seen = time.monotonic() + launch.limit_s, size
        if time.monotonic() > deadline:
            _stop(alive)
            return
        time.sleep(0.01)


def _ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return KILLED
    return f"\nkilled by {signal.Signals(-code).name}\n" if code < 0 else f"\nexit {code}\n"


def _stop(alive: dict[int, int]) -> None:
    """Let ranks say where they are, then kill them."""
    for pid in alive:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    for pid in alive:
        os.waitpid(pid, 0)


def _fork(launch: Launch, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (launch.folder / f"rank{rank}.err").open("w") as words:
            os.dup2(words.fileno(), 1)
            os.dup2(words.fileno(), 2)
            os.close(0)
            code = _run_rank(launch, rank)
            sys.stdout.flush()
            sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _run_rank(launch: Launch, rank: int) -> int:
    import torch
    from torch import distributed

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Ends a rank whose server has been killed.
    signal.alarm(int(launch.limit_s * (len(launch.calls) + 1)))
    timeout = timedelta(seconds=launch.group_timeout_s)
    store = distributed.FileStore(str(launch.folder / "store"), launch.world_size)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=launch.world_size, timeout=timeout
    )
    with (launch.folder / f"rank{rank}").open("wb") as report:
        for call in launch.calls:
            torch.manual_seed(0)
            row = _run_call(call)
            report.write(pickle.dumps(row))
            report.flush()
            if row[0] == "error":
                return 0
    if not launch.killed:
        distributed.barrier()
        distributed.destroy_process_group()
    return 0


# What fails with torch 2.6 itself, by what its errors say.
_GAPS = {
    "'Stream' object has no attribute 'record_event'": "FSDP2 of torch 2.6 has no forward on a CPU",
    "even sharding": "strided shards of torch 2.6 are of even sizes alone",
    "param_data.stride()": "FSDP2 of torch 2.6 takes no parts of rows that are a column",
    "resulted in a negative output size": "torch 2.6 cuts no dim in two that has few elements",
    "do not lie in rows": "FSDP1 of torch 2.6 flattens parts of rows by their storage",
}


def _run_call(call: Call) -> tuple[str, Any]:
    from _pytest.outcomes import Skipped

    try:
        function = getattr(importlib.import_module(call.module), call.function)
        value = function(*call.args, **call.kwargs)
        pickle.dumps(value)
    except Skipped as skipped:
        return "skip", str(skipped)
    except BaseException as error:
        gap = _find_gap(error)
        return ("error", _told(error, call.module)) if gap is None else ("gap", gap)
    return "ok", value


def _find_gap(error: BaseException) -> str | None:
    """Return what the oldest torch cannot do by itself, if that is what failed."""
    import torch

    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
    return next((why for text, why in _GAPS.items() if old and text in str(error)), None)


def _told(error: BaseException, module: str) -> str:
    """Give the traceback, and the variables of the test where it failed."""
    text = io.StringIO()
    traceback.print_exception(error, file=text)
    frame, test = error.__traceback__, None
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__") == module:
            test = frame.tb_frame
        frame = frame.tb_next
    told = text.getvalue()[-_TEXT_MAX:]
    if isinstance(error, AssertionError) and test is not None:
        told += "where\n"
        for name, value in test.f_locals.items():
            try:
                shown = repr(value)
            except Exception as failed:
                shown = f"<{failed!r}>"
            told += f"    {name} = {shown if len(shown) < 300 else shown[:299] + '…'}\n"
    return f"{type(error).__name__}: {error}\n{told}"


if __name__ == "__main__":
    serve()
