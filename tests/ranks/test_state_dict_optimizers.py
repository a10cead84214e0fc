"""An optimizer's state by name, in every wrapping: what is set is what is read, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from dsdformat.errors import DsdError
from dsdformat.torch.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.ranks.layouts import (
    LAYOUTS,
    MAIN,
    OPTIMIZERS,
    STATELESS,
    TIED_LAYOUTS,
    Net,
    Pads,
    Tied,
    build,
    everywhere,
    flattened,
    groups_of,
    joined,
    layouts,
    memory_of,
    numbered_model,
    numbered_optimizer,
    train,
)
from tests.ranks.options import FLAT, FLAT_HOST, FROM_0, FULL, HOST
from tests.torch_runtime.exact import assert_same, assert_same_tensor

Optimizer = torch.optim.Optimizer


def made(layout: str, make: str = "adamw", kind: Any = Net) -> tuple[nn.Module, Optimizer]:
    model = build(layout, kind)
    return model, OPTIMIZERS[make](model.parameters())


def filled(
    layout: str, make: str = "adamw", kind: Any = Net, shift: int = 0
) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
    """A wrapped model whose optimizer has numbered values, and their whole state."""
    model, optimizer = made(layout, make, kind)
    wanted = numbered_optimizer(kind(), OPTIMIZERS[make], shift)
    set_optimizer_state_dict(model, optimizer, wanted, options=FULL)
    return model, optimizer, wanted


def read(model: nn.Module, optimizer: Any, options: StateDictOptions | None = FULL) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=options)


def assert_state(found: Any, wanted: Any) -> None:
    """Compare nested states; the order of parameters in a group says nothing."""
    assert list(found) == ["state", "param_groups"]
    assert_same(found["state"], wanted["state"])
    assert_same(groups_of(found), groups_of(wanted))


# Of FSDP1 with tensor parallelism, `test_fsdp1` tells.
EVERY = list(LAYOUTS)
SOME = (
    "plain",
    "ddp",
    "fsdp1-full-orig",
    "fsdp1-full-flat",
    "fsdp1-hybrid-orig",
    "fsdp2-nested",
    "fsdp2-tp",
    "tp",
)


# AdamW everywhere


@pytest.mark.parametrize("layout", layouts(*EVERY))
def test_a_whole_state_that_was_set_is_read_on_every_rank(layout):
    model, optimizer, wanted = filled(layout)
    assert_state(read(model, optimizer), wanted)
    assert_same(read(model, optimizer, FLAT), flattened(wanted))


@pytest.mark.parametrize("layout", layouts(*EVERY))
def test_only_rank_0_gets_a_whole_state_on_the_host_and_it_is_a_copy(layout):
    model, optimizer, wanted = filled(layout)
    found = read(model, optimizer, HOST)
    mine = distributed.get_rank() == 0
    if mine:
        assert_state(found, wanted)
    else:
        assert found == {}
    spoil(found)
    assert_state(read(model, optimizer), wanted)
    assert_same(read(model, optimizer, FLAT_HOST), flattened(wanted) if mine else {})


def spoil(value: Any) -> None:
    """Change every tensor of a result in place."""
    if isinstance(value, torch.Tensor):
        (value.to_local() if isinstance(value, DTensor) else value).zero_()
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
    elif isinstance(value, list):
        for item in value:
            spoil(item)


@pytest.mark.parametrize("layout", layouts(*MAIN))
def test_a_flat_state_is_set_too_and_what_is_given_stays(layout):
    model, optimizer = made(layout)
    wanted = numbered_optimizer(Net(), OPTIMIZERS["adamw"])
    given = flattened(wanted)
    kept = copy.deepcopy(given)
    set_optimizer_state_dict(model, optimizer, given, options=FLAT)
    assert_state(read(model, optimizer), wanted)
    assert_same(given, kept)
    spoil(read(model, optimizer, HOST))
    assert_same(given, kept)


@pytest.mark.parametrize("layout", layouts(*EVERY))
def test_shards_joined_are_what_was_set_and_go_into_another_optimizer(layout):
    model, optimizer, wanted = filled(layout)
    shards = read(model, optimizer, None)
    assert_state(joined(shards), wanted)
    other, fresh = made(layout)
    set_optimizer_state_dict(other, fresh, shards)
    assert_state(read(other, fresh), wanted)


@pytest.mark.parametrize("layout", layouts(*MAIN))
def test_flat_shards_go_into_an_optimizer_that_has_other_state(layout):
    model, optimizer, wanted = filled(layout)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    shards = read(model, optimizer, options)
    assert_same(joined(shards), flattened(wanted))
    other, used, _ = filled(layout, shift=3)
    set_optimizer_state_dict(other, used, shards, options=options)
    assert_state(read(other, used), wanted)


@pytest.mark.parametrize("layout", layouts(*EVERY))
def test_rank_0_gives_all_ranks_their_parts(layout):
    check_given(layout, flat=False)


@pytest.mark.parametrize("layout", layouts(*MAIN))
def test_rank_0_gives_all_ranks_their_parts_of_a_flat_state(layout):
    check_given(layout, flat=True)


def check_given(layout: str, *, flat: bool) -> None:
    model, optimizer = made(layout)
    wanted = numbered_optimizer(Net(), OPTIMIZERS["adamw"])
    given = flattened(wanted) if flat else wanted
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=flat
    )
    given = given if distributed.get_rank() == 0 else {}
    set_optimizer_state_dict(model, optimizer, given, options=options)
    assert_state(read(model, optimizer), wanted)


# Other optimizers


@pytest.mark.parametrize("layout", layouts(*SOME))
@pytest.mark.parametrize("make", [name for name in OPTIMIZERS if name != "adamw"])
def test_states_of_other_optimizers_are_read_as_set(layout, make):
    model, optimizer, wanted = filled(layout, make)
    assert_state(read(model, optimizer), wanted)
    assert_same(read(model, optimizer, FLAT), flattened(wanted))
    shards = read(model, optimizer, None)
    other, fresh = made(layout, make)
    set_optimizer_state_dict(other, fresh, shards)
    assert_state(read(other, fresh), wanted)


@pytest.mark.parametrize("layout", layouts(*SOME))
@pytest.mark.parametrize("make", [name for name in OPTIMIZERS if name != "adamw"])
def test_rank_0_gives_states_of_other_optimizers(layout, make):
    model, optimizer = made(layout, make)
    wanted = numbered_optimizer(Net(), OPTIMIZERS[make])
    given = flattened(wanted) if distributed.get_rank() == 0 else {}
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=True
    )
    set_optimizer_state_dict(model, optimizer, given, options=options)
    assert_state(read(model, optimizer), wanted)


@pytest.mark.parametrize("layout", layouts(*SOME))
def test_an_optimizer_without_state_stays_without(layout):
    model, optimizer, wanted = filled(layout, "sgd")
    assert wanted["state"] == {}
    assert optimizer.state_dict()["state"] == {}
    assert not [key for key in read(model, optimizer, FLAT) if key.startswith("state.")]


UNTRAINABLE = ("tp", "fsdp2-tp", "fsdp1-tp")  # torch cannot compute with uneven pieces of rows


@pytest.mark.parametrize("layout", layouts(*[name for name in EVERY if name not in UNTRAINABLE]))
def test_training_goes_on_from_a_state_that_was_set(layout):
    torch.manual_seed(0)
    plain, twin = Net(), Net()
    model, optimizer = made(layout)
    twin_optimizer = OPTIMIZERS["adamw"](twin.parameters())
    states = tame_states(plain)
    for one, its in ((model, optimizer), (twin, twin_optimizer)):
        set_state_dict(
            one, its, model_state_dict=states[0], optim_state_dict=states[1], options=FULL
        )
        train(one, its)
    found, wanted = read(model, optimizer), read(twin, twin_optimizer)
    assert found["state"].keys() == wanted["state"].keys()
    assert {float(entry["step"]) for entry in found["state"].values()} == {8.0}
    half = "half" in layout
    for name, entry in wanted["state"].items():
        torch.testing.assert_close(
            found["state"][name]["exp_avg"],
            entry["exp_avg"],
            rtol=0.2 if half else 1e-4,
            atol=0.05 if half else 1e-5,
        )


def tame_states(plain: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """States that train well: small weights, numbered moments."""
    wanted = numbered_optimizer(plain, OPTIMIZERS["adamw"])
    for entry in wanted["state"].values():
        entry["exp_avg"] /= 1000
        entry["exp_avg_sq"] /= 1000
    return plain.state_dict(), wanted


# Before the first step, and between a gradient and a step


@pytest.mark.parametrize("layout", layouts(*SOME))
@pytest.mark.parametrize("make", ["adamw", "momentum", "adagrad"])
def test_reading_before_the_first_step_leaves_an_optimizer_as_it_is(layout, make):
    model, optimizer = made(layout, make)
    before = memory_of([optimizer.state_dict()["state"], list(model.parameters())])
    counts = len(optimizer.state)
    read(model, optimizer)
    read(model, optimizer, None)
    assert len(optimizer.state) == counts
    after = memory_of([optimizer.state_dict()["state"], list(model.parameters())])
    assert_same(after, before)
    assert all(one.grad is None for one in model.parameters())


TRAINED = ("plain", "ddp", "fsdp1-full-orig", "fsdp1-full-flat", "fsdp2-nested", "hsdp")


@pytest.mark.parametrize("layout", layouts(*TRAINED))
def test_reading_before_the_first_step_does_not_change_what_it_makes(layout):
    states = []
    for reads in (True, False):
        torch.manual_seed(0)
        model, optimizer = made(layout)
        if reads:
            read(model, optimizer)
        train(model, optimizer)
        states.append(get_state_dict(model, optimizer, options=FULL))
    assert_same(states[0][0], states[1][0])
    assert_state(states[0][1], states[1][1])


@pytest.mark.parametrize("layout", layouts(*TRAINED))
def test_a_state_read_before_the_first_step_sets_no_state(layout):
    model, optimizer = made(layout)
    found = read(model, optimizer)
    other, fresh = made(layout)
    set_optimizer_state_dict(other, fresh, found, options=FULL)
    assert fresh.state_dict()["state"] == {}


@pytest.mark.parametrize("layout", layouts(*TRAINED))
@pytest.mark.parametrize("steps", [0, 1])
def test_gradients_that_are_there_hide_nothing_and_stay(layout, steps):
    model, optimizer = made(layout)
    train(model, optimizer, steps)
    model(torch.ones(2, 7)).sum().backward()
    grads = memory_of([one.grad for one in model.parameters()])
    found = read(model, optimizer)
    assert_same(memory_of([one.grad for one in model.parameters()]), grads)
    assert found["state"].keys() == dict(Net().named_parameters()).keys()
    steps_found = {float(entry["step"]) for entry in found["state"].values()}
    assert steps_found == {float(steps)}
    assert bool(optimizer.state_dict()["state"]) == bool(steps)


@pytest.mark.parametrize("layout", layouts(*TRAINED))
@pytest.mark.parametrize("options", [None, FULL], ids=["shards", "full"])
def test_a_fresh_optimizer_resumes_without_a_step_of_its_own(layout, options):
    model, optimizer = made(layout)
    train(model, optimizer, 2)
    found = get_state_dict(model, optimizer, options=options)
    other, fresh = made(layout)
    set_state_dict(
        other, fresh, model_state_dict=found[0], optim_state_dict=found[1], options=options
    )
    assert_state(read(other, fresh), read(model, optimizer))
    train(model, optimizer, 2, seed=9)
    train(other, fresh, 2, seed=9)
    assert_state(read(other, fresh), read(model, optimizer))
    assert_same(
        get_model_state_dict(other, options=FULL), get_model_state_dict(model, options=FULL)
    )
    assert {float(e["step"]) for e in read(other, fresh)["state"].values()} == {4.0}


# Groups


def grouped(model: nn.Module, rates: tuple[float, float] = (0.2, 0.3)) -> Optimizer:
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    return torch.optim.AdamW(
        [
            {"params": [], "lr": rates[0]},
            {"params": weights, "betas": (0.5, 0.75)},
            {"params": rest, "lr": rates[1], "weight_decay": 0.0},
        ],
        lr=0.1,
    )


GROUPED = ("plain", "ddp", "fsdp1-full-orig", "fsdp1-3-orig", "fsdp2-nested", "fsdp2-tp")


@pytest.mark.parametrize("layout", layouts(*GROUPED))
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("broadcast", [False, True], ids=["all", "from-0"])
def test_groups_keep_their_number_order_and_values(layout, flat, broadcast):
    model = build(layout)
    optimizer = grouped(model)
    wanted = numbered_groups(optimizer, model)
    given = {"state": numbered_optimizer(Net(), OPTIMIZERS["adamw"])["state"], **wanted}
    set_optimizer_state_dict(model, optimizer, given, options=FULL)
    options = StateDictOptions(
        full_state_dict=True, flatten_optimizer_state_dict=flat, broadcast_from_rank0=broadcast
    )
    found = read(
        model, optimizer, StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    )
    if broadcast and distributed.get_rank():
        found = {}
    other = build(layout)
    fresh = grouped(other, (7.0, 8.0))
    set_optimizer_state_dict(other, fresh, found, options=options)
    assert_same(values_of(fresh), values_of(optimizer))
    assert_state(read(other, fresh), given)


def values_of(optimizer: Optimizer) -> list[Any]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def numbered_groups(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Groups by the names of a plain model, with keys that only a scheduler would make."""
    names = dict(Net().named_parameters())
    members = [
        [],
        [name for name in names if name.endswith("weight")],
        [name for name in names if not name.endswith("weight")],
    ]
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        values = {key: value for key, value in group.items() if key != "params"}
        values |= {"initial_lr": 0.5 + number, "lr": 0.25 + number, "tag": f"group {number}"}
        groups.append({**values, "params": members[number]})
    return {"param_groups": groups}


