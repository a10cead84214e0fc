"""Routes between ranks: every element arrives once, from whatever spread into whatever other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest
import torch

from dsdformat.plan.mesh import Replicate, Shard
from dsdformat.plan.sharding import BoxSharding, FlatSharding, MeshSharding, Sharding, on_each
from dsdformat.torch.buffers import as_bits, box_view
from dsdformat.torch.routes import Routes, Spread
from dsdformat.torch.sharding import held_view

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.bool]
SHAPES = [(), (1,), (7,), (5, 3), (1, 9), (4, 2, 3), (0, 3)]


def some_mesh_sharding(some: random.Random, shape: tuple[int, ...], ranks: list[int]) -> Sharding:
    mesh_shape = some.choice([(len(ranks),), (2, len(ranks) // 2)] if len(ranks) > 1 else [(1,)])
    cuts = [Replicate(), *(Shard(dim, k) for dim in range(len(shape)) for k in (1, 1, 2))]
    return MeshSharding(
        shape, tuple(ranks), mesh_shape, tuple(some.choice(cuts) for _ in mesh_shape)
    )


def some_flat_sharding(some: random.Random, shape: tuple[int, ...], ranks: list[int]) -> Sharding:
    numel = torch.Size(shape).numel()
    start = some.randrange(6)
    count = some.choice([1, len(ranks)])
    pieces = tuple(number % count for number in range(len(ranks)))
    order = tuple(some.sample(range(len(shape)), len(shape))) if some.random() < 0.3 else None
    piece_numel = -(-(start + numel + some.randrange(3)) // count) or 1
    return FlatSharding(shape, tuple(ranks), start, piece_numel, pieces, order)


def some_sharding(some: random.Random, shape: tuple[int, ...], ranks: list[int]) -> Sharding:
    kind = some.randrange(4)
    if kind == 0:
        return some_flat_sharding(some, shape, ranks)
    if kind == 1:
        return on_each(shape, some.sample(ranks, 1))
    sharding = some_mesh_sharding(some, shape, ranks)
    if kind == 2:
        return sharding
    held = tuple(tuple(sharding.held(position)) for position in range(len(ranks)))
    shapes = tuple(sharding.shard_shape(position) for position in range(len(ranks)))
    return BoxSharding(shape, tuple(ranks), held, shapes)


def noise(some: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    high = 2 if dtype is torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.tensor([some.randrange(high) for _ in range(count)], dtype=torch.uint8)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def cut(whole: torch.Tensor, sharding: Sharding, position: int) -> torch.Tensor:
    """What a rank holds of a tensor; other bits where it is blank."""
    shard = torch.zeros(sharding.shard_shape(position), dtype=whole.dtype)
    for held in sharding.held(position):
        as_bits(held_view(held, held.outer, shard)).copy_(as_bits(box_view(whole, held.outer)))
    return shard


def sent_by(
    routes: Routes, world_size: int, shards: list[Mapping[str, torch.Tensor]], bucket: int
) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Run all rounds for all ranks; return nothing but what ranks receive, and the most bytes."""
    into: list[dict[str, torch.Tensor]] = [
        {
            name: torch.zeros(spread.sharding.shard_shape(position), dtype=routes.forms[name][1])
            for name, spread in (routes.targets or {}).items()
            if (position := spread.positions[rank]) is not None
        }
        for rank in range(world_size)
    ]
    most = [0] * world_size
    for parts in routes.rounds(bucket):
        for source, target in itertools.product(range(world_size), repeat=2):
            nbytes = routes.nbytes(parts[source], target)
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            routes.pack(parts[source], target, shards[source], buffer)
            routes.unpack(parts[source], target, buffer, into[target])
        for source in range(world_size):
            sent = sum(routes.nbytes(parts[source], target) for target in range(world_size))
            most[source] = max(most[source], sent)
    return into, most


@pytest.mark.parametrize("seed", range(150))
def test_shards_arrive_whatever_the_spreads_are(seed):
    some = random.Random(seed)
    world_size = some.choice([1, 2, 3, 4, 6])
    ranks = list(range(world_size))
    wholes, sources, targets, forms = {}, {}, {}, {}
    for number in range(some.randint(1, 4)):
        name, shape, dtype = f"t{number}", some.choice(SHAPES), some.choice(DTYPES)
        wholes[name] = noise(some, shape, dtype)
        forms[name] = (shape, dtype)
        sources[name] = Spread.of(some_sharding(some, shape, some.sample(ranks, world_size)), ranks)
        targets[name] = Spread.of(some_sharding(some, shape, some.sample(ranks, world_size)), ranks)
    shards = [
        {
            name: cut(wholes[name], spread.sharding, position)
            for name, spread in sources.items()
            if (position := spread.positions[rank]) is not None
        }
        for rank in ranks
    ]
    into, most = sent_by(Routes(forms, sources, targets), world_size, shards, bucket := 64)
    for rank in ranks:
        for name, shard in into[rank].items():
            spread = targets[name]
            wanted = cut(wholes[name], spread.sharding, spread.positions[rank])
            assert torch.equal(as_bits(shard), as_bits(wanted)), (rank, name)
    # A piece is never cut below one element, which may be wanted by all.
    assert max(most) <= max(bucket, 16 * 2 * world_size) + 16 * world_size


@pytest.mark.parametrize("seed", range(50))
def test_each_element_is_given_by_one_rank(seed):
    some = random.Random(seed)
    ranks = list(range(some.choice([1, 2, 4, 6])))
    shape = some.choice(SHAPES)
    spread = Spread.of(some_sharding(some, shape, ranks), ranks)
    routes = Routes({"t": (shape, torch.float32)}, {"t": spread}, None)
    count = torch.zeros(shape, dtype=torch.int64)
    for parts in routes.rounds(some.choice([1, 20, 1 << 20])):
        for piece in itertools.chain.from_iterable(parts):
            box_view(count, piece.box).add_(1)
    assert torch.equal(count, torch.ones_like(count))


def test_ranks_give_equal_parts_of_each_bucket():
    ranks = range(4)
    sharding = MeshSharding((64, 16), tuple(ranks), (4,), (Shard(0),))
    spread = Spread.of(sharding, list(ranks))
    routes = Routes({"t": ((64, 16), torch.float32)}, {"t": spread}, None)
    rounds = list(routes.rounds(1024))
    assert len(rounds) == 4
    for parts in rounds:
        assert [routes.nbytes(pieces, None) for pieces in parts] == [256] * 4
