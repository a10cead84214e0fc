"""The options of `load`: each does what it says, or is refused before anything is changed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from exact import assert_same, assert_same_tensor  # noqa: E402
from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import (  # noqa: E402
    ArgumentError,
    DsdError,
    EntryNotFoundError,
    MismatchError,
    UnsupportedValueError,
)
from dsdformat.storage.local import LocalStorage  # noqa: E402


def network() -> Any:
    return nn.Sequential(OrderedDict(encoder=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)))


def training(seed: int, module: Callable[[], Any] = network) -> dict[str, Any]:
    """A training state after one step: everything in it depends on the seed."""
    torch.manual_seed(seed)
    model = module()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 + seed)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "ema": {"encoder.weight": torch.rand(4, 3), "steps": torch.tensor(seed)},
        "noise": {"array": np.full(2, seed)},
        "history": [float(seed), {"seed": seed}],
        "step": seed,
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A checkpoint of `training(1)`."""
    path = tmp_path_factory.mktemp("options") / "c"
    dsd.save(path, training(1))
    return path


@pytest.fixture(scope="module")
def saved(path) -> dict[str, Any]:
    return dsd.load(path)


@pytest.fixture
def state() -> dict[str, Any]:
    return training(2)


@contextlib.contextmanager
def unchanged(state: dict[str, Any]) -> Iterator[None]:
    """Check that nothing of a state is changed."""
    before = dsd.snapshot(state)
    yield
    assert_same(dsd.snapshot(state), before)


@pytest.fixture
def data_nbytes(monkeypatch) -> list[int]:
    """The lengths of all reads of data files from here on; maps count as whole files."""
    reads: list[int] = []
    read_into, map_file = LocalStorage.read_into, LocalStorage.map
    read_into_many = LocalStorage.read_into_many

    def read(self: Any, label: str, byte_offset: int, into: Any) -> int:
        if label != "manifest.dsd":
            reads.append(len(into))
        return read_into(self, label, byte_offset, into)

    def read_many(self: Any, label: str, byte_offset: int, into: Any) -> int:
        reads.append(sum(map(len, into)))
        return read_into_many(self, label, byte_offset, into)

    def map_(self: Any, label: str, *, writable: bool = False) -> Any:
        reads.append(self.nbytes(label))
        return map_file(self, label, writable=writable)

    monkeypatch.setattr(LocalStorage, "read_into", read)
    monkeypatch.setattr(LocalStorage, "read_into_many", read_many)
    monkeypatch.setattr(LocalStorage, "map", map_)
    return reads


# The state.


class Config(dict):
    """A dict with attributes, as configuration libraries have it."""


