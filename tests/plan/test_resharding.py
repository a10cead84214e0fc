"""Any spread into any other, in one process, through real parts: what numpy slices is what is read.

Real ranks are elsewhere; here it is many pairs that count.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from spreads import (
    DTYPES,
    Spread,
    indexes_of,
    opened,
    save,
    some_array,
    some_shape,
    some_sharding,
    wanted_by,
)

from dsdformat.storage.memory import MemoryStorage
from dsdformat.verify import verify_storage

CHECKPOINTS, TENSORS = 56, 40  # pairs of spreads: one of each tensor


def some_spread(some: random.Random, number: int, world_size: int) -> Spread:
    shape, dtype = some_shape(some), some.choice(list(DTYPES))
    return Spread(
        f"t{number:02}",
        dtype,
        some_array(some, dtype, shape),
        some_sharding(some, shape, world_size),
        some.choice(["raw", "raw", "raw", "zstd", "planes+zstd"]),
    )


@pytest.mark.parametrize("seed", range(CHECKPOINTS))
def test_what_any_ranks_saved_is_what_any_ranks_load(seed):
    some = random.Random(seed)
    savers, loaders = some.choice([1, 2, 3, 4, 6, 8]), some.choice([1, 2, 3, 4, 6, 8])
    saved = [some_spread(some, number, savers) for number in range(TENSORS)]
    loaded = [replace(one, sharding=some_sharding(some, one.array.shape, loaders)) for one in saved]
    files = save(saved, savers, piece_nbytes=some.choice([64, 4096, 1 << 24]))
    assert verify_storage(MemoryStorage(files), threads=1).problems == ()
    with opened(files) as checkpoint:
        indexes = indexes_of(checkpoint, saved)
        for rank in range(loaders):
            wanted, into, shards = wanted_by(loaded, indexes, rank)
            checkpoint.read_boxes(wanted, into, verify=some.random() < 0.7)
            for shard, expected in shards:
                assert shard.tobytes() == expected.tobytes()


def test_that_many_pairs_are_tried():
    assert CHECKPOINTS * TENSORS >= 2000
