"""What ranks write: each element once, from where its shard has it, and about the same on each."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from dsdformat.boxes import Box, cut_dims, is_tiling
from dsdformat.plan.mesh import Replicate, Shard
from dsdformat.plan.save_plan import SPLIT_NBYTES, plan_save
from dsdformat.plan.sharding import BoxSharding, FlatSharding, Held, MeshSharding, on_each

SHAPES = [(), (1,), (7,), (5, 3), (1, 9), (4, 2, 3), (0, 3), (64,)]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def in_shard(held: Held, shard: np.ndarray) -> np.ndarray:
    """What a shard has of a box, in the box's shape."""
    part = shard[(..., *slices(held.inner))]
    if held.order is not None or part.shape != held.outer.shape:
        order = held.order or range(len(held.outer.shape))
        part = part.reshape([held.outer.shape[dim] for dim in order])
        part = part.transpose([list(order).index(dim) for dim in range(len(held.outer.shape))])
    return part


def shard_of(whole: np.ndarray, sharding, position: int) -> np.ndarray:
    shard = np.full(sharding.shard_shape(position), -1)
    for held in sharding.held(position):
        in_shard(held, shard)[...] = whole[slices(held.outer)]
    return shard


def some_sharding(some: random.Random, shape: tuple[int, ...], world_size: int):
    ranks = tuple(some.sample(range(world_size), world_size))
    kind = some.randrange(4)
    if kind == 0:
        return on_each(shape, ranks[: some.randint(1, world_size)])
    if kind == 1:
        count = some.choice([1, world_size])
        numel = int(np.prod(shape))
        pieces = tuple(number % count for number in range(world_size))
        start = some.randrange(5)
        return FlatSharding(shape, ranks, start, -(-(start + numel + 1) // count), pieces)
    mesh_shape = some.choice(
        [
            s
            for s in [(world_size,), (2, world_size // 2), (1, world_size)]
            if np.prod(s) == world_size
        ]
    )
    cuts = [Replicate(), *(Shard(dim, k) for dim in range(len(shape)) for k in (1, 1, 2))]
    sharding = MeshSharding(shape, ranks, mesh_shape, tuple(some.choice(cuts) for _ in mesh_shape))
    if kind == 2:
        return sharding
    return overlapping(some, shape, ranks)


def overlapping(some: random.Random, shape: tuple[int, ...], ranks: tuple[int, ...]) -> BoxSharding:
    """Two flat shardings of other cuts, each over half of the ranks, as one table."""
    numel = int(np.prod(shape))
    table, shapes = [], []
    half = -(-len(ranks) // 2)
    for part in (ranks[:half], ranks[half:]):
        start = some.randrange(4)
        one = FlatSharding(
            shape,
            part,
            start,
            -(-(start + numel) // max(1, len(part))) or 1,
            tuple(range(len(part))),
        )
        table += [tuple(one.held(position)) for position in range(len(part))]
        shapes += [one.shard_shape(position) for position in range(len(part))]
    return BoxSharding(shape, ranks, tuple(table), tuple(shapes))


@pytest.mark.parametrize("seed", range(300))
def test_each_element_is_written_once_with_its_value(seed):
    some = random.Random(seed)
    world_size = some.choice([1, 2, 3, 4, 6, 8])
    tensors = [
        (some_sharding(some, some.choice(SHAPES), world_size), some.choice([1, 2, 4]))
        for _ in range(some.randint(1, 5))
    ]
    plans = {rank: plan_save(tensors, rank) for rank in range(world_size)}
    for number, (sharding, _) in enumerate(tensors):
        whole = np.arange(int(np.prod(sharding.shape))).reshape(sharding.shape)
        found, times = np.full(sharding.shape, -1), np.zeros(sharding.shape, int)
        boxes = 0
        for position, rank in enumerate(sharding.ranks):
            shard = shard_of(whole, sharding, position)
            for held in plans[rank][number]:
                if whole.size:
                    found[slices(held.outer)] = in_shard(held, shard)
                times[slices(held.outer)] += 1
                boxes += 1
        assert (times == 1).all()
        assert (found == whole).all()
        assert boxes >= 1  # an empty tensor is written too


def written(tensors, ranks) -> list[int]:
    """Bytes of each rank."""
    return [
        sum(
            held.outer.numel * width
            for helds, (_, width) in zip(plan_save(tensors, rank), tensors, strict=True)
            for held in helds
        )
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((8,), (Replicate(),)),
        ((2, 4), (Replicate(), Shard(0))),
        ((4, 2), (Shard(0), Replicate())),
        ((2, 2, 2), (Replicate(), Shard(0), Replicate())),
    ],
    ids=["ddp", "hsdp", "tp", "three-axes"],
)
def test_replicas_are_spread_by_bytes(mesh_shape, placements):
    some = random.Random(0)
    ranks = tuple(range(8))
    tensors = [
        (MeshSharding((some.randint(1, 400) * 8, 64), ranks, mesh_shape, placements), 4)
        for _ in range(200)
    ]
    total = written(tensors, ranks)
    assert max(total) <= 1.1 * sum(total) / len(total)


def test_the_holders_of_one_huge_tensor_share_it():
    ranks = tuple(range(4))
    tensors = [(on_each((64, 1 << 20), ranks), 4)]
    assert written(tensors, ranks) == [64 << 20] * 4


def test_a_small_tensor_is_never_cut():
    ranks = tuple(range(4))
    count = SPLIT_NBYTES // 4
    plans = [plan_save([(on_each((count,), ranks), 4)], rank)[0] for rank in ranks]
    assert [len(helds) for helds in plans] == [1, 0, 0, 0]


def test_what_only_some_ranks_have_counts_before_what_all_have():
    ranks = tuple(range(4))
    alone = (on_each((1000,), (2,)), 4)
    tensors = [*[(on_each((100,), ranks), 4)] * 30, alone]
    own = MeshSharding((4000,), ranks, (4,), (Shard(0),)), 4
    assert written([*tensors, own], ranks)[2] >= 4000
    assert plan_save(tensors, 2)[-1] == [Held(Box((0,), (1000,)), Box((0,), (1000,)))]


def test_ranks_of_another_set_change_nothing():
    ranks = (4, 5, 6, 7)
    mine = [(on_each((10 * n + 10, 8), ranks), 2) for n in range(40)]
    others = [(on_each((999, 8), (0, 1, 2, 3)), 2)] * 7
    for rank in ranks:
        mixed = plan_save([*others, *mine], rank)
        assert mixed[len(others) :] == plan_save(mine, rank)


def test_all_ranks_see_the_same_plan():
    some = random.Random(3)
    tensors = [(some_sharding(some, (64, 8), 6), 4) for _ in range(60)]
    plans = [plan_save(tensors, rank) for rank in range(6)]
    again = [plan_save(list(tensors), rank) for rank in range(6)]
    assert plans == again
    assert all(
        sum(held.outer.numel for rank in range(6) for held in plans[rank][number]) == 512
        for number in range(60)
    )
    assert len(list(itertools.chain(*plans))) == 360


def test_what_all_ranks_know_counts_for_a_part_of_them():
    """A stage knows what the whole world writes, and evens it out; the world knows no stage."""
    world, stage = tuple(range(4)), (2, 3)
    uneven = BoxSharding(
        (4000,),
        world,
        tuple(
            (Held(Box((low,), (high - low,)), Box((0,), (high - low,))),)
            for low, high in itertools.pairwise((0, 500, 1000, 3500, 4000))
        ),
        ((500,), (500,), (2500,), (500,)),
    )
    tensors = [(uneven, 1), *[(on_each((100,), stage), 1)] * 20, *[(on_each((10,), world), 1)] * 9]
    ranks = written(tensors, world)
    assert sum(ranks) == 4000 + 2000 + 90
    assert ranks[2] == 2500  # it holds that alone, so the rest of its stage writes what both hold
    assert ranks[3] == 500 + 2000 + 30
    assert ranks[0] == ranks[1] == 500 + 30


def test_boxes_with_fewer_holders_come_first_and_the_others_level_out():
    ranks = tuple(range(8))
    some = random.Random(5)
    tensors = []
    for _ in range(60):
        shape = (some.randint(1, 40) * 8, 64)
        tensors.append((MeshSharding(shape, ranks, (8,), (Shard(0),)), 4))
        tensors.append((MeshSharding(shape, ranks, (4, 2), (Shard(0), Replicate())), 4))
        tensors.append((MeshSharding(shape, ranks, (2, 4), (Replicate(), Shard(0))), 4))
        tensors.append((on_each(shape, ranks), 4))
        tensors.append((on_each((), ranks), 4))
    total = written(tensors, ranks)
    assert max(total) - min(total) <= max(held_nbytes(one) for one in tensors)
    assert max(total) <= 1.02 * min(total)


def held_nbytes(one) -> int:
    sharding, width = one
    return width * max(held.outer.numel for held in sharding.held(0))


HUGE = [
    pytest.param((128_256, 4096), None, id="an-embedding"),
    pytest.param((1, 1, 1 << 29), None, id="one-row"),
    pytest.param((3, 1 << 27), None, id="fewer-rows-than-ranks"),
    pytest.param((8192, 16384), (1, 0), id="flat-and-transposed"),
]


@pytest.mark.parametrize(("shape", "order"), HUGE)
def test_pieces_are_large_and_whole_pages_and_together_all(shape, order):
    ranks = tuple(range(16))
    numel = int(np.prod(shape))
    sharding = on_each(shape, ranks)
    if order is not None:
        sharding = FlatSharding(shape, ranks, 0, numel, (0,) * 16, order)
    plans = [plan_save([(sharding, 4)], rank)[0] for rank in ranks]
    boxes = [held.outer for helds in plans for held in helds]
    assert sum(box.numel for box in boxes) == numel
    assert is_tiling(shape, boxes, cut_dims(shape, boxes))
    sizes = sorted(4 * box.numel for box in boxes)
    assert sizes[0] >= min(SPLIT_NBYTES, sizes[-1] / 2)
    assert all(size % 4096 == 0 for size in sizes)
    each = [4 * sum(held.outer.numel for held in helds) for helds in plans]
    assert max(each) <= 1.1 * 4 * numel / 16 + SPLIT_NBYTES
    if order is not None:  # contiguous in the flat shard
        assert all(held.inner.shape == (held.outer.numel,) for helds in plans for held in helds)
        assert len(boxes) == 16


def test_few_tensors_are_cut_where_there_are_many():
    ranks = tuple(range(8))
    some = random.Random(1)
    tensors = [(on_each((some.randint(1, 4) * 1024, 4096), ranks), 4) for _ in range(400)]
    plans = [plan_save(tensors, rank) for rank in ranks]
    assert sum(len(helds) for plan in plans for helds in plan) == len(tensors)


def corner(size: int) -> Held:
    return Held(Box((0, 0), (size, size)), Box((0, 0), (size, size)))


def test_of_boxes_that_overlap_the_smaller_one_is_taken_first():
    table = ((corner(10),), (corner(4),), ())
    sharding = BoxSharding((10, 10), (0, 1, 2), table, ((10, 10), (4, 4), (0, 0)))
    first, second, third = (plan_save([(sharding, 4)], rank)[0] for rank in range(3))
    assert [str(held.outer) for held in second] == ["[0:4,0:4]"]
    assert sorted(str(held.outer) for held in first) == ["[0:4,4:10]", "[4:10,0:10]"]
    assert third == []


def test_a_cell_goes_to_whichever_of_its_holders_has_least_to_write():
    """Rank 1 has a corner of what rank 0 has, and much else: rank 0 writes the corner too."""
    table = ((corner(10),), (corner(4),))
    sharding = BoxSharding((10, 10), (0, 1), table, ((10, 10), (4, 4)))
    row = Held(Box((0,), (500,)), Box((0,), (500,)))
    alone = BoxSharding((500,), (0, 1), ((), (row,)), ((0,), (500,)))
    assert written([(sharding, 4), (alone, 4)], (0, 1)) == [400, 2000]


def test_the_rank_does_not_need_to_hold_anything():
    sharding = MeshSharding((3, 5), (0, 1), (2,), (Shard(0),))
    assert plan_save([(sharding, 4), (on_each((0, 2), (1, 0)), 4)], 7) == [[], []]


def test_equal_lists_of_ranks_are_one_whether_or_not_they_are_one_object():
    shapes = [(n, 8) for n in range(1, 30)]
    shared = tuple(range(6))
    copied = [tuple(sorted(shared)) for _ in shapes]
    one = [(on_each(shape, shared), 4) for shape in shapes]
    other = [(on_each(shape, ranks), 4) for shape, ranks in zip(shapes, copied, strict=True)]
    assert [plan_save(one, rank) for rank in shared] == [plan_save(other, rank) for rank in shared]
