"""What does it cost to write what a thousand ranks have stored, and to open it, without any data?

A full-size state has 1,000 matrices, of which each of 1,024 ranks has some rows. Smaller ones have
fewer ranks too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import files
from bench.case import Case, Contender, Scene, Trial
from bench.cases.planning import COLUMNS, LENGTH_NBYTES, ROWS, scaled, sharded

if TYPE_CHECKING:
    from torch.distributed.checkpoint import SavePlan

__all__ = ["METADATA_OPEN", "METADATA_WRITE"]

RANKS = 1024
CHUNK_NBYTES = 4 * ROWS * COLUMNS

# What a contender does: its facts, made before; writing them to a path; opening that.
Make = Callable[[int, int], Any]
Write = Callable[[Any, Path], object]
Open = Callable[[Path], object]


def name_of(number: int) -> str:
    """Return the name of a matrix."""
    return f"layers.{number:05d}.weight"


# msgpack


def make_map(ranks: int, tensors: int) -> dict[str, Any]:
    """Say where each chunk lies, without a digest."""
    chunks = [[rank, rank * ROWS, ROWS] for rank in range(ranks)]
    return {
        "files": [f"model-{rank:05d}.safetensors" for rank in range(ranks)],
        "tensors": {
            name_of(number): [
                "float32",
                [ranks * ROWS, COLUMNS],
                [
                    [rank, number * CHUNK_NBYTES, CHUNK_NBYTES, first, 0, rows, COLUMNS]
                    for rank, first, rows in chunks
                ],
            ]
            for number in range(tensors)
        },
    }


def write_map(facts: dict[str, Any], path: Path) -> None:
    """Pack it in one piece."""
    import msgpack

    path.write_bytes(msgpack.packb(facts))


def open_map(path: Path) -> object:
    """Unpack it, without garbage collection, which takes as long again."""
    import gc

    import msgpack

    gc.disable()
    try:
        return msgpack.unpackb(path.read_bytes())
    finally:
        gc.enable()


# dsdformat


def make_parts(ranks: int, tensors: int) -> list[bytes]:
    """Make what the ranks send to the coordinator."""
    from bench.papers import PaperTensor, make_part

    everyone = tuple(range(ranks))
    spread = sharded((ranks * ROWS, COLUMNS), everyone)
    papers = [PaperTensor(name_of(number), spread) for number in range(tensors)]
    raws = []
    for rank in everyone:
        plan = [paper.sharding.held(rank) for paper in papers]
        raws.append(make_part(papers, plan, rank, ranks).to_bytes())
    return raws


def write_manifest(raws: list[bytes], path: Path) -> None:
    """Merge the parts, check that they are complete, and write the manifest."""
    from bench.papers import manifest_of
    from dsdformat.garbage import paused_gc
    from dsdformat.plan.part import read_parts
    from dsdformat.plan.part_merge import check_complete, merge_parts

    with paused_gc():
        part = merge_parts(read_parts(raws))
        check_complete(part)
    path.write_bytes(manifest_of(part, compress=True))


def open_manifest(path: Path) -> object:
    """Open it, as far as each rank does before it asks for a tensor."""
    import dsdformat

    folder = path.with_suffix(".folder")
    folder.mkdir(exist_ok=True)
    manifest = folder / "manifest.dsd"
    if not manifest.exists():
        manifest.hardlink_to(path)
    return dsdformat.open(folder)


# torch.distributed.checkpoint


def make_plans(ranks: int, tensors: int) -> list[SavePlan]:
    """Make what the ranks send to the coordinator."""
    import torch
    from torch.distributed.checkpoint import metadata, planner

    whole, own = torch.Size([ranks * ROWS, COLUMNS]), torch.Size([ROWS, COLUMNS])
    properties = metadata.TensorProperties(dtype=torch.float32)
    plans = []
    for rank in range(ranks):
        place = torch.Size([ROWS * rank, 0])
        items = [
            planner.WriteItem(
                index=metadata.MetadataIndex(name_of(number), place, rank),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=metadata.ChunkStorageMetadata(offsets=place, sizes=own),
                    properties=properties,
                    size=whole,
                ),
            )
            for number in range(tensors)
        ]
        names = {name_of(number): (name_of(number),) for number in range(tensors)}
        plans.append(planner.SavePlan(items, planner_data=names))
    return plans


def write_dcp(plans: list[SavePlan], path: Path) -> None:
    """Plan on the coordinator, and write the metadata."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    planned, metadata = planner.create_global_plan(plans)
    results = [
        [
            WriteResult(
                item.index,
                CHUNK_NBYTES,
                _StorageInfo(f"__{rank}_0.distcp", number * CHUNK_NBYTES, CHUNK_NBYTES),
            )
            for number, item in enumerate(plan.items)
        ]
        for rank, plan in enumerate(planned)
    ]
    path.mkdir()
    FileSystemWriter(path, sync_files=False).finish(metadata, results)


def open_dcp(path: Path) -> object:
    """Read the metadata, as each rank does."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(path).read_metadata()


def arrange_write(make: Make, write: Write, scene: Scene) -> Trial:
    """Write the metadata of what was made before."""
    ranks, tensors = scaled(scene.size, RANKS)
    facts = make(ranks, tensors)
    path = scene.folder / "metadata"
    return Trial(
        lambda: write(facts, path),
        ranks * tensors * LENGTH_NBYTES,
        check=lambda: check_stored(path),
        columns=lambda: {"chunks": ranks * tensors, "stored MB": files.stored_nbytes(path) / 1e6},
    )


def check_stored(path: Path) -> None:
    """Raise if nothing was written."""
    if files.stored_nbytes(path) == 0:
        raise ValueError("nothing was written")


def arrange_open(opens: Open, scene: Scene) -> Trial:
    """Open the metadata."""
    ranks, tensors = scaled(scene.size, RANKS)
    kept: list[object] = []
    return Trial(
        lambda: kept.append(opens(scene.fixture)),
        ranks * tensors * LENGTH_NBYTES,
        takes_nbytes=64 << 20,
        settle=lambda: files.warm(scene.fixture),
        columns=lambda: {"chunks": ranks * tensors},
    )


def prepare(make: Make, write: Write, scene: Scene) -> None:
    """Write the metadata that is to be opened."""
    if scene.fixture.is_dir():
        shutil.rmtree(scene.fixture)
    write(make(*scaled(scene.size, RANKS)), scene.fixture)


WAYS: dict[str, tuple[tuple[str, ...], Make, Write, Open]] = {
    "raw": (("msgpack",), make_map, write_map, open_map),
    "dsdformat": (("dsdformat.torch",), make_parts, write_manifest, open_manifest),
    "dcp": (("torch",), make_plans, write_dcp, open_dcp),
}
NOTE = (
    "Bytes are eight for each chunk. `raw` is one map of msgpack with file, place and box of each "
    "chunk, and no digests; `dsdformat` has a digest of 32 bytes for each."
)
METADATA_WRITE = Case(
    "metadata-write",
    "merge what 1,024 ranks have stored of 1,000 tensors, and write it",
    tuple(
        Contender(name, partial(arrange_write, make, write), needs=needs)
        for name, (needs, make, write, _) in WAYS.items()
    ),
    note=NOTE,
)
METADATA_OPEN = Case(
    "metadata-open",
    "open what 1,024 ranks have stored of 1,000 tensors, page cache warm",
    tuple(
        Contender(
            name,
            partial(arrange_open, opens),
            needs=needs,
            fixture=f"metadata/{name}",
            prepare=partial(prepare, make, write),
        )
        for name, (needs, make, write, opens) in WAYS.items()
    ),
    note=NOTE,
)
