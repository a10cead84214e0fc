"""`torch.distributed.checkpoint` with our storage, in one process.

What torch's own storage gives back is the measure of a round trip; what is on the disk is measured
by our own readers.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

import numpy as np  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from exact import assert_same, assert_same_tensor  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint import format_utils  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata  # noqa: E402
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import (  # noqa: E402
    ChecksumError,
    FormatError,
    IncompleteError,
    MismatchError,
    NotACheckpointError,
    StorageError,
    UnsupportedValueError,
)
from dsdformat.errors import ArgumentError  # noqa: E402
from dsdformat.format.values import Named  # noqa: E402
from dsdformat.storage import target  # noqa: E402
from dsdformat.torch.buffers import as_bits  # noqa: E402
from dsdformat.torch.dcp import (  # noqa: E402
    DsdStorageReader,
    DsdStorageWriter,
    FileSystemReader,
    FileSystemWriter,
)
from dsdformat.torch.dtypes import logical_dtype  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is:UserWarning",  # what DCP says of a single process
    "ignore:Sparse CSR:UserWarning",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps" / "step-1"


def save(path: Path, state: dict[str, Any], **options: Any) -> DsdStorageWriter:
    planner = options.pop("planner", None)
    writer = DsdStorageWriter(path, **options)
    dcp.save(state, storage_writer=writer, planner=planner)
    return writer


def load(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    planner = options.pop("planner", None)
    dcp.load(state, storage_reader=DsdStorageReader(path, **options), planner=planner)
    return state


def failure(caught: Any) -> Exception:
    """Our error, as DCP gives it for rank 0."""
    assert list(caught.value.failures) == [0]
    error: Exception = caught.value.failures[0][0]
    return error


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


# What is on the disk


def test_one_process_writes_the_very_checkpoint_that_dsd_save_writes(path, tmp_path):
    model, _ = training()
    weight = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    state = {
        "model": dict(model.state_dict()),
        "tied": {"a": model[0].weight, "b": model[0].weight},
        "images": weight,
        "rest": {"step": 3, "betas": (0.8, 0.9), "names": ["x", "y"], "pair": (1, weight)},
    }
    digest = dsd.save(tmp_path / "own", state)
    assert save(path, state).save_id == digest


def test_every_reader_reads_it(path):
    model, optimizer = training()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    save(path, state)
    assert dsdformat.verify(path).ok
    with dsdformat.open(path) as checkpoint:
        assert "model/0.weight" in checkpoint
        assert checkpoint.tensor("model/0.weight").shape == (5, 3)
        assert checkpoint.value("step") == 3
        assert checkpoint.world_size == 1
    from safetensors.torch import load_file

    assert_same(load_file(path / "model.safetensors"), dict(model.state_dict()))


def test_flat_names_are_nested_again_with_lists_as_lists(path):
    model, optimizer = training()
    tensors = [torch.ones(2), {"deep": [torch.zeros(1), 5]}]
    save(path, {"optimizer": optimizer.state_dict(), "tensors": tensors, "a.b": 1, "a": {"c.d": 2}})
    state = dsd.load(path)
    groups = optimizer.state_dict()["param_groups"]
    assert_same(state["optimizer"]["param_groups"], groups)
    assert_same(state["tensors"], tensors)
    assert state["a.b"] == 1
    assert state["a"] == {"c.d": 2}
    assert_same(
        state["optimizer"]["state"]["0"]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_the_number_of_files_does_not_depend_on_that_of_tensors(path):
    save(path, {"model": {f"t{index}": torch.tensor(index) for index in range(400)}})
    assert left_in(path) == ["manifest.dsd", "model.safetensors"]


def test_codec_and_user_metadata_are_those_that_are_passed(path):
    save(path, {"w": torch.zeros(9000)}, codec="zstd", user={"run": "7"}, threads=1)
    with dsdformat.open(path) as checkpoint:
        assert checkpoint.user == {"run": "7"}
        assert checkpoint.tensor("w").chunks[0].codec == "zstd"
    assert_same_tensor(load(path, {"w": torch.ones(9000)})["w"], torch.zeros(9000))


def test_an_empty_state_is_a_checkpoint(path):
    save(path, {})
    assert dsd.load(path) == {}
    assert load(path, {}) == {}


# Values

SPARSE = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True).coalesce()
VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "int": 1,
    "large int": -(2**200),
    "float": 1.0,
    "negative zero": -0.0,
    "nan": float("nan"),
    "infinity": float("inf"),
    "complex": 1 - 2j,
    "str": "ähm\0 𝄞",
    "bytes": b"\x80\x04.\0",
    "tuple": (1, 1.0, True, (), ("x",)),
    "list": [1, [2.0, []], "x"],
    "empty list": [],
    "dict in a tuple": ({"b": 1, "a": {2: 3, None: (4,)}},),
    "odict in a tuple": (OrderedDict([("b", 1), ("a", 2)]),),
    "set": ({1, "x", (2, 3)}, frozenset({b"y"})),
    "counter in a tuple": (Counter("hello"),),
    "deque": deque([1, 2], maxlen=3),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "datetime": (datetime(2026, 7, 1, 12), timedelta(days=-1, microseconds=3)),
    "path": PurePosixPath("/a/b"),
    "numpy scalar": np.float32(0.1),
    "numpy array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "tensors in a tuple": (torch.arange(3), [torch.tensor(2.5, dtype=torch.bfloat16)], "x"),
    "array in a list": [np.arange(3), 1],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_comes_back_as_what_it_is(path, tmp_path, value):
    save(path, {"deep": {"value": value}})
    found = load(path, {"deep": {"value": "other"}})["deep"]["value"]
    assert_same(found, value)
    assert_same(dsd.load(path)["deep"]["value"], value)
    dcp.save({"v": value}, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"))
    theirs = {"v": "other"}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path / "torch"))
    assert_same(found, theirs["v"])


def test_a_stream_of_bytes_comes_back_at_its_place(path):
    stream = io.BytesIO(b"hello")
    stream.seek(2)
    save(path, {"a": stream, "b": (1, [io.BytesIO()])})
    found = load(path, {"a": None, "b": None})
    assert found["a"].read() == b"llo"
    assert found["a"].getvalue() == b"hello"
    assert type(found["b"][1][0]) is io.BytesIO
    # spec/pytorch.md, "Everything else"
    assert dsd.load(path)["a"] == (
        Named("python", "io.BytesIO"),
        {"contents": b"hello", "position": 2},
    )


@pytest.mark.parametrize(
    "parts", [{}, {"contents": b"x", "position": -1}, {"contents": "x", "position": 0}, 3], ids=str
)
def test_what_is_no_stream_as_a_writer_writes_it_stays_as_it_is(path, parts):
    value = (Named("python", "io.BytesIO"), parts)
    with dsdformat.create(path) as writer:
        writer.add_value("v", value)
    assert load(path, {"v": None})["v"] == value


def test_a_sparse_tensor_takes_the_place_of_the_one_that_is_there(path):
    save(path, {"s": SPARSE})
    assert_same_tensor(load(path, {"s": torch.zeros(4)})["s"], SPARSE)


REFUSED: dict[str, tuple[Any, str]] = {
    "function": (lambda: 1, "$.train.hook"),
    "object": (object(), "$.train.hook"),
    "in a tuple": ((1, {"f": print}), "$.train.hook[1].f"),
    "module": (nn.Linear(1, 1), "$.train.hook"),
    "meta tensor": (torch.empty(2, device="meta"), "$.train.hook"),
}


@pytest.mark.parametrize(("value", "place"), REFUSED.values(), ids=REFUSED)
def test_what_only_pickle_could_store_is_refused_by_its_name(path, value, place):
    with pytest.raises(CheckpointException) as caught:
        save(path, {"train": {"step": 1, "hook": value}})
    error = failure(caught)
    assert isinstance(error, UnsupportedValueError)
    assert error.path_in_tree == place
    assert left_in(path.parent) == []


# Tensors


def is_planned(dtype: torch.dtype) -> bool:
    """Whether torch's planners take a dtype; those of less than a byte they do not."""
    try:
        return torch._utils._element_size(dtype) > 0
    except TypeError:
        return False


DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and logical_dtype(value) and is_planned(value)
    },
    key=str,
)


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(count, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    if dtype.itemsize == 1 and dtype != torch.bool:
        return raw.view(dtype).view(shape)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype_comes_back(path, dtype):
    state = {"a": noise((3, 5), dtype), "none": noise((0, 2), dtype), "one": noise((), dtype)}
    save(path, state)
    into = {name: value.clone() for name, value in state.items()}
    for value in into.values():
        as_bits(value).zero_()
    found = load(path, dict(into))
    for name, value in state.items():
        assert_same_tensor(found[name], value)
        assert found[name].data_ptr() == into[name].data_ptr()


OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "packed": lambda t: t,
    "transposed": lambda t: t.T,
    "stepped": lambda t: t[:, ::2],
    "narrow": lambda t: t[1:3, 2:5],
    "expanded": lambda t: t[:1].expand(4, 6),
    "row": lambda t: t[2],
    "conj": lambda t: t.to(torch.complex64).mul(1j).conj(),
    "parameter": nn.Parameter,
}
# From a tensor with room for three times as many elements along the last dim.
INTO: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "narrow": lambda t, n: t[..., 1 : 1 + n],
    "stepped": lambda t, n: t[..., 1 : 1 + 2 * n : 2],
    "permuted": lambda t, n: t.movedim(-1, 0).contiguous().movedim(0, -1)[..., :n],
}


