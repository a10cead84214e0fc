"""Parameters that are frozen, unused, or not stepped yet, and what their state is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn

from dsdformat.torch.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.ranks.layouts import (
    OPTIMIZERS,
    Net,
    Optimizer,
    build,
    groups_of,
    joined,
    layouts,
    numbered_model,
    numbered_optimizer,
    train,
)
from tests.ranks.options import FULL
from tests.torch_runtime.exact import assert_same

WAYS = {
    "nested": StateDictOptions(full_state_dict=True),
    "flat": StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
    "shards": StateDictOptions(),
    "flat-shards": StateDictOptions(flatten_optimizer_state_dict=True),
    "host": StateDictOptions(full_state_dict=True, cpu_offload=True),
}
NAMES = list(dict(Net().named_parameters()))
INNER = [name for name in NAMES if name.startswith("inner")]
OUTER = [name for name in NAMES if not name.startswith("inner")]

# FSDP1 freezes single parameters with use_orig_params alone, and whole units without.
SOME = ("plain", "ddp", "fsdp1-full-orig", "fsdp1-nested-flat", "fsdp2-nested", "fsdp2-3", "hsdp")

ways = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


def inner(model: nn.Module) -> list[nn.Parameter]:
    return [one for name, one in model.named_parameters() if "inner" in name.split(".")]


def freeze(model: nn.Module, *, everything: bool = False) -> None:
    for one in model.parameters() if everything else inner(model):
        one.requires_grad_(False)


def moved(
    model: nn.Module, optimizer: Optimizer, other: nn.Module, fresh: Optimizer, options: Any
) -> None:
    """Read a state, and set it into another optimizer in the same way; from rank 0 if it must."""
    found = get_optimizer_state_dict(model, optimizer, options=options)
    into = StateDictOptions(
        full_state_dict=options.full_state_dict,
        broadcast_from_rank0=options.full_state_dict and options.cpu_offload,
        flatten_optimizer_state_dict=options.flatten_optimizer_state_dict,
    )
    set_optimizer_state_dict(other, fresh, found, options=into)


def read(model: nn.Module, optimizer: Optimizer) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=FULL)


# Frozen after training


@pytest.mark.parametrize("layout", layouts(*SOME))
@ways
def test_state_of_parameters_that_were_frozen_later_is_kept(layout, options):
    check_frozen_later(layout, options, everything=False)


@pytest.mark.parametrize("layout", layouts(*SOME))
@pytest.mark.parametrize("way", ["nested", "flat-shards"])
def test_state_is_kept_if_all_parameters_were_frozen_later(layout, way):
    check_frozen_later(layout, WAYS[way], everything=True)


def check_frozen_later(layout: str, options: StateDictOptions, *, everything: bool) -> None:
    model = build(layout)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wanted = numbered_optimizer(Net(), OPTIMIZERS["adamw"])
    set_optimizer_state_dict(model, optimizer, wanted, options=FULL)
    freeze(model, everything=everything)
    other = build(layout)
    fresh = OPTIMIZERS["adamw"](other.parameters())
    freeze(other, everything=everything)
    moved(model, optimizer, other, fresh, options)
    found = read(other, fresh)
    assert_same(found["state"], wanted["state"])
    assert_same(groups_of(found), groups_of(wanted))


# Frozen from the start


@pytest.mark.parametrize("layout", layouts(*SOME))
@pytest.mark.parametrize("way", list(WAYS))
def test_parameters_frozen_from_the_start_need_no_state(layout, way):
    check_frozen_from_the_start(layout, WAYS[way])


def check_frozen_from_the_start(layout: str, options: StateDictOptions) -> None:
    model, other = build(layout), build(layout)
    freeze(model)
    freeze(other)
    optimizer, fresh = (OPTIMIZERS["adamw"](one.parameters()) for one in (model, other))
    train(model, optimizer)
    moved(model, optimizer, other, fresh, options)
    found = read(other, fresh)
    stated = {name for name, entry in found["state"].items() if entry}
    assert stated == set(OUTER)
    assert_same(
        {name: found["state"][name] for name in OUTER},
        {name: read(model, optimizer)["state"][name] for name in OUTER},
    )


@pytest.mark.parametrize("layout", layouts(*SOME))
@ways
def test_an_optimizer_of_the_trainable_parameters_alone_is_read_and_set(layout, options):
    model, other = build(layout), build(layout)
    freeze(model)
    freeze(other)
    optimizer, fresh = (
        OPTIMIZERS["adamw"]([p for p in one.parameters() if p.requires_grad])
        for one in (model, other)
    )
    train(model, optimizer)
    moved(model, optimizer, other, fresh, options)
    found = read(other, fresh)
    assert set(found["state"]) == set(OUTER)
    assert_same(found["state"], read(model, optimizer)["state"])
    assert set(found["param_groups"][0]["params"]) == set(OUTER)


@pytest.mark.parametrize("layout", layouts(*SOME))
@pytest.mark.parametrize(
    "options",
    [
        StateDictOptions(ignore_frozen_params=True),
        StateDictOptions(full_state_dict=True, ignore_frozen_params=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True),
    ],
    ids=["shards", "full", "host"],
)
def test_frozen_parameters_are_left_out_on_request(layout, options):
    model, wanted = build(layout), numbered_model(Net())
    set_model_state_dict(model, wanted, options=FULL)
    freeze(model)
    found = joined(get_model_state_dict(model, options=options))
    kept = {name: value for name, value in wanted.items() if name not in INNER}
    assert_same(found, kept if not options.cpu_offload or distributed.get_rank() == 0 else {})


@pytest.mark.parametrize("layout", layouts("plain", "fsdp1-full-orig", "fsdp2-nested"))
@pytest.mark.parametrize("broadcast", [False, True], ids=["all", "from-0"])
def test_a_state_without_frozen_parameters_is_set_loosely(layout, broadcast):
    model, wanted = build(layout), numbered_model(Net())
    set_model_state_dict(model, wanted, options=FULL)
    new = {name: value for name, value in numbered_model(Net(), 7).items() if name not in INNER}
    options = StateDictOptions(
        full_state_dict=True,
        strict=False,
        ignore_frozen_params=True,
        broadcast_from_rank0=broadcast,
    )
    freeze(model)
    given = new if distributed.get_rank() == 0 or not broadcast else {}
    keys = set_model_state_dict(model, given, options=options)
    assert set(keys.missing_keys) == set(INNER)
    assert_same(get_model_state_dict(model, options=FULL), {**wanted, **new})


# Not stepped yet


def step_outer(model: nn.Module, optimizer: Optimizer) -> None:
    """Take a step in which the inner layers get no gradient."""
    freeze(model)
    train(model, optimizer)
    for one in inner(model):
        one.requires_grad_(True)
        one.grad = None


PARTIAL = ("plain", "ddp", "fsdp1-full-orig", "fsdp2-nested", "fsdp2-3", "hsdp", "tp")


def partial(layout: str) -> tuple[nn.Module, Optimizer]:
    """A model whose optimizer has state for the outer layers alone."""
    model = build(layout)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for name, one in model.named_parameters():
        if not any(part in name for part in INNER):
            one.grad = torch.ones_like(one)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("layout", layouts(*PARTIAL))
@ways
def test_parameters_without_state_yet_stay_without(layout, options):
    model, optimizer = partial(layout)
    found = read(model, optimizer)
    assert {name for name, entry in found["state"].items() if entry} == set(OUTER)
    other = build(layout)
    fresh = OPTIMIZERS["adamw"](other.parameters())
    moved(model, optimizer, other, fresh, options)
    assert_same(read(other, fresh), found)
    states = {len(fresh.state.get(one, {})) for one in inner(other)}
    assert states == {0}


@pytest.mark.parametrize("layout", layouts("plain", "ddp", "fsdp2-nested", "hsdp"))
@ways
def test_a_state_in_part_replaces_a_whole_one(layout, options):
    model, optimizer = partial(layout)
    other = build(layout)
    used = OPTIMIZERS["adamw"](other.parameters())
    train(other, used, 2)
    moved(model, optimizer, other, used, options)
    assert_same(read(other, used), read(model, optimizer))
    train(other, used)
    steps = {name: float(entry["step"]) for name, entry in read(other, used)["state"].items()}
    assert {steps[name] for name in INNER} == {1.0}
    assert {steps[name] for name in OUTER} == {2.0}


@pytest.mark.parametrize("layout", layouts("fsdp1-nested-flat"))
@pytest.mark.parametrize("way", ["nested", "flat", "shards", "flat-shards"])
def test_units_of_fsdp1_without_state_yet_stay_without(layout, way):
    model = build(layout)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step_outer(model, optimizer)
    found = read(model, optimizer)
    assert {name for name, entry in found["state"].items() if entry} == set(OUTER)
    other = build(layout)
    fresh = OPTIMIZERS["adamw"](other.parameters())
    moved(model, optimizer, other, fresh, WAYS[way])
    assert_same(read(other, fresh)["state"], found["state"])


class Unused(Net):
    """A layer that no output depends on, on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 5)


