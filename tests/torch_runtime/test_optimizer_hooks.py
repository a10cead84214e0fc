"""Optimizers that say themselves what their state is: subclasses, hooks, schedules around them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

import dsdformat.torch as dsd  # noqa: E402
from dsdformat.errors import MismatchError, UnsupportedValueError  # noqa: E402
from tests.torch_runtime.exact import assert_same  # noqa: E402
from tests.torch_runtime.optimizer_cases import (  # noqa: E402
    mlp,
    noise,
    state_of,
    train,
)

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
W0 = "0.weight"


def resumed_from(
    path: Any, make: Any, *, stepped: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and optimizer with what is in a checkpoint."""
    model, optimizer = make(1)
    if stepped:
        train(model, optimizer, range(50, 53))
    dsd.load(path, {"model": model, "optimizer": optimizer})
    return model, optimizer


def assert_goes_on(make: Any, path: Any, *, stepped: bool) -> None:
    """Train, save, load, and go on in both."""
    model, optimizer = make(0)
    train(model, optimizer, range(2))
    dsd.save(path, {"model": model, "optimizer": optimizer})
    resumed, other = resumed_from(path, make, stepped=stepped)
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    train(model, optimizer, range(2, 5))
    train(resumed, other, range(2, 5))
    assert_same(state_of(resumed, other), state_of(model, optimizer))


both_ways = pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])


# Subclasses


class WithExtra(AdamW):
    """Keeps a count beside state and groups, and scales its steps by it."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.count = 0
        self.trace = torch.zeros(2)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.trace = self.trace * 0.5 + self.count
        for group in self.param_groups:
            group["lr"] = 0.01 * float(self.trace.sum())
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        extra = {"count": self.count, "trace": self.trace, "tuple": (1, None)}
        return {**super().state_dict(), "extra": extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        extra = state_dict.pop("extra")
        assert extra["tuple"] == (1, None)
        self.count, self.trace = extra["count"], extra["trace"]
        super().load_state_dict(state_dict)


class Wrapping(AdamW):
    """Puts what torch gives below a key of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict(), "version": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["base"])


class Packed(SGD):
    """Shows its momentum in another form than it keeps it."""

    def state_dict(self) -> dict[str, Any]:
        result = super().state_dict()
        result["state"] = {
            key: {"momentum_buffer": value["momentum_buffer"].to(torch.float64)}
            for key, value in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = {**state_dict, "state": dict(state_dict["state"])}
        for key, value in state_dict["state"].items():
            assert value["momentum_buffer"].dtype == torch.float64
            state_dict["state"][key] = {"momentum_buffer": value["momentum_buffer"].float()}
        super().load_state_dict(state_dict)


class Scaled(SGD):
    """Shows its momentum in the same form, but with other values."""

    def state_dict(self) -> dict[str, Any]:
        return self._scaled(super().state_dict(), 2.0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(self._scaled(state_dict, 0.5))

    @staticmethod
    def _scaled(state_dict: dict[str, Any], factor: float) -> dict[str, Any]:
        state = {
            key: {"momentum_buffer": value["momentum_buffer"] * factor}
            for key, value in state_dict["state"].items()
        }
        return {**state_dict, "state": state}


def maker(kind: Any, **options: Any) -> Any:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(seed)
        return model, kind(model.parameters(), **options)

    return make


@both_ways
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(maker(WithExtra), id="with keys of its own"),
        pytest.param(
            maker(Packed, lr=0.1, momentum=0.9),
            id="another dtype",
        ),
        pytest.param(maker(Scaled, lr=0.1, momentum=0.9), id="other values"),
    ],
)
def test_an_optimizer_with_a_state_dict_of_its_own_goes_on_bit_for_bit(make, stepped, tmp_path):
    assert_goes_on(make, tmp_path / "c", stepped=stepped)


def test_keys_that_an_optimizer_adds_are_handed_to_its_own_load_state_dict(tmp_path):
    make = maker(WithExtra)
    model, optimizer = make(0)
    train(model, optimizer, range(3))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    _, other = resumed_from(tmp_path / "c", make)
    assert other.count == 3
    assert_same(other.trace, optimizer.trace)
    own = dsd.load(tmp_path / "c")["optimizer"]["own_keys"]
    assert_same(own, {"0.weight": {"extra": optimizer.state_dict()["extra"]}})


def test_an_optimizer_whose_state_dict_is_of_another_form_is_refused_with_advice(tmp_path):
    model, optimizer = maker(Wrapping)(0)
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert caught.value.path_in_tree == "$.optimizer"
    assert "Wrapping" in str(caught.value)
    assert "state_dict()" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer.state_dict()})


