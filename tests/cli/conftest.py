"""The command in this process and in its own, and checkpoints for it to look at."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dsdformat.numpy
from dsdformat import Box, Mesh, TensorSource, Writer
from dsdformat.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    """What a run of the command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def dsd() -> Callable[..., Result]:
    """`dsd("ls", path, "--json")` runs the command in this process."""

    def run(*arguments: object) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
        return Result(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def dsd_process() -> Callable[..., subprocess.Popen[bytes]]:
    """`dsd_process("ls", path, stdout=...)` starts the command as a process of its own."""

    def start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dsdformat.cli.main", *map(str, arguments)]
        return subprocess.Popen(command, cwd=ROOT, **options)

    return start


@pytest.fixture
def run_in_terminal() -> Callable[..., str]:
    """`run_in_terminal("ls", path, width=80)` runs it in a terminal, and returns what appears."""
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    import fcntl
    import struct
    import termios

    def run(*arguments: object, width: int = 80, **environment: str) -> str:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        command = [sys.executable, "-m", "dsdformat.cli.main", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, "TERM": "xterm-256color", **environment},
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # what Linux says when the other end is closed
            while piece := os.read(ours, 65536):
                shown += piece
        os.close(ours)
        process.wait(60)
        return shown.decode().replace("\r\n", "\n")

    return run


def state() -> dict[str, Any]:
    """A small model, its optimizer's state, and values."""
    embed = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
    norm = np.array([1, -2], dtype=ml_dtypes.bfloat16)
    return {
        "model": {"embed.weight": embed, "head.weight": embed, "norm.weight": norm},
        "optimizer": {
            "state": {"embed.weight": {"exp_avg": np.zeros((4, 3), np.float32)}},
            "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), "params": ["embed.weight"]}],
        },
        "step": 10,
        "scheduler": {"last_epoch": 3, "name": "cosine"},
    }


@pytest.fixture
def step10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small checkpoint of one process, in the current folder; its name is `step-10`."""
    monkeypatch.chdir(tmp_path)
    dsdformat.numpy.save("step-10", state(), user={"run": "demo"})
    return "step-10"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of two ranks: one tensor in two compressed shards, one on one rank."""
    path = tmp_path / "sharded"
    layout = (Mesh(("dp",), (2,), (0, 1)), ("shard(0)",))
    halves = [np.full((1024, 2), rank, np.float32).tobytes() for rank in (0, 1)]
    with dsdformat.create(path, world_size=2) as writer:
        part = Writer.join(writer.staging, rank=1, world_size=2)
        for rank, rank_writer in enumerate((writer, part)):
            box = Box((1024 * rank, 0), (1024, 2))
            source = TensorSource(
                "float32", (2048, 2), [(box, halves[rank])], codec="zstd", layout=layout
            )
            rank_writer.add({"model": {"weight": source}})
        writer.add_tensor(["model", "bias"], b"\1\2", dtype="uint8", shape=(2,))
        writer.commit([part.finish()])
    return path


@pytest.fixture
def damage() -> Callable[[str | Path, int], None]:
    """`damage(file, offset)` changes one byte; a negative offset counts from the end."""

    def damage(file: str | Path, offset: int) -> None:
        data = bytearray(Path(file).read_bytes())
        data[offset] ^= 0xFF
        Path(file).write_bytes(data)

    return damage
