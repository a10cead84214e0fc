"""Recipes and `load_model`: a model is built from a registry, checked on meta, and loaded."""

from __future__ import annotations

import builtins
import math
import os
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

import numpy as np  # noqa: E402
from exact import assert_same, assert_same_tensor  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import (  # noqa: E402
    ArgumentError,
    ChecksumError,
    DsdError,
    EntryNotFoundError,
    MismatchError,
    NotACheckpointError,
    UnsupportedValueError,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


class Net(nn.Module):
    """A body, and a table that no checkpoint holds."""

    def __init__(self, width: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(width, 2, bias=bias)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(width) * 0.5, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.body(x + self.table))
        return out


class Plain(nn.Module):
    """Everything it has is in its state dict."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(width, 2)


def save(path: Path, model: nn.Module, recipe: dsd.Recipe, **rest: Any) -> str:
    return dsd.save(path, {"model": model, **rest}, recipes={"model": recipe})


def store(path: Path, recipes: Any, model: Any = None) -> None:
    """Write a checkpoint with anything at all where the recipes are."""
    weights = {k: v.detach() for k, v in Plain().state_dict().items()} if model is None else model
    dsd.save(path, {"model": weights, "recipes": recipes})


def assert_same_modules(found: nn.Module, wanted: nn.Module) -> None:
    assert_same(dict(found.state_dict()), dict(wanted.state_dict()))


# Building


def test_a_model_is_built_with_its_arguments_and_loaded(path):
    saved = Net(6, bias=False).eval()
    save(path, saved, dsd.Recipe("net", width=6, bias=False))
    loaded = dsd.load_model(path, {"net": Net})
    assert type(loaded) is Net
    assert_same_modules(loaded, saved)
    x = torch.randn(3, 6)
    assert_same_tensor(loaded.eval()(x), saved(x))


def test_a_loaded_model_is_as_built_in_training_mode_and_trains(path):
    save(path, Plain().eval().requires_grad_(False), dsd.Recipe("plain"))
    loaded = dsd.load_model(path, {"plain": Plain})
    assert all(module.training for module in loaded.modules())
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in loaded.parameters())
    loaded.body(torch.ones(1, 4)).sum().backward()
    torch.optim.Adam(loaded.parameters()).step()


def test_buffers_that_no_checkpoint_holds_have_the_values_of_the_constructor(path):
    saved = Net(5)
    saved.table.fill_(9.0)
    save(path, saved, dsd.Recipe("net", width=5))
    loaded = dsd.load_model(path, {"net": Net})
    assert_same_tensor(loaded.table, torch.arange(5) * 0.5)


def builds_of(kind: type[nn.Module]) -> tuple[Callable[..., nn.Module], list[str]]:
    """A registry's function that notes on which devices it was called."""
    devices: list[str] = []

    def build(**kwargs: Any) -> nn.Module:
        module = kind(**kwargs)
        devices.append(next(module.parameters()).device.type)
        return module

    return build, devices


def test_a_model_is_built_on_meta_alone_if_its_state_dict_is_all_it_has(path):
    save(path, Plain(), dsd.Recipe("plain"))
    build, devices = builds_of(Plain)
    dsd.load_model(path, {"plain": build})
    assert devices == ["meta"]


def test_a_model_with_more_than_its_state_dict_is_built_on_meta_first(path):
    save(path, Net(), dsd.Recipe("net"))
    build, devices = builds_of(Net)
    dsd.load_model(path, {"net": build})
    assert devices == ["meta", "cpu"]


def test_a_wrong_architecture_is_found_before_it_takes_memory(path):
    save(path, Plain(), dsd.Recipe("plain"))
    rows = 2**40  # 16 TiB, were it made

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, rows)
            self.register_buffer("table", torch.zeros(rows), persistent=False)

    with pytest.raises(MismatchError) as caught:
        dsd.load_model(path, {"plain": Huge})
    mismatched = {item.name: item.wanted for item in caught.value.report.mismatched}
    assert mismatched == {"model/body.weight": f"[{rows}, 4]", "model/body.bias": f"[{rows}]"}


