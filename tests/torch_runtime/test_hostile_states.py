"""Checkpoints that are valid files and say the wrong things: only errors of ours, nothing changed.

Whoever writes a file decides every kind, name, shape and attribute in it. What a live state gets is
compared before it is touched, no name is looked up in Python, and a state of any values that can
be saved comes back as it was.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import tempfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

import numpy as np  # noqa: E402
from exact import assert_same, assert_same_tensor, bits  # noqa: E402
from hypothesis import HealthCheck, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import (  # noqa: E402
    DsdError,
    MismatchError,
    Named,
    Scalar,
    Size,
    TensorSource,
    UnsupportedValueError,
)
from dsdformat.format.dtypes import DTYPES  # noqa: E402
from dsdformat.sources import Reference  # noqa: E402

# For the strategies that make values of every kind.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "properties"))

from strategies import arrays, key_values, np_scalars, texts  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


def fault(reason: str) -> pytest.MarkDecorator:
    """Mark what the package gets wrong today."""
    return pytest.mark.xfail(strict=True, reason=reason)


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Durability is not what these tests are about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


# Writing what no save would write


def source(tensor: Tensor, **options: Any) -> TensorSource:
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorSource.of(name, tuple(tensor.shape), bytes(bits(tensor).tolist()), **options)


def write(path: Path, tree: Mapping[str, Any]) -> None:
    """Write a tree as it is: the runtime for torch has no part in this."""

    def adapt(value: Any, place: Any) -> Any:
        return source(value) if isinstance(value, Tensor) else NotImplemented

    with dsdformat.create(path, adapt=adapt, threads=1) as writer:
        writer.add(dict(tree))
        writer.commit()


def composite(kind: Any, parts: Any) -> Any:
    """What stands for a tensor that is not one strided block."""
    return (Named("torch.composite", kind), parts)


def numpy_flavoured(tensor: Tensor) -> Any:
    return Reference(source(tensor), {"flavour": "numpy"})


COO = {
    "indices": torch.tensor([[0, 1], [1, 0]]),
    "values": torch.ones(2),
    "size": Size((2, 2)),
    "coalesced": True,
}
JUNK: dict[str, Any] = {
    "None": None,
    "bool": True,
    "int": 7,
    "float": float("nan"),
    "str": "exp_avg",
    "bytes": b"\x80\x04.",
    "empty list": [],
    "list": [1, "a"],
    "list of lists": [[1, 2], [3]],
    "list of dicts": [{}, {"a": 1}],
    "empty dict": {},
    "dict": {"a": 1},
    "int keys": {0: 1, 5: {}},
    "odd keys": {None: 1, (1, 2): 2, b"x": 3, frozenset(): 4},
    "deque": deque([1], 3),
    "set": {1, "a"},
    "dtype": Named("torch.dtype", "float32"),
    "name": Named("os", "system"),
    "scalar": Scalar("float32", b"\x00\x00\x80\x3f"),
    "scalar tensor": torch.tensor(3.0),
    "tensor": torch.ones(7),
    "tensor of another dtype": torch.ones(2, 3, dtype=torch.int16),
    "array": numpy_flavoured(torch.ones(5)),
    "dict of tensors": {"x": torch.ones(2)},
    "sparse tensor": composite("torch.sparse_coo", COO),
    "composite without parts": composite("torch.sparse_csr", {}),
    "composite of no kind": composite("os.system", {"command": "touch gone"}),
    "subclass": composite("torch.subclass", {"type": "os.system", "tensors": {"x": torch.ones(1)}}),
}
EACH_JUNK = pytest.mark.parametrize("junk", [pytest.param(v, id=k) for k, v in JUNK.items()])


# A live state, and what it looks like


class Box:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def live_state(seed: int = 0, steps: int = 2) -> dict[str, Any]:
    """A small training: modules, optimizers, a schedule, tensors, arrays, values."""
    torch.manual_seed(seed)
    model = nn.Sequential(OrderedDict(body=nn.Linear(3, 2), norm=nn.BatchNorm1d(2)))
    model.register_buffer("graph", torch.eye(2).to_sparse())
    optimizer = torch.optim.Adam(
        [{"params": [model.body.weight]}, {"params": [model.body.bias], "lr": 0.3}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "box": Box({"n": seed}),
        "x": torch.randn(2, 3),
        "sparse": torch.eye(3).to_sparse_csr(),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3) + seed,
        "rng": None,
        "step": steps,
    }


def picture(state: Mapping[str, Any]) -> Any:
    """Copies of all that is in a live state, and where its tensors lie."""
    model, optimizer = state["model"], state["optimizer"]
    tensors = [*model.parameters(), *model.buffers(), state["x"], state["sparse"]]
    tensors += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    where = [(id(t), t.data_ptr()) for t in tensors if t.layout is torch.strided]
    values = (
        dict(model.state_dict()),
        optimizer.state_dict(),
        state["scheduler"].state_dict(),
        state["box"].state,
        state["x"],
        state["sparse"],
        state["array"],
    )
    return copied(values), where, [id(t) for t in tensors]


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, copied(item)) for key, item in value.items())
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else copy.deepcopy(value)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a checkpoint of such a training holds, as plain values; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("good") / "checkpoint"
    dsd.save(folder, {**live_state(seed=1, steps=3), "rng": dsd.rng_state()})
    return dsd.load(folder)


def as_stored(value: Any) -> Any:
    """A plain value of `load` as a tree that `write` takes; containers are new."""
    if isinstance(value, np.ndarray):
        return numpy_flavoured(torch.from_numpy(value))
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        parts = {"indices": value._indices(), "values": value._values(), "size": Size(value.shape)}
        return composite("torch.sparse_coo", {**parts, "coalesced": value.is_coalesced()})
    if isinstance(value, Tensor) and value.layout is torch.sparse_csr:
        parts = {"crow_indices": value.crow_indices(), "col_indices": value.col_indices()}
        parts |= {"values": value.values(), "size": Size(value.shape)}
        return composite("torch.sparse_csr", parts)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, as_stored(item)) for key, item in value.items())
    return type(value)(map(as_stored, value)) if type(value) in (list, tuple) else value


def with_junk(good: Mapping[str, Any], place: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    """The tree of a good checkpoint with something else at one place."""
    tree = as_stored(dict(good))
    node = tree
    for step in place[:-1]:
        node = node[step]
    node[place[-1]] = junk
    return tree


def assert_refused(path: Path, state: Mapping[str, Any], **options: Any) -> DsdError:
    """Load, and check that this is an error of ours that changes nothing."""
    before = picture(state)
    with pytest.raises(DsdError) as caught:
        dsd.load(path, state, **options)
    assert_same(picture(state), before)
    assert len(str(caught.value)) < 20_000
    return caught.value


def test_the_good_checkpoint_is_loaded(path, good):
    write(path, as_stored(good))
    state = live_state()
    rest = dsd.load(path, state)
    assert_same(dict(state["model"].state_dict()), good["model"])
    assert_same_tensor(state["sparse"], good["sparse"])
    assert_same((rest["step"], state["array"]), (3, good["array"]))
    assert_same(dsd.load(path), good)


# Wrong kinds


FQN = "body.weight"
MAPPINGS = {"empty dict", "dict", "int keys", "odd keys", "dict of tensors"}
# Places where only one kind is right; and the kinds that cannot be told from it.
STRUCTURES: dict[tuple[Any, ...], set[str]] = {
    ("model",): set(),
    ("model", FQN): set(),
    ("model", "norm.num_batches_tracked"): set(),
    ("model", "graph"): {"sparse tensor"},
    ("optimizer",): set(),
    ("optimizer", "state"): {"empty dict"},
    ("optimizer", "state", FQN): MAPPINGS,
    ("optimizer", "param_groups"): {"empty dict"},
    ("optimizer", "param_groups", FQN): MAPPINGS,
    ("x",): set(),
    ("sparse",): {"composite without parts"},
    ("array",): set(),
}


def wrong_kinds(names: Any = None) -> list[Any]:
    return [
        pytest.param(place, JUNK[name], id=f"{'/'.join(map(str, place))}: {name}")
        for place, fine in STRUCTURES.items()
        for name in names or JUNK
        if name not in fine
    ]


def some_junk(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("junk", [pytest.param(JUNK[name], id=name) for name in names])


@pytest.mark.parametrize("flag", ["capturable", "fused"])
def test_a_flag_of_a_group_that_has_no_truth_is_no_flag(path, flag):
    model = nn.Linear(2, 2)
    stored = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    stored.step()
    stored.param_groups[0][flag] = torch.tensor([1.0, 2.0])
    dsd.save(path, {"model": model, "optimizer": stored})
    live = torch.optim.AdamW(model.parameters())
    live.param_groups[0][flag] = torch.tensor([0.0, 0.0])
    dsd.load(path, {"model": model, "optimizer": live})
    assert live.param_groups[0][flag].tolist() == [1, 2]
    assert {entry["step"].device.type for entry in live.state.values()} == {"cpu"}


@pytest.mark.parametrize(("place", "junk"), wrong_kinds())
def test_a_wrong_kind_is_refused_and_changes_nothing(path, good, place, junk):
    write(path, with_junk(good, place, junk))
    assert_refused(path, live_state())


@pytest.mark.parametrize(
    ("place", "junk"), wrong_kinds(["None", "list", "dict", "tensor", "sparse tensor"])
)
def test_a_wrong_kind_that_is_allowed_to_differ_leaves_the_rest_to_be_loaded(
    path, good, place, junk
):
    write(path, with_junk(good, place, junk))
    state = live_state()
    assert dsd.load(path, state, strict=False).report
    if place != ("model",):
        assert_same_tensor(state["model"].norm.bias, good["model"]["norm.bias"])


@some_junk("None", "int", "str", "list", "dict", "sparse tensor", "scalar")
def test_a_wrong_kind_in_place_of_a_float64_array_is_refused(path, junk):
    write(path, {"array": junk})
    live = np.zeros(3)
    with pytest.raises(DsdError):
        dsd.load(path, {"array": live})
    assert_same(live, np.zeros(3))


@some_junk("str", "list", "dict", "dict of tensors", "name")
def test_a_wrong_kind_in_place_of_a_tensor_that_an_optimizer_has_is_refused(path, good, junk):
    write(path, with_junk(good, ("optimizer", "state", FQN, "exp_avg"), junk))
    assert_refused(path, live_state())


@fault("what could be there in a tensor's place is taken: some optimizers count in plain numbers")
@some_junk("None", "int", "sparse tensor")
def test_what_may_be_there_in_place_of_a_tensor_of_an_optimizer_is_refused(path, good, junk):
    write(path, with_junk(good, ("optimizer", "state", FQN, "exp_avg"), junk))
    assert_refused(path, live_state())


@some_junk("dict", "int keys", "odd keys", "dict of tensors")
def test_a_state_without_the_tensors_that_an_optimizer_has_is_refused(path, good, junk):
    write(path, with_junk(good, ("optimizer", "state", FQN), junk))
    assert_refused(path, live_state())


@EACH_JUNK
@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_what_a_fresh_optimizer_gets_is_taken_refused_or_its_own_error(path, good, key, junk):
    write(path, with_junk(good, ("optimizer", "state", FQN, key), junk))
    with contextlib.suppress(DsdError, TypeError, ValueError, KeyError):
        dsd.load(path, live_state(steps=0))


def test_the_state_of_a_parameter_may_be_empty(path, good):
    write(path, with_junk(good, ("optimizer", "state", FQN), {}))
    state = live_state()
    dsd.load(path, state)
    assert state["model"].body.weight not in state["optimizer"].state


@some_junk("None", "int", "str", "dict", "tensor", "array", "set", "name")
def test_a_group_whose_parameters_are_no_list_is_refused(path, good, junk):
    write(path, with_junk(good, ("optimizer", "param_groups", FQN, "params"), junk))
    assert_refused(path, live_state())


@some_junk("empty dict", "dict", "int keys", "odd keys", "dict of tensors")
def test_a_group_that_lists_no_parameters_is_refused(path, good, junk):
    write(path, with_junk(good, ("optimizer", "param_groups", FQN), junk))
    assert_refused(path, live_state())


def test_an_optimizer_without_groups_is_refused(path, good):
    write(path, with_junk(good, ("optimizer", "param_groups"), {}))
    assert_refused(path, live_state())


@some_junk("list of lists", "list of dicts")
def test_a_group_whose_parameters_are_no_names_is_refused(path, good, junk):
    write(path, with_junk(good, ("optimizer", "param_groups", FQN, "params"), junk))
    assert_refused(path, live_state())


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(
            ["body.bias", FQN],
            id="one of another group",
        ),
        pytest.param(["body.bias", "nobody"], id="one that nobody has"),
        pytest.param([], id="none"),
    ],
)
def test_a_group_with_other_parameters_is_refused(path, good, params):
    write(path, with_junk(good, ("optimizer", "param_groups", "body.bias", "params"), params))
    assert_refused(path, live_state())


@some_junk("None", "int", "str", "list", "tensor", "sparse tensor", "name")
def test_a_shared_state_that_is_no_dict_is_refused(path, good, junk):
    write(path, with_junk(good, ("optimizer", "shared_state"), junk))
    assert_refused(path, live_state())


def test_a_dict_of_tensors_in_place_of_a_tuple_is_taken_or_refused(path, good):
    betas = ("optimizer", "param_groups", FQN, "betas")
    write(path, with_junk(good, betas, {"x": torch.ones(2)}))
    state = live_state()
    before = picture(state)
    try:
        dsd.load(path, state)
    except DsdError:
        assert_same(picture(state), before)


BY_PARTS = {"composite without parts", "composite of no kind", "subclass"}
ANYTHING: dict[str, tuple[Any, ...]] = {
    "lr": ("optimizer", "param_groups", FQN, "lr"),
    "new option": ("optimizer", "param_groups", FQN, "new"),
    "new state": ("optimizer", "state", FQN, "new"),
    "state of nobody": ("optimizer", "state", "nobody"),
    "group of a number": ("optimizer", "param_groups", 0),
    "other keys": ("optimizer", "own_keys"),
    "a key of nothing": ("optimizer", "nothing"),
    "extra state": ("model", "_extra_state"),
    "entry of nobody": ("model", "nobody"),
    "int key in a model": ("model", 5),
    "value": ("rng",),
    "object": ("box",),
}
# Half of them at each place, so that each is at half of the places.
SOMEWHERE = [
    pytest.param(where, JUNK[name], id=f"{place}: {name}")
    for i, (place, where) in enumerate(ANYTHING.items())
    for j, name in enumerate(name for name in JUNK if name not in BY_PARTS)
    if (i + j) % 2
]


@pytest.mark.parametrize(("place", "junk"), SOMEWHERE)
def test_whatever_lies_where_anything_may_lie_is_taken_or_refused(path, good, place, junk):
    write(path, with_junk(good, place, junk))
    state = live_state()
    before = picture(state)
    try:
        dsd.load(path, state)
    except DsdError:
        assert_same(picture(state), before)


@EACH_JUNK
def test_a_schedule_raises_what_its_own_load_state_dict_does(path, good, junk):
    write(path, with_junk(good, ("scheduler",), junk))
    state = live_state()
    with contextlib.suppress(DsdError, TypeError, ValueError, AttributeError, KeyError):
        dsd.load(path, state)
    scheduler = live_state()["scheduler"]
    assert state["scheduler"].optimizer is state["optimizer"]
    assert type(state["scheduler"]) is type(scheduler)


@EACH_JUNK
def test_whatever_a_file_holds_is_loaded_as_plain_values_or_refused(path, junk):
    write(path, {"a": {"b": [junk, {"c": junk}]}})
    try:
        loaded = dsd.load(path)
    except DsdError:
        return
    assert set(loaded) == {"a"}
    assert_plain(loaded)


PLAIN = (type(None), bool, int, float, complex, str, bytes, date, torch.dtype, torch.Size, Named)


def assert_plain(value: Any) -> None:
    """That a value holds nothing but what the format has."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            assert_plain(item)
            assert_plain(key)
    elif type(value) in (list, tuple, set, frozenset, deque):
        for item in value:
            assert_plain(item)
    else:
        known = (Tensor, np.ndarray, np.generic, *PLAIN)
        assert isinstance(value, known), type(value)


