"""A model's state by name, in every wrapping: what is set is what is read, on every rank.

Values are numbered, so that an element that goes astray is seen. A plain model gives the truth.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dsdformat.torch as dsd
from dsdformat.torch.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from tests.ranks.folders import shared
from tests.ranks.layouts import (
    LAYOUTS,
    MAIN,
    OPTIMIZERS,
    TIED_LAYOUTS,
    Net,
    Pads,
    Tied,
    build,
    joined,
    layouts,
    memory_of,
    numbered_model,
    train,
)
from tests.ranks.options import FROM_0, FULL, HOST
from tests.torch_runtime.exact import assert_same, assert_same_tensor


def filled(layout: str, kind: Any = Net, shift: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A wrapped model with numbered values, and its whole state."""
    model, wanted = build(layout, kind), numbered_model(kind(), shift)
    set_model_state_dict(model, wanted, options=FULL)
    return model, wanted


@pytest.mark.parametrize("layout", layouts())
def test_a_whole_state_that_was_set_is_read_on_every_rank(layout):
    model, wanted = filled(layout)
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.parametrize("layout", layouts())
def test_only_rank_0_gets_a_whole_state_on_the_host_and_it_is_a_copy(layout):
    model, wanted = filled(layout)
    found = get_model_state_dict(model, options=HOST)
    assert_same(found, wanted if distributed.get_rank() == 0 else {})
    spoil(found)
    assert_same(get_model_state_dict(model, options=FULL), wanted)


def spoil(state: dict[str, Any]) -> None:
    """Change every tensor of a result in place."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()


@pytest.mark.parametrize("layout", layouts())
def test_shards_joined_are_what_was_set(layout):
    model, wanted = filled(layout)
    assert_same(joined(get_model_state_dict(model)), wanted)


@pytest.mark.parametrize("layout", layouts(*MAIN))
def test_shards_on_the_host_are_copies(layout):
    model, wanted = filled(layout)
    found = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert_same(joined(found), wanted)
    for value in found.values():
        if isinstance(value, DTensor):
            value.to_local().zero_()
        elif hasattr(value, "local_shards"):
            for shard in value.local_shards():
                shard.tensor.zero_()
        elif isinstance(value, torch.Tensor):
            value.zero_()
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.parametrize("layout", layouts(*MAIN))
def test_shards_go_into_another_model_of_the_same_layout(layout):
    model, wanted = filled(layout)
    other, _ = filled(layout, shift=3)
    keys = set_model_state_dict(other, get_model_state_dict(model))
    assert keys == ([], [])
    assert_same(get_model_state_dict(other, options=FULL), wanted)


@pytest.mark.parametrize("layout", layouts())
def test_rank_0_gives_all_ranks_their_parts(layout):
    model, wanted = build(layout), numbered_model(Net())
    given = wanted if distributed.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=FROM_0)
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.parametrize("layout", layouts(*MAIN))
def test_setting_keeps_the_parameters_and_what_it_is_given(layout):
    model, given = build(layout), numbered_model(Net())
    before = [(name, id(one), one.requires_grad) for name, one in model.named_parameters()]
    buffers = [(name, id(one)) for name, one in model.named_buffers()]
    held = {name: id(value) for name, value in given.items()}
    set_model_state_dict(model, given, options=FULL)
    assert [(name, id(one), one.requires_grad) for name, one in model.named_parameters()] == before
    assert [(name, id(one)) for name, one in model.named_buffers()] == buffers
    assert {name: id(value) for name, value in given.items()} == held
    assert_same(given, numbered_model(Net()))


UNTRAINABLE = ("tp", "fsdp2-tp")  # torch cannot compute with uneven pieces of rows
TRAINABLE = [name for name in MAIN if name not in UNTRAINABLE]


@pytest.mark.parametrize("layout", layouts(*TRAINABLE))
def test_reading_whole_states_changes_nothing(layout):
    check_that_reading_changes_nothing(layout, FULL)


@pytest.mark.parametrize(
    "layout", layouts("ddp", "fsdp1-nested-orig", "fsdp1-3-flat", "fsdp2-nested")
)
@pytest.mark.parametrize(
    "options", [None, HOST, StateDictOptions(cpu_offload=True)], ids=["shards", "host", "parts"]
)
def test_reading_shards_and_copies_changes_nothing(layout, options):
    check_that_reading_changes_nothing(layout, options)


def check_that_reading_changes_nothing(layout: str, options: StateDictOptions | None) -> None:
    model = build(layout)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    train(model, optimizer)
    model(torch.ones(2, 7)).sum().backward()
    before = everything_of(model, optimizer)
    get_state_dict(model, optimizer, options=options)
    assert_same(everything_of(model, optimizer), before)


def everything_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What could change, as copies; and the identities of what must stay."""
    return {
        "parameters": memory_of(list(model.parameters())),
        "buffers": memory_of(list(model.buffers())),
        "grads": memory_of([one.grad for one in model.parameters()]),
        "state": memory_of([optimizer.state.get(one) for one in model.parameters()]),
        "groups": memory_of(
            [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        ),
        "same": [
            [id(one), id(one.grad), one.requires_grad, id(optimizer.state.get(one))]
            for one in model.parameters()
        ],
        "random": torch.get_rng_state(),
        "training": [module.training for module in model.modules()],
        "shards": [type(one).__name__ for one in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


MOVES = (
    "tp>fsdp2",
    "fsdp2>tp",
    "fsdp2>plain",
    "tp>ddp",
    "fsdp1-full-orig>fsdp2",
    "fsdp2>fsdp1-full-orig",
    "fsdp2-4>fsdp2-tp",
    "fsdp2-tp>fsdp2-4",
    "hsdp>fsdp2-tp",
    "fsdp2-tp>hsdp",
)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=pair, marks=pytest.mark.ranks(LAYOUTS[pair.split(">")[1]].world_size))
        for pair in MOVES
    ],
)
def test_shards_of_another_layout_are_moved(pair):
    source, _, target = pair.partition(">")
    model, wanted = filled(source)
    other, _ = filled(target, shift=3)
    set_model_state_dict(other, get_model_state_dict(model))
    assert_same(get_model_state_dict(other, options=FULL), wanted)


