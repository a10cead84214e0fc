"""`dsd tree`: sizes by module."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

import dsdformat.numpy
from dsdformat.cli.main import main

GOLDEN = """\
step-10                 tensors   size   share
total                         3  100 B  100.0%  ██████████
├─ model                      2   52 B   52.0%  █████
│  ├─ embed                   1   48 B   48.0%  █████
│  │  └─ weight               1   48 B   48.0%  █████
│  └─ norm                    1    4 B    4.0%
│     └─ weight               1    4 B    4.0%
└─ optimizer                  1   48 B   48.0%  █████
   └─ state                   1   48 B   48.0%  █████
      └─ embed.               1   48 B   48.0%  █████
"""


def squeezed(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_tree_prints_this(dsd, step10):
    result = dsd("tree", step10)
    assert (result.code, result.err) == (0, "")
    assert squeezed(result.out) == squeezed(GOLDEN)


def test_depth_says_how_many_levels_there_are(dsd, step10):
    assert len(dsd("tree", step10, "--depth", 1).out.splitlines()) == 4
    names = [row["name"] for row in dsd("tree", step10, "--depth", 6, "--json").json["rows"]]
    assert names[-1] == "optimizer/state/embed.weight/exp_avg"
    assert dsd("tree", step10, "--depth", 0).code == 2


def test_the_json_document_has_a_row_for_each_module(dsd, step10):
    document = dsd("tree", step10, "--depth", 2, "--json").json
    assert (document["checkpoint"], document["nbytes"]) == ("step-10", 100)
    assert document["rows"][1] == {
        "depth": 2,
        "name": "model/embed.",
        "tensors": 1,
        "elements": 12,
        "nbytes": 48,
        "share": 0.48,
    }


def test_what_lies_below_many_children_is_added_up(dsd, tmp_path):
    dsdformat.numpy.save(tmp_path / "c", {f"t{n:03}": np.zeros(2, np.uint8) for n in range(100)})
    lines = dsd("tree", tmp_path / "c").out.splitlines()
    assert len(lines) == 2 + 41
    assert lines[-1].split() == [
        "└─",
        "and",
        "60",
        "more;",
        "--json",
        "lists",
        "all",
        "60",
        "120",
        "B",
        "60.0%",
        "██████",
    ]
    assert len(dsd("tree", tmp_path / "c", "--json").json["rows"]) == 100


@pytest.mark.parametrize("name", ["x" * 70_000, "a." * 35_000], ids=["long", "deep"])
def test_a_name_of_70_kb_is_one_short_row(dsd, tmp_path, name):
    dsdformat.numpy.save(tmp_path / "c", {"m": {name: np.zeros(1)}})
    for command in (["tree"], ["tree", "--depth", 64], ["info"], ["ls"], ["digest", "m"]):
        result = dsd(command[0], tmp_path / "c", *command[1:])
        assert result.code == 0
        assert max(map(len, result.out.splitlines())) < 400
    assert dsd("diff", tmp_path / "c", tmp_path / "c").code == 0


def test_an_encoding_without_lines_has_a_tree_all_the_same(step10, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["tree", step10, "--depth", "1"]) == 0
    text = out.buffer.getvalue().decode()
    assert "|- model" in text
    assert "`- optimizer" in text
    assert "##" in text


def test_a_tensor_of_50_gb_is_listed_at_once(dsd, tmp_path):
    header = b'{"w":{"dtype":"F32","shape":[12800000,1000],"data_offsets":[0,51200000000]}}'
    with open(tmp_path / "huge.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 51_200_000_000)
    path = tmp_path / "huge.safetensors"
    assert "47.7 GiB" in dsd("tree", path).out
    assert dsd("info", path, "--json").json["elements"] == 12_800_000_000
    assert dsd("show", path, "w[-1,:3]", "--json").json["elements"] == [0, 0, 0]
    assert dsd("cast", path, tmp_path / "c", "--dtype", "bfloat16", "--dry-run").code == 0
    assert not (tmp_path / "c").exists()
