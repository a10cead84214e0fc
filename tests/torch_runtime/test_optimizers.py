"""Every optimizer of torch goes on, bit for bit, where it was saved; and saving changes nothing."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

import dsdformat.torch as dsd  # noqa: E402
from tests.torch_runtime.exact import assert_same, assert_same_tensor, bits  # noqa: E402
from tests.torch_runtime.optimizer_cases import (  # noqa: E402
    CASES,
    Case,
    mlp,
    noise,
    optimizer_classes,
    state_of,
    train,
)

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
PLAIN = {name: case for name, case in CASES.items() if name == case.kind.__name__}
every_class = pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
BEFORE, AFTER, OTHERWISE = range(2), range(2, 5), range(50, 53)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def retuned(optimizer: torch.optim.Optimizer) -> None:
    """Change the options of all groups, so that a load that leaves one as it was is seen."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 3
        if "weight_decay" in group:
            group["weight_decay"] = 0.5


# Going on


def test_every_optimizer_of_torch_has_a_case():
    assert {case.kind for case in CASES.values()} == set(optimizer_classes())


@every_case
def test_an_optimizer_that_never_stepped_goes_on_bit_for_bit(case, tmp_path):
    model, optimizer = case.make()
    case.train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})

    resumed, other = case.make(seed=1)
    assert dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}) == {}
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    case.train(model, optimizer, AFTER)
    case.train(resumed, other, AFTER)
    assert_same(state_of(resumed, other), state_of(model, optimizer))


@every_case
def test_an_optimizer_that_stepped_otherwise_goes_on_bit_for_bit(case, tmp_path):
    model, optimizer = case.make()
    case.train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})

    resumed, other = case.make(seed=1)
    retuned(other)
    case.train(resumed, other, OTHERWISE)
    assert not dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}).report
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    case.train(model, optimizer, AFTER)
    case.train(resumed, other, AFTER)
    assert_same(state_of(resumed, other), state_of(model, optimizer))


@every_class
def test_an_optimizer_that_was_saved_before_its_first_step_is_without_state_again(case, tmp_path):
    model, optimizer = case.make()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    wanted = case.make()

    case.train(model, optimizer, BEFORE)
    retuned(optimizer)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert_same(state_of(model, optimizer), state_of(*wanted))
    case.train(*wanted, AFTER)
    case.train(model, optimizer, AFTER)
    assert_same(state_of(model, optimizer), state_of(*wanted))


@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum", "Rprop"])
@pytest.mark.parametrize("model", [mlp, CASES["Adam-channels-last"].model], ids=["rows", "conv"])
def test_the_state_keeps_its_layout_in_memory(name, model, tmp_path):
    case = replace(CASES[name], model=model)
    model, optimizer = case.make()
    case.train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = case.make(seed=1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})

    def strides(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [
            {key: v.stride() for key, v in state.items() if isinstance(v, torch.Tensor)}
            for state in optimizer.state.values()
        ]

    assert strides(other) == strides(optimizer)


@pytest.mark.parametrize("kind", optimizer_classes(), ids=lambda kind: kind.__name__)
def test_an_optimizer_that_takes_its_state_over_keeps_its_switches(kind, tmp_path):
    # Of a run on a GPU that goes on here, or that was never run: flags alone, of no effect yet.
    flags = {"foreach", "capturable", "maximize", "differentiable"}
    names = kind.__init__.__annotations__
    model = mlp(bias=False)
    optimizer = kind(model.parameters(), **{flag: True for flag in flags if flag in names})
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = kind(model.parameters())
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


def test_an_optimizer_that_is_loaded_again_and_again_stays_as_it_was_saved(tmp_path):
    model, optimizer = CASES["AdamW-amsgrad"].make()
    train(model, optimizer, BEFORE)
    state = {"model": model, "optimizer": optimizer}
    dsd.save(tmp_path / "c", state)
    wanted = dsd.snapshot(state)
    for step in range(3):
        dsd.load(tmp_path / "c", state)
        assert_same(dsd.snapshot(state), wanted)
        train(model, optimizer, [step])


def test_saving_what_was_loaded_gives_the_same_root_digest(tmp_path):
    model, optimizer = CASES["AdamW-amsgrad"].make()
    train(model, optimizer, BEFORE)
    root = dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = CASES["AdamW-amsgrad"].make(seed=1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert dsd.save(tmp_path / "d", {"model": resumed, "optimizer": other}) == root


@pytest.mark.parametrize("codec", ["zstd", "planes+zstd"])
def test_compressed_state_goes_on_bit_for_bit(codec, tmp_path):
    model, optimizer = CASES["AdamW-amsgrad"].make()
    train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, codec=codec)
    resumed, other = CASES["AdamW-amsgrad"].make(seed=1)
    train(resumed, other, OTHERWISE)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))


