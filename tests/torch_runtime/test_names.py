"""Canonical names: a model is filed as if nothing wrapped it, and fits under any other wrapping."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    ActivationWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat.errors import MismatchError  # noqa: E402
from tests.torch_runtime.exact import assert_same, assert_same_tensor  # noqa: E402

Wrap = Callable[[nn.Module], nn.Module]


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank, which DDP asks for."""
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Wrappings

WRAPPERS: dict[str, Wrap] = {
    "compile": torch.compile,
    "data_parallel": DataParallel,
    "ddp": DistributedDataParallel,
    "checkpoint": checkpoint_wrapper,
    "offload": offload_wrapper,
}


def around(*wrappers: str) -> Wrap:
    """Wrap the model as a whole; the first wrapper is the outermost."""

    def wrap(module: nn.Module) -> nn.Module:
        for name in reversed(wrappers):
            module = WRAPPERS[name](module)
        return module

    return wrap


def within(*wrappers: str, outside: Wrap | None = None) -> Wrap:
    """Wrap modules at several depths, of which some lie in each other."""
    one = around(*wrappers)

    def wrap(module: nn.Module) -> nn.Module:
        module.layers[1].module = one(module.layers[1].module)
        module.layers[1] = one(module.layers[1])
        module.module.module = one(module.module.module)
        module.module = one(module.module)
        module._orig_mod = one(module._orig_mod)
        module._checkpoint_wrapped_module = one(module._checkpoint_wrapped_module)
        return module if outside is None else outside(module)

    return wrap


def checkpointed(outside: Wrap | None = None) -> Wrap:
    """Checkpoint the activations of all linear layers, as users do."""

    def wrap(module: nn.Module) -> nn.Module:
        apply_activation_checkpointing(module, check_fn=lambda one: isinstance(one, nn.Linear))
        return module if outside is None else outside(module)

    return wrap


WRAPPINGS: dict[str, Wrap] = {
    "plain": lambda module: module,
    "compile": around("compile"),
    "data_parallel": around("data_parallel"),
    "ddp": around("ddp"),
    "checkpoint": around("checkpoint"),
    "offload": around("offload"),
    "ddp(compile)": around("ddp", "compile"),
    "compile(ddp)": around("compile", "ddp"),
    "ddp(data_parallel(ddp))": around("ddp", "data_parallel", "ddp"),
    "checkpoint(compile(checkpoint))": around("checkpoint", "compile", "checkpoint"),
    "within offload": within("offload"),
    "within checkpoint(checkpoint)": within("checkpoint", "checkpoint"),
    "within compile(ddp(checkpoint))": within("compile", "ddp", "checkpoint"),
    "ddp(compile(within checkpoint(compile)))": within(
        "checkpoint", "compile", outside=around("ddp", "compile")
    ),
    "compile(ddp(layers checkpointed))": checkpointed(around("compile", "ddp")),
}

each_wrapping = pytest.mark.parametrize("wrapping", WRAPPINGS)


class Holder(nn.Module):
    """A module of the user's, with children and whatever else under chosen names."""

    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            if isinstance(child, (nn.Module, nn.Parameter)):
                setattr(self, name, child)
            else:
                self.register_buffer(name, child)


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


class Net(nn.Module):
    """Has children with the names that wrappers use, nested and repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Holder(module=Holder(module=linear()), weight=nn.Parameter(torch.randn(2)))
        self._orig_mod = linear()
        self._checkpoint_wrapped_module = Holder(_checkpoint_wrapped_module=linear())
        self.layers = nn.Sequential(linear(), Holder(module=linear(), norm=nn.BatchNorm1d(2)))
        self.head = linear()
        self.head.weight = self._orig_mod.weight
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("scratch", torch.randn(3), persistent=False)


NAMES = [
    "_checkpoint_wrapped_module._checkpoint_wrapped_module.bias",
    "_checkpoint_wrapped_module._checkpoint_wrapped_module.weight",
    "_orig_mod.bias",
    "_orig_mod.weight",
    "head.bias",
    "head.weight",
    "layers.0.bias",
    "layers.0.weight",
    "layers.1.module.bias",
    "layers.1.module.weight",
    "layers.1.norm.bias",
    "layers.1.norm.num_batches_tracked",
    "layers.1.norm.running_mean",
    "layers.1.norm.running_var",
    "layers.1.norm.weight",
    "module.module.module.bias",
    "module.module.module.weight",
    "module.weight",
    "table",
]


def make_state(wrapping: str, seed: int) -> dict[str, Any]:
    """A wrapped model, with an optimizer that has taken a step."""
    torch.manual_seed(seed)
    model = WRAPPINGS[wrapping](Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved(wrapping)` gives the checkpoint of one wrapping; all hold the same numbers."""
    folder = tmp_path_factory.mktemp("saved")

    def saved(wrapping: str) -> Path:
        path = folder / str(list(WRAPPINGS).index(wrapping))
        if not path.exists():
            dsd.save(path, make_state(wrapping, seed=1))
        return path

    return saved


