"""Hugging Face folders that ranks write together: the same bytes as from one process."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard

import dsdformat
import dsdformat.torch as dsd
from dsdformat.convert import convert
from dsdformat.errors import DsdError, RankDisagreementError
from dsdformat.limits import MIB
from dsdformat.storage.target import FileSink
from dsdformat.torch import common_files
from dsdformat.torch.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from tests.ranks.counting import watched
from tests.ranks.layouts import (
    LAYOUTS,
    Net,
    Pads,
    Tied,
    build,
    numbered_model,
)
from tests.ranks.options import FULL
from tests.ranks.shards import carried, dtensor, mesh_of, noise, spread
from tests.ranks.test_state_dict_broadcast import rss

NETS = {"net": Net, "pads": Pads, "tied": Tied}
CASES = [
    *((layout, "net") for layout in ("ddp", "fsdp1-nested-flat", "fsdp2-nested", "tp")),
    *((layout, "net") for layout in ("fsdp1-3-flat", "fsdp2-3")),
    *((layout, "net") for layout in ("fsdp1-hybrid-flat", "fsdp1-tp", "fsdp2-tp", "hsdp")),
    *((layout, "tied") for layout in ("fsdp1-full-flat", "fsdp2")),
    *((layout, "pads") for layout in ("fsdp1-full-flat", "fsdp2-3")),
]


def ties_of(net: str) -> tuple[Any, ...]:
    return ("drop", "duplicate") if net == "tied" else ("drop",)


def nothing(fd: int) -> None:
    """Stand for `os.fsync`, which takes most of the time; `tests/storage` tests that."""


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Make blocks and chunks so small that a few numbers have borders of all kinds."""
    small = {"BLOCK_NBYTES": 16, "CHUNK_NBYTES": 64, "LONG_NBYTES": 24, "PIECE_NBYTES": 32}
    with contextlib.ExitStack() as stack:
        for name, value in small.items():
            stack.enter_context(mock.patch.object(common_files, name, value))
        yield


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@functools.cache
def alone() -> Any:
    """A group of rank 0."""
    return distributed.new_group([0])


@pytest.mark.parametrize(
    ("layout", "net"),
    [pytest.param(*one, marks=pytest.mark.ranks(LAYOUTS[one[0]].world_size)) for one in CASES],
)
def test_every_layout_gives_the_bytes_of_the_plain_model(layout, net):
    model, plain = build(layout, NETS[net]), NETS[net]()
    state = numbered_model(plain)
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    plain.load_state_dict(numbered_model(plain))
    group = alone()
    for number, ties in enumerate(ties_of(net)):
        path = Path(shared())
        options: dict[str, Any] = {"ties": ties, "max_shard_bytes": 40, "drop_values": True}
        with small_blocks() if (len(layout) + number) % 2 else contextlib.nullcontext():
            names = dsd.export_safetensors(path, model, **options)
        if distributed.get_rank() == 0:
            dsd.export_safetensors(f"{path}-plain", plain, group=group, **options)
            assert contents(path) == contents(Path(f"{path}-plain"))
            check_folder(path, names, plain, every=ties == "duplicate" or net != "tied")


def check_folder(path: Path, names: tuple[str, ...], plain: nn.Module, *, every: bool) -> None:
    """Read all files with the safetensors library, and compare them with their index."""
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    files = [name for name in names if name.endswith(".safetensors")]
    assert len(files) > 1
    found = {key: value for name in files for key, value in load_file(path / name).items()}
    assert set(found) == set(index["weight_map"])
    nbytes = sum(one.numel() * one.element_size() for one in found.values())
    assert index["metadata"]["total_size"] == nbytes
    state = {k: v for k, v in plain.state_dict().items() if isinstance(v, torch.Tensor)}
    for name, tensor in found.items():
        assert tensor.shape == state[name].shape
        assert torch.equal(tensor, state[name])
    assert not every or set(found) == set(state)


def test_one_process_exports_what_convert_makes_of_its_checkpoint(tmp_path):
    model = nn.Sequential(nn.Linear(70, 90), nn.BatchNorm1d(90), nn.Linear(90, 3)).bfloat16()
    names = dsd.export_safetensors(tmp_path / "a", model, max_shard_bytes="10KB")
    dsd.save(tmp_path / "b", {"model": model})
    convert(
        tmp_path / "b", tmp_path / "c", to="huggingface", select="model", max_shard_bytes="10KB"
    )
    assert contents(tmp_path / "a") == contents(tmp_path / "c")
    assert set(names) == set(contents(tmp_path / "a"))


# B117
@pytest.mark.parametrize(("most", "count"), [("1GB", 1), ("200B", 2), ("100B", 3)])
def test_there_is_an_index_whenever_there_are_several_files(tmp_path, most, count):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    names = dsd.export_safetensors(
        tmp_path / "a", model, max_shard_bytes=most, files={"x.json": "{}"}
    )
    assert len([name for name in names if name.endswith(".safetensors")]) == count
    assert ("model.safetensors.index.json" in names) == (count > 1)
    assert (tmp_path / "a" / "x.json").read_text() == "{}"
    if count > 1:
        check_folder(tmp_path / "a", names, model, every=True)


