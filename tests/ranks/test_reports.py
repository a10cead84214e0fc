"""State dicts on several ranks, where users of other libraries have been let down.

What one rank gives comes to all as it is; what cannot be right on some rank is an error on all.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dsdformat.torch as dsd
from dsdformat.errors import DsdError
from dsdformat.torch.broadcast import fill_from_first
from dsdformat.torch.compat import default_store
from dsdformat.torch.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.ranks.counting import counted
from tests.ranks.layouts import (
    LAYOUTS,
    OPTIMIZERS,
    Extra,
    Net,
    Optimizer,
    Pads,
    Tied,
    build,
    everywhere,
    flattened,
    groups_of,
    inputs,
    joined,
    layouts,
    numbered_model,
    numbered_optimizer,
    train,
)
from tests.ranks.options import FLAT_FROM_0, FROM_0, FULL, HOST
from tests.ranks.shards import (
    DTYPE_IDS,
    DTYPES,
    blank,
    carried,
    mesh_of,
    noise,
    spread,
    typed,
)
from tests.ranks.test_state_dict_broadcast import MIB, SLACK, forget_peak, rss, warm
from tests.torch_runtime.exact import assert_same, assert_same_tensor

WAYS = {"all": FULL, "from-0": FROM_0}

any_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


def given(state: Any, options: StateDictOptions) -> Any:
    """What this rank passes: nothing on most, where rank 0 gives to all."""
    return {} if options.broadcast_from_rank0 and distributed.get_rank() else state


def adamw(model: nn.Module) -> Optimizer:
    return OPTIMIZERS["adamw"](model.parameters())


def moments(kind: Callable[[], nn.Module] = Net, shift: int = 0) -> dict[str, Any]:
    return numbered_optimizer(kind(), OPTIMIZERS["adamw"], shift)


def optim_of(model: nn.Module, optimizer: Any, options: StateDictOptions | None = FULL) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=options)


# Names, and extra state


class Own(nn.Module):
    """The users' own modules, called as torch calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)


@pytest.mark.parametrize("layout", layouts("ddp", "compiled-ddp", "ddp-compiled", "fsdp2"))
def test_modules_that_are_called_as_wrappers_go_into_a_plain_model_and_back(layout):
    model, wanted = build(layout, Own), numbered_model(Own())
    assert list(wanted) == ["module.weight", "module.bias", "_orig_mod.weight", "_orig_mod.bias"]
    set_model_state_dict(model, wanted, options=FULL)
    found = get_model_state_dict(model, options=FULL)
    plain = Own()
    plain.load_state_dict(found, strict=True)
    assert_same(dict(plain.state_dict()), wanted)
    back = build(layout, Own)
    set_model_state_dict(back, plain.state_dict(), options=FULL)
    assert_same(get_model_state_dict(back, options=FULL), wanted)


class Deep(nn.Module):
    """Extra state two levels down, which is no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(7, 7), nn.Sequential(Extra()))


@pytest.mark.parametrize("layout", layouts("ddp", "fsdp1-full-orig", "fsdp1-full-flat", "fsdp2"))
@any_way
def test_extra_state_two_levels_down_is_set_and_read(layout, options):
    model, wanted = build(layout, Deep), numbered_model(Deep())
    set_model_state_dict(model, given(wanted, options), options=options)
    assert_same(get_model_state_dict(model, options=FULL), wanted)
    (extra,) = (one for one in model.modules() if isinstance(one, Extra))
    assert extra.extra == {"calls": 5}


# Values of every kind, from rank 0

OPTIONS_OF_A_GROUP = {
    "tuple": (1, 2.0, None, True),
    "list": [1, (2,)],
    "dict": {"a": 1, "b": {"c": (3,)}},
    "none": None,
    "large": 10**20,
    "infinity": float("inf"),
    "text": "é",
    "bytes": b"x",
    "tensor": torch.arange(3),
    "dotted.key": 1,
    "no keys": {},
    "no items": [],
    "no members": (),
}


@pytest.mark.parametrize("layout", layouts("ddp", "fsdp1-full-flat", "fsdp2-nested"))
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_values_that_rank_0_gives_come_to_all_with_their_types(layout, flat):
    wanted = moments()
    wanted["param_groups"][0].update(OPTIONS_OF_A_GROUP)
    for entry in wanted["state"].values():
        entry |= {"count": 3, "ratio": 0.5, "none": None, "deep": {"x": {"y": 1}}, "empty": {}}
    model = build(layout)
    optimizer = adamw(model)
    options = FLAT_FROM_0 if flat else FROM_0
    state = flattened(wanted) if flat else wanted
    set_optimizer_state_dict(model, optimizer, given(state, options), options=options)
    group = optimizer.param_groups[0]
    assert_same({key: group[key] for key in OPTIONS_OF_A_GROUP}, OPTIONS_OF_A_GROUP)
    assert_same(optim_of(model, optimizer)["state"], wanted["state"])


class Keeping(torch.optim.Optimizer):
    """Keeps lists and tuples of tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:  # of which this rank has nothing
                    continue
                entry = self.state[one]
                entry.setdefault("history", []).append(one.grad.clone())
                entry["pair"] = (one.grad * 2, len(entry["history"]))


