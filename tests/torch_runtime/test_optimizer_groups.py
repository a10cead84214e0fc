"""Groups of parameters keep all their options, whatever their types, and are found by names."""

from __future__ import annotations

import copy
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

import dsdformat.torch as dsd  # noqa: E402
from dsdformat.errors import MismatchError, UnsupportedValueError  # noqa: E402
from tests.torch_runtime.exact import assert_same, assert_same_tensor  # noqa: E402
from tests.torch_runtime.optimizer_cases import (  # noqa: E402
    mlp,
    state_of,
    train,
)

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, without its parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def unchanged(state: dict[str, Any]) -> Any:
    """A check that model and optimizer are still as they are now."""
    before, groups = dsd.snapshot(state), options_of(state["optimizer"])

    def check() -> None:
        assert_same(dsd.snapshot(state), before)
        assert_same(options_of(state["optimizer"]), groups)

    return check


# Options of any type

OPTIONS: dict[str, Any] = {
    "text": "cosine",
    "empty text": "",
    "text of any script": "λ☃ \x00 / @ % .",
    "bytes": b"\x00\xff",
    "None": None,
    "True": True,
    "int": 7,
    "a big int": 2**200,
    "float": 0.1,
    "an int that is a float": 1.0,
    "minus zero": -0.0,
    "infinity": float("inf"),
    "nan": float("nan"),
    "complex": 1 + 2j,
    "tuple": (0.9, 0.999),
    "a tuple in a tuple": ((1, 2.0), ("a", None)),
    "empty tuple": (),
    "list": [1, [2.0, (3,)]],
    "empty list": [],
    "dict": {"a": {"b": (1, [2])}},
    "empty dict": {},
    "dict with other keys": {1: "a", (2, "b"): None, None: 3, 2.5: {True: 1}},
    "OrderedDict": OrderedDict(b=1, a=2),
    "defaultdict": defaultdict(list, a=[1]),
    "Counter": Counter("abca"),
    "deque": deque([1, 2], maxlen=5),
    "set": {1, "a"},
    "frozenset": frozenset({(1, 2)}),
    "datetime": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone(timedelta(hours=2))),
    "date": date(2026, 1, 2),
    "timedelta": timedelta(days=-1, microseconds=1),
    "path": pathlib.PurePosixPath("runs/7"),
    "torch.Size": torch.Size([2, 3]),
    "torch.dtype": torch.bfloat16,
    "torch.device": torch.device("cuda:1"),
    "torch.memory_format": torch.channels_last,
    "torch.layout": torch.strided,
    "numpy float": np.float64(0.1),
    "numpy int": np.int32(5),
    "numpy bool": np.bool_(True),
    "tensor": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    "int tensor": torch.tensor(5),
    "empty tensor": torch.empty(0, 3),
    "tensors in a dict": {"a": [torch.ones(2), (torch.zeros(3, dtype=torch.int8),)]},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
}
any_option = pytest.mark.parametrize("value", OPTIONS.values(), ids=OPTIONS)


@any_option
def test_an_option_comes_back_with_its_exact_type(value, tmp_path):
    model = mlp()
    optimizer = SGD([{"params": model.parameters(), "extra": value}], lr=0.1)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = SGD(model.parameters(), lr=0.2)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(options_of(other), options_of(optimizer))


BEFORE = {
    "an int": 3,
    "a text": "x",
    "a list": [torch.zeros(2)],
    "a dict": {"a": torch.zeros(2)},
    "a tensor": torch.zeros(2),
}


# Over a tensor, one of another form is a mismatch, and so is what can be none: text, list or dict.
OTHER_FORM = (torch.Tensor, np.ndarray, str, list, dict)
CHANGES = {
    f"{new} over {old}": (OPTIONS[new], BEFORE[old])
    for new in OPTIONS
    for old in BEFORE
    if new != "tensors in a dict"
    and not (isinstance(OPTIONS[new], OTHER_FORM) and old == "a tensor")
}


