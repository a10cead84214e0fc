"""State dicts in one process, where users of other libraries have been let down.

`dsdformat.torch.state_dict` without a process group and without files: what is read is the state,
reading it changes nothing, and setting it leaves nothing of another one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    checkpoint_wrapper,
)
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dsdformat.errors import DsdError, DsdPrecisionWarning, MismatchError  # noqa: E402
from dsdformat.torch.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.torch_runtime.exact import assert_same, assert_same_tensor  # noqa: E402
from tests.torch_runtime.optimizer_cases import (  # noqa: E402
    CASES,
    listed,
    mlp,
    noise,
    optimizer_classes,
    state_of,
    train,
)

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
Optimizer = torch.optim.Optimizer

NESTED = StateDictOptions()
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LOOSE = StateDictOptions(strict=False)
LOOSE_FLAT = StateDictOptions(strict=False, flatten_optimizer_state_dict=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT_FROM_0 = StateDictOptions(
    full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=True
)

both = pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flat"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def read(model: nn.Module, optimizer: Any, options: Any = NESTED) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=options)


def passed_on(
    model: nn.Module, optimizer: Any, other: nn.Module, its_own: Any, options: Any = NESTED
) -> None:
    """Set into one optimizer what is read from another."""
    state = read(model, optimizer, options)
    set_optimizer_state_dict(other, its_own, state, options=options)


# Names


class Part(nn.Module):
    """A model of which a part is wrapped, and may be kept without the wrapper too."""

    def __init__(self, wrap: Callable[[nn.Module], Any], *, kept: bool = False) -> None:
        super().__init__()
        layers = mlp()
        if kept:
            self.layers = layers
        self.model = wrap(layers)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
    "checkpointed-compiled": lambda module: checkpoint_wrapper(compiled(module)),
    "compiled-checkpointed": lambda module: compiled(checkpoint_wrapper(module)),
}
wrapped = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


@wrapped
def test_names_do_not_depend_on_what_was_called_before(wrap):
    model = wrap(nn.Linear(8, 8))
    optimizer = AdamW(model.parameters())
    own = list(model.state_dict())
    for _ in range(3):
        state = get_model_state_dict(model)
        assert list(state) == ["weight", "bias"]
        assert set_model_state_dict(model, state) == ([], [])
        passed_on(model, optimizer, model, optimizer, FLAT)
        assert list(read(model, optimizer)["state"]) == ["weight", "bias"]
        assert list(model.state_dict()) == own


@wrapped
def test_names_of_wrappers_are_left_out_in_the_middle(wrap):
    source, plain = Part(wrap), Part(lambda module: module)
    assert list(get_model_state_dict(source)) == list(plain.state_dict())
    set_model_state_dict(plain, get_model_state_dict(source))
    assert_same(dict(plain.state_dict()), get_model_state_dict(source))
    back = Part(wrap)
    set_model_state_dict(back, plain.state_dict())
    assert_same(get_model_state_dict(back), get_model_state_dict(source))


@wrapped
def test_a_part_that_is_kept_without_its_wrapper_too_is_one_tensor_under_two_names(wrap):
    model = Part(wrap, kept=True)
    state = get_model_state_dict(model)
    assert list(state) == [
        f"{part}.{name}" for part in ("layers", "model") for name in mlp().state_dict()
    ]
    for name in mlp().state_dict():
        assert state[f"layers.{name}"].data_ptr() == state[f"model.{name}"].data_ptr()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert len(read(model, optimizer)["state"]) == len(mlp().state_dict())


class Own(nn.Module):
    """The users' own modules, called as torch calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Sequential(nn.Linear(2, 2))


@wrapped
def test_modules_of_the_users_keep_names_that_wrappers_have(wrap):
    model, plain = wrap(Own()), Own()
    names = ["module.weight", "module.bias", "_orig_mod.0.weight", "_orig_mod.0.bias"]
    assert list(get_model_state_dict(model)) == names
    set_model_state_dict(plain, get_model_state_dict(model))
    assert_same(dict(plain.state_dict()), get_model_state_dict(model))
    optimizer = AdamW(model.parameters())
    assert list(read(model, optimizer)["state"]) == names


