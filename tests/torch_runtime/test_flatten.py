"""A module whose parameters are flat computes, saves and loads as the plain module does."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from torch import nn  # noqa: E402

import dsdformat.torch as dsd  # noqa: E402
from dsdformat import ArgumentError, MismatchError, UnsupportedValueError  # noqa: E402
from dsdformat.torch.flat_layout import FlatLayout, pack  # noqa: E402
from dsdformat.torch.flat_optim import cut_state, find_layouts, join_state  # noqa: E402
from dsdformat.torch.flatten import FlattenParams  # noqa: E402
from tests.torch_runtime.exact import assert_same, assert_same_tensor, bits  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Models


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    return nn.Sequential(first, nn.Sequential(nn.Linear(8, 16)), nn.Linear(16, 4))


def transformer(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Transformer(32, 2, 2, 2, dim_feedforward=64, dropout=0.0, batch_first=True)
    model.register_buffer("seen", torch.tensor(1.0))
    return model


def tied_transformer(seed: int = 0) -> nn.Module:
    model = transformer(seed)
    for one, other in zip(model.encoder.layers, model.decoder.layers, strict=True):
        other.linear1.weight = one.linear1.weight
        other.linear2.weight = one.linear2.weight
    return model


def recurrent(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.LSTM(4, 4, num_layers=2)


class Odd(nn.Module):
    """Parameters of all awkward kinds: 0-d, empty, tied under other names, in a list, a dict."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.randn(4, 4))
        self.listed = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.named = nn.ParameterDict({"a": torch.randn(4)})
        self.again = self.table
        self.norm = nn.BatchNorm1d(4)
        self.register_parameter("absent", None)

    def forward(self, x: Any) -> Any:
        x = self.norm(x @ self.table @ self.again.t()) * self.scale + self.none.sum()
        return x + sum(self.listed) + self.named["a"]


