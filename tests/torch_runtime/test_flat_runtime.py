"""Training with flat parameters is saved as that of the plain model, and each loads the other."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    checkpoint_wrapper,
)

import dsdformat.torch as dsd  # noqa: E402
from dsdformat import MismatchError, UnsupportedValueError  # noqa: E402
from dsdformat.torch import compat  # noqa: E402
from dsdformat.torch.flatten import FlattenParams  # noqa: E402
from dsdformat.torch.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from tests.torch_runtime.exact import assert_same, assert_same_tensor  # noqa: E402
from tests.torch_runtime.optimizer_cases import (  # noqa: E402
    CASES,
    Case,
    listed,
    mlp,
    seeded,
    train,
)

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def wide(seed: int = 0) -> nn.Module:
    """A model whose parameters fill whole vectors; torch's kernels may round what is left apart."""
    return mlp(seed, sizes=(4, 64, 64))


def _wide(case: Case) -> Case:
    dtype = next(case.model(0).parameters()).dtype
    return dataclasses.replace(case, model=lambda seed: wide(seed).to(dtype))


WHOLE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
ELEMENTWISE = {
    name: case if "complex" in name else _wide(case)
    for name, case in CASES.items()
    if not name.startswith(WHOLE) and "differentiable" not in name and "last" not in name
}
FEW = ("SGD-momentum", "SGD-momentum-foreach", "Adam", "AdamW-amsgrad", "AdamW-amsgrad-fused")
FEW += ("AdamW-amsgrad-foreach-maximize", "Adagrad", "Adagrad-fused", "ASGD", "ASGD-foreach")
FEW += ("Adam-tensor-lr", "Adam-bfloat16", "RMSprop-centered-momentum", "Rprop", "Adam-complex")
stepped = pytest.mark.parametrize("steps", [0, 2], ids=["never stepped", "stepped"])
few = pytest.mark.parametrize("case", listed({name: ELEMENTWISE[name] for name in FEW}))


def flat_of(case: Case, seed: int = 0) -> tuple[FlattenParams, Any]:
    """What `case.make` makes, with a flat model."""
    model = FlattenParams(case.model(seed))
    options = {key: v() if callable(v) else v for key, v in case.options.items()}
    return model, case.kind(model.parameters(), **options)


def plain_of(case: Case, seed: int = 0) -> tuple[nn.Module, Any]:
    return case.make(seed)


MAKERS = {"plain": plain_of, "flat": flat_of}


