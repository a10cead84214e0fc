"""A thousand ranks and more, on paper: how many steps planning takes, counted and not timed.

Times are measured by tools/bench: `plan-save`, `plan-merge` and `plan-load`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from bench.papers import PaperTensor, make_part, manifest_of, opened

from dsdformat import Box
from dsdformat.plan import chunk_tables, tree_merge
from dsdformat.plan.load_plan import Wanted
from dsdformat.plan.mesh import Replicate, Shard
from dsdformat.plan.part import Part, read_parts
from dsdformat.plan.part_merge import check_complete, merge_parts
from dsdformat.plan.save_plan import plan_save
from dsdformat.plan.sharding import MeshSharding, Sharding, on_each


@pytest.fixture
def calls(monkeypatch) -> Callable[[Any, str], Counter[str]]:
    """`calls(owner, name)` counts the calls of a function from then on, under its name."""
    counter: Counter[str] = Counter()

    def calls(owner: Any, name: str) -> Counter[str]:
        function = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            counter[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, counted)
        return counter

    return calls


def square(ranks: int) -> int:
    return int(ranks**0.5)


def spread(kind: str, shape: tuple[int, ...], ranks: tuple[int, ...]) -> Sharding:
    count = len(ranks)
    side = square(count)
    if kind == "fsdp":
        return MeshSharding(shape, ranks, (count,), (Shard(0),))
    if kind == "hsdp":
        return MeshSharding(shape, ranks, (side, count // side), (Replicate(), Shard(0)))
    return MeshSharding(shape, ranks, (count // 8, 8), (Shard(0, 8), Shard(0)))


# Who writes what


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp-tp"])
@pytest.mark.parametrize("count", [1024, 16_384])
def test_a_rank_looks_at_its_own_shards_only_and_at_equal_ones_once(calls, kind, count):
    ranks = tuple(range(count))
    shapes = [(count * 2, 64), (count * 3, 32), (count - 100, 128)]
    tensors = [(spread(kind, shape, ranks), 4) for _ in range(300) for shape in shapes]
    tensors += [(on_each((), ranks), 4)] * 100
    found = calls(MeshSharding, "held")
    plan = plan_save(tensors, count // 3)
    assert 0 < found["held"] <= len(shapes) + 1
    assert sum(map(len, plan)) > 0


def test_ranks_of_a_large_mesh_write_everything_once():
    ranks = tuple(range(256))
    tensors = [
        (MeshSharding((1000, 3), ranks, (16, 16), (Replicate(), Shard(0))), 4),
        (MeshSharding((300, 5), ranks, (16, 16), (Shard(0), Shard(0))), 4),
        *[(on_each((7,), ranks), 4)] * 40,
    ]
    numels = [0] * len(tensors)
    for rank in ranks:
        for number, boxes in enumerate(plan_save(tensors, rank)):
            numels[number] += sum(held.outer.numel for held in boxes)
    assert numels == [3000, 1500, *[7] * 40]


# What they wrote, merged

RANKS, TENSORS = 192, 60


def parts_of(ranks: int, tensors: int) -> list[Part]:
    """Parts of ranks that have a row each of all tensors, and of a scalar one in all of them."""
    everyone = tuple(range(ranks))
    papers = [
        PaperTensor(f"w{n:04}", spread("fsdp", (ranks, 16), everyone)) for n in range(tensors)
    ]
    papers.append(PaperTensor("x", on_each((), everyone)))
    parts = []
    for rank in everyone:
        plan = [one.sharding.held(rank) for one in papers[:-1]]
        scalar = papers[-1].sharding.held(rank) if rank == 7 else []
        parts.append(make_part(papers, [*plan, scalar], rank, ranks))
    return parts


def test_parts_are_merged_without_an_object_for_a_chunk(calls):
    first, *others = parts_of(RANKS, TENSORS)
    received = read_parts(part.to_bytes() for part in others)
    made = calls(Box, "__post_init__")
    calls(tree_merge, "parse")
    merged = merge_parts([first, *received])
    check_complete(merged)
    assert len(merged.chunks.file) == RANKS * TENSORS + 1
    assert made["__post_init__"] <= 2
    assert made["parse"] <= 2  # the tree is the same on all ranks
    checkpoint = opened(manifest_of(merged))
    assert len(checkpoint.table.row(5).chunks) == RANKS


def test_what_ranks_have_alike_is_read_once():
    received = read_parts(part.to_bytes() for part in parts_of(16, 30))
    assert len({id(part.tensors) for part in received}) == 1


# What one rank loads


@pytest.fixture(scope="module")
def wide() -> Any:
    """A checkpoint of 1,024 ranks, opened."""
    everyone = tuple(range(1024))
    papers = [PaperTensor(f"w{n}", spread("fsdp", (4096, 8), everyone)) for n in range(8)]
    parts = []
    for rank in everyone:
        plan = [one.sharding.held(rank) for one in papers]
        parts.append(make_part(papers, plan, rank, 1024))
    return opened(manifest_of(merge_parts(parts)))


def test_a_rank_makes_objects_of_the_chunks_that_it_reads_only(wide, calls):
    made = calls(chunk_tables, "ChunkPlace")
    wanted = [Wanted(index, Box((16 * 33, 0), (16, 8))) for index in range(8)]
    plan = wide.plan_boxes(wanted)
    assert made["ChunkPlace"] == 8 * 4 == len(plan.chunks.tensor)
    assert (plan.wanted_nbytes, plan.read_nbytes) == (8 * 16 * 8 * 4, 8 * 16 * 8 * 4)
    assert (plan.files, plan.reads) == (4, 4)  # a file of each rank, what it has read together


def test_a_chunk_table_is_decoded_once_for_all_ranks(wide, calls):
    found = calls(wide.table, "chunk_table")
    ranks = [[Wanted(n, Box((16 * rank, 0), (16, 8))) for n in range(8)] for rank in range(256)]
    plans = wide.plan_ranks(ranks)
    assert found["chunk_table"] == 8
    assert sum(plan.read_nbytes for plan in plans) == 8 * 4096 * 8 * 4
    assert {plan.files for plan in plans} == {4}