@EACH_JUNK
def test_a_random_state_that_is_none_changes_no_stream(path, junk):
    write(path, {"rng": {"torch": junk, "python": junk, "numpy": junk}})
    before = dsd.rng_state()
    try:
        dsd.set_rng_state(dsd.load(path)["rng"])
    except DsdError:
        pass
    else:
        pytest.fail("it was taken")
    finally:
        after = dsd.rng_state()
        dsd.set_rng_state(before)
    assert_same(after, before)


@EACH_JUNK
def test_a_model_is_not_built_from_something_else(path, junk):
    recipe = {"model": {"name": "linear", "kwargs": {"in_features": 2, "out_features": 2}}}
    write(path, {"model": junk, "recipes": recipe})
    with pytest.raises(DsdError):
        dsd.load_model(path, {"linear": nn.Linear})


# Tensors by parts

PARTS: dict[str, tuple[str, Any]] = {
    "no parts": ("torch.sparse_coo", {}),
    "unknown kind": ("torch.sparse_dok", COO),
    "kind of a module": ("torch.nn.Linear", {"in_features": 1, "out_features": 1}),
    "empty kind": ("", COO),
    "index out of bounds": ("torch.sparse_coo", {**COO, "indices": torch.tensor([[0, 9], [1, 0]])}),
    "negative index": ("torch.sparse_coo", {**COO, "indices": torch.tensor([[0, -9], [1, 0]])}),
    "float indices": ("torch.sparse_coo", {**COO, "indices": torch.zeros(2, 2)}),
    "values of another length": ("torch.sparse_coo", {**COO, "values": torch.ones(3)}),
    "huge size": ("torch.sparse_coo", {**COO, "size": Size((2**62, 2**62))}),
    "list as size": ("torch.sparse_coo", {**COO, "size": [2, 2]}),
    "more parts": ("torch.sparse_coo", {**COO, "dtype": Named("torch.dtype", "float32")}),
    "array as values": ("torch.sparse_coo", {**COO, "values": numpy_flavoured(torch.ones(2))}),
    "composite as values": ("torch.sparse_coo", {**COO, "values": composite("torch.nested", {})}),
    "int keys": ("torch.sparse_coo", {1: torch.ones(2)}),
    "columns out of bounds": (
        "torch.sparse_csr",
        {
            "crow_indices": torch.tensor([0, 1, 2, 3]),
            "col_indices": torch.tensor([0, 2**40, 1]),
            "values": torch.ones(3),
            "size": Size((3, 3)),
        },
    ),
    "rows that overrun": (
        "torch.sparse_csr",
        {
            "crow_indices": torch.tensor([0, 1, 2, 2**50]),
            "col_indices": torch.tensor([0, 1, 2]),
            "values": torch.ones(3),
            "size": Size((3, 3)),
        },
    ),
    "offsets out of bounds": (
        "torch.jagged",
        {"values": torch.ones(3, 2), "offsets": torch.tensor([0, 2, 99]), "jagged_dim": 1},
    ),
    "jagged dim out of bounds": (
        "torch.jagged",
        {"values": torch.ones(3, 2), "offsets": torch.tensor([0, 2, 3]), "jagged_dim": 9},
    ),
    "nested of nothing": ("torch.nested", {"tensors": []}),
    "nested of values": ("torch.nested", {"tensors": [1, 2]}),
    "subclass of os": (
        "torch.subclass",
        {
            "type": "os.system",
            "tensors": {"a": torch.ones(1)},
            "context": None,
            "size": Size((1,)),
            "stride": (1,),
        },
    ),
    "subclass by a lookalike": (
        "torch.subclass",
        {
            "type": "torch.nn.parameter.Parameter",
            "tensors": {"a": torch.ones(1)},
            "context": None,
            "size": Size((1,)),
            "stride": (1,),
        },
    ),
}
EACH_PARTS = pytest.mark.parametrize(
    ("kind", "parts"), [pytest.param(*value, id=name) for name, value in PARTS.items()]
)