class Counting(nn.Module):
    """Persistent buffers and others, as a whole and one level down."""

    def __init__(self, *, nested: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("left_out", torch.ones(3), persistent=False)
        if nested:
            self.below = Counting(nested=False)


@wrapped
def test_buffers_that_are_not_persistent_are_in_no_state(wrap):
    names = ["weight", "kept", "below.weight", "below.kept"]
    assert list(get_model_state_dict(wrap(Counting()))) == names


# Reading changes nothing

CLASSES = {kind.__name__: CASES[kind.__name__] for kind in optimizer_classes()}


@both
def test_reading_before_the_first_step_changes_no_step(options):
    weights = []
    for reads in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(5, 5, bias=False)
        optimizer = AdamW(model.parameters(), lr=0.1)
        if reads:
            random = torch.get_rng_state()
            state = read(model, optimizer, options)
            assert len(optimizer.state) == 0
            assert model.weight.grad is None
            assert_same_tensor(torch.get_rng_state(), random)
            steps = [state[k] for k in state if k.endswith("step")] if options is FLAT else None
            for step in steps or [state["state"]["weight"]["step"]]:
                assert float(step) == 0.0
        model.weight.grad = noise(1, 5, 5)
        optimizer.step()
        weights.append(model.weight.detach())
    assert_same_tensor(*weights)


@both
@pytest.mark.parametrize("case", listed(CLASSES))
def test_no_optimizer_is_stepped_or_given_a_state_by_reading_it(case, options):
    (model, optimizer), (plain, its_own) = case.make(), case.make()
    before = copy.deepcopy(state_of(model, optimizer))
    count = len(optimizer.state)
    read(model, optimizer, options)
    assert len(optimizer.state) == count
    assert_same(state_of(model, optimizer), before)
    case.train(model, optimizer, range(2))
    case.train(plain, its_own, range(2))
    before = copy.deepcopy(state_of(model, optimizer))
    read(model, optimizer, options)
    assert_same(state_of(model, optimizer), before)
    assert_same(state_of(model, optimizer), state_of(plain, its_own))


def test_reading_calls_no_hook_of_a_step():
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("any")),
        register_optimizer_step_post_hook(lambda *_: calls.append("any")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("own")),
        optimizer.register_step_post_hook(lambda *_: calls.append("own")),
    ]
    try:
        read(model, optimizer)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == []


@both
@pytest.mark.parametrize("steps", [0, 1])
def test_gradients_that_were_kept_hide_no_state(options, steps):
    model, optimizer = CASES["AdamW"].make()
    train(model, optimizer, range(steps))
    model(noise(1, 5, 4)).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    copies = copy.deepcopy(grads)
    names = list(dict(model.named_parameters()))
    state = read(model, optimizer, options)
    assert all(a.grad is b for a, b in zip(model.parameters(), grads, strict=True))
    assert_same(grads, copies)
    if options is FLAT:
        found = {name: float(state[f"state.{name}.step"]) for name in names}
    else:
        found = {name: float(entry["step"]) for name, entry in state["state"].items()}
    assert found == dict.fromkeys(names, float(steps))
    assert len(optimizer.state) == (len(names) if steps else 0)


# Setting restores a state, no more and no less


@both
@pytest.mark.parametrize("case", listed(CLASSES))
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "stepped"])
def test_any_optimizer_goes_on_from_what_was_read(case, options, used):
    (model, optimizer), (other, its_own) = case.make(), case.make(seed=1)
    case.train(model, optimizer, range(2))
    if used:
        case.train(other, its_own, range(7, 8))
    passed_on(model, optimizer, other, its_own, options)
    set_model_state_dict(other, get_model_state_dict(model))
    assert_same(state_of(other, its_own), state_of(model, optimizer))
    case.train(model, optimizer, range(2, 4))
    case.train(other, its_own, range(2, 4))
    assert_same(state_of(other, its_own), state_of(model, optimizer))


@pytest.mark.parametrize("options", [FROM_0, FLAT_FROM_0], ids=["nested", "flat"])
@pytest.mark.parametrize(
    "case",
    listed(CLASSES),
)
def test_any_optimizer_goes_on_from_what_rank_0_gives(case, options):
    (model, optimizer), (other, its_own) = case.make(), case.make(seed=1)
    case.train(model, optimizer, range(2))
    passed_on(model, optimizer, other, its_own, options)
    assert_same(its_own.state_dict(), optimizer.state_dict())


@both
@pytest.mark.parametrize(
    "case",
    listed(CLASSES),
)
def test_an_optimizer_that_was_read_before_its_first_step_goes_on_from_the_start(case, options):
    check_before_the_first_step(case.make, case.train, options)


@both
def test_dampened_momentum_that_was_read_before_the_first_step_starts_as_it_must(options):
    def make() -> tuple[nn.Module, Optimizer]:
        model = mlp()
        return model, SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    check_before_the_first_step(make, train, options)


def check_before_the_first_step(make: Any, trained: Any, options: Any) -> None:
    (model, optimizer), wanted = make(), make()
    passed_on(model, optimizer, model, optimizer, options)
    trained(model, optimizer, range(2))
    trained(*wanted, range(2))
    assert_same(state_of(model, optimizer), state_of(*wanted))


@both
def test_an_optimizer_without_state_gets_no_entries(options):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    other = copy.deepcopy(model)
    optimizer, fresh = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=5.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    passed_on(model, optimizer, other, fresh, options)
    assert fresh.state_dict()["state"] == {}
    assert len(fresh.state) == len(optimizer.state) == 0
    assert fresh.param_groups[0]["lr"] == 0.1


