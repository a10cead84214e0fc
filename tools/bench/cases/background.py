"""How long does training stand still for a save in the background, and how slow is it beside it?"""

from __future__ import annotations

import atexit
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bench import files
from bench.case import Case, Contender, Scene, Trial
from bench.cases.saving import BuildState, large_model, small_model

if TYPE_CHECKING:
    from pathlib import Path

    from bench.states import State

__all__ = ["BACKGROUND", "BACKGROUND_FIRST", "BACKGROUND_SMALL"]

RATE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Going:
    """A save that goes on.

    Attributes:
        done: Whether it has ended.
        wait: Waits for its end.
    """

    done: Callable[[], bool]
    wait: Callable[[], object]


# Begins a save.
Begin = Callable[["Path"], Going]


def arrange(
    begin_for: Callable[[State], Begin], build: BuildState, first: bool, scene: Scene
) -> Trial:
    """Begin a save, after one that is complete unless it is the first."""
    state = build(scene.size)
    begin = begin_for(state)
    path = scene.folder / "checkpoint"
    step = training()
    span = RATE_SECONDS * scene.size
    before = rate(step, span)
    begun: list[tuple[Going, float]] = []
    columns: dict[str, float] = {}

    def call() -> None:
        begun.append((begin(path), time.perf_counter()))

    def check() -> None:
        ((going, since),) = begun
        count = 0
        while not going.done():
            step()
            count += 1
        seconds = time.perf_counter() - since
        going.wait()
        alone = (before + rate(step, span)) / 2
        lost = seconds - count / alone
        columns.update({"training": 1 - lost / seconds, "save s": seconds, "lost s": lost})
        if files.stored_nbytes(path) < state.nbytes():
            raise ValueError("less was stored than the state has")

    if not first:
        begin(scene.folder / "before").wait()
        files.flush(scene.folder / "before")
    return Trial(call, state.nbytes(), check=check, columns=lambda: columns)


def arrange_copy(build: BuildState, scene: Scene) -> Trial:
    """Copy tensor by tensor into memory that is there and touched."""
    import numpy as np

    state = build(scene.size)
    sources = [tensor.numpy().reshape(-1) for tensor in state.tensors()]
    memory = np.ones(sum(source.size for source in sources), np.float32)

    def copy() -> None:
        at = 0
        for source in sources:
            np.copyto(memory[at : at + source.size], source)
            at += source.size

    return Trial(copy, state.nbytes())


def training() -> Callable[[], None]:
    """Return a step of a small training, which takes about a millisecond."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(64, 256)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rate(step: Callable[[], None], seconds: float) -> float:
    """Count the steps in a second."""
    count, began = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - began < seconds:
        step()
        count += 1
    return count / (time.perf_counter() - began)


def begin_dsd(state: State, **options: Any) -> Begin:
    """Save in the background."""
    import dsdformat.torch as dsd
    from bench.formats.dsd import tree_of

    how = dsd.Background(**options)

    def begin(path: Path) -> Going:
        handle = dsd.save(path, tree_of(state), background=how)
        return Going(handle.done, handle.wait)

    return begin


def begin_dcp(state: State, *, reuse: bool) -> Begin:
    """Save with DCP in a thread; with a stager that keeps its memory if asked."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import staging
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from bench.formats.dcp import tree_of

    options: dict[str, Any] = {}
    if reuse and "async_stager" in inspect.signature(dcp.async_save).parameters:
        how = staging.StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        options["async_stager"] = staging.DefaultStager(how)

    def begin(path: Path) -> Going:
        future: Any = dcp.async_save(
            tree_of(state), storage_writer=FileSystemWriter(path), **options
        )
        return Going(future.done, future.result)

    return begin


def begin_torchsnapshot(state: State) -> Begin:
    """Take a snapshot in a thread."""
    from torchsnapshot import Snapshot

    from bench.formats.torchsnapshot import tree_of

    def begin(path: Path) -> Going:
        pending = Snapshot.async_take(str(path), tree_of(state))
        return Going(pending.done, pending.wait)

    return begin


def begin_torch_checkpointing(state: State) -> Begin:
    """Save in a process, which is kept; the call returns when all is copied for it."""
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, CheckpointStagerConfig

    from bench.formats.torch_checkpointing import manager, tree_of

    staging = CheckpointStagerConfig(use_async_staging=False)
    one = manager(AsyncCheckpointSaverConfig(staging_config=staging))
    atexit.register(one.close)

    def begin(path: Path) -> Going:
        future = one.save(str(path), tree_of(state))
        return Going(future.done, future.result)

    return begin


BEGINS: dict[str, tuple[Callable[[State], Begin], str]] = {
    "dsdformat": (begin_dsd, "dsdformat.torch"),
    "dsdformat (nice=0)": (partial(begin_dsd, nice=0), "dsdformat.torch"),
    "dcp": (partial(begin_dcp, reuse=False), "torch"),
    "dcp (reused stager)": (partial(begin_dcp, reuse=True), "torch"),
    "torch_checkpointing": (begin_torch_checkpointing, "torch_checkpointing"),
    "torchsnapshot": (begin_torchsnapshot, "torchsnapshot"),
}


def contenders(build: BuildState, *, first: bool = False) -> tuple[Contender, ...]:
    """Let each save a state while training goes on."""
    return (
        Contender("raw", partial(arrange_copy, build), needs=("torch", "numpy")),
        *(
            Contender(name, partial(arrange, begin, build, first), needs=(module,))
            for name, (begin, module) in BEGINS.items()
        ),
    )


NOTE = (
    "Seconds until the call returns; what follows goes on beside training. `raw` copies the "
    "tensors into memory that was touched before, in one thread. *training*: steps in a second of "
    "a small training that goes on until the save has ended, over those without a save. *save s*: "
    "how long that is, from the end of the call. *lost s*: how much sooner the same steps are done "
    "without. dsdformat and dcp flush what they write."
)
BACKGROUND = Case(
    "background",
    "begin to save a model of 200 float32 tensors in the background, for the second time",
    contenders(large_model),
    note=NOTE,
)
BACKGROUND_FIRST = Case(
    "background-first",
    "begin to save it in the background for the first time",
    contenders(large_model, first=True),
    note=NOTE,
)
BACKGROUND_SMALL = Case(
    "background-small",
    "begin to save a model of many tensors of 1 to 16 KiB in the background, for the second time",
    contenders(small_model),
    note=NOTE,
)
