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
RANKS_SIZE = 0.01  # from here on, they are processes


def rows_of(size: float) -> int:
    """Return how many rows each tensor has: 4,096 at full size."""
    return RANKS * max(1, round(1024 * size))


def value_of(index: int, rows: int) -> Any:
    """Return a tensor that differs from the others."""
    import numpy as np

    return np.random.default_rng(index).random((rows, COLUMNS), np.float32)


def name_of(index: int) -> str:
    """Return the name of a tensor."""
    return f"layers.{index:02d}.weight"


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
            one.add({"model": {name_of(index): source}})
    writer.commit([one.finish() for one in writers[1:]])


def cut(index: int, rows: int, box: Any) -> list[memoryview]:
    """Return the bytes of a box of a tensor."""
    where = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
    return [memoryview(value_of(index, rows)[where].tobytes())]


def write_torch(scene: Scene) -> None:
    """Write a file of torch.save."""
    import torch

    rows = rows_of(scene.size)
    state = {name_of(index): torch.from_numpy(value_of(index, rows)) for index in range(TENSORS)}
    torch.save({"model": state}, scene.fixture)


def write_dcp(scene: Scene) -> None:
    """Write a folder with torch.distributed.checkpoint: of FSDP2, with AdamW, by four ranks.

    A tiny one is written by one rank in this process: it is there to warm up.
    """
    from torch.multiprocessing.spawn import start_processes

    world_size = RANKS if scene.size >= RANKS_SIZE else 1
    meeting = scene.fixture.with_name(scene.fixture.name + ".meeting")
    common = (world_size, str(scene.fixture), str(meeting), rows_of(scene.size))
    if world_size == 1:
        save_dcp(0, *common)
    else:
        start_processes(save_dcp, common, nprocs=world_size, start_method="spawn")
    meeting.unlink(missing_ok=True)


def save_dcp(rank: int, world_size: int, path: str, meeting: str, rows: int) -> None:
    """Save as one of the ranks: a third of the bytes is the model, the rest are its moments."""
    import torch
    from torch import distributed, nn
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    with torch.device("meta"):
        layers = [nn.Linear(COLUMNS, rows, bias=False) for _ in range(TENSORS)]
    names = [name_of(index).split(".")[1] for index in range(TENSORS)]
    model = nn.Module()
    model.add_module("layers", nn.ModuleDict(zip(names, layers, strict=True)))
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (world_size,)))
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    part = rows // world_size
    for index, parameter in enumerate(model.parameters()):
        own = value_of(index, rows)[rank * part : (rank + 1) * part]
        with torch.no_grad():
            parameter.to_local().copy_(torch.from_numpy(own))
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    save(states, storage_writer=FileSystemWriter(path, sync_files=False))
    distributed.destroy_process_group()


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
            if opened.read(name_of(index)) != value_of(index, rows).tobytes():
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
        Contender(
            "dsdformat (of torch)",
            arrange_convert,
            needs=("torch",),
            fixture="convert/torch",
            prepare=write_torch,
        ),
    ),
    baseline="copy",
    note="`copy` copies the data files as they are, and flushes them. `dsdformat` compares all "
    "bytes with their digests on the way; what torch writes has none. The folder of `dcp` is of "
    "FSDP2 with AdamW on four ranks, and its model is converted; that of `torch.save` is a file.",
)