@pytest.mark.parametrize("layout", layouts(*TRAINED))
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_keys_that_a_scheduler_made_come_into_a_fresh_optimizer(layout, flat):
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer)
    scheduler.step()
    found = read(model, optimizer, options)
    other = build(layout)
    fresh = torch.optim.AdamW(other.parameters(), lr=5.0)
    set_optimizer_state_dict(other, fresh, found, options=options)
    assert fresh.param_groups[0]["initial_lr"] == 0.1
    assert fresh.param_groups[0]["lr"] == pytest.approx(0.01)
    torch.optim.lr_scheduler.StepLR(fresh, 1, last_epoch=1)


# Several optimizers


def two(model: nn.Module) -> list[Optimizer]:
    inner = [p for name, p in model.named_parameters() if "inner" in name]
    outer = [p for name, p in model.named_parameters() if "inner" not in name]
    return [
        torch.optim.AdamW(inner, lr=0.5),
        torch.optim.SGD(outer, lr=0.25, momentum=0.5),
    ]


TWO = ("plain", "ddp", "fsdp1-full-orig", "fsdp1-nested-flat", "fsdp2-nested", "fsdp2-3")


@pytest.mark.parametrize("layout", layouts(*TWO))
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_two_optimizers_get_what_is_theirs_in_any_order(layout, flat):
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    model = build(layout)
    optimizers = two(model)
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.ones(2, 7)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    found = read(model, optimizers, options)
    other = build(layout)
    fresh = two(other)
    for optimizer in fresh:
        optimizer.param_groups[0]["lr"] = 9.0
    set_optimizer_state_dict(other, fresh[::-1], found, options=options)
    assert [one.param_groups[0]["lr"] for one in fresh] == [0.5, 0.25]
    again = read(other, fresh)
    assert_state(again, read(model, optimizers))
    kinds = {name: sorted(entry) for name, entry in again["state"].items()}
    assert kinds["inner.0.weight"] == ["exp_avg", "exp_avg_sq", "step"]
    assert kinds["row.weight"] == ["momentum_buffer"]


