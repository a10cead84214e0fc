"""State of optimizers is kept as it is: dtypes, shapes, kinds of values, ties, memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from torch import nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

import dsdformat.torch as dsd  # noqa: E402
from dsdformat.errors import DsdError, MismatchError, UnsupportedValueError  # noqa: E402
from tests.torch_runtime.exact import assert_same, assert_same_tensor  # noqa: E402
from tests.torch_runtime.optimizer_cases import (  # noqa: E402
    faulty,
    mlp,
    noise,
    state_of,
    train,
)

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
W0 = "0.weight"


class Keeper(Optimizer):
    """Keeps what it is given."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def keeping(make: Callable[[nn.Parameter], dict[Any, Any]], seed: int = 0) -> dict[str, Any]:
    """A model whose optimizer has such a state for each parameter."""
    model = mlp(seed)
    optimizer = Keeper(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = make(parameter)
    return {"model": model, "optimizer": optimizer}


def entries(state: dict[str, Any]) -> list[Any]:
    return [dict(state["optimizer"].state[p]) for p in state["model"].parameters()]


def unchanged(state: dict[str, Any]) -> Callable[[], None]:
    before = dsd.snapshot(state)
    return lambda: assert_same(dsd.snapshot(state), before)


# Dtypes

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("moments", DTYPES, ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_moments_keep_their_dtype_whatever_that_of_the_parameters(
    weights, moments, stepped, tmp_path
):
    def make(seed: int) -> dict[str, Any]:
        model = mlp(seed).to(weights)
        optimizer = AdamW(model.parameters())
        return {"model": model, "optimizer": optimizer}

    def forced(state: dict[str, Any]) -> dict[str, Any]:
        train(state["model"], state["optimizer"], [0])
        for entry in state["optimizer"].state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                entry[key] = (entry[key].double() / 3).to(moments)
        return state

    saved = forced(make(0))
    dsd.save(tmp_path / "c", saved)
    other = forced(make(1)) if stepped else make(1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))
    assert {entry["exp_avg"].dtype for entry in entries(other)} == {moments}


EVERY_DTYPE = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16,
    torch.bfloat16, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_state_of_any_dtype_is_kept(dtype, stepped, tmp_path):
    def make(seed: int) -> dict[str, Any]:
        data = torch.randint(0, 2, (24,), generator=torch.Generator().manual_seed(seed))
        return keeping(lambda p: {"q": data.repeat(6)[: p.numel()].to(dtype).view(p.shape)}, seed)

    saved = make(0)
    dsd.save(tmp_path / "c", saved)
    other = make(1) if stepped else keeping(lambda p: {}, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


@pytest.mark.parametrize("value", ["nan", "inf", "-0", "denormal"])
def test_every_bit_of_a_moment_is_kept(value, tmp_path):
    patterns = {"nan": 0x7FC12345, "inf": 0x7F800000, "-0": -0x80000000, "denormal": 1}
    bits = torch.tensor([patterns[value]], dtype=torch.int32)
    saved = keeping(lambda p: {"m": bits.view(torch.float32).expand(p.numel()).clone()})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {}, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(torch.bfloat16, id="one"),
        pytest.param({"*": torch.bfloat16}, id="glob"),
        pytest.param(lambda name: torch.bfloat16, id="function"),
    ],
)
def test_a_dtype_for_the_model_leaves_the_optimizer_alone(option, tmp_path):
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1))
    train(model, optimizer, [0])
    for entry in optimizer.state.values():
        entry["step"].fill_(9999)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1).bfloat16()
    other = AdamW(resumed.parameters(), lr=torch.tensor(0.2))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, dtype=option)
    assert {parameter.dtype for parameter in resumed.parameters()} == {torch.bfloat16}
    assert_same(other.state_dict(), optimizer.state_dict())
    assert {float(entry["step"]) for entry in other.state.values()} == {9999.0}


def test_a_dtype_leaves_the_optimizer_alone_in_a_plain_load_too(tmp_path):
    model = mlp()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    state = {"model": model, "nested": {"a": [optimizer]}}
    dsd.save(tmp_path / "c", state)
    plain = dsd.load(tmp_path / "c", dtype=torch.bfloat16)
    assert plain["model"][W0].dtype == torch.bfloat16
    wanted = dsd.snapshot(state)["nested"]
    assert_same(plain["nested"], wanted)