MODELS = {
    "linear": linear,
    "transformer": transformer,
    "tied_transformer": tied_transformer,
    "recurrent": recurrent,
    "odd": Odd,
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
GROUPINGS = {
    "all": lambda model: None,
    "one_list": lambda model: list(model.parameters()),
    "two_lists": lambda model: [list(model.parameters())[:2], list(model.parameters())[2:]],
    "two_names": lambda model: {
        "head": list(model.parameters())[:2],
        "rest": list(model.parameters())[2:],
    },
    "by_name": lambda model: [[name for name, _ in model.named_parameters()][1:3]],
    "some": lambda model: list(model.parameters())[1:],
    "none": lambda model: [[]],
}
every_grouping = pytest.mark.parametrize("group", GROUPINGS.values(), ids=GROUPINGS)


def outputs(model: nn.Module, kind: Any) -> Any:
    torch.manual_seed(7)
    x = torch.rand(3, 5, 32) if kind in (transformer, tied_transformer) else torch.rand(3, 4)
    found = model(x, torch.rand(3, 2, 32)) if x.ndim == 3 else model(x)
    return found[0] if isinstance(found, tuple) else found


def copied(state: Any) -> OrderedDict[str, Any]:
    return OrderedDict((name, value.clone()) for name, value in state.items())


def assert_same_state(found: Any, wanted: Any) -> None:
    assert list(found) == list(wanted)
    assert_same(dict(found), dict(wanted))


# Computing


@every_model
@every_grouping
def test_a_flat_module_computes_what_the_plain_one_does(make, group):
    wanted, model = make(), make()
    flat = FlattenParams(model, group(model))
    assert_same_tensor(outputs(flat, make), outputs(wanted, make))


@every_model
def test_a_flat_parameter_has_as_many_elements_as_the_parameters(make):
    count = sum(parameter.numel() for parameter in make().parameters())
    flat = FlattenParams(make())
    assert [parameter.numel() for parameter in flat.parameters()] == [count]
    assert flat.flat_param.numel() == flat.layouts[0].numel == count


@every_model
@every_grouping
def test_training_a_flat_module_is_training_the_plain_one(make, group):
    wanted, model = make(), make()
    flat = FlattenParams(model, group(model))
    for one in (wanted, flat):
        optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            outputs(one, make).square().sum().backward()
            optimizer.step()
    assert_same_state(flat.state_dict(), wanted.state_dict())


@every_model
def test_the_flat_gradient_is_the_gradients_one_after_another(make):
    wanted, flat = make(), FlattenParams(make())
    outputs(wanted, make).sum().backward()
    outputs(flat, make).sum().backward()
    parts = [parameter.grad.reshape(-1) for parameter in wanted.parameters()]
    assert_same_tensor(flat.flat_param.grad, torch.cat(parts))


def test_gradients_add_up_over_passes_and_can_be_cleared():
    wanted, flat = linear(), FlattenParams(linear())
    for _ in range(2):
        outputs(wanted, linear).sum().backward()
        outputs(flat, linear).sum().backward()
    parts = [parameter.grad.reshape(-1) for parameter in wanted.parameters()]
    assert_same_tensor(flat.flat_param.grad, torch.cat(parts))
    flat.zero_grad()
    assert flat.flat_param.grad is None


def test_the_gradients_that_there_are_become_the_flat_gradient():
    model = linear()
    outputs(model, linear).sum().backward()
    model[2].bias.grad = None
    parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    flat = FlattenParams(model)
    assert_same_tensor(flat.flat_param.grad, pack(parts))


def test_views_can_be_used_outside_of_a_forward_pass_after_a_step():
    flat = FlattenParams(linear())
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    outputs(flat, linear).sum().backward()
    optimizer.step()
    flat.zero_grad()
    flat.module[2].bias.sum().backward()
    wanted = torch.zeros_like(flat.flat_param)
    wanted[-4:] = 1
    assert_same_tensor(flat.flat_param.grad, wanted)


def test_a_pass_without_gradients_does_not_take_them_from_the_next_use():
    flat = FlattenParams(linear())
    with torch.no_grad():
        outputs(flat, linear)
    assert flat[2].weight.requires_grad
    with torch.inference_mode():
        outputs(flat, linear)
    outputs(flat, linear).sum().backward()
    assert flat.flat_param.grad is not None


def test_what_initializes_a_view_initializes_the_flat_parameter():
    flat = FlattenParams(linear())
    nn.init.constant_(flat.module[2].weight, 5.0)
    flat.module[2].bias.data.fill_(6.0)
    assert flat.flat_param[-68:-4].eq(5).all()
    assert flat.flat_param[-4:].eq(6).all()
    flat.module[2].reset_parameters()
    assert not flat.flat_param[-68:-4].eq(5).any()


def test_a_compiled_flat_module_computes_the_same():
    flat = FlattenParams(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    x = torch.rand(3, 4)
    compiled = torch.compile(flat, backend="eager", fullgraph=True)
    assert_same_tensor(compiled(x), flat(x))


def test_checkpointed_parts_are_computed_again_in_the_backward_pass():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Any) -> Any:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    wanted, flat = Checkpointed(), FlattenParams(Checkpointed())
    for one in (wanted, flat):
        one(torch.ones(3, 4)).sum().backward()
    parts = [parameter.grad for parameter in wanted.parameters()]
    assert_same_tensor(flat.flat_param.grad, pack(parts))


def test_functional_call_takes_another_flat_parameter():
    flat = FlattenParams(linear())
    zeros = torch.zeros_like(flat.flat_param)
    found = torch.func.functional_call(flat, {"flat_param_0": zeros}, (torch.ones(3, 4),))
    assert found.eq(0).all()
    assert_same_tensor(outputs(flat, linear), outputs(linear(), linear))


# Groups


def test_only_the_parameters_of_the_groups_are_flattened():
    model = transformer()
    chosen = [*model.encoder.layers[1].parameters(), *model.decoder.layers[0].parameters()]
    count, total = (sum(p.numel() for p in ps) for ps in (chosen, model.parameters()))
    flat = FlattenParams(model, chosen)
    assert flat.flat_param.numel() == count
    assert sum(parameter.numel() for parameter in flat.parameters()) == total
    assert list(model.encoder.layers[1].parameters()) == []
    assert list(model.decoder.layers[0].parameters()) == []
    assert len(list(model.encoder.layers[0].parameters())) > 0
    flat.to(torch.float64)
    assert flat.flat_param.dtype == torch.float64
    assert {p.dtype for p in model.encoder.layers[0].parameters()} == {torch.float64}


def test_each_group_gets_a_flat_parameter_of_its_own():
    model = transformer()
    groups = [list(layer.parameters()) for layer in (*model.encoder.layers, *model.decoder.layers)]
    counts = [sum(parameter.numel() for parameter in group) for group in groups]
    flat = FlattenParams(model, groups)
    assert [parameter.numel() for parameter in flat.flat_params] == counts
    names = [layout.name for layout in flat.layouts]
    assert names == [f"flat_param_{number}" for number in range(4)]


def test_groups_can_have_names():
    model = linear()
    groups = {"body": model[0].parameters(), "head": ["2.weight", "2.bias"]}
    flat = FlattenParams(model, groups)
    assert [name for name, _ in flat.named_parameters()][:2] == [
        "flat_param_body",
        "flat_param_head",
    ]
    assert flat.layouts[1].names == ("2.weight", "2.bias")


def test_a_module_without_parameters_stays_as_it_is():
    flat = FlattenParams(nn.ReLU())
    assert list(flat.parameters()) == []
    assert flat.state_dict() == {}
    assert flat.load_state_dict({}).missing_keys == []
    assert_same_tensor(flat(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))


def test_each_dtype_and_each_frozen_part_gets_a_flat_parameter_of_its_own():
    def mixed() -> nn.Module:
        model = linear()
        model[0].double()
        model[2].requires_grad_(False)
        return model

    flat = FlattenParams(mixed())
    kinds = [(parameter.dtype, parameter.requires_grad) for parameter in flat.flat_params]
    assert kinds == [(torch.float64, True), (torch.float32, True), (torch.float32, False)]
    assert_same_state(flat.state_dict(), mixed().state_dict())
    assert not flat.module[2].weight.requires_grad
    with flat.unflatten_params():
        assert not flat.module[2].weight.requires_grad


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        pytest.param(lambda m: {"a": ["0.0.weight", "2.weight"]}, "float64.*float32", id="dtypes"),
        pytest.param(lambda m: [["1.0.bias", "0.1.bias"]], "kinds", id="dtypes_without_name"),
        pytest.param(lambda m: [["2.weight"], [m[2].weight]], "two groups", id="twice"),
        pytest.param(lambda m: ["2.wieght"], "wieght.*\n.*did you mean 2.weight", id="unknown"),
        pytest.param(lambda m: [nn.Parameter(torch.ones(2))], "no parameter", id="foreign"),
        pytest.param(lambda m: [["2.weight", 3]], "3, which is no parameter", id="number"),
        pytest.param(lambda m: 3, "lists parameters", id="no_list"),
        pytest.param(lambda m: {"a": "2.weight"}, "lists parameters", id="text"),
        pytest.param(lambda m: {"a.b": ["2.weight"]}, "no dot", id="dotted"),
        pytest.param(lambda m: {"": ["2.weight"]}, "not empty", id="nameless"),
        pytest.param(lambda m: {"x": ["2.weight"]}, "flat_param_x", id="taken"),
    ],
)
def test_groups_that_cannot_be_are_refused_and_nothing_is_changed(groups, what):
    model = linear()
    model[0].double()
    model.flat_param_x = nn.ReLU()
    with pytest.raises(ArgumentError, match=f"(?s){what}") as caught:
        FlattenParams(model, groups(model))
    assert caught.value.code == "bad_argument"
    assert all(isinstance(p, nn.Parameter) for p in (model[0][0].weight, model[2].weight))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.LazyLinear(3), id="lazy"),
        pytest.param(
            lambda: nn.ParameterList([nn.Parameter(torch.eye(2).to_sparse())]), id="sparse"
        ),
    ],
)
def test_parameters_that_are_no_plain_tensors_are_refused(make):
    with pytest.raises(ArgumentError):
        FlattenParams(make())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    with pytest.raises(ArgumentError, match="1 is scripted"):
        FlattenParams(model)


