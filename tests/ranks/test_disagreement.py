"""Ranks that do not say the same, do not call the same, or own different parts of a model."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard

from dsdformat.errors import DistributedError, DsdError, RankDisagreementError
from dsdformat.torch.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.ranks.layouts import (
    OPTIMIZERS,
    Net,
    build,
    everywhere,
    joined,
    layouts,
    numbered,
    numbered_model,
    numbered_optimizer,
    train,
)
from tests.ranks.options import FROM_0, FULL, HOST
from tests.ranks.shards import mesh_of
from tests.torch_runtime.exact import assert_same

GROUP_TIMEOUT_S = 4.0


# A call on one rank alone


def one_rank_calls(layout: str, what: str) -> tuple[str, float]:
    """What rank 0 is told when it calls alone, and after how many seconds."""
    model = build(layout)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    calls = {
        "model": lambda: get_model_state_dict(model, options=FULL),
        "optimizer": lambda: get_optimizer_state_dict(model, optimizer, options=FULL),
        "set": lambda: set_model_state_dict(model, numbered_model(Net()), options=FROM_0),
    }
    distributed.barrier()
    store = distributed.distributed_c10d._get_default_store()
    if distributed.get_rank() == 0:
        started = time.monotonic()
        told = ""
        try:
            calls[what]()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        store.set("told", told)
        return told, time.monotonic() - started
    store.wait(["told"])
    return "", 0.0


# B153


@pytest.mark.parametrize("what", ["model", "optimizer", "set"])
def test_a_call_on_one_rank_ends_when_the_group_times_out(ranks, what):
    run = ranks(2, group_timeout_s=GROUP_TIMEOUT_S, limit_s=40)
    told, seconds = run(one_rank_calls, "fsdp2", what)[0]
    assert told
    assert seconds < 5 * GROUP_TIMEOUT_S


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["fsdp1-full-orig", "fsdp2", "tp"])
@pytest.mark.parametrize("what", ["model", "optimizer", "set"])
def test_a_rank_that_waits_too_long_is_told_for_whom_and_all_may_go_on(layout, what):
    model = build(layout)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    whole, given = numbered_model(Net()), numbered_model(Net(), 4)
    set_model_state_dict(model, whole, options=FULL)
    limited = dataclasses.replace(FULL, timeout=timedelta(seconds=0.5))
    calls = {
        "model": lambda: get_model_state_dict(model, options=limited),
        "optimizer": lambda: get_optimizer_state_dict(model, optimizer, options=limited),
        "set": lambda: set_model_state_dict(model, given, options=limited),
    }
    if distributed.get_rank() == 0:
        with pytest.raises(DistributedError, match="1 of 2 ranks have not made this call: 1"):
            calls[what]()
    distributed.barrier()
    assert_same(get_model_state_dict(model, options=limited), whole)


def one_rank_of_a_part_calls() -> tuple[str, float]:
    """As `one_rank_calls`, where the model is on half of the ranks."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = fully_shard(nn.Linear(3, 5), mesh=mesh["dp"])
    distributed.barrier()
    store = distributed.distributed_c10d._get_default_store()
    if distributed.get_rank() == 0:
        started = time.monotonic()
        told = ""
        try:
            limited = dataclasses.replace(FULL, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
            get_model_state_dict(model, options=limited)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        store.set("told", told)
        return told, time.monotonic() - started
    store.wait(["told"])
    return "", 0.0


# torch's groups for parts of a mesh wait for half an hour.
def test_a_call_on_one_rank_of_a_part_ends_at_the_limit(ranks):
    run = ranks(4, group_timeout_s=GROUP_TIMEOUT_S, limit_s=5 * GROUP_TIMEOUT_S)
    told, seconds = run(one_rank_of_a_part_calls)[0]
    assert told
    assert seconds < 5 * GROUP_TIMEOUT_S


@pytest.mark.ranks(1)
def test_shards_are_read_without_a_word_to_others():
    # One rank in a group of one: nothing to talk to. With more, see below.
    model = build("fsdp2")
    assert joined(get_model_state_dict(model)).keys() == Net().state_dict().keys()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp2-nested", "tp"])
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_reading_shards_needs_no_other_rank(layout, part):
    model = build(layout)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    distributed.barrier()
    if distributed.get_rank() == 1:
        if part == "model":
            get_model_state_dict(model)
        else:
            get_optimizer_state_dict(model, optimizer)
    distributed.barrier()


# Calls that are not the same


@pytest.mark.ranks(2)
def test_ranks_that_call_in_another_order_are_told():
    model = build("fsdp2")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer)
    calls = [
        lambda: get_model_state_dict(model, options=FULL),
        lambda: get_optimizer_state_dict(model, optimizer, options=FULL),
    ]
    with pytest.raises(RankDisagreementError) as caught:
        calls[distributed.get_rank()]()
    assert len(set(everywhere(str(caught.value)))) == 1