def test_the_step_of_a_model_in_low_precision_stays_float32(tmp_path):
    model = mlp().bfloat16()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    for entry in optimizer.state.values():
        entry["step"].fill_(9999)
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1).bfloat16()
    other = AdamW(resumed.parameters())
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    for entry in other.state.values():
        assert_same_tensor(entry["step"], torch.tensor(9999.0))


# State in two representations


class Quantizing(Optimizer):
    """Momentum as uint8 and a scale where a parameter has 16 elements or more, else as float32."""

    def __init__(self, params: Any, lr: float = 0.1, *, least: int = 16) -> None:
        super().__init__(params, {"lr": lr})
        self.least = least

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = self.momentum(state) if state else torch.zeros_like(p)
                momentum = 0.9 * momentum + p.grad
                if p.numel() >= self.least:
                    scale = momentum.abs().max() / 127
                    code = (momentum / scale + 128).round().to(torch.uint8)
                    state.update(code=code, scale=scale)
                else:
                    state["code"] = momentum
                p.sub_(group["lr"] * momentum)

    @staticmethod
    def momentum(state: dict[str, Any]) -> torch.Tensor:
        if state["code"].dtype == torch.uint8:
            return (state["code"].float() - 128) * state["scale"]
        return state["code"]


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_an_optimizer_with_quantized_state_goes_on_bit_for_bit(stepped, tmp_path):
    model, resumed = mlp(0), mlp(1)
    optimizer, other = Quantizing(model.parameters()), Quantizing(resumed.parameters(), 0.5)
    train(model, optimizer, range(2))
    assert {entry["code"].dtype for entry in optimizer.state.values()} == {
        torch.uint8,
        torch.float32,
    }
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    if stepped:
        train(resumed, other, range(50, 52))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    train(model, optimizer, range(2, 5))
    train(resumed, other, range(2, 5))
    assert_same(state_of(resumed, other), state_of(model, optimizer))


@pytest.mark.parametrize("least", [0, 1000], ids=["into uint8", "into float32"])
def test_another_representation_is_a_mismatch_that_names_entry_and_both_dtypes(least, tmp_path):
    model, resumed = mlp(0), mlp(1)
    optimizer = Quantizing(model.parameters())
    other = Quantizing(resumed.parameters(), least=least)
    train(model, optimizer, range(2))
    train(resumed, other, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    state = {"model": resumed, "optimizer": other}
    check = unchanged(state)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", state)
    check()
    name = "0.bias" if least == 0 else W0
    (line,) = [str(m) for m in caught.value.report.mismatched if f"{name}/code" in m.name]
    assert "uint8" in line
    assert "float32" in line


def test_without_strict_the_stored_representation_is_taken_and_reported(tmp_path):
    model, resumed = mlp(0), mlp(1)
    optimizer = Quantizing(model.parameters())
    other = Quantizing(resumed.parameters(), least=1000)
    train(model, optimizer, range(2))
    train(resumed, other, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    state = {"model": resumed, "optimizer": other}
    report = dsd.load(tmp_path / "c", state, strict=False).report
    assert f"optimizer/state/{W0}/code" in {item.name for item in report.replaced}
    assert_same(state_of(resumed, other), state_of(model, optimizer))


# Shapes


def test_factored_state_is_stored_with_its_own_shape(tmp_path):
    model = nn.Linear(8, 6)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(noise(0, 3, 8)).square().sum().backward()
    optimizer.step()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    stored = dsd.load(tmp_path / "c")["optimizer"]["state"]
    live = optimizer.state[model.weight], optimizer.state[model.bias]
    assert_same(stored["weight"], dict(live[0]))
    assert_same(stored["bias"], dict(live[1]))
    shapes = {key: tuple(value.shape) for key, value in stored["weight"].items()}
    assert shapes["row_var"] == (6, 1)
    assert shapes["col_var"] == (1, 8)


SHAPES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "scalar": lambda p: torch.tensor(1.5),
    "row": lambda p: noise(2, p.shape[0]),
    "of another rank": lambda p: noise(3, 1, 2, 1, p.numel(), 1),
    "empty": lambda p: torch.empty(0, 5),
    "transposed": lambda p: noise(4, 3, p.numel()).t(),
    "strided": lambda p: noise(5, 10)[::3],
    "expanded": lambda p: noise(6, 1).expand(4),
    "permuted": lambda p: noise(7, 2, 3, 4, 5).permute(3, 0, 2, 1),
    "channels last": lambda p: noise(8, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    "large": lambda p: noise(9, 300, 400),
    "conjugated": lambda p: noise(10, 4, dtype=torch.complex64).conj(),
    "negated": lambda p: noise(11, 4, dtype=torch.complex64).conj().imag,
    "a parameter": lambda p: nn.Parameter(noise(12, 3)),
    "with a gradient": lambda p: noise(13, 3).requires_grad_(),
    "with a history": lambda p: noise(14, 3).requires_grad_() * 2,
    "sparse": lambda p: noise(15, 3, 4).relu().to_sparse(),
}
any_shape = pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)


@any_shape
def test_state_of_any_shape_and_layout_is_made(make, tmp_path):
    saved = keeping(lambda p: {"x": make(p)})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {}, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


@any_shape
def test_state_of_any_shape_and_layout_is_read_over(make, tmp_path):
    saved = keeping(lambda p: {"x": make(p)})
    dsd.save(tmp_path / "c", saved)

    def changed(parameter: nn.Parameter) -> dict[str, Any]:
        # Of the same kind and strides, but with other values.
        x = make(parameter).detach()
        if x.layout is torch.strided and x.numel():
            x._base.zero_() if x._base is not None else x.zero_()
        return {"x": x}

    other = keeping(changed, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))
    assert_same([p.detach() for p in other["model"].parameters()],
                [p.detach() for p in saved["model"].parameters()])  # fmt: skip


