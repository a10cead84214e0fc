"""What only FSDP1 has: flat parameters, units, ignored modules, groups, and faults of torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dsdformat.errors import UnsupportedValueError
from dsdformat.torch.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.ranks.layouts import (
    OPTIMIZERS,
    Net,
    build,
    groups_of,
    joined,
    layouts,
    numbered_model,
    numbered_optimizer,
    train,
)
from tests.ranks.options import FROM_0, FULL, HOST
from tests.ranks.shards import mesh_of
from tests.torch_runtime.exact import assert_same

CPU = torch.device("cpu")


def wrap(model: nn.Module, **options: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=CPU, **options)


def round_trip(
    wrapped: Any, plain: nn.Module, make: Any = OPTIMIZERS["adamw"], other: Any = None
) -> None:
    """Set whole states, and read them whole, on the host and in shards."""
    wanted = numbered_model(plain), numbered_optimizer(plain, make)
    optimizer = make(wrapped.parameters())
    set_state_dict(
        wrapped,
        optimizer,
        model_state_dict=wanted[0],
        optim_state_dict=wanted[1],
        options=FULL,
    )
    for options in (FULL, HOST, None):
        found = joined(get_state_dict(wrapped, optimizer, options=options))
        if options is HOST and distributed.get_rank():
            assert found == ({}, {})
            continue
        found = found if options else (joined(found[0]), joined(found[1]))
        assert_same(found[0], wanted[0])
        assert_same(found[1]["state"], wanted[1]["state"])
        assert_same(groups_of(found[1]), groups_of(wanted[1]))


both = pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])


# Whole states on the host, where torch mixes up moments or dies


@pytest.mark.ranks(2)
@both
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_moments_of_a_trained_model_come_to_the_host_as_they_are(orig, strategy):
    model = wrap(Net(), use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 2)
    wanted = get_state_dict(model, optimizer, options=FULL)
    found = get_state_dict(model, optimizer, options=HOST)
    if distributed.get_rank():
        assert found == ({}, {})
        return
    assert_same(found[0], wanted[0])
    assert_same(found[1]["state"], wanted[1]["state"])
    for entry in found[1]["state"].values():
        assert not torch.equal(entry["exp_avg"], entry["exp_avg_sq"])
        assert bool((entry["exp_avg_sq"] >= 0).all())
    memory = {value.data_ptr() for entry in found[1]["state"].values() for value in entry.values()}
    assert len(memory) == 3 * len(found[1]["state"])


@pytest.mark.ranks(2)
@both
def test_reading_to_the_host_again_and_again_gives_the_same(orig):
    model = wrap(Net(), use_orig_params=orig)
    wanted = numbered_model(Net())
    set_model_state_dict(model, wanted, options=FULL)
    kept = [get_model_state_dict(model, options=HOST) for _ in range(3)]
    set_model_state_dict(model, numbered_model(Net(), 9), options=FULL)
    if distributed.get_rank() == 0:
        for one in kept:
            assert_same(one, wanted)


@pytest.mark.ranks(2)
@both
def test_whole_tensors_of_one_state_share_no_memory(orig):
    model = wrap(Net(), use_orig_params=orig)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer, options=FULL)
    before = {
        name: value.clone()
        for name, value in weights.items()
        if value is not None and isinstance(value, torch.Tensor)
    }
    for entry in states["state"].values():
        for value in entry.values():
            value.fill_(-1)
    for name, value in before.items():
        assert torch.equal(weights[name], value)
        weights[name].zero_()
    found = get_model_state_dict(model, options=FULL)
    for name, value in before.items():
        assert torch.equal(found[name], value)


# Ways to wrap


@pytest.mark.ranks(2)
@both
def test_only_a_part_of_a_model_may_be_wrapped(orig):
    model = Net()
    model.inner = wrap(model.inner, use_orig_params=orig)
    round_trip(model, Net())


@pytest.mark.ranks(2)
@both
def test_buffers_of_low_precision_models_keep_their_dtype(orig):
    half = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    model = wrap(Net(), use_orig_params=orig, mixed_precision=half)
    wanted = get_model_state_dict(model, options=FULL)
    assert {value.dtype for value in wanted.values() if isinstance(value, torch.Tensor)} == {
        torch.float32,
        torch.int64,
    }


@pytest.mark.ranks(2)
@both
def test_ignored_modules_are_part_of_the_state(orig):
    model = Net()
    wrapped = wrap(model, use_orig_params=orig, ignored_modules=[model.inner])
    wanted = numbered_model(Net())
    set_model_state_dict(wrapped, wanted, options=FULL)
    assert_same(get_model_state_dict(wrapped, options=FULL), wanted)
    found = get_model_state_dict(wrapped, options=HOST)
    assert_same(found, {} if distributed.get_rank() else wanted)


@pytest.mark.ranks(2)
def test_ignored_modules_have_optimizer_state():
    model = Net()
    wrapped = wrap(model, use_orig_params=True, ignored_modules=[model.inner])
    round_trip(wrapped, Net())


@pytest.mark.ranks(2)
@both
@pytest.mark.parametrize("calls", [0, 1])
def test_gathered_units_are_read(orig, calls):
    model = wrap(Net(), use_orig_params=orig, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    wanted = numbered_model(Net())
    set_model_state_dict(model, wanted, options=FULL)
    for _ in range(calls):
        model(torch.ones(2, 7))
    assert_same(get_model_state_dict(model, options=FULL), wanted)
    assert_same(joined(get_model_state_dict(model)), wanted)


@pytest.mark.ranks(2)
@both
def test_the_kind_of_state_dict_that_a_user_chose_stays(orig):
    model = wrap(Net(), use_orig_params=orig)
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, config)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    before = FullyShardedDataParallel.get_state_dict_type(model)
    get_state_dict(model, optimizer)
    get_state_dict(model, optimizer, options=HOST)
    set_model_state_dict(model, numbered_model(Net()), options=FULL)
    assert FullyShardedDataParallel.get_state_dict_type(model) == before


@pytest.mark.ranks(2)
@both
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_sizes_that_pad_in_two_units_are_those_of_a_dense_model(orig, strategy):
    plain = nn.Sequential(
        nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 5)),
        nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 1)),
    )
    options = {"use_orig_params": orig, "sharding_strategy": ShardingStrategy[strategy]}
    model = nn.Sequential(*[wrap(nn.Sequential(*one), **options) for one in plain])
    round_trip(wrap(model, **options), _like(plain))


def _like(plain: nn.Module) -> nn.Module:
    """A dense model of the same layers, which were given away."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 5)),
        nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 1)),
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@both
@pytest.mark.parametrize("how", ["mesh", "groups"])
def test_hybrids_of_two_by_two_are_read_and_set(strategy, orig, how):
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    where: dict[str, Any] = {"device_mesh": mesh}
    if how == "groups":
        where = {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}
    model = wrap(Net(), use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy], **where)
    round_trip(model, Net())


