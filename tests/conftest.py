"""What tests of several folders share: small checkpoints, child processes, costs of a call."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsdformat import Checkpoint, TensorSource, Writer
from dsdformat.storage.memory import MemoryStorage, MemoryTarget
from dsdformat.verify import verify_storage

ROOT = Path(__file__).resolve().parent.parent

Files = dict[str, bytes]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that depend on the test's id alone, so that any order gives the same."""
    return random.Random(zlib.crc32(request.node.nodeid.encode()))


def save_in_memory(
    state: Mapping[str, Any], sides: Mapping[str, bytes] | None = None, **options: Any
) -> Files:
    """Write a state; return the files of the checkpoint."""
    files: dict[str, bytearray] = {}
    writer = Writer(MemoryTarget(files), **{"threads": 1, **options})
    for label, data in (sides or {}).items():
        writer.add_file(label, data)
    writer.add(state)
    writer.commit()
    return {label: bytes(data) for label, data in files.items()}


@pytest.fixture
def save() -> Callable[..., Files]:
    """`save(state, sides={...}, **options)` gives the files of a checkpoint in memory."""
    return save_in_memory


@pytest.fixture
def load() -> Callable[..., Checkpoint]:
    """`load(files)` opens the files of a checkpoint."""

    def load(files: Mapping[str, Any], **options: Any) -> Checkpoint:
        return Checkpoint(MemoryStorage(files), **{"threads": 1, **options})

    return load


@pytest.fixture
def problems_of() -> Callable[..., list[tuple[str, str | None]]]:
    """`problems_of(files)` verifies the files: code and file of each problem."""

    def problems_of(files: Mapping[str, Any], **options: Any) -> list[tuple[str, str | None]]:
        report = verify_storage(MemoryStorage(files), threads=1, **options)
        return [(problem.code, problem.where) for problem in report.problems]

    return problems_of


def small_state() -> dict[str, Any]:
    """Two sections; raw, zstd and planes; tensors of several blocks of 4,096; values."""
    some = random.Random(20)
    noise, text = some.randbytes(4100), b"abcdefgh" * 625
    floats = b"".join((0x3F80_0000 + some.randrange(2)).to_bytes(4, "little") for _ in range(1300))
    return {
        "model": {
            "raw": TensorSource.of("uint8", (4100,), noise),
            "text": TensorSource.of("uint8", (5000,), text, codec="zstd"),
        },
        "optimizer": {
            "step": 3,
            "moment": TensorSource.of("float32", (13, 100), floats, codec="planes+zstd"),
        },
    }


@pytest.fixture(scope="session")
def small_files() -> Files:
    """The files of a small checkpoint with everything in it; see `small_state`."""
    sides = {"config.json": b'{"layers": 2}\n'}
    return save_in_memory(small_state(), sides, block_nbytes=4096, user={"run": "7"})


@pytest.fixture(scope="session")
def small_tensors(small_files: Files) -> dict[str, bytes]:
    """The bytes of each tensor of `small_files`, by name."""
    with Checkpoint(MemoryStorage(small_files), threads=1) as checkpoint:
        return {entry.name: bytes(entry.read()) for entry in checkpoint}


@pytest.fixture
def small_folder(tmp_path: Path, small_files: Files) -> Path:
    """`small_files` in a folder of its own."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for label, data in small_files.items():
        (folder / label).write_bytes(data)
    return folder


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_python(source, *args, env={...})` runs a script in a fresh interpreter."""

    def run_python(
        source: str, *args: object, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", source, *map(str, args)],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run_python


@pytest.fixture
def count_descriptors() -> Callable[[], int]:
    """How many file descriptors this process has open."""
    table = Path("/proc/self/fd")
    if not table.is_dir():
        pytest.skip("this system does not list the descriptors of a process")
    return lambda: len(list(table.iterdir()))


@pytest.fixture
def peak_nbytes() -> Callable[[Callable[[], object]], int]:
    """`peak_nbytes(call)`: how many bytes Python allocates at most while it runs."""

    def peak_nbytes(call: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return peak_nbytes