@EACH_PARTS
def test_parts_that_make_no_tensor_are_refused_without_a_state(path, kind, parts):
    write(path, {"a": [{"b": composite(kind, parts)}]})
    with pytest.raises(DsdError):
        dsd.load(path)


@pytest.mark.parametrize(
    "name", ["no parts", "unknown kind", "index out of bounds", "array as values", "subclass of os"]
)
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(("rng",), id="value"),
        pytest.param(("box",), id="object"),
        pytest.param(("optimizer", "state", FQN, "more"), id="state of an optimizer"),
        pytest.param(("optimizer", "param_groups", FQN, "more"), id="option of an optimizer"),
    ],
)
def test_parts_that_make_no_tensor_are_refused_and_change_nothing(path, good, place, name):
    write(path, with_junk(good, place, composite(*PARTS[name])))
    assert_refused(path, live_state())


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(("model", "graph"), "index out of bounds", id="buffer, bounds"),
        pytest.param(("model", "graph"), "no parts", id="buffer, no parts"),
        pytest.param(("model", "graph"), "huge size", id="buffer, size"),
        pytest.param(("sparse",), "columns out of bounds", id="tensor, bounds"),
        pytest.param(("sparse",), "rows that overrun", id="tensor, rows"),
    ],
)
def test_parts_that_do_not_make_the_tensor_that_is_there_change_nothing(path, good, place, name):
    write(path, with_junk(good, place, composite(*PARTS[name])))
    assert_refused(path, live_state())