# Tied tensors, and sizes that pad


@pytest.mark.parametrize("layout", layouts(*TIED_LAYOUTS))
def test_tied_tensors_keep_all_their_names(layout):
    model, wanted = filled(layout, Tied)
    assert wanted["emb.weight"] is wanted["head.weight"]
    assert_same(get_model_state_dict(model, options=FULL), wanted)
    assert_same(joined(get_model_state_dict(model)), wanted)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert inner.head.weight is inner.emb.weight


@pytest.mark.parametrize("layout", layouts(*TIED_LAYOUTS))
def test_tied_tensors_are_one_tensor_of_the_result(layout):
    model, _ = filled(layout, Tied)
    found = get_model_state_dict(model, options=FULL)
    assert found["emb.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert found["emb.weight"].data_ptr() != found["mid.weight"].data_ptr()


@pytest.mark.parametrize("layout", layouts(*TIED_LAYOUTS))
@pytest.mark.parametrize("name", ["emb.weight", "head.weight"])
def test_one_name_is_enough_for_a_tied_tensor(layout, name):
    model, wanted = build(layout, Tied), numbered_model(Tied())
    other = {"emb.weight": "head.weight", "head.weight": "emb.weight"}[name]
    given = {key: value for key, value in wanted.items() if key != other}
    set_model_state_dict(model, given, options=FULL)
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.parametrize(
    "layout",
    layouts(
        "fsdp1-full-orig",
        "fsdp1-full-flat",
        "fsdp1-nested-orig",
        "fsdp1-nested-flat",
        "fsdp1-3-orig",
        "fsdp1-3-flat",
        "fsdp2-nested",
        "fsdp2-3",
        "fsdp2-4",
    ),
)
def test_no_padding_comes_into_a_state(layout):
    model, wanted = filled(layout, Pads)
    assert_same(get_model_state_dict(model, options=FULL), wanted)
    assert_same(joined(get_model_state_dict(model)), wanted)
    other, _ = filled(layout, Pads, shift=2)
    set_model_state_dict(other, get_model_state_dict(model))
    assert_same(get_model_state_dict(other, options=FULL), wanted)


# Names


class Named(nn.Module):
    """Attributes of the user's that are called as torch calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self._orig_mod = nn.Linear(3, 3)
        self._checkpoint_wrapped_module = nn.Sequential(nn.Linear(3, 5))
        self._fsdp_wrapped_module = nn.Sequential(OrderedDict(module=nn.Linear(5, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._checkpoint_wrapped_module(self._orig_mod(self.module(x)))
        return self._fsdp_wrapped_module(x)


class Modest(nn.Module):
    """The names of those that a user would think of."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self._orig_mod = nn.Sequential(OrderedDict(module=nn.Linear(3, 5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.module(x))


@pytest.mark.parametrize(
    "layout",
    layouts(
        "plain",
        "ddp",
        "replicate",
        "fsdp2",
        "compiled",
        "ddp-compiled",
        "compiled-ddp",
        "compiled-fsdp2",
    ),
)
def test_names_of_the_users_that_look_like_wrappers_stay(layout):
    model, wanted = filled(layout, Named)
    assert list(wanted)[0] == "module.weight"
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.parametrize(
    "layout", layouts("fsdp1-full-orig", "fsdp1-nested-flat", "compiled-fsdp1-orig")
)
def test_names_of_the_users_stay_in_fsdp1(layout):
    # FSDP1 itself takes `_fsdp_wrapped_module` and `_checkpoint_wrapped_module` out of all names.
    model, wanted = filled(layout, Modest)
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["compiled", "compiled-ddp", "ddp-compiled", "compiled-fsdp2"])
def test_names_are_the_same_before_and_after_a_state_is_set(layout):
    model = build(layout)
    before = list(get_model_state_dict(model))
    assert before == list(Net().state_dict())
    own = list(model.state_dict())
    set_model_state_dict(model, get_model_state_dict(model))
    assert list(get_model_state_dict(model)) == before
    assert list(model.state_dict()) == own