@pytest.mark.parametrize("layout", layouts("plain", "fsdp2-nested", "fsdp2-3"))
@ways
def test_parameters_that_are_never_used_have_no_state(layout, options):
    model, other = build(layout, Unused), build(layout, Unused)
    optimizer, fresh = (OPTIMIZERS["adamw"](one.parameters()) for one in (model, other))
    train(model, optimizer)
    found = read(model, optimizer)
    assert {name for name, entry in found["state"].items() if entry} == set(NAMES)
    moved(model, optimizer, other, fresh, options)
    assert_same(read(other, fresh), found)


class Rowless(nn.Module):
    """A parameter with fewer rows than there are ranks, so that some ranks hold nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.thin = nn.Linear(7, 1)
        self.flat = nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flat(self.thin(x))


@pytest.mark.parametrize("layout", layouts("fsdp2", "fsdp2-3", "fsdp2-4", "fsdp1-3-orig"))
@ways
def test_ranks_that_hold_nothing_of_a_parameter_agree_on_its_state(layout, options):
    model, other = build(layout, Rowless), build(layout, Rowless)
    optimizer, fresh = (OPTIMIZERS["adamw"](one.parameters()) for one in (model, other))
    train(model, optimizer, 2)
    found = read(model, optimizer)
    assert {float(entry["step"]) for entry in found["state"].values()} == {2.0}
    assert found["state"]["thin.weight"]["exp_avg"].shape == (1, 7)
    moved(model, optimizer, other, fresh, options)
    assert_same(read(other, fresh)["state"], found["state"])
