"""Checkpoints that ranks write together, and that other ranks in other layouts read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import dsdformat
import dsdformat.torch as dsd
from dsdformat.errors import DistributedError, DsdError, MismatchError, RankDisagreementError
from dsdformat.storage.local import LocalStorage
from dsdformat.torch.state_dict import get_state_dict, set_state_dict
from tests.ranks.counting import watched
from tests.ranks.folders import shared
from tests.ranks.layouts import (
    LAYOUTS,
    OPTIMIZERS,
    Net,
    Tied,
    build,
    everywhere,
    inputs,
    joined,
    numbered_model,
    numbered_optimizer,
    train,
)
from tests.ranks.options import FULL
from tests.ranks.shards import mesh_of
from tests.torch_runtime.exact import assert_same

SOURCES = (
    "plain",
    "ddp",
    "fsdp1-full-orig",
    "fsdp1-3-flat",
    "fsdp1-hybrid-flat",
    "fsdp1-tp",
    "fsdp2-4",
    "fsdp2-3",
    "tp",
    "fsdp2-tp",
    "hsdp",
    "stages",
)
TARGETS = (*SOURCES, "fsdp1-no-flat", "fsdp1-nested-orig", "fsdp2-nested", "compiled-fsdp2")


def half_of_net() -> nn.Module:
    """The stage of a pipeline that this rank has, of two."""
    model = Net()
    for name in (("out", "extra"), ("inner", "row"))[distributed.get_rank()]:
        delattr(model, name)
    return model


def state_of(layout: str) -> dict[str, Any]:
    model = half_of_net() if layout == "stages" else build(layout)
    return {"model": model, "optimizer": OPTIMIZERS["adamw"](model.parameters())}


def wanted() -> tuple[dict[str, Any], dict[str, Any]]:
    return numbered_model(Net()), numbered_optimizer(Net(), OPTIMIZERS["adamw"])


def wanted_of(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is wanted of a model that may be a stage."""
    model_state, optimizer_state = wanted()
    if not isinstance(model, Net) or len(list(model.children())) == len(list(Net().children())):
        return model_state, optimizer_state
    names = dict(model.named_parameters())
    own = {key: value for key, value in model_state.items() if key in model.state_dict()}
    state = {key: value for key, value in optimizer_state["state"].items() if key in names}
    groups = [
        {**group, "params": [name for name in group["params"] if name in names]}
        for group in optimizer_state["param_groups"]
    ]
    return own, {"state": state, "param_groups": groups}


def save_layout(layout: str, path: str) -> str:
    state = state_of(layout)
    model_state, optimizer_state = wanted_of(state["model"])
    set_state_dict(
        state["model"],
        state["optimizer"],
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=FULL,
    )
    rank = distributed.get_rank()
    own = {"number": rank, "stream": torch.full((3,), rank)}
    return dsd.save(path, {**state, "step": 12, "own": dsd.PerRank(own)})


def world_of(layout: str) -> int:
    return {"plain": 1, "stages": 2}.get(layout) or LAYOUTS[layout].world_size


