"""Meta and frozen: parameters get content and stay the same objects; none stays empty unsaid."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat.errors import (  # noqa: E402
    ArgumentError,
    ChecksumError,
    MismatchError,
    UnsupportedValueError,
)
from tests.torch_runtime.exact import assert_same, assert_same_tensor  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where this test's checkpoint goes."""
    return tmp_path / "saved"


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        given = torch.tensor([[1.0, -2.0, 0.5]]) * (step + 1)
        optimizer.zero_grad()
        model(given).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(steps))
    return model, optimizer


@pytest.fixture
def source(path: Path) -> dict[str, Any]:
    """A trained model and its optimizer, as they were saved."""
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer}
    dsd.save(path, state)
    return state


def are_on_meta(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


# Saving what has no data


class Half(nn.Module):
    """One layer has data, the other has none."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(2, 2)
        self.empty = on_meta(lambda: nn.Linear(2, 2))


def stateful_on_meta(make: Callable[[], nn.Module] = mlp) -> dict[str, Any]:
    model = on_meta(make)
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return {"optimizer": optimizer, "model": model}


MLP_NAMES = ["0.bias", "0.weight", "2.bias", "2.weight"]
EMPTY_STATES: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "a model": (lambda: {"model": on_meta(mlp)}, [f"model/{name}" for name in MLP_NAMES]),
    "half of a model": (lambda: {"model": Half()}, ["model/empty.bias", "model/empty.weight"]),
    "a wrapped model": (
        lambda: {"model": nn.DataParallel(torch.compile(on_meta(mlp)))},
        [f"model/{name}" for name in MLP_NAMES],
    ),
    "one of two models": (
        lambda: {"a": mlp(), "b": {"c": on_meta(lambda: nn.Linear(1, 1))}},
        ["b/c/bias", "b/c/weight"],
    ),
    "a part of a model": (
        lambda: {"model": [nn.Sequential(nn.Linear(1, 1)), on_meta(lambda: nn.Linear(1, 1))]},
        ["model/bias", "model/weight"],
    ),
    "a buffer": (
        lambda: {"model": nn.ModuleList([nn.BatchNorm1d(1), on_meta(lambda: nn.BatchNorm1d(1))])},
        [
            f"model/1.{name}"
            for name in ("bias", "num_batches_tracked", "running_mean", "running_var", "weight")
        ],
    ),
    "an optimizer": (
        lambda: stateful_on_meta(lambda: nn.Linear(1, 1)),
        ["model/bias", "model/weight"]
        + [
            f"optimizer/state/{name}/{key}"
            for name in ("bias", "weight")
            for key in ("exp_avg", "exp_avg_sq")
        ],
    ),
    "tensors": (
        lambda: {"x": torch.empty(2, device="meta"), "y": [1, (torch.empty((), device="meta"),)]},
        ["x", "y/@1/@0"],
    ),
    "an OrderedDict": (
        lambda: {"x": OrderedDict(a=torch.empty(2, device="meta"), b=torch.ones(2))},
        ["x/a"],
    ),
    "an empty tensor": (lambda: {"x": torch.empty(0, device="meta")}, ["x"]),
    "a sparse tensor": (
        lambda: {"x": torch.sparse_coo_tensor(size=(3, 3), device="meta")},
        ["x"],
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly:UserWarning")
each_empty_state = pytest.mark.parametrize("kind", EMPTY_STATES)


@each_empty_state
@pytest.mark.parametrize("call", ["save", "snapshot"])
def test_what_is_on_meta_is_refused_with_the_names_of_all_of_it(
    tmp_path: Path, kind: str, call: str
) -> None:
    make, names = EMPTY_STATES[kind]
    with pytest.raises(UnsupportedValueError, match="meta") as caught:
        dsd.save(tmp_path / "saved", make()) if call == "save" else dsd.snapshot(make())
    assert caught.value.code == "unsupported_value"
    assert caught.value.hint
    assert "materialize" in caught.value.hint
    assert [name for name in names if name not in str(caught.value)] == []


@each_empty_state
def test_refusing_what_is_on_meta_leaves_no_file(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedValueError):
        dsd.save(tmp_path / "saved", EMPTY_STATES[kind][0]())
    assert not list(tmp_path.iterdir())


def test_what_has_data_is_not_named_among_what_has_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "saved", {"model": Half()})
    assert "real" not in str(caught.value)


def test_of_many_names_on_meta_ten_are_shown_and_all_counted(tmp_path: Path) -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(50))))
    with pytest.raises(UnsupportedValueError, match="90 more") as caught:
        dsd.save(tmp_path / "saved", {"model": model})
    assert str(caught.value).count("model/") == 10


def test_refusing_what_is_on_meta_keeps_the_checkpoint_that_was_there(tmp_path: Path) -> None:
    digest = dsd.save(tmp_path / "saved", {"model": mlp()})
    with pytest.raises(UnsupportedValueError):
        dsd.save(tmp_path / "saved", {"model": on_meta(mlp)}, overwrite=True)
    assert dsdformat.verify(tmp_path / "saved", digest=digest)


@pytest.mark.parametrize(
    "value",
    [
        deque([torch.empty(2, device="meta")]),
        {"x": (deque([1, [torch.empty(2, device="meta")]]),)},
    ],
    ids=["a deque", "a deque below others"],
)
def test_what_is_on_meta_in_a_deque_is_refused_too(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedValueError):
        dsd.save(tmp_path / "saved", {"history": value})
    assert not list(tmp_path.iterdir())


def test_a_fake_model_is_refused(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = mlp()
    with pytest.raises(UnsupportedValueError):
        dsd.save(tmp_path / "saved", {"model": model})
    assert not list(tmp_path.iterdir())


def test_a_buffer_on_meta_that_is_not_saved_does_not_hinder_saving(path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.empty(3, device="meta"), persistent=False)
    dsd.save(path, {"model": model})
    assert sorted(dsd.load(path)["model"]) == ["bias", "weight"]


# Loading into what is on meta


def test_a_model_on_meta_gets_the_content(path: Path, source: dict[str, Any]) -> None:
    model = on_meta(mlp)
    assert not dsd.load(path, {"model": model, "optimizer": adamw(model)}).report
    assert not are_on_meta(model)
    assert_same(dict(model.state_dict()), dict(source["model"].state_dict()))


def test_parameters_stay_the_objects_that_the_optimizer_holds(
    path: Path, source: dict[str, Any]
) -> None:
    model = on_meta(mlp)
    optimizer = adamw(model)
    before = list(map(id, model.parameters()))
    dsd.load(path, {"model": model, "optimizer": optimizer})
    assert list(map(id, model.parameters())) == before
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == before
    assert set(optimizer.state) == set(model.parameters())


def test_the_state_of_an_optimizer_comes_to_where_its_parameters_are(
    path: Path, source: dict[str, Any]
) -> None:
    model = on_meta(mlp)
    optimizer = adamw(model)
    dsd.load(path, {"model": model, "optimizer": optimizer})
    assert_same(
        dsd.snapshot({"model": model, "optimizer": optimizer}),
        dsd.snapshot(source),
    )


def test_training_goes_on_from_meta_as_if_it_had_never_stopped(
    path: Path, source: dict[str, Any]
) -> None:
    model = on_meta(mlp)
    optimizer = adamw(model)
    dsd.load(path, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(2, 5))
    train(source["model"], source["optimizer"], range(2, 5))
    assert_same(dsd.snapshot({"model": model, "optimizer": optimizer}), dsd.snapshot(source))


def test_the_state_of_an_optimizer_that_was_on_meta_gets_its_content(
    path: Path, source: dict[str, Any]
) -> None:
    state = stateful_on_meta()
    dsd.load(path, state)
    tensors = [one for entry in state["optimizer"].state.values() for one in entry.values()]
    assert not any(tensor.is_meta for tensor in tensors)
    assert_same(dsd.snapshot(state), dsd.snapshot(source))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_whether_a_parameter_is_trained_is_what_the_model_says(
    path: Path, source: dict[str, Any], frozen: bool, place: str
) -> None:
    """And not what it was when the checkpoint was written."""
    source["model"][0].weight.requires_grad_(frozen)
    dsd.save(path, {"model": source["model"]}, overwrite=True)
    with torch.device(place):
        model = mlp()
    model[0].weight.requires_grad_(not frozen)
    dsd.load(path, {"model": model})
    assert model[0].weight.requires_grad is not frozen
    assert model[0].bias.requires_grad


def test_parameters_from_meta_are_parameters_that_can_be_trained(
    path: Path, source: dict[str, Any]
) -> None:
    model = on_meta(mlp)
    dsd.load(path, {"model": model}, select="model/*")
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.grad is None
    model(torch.ones(1, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_attributes_of_parameters_and_buffers_are_kept(path: Path) -> None:
    def make() -> nn.Module:
        model = nn.BatchNorm1d(2)
        model.weight.tensor_parallel = mark
        model.running_mean.note = "kept"
        return model

    mark = object()
    source = make()
    dsd.save(path, {"model": source})
    model = on_meta(make)
    dsd.load(path, {"model": model})
    assert model.weight.tensor_parallel is mark
    assert model.running_mean.note == "kept"
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


class OwnParameter(nn.Parameter):
    """A user's kind of parameter."""


class SlottedParameter(nn.Parameter):
    """A user's kind of parameter, with a slot."""

    __slots__ = ("note",)


class Tagged(torch.Tensor):
    """A user's kind of tensor, which behaves as any other."""


def with_weight(weight: torch.Tensor) -> nn.Linear:
    model = nn.Linear(2, 2)
    model.weight = weight
    return model


@pytest.mark.parametrize("kind", [nn.Parameter, OwnParameter], ids=lambda kind: kind.__name__)
def test_a_users_kind_of_parameter_is_kept(path: Path, kind: type) -> None:
    source = nn.Linear(2, 2)
    dsd.save(path, {"model": source})
    model = on_meta(lambda: with_weight(kind(torch.empty(2, 2))))
    model.weight.note = "kept"
    weight = model.weight
    dsd.load(path, {"model": model})
    assert model.weight is weight
    assert type(model.weight) is kind
    assert model.weight.note == "kept"
    assert_same_tensor(model.weight.data.as_subclass(torch.Tensor), source.weight)


def test_a_users_kind_of_parameter_can_be_trained(path: Path) -> None:
    dsd.save(path, {"model": nn.Linear(2, 2)})
    model = on_meta(lambda: with_weight(OwnParameter(torch.empty(2, 2))))
    dsd.load(path, {"model": model})
    assert model.weight.is_leaf
    model(torch.ones(1, 2)).sum().backward()
    assert_same_tensor(model.weight.grad.as_subclass(torch.Tensor), torch.ones(2, 2))


def test_slots_of_a_users_kind_of_parameter_are_kept(path: Path) -> None:
    dsd.save(path, {"model": nn.Linear(2, 2)})
    model = on_meta(lambda: with_weight(SlottedParameter(torch.empty(2, 2))))
    model.weight.note = "kept"
    dsd.load(path, {"model": model})
    assert model.weight.note == "kept"


def test_a_users_kind_of_buffer_is_kept(path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.register_buffer("b", torch.ones(3).as_subclass(Tagged))
        return model

    dsd.save(path, {"model": make()})
    model = on_meta(make)
    buffer = model.b
    dsd.load(path, {"model": model})
    assert model.b is buffer
    assert type(model.b) is Tagged
    assert not model.b.is_meta


def test_a_buffer_made_as_one_stays_one(path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.b = nn.Buffer(torch.ones(3))
        return model

    dsd.save(path, {"model": make()})
    model = on_meta(make)
    dsd.load(path, {"model": model})
    assert isinstance(model.b, nn.Buffer)
    assert_same_tensor(model.b, torch.ones(3))


HOOKS: dict[str, Callable[[Any, list[str]], Any]] = {
    "a hook": lambda weight, seen: weight.register_hook(lambda grad: seen.append("ran")),
    "a hook after accumulation": lambda weight, seen: weight.register_post_accumulate_grad_hook(
        lambda one: seen.append("ran")
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize(
    "place",
    [
        "cpu",
        pytest.param(
            "meta",
        ),
    ],
)
def test_hooks_of_a_parameter_are_kept(path: Path, kind: str, place: str) -> None:
    dsd.save(path, {"model": nn.Linear(2, 2)})
    with torch.device(place):
        model = nn.Linear(2, 2)
    seen: list[str] = []
    HOOKS[kind](model.weight, seen)
    dsd.load(path, {"model": model})
    model(torch.ones(1, 2)).sum().backward()
    assert seen == ["ran"]


def test_hooks_of_a_module_on_meta_see_what_is_loaded(path: Path) -> None:
    source = nn.Linear(2, 2)
    dsd.save(path, {"model": nn.Sequential(source)})
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    seen: list[Any] = []
    model[0].register_load_state_dict_pre_hook(
        lambda module, entries, prefix, *_: seen.append(entries[f"{prefix}weight"].clone())
    )
    model.register_load_state_dict_post_hook(
        lambda module, keys: seen.append(module[0].weight.detach().clone())
    )
    dsd.load(path, {"model": model})
    assert len(seen) == 2
    for tensor in seen:
        assert_same_tensor(tensor, source.weight)


FORMATS: dict[str, Callable[[], torch.Tensor]] = {
    "row-major": lambda: torch.empty(2, 3, 4, 5),
    "channels_last": lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.empty(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.empty(4, 3).t(),
    "permuted": lambda: torch.empty(2, 3, 4).permute(1, 2, 0),
}


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_the_memory_format_of_a_parameter_on_meta_is_kept(
    path: Path, kind: str, dtype: torch.dtype, mmap: bool
) -> None:
    empty = on_meta(FORMATS[kind])
    stored = torch.randn(empty.shape)
    dsd.save(path, {"model": {"w": stored}})
    model = nn.ParameterDict({"w": nn.Parameter(empty.to(dtype))})
    assert model.w.stride() == empty.stride()
    dsd.load(path, {"model": model}, dtype=dtype, mmap=mmap)
    assert model.w.stride() == empty.stride()
    assert_same_tensor(model.w, stored.to(dtype))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, 8)[:, ::2],
        lambda: torch.empty(8)[::2],
        lambda: torch.empty(3, 1).expand(3, 4),
    ],
    ids=["every second column", "every second", "expanded"],
)
def test_a_parameter_on_meta_that_would_not_be_dense_becomes_so(
    path: Path, make: Callable[[], torch.Tensor]
) -> None:
    empty = on_meta(make)
    stored = torch.randn(empty.shape)
    dsd.save(path, {"w": stored})
    dsd.load(path, {"w": empty})
    assert empty.is_contiguous()
    assert_same_tensor(empty, stored)


SHAPES_AND_DTYPES: dict[str, torch.Tensor] = {
    "no dims": torch.tensor(3.0),
    "no elements": torch.empty(0, 3),
    "bool": torch.tensor([True, False]),
    "int8": torch.tensor([-1, 2], dtype=torch.int8),
    "uint64": torch.tensor([2**63 + 1], dtype=torch.uint64),
    "bfloat16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "float8_e4m3fn": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "complex64": torch.tensor([1 + 2j], dtype=torch.complex64),
    "float64": torch.tensor([1e300], dtype=torch.float64),
}


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
@pytest.mark.parametrize("kind", SHAPES_AND_DTYPES)
def test_any_tensor_on_meta_gets_its_content(path: Path, kind: str, mmap: bool) -> None:
    stored = SHAPES_AND_DTYPES[kind]
    dsd.save(path, {"model": {"p": stored, "b": stored.clone()}, "x": stored.clone()})
    model = nn.Module()
    model.p = nn.Parameter(torch.empty_like(stored, device="meta"), requires_grad=False)
    model.register_buffer("b", torch.empty_like(stored, device="meta"))
    alone = torch.empty_like(stored, device="meta")
    dsd.load(path, {"model": model, "x": alone}, mmap=mmap)
    for tensor in (model.p, model.b, alone):
        assert_same_tensor(tensor, stored)


@pytest.mark.parametrize("trained", [False, True], ids=["plain", "with gradients"])
def test_a_tensor_on_meta_in_a_dict_is_the_same_object_with_content(
    path: Path, trained: bool
) -> None:
    dsd.save(path, {"x": [torch.ones(2), {"y": torch.zeros(3)}]})
    x, y = torch.empty(2, device="meta", requires_grad=trained), torch.empty(3, device="meta")
    state = {"x": [x, {"y": y}]}
    dsd.load(path, state)
    assert state["x"][0] is x
    assert x.is_leaf
    assert x.requires_grad is trained
    assert_same_tensor(x, torch.ones(2))
    assert_same_tensor(y, torch.zeros(3))


def test_a_model_that_was_built_in_another_dtype_on_meta_needs_a_cast(
    path: Path, source: dict[str, Any]
) -> None:
    model = on_meta(mlp).to(torch.float16)
    with pytest.raises(MismatchError):
        dsd.load(path, {"model": model}, select="model")
    assert len(are_on_meta(model)) == 4
    report = dsd.load(path, {"model": model}, select="model", dtype=torch.float16).report
    assert len(report.casts) == 4
    assert_same_tensor(model[0].weight, source["model"][0].weight.detach().half())


def test_modules_whose_parameters_are_reparametrized_load_on_meta(path: Path) -> None:
    def make() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))

    source = make()
    dsd.save(path, {"model": source})
    model = on_meta(make)
    dsd.load(path, {"model": model})
    assert_same_tensor(model(torch.ones(1, 2)), source(torch.ones(1, 2)))


@pytest.mark.parametrize(
    "place",
    [
        "cpu",
        pytest.param(
            "meta",
        ),
    ],
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_recurrent_modules_are_loaded(path: Path, kind: type[nn.Module], place: str) -> None:
    source = kind(2, 3)
    dsd.save(path, {"model": source})
    with torch.device(place):
        model = kind(2, 3)
    dsd.load(path, {"model": model})
    assert_same(model(torch.ones(1, 1, 2)), source(torch.ones(1, 1, 2)))


@pytest.mark.parametrize(
    "kind",
    [
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        lambda: nn.Conv2d(2, 2, 3),
        lambda: nn.BatchNorm2d(2),
        lambda: nn.EmbeddingBag(3, 2),
    ],
    ids=["attention", "transformer layer", "convolution", "batch norm", "embedding bag"],
)
def test_common_modules_are_loaded_on_meta(path: Path, kind: Callable[[], nn.Module]) -> None:
    source = kind()
    dsd.save(path, {"model": source})
    model = on_meta(kind)
    dsd.load(path, {"model": model})
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


def test_a_compiled_model_on_meta_that_has_not_run_is_loaded(
    path: Path, source: dict[str, Any]
) -> None:
    model = torch.compile(on_meta(mlp), backend="eager")
    dsd.load(path, {"model": model}, select="model")
    given = torch.ones(1, 3)
    assert_same_tensor(model(given), source["model"](given))


def test_shapes_may_be_tried_on_meta_before_loading(path: Path, source: dict[str, Any]) -> None:
    model = on_meta(mlp)
    assert model(torch.empty(5, 3, device="meta")).shape == (5, 2)
    dsd.load(path, {"model": model}, select="model")
    model(torch.ones(1, 3)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_model_from_meta_can_be_copied_and_moved(path: Path, source: dict[str, Any]) -> None:
    model = on_meta(mlp)
    dsd.load(path, {"model": model}, select="model")
    other = copy.deepcopy(model).double()
    assert_same_tensor(other[0].weight, source["model"][0].weight.detach().double())
    assert_same_tensor(model[0].weight, source["model"][0].weight)


def test_a_model_from_meta_is_saved_digest_for_digest(
    tmp_path: Path, path: Path, source: dict[str, Any]
) -> None:
    model = on_meta(mlp)
    optimizer = adamw(model)
    dsd.load(path, {"model": model, "optimizer": optimizer})
    again = dsd.save(tmp_path / "again", {"model": model, "optimizer": optimizer})
    assert again == dsd.save(tmp_path / "first", source)


# What is partly on meta


def test_what_has_data_is_loaded_in_place_beside_what_has_none(path: Path) -> None:
    source = nn.ModuleDict({"real": nn.Linear(2, 2), "empty": nn.Linear(2, 2)})
    dsd.save(path, {"model": source})
    model = Half()
    places = [parameter.data_ptr() for parameter in model.real.parameters()]
    weight = model.real.weight
    dsd.load(path, {"model": model})
    assert [parameter.data_ptr() for parameter in model.real.parameters()] == places
    assert model.real.weight is weight
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


def test_a_model_with_parameters_on_meta_and_buffers_with_data_is_loaded(path: Path) -> None:
    def make() -> nn.Module:
        model = nn.BatchNorm1d(2)
        model.register_buffer("table", torch.arange(3.0), persistent=False)
        return model

    source = make()
    source.running_mean.fill_(7)
    dsd.save(path, {"model": source})
    model = make()
    mean = model.running_mean
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(parameter.to("meta")))
    assert not dsd.load(path, {"model": model}).report
    assert model.running_mean is mean
    assert_same(dict(model.state_dict()), dict(source.state_dict()))
    assert_same_tensor(model.table, torch.arange(3.0))


def test_an_optimizer_over_a_half_empty_model_is_restored(path: Path) -> None:
    source = nn.ModuleDict({"real": nn.Linear(2, 2), "empty": nn.Linear(2, 2)})
    optimizer = adamw(source)
    for parameter in source.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    dsd.save(path, {"model": source, "optimizer": optimizer})
    model = Half()
    other = adamw(model)
    dsd.load(path, {"model": model, "optimizer": other})
    assert_same(
        dsd.snapshot({"model": model, "optimizer": other}),
        dsd.snapshot({"model": source, "optimizer": optimizer}),
    )


def test_a_selected_part_is_loaded_and_the_rest_left_on_meta(
    path: Path, source: dict[str, Any]
) -> None:
    model = on_meta(mlp)
    report = dsd.load(path, {"model": model}, select="model/0.*").report
    assert are_on_meta(model) == ["2.weight", "2.bias"]
    assert not report
    dsd.load(path, {"model": model}, select="model/2.*")
    assert_same(dict(model.state_dict()), dict(source["model"].state_dict()))


# Buffers that no checkpoint holds


class Rotary(nn.Module):
    """Has a weight, a buffer that is saved and one that is not."""

    def __init__(self, saved: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("b", torch.zeros(3))
        self.register_buffer("n", torch.ones(3), persistent=saved)


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
def test_a_buffer_that_stays_on_meta_is_an_error_before_anything_is_changed(
    path: Path, nested: bool
) -> None:
    wrap = nn.Sequential if nested else lambda module: module
    dsd.save(path, {"model": wrap(Rotary()), "x": torch.ones(2)})
    model = on_meta(lambda: wrap(Rotary()))
    x = torch.zeros(2)
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": model, "x": x})
    assert caught.value.code == "state_mismatch"
    assert caught.value.report.uninitialized == ["model/0.n" if nested else "model/n"]
    assert "n" in str(caught.value)
    assert len(are_on_meta(model)) == 3
    assert_same_tensor(x, torch.zeros(2))


@pytest.mark.parametrize("strict", [False, {"model/n": False}], ids=["nowhere", "not there"])
def test_a_buffer_that_stays_on_meta_is_reported_where_that_is_allowed(
    path: Path, strict: Any
) -> None:
    source = Rotary()
    dsd.save(path, {"model": source})
    model = on_meta(Rotary)
    report = dsd.load(path, {"model": model}, strict=strict).report
    assert report
    assert report.uninitialized == ["model/n"]
    assert "model/n" in str(report)
    assert are_on_meta(model) == ["n"]
    assert_same_tensor(model.weight, source.weight)


def test_a_buffer_that_stays_on_meta_is_reported_though_the_file_has_its_name(path: Path) -> None:
    """An older version of the model saved it."""
    dsd.save(path, {"model": Rotary(saved=True)})
    model = on_meta(Rotary)
    report = dsd.load(path, {"model": model}, strict=False).report
    assert not model.n.is_meta or report.uninitialized == ["model/n"]


def test_a_buffer_that_is_not_saved_keeps_the_value_it_was_built_with(path: Path) -> None:
    dsd.save(path, {"model": Rotary()})
    model = on_meta(Rotary)
    model.register_buffer("n", torch.full((3,), 5.0), persistent=False)
    assert not dsd.load(path, {"model": model}).report
    assert_same_tensor(model.n, torch.full((3,), 5.0))


def test_a_buffer_on_meta_that_is_tied_to_one_that_is_saved_gets_its_content(path: Path) -> None:
    dsd.save(path, {"model": Rotary()})
    model = on_meta(Rotary)
    model.register_buffer("n", model.b, persistent=False)
    assert not dsd.load(path, {"model": model}).report
    assert model.n is model.b
    assert_same_tensor(model.n, torch.zeros(3))


def test_many_buffers_that_stay_on_meta_are_counted(path: Path) -> None:
    dsd.save(path, {"model": nn.Sequential(*(Rotary() for _ in range(15)))})
    model = on_meta(lambda: nn.Sequential(*(Rotary() for _ in range(15))))
    with pytest.raises(MismatchError, match="5 more") as caught:
        dsd.load(path, {"model": model})
    assert len(caught.value.report.uninitialized) == 15


def test_a_model_built_by_a_recipe_has_the_buffers_that_no_checkpoint_holds(path: Path) -> None:
    source = Rotary()
    dsd.save(path, {"model": source}, recipes={"model": dsd.Recipe("rotary")})
    model = dsd.load_model(path, {"rotary": Rotary})
    assert_same_tensor(model.n, torch.ones(3))
    assert_same_tensor(model.weight, source.weight)


# What the checkpoint lacks


def test_without_strict_what_is_missing_stays_on_meta_and_is_reported(
    path: Path, source: dict[str, Any]
) -> None:
    def deeper() -> nn.Module:
        return nn.Sequential(*mlp(), nn.Linear(2, 2))

    model = on_meta(deeper)
    optimizer = adamw(model)
    state = {"model": model, "optimizer": optimizer}
    report = dsd.load(path, state, strict=False).report
    assert sorted(report.missing) == [
        "model/3.bias",
        "model/3.weight",
        "optimizer/state/3.bias",
        "optimizer/state/3.weight",
    ]
    assert sorted(are_on_meta(model)) == ["3.bias", "3.weight"]
    assert_same_tensor(model[2].weight, source["model"][2].weight)
    moments = source["optimizer"].state[source["model"][2].weight]
    assert_same(optimizer.state[model[2].weight], moments)


def test_without_strict_what_does_not_fit_stays_on_meta_and_is_reported(
    path: Path, source: dict[str, Any]
) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    report = dsd.load(path, {"model": model}, select="model", strict=False).report
    assert [item.name for item in report.mismatched] == ["model/2.weight", "model/2.bias"]
    assert are_on_meta(model) == ["2.weight", "2.bias"]
    assert_same_tensor(model[0].weight, source["model"][0].weight)


@pytest.mark.parametrize("kind", ["missing", "shape", "kind"])
def test_an_error_leaves_a_model_on_meta_as_it_was(path: Path, kind: str) -> None:
    stored = dict(mlp().state_dict())
    stored["2.weight"] = {"shape": torch.zeros(5), "kind": 3, "missing": None}[kind]
    if kind == "missing":
        del stored["2.weight"]
    dsd.save(path, {"model": stored})
    model = on_meta(mlp)
    with pytest.raises(MismatchError):
        dsd.load(path, {"model": model})
    assert len(are_on_meta(model)) == 4


def test_after_a_damaged_file_a_model_on_meta_is_still_there(
    path: Path, source: dict[str, Any]
) -> None:
    data = path / "model.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    model = on_meta(mlp)
    with pytest.raises(ChecksumError):
        dsd.load(path, {"model": model}, select="model")
    assert len(are_on_meta(model)) == 4


# Who else holds a parameter


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_what_is_held_weakly_stays_the_object_that_is_held(path: Path, name: str) -> None:
    source = nn.BatchNorm1d(2)
    source(torch.randn(4, 2))
    dsd.save(path, {"a": source, "b": torch.ones(2)})
    model = on_meta(lambda: nn.BatchNorm1d(2))
    held, b = weakref.ref(getattr(model, name)), torch.zeros(2)
    dsd.load(path, {"a": model, "b": b})
    assert not are_on_meta(model)
    assert held() is getattr(model, name)
    assert_same(dict(model.state_dict()), dict(source.state_dict()))
    assert_same_tensor(b, torch.ones(2))


def test_a_weak_reference_that_is_gone_does_not_hinder(path: Path) -> None:
    source = nn.Linear(2, 2)
    dsd.save(path, {"model": source})
    model = on_meta(lambda: nn.Linear(2, 2))
    held = weakref.ref(model.weight)
    del held
    gc.collect()
    dsd.load(path, {"model": model})
    assert_same_tensor(model.weight, source.weight)


def test_a_weak_reference_to_a_parameter_with_data_does_not_hinder(path: Path) -> None:
    source = nn.Linear(2, 2)
    dsd.save(path, {"model": source})
    model = nn.Linear(2, 2)
    held = weakref.ref(model.weight)
    dsd.load(path, {"model": model})
    assert held() is model.weight
    assert_same_tensor(model.weight, source.weight)


def test_a_weak_reference_to_the_module_does_not_hinder(path: Path) -> None:
    source = nn.Linear(2, 2)
    dsd.save(path, {"model": source})
    model = on_meta(lambda: nn.Linear(2, 2))
    held = weakref.WeakKeyDictionary({model: 1})
    dsd.load(path, {"model": model})
    assert held[model] == 1
    assert_same_tensor(model.weight, source.weight)


@pytest.mark.parametrize(
    "hold",
    [
        lambda model: model[2].bias.view(2, 1),
        torch.no_grad()(lambda model: model[2].bias.view(2, 1)),
        lambda model: model(torch.empty(1, 3, device="meta")),
    ],
    ids=["a view", "a view without history", "a graph"],
)
def test_a_parameter_on_meta_that_torch_itself_holds_gets_its_content_all_the_same(
    path: Path, hold: Callable[[nn.Module], torch.Tensor]
) -> None:
    source = mlp()
    dsd.save(path, {"a": torch.ones(2), "model": source, "z": torch.ones(2)})
    model = on_meta(mlp)
    before = list(map(id, model.parameters()))
    held = hold(model)
    a, z = torch.zeros(2), torch.zeros(2)
    dsd.load(path, {"a": a, "model": model, "z": z})
    assert held.is_meta  # what was made before stays where it was
    assert list(map(id, model.parameters())) == before
    assert_same(dict(model.state_dict()), dict(source.state_dict()))
    assert_same_tensor(a, torch.ones(2))
    assert_same_tensor(z, torch.ones(2))
    model(torch.ones(1, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_parameters_in_lists_and_dicts_of_the_users_are_still_those_of_the_model(
    path: Path,
) -> None:
    source = nn.Linear(2, 2)
    dsd.save(path, {"model": source})
    model = on_meta(lambda: nn.Linear(2, 2))
    by_name, as_keys = dict(model.named_parameters()), {model.weight: "weight"}
    dsd.load(path, {"model": model})
    assert by_name["weight"] is model.weight
    assert as_keys[model.weight] == "weight"
    assert_same_tensor(by_name["weight"], source.weight)


# Where new tensors are made


def test_a_function_of_the_name_is_asked_for_each_parameter_on_meta(
    path: Path, source: dict[str, Any]
) -> None:
    asked: list[str] = []

    def device(name: str) -> str:
        asked.append(name)
        return "cpu"

    model = on_meta(mlp)
    dsd.load(path, {"model": model}, select="model", device=device)
    assert sorted(set(asked)) == [f"model/{name}" for name in MLP_NAMES]
    assert not are_on_meta(model)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        torch.device("cpu"),
        torch.device("cpu", 0),
        None,
        {"model/0.*": "cpu", "model/2.weight": torch.device("cpu")},
        {"no such name": "cpu"},
        lambda name: None,
    ],
    ids=["text", "device", "device with index", "none", "globs", "other globs", "function"],
)
def test_a_device_may_be_given_in_many_ways(
    path: Path, source: dict[str, Any], device: Any
) -> None:
    model = on_meta(mlp)
    optimizer = adamw(model)
    dsd.load(path, {"model": model, "optimizer": optimizer}, device=device)
    assert_same(dsd.snapshot({"model": model, "optimizer": optimizer}), dsd.snapshot(source))


@pytest.mark.parametrize(
    "device",
    ["nowhere", {"model/*": "nowhere"}, lambda name: "nowhere", 3.5],
    ids=["text", "globs", "function", "number"],
)
def test_what_is_no_device_is_refused_before_anything_is_changed(
    path: Path, source: dict[str, Any], device: Any
) -> None:
    model = on_meta(mlp)
    with pytest.raises(ArgumentError, match="device"):
        dsd.load(path, {"model": model}, select="model", device=device)
    assert len(are_on_meta(model)) == 4


def test_the_first_glob_that_matches_says_the_device(path: Path, source: dict[str, Any]) -> None:
    model = on_meta(mlp)
    dsd.load(
        path, {"model": model}, select="model", device={"model/0.weight": "cpu", "model/*": "meta"}
    )
    assert are_on_meta(model) == ["0.bias", "2.weight", "2.bias"]
    assert_same_tensor(model[0].weight, source["model"][0].weight)


def test_no_new_tensor_is_made_for_one_that_is_loaded_in_place(path: Path) -> None:
    dsd.save(path, {"x": torch.ones(2)})
    asked: list[str] = []
    dsd.load(path, {"x": torch.zeros(2)}, device=asked.append)
    assert not asked


def no_default_device() -> None:
    """Set the default device back, of which torch 2.6 keeps something that it cannot read."""
    torch.set_default_device(None)
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


@pytest.fixture(params=["a context", "the default"])
def _meta_by_default(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device of new tensors is set, as programs do that build a model somewhere else."""
    if request.param == "a context":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    yield
    no_default_device()


@pytest.mark.usefixtures("_meta_by_default")
@pytest.mark.parametrize("transposed", [False, True], ids=["packed", "transposed"])
def test_saving_does_not_depend_on_the_default_device(path: Path, transposed: bool) -> None:
    value = torch.arange(6.0, device="cpu").view(2, 3)
    value = value.t() if transposed else value
    dsd.save(path, {"x": value})
    with dsdformat.open(path) as checkpoint:
        stored = bytes(checkpoint.tensor("x").read())
    assert stored == bytes(value.contiguous().view(-1).numpy())


@pytest.mark.parametrize(
    "into",
    [
        *(pytest.param(into) for into in ("a plain state", "a model", "a model on meta")),
        "a map",
    ],
)
@pytest.mark.parametrize("how", ["a context", "the default"])
def test_loading_does_not_depend_on_the_default_device(path: Path, into: str, how: str) -> None:
    source = nn.Linear(2, 2)
    dsd.save(path, {"model": source})
    model = on_meta(lambda: nn.Linear(2, 2)) if into == "a model on meta" else nn.Linear(2, 2)
    state = {"model": model} if "model" in into else None
    if how == "the default":
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if how == "a context" else contextlib.nullcontext():
            loaded = dsd.load(path, state, mmap=into == "a map")
    finally:
        no_default_device()
    found = loaded["model"] if state is None else dict(model.state_dict())
    assert_same(found, dict(source.state_dict()))


@pytest.mark.usefixtures("_meta_by_default")
def test_a_snapshot_does_not_depend_on_the_default_device() -> None:
    value = torch.arange(6.0, device="cpu").view(2, 3).t()
    copied = dsd.snapshot({"x": value})["x"]
    assert copied.device.type == "cpu"
    assert torch.equal(copied, value)


# Maps of the file


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes+zstd"])
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_a_mapped_model_from_meta_trains_and_the_file_stays(
    path: Path, codec: str, verify: bool
) -> None:
    model, optimizer = trained()
    dsd.save(path, {"model": model, "optimizer": optimizer}, codec=codec)
    before = files_of(path)
    other = on_meta(mlp)
    resumed = adamw(other)
    dsd.load(path, {"model": other, "optimizer": resumed}, mmap=True, verify=verify)
    train(other, resumed, range(2, 4))
    train(model, optimizer, range(2, 4))
    assert_same(
        dsd.snapshot({"model": other, "optimizer": resumed}),
        dsd.snapshot({"model": model, "optimizer": optimizer}),
    )
    assert files_of(path) == before


def test_two_models_that_are_mapped_from_one_file_are_apart(
    path: Path, source: dict[str, Any]
) -> None:
    first, second = on_meta(mlp), on_meta(mlp)
    for model in (first, second):
        dsd.load(path, {"model": model}, select="model", mmap=True)
    with torch.no_grad():
        first[0].weight.zero_()
    assert_same_tensor(second[0].weight, source["model"][0].weight)


def test_a_mapped_model_outlives_its_file(path: Path, source: dict[str, Any]) -> None:
    model = on_meta(mlp)
    dsd.load(path, {"model": model}, select="model", mmap=True)
    for file in list(path.iterdir()):
        file.unlink()
    assert_same(dict(model.state_dict()), dict(source["model"].state_dict()))


def test_a_mapped_model_can_be_saved_over_its_own_file(path: Path, source: dict[str, Any]) -> None:
    model = on_meta(mlp)
    dsd.load(path, {"model": model}, select="model", mmap=True)
    with torch.no_grad():
        model[0].bias.fill_(7)
    dsd.save(path, {"model": model}, overwrite=True)
    assert_same(dsd.load(path)["model"], dict(model.state_dict()))
    assert_same_tensor(model[0].weight, source["model"][0].weight)


# Modules that have a state dict of their own making


class Detaching(nn.Linear):
    """Gives what the state dict of torch gives, without `keep_vars`."""

    def state_dict(self) -> dict[str, Any]:
        return dict(super().state_dict())


class Cloning(nn.Linear):
    """Gives copies."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value.clone() for key, value in super().state_dict(*args, **kwargs).items()}


class Renaming(nn.Linear):
    """Has other names in its state dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"core.{k}": v for k, v in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        plain = {key.removeprefix("core."): value for key, value in state_dict.items()}
        return super().load_state_dict(plain, strict, assign)


class Scaling(nn.Linear):
    """Saves other numbers than it holds."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: 2 * value for key, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        halves = {key: value.detach() / 2 for key, value in state_dict.items()}
        return super().load_state_dict(halves, strict, assign)


class OneArgument(nn.Linear):
    """Takes a state dict, and no options."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


class OtherName(nn.Linear):
    """Calls the argument as it likes."""

    def load_state_dict(self, weights: Any, strict: bool = True) -> Any:
        return super().load_state_dict(weights, strict)


class WithoutOptions(nn.Linear):
    """Hands all on."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)


OVERRIDDEN: dict[str, type[nn.Linear]] = {
    "detaching": Detaching,
    "cloning": Cloning,
    "renaming": Renaming,
    "scaling": Scaling,
    "other name": OtherName,
    "any arguments": WithoutOptions,
}
each_overridden = pytest.mark.parametrize("kind", OVERRIDDEN)


@each_overridden
def test_a_module_with_its_own_state_dict_is_loaded(path: Path, kind: str) -> None:
    source = OVERRIDDEN[kind](2, 2)
    dsd.save(path, {"model": source})
    model = OVERRIDDEN[kind](2, 2)
    weight, place = model.weight, model.weight.data_ptr()
    assert not dsd.load(path, {"model": model}).report
    assert model.weight is weight
    assert model.weight.data_ptr() == place
    assert_same_tensor(model.weight, source.weight)
    assert_same_tensor(model.bias, source.bias)


def test_a_module_whose_load_state_dict_takes_no_options_is_loaded(path: Path) -> None:
    source = OneArgument(2, 2)
    dsd.save(path, {"model": source})
    model = OneArgument(2, 2)
    dsd.load(path, {"model": model})
    assert_same_tensor(model.weight, source.weight)


@each_overridden
def test_a_module_with_its_own_state_dict_on_meta_is_loaded_or_refused(
    path: Path, kind: str
) -> None:
    source = OVERRIDDEN[kind](2, 2)
    dsd.save(path, {"model": source})
    model = on_meta(lambda: OVERRIDDEN[kind](2, 2))
    if kind == "renaming":  # nothing says which of its parameters an entry is
        with pytest.raises(MismatchError) as caught:
            dsd.load(path, {"model": model})
        assert sorted(caught.value.report.uninitialized) == ["model/bias", "model/weight"]
        assert len(are_on_meta(model)) == 2
        return
    assert not dsd.load(path, {"model": model}).report
    assert_same_tensor(model.weight, source.weight)
    assert_same_tensor(model.bias, source.bias)


class Adapter(nn.Module):
    """Saves what it trains, and not the base."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2).requires_grad_(False)
        self.adapter = nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        entries = super().state_dict(*args, **kwargs)
        return {key: value for key, value in entries.items() if key.startswith("adapter.")}


def test_what_a_modules_own_state_dict_leaves_out_is_left_alone(path: Path) -> None:
    source = Adapter()
    dsd.save(path, {"model": source})
    assert sorted(dsd.load(path)["model"]) == ["adapter.bias", "adapter.weight"]
    model = Adapter()
    base = model.base.weight.clone()
    assert not dsd.load(path, {"model": model}).report
    assert_same_tensor(model.adapter.weight, source.adapter.weight)
    assert_same_tensor(model.base.weight, base)


def test_what_a_modules_own_state_dict_leaves_out_on_meta_is_reported(path: Path) -> None:
    dsd.save(path, {"model": Adapter()})
    model = on_meta(Adapter)
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": model})
    assert sorted(caught.value.report.uninitialized) == ["model/base.bias", "model/base.weight"]
    assert len(are_on_meta(model)) == 4


class Packed(nn.Module):
    """A child that saves its parameter under another name and in another form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}packed"] = self.weight.detach().to(torch.float64)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}packed"])


def test_a_child_that_saves_in_a_form_of_its_own_is_loaded(path: Path) -> None:
    source = nn.Sequential(Packed())
    dsd.save(path, {"model": source})
    model = nn.Sequential(Packed())
    assert not dsd.load(path, {"model": model}).report
    assert_same_tensor(model[0].weight, source[0].weight)


def test_a_child_on_meta_that_saves_in_a_form_of_its_own_is_refused(path: Path) -> None:
    dsd.save(path, {"model": nn.Sequential(Packed())})
    model = on_meta(lambda: nn.Sequential(Packed()))
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": model})
    assert caught.value.report.uninitialized == ["model/0.weight"]


# Gradients that are there when a state is loaded


def test_gradients_are_what_they_were(path: Path, source: dict[str, Any]) -> None:
    model = mlp()
    model(torch.ones(1, 3)).sum().backward()
    optimizer = adamw(model)
    grads = [parameter.grad for parameter in model.parameters()]
    copies = [grad.clone() for grad in grads]
    dsd.load(path, {"model": model, "optimizer": optimizer})
    for parameter, grad, before in zip(model.parameters(), grads, copies, strict=True):
        assert parameter.grad is grad
        assert_same_tensor(grad, before)


def test_gradients_are_accumulated_on_after_loading(path: Path, source: dict[str, Any]) -> None:
    model = mlp()
    model(torch.ones(1, 3)).sum().backward()
    first = model[2].bias.grad.clone()
    dsd.load(path, {"model": model}, select="model")
    model(torch.ones(1, 3)).sum().backward()
    assert_same_tensor(model[2].bias.grad, first + 1)


def test_saving_makes_no_gradients_and_keeps_those_there_are(tmp_path: Path) -> None:
    model = mlp()
    model[0](torch.ones(1, 3)).sum().backward()
    grad = model[0].weight.grad
    before = grad.clone()
    dsd.save(tmp_path / "saved", {"model": model, "optimizer": adamw(model)})
    assert model[0].weight.grad is grad
    assert_same_tensor(grad, before)
    assert model[2].weight.grad is None


def test_a_gradient_without_data_goes_with_the_meta_device(
    path: Path, source: dict[str, Any]
) -> None:
    model = on_meta(mlp)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    dsd.load(path, {"model": model}, select="model")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_graph_from_before_a_load_does_not_give_wrong_gradients_in_silence(
    path: Path, source: dict[str, Any]
) -> None:
    model = mlp()
    loss = model(torch.ones(1, 3, requires_grad=True)).sum()
    dsd.load(path, {"model": model}, select="model")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_over_a_tensor_does_not_give_wrong_gradients_in_silence(path: Path) -> None:
    dsd.save(path, {"t": torch.ones(2)})
    t, x = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    loss = (t * x).sum()
    dsd.load(path, {"t": t})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Frozen parameters

FROZEN: dict[str, Callable[[nn.Module], None]] = {
    "none": lambda model: None,
    "a layer": lambda model: model[0].requires_grad_(False),
    "a bias": lambda model: model[2].bias.requires_grad_(False),
    "all": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("live", FROZEN)
@pytest.mark.parametrize("saved", FROZEN)
def test_all_entries_of_an_optimizer_are_restored_whatever_is_frozen(
    path: Path, saved: str, live: str, place: str
) -> None:
    model, optimizer = trained()
    before = dsd.snapshot({"model": model, "optimizer": optimizer})
    FROZEN[saved](model)
    dsd.save(path, {"model": model, "optimizer": optimizer})
    with torch.device(place):
        other = mlp()
    FROZEN[live](other)
    resumed = adamw(other)
    assert not dsd.load(path, {"model": other, "optimizer": resumed}).report
    assert_same(dsd.snapshot({"model": other, "optimizer": resumed}), before)
    kept = mlp()
    FROZEN[live](kept)
    assert [one.requires_grad for one in other.parameters()] == [
        one.requires_grad for one in kept.parameters()
    ]


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["a layer", "all"])
def test_training_goes_on_after_freezing_saving_loading_and_unfreezing(
    path: Path, kind: str, place: str
) -> None:
    model, optimizer = trained()
    FROZEN[kind](model)
    dsd.save(path, {"model": model, "optimizer": optimizer})
    with torch.device(place):
        other = mlp()
    FROZEN[kind](other)
    resumed = adamw(other)
    dsd.load(path, {"model": other, "optimizer": resumed})
    for one, its_optimizer in ((model, optimizer), (other, resumed)):
        one.requires_grad_(True)
        train(one, its_optimizer, range(2, 4))
    assert_same(
        dsd.snapshot({"model": other, "optimizer": resumed}),
        dsd.snapshot({"model": model, "optimizer": optimizer}),
    )


def test_an_optimizer_over_what_is_trained_alone_is_restored(path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    model, optimizer = make()
    train(model, optimizer, range(2))
    dsd.save(path, {"model": model, "optimizer": optimizer})
    assert sorted(dsd.load(path)["optimizer"]["state"]) == ["2.bias", "2.weight"]
    other, resumed = make()
    dsd.load(path, {"model": other, "optimizer": resumed})
    assert_same(
        dsd.snapshot({"model": other, "optimizer": resumed}),
        dsd.snapshot({"model": model, "optimizer": optimizer}),
    )


def test_a_frozen_parameter_of_integers_is_loaded(path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.codes = nn.Parameter(torch.tensor([1, 2, 3], dtype=torch.int8), requires_grad=False)
        return model

    dsd.save(path, {"model": make()})
    model = on_meta(make)
    dsd.load(path, {"model": model})
    assert not model.codes.requires_grad
    assert_same_tensor(model.codes, torch.tensor([1, 2, 3], dtype=torch.int8))
