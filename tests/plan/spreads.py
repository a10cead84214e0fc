"""Tensors spread over ranks at random, what each rank then holds, and checkpoints of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsdformat import Box, Checkpoint, PartWriter, TensorSource, Writer
from dsdformat.boxes import flat_boxes, whole
from dsdformat.plan.load_plan import Wanted
from dsdformat.plan.mesh import Placement, Replicate, Shard
from dsdformat.plan.save_plan import plan_save
from dsdformat.plan.sharding import BoxSharding, FlatSharding, Held, MeshSharding, Sharding, on_each
from dsdformat.storage.memory import MemoryStorage, MemoryTarget

Array = Any

DTYPES = {"uint8": "u1", "float16": "<f2", "int32": "<i4", "float64": "<f8", "complex128": "<c16"}


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def view_of(held: Held, shard: Array) -> Array:
    """What a shard has of a box, in the box's shape; a view."""
    part = shard[(*slices(held.inner), ...)]
    if held.order is not None or part.shape != held.outer.shape:
        order = held.order or tuple(range(len(held.outer.shape)))
        part = part.reshape([held.outer.shape[dim] for dim in order])
        part = part.transpose([order.index(dim) for dim in range(len(order))])
    return part


def shard_of(array: Array, sharding: Sharding, position: int) -> Array:
    """What a rank holds of an array."""
    shard = np.zeros(sharding.shard_shape(position), array.dtype)
    for held in sharding.held(position):
        view_of(held, shard)[...] = array[(*slices(held.outer), ...)]
    return shard


# At random


def some_shape(some: random.Random) -> tuple[int, ...]:
    """Of 0 to 4 dims: long, short, odd, 1 and 0."""
    ndim = some.choice([0, 1, 1, 2, 2, 2, 3, 3, 4])
    longest = [0, 4000, 90, 24, 9][ndim]
    sizes = [1, 2, 3, 5, 7, 8, 16]
    shape = [some.choice([*sizes, some.randint(1, longest)]) for _ in range(ndim)]
    if shape and some.random() < 0.08:
        shape[some.randrange(ndim)] = 0
    return tuple(shape)


