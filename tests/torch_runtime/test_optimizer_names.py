"""State of optimizers is found by the names of parameters, in whatever model and order they are."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat.errors import (  # noqa: E402
    DsdError,
    EntryNotFoundError,
    MismatchError,
    UnsupportedValueError,
)
from tests.torch_runtime.exact import assert_same, assert_same_tensor  # noqa: E402
from tests.torch_runtime.optimizer_cases import (  # noqa: E402
    mlp,
    noise,
    seeded,
    state_of,
    train,
)

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
NAMES = W0, B0, W2, B2 = "0.weight", "0.bias", "2.weight", "2.bias"


def trained(seed: int = 0, steps: int = 2, **options: Any) -> tuple[nn.Module, AdamW]:
    model = mlp(seed)
    optimizer = AdamW(model.parameters(), **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def step(*optimizers: torch.optim.Optimizer, seed: int = 0) -> None:
    """Step with gradients that depend on shape and value of each parameter alone."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                shape = parameter.shape
                parameter.grad = noise(seed, *shape) + 0.1 * parameter.detach()
        optimizer.step()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of each parameter that has one, by name."""
    named = model.named_parameters()
    return {name: dict(optimizer.state[p]) for name, p in named if p in optimizer.state}


# Another model than before


class Named(nn.Module):
    """Linear layers of 4 by 4 under given names, in a given order."""

    def __init__(self, *names: str, seed: int = 0) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))
            seeded(self.get_submodule(name), seed + sum(map(ord, name)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x).tanh()
        return x


def test_layers_in_another_order_get_their_own_state(tmp_path):
    model = Named("a", "b", "c")
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = Named("c", "a", "b", seed=1)
    other = AdamW(resumed.parameters())
    assert not dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}).report
    assert_same(states(resumed, other), states(model, optimizer))


def test_parameters_in_another_order_within_the_optimizer_get_their_own_state(tmp_path):
    model = Named("a", "b", "c")
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = Named("a", "b", "c", seed=1)
    other = AdamW(reversed(list(resumed.parameters())))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(states(resumed, other), states(model, optimizer))


@pytest.mark.parametrize(
    ("stored", "live", "missing", "unexpected"),
    [
        pytest.param("ab", "abc", "c", "", id="a layer added at the end"),
        pytest.param("ab", "cab", "c", "", id="a layer added in front"),
        pytest.param("abc", "ac", "", "b", id="a layer removed"),
        pytest.param("abc", "dca", "d", "b", id="one removed, one added, the rest moved"),
    ],
)
def test_a_model_that_has_changed_keeps_the_state_of_what_is_left(
    stored, live, missing, unexpected, tmp_path
):
    model = Named(*stored)
    optimizer = AdamW(model.parameters(), lr=0.5)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})

    resumed = Named(*live, seed=1)
    other = AdamW(resumed.parameters())
    state = {"model": resumed, "optimizer": other}
    before = dsd.snapshot(state)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", state)
    assert_same(dsd.snapshot(state), before)

    report = dsd.load(tmp_path / "c", state, strict=False).report
    assert str(report) == str(caught.value.report)

    def of(layers: str) -> list[str]:
        paths = [f"{one}.{name}" for one in layers for name in ("weight", "bias")]
        return sorted([f"model/{p}" for p in paths] + [f"optimizer/state/{p}" for p in paths])

    tensors = {name.removesuffix(f"/{key}") for name in report.unexpected for key in
               ("exp_avg", "exp_avg_sq", "step")}  # fmt: skip
    assert sorted(report.missing) == of(missing)
    assert sorted(name for name in tensors if name.endswith(("weight", "bias"))) == of(unexpected)
    kept = {n: s for n, s in states(model, optimizer).items() if n[0] in live}
    assert_same(states(resumed, other), kept)
    assert other.param_groups[0]["lr"] == 0.5
    train(resumed, other, [2])
    assert {float(s["step"]) for s in other.state.values()} == {3.0, *([1.0] if missing else [])}


def test_a_parameter_that_the_checkpoint_knows_without_state_loses_what_it_had(tmp_path):
    model = mlp()
    optimizer = AdamW(model.parameters())
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    train(model, optimizer, [0])
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert len(optimizer.state) == 0


def test_a_parameter_that_the_checkpoint_does_not_know_keeps_its_state(tmp_path):
    model, optimizer = Named("a"), None
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = Named("a", "b")
    other = AdamW(resumed.parameters())
    train(resumed, other, range(3))
    before = states(resumed, other)["b.weight"]["exp_avg"].clone()
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, strict=False)
    assert_same_tensor(states(resumed, other)["b.weight"]["exp_avg"], before)
    assert float(states(resumed, other)["a.weight"]["step"]) == 1.0


def test_state_of_another_shape_is_a_mismatch_that_names_both_shapes(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1, sizes=(4, 8, 3))
    other = AdamW(resumed.parameters())
    train(resumed, other, [0])
    state = {"model": resumed, "optimizer": other}
    before = dsd.snapshot(state)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", state)
    text = {item.name: str(item) for item in caught.value.report.mismatched}
    assert "[6, 4]" in text["optimizer/state/0.weight/exp_avg"]
    assert "[8, 4]" in text["optimizer/state/0.weight/exp_avg"]
    assert_same(dsd.snapshot(state), before)


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    "kind", [AdamW, torch.optim.ASGD, torch.optim.NAdam], ids=lambda k: k.__name__
)
def test_the_state_of_another_kind_of_optimizer_is_one_of_our_errors(kind, stepped, tmp_path):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = kind(resumed.parameters())
    if stepped:
        train(resumed, other, [0])
    state = {"model": resumed, "optimizer": other}
    before = dsd.snapshot(state)
    with pytest.raises(DsdError):
        dsd.load(tmp_path / "c", state)
    assert_same(dsd.snapshot(state), before)


def test_the_advice_on_another_dtype_of_state_is_not_to_convert_a_model(tmp_path):
    model, optimizer = trained()
    for entry in optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"].bfloat16()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = trained(1)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert "dtype=" not in caught.value.hint


# A part is frozen, or was half trained


def half_trained() -> tuple[nn.Module, AdamW]:
    model = mlp()
    optimizer = AdamW(model.parameters())
    model[0](noise(0, 2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_parameter_that_never_had_a_gradient_is_saved_and_loaded_without_state(tmp_path):
    model, optimizer = half_trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert set(dsd.load(tmp_path / "c")["optimizer"]["state"]) == {W0, B0}
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    assert not dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}).report
    assert_same(states(resumed, other), states(model, optimizer))
    assert len(other.state) == 2
    train(model, optimizer, [1])
    train(resumed, other, [1])
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_state_that_a_fuller_optimizer_has_is_gone_after_loading_half_of_it(tmp_path):
    model, optimizer = half_trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = trained(1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(states(resumed, other), states(model, optimizer))
    assert len(other.state) == 2


@pytest.mark.parametrize("frozen", [[W0, B0], [W2], NAMES], ids=["first", "one", "all"])
@pytest.mark.parametrize("when", ["before saving", "before loading", "both"])
def test_state_of_frozen_parameters_is_kept(frozen, when, tmp_path):
    model, optimizer = trained()
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    for name in frozen:
        if when != "before loading":
            model.get_parameter(name).requires_grad_(False)
        if when != "before saving":
            resumed.get_parameter(name).requires_grad_(False)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    assert len(other.state) == 4
    flags = {name: p.requires_grad for name, p in resumed.named_parameters()}
    assert flags == {name: when == "before saving" or name not in frozen for name in NAMES}
    for one in (model, resumed):
        one.requires_grad_(True)
    train(model, optimizer, range(2, 4))
    train(resumed, other, range(2, 4))
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_an_optimizer_over_what_is_not_frozen_names_it_within_the_whole_model(tmp_path):
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = AdamW(p for p in model.parameters() if p.requires_grad)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    stored = dsd.load(tmp_path / "c")["optimizer"]
    assert set(stored["state"]) == {W2, B2}
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    state = {"model": resumed, "optimizer": other}
    report = dsd.load(tmp_path / "c", state, strict=False).report
    assert report.missing == [f"optimizer/state/{W0}", f"optimizer/state/{B0}"]
    assert_same(states(resumed, other), states(model, optimizer))


# Tied parameters


class Tied(nn.Module):
    def __init__(self, seed: int = 0, *, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(4, 4, bias=False)
        self.emb = nn.Embedding(4, 4)
        if not head_first:
            self.head = nn.Linear(4, 4, bias=False)
        seeded(self, seed)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.emb.weight.sum(0))


def test_tied_parameters_have_one_entry_and_stay_tied(tmp_path):
    model = Tied()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert set(dsd.load(tmp_path / "c")["optimizer"]["state"]) == {"emb.weight"}
    resumed = Tied(1)
    other = AdamW(resumed.parameters())
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert resumed.emb.weight is resumed.head.weight
    train(model, optimizer, [1, 2])
    train(resumed, other, [1, 2])
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_tied_parameters_whose_other_name_comes_first_get_their_state(tmp_path):
    model, resumed = Tied(), Tied(1, head_first=True)
    optimizer, other = AdamW(model.parameters()), AdamW(resumed.parameters())
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert not dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}).report
    assert_same(other.state[resumed.emb.weight], optimizer.state[model.emb.weight])
    assert resumed.emb.weight is resumed.head.weight


def test_tied_parameters_share_one_group(tmp_path):
    model = Tied()
    optimizer = AdamW([{"params": [model.head.weight], "lr": 0.5}])
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = Tied(1)
    other = AdamW([{"params": [resumed.emb.weight], "lr": 0.1}])
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


# Several optimizers


def pair(model: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """AdamW on the first layer, SGD with momentum on the last."""
    first = AdamW(model[0].parameters(), **options)
    return first, SGD(model[2].parameters(), momentum=0.9, **options)


@pytest.mark.parametrize("swapped", [False, True], ids=["same order", "swapped"])
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("kind", [list, tuple], ids=["list", "tuple"])
def test_a_list_of_optimizers_is_one_state_in_any_order(kind, swapped, stepped, tmp_path):
    model, resumed = mlp(), mlp(1)
    optimizers, others = pair(model, lr=0.1), pair(resumed, lr=0.3)
    step(*optimizers)
    dsd.save(tmp_path / "c", {"model": model, "optimizers": kind(optimizers)})
    if stepped:
        step(*others, seed=5)
    turned = kind(others[::-1] if swapped else others)
    assert not dsd.load(tmp_path / "c", {"model": resumed, "optimizers": turned}).report
    for optimizer, other in zip(optimizers, others, strict=True):
        assert_same(other.state_dict(), optimizer.state_dict())
    keys = [{key for state in one.state.values() for key in state} for one in others]
    assert keys == [{"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}]
    assert [one.param_groups[0]["lr"] for one in others] == [0.1, 0.1]
    step(*optimizers, *others, seed=1)
    assert_same(dict(resumed.named_parameters()), dict(model.named_parameters()))


def test_a_list_of_optimizers_may_be_cut_otherwise(tmp_path):
    model, resumed = mlp(), mlp(1)
    whole = AdamW(model.parameters(), lr=0.1)
    step(whole)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": whole})
    parts = [AdamW([parameter]) for parameter in resumed.parameters()]
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": parts})
    assert {part.param_groups[0]["lr"] for part in parts} == {0.1}
    step(whole, *parts, seed=1)
    assert_same(dict(resumed.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize(
    "take",
    [
        pytest.param(lambda model: (model.parameters(), model[2].parameters()), id="one layer"),
        pytest.param(lambda model: (model[2].parameters(), [model[2].bias]), id="one parameter"),
    ],
)
def test_two_optimizers_of_a_list_that_own_one_name_are_refused(take, tmp_path):
    model = mlp()
    first, second = take(model)
    with pytest.raises(MismatchError) as caught:
        dsd.save(
            tmp_path / "c",
            {"model": model, "opt": [SGD(first, lr=0.1), SGD(second, lr=0.1, momentum=0.9)]},
        )
    assert caught.value.code == "state_conflict"
    assert "2." in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "stateful",
    [
        pytest.param(
            False,
            id="without state",
        ),
        pytest.param(True, id="with state"),
    ],
)
def test_an_optimizer_that_owns_a_name_inside_a_group_of_another_is_refused(stateful, tmp_path):
    # Not the first of its group: the name of the group tells nothing.
    model = mlp()
    both = [SGD(model.parameters(), lr=0.1, momentum=0.9), SGD([model[2].bias], lr=0.2)]
    step(both[0])
    if stateful:
        both[1] = SGD([model[2].bias], lr=0.2, momentum=0.9)
        step(both[1])
    with pytest.raises(MismatchError) as caught:
        dsd.save(tmp_path / "c", {"model": model, "opt": both})
    assert caught.value.code == "state_conflict"


def test_two_optimizers_that_own_one_name_are_refused_at_load_too(tmp_path):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(optimizer)
    dsd.save(tmp_path / "c", {"model": model, "opt": optimizer})
    both = [SGD(model.parameters(), lr=0.5), SGD([model[2].bias], lr=0.5)]
    with pytest.raises(DsdError):
        dsd.load(tmp_path / "c", {"model": model, "opt": both})
    assert [one.param_groups[0]["lr"] for one in both] == [0.5, 0.5]


@pytest.mark.parametrize(
    "swapped",
    [
        pytest.param(False, id="same order"),
        pytest.param(True, id="swapped"),
    ],
)
def test_an_empty_group_stays_with_its_optimizer(swapped, tmp_path):
    model = mlp()

    def make(rate: float) -> list[torch.optim.Optimizer]:
        return [
            AdamW([{"params": [], "lr": rate}, {"params": model[0].parameters()}]),
            SGD([{"params": [], "lr": 2 * rate}, {"params": model[2].parameters()}], lr=0.1),
        ]

    optimizers, others = make(0.5), make(7.0)
    dsd.save(tmp_path / "c", {"model": model, "opt": optimizers})
    dsd.load(tmp_path / "c", {"model": model, "opt": others[::-1] if swapped else others})
    for optimizer, other in zip(optimizers, others, strict=True):
        assert_same(other.state_dict(), optimizer.state_dict())


def test_two_optimizers_over_one_model_are_two_sections(tmp_path):
    model = mlp()
    first, second = AdamW(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.2, momentum=0.9)
    step(first, second)
    dsd.save(tmp_path / "c", {"model": model, "first": first, "second": second})
    resumed = mlp(1)
    others = AdamW(resumed.parameters()), SGD(resumed.parameters(), lr=5.0, momentum=0.9)
    dsd.load(tmp_path / "c", {"model": resumed, "first": others[0], "second": others[1]})
    assert_same(others[0].state_dict(), first.state_dict())
    assert_same(others[1].state_dict(), second.state_dict())


@pytest.mark.parametrize("kind", ["dict", "list", "nested"])
def test_an_optimizer_for_each_parameter_is_a_state(kind, tmp_path):
    def make(model: nn.Module, rate: float) -> Any:
        each = {
            name: Adam([parameter], lr=rate * (index + 1))
            for index, (name, parameter) in enumerate(model.named_parameters())
        }
        return {"dict": each, "list": list(each.values()), "nested": {"a": [0, each]}}[kind]

    def parts(tree: Any) -> list[torch.optim.Optimizer]:
        if kind == "list":
            return tree
        return list((tree if kind == "dict" else tree["a"][1]).values())

    model, resumed = mlp(), mlp(1)
    optimizers, others = make(model, 0.1), make(resumed, 5.0)
    step(*parts(optimizers))
    dsd.save(tmp_path / "c", {"model": model, "opt": optimizers})
    dsd.load(tmp_path / "c", {"model": resumed, "opt": others})
    for optimizer, other in zip(parts(optimizers), parts(others), strict=True):
        assert_same(other.state_dict(), optimizer.state_dict())


def test_stages_with_rates_of_their_own_keep_them_in_checkpoints_of_their_own(tmp_path):
    stages = [nn.ModuleDict({str(rank): nn.Linear(2, 2)}) for rank in range(2)]
    for rank, stage in enumerate(stages):
        optimizer = AdamW(stage.parameters(), lr=0.1 * (rank + 1))
        dsd.save(tmp_path / str(rank), {"model": stage, "optimizer": optimizer})
    for rank, stage in enumerate(stages):
        other = AdamW(stage.parameters(), lr=5.0)
        dsd.load(tmp_path / str(rank), {"model": stage, "optimizer": other})
        assert other.param_groups[0]["lr"] == 0.1 * (rank + 1)


def test_stages_with_rates_of_their_own_keep_them_in_one_checkpoint(tmp_path):
    stages = [nn.ModuleDict({str(rank): nn.Linear(2, 2)}) for rank in range(2)]
    optimizers = [AdamW(s.parameters(), lr=0.1 * (r + 1)) for r, s in enumerate(stages)]
    step(*optimizers)
    dsd.save(tmp_path / "c", {"model": stages, "optimizer": optimizers})
    others = [AdamW(stage.parameters(), lr=5.0) for stage in stages]
    dsd.load(tmp_path / "c", {"model": stages, "optimizer": others})
    for optimizer, other in zip(optimizers, others, strict=True):
        assert_same(other.state_dict(), optimizer.state_dict())


def test_stages_can_become_one_model_with_one_optimizer(tmp_path):
    stages = [nn.ModuleDict({str(rank): nn.Linear(2, 2)}) for rank in range(2)]
    optimizers = [AdamW(stage.parameters(), lr=0.1) for stage in stages]
    step(*optimizers)
    dsd.save(tmp_path / "c", {"model": stages, "optimizer": optimizers})
    whole = nn.ModuleDict({str(rank): nn.Linear(2, 2) for rank in range(2)})
    other = AdamW(whole.parameters(), lr=5.0)
    dsd.load(tmp_path / "c", {"model": whole, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.1
    for stage, optimizer in zip(stages, optimizers, strict=True):
        for name, parameter in stage.named_parameters():
            assert_same(other.state[whole.get_parameter(name)], optimizer.state[parameter])


def test_state_of_the_optimizer_itself_stays_with_the_one_that_has_it(tmp_path):
    model = mlp()
    first, second = pair(model, lr=0.1)
    second.state["global"] = {"count": 3}
    dsd.save(tmp_path / "c", {"model": model, "opt": [first, second]})
    others = pair(model, lr=0.5)
    dsd.load(tmp_path / "c", {"model": model, "opt": list(others)})
    assert others[1].state["global"] == {"count": 3}
    assert "global" not in others[0].state


def test_each_optimizer_of_a_list_may_have_state_of_its_own(tmp_path):
    model = mlp()
    optimizers = pair(model, lr=0.1)
    for number, optimizer in enumerate(optimizers):
        optimizer.state["global"] = {"count": number}
    dsd.save(tmp_path / "c", {"model": model, "opt": list(optimizers)})
    others = pair(model, lr=0.5)
    dsd.load(tmp_path / "c", {"model": model, "opt": list(others)})
    assert [other.state["global"] for other in others] == [{"count": 0}, {"count": 1}]


# Several models, or none


def test_names_are_those_of_sections_where_an_optimizer_works_on_several_models(tmp_path):
    models = {"encoder": mlp(1), "decoder": mlp(2)}
    optimizer = AdamW([p for model in models.values() for p in model.parameters()])
    step(optimizer)
    dsd.save(tmp_path / "c", {**models, "optimizer": optimizer})
    stored = dsd.load(tmp_path / "c")["optimizer"]["state"]
    assert set(stored) == {f"{part}/{name}" for part in models for name in NAMES}
    resumed = {"encoder": mlp(3), "decoder": mlp(4)}
    other = AdamW([p for model in resumed.values() for p in model.parameters()])
    dsd.load(tmp_path / "c", {**resumed, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())
    for part, model in models.items():
        assert_same(states(resumed[part], other), states(model, optimizer))


@pytest.mark.parametrize("turned", ["models", "parameters"])
def test_several_models_in_another_order_get_their_own_state(turned, tmp_path):
    models = {"a": mlp(1), "b": mlp(2)}
    optimizer = AdamW([p for model in models.values() for p in model.parameters()])
    step(optimizer)
    dsd.save(tmp_path / "c", {**models, "optimizer": optimizer})
    resumed = {"b": mlp(3), "a": mlp(4)} if turned == "models" else {"a": mlp(4), "b": mlp(3)}
    other = AdamW([p for part in ("b", "a") for p in resumed[part].parameters()])
    dsd.load(tmp_path / "c", {**resumed, "optimizer": other})
    for part, model in models.items():
        assert_same(states(resumed[part], other), states(model, optimizer))


def test_models_below_dicts_and_lists_are_found(tmp_path):
    gan = {"nets": {"gen": mlp(1), "rest": [3, {"dis": mlp(2)}]}}
    parts = gan["nets"]["gen"], gan["nets"]["rest"][1]["dis"]
    optimizer = AdamW([p for model in parts for p in model.parameters()])
    step(optimizer)
    dsd.save(tmp_path / "c", {**gan, "opt": {"both": optimizer}})
    resumed = {"nets": {"gen": mlp(3), "rest": [3, {"dis": mlp(4)}]}}
    others = resumed["nets"]["gen"], resumed["nets"]["rest"][1]["dis"]
    other = AdamW([p for model in others for p in model.parameters()])
    dsd.load(tmp_path / "c", {**resumed, "opt": {"both": other}})
    for model, new in zip(parts, others, strict=True):
        assert_same(states(new, other), states(model, optimizer))


def test_an_optimizer_may_come_before_its_model(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"optimizer": optimizer, "zzz": {"model": model}})
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    dsd.load(tmp_path / "c", {"optimizer": other, "zzz": {"model": resumed}})
    assert_same(state_of(resumed, other), state_of(model, optimizer))


@pytest.mark.parametrize(
    "flip",
    [
        pytest.param(False, id="same order"),
        pytest.param(
            True,
            id="other order",
        ),
    ],
)
def test_a_part_that_is_also_a_section_does_not_change_what_is_found(flip, tmp_path):
    # The parameters are in two sections, under two names; which is meant may not hang on order.
    def state(seed: int, *, other: bool) -> dict[str, Any]:
        model = mlp(seed)
        both = {"model": model, "encoder": model[0]}
        optimizer = AdamW(model[0].parameters())
        return {**(dict(reversed(both.items())) if other else both), "optimizer": optimizer}

    one = state(0, other=False)
    step(one["optimizer"])
    dsd.save(tmp_path / "c", one)
    two = state(1, other=flip)
    assert not dsd.load(tmp_path / "c", two).report
    assert_same(two["optimizer"].state_dict(), one["optimizer"].state_dict())


def test_a_model_that_is_added_as_a_section_does_not_hide_the_state_of_the_first(tmp_path):
    # A new head beside the old trunk, in the same optimizer.
    trunk = mlp(0)
    optimizer = AdamW(trunk.parameters(), lr=0.5)
    step(optimizer)
    dsd.save(tmp_path / "c", {"trunk": trunk, "optimizer": optimizer})
    resumed, head = mlp(1), nn.Linear(3, 2)
    other = AdamW([*resumed.parameters(), *head.parameters()])
    state = {"trunk": resumed, "head": head, "optimizer": other}
    report = dsd.load(tmp_path / "c", state, strict=False).report
    assert_same(states(resumed, other), states(trunk, optimizer))
    assert not report.unexpected


def test_a_model_that_is_gone_as_a_section_does_not_hide_the_state_of_the_other(tmp_path):
    trunk, head = mlp(0), nn.Linear(3, 2)
    optimizer = AdamW([*trunk.parameters(), *head.parameters()], lr=0.5)
    step(optimizer)
    dsd.save(tmp_path / "c", {"trunk": trunk, "head": head, "optimizer": optimizer})
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    dsd.load(tmp_path / "c", {"trunk": resumed, "optimizer": other}, strict=False)
    assert_same(states(resumed, other), states(trunk, optimizer))


def test_an_optimizer_over_tensors_of_the_state_needs_no_module(tmp_path):
    z = noise(0, 3).requires_grad_()
    optimizer = Adam([z])
    step(optimizer)
    dsd.save(tmp_path / "c", {"z": z, "opt": optimizer})
    assert set(dsd.load(tmp_path / "c")["opt"]["state"]) == {"z"}
    y = noise(1, 3).requires_grad_()
    other = Adam([y])
    dsd.load(tmp_path / "c", {"z": y, "opt": other})
    assert_same_tensor(y.detach(), z.detach())
    assert_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("shape", ["dict", "list", "tuple", "nested", "odd names"])
def test_an_optimizer_over_tensors_in_containers_finds_them(shape, tmp_path):
    def make(seed: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
        a, b = noise(seed, 2).requires_grad_(), noise(seed + 10, 2).requires_grad_()
        held = {
            "dict": {"a": a, "b": b},
            "list": [a, b],
            "tuple": (a, b),
            "nested": {"x": [{"a": a}, (b, 1)]},
            "odd names": {"a/b": a, "a": {"b": b}, "": {"": 1}},
        }
        return {"z": held[shape]}, [a, b]

    state, tensors = make(0)
    optimizer = Adam(tensors)
    step(optimizer)
    tensors[0].grad = None
    optimizer.state[tensors[0]]["step"].fill_(7)
    dsd.save(tmp_path / "c", {**state, "opt": optimizer})
    live, others = make(1)
    other = Adam(others[::-1])
    dsd.load(tmp_path / "c", {**live, "opt": other})
    for old, new in zip(tensors, others, strict=True):
        assert_same_tensor(new.detach(), old.detach())
        assert_same(other.state[new], optimizer.state[old])


def test_an_optimizer_over_a_model_and_a_tensor_finds_both(tmp_path):
    def make(seed: int) -> dict[str, Any]:
        model, z = mlp(seed), noise(seed, 3).requires_grad_()
        return {"model": model, "z": z, "opt": Adam([*model.parameters(), z])}

    state, other = make(0), make(1)
    step(state["opt"])
    dsd.save(tmp_path / "c", state)
    dsd.load(tmp_path / "c", other)
    assert_same(other["opt"].state_dict(), state["opt"].state_dict())
    assert set(dsd.load(tmp_path / "c")["opt"]["state"]) == {"z", *(f"model/{n}" for n in NAMES)}


def test_a_parameter_that_is_a_buffer_is_named_too(tmp_path):
    model = nn.Module()
    model.register_buffer("code", noise(0, 3))
    optimizer = SGD([model.code], lr=0.1, momentum=0.9)
    step(optimizer)
    dsd.save(tmp_path / "c", {"model": model, "opt": optimizer})
    assert set(dsd.load(tmp_path / "c")["opt"]["state"]) == {"code"}


# Without the module


def test_an_optimizer_without_its_module_is_refused(tmp_path):
    model, optimizer = trained()
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", {"optimizer": optimizer})
    assert caught.value.code == "optimizer_without_module"
    assert caught.value.path_in_tree == "$.optimizer"
    assert "model" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.snapshot({"optimizer": optimizer})
    assert caught.value.code == "optimizer_without_module"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: {"model": mlp(1)}, id="another model"),
        pytest.param(lambda model: {"model": model.state_dict()}, id="its state dict"),
        pytest.param(lambda model: {"model": model[0]}, id="a part of it"),
        pytest.param(lambda model: {"model": None}, id="nothing"),
    ],
)
def test_an_optimizer_whose_parameters_are_elsewhere_is_refused(make, tmp_path):
    model, optimizer = trained()
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", {**make(model), "opt": {"a": [0, optimizer]}})
    assert caught.value.code == "optimizer_without_module"
    assert caught.value.path_in_tree == "$.opt.a[1]"
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_that_was_replaced_after_the_optimizer_was_made_is_noticed(tmp_path):
    model, optimizer = trained()
    model[2].bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert caught.value.code == "optimizer_without_module"
    assert "1 of the optimizer's 4" in str(caught.value)


def test_loading_an_optimizer_without_its_module_is_refused_and_changes_nothing(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = trained(1)
    before = dsd.snapshot({"model": resumed, "optimizer": other})
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.load(tmp_path / "c", {"optimizer": other}, select="optimizer")
    assert caught.value.code == "optimizer_without_module"
    assert_same(dsd.snapshot({"model": resumed, "optimizer": other}), before)


def test_the_optimizer_of_a_checkpoint_is_given_back_where_the_state_has_none(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    given = dsd.load(tmp_path / "c", {"model": mlp(1), "optimizer": None})
    assert_same(given["optimizer"]["state"], states(model, optimizer))


def test_an_optimizer_that_the_state_leaves_out_is_unexpected(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", {"model": mlp(1)})
    assert f"optimizer/state/{W0}/exp_avg" in caught.value.report.unexpected


def test_an_optimizer_that_the_checkpoint_lacks_is_missing(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model})
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", state)
    assert caught.value.report.missing == ["optimizer"]
    report = dsd.load(tmp_path / "c", state, strict=False).report
    assert report.missing == ["optimizer"]
    assert len(optimizer.state) == 4


def test_a_state_dict_of_torch_goes_to_the_parameters_at_its_places(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer.state_dict()})
    resumed, other = trained(1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_of_torch_of_other_groups_is_a_mismatch(strict, tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer.state_dict()})
    resumed, other = trained(1)
    spare = torch.nn.Parameter(torch.ones(2))
    resumed.register_parameter("spare", spare)
    other.add_param_group({"params": [spare]})
    state = {"model": resumed, "optimizer": other}
    before = dsd.snapshot(state)["optimizer"]
    if strict:
        with pytest.raises(MismatchError) as caught:
            dsd.load(tmp_path / "c", state)
        report = caught.value.report
    else:
        report = dsd.load(tmp_path / "c", state, strict=False).report
    assert [item.name for item in report.mismatched] == ["optimizer"]
    assert_same(dsd.snapshot(state)["optimizer"], before)


# strict, part by part


def test_strictness_can_differ_between_model_and_optimizer(tmp_path):
    model = Named("a", "b")
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    frozen = Named("a", "b", seed=1)
    other = AdamW(frozen.a.parameters())
    state = {"model": frozen, "optimizer": other}
    with pytest.raises(MismatchError):
        dsd.load(tmp_path / "c", state, strict={"optimizer": True, "*": False})
    report = dsd.load(tmp_path / "c", state, strict={"optimizer": False}).report
    assert all(name.startswith("optimizer/state/b.") for name in report.unexpected)
    assert report.unexpected
    assert_same(states(frozen, other)["a.weight"], states(model, optimizer)["a.weight"])


def test_a_strict_load_that_fails_leaves_the_options_of_the_groups(tmp_path):
    model = Named("a", "b")
    optimizer = AdamW(model.parameters(), lr=0.5)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = AdamW(model.a.parameters(), lr=0.1)
    with pytest.raises(MismatchError):
        dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.1


# select


def loaded(path: Any, select: Any) -> tuple[nn.Module, AdamW, Any, dict[str, Any]]:
    """Load a part over another run; return also what there was before."""
    resumed, other = trained(1, 3, lr=0.7)
    state = {"model": resumed, "optimizer": other}
    before = dsd.snapshot(state)
    dsd.load(path, state, select=select)
    return resumed, other, before, dsd.snapshot(state)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint, and what is in it."""
    model, optimizer = trained(lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    dsd.save(tmp_path / "c", state)
    return tmp_path / "c", dsd.snapshot(state)


def test_the_model_alone_can_be_loaded_beside_its_optimizer(saved):
    path, stored = saved
    *_, before, after = loaded(path, "model")
    assert_same(after["model"], stored["model"])
    assert_same(after["optimizer"], before["optimizer"])


def test_the_optimizer_alone_can_be_loaded(saved):
    path, stored = saved
    *_, before, after = loaded(path, "optimizer")
    assert_same(after["optimizer"], stored["optimizer"])
    assert_same(after["model"], before["model"])


def test_the_state_can_be_loaded_without_the_options(saved):
    path, stored = saved
    *_, before, after = loaded(path, "optimizer/state")
    assert_same(after["optimizer"]["state"], stored["optimizer"]["state"])
    assert_same(after["optimizer"]["param_groups"], before["optimizer"]["param_groups"])


def test_the_options_can_be_loaded_without_the_state(saved):
    path, stored = saved
    *_, before, after = loaded(path, "optimizer/param_groups")
    assert_same(after["optimizer"]["param_groups"], stored["optimizer"]["param_groups"])
    assert_same(after["optimizer"]["state"], before["optimizer"]["state"])


def test_one_option_can_be_loaded_alone(saved):
    path, stored = saved
    *_, before, after = loaded(path, "optimizer/param_groups/*/lr")
    assert after["optimizer"]["param_groups"][W0]["lr"] == 0.1
    assert_same(after["optimizer"]["state"], before["optimizer"]["state"])


def test_the_state_of_one_parameter_can_be_loaded_alone(saved):
    path, stored = saved
    *_, before, after = loaded(path, f"optimizer/state/{W0}")
    wanted = {**before["optimizer"]["state"], W0: stored["optimizer"]["state"][W0]}
    assert_same(after["optimizer"]["state"], wanted)
    assert_same(after["optimizer"]["param_groups"], before["optimizer"]["param_groups"])


@pytest.mark.parametrize("glob", [f"optimizer/state/{W0}/exp_avg", "optimizer/state/*/exp_avg"])
def test_one_kind_of_state_can_be_loaded_alone(glob, saved):
    path, stored = saved
    *_, before, after = loaded(path, glob)
    names = [W0] if W0 in glob else NAMES
    wanted = {name: dict(state) for name, state in before["optimizer"]["state"].items()}
    for name in names:
        wanted[name]["exp_avg"] = stored["optimizer"]["state"][name]["exp_avg"]
    assert_same(after["optimizer"]["state"], wanted)


def test_a_selection_that_names_no_part_of_the_optimizer_needs_none_of_it(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": {"kept": "elsewhere"}})
    resumed, other = trained(1)
    before = dsd.snapshot({"model": resumed, "optimizer": other})["optimizer"]
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, select="model")
    assert_same(dsd.snapshot({"model": resumed, "optimizer": other})["optimizer"], before)


def test_a_selection_leaves_state_of_the_optimizer_itself_alone(tmp_path):
    model, optimizer = trained()
    optimizer.state["global"] = {"count": 3}
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = trained(1)
    other.state["global"] = {"count": 4}
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, select="model")
    assert other.state["global"] == {"count": 4}