def digest_of(path: Path, state: dict[str, Any]) -> str:
    return dsd.save(path, state)


def naming(model: nn.Module) -> list[list[str]]:
    """All names that torch itself gives, with the types and objects behind them."""
    return [
        [f"{name} {type(module)} {id(module)}" for name, module in model.named_modules()],
        [f"{name} {id(one)}" for name, one in model.named_parameters(remove_duplicate=False)],
        [f"{name} {id(one)}" for name, one in model.named_buffers(remove_duplicate=False)],
        list(model.state_dict()),
    ]


def tensor_names(path: Path) -> list[str]:
    with dsdformat.open(path) as checkpoint:
        return sorted(checkpoint.names)


# One model, wrapped


@each_wrapping
def test_a_wrapped_model_has_the_names_of_the_plain_one(wrapping: str) -> None:
    assert sorted(dsd.snapshot(make_state(wrapping, seed=1))["model"]) == NAMES


@each_wrapping
def test_an_optimizer_of_a_wrapped_model_has_the_names_of_the_plain_one(wrapping: str) -> None:
    plain = dsd.snapshot(make_state("plain", seed=1))["optimizer"]
    assert_same(dsd.snapshot(make_state(wrapping, seed=1))["optimizer"], plain)


@each_wrapping
def test_a_wrapped_model_is_stored_as_the_plain_one_digest_for_digest(
    tmp_path: Path, wrapping: str
) -> None:
    digests = [
        digest_of(tmp_path / "plain", make_state("plain", seed=1)),
        digest_of(tmp_path / "wrapped", make_state(wrapping, seed=1)),
    ]
    assert digests[0] == digests[1]


def pairs() -> list[tuple[str, str]]:
    """Each wrapping with itself, with none, and with some others, in both directions."""
    order = list(WRAPPINGS)
    return [
        (source, target)
        for i, source in enumerate(order)
        for j, target in enumerate(order)
        if "plain" in (source, target) or (i - j) % len(order) in (0, 1, 4, 7)
    ]


@pytest.mark.parametrize(("source", "target"), pairs())
def test_a_model_loads_from_any_wrapping_into_any_other(
    saved: Callable[[str], Path], source: str, target: str
) -> None:
    state = make_state(target, seed=2)
    names = naming(state["model"])
    rest = dsd.load(saved(source), state)
    assert not rest
    assert not rest.report
    assert_same(dsd.snapshot(state), dsd.snapshot(make_state("plain", seed=1)))
    assert naming(state["model"]) == names


@each_wrapping
def test_the_names_are_the_same_in_every_call(tmp_path: Path, wrapping: str) -> None:
    state = make_state(wrapping, seed=1)
    first = dsd.snapshot(state)
    digest = dsd.save(tmp_path / "first", state)
    dsd.load(tmp_path / "first", state)
    second = dsd.snapshot(state)
    assert list(second["model"]) == list(first["model"])
    assert_same(second, first)
    assert dsd.save(tmp_path / "second", state) == digest


@each_wrapping
def test_saving_renames_nothing_in_the_model(tmp_path: Path, wrapping: str) -> None:
    state = make_state(wrapping, seed=1)
    names = naming(state["model"])
    dsd.save(tmp_path / "saved", state)
    dsd.snapshot(state)
    assert naming(state["model"]) == names


@each_wrapping
def test_a_flat_dict_of_canonical_names_loads_into_a_wrapped_model(
    tmp_path: Path, wrapping: str
) -> None:
    """What another program saved, which knew the plain model alone."""
    torch.manual_seed(7)
    plain = Net()
    dsd.save(tmp_path / "flat", {"model": dict(plain.state_dict())})
    model = WRAPPINGS[wrapping](Net())
    dsd.load(tmp_path / "flat", {"model": model})
    assert_same(dsd.snapshot({"model": model}), dsd.snapshot({"model": plain}))


@each_wrapping
def test_plain_torch_loads_what_a_wrapped_model_has_saved(
    saved: Callable[[str], Path], wrapping: str
) -> None:
    model = Net()
    model.load_state_dict(dsd.load(saved(wrapping))["model"], strict=True)
    assert_same(
        dsd.snapshot({"model": model})["model"], dsd.snapshot(make_state("plain", seed=1))["model"]
    )


@each_wrapping
def test_a_report_has_canonical_names_only(tmp_path: Path, wrapping: str) -> None:
    stored = dict(Net().state_dict())
    stored["layers.1.module.weight"] = torch.zeros(3, 3)
    stored["module.module.weight"] = stored.pop("module.module.module.weight")
    dsd.save(tmp_path / "saved", {"model": stored})
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "saved", {"model": WRAPPINGS[wrapping](Net())})
    report = caught.value.report
    assert report.missing == ["model/module.module.module.weight"]
    assert report.unexpected == ["model/module.module.weight"]
    assert [item.name for item in report.mismatched] == ["model/layers.1.module.weight"]