def of_case(name: str) -> Callable[..., tuple[nn.Module, Any]]:
    """Return what makes either form."""
    return lambda form, seed=0: MAKERS[form](ELEMENTWISE[name], seed)


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything, by name: what `load` gives."""
    state = dsd.snapshot({"model": model, "optimizer": optimizer})
    assert all(not name.startswith("flat_param") for name in state["model"])
    return state


def tensors_of(optimizer: Any) -> list[torch.Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def places(optimizer: Any) -> set[tuple[int, int]]:
    return {(id(tensor), tensor.data_ptr()) for tensor in tensors_of(optimizer)}


# The same training


@pytest.mark.parametrize("case", listed(ELEMENTWISE))
def test_a_checkpoint_of_a_flat_training_is_that_of_the_plain_one(case, tmp_path):
    digests = []
    for name, make in MAKERS.items():
        model, optimizer = make(case)
        case.train(model, optimizer, range(3))
        digests.append(dsd.save(tmp_path / name, {"model": model, "optimizer": optimizer}))
    assert digests[0] == digests[1]


@few
@stepped
@pytest.mark.parametrize("target", MAKERS.values(), ids=[f"into {name}" for name in MAKERS])
@pytest.mark.parametrize("source", MAKERS.values(), ids=[f"from {name}" for name in MAKERS])
def test_either_form_goes_on_from_the_checkpoint_of_either(case, source, target, steps, tmp_path):
    model, optimizer = source(case)
    case.train(model, optimizer, range(3))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    wanted = state_of(model, optimizer)

    other, loaded = target(case, 1)
    case.train(other, loaded, range(steps))
    before = places(loaded)
    parameters = [(id(one), one.data_ptr()) for one in other.parameters()]
    report = dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded}).report
    assert not report
    assert_same(state_of(other, loaded), wanted)
    assert parameters == [(id(one), one.data_ptr()) for one in other.parameters()]
    if steps:
        assert places(loaded) == before  # read in place

    again, resumed = target(case)
    case.train(again, resumed, range(5))
    case.train(other, loaded, range(3, 5))
    assert_same(state_of(other, loaded), state_of(again, resumed))


def test_state_in_the_order_of_a_memory_format_is_read_into_flat_state(tmp_path):
    case = CASES["Adam-channels-last"]
    model, optimizer = case.make()
    case.train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    flat, other = flat_of(case, 1)
    dsd.load(tmp_path / "c", {"model": flat, "optimizer": other})
    assert_same(state_of(flat, other), state_of(model, optimizer))


# Models and groups


def grouped(form: str, seed: int = 0, lr: float = 0.01) -> tuple[nn.Module, Any]:
    """Weights and biases in groups of their own, with options of their own."""
    model = wide(seed)
    names = [[f"{n}.weight" for n in (0, 2)], [f"{n}.bias" for n in (0, 2)]]
    if form == "plain":
        parameters = dict(model.named_parameters())
        members = [[parameters[name] for name in group] for group in names]
    else:
        model = FlattenParams(model, dict(zip(("decay", "rest"), names, strict=True)))
        members = [[flat] for flat in model.flat_params]
    groups = [
        {"params": members[0], "weight_decay": 0.1, "name": "decay"},
        {"params": members[1], "lr": 10 * lr, "betas": (0.8, 0.9), "initial_lr": 3.0},
    ]
    return model, AdamW(groups, lr=lr, weight_decay=0.0)


def tied(form: str, seed: int = 0, *, backwards: bool = False) -> tuple[nn.Module, Any]:
    """A tied weight; with the names in the other order if `backwards`."""
    first = nn.Linear(4, 4)
    parts = {"first": first, "middle": nn.Linear(4, 4), "again": nn.Linear(4, 4)}
    parts["again"].weight = first.weight
    order = reversed(parts) if backwards else parts
    model: nn.Module = nn.Sequential()
    for name in order:
        model.add_module(name, parts[name])
    seeded(first, seed), seeded(parts["middle"], seed + 1)
    with torch.no_grad():
        parts["again"].bias.fill_(0.1 * seed)
    model = model if form == "plain" else FlattenParams(model)
    return model, Adam(model.parameters(), lr=0.01)


def partial(form: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """Two flat parameters, one in a module inside, and parameters that are not flat."""
    model = mlp(seed, sizes=(4, 6, 5, 3))
    inner = nn.ModuleDict({"body": model, "head": seeded(nn.Linear(3, 2), seed + 7)})
    order = ["body.0.weight", "body.2.bias", "body.4.weight", "body.4.bias", "head.weight"]
    named = dict(inner.named_parameters())
    order = [*order, *(name for name in named if name not in order)]
    parameters = [named[name] for name in order]
    if form == "flat":
        model[4] = FlattenParams(model[4])
        inner["body"] = FlattenParams(model, ["0.weight", "2.bias"])
        live = {name: named[name] for name in order[4:]}
        parameters = [inner["body"].flat_param, model[4].flat_param, *live.values()]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return inner["head"](inner["body"](x))

    inner.forward = forward  # type: ignore[method-assign]
    return inner, SGD(parameters, lr=0.1, momentum=0.9)


def mixed(form: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """Frozen parameters, which become a flat one of their own, without state."""
    model = wide(seed)
    model[0].weight.requires_grad_(False)
    ordered = [model[0].bias, *model[2].parameters(), model[0].weight]
    if form == "flat":
        model = FlattenParams(model, [["0.bias", "2.weight", "2.bias"], ["0.weight"]])
        ordered = list(model.flat_params)
    return model, Adam(ordered, lr=0.01)


def scalars(form: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """Parameters of one element each, which look as steps do."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor(0.5 + seed))
            self.b = nn.Parameter(torch.tensor(2.0 - seed))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a * x + self.b

    model = Scale() if form == "plain" else FlattenParams(Scale())
    return model, torch.optim.ASGD(model.parameters(), lr=0.1, t0=1.0)