@pytest.fixture(scope="module")
def saved(launcher, tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each layout."""
    from tests.ranks.launching import Call, Launch

    folder, made = tmp_path_factory.mktemp("saved"), {}
    for layout in SOURCES:
        call = Call(__name__, "save_layout", (layout, str(folder / layout)))
        launch = Launch((call,), world_of(layout), tmp_path_factory.mktemp("launch"))
        (outcome,) = launcher.run(launch)
        assert outcome.failure is None, f"{layout}: {outcome.failure}"
        if outcome.skipped is None:  # as for the oldest torch
            assert len(set(outcome.values)) == 1  # the root digest, on all ranks
            made[layout] = folder / layout
    return made


@pytest.mark.parametrize("layout", SOURCES)
def test_what_ranks_write_is_an_ordinary_checkpoint(saved, layout):
    if layout not in saved:
        pytest.skip("this torch cannot make such a model")
    path = saved[layout]
    assert dsdformat.verify(path).ok
    state = dsd.load(path)
    model_state, optimizer_state = wanted()
    assert_same(state["model"], model_state)
    assert_same(state["optimizer"]["state"], optimizer_state["state"])
    assert state["step"] == 12
    assert list(state["own"]) == [str(rank) for rank in range(world_of(layout))]
    assert sorted(p.name for p in path.iterdir() if "rank" in p.name or "safetensors" in p.name)


@pytest.mark.parametrize("layout", ["fsdp1-full-orig", "tp"])
def test_one_process_takes_what_it_wants_of_what_two_ranks_wrote(saved, layout, monkeypatch):
    """B144: all of it is above; a branch, a tensor, a list of names, and nothing that matches."""
    if layout not in saved:
        pytest.skip("this torch cannot make such a model")
    path, (model_state, _) = saved[layout], wanted()
    assert not distributed.is_initialized()
    assert_same(dsd.load(path, select="model"), {"model": model_state})
    names = [name for name, one in model_state.items() if isinstance(one, torch.Tensor)]
    largest = max(names, key=lambda name: model_state[name].nbytes)
    kept, reads = LocalStorage.read_into, []

    def noting(self, label, byte_offset, into):
        if label.endswith(".safetensors"):
            reads.append(len(into))
        return kept(self, label, byte_offset, into)

    monkeypatch.setattr(LocalStorage, "read_into", noting)
    loaded = dsd.load(path, select=f"model/{largest}")
    assert_same(loaded, {"model": {largest: model_state[largest]}})
    assert sum(reads) == model_state[largest].nbytes
    with dsdformat.open(path) as checkpoint:
        assert {f"model/{name}" for name in names} <= {one.name for one in checkpoint}
        found = bytes(checkpoint.read(f"model/{largest}"))
    assert found == model_state[largest].numpy().tobytes()
    for strict in (True, False):
        with pytest.raises(dsdformat.EntryNotFoundError):
            dsd.load(path, select="modle/*", strict=strict)


def load_all(target: str, paths: dict[str, str]) -> list[str]:
    """Load the checkpoints of all layouts into one; name those that come out wrong."""
    wrong, rank = [], distributed.get_rank()
    for source, path in paths.items():
        state = state_of(target)
        model_state, optimizer_state = wanted_of(state["model"])
        rest = dsd.load(path, {**state, "own": dsd.PerRank(None)})
        found = get_state_dict(state["model"], state["optimizer"], options=FULL)
        try:
            assert_same(found[0], model_state)
            assert_same(found[1]["state"], optimizer_state["state"])
            mine: Any = {"number": rank, "stream": torch.full((3,), rank)}
            is_fresh = rank >= world_of(source)
            assert_same(rest["own"], None if is_fresh else mine)
            assert rest.report.fresh == (["own"] if is_fresh else [])
            assert rest["step"] == 12
        except AssertionError as error:
            wrong.append(f"{source}: {error}")
    return wrong


@pytest.mark.parametrize("target", TARGETS)
def test_any_layout_reads_what_any_other_has_written(saved, ranks, target):
    paths = {layout: str(path) for layout, path in saved.items()}
    assert ranks(world_of(target), limit_s=120)(load_all, target, paths) == [[]] * world_of(target)


# Sizes that ranks divide, so that all layouts can train


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 8, bias=False))
        self.out = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x)) + self.seen


TRAINED = ("ddp", "fsdp1-full-orig", "fsdp1-full-flat", "fsdp2-4", "tp", "fsdp2-tp", "hsdp")


def trained(layout: str) -> tuple[nn.Module, Any]:
    model = build(layout, Even)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def whole(model: nn.Module, optimizer: Any) -> Any:
    return get_state_dict(model, optimizer, options=FULL)


def train_and_save(layout: str, path: str) -> None:
    model, optimizer = trained(layout)
    train(model, optimizer, 2)
    dsd.save(path, {"model": model, "optimizer": optimizer})


def go_on(layout: str, paths: list[str]) -> list[Any]:
    """What comes of two further steps, in this layout and in a plain model."""
    found = []
    for path in paths:
        model, optimizer = trained(layout)
        dsd.load(path, {"model": model, "optimizer": optimizer})
        plain = Even()
        alone = torch.optim.AdamW(plain.parameters(), lr=0.1)
        dsd.load(path, {"model": plain, "optimizer": alone})
        train(model, optimizer, 2, seed=2)
        train(plain, alone, 2, seed=2)
        found.append((whole(model, optimizer), (plain.state_dict(), alone.state_dict())))
    return found


@pytest.mark.parametrize("target", TRAINED)
def test_training_goes_on_in_any_layout_as_in_a_plain_model(ranks, tmp_path, target):
    paths = []
    for source in ("fsdp2-4", "fsdp1-full-flat"):
        paths.append(str(tmp_path / source))
        ranks(world_of(source))(train_and_save, source, paths[-1])
    for results in ranks(world_of(target), limit_s=120)(go_on, target, paths):
        for (model_state, optimizer_state), (plain, _) in results:
            assert {float(entry["step"]) for entry in optimizer_state["state"].values()} == {4.0}
            for name, value in plain.items():  # sums over ranks are rounded in another order
                torch.testing.assert_close(model_state[name], value, rtol=1e-5, atol=1e-6)


# Stages of a pipeline


class EvenStage(Even):
    """One of two stages: the other's modules are gone, as real pipelines have it."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        delattr(self, "inner" if is_last else "out")
        if not is_last:
            del self.seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) + self.seen if self.is_last else self.inner(x)


