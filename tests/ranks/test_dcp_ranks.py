"""`torch.distributed.checkpoint` with our storage, on several ranks.

What is saved is numbered by hand; it is compared with what `dsd.load` gives of global tensors, and
with what models hold that were loaded, whatever their layout.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dsdformat
import dsdformat.torch as dsd
from dsdformat.errors import (
    ArgumentError,
    MismatchError,
    NotACheckpointError,
    StorageError,
    UnsupportedValueError,
)
from dsdformat.storage import target
from dsdformat.torch.dcp import DsdStorageReader, DsdStorageWriter
from dsdformat.torch.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.ranks.layouts import (
    OPTIMIZERS,
    Model,
    Net,
    Optimizer,
    build,
    everywhere,
    groups_of,
    joined,
    layouts,
    numbered_model,
    numbered_optimizer,
)
from tests.ranks.options import FULL
from tests.ranks.shards import mesh_of
from tests.torch_runtime.exact import assert_same, assert_same_tensor


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder, the same on all ranks."""
    names = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(names)
    yield Path(str(names[0]))
    distributed.barrier()
    if distributed.get_rank() == 0:
        shutil.rmtree(str(names[0]))


def save(path: Path, state: dict[str, Any], **options: Any) -> None:
    keys = ("planner", "process_group", "use_collectives")
    own = {key: options.pop(key) for key in keys if key in options}
    dcp.save(state, storage_writer=DsdStorageWriter(path, **options), **own)


def load(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=DsdStorageReader(path), **options)
    return state


def numbered_training(layout: str, shift: int = 0) -> tuple[Model, Optimizer]:
    """A wrapped model and its optimizer with numbered values."""
    try:
        model = build(layout)
    except NotImplementedError as error:
        pytest.skip(f"this torch: {error}")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    plain = Net()
    set_model_state_dict(model, numbered_model(plain, shift), options=FULL)
    values = numbered_optimizer(plain, OPTIMIZERS["adamw"], shift)
    set_optimizer_state_dict(model, optimizer, values, options=FULL)
    return model, optimizer


def state_of(model: Model, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def check_numbered(found: dict[str, Any], shift: int = 0) -> None:
    """Compare a state of whole tensors with what was numbered."""
    plain = Net()
    assert_same(dict(found["model"]), numbered_model(plain, shift))
    wanted = numbered_optimizer(plain, OPTIMIZERS["adamw"], shift)
    assert_same(found["optimizer"]["state"], wanted["state"])
    assert_same(groups_of(found["optimizer"]), groups_of(wanted))


def failures_of(caught: Any) -> dict[int, BaseException]:
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


# Layouts

SAVED = (
    "plain",
    "ddp",
    "fsdp1-full-orig",
    "fsdp1-nested-flat",
    "fsdp1-hybrid-flat",
    "fsdp2-nested",
    "fsdp2-3",
    "tp",
    "fsdp2-tp",
    "hsdp",
)


@pytest.mark.parametrize("layout", layouts(*SAVED))
def test_a_training_of_any_layout_is_an_ordinary_checkpoint_and_comes_back(layout):
    model, optimizer = numbered_training(layout)
    with shared_folder() as folder:
        path = folder / "step-1"
        save(path, {**state_of(model, optimizer), "step": 5})
        found = dsd.load(path)
        assert found["step"] == 5
        check_numbered(found)
        if distributed.get_rank() == 0:
            assert dsdformat.verify(path).ok
            ranks = distributed.get_world_size()
            assert len(os.listdir(path)) <= 1 + 2 * ranks  # a file a section and rank, no more
            assert os.listdir(folder) == ["step-1"]
        other, fresh = numbered_training(layout, shift=40)
        state = load(path, state_of(other, fresh))
        set_state_dict(
            other,
            fresh,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        check_numbered(joined(state_of(other, fresh)))


def save_numbered(path: Path, layout: str) -> None:
    save(path, state_of(*numbered_training(layout)))


def load_numbered(path: Path, layout: str) -> None:
    model, optimizer = numbered_training(layout, shift=40)
    state = load(path, state_of(model, optimizer))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    check_numbered(joined(state_of(model, optimizer)))


WORLDS = [
    pytest.param(4, "fsdp2-4", 2, "fsdp2", id="4-to-2"),
    pytest.param(2, "fsdp2-nested", 4, "fsdp2-4", id="2-to-4"),
    pytest.param(4, "fsdp2-tp", 2, "tp", id="2d-to-tp"),
    pytest.param(3, "fsdp2-3", 4, "hsdp", id="3-to-hsdp"),
    pytest.param(2, "fsdp1-full-orig", 3, "fsdp2-3", id="fsdp1-to-fsdp2"),
]


@pytest.mark.parametrize(("before", "saved", "after", "loaded"), WORLDS)
def test_a_training_goes_on_with_another_number_of_ranks(
    ranks, tmp_path, before, saved, after, loaded
):
    ranks(before)(save_numbered, tmp_path / "a", saved)
    check_numbered(dsd.load(tmp_path / "a"))
    ranks(after)(load_numbered, tmp_path / "a", loaded)


@pytest.mark.ranks(2)
def test_sharded_tensors_of_fsdp1_are_boxes_of_one_tensor():
    model = build("fsdp1-full-orig")
    set_model_state_dict(model, numbered_model(Net()), options=FULL)
    with (
        shared_folder() as folder,
        FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT),
    ):
        state = model.state_dict()
        assert any(isinstance(value, ShardedTensor) for value in state.values())
        save(folder / "a", {"model": state})
        assert_same(dsd.load(folder / "a")["model"], numbered_model(Net()))
        for value in state.values():
            if isinstance(value, ShardedTensor):
                for shard in value.local_shards():
                    shard.tensor.zero_()
        load(folder / "a", {"model": state})
        assert_same(joined(dict(state)), numbered_model(Net()))


# Placements

PLACEMENTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate()],
    "rows twice": [Shard(0), Shard(0)],
    "both": [Shard(0), Shard(1)],
    "hybrid": [Replicate(), Shard(0)],
}