@pytest.mark.parametrize(("value", "before"), CHANGES.values(), ids=CHANGES)
def test_an_option_takes_the_place_of_one_of_another_type(value, before, tmp_path):
    model = mlp()
    optimizer = SGD([{"params": model.parameters(), "extra": value}], lr=0.1)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = SGD([{"params": model.parameters(), "extra": copy.deepcopy(before)}], lr=0.2)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(options_of(other), options_of(optimizer))


@pytest.mark.parametrize("value", [v for v in OPTIONS.values() if isinstance(v, (str, list, dict))])
def test_an_option_that_cannot_be_a_tensor_over_one_is_reported(value, tmp_path):
    model = mlp()
    optimizer = SGD([{"params": model.parameters(), "extra": value}], lr=0.1)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = SGD([{"params": model.parameters(), "extra": torch.zeros(2)}], lr=0.2)
    state = {"model": model, "optimizer": other}
    check = unchanged(state)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", state)
    (found,) = caught.value.report.mismatched
    assert (found.name, found.what) == ("optimizer/param_groups/0.weight/extra", "kind")
    check()
    dsd.load(tmp_path / "c", state, strict=False)
    assert_same(options_of(other), options_of(optimizer))


DICTS = {k: v for k, v in BEFORE.items() if k != "a tensor"} | {"a dict": {"a": [torch.zeros(2)]}}


@pytest.mark.parametrize("before", DICTS.values(), ids=DICTS)
def test_a_dict_of_tensors_takes_the_place_of_an_option_of_another_type(before, tmp_path):
    model = mlp()
    value = OPTIONS["tensors in a dict"]
    optimizer = SGD([{"params": model.parameters(), "extra": value}], lr=0.1)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = SGD([{"params": model.parameters(), "extra": copy.deepcopy(before)}], lr=0.2)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(options_of(other), options_of(optimizer))


@any_option
def test_an_option_with_the_name_of_a_state_is_only_an_option(value, tmp_path):
    model = mlp()
    groups = [{"params": model.parameters(), "step": value, "exp_avg": value, "state": value}]
    optimizer = AdamW(groups)
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))


@pytest.mark.parametrize("key", ["a/b", "a.b", "", "param_groups", "λ", "@", "0", "%2F"], ids=repr)
def test_an_option_may_have_any_name(key, tmp_path):
    model = mlp()
    optimizer = SGD([{"params": model.parameters(), key: (1, 2)}], lr=0.1)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = SGD(model.parameters(), lr=0.2)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(options_of(other), options_of(optimizer))


class Thing:
    """Something that no format stores without pickle."""


REFUSED = {
    "a class": Thing,
    "an object": Thing(),
    "a function": len,
    "a lambda": lambda step: step,
    "a generator": torch.Generator(),
    "a storage": torch.ones(2).untyped_storage(),
    "a tensor on meta": torch.empty(2, device="meta"),
    "an array of objects": np.array([Thing()], dtype=object),
}


@pytest.mark.parametrize("nested", [False, True], ids=["itself", "nested"])
@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_an_option_that_cannot_be_stored_is_refused_with_its_path(value, nested, tmp_path):
    model = mlp()
    groups = [
        {"params": [model[0].weight]},
        {"params": [model[0].bias], "cls": {"deep": [0, value]} if nested else value},
    ]
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", {"model": model, "optimizer": SGD(groups, lr=0.1)})
    assert "cls" in str(caught.value)
    assert "0.bias" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: torch.nn.Linear(1, 1), id="a module"),
        pytest.param(lambda model: SGD(model.parameters(), lr=1.0), id="an optimizer"),
        pytest.param(
            lambda model: torch.optim.lr_scheduler.StepLR(SGD(model.parameters(), lr=1.0), 1),
            id="a scheduler",
        ),
    ],
)
def test_an_option_that_is_an_object_with_state_does_not_become_a_dict(make, tmp_path):
    model = mlp()
    option = make(model)
    state = {
        "model": model,
        "optimizer": SGD([{"params": model.parameters(), "tool": option}], lr=0.1),
    }
    refusal = None
    try:
        dsd.save(tmp_path / "c", state)
        dsd.load(tmp_path / "c", state)
    except UnsupportedValueError as error:
        refusal = error
    assert refusal is None or "tool" in str(refusal)
    assert state["optimizer"].param_groups[0]["tool"] is option