@pytest.mark.parametrize("layout", layouts("fsdp2-nested"))
@pytest.mark.parametrize(
    "way",
    [
        "all",
        pytest.param("from-0"),
    ],
)
def test_lists_of_tensors_are_set_as_lists(layout, way):
    model, other = build(layout), build(layout)
    optimizer, fresh = Keeping(model.parameters()), Keeping(other.parameters())
    train(model, optimizer, 2)
    found = optim_of(model, optimizer)
    assert type(found["state"]["row.weight"]["history"]) is list
    set_optimizer_state_dict(other, fresh, given(found, WAYS[way]), options=WAYS[way])
    assert_same(optim_of(other, fresh), found)


@pytest.mark.parametrize("layout", layouts("fsdp1-full-orig", "fsdp1-full-flat"))
def test_lists_of_pieces_of_flat_parameters_are_read_or_refused_by_name(layout):
    model, plain = build(layout), Net()
    plain.load_state_dict(get_model_state_dict(model, options=FULL))
    optimizer, its_own = Keeping(model.parameters()), Keeping(plain.parameters())
    train(model, optimizer, 2)
    train(plain, its_own, 2)
    try:
        found = optim_of(model, optimizer)
    except DsdError as error:
        assert "history" in str(error)  # noqa: PT017  # either is right
        assert len(set(everywhere(str(error)))) == 1  # noqa: PT017
        return
    wanted = optim_of(plain, its_own)["state"]
    shapes = {name: shapes_of(entry) for name, entry in wanted.items()}
    assert {name: shapes_of(entry) for name, entry in found["state"].items()} == shapes
    for name, entry in wanted.items():
        torch.testing.assert_close(found["state"][name]["history"], entry["history"])


def shapes_of(entry: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in entry["history"]]


# Every dtype

COUNTS = (5, 3)


class OfEveryDtype(nn.Module):
    """A shard and a buffer of each dtype, with values or with zeros."""

    def __init__(self, *, blank_ones: bool) -> None:
        super().__init__()
        make = blank if blank_ones else spread
        for name, dtype in zip(DTYPE_IDS, DTYPES, strict=True):
            whole = noise(COUNTS, dtype)
            shard = make(whole, mesh_of((2,)), [Shard(0)])
            buffer = typed(carried(whole).clone().fill_(0), dtype) if blank_ones else whole
            self.register_parameter(f"p_{name}", nn.Parameter(shard, requires_grad=False))
            self.register_buffer(f"b_{name}", buffer)


@pytest.mark.ranks(2)
@any_way
def test_weights_of_every_dtype_are_gathered_and_given_bit_for_bit(options):
    wanted = {}
    for name, dtype in zip(DTYPE_IDS, DTYPES, strict=True):
        wanted |= {f"p_{name}": noise(COUNTS, dtype), f"b_{name}": noise(COUNTS, dtype)}
    source = OfEveryDtype(blank_ones=False)
    for found in (
        get_model_state_dict(source, options=FULL),
        get_model_state_dict(source, options=HOST),
    ):
        if found or distributed.get_rank() == 0:
            assert_same({name: found[name] for name in wanted}, wanted)
    model = OfEveryDtype(blank_ones=True)
    set_model_state_dict(model, given(wanted, options), options=options)
    found = get_model_state_dict(model, options=FULL)
    assert_same({name: found[name] for name in wanted}, wanted)


