"""Boxes: each function against a definition that counts elements one by one."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from dsdformat.boxes import Box, cut_dims, flat_boxes, is_tiling, row_boxes, whole
from dsdformat.errors import DsdError

RANDOM = [pytest.param(ndim, seed, id=f"{ndim}d-{seed}") for ndim in range(5) for seed in range(12)]
RANDOM_CUT = [case for case in RANDOM if case.values[0]]


def elements(box: Box) -> list[tuple[int, ...]]:
    """The coordinates of a box's elements, in row-major order."""
    ranges = (range(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
    return list(itertools.product(*ranges))


def random_box(rng: random.Random, shape: tuple[int, ...], least: int = 0) -> Box:
    offset = tuple(rng.randrange(size) for size in shape)
    extent = tuple(
        rng.randint(min(least, n - o), n - o) for o, n in zip(offset, shape, strict=True)
    )
    return Box(offset, extent)


def random_shape(rng: random.Random, ndim: int, most: int = 5) -> tuple[int, ...]:
    return tuple(rng.randint(1, most) for _ in range(ndim))


def random_tiling(rng: random.Random, box: Box, cuts: int) -> list[Box]:
    """Cut a box in two, again and again; a tiling, though not any tiling."""
    boxes = [box]
    for _ in range(cuts):
        index = rng.randrange(len(boxes))
        dims = [dim for dim, size in enumerate(boxes[index].shape) if size > 1]
        if dims:
            boxes[index : index + 1] = split(boxes[index], rng.choice(dims), rng)
    return boxes


def split(box: Box, dim: int, rng: random.Random) -> list[Box]:
    at = rng.randrange(1, box.shape[dim])
    low, high = list(box.shape), list(box.shape)
    low[dim], high[dim] = at, box.shape[dim] - at
    offset = list(box.offset)
    offset[dim] += at
    return [Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))]


def tiles_by_counting(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    return sorted(e for box in boxes for e in elements(box)) == elements(whole(shape))


# Box


def test_a_box_prints_as_its_ranges():
    assert str(Box((2, 0), (3, 5))) == "[2:5,0:5]"


def test_a_box_without_dims_has_one_element():
    assert (Box((), ()).numel, Box((), ()).end) == (1, ())


def test_the_end_of_a_box_is_behind_its_last_element():
    assert Box((2, 0), (3, 5)).end == (5, 5)


@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        pytest.param((0,), (1, 2), id="lengths-differ"),
        pytest.param((-1,), (2,), id="negative-offset"),
        pytest.param((0, 0), (1, -2), id="negative-shape"),
    ],
)
def test_a_box_that_is_none_cannot_be_made(offset, shape):
    with pytest.raises(ValueError, match="box|dims"):
        Box(offset, shape)


def test_a_box_that_is_none_is_refused_with_a_code():
    with pytest.raises(DsdError):
        Box((0,), (1, 2))


@pytest.mark.parametrize(
    ("box", "fits"),
    [
        pytest.param(Box((0, 0), (3, 4)), True, id="whole"),
        pytest.param(Box((3, 4), (0, 0)), True, id="empty-at-the-end"),
        pytest.param(Box((1, 0), (3, 4)), False, id="one-too-far"),
        pytest.param(Box((0,), (3,)), False, id="fewer-dims"),
        pytest.param(Box((0, 0, 0), (1, 1, 1)), False, id="more-dims"),
    ],
)
def test_a_box_fits_a_shape_if_it_lies_inside(box, fits):
    assert box.fits((3, 4)) is fits


@pytest.mark.parametrize(("ndim", "seed"), RANDOM)
def test_an_intersection_has_the_elements_of_both(ndim, seed):
    rng = random.Random(seed)
    shape = random_shape(rng, ndim)
    a, b = random_box(rng, shape), random_box(rng, shape)
    shared = a.intersect(b)
    expected = [e for e in elements(a) if e in set(elements(b))]
    assert (elements(shared) if shared else []) == expected


def test_boxes_that_only_touch_share_nothing():
    assert Box((0, 0), (2, 2)).intersect(Box((2, 0), (2, 2))) is None


# Rows


@pytest.mark.parametrize(("ndim", "seed"), RANDOM)
def test_row_boxes_hold_all_in_row_major_order_a_slab_at_a_time(ndim, seed):
    rng = random.Random(seed)
    shape, slab = random_shape(rng, ndim), rng.choice((1, 6, 40))
    boxes = list(row_boxes(shape, math.prod(shape), slab))
    assert [e for box in boxes for e in elements(box)] == elements(whole(shape))
    assert all(box.numel <= slab for box in boxes)