@each_wrapping
def test_select_takes_canonical_names(saved: Callable[[str], Path], wrapping: str) -> None:
    state = make_state(wrapping, seed=2)
    before = dsd.snapshot(state)
    dsd.load(saved(wrapping), state, select="model/module.module.module.weight")
    after = dsd.snapshot(state)
    changed = [
        name
        for name in before["model"]
        if not torch.equal(before["model"][name], after["model"][name])
    ]
    assert changed == ["module.module.module.weight"]
    assert_same(after["optimizer"], before["optimizer"])


@each_wrapping
def test_rename_takes_canonical_names(
    tmp_path: Path, saved: Callable[[str], Path], wrapping: str
) -> None:
    class Renamed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.layers = self.layers, None

    model = Renamed()
    optimizer = torch.optim.AdamW(model.parameters())
    dsd.load(
        saved(wrapping),
        {"model": model, "optimizer": optimizer},
        rename=[("model/layers.", "model/trunk.")],
    )
    wanted = make_state("plain", seed=1)
    wanted_model, wanted_optimizer = wanted["model"], wanted["optimizer"]
    assert_same_tensor(model.trunk[0].weight, wanted_model.layers[0].weight)
    moments = optimizer.state[model.trunk[1].module.weight]
    assert_same(moments, wanted_optimizer.state[wanted_model.layers[1].module.weight])


@pytest.mark.parametrize("outer", WRAPPERS)
def test_only_persistent_buffers_of_a_wrapped_model_are_saved(tmp_path: Path, outer: str) -> None:
    inner = Holder(kept=torch.ones(2), weight=nn.Parameter(torch.ones(2)))
    inner.register_buffer("left_out", torch.ones(2), persistent=False)
    dsd.save(tmp_path / "saved", {"model": WRAPPERS[outer](nn.Sequential(inner))})
    assert tensor_names(tmp_path / "saved") == ["model/0.kept", "model/0.weight"]


def test_a_model_compiled_in_place_has_its_names() -> None:
    model = Net()
    model.layers[0].compile()
    model.compile()
    assert sorted(dsd.snapshot({"model": model})["model"]) == NAMES


def test_a_model_that_was_compiled_by_running_it_has_its_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.compile(nn.Sequential(linear(), nn.ReLU(), linear()), backend="eager")
    model(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    dsd.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    plain = nn.Sequential(linear(), nn.ReLU(), linear())
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    dsd.load(tmp_path / "saved", {"model": plain, "optimizer": other})
    assert_same(
        dsd.snapshot({"model": plain, "optimizer": other}),
        dsd.snapshot({"model": model, "optimizer": optimizer}),
    )


def test_a_compiled_model_that_has_run_gives_the_same_results_after_loading_another_state(
    tmp_path: Path,
) -> None:
    """The compiled code must see the new numbers, so the parameters' memory must be theirs."""
    torch.manual_seed(0)
    source = nn.Sequential(linear(), linear())
    dsd.save(tmp_path / "saved", {"model": source})
    model = torch.compile(nn.Sequential(linear(), linear()), backend="eager")
    given = torch.ones(1, 2)
    model(given)
    dsd.load(tmp_path / "saved", {"model": model})
    assert_same_tensor(model(given), source(given))


# A user's own modules with the names of wrappers

OWN = {
    "module": lambda: Holder(module=linear()),
    "_orig_mod": lambda: Holder(_orig_mod=linear()),
    "_checkpoint_wrapped_module": lambda: Holder(_checkpoint_wrapped_module=linear()),
    "_fsdp_wrapped_module": lambda: Holder(_fsdp_wrapped_module=linear()),
    "module.module": lambda: Holder(module=Holder(module=linear())),
    "_checkpoint_wrapped_module._checkpoint_wrapped_module": lambda: Holder(
        _checkpoint_wrapped_module=Holder(_checkpoint_wrapped_module=linear())
    ),
    "module._orig_mod._checkpoint_wrapped_module": lambda: Holder(
        module=Holder(_orig_mod=Holder(_checkpoint_wrapped_module=linear()))
    ),
    "a parameter called module": lambda: Holder(module=nn.Parameter(torch.randn(2))),
    "a parameter called _checkpoint_wrapped_module": lambda: Holder(
        _checkpoint_wrapped_module=nn.Parameter(torch.randn(2))
    ),
    "module beside weight": lambda: Holder(module=linear(), weight=nn.Parameter(torch.randn(2))),
    "_checkpoint_wrapped_module beside weight": lambda: Holder(
        _checkpoint_wrapped_module=linear(), weight=nn.Parameter(torch.randn(2))
    ),
    "module.module beside module.weight": lambda: Holder(
        module=Holder(module=linear(), weight=nn.Parameter(torch.randn(2)))
    ),
}
ORDERS = {
    "compile": around("compile"),
    "data_parallel": around("data_parallel"),
    "ddp": around("ddp"),
    "checkpoint": around("checkpoint"),
    "offload": around("offload"),
    "ddp(compile)": around("ddp", "compile"),
    "compile(ddp)": around("compile", "ddp"),
    "checkpoint(checkpoint)": around("checkpoint", "checkpoint"),
    "compile(checkpoint(ddp))": around("compile", "checkpoint", "ddp"),
}
DEPTHS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the whole": lambda module: module,
    "a child": lambda module: Holder(block=module),
    "a child called module": lambda module: Holder(module=module),
    "a child called _orig_mod": lambda module: Holder(_orig_mod=module),
}
# Wrappers that leave out their own names in a state dict, so that these two may look alike.
SILENT = ("checkpoint", "offload", "checkpoint(checkpoint)")
SEVERAL = [order for order in ORDERS if order not in ("ddp", "compile(ddp)", "offload")]
AMBIGUOUS = "_checkpoint_wrapped_module beside weight"