class Other(Net):
    """The net, but for a layer that has another size on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        if distributed.get_rank() == 1:
            self.out = nn.Linear(7, 4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["get", "optimizer", "set"])
def test_ranks_with_different_models_are_told_where(what):
    model = fully_shard(Other(), mesh=mesh_of((2,)))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    given = numbered_model(Net()) if distributed.get_rank() == 0 else {}
    calls = {
        "get": lambda: get_model_state_dict(model, options=FULL),
        "optimizer": lambda: get_optimizer_state_dict(model, optimizer, options=FULL),
        "set": lambda: set_model_state_dict(model, given, options=FROM_0),
    }
    with pytest.raises((RankDisagreementError, DistributedError), match=r"out\.") as caught:
        calls[what]()
    assert len(set(everywhere(str(caught.value)))) == 1


def different_options() -> tuple[str, float]:
    """What a rank is told that wants copies on the host where another does not."""
    model = build("fsdp2")
    distributed.barrier()
    started = time.monotonic()
    try:
        get_model_state_dict(model, options=HOST if distributed.get_rank() else FULL)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "", time.monotonic() - started


def test_ranks_with_different_options_are_told_in_time(ranks):
    for told, seconds in ranks(2, group_timeout_s=GROUP_TIMEOUT_S)(different_options):
        assert told
        assert seconds < 5 * GROUP_TIMEOUT_S


@pytest.mark.ranks(4)
def test_pieces_that_claim_different_whole_shapes_are_no_state():
    rows = [3, 3, 3, 1][distributed.get_rank()]
    model = nn.Module()
    local = torch.ones(rows, 2)
    tensor = DTensor.from_local(local, mesh_of((4,)), [Shard(0)], run_check=False)
    model.weight = nn.Parameter(tensor)
    with pytest.raises(RankDisagreementError) as caught:
        get_model_state_dict(model, options=FULL)
    assert "weight" in str(caught.value)
    assert len(set(everywhere(str(caught.value)))) == 1


# One name, and different contents


class Experts(nn.Module):
    """Each rank has experts of its own, under the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2)])
        with torch.no_grad():
            for one in self.parameters():
                one.fill_(distributed.get_rank())


@pytest.mark.ranks(2)
def test_different_experts_under_one_name_are_no_whole_state():
    model = nn.Sequential(Experts(), fully_shard(nn.Linear(2, 2), mesh=mesh_of((2,))))
    with pytest.raises(DsdError, match="experts"):
        get_model_state_dict(model, options=HOST)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", [False, True], ids=["here", "host"])
def test_each_rank_reads_its_own_experts(offload):
    model = Experts()
    found = get_model_state_dict(model, options=StateDictOptions(cpu_offload=offload))
    assert float(found["experts.0.weight"][0, 0]) == distributed.get_rank()


# Pipeline stages: each rank has layers and an optimizer of its own