def test_an_option_that_only_the_live_group_has_keeps_its_value(tmp_path):
    # As those that a later torch adds to its optimizers.
    model = mlp()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": SGD(model.parameters(), lr=0.1)})
    other = SGD([{"params": model.parameters(), "later": (1,)}], lr=0.2)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert other.param_groups[0]["later"] == (1,)
    assert other.param_groups[0]["lr"] == 0.1


def test_options_of_two_loads_are_independent(tmp_path):
    model = mlp()
    extra = {"a": [1], "t": torch.zeros(2)}
    optimizer = SGD([{"params": model.parameters(), "extra": extra}], lr=0.1)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    one, two = SGD(model.parameters(), lr=1.0), SGD(model.parameters(), lr=1.0)
    for other in (one, two):
        dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    one.param_groups[0]["extra"]["a"].append(2)
    one.param_groups[0]["extra"]["t"].add_(1)
    assert_same(two.param_groups[0]["extra"], extra)


# Tensors as options


RATES: dict[str, Any] = {
    "tensor": torch.tensor(0.25),
    "float": 0.25,
    "double tensor": torch.tensor(0.25, dtype=torch.float64),
    "row": torch.tensor([0.25]),
}


@pytest.mark.parametrize("live", ["tensor", "float"])
@pytest.mark.parametrize("stored", RATES)
def test_a_learning_rate_comes_back_as_it_was_stored(stored, live, tmp_path):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=RATES[stored])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = SGD(model.parameters(), lr=torch.tensor(0.5) if live == "tensor" else 0.5)
    state = {"model": model, "optimizer": other}
    if live == "tensor" and stored in ("double tensor", "row"):
        check = unchanged(state)
        with pytest.raises(MismatchError) as caught:
            dsd.load(tmp_path / "c", state)
        assert "optimizer/param_groups/0.weight/lr" in str(caught.value)
        check()
    dsd.load(tmp_path / "c", state, strict=False)
    assert_same(other.param_groups[0]["lr"], RATES[stored])


def test_a_learning_rate_that_others_hold_is_read_in_place(tmp_path):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=torch.tensor(0.25))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    rate = torch.tensor(0.5)
    other = SGD(model.parameters(), lr=rate)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert other.param_groups[0]["lr"] is rate
    assert_same_tensor(rate, torch.tensor(0.25))


def shared_rate(model: Any, rate: float) -> torch.optim.Optimizer:
    """Both groups hold one tensor, as torch has it where a rate is given once for all."""
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = SGD(groups, lr=torch.tensor(rate))
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    return optimizer


def test_a_learning_rate_that_groups_share_stays_shared(tmp_path):
    model = mlp()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": shared_rate(model, 0.25)})
    other = shared_rate(model, 0.5)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    first, second = (group["lr"] for group in other.param_groups)
    assert_same_tensor(first, torch.tensor(0.25))
    assert second is first


def test_groups_that_share_a_learning_rate_can_get_one_each(tmp_path):
    model = mlp()
    optimizer = shared_rate(model, 0.25)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.75)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = shared_rate(model, 0.5)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(options_of(other), options_of(optimizer))


def test_betas_that_are_tensors_come_back(tmp_path):
    model = mlp()
    betas = torch.tensor(0.8), torch.tensor(0.9)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = AdamW(model.parameters(), betas=(0.5, 0.6), foreach=False)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(options_of(other), options_of(optimizer))


# Groups without parameters