def own_cases() -> Iterator[Any]:
    for own in OWN:
        for order in SEVERAL:
            for depth in DEPTHS:
                marks = []
                if own == AMBIGUOUS and order in SILENT and depth != "the whole":
                    reason = "torch's own wrapper, which renames its keys, cannot load them"
                    marks = [pytest.mark.xfail(strict=True, reason=reason)]
                yield pytest.param(own, order, depth, marks=marks, id=f"{own}-{order}-{depth}")


@pytest.mark.parametrize(("own", "order", "depth"), list(own_cases()))
def test_a_users_own_names_stay(tmp_path: Path, own: str, order: str, depth: str) -> None:
    torch.manual_seed(3)
    plain = DEPTHS[depth](OWN[own]())
    wrapped = DEPTHS[depth](ORDERS[order](copy.deepcopy(_block(plain, depth))))
    dsd.save(tmp_path / "wrapped", {"model": wrapped})
    assert sorted(dsd.load(tmp_path / "wrapped")["model"]) == sorted(plain.state_dict())
    torch.manual_seed(4)
    other = DEPTHS[depth](OWN[own]())
    dsd.load(tmp_path / "wrapped", {"model": other})
    assert_same(dict(other.state_dict()), dict(plain.state_dict()))
    dsd.save(tmp_path / "plain", {"model": plain})
    again = DEPTHS[depth](ORDERS[order](OWN[own]()))
    dsd.load(tmp_path / "plain", {"model": again})
    assert_same(dsd.snapshot({"model": again}), dsd.snapshot({"model": plain}))


def _block(plain: nn.Module, depth: str) -> nn.Module:
    return {
        "the whole": lambda: plain,
        "a child": lambda: plain.block,
        "a child called module": lambda: plain.module,
        "a child called _orig_mod": lambda: plain._orig_mod,
    }[depth]()


class WithExtra(nn.Linear):
    """Has an extra state: a count."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


@pytest.mark.parametrize("own", ["block", "module", "_orig_mod", "_checkpoint_wrapped_module"])
@pytest.mark.parametrize("order", ORDERS)
def test_extra_state_of_a_users_module_has_its_canonical_name(
    tmp_path: Path, own: str, order: str
) -> None:
    child = WithExtra()
    child.count = 7
    model = Holder(outer=ORDERS[order](Holder(**{own: child})))
    dsd.save(tmp_path / "saved", {"model": model})
    assert sorted(dsd.load(tmp_path / "saved")["model"]) == [
        f"outer.{own}._extra_state",
        f"outer.{own}.bias",
        f"outer.{own}.weight",
    ]
    other = Holder(outer=Holder(**{own: WithExtra()}))
    dsd.load(tmp_path / "saved", {"model": other})
    assert getattr(other.outer, own).count == 7


@pytest.mark.parametrize("order", ORDERS)
def test_extra_state_right_below_a_wrapper_is_restored_through_it(
    tmp_path: Path, order: str
) -> None:
    child = WithExtra()
    child.count = 7
    dsd.save(tmp_path / "saved", {"model": nn.Sequential(child)})
    other = WithExtra()
    dsd.load(tmp_path / "saved", {"model": nn.Sequential(ORDERS[order](other))})
    assert other.count == 7
    assert_same_tensor(other.weight, child.weight)


def test_an_averaged_model_keeps_the_name_module_which_is_its_own(tmp_path: Path) -> None:
    averaged = AveragedModel(linear())
    dsd.save(tmp_path / "saved", {"ema": averaged})
    assert sorted(dsd.load(tmp_path / "saved")["ema"]) == [
        "module.bias",
        "module.weight",
        "n_averaged",
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_an_averaged_model_loads_what_one_over_a_wrapped_model_has_saved(
    tmp_path: Path, order: str
) -> None:
    averaged = Holder(module=ORDERS[order](linear()), n_averaged=torch.tensor(3))
    dsd.save(tmp_path / "saved", {"ema": averaged})
    other = AveragedModel(linear())
    dsd.load(tmp_path / "saved", {"ema": other})
    assert int(other.n_averaged) == 3
    assert_same_tensor(other.module.weight, dsd.load(tmp_path / "saved")["ema"]["module.weight"])


def test_a_module_of_a_users_class_called_as_a_wrapper_is_not_taken_for_one(
    tmp_path: Path,
) -> None:
    class DataParallel(nn.Module):  # not torch's
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class OptimizedModule(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    dsd.save(tmp_path / "saved", {"model": DataParallel(OptimizedModule(linear()))})
    assert sorted(dsd.load(tmp_path / "saved")["model"]) == [
        "module._orig_mod.bias",
        "module._orig_mod.weight",
    ]


class OwnParallel(DataParallel):
    """A user's kind of wrapper, which adds nothing."""


