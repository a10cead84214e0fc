"""Runs of bytes from one buffer to another: with numpy and without, the same."""

from __future__ import annotations

import itertools
import random
import sys

import numpy as np
import pytest

from dsdformat.plan import runs
from dsdformat.plan.runs import Level, move_runs


@pytest.fixture(params=["numpy", "memoryview"])
def mover(request, monkeypatch):
    """Who carries the runs."""
    if request.param == "memoryview":
        monkeypatch.setattr(runs, "_loaded_array", lambda: None)
    return request.param


def some_levels(some: random.Random, run: int) -> list[Level]:
    """Levels whose steps in the source hold what is within, with gaps; places in another order."""
    counts = [some.choice([1, 2, 3, 17, 40]) for _ in range(some.randint(0, 3))]
    sources, places = [0] * len(counts), [0] * len(counts)
    for steps, order in (
        (sources, range(len(counts) - 1, -1, -1)),
        (places, some.sample(range(len(counts)), len(counts))),
    ):
        step = run + some.choice([0, run, 1])
        for at in order:
            steps[at] = step
            step = step * counts[at] + some.choice([0, 8, 3])
    return [Level(*level) for level in zip(counts, sources, places, strict=True)]


def carried(levels: list[Level], run: int, data: bytes, room: int) -> bytes:
    into = bytearray(room)
    for steps in itertools.product(*(range(level.times) for level in levels)):
        src = sum(n * one.src_step for n, one in zip(steps, levels, strict=True))
        dst = sum(n * one.dst_step for n, one in zip(steps, levels, strict=True))
        into[dst : dst + run] = data[src : src + run]
    return bytes(into)


def room_of(levels: list[Level], run: int, side: str) -> int:
    return run + sum((one.times - 1) * getattr(one, side) for one in levels)


@pytest.mark.parametrize("seed", range(60))
def test_runs_of_all_levels_are_carried_in_whatever_pieces_they_come(seed, mover):
    some = random.Random(seed)
    run = some.choice([1, 2, 3, 4, 8, 12, 16, 100])
    levels = some_levels(some, run)
    data = some.randbytes(room_of(levels, run, "src_step"))
    room = room_of(levels, run, "dst_step")
    into = memoryview(bytearray(room))
    cuts = sorted({0, len(data), *(some.randrange(len(data) + 1) for _ in range(3))})
    for low, high in itertools.pairwise(cuts):
        move_runs(levels, run, memoryview(data)[low:high], -low, into, 0)
    assert into == carried(levels, run, data, room)


@pytest.mark.parametrize("run", [1, 3, 8, 16])
def test_one_run_can_be_carried_to_many_places(run, mover):
    data = random.Random(1).randbytes(run)
    into = bytearray(100 * (run + 1))
    move_runs([Level(100, 0, run + 1)], run, memoryview(data), 0, memoryview(into), 0)
    assert bytes(into) == (data + b"\0") * 100


def test_more_levels_than_numpy_has_dims_are_carried_without(mover):
    levels = [Level(1, 0, 0)] * 60 + [Level(20, 2, 2)]
    into = bytearray(40)
    move_runs(levels, 1, memoryview(bytes(range(40))), 0, memoryview(into), 0)
    assert bytes(into) == bytes(n if n % 2 == 0 else 0 for n in range(40))


def test_numpy_is_used_only_if_it_is_loaded(monkeypatch):
    assert runs._loaded_array() is np.ndarray
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert runs._loaded_array() is None
