"""A repeated save does not plan again, and a save of anything else does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from spreads import some_shape, some_sharding

from dsdformat.plan import kept_plans
from dsdformat.plan.kept_plans import KeptPlans
from dsdformat.plan.mesh import Replicate, Shard
from dsdformat.plan.save_plan import plan_save
from dsdformat.plan.sharding import MeshSharding, Sharding

RANKS = tuple(range(4))
Spreads = list[tuple[Sharding, int]]


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The ranks for which plans are made, one after another."""
    made: list[int] = []

    def noting(tensors: Spreads, rank: int) -> object:
        made.append(rank)
        return plan_save(tensors, rank)

    monkeypatch.setattr(kept_plans, "plan_save", noting)
    return made


def rows(*sizes: int, placement: object = None) -> Spreads:
    """Tensors of so many rows over all ranks; objects of their own at each call."""
    cut = Shard(0) if placement is None else placement
    return [(MeshSharding((size, 3), tuple(RANKS), (4,), (cut,)), 4) for size in sizes]


def test_what_is_spread_as_it_was_is_planned_once(made):
    plans = KeptPlans()
    first = plans.plan(rows(8, 9), 1)
    assert plans.plan(rows(8, 9), 1) is first
    assert first == plan_save(rows(8, 9), 1)
    assert made == [1]


OTHERS: dict[str, tuple[Callable[[], Spreads], int]] = {
    "shape": (lambda: rows(8, 10), 1),
    "order": (lambda: rows(9, 8), 1),
    "more": (lambda: rows(8, 9, 9), 1),
    "fewer": (lambda: rows(8), 1),
    "placement": (lambda: rows(8) + rows(9, placement=Replicate()), 1),
    "itemsize": (lambda: [*rows(8), (rows(9)[0][0], 2)], 1),
    "ranks": (lambda: [*rows(8), (MeshSharding((9, 3), (3, 2, 1, 0), (4,), (Shard(0),)), 4)], 1),
    "mesh": (
        lambda: [*rows(8), (MeshSharding((9, 3), RANKS, (2, 2), (Replicate(), Shard(0))), 4)],
        1,
    ),
    "rank": (lambda: rows(8, 9), 2),
}


@pytest.mark.parametrize(("make", "rank"), OTHERS.values(), ids=OTHERS)
def test_what_differs_in_anything_is_planned_anew(made, make, rank):
    plans = KeptPlans()
    plans.plan(rows(8, 9), 1)
    assert plans.plan(make(), rank) == plan_save(make(), rank)
    assert made == [1, rank]


def test_two_states_that_are_saved_in_turn_are_planned_once_each(made):
    plans = KeptPlans()
    for _ in range(3):
        plans.plan(rows(8, 9), 1)
        plans.plan(rows(7), 1)
    assert made == [1, 1]


def test_no_more_than_the_last_plans_are_kept(made):
    plans = KeptPlans()
    for size in (5, 6, 7, 5):
        plans.plan(rows(size), 1)
    assert made == [1, 1, 1, 1]


def test_plans_of_very_many_tensors_are_not_kept(made, monkeypatch):
    monkeypatch.setattr(kept_plans, "_TENSORS", 3)
    plans = KeptPlans()
    for _ in range(2):
        plans.plan(rows(1, 2, 3, 4), 1)
    assert made == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_kept_their_plans_and_ranks_that_did_not_agree(seed):
    """One rank has saved before, others have not: all plans are those of ranks that never did."""
    some = random.Random(seed)
    tensors = [(some_sharding(some, some_shape(some), 4), some.choice([1, 4])) for _ in range(12)]
    plans = KeptPlans()
    plans.plan(tensors, some.randrange(4))
    plans.plan(tensors[:5], some.randrange(4))
    for rank in RANKS:
        assert plans.plan(list(tensors), rank) == plan_save(tensors, rank)
