"""How much memory a rank needs to save and to load, above the shards that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dsdformat.torch as dsd
from tests.ranks.shards import mesh_of
from tests.ranks.test_save_load import shared
from tests.ranks.test_state_dict_broadcast import MIB, forget_peak, rss

LIMIT = 96  # MiB
ROWS, COLUMNS = 8192, 4096  # 128 MiB, and AdamW has three of them


def model_of(layout: str, device: str = "cpu") -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.LayerNorm(ROWS))
    if layout != "ddp":
        fully_shard(model, mesh=mesh_of((distributed.get_world_size(),)))
    if device != "meta":
        model.to_empty(device=device)
        fill(model.parameters(), 0.5)
    return DistributedDataParallel(model) if layout == "ddp" else model


def fill(tensors: Iterable[torch.Tensor], value: float) -> None:
    with torch.no_grad():
        for one in tensors:
            one.fill_(value)


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer as after a step, without what a step costs."""
    optimizer = torch.optim.AdamW(model.parameters())
    for one in model.parameters():
        moments = {key: torch.full_like(one, 0.25) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[one] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def held(model: nn.Module) -> float:
    """MiB that this rank holds of a model."""
    return sum(one.nbytes for one in local_of(model)) / MIB


def peak(call: Callable[..., Any], *args: Any, **options: Any) -> float:
    """How many MiB a call needs at most above what there is before it."""
    distributed.barrier()
    before = forget_peak()
    call(*args, **options)
    return (rss("VmHWM") - before) / MIB


def warm(layout: str) -> None:
    """Load what loads lazily, and let gloo make its connections."""
    path, model = shared(f"warm-{layout}"), nn.Linear(8, 8)
    fill(model.parameters(), 0.5)
    state = {"model": model, "optimizer": adamw_of(model)}
    dsd.save(path, state, codec="zstd")
    dsd.load(path, state)


def peaks(layout: str, fresh: bool) -> dict[str, float]:
    """What calls need above the shards that they are given or make: a model and AdamW."""
    warm(layout)
    path, model = shared(layout), model_of(layout)
    state = {"model": model, "optimizer": adamw_of(model)}
    found = {"save": peak(dsd.save, path, state)}
    fill(model.parameters(), 0)
    if fresh:
        state["optimizer"] = torch.optim.AdamW(model.parameters())
    found["load"] = peak(dsd.load, path, state) - (2 * held(model) if fresh else 0)
    assert all(bool((one == 0.5).all()) for one in local_of(model))
    assert len(state["optimizer"].state) == 4
    return found


def local_of(model: nn.Module) -> Iterator[torch.Tensor]:
    for one in model.parameters():
        yield one.to_local() if hasattr(one, "to_local") else one


def peaks_of_forms() -> dict[str, float]:
    """What other ways need, of a model alone."""
    warm("fsdp2")
    assert peak(torch.ones, 16 * MIB) > 63  # so it is seen
    path, small, model = shared("raw"), shared("compressed"), model_of("fsdp2")
    state = {"model": model}
    found = {
        "save checked": peak(dsd.save, path, state, check_replicas=True),
        "save compressed": peak(dsd.save, small, state, codec="planes+zstd"),
        "load compressed": peak(dsd.load, small, state),
    }
    meta = model_of("fsdp2", "meta")
    found["load on meta"] = peak(dsd.load, path, {"model": meta}) - held(meta)
    half = {"model": meta.to(torch.bfloat16)}
    found["load other dtype"] = peak(dsd.load, path, half, dtype=torch.bfloat16)
    return found


def check(rows: list[dict[str, float]]) -> None:
    most = {name: max(row[name] for row in rows) for name in rows[0]}
    print({name: round(mib) for name, mib in most.items()})
    assert {name: mib for name, mib in most.items() if mib > LIMIT} == {}


@pytest.mark.parametrize(
    ("layout", "world_size", "fresh"),
    [("fsdp2", 2, False), ("fsdp2", 4, True), ("ddp", 2, False)],
)
def test_saving_and_loading_need_little_above_the_shards(ranks, layout, world_size, fresh):
    check(ranks(world_size)(peaks, layout, fresh))


def test_other_forms_need_little_more(ranks):
    check(ranks(2)(peaks_of_forms))