def with_empty(model: Any, places: str, rates: Any = None) -> torch.optim.Optimizer:
    """Two groups, and one without parameters for each `e` of a text such as `ewebe`."""
    held = {"w": [model[0].weight, model[2].weight], "b": [model[0].bias, model[2].bias], "e": []}
    groups = []
    for number, place in enumerate(places):
        rate = 0.1 * (number + 1) if rates is None else rates
        groups.append({"params": list(held[place]), "lr": rate, "place": f"{number}"})
    return AdamW(groups, betas=(0.8, 0.9))


@pytest.mark.parametrize("places", ["ewb", "web", "wbe", "eewb", "ewebe", "weeb", "eweebee"])
def test_groups_without_parameters_keep_order_and_options(places, tmp_path):
    model = mlp()
    optimizer = with_empty(model, places)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = with_empty(resumed, places, 9.0)
    for group in other.param_groups:
        group.update(betas=(0.0, 0.0), place=None)
    assert not dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}).report
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    train(model, optimizer, range(2, 4))
    train(resumed, other, range(2, 4))
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_an_empty_group_keeps_default_betas_beside_groups_that_set_theirs(tmp_path):
    model = torch.nn.Linear(2, 2)

    def make() -> torch.optim.Optimizer:
        groups = [
            {"params": [], "lr": 0.2},
            {"params": [model.weight]},
            {"params": [model.bias], "lr": 0.3, "betas": (0.8, 0.9)},
        ]
        return AdamW(groups)

    optimizer, other = make(), make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for group in other.param_groups:
        group.update(lr=7.0, betas=(0.0, 0.0))
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.001, 0.3]
    assert [group["betas"] for group in other.param_groups] == [(0.9, 0.999)] * 2 + [(0.8, 0.9)]
    other.step()


def test_an_optimizer_of_empty_groups_alone_is_saved_and_loaded(tmp_path):
    model = mlp()
    optimizer = SGD([{"params": [], "lr": 0.1}, {"params": [], "lr": 0.2}])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = SGD([{"params": [], "lr": 5.0}, {"params": [], "lr": 6.0}])
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