@pytest.mark.ranks(2)
def test_what_is_attached_below_an_fsdp_root_has_its_plain_names():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)))
    wanted = numbered_model(plain)
    plain.load_state_dict(wanted)
    wrapped = copy.deepcopy(plain)
    skipped = wrapped[1][1]
    wrapped[1][1] = nn.Identity()
    wrapped[1] = FullyShardedDataParallel(wrapped[1], device_id=torch.device("cpu"))
    model = FullyShardedDataParallel(wrapped, device_id=torch.device("cpu"))
    model.module[1].module[1] = skipped
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.parametrize("layout", layouts("plain", "ddp", "fsdp1-full-orig", "fsdp2", "compiled"))
def test_a_plain_call_warns_of_nothing(layout):
    model = build(layout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = get_model_state_dict(model, options=FULL)
        set_model_state_dict(model, state, options=FULL)
    assert [str(one.message) for one in caught] == []


# Whether a model is sharded just now


def gathered_by_hand() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = built_and_trained("fsdp2-nested")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return model, optimizer


def gathered_by_forward() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = built_and_trained("fsdp2-nested-kept")
    with torch.no_grad():
        model(torch.ones(2, 7))
    return model, optimizer


def built_and_trained(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = filled(layout)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return model, optimizer


def kinds(model: nn.Module) -> list[type]:
    return [type(one) for one in model.parameters()]


gathered = pytest.mark.parametrize("made", [gathered_by_hand, gathered_by_forward])


@pytest.mark.ranks(2)
@gathered
@pytest.mark.parametrize("options", [None, FULL, HOST], ids=["shards", "full", "host"])
def test_a_model_that_is_gathered_is_read_and_stays_so(made, options):
    model, optimizer = made()
    before = kinds(model)
    assert nn.Parameter in before
    found = get_state_dict(model, optimizer, options=options)
    assert kinds(model) == before
    output = model(torch.ones(2, 7))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    again = get_state_dict(model, optimizer, options=options)
    assert_same(*(joined(dict(enumerate(one))) for one in (found, again)))
    assert torch.equal(model(torch.ones(2, 7)), output)


@pytest.mark.ranks(2)
@gathered
def test_training_goes_on_after_a_gathered_model_was_read(made):
    (model, optimizer), (twin, twins) = made(), made()
    get_state_dict(model, optimizer, options=FULL)
    train(model, optimizer, steps=2, seed=3)
    train(twin, twins, steps=2, seed=3)
    whole = [get_state_dict(*pair, options=FULL) for pair in ((model, optimizer), (twin, twins))]
    assert_same(*whole)


@pytest.mark.ranks(2)
@gathered
@pytest.mark.parametrize("options", [FULL, FROM_0], ids=["full", "from-0"])
def test_what_is_set_into_a_gathered_model_is_what_it_computes_with(made, options):
    model, optimizer = made()
    wanted = numbered_model(Net())
    set_model_state_dict(model, wanted, options=options)
    plain = Net()
    plain.load_state_dict(wanted)
    assert torch.allclose(model(torch.ones(2, 7)), plain(torch.ones(2, 7)))
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.ranks(2)
@gathered
def test_a_gathered_model_is_saved_as_it_is_and_loaded_into(made):
    path = shared(made.__name__)
    model, optimizer = made()
    before = kinds(model)
    first = dsd.save(f"{path}-a", {"model": model, "optimizer": optimizer})
    assert kinds(model) == before
    other, others = made()
    dsd.load(f"{path}-a", {"model": other, "optimizer": others})
    assert dsd.save(f"{path}-b", {"model": other, "optimizer": others}) == first
    assert torch.equal(model(torch.ones(2, 7)), other(torch.ones(2, 7)))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1-full-orig", "fsdp1-full-flat", "fsdp2"])
@pytest.mark.parametrize("options", [None, FULL, HOST], ids=["shards", "full", "host"])
def test_one_rank_is_as_good_as_many(layout, options):
    model, wanted = filled(layout)
    found = get_model_state_dict(model, options=options)
    assert_same(joined(found), wanted)
    other, _ = filled(layout, shift=2)
    full = StateDictOptions(full_state_dict=options is not None)
    set_model_state_dict(other, found, options=full)
    assert_same(get_model_state_dict(other, options=FULL), wanted)
    set_model_state_dict(model, numbered_model(Net(), 5), options=FROM_0)
    assert_same(get_model_state_dict(model, options=FULL), numbered_model(Net(), 5))


@pytest.mark.ranks(2)
def test_parts_of_a_model_are_set_alone_without_strictness():
    model, wanted = filled("fsdp2")
    part = {name: value + 1 for name, value in wanted.items() if name.startswith("inner.0")}
    options = StateDictOptions(full_state_dict=True, strict=False)
    keys = set_model_state_dict(model, {**part, "zzz": torch.ones(1)}, options=options)
    assert keys.unexpected_keys == ["zzz"]
    assert set(keys.missing_keys) == wanted.keys() - part.keys()
    assert_same(get_model_state_dict(model, options=FULL), {**wanted, **part})


@pytest.mark.ranks(2)
def test_a_whole_tensor_is_not_the_live_one_of_an_fsdp2_model():
    model = build("fsdp2")
    found = get_model_state_dict(model, options=FULL)
    assert not any(isinstance(value, DTensor) for value in found.values())
    assert_same_tensor(found["row.weight"], model.row.weight.full_tensor().detach())
