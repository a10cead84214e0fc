"""States that rank 0 has alone: what others get, what it costs them, and models on meta."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dsdformat.errors import DsdError, DsdPrecisionWarning
from dsdformat.torch.broadcast import broadcast, fill_from_first
from dsdformat.torch.gather import gather
from dsdformat.torch.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.ranks.layouts import (
    LAYOUTS,
    OPTIMIZERS,
    Net,
    Tied,
    build,
    everywhere,
    flattened,
    joined,
    layouts,
    numbered,
    numbered_model,
    numbered_optimizer,
    train,
)
from tests.ranks.options import FROM_0, FULL
from tests.ranks.shards import dtensor, mesh_of
from tests.torch_runtime.exact import assert_same, assert_same_tensor

MIB = 1 << 20


def on_rank_0(value: Any) -> Any:
    return value if distributed.get_rank() == 0 else {}


# Options together


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1-full-orig", "fsdp2-nested", "tp"])
@pytest.mark.parametrize("offload", [False, True], ids=["here", "host"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
@pytest.mark.parametrize("ignore", [False, True], ids=["frozen-too", "trainable"])
def test_options_go_together_when_rank_0_gives(layout, offload, flat, strict, ignore):
    options = StateDictOptions(
        full_state_dict=True,
        broadcast_from_rank0=True,
        cpu_offload=offload,
        flatten_optimizer_state_dict=flat,
        strict=strict,
        ignore_frozen_params=ignore,
    )
    model = build(layout)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wanted = numbered_model(Net()), numbered_optimizer(Net(), OPTIMIZERS["adamw"])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=on_rank_0(wanted[0]),
        optim_state_dict=on_rank_0(flattened(wanted[1]) if flat else wanted[1]),
        options=options,
    )
    found = get_model_state_dict(model, options=options)
    assert_same(found, wanted[0] if not offload or distributed.get_rank() == 0 else {})
    state = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    assert_same(state, wanted[1]["state"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_giving_from_rank_0_needs_whole_states(where):
    model = build("fsdp2")
    options = StateDictOptions(broadcast_from_rank0=True)
    calls = {
        "model": lambda: set_model_state_dict(model, {}, options=options),
        "optimizer": lambda: set_optimizer_state_dict(
            model, OPTIMIZERS["sgd"](model.parameters()), {}, options=options
        ),
    }
    with pytest.raises(Exception, match="full_state_dict must be True"):
        calls[where]()


@pytest.mark.parametrize("layout", layouts("ddp", "fsdp1-full-orig", "fsdp2-nested", "hsdp"))
def test_what_rank_0_has_is_not_changed(layout):
    model = build(layout)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    given = numbered_model(Net()), numbered_optimizer(Net(), OPTIMIZERS["adamw"])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=on_rank_0(given[0]),
        optim_state_dict=on_rank_0(given[1]),
        options=FROM_0,
    )
    train(model, optimizer)
    assert_same(given, (numbered_model(Net()), numbered_optimizer(Net(), OPTIMIZERS["adamw"])))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp1-full-orig", "fsdp2-nested"])
def test_what_other_ranks_pass_is_not_looked_at(layout):
    model, wanted = build(layout), numbered_model(Net())
    given = wanted if distributed.get_rank() == 0 else {"nonsense": torch.ones(9)}
    set_model_state_dict(model, given, options=FROM_0)
    assert_same(get_model_state_dict(model, options=FULL), wanted)


# Names that do not fit


@pytest.mark.parametrize(
    "layout",
    layouts(
        "plain",
        "ddp",
        "fsdp1-full-orig",
        "fsdp2-nested",
        "tp",
        "hsdp",
    ),
)
@pytest.mark.parametrize("offload", [False, True], ids=["here", "host"])
@pytest.mark.parametrize("source", ["all", "from-0"])
def test_a_name_too_much_is_told_and_passed_over_if_not_strict(layout, offload, source):
    model, wanted = build(layout), numbered_model(Net())
    given = {**wanted, "zzz.weight": torch.ones(2, 2)}
    options = StateDictOptions(
        full_state_dict=True,
        strict=False,
        cpu_offload=offload,
        broadcast_from_rank0=source == "from-0",
    )
    given = on_rank_0(given) if source == "from-0" else given
    keys = set_model_state_dict(model, given, options=options)
    assert keys.unexpected_keys == ["zzz.weight"]
    assert keys.missing_keys == []
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.parametrize("layout", layouts("plain", "ddp", "fsdp2-nested", "tp", "hsdp"))
@pytest.mark.parametrize("offload", [False, True], ids=["here", "host"])
@pytest.mark.parametrize("what", ["unexpected", "missing", "shape"])
def test_what_rank_0_has_wrongly_is_one_error_on_every_rank(layout, offload, what):
    check_wrong(layout, offload, what)


@pytest.mark.parametrize("layout", layouts("fsdp1-full-orig", "fsdp1-full-flat"))
@pytest.mark.parametrize("what", ["unexpected", "missing", "shape"])
def test_what_rank_0_has_wrongly_for_fsdp1_is_one_error_on_every_rank(layout, what):
    check_wrong(layout, False, what)


def check_wrong(layout: str, offload: bool, what: str) -> None:
    model = build(layout)
    before = numbered_model(Net(), 4)
    set_model_state_dict(model, before, options=FULL)
    given = numbered_model(Net())
    if what == "missing":
        del given["row.weight"]
    elif what == "unexpected":
        given["zzz.weight"] = torch.ones(2)
    else:
        given["row.weight"] = torch.ones(3, 3)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload)
    name = "zzz.weight" if what == "unexpected" else "row.weight"
    with pytest.raises((DsdError, RuntimeError), match=name) as caught:
        set_model_state_dict(model, on_rank_0(given), options=options)
    assert len(set(everywhere(str(caught.value)))) == 1
    assert_same(get_model_state_dict(model, options=FULL), before)


# Only rank 0 has read the file, and nobody says so


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp1-full-orig", "fsdp2-nested"])
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_ranks_without_a_state_are_told_which_option_helps(layout, part):
    model = build(layout)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wanted = numbered_model(Net()), numbered_optimizer(Net(), OPTIMIZERS["adamw"])
    calls = {
        "model": lambda: set_model_state_dict(model, on_rank_0(wanted[0]), options=FULL),
        "optimizer": lambda: set_optimizer_state_dict(
            model, optimizer, on_rank_0(wanted[1]), options=FULL
        ),
    }
    with pytest.raises(Exception, match="broadcast_from_rank0"):
        calls[part]()


# Buffers, and models on meta


class Rotary(nn.Module):
    """Buffers of both kinds, one of them 0-d, beside a parameter."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 5, device=device)
        self.register_buffer("bias_correction", torch.zeros(4, device=device))
        self.register_buffer("count", torch.tensor(0, device=device))
        self.register_buffer("angles", torch.ones(3, device=device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x * self.angles)


ROTARY = {
    "lin.weight": torch.arange(15.0).view(5, 3),
    "lin.bias": torch.arange(5.0),
    "bias_correction": torch.arange(4.0) + 0.5,
    "count": torch.tensor(41),
}


@pytest.mark.ranks(2)
def test_buffers_of_all_ranks_become_those_of_rank_0():
    model = Rotary()
    with torch.no_grad():
        model.bias_correction.fill_(distributed.get_rank() + 7)
    fully_shard(model, mesh=mesh_of((2,)))
    set_model_state_dict(model, on_rank_0(ROTARY), options=FROM_0)
    assert_same(get_model_state_dict(model, options=FULL), ROTARY)
    assert model.angles.tolist() == [1.0] * 3
    assert type(model.bias_correction) is torch.Tensor


class Plainer(nn.Module):
    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.one = nn.Linear(3, 5, device=device)
        self.two = nn.Sequential(nn.Linear(5, 7, device=device), nn.Linear(7, 1, device=device))
        self.register_buffer("kept", torch.zeros(3, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)) + self.kept.sum()


META = ("fsdp2", "fsdp2-nested", "fsdp2-3", "hsdp", "plain")


@pytest.mark.parametrize("layout", layouts(*META))
@pytest.mark.parametrize("source", ["all", "from-0"])
def test_models_on_meta_get_memory_and_the_values(layout, source):
    model = LAYOUTS[layout].wrap(Plainer("meta"), distributed.get_world_size())
    parameters = [id(one) for one in model.parameters()]
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wanted = numbered_model(Plainer())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=source == "from-0")
    given = on_rank_0(wanted) if source == "from-0" else wanted
    set_model_state_dict(model, given, options=options)
    assert [id(one) for one in model.parameters()] == parameters
    assert not any(one.is_meta for one in [*model.parameters(), *model.buffers()])
    assert_same(get_model_state_dict(model, options=FULL), wanted)
    states = numbered_optimizer(Plainer(), OPTIMIZERS["adamw"])
    set_optimizer_state_dict(model, optimizer, states, options=FULL)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    found = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert {float(entry["step"]) for entry in found["state"].values()} == {8.0}