def train_stages(model: EvenStage, optimizer: Any, steps: int, seed: int = 0) -> None:
    """Take the steps of `train` in a pipeline of torch's own, the batch as one microbatch."""
    stage = PipelineStage(model, int(model.is_last), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1, loss_fn=lambda y, _: y.square().mean())
    for step in range(steps):
        given = (inputs(model, seed + step),) if not model.is_last else ()
        schedule.step(*given, target=torch.zeros(6, 4) if model.is_last else None)
        optimizer.step()
        optimizer.zero_grad()


def staged() -> tuple[EvenStage, Any]:
    model = EvenStage(distributed.get_rank() == 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_and_save_stages(path: str) -> None:
    model, optimizer = staged()
    train_stages(model, optimizer, 2)
    dsd.save(path, {"model": model, "optimizer": optimizer})


def go_on_in_stages(paths: list[str], to: str) -> None:
    """Take two further steps in stages, after each checkpoint, and save what comes of them."""
    for number, path in enumerate(paths):
        model, optimizer = staged()
        dsd.load(path, {"model": model, "optimizer": optimizer})
        train_stages(model, optimizer, 2, seed=2)
        dsd.save(f"{to}-{number}", {"model": model, "optimizer": optimizer})


def by_parameter(path: Any) -> Any:
    """Load a state, its options by parameter: stages have a group each, a plain model has one."""
    state = dsd.load(path)
    state["optimizer"]["param_groups"] = {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in state["optimizer"]["param_groups"].values()
        for name in group["params"]
    }
    return state


def test_training_goes_on_in_stages_and_from_stages_as_in_a_plain_model(ranks, tmp_path):
    """Same sums in the same order, so every bit must be the same."""
    plain = Even()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train(plain, optimizer, 2)
    paths = [str(tmp_path / "plain"), str(tmp_path / "stages")]
    dsd.save(paths[0], {"model": plain, "optimizer": optimizer})
    ranks(2)(train_and_save_stages, paths[1])
    assert_same(by_parameter(paths[1]), by_parameter(paths[0]))
    ranks(2)(go_on_in_stages, paths, str(tmp_path / "further"))
    train(plain, optimizer, 2, seed=2)
    dsd.save(tmp_path / "wanted", {"model": plain, "optimizer": optimizer})
    for number in range(2):
        found = by_parameter(tmp_path / f"further-{number}")
        assert_same(found, by_parameter(tmp_path / "wanted"))
        assert {float(one["step"]) for one in found["optimizer"]["state"].values()} == {4.0}
    again = Even()
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    dsd.load(tmp_path / "further-1", {"model": again, "optimizer": other})
    train(again, other, 2, seed=4)
    train(plain, optimizer, 2, seed=4)
    assert_same(again.state_dict(), plain.state_dict())


class Stage(nn.Module):
    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in numbers})