def test_names_that_differ_are_reported_on_both_sides(path):
    save(path, Plain(), dsd.Recipe("plain"))

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

    with pytest.raises(MismatchError) as caught:
        dsd.load_model(path, {"plain": Other})
    report = caught.value.report
    assert sorted(report.missing) == ["model/head.bias", "model/head.weight"]
    assert sorted(report.unexpected) == ["model/body.bias", "model/body.weight"]


def test_a_checkpoint_with_a_recipe_and_no_model_is_refused(path):
    store(path, {"model": {"name": "plain", "kwargs": {}}})
    renamed = path.parent / "other"
    store(renamed, {"gone": {"name": "plain", "kwargs": {}}})
    with pytest.raises(DsdError):
        dsd.load_model(renamed, {"plain": Plain}, name="gone")


def test_one_of_several_models_is_built_by_its_name(path):
    student, teacher = Plain(3), Plain(5)
    dsd.save(
        path,
        {"student": student, "teacher": teacher, "step": 3},
        recipes={"student": dsd.Recipe("plain", width=3), "teacher": dsd.Recipe("p", width=5)},
    )
    assert_same_modules(dsd.load_model(path, {"plain": Plain}, name="student"), student)
    assert_same_modules(dsd.load_model(path, {"p": Plain}, name="teacher"), teacher)


@pytest.mark.parametrize("key", ["", "a/b", "%2F", "@0", "recipes.model", "é", "\n"], ids=repr)
def test_a_model_under_an_odd_key_is_built(path, key):
    saved = Plain()
    dsd.save(path, {key: saved}, recipes={key: dsd.Recipe("plain")})
    assert_same_modules(dsd.load_model(path, {"plain": Plain}, name=key), saved)


def test_a_model_in_parts_is_built_as_one(path):
    parts = [nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 1)})]
    dsd.save(path, {"model": parts}, recipes={"model": dsd.Recipe("both")})
    whole = dsd.load_model(
        path, {"both": lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 1)})}
    )
    assert_same_modules(whole["a"], parts[0]["a"])
    assert_same_modules(whole["b"], parts[1]["b"])


def test_no_recipe_is_needed_for_each_model(path):
    dsd.save(path, {"a": Plain(), "b": Plain()}, recipes={"b": dsd.Recipe("plain")})
    dsd.load_model(path, {"plain": Plain}, name="b")
    with pytest.raises(EntryNotFoundError) as caught:
        dsd.load_model(path, {"plain": Plain}, name="a")
    assert caught.value.name == "a"


def test_only_the_model_is_read(path):
    """Damage elsewhere is not met, and what is stored beside the model does not count."""
    optimizer_like = {"state": {"x": torch.ones(5000)}}
    save(path, Plain(), dsd.Recipe("plain"), optimizer=optimizer_like)
    [file] = [p for p in path.iterdir() if "optimizer" in p.name]
    file.write_bytes(file.read_bytes()[:-8] + b"\xff" * 8)
    dsd.load_model(path, {"plain": Plain})


# Arguments

VALUES = [
    pytest.param(None, id="None"),
    pytest.param(True, id="bool"),
    pytest.param(2**70, id="large int"),
    pytest.param(-0.0, id="negative zero"),
    pytest.param(math.inf, id="infinity"),
    pytest.param(math.nan, id="nan"),
    pytest.param(1 + 2j, id="complex"),
    pytest.param("gelu", id="str"),
    pytest.param(b"\x00\xff", id="bytes"),
    pytest.param([1, [2.0, "a"], []], id="list"),
    pytest.param((1, (2,), ()), id="tuple"),
    pytest.param({"a": {"b": [1]}, "c": ()}, id="dict"),
    pytest.param({1: "int", (1, 2): "tuple", None: "None"}, id="dict of any keys"),
    pytest.param({1, 2}, id="set"),
    pytest.param(frozenset({"a"}), id="frozenset"),
    pytest.param(OrderedDict(b=1, a=2), id="OrderedDict"),
    pytest.param(Counter(a=2), id="Counter"),
    pytest.param(defaultdict(None, a=1), id="defaultdict"),
    pytest.param(deque([1, 2], 5), id="deque"),
    pytest.param(torch.bfloat16, id="dtype"),
    pytest.param(torch.device("cuda", 1), id="device"),
    pytest.param(torch.Size([2, 3]), id="size"),
    pytest.param(torch.channels_last, id="memory format"),
    pytest.param(torch.sparse_csr, id="layout"),
    pytest.param(np.float32(1.5), id="numpy scalar"),
    pytest.param(np.dtype("int16"), id="numpy dtype"),
    pytest.param(datetime(2024, 1, 2, 3, tzinfo=UTC), id="datetime"),
    pytest.param(date(2024, 1, 2), id="date"),
    pytest.param(timedelta(seconds=1.5), id="timedelta"),
    pytest.param(PurePosixPath("a/b"), id="path"),
    pytest.param({"layers": [{"dtype": torch.float16, "dims": (1, 2)}]}, id="nested"),
]