# Flat ranges


@pytest.mark.parametrize(("ndim", "seed"), RANDOM)
def test_flat_boxes_hold_the_range_in_row_major_order(ndim, seed):
    rng = random.Random(seed)
    shape = random_shape(rng, ndim)
    count = math.prod(shape)
    start = rng.randint(0, count)
    stop = rng.randint(start, count)
    found = [e for box in flat_boxes(shape, start, stop) for e in elements(box)]
    assert found == elements(whole(shape))[start:stop]


@pytest.mark.parametrize("shape", [(7,), (3, 4), (3, 3, 3), (3, 3, 3, 3)], ids=str)
def test_flat_boxes_are_at_most_two_per_dim_less_one(shape):
    count = math.prod(shape)
    most = max(
        len(flat_boxes(shape, start, stop))
        for start in range(count)
        for stop in range(start, count + 1)
    )
    assert most == 2 * len(shape) - 1


def test_a_flat_range_that_is_empty_has_no_boxes():
    assert flat_boxes((3, 4), 5, 5) == []


# Tilings


@pytest.mark.parametrize(("ndim", "seed"), RANDOM)
def test_a_tiling_is_recognised(ndim, seed):
    rng = random.Random(seed)
    shape = random_shape(rng, ndim)
    boxes = random_tiling(rng, whole(shape), rng.randrange(8))
    rng.shuffle(boxes)
    assert is_tiling(shape, boxes, cut_dims(shape, boxes))


def without_one(boxes: list[Box], rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    gone = rng.randrange(len(boxes))
    return boxes[:gone] + boxes[gone + 1 :]


def with_one_twice(boxes: list[Box], rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    return [*boxes, rng.choice(boxes)]


def with_one_moved(boxes: list[Box], rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    index = rng.randrange(len(boxes))
    box = boxes[index]
    offset = tuple(rng.randint(0, n - s) for n, s in zip(shape, box.shape, strict=True))
    return [*boxes[:index], Box(offset, box.shape), *boxes[index + 1 :]]


def with_one_reshaped(boxes: list[Box], rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    index = rng.randrange(len(boxes))
    return [*boxes[:index], random_box(rng, shape, least=1), *boxes[index + 1 :]]


def with_two_exchanged(boxes: list[Box], rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """Shapes of two boxes exchanged, if they still fit: as many elements, in other places."""
    a, b = rng.randrange(len(boxes)), rng.randrange(len(boxes))
    result = list(boxes)
    result[a], result[b] = (
        Box(boxes[a].offset, boxes[b].shape),
        Box(boxes[b].offset, boxes[a].shape),
    )
    return result if all(box.fits(shape) for box in result) else boxes


MUTATIONS = [without_one, with_one_twice, with_one_moved, with_one_reshaped, with_two_exchanged]


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize(("ndim", "seed"), RANDOM_CUT)
def test_a_changed_tiling_is_judged_as_counting_elements_does(mutate, ndim, seed):
    rng = random.Random(seed)
    shape = random_shape(rng, ndim, most=4)
    boxes = mutate(random_tiling(rng, whole(shape), 1 + rng.randrange(6)), rng, shape)
    judged = is_tiling(shape, boxes, cut_dims(shape, boxes))
    assert judged is tiles_by_counting(shape, boxes)


PINWHEEL = [
    Box((0, 0), (1, 2)),
    Box((0, 2), (2, 1)),
    Box((1, 0), (2, 1)),
    Box((1, 1), (1, 1)),
    Box((2, 1), (1, 2)),
]


def test_a_pinwheel_is_a_tiling():
    assert is_tiling((3, 3), PINWHEEL, [0, 1])


def test_a_pinwheel_without_its_middle_is_none():
    assert not is_tiling((3, 3), [*PINWHEEL[:3], PINWHEEL[4]], [0, 1])


def test_a_hole_and_an_overlap_of_one_size_do_not_cancel():
    boxes = [Box((0, 0), (1, 2)), Box((0, 1), (1, 2)), Box((1, 0), (1, 2))]
    assert not is_tiling((2, 3), boxes, cut_dims((2, 3), boxes))


def test_boxes_that_span_everything_tile_only_alone():
    assert is_tiling((2, 2), [whole((2, 2))], [])
    assert not is_tiling((2, 2), [whole((2, 2))] * 2, [])


def test_a_dim_is_cut_if_some_box_does_not_span_it():
    boxes = [Box((0, 0, 0), (1, 4, 5)), Box((1, 0, 0), (2, 4, 5))]
    assert cut_dims((3, 4, 5), boxes) == [0]