UNUSABLE: dict[str, Any] = {
    "None": None,
    "a list": [],
    "nothing": {},
    "no groups": {"state": {}},
    "no state": {"param_groups": []},
    "too few groups": {"state": {}, "param_groups": []},
    "a group without parameters": {"state": {}, "param_groups": [{}]},
    "a group that is no dict": {"state": {}, "param_groups": [3]},
    "too few parameters": {"state": {}, "param_groups": [{"params": [0]}]},
    "parameters in no list": {"state": {}, "param_groups": [{"params": 4}]},
    "state a list": {"state": [], "param_groups": [{"params": [0, 1, 2, 3]}]},
}


@pytest.mark.parametrize("given", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_state_dict_is_refused(given, tmp_path):
    class Odd(SGD):
        def state_dict(self) -> Any:
            return given

    model = mlp()
    state = {"model": model, "optimizer": Odd(model.parameters(), lr=0.1)}
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", state)
    assert caught.value.path_in_tree == "$.optimizer"
    assert list(tmp_path.iterdir()) == []


@both_ways
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_moments_of_another_dtype_survive_a_load_state_dict_of_ones_own(weights, stepped, tmp_path):
    # torch's own casts everything to the dtype of the parameter.
    class Own(Adam):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(seed).to(weights)
        optimizer = Own(model.parameters())
        if seed == 0 or stepped:
            train(model, optimizer, [0])
            for entry in optimizer.state.values():
                entry["exp_avg"] = entry["exp_avg"].double() / 3
                entry["exp_avg_sq"] = entry["exp_avg_sq"].bfloat16()
                entry["history"] = [{"m": entry["exp_avg"].half()}, (entry["exp_avg"] + 1,)]
        return model, optimizer

    model, optimizer = make(0)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = make(1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


KINDS: dict[str, Any] = {
    "text": "warm",
    "bytes": b"ab",
    "torch.Size": torch.Size([2, 3]),
    "set": {1, 2},
    "list": [1, (2, [torch.ones(2)])],
    "dict": {"a": {"b": torch.ones(2)}},
    "int tensor": torch.tensor([1, 2]),
}


@both_ways
@pytest.mark.parametrize("how", ["subclass", "hook"])
@pytest.mark.parametrize("value", KINDS.values(), ids=KINDS)
def test_values_of_any_kind_survive_a_load_state_dict_of_ones_own(value, how, stepped, tmp_path):
    # torch's own would make of a text what a generator prints as.
    class Own(SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(seed)
        optimizer = (Own if how == "subclass" else SGD)(model.parameters(), lr=0.1, momentum=0.9)
        if how == "hook":
            optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
        if seed == 0 or stepped:
            train(model, optimizer, [0])
            for entry in optimizer.state.values():
                entry["value"] = copy.deepcopy(value)
        return model, optimizer

    model, optimizer = make(0)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = make(1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


@both_ways
def test_the_state_of_an_optimizer_with_a_load_state_dict_of_its_own_is_by_name_too(
    stepped, tmp_path
):
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(seed)
        parameters = list(model.parameters())
        return model, WithExtra(parameters[::-1] if seed else parameters)

    model, optimizer = make(0)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = resumed_from(tmp_path / "c", make, stepped=stepped)
    for old, new in zip(model.parameters(), resumed.parameters(), strict=True):
        assert_same(dict(other.state[new]), dict(optimizer.state[old]))


class Loading(AdamW):
    """Shows its state as torch does."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)


def test_the_state_of_a_subclass_is_read_in_place(tmp_path):
    model, optimizer = maker(Loading)(0)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    places = [entry["exp_avg"].data_ptr() for entry in optimizer.state.values()]
    train(model, optimizer, range(2))
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert [entry["exp_avg"].data_ptr() for entry in optimizer.state.values()] == places


def test_the_state_of_a_subclass_with_a_state_dict_of_its_own_is_made_anew(tmp_path):
    # What it shows need not be what it keeps, so nothing is read into that.
    model, optimizer = maker(WithExtra)(0)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    held = [entry["exp_avg"] for entry in optimizer.state.values()]
    before = [tensor.clone() for tensor in held]
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2))
    trained = [tensor.clone() for tensor in held]
    assert not any(map(torch.equal, before, trained))
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert_same(optimizer.state_dict(), saved)
    assert_same(held, trained)


def test_a_mismatch_is_found_before_load_state_dict_is_called(tmp_path):
    calls = []

    class Own(SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            calls.append(state_dict)
            super().load_state_dict(state_dict)

    model = mlp()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": Own(model.parameters(), lr=0.1)})
    other = mlp(1, sizes=(4, 6, 3, 2))
    with pytest.raises(MismatchError):
        dsd.load(tmp_path / "c", {"model": other, "optimizer": Own(other.parameters(), lr=0.1)})
    assert calls == []


def test_a_selection_without_the_optimizer_does_not_call_its_load_state_dict(tmp_path):
    make = maker(WithExtra)
    model, optimizer = make(0)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = make(1)
    train(resumed, other, range(3))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, select="model")
    assert other.count == 3


def test_two_optimizers_of_a_list_may_each_add_keys_of_their_own(tmp_path):
    def make(seed: int) -> tuple[nn.Module, list[WithExtra]]:
        model = mlp(seed)
        return model, [WithExtra(model[0].parameters()), WithExtra(model[2].parameters())]

    model, optimizers = make(0)
    optimizers[0].count, optimizers[1].count = 5, 6
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizers})
    resumed, others = make(1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": others})
    assert [other.count for other in others] == [5, 6]


def test_keys_that_the_live_optimizer_does_not_take_are_reported(tmp_path):
    make = maker(WithExtra)
    model, optimizer = make(0)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = maker(AdamW)(1)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert "optimizer/own_keys/0.weight/extra/trace" in caught.value.report.unexpected


def test_keys_that_the_checkpoint_lacks_stay_as_the_live_optimizer_has_them(tmp_path):
    model, optimizer = maker(AdamW)(0)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = maker(WithExtra)(1)
    train(resumed, other, range(3))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert other.count == 3
    for old, new in zip(model.parameters(), resumed.parameters(), strict=True):
        assert_same(dict(other.state[new]), dict(optimizer.state[old]))


def test_an_optimizer_around_another_is_an_object_with_a_state_dict(tmp_path):
    class Around:
        """No subclass: what its state dict gives is stored as values and tensors."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.count = inner, 0

        def state_dict(self) -> dict[str, Any]:
            return {"inner": self.inner.state_dict(), "count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.inner.load_state_dict(state_dict["inner"])
            self.count = state_dict["count"]

    model = mlp()
    around = Around(AdamW(model.parameters()))
    train(model, around.inner, range(2))
    around.count = 7
    dsd.save(tmp_path / "c", {"model": model, "optimizer": around})
    resumed = mlp(1)
    other = Around(AdamW(resumed.parameters()))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert other.count == 7
    assert_same(other.inner.state_dict(), around.inner.state_dict())


# Hooks


def test_hooks_run_once_at_save_and_once_at_load(tmp_path):
    calls: list[str] = []
    model = mlp()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("before state_dict"))
    optimizer.register_state_dict_post_hook(lambda o, s: calls.append("after state_dict"))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert calls == ["before state_dict", "after state_dict"]
    calls.clear()
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    other.register_load_state_dict_pre_hook(lambda o, s: calls.append("before load"))
    other.register_load_state_dict_post_hook(lambda o: calls.append("after load"))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert calls == ["before load", "after load"]
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def hooked(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Hooks that add a key when saving, and take it away when loading."""
    model = mlp(seed)
    optimizer = AdamW(model.parameters())
    optimizer.mine = seed

    def add(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "mine": {"n": optimizer.mine, "t": torch.ones(2)}}

    def take(optimizer: Any, state_dict: dict[str, Any]) -> None:
        optimizer.mine = state_dict.pop("mine")["n"]

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)
    return model, optimizer


@both_ways
def test_what_a_hook_adds_is_given_to_the_hook_that_takes_it(stepped, tmp_path):
    assert_goes_on(hooked, tmp_path / "c", stepped=stepped)
    _, other = resumed_from(tmp_path / "c", hooked)
    assert other.mine == 0


def test_a_hook_that_adds_to_each_group_is_heard(tmp_path):
    def add(optimizer: Any, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            group["added"] = (1, None)

    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(add)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert "added" not in optimizer.param_groups[0]
    other = SGD(model.parameters(), lr=0.2)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert other.param_groups[0]["added"] == (1, None)


def test_a_hook_that_changes_what_is_loaded_has_the_last_word(tmp_path):
    model = mlp()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": SGD(model.parameters(), lr=0.1)})
    other = SGD(model.parameters(), lr=0.2)

    def halve(optimizer: Any, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            group["lr"] /= 2

    other.register_load_state_dict_pre_hook(halve)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("when", "weights"),
    [
        pytest.param("before", torch.float32, id="before, float32 weights"),
        pytest.param("before", torch.bfloat16, id="before, bfloat16 weights"),
        pytest.param("after", torch.float32, id="after, float32 weights"),
        pytest.param(
            "after",
            torch.bfloat16,
            id="after, bfloat16 weights",
        ),
    ],
)
def test_a_hook_that_converts_the_state_has_the_last_word(when, weights, tmp_path):
    # As one that keeps moments in low precision, whatever the file has.
    model = mlp().to(weights)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, [0])
    for entry in optimizer.state.values():
        entry["momentum_buffer"] = entry["momentum_buffer"].double()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1).to(weights)
    other = SGD(resumed.parameters(), lr=0.2, momentum=0.9)

    def lower(optimizer: Any, state_dict: Any = None) -> None:
        state = optimizer.state if state_dict is None else state_dict["state"]
        for entry in state.values():
            entry["momentum_buffer"] = entry["momentum_buffer"].bfloat16()

    if when == "before":
        other.register_load_state_dict_pre_hook(lower)
    else:
        other.register_load_state_dict_post_hook(lower)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert {entry["momentum_buffer"].dtype for entry in other.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
def test_a_load_hook_costs_no_precision(mixed, tmp_path):
    model = mlp().to(torch.bfloat16 if mixed else torch.float32)
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    for entry in optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"].double() / 3
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1).to(torch.bfloat16 if mixed else torch.float32)
    other = AdamW(resumed.parameters())
    other.register_load_state_dict_pre_hook(lambda o, s: None)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


def test_lists_of_an_lbfgs_survive_a_load_hook(tmp_path):
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(seed).double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        optimizer.register_load_state_dict_pre_hook(lambda o, s: None)
        return model, optimizer

    def run(model: nn.Module, optimizer: Any, seed: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(noise(seed, 5, 4, dtype=torch.float64)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = make(0)
    run(model, optimizer, 0)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = resumed_from(tmp_path / "c", make)
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    run(model, optimizer, 1)
    run(resumed, other, 1)
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_step_hooks_stay(tmp_path):
    calls: list[int] = []
    model = mlp()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert calls == []
    train(model, optimizer, [1])
    assert calls == [1]


def test_global_step_hooks_are_not_called_by_saving_or_loading(tmp_path):
    calls: list[int] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        model = mlp()
        optimizer = AdamW(model.parameters())
        dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
        dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    finally:
        handle.remove()
    assert calls == []


# Schedules

SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.7**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.7),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.7)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.7)], o
    ),
}
any_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def two_groups(seed: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(seed)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    return model, Adam(groups, **{"lr": 0.1, **options})


def run(model: nn.Module, optimizer: Any, scheduler: Any, steps: Any) -> None:
    for step in steps:
        train(model, optimizer, [step])
        scheduler.step()


@any_schedule
@pytest.mark.parametrize("rate", ["float", "tensor"])
@pytest.mark.parametrize("seen", [0, 2], ids=["fresh", "stepped"])
def test_a_schedule_goes_on_with_its_optimizer(schedule, seen, rate, tmp_path):
    def make(seed: int) -> tuple[Any, Any, Any]:
        options = {"lr": torch.tensor(0.1)} if rate == "tensor" else {}
        model, optimizer = two_groups(seed, **options)
        return model, optimizer, schedule(optimizer)

    model, optimizer, scheduler = make(0)
    if rate == "tensor" and (group := optimizer.param_groups[0])["lr"] is group["initial_lr"]:
        pytest.skip("this torch's SequentialLR changes its base rates in place")
    run(model, optimizer, scheduler, range(3))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer, "schedule": scheduler})
    resumed, other, successor = make(1)
    run(resumed, other, successor, range(50, 50 + seen))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other, "schedule": successor})
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    run(model, optimizer, scheduler, range(3, 6))
    run(resumed, other, successor, range(3, 6))
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    assert_same(successor.state_dict(), scheduler.state_dict())


@any_schedule
def test_what_a_schedule_has_added_to_the_groups_comes_back_without_it(schedule, tmp_path):
    model, optimizer = two_groups(0)
    run(model, optimizer, schedule(optimizer), range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = two_groups(1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_a_schedule_can_be_made_for_resuming_after_the_load(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = AdamW(model.parameters(), lr=7.0)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert other.param_groups[0]["initial_lr"] == 0.1
    assert other.param_groups[0]["lr"] == 0.1 * 0.1
    resumed = lr_scheduler.StepLR(other, 1, gamma=0.1, last_epoch=scheduler.last_epoch - 1)
    assert resumed.base_lrs == [0.1]


def test_a_schedule_that_was_made_before_the_load_goes_on_from_what_was_loaded(tmp_path):
    model, optimizer = two_groups(0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    run(model, optimizer, scheduler, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = two_groups(1, lr=9.0)
    successor = lr_scheduler.ExponentialLR(other, 0.5)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    train(resumed, other, [2])
    successor.step()
    assert [group["lr"] for group in other.param_groups] == [0.1 * 0.5**3, 0.5 * 0.5**3]


def test_a_schedule_that_was_made_before_the_load_keeps_its_own_start(tmp_path):
    # The checkpoint is of a run without a schedule: nothing there says where the new one starts.
    model, optimizer = two_groups(0)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = two_groups(1)
    successor = lr_scheduler.LambdaLR(other, lambda step: 0.5)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    train(resumed, other, [0])
    successor.step()
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.25]


def test_a_schedule_by_plateaus_goes_on(tmp_path):
    def make(seed: int) -> tuple[Any, Any, Any]:
        model, optimizer = two_groups(seed)
        return model, optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    model, optimizer, scheduler = make(0)
    for loss in (1.0, 2.0, 2.0):
        scheduler.step(loss)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer, "schedule": scheduler})
    resumed, other, successor = make(1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other, "schedule": successor})
    for one in (scheduler, successor):
        for loss in (2.0, 2.0, 2.0):
            one.step(loss)
    assert_same(other.state_dict(), optimizer.state_dict())
    assert_same(successor.state_dict(), scheduler.state_dict())


def test_momentum_that_a_schedule_cycles_comes_back(tmp_path):
    def make(seed: int) -> tuple[Any, Any, Any]:
        model = mlp(seed)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3)

    model, optimizer, scheduler = make(0)
    run(model, optimizer, scheduler, range(4))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer, "schedule": scheduler})
    resumed, other, successor = make(1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other, "schedule": successor})
    run(model, optimizer, scheduler, range(4, 7))
    run(resumed, other, successor, range(4, 7))
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    assert other.param_groups[0]["momentum"] != 0.9


# Scalers and averages


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_of_gradients_goes_on(enabled, tmp_path):
    def make(seed: int) -> tuple[Any, Any, Any]:
        model = mlp(seed)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=8.0, growth_interval=2)
        return model, optimizer, scaler

    def steps(model: Any, optimizer: Any, scaler: Any, seeds: Any) -> None:
        for seed in seeds:
            optimizer.zero_grad()
            scaler.scale(model(noise(seed, 3, 4)).square().sum()).backward()
            if seed == 2 and enabled:
                model[0].weight.grad.fill_(float("inf"))  # a step that is left out
            scaler.step(optimizer)
            scaler.update()

    model, optimizer, scaler = make(0)
    steps(model, optimizer, scaler, range(4))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer, "scaler": scaler})
    resumed, other, successor = make(1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other, "scaler": successor})
    assert_same(successor.state_dict(), scaler.state_dict())
    steps(model, optimizer, scaler, range(4, 8))
    steps(resumed, other, successor, range(4, 8))
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    assert_same(successor.state_dict(), scaler.state_dict())


def test_an_average_of_the_weights_is_a_model_beside_that_of_the_optimizer(tmp_path):
    from torch.optim.swa_utils import SWALR, AveragedModel

    if not hasattr(SWALR, "_set_anneal_func"):
        pytest.skip("this torch keeps a function in SWALR's state")

    def make(seed: int) -> dict[str, Any]:
        model = mlp(seed)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = AveragedModel(model)
        schedule = SWALR(optimizer, swa_lr=0.05)
        return {"ema": average, "model": model, "optimizer": optimizer, "schedule": schedule}

    def steps(state: dict[str, Any], seeds: Any) -> None:
        for seed in seeds:
            train(state["model"], state["optimizer"], [seed])
            state["ema"].update_parameters(state["model"])
            state["schedule"].step()

    saved, other = make(0), make(1)
    steps(saved, range(3))
    dsd.save(tmp_path / "c", saved)
    dsd.load(tmp_path / "c", other)
    steps(saved, range(3, 6))
    steps(other, range(3, 6))
    assert_same(dsd.snapshot(other), dsd.snapshot(saved))
