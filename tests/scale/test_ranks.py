"""A thousand ranks and more, on paper: how many steps planning takes, counted and not timed.

Times are measured by tools/bench: `plan-save`, `plan-merge` and `plan-load`.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from bench.papers import PaperTensor, make_part, manifest_of, opened

from dsdformat import Box
from dsdformat.errors import FormatError
from dsdformat.format.checks import check_columns, find_tiling_fault
from dsdformat.plan import chunk_tables, tree_merge
from dsdformat.plan.chunk_merge import find_gap
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


def steps_of(function: Callable[[], object]) -> int:
    """Count the calls that a function makes, of Python and of C."""
    steps = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal steps
        steps += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return steps


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


# B100
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp-tp"])
def test_steps_of_a_plan_grow_as_tensors_do_and_hardly_with_ranks(kind):
    def steps(ranks: int, tensors: int) -> int:
        shapes = [(ranks * 2 + number % 5, 64) for number in range(tensors)]
        spreads = [(spread(kind, shape, tuple(range(ranks))), 4) for shape in shapes]
        return steps_of(lambda: plan_save(spreads, ranks // 3))

    few = steps(256, 500)
    assert few < 60 * 500
    assert steps(256, 2000) < 4.2 * few
    assert steps(1024, 500) < 1.2 * few


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


# B100
def test_steps_of_a_merge_grow_no_faster_than_chunks_do():
    def steps(ranks: int, tensors: int) -> int:
        raws = [part.to_bytes() for part in parts_of(ranks, tensors)]
        return steps_of(lambda: check_complete(merge_parts(read_parts(raws))))

    few = steps(64, 100)
    assert few < 10 * 64 * 100
    assert steps(64, 400) < 4.4 * few
    assert steps(256, 100) < 4.4 * few


def test_what_ranks_have_alike_is_read_once():
    received = read_parts(part.to_bytes() for part in parts_of(16, 30))
    assert len({id(part.tensors) for part in received}) == 1
    assert len({part.counts.tobytes() for part in received}) == 2  # one has the scalar tensor too


@pytest.mark.parametrize("column", ["file", "numbers"])
def test_a_part_whose_chunks_are_not_as_many_as_those_of_one_that_is_alike_is_refused(column):
    first, second, *_ = parts_of(4, 5)
    chunks = {name: getattr(second.chunks, name)[:] for name in second.chunks._fields[1:]}
    assert read_parts([first.to_bytes(), second.to_bytes()])
    short = ("numbers",) if column == "numbers" else tuple(chunks)
    for name in short:
        del chunks[name][-4 if name == "numbers" else -1 :]
    second.chunks = second.chunks._replace(**chunks)
    with pytest.raises(FormatError) as caught:
        read_parts([first.to_bytes(), second.to_bytes()])
    assert caught.value.code == "bad_section_length"


# Whether all is there, once: always checked, so it must cost little


def rows_of_100(count: int) -> tuple[tuple[int, int], list[Box]]:
    return (count * 100, 64), [Box((100 * number, 0), (100, 64)) for number in range(count)]


def squares(count: int) -> tuple[tuple[int, int], list[Box]]:
    boxes = [Box((3 * (n // 100), 5 * (n % 100)), (3, 5)) for n in range(count)]
    return (3 * (count // 100), 500), boxes


def bricks(count: int) -> tuple[tuple[int, int], list[Box]]:
    """Two to a row, and no two rows cut alike: neither a grid nor ranges of rows alone."""
    cuts = [(row, 1 + row * 37 % 97) for row in range(count // 2)]
    pairs = [(Box((row, 0), (2, at)), Box((row, at), (2, 100 - at))) for row, at in cuts]
    boxes = [Box((2 * box.offset[0], box.offset[1]), box.shape) for pair in pairs for box in pair]
    return (count, 100), boxes


WALLS = {"rows": rows_of_100, "squares": squares, "bricks": bricks}


def numbers_of(boxes: list[Box]) -> array[int]:
    return array("Q", [number for box in boxes for number in (*box.offset, *box.shape)])


# B105
@pytest.mark.parametrize("wall", [rows_of_100, bricks])
def test_of_100_000_shards_of_a_tensor_one_that_is_missing_or_twice_is_found(wall):
    shape, boxes = wall(100_000)
    assert find_gap(shape, len(boxes), numbers_of(boxes)) is None
    missing, twice = boxes[:777] + boxes[778:], sorted([*boxes, boxes[777]], key=by_offset)
    gap = find_gap(shape, len(missing), numbers_of(missing))
    assert gap == (f"{boxes[777].numel} of {shape[0] * shape[1]} elements were written by no one")
    gap = find_gap(shape, len(twice), numbers_of(twice))
    assert gap == "some elements were written more than once"


def by_offset(box: Box) -> tuple[int, ...]:
    return box.offset


# B105
@pytest.mark.parametrize("wall", WALLS.values(), ids=WALLS)
@pytest.mark.parametrize("fault", ["none", "missing", "twice"])
def test_steps_of_a_check_grow_no_faster_than_shards_do(wall, fault):
    def steps(count: int) -> tuple[int, int]:
        shape, boxes = wall(count)
        change = {"none": boxes, "missing": boxes[1:], "twice": [*boxes[:1], *boxes]}[fault]
        numbers = numbers_of(change)
        for_writers = steps_of(lambda: find_gap(shape, len(change), numbers))
        return for_writers, steps_of(lambda: find_tiling_fault(shape, change))

    few, many = steps(1000), steps(4000)
    assert all(more < 4.4 * less + 1000 for less, more in zip(few, many, strict=True))
    assert max(few) < 60 * 1000


# B105
def test_steps_of_checking_a_checkpoint_grow_no_faster_than_its_tensors_do():
    def steps(tensors: int) -> int:
        checkpoint = opened(manifest_of(merge_parts(parts_of(8, tensors))))
        table = checkpoint.table
        paths = table.decoded.paths
        found: list[Any] = []
        count = steps_of(
            lambda: found.append(
                check_columns(table.body, table.columns, (), False, paths, table.name)
            )
        )
        ((order, problems),) = found
        assert (len(order), problems) == (8 * tensors + 1, [])
        return count

    few = steps(100)
    assert few < 100 * 8 * 100
    assert steps(400) < 4.4 * few


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