def wrapped(form: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A compiled model with a wrapper inside of another."""
    model = wide(seed)
    if form == "flat":
        model[2] = FlattenParams(model[2])
        model = FlattenParams(model)
        return torch.compile(model, backend="eager"), Adam(model.parameters(), lr=0.01)
    ordered = [*model[0].parameters(), *model[2].parameters()]
    return model, Adam(ordered, lr=0.01)


MODELS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "groups": grouped,
    "tied": tied,
    "partly flat": partial,
    "frozen": mixed,
    "scalars": scalars,
    "wrapped": wrapped,
}
every_model = pytest.mark.parametrize("make", listed(MODELS))
every_way = pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(a, b, id=f"{a} to {b}") for a in MAKERS for b in MAKERS],
)


@every_model
def test_models_and_groups_of_any_kind_give_the_checkpoint_of_the_plain_ones(make, tmp_path):
    digests = []
    for form in MAKERS:
        model, optimizer = make(form)
        train(model, optimizer, range(3))
        digests.append(dsd.save(tmp_path / form, {"model": model, "optimizer": optimizer}))
    assert digests[0] == digests[1]


@every_model
@every_way
@stepped
def test_models_and_groups_of_any_kind_load_either(make, source, target, steps, tmp_path):
    model, optimizer = make(source)
    train(model, optimizer, range(3))
    optimizer.param_groups[-1]["lr"] = 0.07
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = make(target, 1)
    train(other, loaded, range(steps))
    assert not dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded}).report
    assert_same(state_of(other, loaded), state_of(model, optimizer))
    train(model, optimizer, range(3, 5))
    train(other, loaded, range(3, 5))
    assert_same(state_of(other, loaded), state_of(model, optimizer))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled inside": lambda model: FlattenParams(torch.compile(model, backend="eager")),
    "compiled outside": lambda model: torch.compile(FlattenParams(model), backend="eager"),
    "checkpointed inside": lambda model: FlattenParams(
        nn.Sequential(*(checkpoint_wrapper(layer) for layer in model))
    ),
    "flat twice": lambda model: FlattenParams(FlattenParams(model)),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_wrappers_inside_and_outside_are_not_in_the_names(wrap, tmp_path):
    model, optimizer = plain_of(ELEMENTWISE["Adam"])
    train(model, optimizer, range(2))
    digest = dsd.save(tmp_path / "plain", {"model": model, "optimizer": optimizer})
    other = wrap(wide(1))
    loaded = Adam(other.parameters(), lr=9.0)
    dsd.load(tmp_path / "plain", {"model": other, "optimizer": loaded})
    assert dsd.save(tmp_path / "c", {"model": other, "optimizer": loaded}) == digest


@every_way
def test_a_tied_parameter_is_found_under_any_of_its_names(source, target, tmp_path):
    model, optimizer = tied(source)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert "first.weight" in dsd.load(tmp_path / "c")["optimizer"]["state"]
    other, loaded = tied(target, 1, backwards=True)
    dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded})
    again, resumed = tied("plain", 2)
    dsd.save(tmp_path / "d", {"model": other, "optimizer": loaded})
    assert "again.weight" in dsd.load(tmp_path / "d")["optimizer"]["state"]
    dsd.load(tmp_path / "d", {"model": again, "optimizer": resumed})
    assert_same(state_of(again, resumed), state_of(model, optimizer))


def test_a_wrapper_at_two_places_has_the_names_of_both(tmp_path):
    def make(flat: bool, seed: int, *names: str) -> tuple[nn.Module, Any]:
        layer: nn.Module = seeded(nn.Linear(4, 4), seed)
        layer = FlattenParams(layer) if flat else layer
        model = nn.ModuleDict(dict.fromkeys(names, layer))
        model.forward = layer.forward  # type: ignore[method-assign]
        return model, Adam(model.parameters(), lr=0.01)

    model, optimizer = make(False, 0, "a", "b")
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = make(True, 1, "b", "a")
    dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded})
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    [state] = loaded.state.values()
    wanted = [optimizer.state[one]["exp_avg"].flatten() for one in model["a"].parameters()]
    assert_same_tensor(state["exp_avg"], torch.cat(wanted))


@every_way
def test_one_optimizer_of_two_models_is_filed_under_the_names_of_both(source, target, tmp_path):
    def make(form: str, seed: int) -> dict[str, Any]:
        models = [wide(seed), wide(seed + 5)]
        if form == "flat":
            models = [FlattenParams(one) for one in models]
        parameters = [one for model in models for one in model.parameters()]
        return {"g/x": models[0], "d": [models[1]], "optimizer": Adam(parameters, lr=0.01)}

    def run(state: dict[str, Any]) -> None:
        for model in (state["g/x"], state["d"][0]):
            train(model, state["optimizer"], range(2))

    state, other = make(source, 0), make(target, 1)
    run(state)
    dsd.save(tmp_path / "c", state)
    stored = dsd.load(tmp_path / "c")["optimizer"]
    assert list(stored["state"]) == sorted(
        f"{where}/{name}" for where in ("g%2Fx", "d") for name in dict(wide().named_parameters())
    )
    dsd.load(tmp_path / "c", other)
    assert_same(dsd.snapshot(other), dsd.snapshot(state))


@every_way
def test_entries_follow_parameters_that_are_renamed(source, target, tmp_path):
    model, optimizer = MAKERS[source](ELEMENTWISE["Adam"])
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = MAKERS[target](ELEMENTWISE["Adam"], 1)
    state = {"net": nn.ModuleDict({"body": other}), "optimizer": loaded}
    renames = [("model/", "net/body.")]
    assert not dsd.load(tmp_path / "c", state, rename=renames).report
    assert_same(state_of(other, loaded), state_of(model, optimizer))


def test_a_model_that_is_unflattened_for_a_while_is_saved_and_loaded_as_ever(tmp_path):
    case = ELEMENTWISE["Adam"]
    model, optimizer = flat_of(case)
    train(model, optimizer, range(2))
    digest = dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with model.unflatten_params():
        assert dsd.save(tmp_path / "d", {"model": model, "optimizer": optimizer}) == digest
    other, loaded = flat_of(case, 1)
    with other.unflatten_params():
        dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded})
    assert_same(state_of(other, loaded), state_of(model, optimizer))


def test_what_is_saved_flat_on_purpose_is_not_cut(tmp_path):
    model, optimizer = flat_of(ELEMENTWISE["Adam"])
    train(model, optimizer, range(2))
    state = {"model": model.flat_state_dict(keep_vars=True), "optimizer": optimizer}
    dsd.save(tmp_path / "c", state)
    assert list(dsd.load(tmp_path / "c")["optimizer"]["state"]) == ["model/flat_param_0"]
    other, loaded = flat_of(ELEMENTWISE["Adam"], 1)
    state = {"model": other.flat_state_dict(keep_vars=True), "optimizer": loaded}
    dsd.load(tmp_path / "c", state)
    assert_same(state_of(other, loaded), state_of(model, optimizer))


# On the meta device


def on_meta(case: Case, seed: int = 1) -> tuple[FlattenParams, Any]:
    with torch.device("meta"):
        model = FlattenParams(case.model(seed).to("meta"))
    return model, case.kind(model.parameters(), **case.options)


@pytest.mark.parametrize("source", MAKERS.values(), ids=MAKERS)
def test_a_flat_model_on_meta_and_its_optimizer_get_memory(source, tmp_path):
    case = ELEMENTWISE["AdamW-amsgrad"]
    model, optimizer = source(case)
    train(model, optimizer, range(3))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = on_meta(case)
    [flat] = other.flat_params
    assert not dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded}).report
    assert other.flat_params == (flat,)
    assert not flat.is_meta
    assert all(not tensor.is_meta for tensor in tensors_of(loaded))
    assert_same(state_of(other, loaded), state_of(model, optimizer))
    train(model, optimizer, range(3, 5))
    train(other, loaded, range(3, 5))
    assert_same(state_of(other, loaded), state_of(model, optimizer))


def test_a_flat_parameter_on_meta_is_not_loaded_in_parts(tmp_path):
    case = ELEMENTWISE["Adam"]
    model, _ = plain_of(case)
    dsd.save(tmp_path / "c", {"model": model})
    del model[2].bias
    dsd.save(tmp_path / "part", {"model": model})
    other, _ = on_meta(case)
    for path, options in (
        (tmp_path / "part", {"strict": False}),
        (tmp_path / "c", {"select": "model/0.*"}),
    ):
        with pytest.raises(MismatchError, match="model/flat_param_0 cannot get its content"):
            dsd.load(path, {"model": other}, **options)
        assert other.flat_param.is_meta
        assert other.is_flattened
    with pytest.raises(MismatchError, match="missing in the checkpoint: 1"):
        dsd.load(tmp_path / "part", {"model": other})


def test_a_recipe_can_build_a_flat_model(tmp_path):
    registry = {"net": lambda: FlattenParams(wide(3))}
    model = FlattenParams(wide(0))
    dsd.save(tmp_path / "c", {"model": model}, recipes={"model": dsd.Recipe("net")})
    other = dsd.load_model(tmp_path / "c", registry)
    assert isinstance(other, FlattenParams)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


# What cannot be cut, or put together


class Rows(torch.optim.Optimizer):
    """Keeps the mean of rows, and of a flat parameter something of its own length."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["rows"] = parameter.grad.reshape(-1)[:3].clone()
                state["step"] = state.get("step", 0) + 1


def closure_of(model: nn.Module, optimizer: Any) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(
    ("kind", "options", "path", "what"),
    [
        pytest.param(Rows, {}, "$.optimizer.state.flat_param_0.rows", "'rows'", id="rows"),
        pytest.param(
            torch.optim.LBFGS, {"max_iter": 1}, "$.optimizer.state", "one history", id="LBFGS-once"
        ),
        pytest.param(torch.optim.LBFGS, {}, "$.optimizer.state", "one history", id="LBFGS"),
    ],
)
def test_state_that_belongs_to_no_parameter_is_refused_before_a_byte_is_written(
    kind, options, path, what, tmp_path
):
    model = FlattenParams(wide())
    optimizer = kind(model.parameters(), **options)
    dsd.save(tmp_path / "fresh", {"model": model, "optimizer": optimizer})
    optimizer.step(closure_of(model, optimizer)) if kind is not Rows else train(
        model, optimizer, [0]
    )
    with pytest.raises(UnsupportedValueError, match=what) as caught:
        dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert (caught.value.code, caught.value.path_in_tree) == ("unsupported_value", path)
    assert caught.value.hint
    assert [one.name for one in tmp_path.iterdir()] == ["fresh"]


def test_an_optimizer_of_before_the_model_was_flattened_is_told_so(tmp_path):
    model = wide()
    optimizer = Adam(model.parameters())
    with pytest.raises(UnsupportedValueError, match="after the model is flattened") as caught:
        dsd.save(tmp_path / "c", {"model": FlattenParams(model), "optimizer": optimizer})
    assert caught.value.code == "optimizer_without_module"


def refused(tmp_path: Path, model: nn.Module, optimizer: Any, **options: Any) -> str:
    """Load, which must fail and change nothing; return the message."""
    before = state_of(model, optimizer) if not options.pop("whole", False) else None
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer}, **options)
    assert caught.value.code == "state_mismatch"
    if before is not None:
        assert_same(state_of(model, optimizer), before)
    return str(caught.value)


