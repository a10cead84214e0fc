"""What does it cost to make a Hugging Face folder of a sharded checkpoint?

A full-size checkpoint has 64 tensors of 16 MiB, whose rows, or columns, lie with several ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench import files
from bench.case import Case, Contender, Scene, Trial

__all__ = ["CONVERT"]

TENSORS, COLUMNS, ITEMSIZE = 64, 1024, 4
RANKS = 4


def rows_of(size: float) -> int:
    """Return how many rows each tensor has: 4,096 at full size."""
    return RANKS * max(1, round(1024 * size))


def value_of(index: int, rows: int) -> Any:
    """Return a tensor that differs from the others."""
    import numpy as np

    return np.random.default_rng(index).random((rows, COLUMNS), np.float32)


def write_ours(dim: int, scene: Scene) -> None:
    """Write a checkpoint in which each of four ranks has its part of each tensor."""
    import dsdformat
    from dsdformat.sources import TensorSource

    rows = rows_of(scene.size)
    shape = (rows, COLUMNS)
    writer = dsdformat.create(scene.fixture, world_size=RANKS)
    writers = [writer]
    for rank in range(1, RANKS):
        writers.append(dsdformat.Writer.join(writer.staging, rank=rank, world_size=RANKS))
    part = [size // RANKS if at == dim else size for at, size in enumerate(shape)]
    for rank, one in enumerate(writers):
        offset = [rank * part[at] if at == dim else 0 for at in range(2)]
        box = dsdformat.Box(tuple(offset), tuple(part))
        for index in range(TENSORS):
            data = partial(cut, index, rows, box)
            source = TensorSource("float32", shape, [(box, data)])
            one.add({"model": {f"layers.{index:02d}.weight": source}})
    writer.commit([one.finish() for one in writers[1:]])


def cut(index: int, rows: int, box: Any) -> list[memoryview]:
    """Return the bytes of a box of a tensor."""
    where = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
    return [memoryview(value_of(index, rows)[where].tobytes())]


def write_dcp(scene: Scene) -> None:
    """Write a folder with torch.distributed.checkpoint, in one process."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from bench.formats.dcp import alone

    rows = rows_of(scene.size)
    names = (f"layers.{index:02d}.weight" for index in range(TENSORS))
    state = {name: torch.from_numpy(value_of(index, rows)) for index, name in enumerate(names)}
    writer = FileSystemWriter(scene.fixture, sync_files=False)
    save({"model": state}, storage_writer=writer, **alone(save))


def arrange_copy(scene: Scene) -> Trial:
    """Copy the data files as they are, one after another."""

    def call() -> None:
        for file in sorted(scene.fixture.glob("*.safetensors")):
            shutil.copyfile(file, scene.folder / file.name)

    return trial_of(scene, call, scene.folder, flush=lambda: files.flush(scene.folder))


def arrange_convert(scene: Scene) -> Trial:
    """Convert; this is atomic and durable."""
    from dsdformat.convert import convert

    path = scene.folder / "model"
    options = {"to": "huggingface", "select": "model", "max_shard_bytes": "1GB"}
    trial = trial_of(scene, lambda: convert(scene.fixture, path, **options), path)

    def check() -> None:
        trial.check()
        compare(path, rows_of(scene.size))

    return Trial(trial.call, trial.nbytes, settle=trial.settle, check=check)


def compare(path: Path, rows: int) -> None:
    """Raise if some tensors are not what was written."""
    from dsdformat.convert import open_any

    with open_any(path) as opened:
        if len(opened) != TENSORS:
            raise ValueError(f"{len(opened)} tensors")
        for index in (0, TENSORS - 1):
            if opened.read(f"layers.{index:02d}.weight") != value_of(index, rows).tobytes():
                raise ValueError(f"tensor {index} is not what was saved")


def trial_of(
    scene: Scene,
    call: Callable[[], object],
    path: Path,
    flush: Callable[[], None] | None = None,
) -> Trial:
    """Make a trial of so many bytes, the source cached."""
    nbytes = TENSORS * rows_of(scene.size) * COLUMNS * ITEMSIZE

    def check() -> None:
        if files.stored_nbytes(path) < nbytes:
            raise ValueError("less was written than there is")

    return Trial(call, nbytes, settle=lambda: files.warm(scene.fixture), flush=flush, check=check)


def ours(name: str, dim: int, arrange: Callable[[Scene], Trial]) -> Contender:
    """Let a contender read a checkpoint of ours that is cut along a dim."""
    return Contender(
        name,
        arrange,
        needs=("numpy",),
        fixture=f"convert/{dim}",
        prepare=partial(write_ours, dim),
    )


CONVERT = Case(
    "convert",
    "make a Hugging Face folder of a checkpoint of four ranks, durable",
    (
        ours("copy", 0, arrange_copy),
        ours("dsdformat (rows)", 0, arrange_convert),
        ours("dsdformat (columns)", 1, arrange_convert),
        Contender(
            "dsdformat (of dcp)",
            arrange_convert,
            needs=("torch",),
            fixture="convert/dcp",
            prepare=write_dcp,
        ),
    ),
    baseline="copy",
    note="`copy` copies the data files as they are, and flushes them. `dsdformat` compares all "
    "bytes with their digests on the way; a folder of `dcp`, written by one process, has none.",
)
