"""Equal states give equal bytes: whatever the process, its hash seed, its threads, the clock."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dsdformat.numpy

ROOT = Path(__file__).resolve().parents[2]

SAVE = """
import collections, sys
import numpy as np
import dsdformat.numpy
words = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
state = {
    "set": set(words),
    "frozen": {frozenset(words[:5]): 1, frozenset(words[5:]): 2, None: 3, ("a", 1): 4},
    "counter": collections.Counter(set(words)),
    "model": {word: np.arange(5000.0) * len(word) for word in set(words)},
}
print(dsdformat.numpy.save(sys.argv[1], state, codec=sys.argv[2], threads=int(sys.argv[3])))
"""


def files_of(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes+zstd"])
def test_processes_with_other_hash_seeds_and_threads_write_equal_bytes(tmp_path, codec):
    found = []
    for number, (seed, threads) in enumerate([("0", 1), ("1", 2), ("2", 5)]):
        path = tmp_path / str(number)
        done = subprocess.run(
            [sys.executable, "-c", SAVE, str(path), codec, str(threads)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found.append((done.stdout, files_of(path)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes+zstd"])
def test_many_threads_write_the_bytes_that_one_writes(tmp_path, codec):
    rng = np.random.default_rng(1)
    state = {f"w{n}": rng.integers(0, 9, n * 70_001, dtype=np.int32) for n in range(30)}
    state["big"] = rng.integers(0, 9, 3_000_000)
    for threads in (1, 2, 8):
        dsdformat.numpy.save(tmp_path / str(threads), state, codec=codec, threads=threads)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "8")


def test_saving_what_was_loaded_gives_equal_bytes(tmp_path):
    state = {"model": {"w": np.asfortranarray(np.ones((3, 4))), "b": np.arange(5, dtype=">i4")}}
    state["tied"] = [state["model"]["w"]]
    first = dsdformat.numpy.save(tmp_path / "a", state)
    second = dsdformat.numpy.save(tmp_path / "b", dsdformat.numpy.load(tmp_path / "a"))
    assert first == second
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