# Random tensors in random spreads


def cases_of(rng: random.Random, number: int) -> list[tuple[int, ...]]:
    """Shapes: large enough for whole blocks, long runs and chunks of columns; and small ones."""
    if number < 4:
        return [(700, 900), (3, 400_000), (40_000,), (5, 3, 70, 300), (), (2_000_003,)]
    return [tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 4))) for _ in range(9)]


@pytest.mark.ranks(4)
def test_tensors_of_any_spread_lie_in_files_as_whole_ones():
    rng, mesh = random.Random(0), mesh_of((2, 2))
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.float8_e4m3fn)
    for case in range(8):
        state, whole = {"own": torch.ones(33)}, {"own": torch.ones(33)}
        for number, shape in enumerate(cases_of(rng, case)):
            tensor = noise(shape, rng.choice(dtypes), case * 100 + number)
            choice = [Replicate(), *map(Shard, range(len(shape)))]
            whole[f"t{number}"] = tensor
            state[f"t{number}"] = spread(tensor, mesh, [rng.choice(choice) for _ in range(2)])
        path = Path(shared())
        with small_blocks() if case > 4 else contextlib.nullcontext():
            dsd.export_safetensors(path, state, max_shard_bytes=rng.choice((10**9, 10**6, 50)))
        files = path.glob("*.safetensors")
        found = {name: one for file in files for name, one in load_file(file).items()}
        assert set(found) == set(whole)
        for name, tensor in whole.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(carried(found[name]), carried(tensor))


# Pipelines


@pytest.mark.ranks(2)
def test_stages_of_a_pipeline_make_one_model():
    torch.manual_seed(0)
    layers = [nn.Linear(40, 40) for _ in range(4)]
    rank, path = distributed.get_rank(), shared()
    own = nn.ModuleDict({str(at): layers[at] for at in (rank, rank + 2)})
    dsd.export_safetensors(f"{path}/stages", own)
    parts = [nn.ModuleDict({str(at): layers[at]}) for at in (rank, rank + 2)]
    dsd.export_safetensors(f"{path}/parts", parts)
    whole = nn.ModuleDict({str(at): layer for at, layer in enumerate(layers)})
    dsd.export_safetensors(f"{path}/whole", whole)
    for name in ("stages", "parts"):
        assert contents(Path(f"{path}/{name}")) == contents(Path(f"{path}/whole"))


# What goes wrong


