"""Chunk tables that are seen to be sound: never one in which the rules find a fault."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import pytest
from bench.papers import PaperTensor, make_part, manifest_of, opened

from dsdformat import Checkpoint
from dsdformat.boxes import Box
from dsdformat.errors import FormatError
from dsdformat.format.checks import check_tensor
from dsdformat.plan.chunk_tables import find_sound_table, table_of_row
from dsdformat.plan.load_plan import Wanted
from dsdformat.plan.mesh import Shard
from dsdformat.plan.part import Part
from dsdformat.plan.part_merge import merge_parts
from dsdformat.plan.sharding import FlatSharding, MeshSharding

RANKS = tuple(range(6))
TENSORS = [
    PaperTensor("a", MeshSharding((13, 5), RANKS, (6,), (Shard(0),))),
    PaperTensor("b", MeshSharding((6, 7, 4), RANKS, (3, 2), (Shard(1), Shard(2))), "bfloat16"),
    PaperTensor("c", FlatSharding((9, 11), RANKS, 3, 19, RANKS)),
    PaperTensor("d", MeshSharding((40_000,), RANKS, (6,), (Shard(0),))),
]
NAMES = [one.name for one in TENSORS]


def made(block_nbytes: int = 4096) -> Part:
    """What six ranks wrote, each all that it holds."""
    parts = []
    for rank in RANKS:
        plan = [one.sharding.held(rank) for one in TENSORS]
        parts.append(make_part(TENSORS, plan, rank, len(RANKS), block_nbytes))
    return merge_parts(parts)


def problems_of(checkpoint: Checkpoint, tensor: int) -> list[Any]:
    table = checkpoint.table
    row, problems = check_tensor(table.body, table.columns, tensor, table.name)
    return problems or table._prefix_problems(tensor, row)


def sound(checkpoint: Checkpoint, tensor: int) -> Any:
    table = checkpoint.table
    return find_sound_table(table.body, table.columns, tensor, table.path(tensor))


@pytest.mark.parametrize("tensor", range(len(TENSORS)), ids=NAMES)
def test_what_many_ranks_wrote_is_seen_to_be_sound(tensor):
    checkpoint = opened(manifest_of(made()))
    quick, row = sound(checkpoint, tensor), checkpoint.table.row(tensor)
    slow = table_of_row(row)
    assert quick is not None
    chunks = [one._replace(frame_at=()) for one in row.chunks]  # raw: there are no frames
    assert [quick.place(number) for number in range(quick.chunks)] == chunks
    assert (quick.dtype, quick.shape, quick.chunks) == (slow.dtype, slow.shape, slow.chunks)


def spoil(some: random.Random, part: Part) -> None:
    """Change one number of the chunk table: a little, or to what does not belong there."""
    columns = [column for column in part.chunks[1:] if len(column)]
    column: array[int] = some.choice(columns)
    at, most = some.randrange(len(column)), 2 ** (8 * column.itemsize) - 1
    near = column[at] + some.choice([-5, -1, 1, 4, 4096])
    column[at] = min(max(some.choice([near, near, near, 0, most, some.randint(0, 60)]), 0), most)


@pytest.mark.parametrize("seed", range(400))
def test_a_table_with_a_fault_is_never_seen_to_be_sound(seed):
    some, part = random.Random(seed), made()
    for _ in range(some.choice([1, 1, 1, 2])):
        spoil(some, part)
    checkpoint = opened(manifest_of(part))
    for tensor in range(len(TENSORS)):
        if sound(checkpoint, tensor) is not None:
            assert problems_of(checkpoint, tensor) == []


@pytest.mark.parametrize("seed", range(100))
def test_a_fault_is_told_of_as_the_rules_do_before_anything_is_read(seed):
    some, part = random.Random(seed), made()
    spoil(some, part)
    checkpoint = opened(manifest_of(part))
    for tensor, one in enumerate(TENSORS):
        problems = problems_of(checkpoint, tensor)
        wanted = [Wanted(tensor, Box((0,) * len(one.sharding.shape), one.sharding.shape))]
        if not problems:
            checkpoint.plan_boxes(wanted)
            continue
        with pytest.raises(FormatError) as caught:
            checkpoint.plan_boxes(wanted)
        assert caught.value.problems == tuple(problems)


@pytest.mark.parametrize(
    "prefix",
    [pytest.param(("optimizer",), id="of-another"), pytest.param(("model", "a"), id="longer")],
)
def test_a_file_of_another_section_is_looked_at_closer(prefix):
    part = made()
    part.files[2] = replace(part.files[2], prefix=prefix)
    checkpoint = opened(manifest_of(part))
    assert all(sound(checkpoint, tensor) is None for tensor in range(len(TENSORS)))
    with pytest.raises(FormatError) as caught:
        checkpoint.plan_boxes([Wanted(0, Box((0, 0), (13, 5)))])
    assert caught.value.code == "prefix_mismatch"


def test_compressed_chunks_are_looked_at_closer():
    part = made()
    part.chunks.codec[3] = 1
    checkpoint = opened(manifest_of(part))
    assert sound(checkpoint, 0) is None
