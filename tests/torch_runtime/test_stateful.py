"""Objects with a state dict of their own: schedulers, scalers, metrics, data loaders, trainers.

`torch.save(thing.state_dict())` and `load_state_dict` are the measure: an object that is loaded
goes on as the one that was saved, and what pickle would have to store is refused with its place.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

import numpy as np  # noqa: E402
from exact import assert_same, assert_same_tensor  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim import SGD, Optimizer, lr_scheduler  # noqa: E402
from torch.optim.swa_utils import SWALR  # noqa: E402

import dsdformat.torch as dsd  # noqa: E402
from dsdformat import DsdError, MismatchError, UnsupportedValueError  # noqa: E402


def fault(reason: str) -> pytest.MarkDecorator:
    """Mark what the package gets wrong today."""
    return pytest.mark.xfail(strict=True, reason=reason)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


# Learning rates

Make = Callable[[Optimizer], Any]


def optimizer_of(model: nn.Module, lr: Any = 0.1) -> Optimizer:
    bias = {"params": [model.bias], "lr": lr * 3}
    return SGD([{"params": [model.weight]}, bias], lr=lr, momentum=0.9)


def advance(optimizer: Optimizer, scheduler: Any, steps: int) -> list[Any]:
    """Step both; return the learning rates, and momenta, of all groups after each step."""
    seen = []
    for step in range(steps):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0 + (step % 2) * 0.1)
        else:
            scheduler.step()
        seen.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
    return seen


class Warmup:
    """A schedule with a state of its own."""

    def __init__(self, steps: int, peak: float = 1.0) -> None:
        self.steps, self.peak, self.calls = steps, peak, 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return min(self.peak, (epoch + 1) / self.steps) / math.sqrt(1 + self.calls)


def sequential(optimizer: Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, 4),
        lr_scheduler.ExponentialLR(optimizer, 0.7),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3, 6])


def chained(optimizer: Optimizer) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=4),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def plateau(optimizer: Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, patience=1, cooldown=1)


def cyclic(mode: str) -> Make:
    def make(optimizer: Optimizer) -> Any:
        return lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3, mode=mode, gamma=0.9)

    return make


swalr = pytest.mark.skipif(
    not hasattr(SWALR, "_set_anneal_func"), reason="this torch keeps a function in SWALR's state"
)
SCHEDULERS = [
    pytest.param(lambda o: lr_scheduler.StepLR(o, 3), id="StepLR"),
    pytest.param(lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 6], 0.5), id="MultiStepLR"),
    pytest.param(lambda o: lr_scheduler.MultiStepLR(o, [3, 6, 6], 0.5), id="MultiStepLR, twice"),
    pytest.param(lambda o: lr_scheduler.ConstantLR(o, 0.5, 6), id="ConstantLR"),
    pytest.param(lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=7), id="LinearLR"),
    pytest.param(lambda o: lr_scheduler.ExponentialLR(o, 0.9), id="ExponentialLR"),
    pytest.param(lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0), id="PolynomialLR"),
    pytest.param(lambda o: lr_scheduler.CosineAnnealingLR(o, 6), id="CosineAnnealingLR"),
    pytest.param(
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
        id="CosineAnnealingWarmRestarts",
    ),
    pytest.param(lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e), id="LambdaLR"),
    pytest.param(
        lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1 / (e + 1)]),
        id="LambdaLR of two functions",
    ),
    pytest.param(lambda o: lr_scheduler.LambdaLR(o, Warmup(4)), id="LambdaLR of an object"),
    pytest.param(
        lambda o: lr_scheduler.LambdaLR(o, [Warmup(4), lambda e: 1.0]),
        id="LambdaLR of an object and a function",
    ),
    pytest.param(lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9), id="MultiplicativeLR"),
    pytest.param(
        lambda o: lr_scheduler.MultiplicativeLR(o, Warmup(2, 0.9)),
        id="MultiplicativeLR of an object",
    ),
    pytest.param(lambda o: lr_scheduler.OneCycleLR(o, 0.3, 20), id="OneCycleLR"),
    pytest.param(
        lambda o: lr_scheduler.OneCycleLR(
            o, [0.3, 0.4], 20, anneal_strategy="linear", three_phase=True
        ),
        id="OneCycleLR in three phases",
    ),
    pytest.param(cyclic("triangular"), id="CyclicLR"),
    pytest.param(cyclic("triangular2"), id="CyclicLR triangular2"),
    pytest.param(cyclic("exp_range"), id="CyclicLR exp_range"),
    pytest.param(
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, scale_fn=Warmup(3)),
        id="CyclicLR of an object",
    ),
    pytest.param(
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, scale_fn=lambda x: 0.5),
        id="CyclicLR of a function",
    ),
    pytest.param(plateau, id="ReduceLROnPlateau"),
    pytest.param(lambda o: SWALR(o, 0.05, 5), id="SWALR", marks=swalr),
    pytest.param(lambda o: SWALR(o, 0.05, 5, "linear"), id="SWALR linear", marks=swalr),
    pytest.param(sequential, id="SequentialLR"),
    pytest.param(chained, id="ChainedScheduler"),
]


def run_of(make: Make, steps: int, lr: Any = 0.1) -> dict[str, Any]:
    torch.manual_seed(steps)
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model, lr)
    scheduler = make(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    advance(optimizer, scheduler, steps)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize("steps", [0, 1, 4, 7])
@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_loaded_schedule_goes_on_as_the_saved_one(path, make, steps):
    saved, fresh = run_of(make, steps), run_of(make, 0)
    dsd.save(path, saved)
    rest = dsd.load(path, fresh)
    assert rest == {}
    assert_same(fresh["scheduler"].state_dict(), saved["scheduler"].state_dict())
    assert_same(
        advance(fresh["optimizer"], fresh["scheduler"], 5),
        advance(saved["optimizer"], saved["scheduler"], 5),
    )


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_stored_schedule_is_what_its_state_dict_says(path, make):
    saved = run_of(make, 4)
    wanted = copy.deepcopy(saved["scheduler"].state_dict())
    dsd.save(path, saved)
    assert_same(saved["scheduler"].state_dict(), wanted)
    assert_same(dsd.load(path)["scheduler"], wanted)


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_schedule_goes_on_over_one_that_is_further(path, make):
    saved, further = run_of(make, 3), run_of(make, 6)
    dsd.save(path, saved)
    dsd.load(path, further)
    assert_same(
        advance(further["optimizer"], further["scheduler"], 5),
        advance(saved["optimizer"], saved["scheduler"], 5),
    )


def test_a_learning_rate_that_is_a_tensor_stays_the_tensor_that_the_schedule_changes(path):
    def run(steps: int) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(
            model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64), foreach=False
        )
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    saved, fresh = run(3), run(0)
    dsd.save(path, saved)
    dsd.load(path, fresh)
    for state in (saved, fresh):
        state["optimizer"].step()
        state["scheduler"].step()
    lrs = [state["optimizer"].param_groups[0]["lr"] for state in (saved, fresh)]
    assert_same_tensor(lrs[1], lrs[0])
    assert_same(fresh["model"].state_dict(), saved["model"].state_dict())
    assert_same(fresh["scheduler"].get_last_lr(), saved["scheduler"].get_last_lr())


def test_a_schedule_is_saved_without_its_optimizer(path):
    saved, fresh = run_of(sequential, 4), run_of(sequential, 0)
    dsd.save(path, {"scheduler": saved["scheduler"]})
    dsd.load(path, {"scheduler": fresh["scheduler"]})
    assert_same(fresh["scheduler"].state_dict(), saved["scheduler"].state_dict())


def test_schedulers_in_a_list_are_each_loaded(path):
    saved, fresh = run_of(chained, 3), run_of(chained, 0)
    for run in (saved, fresh):
        run["second"] = lr_scheduler.StepLR(run["optimizer"], 7)
    both = [[run["scheduler"], run["second"]] for run in (saved, fresh)]
    dsd.save(path, {"schedulers": both[0]})
    dsd.load(path, {"schedulers": both[1]})
    for one, other in zip(*both, strict=True):
        assert_same(other.state_dict(), one.state_dict())


class Traced:
    """A schedule that refers to something that no file can hold."""

    def __init__(self, log: Any) -> None:
        self.log = log

    def __call__(self, epoch: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("make", "where"),
    [
        pytest.param(
            lambda o: lr_scheduler.LambdaLR(o, Traced(print)),
            "$.scheduler.lr_lambdas[0].log",
            id="LambdaLR",
        ),
        pytest.param(
            lambda o: lr_scheduler.LambdaLR(o, [lambda e: 1.0, Traced(open)]),
            "$.scheduler.lr_lambdas[1].log",
            id="second of two",
        ),
        pytest.param(
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.StepLR(o, 3), lr_scheduler.LambdaLR(o, Traced(nn.ReLU))],
                milestones=[2],
            ),
            "$.scheduler._schedulers[1].lr_lambdas[0].log",
            id="inside of SequentialLR",
        ),
    ],
)
def test_a_schedule_that_holds_a_function_is_refused_with_its_place(path, make, where):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(path, {"scheduler": run_of(make, 0)["scheduler"]})
    assert caught.value.path_in_tree == where
    assert not path.exists()


def test_a_schedule_with_an_attribute_of_the_users_that_is_a_function_is_refused(path):
    scheduler = run_of(chained, 0)["scheduler"]
    scheduler.on_step = lambda: None
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(path, {"scheduler": scheduler})
    assert caught.value.path_in_tree == "$.scheduler.on_step"


# Other objects of torch


def test_a_gradient_scaler_goes_on(path):
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)

    def advance_scaler(scaler: torch.amp.GradScaler, steps: int) -> float:
        weight = nn.Parameter(torch.ones(2))
        optimizer = SGD([weight], lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    saved, fresh = scaler(), scaler()
    advance_scaler(saved, 5)
    dsd.save(path, {"scaler": saved})
    dsd.load(path, {"scaler": fresh})
    assert_same(fresh.state_dict(), saved.state_dict())
    assert advance_scaler(fresh, 2) == advance_scaler(saved, 2)


def test_a_gradient_scaler_that_is_off_is_saved_and_loaded(path):
    saved = torch.amp.GradScaler("cpu", enabled=False)
    dsd.save(path, {"scaler": saved})
    dsd.load(path, {"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    assert dsd.load(path) == {"scaler": {}}


def test_an_object_that_refuses_a_state_says_so_itself(path):
    dsd.save(path, {"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    with pytest.raises(RuntimeError, match="state dict is empty"):
        dsd.load(path, {"scaler": torch.amp.GradScaler("cpu")})


class Metric(nn.Module):
    """As metrics are: tensors that are no buffers, lists that grow, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.count = 0
        self.rows: list[Tensor] = []

    def update(self, row: Tensor) -> None:
        self.total += row.sum()
        self.count += 1
        self.rows.append(row)

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        entries = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        entries[prefix + "count"] = self.count
        entries[prefix + "rows"] = [row if keep_vars else row.detach() for row in self.rows]
        return entries

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.count = state_dict.pop(prefix + "count")
        self.rows = state_dict.pop(prefix + "rows")
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(lambda m: m, id="alone"), pytest.param(lambda m: nn.ModuleList([m]), id="child")],
)
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_a_metric_comes_back_with_its_counts_and_lists(path, wrap, rows):
    saved, fresh = Metric(), Metric()
    for row in range(rows):
        saved.update(torch.randn(row, 2))
    fresh.update(torch.randn(3))
    dsd.save(path, {"metric": wrap(saved)})
    dsd.load(path, {"metric": wrap(fresh)})
    assert_same(dict(fresh.state_dict()), dict(saved.state_dict()))