@pytest.mark.parametrize("value", VALUES)
def test_an_argument_of_any_value_reaches_the_constructor_as_it_was(path, value):
    seen: list[Any] = []

    def build(option: Any, *, more: Any) -> nn.Module:
        seen.extend([option, more])
        return Plain()

    save(path, Plain(), dsd.Recipe("plain", option=value, more={"deep": [value]}))
    dsd.load_model(path, {"plain": build})
    assert_same(seen[:2], [value, {"deep": [value]}])


@pytest.mark.parametrize("name", ["name", "kwargs", "self", "cls", "model", "recipes", "device"])
def test_an_argument_may_have_any_name(path, name):
    seen: dict[str, Any] = {}

    def build(**kwargs: Any) -> nn.Module:
        seen.update(kwargs)
        return Plain()

    save(path, Plain(), dsd.Recipe("plain", **{name: 7}))
    dsd.load_model(path, {"plain": build})
    assert seen == {name: 7}


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(len, id="function"),
        pytest.param(nn.ReLU, id="class"),
        pytest.param(nn.ReLU(), id="module"),
        pytest.param(object(), id="object"),
        pytest.param({"act": [nn.functional.gelu]}, id="function, nested"),
    ],
)
def test_an_argument_that_cannot_be_stored_is_refused_with_its_place(path, value):
    with pytest.raises(UnsupportedValueError) as caught:
        save(path, Plain(), dsd.Recipe("plain", option=value))
    assert caught.value.path_in_tree.startswith("$.recipes.model.kwargs.option")
    assert not path.exists()


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.ones(2), id="tensor"),
        pytest.param(np.ones(2), id="array"),
        pytest.param({"class_weights": [torch.ones(2)]}, id="tensor, nested"),
        pytest.param(torch.eye(2).to_sparse(), id="sparse tensor"),
    ],
)
def test_a_tensor_among_the_arguments_is_refused_or_comes_back_as_one(path, value):
    seen: list[Any] = []

    def build(option: Any) -> nn.Module:
        seen.append(option)
        return Plain()

    try:
        save(path, Plain(), dsd.Recipe("plain", option=value))
    except DsdError:
        return
    dsd.load_model(path, {"plain": build})
    assert_same(seen[0], value)


def test_the_arguments_of_two_builds_are_not_one_object(path):
    """A constructor that changes what it is given changes it for itself alone."""

    class Popping(Net):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config.pop("width"))

    save(path, Net(3), dsd.Recipe("net", config={"width": 3}))
    assert dsd.load_model(path, {"net": Popping}).body.in_features == 3


# Names


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.nn.Linear", "eval", "Net"])
def test_a_name_is_never_imported(path, name):
    store(path, {"model": {"name": name, "kwargs": {"command": "touch gone"}}})
    before = set(sys.modules)
    with pytest.raises(EntryNotFoundError) as caught:
        dsd.load_model(path, {"plain": Plain})
    assert caught.value.name == name
    assert set(sys.modules) - before == set()


def test_nothing_is_called_by_a_name_that_python_knows(path, monkeypatch):
    called: list[Any] = []
    monkeypatch.setattr(os, "system", called.append)
    monkeypatch.setattr(builtins, "eval", called.append)
    for index, name in enumerate(["os.system", "builtins.eval", "eval", "system"]):
        place = path.parent / str(index)
        store(place, {"model": {"name": name, "kwargs": {}}})
        with pytest.raises(EntryNotFoundError):
            dsd.load_model(place, {"plain": Plain})
    assert called == []


