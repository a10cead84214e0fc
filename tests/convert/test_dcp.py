"""Folders of torch.distributed.checkpoint, written by one process: read exactly, without torch's.

What is compared is what `dcp_to_torch_save` of torch makes of the folder.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from exactly import digest_of, torch_digest
from samples import FORMS, NO_DIST, needs_forms, written
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from dsdformat import Box, DsdError
from dsdformat.convert import Kind, find_kind, open_foreign
from dsdformat.convert.dcp import DcpFolder
from tests.torch_runtime.exact import assert_same

DTYPES = [
    *("bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
]
DTYPES = [name for name in DTYPES if hasattr(torch, name)]  # some are newer than the oldest torch


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    states = get_state_dict(model, optimizer)
    return {"model": states[0], "optim": states[1], "scheduler": scheduler.state_dict(), "step": 3}


STATES = {
    "training": trained,
    "lists-and-numbers": lambda: {
        "list": [1, {"t": torch.ones(2)}, torch.zeros(1)],
        "numbered": {1: {"x": torch.ones(1)}, "k/y.z": 5},
        "tuple": (1, torch.ones(1)),
        "text": "é",
        "none": None,
    },
    "empty-tensors": lambda: {"e": torch.zeros(0, 3), "s": torch.tensor(5), "f": torch.zeros(3, 0)},
    "dtypes": lambda: {name: torch.zeros(3).to(getattr(torch, name)) for name in DTYPES},
    "layouts": lambda: {
        "t": torch.arange(12.0).reshape(3, 4).t(),
        "cl": torch.rand(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "conj": torch.tensor([1 + 2j]).conj(),
    },
}


def theirs(folder: Path) -> Any:
    """What torch makes of a folder."""
    out = folder.parent / "theirs.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("threads", [1, 3], ids=["one-file", "three-files"])
@pytest.mark.parametrize("case", STATES)
def test_a_folder_is_read_exactly(tmp_path, case, threads):
    folder = written(STATES[case](), tmp_path / "dcp", thread_count=threads)
    with open_foreign(folder) as foreign:
        assert (foreign.kind, foreign.findings) == (Kind.DCP, ())
        foreign.verify()
        ours = digest_of(foreign, tmp_path / "ours")
    assert ours == torch_digest(theirs(folder), tmp_path / "expected")


def test_one_file_for_each_item_is_read_exactly(tmp_path):
    folder = written(STATES["training"](), tmp_path / "dcp", single_file_per_rank=False)
    with open_foreign(folder) as foreign:
        ours = digest_of(foreign, tmp_path / "ours")
    assert ours == torch_digest(theirs(folder), tmp_path / "expected")


@needs_forms
def test_items_in_the_form_of_safetensors_are_read_exactly(tmp_path):
    state = STATES["training"]()
    form = FORMS.SAFETENSORS
    digests = []
    for name, options in {"plain": {}, "safetensors": {"serialization_format": form}}.items():
        folder = written(state, tmp_path / name, **options)
        with open_foreign(folder) as foreign:
            foreign.verify()
            digests.append(digest_of(foreign, tmp_path / f"{name}-ours"))
    assert digests[0] == digests[1]


def test_a_folder_that_was_not_flattened_has_the_names_alone(tmp_path):
    state = {"a.b": torch.ones(2), "c": {"d": 1}}
    folder = written(state, tmp_path / "dcp", flatten=False)
    with open_foreign(folder) as foreign:
        assert set(foreign.tree) == {"a.b", "c"}
        assert foreign.tree["c"] == {"d": 1}


def test_a_box_is_read_from_the_chunks_that_it_meets(tmp_path):
    weight = torch.arange(24.0).reshape(4, 6)
    with open_foreign(written({"w": weight}, tmp_path / "dcp")) as foreign:
        box = Box((1, 2), (2, 3))
        got = torch.frombuffer(foreign.read("w", box), dtype=torch.float32).reshape(2, 3)
    assert_same(got, weight[1:3, 2:5].contiguous())


def test_files_of_the_hugging_face_writer_are_read(tmp_path):
    state = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
    package = "torch.distributed.checkpoint.hf_storage"
    storage = pytest.importorskip(package, reason="this torch does not write such")
    for name, options in {"whole": {}, "shards": {"save_distributed": True}}.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = storage.HuggingFaceStorageWriter(str(tmp_path / name), **options)
            dcp.save(state, storage_writer=writer, **NO_DIST)
        with open_foreign(tmp_path / name) as foreign:
            assert digest_of(foreign, tmp_path / f"{name}-ours") == torch_digest(
                state, tmp_path / f"{name}-expected"
            )
    assert find_kind(tmp_path / "whole") is Kind.SAFETENSORS_FOLDER
    assert find_kind(tmp_path / "shards") is Kind.SAFETENSORS_SHARDS


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_every_protocol_are_read(tmp_path, protocol):
    folder = written(STATES["training"](), tmp_path / "dcp")
    with open_foreign(folder) as foreign:
        expected = digest_of(foreign, tmp_path / "one")
    file = folder / ".metadata"
    file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), protocol))
    with open_foreign(folder) as foreign:
        assert digest_of(foreign, tmp_path / "two") == expected


def test_metadata_of_an_old_torch_are_read(tmp_path):
    """Until torch 2.3, properties and their enum were classes of the sharded tensor."""
    folder = written({"w": torch.arange(6.0)}, tmp_path / "dcp")
    file = folder / ".metadata"
    text = pickle.dumps(pickle.loads(file.read_bytes()), 2)
    new = b"ctorch.distributed.checkpoint.metadata\n"
    old = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    text = text.replace(new + b"TensorProperties\n", old + b"TensorProperties\n")
    text = text.replace(new + b"_MEM_FORMAT_ENCODING\n", old + b"MEM_FORMAT_ENCODING\n")
    assert old in text
    file.write_bytes(text)
    with open_foreign(folder) as foreign:
        assert bytes(foreign.read("w")) == torch.arange(6.0).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused_by_name_or_left_out(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    folder = written({"q": quantized, "w": torch.ones(1)}, tmp_path / "dcp")
    with pytest.raises(DsdError) as caught:
        open_foreign(folder)
    assert (caught.value.code, caught.value.names) == ("unknown_global", ("torch.qint8",))
    with open_foreign(folder, unknown="drop") as foreign:
        assert list(foreign.tree) == ["w"]


def test_a_value_of_a_class_of_its_own_is_refused_by_name_or_left_out(tmp_path):
    folder = written({"config": argparse_like(), "w": torch.ones(1)}, tmp_path / "dcp")
    with pytest.raises(DsdError) as caught:
        open_foreign(folder)
    assert caught.value.names == ("argparse.Namespace",)
    with open_foreign(folder, unknown="record") as foreign:
        assert foreign.tree["config"] == {"name": "argparse.Namespace", "state": {"lr": 0.1}}


def argparse_like() -> object:
    import argparse

    return argparse.Namespace(lr=0.1)


def test_a_folder_is_read_while_it_lies_elsewhere(tmp_path):
    folder = written({"w": torch.ones(3)}, tmp_path / "dcp")
    moved = folder.rename(tmp_path / "moved")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in moved.iterdir():
        (linked / file.name).symlink_to(file)
    with open_foreign(linked) as foreign:
        assert bytes(foreign.read("w")) == torch.ones(3).numpy().tobytes()


def test_opening_a_folder_opens_no_item_of_a_tensor(tmp_path, monkeypatch):
    folder = written({"w": torch.ones(2), "step": 3}, tmp_path / "dcp")
    opened: list[Any] = []
    monkeypatch.setattr(DcpFolder, "_open", lambda *args: opened.append(args))
    with open_foreign(folder) as foreign:
        assert foreign.tree["step"] == 3
        assert opened == []
