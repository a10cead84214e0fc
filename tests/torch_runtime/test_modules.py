"""Modules as people write them: extra state, hooks, own state dicts, parametrizations, odd kinds.

What `torch.save(module.state_dict())` and `load_state_dict` would do is the measure: a module that
is loaded equals the one that was saved, bit for bit, whatever hooks it has.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

import torch.nn.functional as F  # noqa: E402
from exact import assert_same, assert_same_tensor  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.utils import parametrizations, parametrize, prune  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import MismatchError, UnsupportedValueError  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def fault(reason: str) -> pytest.MarkDecorator:
    """Mark what the package gets wrong today."""
    return pytest.mark.xfail(strict=True, reason=reason)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def state_of(module: nn.Module) -> dict[str, Any]:
    return dict(module.state_dict())


def assert_same_modules(found: nn.Module, wanted: nn.Module) -> None:
    assert_same(state_of(found), state_of(wanted))


def carry(path: Path, saved: nn.Module, fresh: nn.Module, **options: Any) -> dsd.Loaded:
    """Save one module, and load it into another."""
    dsd.save(path, {"model": saved})
    return dsd.load(path, {"model": fresh}, **options)


def stored_names(path: Path) -> set[str]:
    """The keys of the model in the checkpoint."""
    return set(dsd.load(path)["model"])


def randomized(module: nn.Module) -> nn.Module:
    """Give every parameter and buffer other values."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.add_(3)
    return module


# Extra state