def test_a_selection_that_matches_nothing_is_an_error(saved):
    path, _ = saved
    with pytest.raises(EntryNotFoundError):
        loaded(path, "optimizer/state/9.weight")


def test_what_is_not_selected_is_not_read(saved, monkeypatch):
    path, _ = saved
    label = next(p.name for p in path.iterdir() if "optimizer" in p.name)
    data = bytearray((path / label).read_bytes())
    data[-20:] = b"\xff" * 20
    (path / label).write_bytes(data)
    assert not dsdformat.verify(path).ok
    loaded(path, "model")


# rename


RENAMED = {"0": "enc", "2": "dec"}


def backbone(seed: int = 1) -> nn.Module:
    """The layers of `mlp`, under other names."""
    model = nn.Sequential()
    for old, new in RENAMED.items():
        model.add_module(new, mlp(seed)[int(old)])
    return model


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    "rename",
    [
        pytest.param([("model/0.", "model/enc."), ("model/2.", "model/dec.")], id="prefixes"),
        pytest.param(
            {f"model/{n}": f"model/{RENAMED[n[0]]}{n[1:]}" for n in NAMES}, id="names"
        ),
        pytest.param(
            lambda name: name.replace("model/0.", "model/enc.").replace("model/2.", "model/dec."),
            id="a function of the model's names",
        ),
        pytest.param(
            lambda name: name.replace("/0.", "/enc.").replace("/2.", "/dec."),
            id="a function of all names",
        ),
    ],
)  # fmt: skip
def test_entries_of_an_optimizer_follow_parameters_that_are_renamed(rename, stepped, tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = backbone()
    other = AdamW(resumed.parameters(), lr=0.7)
    if stepped:
        step(other, seed=9)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, rename=rename)
    assert_same(other.state_dict(), optimizer.state_dict())
    assert_same(list(resumed.parameters()), list(model.parameters()))


