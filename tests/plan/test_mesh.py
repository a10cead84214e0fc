"""Boxes of ranks: compared with torch's own arithmetic, and with cutting numpy arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsdformat.errors import ArgumentError
from dsdformat.plan.mesh import Replicate, Shard, coordinate_of, local_boxes, local_shape


def cut(array, mesh_shape, placements, coordinate):
    """What a rank holds, by cutting an array as torch cuts tensors."""
    for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            parts = chunks(array, placement.split_factor, placement.dim)
            pieces = [chunks(part, count, placement.dim)[index] for part in parts]
            array = np.concatenate(pieces, axis=placement.dim)
    return array


def chunks(array, count, dim):
    step = -(-array.shape[dim] // count)
    return [
        np.take(
            array,
            range(min(i * step, array.shape[dim]), min((i + 1) * step, array.shape[dim])),
            dim,
        )
        for i in range(count)
    ]


@st.composite
def layouts(draw):
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placement = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, st.integers(0, ndim - 1), st.sampled_from([1, 1, 2, 3])),
    )
    return shape, mesh, tuple(draw(st.lists(placement, min_size=len(mesh), max_size=len(mesh))))


@given(layouts())
@settings(max_examples=400, deadline=None)
def test_the_boxes_of_all_ranks_hold_what_cutting_an_array_gives(layout):
    shape, mesh, placements = layout
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        expected = cut(array, mesh, placements, coordinate)
        assert local_shape(shape, mesh, placements, coordinate) == expected.shape
        held = np.full(expected.shape, -1)
        for outer, inner in local_boxes(shape, mesh, placements, coordinate):
            held[slices(inner)] = array[slices(outer)]
        assert np.array_equal(held, expected)


def slices(box):
    return tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_every_element_is_held_by_as_many_ranks_as_there_are_replicas(layout):
    shape, mesh, placements = layout
    copies = [n for n, p in zip(mesh, placements, strict=True) if p == Replicate()]
    count = np.zeros(shape, int)
    for coordinate in itertools.product(*map(range, mesh)):
        for outer, _ in local_boxes(shape, mesh, placements, coordinate):
            count[slices(outer)] += 1
    assert (count == np.prod(copies, dtype=int)).all()


def test_rows_that_two_axes_cut_are_one_box_each():
    # FSDP over a column-parallel weight: the inner axis holds the outer ranges.
    mesh, placements = (2, 2), (Shard(0, split_factor=2), Shard(0))
    offsets = {
        coordinate: local_boxes((8, 4), mesh, placements, coordinate)[0][0].offset[0]
        for coordinate in itertools.product(range(2), range(2))
    }
    assert offsets == {(0, 0): 0, (1, 0): 2, (0, 1): 4, (1, 1): 6}


def test_a_shard_of_interleaved_halves_is_two_boxes():
    boxes = local_boxes((8, 4), (2,), (Shard(0, split_factor=2),), (1,))
    assert [str(outer) for outer, _ in boxes] == ["[2:4,0:4]", "[6:8,0:4]"]
    assert [str(inner) for _, inner in boxes] == ["[0:2,0:4]", "[2:4,0:4]"]


def test_ranks_beyond_the_rows_hold_nothing():
    assert local_boxes((1, 17), (4,), (Shard(0),), (3,)) == []
    assert local_shape((1, 17), (4,), (Shard(0),), (3,)) == (0, 17)


def test_a_tensor_without_dims_is_one_box():
    ((outer, inner),) = local_boxes((), (2,), (Replicate(),), (1,))
    assert outer == inner
    assert outer.numel == 1


def test_positions_are_row_major():
    assert [coordinate_of(p, (2, 3)) for p in (0, 2, 3, 5)] == [(0, 0), (0, 2), (1, 0), (1, 2)]


@pytest.mark.parametrize(
    ("mesh", "placements", "coordinate"),
    [
        pytest.param((2,), (), (0,), id="no-placement"),
        pytest.param((2,), (Shard(0),), (2,), id="coordinate-outside"),
        pytest.param((2,), (Shard(2),), (0,), id="no-such-dim"),
        pytest.param((2,), (Shard(0, 0),), (0,), id="no-parts"),
    ],
)
def test_what_does_not_fit_together_is_refused(mesh, placements, coordinate):
    with pytest.raises(ArgumentError) as caught:
        local_boxes((4, 4), mesh, placements, coordinate)
    assert caught.value.code == "bad_argument"
