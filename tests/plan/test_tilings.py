"""Tilings that are recognized from columns: all grids and flat ranges, and nothing that is none."""

from __future__ import annotations

import itertools
import math
import random
from array import array

import pytest

from dsdformat.boxes import Box, cut_dims, flat_boxes, is_tiling
from dsdformat.plan.tilings import FlatTiling, GridTiling, find_tiling, flat_offsets


def columns(boxes: list[Box], ndim: int) -> tuple[list[array], list[array]]:
    dims = range(ndim)
    offsets = [array("Q", [box.offset[dim] for box in boxes]) for dim in dims]
    return offsets, [array("Q", [box.shape[dim] for box in boxes]) for dim in dims]


def some_grid(some: random.Random, shape: tuple[int, ...]) -> list[Box]:
    cuts = []
    for size in shape:
        inner = some.sample(range(1, size), some.randint(0, min(size - 1, 3)))
        cuts.append(list(itertools.pairwise([0, *sorted(inner), size])))
    return [
        Box(tuple(low for low, _ in one), tuple(high - low for low, high in one))
        for one in itertools.product(*cuts)
    ]


def some_ranges(some: random.Random, shape: tuple[int, ...]) -> list[Box]:
    numel = math.prod(shape)
    inner = some.sample(range(1, numel), some.randint(0, min(numel - 1, 5)))
    ends = itertools.pairwise([0, *sorted(inner), numel])
    return [box for low, high in ends for box in flat_boxes(shape, low, high)]


def spoiled(some: random.Random, boxes: list[Box]) -> list[Box]:
    """Move, grow, shrink, drop or repeat one box."""
    at, dim = some.randrange(len(boxes)), some.randrange(len(boxes[0].shape))
    box, by = boxes[at], some.choice([-1, 1])
    changed = list(box.offset), list(box.shape)
    which = changed[some.randrange(2)]
    which[dim] = max(0, which[dim] + by)
    kind = some.randrange(3)
    middle = [[Box(*map(tuple, changed))], [], [box, box]][kind]
    return [*boxes[:at], *middle, *boxes[at + 1 :]]


def some_case(seed: int) -> tuple[tuple[int, ...], list[Box]]:
    some = random.Random(seed)
    shape = tuple(some.randint(1, 7) for _ in range(some.randint(1, 4)))
    boxes = some.choice([some_grid, some_ranges])(some, shape)
    return shape, sorted(boxes, key=lambda box: box.offset)


@pytest.mark.parametrize("seed", range(300))
def test_a_grid_and_flat_ranges_are_recognized_and_searched(seed):
    shape, boxes = some_case(seed)
    tiling = find_tiling(shape, *columns(boxes, len(shape)))
    assert isinstance(tiling, (GridTiling, FlatTiling))
    some = random.Random(seed)
    for _ in range(8):
        low = tuple(map(some.randrange, shape))
        box = Box(low, tuple(some.randint(1, n - o) for n, o in zip(shape, low, strict=True)))
        found = list(tiling.find(box))
        met = [number for number, one in enumerate(boxes) if one.intersect(box)]
        assert set(met) <= set(found)
        assert found == sorted(found)
        if isinstance(tiling, GridTiling):
            assert found == met


@pytest.mark.parametrize("seed", range(1000))
def test_nothing_is_recognized_that_does_not_tile(seed):
    shape, boxes = some_case(seed)
    boxes = spoiled(random.Random(seed), boxes)
    good = boxes == sorted(boxes, key=lambda box: box.offset)
    good = good and all(box.fits(shape) and box.numel for box in boxes)
    good = good and is_tiling(shape, boxes, cut_dims(shape, boxes))
    if not good and boxes:
        assert find_tiling(shape, *columns(boxes, len(shape))) is None


def test_more_cut_dims_than_are_allowed_are_not_recognized():
    shape = (2,) * 9
    boxes = some_grid(random.Random(0), shape)
    boxes = [Box(at, (1,) * 9) for at in itertools.product(*[range(2)] * 9)]
    assert find_tiling(shape, *columns(boxes, 9)) is None
    assert find_tiling((*shape[:8], 1), *columns([b for b in boxes if not b.offset[8]], 9))


HUGE = [
    pytest.param([(0, 2**63), (2**63, 2**63)], 2**63, id="sums-beyond-64-bits"),
    pytest.param([(0, 5), (5, 2**64 - 1)], 10, id="a-size-that-wraps"),
    pytest.param([(0, 5), (2**64 - 1, 6)], 10, id="an-offset-that-wraps"),
]


@pytest.mark.parametrize(("boxes", "size"), HUGE)
def test_numbers_of_64_bits_do_not_overflow(boxes, size):
    offsets, sizes = (array("Q", column) for column in zip(*boxes, strict=True))
    ones = array("Q", [1, 1])
    assert find_tiling((size,), [offsets], [sizes]) is None
    assert find_tiling((size, 2), [offsets, array("Q", [0, 1])], [sizes, ones]) is None


@pytest.mark.parametrize("seed", range(50))
def test_flat_offsets_order_boxes_as_their_offsets_do(seed):
    shape, boxes = some_case(seed)
    random.Random(seed).shuffle(boxes)
    keys = list(flat_offsets(shape, columns(boxes, len(shape))[0]))
    order = sorted(range(len(boxes)), key=keys.__getitem__)
    assert [boxes[at] for at in order] == sorted(boxes, key=lambda box: box.offset)


def test_one_of_a_thousand_chunks_is_found_without_looking_at_the_others():
    ends = [array("Q", range(0, 4096, 4)), array("Q", bytes(8 * 1024))]
    sizes = [array("Q", [4] * 1024), array("Q", [64] * 1024)]
    tiling = find_tiling((4096, 64), ends, sizes)
    looked_at = []

    class Watched(list):
        def __getitem__(self, at):
            looked_at.append(at)
            return super().__getitem__(at)

    watched = GridTiling([Watched(starts) for starts in tiling.starts])
    assert list(watched.find(Box((101, 3), (8, 2)))) == [25, 26, 27]
    assert len(looked_at) < 30