@pytest.mark.parametrize("into", INTO.values(), ids=INTO)
@pytest.mark.parametrize("out", OUT.values(), ids=OUT)
def test_tensors_are_saved_from_and_loaded_into_any_strides(path, out, into):
    value = out(torch.arange(24.0).view(4, 6))
    save(path, {"t": value})
    count = value.shape[-1]
    room = torch.full((*value.shape[:-1], 3 * count), -1.0, dtype=value.dtype)
    into_room = into(room, count)
    load(path, {"t": into_room})
    assert_same_tensor(into_room, value)
    everything = into_room if into_room._base is None else into_room._base
    into_room.fill_(-1.0)
    assert torch.equal(everything, torch.full_like(everything, -1.0)), "more was written to"


def test_tied_tensors_lie_in_the_file_once_and_fill_both_targets(path):
    weight = torch.randn(3, 4)
    save(path, {"embed": weight, "head": weight})
    with dsdformat.open(path) as checkpoint:
        assert len(checkpoint) == 1
    found = load(path, {"embed": torch.zeros(3, 4), "head": torch.zeros(3, 4)})
    assert_same(found, {"embed": weight, "head": weight})


def test_another_dtype_is_converted_as_torch_does_unless_that_is_an_error(path):
    value = torch.randn(100)
    save(path, {"w": value})
    found = load(path, {"w": torch.zeros(100, dtype=torch.bfloat16)})["w"]
    assert_same_tensor(found, value.to(torch.bfloat16))
    into = torch.zeros(100, dtype=torch.bfloat16)
    with pytest.raises(CheckpointException) as caught:
        load(path, {"w": into}, cast=False)
    error = failure(caught)
    assert isinstance(error, MismatchError)
    assert "torch.float32" in error.message
    assert "torch.bfloat16" in error.message
    assert not into.any()