@pytest.mark.parametrize("layout", layouts("ddp", "fsdp1-full-orig", "fsdp2"))
@any_way
def test_entries_of_every_dtype_are_gathered_and_given_bit_for_bit(layout, options):
    model = build(layout, lambda: nn.Sequential(nn.Linear(3, 5, bias=False)))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    entry = {}
    for name, dtype in zip(DTYPE_IDS, DTYPES, strict=True):
        entry |= {f"whole_{name}": noise(COUNTS, dtype), f"one_{name}": noise((), dtype)}
    wanted = {"state": {"0.weight": entry}, "param_groups": [{"params": ["0.weight"], "lr": 0.5}]}
    set_optimizer_state_dict(model, optimizer, given(wanted, options), options=options)
    assert_same(optim_of(model, optimizer)["state"], wanted["state"])
    found = optim_of(model, optimizer, HOST)
    first = distributed.get_rank() == 0
    assert_same(found.get("state", {}), wanted["state"] if first else {})


@pytest.mark.parametrize("layout", layouts("ddp", "fsdp1-full-flat", "fsdp2-nested"))
@any_way
def test_a_step_of_9999_stays_what_it_is_in_a_model_of_low_precision(layout, options):
    def kind() -> nn.Module:
        return Pads().to(torch.bfloat16)

    wanted = moments(kind)
    for entry in wanted["state"].values():
        entry["step"] = torch.tensor(9999.0)
    model = build(layout, kind)
    optimizer = adamw(model)
    set_optimizer_state_dict(model, optimizer, given(wanted, options), options=options)
    for entry in optimizer.state.values():
        assert_same_tensor(entry["step"], torch.tensor(9999.0))
    assert_same(optim_of(model, optimizer)["state"], wanted["state"])


class Quantizing(torch.optim.Optimizer):
    """Keeps codes of a byte where this rank holds many elements, and numbers otherwise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                held = one.to_local().numel() if isinstance(one, DTensor) else one.numel()
                average = (one.grad > 0).to(torch.uint8) if held >= 32 else one.grad.clone()
                self.state[one] = {"average": average}


@pytest.mark.ranks(2)
@any_way
def test_codes_of_a_byte_stay_so_where_ranks_hold_less(options):
    def kind() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 5, bias=False))

    source = kind()
    one = Quantizing(source.parameters())
    source[0].weight.grad = noise((5, 7), torch.float32)
    source[0].weight.grad.nan_to_num_()
    one.step()
    wanted = optim_of(source, one)
    assert wanted["state"]["0.weight"]["average"].dtype == torch.uint8
    model = build("fsdp2", kind)
    fresh = Quantizing(model.parameters())
    set_optimizer_state_dict(model, fresh, given(wanted, options), options=options)
    assert_same(optim_of(model, fresh), wanted)
    placed = fresh.state[model[0].weight]["average"]
    assert isinstance(placed, DTensor)
    assert placed.placements == model[0].weight.placements


# Other numbers of ranks


class Rowwise(torch.optim.Optimizer):
    """Keeps the mean square of each row."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.dim() > 1:
                    self.state[one] = {"rows": one.grad.square().mean(1)}


MADE: dict[str, Callable[[Any], Optimizer]] = {
    "fsdp1-full-orig": OPTIMIZERS["adamw"],
    "fsdp1-full-flat": OPTIMIZERS["adamw"],
    "fsdp2-nested": OPTIMIZERS["adamw"],
    "fsdp2": Rowwise,
    "ddp": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def handed_on(states: dict[str, Any]) -> dict[str, Any]:
    """Whole states of each kind, on rank 0: of a training, or those that are given."""
    result = {}
    for layout, make in MADE.items():
        model = build(layout)
        optimizer = make(model.parameters())
        if layout in states:
            weights, optim = states[layout]
            set_state_dict(
                model, optimizer, model_state_dict=weights, optim_state_dict=optim, options=FULL
            )
        else:
            train(model, optimizer, 2)
        result[layout] = get_state_dict(model, optimizer, options=HOST)
    return result


def test_states_of_two_ranks_go_to_one_and_back(ranks):
    states = ranks(2)(handed_on, {})[0]
    assert states["fsdp2"][1]["state"]["inner.0.weight"]["rows"].shape == (5,)
    assert states["ddp"][1]["state"]["inner.0.weight"]["row_var"].shape == (5, 1)
    (alone,) = ranks(1)(handed_on, states)
    again = ranks(2)(handed_on, alone)[0]
    for layout, (weights, optim) in states.items():
        for found in (alone[layout], again[layout]):
            assert_same(found[0], weights)
            assert_same(found[1]["state"], optim["state"])
            assert_same(groups_of(found[1]), groups_of(optim))


def resumed(states: Any, path: str, way: str) -> Any:
    """Train and save, or take the state or what was saved; then read all, and train on."""
    model = build("fsdp1-3-flat", Pads)
    optimizer = adamw(model)
    both = {"model": model, "optimizer": optimizer}
    if way == "trained":
        train(model, optimizer, 3)
        dsd.save(path, both)
    elif way == "saved":
        dsd.load(path, both)
    else:
        weights, optim = states
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=optim, options=FULL
        )
    found = copy.deepcopy(get_state_dict(model, optimizer, options=FULL))
    losses = []
    for step in range(5):
        losses.append(model(inputs(model, 10 + step)).square().mean().item())
        train(model, optimizer, 1, seed=10 + step)
    return found, losses


