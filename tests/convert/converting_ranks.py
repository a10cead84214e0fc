"""What ranks do with folders of torch.distributed.checkpoint that came through ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsdformat.torch as dsd
from dsdformat.convert import convert
from tests.convert.saving_ranks import bits


def make(shape: tuple[int, ...] | None, *, trained: bool = False) -> tuple[nn.Module, Any]:
    """A model and AdamW with two groups; sharded over a mesh of a shape, if there is one."""
    torch.manual_seed(int(trained))
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))
    if shape is not None:
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    weights = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.5}, {"params": others, "lr": 0.3}], lr=0.1
    )
    for step in range(2 * trained):
        torch.manual_seed(step)
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module, optimizer: Any) -> Any:
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return bits({"model": full[0], "optim": full[1]})


def loaded_by_dcp(folder: str, shape: tuple[int, ...] | None) -> Any:
    """Load as torch's guide does it: templates, dcp.load, set_state_dict."""
    model, optimizer = make(shape)
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optim": states[1], "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    return whole(model, optimizer), state["step"]


def loaded_by_us(folder: str, shape: tuple[int, ...] | None) -> Any:
    model, optimizer = make(shape)
    rest = dsd.load(folder, {"model": model, "optim": optimizer, "step": None})
    return whole(model, optimizer), rest["step"]


def both_ways(folder: str) -> Any:
    """Save with FSDP2 and dcp.save; convert to ours and back; load both on another mesh.

    Returns:
        The whole state as it was saved, and what it is after each way.
    """
    warnings.simplefilter("ignore")
    model, optimizer = make((4,), trained=True)
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optim": states[1], "step": 2}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    if distributed.get_rank() == 0:
        convert(f"{folder}/dcp", f"{folder}/ours", to="dsd")
        convert(f"{folder}/ours", f"{folder}/back", to="dcp", max_chunk_bytes=60)
    distributed.barrier()
    return {
        "saved": whole(model, optimizer),
        "ours": loaded_by_us(f"{folder}/ours", (2, 2)),
        "back": loaded_by_dcp(f"{folder}/back", (2, 2)),
        "names": sorted(path.name for path in Path(folder, "back").iterdir()),
    }


def resharded(folder: str) -> Any:
    """Load on fewer ranks, sharded and not."""
    warnings.simplefilter("ignore")
    return {
        "ours": loaded_by_us(f"{folder}/ours", (2,)),
        "back": loaded_by_dcp(f"{folder}/back", (2,)),
        "plain": loaded_by_dcp(f"{folder}/back", None),
    }