def test_what_autograd_has_seen_notices_that_it_was_loaded(path):
    weight = nn.Parameter(torch.ones(3))
    save(path, {"w": torch.zeros(3)})
    loss = (weight * weight).sum()
    load(path, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Pair(torch.Tensor):
    """A tensor of two others."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)
        made.a, made.b = a, b
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Pair:
        return Pair(parts["a"], parts["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return False
        assert func is torch.ops.aten.detach.default
        return Pair(args[0].a.detach(), args[0].b.detach())


def test_a_tensor_subclass_is_stored_by_its_components_and_made_if_it_is_allowed(path):
    pair = Pair(torch.ones(2), torch.zeros(2))
    save(path, {"pair": pair})
    with dsdformat.open(path) as checkpoint:
        assert len(checkpoint) == 2
    with pytest.raises(CheckpointException) as caught:
        load(path, {"pair": None})
    assert isinstance(failure(caught), UnsupportedValueError)
    found = load(path, {"pair": None}, types=[Pair])["pair"]
    assert type(found) is Pair
    assert_same([found.a, found.b], [pair.a, pair.b])


# Whole trainings


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_training_resumes_bit_for_bit(path, flat):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = training()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state, "lr": scheduler, "step": 2}
    save(path, state)

    torch.manual_seed(9)
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    fresh = torch.optim.AdamW(other.parameters(), lr=1.0)
    later = torch.optim.lr_scheduler.CosineAnnealingLR(fresh, 3)
    model_into, optimizer_into = get_state_dict(other, fresh, options=options)
    found = load(path, {"model": model_into, "optimizer": optimizer_into, "lr": later, "step": 0})
    set_state_dict(
        other,
        fresh,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=options,
    )
    assert found["step"] == 2
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert_same(later.state_dict(), scheduler.state_dict())


def test_a_checkpoint_of_dsd_save_is_read_by_dcp(path):
    model, optimizer = training()
    dsd.save(path, {"model": model, "optimizer": optimizer, "step": 5, "rng": dsd.rng_state()})
    other, _ = training()
    for parameter in other.parameters():
        parameter.data.zero_()
    average = torch.zeros(5, 3)
    found = load(
        path,
        {
            "model": other.state_dict(),
            "optimizer": {"state": {"0.weight": {"exp_avg": average}}},
            "step": 0,
        },
    )
    assert found["step"] == 5
    assert_same(dict(found["model"]), dict(model.state_dict()))
    assert_same_tensor(average, optimizer.state[model[0].weight]["exp_avg"])


def test_torchs_own_tool_makes_a_file_of_it(path, tmp_path):
    model, optimizer = training()
    state = {"model": dict(model.state_dict()), "groups": optimizer.state_dict()["param_groups"]}
    save(path, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_utils, "FileSystemReader", FileSystemReader)
        format_utils.dcp_to_torch_save(path, tmp_path / "all.pt")
    assert_same(torch.load(tmp_path / "all.pt", weights_only=False), state)


# Metadata


def test_the_metadata_have_each_tensor_as_one_chunk_and_the_paths_of_all_names(path):
    writer = save(path, {"m": {"w": torch.zeros(2, 3), "n": [1]}, "l": [torch.ones(1)]})
    reader = DsdStorageReader(path)
    metadata = reader.read_metadata()
    entries = metadata.state_dict_metadata
    assert sorted(entries) == ["l.0", "m.n", "m.w"]
    assert entries["m.w"].size == torch.Size([2, 3])
    assert entries["m.w"].properties.dtype == torch.float32
    assert [chunk.sizes for chunk in entries["m.w"].chunks] == [torch.Size([2, 3])]
    assert entries["m.n"] == BytesStorageMetadata()
    assert metadata.planner_data == {"m.w": ("m", "w"), "m.n": ("m", "n"), "l.0": ("l", 0)}
    assert metadata.storage_meta.save_id == writer.save_id == dsdformat.open(path).root
    assert metadata.storage_meta.load_id == reader.load_id
    assert metadata.storage_meta.checkpoint_id == path


def test_a_planner_is_told_of_the_save(path):
    told = []

    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            told.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    save(path, {"a": 1}, planner=Planner())
    assert told[0].checkpoint_id == path
    assert told[0].save_id


def test_names_that_dots_make_equal_are_an_error(path):
    dsd.save(path, {"a.b": 1, "a": {"b": 2}})
    with pytest.raises(CheckpointException) as caught:
        load(path, {"a.b": None})
    assert isinstance(failure(caught), MismatchError)


# Planners


class Half(DefaultSavePlanner):
    """The example of torch's documentation: a planner that transforms what it gives."""

    asked = 0

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item):
        item = super().resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO:
            return item
        Half.asked += 1
        return item.to(torch.float16)


def test_a_planner_may_transform_tensors_and_is_asked_when_they_are_written(path):
    value = torch.randn(4, 5)
    save(path, {"w": value, "v": {"a": (1, 2)}}, planner=Half())
    assert Half.asked >= 2
    state = dsd.load(path)
    assert_same(state, {"w": value.half(), "v": {"a": (1, 2)}})


