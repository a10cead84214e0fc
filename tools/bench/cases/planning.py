"""What does it cost to plan for a thousand ranks and more, without any data?

A full-size state has 1,000 parameters and what AdamW keeps of each: two moments, and a step that
all ranks have. Smaller ones have fewer ranks too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from bench.case import Case, Contender, Scene, Trial

if TYPE_CHECKING:
    from dsdformat.plan.sharding import Sharding

__all__ = ["PLAN_LOAD", "PLAN_MERGE", "PLAN_MESH", "PLAN_SAVE"]

PARAMETERS = 1000
SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (4096,), (128256, 4096))
LOADERS = 256
ROWS, COLUMNS = 2, 64
LENGTH_NBYTES = 8


def scaled(size: float, ranks: int) -> tuple[int, int]:
    """Return how many ranks and parameters there are at a scale."""
    side = max(2, round(ranks**0.5 * size**0.25))
    return side * side, max(1, round(PARAMETERS * size**0.7))


def sharded(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Sharding:
    """Spread as FSDP does: rows over all ranks."""
    from dsdformat.plan.mesh import Shard
    from dsdformat.plan.sharding import MeshSharding

    return MeshSharding(shape, ranks, (len(ranks),), (Shard(0),))


def replicated(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Sharding:
    """Spread as HSDP does: rows over some ranks, and the same on as many groups of them."""
    from dsdformat.plan.mesh import Replicate, Shard
    from dsdformat.plan.sharding import MeshSharding

    side = round(len(ranks) ** 0.5)
    return MeshSharding(shape, ranks, (side, side), (Replicate(), Shard(0)))


def parallel(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Sharding:
    """Spread as FSDP over tensor parallelism does: rows over both axes, vectors over one."""
    from dsdformat.plan.mesh import Replicate, Shard
    from dsdformat.plan.sharding import MeshSharding

    side = round(len(ranks) ** 0.5)
    cuts = (Shard(0, side), Shard(0)) if len(shape) > 1 else (Shard(0), Replicate())
    return MeshSharding(shape, ranks, (side, side), cuts)


Spread = Callable[[tuple[int, ...], tuple[int, ...]], "Sharding"]
SPREADS: dict[str, Spread] = {"fsdp": sharded, "hsdp": replicated, "fsdp-tp": parallel}


def arrange_save(spread: Spread, ranks: int, scene: Scene) -> Trial:
    """Plan what one rank writes."""
    from dsdformat.plan.save_plan import plan_save
    from dsdformat.plan.sharding import Held, on_each

    count, parameters = scaled(scene.size, ranks)
    everyone = tuple(range(count))
    tensors: list[tuple[Sharding, int]] = []
    for number in range(parameters):
        shape = SHAPES[number % len(SHAPES)]
        tensors += [(spread(shape, everyone), 4) for _ in range(3)]
        tensors.append((on_each((), everyone), 4))
    plans: list[list[list[Held]]] = []

    def check() -> None:
        if any(held.outer.numel == 0 for boxes in plans[0] for held in boxes):
            raise ValueError("an empty box is to be written")

    return Trial(
        call=lambda: plans.append(plan_save(tensors, count // 3)),
        nbytes=LENGTH_NBYTES * sum(len(sharding.shape) + 1 for sharding, _ in tensors),
        check=check,
        columns=lambda: {"ranks": count, "tensors": len(tensors)},
    )


def write_parts(ranks: int, scene: Scene) -> None:
    """Write what the ranks would send to the coordinator, one after another."""
    from bench.papers import PaperTensor, make_part

    count, parameters = scaled(scene.size, ranks)
    everyone = tuple(range(count))
    papers = []
    for number in range(parameters):
        for name in ("exp_avg", "exp_avg_sq", "param"):
            paper = PaperTensor(f"{number:05d}.{name}", sharded((count * ROWS, COLUMNS), everyone))
            papers.append(paper)
    with scene.fixture.open("wb") as file:
        for rank in everyone:
            plan = [paper.sharding.held(rank) for paper in papers]
            raw = make_part(papers, plan, rank, count).to_bytes()
            file.write(len(raw).to_bytes(LENGTH_NBYTES, "little") + raw)


def read_fixture(scene: Scene) -> list[bytes]:
    """Return the parts."""
    raws = []
    with scene.fixture.open("rb") as file:
        while length := file.read(LENGTH_NBYTES):
            raws.append(file.read(int.from_bytes(length, "little")))
    return raws


def arrange_merge(ranks: int, scene: Scene) -> Trial:
    """Merge what all ranks wrote, and check that it is complete."""
    from dsdformat.plan.part import Part, read_parts
    from dsdformat.plan.part_merge import check_complete, merge_parts

    count, parameters = scaled(scene.size, ranks)
    raws = read_fixture(scene)
    merged: list[Part] = []

    def call() -> None:
        merged.append(merge_parts(read_parts(raws)))
        check_complete(merged[0])

    def check() -> None:
        if len(merged[0].chunks.file) != count * 3 * parameters:
            raise ValueError("there are chunks too many, or too few")

    return Trial(
        call=call,
        nbytes=sum(map(len, raws)),
        check=check,
        columns=lambda: {"ranks": count, "chunks": count * 3 * parameters},
    )


def write_manifest(ranks: int, scene: Scene) -> None:
    """Write the manifest that the ranks would have made together."""
    from bench.papers import rows_manifest

    count, parameters = scaled(scene.size, ranks)
    scene.fixture.write_bytes(rows_manifest(3 * parameters, count, ROWS, COLUMNS))


def arrange_load(ranks: int, scene: Scene, *, decoded: bool) -> Trial:
    """Plan what one of 256 ranks reads; of chunk tables that are decoded, or not yet."""
    from bench.papers import opened
    from dsdformat.boxes import Box
    from dsdformat.plan.load_plan import LoadPlan, LoadPlanner, Wanted

    count, parameters = scaled(scene.size, ranks)
    loaders = min(LOADERS, count)
    first, stop = (count * ROWS * at // loaders for at in (loaders // 3, loaders // 3 + 1))
    box = Box((first, 0), (stop - first, COLUMNS))
    wanted = [Wanted(index, box) for index in range(3 * parameters)]
    checkpoint = opened(scene.fixture.read_bytes())
    tables = [checkpoint.table.chunk_table(one.tensor) for one in wanted] if decoded else []
    plans: list[LoadPlan] = []

    def call() -> None:
        if not decoded:
            plans.append(checkpoint.plan_boxes(wanted))
            return
        planner = LoadPlanner(checkpoint.block_nbytes, verify=True)
        for number, (table, one) in enumerate(zip(tables, wanted, strict=True)):
            planner.add(one.tensor, table, [(number, one)])
        plans.append(planner.finish())

    def check() -> None:
        nbytes = 4 * box.numel * len(wanted)
        if not plans[0].wanted_nbytes == nbytes <= plans[0].read_nbytes:
            raise ValueError("what is planned is not what is wanted")

    return Trial(
        call=call,
        nbytes=64 * count * len(wanted),
        check=check,
        columns=lambda: {
            "ranks": count,
            "blocks": len(plans[0].order),
            "read / wanted": plans[0].read_nbytes / plans[0].wanted_nbytes,
        },
    )


def arrange_mesh(ranks: int, scene: Scene) -> Trial:
    """Plan what each rank of another mesh reads, as `dsd plan` does."""
    from bench.papers import opened
    from dsdformat.convert.layouts import Layouts
    from dsdformat.plan.mesh import Shard
    from dsdformat.plan.survey import RankTable, WantedTensor, survey

    count, parameters = scaled(scene.size, ranks)
    checkpoint = opened(scene.fixture.read_bytes())
    shape = (count * ROWS, COLUMNS)
    tables: list[RankTable] = []

    def call() -> None:
        layouts = Layouts(checkpoint)
        wanted = [
            WantedTensor(layouts.of(index), shape, 4, (Shard(0),))
            for index in range(3 * parameters)
        ]
        block_nbytes = checkpoint.block_nbytes
        tables.append(survey({"fsdp": count}, wanted, block_nbytes=block_nbytes))

    def check() -> None:
        if int(tables[0].wanted_nbytes.sum()) != 3 * parameters * 4 * shape[0] * COLUMNS:
            raise ValueError("what is planned is not what is wanted")

    return Trial(
        call=call,
        nbytes=64 * count * 3 * parameters,
        check=check,
        columns=lambda: {"ranks": count, "read / wanted": tables[0].over_read},
    )


PLAN_SAVE = Case(
    "plan-save",
    "plan what one rank writes of 1,000 parameters with AdamW",
    tuple(
        Contender(f"{name}-{ranks}", partial(arrange_save, spread, ranks))
        for name, spread in SPREADS.items()
        for ranks in (1024, 4096, 16384)
    ),
    baseline="fsdp-1024",
    note="Bytes are those of the shapes.",
)
PLAN_MERGE = Case(
    "plan-merge",
    "merge the chunk tables of 3,000 tensors, and check that they are complete",
    tuple(
        Contender(
            str(ranks),
            partial(arrange_merge, ranks),
            fixture=f"parts/{ranks}",
            prepare=partial(write_parts, ranks),
        )
        for ranks in (1024, 4096)
    ),
    baseline="1024",
    note="Bytes are those of the parts that ranks send.",
)
PLAN_LOAD = Case(
    "plan-load",
    "plan what one of 256 ranks reads of 3,000 tensors",
    tuple(
        Contender(
            str(ranks) if decoded else f"{ranks}-with-tables",
            partial(arrange_load, ranks, decoded=decoded),
            fixture=f"manifest/{ranks}",
            prepare=partial(write_manifest, ranks),
        )
        for ranks in (1024, 4096)
        for decoded in (True, False)
    ),
    baseline="1024",
    note="`with-tables` decodes and checks the chunk tables too. Bytes are those of the tables.",
)
PLAN_MESH = Case(
    "plan-mesh",
    "plan what each rank of a mesh reads of 3,000 tensors that as many ranks wrote",
    tuple(
        Contender(
            str(ranks),
            partial(arrange_mesh, ranks),
            fixture=f"manifest/{ranks}",
            prepare=partial(write_manifest, ranks),
        )
        for ranks in (1024, 4096)
    ),
    baseline="1024",
    note="Decodes the chunk tables. Bytes are those of the tables.",
)