def resumed_both_ways(states: Any, path: str) -> list[Any]:
    return [resumed(states, path, way) for way in ("given", "saved")]


def test_a_training_with_padded_flat_parameters_goes_on_with_fewer_and_with_more_ranks(
    ranks, tmp_path
):
    """B052: from a whole state, and from a checkpoint of which each rank reads its shards."""
    torch.manual_seed(0)
    path = str(tmp_path / "saved" / "ck")
    states, losses = ranks(3)(resumed, None, path, "trained")[0]
    for world_size in (2, 4):
        for found, its_losses in itertools.chain(
            *ranks(world_size)(resumed_both_ways, states, path)
        ):
            assert_same(found[0], states[0])
            assert_same(found[1], states[1])
            assert its_losses == pytest.approx(losses, rel=1e-5)


# Shards that are not one piece, or of which some ranks have none


def holder(tensor: Any) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(tensor)
    return model


def _split(factor: int) -> Any:
    return _StridedShard(0, split_factor=factor)


SPREADS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "two-halves-on-2": ((2, 2), (_split(2), Replicate())),
    "on-2": ((2, 2), (Shard(0), Replicate())),
    "on-4": ((4,), (Shard(0),)),
    "columns-on-4": ((4,), (Shard(1),)),
    "two-halves-on-4": ((2, 2), (_split(2), Shard(0))),
    "whole": ((4,), (Replicate(),)),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", [(8, 4), (1, 5)], ids=str)
@pytest.mark.parametrize("source", ["two-halves-on-2", "on-4"])
@pytest.mark.parametrize("target", [*SPREADS, "plain"])
def test_rows_keep_their_order_whatever_they_are_cut_into(shape, source, target):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    mesh, placements = SPREADS[source]
    model = holder(spread(whole, mesh_of(mesh), placements))
    assert_same(get_model_state_dict(model, options=FULL), {"weight": whole})
    if target == "plain":
        other = holder(torch.zeros(shape))
    else:
        mesh, placements = SPREADS[target]
        other = holder(blank(whole, mesh_of(mesh), placements))
    set_model_state_dict(other, get_model_state_dict(model))
    assert_same(get_model_state_dict(other, options=FULL), {"weight": whole})
    assert_same(joined(get_model_state_dict(other)), {"weight": whole})


# Tied tensors