@both
def test_buffers_of_momentum_are_there_and_equal(options):
    model, other = mlp(bias=False), mlp(1, bias=False)
    optimizer, fresh = (SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, other))
    train(model, optimizer, [0])
    passed_on(model, optimizer, other, fresh, options)
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert [list(entry) for entry in fresh.state.values()] == [["momentum_buffer"]] * 2


@both
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "stepped"])
def test_a_parameter_that_had_no_gradient_yet_has_no_state_and_gets_none(options, used):
    model, other = mlp(bias=False), mlp(1, bias=False)
    optimizer, its_own = AdamW(model.parameters()), AdamW(other.parameters())
    model[0].weight.grad = noise(2, 6, 4)
    optimizer.step()
    state = read(model, optimizer, options)
    if options is FLAT:
        told = {key: value for key, value in state.items() if key.startswith("state.2.weight")}
        assert told == {"state.2.weight": {}}
    else:
        assert list(state["state"]) == ["0.weight", "2.weight"]
        assert state["state"]["2.weight"] == {}
    if used:
        train(other, its_own, range(3))
    set_optimizer_state_dict(other, its_own, state, options=options)
    assert list(its_own.state) == [other[0].weight]
    assert_same(dict(its_own.state[other[0].weight]), dict(optimizer.state[model[0].weight]))
    train(other, its_own, [3])
    assert [float(its_own.state[one]["step"]) for one in other.parameters()] == [2.0, 1.0]


@both
@pytest.mark.parametrize("frozen", ["0", ""], ids=["a layer", "all"])
def test_state_of_what_is_frozen_is_read_and_set(options, frozen):
    model, other = mlp(), mlp(1)
    optimizer, fresh = AdamW(model.parameters()), AdamW(other.parameters())
    train(model, optimizer, range(2))
    for one in (model, other):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    passed_on(model, optimizer, other, fresh, options)
    set_model_state_dict(other, get_model_state_dict(model))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    for one, its_own in ((model, optimizer), (other, fresh)):
        one.requires_grad_(True)
        train(one, its_own, range(2, 4))
    assert_same(state_of(other, fresh), state_of(model, optimizer))


@both
def test_a_step_that_was_further_is_the_one_that_was_set(options):
    (model, optimizer), (other, its_own) = CASES["AdamW"].make(), CASES["AdamW"].make(seed=1)
    train(model, optimizer, range(7))
    train(other, its_own, range(3))
    passed_on(model, optimizer, other, its_own, options)
    assert {float(entry["step"]) for entry in its_own.state.values()} == {7.0}
    set_model_state_dict(other, get_model_state_dict(model))
    train(model, optimizer, [7])
    train(other, its_own, [7])
    assert_same(state_of(other, its_own), state_of(model, optimizer))


@both
def test_momentum_and_losses_go_on_bit_for_bit(options):
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return (model(noise(step, 5, 4)) - 1).square().sum()

    (model, optimizer), (other, fresh) = CASES["AdamW"].make(), CASES["AdamW"].make(seed=1)
    train(model, optimizer, range(5))
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state, options=options)
    assert_same(fresh.state_dict(), optimizer.state_dict())
    losses: list[list[float]] = [[], []]
    for step in range(5, 10):
        for found, (one, its_own) in zip(losses, ((model, optimizer), (other, fresh)), strict=True):
            found.append(loss(one, step).item())
            train(one, its_own, [step])
    assert losses[0] == losses[1]


@both
def test_a_state_is_set_again_and_again_while_training_goes_on(options):
    model, optimizer = CASES["AdamW"].make()
    for turn in range(3):
        train(model, optimizer, [turn])
        weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        wanted = copy.deepcopy(state_of(model, optimizer))
        train(model, optimizer, [10 + turn])
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options
        )
        assert_same(state_of(model, optimizer), wanted)


@both
def test_state_is_set_where_it_lies(options):
    (model, optimizer), (other, its_own) = CASES["AdamW"].make(), CASES["AdamW"].make(seed=1)
    train(model, optimizer, range(2))
    train(other, its_own, range(3))
    memory = {id(v): v.data_ptr() for entry in its_own.state.values() for v in entry.values()}
    passed_on(model, optimizer, other, its_own, options)
    found = [v for entry in its_own.state.values() for v in entry.values()]
    assert {id(value): value.data_ptr() for value in found} == memory
    assert_same(its_own.state_dict(), optimizer.state_dict())


@both
def test_state_that_was_set_is_apart_from_what_was_given(options):
    (model, optimizer), (other, fresh) = CASES["AdamW"].make(), CASES["AdamW"].make(seed=1)
    train(model, optimizer, range(2))
    state = read(model, optimizer, options)
    kept = copy.deepcopy(state)
    set_optimizer_state_dict(other, fresh, state, options=options)
    train(other, fresh, range(3))
    assert_same(state, kept)
    assert_same(read(model, optimizer, options), kept)