@any_shape
def test_state_of_any_shape_takes_the_place_of_another_without_strict(make, tmp_path):
    saved = keeping(lambda p: {"x": make(p)})
    wanted = entries(saved)
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {"x": torch.zeros(2, 7, dtype=torch.int8)}, 1)
    dsd.load(tmp_path / "c", other, strict=False)
    assert_same(entries(other), wanted)


# Values of other kinds

VALUES: dict[str, Callable[[], Any]] = {
    "int step": lambda: 3,
    "float step": lambda: 3.0,
    "bool": lambda: True,
    "None": lambda: None,
    "text": lambda: "warm",
    "bytes": lambda: b"\x00\xff",
    "complex": lambda: 1j,
    "list of tensors": lambda: [torch.ones(2), torch.zeros(2)],
    "tuple of tensors": lambda: (torch.ones(2), torch.zeros(2)),
    "list of tensors and None": lambda: [None, torch.ones(2), None, 3],
    "empty list": list,
    "empty dict": dict,
    "deque of tensors": lambda: deque([torch.ones(2)], maxlen=4),
    "nested dict": lambda: {"a": {"b": [torch.ones(2), {"c": (torch.zeros(2), 2)}]}},
    "OrderedDict of tensors": lambda: OrderedDict(z=torch.ones(2), a=torch.zeros(2)),
    "dict with int keys": lambda: {3: torch.ones(2), 1: torch.zeros(2)},
    "dict with tuple keys": lambda: {(0, 1): torch.ones(2), None: 5},
    "torch.Size": lambda: torch.Size([2, 3]),
    "torch.dtype": lambda: torch.float8_e5m2,
    "numpy scalar": lambda: np.float32(0.5),
    "array": lambda: np.arange(6).reshape(2, 3),
    "set": lambda: {1, 2},
}
any_value = pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)