class OwnActivation(ActivationWrapper):
    """A user's kind of activation wrapper, which adds nothing."""

    def forward(self, given: Any) -> Any:
        return self._checkpoint_wrapped_module(given)


@pytest.mark.parametrize("kind", [OwnParallel, OwnActivation], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_users_subclass_of_a_wrapper_is_a_wrapper(
    tmp_path: Path, kind: type[nn.Module], depth: str
) -> None:
    plain = DEPTHS[depth](linear())
    dsd.save(tmp_path / "saved", {"model": DEPTHS[depth](kind(linear()))})
    assert sorted(dsd.load(tmp_path / "saved")["model"]) == sorted(plain.state_dict())


class Scaled(DataParallel):
    """A user's kind of wrapper, which adds a buffer and a parameter of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.register_buffer("scale", torch.tensor([3.0]))
        self.shift = nn.Parameter(torch.tensor([4.0]))


def with_criterion(module: nn.Module) -> nn.Module:
    """A wrapper to which a user attached something else that is trained."""
    wrapper = DataParallel(module)
    wrapper.criterion = nn.Linear(1, 1)
    return wrapper


OWN_CONTENT = {"a subclass": Scaled, "an attribute": with_criterion}


@pytest.mark.parametrize("kind", OWN_CONTENT)
@pytest.mark.parametrize(
    "depth",
    [
        pytest.param(
            "the whole",
        ),
        "a child",
    ],
)
def test_what_a_wrapper_holds_beside_the_model_is_not_lost(
    tmp_path: Path, kind: str, depth: str
) -> None:
    model = DEPTHS[depth](OWN_CONTENT[kind](linear()))
    dsd.save(tmp_path / "saved", {"model": model})
    stored = dsd.load(tmp_path / "saved")["model"]
    assert len(stored) == len(model.state_dict())
    torch.manual_seed(9)
    other = DEPTHS[depth](OWN_CONTENT[kind](linear()))
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    dsd.load(tmp_path / "saved", {"model": other})
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("depth", ["the whole", "a child"])
def test_an_optimizer_over_what_a_wrapper_holds_beside_the_model_is_saved(
    tmp_path: Path, depth: str
) -> None:
    model = DEPTHS[depth](Scaled(linear()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dsd.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    groups = dsd.load(tmp_path / "saved")["optimizer"]["param_groups"]
    assert sum(len(group["params"]) for group in groups.values()) == 3


# The same model more than once


def test_a_compiled_reference_beside_the_model_stores_nothing_twice(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(64, 64)
            self.fast = torch.compile(self.model)

    both = Both()
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9)
    dsd.save(tmp_path / "saved", {"model": both, "optimizer": optimizer})
    with dsdformat.open(tmp_path / "saved") as checkpoint:
        assert len(checkpoint) == 2
        nbytes = sum(checkpoint.data_files.values())
    assert nbytes < 1.6 * 64 * 65 * 4
    other = Both()
    dsd.load(tmp_path / "saved", {"model": other})
    assert other.model.weight is other.fast._orig_mod.weight
    assert_same_tensor(other.model.weight, both.model.weight)


@pytest.mark.parametrize("order", ORDERS)
def test_a_model_and_its_wrapper_as_two_sections_store_nothing_twice(
    tmp_path: Path, order: str
) -> None:
    model = nn.Sequential(linear(), linear())
    state = {"raw": model, "wrapped": ORDERS[order](model)}
    optimizer = torch.optim.AdamW(state["wrapped"].parameters())
    dsd.save(tmp_path / "saved", {**state, "optimizer": optimizer})
    with dsdformat.open(tmp_path / "saved") as checkpoint:
        assert len(checkpoint) == 4
    loaded = dsd.load(tmp_path / "saved")
    assert list(loaded["raw"]) == list(loaded["wrapped"])
    assert all(loaded["raw"][name] is loaded["wrapped"][name] for name in loaded["raw"])


def test_a_module_under_two_names_of_which_one_is_wrapped_keeps_both(tmp_path: Path) -> None:
    shared = linear()
    model = Holder(a=shared, b=checkpoint_wrapper(torch.compile(shared)))
    dsd.save(tmp_path / "saved", {"model": model})
    assert sorted(dsd.load(tmp_path / "saved")["model"]) == [
        "a.bias",
        "a.weight",
        "b.bias",
        "b.weight",
    ]
    other = Holder(a=DataParallel(linear()), b=linear())
    dsd.load(tmp_path / "saved", {"model": other})
    assert_same_tensor(other.a.module.weight, shared.weight)
    assert_same_tensor(other.b.weight, shared.weight)


def test_an_optimizer_over_two_wrapped_models_has_the_names_of_both(tmp_path: Path) -> None:
    def make(first: Wrap, second: Wrap, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        state: dict[str, Any] = {"encoder": first(linear()), "decoder": second(linear())}
        parameters = [*state["encoder"].parameters(), *state["decoder"].parameters()]
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return {**state, "optimizer": optimizer}

    source = make(around("ddp", "compile"), around("checkpoint"), 1)
    dsd.save(tmp_path / "saved", source)
    assert sorted(dsd.load(tmp_path / "saved")["optimizer"]["state"]) == [
        "decoder/bias",
        "decoder/weight",
        "encoder/bias",
        "encoder/weight",
    ]
    target = make(around("compile"), around("data_parallel"), 2)
    dsd.load(tmp_path / "saved", target)
    assert_same(dsd.snapshot(target), dsd.snapshot(source))


# Names that are not letters and dots

ODD = ["a/b", "a@b", "%2F", "%252F", "ünï", " ", "__metadata__", "a\nb", "*", "[x]", "0", "état/%"]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("order", ["compile", "ddp", "checkpoint"])
def test_a_module_may_be_called_anything(tmp_path: Path, name: str, order: str) -> None:
    def make(wrap: Wrap, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({name: wrap(nn.ModuleDict({name: linear()}))})
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    source = make(ORDERS[order], 1)
    dsd.save(tmp_path / "saved", source)
    assert sorted(dsd.load(tmp_path / "saved")["model"]) == [
        f"{name}.{name}.bias",
        f"{name}.{name}.weight",
    ]
    target = make(lambda module: module, 2)
    dsd.load(tmp_path / "saved", target)
    assert_same(dsd.snapshot(target), dsd.snapshot(source))


# Lists: one model in parts

SIZE = 2


class Stage(nn.Module):
    """Some of the layers of a model, with their names in the whole."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(SIZE, SIZE) for number in numbers})


class Whole(nn.Module):
    """All four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4)))


def stepped(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def stages(seed: int, wrap: Wrap = lambda module: module) -> dict[str, Any]:
    """What two ranks hold, with layers 0, 2 and 1, 3: a list of stages, and one of optimizers."""
    torch.manual_seed(seed)
    first, second = [wrap(Stage(0)), wrap(Stage(2))], [wrap(Stage(1)), wrap(Stage(3))]
    return {
        "first": {"model": first, "optimizer": [stepped(one.parameters()) for one in first]},
        "second": {"model": second, "optimizer": [stepped(one.parameters()) for one in second]},
    }


def joined(ranks: dict[str, Any]) -> dict[str, Any]:
    return {key: [*ranks["first"][key], *ranks["second"][key]] for key in ("model", "optimizer")}


def whole(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Whole()
    return {"model": model, "optimizer": stepped(model.parameters())}


def layers_of(state: dict[str, Any]) -> dict[str, Any]:
    """Weights and moments by name, of one model or of one in parts."""
    plain = dsd.snapshot(state)
    moments = {
        f"{name}/{key}": value
        for name, entry in plain["optimizer"]["state"].items()
        for key, value in entry.items()
    }
    result = {**plain["model"], **moments}
    return {name: result[name] for name in sorted(result)}


def test_stages_are_stored_as_one_model(tmp_path: Path) -> None:
    dsd.save(tmp_path / "saved", joined(stages(1)))
    stored = dsd.load(tmp_path / "saved")
    names = [f"layers.{number}.{kind}" for number in range(4) for kind in ("bias", "weight")]
    assert sorted(stored["model"]) == names
    assert sorted(stored["optimizer"]["state"]) == names


def test_stages_are_stored_as_the_whole_model_is_digest_for_digest(tmp_path: Path) -> None:
    model = Whole()
    parts: list[Stage] = []
    for number in (2, 0, 3, 1):
        parts.append(Stage(number))
        parts[-1].layers[str(number)] = model.layers[number]
    one = dsd.save(tmp_path / "whole", {"model": model})
    assert dsd.save(tmp_path / "parts", {"model": parts}) == one


@pytest.mark.parametrize("order", ["plain", "compile", "ddp(compile)", "checkpoint"])
def test_stages_load_into_one_model(tmp_path: Path, order: str) -> None:
    source = joined(stages(1, ORDERS.get(order, lambda module: module)))
    dsd.save(tmp_path / "saved", source)
    target = whole(2)
    assert not dsd.load(tmp_path / "saved", target).report
    assert_same(layers_of(target), layers_of(source))


@pytest.mark.parametrize("order", ["plain", "compile", "ddp(compile)", "checkpoint"])
def test_one_model_loads_into_stages(tmp_path: Path, order: str) -> None:
    source = whole(1)
    dsd.save(tmp_path / "saved", source)
    target = joined(stages(2, ORDERS.get(order, lambda module: module)))
    assert not dsd.load(tmp_path / "saved", target).report
    assert_same(layers_of(target), layers_of(source))


def test_stages_load_into_stages_that_are_cut_elsewhere(tmp_path: Path) -> None:
    source = joined(stages(1))
    dsd.save(tmp_path / "saved", source)
    parts = [Stage(3, 0), Stage(1, 2)]
    target = {"model": parts, "optimizer": [stepped(part.parameters()) for part in parts]}
    dsd.load(tmp_path / "saved", target)
    assert_same(layers_of(target), layers_of(source))


def test_stages_that_two_ranks_saved_apart_load_into_one_model(tmp_path: Path) -> None:
    source = stages(1)
    dsd.save(tmp_path / "saved", source)
    target = whole(2)
    dsd.load(tmp_path / "saved", target, rename=[("first/", ""), ("second/", "")])
    assert_same(layers_of(target), layers_of(joined(source)))


@pytest.mark.parametrize("rank", ["first", "second"])
def test_each_rank_loads_its_stages_from_the_whole_model(tmp_path: Path, rank: str) -> None:
    source = whole(1)
    dsd.save(tmp_path / "saved", source)
    target = stages(2)[rank]
    report = dsd.load(tmp_path / "saved", target, strict=False).report
    held = layers_of(target)
    wanted = layers_of(source)
    assert_same(held, {name: wanted[name] for name in held})
    others = "13" if rank == "first" else "02"
    assert sorted(report.unexpected) == sorted(
        f"{place}/layers.{number}.{kind}"
        for place in ("model", "optimizer/state")
        for number in others
        for kind in ("bias", "weight")
    )
    assert not report.missing
    assert not report.mismatched


def test_a_stage_of_the_whole_model_can_be_selected(tmp_path: Path) -> None:
    source = whole(1)
    dsd.save(tmp_path / "saved", source)
    part = Stage(1)
    dsd.load(tmp_path / "saved", {"model": [part]}, select="model/layers.1.*")
    assert_same_tensor(part.layers["1"].weight, source["model"].layers[1].weight)


def test_layers_that_no_stage_has_are_missed_by_the_whole_model(tmp_path: Path) -> None:
    dsd.save(tmp_path / "saved", stages(1)["first"])
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "saved", whole(2))
    assert sorted(caught.value.report.missing) == sorted(
        f"{place}/layers.{number}.{kind}"
        for place in ("model", "optimizer/state")
        for number in "13"
        for kind in ("bias", "weight")
    )


def test_stages_with_other_hyperparameters_do_not_become_one_group_in_silence(
    tmp_path: Path,
) -> None:
    parts = [Stage(0, 1), Stage(2, 3)]
    optimizers = [
        stepped(part.parameters(), lr) for part, lr in zip(parts, (0.1, 0.2), strict=True)
    ]
    dsd.save(tmp_path / "saved", {"model": parts, "optimizer": optimizers})
    target = whole(2)
    before = dsd.snapshot(target)
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "saved", target)
    assert [item.name.rsplit("/", 1)[-1] for item in caught.value.report.mismatched] == ["lr"]
    assert_same(dsd.snapshot(target), before)


@pytest.mark.parametrize("kind", [list, tuple])
def test_one_part_is_a_whole_model(tmp_path: Path, kind: type) -> None:
    model = Whole()
    one = dsd.save(tmp_path / "whole", {"model": model})
    assert dsd.save(tmp_path / "part", {"model": kind([model])}) == one


def test_a_tensor_that_two_parts_share_is_no_conflict(tmp_path: Path) -> None:
    first, last = Holder(embedding=linear()), Holder(embedding=linear(), head=linear())
    last.embedding.weight, last.embedding.bias = first.embedding.weight, first.embedding.bias
    dsd.save(tmp_path / "saved", {"model": [first, last]})
    assert tensor_names(tmp_path / "saved") == [
        "model/embedding.bias",
        "model/embedding.weight",
        "model/head.bias",
        "model/head.weight",
    ]


def test_tensors_of_different_names_that_two_parts_share_are_tied(tmp_path: Path) -> None:
    first, last = Holder(embedding=linear()), Holder(head=linear())
    last.head.weight = first.embedding.weight
    dsd.save(tmp_path / "saved", {"model": [first, last]})
    stored = dsd.load(tmp_path / "saved")["model"]
    assert stored["embedding.weight"] is stored["head.weight"]


def clashing(kind: str) -> list[nn.Module]:
    """Two parts of which each numbers its own experts from 0."""
    if kind == "buffers":
        return [Holder(seen=torch.ones(1)), Holder(seen=torch.zeros(1))]
    if kind == "extra states":
        parts = [nn.Sequential(WithExtra()), nn.Sequential(WithExtra())]
        parts[1][0].weight, parts[1][0].bias = parts[0][0].weight, parts[0][0].bias
        parts[0][0].count = 1000
        parts[1][0].count = 2000
        return parts
    parts = [nn.ModuleList([linear()]), nn.ModuleList([linear()])]
    if kind == "equal content":
        parts[1].load_state_dict(parts[0].state_dict())
    if kind == "compiled":
        parts[1] = torch.compile(parts[1])
    if kind == "another shape":
        parts[1] = nn.ModuleList([nn.Linear(2, 3)])
    return list(parts)


@pytest.mark.parametrize(
    "kind",
    ["other content", "equal content", "compiled", "another shape", "buffers", "extra states"],
)
def test_parts_that_share_a_name_are_refused_before_a_byte_is_written(
    tmp_path: Path, kind: str
) -> None:
    with pytest.raises(MismatchError, match=r"seen|0\.weight|_extra_state") as caught:
        dsd.save(tmp_path / "saved", {"model": clashing(kind)})
    assert caught.value.code == "state_conflict"
    assert not list(tmp_path.iterdir())


def test_parts_that_share_a_name_cannot_be_loaded_either(tmp_path: Path) -> None:
    dsd.save(tmp_path / "saved", {"model": nn.ModuleList([linear()])})
    with pytest.raises(MismatchError):
        dsd.load(tmp_path / "saved", {"model": clashing("other content")})


def test_optimizers_that_hold_the_same_parameter_are_refused(tmp_path: Path) -> None:
    model = linear()
    optimizers = [stepped(model.parameters()), stepped([model.weight])]
    with pytest.raises(MismatchError) as caught:
        dsd.save(tmp_path / "saved", {"model": model, "optimizer": optimizers})
    assert caught.value.code == "state_conflict"
    assert not list(tmp_path.iterdir())


def test_a_list_with_something_else_among_modules_is_a_list(tmp_path: Path) -> None:
    first, second = linear(), linear()
    dsd.save(tmp_path / "saved", {"parts": [first, 3, second]})
    assert_same(
        dsd.load(tmp_path / "saved")["parts"],
        [dict(first.state_dict()), 3, dict(second.state_dict())],
    )


def test_models_in_a_dict_may_share_names(tmp_path: Path) -> None:
    state = {"model": {"a": linear(), "b": torch.compile(linear())}}
    dsd.save(tmp_path / "saved", state)
    other = {"model": {"a": DataParallel(linear()), "b": linear()}}
    dsd.load(tmp_path / "saved", other)
    assert_same(dsd.snapshot(other), dsd.snapshot(state))


# Lists of values are values

GROWN: dict[str, list[Any]] = {
    "dicts": [{"x": 1}, {"y": 2}],
    "numbers": [1, 2.0, None],
    "tensors": [torch.ones(2), {"z": torch.zeros(3)}],
    "nested": [[[1]], (2, [3])],
}


@pytest.mark.parametrize("kind", GROWN)
def test_a_list_that_has_grown_loads_into_one_that_is_still_empty(
    tmp_path: Path, kind: str
) -> None:
    dsd.save(tmp_path / "saved", {"k": GROWN[kind]})
    rest = dsd.load(tmp_path / "saved", {"k": []})
    assert not rest.report
    assert_same(dict(rest), {"k": GROWN[kind]})


@pytest.mark.parametrize(
    "live", [[{"x": 5}], [{"x": 1}, {"x": 1}, {"x": 1}], None, {}, "text"], ids=str
)
def test_a_list_of_values_replaces_whatever_value_was_there(tmp_path: Path, live: Any) -> None:
    dsd.save(tmp_path / "saved", {"k": [{"x": 1}, {"y": 2}]})
    assert_same(dict(dsd.load(tmp_path / "saved", {"k": live})), {"k": [{"x": 1}, {"y": 2}]})


def test_a_list_of_tensors_of_another_length_is_an_error(tmp_path: Path) -> None:
    dsd.save(tmp_path / "saved", {"k": [torch.ones(2), torch.ones(2)]})
    live = torch.zeros(2)
    with pytest.raises(MismatchError):
        dsd.load(tmp_path / "saved", {"k": [live]})
    assert_same_tensor(live, torch.zeros(2))
