"""What users report of checkpoints that several ranks write and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import dsdformat
import dsdformat.torch as dsd
from dsdformat.errors import DistributedError
from dsdformat.plan import kept_plans
from dsdformat.torch.state_dict import set_model_state_dict
from tests.ranks.counting import counted, data_reads, reads
from tests.ranks.layouts import Extra, build, everywhere, layouts, train
from tests.ranks.options import FULL
from tests.ranks.shards import dtensor, mesh_of
from tests.ranks.test_reports import Deep
from tests.ranks.test_save_load import Even, Stage, shared, whole
from tests.torch_runtime.exact import assert_same


def training(layout: str) -> dict[str, Any]:
    model = build(layout, Even)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


# B038: pieces that claim different whole shapes


@pytest.mark.ranks(4)
def test_pieces_that_claim_different_whole_shapes_are_not_stored():
    rank, path = distributed.get_rank(), shared("claims")
    local = torch.ones(1 if rank == 3 else 3, 2)
    claimed = DTensor.from_local(local, mesh_of((4,)), [Shard(0)])
    with pytest.raises(DistributedError, match=r"(?s)w.*\[(12|4), 2\].*\[(12|4), 2\]") as caught:
        dsd.save(path, {"w": claimed})
    assert len(set(everywhere(str(caught.value)))) == 1
    distributed.barrier()
    assert not [one for one in Path(path).parent.iterdir() if "claims" in one.name]


# B036, B040: rows that a rank holds lie apart in the whole


def stored_rows(path: str, name: str) -> list[list[int]]:
    """For each rank the rows of a tensor that it has stored."""
    with dsdformat.open(path) as checkpoint:
        files = checkpoint.table.body.files
        rows: list[list[int]] = [[] for _ in range(checkpoint.world_size)]
        for chunk in checkpoint.table.row(checkpoint.tensor(name).index).chunks:
            first, count = chunk.box.offset[0], chunk.box.shape[0]
            rows[files[chunk.file].rank] += range(first, first + count)
        return [sorted(some) for some in rows]


@pytest.mark.ranks(4)
def test_shards_of_columns_that_fsdp2_cut_again_are_stored_where_they_truly_lie():
    path, mesh = shared("strided"), mesh_of((2, 2), ("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 8)), mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    wanted = torch.arange(32.0).view(8, 4)
    set_model_state_dict(model, {"0.weight": wanted, "0.bias": torch.arange(8.0)}, options=FULL)
    assert torch.equal(model[0].weight.full_tensor(), wanted)  # by torch
    dsd.save(path, {"model": model})
    held = [int(row[0]) // 4 for row in model[0].weight.to_local()]
    assert everywhere(held) == stored_rows(path, "model/0.weight")
    kept = dsd.load(path)["model"]
    assert_same(kept, {"0.bias": torch.arange(8.0), "0.weight": wanted})


@pytest.mark.ranks(2)
def test_slices_of_two_stacked_halves_are_several_boxes_and_come_back_in_order():
    path, rank = shared("stacked"), distributed.get_rank()
    wanted = torch.arange(32.0).view(8, 4)
    rows = [0, 1, 4, 5] if rank == 0 else [2, 3, 6, 7]
    cut = [_StridedShard(0, split_factor=2)]
    fused = dtensor(wanted[rows].clone(), mesh_of((2,)), cut, (8, 4))
    dsd.save(path, {"w": fused})
    assert stored_rows(path, "w") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with dsdformat.open(path) as checkpoint:
        boxes = [chunk.box.offset for chunk in checkpoint.tensor("w").chunks]
    assert boxes == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert_same(dsd.load(path), {"w": wanted})
    plain = {"w": torch.zeros(8, 4)}
    dsd.load(path, plain)
    assert_same(plain, {"w": wanted})


# B041: who writes under hybrid sharding


@pytest.mark.parametrize("layout", layouts("hsdp", "fsdp1-hybrid-orig", "fsdp1-hybrid-flat"))
def test_hybrids_write_each_element_once_and_all_ranks_write(layout):
    path, state = shared(f"hybrid-{layout}"), training(layout)
    train(state["model"], state["optimizer"])
    dsd.save(path, state)
    assert dsdformat.verify(path).ok  # chunks tile each tensor
    with dsdformat.open(path) as checkpoint:
        files = checkpoint.table.body.files
        written: Counter[int] = Counter()
        for entry in checkpoint:
            for chunk in checkpoint.table.row(entry.index).chunks:
                written[files[chunk.file].rank] += chunk.nbytes
        assert sum(written.values()) == sum(entry.nbytes for entry in checkpoint)
    assert set(written) == {0, 1, 2, 3}
    model_state, optimizer_state = whole(state["model"], state["optimizer"])
    kept = dsd.load(path)
    assert_same(kept["model"], model_state)
    assert_same(kept["optimizer"]["state"], optimizer_state["state"])


# B047: several stages of a pipeline on each rank


def save_stages_in_turn(path: str) -> None:
    rank = distributed.get_rank()
    stages = [Stage([rank]), Stage([rank + 2])]
    optimizers = []
    for one in stages:
        number = int(next(iter(one.layers)))
        optimizers.append(torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9))
        for parameter in one.parameters():
            nn.init.constant_(parameter, number)
            parameter.grad = torch.full_like(parameter, number + 1)
        optimizers[-1].step()
    dsd.save(path, {"model": stages, "optimizer": optimizers})


def test_all_stages_of_all_ranks_load_into_one_model(ranks, tmp_path):
    path = tmp_path / "stages"
    ranks(2)(save_stages_in_turn, str(path))
    model = Stage([0, 1, 2, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    dsd.load(path, {"model": model, "optimizer": optimizer})
    for name, parameter in model.named_parameters():
        number = int(name.split(".")[1])
        assert bool((parameter == number - 0.5 * (number + 1)).all())
        assert bool((optimizer.state[parameter]["momentum_buffer"] == number + 1).all())


# B051: one rank and several


def save_again(jobs: list[tuple[str, str | None, str]]) -> None:
    """Load a checkpoint, or train, and save; of each layout."""
    for layout, source, path in jobs:
        state = training(layout)
        if source is None:
            train(state["model"], state["optimizer"])
        else:
            dsd.load(source, state)
        dsd.save(path, state)


def test_one_rank_reads_what_several_write_and_the_other_way_round(ranks, tmp_path):
    names = ("fsdp2", "fsdp1-full-orig", "fsdp1-full-flat")
    paths = {name: [str(tmp_path / f"{name}-{n}") for n in range(3)] for name in names}
    for number, world_size in enumerate((2, 1, 2)):
        jobs = [
            (name, some[number - 1] if number else None, some[number])
            for name, some in paths.items()
        ]
        ranks(world_size)(save_again, jobs)
    for some in paths.values():
        assert len({dsdformat.open(path).content_digest() for path in some}) == 1
        assert [dsdformat.open(path).world_size for path in some] == [2, 1, 2]


# B087: many small tensors


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["sharded", "whole"])
def test_messages_of_saving_and_loading_do_not_grow_with_the_number_of_tensors(kind):
    calls = []
    for count in (20, 400):
        path = shared(f"many-{kind}-{count}")
        locals_ = [torch.full((3, 2), float(number)) for number in range(count)]
        state: dict[str, Any] = {f"w{number:04}": one for number, one in enumerate(locals_)}
        if kind == "sharded":
            mesh = mesh_of((2,))
            state = {name: dtensor(one, mesh, [Shard(0)], (6, 2)) for name, one in state.items()}
        with counted() as saving:
            dsd.save(path, state)
        for one in locals_:
            one.zero_()
        with counted() as loading:
            dsd.load(path, state)
        assert [float(one[0, 0]) for one in locals_] == list(range(count))
        calls.append((Counter(saving), Counter(loading)))
    assert calls[0] == calls[1]
    assert sum(calls[0][0].values()) < 40
    assert sum(calls[0][1].values()) < 40


# B100: a repeated save


def many(count: int) -> dict[str, Any]:
    mesh = mesh_of((2,))
    state: dict[str, Any] = {
        f"w{number:04}": dtensor(torch.full((3, 2), float(number)), mesh, [Shard(0)], (6, 2))
        for number in range(count)
    }
    return {**state, "whole": torch.arange(5.0), "step": 0}


@contextmanager
def planning() -> Iterator[tuple[list[int], list[Any]]]:
    """Note how many tensors are planned anew, and which meshes are asked for their ranks."""
    planned: list[int] = []
    looked: list[Any] = []
    kept, mesh = kept_plans.plan_save, DeviceMesh.mesh

    def plan_save(tensors: Any, rank: int) -> Any:
        planned.append(len(tensors))
        return kept(tensors, rank)

    def noting(self: DeviceMesh) -> Any:
        looked.append(self)
        return mesh.fget(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_plans, "plan_save", plan_save)
        patch.setattr(DeviceMesh, "mesh", property(noting))
        yield planned, looked


@pytest.mark.ranks(2)
def test_a_repeated_save_is_not_planned_again():
    if not hasattr(DeviceMesh, "mesh"):
        pytest.skip("the mesh of this torch is an attribute, which nothing counts")
    state, rank = many(40), distributed.get_rank()
    with planning() as (planned, looked):
        with counted() as first:
            dsd.save(shared("plan-0"), state)
        assert planned == [41]
        assert len(looked) <= 1
        for number in range(40):
            state[f"w{number:04}"].to_local().fill_(100.0 + number)
        state["step"] = 1
        with counted() as second:
            dsd.save(shared("plan-1"), state)
        assert planned == [41]
        assert Counter(first) == Counter(second)
        one_more = {**state, **({"more": torch.ones(3)} if rank else {})}
        dsd.save(shared("plan-2"), one_more)  # planned anew where something is new, and only there
        assert planned == ([41, 42] if rank else [41])
        dsd.save(shared("plan-3"), {**state, "w0000": torch.zeros(6, 2)})
        assert planned[-1] == 41
        assert len(planned) == (3 if rank else 2)
        assert len(looked) <= 1
    for number, names in ((1, {*state}), (2, {*state, "more"})):
        found = dsd.load(shared(f"plan-{number}"))
        assert found.keys() == names
        assert [float(found[f"w{n:04}"].min()) for n in range(40)] == [100.0 + n for n in range(40)]
        assert found["whole"].tolist() == [0, 1, 2, 3, 4]


# B101: a rank's own files


@pytest.mark.ranks(2)
def test_resuming_with_the_same_layout_opens_no_files_of_others():
    path, rank = shared("own-files"), distributed.get_rank()
    model = fully_shard(nn.Linear(16, 8), mesh=mesh_of((2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    dsd.save(path, state)
    with reads() as noted:
        dsd.load(path, state)
    assert {label.split("-")[1] for label, _, _ in data_reads(noted, path)} == {f"{rank:05}"}
    assert {label for label, _, _ in noted} <= {
        "manifest.dsd",
        *(f"{stem}-{rank:05}-of-00002.safetensors" for stem in ("model", "optimizer")),
    }


# B114: fewer ranks than before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("background", [False, True])
def test_nothing_of_a_larger_run_stays_where_a_smaller_one_saves(background):
    path, rank = shared(f"smaller-{background}"), distributed.get_rank()
    dsd.save(path, {"model": many(3)})
    groups = [distributed.new_group([number]) for number in range(2)]
    assert sorted(one.name for one in Path(path).iterdir()) == [
        "manifest.dsd",
        *(f"model-{number:05}-of-00002.safetensors" for number in range(2)),
    ]
    distributed.barrier()
    if rank == 0:
        options = {"group": groups[0], "background": background}
        with pytest.raises(dsdformat.StorageError) as caught:
            dsd.save(path, {"model": {"w": torch.zeros(5)}}, **options)
        assert caught.value.code == "already_exists"
        saved = dsd.save(path, {"model": {"w": torch.zeros(5)}}, overwrite=True, **options)
        root = saved.wait() if background else saved
        assert sorted(one.name for one in Path(path).iterdir()) == [
            "manifest.dsd",
            "model.safetensors",
        ]
        assert dsdformat.verify(path, digest=root).ok
    distributed.barrier()


# B121: extra state


@pytest.mark.parametrize("layout", layouts("ddp", "fsdp1-full-orig", "fsdp1-full-flat", "fsdp2"))
def test_extra_state_two_levels_down_is_saved_and_restored(layout):
    path, model = shared(f"extra-{layout}"), build(layout, Deep)
    (extra,) = (one for one in model.modules() if isinstance(one, Extra))
    extra.extra = {"calls": 7, "names": ["a", {"b": (1, 2.5)}]}
    wanted = dict(extra.extra)
    dsd.save(path, {"model": model})
    extra.extra = {"calls": 0}
    dsd.load(path, {"model": model})
    assert_same(extra.extra, wanted)
    plain = Deep()
    dsd.load(path, {"model": plain})
    assert_same(plain.middle[1][0].extra, wanted)


# B152: again and again


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_training_is_saved_and_resumed_again_and_again(layout):
    plain, resumed = training(layout), training(layout)
    for number in range(3):
        train(plain["model"], plain["optimizer"], seed=number)
        path = shared(f"again-{layout}-{number}")
        train(resumed["model"], resumed["optimizer"], seed=number)
        dsd.save(path, resumed)
        resumed = training(layout)
        dsd.load(path, resumed)
    found, wanted = (whole(one["model"], one["optimizer"]) for one in (resumed, plain))
    assert_same(found[0], wanted[0])
    assert_same(found[1]["state"], wanted[1]["state"])