WRAPPERS: dict[str, Any] = {
    "dict": dict,
    "ordered dict": OrderedDict,
    "default dict": lambda state: defaultdict(None, state),
    "mapping proxy": MappingProxyType,
    "subclass of dict": Config,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_state_may_be_any_mapping(path, saved, state, wrap):
    loaded = dsd.load(path, wrap(state))
    assert_same(dsd.snapshot({**state, **loaded}), saved)
    assert not loaded.report


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_state_that_is_saved_may_be_any_mapping(path, tmp_path, wrap):
    with dsdformat.open(path) as checkpoint:
        assert dsd.save(tmp_path / "c", wrap(training(1))) == checkpoint.root


def test_plain_values_come_back_in_the_result_and_the_state_keeps_its_own(path, state):
    loaded = dsd.load(path, state)
    assert (loaded["step"], state["step"]) == (1, 2)
    assert loaded["history"][0] == 1.0


def test_a_leaf_that_is_none_means_what_is_stored_there(path, saved):
    loaded = dsd.load(path, {"model": None, "optimizer": None}, strict=False)
    assert_same(loaded["model"], saved["model"])
    assert_same(loaded["optimizer"], saved["optimizer"])


def test_what_the_state_does_not_name_comes_back_if_it_is_plain(path, state):
    loaded = dsd.load(path, {"model": state["model"]}, strict=False)
    assert loaded["step"] == 1
    assert "model/encoder.weight" not in loaded.report.unexpected


HOLES: dict[str, Callable[[int], Any]] = {
    "tuple": lambda seed: np.random.RandomState(seed).get_state(),
    "list": lambda seed: [seed, torch.full((2,), seed), {"n": seed, "w": np.full(2, seed)}],
}


@pytest.mark.parametrize("make", HOLES.values(), ids=HOLES)
def test_a_list_of_tensors_and_values_comes_back_whole(tmp_path, make):
    """As the state of numpy's generator: neither its array nor its numbers are enough."""
    dsd.save(tmp_path / "c", {"rng": make(1)})
    loaded = dsd.load(tmp_path / "c", {"rng": make(2)})
    assert_same(loaded["rng"], make(1))


def test_plain_values_beside_tensors_that_nobody_wants_come_back_too(tmp_path):
    dsd.save(tmp_path / "c", {"w": torch.ones(2), "meta": {"epoch": 3, "mean": torch.ones(1)}})
    loaded = dsd.load(tmp_path / "c", {"w": torch.zeros(2)}, strict=False)
    assert loaded.report.unexpected == ["meta/mean"]
    assert loaded["meta"]["epoch"] == 3


STATES = {
    "a module": network,
    "keys that are no strings": lambda: {1: torch.ones(1)},
    "a list": lambda: [torch.ones(1)],
    "a string": lambda: "model",
}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_what_is_no_mapping_of_strings_is_refused(path, make):
    with pytest.raises(ArgumentError, match="a mapping with string keys"):
        dsd.load(path, make())


# Strict.


def fewer(state: dict[str, Any]) -> dict[str, Any]:
    del state["ema"]["steps"]
    return state


def more(state: dict[str, Any]) -> dict[str, Any]:
    state["ema"]["new"] = torch.full((2,), 7.0)
    return state


def other_shape(state: dict[str, Any]) -> dict[str, Any]:
    state["ema"]["encoder.weight"] = torch.full((4, 9), 7.0)
    return state


def other_dtype(state: dict[str, Any]) -> dict[str, Any]:
    state["ema"]["encoder.weight"] = torch.full((4, 3), 7.0, dtype=torch.float16)
    return state


def other_kind(state: dict[str, Any]) -> dict[str, Any]:
    state["ema"]["encoder.weight"] = nn.Linear(2, 2)
    return state


DIFFERENT = {
    "fewer": (fewer, "unexpected", "ema/steps"),
    "more": (more, "missing", "ema/new"),
    "another shape": (other_shape, "mismatched", "ema/encoder.weight"),
    "another dtype": (other_dtype, "mismatched", "ema/encoder.weight"),
    "another kind": (other_kind, "mismatched", "ema/encoder.weight"),
}


@pytest.mark.parametrize(("change", "what", "name"), DIFFERENT.values(), ids=DIFFERENT)
def test_strict_refuses_what_differs_before_anything_is_changed(path, state, change, what, name):
    change(state)
    with unchanged(state), pytest.raises(MismatchError) as caught:
        dsd.load(path, state)
    assert caught.value.code == "state_mismatch"
    found = getattr(caught.value.report, what)
    assert [getattr(item, "name", item) for item in found] == [name]


@pytest.mark.parametrize(("change", "what", "name"), DIFFERENT.values(), ids=DIFFERENT)
@pytest.mark.parametrize(
    "strict", [False, {"ema": False}, {"ema/*": False, "*": True}, lambda name: name[0] != "e"]
)
def test_what_may_differ_is_reported_and_the_rest_is_loaded(
    path, saved, state, change, what, name, strict
):
    change(state)
    report = dsd.load(path, state, strict=strict).report
    found = getattr(report, what)
    assert [getattr(item, "name", item) for item in found] == [name]
    assert_same(dsd.snapshot(state)["model"], saved["model"])
    assert_same(dsd.snapshot(state)["optimizer"], saved["optimizer"])


def test_what_does_not_fit_stays_as_it_was_where_it_may_differ(path, state):
    other_shape(state)
    dsd.load(path, state, strict=False)
    assert_same_tensor(state["ema"]["encoder.weight"], torch.full((4, 9), 7.0))


@pytest.mark.parametrize(
    "strict",
    [{"model": False}, {"ema/e*": False}, {"*": True, "ema": False}, lambda name: None],
    ids=["another part", "other names", "the first glob counts", "None is the default"],
)
def test_what_may_not_differ_is_refused_though_other_things_may(path, state, strict):
    more(state)
    with unchanged(state), pytest.raises(MismatchError, match="ema/new"):
        dsd.load(path, state, strict=strict)


# Devices.


def test_new_tensors_lie_on_the_cpu_if_nothing_is_said(path):
    assert dsd.load(path)["model"]["encoder.weight"].device.type == "cpu"


DEVICES = {
    "string": "meta",
    "device": torch.device("meta"),
    "mapping": {"model/encoder.*": "meta", "*": "cpu"},
    "the first glob counts": {"model": "meta", "model/encoder.weight": "cpu"},
    "function": lambda name: "meta" if name.startswith("model") else None,
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_new_tensors_lie_where_the_device_says(path, device):
    loaded = dsd.load(path, select=["model/encoder.weight", "ema"], device=device)
    assert loaded["model"]["encoder.weight"].is_meta
    if not isinstance(device, (str, torch.device)):
        assert not loaded["ema"]["encoder.weight"].is_meta


def test_parameters_on_meta_are_materialized_on_the_device(path, saved):
    with torch.device("meta"):
        model = network()
    dsd.load(path, {"model": model}, select="model", device="cpu")
    assert_same(dsd.snapshot({"model": model})["model"], saved["model"])


def test_what_the_state_holds_stays_on_its_own_device(path, state, saved):
    dsd.load(path, state, device={"model": "meta", "ema": "meta"})
    assert_same(dsd.snapshot(state)["model"], saved["model"])


def test_an_array_of_numpy_stays_on_the_host_whatever_the_device(path, saved):
    """As with device="cuda"."""
    loaded = dsd.load(path, select="noise", device="meta")
    assert_same(loaded["noise"], saved["noise"])


# Options that make no sense, all refused before anything is changed.

BAD: list[Any] = [
    pytest.param({"device": "gpu"}, id="device gpu"),
    pytest.param({"device": ""}, id="device empty"),
    pytest.param({"device": ["cpu"]}, id="device list"),
    pytest.param({"device": {"*": "gpu"}}, id="device in a mapping"),
    pytest.param({"device": {5: "cpu"}}, id="device glob"),
    pytest.param({"device": lambda name: "gpu"}, id="device of a function"),
    pytest.param({"device": object()}, id="device object"),
    pytest.param({"dtype": "float16"}, id="dtype string"),
    pytest.param({"dtype": torch.int32}, id="dtype int"),
    pytest.param({"dtype": torch.complex64}, id="dtype complex"),
    pytest.param({"dtype": float}, id="dtype class"),
    pytest.param({"dtype": {"*": None}}, id="dtype in a mapping"),
    pytest.param({"dtype": {"*": torch.bool}}, id="dtype bool in a mapping"),
    pytest.param({"strict": "false"}, id="strict string"),
    pytest.param({"strict": {"*": "no"}}, id="strict in a mapping"),
    pytest.param({"strict": {5: False}}, id="strict glob"),
    pytest.param({"rename": "model"}, id="rename string"),
    pytest.param({"rename": 5}, id="rename int"),
    pytest.param({"rename": [("a",)]}, id="rename of one"),
    pytest.param({"rename": ["ab"]}, id="rename strings"),
    pytest.param({"rename": {"step": None}}, id="rename to None"),
    pytest.param({"rename": {"step": 5}}, id="rename to int"),
    pytest.param({"rename": lambda name: 5}, id="rename function"),
    pytest.param({"select": 5}, id="select int"),
    pytest.param({"select": [5]}, id="select of ints"),
    pytest.param({"select": b"model"}, id="select bytes"),
    pytest.param({"types": ["Pair"]}, id="types of strings"),
    pytest.param({"types": torch.Tensor}, id="types no list"),
    pytest.param({"threads": 0}, id="threads 0"),
    pytest.param({"threads": -1}, id="threads negative"),
    pytest.param({"threads": "2"}, id="threads string"),
    pytest.param({"digest": "abc"}, id="digest short"),
    pytest.param({"digest": "x" * 64}, id="digest no hex"),
    pytest.param({"digest": b"a" * 64}, id="digest bytes"),
]


@pytest.mark.parametrize("options", BAD)
def test_an_option_that_makes_no_sense_is_refused_before_anything_is_changed(path, state, options):
    if callable(options.get("device")):  # asked where something is made
        state["ema"]["steps"] = None
    with unchanged(state), pytest.raises(ArgumentError) as caught:
        dsd.load(path, state, **options)
    assert caught.value.code == "bad_argument"


@pytest.mark.parametrize("options", BAD)
def test_an_option_that_makes_no_sense_is_refused_where_all_is_new(path, options):
    if "strict" in options:
        pytest.skip("nothing is compared")
    with pytest.raises(ArgumentError):
        dsd.load(path, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
@pytest.mark.parametrize("options", [{}, {"mmap": True}], ids=["read", "mapped"])
def test_a_device_that_this_machine_lacks_is_refused(path, options):
    with pytest.raises(DsdError, match="cuda"):
        dsd.load(path, device="cuda", **options)


def explode(name: str) -> Any:
    raise LookupError(name)


@pytest.mark.parametrize("option", ["strict", "dtype", "device", "rename"])
def test_an_error_of_a_function_comes_through_before_anything_is_changed(path, state, option):
    if option in ("strict", "dtype"):  # asked where something differs
        other_dtype(state)
    if option == "device":  # asked where something is made
        state["optimizer"].state.clear()
        state["ema"]["steps"] = None
    with unchanged(state), pytest.raises(LookupError):
        dsd.load(path, state, **{option: explode})


@pytest.mark.parametrize("option", ["device", "dtype"])
def test_a_function_that_counts_is_asked_once_for_each_tensor(path, option):
    """As one that fills a first device, and then a second."""
    asked: list[str] = []
    dsd.load(path, **{option: asked.append})
    assert len(asked) == len(set(asked))


def test_a_function_that_answers_in_turns_is_believed(path):
    turns = itertools.cycle([torch.float64, torch.bfloat16])
    loaded = dsd.load(path, select="ema", dtype=lambda name: next(turns))
    assert loaded["ema"]["encoder.weight"].dtype in (torch.float64, torch.bfloat16)


# Dtypes: what is cast is the subject of test_dtypes.py; here is which names are.

DTYPES = {
    "one": torch.bfloat16,
    "mapping": {"model": torch.bfloat16},
    "mapping, the first glob counts": {"model/*": torch.bfloat16, "*": torch.float64},
    "function": lambda name: torch.bfloat16 if name.startswith("model/") else None,
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_casts_are_asked_for_by_name_and_reported(path, saved, dtype):
    model = network().bfloat16()
    report = dsd.load(path, {"model": model}, select="model", dtype=dtype).report
    floats = {name for name, w in saved["model"].items() if w.is_floating_point()}
    assert {cast.name for cast in report.casts} == {f"model/{name}" for name in floats}
    assert {(cast.stored, cast.loaded) for cast in report.casts} == {("float32", "bfloat16")}
    assert_same_tensor(model.encoder.weight.detach(), saved["model"]["encoder.weight"].bfloat16())


def test_a_tensor_whose_name_is_not_asked_for_is_not_cast(path, state):
    other_dtype(state)
    with unchanged(state), pytest.raises(MismatchError, match="ema/encoder.weight: dtype"):
        dsd.load(path, state, dtype={"model": torch.float16, "ema/x*": torch.float16})


def test_the_report_shows_casts_to_people(path, state):
    other_dtype(state)
    report = dsd.load(path, state, dtype=torch.float16).report
    assert "ema/encoder.weight: float32 to float16" in str(report)
    assert not report


# Rename.


def two() -> dict[str, Any]:
    return {"m": {"a": torch.zeros(2), "b": torch.ones(2)}, "list": [torch.ones(1), 2], "v": 3}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("options") / "c"
    dsd.save(path, two())
    return path


A, B, LIST = torch.zeros(2), torch.ones(2), [torch.ones(1), 2]
RENAMES: dict[str, tuple[Any, Any]] = {
    "nothing": ({}, two()),
    "no pairs": ([], two()),
    "one name": ({"m/a": "m/c"}, {"m": {"c": A, "b": B}, "list": LIST, "v": 3}),
    "swapped": ({"m/a": "m/b", "m/b": "m/a"}, {"m": {"b": A, "a": B}, "list": LIST, "v": 3}),
    "to another branch": (
        {"m/a": "n/x/a"},
        {"n": {"x": {"a": A}}, "m": {"b": B}, "list": LIST, "v": 3},
    ),
    "to the root": ({"m/a": "a"}, {"a": A, "m": {"b": B}, "list": LIST, "v": 3}),
    "a value": ({"v": "m/v"}, {"m": {"a": A, "b": B, "v": 3}, "list": LIST}),
    "a list, whole": ({"list": "m/list"}, {"m": {"a": A, "b": B, "list": LIST}, "v": 3}),
    "prefix": ([("m/", "n/")], {"n": {"a": A, "b": B}, "list": LIST, "v": 3}),
    "prefix of all": ([("", "p/")], {"p": two()}),
    "prefix of a part": ([("m/a", "m/aa")], {"m": {"aa": A, "b": B}, "list": LIST, "v": 3}),
    "the first prefix counts": (
        [("m/a", "x"), ("m/", "y/")],
        {"x": A, "y": {"b": B}, "list": LIST, "v": 3},
    ),
    "function": (lambda n: n.upper(), {"M": {"A": A, "B": B}, "LIST": LIST, "V": 3}),
    "function that drops": (
        lambda n: None if n == "m/a" else n,
        {"m": {"b": B}, "list": LIST, "v": 3},
    ),
    "function that drops all": (lambda n: None, {}),
    "name with a slash": ({"m/a": "m/x%2Fy"}, {"m": {"x/y": A, "b": B}, "list": LIST, "v": 3}),
    "name with a percent": ({"m/a": "m/100%25"}, {"m": {"100%": A, "b": B}, "list": LIST, "v": 3}),
    "name with an at": ({"m/a": "m/x%40y"}, {"m": {"x@y": A, "b": B}, "list": LIST, "v": 3}),
    "name with dots": ({"m/a": "m/x..y."}, {"m": {"x..y.": A, "b": B}, "list": LIST, "v": 3}),
    "empty name": ({"m/a": "m/"}, {"m": {"": A, "b": B}, "list": LIST, "v": 3}),
    "unicode": ({"m/a": "m/größe"}, {"m": {"größe": A, "b": B}, "list": LIST, "v": 3}),
}


@pytest.mark.parametrize(("rename", "wanted"), RENAMES.values(), ids=RENAMES)
def test_entries_are_called_what_rename_says(small, rename, wanted):
    assert_same(dsd.load(small, rename=rename), wanted)


@pytest.mark.parametrize(("rename", "wanted"), RENAMES.values(), ids=RENAMES)
def test_entries_find_their_new_place_in_a_state(small, rename, wanted):
    def zeros(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: zeros(item) for key, item in value.items()}
        if isinstance(value, list):
            return [zeros(item) for item in value]
        return torch.full_like(value, -1) if isinstance(value, torch.Tensor) else 0

    state = zeros(wanted)
    dsd.load(small, state, rename=rename)
    tensors = {name: value for name, value in state.items() if name not in ("v", "V")}
    for name, value in tensors.items():
        assert "-1" not in str(value), name


COLLISIONS = {
    "with another": {"m/a": "m/b"},
    "below a tensor": {"m/a": "m/b/c"},
    "below a value": {"m/a": "v/x"},
    "with a branch": {"v": "m"},
    "all in one": lambda name: "same",
}


@pytest.mark.parametrize("rename", COLLISIONS.values(), ids=COLLISIONS)
def test_two_entries_with_one_name_are_refused_before_anything_is_changed(small, rename):
    state = {"m": {"a": torch.full((2,), 7.0), "b": torch.full((2,), 7.0)}}
    with unchanged(state), pytest.raises(ArgumentError, match="name of two entries") as caught:
        dsd.load(small, state, rename=rename)
    assert caught.value.code == "bad_argument"


UNKNOWN = {
    "name": ({"m/aa": "m/c"}, "m/aa"),
    "branch": ({"m": "n"}, "m"),
    "prefix": ([("mm/", "n/")], "mm/"),
    "second prefix, shadowed": ([("m/", "x/"), ("m/a", "y/")], "m/a"),
    "glob": ({"m/*": "n"}, "m/*"),
}


@pytest.mark.parametrize(("rename", "name"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_name_to_be_replaced_that_is_not_there_is_refused(small, rename, name):
    state = two()
    with unchanged(state), pytest.raises(EntryNotFoundError, match="rename") as caught:
        dsd.load(small, state, rename=rename)
    assert caught.value.name == name


def test_the_hint_for_an_unknown_name_names_close_ones(small):
    with pytest.raises(EntryNotFoundError) as caught:
        dsd.load(small, rename={"m/aa": "m/c"})
    assert "m/a" in caught.value.close_matches
    assert "did you mean" in str(caught.value)


def test_names_of_the_state_that_are_left_out_are_missing(small):
    state = two()
    with unchanged(state), pytest.raises(MismatchError) as caught:
        dsd.load(small, state, rename=lambda name: None if name == "m/a" else name)
    assert caught.value.report.missing == ["m/a"]


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Any) -> Any:
        return self.body(x)


PREFIXED = {
    "prefix": [("model/", "model/body.")],
    "function": lambda n: n.replace("model/", "model/body.") if n.startswith("model/") else n,
}


@pytest.mark.parametrize("rename", PREFIXED.values(), ids=PREFIXED)
def test_the_state_of_an_optimizer_follows_its_renamed_parameters(path, saved, rename):
    state = training(2, Wrapped)
    loaded = dsd.load(path, state, rename=rename)
    assert not loaded.report
    plain = dsd.snapshot(state)
    wanted = saved["optimizer"]["state"]
    assert_same(
        plain["optimizer"]["state"], {f"body.{name}": entry for name, entry in wanted.items()}
    )
    assert (
        state["optimizer"].param_groups[0]["lr"]
        == saved["optimizer"]["param_groups"]["encoder.weight"]["lr"]
    )


def test_a_model_and_its_optimizer_change_their_keys_together(path, saved, state):
    renamed = {"net": state["model"], "opt": state["optimizer"]}
    pairs = [("model/", "net/"), ("optimizer/", "opt/")]
    dsd.load(path, renamed, rename=pairs, select=["net", "opt"])
    plain = dsd.snapshot(renamed)
    assert_same(plain["net"], saved["model"])
    assert_same(plain["opt"], saved["optimizer"])


def test_the_groups_of_an_optimizer_keep_their_order(path, tmp_path):
    model = network()
    optimizer = torch.optim.SGD(
        [{"params": [w], "lr": i} for i, w in enumerate(model.parameters())]
    )
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    loaded = dsd.load(tmp_path / "c", rename=[("optimizer/", "o/"), ("model/", "m/")])
    groups = loaded["o"]["param_groups"]
    assert type(groups) is OrderedDict
    assert [group["lr"] for group in groups.values()] == [0, 1, 2, 3]


def test_a_tied_tensor_can_be_renamed_at_one_name(tmp_path):
    weight = torch.ones(2)
    dsd.save(tmp_path / "c", {"a": weight, "b": weight})
    loaded = dsd.load(tmp_path / "c", rename={"b": "z"})
    assert sorted(loaded) == ["a", "z"]
    assert loaded["a"] is loaded["z"]


@pytest.mark.parametrize("option", ["dtype", "device"])
def test_all_options_go_by_the_new_names(small, option):
    value = torch.bfloat16 if option == "dtype" else torch.device("meta")
    loaded = dsd.load(small, rename={"m/a": "n"}, select="n", **{option: {"n": value}})
    assert getattr(loaded["n"], option) == value


def test_the_state_of_an_optimizer_is_not_cast_under_another_name_either(path, saved):
    loaded = dsd.load(path, rename=[("optimizer/", "opt/")], dtype=torch.bfloat16)
    assert_same(loaded["opt"], saved["optimizer"])


def test_a_tied_tensor_is_cast_where_one_of_its_names_is_asked_for(tmp_path):
    weight = torch.ones(2)
    dsd.save(tmp_path / "c", {"a": weight, "b": weight})
    loaded = dsd.load(tmp_path / "c", select="b", dtype={"b": torch.bfloat16})
    assert loaded["b"].dtype == torch.bfloat16


# Names that people really have.

ODD = [
    *("", "a/b", "a%2Fb", "a@b", "@1", "@x00", "a.b", ".", "..", "a b", " ", "%", "%25"),
    *("*", "?", "[ab]", "[", "a\nb", "a\0b", "ä", "日本", "🙂", "e\u0301", "x" * 300),
    *("__metadata__", "state", "param_groups", "C:\\x", "-", "$", "a,b", "'", '"', "\\"),
]


def display(name: str) -> str:
    """How `dsd ls` prints it."""
    return name.replace("%", "%25").replace("@", "%40").replace("/", "%2F")


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("options") / "c"
    dsd.save(path, {"m": {name: torch.tensor(i) for i, name in enumerate(ODD)}})
    return path


def test_a_state_with_odd_names_comes_back(odd):
    assert_same(dsd.load(odd), {"m": {name: torch.tensor(i) for i, name in enumerate(ODD)}})


def test_a_state_with_odd_names_is_loaded_in_place(odd):
    state = {"m": {name: torch.tensor(-1) for name in ODD}}
    assert not dsd.load(odd, state).report
    assert_same(state, {"m": {name: torch.tensor(i) for i, name in enumerate(ODD)}})


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_a_root_key_with_an_odd_name_comes_back(tmp_path, name):
    dsd.save(tmp_path / "c", {name: torch.ones(2), "other": {name: 1}})
    assert_same(dsd.load(tmp_path / "c"), {name: torch.ones(2), "other": {name: 1}})


@pytest.mark.parametrize("name", [n for n in ODD if n not in ("", "*", "?")], ids=ascii)
def test_an_odd_name_selects_itself_alone(odd, name):
    loaded = dsd.load(odd, select=f"m/{display(name)}")
    assert_same(loaded, {"m": {name: torch.tensor(ODD.index(name))}})


@pytest.mark.parametrize("name", ["", "*", "?"], ids=ascii)
def test_a_name_that_is_a_glob_selects_itself_among_others(odd, name):
    assert name in dsd.load(odd, select=f"m/{display(name)}")["m"]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_an_odd_name_is_renamed_from_and_to(odd, name):
    fresh = dsd.load(odd, rename={f"m/{display(name)}": "new"})
    assert_same_tensor(fresh["new"], torch.tensor(ODD.index(name)))
    assert name not in fresh["m"]
    fresh = dsd.load(odd, rename={"m/ä": f"n/{display(name)}"})
    assert_same(fresh["n"], {name: torch.tensor(ODD.index("ä"))})


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_an_odd_name_is_reported_as_it_is_displayed(odd, name):
    state = {"m": {other: torch.tensor(-1) for other in ODD if other != name}}
    report = dsd.load(odd, state, strict=False).report
    assert report.unexpected == [f"m/{display(name)}"]


# Select (B144).

SELECTIONS: dict[str, tuple[Any, set[str]]] = {
    "one": ("model/encoder.weight", {"model/encoder.weight"}),
    "glob": ("model/encoder.*", {"model/encoder.weight", "model/encoder.bias"}),
    "branch": ("ema", {"ema/encoder.weight", "ema/steps"}),
    "branch with a slash": ("ema/", {"ema/encoder.weight", "ema/steps"}),
    "a star crosses slashes": (
        "*weight/exp_avg",
        {f"optimizer/state/{n}.weight/exp_avg" for n in ("encoder", "norm")},
    ),
    "several": (["ema/steps", "model/norm.bias"], {"ema/steps", "model/norm.bias"}),
    "a generator": ((x for x in ["ema/steps"]), {"ema/steps"}),
    "a set": ({"ema/steps"}, {"ema/steps"}),
    "question mark": ("ema/step?", {"ema/steps"}),
    "class": ("ema/[rst]teps", {"ema/steps"}),
    "value": ("step", {"step"}),
}


def names_of(value: Any, prefix: str = "") -> set[str]:
    if isinstance(value, dict):
        return {n for k, v in value.items() for n in names_of(v, f"{prefix}{k}/")}
    return {prefix.rstrip("/")}


@pytest.mark.parametrize(("select", "wanted"), SELECTIONS.values(), ids=SELECTIONS)
def test_a_selection_is_loaded_alone_and_nested_as_before(path, saved, select, wanted):
    loaded = dsd.load(path, select=select)
    assert names_of(loaded) == wanted
    for root, value in loaded.items():
        if isinstance(value, dict):
            for name in value.keys() & {"encoder.weight", "steps", "norm.bias"}:
                assert_same(value[name], saved[root][name])


NOTHING = {
    "no such name": ("model/encoder.weigth", "model/encoder.weight"),
    "no such branch": ("modle", None),
    "a part of a name": ("mode", None),
    "other case": ("MODEL", None),
    "a list": (["modell/encoder.weight", "x"], "model/encoder.weight"),
    "an empty list": ([], None),
    "an empty string": ("", None),
}


@pytest.mark.parametrize(("select", "close"), NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("into", [False, True], ids=["new", "in place"])
def test_a_selection_of_nothing_is_refused_with_close_names(path, state, select, close, into):
    with unchanged(state), pytest.raises(EntryNotFoundError, match="nothing .* matches") as caught:
        dsd.load(path, state if into else None, select=select)
    assert caught.value.code == "entry_not_found"
    assert close is None or close in caught.value.close_matches


def test_a_part_of_a_model_is_loaded_and_the_rest_of_it_is_left(path, saved, state):
    before = dsd.snapshot(state)
    report = dsd.load(path, state, select="model/encoder.*").report
    assert not report
    after = dsd.snapshot(state)
    for name in ("encoder.weight", "encoder.bias"):
        assert_same(after["model"].pop(name), saved["model"][name])
        before["model"].pop(name)
    assert_same(after, before)


def test_what_is_not_selected_may_be_missing_or_of_another_shape(path, saved):
    model = nn.Sequential(OrderedDict(encoder=nn.Linear(3, 4), head=nn.Linear(4, 9)))
    head = model.head.weight.detach().clone()
    assert not dsd.load(path, {"model": model}, select="model/encoder.*").report
    assert_same_tensor(model.encoder.weight.detach(), saved["model"]["encoder.weight"])
    assert_same_tensor(model.head.weight.detach(), head)


def test_what_is_selected_and_not_in_the_file_is_missing(path):
    model = nn.Sequential(OrderedDict(encoder=nn.Linear(3, 4), head=nn.Linear(4, 9)))
    with unchanged({"m": model}), pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": model}, select=["model/encoder.*", "model/head.weight"])
    assert caught.value.report.missing == ["model/head.weight"]


def test_the_entries_of_one_parameter_of_an_optimizer_are_loaded_alone(path, saved, state):
    before = dsd.snapshot(state)
    assert not dsd.load(path, state, select="optimizer/state/norm.bias").report
    after = dsd.snapshot(state)
    assert_same(
        after["optimizer"]["state"].pop("norm.bias"), saved["optimizer"]["state"]["norm.bias"]
    )
    before["optimizer"]["state"].pop("norm.bias")
    assert_same(after, before)


def test_one_option_of_a_group_of_an_optimizer_is_loaded_alone(path, saved, state):
    before = dsd.snapshot(state)
    assert not dsd.load(path, state, select="optimizer/param_groups/*/lr").report
    after = dsd.snapshot(state)
    for plain in (before, after):
        plain["lr"] = plain["optimizer"]["param_groups"]["encoder.weight"].pop("lr")
    assert after.pop("lr") == saved["optimizer"]["param_groups"]["encoder.weight"]["lr"]
    before.pop("lr")
    assert_same(after, before)


def test_one_entry_of_a_parameter_of_an_optimizer_is_loaded_alone(path, saved, state):
    before = dsd.snapshot(state)
    dsd.load(path, state, select="optimizer/state/norm.bias/exp_avg")
    after = dsd.snapshot(state)
    loaded = after["optimizer"]["state"]["norm.bias"].pop("exp_avg")
    assert_same(loaded, saved["optimizer"]["state"]["norm.bias"]["exp_avg"])
    before["optimizer"]["state"]["norm.bias"].pop("exp_avg")
    assert_same(after, before)


class Counting(torch.optim.SGD):
    """An optimizer with something of its own in its state."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        state = dict(state)
        self.count = state.pop("count")
        super().load_state_dict(state)


def test_the_own_values_of_an_optimizer_that_is_not_selected_are_left(tmp_path):
    model = network()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.count = 42
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    optimizer.count = 1
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer}, select="model")
    assert optimizer.count == 1


def test_a_scheduler_that_is_not_selected_is_left(path, state):
    before = state["scheduler"].state_dict()
    dsd.load(path, state, select="model")
    assert state["scheduler"].state_dict() == before


def test_values_of_a_state_that_are_not_selected_are_not_in_the_result(path, state):
    loaded = dsd.load(path, state, select="model")
    assert dict(loaded) == {}


def test_a_leaf_that_is_none_means_what_is_selected_there(tmp_path):
    dsd.save(tmp_path / "c", {"extra": {"a": 1, "b": torch.ones(3), "c": 2}})
    loaded = dsd.load(tmp_path / "c", {"extra": None}, select="extra/a")
    assert_same(dict(loaded), {"extra": {"a": 1}})


def test_a_value_that_is_selected_comes_back_though_a_tensor_beside_it_is_not(tmp_path):
    dsd.save(tmp_path / "c", {"extra": {"a": 1, "b": torch.ones(3)}, "w": torch.ones(1)})
    loaded = dsd.load(tmp_path / "c", {"w": torch.zeros(1)}, select=["extra/a", "w"])
    assert_same(dict(loaded), {"extra": {"a": 1}})


def test_a_list_is_selected_whole_or_not_at_all(small):
    assert_same(dsd.load(small, select="list/@1"), {"list": [torch.ones(1), 2]})
    assert "list" not in dsd.load(small, select="m")


def test_one_of_two_tied_names_can_be_selected(tmp_path):
    weight = torch.ones(2)
    dsd.save(tmp_path / "c", {"a": weight, "b": weight, "c": torch.zeros(1)})
    assert_same(dsd.load(tmp_path / "c", select="b"), {"b": weight})


# How much is read (B144).


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Forty tensors of 100,000 bytes, in two branches, and a packed optimizer-like one."""
    path = tmp_path_factory.mktemp("options") / "c"
    state = {
        branch: {f"w{i}": torch.full((25_000,), float(i)) for i in range(20)}
        for branch in ("model", "other")
    }
    dsd.save(path, state)
    return path


READS: dict[str, tuple[Any, int]] = {
    "one tensor": ("model/w3", 1),
    "prefix": ("model", 20),
    "glob": ("*/w1", 2),
    "all": (None, 40),
}


@pytest.mark.parametrize(("select", "count"), READS.values(), ids=READS)
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_a_selection_reads_its_own_bytes_and_little_more(wide, data_nbytes, select, count, verify):
    dsd.load(wide, select=select, verify=verify)
    assert 100_000 * count <= sum(data_nbytes) <= 110_000 * count + 50_000


def test_a_selection_into_a_state_reads_its_own_bytes_and_little_more(wide, data_nbytes):
    state = {"model": {f"w{i}": torch.zeros(25_000) for i in range(20)}}
    dsd.load(wide, state, select=["model/w3", "model/w4"])
    assert sum(data_nbytes) <= 250_000
    assert state["model"]["w4"][0] == 4


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(torch.zeros, id="tensors"),
        pytest.param(functools.partial(np.zeros, dtype=np.float32), id="arrays"),
    ],
)
def test_what_is_loaded_in_place_is_read_once(wide, data_nbytes, make):
    state = {branch: {f"w{i}": make(25_000) for i in range(20)} for branch in ("model", "other")}
    dsd.load(wide, state)
    assert sum(data_nbytes) <= 40 * 100_000 + 50_000


def test_what_a_module_loads_is_read_once(tmp_path, data_nbytes):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    dsd.save(tmp_path / "c", {"model": model})
    dsd.load(tmp_path / "c", {"model": model})
    assert sum(data_nbytes) <= 4 * sum(w.numel() for w in model.parameters()) + 20_000


def test_what_rename_leaves_out_is_not_read(wide, data_nbytes):
    dsd.load(wide, rename=lambda name: name if name == "model/w3" else None)
    assert sum(data_nbytes) <= 150_000


def test_a_comparison_that_fails_reads_no_data(wide, data_nbytes):
    with pytest.raises(MismatchError):
        dsd.load(wide, {"model": {"w0": torch.zeros(3)}})
    assert sum(data_nbytes) == 0


PEAK = """
import resource, sys
import torch
import dsdformat.torch as dsd

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

path, select = sys.argv[1], sys.argv[2]
dsd.load(path, select="model/small")
before = peak()
loaded = dsd.load(path, select=select)
print(peak() - before)
"""


def test_the_peak_memory_of_a_selection_is_about_what_is_selected(tmp_path, run_python):
    mib = 2**20
    state = {f"w{i}": torch.zeros(2 * mib) for i in range(10)}  # 80 MiB
    dsd.save(tmp_path / "c", {"model": {**state, "small": torch.ones(1)}})
    result = run_python(PEAK, tmp_path / "c", "model/w3")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 40 * mib


# Threads, types.


@pytest.mark.parametrize("threads", [None, 1, 2, 16])
def test_the_number_of_threads_changes_nothing(path, saved, state, threads):
    assert_same(dsd.load(path, threads=threads), saved)
    loaded = dsd.load(path, state, threads=threads)
    assert_same(dsd.snapshot({**state, **loaded}), saved)


class Pair(torch.Tensor):
    """Two tensors of one shape that look like one."""

    @staticmethod
    def __new__(cls, a: Any, b: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.size(), dtype=a.dtype)

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Pair(args[0].a, args[0].b)
        raise NotImplementedError(func)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("options") / "c"
    dsd.save(path, {"pair": Pair(torch.ones(2), torch.zeros(2)), "w": torch.ones(3)})
    return path


def test_a_type_that_is_not_allowed_is_refused_by_name(pairs):
    with pytest.raises(UnsupportedValueError, match=r"\$\.pair.*Pair.*not allowed") as caught:
        dsd.load(pairs)
    assert "types=[" in caught.value.hint


@pytest.mark.parametrize("wrap", [list, tuple, set, iter], ids=lambda wrap: wrap.__name__)
def test_a_type_that_is_allowed_is_made(pairs, wrap):
    loaded = dsd.load(pairs, types=wrap([Pair]))["pair"]
    assert type(loaded) is Pair
    assert_same_tensor(loaded.a, torch.ones(2))


def test_a_live_tensor_of_a_type_is_loaded_without_leave(pairs):
    """The class is the state's own; nothing is made by a name from the file."""
    live, w = Pair(torch.zeros(2), torch.ones(2)), torch.zeros(3)
    dsd.load(pairs, {"pair": live, "w": w})
    assert_same_tensor(live.a, torch.ones(2))
    assert_same_tensor(w, torch.ones(3))


def test_a_type_is_not_needed_where_it_is_not_selected(pairs):
    assert_same(dsd.load(pairs, select="w"), {"w": torch.ones(3)})


def test_a_type_that_is_not_allowed_in_a_state_changes_nothing(pairs):
    state = {"pair": None, "w": torch.zeros(3)}
    with pytest.raises(UnsupportedValueError):
        dsd.load(pairs, state)
    assert_same_tensor(state["w"], torch.zeros(3))


def test_numbers_in_the_state_are_no_reason_to_read(tmp_path, data_nbytes):
    dsd.save(tmp_path / "c", {"lr": 0.1, "w": torch.ones(100_000)})
    assert dsd.load(tmp_path / "c", select="lr") == {"lr": 0.1}
    assert sum(data_nbytes) == 0
    assert math.isclose(dsd.load(tmp_path / "c", {"lr": 1.0}, select="lr")["lr"], 0.1)


def test_load_needs_a_checkpoint(tmp_path):
    with pytest.raises(dsdformat.NotACheckpointError, match="does not exist"):
        dsd.load(tmp_path / "nothing", {"w": torch.zeros(1)})
