"""info, ls, show and verify of files of other kinds."""

from __future__ import annotations

import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dsdformat.numpy
from tests.convert.samples import NO_DIST


def state():
    table = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    return {
        "model": OrderedDict(embed=table, head=table, norm=torch.ones(2, dtype=torch.bfloat16)),
        "epoch": 3,
    }


@pytest.fixture
def pt(tmp_path):
    torch.save(state(), tmp_path / "m.pt")
    return tmp_path / "m.pt"


def test_info_sums_up_a_torch_file(dsd, pt):
    lines = dsd("info", pt).out.splitlines()
    assert lines[1:5] == [
        "  kind      a file of torch.save",
        "  tensors   2, and 1 tied name",
        "  elements  14",
        "  size      52 B",
    ]
    assert "epoch  int   3" in lines
    document = dsd("info", pt, "--json").json
    assert (document["kind"], document["tied"], document["findings"]) == (
        "a file of torch.save",
        1,
        [],
    )


def test_the_keys_of_the_json_documents_are_documented(dsd, pt):
    for command in (["info"], ["ls", "--long", "--values"], ["verify"]):
        help_text = dsd(command[0], "--help").out
        document = dsd(command[0], pt, *command[1:], "--json").json
        rows = [row for value in document.values() if isinstance(value, list) for row in value]
        keys = {*document, *(key for row in rows for key in row)}
        assert {key for key in keys if not re.search(rf"\b{key}\b", help_text)} == set()


def test_ls_lists_tensors_and_values_of_a_torch_file(dsd, pt):
    result = dsd("ls", pt, "--long", "--values", "--json").json
    assert result["root"] is None
    assert [(row["name"], row["aliases"]) for row in result["tensors"]] == [
        ("model/embed", ["model/head"]),
        ("model/norm", []),
    ]
    assert result["values"] == [{"name": "epoch", "type": "int", "value": 3}]
    assert [line.split() for line in dsd("ls", pt, "*norm").out.splitlines()] == [
        ["name", "dtype", "shape", "size"],
        ["model/norm", "bfloat16", "[2]", "4", "B"],
    ]
    assert "  tied     model/head\n" in dsd("ls", pt, "--long").out


def test_show_prints_boxes_values_and_containers_of_a_torch_file(dsd, pt):
    assert dsd("show", pt, "model/head[1:3,-1]", "--json").json["elements"] == [5, 8]
    assert dsd("show", pt, "epoch").out == "3\n"
    assert dsd("show", pt, "model").out.splitlines()[1].split() == (
        ["model/embed", "tensor", "float32", "[4,", "3],", "48", "B"]
    )
    assert "min    0\n" in dsd("show", pt, "model/embed").out
    result = dsd("show", pt, "model/hed")
    assert (result.code, "did you mean model/head" in result.err) == (2, True)


def test_what_is_not_read_of_a_file_is_told(dsd, tmp_path):
    class Options:
        pass

    Options.__qualname__ = "Options"
    globals()["Options"] = Options
    try:
        torch.save({"w": torch.ones(2), "hyper": Options()}, tmp_path / "m.pt")
    finally:
        del globals()["Options"]
    result = dsd("info", tmp_path / "m.pt")
    assert (result.code, "Options" in result.err) == (0, True)
    assert dsd("ls", tmp_path / "m.pt").code == 0
    refused = dsd("extract", tmp_path / "m.pt", tmp_path / "c", "--select", "w")
    assert (refused.code, (tmp_path / "c").exists()) == (1, False)
    arguments = ["extract", tmp_path / "m.pt", tmp_path / "c", "--select", "w"]
    assert dsd(*arguments, "--unknown", "drop").code == 0


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_verify_compares_the_checksums_of_a_torch_file(dsd, tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "m.pt")
    result = dsd("verify", tmp_path / "m.pt")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"{tmp_path}/m.pt: ok\n  kind      a file of torch.save\n")
    data = (tmp_path / "m.pt").read_bytes()
    flip(tmp_path / "m.pt", data.index(b"\0\0\x80?" * 100) + 42)
    result = dsd("verify", tmp_path / "m.pt", "--json")
    assert (result.code, result.json["error"]["code"]) == (1, "foreign_checksum")
    assert "/data/0 has CRC-32" in result.json["error"]["message"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_verify_compares_the_checksums_of_a_numpy_file(dsd, tmp_path, save):
    save(tmp_path / "m.npz", a=np.random.default_rng(0).standard_normal(1000))
    document = dsd("verify", tmp_path / "m.npz", "--json").json
    assert (document["ok"], document["compared"] > 8000) == (True, True)
    flip(tmp_path / "m.npz", 4000)
    assert dsd("verify", tmp_path / "m.npz").code == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_verify_compares_the_checksums_of_a_dcp_folder(dsd, tmp_path):
    dcp.save({"w": torch.ones(100)}, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    assert dsd("verify", tmp_path / "dcp").code == 0
    assert dsd("info", tmp_path / "dcp", "--json").json["elements"] == 100


def test_verify_says_where_there_is_no_checksum(dsd, tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    result = dsd("verify", tmp_path / "m.safetensors")
    assert (result.code, result.err) == (1, "")
    assert "m.safetensors: not verified\n" in result.out
    assert "none in this file, so that damage goes unnoticed" in result.out
    document = dsd("verify", tmp_path / "m.safetensors", "--json").json
    assert (document["ok"], document["compared"]) == (None, 0)


def test_a_folder_of_ours_without_its_manifest_is_not_taken_for_a_good_model(dsd, tmp_path):
    dsdformat.numpy.save(tmp_path / "c", {"model": {"w": np.ones(3)}})
    (tmp_path / "c" / "manifest.dsd").unlink()
    result = dsd("verify", tmp_path / "c")
    assert result.code == 1
    assert "no_manifest" in result.out
    assert "can be read as a folder of safetensors files" in result.err


def test_a_file_that_is_cut_short_or_of_no_kind_ends_with_1(dsd, pt, tmp_path):
    (tmp_path / "cut.pt").write_bytes(pt.read_bytes()[:-40])
    (tmp_path / "text").write_text("hello")
    for name in ("cut.pt", "text"):
        for command in ("info", "ls", "verify", "tree", "digest"):
            result = dsd(command, tmp_path / name)
            assert (result.code, result.out) == (1, "")
            assert result.err.startswith("error[")