def some_mesh(some: random.Random, count: int) -> tuple[int, ...]:
    """A shape of a mesh of so many ranks."""
    first = some.choice([n for n in range(1, count + 1) if count % n == 0])
    return some.choice([(count,), (first, count // first), (1, first, count // first)])


def some_placements(some: random.Random, ndim: int, axes: int) -> tuple[Placement, ...]:
    choices: list[Placement] = [Replicate()]
    choices += [Shard(dim, factor) for dim in range(ndim) for factor in (1, 1, 1, 2, 3)]
    return tuple(some.choice(choices) for _ in range(axes))


def some_flat(some: random.Random, shape: tuple[int, ...], ranks: tuple[int, ...]) -> FlatSharding:
    """Pieces of a flat tensor that has others around; each on one rank, or on several."""
    copies = some.choice([n for n in (1, 1, 2) if len(ranks) % n == 0])
    count, numel = len(ranks) // copies, math.prod(shape)
    start = some.randrange(8)
    piece = -(-(start + numel + some.randrange(8)) // count) or 1
    order = list(range(len(shape)))
    some.shuffle(order)
    turned = tuple(order) if len(shape) > 1 and some.random() < 0.4 else None
    pieces = tuple(number % count for number in range(len(ranks)))
    return FlatSharding(shape, ranks, start, piece, pieces, turned)


def some_table(some: random.Random, shape: tuple[int, ...], ranks: tuple[int, ...]) -> BoxSharding:
    """Boxes that overlap: each half of the ranks has all of it, in flat ranges of its own cuts."""
    numel, half = math.prod(shape), -(-len(ranks) // 2)
    table, shapes = [], []
    for part in (ranks[:half], ranks[half:]):
        cuts = sorted(some.randint(0, numel) for _ in part[1:])
        for start, stop in zip([0, *cuts], [*cuts, numel], strict=True):
            row, at = [], 0
            for box in flat_boxes(shape, start, stop):
                row.append(Held(box, Box((at,), (box.numel,))))
                at += box.numel
            table.append(tuple(row))
            shapes.append((stop - start,))
    table, shapes = table[: len(ranks)], shapes[: len(ranks)]
    return BoxSharding(shape, ranks, tuple(table), tuple(shapes))


def some_sharding(
    some: random.Random, shape: tuple[int, ...], world_size: int, *, tables: bool = True
) -> Sharding:
    """Over all ranks in any order, or over one half of them as over a pipeline's stage."""
    ranks = tuple(some.sample(range(world_size), world_size))
    if world_size > 1 and some.random() < 0.3:
        ranks = tuple(sorted(ranks)[: world_size // 2])
    kind = some.random()
    if kind < 0.1:
        return on_each(shape, ranks)
    if kind < 0.25:
        return some_flat(some, shape, ranks)
    if kind < 0.35 and tables and 0 not in shape:
        return some_table(some, shape, ranks)
    mesh = some_mesh(some, len(ranks))
    return MeshSharding(shape, ranks, mesh, some_placements(some, len(shape), len(mesh)))


# Checkpoints of them


@dataclass(frozen=True)
class Spread:
    """A tensor, and how it is spread.

    Attributes:
        name: In the checkpoint.
        dtype: Logical name.
        array: All of it.
        sharding: Of the ranks that save, or of those that load.
        codec: That it is stored with.
    """

    name: str
    dtype: str
    array: Array
    sharding: Sharding
    codec: str = "raw"


def some_array(some: random.Random, dtype: str, shape: tuple[int, ...]) -> Array:
    """Bytes of any kind, of which a codec can save some."""
    count = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    data = some.randbytes(count) if some.random() < 0.5 else bytes(count)
    return np.frombuffer(bytearray(data), np.uint8).view(DTYPES[dtype]).reshape(shape)


def state_of(spreads: Sequence[Spread], rank: int, piece_nbytes: int) -> dict[str, Any]:
    """What a rank gives to its writer: tensors that it holds some of, the boxes that it writes."""
    stakes = [(one.sharding, one.array.itemsize) for one in spreads]
    plan = plan_save(stakes, rank, piece_nbytes=piece_nbytes)
    model = {}
    for one, boxes in zip(spreads, plan, strict=True):
        if rank not in one.sharding.ranks:
            assert not boxes
            continue
        shard = shard_of(one.array, one.sharding, one.sharding.ranks.index(rank))
        chunks = []
        for held in boxes:
            data = np.ascontiguousarray(view_of(held, shard)) if held.outer.numel else b""
            chunks.append((held.outer, bytes(data)))
        model[one.name] = TensorSource(one.dtype, one.array.shape, chunks, codec=one.codec)
    return {"model": model, "step": 7}


def save(
    spreads: Sequence[Spread], world_size: int, *, piece_nbytes: int = 4096, **options: Any
) -> dict[str, bytearray]:
    """Write tensors from all ranks; give the files of the checkpoint."""
    files: dict[str, bytearray] = {}
    target = MemoryTarget(files)
    options = {"threads": 1, "world_size": world_size, "block_nbytes": 4096, **options}
    first, *others = [
        (PartWriter if rank else Writer)(target, **({"rank": rank} if rank else {}), **options)
        for rank in range(world_size)
    ]
    first.add(state_of(spreads, 0, piece_nbytes))
    parts = []
    for rank, writer in enumerate(others, 1):
        writer.add(state_of(spreads, rank, piece_nbytes))
        parts.append(writer.finish())
    first.commit(parts)
    return files


def opened(files: dict[str, bytearray], **options: Any) -> Checkpoint:
    return Checkpoint(MemoryStorage(files), threads=1, **options)


def destination(view: Array, shard: Array) -> memoryview:
    """The memory of a shard from the first element of a view to its last."""
    raw = memoryview(shard.reshape(-1).view(np.uint8))
    begin = view.__array_interface__["data"][0] - shard.__array_interface__["data"][0]
    steps = zip(view.shape, view.strides, strict=True)
    return raw[begin : begin + view.itemsize + sum((size - 1) * by for size, by in steps)]


def wanted_by(
    spreads: Sequence[Spread], indexes: Sequence[int], rank: int
) -> tuple[list[Wanted], list[memoryview], list[tuple[Array, Array]]]:
    """What a rank that loads wants: boxes, their places, and shards with what they should hold."""
    wanted, into, shards = [], [], []
    for one, index in zip(spreads, indexes, strict=True):
        if rank not in one.sharding.ranks:
            continue
        position = one.sharding.ranks.index(rank)
        expected = shard_of(one.array, one.sharding, position)
        shard = np.zeros_like(expected)
        shards.append((shard, expected))
        for held in one.sharding.held(position):
            view = view_of(held, shard)
            if 0 in held.outer.shape:
                continue
            packed = view.flags.c_contiguous
            wanted.append(Wanted(index, held.outer, None if packed else view.strides))
            into.append(destination(view, shard))
    return wanted, into, shards


def indexes_of(checkpoint: Checkpoint, spreads: Sequence[Spread]) -> list[int]:
    return [checkpoint.tensor(("model", one.name)).index for one in spreads]


def all_of(shape: tuple[int, ...]) -> Box:
    return whole(shape)
