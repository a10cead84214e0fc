"""Runs of bytes from a chunk to a wanted box: all of them, in pieces, and what they touch."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import numpy as np
import pytest

from dsdformat.boxes import Box
from dsdformat.plan.copies import Copy, Level, find_copy, packed_strides


def some_box(some: random.Random, shape: tuple[int, ...]) -> Box:
    offset = tuple(some.randrange(size) for size in shape)
    sizes = zip(shape, offset, strict=True)
    return Box(offset, tuple(some.randint(1, size - low) for size, low in sizes))


def some_strides(some: random.Random, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Of a destination with its dims in any order, and room between rows."""
    strides, step = [0] * len(shape), itemsize * some.randint(1, 2)
    for dim in some.sample(range(len(shape)), len(shape)):
        strides[dim] = step
        step = step * shape[dim] + itemsize * some.randint(0, 2)
    return tuple(strides)


def element_places(shared: Box, box: Box, strides: Any) -> list[int]:
    """Where each element of a box lies, in row-major order of what is shared."""
    sides = zip(shared.offset, box.offset, shared.shape, strict=True)
    ranges = [range(o - b, o - b + n) for o, b, n in sides]
    return [sum(map(int.__mul__, at, strides)) for at in itertools.product(*ranges)]


class Case:
    def __init__(self, seed: int) -> None:
        some = random.Random(seed)
        shape = tuple(some.randint(1, 9) for _ in range(some.randint(0, 4)))
        self.itemsize = some.choice([1, 2, 3, 4, 8, 16])
        self.chunk, self.wanted = some_box(some, shape), some_box(some, shape)
        self.strides = None
        if shape and some.random() < 0.5:
            self.strides = some_strides(some, self.wanted.shape, self.itemsize)
        self.shared = self.chunk.intersect(self.wanted)
        self.data = some.randbytes(self.chunk.numel * self.itemsize)
        places = self.strides or packed_strides(self.wanted.shape, self.itemsize)
        steps = zip(self.wanted.shape, places, strict=True)
        self.room = self.itemsize + sum((size - 1) * by for size, by in steps)
        self.copy = find_copy(self.chunk, self.wanted, self.itemsize, self.strides)
        self.some = some
        if self.shared is not None:
            sources = packed_strides(self.chunk.shape, self.itemsize)
            self.src = element_places(self.shared, self.chunk, sources)
            self.dst = element_places(self.shared, self.wanted, places)

    def expected(self) -> bytes:
        into = bytearray(self.room)
        for src, dst in zip(self.src, self.dst, strict=True):
            into[dst : dst + self.itemsize] = self.data[src : src + self.itemsize]
        return bytes(into)


SEEDS = range(1500)


def test_boxes_that_share_no_element_have_no_copy():
    cases = [Case(seed) for seed in SEEDS]
    apart = [case for case in cases if case.shared is None]
    assert len(apart) > 50
    assert all(case.copy is None for case in apart)
    assert all(case.copy is not None for case in cases if case.shared is not None)


def met() -> list[Case]:
    return [case for case in map(Case, SEEDS) if case.shared is not None]


def test_what_two_boxes_share_is_carried_in_whatever_pieces_it_comes():
    for case in met():
        cuts = {0, len(case.data), *(case.some.randrange(len(case.data) + 1) for _ in range(3))}
        into = memoryview(bytearray(case.room))
        for low, high in itertools.pairwise(sorted(cuts)):
            case.copy.move(memoryview(case.data)[low:high], low, into)
        assert into == case.expected()


def test_each_run_has_a_place():
    for case in met():
        into = bytearray(case.room)
        runs = list(case.copy.places())
        for src, dst in runs:
            into[dst : dst + case.copy.run] = case.data[src : src + case.copy.run]
        assert into == case.expected()
        assert len(runs) == case.copy.runs
        assert case.copy.nbytes == case.shared.numel * case.itemsize


def test_spans_touch_the_blocks_that_the_runs_touch_and_no_others():
    for case in met():
        block = case.some.randint(1, 40)
        touched = {at for src, _ in case.copy.places() for at in range(src, src + case.copy.run)}
        spans = list(case.copy.spans(block))
        covered = {at for low, high in spans for at in range(low, high)}
        assert touched <= covered
        assert {at // block for at in touched} == {at // block for at in covered}
        assert spans == sorted(spans)
        assert (case.copy.src, case.copy.src_end) == (min(touched), max(touched) + 1)


SHAPES = [
    pytest.param((8, 6, 4), (2, 6, 4), None, (), id="rows"),
    pytest.param((8, 6, 4), (8, 6, 4), None, (), id="all"),
    pytest.param((8, 6, 4), (1, 3, 4), None, (), id="some-rows-of-one-matrix"),
    pytest.param((8, 6, 4), (8, 3, 4), None, ((8, 24, 12),), id="columns-of-matrices"),
    pytest.param((8, 6, 4), (8, 6, 2), None, ((48, 4, 2),), id="last-dim"),
    pytest.param((8, 6, 4), (4, 3, 2), None, ((4, 24, 6), (3, 4, 2)), id="a-corner"),
    pytest.param((8, 6), (8, 6), (1, 8), ((8, 6, 1), (6, 1, 8)), id="transposed"),
    pytest.param((8, 6), (8, 6), (10, 1), ((8, 6, 10),), id="into-wider-rows"),
]


@pytest.mark.parametrize(("chunk", "wanted", "strides", "levels"), SHAPES)
def test_dims_that_follow_each_other_on_both_sides_are_one_run(chunk, wanted, strides, levels):
    zeros = (0,) * len(chunk)
    copy = find_copy(Box(zeros, chunk), Box(zeros, wanted), 1, strides)
    assert copy.levels == tuple(Level(*level) for level in levels)


def test_many_short_rows_are_carried_a_word_of_each_at_a_time():
    rows, wide, narrow = 5000, 24, 8
    data = random.Random(1).randbytes(rows * wide)
    copy = Copy(8, 0, narrow, (Level(rows, wide, narrow),))
    into = bytearray(rows * narrow)
    lines: list[int] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        lines.append(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        copy.move(memoryview(data), 0, memoryview(into))
    finally:
        sys.settrace(before)
    expected = np.frombuffer(data, np.uint8).reshape(rows, wide)[:, 8:16]
    assert bytes(into) == expected.tobytes()
    assert len(lines) < 200  # steps of Python, for 5,000 rows


def test_the_runs_of_a_whole_model_in_columns_are_a_few_numbers():
    copy = find_copy(Box((0, 0), (10**6, 10**6)), Box((0, 10), (10**6, 500)), 2)
    assert copy == Copy(20, 0, 1000, (Level(10**6, 2 * 10**6, 1000),))
    assert next(iter(copy.spans(4 << 20)))[0] == 20
    assert sum(1 for _ in copy.spans(4 << 20)) == 1