def spread(tensor: torch.Tensor, placements: list[Any]) -> DTensor:
    mesh = mesh_of((4,) if len(placements) == 1 else (2, 2))
    return distribute_tensor(tensor, mesh, placements)


NAMES = list(PLACEMENTS)
PAIRS = [
    *(((5, 7), saved, loaded) for saved in NAMES for loaded in NAMES),
    *((shape, *pair) for shape in [(1, 3), (0, 4)] for pair in zip(NAMES, NAMES[1:], strict=False)),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("shape", "saved", "loaded"), PAIRS, ids=str)
def test_a_tensor_is_read_under_other_placements(shape, saved, loaded):
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    with shared_folder() as folder:
        save(folder / "a", {"t": spread(value, PLACEMENTS[saved])})
        assert_same_tensor(dsd.load(folder / "a")["t"], value)
        into = spread(torch.full(shape, -1.0), PLACEMENTS[loaded])
        load(folder / "a", {"t": into})
        assert_same_tensor(into.full_tensor(), value)


@pytest.mark.ranks(4)
def test_where_a_tensor_was_on_the_ranks_is_told():
    with shared_folder() as folder:
        save(folder / "a", {"t": spread(torch.zeros(8, 8), [Shard(0), Shard(1)]), "n": 1})
        with dsdformat.open(folder / "a") as checkpoint:
            assert checkpoint.world_size == 4
            mesh, placements = checkpoint.tensor("t").placements
            assert mesh.shape == (2, 2)
            assert mesh.ranks == (0, 1, 2, 3)
            assert placements == ("shard(0)", "shard(1)")


@pytest.mark.ranks(4)
def test_a_tensor_that_only_some_ranks_hold_is_stored_by_them():
    mesh = distributed.device_mesh.DeviceMesh("cpu", [1, 3])
    value = torch.arange(6.0)
    rank = distributed.get_rank()
    local = value[:3] if rank == 1 else value[3:] if rank == 3 else torch.empty(0)
    tensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=(1,)
    )
    with shared_folder() as folder:
        save(folder / "a", {"t": tensor, "all": rank})
        assert_same_tensor(dsd.load(folder / "a")["t"], value)


@pytest.mark.ranks(2)
def test_equal_states_make_equal_checkpoints():
    with shared_folder() as folder:
        roots = []
        for name in "ab":
            save(folder / name, state_of(*numbered_training("fsdp2-nested")))
            with dsdformat.open(folder / name) as checkpoint:
                roots.append(checkpoint.root)
        assert roots[0] == roots[1]


# Values and lists


@pytest.mark.ranks(3)
def test_values_are_stored_once_and_come_back_on_all_ranks():
    values = {"a": (1, 2.0), "b": [1, "x"], "c": {"d": None, "e": b"raw"}, "f": "x" * 50}
    with shared_folder() as folder:
        save(folder / "a", values)
        assert_same(dsd.load(folder / "a"), values)
        found = load(folder / "a", {"a": 0, "b": [], "c": {"d": 0, "e": 0}, "f": ""})
        assert_same(found, values)


