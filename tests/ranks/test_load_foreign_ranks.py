"""Checkpoints of others, loaded by ranks that each read what is their own."""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dsdformat.torch as dsd
from dsdformat.errors import DistributedError
from dsdformat.storage.local import LocalStorage
from dsdformat.torch.state_dict import StateDictOptions, get_state_dict
from tests.ranks.layouts import (
    LAYOUTS,
    OPTIMIZERS,
    Net,
    build,
    memory_of,
    mesh_2d,
    numbered_model,
    numbered_optimizer,
)
from tests.ranks.options import FULL
from tests.torch_runtime.exact import assert_same

ADAMW = OPTIMIZERS["adamw"]
TARGETS = {
    2: ("fsdp2", "tp", "fsdp1-full-orig", "fsdp1-full-flat"),
    3: ("fsdp2-3",),
    4: ("fsdp2-tp", "hsdp"),
}


def plain_optimizer() -> dict[str, Any]:
    """The state of a plain AdamW by numbers, as torch gives it."""
    named = numbered_optimizer(Net(), ADAMW)
    names = [name for name, _ in Net().named_parameters()]
    state = {names.index(name): entry for name, entry in named["state"].items()}
    (group,) = named["param_groups"]
    return {"state": state, "param_groups": [{**group, "params": list(range(len(names)))}]}


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}


def save_sharded(folder: Path, state: dict[str, torch.Tensor], files: int) -> Path:
    """A folder as Hugging Face has it, of several files."""
    folder.mkdir()
    names = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
    parts: list[dict[str, torch.Tensor]] = [{} for _ in names]
    for number, (name, one) in enumerate(state.items()):
        parts[number % files][name] = one
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    weight_map = {name: names[number % files] for number, name in enumerate(state)}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> dict[str, Any]:
    """One training, as others keep it."""
    folder = tmp_path_factory.mktemp("foreign")
    model, optimizer = numbered_model(Net()), plain_optimizer()
    save_file(tensors_of(model), folder / "model.safetensors")
    save_sharded(folder / "hf", tensors_of(model), 3)
    torch.save(optimizer, folder / "optimizer.pt")
    torch.save({"model": model, "optimizer": optimizer, "epoch": 4}, folder / "one.pt")
    torch.save(
        {"model_state_dict": model, "optimizer_state_dict": optimizer, "epoch": 4},
        folder / "general.pt",
        _use_new_zipfile_serialization=False,
    )
    rename = [("model_state_dict/", "model/"), ("optimizer_state_dict/", "optimizer/")]
    kept = str(folder / "optimizer.pt")
    return {
        "file and dict": ({"model": str(folder / "model.safetensors"), "optimizer": kept}, None),
        "folder and dict": ({"model": str(folder / "hf"), "optimizer": kept}, None),
        "one file": (str(folder / "one.pt"), None),
        "general file of old": (str(folder / "general.pt"), rename),
    }


def load_all(targets: tuple[str, ...], sources: dict[str, Any]) -> list[str]:
    """Load every form into every layout, each in one call; name what comes out wrong."""
    wrong = []
    wanted = tensors_of(numbered_model(Net())), numbered_optimizer(Net(), ADAMW)
    for target, (source, (path, rename)) in itertools.product(targets, sources.items()):
        model = build(target)
        state = {"model": model, "optimizer": ADAMW(model.parameters())}
        # Safetensors have no place for the extra state of a module.
        rest = dsd.load(path, state, rename=rename, strict={"model/extra._extra_state": False})
        found = get_state_dict(model, state["optimizer"], options=FULL)
        try:
            assert rest == ({} if isinstance(path, dict) else {"epoch": 4})
            assert_same(tensors_of(found[0]), wanted[0])
            assert_same(found[1]["state"], wanted[1]["state"])
            assert found[1]["param_groups"][0]["weight_decay"] == 0.125
        except AssertionError as error:
            wrong.append(f"{source} into {target}: {error}")
    return wrong


# B140


@pytest.mark.parametrize("world_size", TARGETS)
def test_a_plain_model_and_its_optimizer_are_loaded_into_any_layout_in_one_call(
    foreign, ranks, world_size
):
    targets = TARGETS[world_size]
    assert all(LAYOUTS[target].world_size == world_size for target in targets)
    assert ranks(world_size)(load_all, targets, foreign) == [[]] * world_size


# What is read