@any_value
@pytest.mark.parametrize("before", ["nothing", "the same", "None", "nested dict", "int step"])
def test_state_of_any_kind_of_value_is_kept(make, before, tmp_path):
    saved = keeping(lambda p: {"x": make(), "m": p.detach() + 1})
    dsd.save(tmp_path / "c", saved)
    live = {"nothing": dict, "the same": lambda: {"x": make()}}.get(before)
    other = keeping(lambda p: live() if live else {"x": VALUES[before]()}, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


SEQUENCES = ["bytes", "list of tensors", "tuple of tensors", "empty list", "torch.Size",
             "deque of tensors"]  # fmt: skip


@pytest.mark.parametrize("before", SEQUENCES)
@pytest.mark.parametrize(
    "name",
    [
        "list of tensors and None",
        "tuple of tensors",
        "deque of tensors",
        "dict with int keys",
        "text",
        "array",
    ],
)
def test_state_takes_the_place_of_a_sequence(name, before, tmp_path):
    saved = keeping(lambda p: {"x": VALUES[name]()})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {"x": VALUES[before]()}, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


@pytest.mark.parametrize("before", SEQUENCES)
@pytest.mark.parametrize("name", ["nested dict", "OrderedDict of tensors", "dict with tuple keys"])
def test_a_dict_of_tensors_takes_the_place_of_a_sequence(name, before, tmp_path):
    saved = keeping(lambda p: {"x": VALUES[name]()})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {"x": VALUES[before]()}, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


@pytest.mark.parametrize("value", [3, None, (torch.zeros(2),)], ids=repr)
def test_a_value_takes_the_place_of_a_tensor(value, tmp_path):
    saved = keeping(lambda p: {"x": value})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {"x": torch.zeros(2)}, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


@pytest.mark.parametrize("value", ["x", [1, 2], {"a": torch.zeros(2)}], ids=repr)
def test_a_value_that_is_never_a_tensor_over_one_is_reported(value, tmp_path):
    saved = keeping(lambda p: {"x": value})
    wanted = entries(saved)
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {"x": torch.zeros(2)}, 1)
    before = dsd.snapshot(other)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", other)
    assert [found.name for found in caught.value.report.mismatched] == [
        f"optimizer/state/{name}/x" for name, _ in other["model"].named_parameters()
    ]
    assert {found.what for found in caught.value.report.mismatched} == {"kind"}
    assert_same(dsd.snapshot(other), before)
    dsd.load(tmp_path / "c", other, strict=False)
    assert_same(entries(other), wanted)


@pytest.mark.parametrize(
    "key", [0, -1, None, ("a", 1), 2.5, True, b"k", "a/b", "", "params", "state"], ids=repr
)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_a_state_may_have_any_key(stepped, key, tmp_path):
    saved = keeping(lambda p: {key: p.detach() + 1, "x": 1})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {key: p.detach().clone()} if stepped else {}, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: len, id="a function"),
        pytest.param(object, id="an object"),
        pytest.param(torch.Generator, id="a generator"),
        pytest.param(lambda: [0, {"a": len}], id="nested"),
        pytest.param(lambda: torch.empty(2, device="meta"), id="a tensor on meta"),
    ],
)
def test_state_that_cannot_be_stored_is_refused_with_its_path(make, tmp_path):
    state = keeping(lambda p: {"good": 1, "bad": make()})
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", state)
    assert "bad" in str(caught.value)
    assert "0." in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: p.detach() + 1, id="a tensor"),
        pytest.param(lambda p: [p.detach() + 1, 2], id="a list"),
        pytest.param(lambda p: 5, id="an int"),
        pytest.param(lambda p: None, id="None"),
    ],
)
def test_an_entry_that_is_no_mapping_is_refused(make, tmp_path):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", keeping(make))
    assert caught.value.path_in_tree == "$.optimizer"
    assert list(tmp_path.iterdir()) == []


def ordered(parameter: nn.Parameter) -> OrderedDict[str, Any]:
    return OrderedDict(b=parameter.detach() + 1, a=1)


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_the_content_of_an_entry_that_is_an_ordered_dict_is_loaded(stepped, tmp_path):
    saved = keeping(ordered)
    dsd.save(tmp_path / "c", saved)
    other = keeping(ordered if stepped else lambda p: {}, 1)
    dsd.load(tmp_path / "c", other)
    for new, old in zip(entries(other), entries(saved), strict=True):
        assert_same(dict(new), dict(old))


@faulty("an OrderedDict comes back as a dict")
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_an_entry_that_is_an_ordered_dict_stays_one(stepped, tmp_path):
    saved = keeping(ordered)
    dsd.save(tmp_path / "c", saved)
    other = keeping(ordered if stepped else lambda p: {}, 1)
    dsd.load(tmp_path / "c", other)
    for parameter in other["model"].parameters():
        assert type(other["optimizer"].state[parameter]) is OrderedDict


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("key", ["global", 7, ("a", 1)], ids=repr)
def test_state_of_the_optimizer_itself_is_kept(key, stepped, tmp_path):
    def add(state: dict[str, Any], value: float) -> dict[str, Any]:
        state["optimizer"].state[key] = {"t": torch.full((3,), value), "n": [value]}
        return state

    saved = add(keeping(lambda p: {"x": 1}), 2.0)
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {}, 1)
    other = add(other, 9.0) if stepped else other
    dsd.load(tmp_path / "c", other)
    assert_same(other["optimizer"].state[key], saved["optimizer"].state[key])


