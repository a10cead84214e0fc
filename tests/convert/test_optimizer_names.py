"""Optimizers on their way between kinds: numbers become names where that is certain, and back."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import torch
from torch import nn

import dsdformat
import dsdformat.torch as dsd
from dsdformat.convert import convert, open_any
from dsdformat.convert.optimizer_names import ModelSection, names_in
from dsdformat.convert.optimizers import NumberedOptimizer, NumberedParameter


class Net(nn.Module):
    """Buffers between parameters, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.embed(x))))


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups: weights, and what has one dim."""
    parameters = list(model.parameters())
    return [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]


MAKERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "two groups": lambda model: torch.optim.AdamW(decayed(model), lr=0.1),
    "empty group": lambda model: torch.optim.Adam([*decayed(model), {"params": []}]),
    "tensor rate": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1)),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1),
    "named": lambda model: torch.optim.AdamW(model.named_parameters()),
}


def trained(make: Any, model: nn.Module | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = make(model)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(torch.tensor([0, 1, 2, 3])).square().sum()
        result.backward()
        return result

    for _ in range(2):
        optimizer.step(loss)
    return {"model": model, "optimizer": optimizer, "epoch": 3}


def states(training: dict[str, Any]) -> dict[str, Any]:
    """What a general checkpoint has; the model's as a dict, as it is stored when given itself."""
    return {
        "model": dict(training["model"].state_dict()),
        "optimizer": training["optimizer"].state_dict(),
        "epoch": training["epoch"],
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def without_names(state: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {key: item for key, item in group.items() if key != "param_names"}
        for group in state["param_groups"]
    ]
    return state | {"param_groups": groups}


@pytest.mark.parametrize("case", MAKERS)
def test_a_file_of_torch_becomes_what_saving_the_objects_makes(tmp_path, case):
    training = trained(MAKERS[case])
    root = dsd.save(tmp_path / "live", training)
    torch.save(states(training), tmp_path / "x.pt")
    converted = convert(tmp_path / "x.pt", tmp_path / "ours", to="dsd")
    assert converted.findings == ()
    assert converted.root == root


@pytest.mark.parametrize("case", MAKERS)
def test_what_was_converted_is_loaded_into_objects(tmp_path, case):
    training = trained(MAKERS[case])
    torch.save(states(training), tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "ours", to="dsd")
    model = Net()
    fresh = {"model": model, "optimizer": MAKERS[case](model), "epoch": 0}
    rest = dsd.load(tmp_path / "ours", fresh)
    assert rest["epoch"] == 3
    assert same(fresh["optimizer"].state_dict(), training["optimizer"].state_dict())


@pytest.mark.parametrize("case", MAKERS)
def test_ours_becomes_numbers_that_optimizers_of_torch_load(tmp_path, case):
    training = trained(MAKERS[case])
    root = dsd.save(tmp_path / "live", training)
    convert(tmp_path / "live", tmp_path / "x.pt")
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    model = Net()
    optimizer = MAKERS[case](model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loaded, wanted = optimizer.state_dict(), training["optimizer"].state_dict()
    assert same(without_names(loaded), without_names(wanted))
    assert convert(tmp_path / "x.pt", tmp_path / "again", to="dsd").root == root


def test_several_models_have_their_own_optimizers(tmp_path):
    g, d = trained(MAKERS["adamw"]), trained(MAKERS["two groups"], nn.Sequential(Net()))
    state = {
        "g": states(g)["model"],
        "d": states(d)["model"],
        "optimizers": [states(g)["optimizer"], states(d)["optimizer"]],
    }
    torch.save(state, tmp_path / "x.pt")
    converted = convert(tmp_path / "x.pt", tmp_path / "ours", to="dsd")
    # Both models have these shapes in this order, so nobody can tell.
    assert [one.path for one in converted.findings] == [("optimizers", 0), ("optimizers", 1)]
    assert converted.findings[0].reason == "it fits g and d; give their names"
    names = {
        "optimizers/@0": list(dict(g["model"].named_parameters())),
        "optimizers/@1": [
            name
            for dims in (True, False)
            for name, one in d["model"].named_parameters()
            if (one.ndim > 1) is dims
        ],
    }
    converted = convert(tmp_path / "x.pt", tmp_path / "named", to="dsd", names=names)
    assert converted.findings == ()
    optimizers = dsd.load(tmp_path / "named")["optimizers"]
    assert "embed.weight" in optimizers[0]["state"]
    assert "0.embed.weight" in optimizers[1]["state"]


AMBIGUOUS: dict[str, Any] = {
    "groups that could be either": lambda model: torch.optim.AdamW(
        [{"params": model.body[0].parameters()}, {"params": model.body[1].parameters()}]
    ),
    "not all parameters": lambda model: torch.optim.AdamW(model.body[0].parameters()),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_numbers_stay_where_there_are_several_ways(tmp_path, case):
    training = trained(AMBIGUOUS[case])
    torch.save(states(training), tmp_path / "x.pt")
    converted = convert(tmp_path / "x.pt", tmp_path / "ours", to="dsd")
    (finding,) = converted.findings
    assert (finding.path, finding.lost) == (("optimizer",), False)
    assert "several ways" in str(finding)
    kept = dsd.load(tmp_path / "ours")["optimizer"]
    assert same(kept, states(training)["optimizer"])


def test_an_optimizer_alone_gets_the_names_of_the_model_that_it_was_chosen_from(tmp_path):
    training = trained(MAKERS["two groups"])
    torch.save(states(training), tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "ours", to="dsd", select="optimizer")
    assert "embed.weight" in dsd.load(tmp_path / "ours")["state"]


def test_all_of_a_training_comes_back_from_a_dcp_folder(tmp_path):
    for case, make in MAKERS.items():
        folder = tmp_path / case
        root = dsd.save(folder / "live", trained(make))
        convert(folder / "live", folder / "dcp", to="dcp")
        assert convert(folder / "dcp", folder / "again", to="dsd").root == root, case


def test_numbers_stay_where_no_model_fits(tmp_path):
    training = trained(MAKERS["adamw"])
    torch.save(states(training)["optimizer"], tmp_path / "alone.pt")
    (finding,) = convert(tmp_path / "alone.pt", tmp_path / "a", to="dsd").findings
    assert "no model" in finding.reason
    other = nn.Linear(7, 9).state_dict()
    torch.save({"m": other, "o": states(training)["optimizer"]}, tmp_path / "other.pt")
    (finding,) = convert(tmp_path / "other.pt", tmp_path / "b", to="dsd").findings
    assert "fits no model" in finding.reason


@pytest.fixture
def alone(tmp_path):
    """An optimizer in a file without its model, the objects, and the names that it should get."""
    training = trained(MAKERS["two groups"])
    torch.save({"optimizer": states(training)["optimizer"]}, tmp_path / "x.pt")
    model = training["model"]
    name_of = {id(one): name for name, one in model.named_parameters()}
    groups = training["optimizer"].param_groups
    names = [name_of[id(one)] for group in groups for one in group["params"]]
    return tmp_path / "x.pt", training, names


def test_names_are_given_as_a_list_a_json_file_or_another_checkpoint(tmp_path, alone):
    path, training, names = alone
    (tmp_path / "names.json").write_text(json.dumps(names))
    (tmp_path / "dict.json").write_text(json.dumps({"optimizer": names}))
    torch.save(training["model"].state_dict(), tmp_path / "model.pt")
    dsd.save(tmp_path / "other", {"m": training["model"], "o": training["optimizer"]})
    dsd.save(tmp_path / "live", training)
    given: list[Any] = [names, {"optimizer": names}]
    given += [
        tmp_path / "names.json",
        tmp_path / "dict.json",
        tmp_path / "live",
        tmp_path / "other",
    ]
    given += [str(tmp_path / "model.pt")]
    roots = {
        convert(path, tmp_path / f"out-{number}", to="dsd", names=one).root
        for number, one in enumerate(given)
    }
    assert len(roots) == 1
    groups = dsd.load(tmp_path / "out-0")["optimizer"]["param_groups"]
    assert [group["params"] for group in groups.values()] == [names[:3], names[3:]]


BAD_NAMES: dict[str, Any] = {
    "too few": ["a"],
    "twice": ["a"] * 8,
    "no names": [1, 2],
    "another optimizer": {"other": ["a"]},
    "no list": {"optimizer": "abc"},
}


@pytest.mark.parametrize("case", BAD_NAMES)
def test_names_that_are_none_are_refused(tmp_path, alone, case):
    with pytest.raises(dsdformat.ArgumentError) as caught:
        convert(alone[0], tmp_path / "out", to="dsd", names=BAD_NAMES[case])
    assert caught.value.code == "bad_argument"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "3", "[" * 100000])
def test_a_file_of_names_that_is_none_is_refused(tmp_path, alone, text):
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(dsdformat.ArgumentError):
        convert(alone[0], tmp_path / "out", to="dsd", names=tmp_path / "names.json")


def test_what_is_kept_for_no_parameter_goes_both_ways(tmp_path):
    training = states(trained(MAKERS["adamw"]))
    training["optimizer"]["state"]["global"] = {"step": 5}
    training["optimizer"]["scale"] = 2.0
    torch.save(training, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "ours", to="dsd")
    stored = dsd.load(tmp_path / "ours")["optimizer"]
    assert stored["shared_state"] == {"embed.weight": {"global": {"step": 5}}}
    assert stored["own_keys"] == {"embed.weight": {"scale": 2.0}}
    convert(tmp_path / "ours", tmp_path / "y.pt")
    loaded = torch.load(tmp_path / "y.pt")["optimizer"]
    assert same(without_names(loaded), training["optimizer"])


def test_the_layout_of_lightning_is_named_within_its_lists(tmp_path):
    training = trained(MAKERS["adamw"])
    root = states(training)
    state = {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": root["model"],
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.ones(())}},
        "optimizer_states": [root["optimizer"]],
        "lr_schedulers": [{"last_epoch": 1, "_last_lr": [0.1]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 4},
    }
    torch.save(state, tmp_path / "last.ckpt")
    converted = convert(tmp_path / "last.ckpt", tmp_path / "ours", to="dsd")
    assert converted.findings == ()
    loaded = dsd.load(tmp_path / "ours")
    assert loaded["hyper_parameters"] == {"width": 4}
    assert list(loaded["optimizer_states"][0]["param_groups"]) == ["embed.weight"]
    convert(tmp_path / "ours", tmp_path / "again.ckpt")
    again = torch.load(tmp_path / "again.ckpt")
    state["optimizer_states"] = [without_names(state["optimizer_states"][0])]
    again["optimizer_states"] = [without_names(again["optimizer_states"][0])]
    assert same(again, state)