class Wide(nn.Module):
    """Sizes that ranks divide, so large that what lies between columns is longer than a page."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 4096, bias=False)
        self.down = nn.Linear(4096, 64, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x)))


@contextmanager
def reads_of(names: tuple[str, ...]):
    """Note the lengths of the reads of files whose names begin so."""
    kept, reads = LocalStorage.read_into, []

    def noting(self, label, byte_offset, into):
        if label.startswith(names):
            reads.append(len(into))
        return kept(self, label, byte_offset, into)

    LocalStorage.read_into = noting
    try:
        yield reads
    finally:
        LocalStorage.read_into = kept


FORMS = {"hf": "hf", "file": "wide.safetensors", "pt": "wide.pt"}


def wide_sharded() -> nn.Module:
    mesh = mesh_2d()
    with torch.device("meta"):
        model = Wide()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


def count_reads(folder: str) -> dict[str, tuple[int, int, int]]:
    """Bytes that this rank holds, bytes it reads, and in how many reads, for each form."""
    found = {}
    for form, name in FORMS.items():
        model = wide_sharded()
        with reads_of(("model-", "wide")) as reads:
            dsd.load(f"{folder}/{name}", {"model": model}, verify=False)
        local = [one.to_local() for one in model.parameters()]
        for parameter, one in zip(model.parameters(), local, strict=True):
            whole = parameter.full_tensor()
            assert torch.equal(whole.flatten(), torch.arange(whole.numel()).float()), one.shape
        own = sum(one.nbytes for one in local)
        found[form] = (own, sum(reads), len(reads))
    return found


def test_each_rank_reads_its_slices_of_a_file_and_not_much_more(ranks, tmp_path):
    state = {
        name: torch.arange(one.numel()).float().view(one.shape)
        for name, one in Wide().state_dict().items()
    }
    save_file(state, tmp_path / "wide.safetensors")
    save_sharded(tmp_path / "hf", state, 2)
    torch.save(state, tmp_path / "wide.pt")
    total = sum(one.nbytes for one in state.values())
    results = ranks(4)(count_reads, str(tmp_path))
    for form in FORMS:
        own = sum(result[form][0] for result in results)
        read = sum(result[form][1] for result in results)
        assert own == total + 2 * 64 * 4, "the tensor-parallel ranks have norms each"
        for held, nbytes, _ in (result[form] for result in results):
            assert held <= nbytes <= 1.05 * held + 64 * 1024  # headers, and the zip's directory
        assert read <= 1.05 * own + 4 * 64 * 1024
        # One read for rows, one for each of 32 pieces of rows, the rest for small tensors and
        # what says where all are.
        assert max(result[form][2] for result in results) < 32 + 48
    rules = [("*up.weight", 0, "tp"), ("*down.weight", 1, "tp")]
    for form, name in FORMS.items():  # and that is what was to be expected
        found = dsd.preflight(tmp_path / name, Wide(), {"shard": 2, "tp": 2}, shard=rules).ranks
        assert found.held_nbytes.tolist() == [result[form][0] for result in results]
        for planned, result in zip(found.read_nbytes.tolist(), results, strict=True):
            assert planned <= result[form][1] <= 1.05 * planned + 64 * 1024


# What is wrong, is so on every rank, and changes nothing


def load_damaged(path: str) -> list[tuple[int, str]]:
    model = build("fsdp2")
    before = memory_of(model.state_dict())
    with pytest.raises(DistributedError) as caught:
        dsd.load(path, {"model": model})
    assert_same(memory_of(model.state_dict()), before)
    return [(rank, error.code) for rank, error in caught.value.failures.items()]


def test_a_damaged_record_is_found_by_the_rank_that_compares_it_and_told_to_all(ranks, tmp_path):
    path = tmp_path / "one.pt"
    torch.save(numbered_model(Net()), path)
    data = bytearray(path.read_bytes())
    at = data.index(numbered_model(Net())["inner.0.weight"].numpy().tobytes())
    data[at + 5] ^= 1
    path.write_bytes(data)
    first, second = ranks(2)(load_damaged, str(path))
    assert first == second
    assert [code for _, code in first] == ["foreign_checksum"]


# DCP


def save_dcp(folder: str) -> Any:
    """What a training under FSDP2 saves with DCP, in both forms of an optimizer's state."""
    model = build("fsdp2")
    optimizer = ADAMW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        states = get_state_dict(model, optimizer, options=options)
        state = {"model": tensors_of(states[0]), "optimizer": states[1], "step": 3}
        writer = FileSystemWriter(f"{folder}/{flat}", sync_files=False)
        dcp.save(state, storage_writer=writer)
    return get_state_dict(model, optimizer, options=FULL)


def load_dcp(folder: str, targets: tuple[str, ...], wanted: Any) -> None:
    for target, flat in itertools.product(targets, (False, True)):
        model = build(target)
        optimizer = ADAMW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        rest = dsd.load(f"{folder}/{flat}", state, strict={"model/extra._extra_state": False})
        assert rest == {"step": 3}
        found = get_state_dict(model, optimizer, options=FULL)
        assert_same(tensors_of(found[0]), tensors_of(wanted[0]))
        assert_same(found[1]["state"], wanted[1]["state"])
        assert found[1]["param_groups"] == wanted[1]["param_groups"]


def test_what_dcp_has_saved_of_shards_is_loaded_into_others(ranks, tmp_path):
    wanted = ranks(2)(save_dcp, str(tmp_path))[0]
    ranks(4)(load_dcp, str(tmp_path), ("fsdp2-tp", "fsdp1-hybrid-orig"), wanted)