def stage(numbers: list[int], sharded: bool) -> tuple[nn.Module, Any]:
    model = Stage(numbers)
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.fill_(int(name.split(".")[1]) + 1)
    if sharded:
        mesh = mesh_of((2, 2), ("pp", "dp"))
        model = fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def own_numbers(sharded: bool) -> list[int]:
    number = distributed.get_rank() // (2 if sharded else 1)
    return [2 * number, 2 * number + 1]


def save_stages(path: str, sharded: bool) -> None:
    model, optimizer = stage(own_numbers(sharded), sharded)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    dsd.save(path, {"model": model, "optimizer": optimizer})


def load_stages(path: str, sharded: bool) -> None:
    numbers = [0, 3] if distributed.get_rank() < distributed.get_world_size() // 2 else [1, 2]
    few, _ = stage([one for one in numbers if one != 3], sharded)
    with pytest.raises(MismatchError, match=r"(?s)unexpected.*model/layers\.3"):
        dsd.load(path, {"model": few}, select="model")
    model, optimizer = stage(numbers, sharded)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    loaded = dsd.load(path, {"model": model, "optimizer": optimizer})
    assert loaded.report.unexpected == []
    for name, one in joined(model.state_dict()).items():
        assert_same(one, torch.full_like(one, int(name.split(".")[1]) + 0.5))
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_stages_merge_and_are_dealt_out_again(ranks, tmp_path, sharded):
    path = str(tmp_path / "stages")
    ranks(4 if sharded else 2)(save_stages, path, sharded)
    state = dsd.load(path)
    names = [f"layers.{n}.{kind}" for n in range(4) for kind in ("weight", "bias")]
    assert sorted(state["model"]) == sorted(names)
    assert sorted(state["optimizer"]["state"]) == sorted(names)
    assert float(state["model"]["layers.3.weight"][0, 0]) == 3.5
    ranks(4 if sharded else 2)(load_stages, path, sharded)


# Models on meta


def load_on_meta(path: str, layout: str) -> None:
    with torch.device("meta"):
        model = build(layout, Even)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    dsd.load(path, {"model": model, "optimizer": optimizer})
    assert not any(one.is_meta for one in [*model.parameters(), *model.buffers()])
    found = whole(model, optimizer)
    kept = dsd.load(path)
    assert_same(found[0], kept["model"])
    assert_same(found[1]["state"], kept["optimizer"]["state"])
    train(model, optimizer)


@pytest.mark.parametrize("layout", ["fsdp2-4", "fsdp2-tp", "hsdp"])
def test_models_on_meta_get_their_shards(ranks, tmp_path, layout):
    path = str(tmp_path / "ck")
    ranks(2)(train_and_save, "ddp", path)
    ranks(world_of(layout))(load_on_meta, path, layout)


# Random states


def save_streams(path: str) -> list[float]:
    """Draw as many numbers as no other rank does, save, and say which ones come next."""
    torch.manual_seed(100 + distributed.get_rank())
    torch.rand(1 + distributed.get_rank())
    dsd.save(path, {"rng": dsd.PerRank(dsd.rng_state())})
    return torch.rand(5).tolist()


def resume_streams(path: str) -> tuple[list[float], list[float], list[str]]:
    """Say which numbers come after loading, which would come without, and what is reported."""
    torch.manual_seed(7000 + distributed.get_rank())
    state = dsd.rng_state()
    fresh = torch.rand(5).tolist()
    rest = dsd.load(path, {"rng": dsd.PerRank(None)})
    dsd.set_rng_state(rest["rng"] or state)
    return torch.rand(5).tolist(), fresh, rest.report.fresh


def test_each_rank_goes_on_with_its_own_stream_and_new_ranks_with_theirs(ranks, tmp_path):
    path = str(tmp_path / "streams")
    wanted = ranks(3)(save_streams, path)
    assert len(set(map(tuple, wanted))) == 3
    for world_size in (2, 4):
        for rank, (found, fresh, reported) in enumerate(ranks(world_size)(resume_streams, path)):
            assert found == (wanted[rank] if rank < 3 else fresh)
            assert reported == ([] if rank < 3 else ["rng"])


# What is told to all


@pytest.mark.ranks(2)
def test_values_that_differ_are_told_before_anything_is_written():
    path = shared("values")
    with pytest.raises(RankDisagreementError, match=r"(?s)step differs.*PerRank"):
        dsd.save(path, {"step": distributed.get_rank(), "same": 1})
    assert not Path(path).exists()