def test_only_a_module_is_wrapped():
    with pytest.raises(ArgumentError, match="not a module"):
        FlattenParams([1])


def test_there_is_one_flat_parameter_or_an_error_says_how_many():
    with pytest.raises(ArgumentError, match="2 flat parameters"):
        _ = FlattenParams(linear(), [["2.weight"], ["2.bias"]]).flat_param


# Layouts


def test_a_layout_tells_names_shapes_and_ties():
    flat = FlattenParams(Odd())
    assert flat.layouts == (
        FlatLayout(
            "flat_param_0",
            (
                "scale",
                "none",
                "table",
                "listed.0",
                "listed.1",
                "named.a",
                "norm.weight",
                "norm.bias",
            ),
            ((), (0, 3), (4, 4), (4,), (4,), (4,), (4,), (4,)),
            (("again", "table"),),
        ),
    )
    assert flat.layouts[0].numels == (1, 0, 16, 4, 4, 4, 4, 4)


def test_a_layout_survives_json_and_a_checkpoint(tmp_path):
    layout = FlattenParams(Odd()).layouts[0]
    assert FlatLayout.of_value(json.loads(json.dumps(layout.to_value()))) == layout
    dsd.save(tmp_path / "c", {"layout": layout.to_value()})
    assert FlatLayout.of_value(dsd.load(tmp_path / "c")["layout"]) == layout


VALUE = {"name": "f", "names": ["a"], "shapes": [[2]], "numels": [2], "aliases": {"b": "a"}}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"names": 3}, id="names"),
        pytest.param({"names": []}, id="no_names"),
        pytest.param({"names": [3]}, id="number"),
        pytest.param({"names": [["a"]]}, id="list"),
        pytest.param({"names": ["a", "a"], "shapes": [[2], [2]], "numels": [2, 2]}, id="twice"),
        pytest.param({"shapes": [2]}, id="no_shape"),
        pytest.param({"shapes": [[-1]]}, id="negative"),
        pytest.param({"shapes": [[True, 2]]}, id="bool"),
        pytest.param({"shapes": [[0, 2**62, 2**62]], "numels": [0]}, id="huge"),
        pytest.param({"shapes": [[1] * 65], "numels": [1]}, id="deep"),
        pytest.param({"numels": [3]}, id="numels"),
        pytest.param({"numels": [2.0]}, id="float"),
        pytest.param({"numels": [torch.ones(2)]}, id="tensor"),
        pytest.param({"numels": None}, id="no_numels"),
        pytest.param({"aliases": {"b": "c"}}, id="alias"),
        pytest.param({"aliases": {"b": ["a"]}}, id="alias_list"),
        pytest.param({"aliases": [("b", "a")]}, id="alias_pairs"),
        pytest.param({"name": 1}, id="name"),
    ],
)
def test_values_that_are_no_layout_are_refused(change):
    assert FlatLayout.of_value(VALUE).aliases == (("b", "a"),)
    with pytest.raises(ArgumentError):
        FlatLayout.of_value({**VALUE, **change})


def test_values_that_lack_something_are_no_layout():
    for key in VALUE:
        with pytest.raises(ArgumentError, match=key):
            FlatLayout.of_value({name: value for name, value in VALUE.items() if name != key})
    with pytest.raises(ArgumentError):
        FlatLayout.of_value([1])


# State dicts


@every_model
@every_grouping
def test_the_state_dict_is_that_of_the_plain_module(make, group):
    wanted, model = make().state_dict(), make()
    flat = FlattenParams(model, group(model))
    found = flat.state_dict()
    assert_same_state(found, wanted)
    assert found._metadata == wanted._metadata
    assert flat.is_flattened


@every_model
@every_grouping
def test_a_plain_state_dict_can_be_loaded(make, group):
    wanted, model = make(), make(seed=1)
    flat = FlattenParams(model, group(model))
    memory = [parameter.data_ptr() for parameter in flat.flat_params]
    given = copied(wanted.state_dict())
    assert flat.load_state_dict(given).missing_keys == []
    assert_same_state(given, wanted.state_dict())
    assert_same_tensor(outputs(flat, make), outputs(wanted, make))
    assert [parameter.data_ptr() for parameter in flat.flat_params] == memory

    other = FlattenParams(make(seed=2))
    with other.unflatten_params():
        other.load_state_dict(given)
    assert_same_tensor(outputs(other, make), outputs(wanted, make))


@every_model
@every_grouping
def test_a_flat_state_dict_can_be_loaded(make, group):
    model, other = make(), make(seed=1)
    flat = FlattenParams(model, group(model))
    state = copied(flat.flat_state_dict())
    assert set(state) >= {layout.name for layout in flat.layouts}
    again = FlattenParams(other, group(other))
    assert again.load_state_dict(state).unexpected_keys == []
    assert_same_state(again.state_dict(), flat.state_dict())
    assert_same_tensor(outputs(again, make), outputs(flat, make))


def test_the_plain_module_loads_what_the_flat_one_gives():
    flat, plain = FlattenParams(tied_transformer()), tied_transformer(seed=1)
    plain.load_state_dict(flat.state_dict())
    assert_same_state(plain.state_dict(), flat.state_dict())


def test_variables_are_kept_on_request_and_are_the_parameters_of_before():
    model = tied_transformer()
    before = dict(model.named_parameters(remove_duplicate=False))
    flat = FlattenParams(model)
    kept = flat.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in before.items())
    assert kept["encoder.layers.0.linear1.weight"].data_ptr() != 0


def test_a_state_dict_shares_the_memory_of_the_module():
    flat = FlattenParams(linear())
    flat.state_dict()["2.bias"].fill_(9)
    assert flat.flat_param[-4:].eq(9).all()