def test_a_name_that_the_registry_lacks_comes_with_near_ones(path):
    save(path, Plain(), dsd.Recipe("resnet_small"))
    registry = {"resnet-small": Plain, "resnet_smal": Plain, "mlp": Plain}
    with pytest.raises(EntryNotFoundError, match="resnet_smal") as caught:
        dsd.load_model(path, registry)
    assert caught.value.name == "resnet_small"
    assert set(caught.value.close_matches) == {"resnet_smal", "resnet-small"}


@pytest.mark.parametrize(
    "registry",
    [
        pytest.param({}, id="empty"),
        pytest.param(
            {1: Plain, ("a", 2): Plain, None: Plain},
            id="names that are no strings",
        ),
        pytest.param({f"net{n}": Plain for n in range(2000)}, id="long"),
    ],
)
def test_a_name_that_is_in_no_registry_is_one_error(path, registry):
    save(path, Plain(), dsd.Recipe("plain"))
    with pytest.raises(EntryNotFoundError) as caught:
        dsd.load_model(path, registry)
    assert len(str(caught.value)) < 1000


def test_a_registry_may_be_any_mapping(path):
    class Registry(dict[str, Any]):
        def __missing__(self, key: str) -> Any:
            raise AssertionError("asked for what it does not have")

    save(path, Plain(), dsd.Recipe("plain"))
    dsd.load_model(path, Registry(plain=Plain))
    with pytest.raises(EntryNotFoundError):
        dsd.load_model(path, Registry())


def test_a_model_without_a_recipe_comes_with_the_names_of_those_that_have_one(path):
    save(path, Plain(), dsd.Recipe("plain"))
    with pytest.raises(EntryNotFoundError, match="model") as caught:
        dsd.load_model(path, {"plain": Plain}, name="modle")
    assert caught.value.name == "modle"
    assert caught.value.close_matches == ("model",)


def test_a_checkpoint_without_recipes_is_refused(path):
    dsd.save(path, {"model": Plain()})
    with pytest.raises(EntryNotFoundError) as caught:
        dsd.load_model(path, {"plain": Plain})
    assert caught.value.name == "model"


def test_a_folder_without_a_checkpoint_is_refused(path):
    path.mkdir()
    with pytest.raises(NotACheckpointError):
        dsd.load_model(path, {"plain": Plain})


@pytest.mark.parametrize(
    "recipes",
    [
        pytest.param(5, id="int"),
        pytest.param([], id="list"),
        pytest.param("model", id="str"),
        pytest.param(torch.ones(2), id="tensor"),
        pytest.param({"model": None}, id="recipe None"),
        pytest.param({"model": 5}, id="recipe int"),
        pytest.param({"model": []}, id="recipe list"),
        pytest.param({"model": torch.ones(1)}, id="recipe tensor"),
        pytest.param({"model": torch.eye(2).to_sparse()}, id="recipe sparse tensor"),
        pytest.param({"model": {}}, id="recipe empty"),
        pytest.param({"model": {"name": "plain"}}, id="no kwargs"),
        pytest.param({"model": {"kwargs": {}}}, id="no name"),
        pytest.param({"model": {"name": 1, "kwargs": {}}}, id="name int"),
        pytest.param({"model": {"name": ["plain"], "kwargs": {}}}, id="name list"),
        pytest.param({"model": {"name": None, "kwargs": {}}}, id="name None"),
        pytest.param({"model": {"name": torch.ones(1), "kwargs": {}}}, id="name tensor"),
        pytest.param({"model": {"name": "", "kwargs": {}}}, id="name empty"),
        pytest.param({"model": {"name": "plain", "kwargs": [1]}}, id="kwargs list"),
        pytest.param({"model": {"name": "plain", "kwargs": None}}, id="kwargs None"),
        pytest.param({"model": {"name": "plain", "kwargs": {1: 2}}}, id="kwargs of int keys"),
        pytest.param({"model": {"name": "plain", "kwargs": {("a",): 2}}}, id="kwargs, tuple keys"),
        pytest.param({1: {"name": "plain", "kwargs": {}}}, id="int keys"),
    ],
)
def test_what_is_no_recipe_is_an_error_of_ours(path, recipes):
    store(path, recipes)
    with pytest.raises(DsdError):
        dsd.load_model(path, {"plain": Plain})