@stepped
def test_rows_and_columns_of_parameters_do_not_fit_a_flat_one(steps, tmp_path):
    model = wide()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = FlattenParams(wide(1))
    loaded = torch.optim.Adafactor(other.parameters())
    train(other, loaded, range(steps))
    message = refused(tmp_path, other, loaded)
    assert "optimizer/state/0.weight/row_var: shape [64, 1] in the checkpoint, [64, 4]" in message
    assert "optimizer/state/0.bias/row_var" in message  # which it lacks


def test_a_history_of_all_parameters_does_not_fit_flat_ones(tmp_path):
    model = wide()
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(closure_of(model, optimizer))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = FlattenParams(wide(1))
    loaded = torch.optim.LBFGS(other.parameters())
    message = refused(tmp_path, other, loaded)
    assert "one history of all parameters in the checkpoint" in message


def changed(tmp_path: Path, change: Callable[[Any], None], form: str = "plain") -> None:
    """Save a training whose optimizer was changed."""
    model, optimizer = MAKERS[form](ELEMENTWISE["Adam"])
    train(model, optimizer, range(2))
    change({name: optimizer.state[one] for name, one in model.named_parameters()})
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})


MISFITS = {
    "another step": (
        lambda s: s["0.bias"].update(step=torch.tensor(5.0)),
        "optimizer/state/0.bias/step: value 5.0 in the checkpoint, 2.0, as 0.weight has wanted",
    ),
    "no state": (lambda s: s["2.bias"].clear(), "optimizer/state/2.bias/exp_avg\n"),
    "no step": (lambda s: s["2.bias"].pop("step"), "optimizer/state/2.bias/step\n"),
    "another dtype": (
        lambda s: s["0.bias"].update(exp_avg=s["0.bias"]["exp_avg"].double()),
        "optimizer/state/0.bias/exp_avg: dtype float64 in the checkpoint, float32, as 0.weight",
    ),
    "another shape": (
        lambda s: s["2.weight"].update(exp_avg=torch.ones(64, 1)),
        "optimizer/state/2.weight/exp_avg: shape [64, 1] in the checkpoint, [64, 64], as the",
    ),
    "a text": (
        lambda s: s["2.weight"].update(exp_avg="none"),
        "optimizer/state/2.weight/exp_avg: kind a str, 'none' in the checkpoint, [64, 64], as",
    ),
    "a step for each element": (
        lambda s: [state.update(step=torch.ones_like(state["exp_avg"])) for state in s.values()],
        "optimizer/state/0.weight/step: shape [64, 4] in the checkpoint, a number wanted",
    ),
    "a sparse tensor": (
        lambda s: [one.update(exp_avg=one["exp_avg"].to_sparse()) for one in s.values()],
        "optimizer/state/0.weight/exp_avg: shape [0] in the checkpoint",
    ),
}