class Extra(nn.Module):
    """A module with a weight, and an extra state that it is given."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Outer(nn.Module):
    """Extra state of its own, and two levels below."""

    def __init__(self, outer: Any, inner: Any) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"deep": Extra(inner)}))
        self.outer = outer

    def get_extra_state(self) -> Any:
        return self.outer

    def set_extra_state(self, state: Any) -> None:
        self.outer = state


EXTRA_STATES = [
    pytest.param(7, id="int"),
    pytest.param(None, id="None"),
    pytest.param({}, id="empty dict"),
    pytest.param(b"\x00pickle-like\xff", id="bytes"),
    pytest.param(torch.arange(3, dtype=torch.uint8), id="tensor"),
    pytest.param(torch.empty(0, dtype=torch.uint8), id="empty tensor"),
    pytest.param({"scale": torch.tensor([1.5, float("nan")]), "n": 3}, id="dict with tensor"),
    pytest.param([(torch.ones(1), "a"), {1: torch.zeros(2)}], id="list of tuples with tensors"),
    pytest.param(OrderedDict(b=1, a=2.0), id="OrderedDict"),
    pytest.param((1, [True, None], {"x": (torch.float16,)}), id="nested values"),
    pytest.param("text", id="str"),
]


@pytest.mark.parametrize("extra", EXTRA_STATES)
def test_extra_state_comes_back_as_it_was(path, extra):
    fresh = Extra("nothing yet")
    carry(path, Extra(extra), fresh)
    assert_same(fresh.extra, extra)


@pytest.mark.parametrize("extra", EXTRA_STATES)
def test_extra_state_two_levels_down_comes_back_under_its_plain_name(path, extra):
    saved, fresh = Outer(extra, {"at": extra}), Outer("nothing", "yet")
    carry(path, saved, fresh)
    assert {"_extra_state", "middle.1.deep._extra_state"} <= stored_names(path)
    assert_same(fresh.outer, extra)
    assert_same(fresh.middle[1]["deep"].extra, {"at": extra})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(torch.empty(0).byte(), torch.arange(9).byte(), id="from nothing"),
        pytest.param(torch.arange(9).byte(), torch.empty(0).byte(), id="to nothing"),
        pytest.param(torch.zeros(2), torch.arange(6).reshape(2, 3), id="to another dtype"),
        pytest.param(torch.zeros(2), {"now": "a dict"}, id="to a value"),
        pytest.param({"was": torch.zeros(2)}, torch.ones(3), id="from a value"),
    ],
)
def test_extra_state_may_change_shape_and_kind(path, old, new):
    fresh = Extra(old)
    carry(path, Extra(new), fresh)
    assert_same(fresh.extra, new)


def test_extra_state_is_not_written_into_while_it_is_loaded(path):
    mine = torch.zeros(3)
    fresh = Extra(mine)
    carry(path, Extra(torch.ones(3)), fresh)
    assert_same_tensor(mine, torch.zeros(3))
    assert_same_tensor(fresh.extra, torch.ones(3))


def test_extra_state_of_a_compiled_module_has_plain_names(path):
    saved, fresh = Outer(1, {"at": torch.ones(2)}), Outer(0, 0)
    carry(path, torch.compile(saved, backend="eager"), torch.compile(fresh, backend="eager"))
    assert stored_names(path) == set(saved.state_dict())
    assert_same_modules(fresh, saved)


def test_extra_state_of_a_module_compiled_in_part_has_plain_names(path):
    saved, fresh = Outer(1, {"at": torch.ones(2)}), Outer(0, 0)
    wanted = set(saved.state_dict())
    saved.middle[1]["deep"] = torch.compile(saved.middle[1]["deep"], backend="eager")
    carry(path, saved, fresh)
    assert stored_names(path) == wanted
    assert_same(fresh.middle[1]["deep"].extra, {"at": torch.ones(2)})


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    distributed = torch.distributed
    if not distributed.is_available() or distributed.is_initialized():
        pytest.skip("no process group can be made here")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_extra_state_and_buffers_under_ddp_have_plain_names(path, one_rank):
    saved, fresh = Outer(1, {"at": torch.ones(2)}), Outer(0, 0)
    for module in (saved, fresh):
        module.register_buffer("kept", torch.randn(2))
        module.middle.register_buffer("scratch", torch.randn(2), persistent=False)
    wrap = torch.nn.parallel.DistributedDataParallel
    carry(path, wrap(saved), wrap(fresh))
    assert stored_names(path) == set(saved.state_dict())
    assert_same_modules(fresh, saved)


def test_extra_state_of_a_model_on_meta_is_set_and_its_parameters_filled(path):
    saved = Outer({"a": 1}, {"at": torch.ones(2)})
    with torch.device("meta"):
        fresh = Outer(None, None)
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)


def test_extra_state_that_is_a_meta_tensor_becomes_the_stored_one(path):
    fresh = Extra(torch.empty(3, device="meta"))
    carry(path, Extra(torch.ones(3)), fresh)
    assert_same_tensor(fresh.extra, torch.ones(3))


def test_extra_state_that_holds_a_function_is_refused_with_its_path(path):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(path, {"model": Outer(None, {"hook": len})})
    assert "middle.1.deep._extra_state" in caught.value.path_in_tree
    assert not path.exists()


def test_extra_state_missing_from_the_checkpoint_is_reported(path):
    dsd.save(path, {"model": {"weight": torch.zeros(2)}})
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": Extra(1)})
    assert caught.value.report.missing == ["model/_extra_state"]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(5, id="int"),
        pytest.param({"a": [1]}, id="dict"),
        pytest.param(torch.ones(2), id="tensor"),
        pytest.param({"a": torch.ones(2)}, id="dict with tensor"),
    ],
)
def test_extra_state_that_nobody_wants_is_reported(path, extra):
    dsd.save(path, {"model": Extra(extra)})
    fresh = nn.Module()
    fresh.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": fresh})
    assert all("model/_extra_state" in name for name in caught.value.report.unexpected)
    assert len(caught.value.report.unexpected) == 1
    assert_same_tensor(fresh.weight, torch.zeros(2))


def test_an_error_of_set_extra_state_reaches_the_caller(path):
    class Picky(Extra):
        def set_extra_state(self, state: Any) -> None:
            raise KeyError("the state of another version")

    with pytest.raises(KeyError, match="another version"):
        carry(path, Extra(1), Picky())


# Hooks


def test_a_state_dict_pre_hook_is_called_before_saving(path):
    module = nn.Linear(2, 2)
    module.register_buffer("total", torch.zeros(1))

    def update(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        module.total.fill_(4)

    module.register_state_dict_pre_hook(update)
    dsd.save(path, {"model": module})
    assert_same_tensor(dsd.load(path)["model"]["total"], torch.tensor([4.0]))


def test_what_a_state_dict_post_hook_adds_is_saved_and_given_to_load_hooks(path):
    class Counting(nn.Linear):
        def __init__(self, count: int) -> None:
            super().__init__(2, 2)
            self.count = count
            self.register_state_dict_post_hook(self.add)
            self.register_load_state_dict_pre_hook(self.take)

        @staticmethod
        def add(module: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
            state_dict[prefix + "count"] = module.count
            state_dict[prefix + "squares"] = torch.arange(module.count) ** 2

        @staticmethod
        def take(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
            module.count = state_dict.pop(prefix + "count")
            module.squares = state_dict.pop(prefix + "squares")

    saved, fresh = nn.Sequential(Counting(3)), nn.Sequential(Counting(3))
    fresh[0].squares = None
    fresh_count = fresh[0]
    carry(path, saved, fresh)
    assert_same(dsd.load(path)["model"]["0.count"], 3)
    assert_same(fresh_count.count, 3)
    assert_same_tensor(fresh_count.squares, torch.tensor([0, 1, 4]))
    assert_same_tensor(fresh[0].weight, saved[0].weight)


class Kernel(nn.Linear):
    """Its weight is called `kernel` in state dicts."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self._register_state_dict_hook(self.rename)
        self.register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename(module: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
        state_dict[prefix + "kernel"] = state_dict.pop(prefix + "weight")

    @staticmethod
    def rename_back(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")


def test_a_hook_that_renames_decides_the_name_in_the_checkpoint(path):
    saved, fresh = nn.Sequential(Kernel()), nn.Sequential(Kernel())
    carry(path, saved, fresh)
    assert stored_names(path) == {"0.kernel", "0.bias"}
    assert_same_modules(fresh, saved)


def test_an_optimizer_of_a_module_whose_hook_renames_resumes(path):
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(Kernel())
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (fresh, other) = trained(3), trained(0)
    dsd.save(path, {"model": model, "optimizer": optimizer})
    dsd.load(path, {"model": fresh, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


def test_a_model_on_meta_whose_hook_renames_is_filled(path):
    saved = nn.Sequential(Kernel())
    with torch.device("meta"):
        fresh = nn.Sequential(Kernel())
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)


def test_a_hook_that_removes_entries_keeps_them_out_of_the_checkpoint(path):
    def without_frozen(module: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                del state_dict[prefix + name]

    def adapted() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
        model._register_state_dict_hook(without_frozen)
        return model

    saved, fresh = adapted(), adapted()
    base = copy.deepcopy(fresh[0].state_dict())
    carry(path, saved, fresh)
    assert stored_names(path) == {"1.weight", "1.bias"}
    assert_same(fresh[0].state_dict(), base)
    assert_same_tensor(fresh[1].weight, saved[1].weight)


def test_a_hook_that_returns_another_dict_is_followed(path):
    def halves(module: Any, state_dict: Any, prefix: str, metadata: Any) -> Any:
        return OrderedDict((k, v.half()) for k, v in state_dict.items())

    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (saved, fresh):
        module._register_state_dict_hook(halves)
    carry(path, saved, fresh)
    assert_same_tensor(dsd.load(path)["model"]["weight"], saved.weight.half())
    assert_same_tensor(fresh.weight, saved.weight.half().float())


def test_a_load_hook_sees_the_values_of_the_checkpoint_under_the_keys_of_its_module(path):
    seen = {}

    def look(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        seen.update({k: v.clone() for k, v in state_dict.items() if k.startswith(prefix)})

    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fresh[1].register_load_state_dict_pre_hook(look)
    carry(path, saved, fresh)
    assert_same(seen, {name: state_of(saved)[name] for name in ("1.weight", "1.bias")})


def test_a_load_hook_that_changes_a_value_is_followed(path):
    def double(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[prefix + "bias"] = state_dict[prefix + "bias"] * 2

    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    fresh.register_load_state_dict_pre_hook(double)
    carry(path, saved, fresh)
    assert_same_tensor(fresh.bias, saved.bias * 2)


@fault("tensors are read in place before hooks run")
def test_what_a_load_hook_takes_out_of_the_entries_keeps_its_value(path):
    def keep_own(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        del state_dict[prefix + "bias"]

    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    bias = fresh.bias.detach().clone()
    fresh.register_load_state_dict_pre_hook(keep_own)
    carry(path, saved, fresh)
    assert_same_tensor(fresh.bias, bias)
    assert_same_tensor(fresh.weight, saved.weight)


def test_a_load_post_hook_is_called_once_when_the_values_are_there(path):
    calls = []
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    fresh.register_load_state_dict_post_hook(
        lambda module, keys: calls.append(module.weight.detach().clone())
    )
    carry(path, saved, fresh)
    assert_same(calls, [saved.weight.detach()])


def test_an_error_of_a_load_hook_reaches_the_caller(path):
    def refuse(*args: Any) -> None:
        raise LookupError("not this one")

    fresh = nn.Linear(2, 2)
    fresh.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(LookupError, match="not this one"):
        carry(path, nn.Linear(2, 2), fresh)


def test_names_that_a_load_hook_would_upgrade_are_reported_and_can_be_renamed(path):
    def upgrade(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        if prefix + "gamma" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "gamma")

    old = {"gamma": torch.tensor([1.0, 2.0]), "bias": torch.zeros(2)}
    dsd.save(path, {"model": old})
    fresh = nn.LayerNorm(2)
    fresh.register_load_state_dict_pre_hook(upgrade)
    with pytest.raises(MismatchError, match="rename") as caught:
        dsd.load(path, {"model": fresh})
    report = caught.value.report
    assert (report.missing, report.unexpected) == (["model/weight"], ["model/gamma"])
    dsd.load(path, {"model": fresh}, rename={"model/gamma": "model/weight"})
    assert_same_tensor(fresh.weight, old["gamma"])


class Versioned(nn.Module):
    """Since version 2 the weight is stored as it is; before, half of it was."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        version = local_metadata.get("version", None)
        if version is None or version < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize(
    "wrap", [pytest.param(lambda m: m, id="root"), pytest.param(nn.Sequential, id="child")]
)
def test_a_module_of_the_present_version_is_not_upgraded_while_it_is_loaded(path, wrap):
    saved, fresh = wrap(Versioned()), wrap(Versioned())
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)


def test_an_overridden_load_from_state_dict_is_called_with_prefix_and_entries(path):
    class Bounded(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].clamp(-0.1, 0.1)
            super()._load_from_state_dict(state_dict, prefix, *rest)

    saved, fresh = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(Bounded(4, 4))
    carry(path, saved, fresh)
    assert_same_tensor(fresh[0].weight, saved[0].weight.clamp(-0.1, 0.1))


def test_an_overridden_save_to_state_dict_is_followed(path):
    class Transposed(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"].t().contiguous()

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
            super()._load_from_state_dict(state_dict, prefix, *rest)

    saved, fresh = nn.Sequential(Transposed(2, 3)), nn.Sequential(Transposed(2, 3))
    carry(path, saved, fresh)
    assert_same_tensor(dsd.load(path)["model"]["0.weight"], saved[0].weight.t())
    assert_same_modules(fresh, saved)
    assert_same_tensor(fresh[0].weight, saved[0].weight)


@fault("shapes are compared before hooks run")
def test_buffers_that_grow_while_training_are_loaded_by_their_load_hook(path):
    """As observers and memory banks do: the loading module makes room for what comes."""

    class Bank(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.register_buffer("rows", torch.randn(rows, 2))

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            self.rows = torch.empty_like(state_dict[prefix + "rows"])
            super()._load_from_state_dict(state_dict, prefix, *rest)

    saved, fresh = nn.Sequential(Bank(5)), nn.Sequential(Bank(0))
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)


# State dicts of their own


class Fused(nn.Module):
    """Splits its fused weight in state dicts, with the signatures that `nn.Module` has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(6, 2))
        self.out = nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        entries = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, part in zip("qkv", entries.pop(prefix + "qkv").chunk(3), strict=True):
            entries[f"{prefix}{name}.weight"] = part
        return entries

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        parts = [state_dict[f"{name}.weight"] for name in "qkv"]
        rest = {k: v for k, v in state_dict.items() if k[:2] not in ("q.", "k.", "v.")}
        return super().load_state_dict({**rest, "qkv": torch.cat(parts)}, *args, **kwargs)


class FusedPlain(Fused):
    """The same, with methods that take nothing beside the entries."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict)


class FusedCopies(Fused):
    """The same, with copies in place of views."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {k: v.clone() for k, v in super().state_dict(*args, **kwargs).items()}


KINDS_OF_FUSED = [
    pytest.param(Fused, id="signature of nn.Module"),
    pytest.param(FusedPlain, id="no arguments"),
    pytest.param(FusedCopies, id="copies"),
]


@pytest.mark.parametrize("kind", KINDS_OF_FUSED)
def test_a_fused_weight_is_split_when_saved_and_joined_when_loaded(path, kind):
    saved, fresh = kind(), kind()
    parameter = fresh.qkv
    carry(path, saved, fresh)
    assert stored_names(path) == {"q.weight", "k.weight", "v.weight", "out.weight", "out.bias"}
    assert fresh.qkv is parameter
    assert_same_tensor(fresh.qkv, saved.qkv)
    assert_same_tensor(fresh.out.weight, saved.out.weight)


@pytest.mark.parametrize("kind", KINDS_OF_FUSED)
def test_an_optimizer_of_a_fused_weight_resumes(path, kind):
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = kind()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            (model.qkv.sum() + model.out(torch.ones(1, 2)).sum()).backward()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (fresh, other) = trained(2), trained(0)
    dsd.save(path, {"model": model, "optimizer": optimizer})
    dsd.load(path, {"model": fresh, "optimizer": other})
    assert_same(other.state_dict(), optimizer.state_dict())


def test_a_fused_child_is_split_when_saved(path):
    dsd.save(path, {"model": nn.Sequential(Fused())})
    wanted = {"0.q.weight", "0.k.weight", "0.v.weight", "0.out.weight", "0.out.bias"}
    assert stored_names(path) == wanted


def test_a_state_dict_of_values_and_nested_dicts_is_given_back_to_its_module(path):
    class Bundle(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.net = nn.Linear(width, 2)
            self.config: Any = {"width": width, "dtype": torch.float32, "act": ("gelu", None)}

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"config": self.config, "net": self.net.state_dict(), "format": 3}

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
            assert state_dict["format"] == 3
            self.config = state_dict["config"]
            return self.net.load_state_dict(state_dict["net"], strict)

    saved, fresh = Bundle(3), Bundle(3)
    fresh.config = None
    carry(path, saved, fresh)
    assert_same(fresh.config, saved.config)
    assert_same_modules(fresh.net, saved.net)


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(None, id="None"),
        pytest.param([torch.zeros(1)], id="list"),
        pytest.param({1: torch.zeros(1)}, id="int keys"),
        pytest.param({("a", "b"): torch.zeros(1)}, id="tuple keys"),
    ],
)
def test_a_state_dict_that_is_none_is_refused_with_its_place(path, result):
    class Odd(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return result

    with pytest.raises(UnsupportedValueError, match=r"Odd") as caught:
        dsd.save(path, {"parts": {"odd": Odd()}})
    assert caught.value.path_in_tree == "$.parts.odd"
    assert not path.exists()


def test_an_error_of_a_state_dict_reaches_the_caller_and_nothing_is_written(path):
    class Failing(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("busy")

    with pytest.raises(RuntimeError, match="busy"):
        dsd.save(path, {"model": Failing()})
    assert not path.exists()


def test_the_names_of_a_module_that_overrides_named_parameters_are_its_own(path):
    class Trainable(nn.Sequential):
        """As adapters do: lists what is trained only, under names of its choice."""

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            for name, parameter in super().named_parameters(*args, **kwargs):
                if name.startswith("1."):
                    yield "adapter." + name, parameter

    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Trainable(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.Adam(model.named_parameters())
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (fresh, other) = trained(2), trained(0)
    dsd.save(path, {"model": model, "optimizer": optimizer})
    dsd.load(path, {"model": fresh, "optimizer": other})
    assert stored_names(path) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(dsd.load(path)["optimizer"]["state"]) == {"1.weight", "1.bias"}
    assert_same_modules(fresh, model)
    assert_same(other.state_dict(), optimizer.state_dict())


def test_a_module_that_forwards_unknown_attributes_is_saved_as_itself(path):
    class Forwarding(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    saved, fresh = Forwarding(nn.Linear(2, 2)), Forwarding(nn.Linear(2, 2))
    carry(path, saved, fresh)
    assert stored_names(path) == {"inner.weight", "inner.bias"}
    assert_same_modules(fresh, saved)


# Parametrizations and reparametrizations


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


class Scale(nn.Module):
    """A parametrization with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(1) + 0.5)
        self.register_buffer("offset", torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset


def parametrized(*steps: nn.Module) -> nn.Module:
    module = nn.Linear(3, 3)
    for step in steps:
        parametrize.register_parametrization(module, "weight", step)
    return module


@pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm`? is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: parametrizations.weight_norm(nn.Linear(3, 3)), id="weight_norm"),
        pytest.param(lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), id="spectral_norm"),
        pytest.param(lambda: parametrizations.orthogonal(nn.Linear(3, 3)), id="orthogonal"),
        pytest.param(
            lambda: parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley"),
            id="orthogonal by cayley",
        ),
        pytest.param(
            lambda: parametrizations.orthogonal(nn.Linear(3, 2), use_trivialization=False),
            id="orthogonal without trivialization",
        ),
        pytest.param(lambda: parametrized(Symmetric()), id="user-made"),
        pytest.param(lambda: parametrized(Symmetric(), Scale(), Scale()), id="several at once"),
        pytest.param(lambda: nn.utils.weight_norm(nn.Linear(3, 3)), id="legacy weight_norm"),
        pytest.param(lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), id="legacy spectral_norm"),
    ],
)
def test_a_parametrized_module_computes_the_same_after_loading(path, make):
    saved, fresh = nn.Sequential(make()).eval(), nn.Sequential(make()).eval()
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)
    x = torch.randn(4, 3)
    assert_same_tensor(fresh(x), saved(x))


def test_saving_does_not_run_a_parametrization(path):
    saved = parametrizations.spectral_norm(nn.Linear(3, 3)).train()
    before = copy.deepcopy(state_of(saved))
    dsd.save(path, {"model": saved})
    assert_same(state_of(saved), before)


def test_a_parametrized_module_resumes_its_optimizer(path):
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = parametrizations.weight_norm(nn.Linear(3, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(2)
    fresh, other = trained(0)
    dsd.save(path, {"model": model, "optimizer": optimizer})
    dsd.load(path, {"model": fresh, "optimizer": other})
    for one, two in ((model, optimizer), (fresh, other)):
        two.zero_grad()
        one(torch.ones(1, 3)).square().sum().backward()
        two.step()
    assert_same_modules(fresh, model)


def test_a_parametrized_module_is_not_loaded_into_a_plain_one(path):
    with pytest.raises(MismatchError) as caught:
        carry(path, parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    assert caught.value.report.missing == ["model/weight"]


def test_parametrized_tensors_on_meta_are_filled(path):
    saved = parametrized(Symmetric(), Scale())
    with torch.device("meta"):
        fresh = parametrized(Symmetric(), Scale())
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)
    assert_same_tensor(fresh.weight, saved.weight)


# Lazy modules


def lazy_net() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyBatchNorm1d())


def test_a_lazy_module_is_refused_before_it_has_shapes(path):
    with pytest.raises(UnsupportedValueError, match="call the module once") as caught:
        dsd.save(path, {"model": {"net": lazy_net()}})
    assert caught.value.path_in_tree == "$.model.net"
    assert all(name in str(caught.value) for name in ("0.weight", "2.running_mean"))
    assert not path.exists()


def test_a_lazy_module_is_saved_and_loaded_once_it_has_shapes(path):
    saved, fresh = lazy_net(), lazy_net()
    x = torch.randn(4, 5)
    saved(x)
    fresh(x)
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)


def test_nothing_is_loaded_into_a_lazy_module_without_shapes(path):
    saved = lazy_net()
    saved(torch.randn(4, 5))
    with pytest.raises(UnsupportedValueError, match="call the module once"):
        carry(path, saved, lazy_net())


@pytest.mark.parametrize("kind", ["UninitializedParameter", "UninitializedBuffer"])
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda value: value, id="alone"),
        pytest.param(lambda value: {"deep": [value]}, id="in a list"),
    ],
)
def test_a_tensor_without_a_shape_is_refused_outside_of_modules_too(path, kind, wrap):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(path, {"x": wrap(getattr(nn.parameter, kind)())})
    assert caught.value.path_in_tree.startswith("$.x")
    assert not path.exists()


# Containers and their names

ODD_KEYS = ["a/b", "%2F", "%", "@", "@0", " ", "ü∂", "0", "007", "weight", "module", "_orig_mod"]
ODD_KEYS += ["_extra_state", "*", "[a]", "?", "a\nb", "\x00", "-", "params", "state", "x" * 300]


@pytest.mark.parametrize("key", ODD_KEYS, ids=repr)
def test_a_parameter_dict_may_have_odd_keys(path, key):
    saved = nn.ParameterDict({key: torch.randn(2), "z": torch.randn(1)})
    fresh = nn.ParameterDict({key: torch.zeros(2), "z": torch.zeros(1)})
    carry(path, saved, fresh)
    assert stored_names(path) == {key, "z"}
    assert_same_modules(fresh, saved)


@pytest.mark.parametrize("key", ODD_KEYS, ids=repr)
def test_a_module_dict_may_have_odd_keys_and_an_optimizer(path, key):
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({key: nn.Linear(2, 2), "z": nn.Linear(2, 1)})
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model["z"](model[key](torch.ones(1, 2))).sum().backward()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (fresh, other) = trained(1), trained(0)
    dsd.save(path, {"model": model, "optimizer": optimizer})
    dsd.load(path, {"model": fresh, "optimizer": other})
    assert stored_names(path) == set(model.state_dict())
    assert_same_modules(fresh, model)
    assert_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("key", ODD_KEYS, ids=repr)
def test_a_model_may_have_an_odd_name_in_the_state(path, key):
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9) for m in (saved, fresh)]
    saved(torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    dsd.save(path, {key: saved, "optim": optimizers[0]})
    dsd.load(path, {key: fresh, "optim": optimizers[1]})
    assert_same_modules(fresh, saved)
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_a_parameter_list_comes_back_in_order(path):
    saved = nn.ParameterList([torch.randn(n) for n in range(12)])
    fresh = nn.ParameterList([torch.zeros(n) for n in range(12)])
    carry(path, saved, fresh)
    for index in range(12):
        assert_same_tensor(fresh[index], saved[index])


def test_a_longer_list_of_modules_names_what_is_missing(path):
    saved = nn.ModuleList([nn.Linear(1, 1) for _ in range(2)])
    fresh = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])
    with pytest.raises(MismatchError) as caught:
        carry(path, saved, fresh)
    assert sorted(caught.value.report.missing) == ["model/2.bias", "model/2.weight"]
    assert caught.value.report.unexpected == []


class Optional(nn.Module):
    """A parameter, a buffer and a module, each of which may be None."""

    def __init__(self, there: bool) -> None:
        super().__init__()
        self.register_parameter("gain", nn.Parameter(torch.randn(2)) if there else None)
        self.register_buffer("mean", torch.randn(2) if there else None)
        self.child = nn.Linear(1, 1) if there else None
        self.always = nn.Parameter(torch.randn(2))


def test_parameters_and_buffers_that_are_none_are_left_out(path):
    saved, fresh = Optional(False), Optional(False)
    carry(path, saved, fresh)
    assert stored_names(path) == {"always"}
    assert_same_modules(fresh, saved)
    assert fresh.gain is None


@pytest.mark.parametrize("there", [True, False], ids=["saved with", "saved without"])
def test_what_is_none_on_one_side_only_is_reported(path, there):
    names = ["model/child.bias", "model/child.weight", "model/gain", "model/mean"]
    with pytest.raises(MismatchError) as caught:
        carry(path, Optional(there), Optional(not there))
    report = caught.value.report
    assert sorted(report.unexpected) == (names if there else [])
    assert sorted(report.missing) == ([] if there else names)


def with_buffers() -> nn.Module:
    inner = nn.Module()
    inner.register_buffer("kept", torch.randn(3))
    inner.register_buffer("scratch", torch.randn(3), persistent=False)
    outer = nn.Module()
    outer.inner = inner
    outer.register_buffer("kept", torch.arange(3))
    outer.register_buffer("scratch", torch.randn(1), persistent=False)
    return outer


def test_buffers_that_are_not_persistent_are_neither_saved_nor_wanted_nor_changed(path):
    saved, fresh = with_buffers(), with_buffers()
    scratch = fresh.inner.scratch.clone(), fresh.scratch.clone()
    carry(path, saved, fresh)
    assert stored_names(path) == {"kept", "inner.kept"}
    assert_same_modules(fresh, saved)
    assert_same((fresh.inner.scratch, fresh.scratch), scratch)


def test_buffers_that_are_not_persistent_and_on_meta_are_reported(path):
    with torch.device("meta"):
        fresh = with_buffers()
    with pytest.raises(MismatchError) as caught:
        carry(path, with_buffers(), fresh)
    names = ["model/inner.scratch", "model/scratch"]
    assert sorted(caught.value.report.uninitialized) == names
    assert fresh.kept.is_meta


def test_a_buffer_that_became_persistent_is_missing(path):
    fresh = with_buffers()
    fresh.register_buffer("scratch", torch.zeros(1), persistent=True)
    with pytest.raises(MismatchError) as caught:
        carry(path, with_buffers(), fresh)
    assert caught.value.report.missing == ["model/scratch"]


class Shared(nn.Module):
    """One block at two places, or two blocks."""

    def __init__(self, shared: bool = True) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(2)
        self.second = self.first if shared else nn.BatchNorm1d(2)


def test_a_module_at_two_places_is_stored_once_and_stays_one(path):
    saved, fresh = randomized(Shared()), Shared()
    carry(path, saved, fresh)
    with dsdformat.open(path) as checkpoint:
        assert len(list(checkpoint)) == 5
    assert stored_names(path) == set(saved.state_dict())
    assert fresh.first is fresh.second
    assert_same_modules(fresh, saved)


def test_a_module_at_two_places_is_loaded_into_two(path):
    saved, fresh = randomized(Shared()), Shared(shared=False)
    carry(path, saved, fresh)
    assert fresh.first.weight is not fresh.second.weight
    assert_same_modules(fresh, saved)


def test_two_modules_that_differ_are_not_loaded_into_one(path):
    saved = Shared(shared=False)
    randomized(saved.second)
    fresh = Shared()
    before = copy.deepcopy(state_of(fresh))
    with pytest.raises(MismatchError) as caught:
        carry(path, saved, fresh)
    assert {item.what for item in caught.value.report.mismatched} == {"tie"}
    assert_same(state_of(fresh), before)


def test_two_modules_that_are_equal_are_loaded_into_one(path):
    saved, fresh = Shared(shared=False), randomized(Shared())
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)


def test_models_of_one_state_may_share_a_module(path):
    def pair() -> dict[str, nn.Module]:
        body = nn.Linear(2, 2)
        return {
            "policy": nn.Sequential(body, nn.Linear(2, 1)),
            "value": nn.Sequential(body, nn.Linear(2, 1)),
        }

    saved, fresh = pair(), pair()
    dsd.save(path, saved)
    dsd.load(path, fresh)
    assert fresh["policy"][0].weight is fresh["value"][0].weight
    for name in saved:
        assert_same_modules(fresh[name], saved[name])


# Modules of torch


def recurrent(kind: type[nn.Module], **options: Any) -> nn.Module:
    return kind(3, 4, batch_first=True, **options)


RECURRENT = [
    pytest.param(lambda: recurrent(nn.LSTM, num_layers=2), id="LSTM"),
    pytest.param(lambda: recurrent(nn.LSTM, bidirectional=True), id="LSTM of two directions"),
    pytest.param(lambda: recurrent(nn.LSTM, proj_size=2), id="LSTM with projection"),
    pytest.param(lambda: recurrent(nn.LSTM, bias=False), id="LSTM without bias"),
    pytest.param(lambda: recurrent(nn.GRU), id="GRU"),
    pytest.param(lambda: recurrent(nn.RNN), id="RNN"),
]


@pytest.mark.parametrize("make", RECURRENT)
def test_a_recurrent_module_runs_on_its_loaded_weights(path, make):
    saved, fresh = make(), make()
    carry(path, saved, fresh)
    x = torch.randn(2, 5, 3)
    assert_same_tensor(fresh(x)[0], saved(x)[0])
    flat = [id(weight) for weight in fresh._flat_weights]
    assert flat == [id(getattr(fresh, name)) for name in fresh._flat_weights_names]


@pytest.mark.parametrize("make", RECURRENT)
def test_a_recurrent_module_on_meta_is_filled_and_runs(path, make):
    saved = make()
    with torch.device("meta"):
        fresh = make()
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)
    x = torch.randn(2, 5, 3)
    assert_same_tensor(fresh(x)[0], saved(x)[0])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.MultiheadAttention(4, 2), id="fused"),
        pytest.param(lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5), id="separate"),
        pytest.param(lambda: nn.MultiheadAttention(4, 2, bias=False), id="no bias"),
        pytest.param(lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), id="bias of k and v"),
        pytest.param(lambda: nn.BatchNorm2d(3), id="BatchNorm"),
        pytest.param(lambda: nn.BatchNorm2d(3, affine=False), id="BatchNorm without weights"),
        pytest.param(
            lambda: nn.BatchNorm2d(3, track_running_stats=False), id="BatchNorm, no stats"
        ),
        pytest.param(lambda: nn.BatchNorm2d(3, momentum=None), id="BatchNorm with momentum None"),
        pytest.param(lambda: nn.InstanceNorm1d(3, track_running_stats=True), id="InstanceNorm"),
        pytest.param(lambda: nn.SyncBatchNorm(3), id="SyncBatchNorm"),
        pytest.param(lambda: nn.Embedding(4, 3, padding_idx=1), id="Embedding with padding"),
        pytest.param(lambda: nn.EmbeddingBag(4, 3, mode="max"), id="EmbeddingBag"),
        pytest.param(lambda: nn.Bilinear(2, 3, 4), id="Bilinear"),
        pytest.param(lambda: nn.PReLU(3), id="PReLU"),
        pytest.param(lambda: nn.LSTMCell(2, 3), id="LSTMCell"),
        pytest.param(lambda: nn.TransformerDecoderLayer(4, 2, 8), id="TransformerDecoderLayer"),
        pytest.param(lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2]), id="AdaptiveLogSoftmax"),
        pytest.param(lambda: nn.ConvTranspose3d(2, 2, 1), id="ConvTranspose3d"),
        pytest.param(nn.Identity, id="Identity"),
        pytest.param(lambda: nn.CrossEntropyLoss(weight=torch.rand(3)), id="loss with weights"),
        pytest.param(lambda: nn.Linear(2, 2).double(), id="float64"),
        pytest.param(lambda: nn.Linear(2, 2).bfloat16(), id="bfloat16"),
        pytest.param(lambda: nn.Linear(2, 2, dtype=torch.complex64), id="complex64"),
        pytest.param(lambda: nn.Linear(0, 2, bias=False), id="nothing in it"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_module_of_torch_comes_back(path, make):
    saved, fresh = make(), make()
    with torch.no_grad():
        for tensor in [*saved.parameters(), *saved.buffers()]:
            tensor.copy_(torch.randn(tensor.shape) * 3)
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)


def test_the_statistics_of_a_batch_norm_go_on(path):
    saved, fresh = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for _ in range(3):
        saved(torch.randn(8, 3))
    carry(path, saved, fresh)
    x = torch.randn(8, 3)
    assert_same_tensor(fresh(x), saved(x))
    assert_same_modules(fresh, saved)
    assert fresh.num_batches_tracked.item() == 4


def test_the_padding_row_of_an_embedding_is_loaded_as_it_was_saved(path):
    saved, fresh = nn.Embedding(4, 3, padding_idx=1), nn.Embedding(4, 3, padding_idx=1)
    with torch.no_grad():
        saved.weight[1] = 7.0
    carry(path, saved, fresh)
    assert_same_tensor(fresh.weight, saved.weight)


def quantized(how: str) -> nn.Module:
    if how == "dynamic":
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)))
    return torch.ao.nn.quantized.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:.*deprecat:DeprecationWarning")
@pytest.mark.parametrize("how", ["dynamic", "static"])
def test_a_quantized_module_is_refused_with_the_place_of_what_cannot_be_stored(path, how):
    try:
        module = quantized(how)
    except (RuntimeError, NotImplementedError):
        pytest.skip("this torch quantizes nothing on this machine")
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(path, {"model": module})
    assert "_packed_params" in caught.value.path_in_tree
    assert not path.exists()


def pruned() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    prune.l1_unstructured(module[0], "weight", amount=0.5)
    prune.random_structured(module[2], "weight", amount=1, dim=0)
    return module


def test_a_pruned_module_comes_back_with_its_masks(path):
    saved, fresh = pruned(), pruned()
    carry(path, saved, fresh)
    assert {"0.weight_orig", "0.weight_mask"} <= stored_names(path)
    assert_same_modules(fresh, saved)
    x = torch.randn(3, 4)
    assert_same_tensor(fresh(x), saved(x))


def test_a_pruned_module_is_not_loaded_into_one_that_is_not(path):
    with pytest.raises(MismatchError) as caught:
        carry(path, pruned(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert sorted(caught.value.report.missing) == ["model/0.weight", "model/2.weight"]


def test_a_module_whose_pruning_was_made_permanent_is_loaded_into_a_plain_one(path):
    saved, fresh = pruned(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    prune.remove(saved[0], "weight")
    prune.remove(saved[2], "weight")
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="mean"),
        pytest.param({"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, id="moving average"),
        pytest.param({"avg_fn": lambda a, b, n: a * 0.5 + b * 0.5}, id="function of its own"),
        pytest.param(
            {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}, id="with buffers"
        ),
    ],
)
def test_an_averaged_model_goes_on_averaging(path, options):
    def averaging() -> tuple[nn.Module, AveragedModel]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return model, AveragedModel(model, **options)

    (model, averaged), (fresh, other) = averaging(), averaging()
    for _ in range(3):
        averaged.update_parameters(randomized(model))
    dsd.save(path, {"model": model, "ema": averaged})
    dsd.load(path, {"model": fresh, "ema": other})
    assert set(dsd.load(path)["ema"]) == set(averaged.state_dict())
    assert_same_modules(other, averaged)

    randomized(model)
    fresh.load_state_dict(model.state_dict())
    averaged.update_parameters(model)
    other.update_parameters(fresh)
    assert_same_modules(other, averaged)


def net() -> nn.Module:
    return nn.Sequential(OrderedDict(body=nn.Linear(2, 3), norm=nn.BatchNorm1d(3)))


def test_a_scripted_module_is_saved_under_the_names_of_the_plain_one(path):
    saved, fresh = torch.jit.script(randomized(net())), net()
    carry(path, saved, fresh)
    assert stored_names(path) == set(fresh.state_dict())
    assert_same(state_of(fresh), state_of(saved))


def test_a_checkpoint_is_loaded_into_a_scripted_module(path):
    saved, fresh = randomized(net()), torch.jit.script(net())
    carry(path, saved, fresh)
    assert_same(state_of(fresh), state_of(saved))
    x = torch.randn(2, 2)
    assert_same_tensor(fresh.eval()(x), saved.eval()(x))


@pytest.mark.filterwarnings("ignore:.*deprecat:DeprecationWarning")
def test_a_traced_module_is_saved_under_the_names_of_the_plain_one(path):
    original = randomized(net()).eval()
    saved, fresh = torch.jit.trace(original, torch.randn(2, 2)), net()
    carry(path, saved, fresh)
    assert_same_modules(fresh, original)


def test_a_traced_graph_and_its_module_load_from_each_other(path):
    original = randomized(net())
    traced = torch.fx.symbolic_trace(original)
    fresh, graph = net(), torch.fx.symbolic_trace(net())
    carry(path, traced, fresh)
    dsd.load(path, {"model": graph})
    assert_same_modules(fresh, original)
    assert_same_modules(graph, original)


def test_parameters_as_a_plain_dict_are_loaded_in_place(path):
    saved, fresh = net(), net()
    for module in (saved, fresh):
        module.requires_grad_(True)

    def functional(module: nn.Module) -> dict[str, Any]:
        return {"params": dict(module.named_parameters()), "buffers": dict(module.named_buffers())}

    dsd.save(path, functional(randomized(saved)))
    dsd.load(path, functional(fresh))
    assert_same_modules(fresh, saved)
    assert fresh.body.weight.requires_grad
    assert fresh.body.weight.is_leaf


def test_a_stacked_ensemble_comes_back(path):
    models = [nn.Linear(2, 2) for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    dsd.save(path, {"params": params, "buffers": buffers})
    fresh = {name: torch.zeros_like(value) for name, value in params.items()}
    dsd.load(path, {"params": fresh, "buffers": {}})
    assert_same(fresh, {name: value.detach() for name, value in params.items()})


# Tensors that are not one block


class Pair(torch.Tensor):
    """Two tensors, of which it shows the sum."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device
        )

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __repr__(self) -> str:  # type: ignore[override]
        return "Pair"

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def part(name: str) -> Any:
            def pick(value: Any) -> Any:
                return getattr(value, name) if isinstance(value, Pair) else value

            return func(*map(pick, args), **{k: pick(v) for k, v in (kwargs or {}).items()})

        one, other = part("a"), part("b")
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.detach_.default):
            return args[0]
        return Pair(one, other) if isinstance(one, Tensor) else one


def paired() -> nn.Module:
    module = nn.Linear(2, 3)
    module.weight = nn.Parameter(Pair(torch.randn(3, 2), torch.randn(3, 2)))
    return module


def test_a_parameter_that_wraps_tensors_is_read_into_what_it_wraps(path):
    saved, fresh = paired(), paired()
    weight, inner = fresh.weight, fresh.weight.a
    address = inner.data_ptr()
    carry(path, saved, fresh)
    assert fresh.weight is weight
    assert fresh.weight.a.data_ptr() == address
    assert_same(state_of(fresh), state_of(saved))


def test_a_tensor_subclass_is_made_only_if_it_is_allowed(path):
    saved = paired()
    dsd.save(path, {"model": saved})
    with pytest.raises(UnsupportedValueError, match=r"types="):
        dsd.load(path)
    loaded = dsd.load(path, types=[Pair])["model"]
    assert_same(loaded, {k: v.detach() for k, v in saved.state_dict().items()})


def test_a_plain_parameter_is_not_loaded_into_one_that_wraps_tensors(path):
    fresh = paired()
    before = copy.deepcopy(fresh.weight.a)
    with pytest.raises(MismatchError) as caught:
        carry(path, nn.Linear(2, 3), fresh)
    assert [item.name for item in caught.value.report.mismatched] == ["model/weight"]
    assert_same_tensor(fresh.weight.a, before)


def test_a_parameter_that_wraps_tensors_is_not_loaded_into_a_plain_one(path):
    fresh = nn.Linear(2, 3)
    before = copy.deepcopy(state_of(fresh))
    with pytest.raises(MismatchError) as caught:
        carry(path, paired(), fresh, types=[Pair])
    assert [item.name for item in caught.value.report.mismatched] == ["model/weight"]
    assert_same(state_of(fresh), before)


DENSE = torch.tensor([[0.0, 1.5, 0.0, 0.0], [2.0, 0.0, 0.0, -0.0], [0.0] * 4, [1.0] * 4])
LAYOUTS: list[Any] = [
    pytest.param(lambda x: x.to_sparse(), id="coo"),
    pytest.param(lambda x: x.to_sparse_csr(), id="csr"),
    pytest.param(lambda x: x.to_sparse_csc(), id="csc"),
    pytest.param(lambda x: x.to_sparse_bsr((2, 2)), id="bsr"),
    pytest.param(lambda x: x.to_sparse_bsc((2, 2)), id="bsc"),
]


@pytest.mark.parametrize("sparse", LAYOUTS)
def test_a_sparse_buffer_comes_back_with_more_or_fewer_elements(path, sparse):
    def graph(adjacency: Tensor) -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4))
        module[0].register_buffer("adjacency", sparse(adjacency))
        return module

    saved, fresh = graph(DENSE), graph(torch.eye(4))
    buffer = fresh[0].adjacency
    carry(path, saved, fresh)
    assert fresh[0].adjacency is buffer
    assert_same(state_of(fresh), state_of(saved))
    assert_same(dsd.load(path)["model"], state_of(saved))


def test_a_sparse_buffer_is_not_loaded_into_a_dense_one(path):
    saved, fresh = nn.Module(), nn.Module()
    saved.register_buffer("x", DENSE.to_sparse())
    fresh.register_buffer("x", torch.zeros(4, 4))
    with pytest.raises(MismatchError) as caught:
        carry(path, saved, fresh)
    assert [item.what for item in caught.value.report.mismatched] == ["kind"]
    assert_same_tensor(fresh.x, torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        pytest.param(torch.eye(4).to_sparse(), torch.eye(3).to_sparse(), id="shape"),
        pytest.param(torch.eye(4).double().to_sparse(), torch.eye(4).to_sparse(), id="dtype"),
    ],
)
def test_a_sparse_buffer_of_another_shape_or_dtype_is_a_mismatch(path, stored, live):
    saved, fresh = nn.Module(), nn.Module()
    saved.register_buffer("x", stored)
    fresh.register_buffer("x", live)
    before = live.clone()
    with pytest.raises(MismatchError) as caught:
        carry(path, saved, fresh)
    assert [item.name for item in caught.value.report.mismatched] == ["model/x"]
    assert_same_tensor(fresh.x, before)


def jagged(*lengths: int) -> Tensor:
    rows = [torch.randn(length, 2) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def strided_nested(*lengths: int) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(length, 2) for length in lengths])


NESTED = [pytest.param(jagged, id="jagged"), pytest.param(strided_nested, id="strided")]


@pytest.mark.parametrize("make", NESTED)
def test_a_nested_tensor_in_a_state_comes_back(path, make):
    wanted = make(2, 0, 3)
    dsd.save(path, {"batch": {"x": wanted, "n": 3}})
    assert_same(dsd.load(path), {"batch": {"x": wanted, "n": 3}})


@pytest.mark.parametrize("lengths", [(1, 1), (2, 4), (7, 1)], ids=["shorter", "equal", "longer"])
def test_a_jagged_buffer_is_loaded_with_its_lengths(path, lengths):
    saved, fresh = nn.Module(), nn.Module()
    saved.register_buffer("rows", jagged(2, 4))
    fresh.register_buffer("rows", jagged(*lengths))
    buffer = fresh.rows
    carry(path, saved, fresh)
    assert fresh.rows is buffer
    assert_same_tensor(fresh.rows, saved.rows)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(jagged, id="jagged"),
        pytest.param(strided_nested, id="strided"),
    ],
)
def test_a_nested_tensor_of_a_state_is_loaded_in_place(path, make):
    wanted, fresh = make(2, 4), make(1, 3)
    dsd.save(path, {"x": wanted})
    dsd.load(path, {"x": fresh})
    assert_same_tensor(fresh, wanted)