def test_state_of_a_parameter_that_no_group_holds_is_not_an_error_of_python(tmp_path):
    model = mlp()
    optimizer = SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1,
                    momentum=0.9)  # fmt: skip
    train(model, optimizer, [0])
    del optimizer.param_groups[1]  # its state stays, and torch's own state_dict() fails
    state = {"model": model, "optimizer": optimizer}
    refusal = None
    try:
        dsd.save(tmp_path / "c", state)
    except DsdError as error:
        refusal = error
    assert refusal is None or "group" in str(refusal)


def test_state_that_the_live_optimizer_has_for_others_stays(tmp_path):
    saved = keeping(lambda p: {"x": 1})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {"x": 2}, 1)
    other["optimizer"].state["mine"] = {"kept": True}
    dsd.load(tmp_path / "c", other)
    assert other["optimizer"].state["mine"] == {"kept": True}


# Ties


def test_a_tensor_that_entries_share_is_stored_once_and_shared_again(tmp_path):
    counter = torch.tensor(3.0)
    saved = keeping(lambda p: {"step": counter, "m": p.detach() + 1})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {}, 1)
    dsd.load(tmp_path / "c", other)
    first, *rest = [entry["step"] for entry in entries(other)]
    assert_same_tensor(first, counter)
    assert all(step is first for step in rest)


def test_a_tensor_that_live_entries_share_stays_shared(tmp_path):
    counters = torch.tensor(3.0), torch.tensor(8.0)
    saved = keeping(lambda p: {"step": counters[0]})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {"step": counters[1]}, 1)
    dsd.load(tmp_path / "c", other)
    assert {float(entry["step"]) for entry in entries(other)} == {3.0}
    assert all(entry["step"] is counters[1] for entry in entries(other))