class Stage(nn.Module):
    """The layers of one stage, under the names that the whole model has."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def stage(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Numbers 0 and 2 on rank 0, 1 and 3 on rank 1; each with a rate of its own."""
    numbers = [rank, rank + 2]
    model = Stage(numbers)
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(numbered(one, hash_of(name)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def hash_of(name: str) -> int:
    return int(name.split(".")[1]) * 2 + name.endswith("bias")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("full", [False, True], ids=["shards", "full"])
def test_stages_keep_their_own_rates_and_states(flat, full):
    options = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flat)
    rank = distributed.get_rank()
    model, optimizer = stage(rank)
    found = get_optimizer_state_dict(model, optimizer, options=options)
    other = Stage([rank, rank + 2])
    fresh = torch.optim.AdamW(other.parameters(), lr=5.0)
    set_optimizer_state_dict(other, fresh, found, options=options)
    assert fresh.param_groups[0]["lr"] == 0.1 * (rank + 1)
    assert_same(
        get_optimizer_state_dict(other, fresh, options=options),
        get_optimizer_state_dict(model, optimizer, options=options),
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_states_of_all_stages_go_into_the_whole_model_by_name(flat):
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    states = everywhere(get_state_dict(*stage(distributed.get_rank()), options=options))
    weights = {**states[0][0], **states[1][0]}
    if flat:
        optim = {**states[0][1], **states[1][1]}
    else:
        optim = {
            "state": {**states[0][1]["state"], **states[1][1]["state"]},
            "param_groups": states[0][1]["param_groups"] + states[1][1]["param_groups"],
        }
    whole = Stage([0, 1, 2, 3])
    layers = whole.layers
    optimizer = torch.optim.AdamW(
        [
            {"params": [*layers["0"].parameters(), *layers["2"].parameters()]},
            {"params": [*layers["1"].parameters(), *layers["3"].parameters()]},
        ],
        lr=9.0,
    )
    set_state_dict(
        whole, optimizer, model_state_dict=weights, optim_state_dict=optim, options=options
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert_same(get_model_state_dict(whole), {name: weights[name] for name in whole.state_dict()})
    found = get_optimizer_state_dict(whole, optimizer)["state"]
    assert set(found) == set(weights)
    for rank in range(2):
        own = states[rank][1]
        if not flat:
            assert_same({name: found[name] for name in own["state"]}, own["state"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_stage_takes_its_part_of_the_whole_state(flat):
    whole = Stage([0, 1, 2, 3])
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.25)
    whole(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(
        full_state_dict=True, flatten_optimizer_state_dict=flat, strict=False
    )
    given = get_state_dict(whole, optimizer, options=options)
    rank = distributed.get_rank()
    model = Stage([rank, rank + 2])
    fresh = torch.optim.AdamW(model.parameters(), lr=5.0)
    set_state_dict(
        model, fresh, model_state_dict=given[0], optim_state_dict=given[1], options=options
    )
    assert fresh.param_groups[0]["lr"] == 0.25
    expected = get_state_dict(whole, optimizer, options=FULL)
    found = get_state_dict(model, fresh, options=FULL)
    assert_same(found[0], {name: expected[0][name] for name in found[0]})
    assert_same(found[1]["state"], {n: expected[1]["state"][n] for n in model.state_dict()})


@pytest.mark.ranks(2)
def test_plain_stages_come_to_the_host_of_the_group_that_is_named():
    groups = [distributed.new_group([rank]) for rank in range(2)]
    model, optimizer = stage(distributed.get_rank())
    options = dataclasses.replace(HOST, process_group=groups[distributed.get_rank()])
    found = everywhere(get_state_dict(model, optimizer, options=options))
    names = {name for states in found for name in states[0]}
    assert names == set(Stage([0, 1, 2, 3]).state_dict())
    stated = {name for states in found for name in states[1].get("state", {})}
    assert stated == names


def stage_of_two(kind: str) -> tuple[nn.Module, int, Any]:
    """Two stages on two ranks each; a stage's model, its number, and its group."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    number = mesh.get_local_rank("pp")
    model = Stage([number, number + 2])
    part: DeviceMesh = mesh["dp"]
    if kind == "fsdp2":
        return fully_shard(model, mesh=part), number, part.get_group()
    group = part.get_group()
    return (
        FullyShardedDataParallel(
            model, process_group=group, device_id=torch.device("cpu"), use_orig_params=True
        ),
        number,
        group,
    )


def staged_state(number: int) -> dict[str, Any]:
    return {
        name: numbered(value, hash_of(name))
        for name, value in Stage([number, number + 2]).state_dict().items()
    }


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_all_ranks_of_a_stage_get_the_whole_stage(kind):
    check_stages(kind, FULL)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "kind",
    ["fsdp2", "fsdp1"],
)
def test_the_first_rank_of_each_stage_gets_the_stage_on_the_host(kind):
    check_stages(kind, HOST)


def check_stages(kind: str, options: StateDictOptions) -> None:
    model, number, _ = stage_of_two(kind)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wanted = staged_state(number)
    set_model_state_dict(model, wanted, options=FULL)
    moments = numbered_optimizer(Stage([number, number + 2]), OPTIMIZERS["adamw"], number)
    set_optimizer_state_dict(model, optimizer, moments, options=FULL)
    found = get_state_dict(model, optimizer, options=options)
    mine = not options.cpu_offload or distributed.get_rank() % 2 == 0
    assert_same(found[0], wanted if mine else {})
    assert_same(found[1].get("state", {}), moments["state"] if mine else {})


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "kind",
    ["fsdp2", "fsdp1"],
)
def test_the_first_rank_of_each_stage_gives_the_stage(kind):
    model, number, _ = stage_of_two(kind)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wanted = staged_state(number)
    moments = numbered_optimizer(Stage([number, number + 2]), OPTIMIZERS["adamw"], number)
    first = distributed.get_rank() % 2 == 0
    set_state_dict(
        model,
        optimizer,
        model_state_dict=wanted if first else {},
        optim_state_dict=moments if first else {},
        options=FROM_0,
    )
    found = get_state_dict(model, optimizer, options=FULL)
    assert_same(found[0], wanted)
    assert_same(found[1]["state"], moments["state"])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_stage_needs_no_other_stage(kind):
    model, number, _ = stage_of_two(kind)
    distributed.barrier()
    if number == 1:
        set_model_state_dict(model, staged_state(number), options=FULL)
        assert_same(get_model_state_dict(model, options=FULL), staged_state(number))
    distributed.barrier()


# What users read when something does not fit


@pytest.mark.parametrize(
    "layout",
    layouts(
        "plain",
        "compiled-ddp",
        "fsdp2-compiled-part",
        "fsdp1-nested-orig",
    ),
)
def test_errors_have_names_as_users_know_them_and_are_short(layout):
    class_of = build(layout)
    given = numbered_model(Net())
    given = {f"{name}x" if "inner" in name else name: value for name, value in given.items()}
    given |= {f"junk.{number}": torch.ones(1) for number in range(500)}
    with pytest.raises(RuntimeError) as caught:
        set_model_state_dict(class_of, given, options=FULL)
    text = str(caught.value)
    assert "inner.0.weight" in text
    assert "did you mean" in text or "inner.0.weightx" in text
    assert "503" in text
    assert len(text) < 4000
    for wrapper in ("_orig_mod", "module.", "_fsdp_wrapped_module", "_checkpoint_wrapped"):
        assert wrapper not in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp2", "tp"])
def test_an_error_of_shape_tells_both(layout):
    model, given = build(layout), numbered_model(Net())
    given["row.weight"] = torch.ones(3, 2)
    with pytest.raises(RuntimeError) as caught:
        set_model_state_dict(model, given, options=FULL)
    text = str(caught.value)
    assert "row.weight" in text
    assert "[3, 2]" in text
    assert "[1, 7]" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("into", ["plain", "ddp"])
def test_shards_go_into_a_model_that_is_not_sharded_or_an_error_says_why(kind, into):
    source = build({"fsdp2": "fsdp2", "fsdp1": "fsdp1-full-orig"}[kind])
    wanted = numbered_model(Net())
    set_model_state_dict(source, wanted, options=FULL)
    model = build(into)
    before = numbered_model(Net(), 4)
    set_model_state_dict(model, before, options=FULL)
    try:
        set_model_state_dict(model, get_model_state_dict(source))
    except (DsdError, RuntimeError) as error:
        assert "inner.0.weight" in str(error)  # noqa: PT017  # either is right
        assert_same(get_model_state_dict(model, options=FULL), before)
        return
    assert_same(get_model_state_dict(model, options=FULL), wanted)