@pytest.mark.ranks(3)
def test_lists_are_lists_again_though_ranks_share_their_items():
    def state(number: float) -> dict[str, Any]:
        whole = [torch.full((size,), number) for size in (3, 2, 5, 7)]
        spread = distribute_tensor(torch.full((4,), number), mesh_of((3,)), [Shard(0)])
        return {
            "whole": whole,
            "mixed": [torch.full((9,), number), 3.5, {"a": [whole[0], {"b": "x"}], "c": None}],
            "spread": [spread, torch.full((2,), number)],
            "groups": [{"lr": number, "betas": (0.9, number), "params": ["a"]}, {"lr": 1}],
        }

    with shared_folder() as folder:
        save(folder / "a", state(2.0))
        assert_same(dsd.load(folder / "a"), joined(state(2.0)))
        assert_same(joined(load(folder / "a", state(0.0))), joined(state(2.0)))


def random_state(some: random.Random, depth: int) -> Any:
    """A tree of dicts and lists, none of them empty, of tensors that are whole or spread."""
    kind = some.choice(
        ["value", "tensor", "tensor", "spread", *(["dict", "list"] * 2 * (depth > 0))]
    )
    if kind == "dict":
        return {some.choice("abcdef"): random_state(some, depth - 1) for _ in range(3)}
    if kind == "list":
        return [random_state(some, depth - 1) for _ in range(some.randint(1, 3))]
    number = some.random()
    if kind == "value":
        return some.choice([number, (number, "x"), "y", None, [1, 2]])
    tensor = torch.full((some.randint(1, 9),), number)
    return tensor if kind == "tensor" else distribute_tensor(tensor, mesh_of((3,)), [Shard(0)])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("seed", range(12))
def test_any_nesting_of_dicts_and_lists_comes_back(seed):
    def state() -> dict[str, Any]:
        some = random.Random(seed)
        return {name: random_state(some, 3) for name in "xyz"}

    def emptied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value)
        if isinstance(value, dict):
            return {key: emptied(item) for key, item in value.items()}
        return [emptied(item) for item in value] if isinstance(value, list) else value

    with shared_folder() as folder:
        save(folder / "a", state())
        assert_same(dsd.load(folder / "a"), joined(state()))
        assert_same(joined(load(folder / "a", emptied(state()))), joined(state()))


@pytest.mark.ranks(2)
def test_the_optimizer_of_a_plain_loop_comes_back_with_its_groups():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with shared_folder() as folder:
        save(folder / "a", {"o": optimizer.state_dict()})
        groups = dsd.load(folder / "a")["o"]["param_groups"]
        assert_same(groups, optimizer.state_dict()["param_groups"])


@pytest.mark.ranks(2)
def test_items_of_a_list_that_differ_between_ranks_are_an_error():
    state = {"l": [torch.ones(9), torch.zeros(9), distributed.get_rank()]}
    with shared_folder() as folder:
        with pytest.raises(CheckpointException) as caught:
            save(folder / "a", state)
        (error,) = failures_of(caught).values()
        assert isinstance(error, MismatchError)
        assert "$.l[2]" in str(error)
        assert not (folder / "a").exists()


# Groups, planners


@pytest.mark.ranks(4)
def test_a_part_of_the_ranks_saves_and_loads():
    group = distributed.new_group([0, 2])
    with shared_folder() as folder:
        if distributed.get_rank() in (0, 2):
            save(folder / "a", {"w": torch.arange(3.0), "r": "x"}, process_group=group)
            found = load(folder / "a", {"w": torch.zeros(3), "r": ""}, process_group=group)
            assert_same(found, {"w": torch.arange(3.0), "r": "x"})
        distributed.barrier()
        with dsdformat.open(folder / "a") as checkpoint:
            assert checkpoint.world_size == 2


@pytest.mark.ranks(3)
@pytest.mark.parametrize("coordinator", [0, 1, 2])
def test_any_rank_may_be_the_coordinator(coordinator):
    tensor = distribute_tensor(torch.arange(7.0), mesh_of((3,)), [Shard(0)])
    with shared_folder() as folder:
        dcp.save_state_dict(
            {"t": tensor, "v": (1,)},
            DsdStorageWriter(folder / "a"),
            coordinator_rank=coordinator,
        )
        assert_same(dsd.load(folder / "a"), {"t": torch.arange(7.0), "v": (1,)})