@pytest.mark.ranks(2)
def test_if_one_rank_fails_all_raise_and_nothing_is_left():
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 3))
    for layer in model:
        fully_shard(layer)
    rank, folder = distributed.get_rank(), shared()
    dsd.export_safetensors(f"{folder}/old", model)

    def attempt(name: str, **options: Any) -> str:
        with pytest.raises(DsdError) as caught:
            dsd.export_safetensors(f"{folder}/{name}", model, **options)
        return f"{caught.value.code}: {caught.value.message}"

    def full(self: FileSink, byte_offset: int, pieces: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(FileSink, "write_at", full if rank == 1 else FileSink.write_at):
        for name, options in (("new", {}), ("old", {"overwrite": True})):
            told = attempt(name, **options)
            assert told.startswith("rank_failed: export failed on rank 1")
            assert "No space left" in told
    assert attempt("old").startswith("rank_failed: export failed on rank 0: ")
    assert attempt("new", max_shard_bytes="x") == "bad_argument: 'x' is no number of bytes"
    assert attempt("new", max_shard_bytes=100 + rank).startswith("ranks_disagree: what is exported")
    assert attempt("new", ties="both").startswith("bad_argument: ties='both' is neither")
    told = attempt("new", files={"../x": "y"} if rank == 1 else None)
    assert told.startswith("rank_failed: export failed on rank 1")
    distributed.barrier()
    assert os.listdir(folder) == ["old"]
    assert set(load_file(f"{folder}/old/model.safetensors")) == {
        f"{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
    }


@pytest.mark.ranks(2)
def test_a_name_that_means_other_tensors_on_other_ranks_is_told():
    rank = distributed.get_rank()
    with pytest.raises(RankDisagreementError, match="w differs between ranks"):
        dsd.export_safetensors(shared(), {"w": torch.zeros(2 + rank)})
    own = {"w": torch.full((2,), float(rank))}
    with pytest.raises(RankDisagreementError, match="w differs between ranks"):
        dsd.export_safetensors(shared(), own)
    with pytest.raises(RankDisagreementError, match="w has other bytes on ranks"):
        dsd.export_safetensors(shared(), own, check_replicas=True)
    path = shared()
    dsd.export_safetensors(path, own, check_replicas=False)
    assert load_file(f"{path}/model.safetensors")["w"].tolist() in ([0.0, 0.0], [1.0, 1.0])
    one = torch.ones(3)
    state = {"a": one, "b": one} if rank else {"a": one, "b": torch.ones(3)}
    with pytest.raises(RankDisagreementError, match="b differs between ranks"):
        dsd.export_safetensors(shared(), state)


@pytest.mark.ranks(2)
def test_of_buffers_that_differ_those_of_the_first_rank_are_written():
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(distributed.get_rank() + 5)
    path = shared()
    dsd.export_safetensors(path, model)
    found = load_file(f"{path}/model.safetensors")
    assert found["running_mean"].tolist() == [5.0, 5.0, 5.0]


def shared() -> str:
    """A path that does not exist, the same on all ranks."""
    os.fsync = nothing
    told = [tempfile.mkdtemp() + "/x"]
    distributed.broadcast_object_list(told)
    return told[0]


# B142, B145


@pytest.mark.ranks(2)
def test_units_of_fsdp_that_share_memory_are_not_taken_for_tied():
    """Nor are pieces of flat parameters written as tensors: shapes are those of the module."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    shapes = {name: tuple(one.shape) for name, one in plain.state_dict().items()}
    model = FullyShardedDataParallel(plain, device_id=torch.device("cpu"))
    model(torch.ones(2, 4)).sum().backward()
    path = shared()
    dsd.export_safetensors(path, model)
    with safe_open(f"{path}/model.safetensors", "pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in shapes} == shapes
        assert set(file.keys()) == set(shapes)
        assert file.metadata() == {"format": "pt"}


@pytest.mark.ranks(2)
def test_tied_weights_are_there_once_and_recorded_or_twice():
    model = build("fsdp2", Tied)
    path = shared()
    dsd.export_safetensors(f"{path}/drop", model)
    dsd.export_safetensors(f"{path}/duplicate", model, ties="duplicate")
    assert set(load_file(f"{path}/drop/model.safetensors")) == {
        "emb.weight",
        "mid.weight",
        "mid.bias",
        "seen",
    }
    found = load_file(f"{path}/duplicate/model.safetensors")
    assert torch.equal(found["emb.weight"], found["head.weight"])
    with safe_open(f"{path}/drop/model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["dsdformat.ties"]) == {"head.weight": "emb.weight"}


@pytest.mark.ranks(2)
def test_what_is_no_tensor_is_refused_by_all_ranks_alike():
    with pytest.raises(dsdformat.UnsupportedValueError, match=r"not \$\['extra._extra_state'\]"):
        dsd.export_safetensors(shared(), build("fsdp2", Net))


@pytest.mark.ranks(2)
def test_floating_point_is_converted_piece_by_piece_if_asked():
    model = build("fsdp2", Net)
    path = shared()
    dsd.export_safetensors(path, model, dtype=torch.bfloat16, drop_values=True)
    found = load_file(f"{path}/model.safetensors")
    full = get_model_state_dict(model, options=FULL)
    for name, tensor in found.items():
        wanted = torch.bfloat16 if full[name].is_floating_point() else full[name].dtype
        assert tensor.dtype == wanted
        assert torch.equal(tensor, full[name].to(wanted))


# What it costs


@pytest.mark.ranks(4)
def test_rows_of_large_tensors_do_not_travel():
    """Beside names and sizes only the blocks at the ends of shards go to another rank."""
    mesh = mesh_of((4,))
    whole = {f"w{n}": noise((1000, 1001), torch.float32, n) for n in (1, 2)}
    state = {name: spread(one, mesh, [Shard(0)]) for name, one in whole.items()}
    sent = []

    def note(name: str, args: Any) -> None:
        if name == "all_to_all_single":
            sent.append(args[1].numel())

    path = shared()
    with watched(note):
        dsd.export_safetensors(path, state)
    nbytes = 2 * 1000 * 1001 * 4
    assert 0 < sum(sent) < 4 * 2 * 64 * 1024 + 4096 < nbytes / 10
    found = load_file(f"{path}/model.safetensors")
    assert all(torch.equal(carried(found[name]), carried(one)) for name, one in whole.items())


@pytest.mark.ranks(4)
def test_memory_above_the_shards_is_a_bucket():
    """Where all has to be put together from columns; rows are written where they lie."""
    mesh = mesh_of((4,))
    local = torch.ones(2048, 4096)  # 32 MiB, of 128 MiB
    state = {"w": dtensor(local, mesh, [Shard(1)], [2048, 4096 * 4])}
    path = shared()
    dsd.export_safetensors(f"{path}-warm", {"w": torch.ones(4)})
    bucket = common_files.BUCKET_NBYTES
    common_files.CommonFiles.__init__.__kwdefaults__["bucket_nbytes"] = 16 * MIB
    try:
        before = rss("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        dsd.export_safetensors(path, state)
        risen = rss("VmHWM") - before
    finally:
        common_files.CommonFiles.__init__.__kwdefaults__["bucket_nbytes"] = bucket
    assert risen < (16 + 64) * MIB
    distributed.barrier()
    if distributed.get_rank() == 0:
        assert os.path.getsize(f"{path}/model.safetensors") == 4096 + 128 * MIB
        for name in ("", "-warm"):
            os.unlink(f"{path}{name}/model.safetensors")