@pytest.mark.ranks(4)
@both
def test_a_hybrid_takes_what_rank_0_has(orig):
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    hybrid = ShardingStrategy.HYBRID_SHARD
    model = wrap(Net(), use_orig_params=orig, sharding_strategy=hybrid, device_mesh=mesh)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wanted = numbered_model(Net()), numbered_optimizer(Net(), OPTIMIZERS["adamw"])
    mine = distributed.get_rank() == 0
    set_state_dict(
        model,
        optimizer,
        model_state_dict=wanted[0] if mine else {},
        optim_state_dict=wanted[1] if mine else {},
        options=FROM_0,
    )
    found = get_state_dict(model, optimizer, options=FULL)
    assert_same(found[0], wanted[0])
    assert_same(found[1]["state"], wanted[1]["state"])


# Tensor parallelism inside


def parallel(sizes: tuple[int, int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """FSDP1 over a column-parallel layer with numbered values."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = nn.Sequential(nn.Linear(*sizes))
    wanted = numbered_model(model)
    model.load_state_dict(wanted)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    return wrap(model, device_mesh=mesh["dp"], use_orig_params=True), wanted


SIZES = pytest.mark.parametrize("sizes", [(4, 8), (4, 5), (7, 2)], ids=str)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(4, 8), (7, 2), (4, 5)], ids=str)
def test_shards_of_two_axes_have_the_true_shape_and_values(sizes):
    model, wanted = parallel(sizes)
    assert_same(joined(get_model_state_dict(model)), wanted)
    set_model_state_dict(model, get_model_state_dict(model))
    assert_same(joined(get_model_state_dict(model)), wanted)


@pytest.mark.ranks(4)
@SIZES
def test_whole_tensors_of_two_axes_have_the_true_shape_and_values(sizes):
    model, wanted = parallel(sizes)
    assert_same(get_model_state_dict(model, options=FULL), wanted)


@pytest.mark.ranks(4)
@SIZES
@pytest.mark.parametrize("source", ["all", "from-0"])
def test_whole_tensors_are_set_on_two_axes(sizes, source):
    model, wanted = parallel(sizes)
    given = {name: value + 1000 for name, value in wanted.items()}
    options = FROM_0 if source == "from-0" else FULL
    mine = distributed.get_rank() == 0 or source == "all"
    set_model_state_dict(model, given if mine else {}, options=options)
    assert_same(joined(get_model_state_dict(model)), given)


@pytest.mark.ranks(4)
def test_optimizer_states_of_two_axes_are_read_as_set_or_refused():
    model, _ = parallel((4, 8))
    plain = nn.Sequential(nn.Linear(4, 8))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    wanted = numbered_optimizer(plain, OPTIMIZERS["adamw"])
    try:
        set_optimizer_state_dict(model, optimizer, wanted, options=FULL)
    except UnsupportedValueError:
        return
    found = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert_same(found["state"], wanted["state"])


# Errors


@pytest.mark.parametrize("layout", layouts("fsdp1-nested-orig", "fsdp1-nested-flat"))
@pytest.mark.parametrize("what", ["missing", "unexpected"])
def test_strictness_is_that_of_other_models(layout, what):
    model, given = build(layout), numbered_model(Net())
    if what == "missing":
        del given["inner.0.bias"]
    else:
        given["zzz"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"inner\.0\.bias|zzz"):
        set_model_state_dict(model, given, options=FULL)
    loose = StateDictOptions(full_state_dict=True, strict=False)
    keys = set_model_state_dict(model, given, options=loose)
    assert keys.missing_keys == (["inner.0.bias"] if what == "missing" else [])
    assert keys.unexpected_keys == (["zzz"] if what == "unexpected" else [])
    found = get_model_state_dict(model, options=FULL)
    kept = {name: value for name, value in given.items() if name != "zzz"}
    assert_same({name: found[name] for name in kept}, kept)