@pytest.mark.ranks(2)
def test_a_replica_that_differs_in_one_element_is_told_on_request():
    model = nn.Linear(300, 500, bias=False)
    if distributed.get_rank() == 1:
        with torch.no_grad():
            model.weight[0, 1] = 7
    path = shared("one-element")
    with pytest.raises(RankDisagreementError, match=r"model/weight has other bytes on ranks \[1\]"):
        dsd.save(path, {"model": model}, check_replicas=True)
    assert not Path(path).exists()
    dsd.save(path, {"model": model})
    assert dsdformat.verify(path).ok


def experts_of(kind: str) -> Any:
    """What ranks may have under one name, and differently without noticing."""
    torch.manual_seed(distributed.get_rank())
    expert = nn.Linear(40, 30)
    if kind == "model":
        return nn.ModuleDict({"experts": nn.ModuleList([expert])})
    if kind == "fsdp2":  # beside what is sharded
        out = fully_shard(nn.Linear(4, 4), mesh=mesh_of((2,)))
        return nn.ModuleDict({"experts": nn.ModuleList([expert]), "out": out})
    if kind == "array":
        return {"experts.0.weight": expert.weight.detach().numpy()}
    if kind == "half":
        return {"experts.0.weight": expert.weight.detach().half()}
    if kind == "view":
        return {"experts.0.weight": expert.weight.detach().t()[::2]}
    return {"experts.0.weight": expert.weight.detach()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["model", "fsdp2", "array", "half", "view", "tensor"])
def test_tensors_of_one_name_that_ranks_made_for_themselves_are_refused_by_name(kind):
    path = shared(f"experts-{kind}")
    state = experts_of(kind)
    words = r"(?s)experts.*differs.*on rank 0.*on rank 1.*check_replicas=False"
    with pytest.raises(RankDisagreementError, match=words) as caught:
        dsd.save(path, {"model": state})
    assert "experts.0.weight" in str(caught.value)
    assert len(set(everywhere(str(caught.value)))) == 1
    assert not Path(path).exists()
    dsd.save(path, {"model": state}, check_replicas=False)
    assert dsdformat.verify(path).ok