# Groups


def three(model: nn.Linear, rates: tuple[float, float] = (0.2, 0.3)) -> Optimizer:
    return AdamW(
        [
            {"params": [], "lr": rates[0]},
            {"params": [model.weight]},
            {"params": [model.bias], "lr": rates[1], "betas": (0.8, 0.9)},
        ]
    )


@both
def test_a_group_without_parameters_keeps_all_that_it_has(options):
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, other = three(model), three(twin, (7.0, 8.0))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for group in other.param_groups:
        group.update(betas=(0.0, 0.0), eps=1.0)
    passed_on(model, optimizer, twin, other, options)
    assert_same(other.state_dict(), optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.001, 0.3]
    assert other.param_groups[0]["betas"] == (0.9, 0.999)
    twin(torch.ones(1, 2)).sum().backward()
    other.step()


def step_all(model: nn.Module, optimizers: list[Optimizer]) -> None:
    model(noise(0, 5, 4)).square().sum().backward()
    for one in optimizers:
        one.step()
        one.zero_grad()


@both
@pytest.mark.parametrize("turned", [False, True], ids=["as read", "swapped"])
def test_groups_without_parameters_stay_with_their_optimizer(options, turned):
    def make(model: nn.Module, rate: float) -> list[Optimizer]:
        return [
            AdamW([{"params": [], "lr": rate}, {"params": model[0].parameters()}]),
            SGD(
                [{"params": [], "lr": 2 * rate}, {"params": model[2].parameters()}],
                lr=0.1,
                momentum=0.9,
            ),
        ]

    model, other = mlp(), mlp(1)
    optimizers, fresh = make(model, 0.5), make(other, 7.0)
    step_all(model, optimizers)
    state = read(model, optimizers, options)
    given = fresh[::-1] if turned else fresh
    set_optimizer_state_dict(other, given, state, options=options)
    assert_same([one.state_dict() for one in fresh], [one.state_dict() for one in optimizers])


@both
def test_what_a_schedule_and_users_have_added_comes_into_a_fresh_optimizer(options):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    added = {"tag": "a", "pair": (1, 2.0), "list": [1, [2]], "deep": {"x": {"y": None}}, "n": 3}
    optimizer.param_groups[0].update(added)
    fresh = AdamW(other.parameters(), lr=7.0)
    passed_on(model, optimizer, other, fresh, options)
    (group,) = fresh.param_groups
    assert group["initial_lr"] == 0.1
    assert group["lr"] == 0.1 * 0.1
    assert_same({key: group[key] for key in added}, added)
    resumed = torch.optim.lr_scheduler.StepLR(fresh, 1, gamma=0.1, last_epoch=1)
    assert resumed.base_lrs == [0.1]


# Other models, several optimizers


class Layers(nn.Module):
    def __init__(self, names: str, seed: int = 0) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4))
        for index, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, 0.125 * index + seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x) / 4
        return x