def test_parts_within_parts_without_end_are_refused(path):
    value: Any = torch.ones(1)
    for _ in range(40):
        parts = {"type": "x", "tensors": {"a": value}, "context": None}
        value = composite("torch.subclass", {**parts, "size": Size((1,)), "stride": (1,)})
    try:
        write(path, {"x": value})
    except DsdError:
        return
    with pytest.raises(DsdError):
        dsd.load(path)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param((Named("torch.composite", "torch.sparse_coo"),), id="one item"),
        pytest.param((Named("torch.composite", "torch.sparse_coo"), [1]), id="no dict"),
        pytest.param([Named("torch.composite", "torch.sparse_coo"), COO], id="list"),
        pytest.param((Named("torch.composites", "torch.sparse_coo"), COO), id="other kind of name"),
        pytest.param((COO, Named("torch.composite", "torch.sparse_coo")), id="other order"),
    ],
)
def test_what_only_resembles_a_tensor_by_parts_is_a_plain_value(path, value):
    write(path, {"x": value})
    assert type(dsd.load(path)["x"]) is type(value)


class Pair(torch.Tensor):
    """Two tensors; what it is made of may come from a file."""

    made: list[Any] = []

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Pair:
        Pair.made.append((sorted(inner), context))
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


PAIR_PARTS: dict[str, Any] = {
    "type": f"{Pair.__module__}.{Pair.__qualname__}",
    "tensors": {"a": torch.ones(2), "b": torch.zeros(2)},
    "context": None,
    "size": Size((2,)),
    "stride": (1,),
}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"type": "builtins.eval"}, id="another type"),
        pytest.param({"type": "Pair"}, id="name alone"),
        pytest.param({"type": 5}, id="no name"),
        pytest.param({"tensors": {"a": torch.ones(2)}}, id="a tensor less"),
        pytest.param({"tensors": {"a": 1, "b": 2}}, id="values"),
        pytest.param({"tensors": {"a": numpy_flavoured(torch.ones(2)), "b": 1}}, id="array"),
        pytest.param({"tensors": {}}, id="nothing"),
        pytest.param({"tensors": {"__class__": torch.ones(2)}}, id="odd name"),
        pytest.param({"size": Size((3,))}, id="another size"),
        pytest.param({"size": Size((2**62,))}, id="huge size"),
        pytest.param({"stride": (-1,)}, id="negative stride"),
        pytest.param({"stride": (1, 1)}, id="another stride"),
        pytest.param({"context": Named("os", "system")}, id="name as context"),
        pytest.param({"context": {"f": torch.ones(1)}}, id="tensor in the context"),
        pytest.param({"more": 1}, id="more parts"),
    ],
)
def test_an_allowed_subclass_is_not_made_from_other_parts(path, change):
    write(path, {"x": composite("torch.subclass", {**PAIR_PARTS, **change})})
    with pytest.raises(DsdError):
        dsd.load(path, types=[Pair])