def test_an_optimizer_of_empty_groups_needs_no_module(tmp_path):
    optimizer = SGD([{"params": [], "lr": 0.1}])
    dsd.save(tmp_path / "c", {"optimizer": optimizer})
    other = SGD([{"params": [], "lr": 5.0}])
    dsd.load(tmp_path / "c", {"optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("stored", "live", "what"),
    [
        pytest.param("web", "wb", "unexpected", id="one less"),
        pytest.param("wb", "web", "missing", id="one more"),
        pytest.param("ewebe", "web", "unexpected", id="two less"),
    ],
)
def test_another_number_of_empty_groups_is_reported(stored, live, what, tmp_path):
    model = mlp()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": with_empty(model, stored)})
    state = {"model": model, "optimizer": with_empty(model, live, 9.0)}
    check = unchanged(state)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", state)
    assert caught.value.code == "state_mismatch"
    assert len(getattr(caught.value.report, what)) == abs(stored.count("e") - live.count("e"))
    check()
    assert getattr(dsd.load(tmp_path / "c", state, strict=False).report, what)


# Other groups than before


def grouped(model: Any, *groups: Any) -> torch.optim.Optimizer:
    """One group for each (names, options)."""
    named = dict(model.named_parameters())
    return AdamW([{"params": [named[n] for n in names], **rest} for names, rest in groups])


W0, B0, W2, B2 = NAMES = "0.weight", "0.bias", "2.weight", "2.bias"
ONE = [(NAMES, {"lr": 0.1})]
TWO_ALIKE = [((W0, W2), {"lr": 0.1}), ((B0, B2), {"lr": 0.1})]
FOUR_ALIKE = [((name,), {"lr": 0.1}) for name in NAMES]
TWO_OTHERS = [((W0, B0), {"lr": 0.1}), ((W2, B2), {"lr": 0.1})]
SHUFFLED = [((B2, W0, B0, W2), {"lr": 0.1})]


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        pytest.param(ONE, TWO_ALIKE, id="split"),
        pytest.param(ONE, FOUR_ALIKE, id="split into single ones"),
        pytest.param(TWO_ALIKE, ONE, id="merged"),
        pytest.param(FOUR_ALIKE, SHUFFLED, id="merged and shuffled"),
        pytest.param(TWO_ALIKE, TWO_OTHERS, id="cut otherwise"),
        pytest.param(ONE, SHUFFLED, id="shuffled"),
    ],
)
def test_parameters_that_are_grouped_otherwise_with_the_same_options_go_on(stored, live, tmp_path):
    model = mlp()
    optimizer = grouped(model, *stored)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = grouped(resumed, *live)
    for group in other.param_groups:
        group["lr"] = 9.0
    assert not dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}).report
    assert len(other.param_groups) == len(live)
    train(model, optimizer, range(2, 5))
    train(resumed, other, range(2, 5))
    assert_same(dict(resumed.named_parameters()), dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert_same(other.state[resumed.get_parameter(name)], optimizer.state[parameter])


def test_groups_in_another_order_keep_their_own_options(tmp_path):
    model = mlp()
    decay = ((W0, W2), {"lr": 0.1, "weight_decay": 0.1})
    none = ((B0, B2), {"lr": 0.2, "weight_decay": 0.0})
    optimizer = grouped(model, decay, none)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = grouped(model, ((B0, B2), {}), ((W0, W2), {}))
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(options_of(other), options_of(optimizer)[::-1])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        pytest.param(0.1, 0.2, id="floats"),
        pytest.param(1, 1.0, id="int and float"),
        pytest.param((1, 2), [1, 2], id="tuple and list"),
        pytest.param(None, 0, id="None and 0"),
        pytest.param(torch.tensor(1.0), torch.tensor(2.0), id="tensors"),
        pytest.param(torch.tensor(1.0), 1.0, id="tensor and float"),
        pytest.param({"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}, id="tensors in dicts"),
        pytest.param(
            {"a": 1},
            {"a": True},
            id="int and bool in dicts",
        ),
    ],
)
def test_groups_with_different_options_are_not_merged(one, two, tmp_path):
    model = mlp()
    optimizer = grouped(model, ((W0, W2), {"extra": one}), ((B0, B2), {"extra": two}))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    state = {"model": mlp(1), "optimizer": None}
    state["optimizer"] = grouped(state["model"], *ONE)
    check = unchanged(state)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", state)
    (difference,) = caught.value.report.mismatched
    assert "extra" in difference.name
    assert difference.what == "value"
    check()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: float("nan"), id="nan"),
        pytest.param(lambda: (0.9, 0.99), id="tuple"),
        pytest.param(lambda: {"a": [1, (2,)]}, id="dict"),
        pytest.param(lambda: torch.tensor(1.0), id="tensor"),
        pytest.param(
            lambda: (torch.tensor(0.5), torch.tensor(0.75)),
            id="tensors in a tuple",
        ),
        pytest.param(lambda: np.arange(3), id="array"),
        pytest.param(lambda: np.float32(1), id="numpy scalar"),
    ],
)
def test_groups_with_equal_options_are_merged(make, tmp_path):
    model = mlp()
    optimizer = grouped(model, ((W0, W2), {"extra": make()}), ((B0, B2), {"extra": make()}))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = grouped(model, *ONE)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(other.param_groups[0]["extra"], make())


def test_an_option_that_only_one_of_two_merged_groups_has_is_a_difference(tmp_path):
    model = mlp()
    optimizer = grouped(model, ((W0, W2), {}), ((B0, B2), {"extra": None}))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", {"model": model, "optimizer": grouped(model, *ONE)})
    assert "extra" in str(caught.value)