def test_arguments_of_a_file_that_the_constructor_does_not_take_are_its_own_error(path):
    store(path, {"model": {"name": "plain", "kwargs": {"command": "x"}}})
    with pytest.raises((TypeError, DsdError), match="command"):
        dsd.load_model(path, {"plain": Plain})


# Constructors


def test_an_error_of_the_constructor_reaches_the_caller(path):
    class Failing(nn.Module):
        def __init__(self) -> None:
            raise LookupError("no such vocabulary")

    save(path, Plain(), dsd.Recipe("plain"))
    with pytest.raises(LookupError, match="no such vocabulary"):
        dsd.load_model(path, {"plain": Failing})


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(None, id="None"),
        pytest.param({"weight": torch.ones(1)}, id="dict"),
        pytest.param(Plain, id="class"),
        pytest.param([nn.ReLU()], id="list of modules"),
        pytest.param((Plain(), 1), id="tuple"),
    ],
)
def test_a_registry_that_makes_no_module_is_told_so(path, made):
    save(path, Plain(), dsd.Recipe("plain"))
    with pytest.raises(ArgumentError, match="plain"):
        dsd.load_model(path, {"plain": lambda: made})


@pytest.mark.parametrize("entry", [None, 5, "Plain"], ids=["None", "int", "str"])
def test_a_registry_that_holds_no_function_is_told_so(path, entry):
    save(path, Plain(), dsd.Recipe("plain"))
    with pytest.raises((ArgumentError, TypeError)):
        dsd.load_model(path, {"plain": entry})


def item_of_a_tensor(width: int) -> Any:
    return [x.item() for x in torch.linspace(0, 0.1, width)]


def list_of_a_tensor(width: int) -> Any:
    return torch.linspace(0, 0.1, width).tolist()


def branch_on_a_tensor(width: int) -> Any:
    return 1 if torch.arange(width).sum() > 3 else 2


def array_of_a_tensor(width: int) -> Any:
    return torch.arange(width).numpy()


def tensor_of_an_array(width: int) -> Any:
    return torch.from_numpy(np.arange(width)) + torch.arange(width)


def seeded_noise(width: int) -> Any:
    return torch.rand(width, generator=torch.Generator().manual_seed(width))


NOT_ON_META = [
    pytest.param(seeded_noise, id="generator"),
    pytest.param(item_of_a_tensor, id="item"),
    pytest.param(list_of_a_tensor, id="tolist"),
    pytest.param(branch_on_a_tensor, id="branch"),
    pytest.param(array_of_a_tensor, id="numpy"),
    pytest.param(tensor_of_an_array, id="two devices"),
]


@pytest.mark.parametrize("rates", NOT_ON_META)
def test_a_constructor_that_reads_its_tensors_is_run_where_they_have_values(path, rates):
    """As the drop rates of vision transformers: `torch.linspace(0, rate, depth).tolist()`."""

    class Reading(Plain):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.rates = rates(width)

    saved = Reading(4)
    save(path, saved, dsd.Recipe("reading", width=4))
    loaded = dsd.load_model(path, {"reading": Reading})
    assert_same_modules(loaded, saved)
    assert_same(loaded.rates, saved.rates)


def test_a_registry_that_puts_its_module_on_a_device_itself_is_loaded(path):
    save(path, Net(), dsd.Recipe("net"))
    loaded = dsd.load_model(path, {"net": lambda: Net().to("cpu")})
    assert_same_tensor(loaded.table, torch.arange(4) * 0.5)


def test_tensors_that_a_constructor_puts_on_a_device_itself_are_loaded(path):
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 2)
            self.gain = nn.Parameter(torch.ones(2, device="cpu"))
            self.register_buffer("mean", torch.from_numpy(np.zeros(2)))
            self.register_buffer("table", torch.from_numpy(np.arange(3.0)), persistent=False)

    saved = Placed()
    nn.init.uniform_(saved.gain)
    saved.mean.fill_(2)
    save(path, saved, dsd.Recipe("placed"))
    loaded = dsd.load_model(path, {"placed": Placed})
    assert_same_modules(loaded, saved)
    assert_same_tensor(loaded.table, torch.arange(3.0).double())