def test_names_that_are_swapped_swap_their_state(tmp_path):
    model = Named("a", "b")
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = Named("a", "b", seed=3)
    other = AdamW(resumed.parameters())
    swap = [("model/a.", "model/b."), ("model/b.", "model/a.")]
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, rename=swap)
    assert_same_tensor(resumed.a.weight.detach(), model.b.weight.detach())
    assert_same(other.state[resumed.a.weight], optimizer.state[model.b.weight])
    assert_same(other.state[resumed.b.bias], optimizer.state[model.a.bias])


def test_a_function_that_swaps_names_everywhere_swaps_their_state_once(tmp_path):
    model = Named("a", "b")
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = Named("a", "b", seed=3)
    other = AdamW(resumed.parameters())

    def swap(name: str) -> str:
        return name.replace("/a.", "/?.").replace("/b.", "/a.").replace("/?.", "/b.")

    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, rename=swap)
    assert_same_tensor(resumed.a.weight.detach(), model.b.weight.detach())
    assert_same(other.state[resumed.a.weight], optimizer.state[model.b.weight])
    assert_same(other.state[resumed.b.bias], optimizer.state[model.a.bias])


def test_a_function_that_adds_to_names_everywhere_adds_once(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = nn.Sequential()
    resumed.add_module("0", nn.Sequential(mlp(1)))  # names `0.0.0.weight` and so on
    other = AdamW(resumed.parameters())

    def rename(name: str) -> str:
        return name.replace("/0.", "/0.0.0.").replace("/2.", "/0.0.2.")

    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, rename=rename)
    assert_same(other.state_dict(), optimizer.state_dict())


