"""Folders of torch.distributed.checkpoint that we write: dcp.load reads them, in one process."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from samples import FORMS, NO_DIST, VALUES, needs_forms, trained, written
from test_torch_files import DTYPES, LAYOUTS, bits
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dsdformat
import dsdformat.torch as dsd
from dsdformat.convert import convert, open_any

TIED = torch.arange(3000.0).reshape(100, 30)
STATE: dict[str, Any] = {
    "model": {
        "w": TIED,
        "again": TIED,
        "last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(3.0),
        "half": torch.randn(7).bfloat16(),
    },
    "step": 3,
    "list": [1, torch.ones(2), {"a": 2, "e": {}}],
    "plain": [1, [2, "x"], (3,)],
    "empty": {},
    "keys": {1: 2, "a": 3},
    "tuple": (torch.ones(2), 1),
    "values": VALUES,
    "array": np.arange(6.0).reshape(2, 3),
}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """`made(state, **options)` gives the root digest of ours, and the folder made of it."""

    def made(state: Any, **options: Any) -> tuple[str, Path]:
        root = dsd.save(tmp_path / "ours", state, threads=1)
        convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", **options)
        return root, tmp_path / "dcp"

    return made


def contents(path: Path) -> Any:
    """All of a checkpoint, with the bytes and the hints of tensors."""
    with open_any(path) as opened:
        tensors = {
            name: (one.dtype, one.shape, bytes(one.read()), dict(one.attributes))
            for name, one in opened
        }
        ties = sorted(sorted(map(repr, opened.paths(one))) for _, one in opened)
        return repr(opened.tree), tensors, ties


def test_what_we_read_again_is_the_same_checkpoint(made, tmp_path):
    root, folder = made(STATE)
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp"]
    assert convert(folder, tmp_path / "again", to="dsd").root == root


def test_chunks_and_files_are_as_long_as_wanted(made, tmp_path):
    _, folder = made(STATE, max_chunk_bytes=4000, max_file_bytes="8KB")
    metadata = FileSystemReader(folder).read_metadata()
    chunks = metadata.state_dict_metadata["model.w"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(33, 30), (33, 30), (33, 30), (1, 30)]
    infos = [value for key, value in metadata.storage_data.items() if key.fqn == "model.w"]
    assert all(info.offset % 64 == 0 for info in infos)
    assert len({info.relative_path for info in metadata.storage_data.values()}) > 1
    convert(folder, tmp_path / "again", to="dsd")
    assert contents(tmp_path / "again") == contents(tmp_path / "ours")


def test_tied_tensors_are_stored_once_and_tied_again(made, tmp_path):
    _, folder = made({"a": TIED, "b": {"c": TIED}, "d": TIED.clone()})
    assert (folder / "__0_0.distcp").stat().st_size < 3 * TIED.nbytes
    state = {"a": torch.zeros(100, 30), "b": {"c": torch.zeros(100, 30)}}
    dcp.load(state, checkpoint_id=folder, **NO_DIST)
    assert torch.equal(state["a"], TIED)
    assert torch.equal(state["b"]["c"], TIED)
    with open_any(folder) as opened:
        assert len(opened) == 2
        assert opened.paths(opened.tensor("b/c")) == [("a",), ("b", "c")]


@needs_forms
def test_equal_chunks_of_one_safetensors_file_are_not_tied(tmp_path):
    state = {"a": torch.ones(3), "b": torch.zeros(3)}
    folder = written(state, tmp_path / "dcp", serialization_format=FORMS.SAFETENSORS)
    with open_any(folder) as opened:
        assert len(opened) == 2
        assert bytes(opened.read("b")) == bytes(12)


def test_nested_templates_are_loaded(made):
    _, folder = made(STATE)
    state: dict[str, Any] = {
        "model": {
            name: torch.zeros_like(one) for name, one in STATE["model"].items() if name != "none"
        },
        "step": 0,
        "list": [0, torch.zeros(2), {"a": 0, "e": {}}],
        "plain": [],
        "tuple": (),
    }
    dcp.load(state, checkpoint_id=folder, **NO_DIST)
    assert all(torch.equal(state["model"][name], STATE["model"][name]) for name in state["model"])
    assert state["step"] == 3
    assert state["list"][0] == 1
    assert torch.equal(state["list"][1], torch.ones(2))
    assert state["list"][2] == {"a": 2, "e": {}}
    assert state["plain"] == STATE["plain"]
    assert torch.equal(state["tuple"][0], torch.ones(2))


def test_a_part_is_loaded_by_its_keys(made):
    _, folder = made(STATE)
    state = _load_state_dict_from_keys({"model.w", "step"}, checkpoint_id=str(folder))
    assert list(state) == ["model", "step"]
    assert torch.equal(state["model"]["w"], TIED)
    state = _load_state_dict_from_keys({"model"}, checkpoint_id=str(folder))
    assert set(state["model"]) == set(STATE["model"])


def test_the_tool_of_torch_makes_its_file_of_it(made, tmp_path):
    state = {key: value for key, value in STATE.items() if key != "model"}
    state["model"] = {name: one for name, one in STATE["model"].items() if name != "again"}
    del state["model"]["last"]  # torch makes new tensors, row-major
    state["values"] = {name: one for name, one in VALUES.items() if name != "times"}  # no `fold`
    root, folder = made(state)
    dcp_to_torch_save(folder, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=False)
    assert dsd.save(tmp_path / "loaded", loaded, threads=1) == root


def test_a_general_checkpoint_is_loaded_by_templates_of_torch(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    state = trained()
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(dsdformat.UnsupportedValueError, match="names="):
        convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": [*model[1:].parameters()]}], amsgrad=True
    )
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)  # which sets `initial_lr`
    names = [name for name, _ in model.named_parameters()]
    convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", names=names)
    parts = get_state_dict(model, optimizer)
    fresh = {"model": parts[0], "optimizer": parts[1], "scheduler": {"last_epoch": 0}}
    dcp.load(fresh, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    assert fresh["scheduler"]["last_epoch"] == 2
    set_state_dict(
        model,
        optimizer,
        model_state_dict=fresh["model"],
        optim_state_dict=fresh["optimizer"],
    )
    wanted, got = state["optimizer"], optimizer.state_dict()
    for number, kept in wanted["state"].items():
        assert all(torch.equal(kept[name], got["state"][number][name]) for name in kept)
    for one, other in zip(wanted["param_groups"], got["param_groups"], strict=True):
        assert one == other


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_loaded_bit_for_bit(made, tmp_path, dtype):
    state = {"w": bits(dtype, 3, 4), "none": bits(dtype, 0, 4), "one": bits(dtype, 1)}
    root, folder = made(state)
    assert convert(folder, tmp_path / "again", to="dsd").root == root
    loaded = {name: torch.empty_like(one) for name, one in state.items()}
    dcp.load(loaded, checkpoint_id=folder, **NO_DIST)
    for name, one in state.items():
        if one.numel():
            assert torch.equal(loaded[name].view(torch.uint8), one.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_loaded_exactly(made, layout):
    tensor = LAYOUTS[layout].resolve_conj().resolve_neg()
    _, folder = made({"w": tensor}, max_chunk_bytes=64)
    loaded = {"w": torch.zeros(tensor.shape, dtype=tensor.dtype)}
    dcp.load(loaded, checkpoint_id=folder, **NO_DIST)
    assert torch.equal(loaded["w"], tensor)


def test_an_ordered_dict_of_tensors_becomes_a_dict_in_its_order(tmp_path):
    state = OrderedDict(b=torch.ones(1), a=torch.zeros(1))
    torch.save({"model": state}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp")
    with open_any(tmp_path / "dcp") as opened:
        assert type(opened.tree["model"]) is dict
        assert list(opened.tree["model"]) == ["b", "a"]


REFUSED: dict[str, tuple[Any, str]] = {
    "one name for two": ({"a.b": 1, "a": {"b": 2}}, "$.a.b"),
    "numbers of tensors": ({"d": {1: torch.ones(1)}}, "$.d"),
    "counter of tensors": ({"d": Counter(a=torch.ones(1))}, "$.d"),
    "tied to one in a tuple": ({"w": TIED, "t": (TIED,)}, "$.t"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_folder_cannot_hold_is_refused_with_its_place(tmp_path, case):
    state, place = REFUSED[case]
    dsd.save(tmp_path / "ours", state)
    with pytest.raises(dsdformat.UnsupportedValueError) as caught:
        convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    assert caught.value.path_in_tree.startswith(place) or caught.value.path_in_tree == "$['a.b']"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_a_dtype_that_torch_does_not_have_is_refused(tmp_path):
    with dsdformat.create(tmp_path / "ours") as writer:
        writer.add_tensor("w", b"abcd", dtype="float8_e3m4", shape=[4])
        writer.commit()
    with pytest.raises(dsdformat.UnsupportedValueError) as caught:
        convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    assert (caught.value.code, caught.value.path_in_tree) == ("unsupported_dtype", "$.w")


def test_a_folder_is_replaced_only_if_that_is_wanted_and_nothing_else_is_in_it(tmp_path):
    dsd.save(tmp_path / "ours", {"w": torch.ones(2)})
    convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    with pytest.raises(dsdformat.StorageError) as caught:
        convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    assert caught.value.code == "already_exists"
    convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", overwrite=True)
    (tmp_path / "dcp" / "thesis.txt").write_text("mine")
    with pytest.raises(dsdformat.StorageError) as caught:
        convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", overwrite=True)
    assert caught.value.code == "not_replaceable"


def test_nothing_is_left_where_reading_fails(tmp_path):
    dsd.save(tmp_path / "ours", {"w": torch.arange(1000.0)})
    data = next((tmp_path / "ours").glob("*.safetensors"))
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(dsdformat.ChecksumError):
        convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]
