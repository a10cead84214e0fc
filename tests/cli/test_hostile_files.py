"""What the commands do with files that were made to do harm, or were damaged: they say so."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

READ = {
    "info": ["info"],
    "ls": ["ls", "--long", "--values"],
    "show": ["show", "w"],
    "tree": ["tree"],
    "stats": ["stats", "w"],
    "verify": ["verify"],
    "digest": ["digest", "--content"],
}


class Harm:
    """What pickle would make a file `canary` of."""

    def __reduce__(self):
        return os.mkdir, ("canary",)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not os.path.exists("canary"), "the file was executed"


@pytest.mark.parametrize("command", READ.values(), ids=READ)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_nothing_in_a_torch_file_is_executed(dsd, command, zipped):
    state = {"w": torch.ones(2), "harm": Harm()}
    torch.save(state, "m.pt", _use_new_zipfile_serialization=zipped)
    result = dsd(command[0], "m.pt", *command[1:])
    assert result.code in (0, 1)
    assert result.code == 0 or not zipped or command[0] in ("verify", "digest")


def test_what_is_written_has_no_place_for_unknown_objects(dsd):
    torch.save({"w": torch.ones(2), "harm": Harm()}, "m.pt")
    for command in (
        ["extract", "m.pt", "c", "--select", "w"],
        ["cast", "m.pt", "c", "--dtype", "float64"],
        ["rename", "m.pt", "c", "--map", "w=v"],
    ):
        result = dsd(*command)
        assert (result.code, os.path.exists("c")) == (1, False)
        assert result.err.startswith("error[unknown_global]: ")
        assert "posix.mkdir" in result.err
        assert "--unknown drop" in result.err
        dropped = dsd(*command, "--unknown", "drop", "--overwrite")
        assert (dropped.code, dropped.err.startswith("note: not all of ")) == (0, True)
        os.rename("c", f"done-{command[0]}")


def hub(weight_map):
    os.mkdir("hub")
    save_file({"a": torch.ones(2)}, "hub/model-00001-of-00002.safetensors")
    index = {"metadata": {"total_size": 8}, "weight_map": weight_map}
    with open("hub/model.safetensors.index.json", "w") as file:
        json.dump(index, file)


FILE = "model-00001-of-00002.safetensors"
INDEXES = {
    "a-tensor-that-no-file-has": ({"a": FILE, "b": FILE}, "b"),
    "a-file-that-is-gone": ({"a": FILE, "b": "model-00002-of-00002.safetensors"}, "00002-of"),
    "a-path-that-leads-out": ({"a": "../x.safetensors"}, "../x.safetensors"),
    "an-absolute-path": ({"a": "/etc/passwd"}, "/etc/passwd"),
}


@pytest.mark.parametrize(("weight_map", "named"), INDEXES.values(), ids=INDEXES)
def test_an_index_that_lies_is_told_by_every_command(dsd, weight_map, named):
    hub(weight_map)
    for command in (["info"], ["ls"], ["tree"], ["digest", "--content"], ["diff", "hub"]):
        result = dsd(command[0], "hub", *command[1:])
        assert (result.code, result.out) == (1, "")
        assert named in result.err


def test_a_name_that_a_header_has_twice_is_refused(dsd):
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    with open("m.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + b"\1")
    for command in READ.values():
        result = dsd(command[0], "m.safetensors", *command[1:])
        assert (result.code, result.out) == (1, "")