def test_without_strict_merged_groups_take_the_options_of_the_first(tmp_path):
    model = mlp()
    optimizer = grouped(model, ((W0, W2), {"lr": 0.1}), ((B0, B2), {"lr": 0.2}))
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = grouped(model, (NAMES, {"lr": 9.0}))
    report = dsd.load(tmp_path / "c", {"model": model, "optimizer": other}, strict=False).report
    assert other.param_groups[0]["lr"] == 0.1
    assert [difference.what for difference in report.mismatched] == ["value"]
    assert len(other.state) == 4


def test_a_group_that_is_new_keeps_its_options(tmp_path):
    model = mlp()
    optimizer = grouped(model, ((W0, W2), {"lr": 0.1}))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = grouped(model, ((B0, B2), {"lr": 0.7}), ((W0, W2), {"lr": 0.6}))
    state = {"model": model, "optimizer": other}
    report = dsd.load(tmp_path / "c", state, strict=False).report
    assert [group["lr"] for group in other.param_groups] == [0.7, 0.1]
    assert report.missing == ["optimizer/state/0.bias", "optimizer/state/2.bias"]


def test_a_group_that_was_added_while_training_is_one_of_its_own(tmp_path):
    model = mlp()
    optimizer = grouped(model, ((W0, B0), {"lr": 0.1}))
    train(model, optimizer, [0])
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
    train(model, optimizer, [1])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = grouped(resumed, ((W0, B0), {}), ((W2, B2), {}))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    assert [float(other.state[p]["step"]) for p in resumed.parameters()] == [2.0, 2.0, 1.0, 1.0]


def test_a_group_can_be_added_after_loading(tmp_path):
    model = mlp()
    optimizer = grouped(model, ((W0, B0), {"lr": 0.1}))
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = grouped(resumed, ((W0, B0), {}))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    for one in (optimizer, other):
        one.add_param_group({"params": (model if one is optimizer else resumed)[2].parameters()})
    train(model, optimizer, [1])
    train(resumed, other, [1])
    assert_same(state_of(resumed, other), state_of(model, optimizer))


# Names that the optimizer has itself


@pytest.mark.parametrize("named", [False, True], ids=["into parameters", "into named parameters"])
@pytest.mark.parametrize("saved", [False, True], ids=["parameters", "named parameters"])
def test_an_optimizer_that_knows_names_keeps_its_own(saved, named, tmp_path):
    model = mlp()
    optimizer = AdamW(model.named_parameters() if saved else model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = AdamW(resumed.named_parameters() if named else resumed.parameters(), lr=0.2)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert ("param_names" in other.param_groups[0]) == named
    if named:
        assert other.param_groups[0]["param_names"] == list(NAMES)
    assert other.param_groups[0]["lr"] == 0.1
    train(model, optimizer, [2])
    train(resumed, other, [2])
    assert_same(dict(resumed.named_parameters()), dict(model.named_parameters()))


def test_names_of_groups_that_were_cut_otherwise_stay_with_their_parameters(tmp_path):
    model = mlp()
    optimizer = AdamW(model.named_parameters())
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    named = list(model.named_parameters())
    other = AdamW([{"params": named[2:]}, {"params": named[:2]}])
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert [group["param_names"] for group in other.param_groups] == [[W2, B2], [W0, B0]]


def test_names_that_the_optimizer_has_are_not_those_that_are_stored(tmp_path):
    model = mlp()
    named = [(f"my.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = AdamW(named)
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    stored = dsd.load(tmp_path / "c")["optimizer"]
    assert set(stored["state"]) == set(NAMES)
    assert stored["param_groups"][W0]["params"] == list(NAMES)


@pytest.mark.parametrize("half", ["once", "twice"])
def test_the_same_parameter_twice_in_a_group_is_one_entry(half, tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = SGD([model.weight, model.weight, model.bias], lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = SGD(model.parameters(), lr=0.2, momentum=0.9)
    if half == "twice":
        with pytest.warns(UserWarning, match="duplicate"):
            other = SGD([model.weight, model.weight, model.bias], lr=0.2, momentum=0.9)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    for parameter in model.parameters():
        assert_same(other.state[parameter], optimizer.state[parameter])
