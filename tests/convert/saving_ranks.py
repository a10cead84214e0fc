"""What ranks save with torch.distributed.checkpoint, and what the whole state then is."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

Array = tuple[str, tuple[int, ...], bytes]


def bits(value: Any) -> Any:
    """A state in which tensors are dtype, shape and bytes, so that it can be compared anywhere."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), data
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list) else value


def save_fsdp2(folder: str, shape: tuple[int, ...], form: str = "TORCH_SAVE") -> Any:
    """Train a model that FSDP2 shards for two steps of AdamW, and save it; return the state."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optim": states[1], "step": 2}
    options: dict[str, Any] = {}
    if form != "TORCH_SAVE":
        options["serialization_format"] = filesystem.SerializationFormat[form]
    writer = filesystem.FileSystemWriter(folder, sync_files=False, **options)
    dcp.save(state, storage_writer=writer)
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return bits({"model": full[0], "optim": full[1], "step": 2})


def save_layouts(folder: str, shape: tuple[int, ...]) -> Any:
    """Save tensors that are sharded evenly, unevenly, along two dims, or not at all."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", shape)
    layouts: list[list[Any]] = [[Shard(0)], [Shard(1)], [Replicate()]]
    if len(shape) == 2:
        layouts = [
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
            [Shard(0), Shard(0)],
            [Replicate(), Shard(1)],
        ]
    state, full = {}, {}
    for index, layout in enumerate(layouts):
        for size in ((8, 6), (5, 7), (1, 3), (3, 1), (2, 3, 4)):
            name = f"{index}.{'x'.join(map(str, size))}"
            whole = torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)
            state[name], full[name] = distribute_tensor(whole, mesh, layout), whole
    state["rank0"] = full["rank0"] = torch.ones(2)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(
        state, storage_writer=filesystem.FileSystemWriter(folder, sync_files=False), planner=planner
    )
    distributed.barrier()
    return bits(full)