@pytest.mark.parametrize("wrap", ["outer", "inner", "both"])
def test_wrappers_inside_of_modules_and_wrappers_give_and_take_plain_state_dicts(wrap):
    def build(seed: int, flat: bool) -> nn.Module:
        torch.manual_seed(seed)
        inner: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
        if flat and wrap != "outer":
            inner = FlattenParams(inner)
        outer: nn.Module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": inner})
        if flat and wrap != "inner":
            outer = FlattenParams(outer)
        return nn.Sequential(outer, nn.BatchNorm1d(4))

    wanted, model = build(0, False), build(1, True)
    model.load_state_dict(wanted.state_dict())
    found = model.state_dict()
    assert_same_state(found, wanted.state_dict())
    assert found._metadata == wanted.state_dict()._metadata
    x = torch.rand(3, 4)
    assert_same_tensor(model[0]["b"](x)[0], wanted[0]["b"](x)[0])
    flats = [one for one in model.modules() if isinstance(one, FlattenParams)]
    for one in flats:
        one.load_state_dict(one.flat_state_dict())
    assert_same_state(model.state_dict(), wanted.state_dict())


def test_a_flat_state_dict_is_flat_in_wrappers_inside_too():
    inner = FlattenParams(nn.Linear(2, 2))
    flat = FlattenParams(nn.Sequential(inner, nn.Linear(2, 2)))
    assert list(flat.flat_state_dict()) == ["flat_param_0", "0.flat_param_0"]
    assert list(flat.flat_state_dict(prefix="x.")) == ["x.flat_param_0", "x.0.flat_param_0"]
    assert flat.layouts[0].names == ("1.weight", "1.bias")


def test_a_wrapper_around_a_wrapper_leaves_what_is_flat():
    inner = FlattenParams(nn.Linear(2, 2), ["weight"])
    flat = FlattenParams(inner)
    assert [layout.name for layout in flat.layouts] == ["flat_param_1"]
    assert list(flat.state_dict()) == ["weight", "bias"]
    assert sorted(flat.flat_state_dict()) == ["flat_param_0", "flat_param_1"]
    flat.load_state_dict(flat.flat_state_dict())
    with pytest.raises(ArgumentError, match="flat parameter already"):
        FlattenParams(inner, [inner.flat_param])


def test_names_and_shapes_that_do_not_fit_are_told_as_the_plain_module_has_them():
    flat = FlattenParams(linear())
    state = dict(linear().state_dict(), more=torch.ones(1))
    state["2.bias"] = torch.ones(7)
    del state["0.0.weight"]
    with pytest.raises(MismatchError) as caught:
        flat.load_state_dict(state)
    assert caught.value.code == "state_mismatch"
    for text in ('"0.0.weight"', '"more"', "size mismatch for 2.bias", "[7]", "[4]"):
        assert text in str(caught.value)
    assert "_flat_module" not in str(caught.value)
    assert flat.is_flattened
    outer = nn.Sequential(flat)
    with pytest.raises(RuntimeError, match='Missing key.*"0.0.0.weight"'):
        outer.load_state_dict({})
    assert flat.is_flattened