def test_an_allowed_subclass_is_made_from_its_parts(path):
    write(path, {"x": composite("torch.subclass", PAIR_PARTS)})
    loaded = dsd.load(path, types=[Pair])["x"]
    assert type(loaded) is Pair
    assert_same_tensor(loaded.a, torch.ones(2))


def test_a_subclass_that_is_not_allowed_is_never_asked(path):
    write(path, {"x": composite("torch.subclass", PAIR_PARTS)})
    Pair.made.clear()
    with pytest.raises(UnsupportedValueError, match="types="):
        dsd.load(path)
    assert Pair.made == []


# Attributes of a tensor

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "order is a str": {"dim_order": "10"},
    "order is None": {"dim_order": None},
    "order is an int": {"dim_order": 1},
    "order is empty": {"dim_order": []},
    "order is too short": {"dim_order": [0]},
    "order is too long": {"dim_order": [2, 1, 0]},
    "order repeats": {"dim_order": [1, 1]},
    "order is negative": {"dim_order": [-1, -2]},
    "order is huge": {"dim_order": [2**63 - 1, 2**64 - 1]},
    "order is large int": {"dim_order": [2**70, 0]},
    "order is of floats": {"dim_order": [1.0, 0.0]},
    "order is of bools": {"dim_order": [True, False]},
    "order is a tuple": {"dim_order": (1, 0)},
    "order is nested": {"dim_order": [[1], [0]]},
    "order is a dict": {"dim_order": {"0": 1}},
    "order is row-major": {"dim_order": [0, 1]},
    "order is right": {"dim_order": [1, 0]},
    "flavour is unknown": {"flavour": "jax"},
    "flavour is empty": {"flavour": ""},
    "flavour is an int": {"flavour": 5},
    "flavour is a list": {"flavour": ["numpy"]},
    "flavour is None": {"flavour": None},
    "flavour is bytes": {"flavour": b"numpy"},
    "another attribute": {"device": "cuda:9", "requires_grad": True, "os.system": ["ls"]},
    "many": {f"a{n}": n for n in range(500)},
}
EACH_ATTRIBUTES = pytest.mark.parametrize(
    "attributes", [pytest.param(v, id=k) for k, v in ATTRIBUTES.items()]
)
MATRIX = torch.arange(6.0).reshape(2, 3)


@EACH_ATTRIBUTES
def test_attributes_are_hints_and_never_change_a_value(path, attributes):
    write(path, {"x": Reference(source(MATRIX), attributes)})
    assert_same_tensor(dsd.load(path)["x"], MATRIX)


@EACH_ATTRIBUTES
def test_attributes_do_not_count_for_a_tensor_that_is_there(path, attributes):
    write(path, {"x": Reference(source(MATRIX), attributes)})
    fresh = torch.zeros(2, 3)
    dsd.load(path, {"x": fresh})
    assert_same_tensor(fresh, MATRIX)
    assert fresh.stride() == (3, 1)


@EACH_ATTRIBUTES
def test_attributes_do_not_count_for_a_parameter_that_is_made(path, attributes):
    write(path, {"m": {"weight": Reference(source(MATRIX), attributes)}})
    with torch.device("meta"):
        fresh = nn.Linear(3, 2, bias=False)
    dsd.load(path, {"m": fresh})
    assert_same_tensor(fresh.weight, MATRIX)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_one_tensor_with_two_orders_has_one_value(path, mmap):
    one = source(MATRIX)
    tree = {"a": one, "b": Reference(one, {"dim_order": [1, 0]}), "c": Reference(one, {"x": 1})}
    write(path, {**tree, "d": Reference(one, {"flavour": "numpy"})})
    loaded = dsd.load(path, mmap=mmap)
    for name in "abc":
        assert_same_tensor(loaded[name], MATRIX)
    assert_same(loaded["d"], MATRIX.numpy())


@pytest.mark.parametrize("order", [[0], [1, 0], []], ids=repr)
def test_an_order_for_a_tensor_without_dims_is_ignored(path, order):
    write(path, {"x": Reference(source(torch.tensor(2.0)), {"dim_order": order})})
    assert_same_tensor(dsd.load(path)["x"], torch.tensor(2.0))


# Names of constants

NAMES = {
    "torch.dtype": ["float32", "object", "Tensor", "os.system", "", "float32\x00", "load"],
    "torch.layout": ["strided", "jagged", "sparse_coo", "nothing", "__class__"],
    "torch.memory_format": ["channels_last", "contiguous_format", "nothing"],
    "torch.device": [
        "cpu",
        "meta",
        "cuda:1",
        "cuda:-1",
        "cuda:",
        "nowhere:0",
        "",
        "cpu:x",
        "x" * 999,
    ]
    + ["cuda:99999999999999999999", "cpu:128", "cpu:0:0", "cuda:1.5", "CPU", "\x00", "мир"],
    "numpy.dtype": [
        "float32",
        "object",
        "O",
        "V8",
        "os.system",
        "<i4",
        "(2,3)f4",
        "",
        "datetime64",
    ],
    "torch.composite": ["torch.sparse_coo", "os.system"],
    "os.system": ["ls"],
    "builtins": ["eval", "__import__"],
    "torch.nn": ["Linear"],
}
EACH_NAME = pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, id=f"{kind} {name[:30]!r}")
        for kind, names in NAMES.items()
        for name in names
    ],
)


@EACH_NAME
def test_a_name_is_a_constant_of_its_kind_or_stays_a_name(path, kind, name):
    write(path, {"x": Named(kind, name), "y": [{"z": (Named(kind, name),)}]})
    before = set(sys.modules)
    try:
        found = dsd.load(path)["x"]
    except DsdError:
        return
    kinds = {"torch.dtype": torch.dtype, "torch.layout": torch.layout, "torch.device": torch.device}
    kinds |= {"torch.memory_format": torch.memory_format, "numpy.dtype": np.dtype}
    assert isinstance(found, Named) or type(found) is kinds[kind] or isinstance(found, kinds[kind])
    if isinstance(found, Named):
        assert found == Named(kind, name)
    assert not torch.cuda.is_initialized()
    assert {m for m in set(sys.modules) - before if not m.startswith("torch.")} <= {"ml_dtypes"}


