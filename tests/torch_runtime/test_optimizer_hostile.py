"""Sections of optimizers that nobody would write give our errors alone, and change nothing."""

from __future__ import annotations

import copy
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the runtime needs torch")

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import TensorSource  # noqa: E402
from dsdformat.errors import DsdError, MismatchError  # noqa: E402
from dsdformat.format.values import Named, Size  # noqa: E402
from tests.torch_runtime.exact import assert_same, bits  # noqa: E402
from tests.torch_runtime.optimizer_cases import listed, mlp, train  # noqa: E402

NAMES = W0, B0, W2, B2 = "0.weight", "0.bias", "2.weight", "2.bias"


def source(tensor: torch.Tensor) -> TensorSource:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSource.of(dtype, tuple(tensor.shape), bits(tensor).numpy().tobytes())


def forged(value: Any) -> Any:
    """Turn tensors below dicts, lists and tuples into what the writer takes."""
    if isinstance(value, torch.Tensor):
        return source(value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, forged(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(forged, value))
    return value


def write(path: Path, section: Any) -> Path:
    """Write a good model beside a section for its optimizer."""
    model = {name: parameter.detach() for name, parameter in mlp(7).named_parameters()}
    with dsdformat.create(path, threads=1) as writer:
        writer.add(forged({"model": model, "optimizer": section}))
        writer.commit()
    return path


def entry(seed: int = 0, shape: Any = (6, 4)) -> dict[str, Any]:
    return {
        "step": torch.tensor(4.0),
        "exp_avg": torch.full(shape, 1.0 + seed),
        "exp_avg_sq": torch.full(shape, 2.0 + seed),
    }


def good() -> dict[str, Any]:
    """A section that is as it should be."""
    shapes = {W0: (6, 4), B0: (6,), W2: (3, 6), B2: (3,)}
    group = {"lr": 0.5, "betas": (0.5, 0.75), "params": list(NAMES)}
    return {
        "state": {name: entry(index, shape) for index, (name, shape) in enumerate(shapes.items())},
        "param_groups": OrderedDict({W0: group}),
    }


def live(*, stepped: bool, hooks: bool = False) -> dict[str, Any]:
    model = mlp(1)
    optimizer = torch.optim.Adam(model.parameters())
    if stepped:
        train(model, optimizer, range(2))
    if hooks:
        optimizer.register_load_state_dict_pre_hook(lambda o, s: None)
    return {"model": model, "optimizer": optimizer}


def options(state: dict[str, Any]) -> list[dict[str, Any]]:
    groups = state["optimizer"].param_groups
    return [{key: v for key, v in group.items() if key != "params"} for group in groups]


def watch(state: dict[str, Any]) -> Callable[[], None]:
    """A check that nothing of a state has changed since."""
    before, groups = dsd.snapshot(state), copy.deepcopy(options(state))
    keys = list(state["optimizer"].state)
    addresses = [parameter.data_ptr() for parameter in state["model"].parameters()]

    def check() -> None:
        assert_same(dsd.snapshot(state), before)
        assert_same(options(state), groups)
        assert [id(key) for key in state["optimizer"].state] == [id(key) for key in keys]
        assert [parameter.data_ptr() for parameter in state["model"].parameters()] == addresses

    return check


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The good section with something else at a path."""
    section = good()
    node: Any = section
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = to
    return section


def without(*path: Any) -> dict[str, Any]:
    section = good()
    node: Any = section
    for step in path[:-1]:
        node = node[step]
    del node[path[-1]]
    return section


GROUP = ("param_groups", W0)
T = torch.ones(2)
MALFORMED: dict[str, Any] = {
    "None": None,
    "an int": 3,
    "a text": "state",
    "a list": [],
    "a list of sections": [good(), good()],
    "a tensor": T,
    "an empty dict": {},
    "no state": without("state"),
    "no groups": without("param_groups"),
    "state None": changed("state", to=None),
    "state a list": changed("state", to=[entry()]),
    "state a tensor": changed("state", to=T),
    "groups None": changed("param_groups", to=None),
    "groups a list": changed("param_groups", to=[{"lr": 0.1, "params": [0, 1, 2, 3]}]),
    "groups a tensor": changed("param_groups", to=T),
    "a group None": changed(*GROUP, to=None),
    "a group a list": changed(*GROUP, to=["lr", 0.1]),
    "a group a tensor": changed(*GROUP, to=T),
    "a second group an int": changed("param_groups", "x", to=4),
    "a group without params": without(*GROUP, "params"),
    "params None": changed(*GROUP, "params", to=None),
    "params an int": changed(*GROUP, "params", to=4),
    "params a text": changed(*GROUP, "params", to=W0),
    "params a dict": changed(*GROUP, "params", to=dict.fromkeys(NAMES, 1)),
    "params a tensor": changed(*GROUP, "params", to=T),
    "params of ints": changed(*GROUP, "params", to=[0, 1, 2, 3]),
    "params of None": changed(*GROUP, "params", to=[None]),
    "params of lists": changed(*GROUP, "params", to=[[W0], [B0]]),
    "params of dicts": changed(*GROUP, "params", to=[{W0: 1}]),
    "params of tensors": changed(*GROUP, "params", to=[T]),
    "params of bytes": changed(*GROUP, "params", to=[b"0.weight"]),
    "params of tuples": changed(*GROUP, "params", to=[(W0,)]),
    "params with one int": changed(*GROUP, "params", to=[*NAMES, 7]),
    "params with one list": changed(*GROUP, "params", to=[*NAMES, []]),
    "params of others": changed(*GROUP, "params", to=["9.weight", "", "/", "%", "@0"]),
    "an entry None": changed("state", W0, to=None),
    "an entry a tensor": changed("state", W0, to=T),
    "an entry a list": changed("state", W0, to=[T, T]),
    "an entry under an int": changed("state", 0, to=entry()),
    "an entry under None": changed("state", None, to=entry()),
    "an entry under bytes": changed("state", b"0.weight", to=entry()),
    "an entry under a tuple": changed("state", (W0, 1), to=entry()),
    "an entry under another name": changed("state", "9.weight", to=entry()),
    "an entry under an odd name": changed("state", "../%2F@0\x00/", to=entry()),
    "shared state None": changed("shared_state", to=None),
    "shared state a list": changed("shared_state", to=[1]),
    "shared state a tensor": changed("shared_state", to=T),
    "own keys None": changed("own_keys", to=None),
    "own keys a list": changed("own_keys", to=[1]),
    "own keys of an optimizer a list": changed("own_keys", to={W0: [1]}),
    "two groups of one parameter": changed(
        "param_groups", B2, to={"lr": 0.25, "params": [B2], "betas": (0.5, 0.75)}
    ),
}


both_ways = pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])

malformed = pytest.mark.parametrize("section", MALFORMED.values(), ids=MALFORMED)


@both_ways
@malformed
def test_a_malformed_section_is_one_of_our_errors_and_changes_nothing(section, stepped, tmp_path):
    path = write(tmp_path / "c", section)
    state = live(stepped=stepped)
    check = watch(state)
    with pytest.raises(DsdError):
        dsd.load(path, state)
    check()


@malformed
def test_without_strict_a_malformed_section_gives_no_error_of_python(section, tmp_path):
    path = write(tmp_path / "c", section)
    state = live(stepped=True)
    check = watch(state)
    try:
        dsd.load(path, state, strict=False)
    except DsdError:
        check()


@malformed
def test_a_malformed_section_is_one_of_our_errors_where_names_change(section, tmp_path):
    path = write(tmp_path / "c", section)
    state = live(stepped=True)
    check = watch(state)
    with pytest.raises(DsdError):
        dsd.load(path, state, rename=lambda name: name)
    check()


@pytest.mark.parametrize(
    "name", ["None", "a text", "no state", "groups a list", "params of lists", "shared state None"]
)
def test_a_malformed_section_does_not_matter_where_it_is_not_selected(name, tmp_path):
    path = write(tmp_path / "c", MALFORMED[name])
    state = live(stepped=True)
    before = dsd.snapshot(state)["optimizer"]
    dsd.load(path, state, select="model")
    assert_same(dsd.snapshot(state)["optimizer"], before)
    assert_same(dict(state["model"].named_parameters()), dict(mlp(7).named_parameters()))


@malformed
def test_a_malformed_section_can_be_looked_at(section, tmp_path):
    path = write(tmp_path / "c", section)
    assert_same(dsd.load(path)["optimizer"], section)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(torch.ones(4, 6), id="another shape"),
        pytest.param(torch.ones(6, 4).half(), id="another dtype"),
        pytest.param(torch.ones(24), id="another rank"),
        pytest.param(torch.ones(()), id="a scalar"),
    ],
)
def test_a_moment_of_another_form_than_the_live_one_changes_nothing(moment, tmp_path):
    path = write(tmp_path / "c", changed("state", W0, "exp_avg", to=moment))
    state = live(stepped=True)
    check = watch(state)
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, state)
    assert f"optimizer/state/{W0}/exp_avg" in str(caught.value)
    check()


def test_the_good_section_is_good(tmp_path):
    state = live(stepped=True)
    assert not dsd.load(write(tmp_path / "c", good()), state).report
    assert state["optimizer"].param_groups[0]["lr"] == 0.5
    train(state["model"], state["optimizer"], [0])


# Values that the optimizer cannot work with

HUGE = 10**400
VALUES: dict[str, Any] = {
    "no step": without("state", W0, "step"),
    "no moment": without("state", W0, "exp_avg"),
    "nothing but another key": changed("state", W0, to={"x": 1}),
    "a step that is a text": changed("state", W0, "step", to="four"),
    "a step that is None": changed("state", W0, "step", to=None),
    "a step that is a list": changed("state", W0, "step", to=[4]),
    "a step that is a dict": changed("state", W0, "step", to={"a": T}),
    "a step that is huge": changed("state", W0, "step", to=HUGE),
    "a step that is complex": changed("state", W0, "step", to=1j),
    "a step of two": changed("state", W0, "step", to=T),
    "a moment that is a text": changed("state", W0, "exp_avg", to="x"),
    "a moment that is a dict": changed("state", W0, "exp_avg", to={"a": torch.ones(6, 4)}),
    "an entry under a key of its own": changed("state", W0, (1, None), to=T),
    "a rate that is a text": changed(*GROUP, "lr", to="fast"),
    "a rate that is a dict": changed(*GROUP, "lr", to={"a": T}),
    "betas that are an int": changed(*GROUP, "betas", to=3),
    "a switch that is a text": changed(*GROUP, "foreach", to="x"),
    "a switch that is a tensor": changed(*GROUP, "capturable", to=T),
    "a switch that is a dict": changed(*GROUP, "fused", to={"a": 1}),
    "an option under an int": changed(*GROUP, 5, to=1),
    "an option under a tuple": changed(*GROUP, (1, "a"), to=T),
    "options named as those of torch": changed(*GROUP, "param_names", to=["x"]),
    "another key": changed("extra", to={"a": T}),
    "another key that is an int": changed(5, to=T),
    "another key that is None": changed(None, to=1),
    "state of the optimizer itself": changed(
        "shared_state", to={W0: {5: T, None: 1, "a": [T], W0: T}}
    ),
    "state of the optimizer itself under a number": changed("shared_state", to={W0: {0: {"x": T}}}),
    "state of no optimizer": changed("shared_state", to={5: {"x": T}, None: {}, "a": {"x": T}}),
    "own keys": changed("own_keys", to={W0: {5: T, None: 1, "a": [T]}}),
    "own keys that are those of torch": changed("own_keys", to={W0: {"state": [T]}}),
    "own keys of no optimizer": changed("own_keys", to={5: {"x": T}, "a": {"x": 1}}),
    "parts of a tensor that do not fit": changed(
        "state", W0, "exp_avg", to=(Named("torch.composite", "torch.sparse_coo"), {"values": T})
    ),
    "a tensor of an unknown kind": changed(
        "state", W0, "exp_avg", to=(Named("torch.composite", "torch.nothing"), {"values": T})
    ),
    "a sparse tensor that lies": changed(
        "state",
        W0,
        "exp_avg",
        to=(
            Named("torch.composite", "torch.sparse_coo"),
            {
                "size": Size((6, 4)),
                "indices": torch.tensor([[900], [0]]),
                "values": torch.ones(1),
                "coalesced": True,
            },
        ),
    ),
    "a class that is not allowed": changed(
        "state",
        W0,
        "exp_avg",
        to=(
            Named("torch.composite", "torch.subclass"),
            {"type": "os.system", "tensors": {"a": T}, "context": None, "size": Size((2,)),
             "stride": (1,)},
        ),
    ),
    "an option that is a tensor whose parts do not fit": changed(
        *GROUP, "lr", to=(Named("torch.composite", "torch.sparse_csr"), {"values": T})
    ),
}  # fmt: skip


any_value = pytest.mark.parametrize("section", VALUES.values(), ids=VALUES)


@both_ways
@any_value
def test_values_of_other_kinds_are_loaded_or_refused_before_anything_changes(
    section, stepped, tmp_path
):
    path = write(tmp_path / "c", section)
    state = live(stepped=stepped)
    check = watch(state)
    try:
        dsd.load(path, state)
    except DsdError:
        check()


@pytest.mark.parametrize("section", listed(VALUES, {}))
def test_with_hooks_values_of_other_kinds_are_loaded_or_refused_before_anything_changes(
    section, tmp_path
):
    path = write(tmp_path / "c", section)
    state = live(stepped=True, hooks=True)
    check = watch(state)
    try:
        dsd.load(path, state)
    except DsdError:
        check()


# Damage on the way


@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_damage_in_one_section_leaves_the_groups_of_the_optimizer(which, tmp_path):
    path = write(tmp_path / "c", good())
    (label,) = [p for p in path.iterdir() if p.name.startswith(which)]
    data = bytearray(label.read_bytes())
    data[-4] ^= 1
    label.write_bytes(data)
    state = live(stepped=False)
    before = options(state)
    with pytest.raises(DsdError) as caught:
        dsd.load(path, state)
    assert caught.value.code == "checksum_mismatch"
    assert_same(options(state), before)
    assert len(state["optimizer"].state) == 0


def test_damage_in_state_that_is_not_there_yet_changes_nothing(tmp_path):
    path = write(tmp_path / "c", good())
    (label,) = [p for p in path.iterdir() if p.name.startswith("optimizer")]
    data = bytearray(label.read_bytes())
    data[-4] ^= 1
    label.write_bytes(data)
    state = live(stepped=False)
    check = watch(state)
    with pytest.raises(DsdError):
        dsd.load(path, state)
    check()


def test_a_wrong_digest_changes_nothing(tmp_path):
    path = write(tmp_path / "c", good())
    state = live(stepped=True)
    check = watch(state)
    with pytest.raises(DsdError):
        dsd.load(path, state, digest="0" * 64)
    check()


def test_a_mismatch_of_the_model_leaves_the_optimizer(tmp_path):
    path = write(tmp_path / "c", good())
    model = mlp(1, sizes=(4, 5, 3))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    check = watch(state)
    with pytest.raises(MismatchError):
        dsd.load(path, state)
    check()


# Anything at all

NEW = st.sampled_from(
    [None, 0, -1, "", W0, b"x", 0.5, (), [], {}, OrderedDict(), T, [T], {"a": T}, {W0: {}}, [[]],
     {"params": [W0]}, {"params": [[]]}, {"state": {}, "param_groups": {}}, float("nan"), {1: 2}]
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All paths into dicts and lists."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    below = [place for key, item in items for place in places(item, (*path, key))]
    return [path, *below] if path else below


def new(draw: st.DrawFn) -> Any:
    # A copy: what is changed below it must not change what is drawn next.
    return copy.deepcopy(draw(NEW))


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    section = good()
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(section) or [("x",)]))
        node: Any = section
        for step in place[:-1]:
            node = node[step]
        how = draw(st.sampled_from(["replace", "delete", "add"]))
        if how == "delete" and isinstance(node, (dict, list)) and place != ("x",):
            del node[place[-1]]
        elif how == "add" and isinstance(node, dict):
            node[draw(st.sampled_from([0, None, "x", W0, B2, "params", (1,)]))] = new(draw)
        else:
            node[place[-1]] = new(draw)
    return section


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(mutated(), st.booleans(), st.booleans())
def test_any_section_is_loaded_or_one_of_our_errors(section, stepped, strict):
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "c", section)
        state = live(stepped=stepped)
        check = watch(state)
        try:
            dsd.load(path, state, strict=strict)
        except DsdError:
            check()