def test_a_registry_that_returns_a_module_that_exists_loads_into_it(path):
    saved, existing = Plain(), Plain()
    save(path, saved, dsd.Recipe("plain"))
    loaded = dsd.load_model(path, {"plain": lambda: existing})
    assert loaded is existing
    assert_same_modules(existing, saved)


def test_plain_tensors_of_a_module_have_the_values_of_the_constructor(path):
    """Attributes that are no buffers are not on meta when all is done."""

    class Scaled(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor([1.0, 2.0])

    save(path, Scaled(), dsd.Recipe("scaled"))
    loaded = dsd.load_model(path, {"scaled": Scaled})
    assert_same_tensor(loaded.scale, torch.tensor([1.0, 2.0]))


def test_a_model_of_recurrent_layers_is_built(path):
    saved = nn.LSTM(3, 4)
    save(path, saved, dsd.Recipe("lstm", input_size=3, hidden_size=4))
    loaded = dsd.load_model(path, {"lstm": nn.LSTM})
    x = torch.randn(2, 1, 3)
    assert_same_tensor(loaded(x)[0], saved(x)[0])


def test_a_compiled_model_is_built_plain(path):
    saved = Plain()
    save(path, torch.compile(saved, backend="eager"), dsd.Recipe("plain"))
    assert_same_modules(dsd.load_model(path, {"plain": Plain}), saved)


def test_a_model_that_the_registry_compiles_is_loaded(path):
    saved = Plain()
    save(path, saved, dsd.Recipe("plain"))
    loaded = dsd.load_model(path, {"plain": lambda: torch.compile(Plain(), backend="eager")})
    assert_same_modules(loaded._orig_mod, saved)


def test_extra_state_is_given_to_the_built_model(path):
    class WithExtra(Plain):
        note: Any = None

        def get_extra_state(self) -> Any:
            return {"note": self.note}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]

    saved = WithExtra()
    saved.note = [1, torch.ones(2)]
    save(path, saved, dsd.Recipe("extra"))
    assert_same(dsd.load_model(path, {"extra": WithExtra}).note, [1, torch.ones(2)])