def test_a_metric_inside_of_a_model_on_the_same_state_comes_back(path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.metric = nn.Linear(2, 2), Metric()

    saved, fresh = Net(), Net()
    saved.metric.update(torch.ones(2))
    dsd.save(path, {"model": saved})
    dsd.load(path, {"model": fresh})
    assert_same(dict(fresh.state_dict()), dict(saved.state_dict()))


# Objects of users


class Box:
    """Any state at all, given back as it was loaded."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


LOADER_STATE: dict[str, Any] = {
    "_snapshot": {
        "_iterator": {"epoch": 2, "index": torch.tensor([5, 3]), "done": False},
        "_workers": {
            0: {"shard": Path("data/0"), "rng": torch.arange(5, dtype=torch.uint8)},
            1: {"shard": Path("data/1"), "rng": None},
        },
        "_order": np.arange(6, dtype=np.int32),
        "_queue": deque([(1, b"x"), (2, b"y")], maxlen=7),
    },
    "_seen": {("train", 3): 1.5, frozenset({1, 2}): "set"},
    "_counts": Counter(a=3),
    "_history": OrderedDict(b=[1, 2.0, True], a=(None,)),
    "_empty": {},
}

STATES = [
    pytest.param(LOADER_STATE, id="nested dict"),
    pytest.param([1, (2, torch.ones(2))], id="list"),
    pytest.param((torch.zeros(1), {"a": ()}), id="tuple"),
    pytest.param(torch.arange(3), id="tensor"),
    pytest.param(np.arange(3.0), id="array"),
    pytest.param(np.float64(1.5), id="numpy scalar"),
    pytest.param(None, id="None"),
    pytest.param(7, id="int"),
    pytest.param("text", id="str"),
    pytest.param({1: "a", 2: torch.ones(1)}, id="int keys"),
    pytest.param({}, id="empty"),
    pytest.param({"state": {}, "param_groups": []}, id="names of an optimizer"),
]


@pytest.mark.parametrize("state", STATES)
def test_an_object_gets_the_very_state_that_it_gave(path, state):
    fresh = Box("nothing")
    dsd.save(path, {"loader": Box(state)})
    dsd.load(path, {"loader": fresh})
    assert_same(fresh.state, state)


@pytest.mark.parametrize("state", STATES)
def test_the_state_of_an_object_is_stored_as_plain_values(path, state):
    dsd.save(path, {"loader": Box(state)})
    assert_same(dsd.load(path), {"loader": state})


def test_tensors_that_an_object_gets_are_its_own(path):
    mine = torch.zeros(3)
    fresh = Box({"x": mine})
    dsd.save(path, {"loader": Box({"x": torch.ones(3)})})
    dsd.load(path, {"loader": fresh})
    assert_same_tensor(mine, torch.zeros(3))
    fresh.state["x"].add_(1)
    assert_same_tensor(dsd.load(path)["loader"]["x"], torch.ones(3))


def test_tensors_of_two_objects_that_are_one_memory_are_tied_only_as_they_were(path):
    shared = torch.ones(3)
    dsd.save(path, {"a": Box([shared, shared]), "b": Box(shared), "c": Box(shared.clone())})
    loaded = dsd.load(path)
    assert loaded["a"][0] is loaded["a"][1] is loaded["b"]
    assert loaded["c"] is not loaded["b"]


def places(item: Any) -> dict[str, Any]:
    """The places of a state in which an object may lie."""
    return {
        "list": {"x": [1, item]},
        "tuple": {"x": (item, "b")},
        "nested dict": {"x": {"y": {"z": item, "n": 1}}},
        "int keys": {"x": {0: item, 1: {2: item}}},
        "tuple keys": {"x": {("a", 1): item}},
        "OrderedDict": {"x": OrderedDict(b=item, a=1)},
        "defaultdict": {"x": defaultdict(None, {"a": item})},
        "list of lists": {"x": [[item], [2, [item]]]},
        "list of dicts": {"x": [{"a": item}, {"b": 2}]},
    }


TWICE = ("int keys", "list of lists")
PLACES = [pytest.param(name, id=name) for name in places(None)]


@pytest.mark.parametrize("place", PLACES)
def test_an_object_is_found_wherever_it_lies(path, place):
    inner = {"at": torch.ones(2), "n": 3}
    fresh = Box()
    dsd.save(path, places(Box(inner))[place])
    dsd.load(path, places(fresh)[place])
    assert_same(fresh.state, inner)
    assert_same(dsd.load(path), places(inner)[place])


@pytest.mark.parametrize("place", PLACES)
def test_a_module_is_found_wherever_it_lies(path, place):
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    dsd.save(path, places(saved)[place])
    dsd.load(path, places(fresh)[place])
    assert_same(dict(fresh.state_dict()), dict(saved.state_dict()))


@pytest.mark.parametrize("place", [name for name in places(None) if name not in TWICE])
def test_an_optimizer_is_found_wherever_it_lies(path, place):
    saved, fresh = run_of(chained, 2), run_of(chained, 0)
    dsd.save(path, {"model": saved["model"], **places(saved["optimizer"])[place]})
    dsd.load(path, {"model": fresh["model"], **places(fresh["optimizer"])[place]})
    assert_same(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_with_an_object_comes_back_whole_with_the_object_in_it(path, kind):
    fresh = Box()
    dsd.save(path, {"x": kind([Box({"n": 1}), 5, None, [6]])})
    loaded = dsd.load(path, {"x": kind([fresh, 0, 0, 0])})
    assert type(loaded["x"]) is kind
    assert loaded["x"][0] is fresh
    assert_same(list(loaded["x"][1:]), [5, None, [6]])
    assert fresh.state == {"n": 1}


@pytest.mark.parametrize(
    "kind",
    [
        dict,
        pytest.param(OrderedDict),
    ],
)
def test_values_beside_an_object_in_a_dict_come_back_without_it(path, kind):
    dsd.save(path, {"x": kind({"b": Box(1), 1: 5, "a": None})})
    loaded = dsd.load(path, {"x": kind({"b": Box(), 1: 0, "a": 0})})
    assert_same(loaded["x"], kind({1: 5, "a": None}))


@dataclass
class Holder:
    item: Any


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda item: deque([item]), id="deque"),
        pytest.param(Holder, id="dataclass"),
        pytest.param(lambda item: Counter({"a": item}), id="Counter"),
        pytest.param(lambda item: iter([item]), id="iterator"),
    ],
)
def test_an_object_in_a_container_of_another_kind_is_refused_with_its_place(path, wrap):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(path, {"x": wrap(nn.Linear(2, 2))})
    assert caught.value.path_in_tree.startswith("$.x")
    assert not path.exists()


def test_a_module_in_a_deque_is_not_called_a_function(path):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(path, {"x": deque([nn.Linear(2, 2)])})
    assert "a function cannot" not in str(caught.value)


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda item: deque([item]), id="deque"),
        pytest.param(lambda item: [deque([{"a": item}])], id="dict in a deque"),
        pytest.param(lambda item: {"a": (item,)}, id="tuple"),
        pytest.param(lambda item: defaultdict(None, a=item), id="defaultdict"),
    ],
)
def test_a_meta_tensor_in_a_container_is_refused_with_its_place(path, wrap):
    with pytest.raises(UnsupportedValueError, match="meta"):
        dsd.save(path, {"x": wrap(torch.empty(2, device="meta"))})
    assert not path.exists()


def test_an_object_with_a_state_dict_only_is_refused_with_a_hint(path):
    class Half:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(UnsupportedValueError, match=r"state_dict\(\)") as caught:
        dsd.save(path, {"x": {"half": Half()}})
    assert caught.value.path_in_tree == "$.x.half"
    assert "state_dict" in (caught.value.hint or "")
    assert not path.exists()


def test_an_object_with_a_load_state_dict_only_is_refused(path):
    class Half:
        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(path, {"half": Half()})
    assert caught.value.path_in_tree == "$.half"


@pytest.mark.parametrize("kind", [nn.Linear, SGD, Box, lr_scheduler.StepLR])
def test_a_class_in_place_of_its_object_is_refused(path, kind):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(path, {"thing": kind})
    assert caught.value.path_in_tree == "$.thing"
    assert not path.exists()


def test_an_error_of_a_state_dict_reaches_the_caller_and_nothing_is_written(path):
    class Failing(Box):
        def state_dict(self) -> Any:
            raise OSError("the stream is gone")

    with pytest.raises(OSError, match="the stream is gone"):
        dsd.save(path, {"model": nn.Linear(2, 2), "loader": Failing()})
    assert list(path.parent.iterdir()) == []


def test_an_error_of_a_state_dict_keeps_the_checkpoint_that_is_there(path):
    class Failing(Box):
        def state_dict(self) -> Any:
            raise OSError("the stream is gone")

    root = dsd.save(path, {"n": 1})
    with pytest.raises(OSError, match="the stream is gone"):
        dsd.save(path, {"n": 2, "loader": Failing()}, overwrite=True)
    assert_same(dsd.load(path, digest=root), {"n": 1})


def test_an_error_of_load_state_dict_reaches_the_caller(path):
    class Picky(Box):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("epoch")

    dsd.save(path, {"loader": Box({"step": 1})})
    with pytest.raises(KeyError, match="epoch"):
        dsd.load(path, {"loader": Picky()})


def test_objects_are_loaded_after_the_tensors_of_modules(path):
    """So that a scheduler, or an average, may look at what was loaded."""
    model = nn.Linear(2, 2)

    class Looking(Box):
        def load_state_dict(self, state: Any) -> None:
            self.state = model.weight.detach().clone()

    saved, looking = nn.Linear(2, 2), Looking()
    dsd.save(path, {"a": Box(1), "model": saved})
    dsd.load(path, {"a": looking, "model": model})
    assert_same_tensor(looking.state, saved.weight)


def test_an_object_whose_load_state_dict_returns_something_is_loaded(path):
    class Chatty(Box):
        def load_state_dict(self, state: Any) -> Any:
            self.state = state
            return ("missing", [])

    fresh = Chatty()
    dsd.save(path, {"loader": Box([1])})
    assert dsd.load(path, {"loader": fresh}) == {}
    assert fresh.state == [1]


def test_an_object_that_the_checkpoint_lacks_is_reported(path):
    fresh = Box("kept")
    dsd.save(path, {"step": 1})
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"step": 0, "loader": fresh})
    assert caught.value.report.missing == ["loader"]
    assert fresh.state == "kept"


def test_an_object_that_the_checkpoint_lacks_is_left_alone_if_that_is_allowed(path):
    fresh = Box("kept")
    dsd.save(path, {"step": 1})
    loaded = dsd.load(path, {"step": 0, "loader": fresh}, strict=False)
    assert fresh.state == "kept"
    assert loaded.report.missing == ["loader"]


def test_an_object_that_is_not_selected_is_left_alone(path):
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    box = Box("kept")
    dsd.save(path, {"model": saved, "loader": Box({"x": torch.ones(1), "n": 2})})
    dsd.load(path, {"model": fresh, "loader": box}, select="model")
    assert box.state == "kept"


def test_an_object_with_a_dynamic_attribute_for_every_name_is_not_taken_for_stateful(path):
    class Magic:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    with pytest.raises((UnsupportedValueError, RuntimeError)):
        dsd.save(path, {"x": Magic()})
    assert not path.exists()


def test_the_same_object_at_two_places_is_loaded_at_both(path):
    box, fresh = Box({"n": 1}), Box()
    dsd.save(path, {"a": box, "b": [box]})
    dsd.load(path, {"a": fresh, "b": [fresh]})
    assert fresh.state == {"n": 1}


def test_an_object_that_holds_itself_is_refused_and_does_not_recurse_for_ever(path):
    box = Box()
    box.state = {"again": box}
    with pytest.raises(DsdError):
        dsd.save(path, {"x": box})
    assert not path.exists()


# Trainers


@dataclass
class Trainer:
    """A stateful object whose state has modules, optimizers and schedulers in it, as objects."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    step: int = 0
    best: float = float("inf")
    log: list[Any] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.best, self.log = state["step"], state["best"], state["log"]


def trainer_of(steps: int) -> Trainer:
    run = run_of(sequential, steps)
    return Trainer(run["model"], run["optimizer"], run["scheduler"], steps, log=[(steps, 0.5)])


@fault("modules in the state of an object are not looked at for names")
def test_a_trainer_whose_state_holds_modules_is_saved_with_their_state_dicts(path):
    saved = trainer_of(3)
    dsd.save(path, {"trainer": saved})
    loaded = dsd.load(path)["trainer"]
    assert_same(loaded["model"], {k: v.detach() for k, v in saved.model.state_dict().items()})
    assert_same(loaded["scheduler"], saved.scheduler.state_dict())
    assert_same((loaded["step"], loaded["best"], loaded["log"]), (3, float("inf"), [(3, 0.5)]))
    assert set(loaded["optimizer"]["state"]) == {"weight", "bias"}


def test_a_trainer_whose_state_holds_modules_gets_their_state_dicts_back(path):
    saved, fresh = trainer_of(3), trainer_of(0)
    for trainer in (saved, fresh):
        trainer.optimizer = Box(1)  # type: ignore[assignment]
    dsd.save(path, {"trainer": saved})
    dsd.load(path, {"trainer": fresh})
    assert_same(dict(fresh.model.state_dict()), dict(saved.model.state_dict()))
    assert_same(fresh.scheduler.state_dict(), saved.scheduler.state_dict())
    assert (fresh.step, fresh.log) == (saved.step, saved.log)


class PlainTrainer(Trainer):
    """The usual kind: its state is state dicts."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        self.step = state["step"]


def test_a_trainer_whose_state_is_state_dicts_resumes(path):
    saved, fresh = (PlainTrainer(**vars(trainer_of(steps))) for steps in (3, 0))
    dsd.save(path, {"trainer": saved})
    dsd.load(path, {"trainer": fresh})
    assert_same(dict(fresh.model.state_dict()), dict(saved.model.state_dict()))
    assert_same(fresh.optimizer.state_dict(), saved.optimizer.state_dict())
    assert_same(
        advance(fresh.optimizer, fresh.scheduler, 5), advance(saved.optimizer, saved.scheduler, 5)
    )


def test_a_stateful_object_may_return_another(path):
    inner = Box({"n": 1, "x": torch.ones(2)})
    fresh = Box()
    dsd.save(path, {"outer": Box({"inner": inner, "more": [Box(3)]})})
    dsd.load(path, {"outer": fresh})
    assert_same(fresh.state, {"inner": {"n": 1, "x": torch.ones(2)}, "more": [3]})


# Snapshots and random states among the rest


def test_a_snapshot_of_objects_does_not_follow_them(path):
    run = run_of(sequential, 3)
    state = {**run, "loader": Box({"x": torch.ones(2), "order": np.arange(3), "n": [1]})}
    before = dsd.snapshot(state)
    kept = copy.deepcopy(before)
    advance(run["optimizer"], run["scheduler"], 2)
    state["loader"].state["x"].add_(1)
    state["loader"].state["order"] += 1
    state["loader"].state["n"].append(2)
    assert_same(before, kept)


def test_a_snapshot_equals_what_is_loaded_after_saving(path):
    state = {**run_of(sequential, 3), "loader": Box(LOADER_STATE)}
    copied = dsd.snapshot(state)
    root = dsd.save(path, state)
    assert_same(dsd.load(path), copied)
    assert dsd.save(path, copied, overwrite=True) == root


@pytest.fixture
def kept_streams() -> Iterator[None]:
    state = dsd.rng_state()
    yield
    dsd.set_rng_state(state)


def test_saving_and_loading_objects_draws_no_random_numbers(path, kept_streams):
    saved, fresh = run_of(sequential, 3), run_of(sequential, 0)
    before = dsd.rng_state()
    dsd.save(path, saved)
    dsd.load(path, fresh)
    assert_same(dsd.rng_state(), before)


def test_a_random_state_beside_objects_is_given_back(path, kept_streams):
    state = {**run_of(sequential, 3), "rng": dsd.rng_state()}
    dsd.save(path, state)
    wanted = torch.rand(3), np.random.rand(), dsd.rng_state()["python"]
    loaded = dsd.load(path, {**run_of(sequential, 0), "rng": None})
    dsd.set_rng_state(loaded["rng"])
    assert_same((torch.rand(3), np.random.rand(), dsd.rng_state()["python"]), wanted)