# Dtypes


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_of_the_format_is_loaded_or_refused_by_name(path, name):
    data = bytes(range(4 * DTYPES[name].itemsize))
    write(path, {"x": TensorSource.of(name, (4,), data), "other": torch.ones(2)})
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        found = dsd.load(path)["x"]
        assert (found.dtype, found.shape) == (dtype, (4,))
        assert bytes(bits(found).tolist()) == data
    else:
        with pytest.raises(UnsupportedValueError, match=name) as caught:
            dsd.load(path)
        assert caught.value.code == "unsupported_dtype"
    assert_same(dsd.load(path, select="other"), {"other": torch.ones(2)})


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_tensor_of_any_other_dtype_is_refused_in_place(path, name):
    data = bytes(2 * DTYPES[name].itemsize)
    write(path, {"x": TensorSource.of(name, (2,), data)})
    fresh = torch.ones(2, dtype=torch.float32 if name != "float32" else torch.float64)
    with pytest.raises(DsdError):
        dsd.load(path, {"x": fresh})
    assert_same_tensor(fresh, torch.ones_like(fresh))


LACKING = [name for name in sorted(DTYPES) if not isinstance(getattr(torch, name, 0), torch.dtype)]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_an_array_of_every_dtype_of_the_format_is_saved_and_loaded(path, name):
    import dsdformat.numpy as side

    width = DTYPES[name].itemsize
    array = np.arange(4 * width, dtype=np.uint8).view(side._DTYPES[name])
    dsd.save(path, {"x": array})
    assert_same(dsd.load(path), {"x": array})


# Arrays that are there


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        pytest.param(np.arange(3.0), np.zeros(6)[::2], id="every second"),
        pytest.param(np.arange(6.0).reshape(2, 3), np.zeros((3, 2)).T, id="transposed"),
        pytest.param(np.array(2.5), np.array(0.0), id="no dims"),
        pytest.param(np.arange(3) > 1, np.zeros(3, bool), id="bool"),
        pytest.param(
            np.arange(3, dtype=">i4"),
            np.zeros(3, dtype=">i4"),
            id="big-endian",
        ),
    ],
)
def test_an_array_is_loaded_in_place(path, stored, live):
    dsd.save(path, {"x": stored})
    dsd.load(path, {"x": live})
    assert live.tolist() == stored.tolist()
    assert live.dtype == stored.dtype


def test_an_array_that_cannot_be_written_to_is_refused(path):
    live = np.zeros(3)
    live.flags.writeable = False
    write(path, {"x": numpy_flavoured(torch.ones(3).double())})
    with pytest.raises(MismatchError):
        dsd.load(path, {"x": live})
    assert_same(live, np.zeros(3))


# Shapes

SHAPES = [
    (0, 2**62),
    (2**62, 0),
    (0, 2**31, 2**31),
    (2**20, 0, 2**20, 2**20),
    (0,),
    (0,) * 64,
    (1,) * 64,
    (1,) * 63 + (3,),
    (),
]
EACH_SHAPE = pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{len(shape)}d {shape[:4]}"
)


def empty_source(shape: tuple[int, ...], **options: Any) -> TensorSource:
    count = 0 if 0 in shape else int(np.prod(shape, dtype=object))
    return TensorSource.of("uint8", shape, b"\x07" * count, **options)


@EACH_SHAPE
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_a_shape_without_elements_may_be_huge(path, shape, mmap):
    write(path, {"x": empty_source(shape)})
    try:
        found = dsd.load(path, mmap=mmap)["x"]
    except DsdError:
        return
    assert tuple(found.shape) == shape


@EACH_SHAPE
def test_an_array_without_elements_may_be_huge(path, shape):
    write(path, {"x": empty_source(shape, attributes={"flavour": "numpy"})})
    try:
        found = dsd.load(path)["x"]
    except DsdError:
        return
    assert found.shape == shape


@EACH_SHAPE
@pytest.mark.parametrize("order", ["reversed", "rolled"])
def test_a_huge_shape_may_have_an_order(path, shape, order):
    dims = list(range(len(shape)))
    dims = dims[::-1] if order == "reversed" else dims[1:] + dims[:1]
    write(path, {"x": empty_source(shape, attributes={"dim_order": dims})})
    try:
        found = dsd.load(path)["x"]
    except DsdError:
        return
    assert tuple(found.shape) == shape


@EACH_SHAPE
def test_a_huge_shape_is_refused_in_place_and_left_out_if_that_is_allowed(path, shape):
    write(path, {"x": empty_source(shape), "m": {"weight": empty_source(shape)}})
    state = {"x": torch.ones(3, dtype=torch.uint8), "m": nn.Linear(2, 2, bias=False)}
    with pytest.raises(MismatchError):
        dsd.load(path, state)
    dsd.load(path, state, strict=False)
    assert_same_tensor(state["x"], torch.ones(3, dtype=torch.uint8))