@pytest.mark.ranks(2)
def test_the_moments_of_parameters_that_differ_are_refused_by_name():
    model = nn.Linear(40, 30, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.full_like(model.weight, 1 + distributed.get_rank())
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(1)
    with pytest.raises(RankDisagreementError, match="optimizer/state/weight/exp_avg differs"):
        dsd.save(shared("moments"), {"model": model, "optimizer": optimizer})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1-full-orig", "fsdp2"])
def test_of_buffers_that_ranks_count_for_themselves_those_of_rank_0_are_stored(layout):
    path = shared(f"buffers-{layout}")
    model = build(layout, Counts)
    with torch.no_grad():
        for one in model.buffers():
            one.fill_(distributed.get_rank() + 1)
    dsd.save(path, {"model": model})
    kept = dsd.load(path)["model"]
    assert {name: one.unique().tolist() for name, one in kept.items() if "norm" in name} == {
        "norm.weight": [1.0],
        "norm.bias": [0.0],
        "norm.running_mean": [1.0],
        "norm.running_var": [1.0],
        "norm.num_batches_tracked": [1],
    }
    with pytest.raises(RankDisagreementError, match=r"norm\..* has other bytes on ranks"):
        dsd.save(shared(f"again-{layout}"), {"model": model}, check_replicas=True)


class Counts(nn.Module):
    """A batch norm, whose buffers hold what a rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 64)
        self.norm = nn.BatchNorm1d(64)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["path", "option", "names", "shape", "value"])
def test_calls_that_differ_are_errors_on_every_rank(what):
    rank = distributed.get_rank()
    state: dict[str, Any] = {"a": torch.ones(3), "b": 2}
    if rank and what == "shape":
        state["a"] = torch.ones(4)
    if rank and what == "value":
        state["b"] = 3.0
    path = shared(f"differ-{what}{rank if what == 'path' else ''}")
    if what == "names" and rank:
        state["c"] = state.pop("a")
        dsd.save(path, state)  # each has names of its own, as stages do
        assert sorted(dsd.load(path)) == ["a", "b", "c"]
        return
    if what == "names":
        dsd.save(path, state)
        return
    with pytest.raises(DsdError) as caught:
        dsd.save(path, state, overwrite=what == "option" and rank == 1)
    assert len(set(everywhere(str(caught.value)))) == 1
    assert not Path(path).exists()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_is_that_of_all_and_leaves_nothing(failing):
    state: dict[str, Any] = {"a": torch.ones(3)}
    if distributed.get_rank() == failing:
        state["bad"] = dsd.PerRank(lambda: None)
    path = shared(f"failing{failing}")
    with pytest.raises(DistributedError, match=f"on rank {failing}") as caught:
        dsd.save(path, state)
    assert list(caught.value.failures) == [failing]
    assert not Path(path).exists()
    distributed.barrier()
    assert not [p for p in Path(path).parent.iterdir() if f"failing{failing}" in p.name]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_model_that_does_not_fit_on_one_rank_is_an_error_on_all(failing):
    path = shared(f"misfit{failing}")
    dsd.save(path, {"model": nn.Linear(3, 5)})
    model = nn.Linear(3, 4 if distributed.get_rank() == failing else 5)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DistributedError, match=f"on rank {failing}") as caught:
        dsd.load(path, {"model": model})
    assert isinstance(caught.value.failures[failing], MismatchError)
    assert_same(dict(model.state_dict()), dict(before))


@pytest.mark.ranks(2)
def test_a_checkpoint_that_is_there_is_kept_unless_asked():
    path = shared("kept")
    first = dsd.save(path, {"a": torch.ones(3)})
    with pytest.raises(DistributedError, match="already_exists|exists"):
        dsd.save(path, {"a": torch.zeros(3)})
    assert dsdformat.open(path).root == first
    distributed.barrier()
    second = dsd.save(path, {"a": torch.zeros(3)}, overwrite=True)
    assert dsdformat.open(path).root == second != first


@pytest.mark.ranks(4)
def test_a_save_moves_no_bytes_of_tensors_between_ranks():
    model = fully_shard(nn.Linear(512, 1024, bias=False), mesh=mesh_of((4,)))
    moved = []

    def note(name: str, args: tuple[Any, ...]) -> None:
        tensor = args[1] if name in ("all_gather", "all_to_all_single") else args[0]
        moved.append(tensor.nbytes)

    with watched(note, ("all_gather", "all_to_all_single", "broadcast", "reduce_scatter_tensor")):
        dsd.save(shared("quiet"), {"model": model})
    assert sum(moved) < 20_000  # of 2 MiB


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["fsdp1-full-orig", "fsdp2", "ddp"])
def test_tied_parameters_stay_tied(layout):
    path = shared(f"tied-{layout}")
    model = build(layout, Tied)
    dsd.save(path, {"model": model})
    kept = dsd.load(path)["model"]
    assert kept["emb.weight"] is kept["head.weight"]
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    dsd.load(path, {"model": model})
    found = get_state_dict(model, (), options=FULL)[0]
    assert_same(found, kept)


@pytest.mark.ranks(3)
def test_groups_of_some_ranks_save_and_load_by_themselves():
    rank = distributed.get_rank()
    groups = [distributed.new_group([0]), distributed.new_group([1, 2])]
    group = groups[min(rank, 1)]
    path = shared(f"group{min(rank, 1)}")
    dsd.save(path, {"rank": dsd.PerRank(rank), "one": torch.full((2,), min(rank, 1))}, group=group)
    found = dsd.load(
        path, {"one": torch.zeros(2, dtype=torch.int64), "rank": dsd.PerRank(None)}, group=group
    )
    assert found["rank"] == rank
    distributed.barrier()


@pytest.mark.ranks(2)
def test_one_rank_may_load_alone():
    path = shared("alone")
    dsd.save(path, {"one": torch.ones(3)})
    if distributed.get_rank() == 1:
        one = torch.zeros(3)
        dsd.load(path, {"one": one}, alone=True)
        assert one.tolist() == [1.0] * 3
    distributed.barrier()