class Tied(nn.Module):
    def __init__(self, words: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 3)
        self.head = nn.Linear(3, words, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_weight_is_stored_once_and_is_one_after_loading(path):
    saved = Tied()
    save(path, saved, dsd.Recipe("tied"))
    with dsdformat.open(path) as checkpoint:
        assert len(list(checkpoint)) == 1
    loaded = dsd.load_model(path, {"tied": Tied})
    assert loaded.head.weight is loaded.embed.weight
    assert len(list(loaded.parameters())) == 1
    assert_same_modules(loaded, saved)


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_a_tied_model_is_loaded_from_either_name(path, kept):
    weight = torch.randn(5, 3)
    store(path, {"model": {"name": "tied", "kwargs": {}}}, {kept: weight})
    loaded = dsd.load_model(path, {"tied": Tied})
    assert loaded.head.weight is loaded.embed.weight
    assert_same_tensor(loaded.head.weight, weight)


def test_weights_that_differ_are_not_loaded_into_a_tied_model(path):
    stored = {"embed.weight": torch.zeros(5, 3), "head.weight": torch.ones(5, 3)}
    store(path, {"model": {"name": "tied", "kwargs": {}}}, stored)
    with pytest.raises(MismatchError):
        dsd.load_model(path, {"tied": Tied})


def test_a_tied_weight_is_loaded_into_two_parameters_of_their_own(path):
    class Untied(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(self.embed.weight.detach().clone())

    saved = Tied()
    save(path, saved, dsd.Recipe("tied"))
    loaded = dsd.load_model(path, {"tied": Untied})
    assert loaded.head.weight is not loaded.embed.weight
    assert loaded.head.weight.data_ptr() != loaded.embed.weight.data_ptr()
    assert_same_modules(loaded, saved)


# Random numbers


class Drawing(nn.Module):
    """Draws from every stream while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.draws = (random.random(), float(np.random.rand()))
        self.register_buffer("noise", torch.rand(2), persistent=False)


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param("torch", id="torch"),
        pytest.param("python", id="python"),
        pytest.param("numpy", id="numpy"),
    ],
)
def test_building_a_model_leaves_the_random_streams_alone(path, stream):
    save(path, Drawing(), dsd.Recipe("drawing"))
    before = dsd.rng_state()
    try:
        dsd.load_model(path, {"drawing": Drawing})
        assert_same(dsd.rng_state()[stream], before[stream])
    finally:
        dsd.set_rng_state(before)


def test_a_constructor_that_fails_leaves_the_random_stream_alone(path):
    class Failing(Drawing):
        def __init__(self) -> None:
            super().__init__()
            raise LookupError("gone")

    save(path, Drawing(), dsd.Recipe("drawing"))
    before = dsd.rng_state()
    try:
        with pytest.raises(LookupError):
            dsd.load_model(path, {"drawing": Failing})
        assert_same(dsd.rng_state()["torch"], before["torch"])
    finally:
        dsd.set_rng_state(before)


# Options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_is_converted_to_a_dtype(path, dtype):
    saved = Net()
    saved.norm(torch.randn(4, 2))
    save(path, saved, dsd.Recipe("net"))
    loaded = dsd.load_model(path, {"net": Net}, dtype=dtype)
    wanted = {k: v.to(dtype) if v.is_floating_point() else v for k, v in saved.state_dict().items()}
    assert_same(dict(loaded.state_dict()), wanted)
    assert loaded.norm.num_batches_tracked.dtype == torch.int64


def test_a_model_is_not_converted_unless_it_is_asked_for(path):
    saved = Plain().bfloat16()
    save(path, saved, dsd.Recipe("plain"))
    with pytest.raises(MismatchError) as caught:
        dsd.load_model(path, {"plain": Plain})
    assert {item.what for item in caught.value.report.mismatched} == {"dtype"}


def test_a_model_saved_in_another_dtype_is_built_in_it(path):
    saved = Plain().bfloat16()
    save(path, saved, dsd.Recipe("plain"))
    assert_same_modules(dsd.load_model(path, {"plain": Plain}, dtype=torch.bfloat16), saved)


@pytest.mark.parametrize("dtype", [torch.int32, "float32", float, torch.bool], ids=str)
def test_what_is_no_floating_dtype_is_refused(path, dtype):
    save(path, Plain(), dsd.Recipe("plain"))
    with pytest.raises(ArgumentError):
        dsd.load_model(path, {"plain": Plain}, dtype=dtype)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"], ids=repr)
def test_a_model_is_made_on_a_device(path, device):
    saved = Net()
    save(path, saved, dsd.Recipe("net"))
    loaded = dsd.load_model(path, {"net": Net}, device=device)
    assert {t.device.type for t in [*loaded.parameters(), *loaded.buffers()]} == {"cpu"}
    assert_same_modules(loaded, saved)


@pytest.mark.parametrize("device", ["nowhere", 3.5, object()], ids=["name", "float", "object"])
def test_what_is_no_device_is_refused(path, device):
    save(path, Plain(), dsd.Recipe("plain"))
    with pytest.raises(ArgumentError):
        dsd.load_model(path, {"plain": Plain}, device=device)


def test_a_mapped_model_reads_the_file_and_never_writes_it(path):
    saved = nn.Linear(64, 64)
    root = save(path, saved, dsd.Recipe("linear", in_features=64, out_features=64))
    loaded = dsd.load_model(path, {"linear": nn.Linear}, mmap=True)
    assert_same_modules(loaded, saved)
    with torch.no_grad():
        loaded.weight.add_(1)
    assert dsdformat.verify(path, digest=root).ok
    assert_same_modules(dsd.load_model(path, {"linear": nn.Linear}), saved)


def test_a_mapped_model_trains(path):
    save(path, nn.Linear(8, 8), dsd.Recipe("linear", in_features=8, out_features=8))
    loaded = dsd.load_model(path, {"linear": nn.Linear}, mmap=True)
    loaded(torch.ones(1, 8)).sum().backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()


def test_a_mapped_model_is_converted_if_that_is_asked_for(path):
    saved = Net()
    save(path, saved, dsd.Recipe("net"))
    loaded = dsd.load_model(path, {"net": Net}, mmap=True, dtype=torch.float64)
    assert loaded.body.weight.dtype == torch.float64
    assert_same_tensor(loaded.body.weight, saved.body.weight.double())


def test_another_root_digest_is_refused(path):
    root = save(path, Plain(), dsd.Recipe("plain"))
    dsd.load_model(path, {"plain": Plain}, digest=root)
    other = ("0" if root[0] != "0" else "1") + root[1:]
    with pytest.raises(ChecksumError):
        dsd.load_model(path, {"plain": Plain}, digest=other)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "as it is"])
def test_damage_is_found_if_it_is_looked_for(path, verify):
    saved = nn.Linear(64, 64, bias=False)
    recipe = dsd.Recipe("linear", in_features=64, out_features=64, bias=False)
    save(path, saved, recipe)
    [file] = path.glob("*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(bytes(raw))
    if verify:
        with pytest.raises(ChecksumError):
            dsd.load_model(path, {"linear": nn.Linear})
    else:
        loaded = dsd.load_model(path, {"linear": nn.Linear}, verify=False)
        assert (loaded.weight != saved.weight).sum() == 1


# Saving recipes


def test_recipes_are_plain_values_under_their_key(path):
    save(path, Plain(), dsd.Recipe("plain", width=4), step=3)
    loaded = dsd.load(path)
    assert_same(loaded["recipes"], {"model": {"name": "plain", "kwargs": {"width": 4}}})
    assert set(loaded) == {"model", "recipes", "step"}


def test_recipes_are_no_part_of_what_a_state_wants(path):
    saved, fresh = Plain(), Plain()
    save(path, saved, dsd.Recipe("plain"), step=3)
    loaded = dsd.load(path, {"model": fresh, "step": 0})
    assert not loaded.report
    assert loaded["step"] == 3
    assert_same_modules(fresh, saved)


def test_recipes_and_a_key_of_that_name_are_refused_together(path):
    with pytest.raises(ArgumentError, match="recipes"):
        save(path, Plain(), dsd.Recipe("plain"), recipes={"soup": 1})
    assert not path.exists()


def test_a_state_may_have_a_key_of_that_name_of_its_own(path):
    soup = {"soup": ["water", {"salt": 1}], "n": torch.ones(2)}
    dsd.save(path, {"recipes": soup, "model": Plain()})
    assert_same(dsd.load(path)["recipes"], soup)
    with pytest.raises(EntryNotFoundError):
        dsd.load_model(path, {"plain": Plain})


@pytest.mark.parametrize(
    "recipes",
    [
        pytest.param({"modle": dsd.Recipe("plain")}, id="a key that the state lacks"),
        pytest.param({"model": "plain"}, id="str"),
        pytest.param({"model": Plain}, id="class"),
        pytest.param({"model": {"name": "plain", "kwargs": {}}}, id="dict"),
        pytest.param({1: dsd.Recipe("plain")}, id="int key"),
    ],
)
def test_recipes_that_are_none_are_refused(path, recipes):
    with pytest.raises(ArgumentError):
        dsd.save(path, {"model": Plain()}, recipes=recipes)
    assert not path.exists()


@pytest.mark.parametrize("recipes", [dsd.Recipe("plain"), "plain", 5, [1]], ids=repr)
def test_recipes_that_are_no_mapping_are_refused(path, recipes):
    with pytest.raises(ArgumentError):
        dsd.save(path, {"model": Plain()}, recipes=recipes)
    assert not path.exists()


@pytest.mark.parametrize("name", ["", None, 5, b"plain", Plain, ["plain"]], ids=repr)
def test_a_recipe_has_a_name(name):
    with pytest.raises(ArgumentError):
        dsd.Recipe(name)


def test_recipes_that_say_the_same_are_equal():
    assert dsd.Recipe("a", x=1) == dsd.Recipe("a", x=1)
    assert dsd.Recipe("a", x=1) != dsd.Recipe("a", x=2)
    assert dsd.Recipe("a") != dsd.Recipe("b")
    assert dsd.Recipe("a") != "a"


def test_changing_a_recipe_after_saving_changes_no_checkpoint(path):
    config = {"width": 4}
    recipe = dsd.Recipe("plain", config=config)
    save(path, Plain(), recipe)
    config["width"] = 5
    assert dsd.load(path)["recipes"]["model"]["kwargs"] == {"config": {"width": 4}}
