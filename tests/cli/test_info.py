"""`dsd info`: sums by section and dtype, files, values, provenance."""

from __future__ import annotations

import numpy as np
import pytest

import dsdformat.numpy
from dsdformat.cli import info

GOLDEN = """\
step-10
  root        ROOT
  format      1.0
  written by  1 rank
  tensors     3, and 1 tied name
  elements    26
  size        100 B, in files 8.1 KiB
  codecs      raw 3 chunks

section    tensors  elements  size  values
model            2        14  52 B       0
optimizer        1        12  48 B       3

dtype     tensors  elements  size
float32         2        24  96 B
bfloat16        1         2   4 B

data file                 size
model.safetensors      4.1 KiB
optimizer.safetensors  4.0 KiB

value      type
scheduler  dict  {'last_epoch': 3, 'name': 'cosine'}
step       int   10

user metadata
run            demo
"""


@pytest.fixture
def root(step10):
    with dsdformat.open(step10) as checkpoint:
        return checkpoint.root


def test_info_of_a_small_checkpoint_prints_this(dsd, step10, root):
    result = dsd("info", step10)
    assert (result.code, result.out.replace(root, "ROOT"), result.err) == (0, GOLDEN, "")


def test_the_json_document_has_these_keys_and_values(dsd, step10, root):
    document = dsd("info", step10, "--json").json
    files = document.pop("data_files")
    manifest_nbytes = document.pop("manifest_nbytes")
    with dsdformat.open(step10) as checkpoint:
        assert files == [
            {"label": label, "nbytes": nbytes} for label, nbytes in checkpoint.data_files.items()
        ]
        assert manifest_nbytes == checkpoint.manifest_nbytes
    assert document == {
        "checkpoint": "step-10",
        "root": root,
        "format_version": "1.0",
        "features": [],
        "world_size": 1,
        "block_nbytes": 4 << 20,
        "tensors": 3,
        "tied": 1,
        "elements": 26,
        "nbytes": 100,
        "stored_nbytes": sum(file["nbytes"] for file in files),
        "sections": [
            {"name": "model", "tensors": 2, "elements": 14, "nbytes": 52, "values": 0},
            {"name": "optimizer", "tensors": 1, "elements": 12, "nbytes": 48, "values": 3},
        ],
        "dtypes": [
            {"dtype": "float32", "tensors": 2, "elements": 24, "nbytes": 96},
            {"dtype": "bfloat16", "tensors": 1, "elements": 2, "nbytes": 4},
        ],
        "side_files": [],
        "user": {"run": "demo"},
        "values": [
            {
                "name": "scheduler",
                "type": "dict",
                "value": {"last_epoch": 3, "name": "cosine"},
            },
            {"name": "step", "type": "int", "value": 10},
        ],
        "placements": [],
        "codecs": [{"codec": "raw", "chunks": 3, "nbytes": 100, "stored_nbytes": 100}],
    }


def test_ranks_placements_and_codecs_of_a_sharded_checkpoint_are_told(dsd, sharded):
    result = dsd("info", sharded)
    lines = result.out.splitlines()
    assert "  written by  2 ranks" in lines
    assert any(line.startswith("  codecs      raw 1 chunk, zstd 2 chunks (to ") for line in lines)
    at = lines.index("mesh  placements  tensors      size")
    assert lines[at + 1] == "dp=2  shard(0)          1  16.0 KiB"


def test_placements_and_codecs_are_in_the_json_document(dsd, sharded):
    document = dsd("info", sharded, "--json").json
    assert document["features"] == ["zstd"]
    assert document["placements"] == [
        {
            "mesh": {"axes": ["dp"], "shape": [2], "ranks": [0, 1]},
            "placements": ["shard(0)"],
            "tensors": 1,
            "elements": 4096,
            "nbytes": 16384,
        }
    ]
    codecs = {codec["codec"]: codec for codec in document["codecs"]}
    assert codecs["raw"] == {"codec": "raw", "chunks": 1, "nbytes": 2, "stored_nbytes": 2}
    assert (codecs["zstd"]["chunks"], codecs["zstd"]["nbytes"]) == (2, 16384)
    assert codecs["zstd"]["stored_nbytes"] < 16384


def test_large_chunk_tables_are_read_only_when_asked_for(dsd, sharded, monkeypatch):
    monkeypatch.setattr(info, "CHUNKS_READ_MAX", 2)
    assert dsd("info", sharded, "--json").json["codecs"] is None
    assert "  codecs      not read; --chunks reads them\n" in dsd("info", sharded).out
    assert len(dsd("info", sharded, "--chunks", "--json").json["codecs"]) == 2


def test_without_the_zstd_feature_codecs_are_known_without_chunk_tables(dsd, step10, monkeypatch):
    monkeypatch.setattr(info, "CHUNKS_READ_MAX", 2)
    assert "  codecs      raw\n" in dsd("info", step10).out


def test_tensors_at_the_top_have_a_section_without_a_name(dsd, tmp_path):
    dsdformat.numpy.save(tmp_path / "flat", {"a": np.zeros(2), "b": np.zeros(3)})
    sections = dsd("info", tmp_path / "flat", "--json").json["sections"]
    assert sections == [{"name": None, "tensors": 2, "elements": 5, "nbytes": 40, "values": 0}]
    assert "\n(top level)        2         5  40 B       0\n" in dsd("info", tmp_path / "flat").out


def test_tables_end_after_thirty_rows_and_say_so(dsd, tmp_path):
    state = {f"value{number:02}": number for number in range(32)}
    dsdformat.numpy.save(tmp_path / "many", state)
    out = dsd("info", tmp_path / "many").out
    assert "value29" in out
    assert "value30" not in out
    assert "and 2 more; --json lists all\n" in out
    assert len(dsd("info", tmp_path / "many", "--json").json["values"]) == 32


def test_a_checkpoint_without_anything_is_shown(dsd, tmp_path):
    dsdformat.numpy.save(tmp_path / "empty", {})
    result = dsd("info", tmp_path / "empty")
    assert result.code == 0
    assert "  tensors     0\n" in result.out
    assert dsd("info", tmp_path / "empty", "--json").json["sections"] == []


def test_side_files_are_listed(dsd, tmp_path):
    with dsdformat.create(tmp_path / "sides") as writer:
        writer.add_file("config.json", b"{}")
        writer.add_value("step", 1)
    assert "side file    size\nconfig.json   2 B\n" in dsd("info", tmp_path / "sides").out
    document = dsd("info", tmp_path / "sides", "--json").json
    assert document["side_files"] == [{"label": "config.json", "nbytes": 2}]