def made_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many elements each tensor has that `torch.empty` makes."""
    sizes: list[int] = []
    original = torch.empty

    def noting(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(torch, "empty", noting)
    return sizes


def test_a_large_tensor_that_does_not_fit_is_not_read(path, monkeypatch):
    """With `strict=False`, a mismatch costs neither memory nor time."""
    write(path, {"x": torch.zeros(1 << 20), "y": torch.ones(1)})
    state = {"x": torch.ones(3), "y": torch.zeros(1)}
    sizes = made_sizes(monkeypatch)
    dsd.load(path, state, strict=False)
    assert max(sizes, default=0) < 1 << 20
    assert_same_tensor(state["x"], torch.ones(3))


def test_a_tensor_that_is_read_in_place_is_not_made_a_second_time(path, monkeypatch):
    write(path, {"x": torch.zeros(1 << 20)})
    state = {"x": torch.ones(1 << 20)}
    sizes = made_sizes(monkeypatch)
    dsd.load(path, state)
    assert max(sizes, default=0) < 1 << 20
    assert_same_tensor(state["x"], torch.zeros(1 << 20))


# Names of entries

ODD_NAMES = ["", ".", "..", "../../etc/passwd", "/", "a/b", "%", "@", "@1", "\x00", "\n", "\x1b[2J"]
ODD_NAMES += [
    "__class__",
    "__dict__",
    "_parameters",
    "forward",
    "training",
    "x" * 5000,
    "é",
    "\u202e",
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: repr(name[:20]))
def test_an_entry_of_any_name_is_unexpected_and_sets_nothing(path, good, name):
    state = live_state()
    attributes = {key: id(value) for key, value in vars(state["model"]).items()}
    write(path, with_junk(good, ("model", name), torch.ones(2)))
    error = assert_refused(path, state)
    assert isinstance(error, MismatchError)
    assert len(error.report.unexpected) == 1
    dsd.load(path, state, strict=False)
    assert {key: id(value) for key, value in vars(state["model"]).items()} == attributes


@pytest.mark.parametrize("name", ["\x1b[2J\x1b[31mred", "a\rb", "\x9b2J", "\x07"], ids=repr)
def test_an_error_prints_no_control_characters_of_a_file(path, good, name):
    write(path, with_junk(good, ("model", name), torch.ones(2)))
    text = str(assert_refused(path, live_state()))
    assert [c for c in text if ord(c) < 32 and c != "\n" or 127 <= ord(c) < 160] == []


def test_many_unexpected_entries_are_counted_and_not_all_listed(path, good):
    tree = as_stored(good)
    tree["model"].update({f"layer.{n}.weight": torch.ones(1) for n in range(500)})
    write(path, tree)
    error = assert_refused(path, live_state())
    assert isinstance(error, MismatchError)
    assert len(error.report.unexpected) == 500
    assert "500" in str(error)
    assert str(error).count("layer.") <= 12


def test_entries_of_long_names_make_no_long_error(path, good):
    tree = as_stored(good)
    tree["model"].update({f"{n}" + "x" * 50_000: torch.ones(1) for n in range(3)})
    write(path, tree)
    assert_refused(path, live_state())


def test_a_value_is_nested_as_deeply_as_the_format_allows(path):
    value: Any = torch.ones(1)
    depth = 0
    while depth < 200:
        try:
            write(path.parent / str(depth), {"x": value})
        except DsdError:
            break
        value, depth = ([value] if depth % 2 else {"a": value}), depth + 1
    deepest = path.parent / str(depth - 1)
    assert 50 < depth < 200
    found = dsd.load(deepest)["x"]
    for level in range(depth - 2, -1, -1):
        found = found[0] if level % 2 else found["a"]
    assert_same_tensor(found, torch.ones(1))
    with pytest.raises(DsdError):
        dsd.load(deepest, {"x": torch.zeros(1)})


# Ties that no state has


@fault("moments that a file ties are tied, as a counter that parameters share must be")
def test_an_optimizer_s_tensors_that_a_file_ties_are_made_apart(path, good):
    """One memory for the moments of two parameters would mix them in the next step."""
    shared = source(torch.ones(2, 2))
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    optimizer = torch.optim.Adam(model.parameters())
    names = ["a.weight", "b.weight"]
    entry = {"step": source(torch.tensor(1.0)), "exp_avg": shared, "exp_avg_sq": shared}
    group = {"params": names, "lr": 0.1}
    write(
        path,
        {
            "model": {name: torch.zeros(2, 2) for name in names},
            "optimizer": {
                "state": {name: dict(entry) for name in names},
                "param_groups": OrderedDict({names[0]: group}),
            },
        },
    )
    dsd.load(path, {"model": model, "optimizer": optimizer})
    tensors = [
        state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    assert len({tensor.data_ptr() for tensor in tensors}) == 4


def test_parameters_that_a_file_ties_are_read_into_two_memories(path):
    shared = source(torch.ones(2, 2))
    write(path, {"m": {"0.weight": shared, "1.weight": shared}})
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    dsd.load(path, {"m": model})
    assert model[0].weight.data_ptr() != model[1].weight.data_ptr()
    assert_same_tensor(model[1].weight, torch.ones(2, 2))


def test_parameters_on_meta_that_a_file_ties_get_two_memories(path):
    shared = source(torch.ones(2, 2))
    write(path, {"m": {"0.weight": shared, "1.weight": shared}})
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    dsd.load(path, {"m": model})
    assert model[0].weight.data_ptr() != model[1].weight.data_ptr()


# Nothing is run


def test_loading_a_file_of_names_and_code_runs_and_imports_nothing(path, tmp_path):
    marker = tmp_path / "ran"
    code = f"__import__('os').mkdir({str(marker)!r})"
    pickled = b"cos\nmkdir\n(V" + str(marker).encode() + b"\ntR."
    evil = {
        "model": {"_extra_state": pickled, "weight": torch.ones(2, 2), "bias": torch.ones(2)},
        "recipes": {"model": {"name": "os.mkdir", "kwargs": {"path": str(marker)}}},
        "rng": {"python": (3, (code,), None)},
        "scheduler": {"lr_lambdas": [code], "__class__": code, "__reduce__": [code]},
        "values": [Named("os", "mkdir"), Named("torch.dtype", code), code, pickled],
        "sub": composite(
            "torch.subclass",
            {
                "type": "os.mkdir",
                "tensors": {"path": torch.ones(1)},
                "context": str(marker),
                "size": Size((1,)),
                "stride": (1,),
            },
        ),
    }
    write(path, evil)
    script = (
        "import sys, torch, dsdformat.torch as dsd\n"
        "from dsdformat import DsdError\n"
        "path = sys.argv[1]\n"
        "calls = [lambda: dsd.load(path), lambda: dsd.load(path, select='[!s]*'),\n"
        "    lambda: dsd.load(path, {'model': torch.nn.Linear(2, 2), 'rng': None}, strict=False),\n"
        "    lambda: dsd.load_model(path, {'linear': torch.nn.Linear}),\n"
        "    lambda: dsd.set_rng_state(dsd.load(path, select='rng')['rng'])]\n"
        "sys.addaudithook(lambda event, args: sys.exit(event) if event in\n"
        "    ('os.mkdir', 'os.system', 'pickle.find_class', 'subprocess.Popen') else None)\n"
        "for call in calls:\n"
        "    try: call()\n"
        "    except DsdError as error: print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


# Random states


def is_printable(dtype: torch.dtype) -> bool:
    """Whether hypothesis can show a tensor of this dtype; those of parts of a byte fail."""
    try:
        repr(torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype))
    except (NotImplementedError, RuntimeError):
        return False
    return True


KNOWN = [getattr(torch, name, None) for name in sorted(DTYPES)]
TORCH_DTYPES = [one for one in KNOWN if isinstance(one, torch.dtype) and is_printable(one)]


def with_random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))
    if dtype == torch.bool:
        data = data % 2
    return (
        data.view(dtype).reshape(shape)
        if count
        else torch.empty(0).byte().view(dtype).reshape(shape)
    )


LAYOUTS: dict[str, Any] = {
    "packed": lambda x: x,
    "transposed": lambda x: x.t() if x.ndim == 2 else x,
    "permuted": lambda x: x.permute(*range(1, x.ndim), 0) if x.ndim > 1 else x,
    "every second": lambda x: x[::2] if x.ndim else x,
    "part": lambda x: x.narrow(-1, 0, x.shape[-1] // 2) if x.ndim else x,
    "expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "parameter": lambda x: nn.Parameter(
        x, requires_grad=x.is_floating_point() and x.element_size() > 1
    ),
    "conjugate": lambda x: x.conj() if x.dtype in (torch.complex64, torch.complex128) else x,
    "negative": lambda x: torch._neg_view(x) if x.dtype in (torch.float32, torch.int16) else x,
}


@st.composite
def tensors(draw: Any) -> Tensor:
    """Tensors of every dtype that torch has, with any bits, any shape, and any strides."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    tensor = with_random_bits(dtype, shape, draw(st.integers(0, 2**32 - 1)))
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](tensor)