@pytest.mark.parametrize(("change", "what"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("steps", [0, 1], ids=["never stepped", "stepped"])
def test_states_that_are_not_of_one_kind_are_told_and_nothing_is_changed(
    change, what, steps, tmp_path
):
    changed(tmp_path, change)
    model, optimizer = flat_of(ELEMENTWISE["Adam"], 1)
    train(model, optimizer, range(steps))
    message = refused(tmp_path, model, optimizer)
    assert what in f"{message}\n"


@pytest.mark.parametrize("change", [one for one, _ in MISFITS.values()], ids=MISFITS)
def test_states_that_are_not_of_one_kind_can_be_left_out(change, tmp_path):
    changed(tmp_path, change)
    model, optimizer = flat_of(ELEMENTWISE["Adam"], 1)
    train(model, optimizer, range(1))
    before = [tensor.clone() for tensor in tensors_of(optimizer)]
    state = {"model": model, "optimizer": optimizer}
    assert dsd.load(tmp_path / "c", state, strict=False).report
    assert_same(tensors_of(optimizer), before)
    assert_same(state_of(model, optimizer)["model"], dsd.load(tmp_path / "c")["model"])
    train(model, optimizer, [1])


def test_parameters_of_groups_that_differ_are_not_one_group(tmp_path):
    model, optimizer = grouped("plain")
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = flat_of(ELEMENTWISE["AdamW"], 1)
    message = refused(tmp_path, other, loaded)
    assert "optimizer/param_groups/0.bias/betas: value (0.8, 0.9) in the checkpoint" in message


def test_another_grouping_into_flat_parameters_can_be_loaded(tmp_path):
    case = ELEMENTWISE["Adam"]
    model, optimizer = flat_of(case)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = FlattenParams(wide(1), [["2.bias", "0.weight"], ["0.bias"]])
    parameters = [{"params": [one]} for one in other.parameters()]
    loaded = Adam(parameters, lr=3.0)
    dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded})
    assert [group["lr"] for group in loaded.param_groups] == [1e-3] * 3
    assert_same(
        state_of(other, loaded)["optimizer"]["state"],
        state_of(model, optimizer)["optimizer"]["state"],
    )