def test_what_is_missing_or_unexpected_is_returned_where_it_is_no_error():
    flat = FlattenParams(linear())
    state = dict(linear(seed=1).state_dict(), more=torch.ones(1))
    del state["0.0.weight"]
    kept = flat.state_dict()["0.0.weight"].clone()
    found = flat.load_state_dict(state, strict=False)
    assert found.missing_keys == ["0.0.weight"]
    assert found.unexpected_keys == ["more"]
    assert_same_tensor(flat.state_dict()["0.0.weight"], kept)
    assert_same_tensor(flat.state_dict()["2.bias"], state["2.bias"])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        pytest.param(
            lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)),
            r"no 0.weight, and \[2, 2\]|0.weight",
            id="shapes",
        ),
        pytest.param(lambda: nn.Sequential(nn.Bilinear(2, 1, 4)), "0.weight", id="names"),
    ],
)
def test_a_flat_state_dict_of_another_layout_is_refused_and_nothing_is_changed(other, what):
    flat = FlattenParams(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    kept = copied(flat.state_dict())
    with pytest.raises(MismatchError, match=what) as caught:
        flat.load_state_dict(FlattenParams(other()).flat_state_dict())
    assert caught.value.code == "state_mismatch"
    assert_same_state(flat.state_dict(), kept)


def test_a_flat_state_dict_in_another_order_is_refused():
    flat = FlattenParams(nn.ParameterDict([("a", torch.ones(2)), ("b", torch.zeros(2))]))
    other = FlattenParams(nn.ParameterDict([("b", torch.ones(2)), ("a", torch.zeros(2))]))
    with pytest.raises(MismatchError, match="order b, a"):
        flat.load_state_dict(other.flat_state_dict())


def test_a_flat_state_dict_without_layouts_is_compared_by_length():
    flat = FlattenParams(nn.Linear(2, 2))
    flat.load_state_dict({"flat_param_0": torch.arange(6.0)})
    assert_same_tensor(flat.state_dict()["bias"], torch.tensor([4.0, 5.0]))
    flat.load_state_dict({"flat_param": torch.arange(6.0) + 1})  # as fairscale had it once
    assert_same_tensor(flat.state_dict()["bias"], torch.tensor([5.0, 6.0]))
    with pytest.raises(MismatchError, match="size mismatch for flat_param_0"):
        flat.load_state_dict({"flat_param_0": torch.ones(7)})


def test_an_unflattened_module_neither_gives_nor_takes_a_flat_state_dict():
    flat = FlattenParams(nn.Linear(2, 2))
    state = flat.flat_state_dict()
    with flat.unflatten_params():
        with pytest.raises(ArgumentError, match="unflatten_params"):
            flat.flat_state_dict()
        with pytest.raises(ArgumentError, match="unflatten_params"):
            flat.load_state_dict(state)
    assert_same_state(flat.flat_state_dict(), state)


def test_assigned_tensors_give_the_flat_parameter_their_dtype():
    flat = FlattenParams(tied_transformer())
    parameter = flat.flat_param
    state = tied_transformer(seed=1).double().state_dict()
    flat.load_state_dict(state, assign=True)
    assert flat.flat_param is parameter
    assert parameter.dtype == torch.float64
    assert_same_state(flat.state_dict(), state)
    flat.load_state_dict(FlattenParams(tied_transformer()).flat_state_dict(), assign=True)
    assert flat.module.encoder.layers[0].linear1.weight.dtype == torch.float32


class Fails(nn.Module):
    """Fails in the middle of a state dict, when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.after = nn.Linear(2, 2)
        self.fail = False

    def get_extra_state(self) -> Any:
        if self.fail:
            raise KeyError("no state now")
        return {"n": 1}

    def set_extra_state(self, state: Any) -> None:
        if self.fail:
            raise KeyError("no state now")
        self.got = state

    def forward(self, x: Any) -> Any:
        return self.after(x * self.weight)


@pytest.mark.parametrize("nested", [False, True])
def test_a_failure_in_the_middle_of_a_state_dict_does_not_leave_the_module_plain(nested):
    flat = FlattenParams(Fails())
    outer = nn.Sequential(flat) if nested else flat
    state = outer.state_dict()
    assert "_extra_state" in "".join(state)
    flat.module.fail = True
    with pytest.raises(KeyError):
        outer.state_dict()
    with pytest.raises(KeyError):
        outer.load_state_dict(state)
    flat.fail = False
    outer(torch.ones(2)).sum().backward()
    assert flat.is_flattened
    assert flat.flat_param.grad is not None
    flat.module.fail = False
    assert_same_state(outer.state_dict(), state)


def test_hooks_inside_see_what_they_see_in_the_plain_module():
    def plain() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))

        def rename(module: Any, state: Any, prefix: str, *_: Any) -> None:
            if prefix + "old" in state:
                state[prefix + "weight"] = state.pop(prefix + "old")

        model[0].register_load_state_dict_pre_hook(rename)
        model[0].register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({prefix + "sum": module.weight.sum()})
        )
        return model

    flat = FlattenParams(plain())
    old = {"0.old": torch.ones(2, 2), "0.bias": torch.zeros(2)}
    flat.load_state_dict(old)
    assert list(flat.state_dict()) == ["0.weight", "0.bias", "0.sum"]
    assert flat.state_dict()["0.sum"] == 4


# Unflattening


@every_model
@every_grouping
def test_unflattened_modules_have_the_parameters_of_before(make, group):
    model = make()
    before = dict(model.named_parameters(remove_duplicate=False))
    flat = FlattenParams(model, group(model))
    with flat.unflatten_params():
        assert not flat.is_flattened
        now = dict(flat.module.named_parameters(remove_duplicate=False))
        assert list(now) == list(before)
        assert all(now[name] is parameter for name, parameter in before.items())
        with flat.unflatten_params():
            assert not flat.is_flattened
        assert not flat.is_flattened
    assert flat.is_flattened
    assert_same_tensor(outputs(flat, make), outputs(make(), make))


@every_model
@every_grouping
def test_other_flat_tensors_can_stand_in_for_a_while(make, group):
    model = make()
    flat = FlattenParams(model, group(model))
    kept = copied(flat.state_dict())
    values = [torch.full_like(parameter, 42.0) for parameter in flat.flat_params]
    with flat.unflatten_params(values=values):
        given = copied(flat.state_dict())
        for parameter in flat.module.parameters():
            parameter.data.sub_(1)
    names = {name for layout in flat.layouts for name in layout.names}
    assert all(value.eq(42).all() for name, value in given.items() if name in names)
    assert all(value.eq(41).all() for value in values)
    left = dict(flat.module.named_parameters(remove_duplicate=False))
    for name in left:
        kept[name] = kept[name] - 1
    assert_same_state(flat.state_dict(), kept)
    flat.load_state_dict(given)
    assert all(parameter.eq(42).all() for parameter in flat.flat_params)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        pytest.param(list, ArgumentError, id="too_few"),
        pytest.param(lambda: [torch.ones(7)], MismatchError, id="length"),
        pytest.param(lambda: [torch.ones(2, 3)], MismatchError, id="dims"),
    ],
)
def test_stand_ins_that_do_not_fit_are_refused(values, error):
    flat = FlattenParams(nn.Linear(2, 2))
    with pytest.raises(error), flat.unflatten_params(values=values()):
        pass
    assert flat.is_flattened
    with flat.unflatten_params(), pytest.raises(ArgumentError, match="flat"):
        flat.unflatten_params(values=[torch.ones(6)]).__enter__()


def test_changes_of_unflattened_parameters_are_kept_unless_they_are_not_wanted():
    flat = FlattenParams(linear())
    memory = flat.flat_param.data_ptr()
    with flat.unflatten_params():
        flat.module[2].bias.data.fill_(3)
        flat.module[2].weight = nn.Parameter(torch.full((4, 16), 4.0))
    assert flat.flat_param[-4:].eq(3).all()
    assert flat.flat_param[-68:-4].eq(4).all()
    assert flat.flat_param.data_ptr() == memory
    kept = copied(flat.state_dict())
    with flat.unflatten_params(writeback=False):
        assert_same_state(flat.state_dict(), kept)
        flat.module[2].bias.data.fill_(5)
        flat.module[2].weight = nn.Parameter(torch.full((4, 16), 6.0))
    assert_same_state(flat.state_dict(), kept)


def test_changes_are_kept_when_the_block_fails():
    flat = FlattenParams(linear())

    def change() -> None:
        with flat.unflatten_params():
            flat.module[2].bias.data.fill_(3)
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert flat.is_flattened
    assert flat.flat_param[-4:].eq(3).all()


def test_parameters_that_changed_places_are_written_back_right():
    flat = FlattenParams(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    kept = copied(flat.state_dict())
    with flat.unflatten_params():
        one, other = flat.module
        one.weight, other.weight = other.weight, one.weight
    assert_same_tensor(flat.state_dict()["0.weight"], kept["1.weight"])
    assert_same_tensor(flat.state_dict()["1.weight"], kept["0.weight"])


def test_wrappers_inside_are_unflattened_unless_they_are_not_wanted():
    inner = FlattenParams(nn.Linear(2, 2))
    flat = FlattenParams(nn.Sequential(inner, nn.Linear(2, 2)))
    with flat.unflatten_params():
        assert not inner.is_flattened
        inner.module.bias.data.fill_(3)
    assert inner.is_flattened
    assert inner.flat_param[-2:].eq(3).all()
    with flat.unflatten_params(recurse=False):
        assert inner.is_flattened
        assert not flat.is_flattened


def test_gradients_are_cut_and_written_back():
    flat = FlattenParams(linear())
    outputs(flat, linear).sum().backward()
    kept = flat.flat_param.grad.clone()
    with flat.unflatten_params():
        assert_same_tensor(flat.module[2].bias.grad, kept[-4:])
        outputs(flat, linear).sum().backward()
    assert_same_tensor(flat.flat_param.grad, kept * 2)
    with flat.unflatten_params(writeback=False):
        flat.module[2].bias.grad.fill_(7)
    assert_same_tensor(flat.flat_param.grad, kept * 2)
    with flat.unflatten_params():
        flat.zero_grad()
        flat.module[2].bias.sum().backward()
    wanted = torch.zeros_like(kept)
    wanted[-4:] = 1
    assert_same_tensor(flat.flat_param.grad, wanted)


def test_conversions_of_unflattened_parameters_convert_the_flat_one():
    flat = FlattenParams(linear())
    parameter = flat.flat_param
    with flat.unflatten_params():
        flat.double()
        flat.requires_grad_(False)
    assert flat.flat_param is parameter
    assert (parameter.dtype, parameter.requires_grad) == (torch.float64, False)
    assert_same_state(flat.state_dict(), linear().double().state_dict())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param(lambda m: delattr(m[0], "weight"), "0.weight is no parameter", id="gone"),
        pytest.param(lambda m: m[1].half(), "float16", id="dtype"),
        pytest.param(lambda m: m[1].bias.requires_grad_(False), "not trainable", id="frozen"),
        pytest.param(
            lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(3))), r"\[3\]", id="shape"
        ),
        pytest.param(lambda m: setattr(m[0], "bias", m[1].bias), "one parameter", id="tied"),
        pytest.param(
            lambda m: (
                setattr(m[2], "weight", nn.Parameter(torch.ones(2, 2)))
                or setattr(m[1], "weight", nn.Parameter(torch.zeros(2, 2)))
            ),
            "tied names that differ",
            id="untied",
        ),
    ],
)
def test_what_no_longer_fits_is_told_and_the_flat_parameter_is_as_before(change, what):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[1].weight
    flat = FlattenParams(model)
    kept = copied(flat.state_dict())
    with pytest.raises(MismatchError, match=what) as caught, flat.unflatten_params():
        change(flat.module)
    assert caught.value.code == "state_mismatch"
    assert flat.is_flattened
    assert_same_state(flat.state_dict(), kept)
    flat(torch.rand(2, 2)).sum().backward()


def test_a_tied_parameter_can_be_replaced_under_one_of_its_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    flat = FlattenParams(model)
    with flat.unflatten_params():
        flat.module[1].weight = nn.Parameter(torch.full((2, 2), 8.0))
    assert flat.module[0].weight.eq(8).all()
    assert flat.layouts[0].aliases == (("1.weight", "0.weight"),)


def test_a_parameter_that_is_set_in_place_of_a_view_is_told():
    flat = FlattenParams(linear())
    flat.module[2].weight = nn.Parameter(torch.ones(4, 16))
    for use in (lambda: outputs(flat, linear), flat.half, flat.state_dict):
        with pytest.raises(ArgumentError, match="2.weight was replaced"):
            use()


# Moves and copies


@pytest.mark.parametrize("swap", [False, True])
@every_model
def test_views_follow_when_the_module_is_converted(make, swap):
    wanted, flat = make().double(), FlattenParams(make())
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        outer = nn.Sequential(flat).double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert flat.flat_param.dtype == torch.float64
    assert_same_state(flat.state_dict(), wanted.state_dict())
    torch.manual_seed(7)
    x = torch.rand(3, 4, dtype=torch.float64)
    if make in (linear, recurrent, Odd):
        pair = outer(x), wanted(x)
        assert_same(*pair if make is not recurrent else (pair[0][0], pair[1][0]))


def test_a_flat_module_moves_to_meta_and_back():
    flat = FlattenParams(tied_transformer())
    flat.to("meta")
    assert flat.flat_param.is_meta
    assert flat.module.encoder.layers[0].linear1.weight.is_meta
    assert all(value.is_meta for value in flat.state_dict().values())
    flat.to_empty(device="cpu")
    flat.load_state_dict(tied_transformer().state_dict())
    assert_same_tensor(
        outputs(flat, tied_transformer), outputs(tied_transformer(), tied_transformer)
    )


def test_a_module_on_meta_can_be_flattened_and_takes_assigned_tensors():
    with torch.device("meta"):
        model = linear()
    flat = FlattenParams(model)
    parameter = flat.flat_param
    assert parameter.is_meta
    flat.load_state_dict(linear().state_dict(), assign=True)
    assert flat.flat_param is parameter
    assert not parameter.is_meta
    assert_same_tensor(outputs(flat, linear), outputs(linear(), linear))


def test_freezing_is_seen_in_the_views():
    flat = FlattenParams(linear())
    flat.requires_grad_(False)
    assert not flat.module[2].weight.requires_grad
    flat.requires_grad_(True)
    outputs(flat, linear).sum().backward()
    assert flat.flat_param.grad is not None


@every_model
@pytest.mark.parametrize("plain", [False, True])
def test_a_copy_is_flat_and_has_memory_of_its_own(make, plain):
    flat = FlattenParams(make())
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    outputs(flat, make).sum().backward()
    with flat.unflatten_params() if plain else torch.enable_grad():
        twin = copy.deepcopy(nn.Sequential(flat))[0]
    optimizer.step()
    assert twin.is_flattened
    assert flat.is_flattened
    assert_same_tensor(outputs(twin, make), outputs(make(), make))
    assert len(list(twin.parameters())) == 1
    assert not torch.equal(twin.flat_param, flat.flat_param)
    with twin.unflatten_params():
        for parameter in twin.module.parameters():
            parameter.data.zero_()
    assert twin.flat_param.eq(0).all()
    assert not flat.flat_param.eq(0).all()


def test_attributes_and_items_of_the_wrapped_module_are_those_of_the_wrapper():
    class Named(nn.Sequential):
        width = 5

        def double(self) -> str:  # type: ignore[override]
            return "not this one"

        def triple(self, x: Any) -> Any:
            return self(x) * 3

    flat = FlattenParams(Named(nn.Linear(2, 2)))
    x = torch.ones(1, 2)
    assert flat.width == 5
    assert_same_tensor(flat.triple(x), flat(x) * 3)
    assert flat[0] is flat.module[0]
    assert [type(one) for one in flat] == [nn.Linear]
    with pytest.raises(AttributeError, match="width_2"):
        _ = flat.width_2
    assert flat.double() is flat
    assert "6 elements" in repr(flat)


def test_what_users_hung_on_parameters_is_there_again():
    model = linear()
    model[2].weight.kind = "head"
    flat = FlattenParams(model)
    flat.double()
    with flat.unflatten_params():
        assert flat.module[2].weight.kind == "head"


def test_a_parametrized_module_can_be_flattened():
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    wanted, flat = make(), FlattenParams(make())
    x = torch.rand(2, 4)
    assert_same_tensor(flat(x), wanted(x))
    assert_same_state(flat.state_dict(), wanted.state_dict())


# Checkpoints


@every_model
@every_grouping
def test_a_checkpoint_of_a_flat_module_is_that_of_the_plain_one(make, group, tmp_path):
    wanted, model = make(), make()
    kept = copied(wanted.state_dict())
    flat = FlattenParams(model, group(model))
    digest = dsd.save(tmp_path / "flat", {"model": flat})
    assert dsd.save(tmp_path / "plain", {"model": wanted}) == digest

    plain = make(seed=1)
    dsd.load(tmp_path / "flat", {"model": plain})
    assert_same_state(plain.state_dict(), kept)

    other = make(seed=2)
    again = FlattenParams(other, group(other))
    memory = [parameter.data_ptr() for parameter in again.flat_params]
    assert not dsd.load(tmp_path / "plain", {"model": again}).report
    assert_same_state(again.state_dict(), kept)
    assert [parameter.data_ptr() for parameter in again.flat_params] == memory
    assert_same_tensor(outputs(again, make), outputs(make(), make))


def test_a_checkpoint_of_a_model_with_wrappers_inside_has_canonical_names(tmp_path):
    def build(seed: int, wrap: Any) -> nn.Module:
        torch.manual_seed(seed)
        inner = wrap(nn.Sequential(nn.Linear(2, 2), wrap(nn.Linear(2, 2))))
        return nn.ModuleDict({"inner": inner, "head": nn.Linear(2, 2)})

    def plain(module: nn.Module) -> nn.Module:
        return module

    model, wanted = build(0, FlattenParams), build(0, plain)
    dsd.save(tmp_path / "c", {"model": torch.compile(model)})
    assert_same(dsd.load(tmp_path / "c")["model"], dict(wanted.state_dict()))
    for wrap in (plain, FlattenParams):
        other = build(1, wrap)
        dsd.load(tmp_path / "c", {"model": other})
        assert_same_state(other.state_dict(), wanted.state_dict())


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    dsd.save(tmp_path / "c", {"model": nn.Sequential(nn.Linear(4, 4))})
    flat = FlattenParams(linear())
    with pytest.raises(MismatchError, match="2.weight"):
        dsd.load(tmp_path / "c", {"model": flat})
    assert flat.is_flattened
    assert_same_state(flat.state_dict(), linear().state_dict())


def test_an_optimizer_of_a_flat_module_goes_on_where_it_was_saved(tmp_path):
    def run(flat: Any, optimizer: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            outputs(flat, linear).square().sum().backward()
            optimizer.step()

    flat = FlattenParams(linear())
    optimizer = torch.optim.AdamW(flat.parameters())
    run(flat, optimizer)
    dsd.save(tmp_path / "c", {"model": flat, "optimizer": optimizer})
    again = FlattenParams(linear(seed=1))
    other = torch.optim.AdamW(again.parameters(), lr=9.0)
    dsd.load(tmp_path / "c", {"model": again, "optimizer": other})
    run(flat, optimizer)
    run(again, other)
    assert_same_state(again.state_dict(), flat.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())


# The optimizer's state


def trained(kind: Any, model: nn.Module, make: Any) -> Any:
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        outputs(model, make).square().sum().backward()
        optimizer.step()
    return optimizer


ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam"]
ELEMENTWISE += ["RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", ELEMENTWISE)
@every_model
def test_the_state_of_a_flat_parameter_is_cut_into_that_of_the_parameters(make, name):
    kind = getattr(torch.optim, name)
    wanted, flat = make(), FlattenParams(make())
    plain, other = trained(kind, wanted, make), trained(kind, flat, make)
    layout, state = flat.layouts[0], other.state[flat.flat_param]
    parts = cut_state(layout, state)
    parameters = dict(wanted.named_parameters())
    assert list(parts) == list(layout.names)
    for fqn, entries in parts.items():
        assert_same(entries, dict(plain.state[parameters[fqn]]))
    joined = join_state(layout, parts)
    assert_same(joined, dict(state))


def test_no_two_parameters_share_a_step():
    layout = FlatLayout("f", ("a", "b"), ((2,), (1, 3)))
    parts = cut_state(layout, {"step": torch.tensor(3.0), "exp_avg": torch.arange(5.0), "n": [1]})
    parts["a"]["step"] += 1
    parts["a"]["n"].append(2)
    assert parts["b"]["step"] == 3
    assert parts["b"]["n"] == [1]
    assert_same_tensor(parts["b"]["exp_avg"], torch.tensor([[2.0, 3.0, 4.0]]))


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.ones(4), id="another_length"),
        pytest.param(torch.ones(5, 1), id="another_shape"),
        pytest.param([torch.ones(5)], id="list"),
        pytest.param({"a": (torch.ones(2),)}, id="nested"),
    ],
)
def test_state_that_belongs_to_no_parameter_alone_is_refused(value):
    layout = FlatLayout("f", ("a", "b"), ((2,), (1, 3)))
    with pytest.raises(UnsupportedValueError, match="'rows' of f"):
        cut_state(layout, {"step": 1, "rows": value})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param(lambda s: s["b"].pop("step"), "b has no 'step'", id="lacks"),
        pytest.param(lambda s: s.pop("b"), "b has no 'step', and a has", id="lacks_all"),
        pytest.param(lambda s: s["b"].update(step=torch.tensor(4.0)), "step", id="step"),
        pytest.param(
            lambda s: s["b"].update(x=torch.ones(3)), r"of b is \(3,\), not \(1, 3\)", id="shape"
        ),
        pytest.param(lambda s: s["b"].update(x=s["b"]["x"].double()), "float64", id="dtype"),
        pytest.param(lambda s: s["b"].update(x=3), "'x'", id="number"),
    ],
)
def test_states_that_do_not_fit_together_are_not_joined(change, what):
    layout = FlatLayout("f", ("a", "b"), ((2,), (1, 3)))
    states = cut_state(layout, {"step": torch.tensor(3.0), "x": torch.arange(5.0)})
    change(states)
    with pytest.raises(MismatchError, match=what):
        join_state(layout, states)


def test_a_tied_parameter_is_joined_under_any_of_its_names():
    layout = FlatLayout("f", ("a", "b"), ((2,), (3,)), (("c", "b"),))
    x = torch.arange(5.0)
    states = {"a": {"x": x[:2]}, "c": {"x": x[2:]}, "other": {"x": x}}
    assert_same(join_state(layout, states), {"x": x})
    assert join_state(layout, {"other": {"x": x}}) == {}


def test_where_all_parameters_have_one_element_the_live_state_decides():
    layout = FlatLayout("f", ("a", "b"), ((), ()))
    states = {name: {"eta": torch.tensor(1.0), "step": torch.tensor(2.0)} for name in "ab"}
    assert_same(join_state(layout, states)["eta"], torch.ones(2))
    like = {"eta": torch.tensor(0.0)}
    assert_same(
        join_state(layout, states, like), {"eta": torch.tensor(1.0), "step": torch.tensor(2.0)}
    )


def test_layouts_are_found_with_names_in_the_whole_model():
    inner = FlattenParams(nn.Sequential(nn.Linear(2, 2), FlattenParams(nn.Linear(2, 1))))
    model = nn.ModuleDict({"body": torch.compile(inner), "head": nn.Linear(1, 1)})
    found = find_layouts(model)
    flat, deep = inner.flat_param, inner.module[1].flat_param
    assert set(found) == {id(flat), id(deep)}
    assert found[id(flat)].names == ("body.0.weight", "body.0.bias")
    assert found[id(deep)].names == ("body.1.weight", "body.1.bias")
    assert found[id(deep)].name == "body.1.flat_param_0"


# Properties

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


@st.composite
def modules(draw: Any) -> nn.Module:
    """Modules of several parameters of any dtype and shape, some tied, nested, bits random."""
    count = draw(st.integers(0, 6))
    seed = draw(st.integers(0, 2**31))
    root = nn.Module()
    children = [root]
    made: list[nn.Parameter] = []
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        owner = draw(st.sampled_from(children))
        if draw(st.booleans()):
            child = nn.Module()
            owner.add_module(f"m{index}", child)
            children.append(child)
            owner = child
        if made and draw(st.integers(0, 3)) == 0:
            owner.register_parameter(f"p{index}", draw(st.sampled_from(made)))
            continue
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
        width = torch.empty(0, dtype=dtype).element_size()
        numel = torch.Size(shape).numel()
        raw = torch.randint(0, 256, (numel * width,), dtype=torch.uint8, generator=generator)
        data = raw.gt(127) if dtype == torch.bool else raw.view(dtype)
        grad = (dtype.is_floating_point or dtype.is_complex) and draw(st.booleans())
        made.append(nn.Parameter(data.view(shape), requires_grad=grad))
        owner.register_parameter(f"p{index}", made[-1])
    return root


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_module_in_any_groups_keeps_every_bit(data):
    model = data.draw(modules())
    names = dict(model.named_parameters())
    kinds: dict[Any, list[str]] = {}
    for name, one in names.items():
        number = data.draw(st.integers(0, 2))
        kinds.setdefault((one.dtype, one.requires_grad, number), []).append(name)
    groups = (
        None
        if data.draw(st.booleans())
        else [group for (_, _, number), group in kinds.items() if number]
    )
    wanted = copied(model.state_dict())
    flat = FlattenParams(model, groups)
    assert_same_state(flat.state_dict(), wanted)
    assert [FlatLayout.of_value(one.to_value()) for one in flat.layouts] == list(flat.layouts)
    for layout, parameter in zip(flat.layouts, flat.flat_params, strict=True):
        assert parameter.shape == (layout.numel,)
        for name, part in zip(layout.names, layout.cut(parameter.detach()), strict=True):
            assert_same_tensor(part, wanted[name])
    zeros = OrderedDict((name, torch.zeros_like(value)) for name, value in wanted.items())
    stored = copied(flat.flat_state_dict())
    flat.load_state_dict(zeros)
    assert all(not bits(value).any() for value in flat.state_dict().values())
    flat.load_state_dict(stored)
    assert_same_state(copy.deepcopy(flat).state_dict(), wanted)
    with flat.unflatten_params():
        assert_same_state(flat.module.state_dict(), wanted)
    assert_same_state(flat.state_dict(), wanted)