constants = st.sampled_from(
    [torch.float32, torch.bool, torch.strided, torch.sparse_coo, torch.preserve_format]
    + [torch.channels_last, torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]
)
sizes = st.lists(st.integers(0, 2**63 - 1), max_size=3).map(torch.Size)
atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary(max_size=6),
    st.complex_numbers(), st.dates(), st.timedeltas(), constants, sizes,
)  # fmt: skip
known_arrays = arrays(max_side=3).filter(
    lambda array: array.dtype.names or array.dtype.name not in LACKING
)
leaves = st.one_of(tensors(), tensors(), known_arrays, np_scalars(), atoms)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(key_values, inner, max_size=3),
        st.dictionaries(key_values, inner, max_size=3, dict_class=OrderedDict),
        st.dictionaries(texts, inner, max_size=2).map(lambda pairs: defaultdict(None, pairs)),
        st.builds(deque, items, st.none() | st.integers(3, 9)),
        st.sets(key_values, max_size=3),
        st.frozensets(key_values, max_size=3),
    )


states = st.dictionaries(texts, st.recursive(leaves, containers, max_leaves=8), max_size=4)
quickly = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@quickly
@given(state=states, codec=st.sampled_from(["raw", "zstd", "planes+zstd"]))
@example(state={"": {"": [], "a": ()}}, codec="raw")
@example(state={"x": nn.Parameter(torch.ones(2).expand(3, 2))}, codec="raw")
@example(state={"x": torch.zeros((), dtype=torch.complex64).conj()}, codec="zstd")
def test_a_state_of_anything_comes_back_with_its_types_and_bits(state, codec):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        root = dsd.save(path, state, codec=codec)
        loaded = dsd.load(path)
        assert_same(loaded, state)
        assert dsdformat.verify(path).ok
        again = Path(folder) / "again"
        assert dsd.save(again, loaded, codec=codec) == root


@quickly
@given(state=states)
def test_a_snapshot_of_anything_is_what_is_saved(state):
    copied = dsd.snapshot(state)
    assert_same(copied, state)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        root = dsd.save(path, state)
        assert dsd.save(path, copied, overwrite=True) == root


def blank(value: Any) -> Any:
    """The same state with other bits in its tensors and arrays, and None in place of values."""
    if isinstance(value, Tensor):
        other = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        if 0 in value.stride():  # its elements share memory
            other = torch.empty(value.shape, dtype=value.dtype)
        if other.numel():
            flat = torch.empty(0, dtype=torch.uint8).set_(other.untyped_storage())
            flat.fill_(1)
        return other
    if isinstance(value, np.ndarray):
        return np.zeros(value.shape, value.dtype.newbyteorder("="))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, blank(item)) for key, item in value.items())
    return None


def joined(live: Any, rest: Any) -> Any:
    """What was loaded in place, and what was given back, as one state."""
    if isinstance(live, (Tensor, np.ndarray)):
        return live
    if type(live) in (dict, OrderedDict) and live:
        rest = {} if rest is None else rest
        return type(live)((key, joined(item, rest.get(key))) for key, item in live.items())
    return rest


nested_dicts = st.dictionaries(
    texts,
    st.recursive(
        st.one_of(tensors(), known_arrays.filter(lambda array: not array.dtype.names), atoms),
        lambda inner: st.dictionaries(texts, inner, min_size=1, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@quickly
@given(state=nested_dicts)
def test_a_state_of_anything_is_loaded_in_place(state):
    live = blank(state)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        dsd.save(path, state)
        loaded = dsd.load(path, live)
    assert not loaded.report
    assert_same(joined(live, dict(loaded)), state)


@quickly
@given(data=st.data())
def test_names_of_one_memory_are_one_tensor_after_loading_and_others_are_not(data):
    pool = data.draw(st.lists(tensors().filter(lambda t: t.numel() > 0), min_size=1, max_size=3))
    picks = data.draw(st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=6))
    state = {"items": [pool[pick] for pick in picks]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        dsd.save(path, state)
        loaded = dsd.load(path)["items"]
    for i, one in enumerate(picks):
        for j, other in enumerate(picks):
            assert (loaded[i] is loaded[j]) == (one == other)
            assert (loaded[i].data_ptr() == loaded[j].data_ptr()) == (one == other)