@pytest.mark.parametrize("options", [LOOSE, LOOSE_FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("names", ["abc", "cab", "ba"])
def test_layers_keep_their_own_state_whatever_their_order(options, names):
    model, other = Layers("ab"), Layers(names, 1)
    optimizer, fresh = AdamW(model.parameters(), lr=0.5), AdamW(other.parameters())
    train(model, optimizer, range(2))
    wanted = read(model, optimizer)["state"]
    passed_on(model, optimizer, other, fresh, options)
    found = {name: entry for name, entry in read(other, fresh)["state"].items() if entry}
    assert sorted(found) == sorted(wanted)
    assert_same(found, {name: wanted[name] for name in found})
    assert fresh.param_groups[0]["lr"] == 0.5
    new = [one for name, one in other.named_parameters() if name.startswith("c")]
    assert not any(fresh.state.get(one) for one in new)
    train(other, fresh, [2])
    assert {float(fresh.state[one]["step"]) for one in new} <= {1.0}


@both
def test_a_layer_without_an_entry_is_named_and_nothing_is_changed(options):
    model, other = Layers("ab"), Layers("abc", 1)
    optimizer, fresh = AdamW(model.parameters(), lr=0.5), AdamW(other.parameters())
    train(model, optimizer, range(2))
    before = copy.deepcopy(state_of(other, fresh))
    state = read(model, optimizer, options)
    with pytest.raises(MismatchError, match=r"c\.(weight|bias)"):
        set_optimizer_state_dict(other, fresh, state, options=options)
    assert_same(state_of(other, fresh), before)


@both
def test_an_entry_of_a_parameter_that_the_model_lacks_is_named_and_nothing_is_changed(options):
    model, other = Layers("abc"), Layers("ab", 1)
    optimizer, fresh = AdamW(model.parameters(), lr=0.5), AdamW(other.parameters())
    train(model, optimizer, range(2))
    before = copy.deepcopy(state_of(other, fresh))
    state = read(model, optimizer, options)
    with pytest.raises(MismatchError, match=r"c\.(weight|bias)"):
        set_optimizer_state_dict(other, fresh, state, options=options)
    assert_same(state_of(other, fresh), before)


def two(model: nn.Module, rate: float = 0.1) -> list[Optimizer]:
    return [
        AdamW(model[0].parameters(), lr=rate),
        SGD(model[2].parameters(), lr=2 * rate, momentum=0.9),
    ]


@both
@pytest.mark.parametrize("turned", [False, True], ids=["as read", "swapped"])
def test_each_optimizer_gets_what_is_of_its_parameters(options, turned):
    model, other = mlp(), mlp(1)
    optimizers, fresh = two(model), two(other, 7.0)
    step_all(model, optimizers)
    state = read(model, optimizers, options)
    given = fresh[::-1] if turned else fresh
    set_optimizer_state_dict(other, given, state, options=options)
    assert_same([one.state_dict() for one in fresh], [one.state_dict() for one in optimizers])
    keys = [{key for entry in one.state.values() for key in entry} for one in fresh]
    assert keys == [{"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}]


@both
def test_an_optimizer_that_keeps_nothing_goes_with_one_that_does(options):
    def make(model: nn.Module, rate: float) -> list[Optimizer]:
        return [AdamW(model[0].parameters(), lr=rate), SGD(model[2].parameters(), lr=2 * rate)]

    model, other = mlp(), mlp(1)
    optimizers, fresh = make(model, 0.5), make(other, 7.0)
    step_all(model, optimizers)
    state = read(model, optimizers, options)
    set_optimizer_state_dict(other, fresh, state, options=options)
    assert_same([one.state_dict() for one in fresh], [one.state_dict() for one in optimizers])


@both
def test_a_group_that_keeps_nothing_goes_with_one_that_does(options):
    def make(model: nn.Module, rate: float) -> Optimizer:
        groups = [
            {"params": model[0].parameters(), "momentum": 0.9},
            {"params": model[2].parameters()},
        ]
        return SGD(groups, lr=rate)

    model, other = mlp(), mlp(1)
    optimizer, fresh = make(model, 0.5), make(other, 7.0)
    train(model, optimizer, [0])
    passed_on(model, optimizer, other, fresh, options)
    assert_same(fresh.state_dict(), optimizer.state_dict())


@both
@pytest.mark.parametrize("call", ["read", "set"])
def test_a_parameter_of_two_optimizers_is_refused_by_name(options, call):
    model = mlp()
    good = read(model, two(model), options)
    twice = [AdamW(model.parameters()), SGD(model[2].parameters(), lr=0.1)]
    calls = {
        "read": lambda: read(model, twice, options),
        "set": lambda: set_optimizer_state_dict(model, twice, good, options=options),
    }
    with pytest.raises(MismatchError, match=r"2\.(weight|bias)"):
        calls[call]()


# States that are not formed as their parameter


@both
def test_rows_and_columns_of_a_factored_state_keep_their_shape(options):
    model, other = nn.Linear(8, 6), nn.Linear(8, 6)
    optimizer, fresh = (torch.optim.Adafactor(one.parameters()) for one in (model, other))
    model(noise(0, 3, 8)).square().sum().backward()
    optimizer.step()
    passed_on(model, optimizer, other, fresh, options)
    assert_same(fresh.state_dict(), optimizer.state_dict())
    entry = fresh.state[other.weight]
    assert (tuple(entry["row_var"].shape), tuple(entry["col_var"].shape)) == ((6, 1), (1, 8))


class Quantizing(Optimizer):
    """Keeps codes of a byte and a scale where there are many elements, and numbers otherwise."""

    def __init__(self, params: Any, least: int = 16) -> None:
        super().__init__(params, {"lr": 0.25})
        self.least = least

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                grad = one.grad
                if one.numel() >= self.least:
                    scale = grad.abs().max()
                    codes = (grad / scale * 127 + 128).to(torch.uint8)
                    self.state[one] = {"average": codes, "scale": scale}
                else:
                    self.state[one] = {"average": grad.clone()}


@both
def test_codes_of_a_byte_stay_codes_of_a_byte(options):
    model, other = mlp(), mlp(1)
    optimizer, fresh = Quantizing(model.parameters()), Quantizing(other.parameters())
    train(model, optimizer, [0])
    passed_on(model, optimizer, other, fresh, options)
    assert_same(fresh.state_dict(), optimizer.state_dict())
    dtypes = {entry["average"].dtype for entry in fresh.state.values()}
    assert dtypes == {torch.uint8, torch.float32}


# What is rounded


@pytest.mark.parametrize(
    ("given", "own", "rounded"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.float64, torch.float32, True),
        (torch.float32, torch.float8_e4m3fn, True),
        (torch.complex64, torch.float32, True),
        (torch.bfloat16, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, False),
    ],
    ids=str,
)
def test_weights_are_rounded_with_a_warning_that_names_both_dtypes(given, own, rounded):
    model = nn.Linear(2, 2, bias=False).requires_grad_(False)
    model.weight.data = model.weight.data.to(own)
    values = torch.tensor([[1.0, 2.0], [0.5, -4.0]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_model_state_dict(model, {"weight": values.to(given)})
    told = [str(one.message) for one in caught if one.category is DsdPrecisionWarning]
    assert len(told) == rounded
    assert all(f"weight ({given} given, {own} in the model)" in one for one in told)
    assert all(one.filename == __file__ for one in caught if one.category is DsdPrecisionWarning)
    assert_same_tensor(model.weight.detach(), values.to(own))


@both
@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_state_of_another_form_than_the_live_one_is_refused_with_both(options, what):
    model, other = mlp(), mlp(1)
    if what == "dtype":
        optimizer = Quantizing(model.parameters())
        live: Optimizer = Quantizing(other.parameters(), least=1000)
        wanted = ("0.weight", "average", "uint8", "float32")
    else:
        optimizer, live = AdamW(model.parameters()), AdamW(other.parameters())
        wanted = ("0.weight", "exp_avg", "[3, 3]", "[6, 4]")
    train(model, optimizer, [0])
    train(other, live, [0])
    if what == "shape":
        optimizer.state[model[0].weight]["exp_avg"] = torch.ones(3, 3)
    before = copy.deepcopy(state_of(other, live))
    state = read(model, optimizer, options)
    with pytest.raises(MismatchError) as caught:
        set_optimizer_state_dict(other, live, state, options=options)
    assert [word for word in wanted if word not in str(caught.value)] == []
    assert_same(state_of(other, live), before)


class Keeping(Optimizer):
    """Keeps lists and tuples of tensors, which grow."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                entry = self.state[one]
                entry.setdefault("history", []).append(one.grad.clone())
                entry["pair"] = (one.grad * 2, len(entry["history"]))
                entry["rows"] = [{"x": one.grad.sum()}, {"y": [1, None]}]


WAYS = [
    pytest.param(NESTED, id="nested"),
    pytest.param(FLAT, id="flat"),
    pytest.param(FROM_0, id="from-0"),
    pytest.param(FLAT_FROM_0, id="flat-from-0"),
]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("used", [None, 1, 3], ids=["fresh", "shorter", "longer"])
def test_lists_are_values_and_may_have_grown(options, used):
    model, other = mlp(), mlp(1)
    optimizer, its_own = Keeping(model.parameters()), Keeping(other.parameters())
    train(model, optimizer, range(2))
    if used:
        train(other, its_own, range(5, 5 + used))
    passed_on(model, optimizer, other, its_own, options)
    assert_same(its_own.state_dict(), optimizer.state_dict())


# Tied tensors


class Pair(nn.Module):
    """Two modules that share one parameter and one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.emb.weight
        scale = torch.ones(2)
        self.emb.register_buffer("scale", scale)
        self.head.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(x)) * self.head.scale.sum()

    def check_tied(self) -> None:
        assert self.emb.weight is self.head.weight
        assert self.emb.scale is self.head.scale
        assert len(list(self.parameters())) == 1
        assert len(list(self.buffers())) == 1


def stepped(model: Pair) -> Optimizer:
    optimizer = AdamW(model.parameters())
    model(torch.tensor([0, 2])).square().sum().backward()
    optimizer.step()
    return optimizer


@both
def test_a_pair_has_one_entry_and_stays_a_pair(options):
    model, other = Pair(), Pair()
    optimizer, fresh = stepped(model), AdamW(other.parameters())
    if options is FLAT:
        names = [key for key in read(model, optimizer, options) if key.endswith("exp_avg")]
        assert names == ["state.emb.weight.exp_avg"]
    else:
        assert list(read(model, optimizer, options)["state"]) == ["emb.weight"]
    passed_on(model, optimizer, other, fresh, options)
    other.check_tied()
    assert list(fresh.state) == [other.emb.weight]
    assert_same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("names", ["emb", "head", "both"])
@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("options", [NESTED, FROM_0], ids=["given", "from-0"])
def test_a_pair_that_is_built_anywhere_is_filled_under_any_of_its_names(names, place, options):
    source = Pair()
    source.emb.scale.copy_(torch.tensor([2.0, 3.0]))
    given = {
        name: value
        for name, value in source.state_dict().items()
        if names in ("both", name.split(".")[0])
    }
    with torch.device(place):
        model = Pair()
    weight, scale = model.emb.weight, model.head.scale
    assert set_model_state_dict(model, given, options=options) == ([], [])
    model.check_tied()
    assert model.emb.weight is weight
    assert model.head.scale is scale
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize("what", ["weight", "scale"])
@pytest.mark.parametrize("options", [NESTED, FROM_0], ids=["given", "from-0"])
def test_different_tensors_are_not_made_one(what, options):
    model = Pair()
    before = copy.deepcopy(dict(model.state_dict()))
    given = copy.deepcopy(before)
    given[f"head.{what}"] = given[f"emb.{what}"] + 1
    with pytest.raises(MismatchError, match=rf"(emb|head)\.{what}"):
        set_model_state_dict(model, given, options=options)
    assert_same(dict(model.state_dict()), before)


# Dtypes


@both
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    ("weights", "moments"),
    [
        pytest.param(torch.bfloat16, torch.float32, id="bf16-with-fp32"),
        pytest.param(torch.float32, torch.bfloat16, id="fp32-with-bf16"),
    ],
)
def test_moments_keep_dtype_bits_and_size(options, used, weights, moments):
    def trained(seed: int) -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(2, 2).to(weights)
        optimizer = AdamW(model.parameters())
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = noise(seed + index, *parameter.shape).to(weights)
        optimizer.step()
        for entry in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                entry[key] = (entry[key].double() / 3).to(moments)
        return model, optimizer

    model, optimizer = trained(0)
    other, its_own = trained(5)
    if not used:
        its_own = AdamW(other.parameters())
    passed_on(model, optimizer, other, its_own, options)
    assert_same(its_own.state_dict(), optimizer.state_dict())
    assert {entry["exp_avg"].dtype for entry in its_own.state.values()} == {moments}
    sizes = [
        sum(v.nbytes for entry in one.state.values() for v in entry.values())
        for one in (optimizer, its_own)
    ]
    assert sizes[0] == sizes[1]


@both
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "stepped"])
def test_a_step_of_9999_stays_what_it_is_in_a_model_of_low_precision(options, used):
    model, other = mlp().bfloat16(), mlp(1).bfloat16()
    optimizer, its_own = AdamW(model.parameters()), AdamW(other.parameters())
    train(model, optimizer, [0])
    if used:
        train(other, its_own, [0])
    for entry in optimizer.state.values():
        entry["step"].fill_(9999)
    passed_on(model, optimizer, other, its_own, options)
    for entry in its_own.state.values():
        assert_same_tensor(entry["step"], torch.tensor(9999.0))


# Meta


class Rotary(nn.Module):
    """A parameter, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("b", torch.zeros(3))
        self.register_buffer("n", torch.ones(3), persistent=False)


@pytest.mark.parametrize("options", [NESTED, FROM_0], ids=["given", "from-0"])
def test_a_buffer_that_would_stay_on_meta_is_an_error_before_anything_is_changed(options):
    with torch.device("meta"):
        model = nn.Sequential(Rotary())
    given = {"0.weight": torch.ones(2), "0.b": torch.ones(3)}
    with pytest.raises(MismatchError, match=r"0\.n"):
        set_model_state_dict(model, given, options=options)
    assert all(one.is_meta for one in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("options", [NESTED, FROM_0], ids=["given", "from-0"])
def test_a_buffer_with_a_value_of_its_own_keeps_it_beside_parameters_from_meta(options):
    model = Rotary()
    model.weight = nn.Parameter(torch.empty(2, device="meta"))
    set_model_state_dict(model, {"weight": torch.ones(2), "b": torch.ones(3)}, options=options)
    assert_same_tensor(model.weight, torch.ones(2))
    assert_same_tensor(model.b, torch.ones(3))
    assert_same_tensor(model.n, torch.ones(3))


@pytest.mark.parametrize("options", [NESTED, FROM_0], ids=["given", "from-0"])
@pytest.mark.parametrize("kind", ["all", "half"])
def test_weights_without_data_are_refused_by_name_before_anything_is_changed(options, kind):
    model = mlp()
    before = copy.deepcopy(dict(model.state_dict()))
    given = dict(mlp(1).state_dict())
    empty = list(given) if kind == "all" else ["2.weight", "2.bias"]
    given.update({name: given[name].to("meta") for name in empty})
    with pytest.raises(DsdError) as caught:
        set_model_state_dict(model, given, options=options)
    assert [name for name in empty if name not in str(caught.value)] == []
    assert "meta" in str(caught.value)
    assert_same(dict(model.state_dict()), before)


@pytest.mark.parametrize("options", [NESTED, FROM_0], ids=["given", "from-0"])
def test_moments_without_data_are_refused_by_name_before_anything_is_changed(options):
    (model, optimizer), (other, its_own) = CASES["AdamW"].make(), CASES["AdamW"].make(seed=1)
    train(model, optimizer, [0])
    train(other, its_own, range(2))
    before = copy.deepcopy(state_of(other, its_own))
    state = read(model, optimizer)
    state["state"]["2.weight"]["exp_avg"] = state["state"]["2.weight"]["exp_avg"].to("meta")
    with pytest.raises(DsdError, match=r"2\.weight.*exp_avg|exp_avg.*2\.weight"):
        set_optimizer_state_dict(other, its_own, state, options=options)
    assert_same(state_of(other, its_own), before)


# What does not fit

WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda given: given.pop("2.weight"),
    "unexpected": lambda given: given.update({"zzz.weight": torch.ones(1)}),
    "shape": lambda given: given.update({"2.weight": torch.ones(7, 7)}),
    "kind": lambda given: given.update({"2.weight": 5}),
}
wrong = pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)


@wrong
@pytest.mark.parametrize("options", [NESTED, FROM_0], ids=["given", "from-0"])
def test_a_strict_error_names_what_is_wrong_before_anything_is_changed(spoil, options):
    model = mlp()
    before = copy.deepcopy(dict(model.state_dict()))
    given = dict(mlp(1).state_dict())
    spoil(given)
    with pytest.raises(MismatchError, match=r"2\.weight|zzz\.weight"):
        set_model_state_dict(model, given, options=options)
    assert_same(dict(model.state_dict()), before)


@pytest.mark.parametrize("options", [LOOSE], ids=["loose"])
def test_a_loose_call_lists_what_is_missing_and_what_is_unexpected(options):
    model, given = mlp(), dict(mlp(1).state_dict())
    wanted = {**given, "2.weight": model[2].weight.detach().clone()}
    given.pop("2.weight")
    given["zzz.weight"] = torch.ones(1)
    keys = set_model_state_dict(model, given, options=options)
    assert (keys.missing_keys, keys.unexpected_keys) == (["2.weight"], ["zzz.weight"])
    assert_same(dict(model.state_dict()), wanted)


@wrong
def test_a_model_that_does_not_fit_leaves_its_optimizer_as_it_was(spoil):
    (model, optimizer), (other, its_own) = CASES["AdamW"].make(), CASES["AdamW"].make(seed=1)
    train(model, optimizer, [0])
    train(other, its_own, range(2))
    weights, state = get_state_dict(model, optimizer)
    spoil(weights)
    before = copy.deepcopy(state_of(other, its_own))
    with pytest.raises(MismatchError):
        set_state_dict(other, its_own, model_state_dict=weights, optim_state_dict=state)
    assert_same(state_of(other, its_own), before)


def test_an_optimizer_that_does_not_fit_leaves_its_model_as_it_was():
    model, other = Layers("ab"), Layers("abc", 1)
    optimizer, fresh = AdamW(model.parameters()), AdamW(other.parameters())
    train(model, optimizer, [0])
    before = copy.deepcopy(state_of(other, fresh))
    weights = dict(Layers("abc", 2).state_dict())
    state = read(model, optimizer)
    with pytest.raises(MismatchError):
        set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    assert_same(state_of(other, fresh), before)


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("given", [{}, None], ids=["empty", "none"])
def test_nothing_asks_for_nothing(given, part):
    model, optimizer = CASES["AdamW"].make()
    train(model, optimizer, [0])
    before = copy.deepcopy(state_of(model, optimizer))
    if part == "model":
        assert set_model_state_dict(model, given) == ([], [])
    else:
        set_optimizer_state_dict(model, optimizer, given)
    assert_same(state_of(model, optimizer), before)


def test_of_five_hundred_names_ten_are_shown_with_the_count_and_one_that_is_alike():
    model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(500)])
    given = {f"{name}s": value for name, value in compiled(model).state_dict().items()}
    with pytest.raises(MismatchError) as caught:
        set_model_state_dict(compiled(model), {n[10:]: v for n, v in given.items()})
    text = str(caught.value)
    assert "500" in text
    assert "0.weight (is it 0.weights?)" in text
    assert "_orig_mod" not in text
    assert len(text.splitlines()) < 40


# Extra state


class Deep(nn.Module):
    """Extra state under a name that is no attribute."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@wrapped
@pytest.mark.parametrize(
    "value",
    [{"scale": torch.ones(2), "n": [1, (2,)]}, torch.arange(3), {"amax": 0.5}],
    ids=["nested", "tensor", "plain"],
)
def test_extra_state_two_levels_down_is_read_and_set(wrap, value):
    source = nn.Sequential(nn.Sequential(wrap(Deep(value))))
    state = get_model_state_dict(source)
    assert list(state) == ["0.0._extra_state"]
    inner = Deep()
    target = nn.Sequential(nn.Sequential(wrap(inner)))
    set_model_state_dict(target, state)
    assert_same(inner.value, value)