@pytest.mark.parametrize("seen", [range(0), OTHERWISE], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    "arrange",
    [
        pytest.param(lambda m, o: {"model": m, "a": o, "b": o}, id="twice"),
        pytest.param(lambda m, o: {"pair": (m, o)}, id="in a tuple with its model"),
        pytest.param(lambda m, o: {"run": [{"o": o}, 3, {"m": [m]}]}, id="in a list"),
    ],
)
def test_model_and_optimizer_may_lie_anywhere_in_the_state(arrange, seen, tmp_path):
    model, optimizer = CASES["AdamW"].make()
    train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", arrange(model, optimizer))
    resumed, other = CASES["AdamW"].make(seed=1)
    train(resumed, other, seen)
    assert not dsd.load(tmp_path / "c", arrange(resumed, other)).report
    train(model, optimizer, AFTER)
    train(resumed, other, AFTER)
    assert_same(state_of(resumed, other), state_of(model, optimizer))


# Saving changes nothing


def addresses(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Which objects a state holds, and where their memory lies."""
    return [
        (id(parameter), id(state), key, id(value))
        + ((value.data_ptr(),) if isinstance(value, torch.Tensor) else ())
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    ]


@every_class
def test_saving_takes_no_step_and_touches_no_state(case, tmp_path):
    model, optimizer = case.make()
    case.train(model, optimizer, BEFORE)
    before, objects = dsd.snapshot({"m": model, "o": optimizer}), addresses(optimizer)
    groups = [(id(group), list(group.items())) for group in optimizer.param_groups]
    gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]

    dsd.save(tmp_path / "c", {"m": model, "o": optimizer})
    assert_same(dsd.snapshot({"m": model, "o": optimizer}), before)
    assert addresses(optimizer) == objects
    assert [(id(group), list(group.items())) for group in optimizer.param_groups] == groups
    for parameter, (gradient, values) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert_same_tensor(gradient, values)


@every_case
def test_a_run_that_saves_is_the_run_that_does_not(case, tmp_path):
    saving, plain = case.make(), case.make()
    case.train(*plain, BEFORE)
    for step in BEFORE:
        dsd.save(tmp_path / f"{step}", {"model": saving[0], "optimizer": saving[1]})
        case.train(*saving, [step])
    assert_same(state_of(*saving), state_of(*plain))


@pytest.mark.parametrize("when", ["before", "with gradients"])
def test_saving_an_optimizer_that_never_stepped_makes_no_state(when, tmp_path):
    arms = [CASES["AdamW"].make() for _ in "AB"]
    for model, _ in arms:
        if when == "with gradients":
            model(noise(1, 5, 4)).sum().backward()
    (model, optimizer), plain = arms
    gradients = [parameter.grad for parameter in model.parameters()]
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert len(optimizer.state) == 0
    assert type(optimizer.state) is defaultdict
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    for number, arm in enumerate(arms):
        for index, parameter in enumerate(arm[0].parameters()):
            parameter.grad = noise(index, *parameter.shape)
        arm[1].step()
        assert number == 0 or arm is plain
    assert_same(state_of(model, optimizer), state_of(*plain))
    assert dsd.load(tmp_path / "c")["optimizer"]["state"] == {}


def test_gradients_that_are_kept_do_not_hide_the_state(tmp_path):
    model, optimizer = CASES["AdamW"].make()
    train(model, optimizer, [0])
    assert all(parameter.grad is not None for parameter in model.parameters())
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    stored = dsd.load(tmp_path / "c")["optimizer"]["state"]
    assert {name: set(state) for name, state in stored.items()} == dict.fromkeys(
        ["0.weight", "0.bias", "2.weight", "2.bias"], {"step", "exp_avg", "exp_avg_sq"}
    )


def test_loading_leaves_gradients_alone(tmp_path):
    model, optimizer = CASES["AdamW"].make()
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    train(model, optimizer, [1])
    gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for parameter, (gradient, values) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert_same_tensor(gradient, values)


def test_looking_at_a_state_does_not_touch_its_default_dict(tmp_path):
    model, optimizer = CASES["SGD"].make()
    train(model, optimizer, [0])
    optimizer.state.clear()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    dsd.snapshot({"model": model, "optimizer": optimizer})
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert len(optimizer.state) == 0
    assert optimizer.state.default_factory is dict


def test_saving_and_loading_leave_the_global_generator_alone(tmp_path):
    model, optimizer = CASES["AdamW"].make()
    train(model, optimizer, [0])
    before = torch.get_rng_state()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert_same_tensor(torch.get_rng_state(), before)


def test_a_snapshot_stays_as_it_was_while_training_goes_on(tmp_path):
    model, optimizer = CASES["AdamW-amsgrad"].make()
    train(model, optimizer, BEFORE)
    state = {"model": model, "optimizer": optimizer}
    snapshot = dsd.snapshot(state)
    root = dsd.save(tmp_path / "c", state)
    train(model, optimizer, AFTER)
    assert dsd.save(tmp_path / "d", snapshot) == root


def test_a_snapshot_is_loaded_as_the_optimizer_itself_would_be(tmp_path):
    model, optimizer = CASES["LBFGS-short-history"].make()
    CASES["LBFGS-short-history"].train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", dsd.snapshot({"model": model, "optimizer": optimizer}))
    resumed, other = CASES["LBFGS-short-history"].make(seed=1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_saving_and_loading_keep_nothing_of_the_optimizer_alive(tmp_path):
    model, optimizer = CASES["AdamW"].make()
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    held = [weakref.ref(value) for s in optimizer.state.values() for value in s.values()]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in held] == [None] * 12


# Where things are put


def test_state_is_filed_under_the_names_of_parameters(tmp_path):
    model, optimizer = CASES["AdamW"].make()
    train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    stored = dsd.load(tmp_path / "c")["optimizer"]
    assert set(stored) == {"state", "param_groups"}
    assert_same(
        stored["state"],
        {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()},
    )
    (key, group), *_ = stored["param_groups"].items()
    wanted = {**optimizer.param_groups[0], "params": ["0.weight", "0.bias", "2.weight", "2.bias"]}
    assert key == "0.weight"
    assert_same(group, wanted)


def test_state_of_a_stepped_optimizer_is_read_in_place(tmp_path):
    model, optimizer = CASES["AdamW-amsgrad"].make()
    train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    train(model, optimizer, AFTER)
    tensors = {
        (parameter, key): (value, value.data_ptr())
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    assert len(tensors) == 16
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for (parameter, key), (tensor, address) in tensors.items():
        assert optimizer.state[parameter][key] is tensor
        assert tensor.data_ptr() == address


def test_parameters_and_groups_are_the_same_objects_after_a_load(tmp_path):
    model, optimizer = CASES["AdamW"].make()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    parameters, groups = list(model.parameters()), optimizer.param_groups
    group, held = groups[0], groups[0]["params"]
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups is groups
    assert groups[0] is group
    assert group["params"] is held
    assert [id(parameter) for parameter in held] == [id(parameter) for parameter in parameters]


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of the storages that appear."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.storages[result.untyped_storage().data_ptr()] = result
        return result

    def nbytes(self, known: set[int]) -> int:
        return sum(
            tensor.untyped_storage().nbytes()
            for address, tensor in self.storages.items()
            if address not in known
        )


def known_memory(*tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def wide(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = mlp(seed, sizes=(4, 200, 300, 3))
    return model, torch.optim.AdamW(model.parameters(), amsgrad=True)


def test_loading_into_a_stepped_optimizer_allocates_no_second_state(tmp_path):
    model, optimizer = wide()
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    known = known_memory(
        *model.parameters(),
        *(parameter.grad for parameter in model.parameters()),  # which are looked at, no more
        *(v for s in optimizer.state.values() for v in s.values()),
    )
    with Allocations() as allocations:
        dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert allocations.nbytes(known) < 1000


def test_loading_into_a_fresh_optimizer_allocates_each_state_tensor_once(tmp_path):
    model, optimizer = wide()
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = wide(seed=1)
    with Allocations() as allocations:
        dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    wanted = sum(v.nbytes for state in other.state.values() for v in state.values())
    made = allocations.nbytes(known_memory(*resumed.parameters()))
    assert wanted <= made < wanted + 1000


def test_python_holds_no_copy_of_the_state_while_it_is_loaded(tmp_path, peak_nbytes):
    model = mlp(sizes=(4, 500, 3000, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    whole = sum(p.nbytes for p in model.parameters()) * 3
    assert whole > 18e6
    state = {"model": model, "optimizer": optimizer}
    assert peak_nbytes(lambda: dsd.load(tmp_path / "c", state, threads=1)) < whole / 8


def test_state_that_was_shared_with_a_copy_of_the_user_is_read_over(tmp_path):
    # In place means in place: who keeps a reference to a moment sees it change.
    model, optimizer = CASES["SGD-momentum"].make()
    train(model, optimizer, [0])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    held = optimizer.state[model[0].weight]["momentum_buffer"]
    saved = held.clone()
    train(model, optimizer, [1])
    assert not torch.equal(bits(held), bits(saved))
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert_same_tensor(held, saved)


# Steps: where they are counted


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_a_step_is_a_float32_scalar_on_the_host(options, tmp_path):
    model, optimizer = Case(torch.optim.Adam, options).make()
    train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = Case(torch.optim.Adam, options).make(seed=1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    for state in other.state.values():
        assert_same_tensor(state["step"], torch.tensor(2.0))


@pytest.mark.parametrize("start", [0, 3], ids=["fresh", "at another step"])
def test_the_step_that_was_saved_is_the_step_after_loading(start, tmp_path):
    model, optimizer = CASES["AdamW"].make()
    train(model, optimizer, range(7))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = CASES["AdamW"].make(seed=1)
    train(resumed, other, range(start))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert {float(state["step"]) for state in other.state.values()} == {7.0}
    train(model, optimizer, [7])
    train(resumed, other, [7])
    assert_same(state_of(resumed, other), state_of(model, optimizer))


@pytest.mark.parametrize("start", [{}, {"fused": True}], ids=["from plain", "from fused"])
@pytest.mark.parametrize("end", [{}, {"fused": True}], ids=["into plain", "into fused"])
def test_on_the_host_fused_and_plain_load_each_other(start, end, tmp_path):
    model, optimizer = Case(torch.optim.Adam, start).make()
    train(model, optimizer, BEFORE)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed, other = Case(torch.optim.Adam, end).make(seed=1)
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    train(resumed, other, AFTER)
    train(model, optimizer, AFTER)
    assert_same(state_of(resumed, other), state_of(model, optimizer))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("origin", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("options", "counted_on"),
    [
        pytest.param({}, "cpu", id="plain"),
        pytest.param({"foreach": True}, "cpu", id="foreach"),
        pytest.param({"fused": True}, "cuda", id="fused"),
        pytest.param({"capturable": True}, "cuda", id="capturable"),
    ],
)
def test_a_step_is_counted_where_the_optimizer_counts(
    options, counted_on, origin, stepped, tmp_path
):
    model = mlp().to(origin)
    plain = {} if origin == "cpu" and "capturable" in options else options
    optimizer = torch.optim.Adam(model.parameters(), **plain)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.param_groups[0].update(options)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})

    resumed = mlp(1).cuda()
    other = torch.optim.Adam(resumed.parameters(), **options)
    for parameter in resumed.parameters():
        parameter.grad = torch.ones_like(parameter)
    if stepped:
        other.step()
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    for state in other.state.values():
        assert state["step"].device.type == counted_on
        assert state["step"].dtype == torch.float32
        assert state["exp_avg"].device.type == "cuda"
    other.step()
    assert {float(state["step"]) for state in other.state.values()} == {2.0}


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("flag", ["fused", "capturable"])
def test_a_flag_that_comes_with_the_file_decides_where_a_step_is_counted(flag, stepped, tmp_path):
    model = mlp().cuda()
    optimizer = torch.optim.Adam(model.parameters(), **{flag: True})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})

    other = torch.optim.Adam(model.parameters())
    if stepped:
        other.step()
    dsd.load(tmp_path / "c", {"model": model, "optimizer": other})
    assert other.param_groups[0][flag] is True
    other.step()
    assert {state["step"].device.type for state in other.state.values()} == {"cuda"}


@needs_gpu
@pytest.mark.gpu
def test_an_optimizer_of_a_gpu_is_loaded_on_the_host(tmp_path):
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = torch.optim.AdamW(resumed.parameters())
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    devices = {v.device.type for state in other.state.values() for v in state.values()}
    assert devices == {"cpu"}