class TwoTied(nn.Module):
    """Two layers that share one parameter and one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.a.register_buffer("scale", torch.zeros(2))
        self.b.register_buffer("scale", self.a.scale)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["plain", "fsdp2"])
@pytest.mark.parametrize("names", ["a", "b", "both"])
@any_way
def test_pairs_on_meta_are_filled_under_any_name_and_stay_pairs(layout, names, options):
    with torch.device("meta"):
        model = TwoTied()
    wanted, dropped = numbered_model(TwoTied()), {"a": "b", "b": "a", "both": ""}[names]
    state = {
        name: value
        for name, value in wanted.items()
        if name not in (f"{dropped}.weight", f"{dropped}.scale")
    }
    model = LAYOUTS[layout].wrap(model, 2)
    set_model_state_dict(model, given(state, options), options=options)
    assert model.a.weight is model.b.weight
    assert model.a.scale is model.b.scale
    assert len(list(model.parameters())) == 3
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["fsdp1-full-flat", "fsdp2"])
def test_different_tensors_are_not_made_one(layout):
    model, state = build(layout, Tied), numbered_model(Tied())
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(DsdError, match=r"(emb|head)\.weight"):
        set_model_state_dict(model, given(state, FROM_0), options=FROM_0)


# In place, again and again, and however many


@pytest.mark.parametrize(
    "layout", layouts("ddp", "fsdp1-full-orig", "fsdp1-full-flat", "fsdp2-nested")
)
@any_way
def test_state_is_set_where_it_lies(layout, options):
    model = build(layout)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    before = places_of(optimizer)
    wanted = moments(shift=3)
    set_optimizer_state_dict(model, optimizer, given(wanted, options), options=options)
    # With FSDP1, entries of parameters that this rank holds nothing of may be new.
    assert before.items() <= places_of(optimizer).items()
    assert_same(optim_of(model, optimizer)["state"], wanted["state"])


def places_of(optimizer: Optimizer) -> dict[Any, Any]:
    return {
        (id(parameter), key): (
            id(value),
            (value.to_local() if isinstance(value, DTensor) else value).data_ptr(),
        )
        for parameter, entry in optimizer.state.items()
        for key, value in entry.items()
    }


@pytest.mark.parametrize("layout", layouts("ddp", "fsdp1-full-flat", "fsdp2-nested", "hsdp"))
@pytest.mark.parametrize("options", [None, FULL], ids=["shards", "full"])
def test_a_state_is_set_again_and_again_while_training_goes_on(layout, options):
    model = build(layout)
    optimizer = adamw(model)
    for turn in range(3):
        train(model, optimizer, 1, seed=turn)
        weights, optim = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        wanted = copy.deepcopy(get_state_dict(model, optimizer, options=FULL))
        train(model, optimizer, 2, seed=50 + turn)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=optim, options=options
        )
        found = get_state_dict(model, optimizer, options=FULL)
        assert_same(found[0], wanted[0])
        assert_same(found[1], wanted[1])


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1) for _ in range(count)])


@pytest.mark.parametrize("layout", layouts("ddp", "fsdp1-full-orig", "fsdp2"))
def test_messages_do_not_grow_with_the_number_of_tensors(layout):
    few, many = messages(layout, 3), messages(layout, 60)
    assert many == few
    assert max(many.values()) <= 16
    if layout in ("ddp", "fsdp2"):  # shards need no other rank
        assert {name: count for name, count in many.items() if "shards" in name and count} == {}


def messages(layout: str, count: int) -> dict[str, int]:
    """How many collectives each call makes."""
    model = LAYOUTS[layout].wrap(Many(count), distributed.get_world_size())
    optimizer = adamw(model)
    weights, optim = numbered_model(Many(count)), moments(lambda: Many(count))
    result: dict[str, int] = {}

    def noted(name: str, call: Callable[[], Any]) -> Any:
        with counted() as calls:
            found = call()
        result[name] = len(calls)
        return found

    for way, options in WAYS.items():
        mine = given(weights, options), given(optim, options)
        noted(f"set {way}", lambda m=mine, o=options: set_model_state_dict(model, m[0], options=o))
        noted(
            f"set optimizer {way}",
            lambda m=mine, o=options: set_optimizer_state_dict(model, optimizer, m[1], options=o),
        )
    noted("get", lambda: get_model_state_dict(model, options=FULL))
    noted("get optimizer", lambda: optim_of(model, optimizer))
    shards = noted("get shards", lambda: get_model_state_dict(model))
    pieces = noted("get shards of the optimizer", lambda: optim_of(model, optimizer, None))
    noted("set shards", lambda: set_model_state_dict(model, shards))
    noted("set shards of the optimizer", lambda: set_optimizer_state_dict(model, optimizer, pieces))
    return result


def peaks_of_setting() -> list[float]:
    """MiB that a rank needs at most for a model with one large weight, and for its optimizer."""
    warm()
    fill_from_first.__defaults__ = (16 * MIB,)
    sizes = [1024] * 8 + [10240]
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, rows, bias=False) for rows in sizes])
    fully_shard(model, mesh=mesh_of((distributed.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    names = [f"{number}.weight" for number in range(len(sizes))]

    def whole(fill: float) -> dict[str, torch.Tensor]:
        pairs = zip(names, sizes, strict=True)
        return {name: torch.full((rows, 1024), fill) for name, rows in pairs}

    risen = []
    weights = whole(2.0) if distributed.get_rank() == 0 else {}
    distributed.barrier()
    before = forget_peak()
    set_model_state_dict(model, weights, options=FROM_0)
    risen.append((rss("VmHWM") - before) / MIB)
    state: dict[str, Any] = {}
    if distributed.get_rank() == 0:
        entries = {name: {"momentum_buffer": one} for name, one in whole(3.0).items()}
        groups = [{**optimizer.param_groups[0], "params": names}]
        state = {"state": entries, "param_groups": groups}
    distributed.barrier()
    before = forget_peak()
    set_optimizer_state_dict(model, optimizer, state, options=FROM_0)
    risen.append((rss("VmHWM") - before) / MIB)
    for one in model.parameters():
        assert bool((one.to_local() == 2).all())
        assert bool((optimizer.state[one]["momentum_buffer"].to_local() == 3).all())
    return risen


def test_one_weight_that_is_ten_times_larger_costs_no_more_than_a_bucket(ranks):
    for risen in ranks(4)(peaks_of_setting)[1:]:
        assert max(risen) <= 72 / 4 + 16 + SLACK


# Ranks that do not give the same


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("layout", "part"), [("ddp", "model"), ("fsdp2-nested", "model"), ("fsdp2-nested", "optimizer")]
)
def test_whole_states_that_differ_are_an_error_or_those_of_rank_0(layout, part):
    model = build(layout)
    optimizer = adamw(model)
    weights, optim = numbered_model(Net()), moments()
    shift = 1000.0 * distributed.get_rank()
    mine = {"inner.0.weight": weights["inner.0.weight"] + shift}
    other = copy.deepcopy(optim)
    other["state"]["inner.0.weight"]["exp_avg"] += shift
    try:
        if part == "model":
            set_model_state_dict(model, {**weights, **mine}, options=FULL)
        else:
            set_optimizer_state_dict(model, optimizer, other, options=FULL)
    except DsdError as error:
        assert "inner.0.weight" in str(error)  # noqa: PT017  # either is right
        assert len(set(everywhere(str(error)))) == 1  # noqa: PT017
        return
    if part == "model":
        assert_same(get_model_state_dict(model, options=FULL), weights)
    else:
        assert_same(optim_of(model, optimizer)["state"], optim["state"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(FULL, id="full"),
    ],
)
def test_no_rank_loses_experts_of_its_own_in_silence(options):
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(distributed.get_rank())
    try:
        found = get_model_state_dict(model, options=options)
    except DsdError as error:
        assert "experts.0" in str(error)  # noqa: PT017  # either is right
        return
    assert_same(found, dict(model.state_dict()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp1-full-orig", "fsdp2-nested"])
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_all_ranks_are_told_which_rank_has_no_state_and_what_to_do(layout, part):
    model = build(layout)
    optimizer = adamw(model)
    before = numbered_model(Net(), 4), moments(shift=4)
    set_model_state_dict(model, before[0], options=FULL)
    set_optimizer_state_dict(model, optimizer, before[1], options=FULL)
    mine = given((numbered_model(Net()), moments()), FROM_0) or ({}, {})
    calls = {
        "model": lambda: set_model_state_dict(model, mine[0], options=FULL),
        "optimizer": lambda: set_optimizer_state_dict(model, optimizer, mine[1], options=FULL),
    }
    started = time.monotonic()
    with pytest.raises(DsdError, match=r"(?s)rank 1.*broadcast_from_rank0") as caught:
        calls[part]()
    assert time.monotonic() - started < 10
    assert len(set(everywhere(str(caught.value)))) == 1
    assert_same(get_model_state_dict(model, options=FULL), before[0])
    assert_same(optim_of(model, optimizer)["state"], before[1]["state"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [FROM_0], ids=["from-0"])
def test_an_entry_of_a_parameter_that_the_model_lacks_is_an_error_on_every_rank(options):
    model = build("fsdp2")
    optimizer = adamw(model)
    state = moments()
    state["state"]["zzz.weight"] = copy.deepcopy(state["state"]["row.weight"])
    state["param_groups"][0]["params"].append("zzz.weight")
    with pytest.raises(DsdError, match=r"zzz\.weight") as caught:
        set_optimizer_state_dict(model, optimizer, given(state, options), options=options)
    assert len(set(everywhere(str(caught.value)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp1-full-flat", "fsdp2-nested"])
@any_way
def test_an_entry_too_much_is_passed_over_if_not_strict(layout, options):
    model = build(layout)
    optimizer = adamw(model)
    wanted = moments()
    state = copy.deepcopy(wanted)
    state["state"]["zzz.weight"] = copy.deepcopy(state["state"]["row.weight"])
    state["param_groups"][0]["params"].append("zzz.weight")
    loose = dataclasses.replace(options, strict=False)
    set_optimizer_state_dict(model, optimizer, given(state, loose), options=loose)
    assert_same(optim_of(model, optimizer)["state"], wanted["state"])


@pytest.mark.ranks(2)
def test_an_error_of_shape_in_a_flat_parameter_tells_the_name_and_both_shapes():
    model = build("fsdp1-full-flat")
    optimizer = adamw(model)
    state = moments()
    state["state"]["row.weight"]["exp_avg"] = torch.ones(3, 3)
    with pytest.raises(DsdError) as caught:
        set_optimizer_state_dict(model, optimizer, state, options=FULL)
    text = str(caught.value)
    assert [word for word in ("row.weight", "[3, 3]", "[1, 7]") if word not in text] == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("layout", "part"), [("fsdp1-full-orig", "optimizer"), ("fsdp2-nested", "model")]
)
def test_tensors_without_data_are_refused_by_name_on_every_rank(layout, part):
    model = build(layout)
    optimizer = adamw(model)
    weights, optim = numbered_model(Net()), moments()
    weights["row.weight"] = weights["row.weight"].to("meta")
    entry = optim["state"]["row.weight"]
    entry["exp_avg"] = entry["exp_avg"].to("meta")
    calls = {
        "model": lambda: set_model_state_dict(model, weights, options=FULL),
        "optimizer": lambda: set_optimizer_state_dict(model, optimizer, optim, options=FULL),
    }
    told = ""
    try:
        calls[part]()
    except Exception as error:
        told = f"{type(error).__name__} {error}"
    texts = everywhere(told)
    assert len(set(texts)) == 1
    assert "row.weight" in texts[0]
    assert "meta" in texts[0]


@pytest.mark.ranks(2)
def test_a_model_without_data_has_no_whole_state():
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(nn.Linear(3, 5)), mesh=mesh_of((2,)))
    with pytest.raises(DsdError, match=r"0\.weight") as caught:
        get_model_state_dict(model, options=FULL)
    assert "meta" in str(caught.value)
    assert len(set(everywhere(str(caught.value)))) == 1


# What one rank cannot do, all are told in time

PATIENCE = timedelta(seconds=2)


def told(call: Callable[[], Any]) -> str:
    """What this rank is told. If others are not told soon, it leaves them, so that they are."""
    text = ""
    try:
        call()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    store, size = default_store(), distributed.get_world_size()
    store.set(f"told/{distributed.get_rank()}", "")
    try:
        store.wait([f"told/{rank}" for rank in range(size)], PATIENCE)
    except Exception:  # each store has a kind of its own
        distributed.destroy_process_group()
    return text


class Telling(Net):
    """A net whose extra state cannot be read, or set, on rank 1."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails

    def get_extra_state(self) -> Any:
        self._check("read")
        return 1

    def set_extra_state(self, state: Any) -> None:
        self._check("set")

    def _check(self, verb: str) -> None:
        if self.fails == verb and distributed.get_rank() == 1:
            raise ValueError(f"extra state cannot be {verb} here")