@pytest.mark.ranks(2)
def test_a_planner_that_caches_its_plans_saves_each_step_to_its_own_place():
    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip("this torch caches no plans")
    names = ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata")
    for name in names:
        getattr(SavePlanner, f"_cached_{name}").clear()
    with shared_folder() as folder:
        for step in range(4):
            value = torch.arange(5.0) + 10 * (step if step < 3 else 0)
            state = {
                "t": distribute_tensor(value, mesh_of((2,)), [Shard(0)]),
                "l": [torch.ones(1), torch.zeros(2)],
                "s": step,
            }
            if step == 2:  # the plans change
                state["more"] = torch.ones(3)
            planner = DefaultSavePlanner(enable_plan_caching=True)
            save(folder / f"step-{step}", state, planner=planner)
            assert_same(dsd.load(folder / f"step-{step}"), joined(state))
    for name in names:
        getattr(SavePlanner, f"_cached_{name}").clear()


@pytest.mark.ranks(2)
def test_ranks_that_would_each_write_a_checkpoint_of_their_own_are_refused():
    if "use_collectives" not in dcp.save.__wrapped__.__wrapped__.__kwdefaults__:
        pytest.skip("this torch always uses collectives")
    with shared_folder() as folder:
        with pytest.raises(ArgumentError, match="use_collectives"):
            save(folder / "a", {"a": 1}, use_collectives=False)
        assert os.listdir(folder) == []


# Failures


def check_old_is_whole(folder: Path) -> None:
    """The checkpoint that was there is, and nothing of the one that failed."""
    gc.collect()  # tracebacks hold the frames that hold the writer
    distributed.barrier()
    assert os.listdir(folder) == ["a"]
    assert dsdformat.verify(folder / "a").ok
    assert_same_tensor(dsd.load(folder / "a")["t"], torch.ones(8))
    distributed.barrier()


def tensor_of_ranks(value: float) -> DTensor:
    return distribute_tensor(torch.full((8,), value), mesh_of((2,)), [Shard(0)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["write_at", "close"])
def test_a_full_disk_of_one_rank_is_told_to_all_and_the_old_checkpoint_stays(failing, when):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with shared_folder() as folder:
        save(folder / "a", {"t": tensor_of_ranks(1.0)})
        real = getattr(target.FileSink, when)
        patched = full if distributed.get_rank() == failing else real
        with (
            mock.patch.object(target.FileSink, when, patched),
            pytest.raises(CheckpointException, match="No space left") as caught,
        ):
            save(folder / "a", {"t": tensor_of_ranks(2.0)}, overwrite=True)
        assert list(failures_of(caught)) == [failing]
        del caught
        check_old_is_whole(folder)


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_store_is_told_to_all_by_its_name():
    own = (lambda: 1) if distributed.get_rank() == 1 else 1
    # Values go to the rank with less to write.
    state = {"t": tensor_of_ranks(1.0), "first": "x", "hook": own}
    with shared_folder() as folder:
        save(folder / "a", {"t": tensor_of_ranks(1.0)})
        with pytest.raises(CheckpointException) as caught:
            save(folder / "a", state, overwrite=True)
        (failure,) = failures_of(caught).items()
        assert failure[0] == 1
        assert isinstance(failure[1], UnsupportedValueError)
        assert failure[1].path_in_tree == "$.hook"
        del caught, failure
        check_old_is_whole(folder)


@pytest.mark.ranks(2)
def test_a_checkpoint_that_is_there_is_an_error_on_all_ranks_before_anything_is_written():
    with shared_folder() as folder:
        save(folder / "a", {"t": tensor_of_ranks(1.0)})
        with pytest.raises(CheckpointException, match="Checkpoint already exists") as caught:
            save(folder / "a", {"t": tensor_of_ranks(2.0)})
        (error,) = failures_of(caught).values()
        assert isinstance(error, StorageError)
        del caught, error
        check_old_is_whole(folder)


@pytest.mark.ranks(2)
def test_a_rank_that_reads_no_checkpoint_is_told_to_all():
    with shared_folder() as folder:
        save(folder / "a", {"t": tensor_of_ranks(1.0)})
        into = tensor_of_ranks(0.0)
        name = "a" if distributed.get_rank() == 0 else "b"
        start = time.monotonic()
        with pytest.raises(CheckpointException) as caught:
            load(folder / name, {"t": into})
        assert time.monotonic() - start < 10
        (failure,) = failures_of(caught).items()
        assert failure[0] == 1
        assert isinstance(failure[1], NotACheckpointError)
        assert not into.to_local().any()


@pytest.mark.ranks(2)
def test_damage_in_the_shard_of_one_rank_is_told_to_all():
    with shared_folder() as folder:
        save(folder / "a", {"t": tensor_of_ranks(1.0)})
        if distributed.get_rank() == 0:
            (file,) = folder.glob("a/*-00001-of-*")
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw)
        distributed.barrier()
        with pytest.raises(CheckpointException, match="checksum mismatch in .* of t") as caught:
            load(folder / "a", {"t": tensor_of_ranks(0.0)})
        assert list(failures_of(caught)) == [1]