def test_flattened_optimizers_get_the_form_of_ours(tmp_path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    training = trained(MAKERS["two groups"])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(training["model"], training["optimizer"], options=options)
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "ours", to="dsd")
    fresh_model = Net()
    fresh = {"model": fresh_model, "optimizer": MAKERS["two groups"](fresh_model)}
    dsd.load(tmp_path / "ours", fresh)
    wanted = training["optimizer"].state_dict()
    assert same(fresh["optimizer"].state_dict(), wanted)


def test_a_checkpoint_of_ours_is_seen_as_it_is_by_those_who_only_open_it(tmp_path):
    training = trained(MAKERS["adamw"])
    torch.save(states(training), tmp_path / "x.pt")
    with open_any(tmp_path / "x.pt") as opened:
        assert list(opened.tree["optimizer"]["state"]) == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("count", [8, 300, 1000])
def test_many_groups_that_fit_in_many_ways_are_judged_with_little_memory(count):
    parameters = tuple(NumberedParameter(number, number, None, {}) for number in range(count))
    model = ModelSection(("m",), {f"w{number}": (1,) for number in range(count)})
    tracemalloc.start()
    found, reason = names_in(NumberedOptimizer(("o",), parameters), [model])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is None
    assert "several ways" in reason
    assert peak < 200 * 2**20


STRANGE: dict[str, Any] = {
    "a number twice": {"state": {}, "param_groups": [{"params": [0, 0]}]},
    "numbers and names": {"state": {}, "param_groups": [{"params": [0, "a"]}]},
    "groups that are none": {"state": {}, "param_groups": [1]},
    "params that are none": {"state": {}, "param_groups": [{"params": 3}]},
    "flags": {"state": {}, "param_groups": [{"params": [True]}]},
    "no groups": {"state": {0: {}}, "param_groups": []},
    "state of a number": {"state": {0: 5}, "param_groups": [{"params": [0]}]},
    "state of a name": {"state": {"a": 5}, "param_groups": [{"params": ["a"]}]},
    "state that is a list": {"state": [1], "param_groups": [{"params": [0]}]},
    "flat and nested": {"state.a": 1, "param_groups.a.lr": 1},
    "flat without names": {"state.a": 1, "param_groups.": 1},
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_only_looks_like_an_optimizer_stays_as_it_is(tmp_path, case):
    state = {"m": {"w": torch.ones(2)}, "o": STRANGE[case]}
    torch.save(state, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "ours", to="dsd")
    assert dsd.load(tmp_path / "ours")["o"] == STRANGE[case]