def test_a_section_of_another_name_takes_its_optimizer_along(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    rename = [("model/", "net/"), ("optimizer/", "opt/")]
    dsd.load(tmp_path / "c", {"net": resumed, "opt": other}, rename=rename)
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_a_section_and_layers_of_another_name_take_their_optimizer_along(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = backbone()
    other = AdamW(resumed.parameters())
    rename = [("model/0.", "net/enc."), ("model/2.", "net/dec.")]
    dsd.load(tmp_path / "c", {"net": resumed, "optimizer": other}, rename=rename)
    assert_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    "rename",
    [
        pytest.param([("a/0.", "a/enc."), ("a/2.", "a/dec.")], id="layers of one"),
        pytest.param([("a/0.", "x/enc."), ("a/2.", "x/dec.")], id="one and its layers"),
        pytest.param([("a/", "x/"), ("b/", "y/")], id="both"),
        pytest.param([("a/", "b/"), ("b/", "a/")], id="swapped"),
    ],
)
def test_models_of_other_names_take_the_optimizer_of_both_along(rename, tmp_path):
    models = {"a": mlp(1), "b": mlp(2)}
    optimizer = AdamW([p for model in models.values() for p in model.parameters()])
    step(optimizer)
    dsd.save(tmp_path / "c", {**models, "optimizer": optimizer})
    names = dict(rename)
    first = names["a/"][0] if "a/" in names else names["a/0."][0]
    second = names.get("b/", "b/")[0]
    resumed = {first: mlp(3) if "a/" in names else backbone(3), second: mlp(4)}
    other = AdamW([p for model in resumed.values() for p in model.parameters()])
    dsd.load(tmp_path / "c", {**resumed, "optimizer": other}, rename=rename)
    assert_same(other.state_dict(), optimizer.state_dict())


def test_an_optimizer_over_plain_tensors_follows_those_that_are_renamed(tmp_path):
    z = noise(0, 3).requires_grad_()
    optimizer = Adam([z])
    step(optimizer)
    dsd.save(tmp_path / "c", {"z": z, "opt": optimizer})
    y = noise(1, 3).requires_grad_()
    other = Adam([y])
    dsd.load(tmp_path / "c", {"y": y, "opt": other}, rename={"z": "y"})
    assert_same(other.state_dict(), optimizer.state_dict())


def test_a_name_that_holds_a_slash_is_renamed_with_its_state(tmp_path):
    model = nn.ModuleDict({"a/b@%": nn.Linear(2, 2)})
    optimizer = AdamW(model.parameters())
    step(optimizer)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = nn.ModuleDict({"plain": nn.Linear(2, 2)})
    other = AdamW(resumed.parameters())
    with dsdformat.open(tmp_path / "c") as checkpoint:
        prefix = next(e.name for e in checkpoint if "model" in e.name).rpartition(".")[0]
    rename = [(prefix + ".", "model/plain.")]
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, rename=rename)
    assert_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("drop", ["model/2.", "everywhere"])
def test_parameters_that_are_dropped_take_their_state_with_them(drop, tmp_path):
    model = Named("a", "b")
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = Named("a", seed=1)
    other = AdamW(resumed.parameters())

    def rename(name: str) -> str | None:
        gone = "/b." if drop == "everywhere" else "model/b."
        return None if gone in name else name

    report = dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, rename=rename).report
    assert not report
    assert_same(states(resumed, other)["a.weight"], states(model, optimizer)["a.weight"])