@pytest.mark.ranks(2)
def test_after_a_failure_the_same_writer_saves():
    writers = []
    with shared_folder() as folder:
        writer = DsdStorageWriter(folder / "a")
        writers.append(writer)
        bad = (lambda: 1) if distributed.get_rank() == 1 else 1
        with pytest.raises(CheckpointException):
            dcp.save({"t": tensor_of_ranks(2.0), "x": "", "h": bad}, storage_writer=writer)
        dcp.save({"t": tensor_of_ranks(1.0)}, storage_writer=writer)
        check_old_is_whole(folder)


# In the background


def wait(future: Any) -> None:
    getattr(future, "upload_completion", future).result(timeout=60)


@pytest.mark.ranks(2)
def test_saves_in_the_background_have_what_was_there_while_ranks_go_on_talking():
    model = fully_shard(nn.Linear(64, 32), mesh=mesh_of((2,)))
    group = distributed.new_group(backend="gloo")
    weight = model.weight
    with shared_folder() as folder:
        for step in range(10):
            with torch.no_grad():
                weight.to_local().fill_(step)
            flat = torch.full((9,), 1.0 * step)
            state = {"model": model.state_dict(), "step": step, "flat": flat}
            future = dcp.async_save(
                state,
                storage_writer=DsdStorageWriter(folder / f"{step}"),
                process_group=group,
            )
            with torch.no_grad():
                weight.to_local().fill_(-1)
            flat.fill_(-1)
            distributed.barrier()
            distributed.all_reduce(torch.ones(1))
            wait(future)
        distributed.barrier()
        for step in range(10):
            found = dsd.load(folder / f"{step}")
            assert_same_tensor(found["model"]["weight"], torch.full((32, 64), 1.0 * step))
            assert_same_tensor(found["flat"], torch.full((9,), 1.0 * step))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_process_of_its_own_saves_what_was_there():
    kind = getattr(dcp.state_dict_saver, "AsyncCheckpointerType", None)
    if kind is None:
        pytest.skip("this torch saves in threads only")
    tensor = tensor_of_ranks(1.0)
    with shared_folder() as folder:
        for name in ("a", "b"):
            future = dcp.async_save(
                {"t": tensor, "v": (name, {"x"})},
                storage_writer=DsdStorageWriter(folder / name),
                async_checkpointer_type=kind.PROCESS,
            )
            tensor.to_local().add_(1)
            wait(future)
        distributed.barrier()
        assert_same(dsd.load(folder / "a"), {"t": torch.ones(8), "v": ("a", {"x"})})
        assert_same(dsd.load(folder / "b"), {"t": torch.full((8,), 2.0), "v": ("b", {"x"})})


@pytest.mark.ranks(2)
def test_sharded_tensors_are_copied_for_the_background():
    model = build("fsdp1-full-orig")
    set_model_state_dict(model, numbered_model(Net()), options=FULL)
    with (
        shared_folder() as folder,
        FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT),
    ):
        state = model.state_dict()
        copied = DsdStorageWriter(folder / "a").stage({"model": state})
        for value in state.values():
            if isinstance(value, ShardedTensor):
                for shard in value.local_shards():
                    shard.tensor.zero_()
        save(folder / "a", copied)
        assert_same(dsd.load(folder / "a")["model"], numbered_model(Net()))


@pytest.mark.ranks(2)
def test_a_load_right_after_a_save_has_the_state_each_time():
    model, optimizer = numbered_training("fsdp2-nested")
    with shared_folder() as folder:
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().add_(1)
            wanted = joined(state_of(model, optimizer))
            save(folder / "a", state_of(model, optimizer), overwrite=True)
            state = load(folder / "a", state_of(*numbered_training("fsdp2-nested", 3)))
            assert_same(joined(state), wanted)


@pytest.mark.ranks(2)
def test_names_that_one_rank_lacks_do_not_hang():
    own = {"t": tensor_of_ranks(1.0), **({"only": 1} if distributed.get_rank() == 1 else {})}
    with shared_folder() as folder:
        save(folder / "a", own)
        assert set(dsd.load(folder / "a")) == {"t", "only"}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        load(folder / "a", {"t": tensor_of_ranks(0.0)}, planner=planner)
    assert everywhere(1) == [1, 1]