def test_a_parameter_that_is_not_in_the_checkpoint_is_missing(tmp_path):
    model = nn.Sequential(wide()[0])
    optimizer = Adam(model.parameters())
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = flat_of(ELEMENTWISE["Adam"], 1)
    train(other, loaded, range(1))
    message = refused(tmp_path, other, loaded)
    assert "  optimizer/state/2.weight\n  optimizer/state/2.bias\n" in message


def test_what_differs_in_the_model_leaves_its_flat_state_alone(tmp_path):
    model = mlp(0, sizes=(4, 64, 32))
    optimizer = Adam(model.parameters())
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = flat_of(ELEMENTWISE["Adam"], 1)
    train(other, loaded, range(1))
    before = [tensor.clone() for tensor in tensors_of(loaded)]
    report = dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded}, strict=False).report
    assert {one.name for one in report.mismatched} == {
        "model/2.weight",
        "model/2.bias",
        "optimizer/state/0.weight",
    }
    assert_same(tensors_of(loaded), before)


def test_a_checkpoint_without_state_takes_the_state_away(tmp_path):
    model, optimizer = plain_of(ELEMENTWISE["Adam"])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = flat_of(ELEMENTWISE["Adam"], 1)
    train(other, loaded, range(2))
    dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded})
    assert not loaded.state
    assert_same(state_of(other, loaded), state_of(model, optimizer))


# Other forms of state than those that are there


def test_state_of_another_dtype_is_told_or_replaced(tmp_path):
    def halve(states: Any) -> None:
        for state in states.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()

    changed(tmp_path, halve)
    model, optimizer = flat_of(ELEMENTWISE["Adam"], 1)
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    [state] = optimizer.state.values()
    assert state["exp_avg"].dtype == torch.bfloat16

    model, optimizer = flat_of(ELEMENTWISE["Adam"], 1)
    train(model, optimizer, range(1))
    message = refused(tmp_path, model, optimizer)
    assert "optimizer/state/2.bias/exp_avg: dtype bfloat16 [64] in the checkpoint" in message
    state = {"model": model, "optimizer": optimizer}
    report = dsd.load(tmp_path / "c", state, strict=False).report
    assert len(report.replaced) == 4
    stored = dsd.load(tmp_path / "c")
    assert_same(state_of(model, optimizer)["optimizer"]["state"], stored["optimizer"]["state"])


def test_state_that_shares_memory_with_the_model_is_not_read_into(tmp_path):
    model, optimizer = plain_of(ELEMENTWISE["Adam"])
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = flat_of(ELEMENTWISE["Adam"], 1)
    train(other, loaded, range(1))
    state = loaded.state[other.flat_param]
    state["exp_avg"] = other.flat_param.detach()
    dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded})
    assert_same(state_of(other, loaded), state_of(model, optimizer))