def what_ranks_are_told(case: str) -> str:
    kind = {"get_extra_state": "read", "set_extra_state": "set"}.get(case)
    model = build("fsdp2", Net if kind is None else lambda: Telling(kind))
    optimizer = adamw(model)
    weights, optim = numbered_model(Net()), moments()
    first = distributed.get_rank() == 0
    if kind is not None:
        weights["_extra_state"] = 1
    elif case == "class":
        optim["param_groups"][0]["cls"] = Net
    calls = {
        "class": lambda: set_optimizer_state_dict(
            model, optimizer, given(optim, FROM_0), options=FROM_0
        ),
        "nothing": lambda: set_model_state_dict(
            model,
            weights if first else None,  # type: ignore[arg-type]
            options=FULL,
        ),
        "get_extra_state": lambda: get_model_state_dict(model, options=FULL),
        "set_extra_state": lambda: set_model_state_dict(model, weights, options=FULL),
    }
    return told(calls[case])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param("class", ("cls", "class"), id="an-option-that-no-file-holds"),
        pytest.param("nothing", ("rank 1", "broadcast_from_rank0"), id="no-state-on-rank-1"),
        pytest.param(
            "get_extra_state",
            ("rank 1", "cannot be read here"),
            id="a-hook-that-fails-on-rank-1-when-it-is-read",
        ),
        pytest.param(
            "set_extra_state",
            ("rank 1", "cannot be set here"),
            id="a-hook-that-fails-on-rank-1-when-it-is-set",
        ),
    ],
)
def test_what_one_rank_cannot_do_is_the_same_error_on_all_in_time(ranks, case, words):
    texts = ranks(2)(what_ranks_are_told, case)
    assert len(set(texts)) == 1, texts
    assert [word for word in words if word not in texts[0]] == []