@pytest.mark.parametrize("layout", layouts("fsdp2", "plain"))
def test_tied_parameters_on_meta_stay_tied(layout):
    with torch.device("meta"):
        model = Tied()
    model = LAYOUTS[layout].wrap(model, distributed.get_world_size())
    set_model_state_dict(model, on_rank_0(numbered_model(Tied())), options=FROM_0)
    assert model.head.weight is model.emb.weight
    assert len(list(model.parameters())) == 3
    assert_same(get_model_state_dict(model, options=FULL), numbered_model(Tied()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["plain", "fsdp2"])
def test_a_buffer_that_no_state_fills_is_never_left_on_meta_in_silence(layout):
    model = LAYOUTS[layout].wrap(Rotary("meta"), distributed.get_world_size())
    try:
        set_model_state_dict(model, on_rank_0(ROTARY), options=FROM_0)
    except DsdError as error:
        assert "angles" in str(error)  # noqa: PT017  # either is right
        return
    assert not model.angles.is_meta
    assert model.angles.tolist() == [1.0] * 3


@pytest.mark.ranks(2)
def test_dtypes_of_a_model_are_kept_when_rank_0_has_others():
    model = fully_shard(nn.Linear(3, 5).to(torch.bfloat16), mesh=mesh_of((2,)))
    given = {"weight": torch.arange(15.0).view(5, 3), "bias": torch.arange(5.0)}
    told = "weight .torch.float32 given, torch.bfloat16 in the model."
    first = distributed.get_rank() == 0
    with pytest.warns(DsdPrecisionWarning, match=told) if first else nullcontext():
        set_model_state_dict(model, on_rank_0(given), options=FROM_0)
    found = get_model_state_dict(model, options=FULL)
    assert_same(found, {name: value.to(torch.bfloat16) for name, value in given.items()})


# Two axes


def two_axes(sizes: tuple[int, int] = (7, 5)) -> nn.Module:
    """A row that one axis shards, and a column-parallel layer that both do."""
    torch.manual_seed(0)
    model = nn.Module()
    model.row = nn.Parameter(torch.zeros(1, 17))
    model.wide = nn.Linear(*sizes)
    return model


def wrapped_two_axes(sizes: tuple[int, int] = (7, 5)) -> nn.Module:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = parallelize_module(two_axes(sizes), mesh["tp"], {"wide": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(7, 5), (4, 8), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("source", ["all", "from-0"])
def test_fewer_rows_than_ranks_on_two_axes_are_set_and_read(sizes, source):
    model, wanted = wrapped_two_axes(sizes), numbered_model(two_axes(sizes))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=source == "from-0")
    given = on_rank_0(wanted) if source == "from-0" else wanted
    set_model_state_dict(model, given, options=options)
    assert_same(get_model_state_dict(model, options=FULL), wanted)
    assert_same(joined(get_model_state_dict(model)), wanted)
    # Row 0 is on the first rank of the axis, and the second has none.
    rows = 1 if mesh_of((2, 2), ("dp", "tp")).get_local_rank("dp") == 0 else 0
    assert tuple(model.row.to_local().shape) == (rows, 17)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("source", ["all", "from-0"])
def test_optimizer_state_on_two_axes_is_set_and_read(source):
    model = wrapped_two_axes()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wanted = numbered_optimizer(two_axes(), OPTIMIZERS["adamw"])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=source == "from-0")
    given = on_rank_0(wanted) if source == "from-0" else wanted
    set_optimizer_state_dict(model, optimizer, given, options=options)
    found = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert_same(found["state"], wanted["state"])
    assert isinstance(optimizer.state[model.row]["exp_avg"], DTensor)
    assert optimizer.state[model.row]["exp_avg"].placements == model.row.placements


@pytest.mark.ranks(4)
def test_a_part_of_a_mesh_whose_first_rank_has_nothing_is_told_what_to_do():
    model = fully_shard(Net(), mesh=mesh_of((2, 2), ("dp", "tp"))["dp"])
    wanted = numbered_model(Net())
    if distributed.get_rank() % 2:  # ranks 1 and 3 are a part of the mesh
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 has no state dict.*process_group"):
            set_model_state_dict(model, {}, options=FROM_0)
    else:
        set_model_state_dict(model, on_rank_0(wanted), options=FROM_0)
        assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_model_on_one_axis_of_a_mesh_takes_the_state_of_rank_0_of_a_group(part):
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = fully_shard(Net(), mesh=mesh["dp"])
    options = dataclasses.replace(FROM_0, process_group=distributed.group.WORLD)
    if part == "model":
        wanted = numbered_model(Net())
        set_model_state_dict(model, on_rank_0(wanted), options=options)
        assert_same(get_model_state_dict(model, options=FULL), wanted)
    else:
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        state = numbered_optimizer(Net(), OPTIMIZERS["adamw"])
        set_optimizer_state_dict(model, optimizer, on_rank_0(state), options=options)
        found = get_optimizer_state_dict(model, optimizer, options=FULL)
        assert_same(found["state"], state["state"])


# Peak memory


def rss(field: str = "VmRSS") -> int:
    """Resident bytes now, or the most since `forget_peak`, as VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def forget_peak() -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return rss("VmHWM")


def warm() -> None:
    """Load what loads lazily, and let gloo make its connections."""
    mesh = mesh_of((distributed.get_world_size(),))
    small = dtensor(torch.zeros(1024 * 64, 4), mesh, [Shard(0)], (1024 * 64 * mesh.size(), 4))
    whole = torch.zeros(small.shape)
    broadcast({"one": whole}, {"one": small})
    gather({"one": small}, to=0)


def peak_of_broadcast(nbytes: int, bucket: int, count: int) -> float:
    """How many MiB a rank needs at most while it fills `count` shards that have memory."""
    warm()
    mesh = mesh_of((distributed.get_world_size(),))
    rows = nbytes // 4096
    into = {}
    for index in range(count):
        local = torch.ones(rows // mesh.size(), 1024)
        into[f"t{index}"] = dtensor(local, mesh, [Shard(0)], (rows, 1024))
    whole = None
    if distributed.get_rank() == 0:
        whole = {name: torch.full((rows, 1024), 2.0) for name in into}
    distributed.barrier()
    before = forget_peak()
    broadcast(whole, into, bucket_nbytes=bucket)
    risen = rss("VmHWM") - before
    assert all(bool((one.to_local() == 2).all()) for one in into.values())
    return risen / MIB


def peak_of_gather(nbytes: int, bucket: int) -> float:
    """How many MiB a rank needs at most while rank 0 gets a whole tensor."""
    warm()
    mesh = mesh_of((distributed.get_world_size(),))
    rows = nbytes // 4096
    tensor = dtensor(torch.ones(rows // mesh.size(), 1024), mesh, [Shard(0)], (rows, 1024))
    distributed.barrier()
    before = forget_peak()
    found = gather({"one": tensor}, to=0, bucket_nbytes=bucket)
    risen = rss("VmHWM") - before
    assert len(found) == (distributed.get_rank() == 0)
    return risen / MIB


SLACK = 16  # MiB: what gloo and the allocator take


@pytest.mark.parametrize("world_size", [2, 4])
def test_other_ranks_need_no_more_than_a_bucket_to_be_filled(ranks, world_size):
    risen = ranks(world_size)(peak_of_broadcast, 128 * MIB, 32 * MIB, 1)
    assert max(risen[1:]) <= 32 + SLACK
    assert risen[0] <= 3 * 32 + SLACK  # its own, those of others, and gloo's copy


def test_many_tensors_need_no_more_than_one(ranks):
    risen = ranks(2)(peak_of_broadcast, 32 * MIB, 16 * MIB, 5)
    assert max(risen[1:]) <= 16 + SLACK
    assert risen[0] <= 3 * 16 + SLACK


@pytest.mark.parametrize("world_size", [2, 4])
def test_other_ranks_hold_no_whole_tensor_when_rank_0_gets_it(ranks, world_size):
    risen = ranks(world_size)(peak_of_gather, 128 * MIB, 32 * MIB)
    assert max(risen[1:]) <= 32 + SLACK


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_rank_that_gets_a_whole_tensor_needs_a_bucket_beside_it(ranks, world_size):
    risen = ranks(world_size)(peak_of_gather, 128 * MIB, 32 * MIB)
    assert risen[0] <= 128 + 2 * 32 + SLACK


def peak_of_loading(mib: int, part: str, kind: str = "fsdp2") -> float:
    """How many MiB a rank needs at most to set a meta model, or its optimizer, from rank 0."""
    warm()
    fill_from_first.__defaults__ = (16 * MIB,)
    rows = mib * MIB // 4096
    with torch.device("meta" if kind == "fsdp2" else "cpu"):
        model = nn.Sequential(nn.Linear(1024, rows, bias=False))
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh_of((distributed.get_world_size(),)))
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"0.weight": torch.ones(rows, 1024)} if part == "model" else {}
    if part == "optimizer":
        model.to_empty(device="cpu")
        torch.nn.init.ones_(model[0].weight)
        entry = {"momentum_buffer": torch.ones(rows, 1024)}
        groups = [{**optimizer.param_groups[0], "params": ["0.weight"]}]
        state = {"state": {"0.weight": entry}, "param_groups": groups}
    if distributed.get_rank():
        state = {}
    distributed.barrier()
    before = forget_peak()
    if part == "model":
        set_model_state_dict(model, state, options=FROM_0)
    else:
        set_optimizer_state_dict(model, optimizer, state, options=FROM_0)
    risen = rss("VmHWM") - before
    if kind == "fsdp2":
        local = model[0].weight.to_local()
        assert local.shape == (rows // distributed.get_world_size(), 1024)
        assert bool((local == 1).all())
    return risen / MIB


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_setting_from_rank_0_costs_others_their_shards_and_a_bucket(ranks, world_size, part):
    risen = ranks(world_size)(peak_of_loading, 128, part)
    assert max(risen[1:]) <= 128 / world_size + 16 + SLACK


def test_setting_fsdp1_from_rank_0_costs_others_a_bucket(ranks):
    risen = ranks(2)(peak_of_loading, 128, "model", "fsdp1")
    assert max(risen[1:]) <= 16 + SLACK


def test_numbers_of_elements_tell_them_apart():
    assert_same_tensor(numbered(torch.zeros(3), 1), torch.tensor([32.5, 32.625, 32.75]))