def test_state_that_is_not_contiguous_is_cut_and_replaced(tmp_path):
    model, optimizer = flat_of(ELEMENTWISE["Adam"])
    train(model, optimizer, range(2))
    wanted = state_of(model, optimizer)
    [state] = optimizer.state.values()
    spread = torch.zeros(2 * state["exp_avg"].numel())[::2]
    state["exp_avg"] = spread.copy_(state["exp_avg"])
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert_same(state_of(model, optimizer), wanted)
    state["exp_avg"].zero_()
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert_same(state_of(model, optimizer), wanted)


class Shown(Adam):
    """Shows its state under other names."""

    def state_dict(self) -> dict[str, Any]:
        shown = super().state_dict()
        state = {
            number: {f"my_{key}": value for key, value in entries.items()}
            for number, entries in shown["state"].items()
        }
        return {**shown, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {
            number: {key.removeprefix("my_"): value for key, value in entries.items()}
            for number, entries in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})


@every_way
def test_an_optimizer_with_a_form_of_its_own_keeps_it(source, target, tmp_path):
    case = dataclasses.replace(ELEMENTWISE["Adam"], kind=Shown)
    model, optimizer = MAKERS[source](case)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    entries = dsd.load(tmp_path / "c")["optimizer"]["state"]["0.bias"]
    assert [*entries] == ["my_exp_avg", "my_exp_avg_sq", "my_step"]
    for steps in (0, 1):
        other, loaded = MAKERS[target](case, 1)
        train(other, loaded, range(steps))
        dsd.load(tmp_path / "c", {"model": other, "optimizer": loaded})
        assert_same(state_of(other, loaded), state_of(model, optimizer))
        assert "exp_avg" in next(iter(loaded.state.values()))


# Parts of a checkpoint


def test_parts_are_read_into_a_flat_state_that_is_there(tmp_path):
    case = ELEMENTWISE["Adam"]
    model, optimizer = plain_of(case)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, loaded = flat_of(case, 1)
    train(other, loaded, range(2))
    wanted = state_of(other, loaded)["optimizer"]["state"]
    stored = dsd.load(tmp_path / "c")["optimizer"]["state"]
    before = places(loaded)
    state = {"model": other, "optimizer": loaded}
    dsd.load(tmp_path / "c", state, select=["optimizer/state/0.*/exp_avg"])
    for name in ("0.weight", "0.bias"):
        wanted[name]["exp_avg"] = stored[name]["exp_avg"]
    assert_same(state_of(other, loaded)["optimizer"]["state"], wanted)
    assert places(loaded) == before
    dsd.load(tmp_path / "c", state, select=["optimizer/state/*/exp_avg_sq"])
    for name in wanted:
        wanted[name]["exp_avg_sq"] = stored[name]["exp_avg_sq"]
    assert_same(state_of(other, loaded)["optimizer"]["state"], wanted)


def test_parts_are_refused_where_the_rest_would_mean_nothing(tmp_path):
    case = ELEMENTWISE["Adam"]
    model, optimizer = plain_of(case)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    fresh, loaded = flat_of(case, 1)
    message = refused(tmp_path, fresh, loaded, select="optimizer/state/0.*/exp_avg")
    assert "optimizer/state/2.weight/exp_avg: state not selected" in message
    train(fresh, loaded, range(1))
    message = refused(tmp_path, fresh, loaded, select="optimizer/state/0.weight/step")
    assert "optimizer/state/0.bias/step: state not selected" in message


# The functions of `state_dict`

SOME = ("SGD", "SGD-momentum", "AdamW-amsgrad")
trainings = pytest.mark.parametrize(
    "make", listed({**MODELS, **{name: of_case(name) for name in SOME}})
)
flattened = pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])


@trainings
@flattened
@stepped
def test_functions_give_the_state_of_the_plain_model(make, flatten, steps):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    states = []
    for form in MAKERS:
        model, optimizer = make(form)
        train(model, optimizer, range(steps))
        states.append(get_state_dict(model, optimizer, options=options))
    assert_same(states[1][0], states[0][0])
    assert_same(states[1][1], states[0][1])