def test_a_quantized_tensor_is_refused_with_its_place(path):
    values = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    with pytest.raises(UnsupportedValueError, match="quantized") as caught:
        dsd.save(path, {"x": [values]})
    assert caught.value.path_in_tree == "$.x[0]"
    assert not path.exists()


# Parameters on meta stay the objects that others hold


class Tagged(nn.Parameter):
    """A kind of parameter of the user's."""


def on_meta(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = parameter
    return module


META: list[Any] = [
    pytest.param(nn.Parameter, id="parameter"),
    pytest.param(Tagged, id="of the user's kind"),
    pytest.param(lambda x: nn.Parameter(x, requires_grad=False), id="frozen"),
]


@pytest.mark.parametrize("make", META)
def test_a_parameter_on_meta_keeps_its_type_flags_and_attributes(path, make):
    parameter = make(torch.empty(2, device="meta"))
    parameter.tag = {"lr_scale": 3}
    kind, requires_grad = type(parameter), parameter.requires_grad
    module = on_meta(parameter)
    dsd.save(path, {"m": {"weight": torch.ones(2)}})
    dsd.load(path, {"m": module})
    assert module.weight is parameter
    assert (type(parameter), parameter.requires_grad) == (kind, requires_grad)
    assert parameter.tag == {"lr_scale": 3}
    assert_same_tensor(parameter, torch.ones(2))


def test_an_optimizer_made_on_meta_trains_what_was_loaded(path):
    module = on_meta(nn.Parameter(torch.empty(2, device="meta")))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    dsd.save(path, {"m": {"weight": torch.ones(2)}})
    dsd.load(path, {"m": module})
    module.weight.sum().backward()
    optimizer.step()
    assert_same_tensor(module.weight, torch.zeros(2))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_on_meta_are_called_or_loading_is_refused(path, kind):
    """As those of an optimizer that steps in the backward pass."""
    calls: list[int] = []
    module = on_meta(nn.Parameter(torch.empty(2, device="meta")))
    getattr(module.weight, kind)(lambda *args: calls.append(1) and None)
    dsd.save(path, {"m": {"weight": torch.ones(2)}})
    try:
        dsd.load(path, {"m": module})
    except dsdformat.DsdError:
        assert module.weight.is_meta
        return
    module.weight.sum().backward()
    assert calls == [1]


def test_a_buffer_on_meta_stays_the_object_that_others_hold(path):
    module = nn.Module()
    module.register_buffer("total", torch.empty(2, device="meta", dtype=torch.int64))
    held = module.total
    dsd.save(path, {"m": {"total": torch.tensor([1, 2])}})
    dsd.load(path, {"m": module})
    assert module.total is held
    assert_same_tensor(held, torch.tensor([1, 2]))


# What saving and loading leave alone


def everything_of(module: nn.Module) -> Any:
    """Whatever a save could change by accident."""
    tensors = [*module.parameters(), *module.buffers()]
    hooks = [
        len(getattr(part, name))
        for part in module.modules()
        for name in sorted(vars(part))
        if "hooks" in name and getattr(part, name) is not None
    ]
    facts = [(t.data_ptr(), t._version, t.requires_grad, t.is_leaf, t.stride()) for t in tensors]
    grads = [None if t.grad is None else t.grad.clone() for t in tensors]
    return facts, grads, hooks, [part.training for part in module.modules()], state_of(module)


def test_saving_changes_nothing_in_a_module(path):
    module = net().train()
    module.body.weight.register_hook(lambda grad: grad)
    module(torch.randn(4, 2)).square().sum().backward()
    before = copy.deepcopy(everything_of(module))
    dsd.save(path, {"model": module})
    assert_same(everything_of(module), before)


def test_loading_leaves_gradients_modes_and_flags_alone(path):
    module = net().eval()
    module.body.requires_grad_(False)
    module.norm.weight.grad = torch.ones(3)
    parameters = list(module.parameters())
    carry(path, randomized(net()), module)
    assert not any(part.training for part in module.modules())
    assert [p.requires_grad for p in module.parameters()] == [False, False, True, True]
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert_same_tensor(module.norm.weight.grad, torch.ones(3))


def test_a_loaded_module_trains_on(path):
    model = net()
    carry(path, net(), model)
    model(torch.randn(4, 2)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_graph_made_before_loading_notices_that_its_weights_changed(path):
    """As after `load_state_dict`: a stale backward is an error, and never a wrong gradient."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    carry(path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.randn(3, 4).t(), id="transposed"),
        pytest.param(
            lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), id="nhwc"
        ),
        pytest.param(lambda: torch.randn(8, 4)[::2, 1:3], id="strided view"),
        pytest.param(lambda: torch.randn(3, 4)[:, 1], id="column"),
    ],
)
def test_a_parameter_keeps_its_memory_and_strides(path, make):
    saved, fresh = nn.Module(), nn.Module()
    saved.weight, fresh.weight = nn.Parameter(make()), nn.Parameter(make())
    place = fresh.weight.data_ptr(), fresh.weight.stride()
    carry(path, saved, fresh)
    assert (fresh.weight.data_ptr(), fresh.weight.stride()) == place
    assert_same_tensor(fresh.weight, saved.weight)


@pytest.mark.parametrize(
    "live",
    [
        pytest.param(torch.empty(0).expand(3, 0), id="no elements"),
        pytest.param(torch.zeros(4).as_strided((1, 4), (0, 1)), id="a dim of one"),
        pytest.param(torch.zeros(1).expand(1), id="one element"),
    ],
)
def test_a_stride_of_zero_does_not_matter_where_no_elements_share_memory(path, live):
    wanted = torch.full(live.shape, 3.0)
    dsd.save(path, {"x": wanted})
    dsd.load(path, {"x": live})
    assert_same_tensor(live, wanted)


def test_a_tensor_whose_elements_share_memory_is_not_loaded_in_silence(path):
    live = torch.zeros(1).expand(4)
    dsd.save(path, {"x": torch.arange(4.0)})
    with pytest.raises(MismatchError):
        dsd.load(path, {"x": live})
    assert_same_tensor(live, torch.zeros(4))


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda: torch.zeros(2, 3, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(lambda: torch._neg_view(torch.zeros(2, 3)), id="negative"),
        pytest.param(lambda: torch.zeros(2, 3, dtype=torch.complex64).conj().t(), id="adjoint"),
    ],
)
@pytest.mark.parametrize("wrap", [torch.Tensor.detach, nn.Parameter], ids=["tensor", "parameter"])
def test_a_lazily_conjugated_or_negated_tensor_is_loaded(path, view, wrap):
    live = wrap(view())
    wanted = torch.arange(1, 7).reshape(live.shape).to(live.dtype) * (
        1 + 2j if live.is_complex() else 1
    )
    dsd.save(path, {"x": wanted})
    dsd.load(path, {"x": live})
    assert_same_tensor(live, wanted)


def test_a_parameter_in_a_larger_memory_leaves_its_neighbours_alone(path):
    flat = torch.full((10,), 7.0)
    module = nn.Module()
    module.weight = nn.Parameter(flat[2:8].view(2, 3))
    dsd.save(path, {"model": {"weight": torch.ones(2, 3)}})
    dsd.load(path, {"model": module})
    assert_same_tensor(flat, torch.tensor([7.0] * 2 + [1.0] * 6 + [7.0] * 2))


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_saving_and_loading_do_not_heed_a_default_device(path, mmap):
    saved, fresh = net(), net()
    with torch.device("meta"):
        dsd.save(path, {"model": saved})
        dsd.load(path, {"model": fresh}, mmap=mmap)
        plain = dsd.load(path, mmap=mmap)
    assert_same_modules(fresh, saved)
    assert_same(plain["model"], state_of(saved))


@pytest.mark.parametrize("sparse", LAYOUTS)
def test_sparse_tensors_do_not_heed_a_default_device(path, sparse):
    wanted = {"x": sparse(DENSE)}
    dsd.save(path, wanted)
    with torch.device("meta"):
        found = dsd.load(path)
    assert_same(found, wanted)


def test_saving_and_loading_do_not_heed_a_default_dtype(path):
    saved, fresh = net(), net()
    torch.set_default_dtype(torch.float64)
    try:
        carry(path, saved, fresh)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_modules(fresh, saved)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(torch.inference_mode, id="inference_mode"),
        pytest.param(torch.no_grad, id="no_grad"),
        pytest.param(lambda: torch.autocast("cpu"), id="autocast"),
        pytest.param(lambda: torch.autograd.set_detect_anomaly(True), id="detect_anomaly"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_a_module_is_saved_and_loaded_in_any_mode_and_trains_after_it(path, mode):
    saved, fresh = net(), net()
    with mode():
        carry(path, saved, fresh)
    assert_same_modules(fresh, saved)
    assert not any(tensor.is_inference() for tensor in fresh.parameters())
    fresh(torch.randn(4, 2)).square().sum().backward()


def test_a_fake_tensor_is_refused_by_name(path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module = nn.Linear(2, 2)
    with pytest.raises(UnsupportedValueError, match="FakeTensor"):
        dsd.save(path, {"model": module})
    assert not path.exists()


def test_a_module_with_a_cycle_of_plain_attributes_is_saved(path):
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2))
            object.__setattr__(self, "parent", parent)

    saved, fresh = nn.Module(), nn.Module()
    for module in (saved, fresh):
        module.child = Child(module)
    carry(path, saved, fresh)
    assert_same_modules(fresh, saved)


def test_a_module_and_its_own_part_in_one_state_are_stored_once(path):
    def parts() -> dict[str, nn.Module]:
        model = net()
        return {"model": model, "body": model.body}

    saved, fresh = parts(), parts()
    dsd.save(path, saved)
    dsd.load(path, fresh)
    with dsdformat.open(path) as checkpoint:
        assert len(list(checkpoint)) == len(saved["model"].state_dict())
    assert_same_modules(fresh["model"], saved["model"])


def test_a_part_that_conflicts_with_its_whole_is_not_loaded_in_silence(path):
    """The two name one memory; the checkpoint has other data for each."""
    dsd.save(path, {"model": net(), "body": nn.Linear(2, 3)})
    model = net()
    before = copy.deepcopy(state_of(model))
    with pytest.raises(MismatchError):
        dsd.load(path, {"model": model, "body": model.body})
    assert_same(state_of(model), before)


@pytest.mark.parametrize("build", [pytest.param(lambda: F.relu, id="function")])
def test_a_function_in_place_of_a_module_is_refused(path, build: Callable[[], Any]):
    with pytest.raises(UnsupportedValueError, match="function"):
        dsd.save(path, {"model": build()})