def what_comes(case: str) -> tuple[str, Any]:
    """What a rank is told, and has, when rank 0 gives what a file could hold."""
    model = build("fsdp2")
    optimizer = adamw(model)
    weights, optim = numbered_model(Net()), moments()
    first = distributed.get_rank() == 0
    weights["extra._extra_state"] = {"calls": 5, "scales": [torch.ones(2), torch.arange(3)]}
    optim["param_groups"][0]["kind"] = torch.float16
    if case == "extra":
        text = told(lambda: set_model_state_dict(model, given(weights, FROM_0), options=FROM_0))
        return text, model.extra.extra
    if case == "dtype":
        mine = given(optim, FROM_0)
        text = told(lambda: set_optimizer_state_dict(model, optimizer, mine, options=FROM_0))
        return text, optimizer.param_groups[0].get("kind")
    nothing: Any = numbered_model(Net()) if first else None
    text = told(lambda: set_model_state_dict(model, nothing, options=FROM_0))
    return text, model.extra.extra


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        pytest.param(
            "extra",
            {"calls": 5, "scales": [torch.ones(2), torch.arange(3)]},
            id="extra-state-with-tensors",
        ),
        pytest.param("dtype", torch.float16, id="an-option-that-is-a-dtype"),
        pytest.param("none", {"calls": 5}, id="none-on-others"),
    ],
)
def test_what_a_file_could_hold_comes_from_rank_0_to_all(ranks, case, wanted):
    for text, found in ranks(2)(what_comes, case):
        assert text == ""
        assert_same(found, wanted)