class Counting(Optimizer):
    """All parameters share one counter, which decides the size of a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if parameters[0] not in self.state:
            count = torch.tensor(0.0)
            for parameter in parameters:
                self.state[parameter]["step"] = count
        self.state[parameters[0]]["step"] += 1
        for parameter in parameters:
            parameter.sub_(parameter.grad / self.state[parameter]["step"])


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_an_optimizer_with_one_counter_for_all_goes_on_bit_for_bit(stepped, tmp_path):
    model, resumed = mlp(0), mlp(1)
    optimizer, other = Counting(model.parameters()), Counting(resumed.parameters())
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    if stepped:
        train(resumed, other, range(50, 53))
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    train(model, optimizer, range(2, 5))
    train(resumed, other, range(2, 5))
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_live_entries_that_share_a_tensor_get_one_each_where_the_stored_ones_differ(tmp_path):
    saved = keeping(lambda p: {"step": torch.tensor(float(p.numel()))})
    dsd.save(tmp_path / "c", saved)
    counter = torch.tensor(8.0)
    other = keeping(lambda p: {"step": counter}, 1)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


def test_state_that_is_views_of_one_buffer_is_read_into_its_own_parts(tmp_path):
    def flat(seed: int) -> dict[str, Any]:
        buffer, state = noise(seed, 100), {}
        model = mlp(seed)
        optimizer = Keeper(model.parameters())
        place = 0
        for parameter in model.parameters():
            count = parameter.numel()
            optimizer.state[parameter] = {"m": buffer[place : place + count].view_as(parameter)}
            place += count
        state.update(model=model, optimizer=optimizer)
        return state

    saved, other = flat(0), flat(1)
    dsd.save(tmp_path / "c", saved)
    places = [entry["m"].data_ptr() for entry in entries(other)]
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))
    assert [entry["m"].data_ptr() for entry in entries(other)] == places


@pytest.mark.parametrize(
    "views",
    [
        pytest.param(lambda b: (b, b), id="the same"),
        pytest.param(lambda b: (b[:4], b[2:6]), id="halves over each other"),
        pytest.param(lambda b: (b, b[:4]), id="a part from the start"),
        pytest.param(lambda b: (b, b[4:]), id="a part at the end"),
        pytest.param(lambda b: (b[4:], b), id="a part first"),
        pytest.param(lambda b: (b.view(2, 4), b.view(2, 4).t()), id="transposed"),
        pytest.param(lambda b: (b, b.view(torch.int32)), id="of another dtype"),
        pytest.param(lambda b: (b, b.view(2, 4)), id="of another shape"),
    ],
)
def test_live_state_that_overlaps_gets_the_values_of_state_that_does_not(views, tmp_path):
    def make(seed: int, *, apart: bool) -> dict[str, Any]:
        def entry(parameter: nn.Parameter) -> dict[str, Any]:
            a, b = views(noise(seed, 8))
            if apart:
                a, b = a.clone(), b.clone() + 1
            return {"a": a, "b": b}

        return keeping(entry, seed)

    saved, other = make(0, apart=True), make(1, apart=False)
    dsd.save(tmp_path / "c", saved)
    dsd.load(tmp_path / "c", other)
    assert_same(entries(other), entries(saved))


def lookahead(seed: int, *, aliased: bool) -> dict[str, Any]:
    """Slow weights that are the parameters themselves, until the first step makes them others."""
    return keeping(lambda p: {"slow": p.detach() if aliased else p.detach() * 2}, seed)


@pytest.mark.parametrize(
    ("aliased", "live"),
    [
        pytest.param(False, "fresh", id="apart into fresh"),
        pytest.param(False, "apart", id="apart into apart"),
        pytest.param(False, "aliased", id="apart into one"),
        pytest.param(True, "fresh", id="one into fresh"),
        pytest.param(True, "apart", id="one into apart"),
        pytest.param(True, "aliased", id="one into one"),
    ],
)
def test_state_that_is_the_parameter_itself_does_not_spoil_it(live, aliased, tmp_path):
    saved = lookahead(0, aliased=aliased)
    dsd.save(tmp_path / "c", saved)
    other = lookahead(1, aliased=live == "aliased")
    if live == "fresh":
        other["optimizer"].state.clear()
    dsd.load(tmp_path / "c", other)
    for old, new in zip(saved["model"].parameters(), other["model"].parameters(), strict=True):
        assert_same_tensor(new.detach(), old.detach())
        wanted = saved["optimizer"].state[old]["slow"]
        assert_same_tensor(other["optimizer"].state[new]["slow"], wanted)


@pytest.mark.parametrize("held", ["buffer", "another tensor of the state"])
def test_state_that_is_a_tensor_elsewhere_in_the_state_does_not_spoil_it(held, tmp_path):
    def make(seed: int, *, aliased: bool) -> dict[str, Any]:
        model, z = mlp(seed), noise(seed, 3)
        model.register_buffer("mean", noise(seed + 1, 3))
        optimizer = Keeper(model.parameters())
        shared = model.mean if held == "buffer" else z
        entry = shared if aliased else shared * 2
        optimizer.state[model[0].weight] = {"x": entry}
        return {"model": model, "z": z, "optimizer": optimizer}

    saved, other = make(0, aliased=False), make(5, aliased=True)
    dsd.save(tmp_path / "c", saved)
    wanted = dsd.snapshot(saved)
    dsd.load(tmp_path / "c", other)
    assert_same(dsd.snapshot(other), wanted)


def test_state_that_is_the_gradient_does_not_change_it(tmp_path):
    saved = keeping(lambda p: {"last": torch.ones_like(p)})
    dsd.save(tmp_path / "c", saved)
    model = mlp(1)
    optimizer = Keeper(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        optimizer.state[parameter] = {"last": parameter.grad}
    dsd.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for parameter in model.parameters():
        assert_same_tensor(optimizer.state[parameter]["last"], torch.ones_like(parameter))
        assert_same_tensor(parameter.grad, torch.zeros_like(parameter))


def test_a_parameter_group_of_one_storage_keeps_its_views(tmp_path):
    # Parameters that are views of one flat buffer, as multi-tensor kernels like them.
    def make(seed: int) -> dict[str, Any]:
        flat = noise(seed, 12)
        model = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[4:].view(2, 4))])
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for index, parameter in enumerate(model):
            parameter.grad = noise(index, *parameter.shape)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, other = make(0), make(1)
    dsd.save(tmp_path / "c", saved)
    dsd.load(tmp_path / "c", other)
    assert_same(dsd.snapshot(other), dsd.snapshot(saved))
    one, two = other["model"]
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


# Autograd


def unrolled(seed: int) -> dict[str, Any]:
    """A differentiable optimizer whose state has a history."""
    z = noise(seed, 3)
    optimizer = torch.optim.Adam([z], lr=0.1, differentiable=True)
    z.grad = noise(seed + 1, 3).requires_grad_()
    optimizer.step()
    assert optimizer.state[z]["exp_avg"].grad_fn is not None
    return {"z": z, "optimizer": optimizer}


def test_state_with_a_history_is_saved_without_it(tmp_path):
    state = unrolled(0)
    graph = state["optimizer"].state[state["z"]]["exp_avg"].grad_fn
    dsd.save(tmp_path / "c", state)
    assert state["optimizer"].state[state["z"]]["exp_avg"].grad_fn is graph
    assert not dsd.load(tmp_path / "c")["optimizer"]["state"]["z"]["exp_avg"].requires_grad


def test_state_that_was_loaded_over_one_with_a_history_has_none(tmp_path):
    saved, other = unrolled(0), unrolled(5)
    dsd.save(tmp_path / "c", saved)
    dsd.load(tmp_path / "c", other)
    entry, wanted = other["optimizer"].state[other["z"]], saved["optimizer"].state[saved["z"]]
    assert_same(dict(entry), dict(wanted))
    assert entry["exp_avg"].grad_fn is None
    assert not entry["exp_avg"].requires_grad


def test_new_state_needs_no_gradient(tmp_path):
    saved = keeping(lambda p: {"x": p * 2})
    dsd.save(tmp_path / "c", saved)
    other = keeping(lambda p: {}, 1)
    dsd.load(tmp_path / "c", other)
    assert not any(entry["x"].requires_grad for entry in entries(other))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=lambda mode: mode.__name__)
def test_the_mode_of_autograd_makes_no_difference(mode, tmp_path):
    model = mlp()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    with mode():
        dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    with mode():
        dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    train(model, optimizer, [1])
    train(resumed, other, [1])
    assert_same(state_of(resumed, other), state_of(model, optimizer))


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_default_device_makes_no_difference(call, tmp_path):
    # As torch.set_default_device does; the device here is one that any machine has.
    model = mlp()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    with torch.device("meta" if call == "save" else "cpu"):
        dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    with torch.device("meta" if call == "load" else "cpu"):
        dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))


@pytest.mark.parametrize("mmap", [False, True])
def test_state_that_is_mapped_is_copied_on_write(mmap, tmp_path):
    model = mlp()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    root = dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    resumed = mlp(1)
    other = AdamW(resumed.parameters())
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other}, mmap=mmap)
    train(model, optimizer, range(1, 3))
    train(resumed, other, range(1, 3))
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    assert dsd.load(tmp_path / "c", digest=root)


# Models on meta


def test_an_optimizer_of_a_model_on_meta_gets_its_state_on_the_host(tmp_path):
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.5)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        resumed = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    other = AdamW(resumed.parameters())
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))
    train(model, optimizer, range(2, 5))
    train(resumed, other, range(2, 5))
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_an_optimizer_with_state_on_meta_gets_it_on_the_host(tmp_path):
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.5)
    train(model, optimizer, range(2))
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        resumed = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    other = AdamW(resumed.parameters())
    for parameter in resumed.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other.step()
    other.zero_grad()
    assert other.state[resumed[0].weight]["exp_avg"].is_meta
    dsd.load(tmp_path / "c", {"model": resumed, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))


def test_the_state_of_an_optimizer_on_meta_is_refused_at_save(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    real = nn.Linear(2, 2)
    for mine, parameter in zip(model.parameters(), real.parameters(), strict=True):
        optimizer.state[parameter] = optimizer.state.pop(mine)
    optimizer.param_groups[0]["params"] = list(real.parameters())
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", {"model": real, "optimizer": optimizer})
    assert "optimizer/state/weight/exp_avg" in str(caught.value)


# Wrapped models


@pytest.mark.parametrize("wrapped", ["saved", "loaded", "both"])
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda m: torch.compile(m, backend="eager"), id="compile"),
        pytest.param(nn.DataParallel, id="DataParallel"),
    ],
)
def test_a_wrapper_around_the_model_does_not_show_in_the_optimizer(wrap, wrapped, tmp_path):
    model, resumed = mlp(), mlp(1)
    optimizer, other = AdamW(model.parameters()), AdamW(resumed.parameters())
    train(model, optimizer, [0])
    shown = wrap(model) if wrapped != "loaded" else model
    dsd.save(tmp_path / "c", {"model": shown, "optimizer": optimizer})
    assert W0 in dsd.load(tmp_path / "c")["optimizer"]["state"]
    shown = wrap(resumed) if wrapped != "saved" else resumed
    dsd.load(tmp_path / "c", {"model": shown, "optimizer": other})
    assert_same(state_of(resumed, other), state_of(model, optimizer))
