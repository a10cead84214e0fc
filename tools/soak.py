"""Use checkpoints for long: many readers beside a writer, many saves, many folders.

    tools/soak.py readers --seconds 60 --readers 8    no reader sees a torn state
    tools/soak.py leaks --rounds 10000                neither memory, descriptors nor threads grow
    tools/soak.py names --count 200000                opening and `latest` in a folder of that many

Each works in a folder of its own (--folder; a temporary one otherwise), prints what it measured as
JSON, and exits 1 if something is wrong. Tests run each for a moment.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import dsdformat
import dsdformat.numpy
from dsdformat import IncompleteError

Figures = dict[str, Any]


# Readers beside a writer


def state_of(number: int) -> dict[str, Any]:
    """A state all of which says its number, of a size that changes with it."""
    rows = 50 + 37 * (number % 5)
    weights = np.full((rows, 16), number, np.int64)
    return {
        "model": {f"layers.{layer}": weights + layer for layer in range(number % 3 + 1)},
        "optimizer": {"moment": weights * 2},
        "number": number,
    }


def number_of(state: dict[str, Any]) -> int:
    """The number that a state says; it is an error if its parts say different ones."""
    expected = state_of(state["number"])
    assert state.keys() == expected.keys()
    assert state["model"].keys() == expected["model"].keys()
    for name, weights in expected["model"].items():
        assert np.array_equal(state["model"][name], weights)
    assert np.array_equal(state["optimizer"]["moment"], expected["optimizer"]["moment"])
    return int(state["number"])


def read_for(path: Path, seconds: float) -> Figures:
    """Read again and again; what is read must be whole, and never older than what was read."""
    last, counts = 0, Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            number = number_of(dsdformat.numpy.load(path, threads=1))
        except IncompleteError as error:  # its folder was removed before all files were open
            check("replaced while it was read" in (error.hint or ""))
            counts["replaced"] += 1
            continue
        assert number >= last, f"{number} was read after {last}"
        counts["new"] += number > last
        counts["read"] += 1
        last = number
        if counts["read"] % 10 == 0:
            report = dsdformat.verify(path, threads=1)
            assert report.ok, report
    return dict(counts)


def run_readers(folder: Path, *, seconds: float, readers: int) -> Figures:
    """Replace a checkpoint as fast as it goes, while other processes read it."""
    path = folder / "c"
    dsdformat.numpy.save(path, state_of(1), threads=1)
    command = [sys.executable, __file__, "read", "--folder", str(path), "--seconds", str(seconds)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(readers)
    ]
    number = 1
    while any(one.poll() is None for one in started):
        number += 1
        dsdformat.numpy.save(path, state_of(number), overwrite=True, threads=1)
    total, faults = Counter[str](), []
    for one in started:
        out, err = one.communicate()
        if one.returncode == 0:
            total.update(json.loads(out))
        else:
            faults.append(err.strip().splitlines()[-1])
    if left := sorted(one.name for one in folder.iterdir() if one != path):
        faults.append(f"left over: {left}")
    return {"saves": number, **dict(total), "faults": faults}


# Leaks

LATE_NBYTES_MAX = 1 << 20
# Objects of Python that are alive are counted exactly, so these few are for caches that fill.
LATE_BLOCKS_MAX = 100


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def round_of(path: Path) -> Callable[[], None]:
    """Save, load, convert and verify, in each way, and fail to."""
    import torch

    import dsdformat.torch as dsd
    from dsdformat.convert import convert

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    live = {"model": model, "optimizer": optimizer, "step": 3}

    def once() -> None:
        dsdformat.numpy.save(path / "numpy", state_of(3), overwrite=True, threads=2)
        number_of(dsdformat.numpy.load(path / "numpy", threads=2))
        dsd.save(path / "torch", live, overwrite=True)
        dsd.load(path / "torch", {**live, "step": None})
        assert dsdformat.verify(path / "torch").ok
        dsd.save(path / "torch", live, overwrite=True, background=True).wait()
        dsd.load(path / "torch", mmap=True)
        convert(path / "torch", path / "torch.pt", overwrite=True)
        dsd.load(path / "torch.pt")
        with contextlib.suppress(dsdformat.StorageError):
            dsdformat.numpy.save(path / "numpy", state_of(3))
        with contextlib.suppress(dsdformat.UnsupportedValueError):
            dsdformat.numpy.save(path / "numpy", {"o": object()}, overwrite=True)
        with contextlib.suppress(dsdformat.NotACheckpointError):
            dsdformat.open(path)
        with contextlib.suppress(dsdformat.MismatchError):
            dsd.load(path / "torch", {"model": torch.nn.Linear(2, 2)}, select="model")

    return once


def held() -> tuple[int, int, int, int]:
    """Descriptors, threads, blocks of Python's own memory that are in use, and resident bytes.

    After what is free was given back. What an allocator keeps for later is resident too.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    return descriptors(), threading.active_count(), sys.getallocatedblocks(), resident_nbytes()