@pytest.mark.parametrize(
    "layout",
    layouts(
        "plain",
        "fsdp1-full-orig",
        "fsdp2-nested",
    ),
)
def test_two_optimizers_of_one_parameter_are_refused(layout):
    model = build(layout)
    optimizers = [
        torch.optim.AdamW(model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ]
    with pytest.raises(DsdError) as caught:
        read(model, optimizers)
    assert caught.value.code == "state_conflict"


# Tied parameters, sizes that pad


@pytest.mark.parametrize("layout", layouts(*TIED_LAYOUTS))
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_tied_parameter_has_one_entry(layout, flat):
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    model, optimizer, wanted = filled(layout, kind=Tied)
    assert "head.weight" not in wanted["state"]
    found = read(model, optimizer, options)
    assert_same(found if flat else found["state"], flattened(wanted) if flat else wanted["state"])
    other, fresh = made(layout, kind=Tied)
    set_optimizer_state_dict(other, fresh, found, options=options)
    assert_state(read(other, fresh), wanted)
    inner = getattr(other, "module", other)
    assert inner.emb.weight is inner.head.weight


@pytest.mark.parametrize("layout", layouts(*TIED_LAYOUTS))
def test_an_entry_under_the_other_name_of_a_tied_parameter_is_found(layout):
    wanted = numbered_optimizer(Tied(), OPTIMIZERS["adamw"])
    given = copy.deepcopy(wanted)
    given["state"]["head.weight"] = given["state"].pop("emb.weight")
    for group in given["param_groups"]:
        group["params"] = [n.replace("emb", "head") for n in group["params"]]
    model, optimizer = made(layout, kind=Tied)
    set_optimizer_state_dict(model, optimizer, given, options=FULL)
    assert_state(read(model, optimizer), wanted)


@pytest.mark.parametrize(
    "layout",
    layouts(
        "fsdp1-full-orig",
        "fsdp1-full-flat",
        "fsdp1-nested-orig",
        "fsdp1-nested-flat",
        "fsdp1-3-orig",
        "fsdp1-3-flat",
        "fsdp2-nested",
        "fsdp2-3",
        "fsdp2-4",
    ),
)
def test_no_padding_comes_into_a_state(layout):
    model, optimizer, wanted = filled(layout, kind=Pads)
    assert_state(read(model, optimizer), wanted)
    shards = read(model, optimizer, None)
    assert_state(joined(shards), wanted)
    other, fresh = made(layout, kind=Pads)
    set_optimizer_state_dict(other, fresh, shards)
    assert_state(read(other, fresh), wanted)
    states = everywhere(memory_of(joined(read(other, fresh, None))["state"]))
    assert_same(states[-1], states[0])


# Dtypes


@pytest.mark.parametrize("layout", layouts("plain", "ddp", "fsdp2-nested", "tp", "hsdp"))
@pytest.mark.parametrize("route", ["full", "shards", "from-0"])
@pytest.mark.parametrize(
    ("weights", "moments"),
    [
        pytest.param(torch.bfloat16, torch.float32, id="bf16-with-fp32-moments"),
        pytest.param(torch.float32, torch.bfloat16, id="fp32-with-bf16-moments"),
    ],
)
def test_moments_keep_their_dtype(layout, route, weights, moments):
    check_dtypes(layout, route, weights, moments)


@pytest.mark.parametrize("layout", layouts("fsdp1-full-orig", "fsdp1-full-flat"))
@pytest.mark.parametrize("route", ["full", "shards", "from-0"])
@pytest.mark.parametrize(
    ("weights", "moments"),
    [
        pytest.param(torch.bfloat16, torch.float32, id="bf16-with-fp32-moments"),
        pytest.param(torch.float32, torch.bfloat16, id="fp32-with-bf16-moments"),
    ],
)
def test_moments_of_fsdp1_keep_their_dtype(layout, route, weights, moments):
    check_dtypes(layout, route, weights, moments)


def check_dtypes(layout: str, route: str, weights: torch.dtype, moments: torch.dtype) -> None:
    def kind() -> nn.Module:
        return Pads().to(weights)

    wanted = numbered_optimizer(kind(), OPTIMIZERS["adamw"])
    for entry in wanted["state"].values():
        entry["exp_avg"] = entry["exp_avg"].to(moments)
        entry["exp_avg_sq"] = entry["exp_avg_sq"].to(moments)
    model, optimizer = made(layout, kind=kind)
    if route == "from-0":
        given = wanted if distributed.get_rank() == 0 else {}
        set_optimizer_state_dict(model, optimizer, given, options=FROM_0)
    else:
        set_optimizer_state_dict(model, optimizer, wanted, options=FULL)
    if route == "shards":
        shards = read(model, optimizer, None)
        model, optimizer = made(layout, kind=kind)
        set_optimizer_state_dict(model, optimizer, shards)
    assert_state(read(model, optimizer), wanted)
    states = [optimizer.state[one] for one in optimizer.state]
    assert {state["exp_avg"].dtype for state in states} == {moments}
    assert {state["step"].dtype for state in states} == {torch.float32}


# States that are shaped otherwise than their parameter


def adafactor(model: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.1)


@pytest.mark.parametrize("layout", layouts("plain", "ddp"))
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_factored_states_keep_their_shape(layout, flat):
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    model = build(layout)
    optimizer = adafactor(model)
    train(model, optimizer)
    found = read(model, optimizer, options)
    if not flat:
        assert found["state"]["inner.0.weight"]["row_var"].shape == (5, 1)
    other = build(layout)
    fresh = adafactor(other)
    set_optimizer_state_dict(other, fresh, found, options=options)
    assert_state(read(other, fresh), read(model, optimizer))


class Factored(torch.optim.Optimizer):
    """Keeps the mean square of each row and of the whole, in DTensors where there are such."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state["count"] = 0
                    state["rows"] = one.grad.square().flatten(1).mean(1) if one.dim() > 1 else None
                    state["signs"] = one.grad > 0
                    state["parts"] = [one.grad.clone(), {"twice": one.grad * 2}]
                state["count"] += 1
                one.add_(one.grad, alpha=-group["lr"])


@pytest.mark.parametrize("layout", layouts("plain", "ddp", "fsdp2-nested", "fsdp2-3", "hsdp"))
@pytest.mark.parametrize("options", [None, FULL], ids=["shards", "full"])
def test_states_of_a_users_own_optimizer_are_read_as_set(layout, options):
    model = build(layout)
    optimizer = Factored(model.parameters())
    train(model, optimizer)
    found = read(model, optimizer, options)
    wanted = joined(found)
    assert wanted["state"]["inner.0.weight"]["rows"].shape == (5,)
    assert wanted["state"]["inner.0.weight"]["signs"].dtype == torch.bool
    other = build(layout)
    used = Factored(other.parameters())
    train(other, used, 2, seed=5)
    set_optimizer_state_dict(other, used, found, options=options)
    assert_state(read(other, used), wanted)


@pytest.mark.parametrize("layout", layouts("fsdp2-nested", "fsdp2-3", "hsdp"))
def test_shards_of_another_shape_than_the_parameter_stay_shards(layout):
    model = build(layout)
    optimizer = Factored(model.parameters())
    train(model, optimizer)
    found = read(model, optimizer, None)
    rows = found["state"]["inner.0.weight"]["rows"]
    assert isinstance(rows, DTensor)
    other = build(layout)
    fresh = Factored(other.parameters())
    set_optimizer_state_dict(other, fresh, found)
    parameter = dict(other.named_parameters())["inner.0.weight"]
    placed = fresh.state[parameter]["rows"]
    assert isinstance(placed, DTensor)
    assert placed.placements == rows.placements
    assert_same_tensor(placed.to_local(), rows.to_local())


# States by number, and states with less or more


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp2"])
def test_a_plain_state_by_numbers_is_set_too(layout):
    twin = Net()
    optimizer = OPTIMIZERS["adamw"](twin.parameters())
    train(twin, optimizer)
    model, fresh = made(layout)
    set_optimizer_state_dict(model, fresh, optimizer.state_dict(), options=FULL)
    assert_state(read(model, fresh), read(twin, optimizer))


class Grown(Net):
    """The net with a layer more, in another order."""

    def __init__(self) -> None:
        super().__init__()
        out = self.out
        del self.out
        self.more = nn.Linear(3, 3)
        self.out = out
        first = self._modules.pop("inner")
        self._modules["inner"] = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(super().forward(x))


GROWN = ("plain", "ddp", "fsdp1-full-orig", "fsdp1-full-flat", "fsdp2-nested")


@pytest.mark.parametrize("layout", layouts(*GROWN))
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_layers_that_are_still_there_keep_their_state_in_any_order(layout, flat):
    options = StateDictOptions(
        full_state_dict=True, flatten_optimizer_state_dict=flat, strict=False
    )
    wanted = numbered_optimizer(Net(), OPTIMIZERS["adamw"])
    model, optimizer = made(layout, kind=Grown)
    set_optimizer_state_dict(
        model, optimizer, flattened(wanted) if flat else wanted, options=options
    )
    found = read(model, optimizer)["state"]
    kept = {name: entry for name, entry in found.items() if not name.startswith("more")}
    assert_same(kept, wanted["state"])
    # `.get` is what a user asks: no entry, or one that is empty or before the first step.
    for name in ("more.weight", "more.bias"):
        entry = found.get(name, {})
        if layout == "fsdp1-full-flat":  # one flat parameter has one step for all in it
            assert not entry["exp_avg"].any()
        else:
            assert not entry or float(entry["step"]) == 0.0


@pytest.mark.parametrize("layout", layouts(*GROWN))
def test_a_parameter_without_an_entry_is_an_error_if_strict(layout):
    check_strict(layout, FULL)


@pytest.mark.parametrize("layout", layouts(*GROWN))
def test_a_parameter_that_rank_0_has_no_entry_of_is_an_error_if_strict(layout):
    check_strict(layout, FROM_0)


def check_strict(layout: str, options: StateDictOptions) -> None:
    wanted = numbered_optimizer(Net(), OPTIMIZERS["adamw"])
    model, optimizer = made(layout, kind=Grown)
    given = wanted if distributed.get_rank() == 0 or options is FULL else {}
    with pytest.raises((RuntimeError, DsdError), match=r"more\.(weight|bias)"):
        set_optimizer_state_dict(model, optimizer, given, options=options)
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("layout", layouts(*GROWN))
def test_a_parameter_that_is_gone_leaves_the_others(layout):
    wanted = numbered_optimizer(Grown(), OPTIMIZERS["adamw"])
    model, optimizer = made(layout)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_optimizer_state_dict(model, optimizer, wanted, options=options)
    found = read(model, optimizer)["state"]
    assert_same(found, {k: v for k, v in wanted["state"].items() if not k.startswith("more")})


# One rank


@pytest.mark.ranks(1)
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1-full-orig", "fsdp1-full-flat", "fsdp2"])
@pytest.mark.parametrize(
    "options", [None, FULL, HOST, FLAT], ids=["shards", "full", "host", "flat"]
)
def test_one_rank_is_as_good_as_many(layout, options):
    model, optimizer, wanted = filled(layout)
    found = read(model, optimizer, options)
    other, fresh = made(layout)
    full = StateDictOptions(full_state_dict=options is not None)
    set_optimizer_state_dict(other, fresh, found, options=full)
    assert_state(read(other, fresh), wanted)
    set_optimizer_state_dict(model, optimizer, wanted, options=FROM_0)
    assert_state(read(model, optimizer), wanted)


def test_there_are_layouts_for_each_number_of_ranks():
    assert {layout.world_size for layout in LAYOUTS.values()} == {2, 3, 4}
    assert set(STATELESS) < set(OPTIMIZERS)
    assert numbered_model(Net())
