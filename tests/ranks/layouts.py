"""Models, every way to wrap them, and states whose every element says where it belongs.

Truth is a plain model that is never wrapped: `numbered_model` and `numbered_optimizer` make its
state dicts by hand, so that nothing of the package decides what is right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.shards import mesh_of

CPU = torch.device("cpu")

Model = nn.Module
Optimizer = torch.optim.Optimizer


# Models


class Extra(nn.Module):
    """A module with extra state, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.zeros(3, 2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.extra: Any = {"calls": 0}

    def get_extra_state(self) -> Any:
        return dict(self.extra)

    def set_extra_state(self, state: Any) -> None:
        self.extra = dict(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.scratch.sum()


class Net(nn.Module):
    """Sizes that no number of ranks divides: 5, 7, 3, 1; nested one level."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 7, bias=False))
        self.row = nn.Linear(7, 1)
        self.out = nn.Linear(7, 3)
        self.extra = Extra()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.extra(self.out(x) + self.row(x))


class Tied(nn.Module):
    """An embedding and a head that are one parameter, and a tied buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.mid = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.emb(x)))


class Pads(nn.Module):
    """Parameters of 3, 5 and 7 elements, which pad on two and on three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 1, bias=False)
        self.two = nn.Linear(1, 5, bias=False)
        self.three = nn.Linear(7, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.one(x[:, :3]))
        return self.three(torch.cat([y, x[:, :2]], 1)) + self.bias


def inputs(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """A whole batch for one of the models here, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        return torch.randint(0, 5, (6,), generator=generator)
    return torch.randn(6, 7, generator=generator)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 1, seed: int = 0) -> None:
    """Take real steps."""
    for step in range(steps):
        model(inputs(model, seed + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# States whose elements are all different


def numbered(like: torch.Tensor, number: int) -> torch.Tensor:
    """Distinct values for a tensor, and for others that differ by `number`."""
    values = torch.arange(like.numel(), dtype=torch.float64).reshape(like.shape)
    if like.dtype.is_floating_point or like.dtype.is_complex:
        values = values / 8 + 32 * number + 0.5
    else:
        values = values + 100 * number + 1
    return values.to(like.dtype)


def numbered_model(plain: nn.Module, shift: int = 0) -> dict[str, Any]:
    """A state dict for a plain model; one tensor for all names of a tied one."""
    made: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for number, (name, value) in enumerate(plain.state_dict(keep_vars=True).items()):
        if isinstance(value, torch.Tensor):
            state[name] = made.setdefault(id(value), numbered(value, number + shift))
        else:
            state[name] = {"calls": 5 + shift}
    return state


Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "tensor-lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01)),
}
STATELESS = ("sgd",)


def numbered_optimizer(plain: nn.Module, make: Make, shift: int = 0) -> dict[str, Any]:
    """A nested state dict by names, with what one step of a twin makes in numbered values."""
    twin = copy.deepcopy(plain)
    parameters = dict(twin.named_parameters())
    optimizer = make(list(parameters.values()))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state: dict[str, Any] = {}
    for number, (name, parameter) in enumerate(parameters.items()):
        entry = {}
        for index, (key, value) in enumerate(optimizer.state[parameter].items()):
            if key == "step":
                entry[key] = torch.tensor(7.0)
            else:
                entry[key] = numbered(value, 10 * number + index + 5 + shift)
        if entry and any(value is not None for value in entry.values()):
            state[name] = entry
    groups = []
    for group in optimizer.param_groups:
        values = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups.append({**values, "params": [names[id(one)] for one in group["params"]]})
    groups[0]["weight_decay"] = 0.125
    return {"state": state, "param_groups": groups}


def flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted form of a nested optimizer state."""
    flat: dict[str, Any] = {}
    for name, entry in nested["state"].items():
        for key, value in entry.items():
            flat[f"state.{name}.{key}"] = value
    for group in nested["param_groups"]:
        for name in group["params"]:
            for key, value in group.items():
                if key != "params":
                    flat[f"param_groups.{name}.{key}"] = value
    return flat


# Layouts


def _ddp(model: Model, _: int) -> Model:
    return DistributedDataParallel(model)


def _replicate(model: Model, _: int) -> Model:
    return replicate(model)


def _fsdp1(**options: Any) -> Callable[[Model, int], Model]:
    def wrap(model: Model, _: int) -> Model:
        return FullyShardedDataParallel(model, device_id=CPU, **options)

    return wrap


def _fsdp1_nested(**options: Any) -> Callable[[Model, int], Model]:
    def wrap(model: Model, _: int) -> Model:
        for name, child in list(model.named_children())[:-1]:
            if any(True for _ in child.parameters()):
                setattr(model, name, FullyShardedDataParallel(child, device_id=CPU, **options))
        return FullyShardedDataParallel(model, device_id=CPU, **options)

    return wrap


def _fsdp1_hybrid(**options: Any) -> Callable[[Model, int], Model]:
    def wrap(model: Model, _: int) -> Model:
        mesh = mesh_of((2, 2), ("replicate", "shard"))
        return FullyShardedDataParallel(
            model,
            device_id=CPU,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            **options,
        )

    return wrap


def _fsdp2(*, nested: bool = False, **options: Any) -> Callable[[Model, int], Model]:
    def wrap(model: Model, world_size: int) -> Model:
        mesh = mesh_of((world_size,))
        if nested:
            for child in model.children():
                fully_shard(child, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return wrap


def _tp(model: Model, world_size: int) -> Model:
    return parallelize_module(model, mesh_of((world_size,)), _plan())


def _plan() -> dict[str, Any]:
    return {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()}


def mesh_2d() -> DeviceMesh:
    return mesh_of((2, 2), ("dp", "tp"))


def _fsdp2_tp(model: Model, _: int) -> Model:
    mesh = mesh_2d()
    parallelize_module(model, mesh["tp"], _plan())
    return fully_shard(model, mesh=mesh["dp"])


def _fsdp1_tp(model: Model, _: int) -> Model:
    mesh = mesh_2d()
    parallelize_module(model, mesh["tp"], _plan())
    return FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], device_id=CPU, use_orig_params=True
    )


def _hsdp(model: Model, _: int) -> Model:
    return fully_shard(model, mesh=mesh_of((2, 2), ("replicate", "shard")))


def _compile(model: Model) -> Model:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _compile_part(model: Any, _: int) -> Model:
    model.inner = _compile(model.inner)
    return model


def _checkpointed(model: Any, _: int) -> Model:
    model.inner = checkpoint_wrapper(model.inner)
    return model


def _chain(*wraps: Callable[[Model, int], Model]) -> Callable[[Model, int], Model]:
    def wrap(model: Model, world_size: int) -> Model:
        for one in wraps:
            model = one(model, world_size)
        return model

    return wrap


def _whole(wrap: Callable[[Model], Model]) -> Callable[[Model, int], Model]:
    return lambda model, _: wrap(model)


FULL, GRAD, NO = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
_HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Layout:
    """A way to wrap a model.

    Attributes:
        wrap: From a plain model and the world size; changes the model.
        world_size: How many ranks it is for.
    """

    wrap: Callable[[Model, int], Model]
    world_size: int = 2


LAYOUTS: dict[str, Layout] = {
    "plain": Layout(lambda model, _: model),
    "ddp": Layout(_ddp),
    "replicate": Layout(_replicate),
    "fsdp1-full-orig": Layout(_fsdp1(sharding_strategy=FULL, use_orig_params=True)),
    "fsdp1-full-flat": Layout(_fsdp1(sharding_strategy=FULL, use_orig_params=False)),
    "fsdp1-grad-orig": Layout(_fsdp1(sharding_strategy=GRAD, use_orig_params=True)),
    "fsdp1-grad-flat": Layout(_fsdp1(sharding_strategy=GRAD, use_orig_params=False)),
    "fsdp1-no-orig": Layout(_fsdp1(sharding_strategy=NO, use_orig_params=True)),
    "fsdp1-no-flat": Layout(_fsdp1(sharding_strategy=NO, use_orig_params=False)),
    "fsdp1-half-orig": Layout(_fsdp1(use_orig_params=True, mixed_precision=_HALF)),
    "fsdp1-half-flat": Layout(_fsdp1(use_orig_params=False, mixed_precision=_HALF)),
    "fsdp1-nested-orig": Layout(_fsdp1_nested(use_orig_params=True)),
    "fsdp1-nested-flat": Layout(_fsdp1_nested(use_orig_params=False)),
    "fsdp1-3-orig": Layout(_fsdp1(use_orig_params=True), 3),
    "fsdp1-3-flat": Layout(_fsdp1_nested(use_orig_params=False), 3),
    "fsdp1-hybrid-orig": Layout(_fsdp1_hybrid(use_orig_params=True), 4),
    "fsdp1-hybrid-flat": Layout(_fsdp1_hybrid(use_orig_params=False), 4),
    "fsdp1-tp": Layout(_fsdp1_tp, 4),
    "fsdp2": Layout(_fsdp2()),
    "fsdp2-nested": Layout(_fsdp2(nested=True)),
    "fsdp2-nested-kept": Layout(_fsdp2(nested=True, reshard_after_forward=False)),
    "fsdp2-3": Layout(_fsdp2(nested=True), 3),
    "fsdp2-4": Layout(_fsdp2(), 4),
    "tp": Layout(_tp),
    "fsdp2-tp": Layout(_fsdp2_tp, 4),
    "hsdp": Layout(_hsdp, 4),
    "compiled": Layout(_whole(_compile)),
    "ddp-compiled": Layout(_chain(_whole(_compile), _ddp)),
    "compiled-ddp": Layout(_chain(_ddp, _whole(_compile))),
    "compiled-part-ddp": Layout(_chain(_compile_part, _ddp)),
    "checkpointed-compiled-part": Layout(_chain(_checkpointed, _compile_part)),
    "compiled-checkpointed-part": Layout(_chain(_compile_part, _checkpointed)),
    "checkpointed-fsdp2": Layout(_chain(_checkpointed, _fsdp2(nested=True))),
    "checkpointed-fsdp1-orig": Layout(_chain(_checkpointed, _fsdp1_nested(use_orig_params=True))),
    "checkpointed-fsdp1-flat": Layout(_chain(_checkpointed, _fsdp1_nested(use_orig_params=False))),
    "compiled-fsdp1-orig": Layout(_chain(_fsdp1(use_orig_params=True), _whole(_compile))),
    "fsdp1-compiled-part": Layout(_chain(_compile_part, _fsdp1_nested(use_orig_params=True))),
    "compiled-fsdp2": Layout(_chain(_fsdp2(nested=True), _whole(_compile))),
    "fsdp2-compiled-part": Layout(_chain(_compile_part, _fsdp2(nested=True))),
    "checkpointed-ddp-compiled": Layout(_chain(_checkpointed, _ddp, _whole(_compile))),
}

# One of each kind, for what all layouts need not show.
MAIN = (
    "plain",
    "ddp",
    "fsdp1-full-orig",
    "fsdp1-no-orig",
    "fsdp1-half-flat",
    "fsdp1-nested-flat",
    "fsdp1-3-orig",
    "fsdp1-hybrid-flat",
    "fsdp2-nested",
    "fsdp2-3",
    "tp",
    "fsdp2-tp",
    "hsdp",
    "compiled-part-ddp",
    "checkpointed-compiled-part",
    "checkpointed-fsdp1-flat",
    "fsdp2-compiled-part",
)

# Where an embedding and a head are units of their own, FSDP cannot tie them.
TIED_LAYOUTS = (
    "plain",
    "ddp",
    "fsdp1-full-orig",
    "fsdp1-full-flat",
    "fsdp1-no-flat",
    "fsdp1-hybrid-orig",
    "fsdp2",
    "fsdp2-4",
    "hsdp",
    "compiled",
)


def build(name: str, kind: Callable[[], Model] = Net) -> Model:
    """Make a model and wrap it."""
    return LAYOUTS[name].wrap(kind(), distributed.get_world_size())


def layouts(*names: str) -> list[Any]:
    """Turn layouts, all if none is named, into parameters of a test that runs on their ranks."""
    return [
        pytest.param(name, id=name, marks=pytest.mark.ranks(LAYOUTS[name].world_size))
        for name in names or LAYOUTS
    ]


# What ranks have


def everywhere(value: Any) -> list[Any]:
    """What each rank passed, on all of them."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def joined(value: Any) -> Any:
    """A state with whole tensors in the place of shards, joined by torch or by hand."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, ShardedTensor):
        return _joined_by_hand(value)
    if isinstance(value, dict):
        return {key: joined(item) for key, item in value.items()}
    if isinstance(value, list):
        return [joined(item) for item in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def _joined_by_hand(sharded: ShardedTensor) -> torch.Tensor:
    own = [(shard.metadata.shard_offsets, shard.tensor.clone()) for shard in sharded.local_shards()]
    whole = torch.full(sharded.size(), -1.0, dtype=sharded.dtype)
    for shards in everywhere(own):
        for offsets, tensor in shards:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
            whole[box] = tensor
    return whole


def memory_of(value: Any) -> list[tuple[Any, ...]]:
    """Copies of all local tensors in a state or in what a module or optimizer holds."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        return [(local.detach().clone(),)]
    if isinstance(value, Mapping):
        return [row for key in value for row in memory_of(value[key])]
    if isinstance(value, (list, tuple)):
        return [row for item in value for row in memory_of(item)]
    return [(copy.deepcopy(value),)]


def groups_of(state: Mapping[str, Any]) -> list[Any]:
    """The groups of an optimizer's state; the order of parameters in a group says nothing."""
    groups = [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]
    return sorted(groups, key=lambda group: group["params"])