def test_a_planner_that_gives_no_objects_is_refused(path):
    class Own(SavePlanner):
        def __init__(self) -> None:
            self.inner = DefaultSavePlanner()

        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

        def create_local_plan(self):
            return self.inner.create_local_plan()

        def create_global_plan(self, all_plans):
            return self.inner.create_global_plan(all_plans)

        def finish_plan(self, new_plan):
            return new_plan

        def resolve_data(self, write_item):
            return self.inner.resolve_data(write_item)

    save(path, {"w": torch.ones(2)}, planner=Own())
    assert_same(dsd.load(path), {"w": torch.ones(2)})
    with pytest.raises(CheckpointException) as caught:
        save(path.with_name("b"), {"w": torch.ones(2), "step": 1}, planner=Own())
    error = failure(caught)
    assert isinstance(error, UnsupportedValueError)
    assert error.path_in_tree == "$.step"


def test_a_planner_that_drops_the_storage_data_is_an_error(path):
    class Dropping(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            return type(new_plan)(new_plan.items)

    save(path, {"w": torch.ones(2)}, planner=Dropping())  # one process needs none
    assert_same(dsd.load(path), {"w": torch.ones(2)})


def test_states_that_are_not_flattened_are_read_in_either_way(path):
    state = {"model": {"w": torch.arange(3.0), "b": {"c": (1,)}}, "step": 4}
    save(path, dict(state), planner=DefaultSavePlanner(flatten_state_dict=False))
    assert_same(dsd.load(path), state)
    flat = load(path, {"model": {"w": torch.zeros(3), "b": {"c": None}}, "step": 0})
    assert_same(flat, state)
    save(path.with_name("flat"), state)
    for folder in (path, path.with_name("flat")):
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        assert_same(load(folder, {"model": None, "step": 0}, planner=planner), state)


def test_a_planner_that_caches_its_plans_saves_each_step(path, monkeypatch):
    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip("this torch caches no plans")
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        monkeypatch.setattr(SavePlanner, f"_cached_{name}", {}, raising=False)
    for step in range(3):
        state = {
            "w": torch.full((3,), float(step)),
            "step": step,
            "l": [torch.ones(1), {"a": step}],
        }
        folder = path.with_name(f"step-{step}")
        save(folder, state, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert_same(dsd.load(folder), state)


def test_a_list_that_has_grown_comes_back_into_an_empty_one(path):
    save(path, {"k": [torch.ones(2), torch.zeros(1)], "rng": {"a": {"b": 1}}})
    found = load(path, {"k": [], "rng": None})
    assert_same(found, {"k": [torch.ones(2), torch.zeros(1)], "rng": {"a": {"b": 1}}})


def test_a_dict_never_takes_the_place_of_a_tensor(path):
    save(path, {"w": {"a": torch.ones(2)}})
    into = {"w": torch.zeros(2)}
    with pytest.raises(CheckpointException) as caught:
        load(path, into)
    assert isinstance(failure(caught), MismatchError)
    assert torch.equal(into["w"], torch.zeros(2))


def test_a_name_that_is_missing_is_torchs_error_unless_the_load_is_partial(path):
    save(path, {"a": torch.ones(2)})
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: b"):
        load(path, {"a": torch.zeros(2), "b": 1})
    planner = DefaultLoadPlanner(allow_partial_load=True)
    found = load(path, {"a": torch.zeros(2), "b": 1}, planner=planner)
    assert_same(found, {"a": torch.ones(2), "b": 1})


def test_another_shape_is_torchs_error_and_nothing_is_changed(path):
    save(path, {"a": torch.ones(2), "b": torch.ones(3)})
    into = {"a": torch.zeros(2), "b": torch.zeros(4)}
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(path, into)
    assert not into["a"].any()


# Overwriting, and failures


def test_a_checkpoint_that_is_there_is_replaced_only_if_that_is_asked_for(path):
    save(path, {"w": torch.ones(2)})
    with pytest.raises(CheckpointException, match="Checkpoint already exists") as caught:
        save(path, {"w": torch.zeros(2)})
    error = failure(caught)
    assert isinstance(error, StorageError)
    assert error.code == "already_exists"
    assert_same(dsd.load(path), {"w": torch.ones(2)})
    save(path, {"w": torch.zeros(2)}, overwrite=True)
    assert_same(dsd.load(path), {"w": torch.zeros(2)})
    dcp.save({"w": torch.full((2,), 5.0)}, storage_writer=FileSystemWriter(path))
    assert_same(dsd.load(path), {"w": torch.full((2,), 5.0)})
    assert left_in(path.parent) == ["step-1"]


def test_a_folder_that_is_no_checkpoint_is_never_replaced(path):
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("…")
    with pytest.raises(CheckpointException) as caught:
        save(path, {"w": torch.zeros(2)}, overwrite=True)
    assert failure(caught).code == "not_replaceable"
    assert left_in(path) == ["thesis.tex"]
    assert left_in(path.parent) == ["step-1"]


def test_the_writer_of_torchs_name_writes_beside_other_files_as_torchs_does(path):
    path.mkdir(parents=True)
    torch.save({"w": torch.ones(2)}, path / "model.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_utils, "FileSystemWriter", FileSystemWriter)
        format_utils.torch_save_to_dcp(path / "model.pt", path)
    assert left_in(path) == ["manifest.dsd", "model.pt", "model.safetensors"]
    assert_same(dsd.load(path), {"w": torch.ones(2)})
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.zeros(2)}, storage_writer=FileSystemWriter(path))
    assert failure(caught).code == "not_replaceable"
    assert_same(dsd.load(path), {"w": torch.ones(2)})


@pytest.mark.parametrize("when", ["write_at", "close"])
def test_a_disk_that_is_full_leaves_the_old_checkpoint_whole_and_no_trace(path, monkeypatch, when):
    save(path, {"w": torch.ones(2)})

    def full(self, *args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(target.FileSink, when, full)
        with pytest.raises(CheckpointException, match="No space left"):
            save(path, {"w": torch.zeros(2)}, overwrite=True)
    assert dsdformat.verify(path).ok
    assert_same(dsd.load(path), {"w": torch.ones(2)})
    assert left_in(path.parent) == ["step-1"]


def test_a_writer_that_failed_can_be_used_again(path):
    writer = DsdStorageWriter(path)
    with pytest.raises(CheckpointException):
        dcp.save({"f": print}, storage_writer=writer)
    dcp.save({"f": 1}, storage_writer=writer)
    dcp.save({"f": 2}, storage_writer=writer, checkpoint_id=path.with_name("other"))
    assert dsd.load(path) == {"f": 1}
    assert dsd.load(path.with_name("other")) == {"f": 2}
    assert left_in(path.parent) == ["other", "step-1"]


def test_a_save_that_is_given_up_between_the_steps_leaves_nothing(path):
    class Failing(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            raise RuntimeError("the planner fails")

    writer = DsdStorageWriter(path)
    with pytest.raises(CheckpointException, match="the planner fails"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=Failing())
    writer.reset()
    assert left_in(path.parent) == []


def test_a_writer_that_is_dropped_takes_its_unfinished_folder_along(path):
    class Failing(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            raise RuntimeError("the planner fails")

    def attempt() -> None:
        try:
            dcp.save({}, storage_writer=DsdStorageWriter(path), planner=Failing())
        except CheckpointException:
            return
        raise AssertionError("it did not fail")

    attempt()
    gc.collect()  # tracebacks hold the frames that hold them
    assert left_in(path.parent) == []


# Options


def test_extensions_are_refused_with_a_hint_at_codecs(path):
    with pytest.raises(ArgumentError, match="_extensions") as caught:
        DsdStorageWriter(path, _extensions=[object()])
    assert "codec" in caught.value.hint


def test_what_torchs_writer_takes_is_taken(path):
    options = {
        "single_file_per_rank": False,
        "sync_files": False,
        "thread_count": 2,
        "per_thread_copy_ahead": 1,
        "cache_staged_state_dict": True,
        "_extensions": None,
    }
    save(path, {"w": torch.ones(2)}, **options)
    with pytest.raises(ArgumentError, match="tread_count"):
        DsdStorageWriter(path, tread_count=1)


@pytest.mark.parametrize("kind", [DsdStorageWriter, DsdStorageReader])
def test_checkpoint_ids_are_paths_and_no_urls(kind, tmp_path):
    assert kind.validate_checkpoint_id(tmp_path / "x")
    assert kind.validate_checkpoint_id(str(tmp_path / "x"))
    assert not kind.validate_checkpoint_id("s3://bucket/x")


def test_the_checkpoint_id_of_the_call_is_used(path):
    dcp.save({"a": 1}, storage_writer=DsdStorageWriter("/nowhere"), checkpoint_id=path)
    state = {"a": 0}
    dcp.load(state, storage_reader=DsdStorageReader("/nowhere"), checkpoint_id=str(path))
    assert state == {"a": 1}


def test_a_writer_can_be_sent_to_another_process_at_any_time(path):
    class Sending(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            pickle.loads(pickle.dumps(writer))
            return super().finish_plan(new_plan)

    writer = DsdStorageWriter(path)
    dcp.save({"a": 1}, storage_writer=writer, planner=Sending())
    assert dsd.load(path) == {"a": 1}
    copy = pickle.loads(pickle.dumps(writer))
    copy.reset(path.with_name("b"))
    dcp.save({"a": 2}, storage_writer=copy)
    assert dsd.load(path.with_name("b")) == {"a": 2}


def test_importing_the_runtime_does_not_load_dcp():
    code = "import dsdformat.torch, sys; assert 'torch.distributed.checkpoint' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# What is wrong with a file


def test_what_is_no_checkpoint_is_told_as_our_error(path):
    with pytest.raises(NotACheckpointError):
        DsdStorageReader(path).read_metadata()
    with pytest.raises(CheckpointException) as caught:
        load(path, {"a": 1})
    assert isinstance(failure(caught), NotACheckpointError)


def test_a_folder_of_torchs_own_storage_is_told_as_that(path):
    dcp.save({"a": 1}, storage_writer=dcp.FileSystemWriter(path))
    with pytest.raises(CheckpointException, match="torch.distributed.checkpoint's own") as caught:
        load(path, {"a": 1})
    assert isinstance(failure(caught), NotACheckpointError)


def test_a_damaged_manifest_is_an_error_even_for_a_planner_that_looks_into_the_metadata(path):
    class Looking(DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            assert "a" in metadata.state_dict_metadata
            super().set_up_planner(state_dict, metadata, is_coordinator)

    save(path, {"a": 1})
    raw = bytearray((path / "manifest.dsd").read_bytes())
    raw[40] ^= 1
    (path / "manifest.dsd").write_bytes(raw)
    with pytest.raises(CheckpointException) as caught:
        load(path, {"a": 1}, planner=Looking())
    assert isinstance(failure(caught), FormatError)


def test_a_flipped_bit_of_data_is_an_error_that_names_tensor_and_file(path):
    save(path, {"m": {"w": torch.ones(1000)}})
    data = path / "m.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CheckpointException, match="m/w") as caught:
        load(path, {"m": {"w": torch.zeros(1000)}})
    error = failure(caught)
    assert isinstance(error, ChecksumError)
    assert error.where == "m.safetensors"
    load(path, {"m": {"w": torch.zeros(1000)}}, verify=False)


def test_another_checkpoint_than_the_digest_says_is_an_error(path):
    digest = save(path, {"a": 1}).save_id
    assert load(path, {"a": 0}, digest=digest) == {"a": 1}
    with pytest.raises(CheckpointException) as caught:
        load(path, {"a": 0}, digest="0" * 64)
    assert failure(caught).code == "digest_mismatch"


class Canary:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_a_value_that_pretends_to_be_a_pickle_stays_bytes(path, tmp_path):
    canary = tmp_path / "canary"
    evil = pickle.dumps(Canary(canary))
    stream = io.BytesIO()
    torch.save(Canary(canary), stream)
    values = [evil, stream.getvalue()]
    with dsdformat.create(path) as writer:
        writer.add({"a": values[0], "b": values[1], "c": (values[0], [values[1]])})
    found = load(path, {"a": None, "b": None, "c": None})
    assert found == {"a": values[0], "b": values[1], "c": (values[0], [values[1]])}
    assert not canary.exists()


def test_files_of_pickles_beside_a_checkpoint_are_never_opened(path, tmp_path):
    canary = tmp_path / "canary"
    save(path, {"a": 1})
    for name in (".metadata", "__0_0.distcp", "data.pkl"):
        (path / name).write_bytes(pickle.dumps(Canary(canary)))
    assert load(path, {"a": 0}) == {"a": 1}
    assert not canary.exists()


def test_no_pickle_is_stored(path):
    model, optimizer = training()
    save(path, {"model": model, "optimizer": optimizer.state_dict(), "t": (1, {"a": {1, 2}})})
    for file in path.iterdir():
        raw = file.read_bytes()
        assert b"\x80\x02" not in raw[:4096]
        assert b"PK\x03\x04" not in raw
        assert b"ctorch" not in raw


# Saves that go on in the background


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds all data files back until it is set."""
    event, write_at = threading.Event(), target.FileSink.write_at

    def waiting(self, *args):
        assert event.wait(30)
        write_at(self, *args)

    monkeypatch.setattr(target.FileSink, "write_at", waiting)
    yield event
    event.set()


def done(future: Any) -> None:
    getattr(future, "upload_completion", future).result(timeout=60)


def changing() -> dict[str, Any]:
    shared = torch.ones(1000).share_memory_()
    return {
        "t": torch.ones(200_000),
        "shared": shared,
        "tied": [shared, shared],
        "zero": torch.tensor(1, dtype=torch.int8),
        "view": torch.ones(5, 6)[:, ::2],
        "array": np.ones(3),
        "deep": {"list": [1, [2]], "tuple": (torch.ones(2), [3], torch.Size([4])), "n": 1},
        "stream": io.BytesIO(b"abc"),
    }


def change(state: dict[str, Any]) -> None:
    for name in ("t", "shared", "zero", "view"):
        state[name].fill_(7)
    state["array"][:] = 7
    state["deep"]["list"][1].append(7)
    state["deep"]["tuple"][0].fill_(7)
    state["deep"]["tuple"][1].append(7)
    state["deep"]["n"] = 7
    state["stream"].seek(0)
    state["stream"].write(b"7")


@pytest.mark.parametrize("cached", [False, True])
def test_a_save_in_the_background_has_what_was_there_when_it_began(path, gate, cached):
    state = changing()
    writer = DsdStorageWriter(path, cache_staged_state_dict=cached)
    future = dcp.async_save(state, storage_writer=writer)
    change(state)
    gate.set()
    done(future)
    found, wanted = dsd.load(path), changing()
    assert found.pop("stream")[1]["contents"] == wanted.pop("stream").getvalue()
    assert_same(found, wanted)
    assert found["tied"][0] is found["tied"][1]


def test_a_save_in_the_background_that_fails_says_so_when_it_is_waited_for(path):
    future = dcp.async_save({"f": print}, storage_writer=DsdStorageWriter(path))
    with pytest.raises(CheckpointException) as caught:
        done(future)
    assert isinstance(failure(caught), UnsupportedValueError)


def test_a_load_while_a_save_goes_on_finds_the_old_checkpoint_or_none(path, gate):
    first = dcp.async_save({"a": torch.ones(3)}, storage_writer=DsdStorageWriter(path))
    with pytest.raises(CheckpointException) as caught:
        load(path, {"a": torch.zeros(3)})
    assert isinstance(failure(caught), NotACheckpointError)
    gate.set()
    done(first)
    gate.clear()
    writer = DsdStorageWriter(path, overwrite=True)
    second = dcp.async_save({"a": torch.full((3,), 2.0)}, storage_writer=writer)
    assert_same(load(path, {"a": torch.zeros(3)}), {"a": torch.ones(3)})
    gate.set()
    done(second)
    assert_same(load(path, {"a": torch.zeros(3)}), {"a": torch.full((3,), 2.0)})


def test_a_load_during_which_the_checkpoint_is_replaced_fails_and_mixes_nothing(path):
    class Replacing(DefaultLoadPlanner):
        def create_local_plan(self):
            save(path, {"a": torch.zeros(3), "b": 2}, overwrite=True)
            return super().create_local_plan()

    save(path, {"a": torch.ones(3), "b": 1})
    into = {"a": torch.full((3,), 9.0), "b": 0}
    with pytest.raises(CheckpointException) as caught:
        load(path, into, planner=Replacing())
    assert isinstance(failure(caught), IncompleteError)
    assert_same(into, {"a": torch.full((3,), 9.0), "b": 0})