@trainings
@flattened
@stepped
@pytest.mark.parametrize(("source", "target"), [("plain", "flat"), ("flat", "plain")])
def test_functions_set_either_from_either(make, source, target, flatten, steps):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = make(source)
    train(model, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    other, loaded = make(target, 1)
    train(other, loaded, range(steps))
    before = places(loaded)
    set_state_dict(
        other,
        loaded,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    assert steps == 0 or places(loaded) == before
    assert_same(state_of(other, loaded), state_of(model, optimizer))
    train(model, optimizer, range(3, 5))
    train(other, loaded, range(3, 5))
    assert_same(state_of(other, loaded), state_of(model, optimizer))


def test_functions_leave_out_what_is_frozen_in_a_flat_model():
    options = StateDictOptions(ignore_frozen_params=True)
    names = [set(get_model_state_dict(mixed(form)[0], options=options)) for form in MAKERS]
    assert names[0] == names[1] == {"0.bias", "2.weight", "2.bias"}


def test_functions_find_a_tied_parameter_of_a_flat_model_under_one_of_its_names():
    model, _ = tied("plain")
    state = get_model_state_dict(model)
    del state["first.weight"]
    other, _ = tied("flat", 1)
    assert not any(set_model_state_dict(other, state))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


# fairscale's wrapper


class FlatParameter(nn.Parameter):
    """What fairscale's has."""

    _param_infos: list[Any]
    _shared_param_infos: list[Any]
    _param_shapes: list[Any]

    def metadata(self) -> tuple[list[str], list[Any], list[int]]:
        names = [f"{path}.{name}".removeprefix(".") for path, _, name in self._param_infos]
        return names, self._param_shapes, [shape.numel() for shape in self._param_shapes]


class FlattenParamsWrapper(nn.Module):
    """Does what fairscale's does, as far as state dicts and optimizers see it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fpw_module = module
        infos, shared, first, parameters = [], [], {}, []
        for path, owner in self.named_modules():
            for name, one in owner.named_parameters(recurse=False):
                if one in first:
                    shared.append((path, first[one][0], owner, name, *first[one][1:]))
                else:
                    first[one] = (path, owner, name)
                    infos.append((path, owner, name))
                    parameters.append(one)
        flat = FlatParameter(torch.cat([one.detach().reshape(-1) for one in parameters]))
        flat._param_infos, flat._shared_param_infos = infos, shared
        flat._param_shapes = [one.shape for one in parameters]
        self.register_parameter("flat_param_0", flat)
        for _, owner, name in infos:
            delattr(owner, name)
        for _, _, owner, name, *_ in shared:
            delattr(owner, name)

    def _hold(self, register: bool) -> None:
        flat = self.flat_param_0
        shapes = flat._param_shapes
        parts = flat.split([shape.numel() for shape in shapes])
        places = [(owner, name) for _, owner, name in flat._param_infos]
        for (owner, name), part, shape in zip(places, parts, shapes, strict=True):
            if register:
                owner.__dict__.pop(name, None)
                owner.register_parameter(name, nn.Parameter(part.detach().view(shape)))
            else:
                owner._parameters.pop(name, None)
                setattr(owner, name, part.view(shape))
        for _, _, owner, name, first, other in flat._shared_param_infos:
            owner.__dict__.pop(name, None)
            owner._parameters.pop(name, None)
            setattr(owner, name, getattr(first, other))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._hold(register=False)
        return self._fpw_module(x)

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> Any:
        self._hold(register=True)
        try:
            return self._fpw_module.state_dict(*args, prefix=prefix, **options)
        finally:
            self._hold(register=False)

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        self._hold(register=True)
        try:
            return self._fpw_module.load_state_dict(state, strict)
        finally:
            self._hold(register=False)


@pytest.fixture
def fairscale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the class above in the place of fairscale's."""
    place = "fairscale.nn.misc.flatten_params_wrapper"
    module = types.ModuleType(place)
    module.FlattenParamsWrapper = FlattenParamsWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, place, module)
    compat._child_of.cache_clear()  # another test may have another one there
    yield
    compat._child_of.cache_clear()


@pytest.mark.usefixtures("fairscale")
@pytest.mark.parametrize("nested", [False, True], ids=["whole", "nested"])
def test_flat_parameters_of_fairscale_are_filed_and_loaded_by_name(nested, tmp_path):
    def make(wrap: Any, seed: int) -> tuple[nn.Module, Any]:
        model, _ = tied("plain", seed)
        model = wrap(model)
        model = nn.Sequential(model, seeded(nn.Linear(4, 2), seed)) if nested else model
        return model, Adam(model.parameters(), lr=0.01)

    forms = {"plain": lambda m: m, "flat": FlattenParams, "fairscale": FlattenParamsWrapper}
    digests = []
    for name, wrap in forms.items():
        model, optimizer = make(wrap, 0)
        train(model, optimizer, range(3))
        digests.append(dsd.save(tmp_path / name, {"model": model, "optimizer": optimizer}))
    assert len(set(digests)) == 1
    for steps in (0, 2):
        for source in forms:
            for wrap in forms.values():
                other, loaded = make(wrap, 1)
                train(other, loaded, range(steps))
                dsd.load(tmp_path / source, {"model": other, "optimizer": loaded})
                again = dsd.save(
                    tmp_path / "again", {"model": other, "optimizer": loaded}, overwrite=True
                )
                assert again == digests[0]