def run_leaks(folder: Path, *, rounds: int, warm: int = 100) -> Figures:
    """Save and load a small state many times; compare what is held before, half-way and after.

    What an allocator keeps grows at first and then no more: pages of which a part is in use, and
    freed pieces that each thread has at hand. With `GLIBC_TUNABLES=glibc.malloc.tcache_count=0`
    there are none of those, and not one byte more is in use. So the second half counts, and of
    it what is more than was ever held before: a kernel takes pages back, and gives them again.
    """
    once = round_of(folder)
    points = []
    for count in (warm, rounds // 2, rounds - rounds // 2):
        for _ in range(count):
            once()
        points.append(held())
    first, middle, last = points
    grown = [now - then for now, then in zip(last, first, strict=True)]
    before = map(max, first, middle)
    *_, late_blocks, late = (now - then for now, then in zip(last, before, strict=True))
    faults = []
    if grown[0] or grown[1]:
        faults.append(f"{grown[0]} descriptors and {grown[1]} threads more")
    if late_blocks > LATE_BLOCKS_MAX:
        faults.append(f"{late_blocks} blocks more in the second half, {LATE_BLOCKS_MAX} allowed")
    if late > LATE_NBYTES_MAX:
        faults.append(f"{late} bytes more in the second half, {LATE_NBYTES_MAX} allowed")
    return {
        "rounds": rounds,
        "descriptors": grown[0],
        "threads": grown[1],
        "nbytes": grown[3],
        "nbytes_second_half": late,
        "blocks_second_half": late_blocks,
        "faults": faults,
    }


# A folder of many names


def run_names(folder: Path, *, count: int) -> Figures:
    """Time opening, saving and `latest` among few names and among many."""
    path = folder / "step-100"
    dsdformat.numpy.save(folder / "step-20", state_of(2), threads=1)
    dsdformat.numpy.save(path, state_of(1), threads=1)

    def seconds() -> dict[str, float]:
        return {
            "listdir": best(lambda: os.listdir(folder)),
            "open": best(lambda: dsdformat.open(path).close()),
            "latest": best(lambda: check(dsdformat.latest(folder) == path)),
            "save": best(lambda: save_again(path)),
        }

    few = seconds()
    for number in range(count):
        (folder / f"log-{number}.txt").touch()
    many = seconds()
    return {"count": count, "few": few, "many": many, "faults": []}


def check(fact: bool) -> None:
    assert fact


def save_again(path: Path) -> None:
    dsdformat.numpy.save(path, state_of(1), overwrite=True, threads=1)


def best(call: Callable[[], object], times: int = 5) -> float:
    spent = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        spent.append(time.perf_counter() - started)
    return round(min(spent), 6)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["readers", "leaks", "names", "read"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=200_000)
    chosen = parser.parse_args(arguments)
    if chosen.what == "read":
        print(json.dumps(read_for(chosen.folder, chosen.seconds)))
        return 0
    with tempfile.TemporaryDirectory(dir=chosen.folder) as made:
        folder = Path(made)
        if chosen.what == "readers":
            figures = run_readers(folder, seconds=chosen.seconds, readers=chosen.readers)
        elif chosen.what == "leaks":
            figures = run_leaks(folder, rounds=chosen.rounds)
        else:
            figures = run_names(folder, count=chosen.count)
    print(json.dumps(figures, indent=2))
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
