"""States of random number generators come back, and go on with the same numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from sameness import assert_same

import dsdformat.numpy

BIT_GENERATORS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox]
BIT_GENERATORS += [np.random.SFC64]


def draw(generator: np.random.Generator) -> list[Any]:
    """Numbers of several kinds: some keep half a word for the next call."""
    return [
        generator.random(),
        generator.standard_normal(),
        int(generator.integers(0, 2**32, dtype=np.uint32)),
        generator.permutation(10).tolist(),
        generator.bytes(5),
    ]


@pytest.mark.parametrize("kind", BIT_GENERATORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("drawn", [0, 1, 3])
def test_a_numpy_generator_goes_on_with_its_own_numbers(round_trip, kind, drawn):
    generator = np.random.Generator(kind(42))
    for _ in range(drawn):
        draw(generator)
    generator.integers(0, 10, dtype=np.uint32)  # leaves half a word behind
    state = generator.bit_generator.state
    loaded = round_trip({"rng": state})["rng"]
    assert_same(state, loaded)
    other = np.random.Generator(kind(7))
    other.bit_generator.state = loaded
    assert draw(other) == draw(generator)


@pytest.mark.parametrize("legacy", [True, False], ids=["tuple", "dict"])
def test_the_global_state_of_numpy_goes_on_with_its_own_numbers(round_trip, legacy):
    source = np.random.RandomState(5)
    source.standard_normal(3)  # an odd number: one is kept for the next call
    state = source.get_state(legacy=legacy)
    loaded = round_trip({"rng": state})["rng"]
    assert_same({"rng": state}, {"rng": loaded})
    other = np.random.RandomState(6)
    other.set_state(loaded)
    assert other.standard_normal(5).tolist() == source.standard_normal(5).tolist()


@pytest.mark.parametrize("gauss", [False, True], ids=["plain", "with half a pair"])
def test_the_state_of_pythons_random_goes_on_with_its_own_numbers(round_trip, gauss):
    source = random.Random(3)
    source.random()
    if gauss:
        source.gauss(0, 1)
    state = source.getstate()
    loaded = round_trip({"rng": state})["rng"]
    assert_same({"rng": state}, {"rng": loaded})
    other = random.Random(4)
    other.setstate(loaded)
    assert [other.gauss(0, 1) for _ in range(5)] == [source.gauss(0, 1) for _ in range(5)]


def test_each_rank_gets_its_own_state_back(round_trip):
    generators = [np.random.default_rng(rank) for rank in range(4)]
    for rank, generator in enumerate(generators):
        generator.random(rank)
    loaded = round_trip({"rng": {rank: g.bit_generator.state for rank, g in enumerate(generators)}})
    for rank, generator in enumerate(generators):
        other = np.random.default_rng(9)
        other.bit_generator.state = loaded["rng"][rank]
        assert other.random(5).tolist() == generator.random(5).tolist()


def test_saving_and_loading_draw_no_random_numbers(tmp_path):
    before = (random.getstate(), np.random.get_state(legacy=False))
    dsdformat.numpy.save(tmp_path / "checkpoint", {"w": np.arange(3)}, codec="zstd")
    dsdformat.numpy.load(tmp_path / "checkpoint")
    assert_same(before, (random.getstate(), np.random.get_state(legacy=False)))


def test_a_generator_is_not_changed_by_saving_its_state(round_trip):
    generator = np.random.default_rng(1)
    before = generator.bit_generator.state
    round_trip({"rng": generator.bit_generator.state})
    assert_same(before, generator.bit_generator.state)


def test_one_state_holds_all_the_odd_things_that_trainers_put_into_one(round_trip):
    state = {
        "loss": np.float64(0.25),
        "step": np.int32(7),
        "numpy": np.random.RandomState(1).get_state(),
        "python": random.Random(1).getstate(),
        "seen": {1, 2, 3},
        "best": {"epoch": 3, "path": __import__("pathlib").PurePosixPath("runs/3")},
        "started": __import__("datetime").datetime(2026, 3, 29, 2, 30, fold=1),
    }
    assert_same(state, round_trip(state))