def other_calls() -> tuple[str, float]:
    model = build("fsdp2")
    limited = {way: dataclasses.replace(o, timeout=PATIENCE) for way, o in WAYS.items()}
    started = time.monotonic()
    text = told(
        (lambda: get_model_state_dict(model, options=limited["all"]))
        if distributed.get_rank() == 0
        else lambda: set_model_state_dict(model, numbered_model(Net()), options=limited["from-0"])
    )
    return text, time.monotonic() - started


def test_ranks_that_make_different_calls_are_told_of_both_within_the_limit(ranks):
    told_of = ranks(2, group_timeout_s=4)(other_calls)
    for text, seconds in told_of:
        assert "get_model_state_dict" in text
        assert "set_model_state_dict" in text
        assert seconds < 5


def one_rank_calls(layout: str) -> str:
    """What rank 0 is told; others leave it if it is not told soon."""
    model = build(layout)
    limited = dataclasses.replace(FULL, timeout=timedelta(seconds=0.5))
    distributed.barrier()
    store = default_store()
    if distributed.get_rank() == 0:
        text = ""
        try:
            get_model_state_dict(model, options=limited)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        store.set("told", text)
        return text
    try:
        store.wait(["told"], timedelta(seconds=3))
    except Exception:  # each store has a kind of its own
        distributed.destroy_process_group()
    return ""


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp1-hybrid-orig",
        pytest.param("fsdp1-tp"),
    ],
)
def test_a_rank_that_calls_alone_is_told_within_the_limit(ranks, layout):
    text = ranks(4, limit_s=20)(one_rank_calls, layout)[0]
    assert "ranks have not made this call" in text
