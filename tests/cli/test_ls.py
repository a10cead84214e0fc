"""`dsd ls`: one line a tensor, and more where asked for."""

from __future__ import annotations

import numpy as np
import pytest

import dsdformat.numpy
from dsdformat.cli import render

GOLDEN = """\
name                                  dtype     shape   size
model/embed.weight                    float32   [4, 3]  48 B
model/norm.weight                     bfloat16  [2]      4 B
optimizer/state/embed.weight/exp_avg  float32   [4, 3]  48 B
"""
GOLDEN_LONG = """\
model/embed.weight
  tensor   float32 [4, 3], 48 B
  chunks   1, raw
  files    model.safetensors
  tied     model/head.weight
  content  DIGEST
"""
GOLDEN_VALUES = """\

name                              type   value
optimizer/param_groups/@0/betas   tuple  (0.9, 0.999)
optimizer/param_groups/@0/lr      float  0.001
optimizer/param_groups/@0/params  list   ['embed.weight']
scheduler/last_epoch              int    3
scheduler/name                    str    'cosine'
step                              int    10
"""


def names(result):
    return [row["name"] for row in result.json["tensors"]]


def content_digest(path, name):
    with dsdformat.open(path) as checkpoint:
        return checkpoint.tensor(name).content_digest()


def test_ls_of_a_small_checkpoint_prints_this(dsd, step10):
    result = dsd("ls", step10)
    assert (result.code, result.out, result.err) == (0, GOLDEN, "")


def test_values_follow_the_tensors(dsd, step10):
    assert dsd("ls", step10, "--values").out == GOLDEN + GOLDEN_VALUES


def test_long_tells_files_codecs_ties_and_the_content_digest(dsd, step10):
    out = dsd("ls", step10, "model/embed*", "--long").out
    assert out.replace(content_digest(step10, "model/embed.weight"), "DIGEST") == GOLDEN_LONG


def test_long_tells_shards_and_placements_and_no_digest_that_must_be_read(dsd, sharded):
    out = dsd("ls", sharded, "model/weight", "--long").out
    lines = out.splitlines()
    assert lines[2].startswith("  chunks   2, zstd, stored in ")
    assert lines[3].startswith("  files    model-00000-of-00002.safetensors, model-00001-of-0000")
    assert lines[4] == "  placed   dp=2: shard(0)"
    assert "content" not in out


def test_the_json_document_has_these_keys_and_values(dsd, step10):
    document = dsd("ls", step10, "--json").json
    assert list(document) == ["checkpoint", "root", "tensors"]
    assert document["checkpoint"] == "step-10"
    assert document["tensors"][1] == {
        "name": "model/norm.weight",
        "dtype": "bfloat16",
        "shape": [2],
        "nbytes": 4,
    }


def test_the_long_json_document_tells_everything(dsd, step10):
    (row,) = dsd("ls", step10, "model/embed.weight", "--long", "--json").json["tensors"]
    (chunk,) = row.pop("chunks")
    assert chunk.pop("byte_offset") >= 4096
    assert chunk == {
        "offset": [0, 0],
        "shape": [4, 3],
        "file": "model.safetensors",
        "nbytes": 48,
        "stored_nbytes": 48,
        "codec": "raw",
    }
    assert row == {
        "name": "model/embed.weight",
        "dtype": "float32",
        "shape": [4, 3],
        "nbytes": 48,
        "aliases": ["model/head.weight"],
        "codecs": ["raw"],
        "files": ["model.safetensors"],
        "stored_nbytes": 48,
        "placements": None,
        "content_digest": content_digest(step10, "model/embed.weight"),
    }


def test_the_long_json_document_of_a_sharded_tensor_tells_its_shards(dsd, sharded):
    (row,) = dsd("ls", sharded, "model/weight", "--long", "--json").json["tensors"]
    assert [chunk["offset"] for chunk in row["chunks"]] == [[0, 0], [1024, 0]]
    assert row["codecs"] == ["zstd"]
    assert row["content_digest"] is None
    mesh = {"axes": ["dp"], "shape": [2], "ranks": [0, 1]}
    assert row["placements"] == {"mesh": mesh, "placements": ["shard(0)"]}
    assert row["stored_nbytes"] == sum(chunk["stored_nbytes"] for chunk in row["chunks"])


def test_values_are_in_the_json_document_where_asked_for(dsd, step10):
    document = dsd("ls", step10, "--values", "--json").json
    assert document["values"][0] == {
        "name": "optimizer/param_groups/@0/betas",
        "type": "tuple",
        "value": {"$tuple": [0.9, 0.999]},
    }
    assert [row["name"] for row in document["values"]][-1] == "step"


GLOBS = {
    "pattern": ("model/*", ["model/embed.weight", "model/norm.weight"]),
    "across-slashes": ("*exp_avg", ["optimizer/state/embed.weight/exp_avg"]),
    "name": ("model/norm.weight", ["model/norm.weight"]),
    "container": ("model", ["model/embed.weight", "model/norm.weight"]),
    "container-with-slash": ("optimizer/", ["optimizer/state/embed.weight/exp_avg"]),
    "alias": ("*head*", ["model/head.weight"]),
    "part-of-a-key": ("mod", []),
}


@pytest.mark.parametrize(("glob", "found"), GLOBS.values(), ids=GLOBS)
def test_a_glob_finds(dsd, step10, glob, found):
    assert names(dsd("ls", step10, glob, "--json")) == found


def test_a_glob_chooses_values_too(dsd, step10):
    result = dsd("ls", step10, "scheduler", "--values")
    assert result.out == (
        "name                  type  value\n"
        "scheduler/last_epoch  int   3\n"
        "scheduler/name        str   'cosine'\n"
    )


def test_nothing_found_is_a_note_and_no_error(dsd, step10):
    result = dsd("ls", step10, "nothing*")
    assert (result.code, result.out) == (0, "")
    assert result.err == "note: nothing matches nothing*\n"


def test_sorting_by_size_puts_the_largest_first(dsd, tmp_path):
    dsdformat.numpy.save(tmp_path / "c", {"b": np.zeros(1), "c": np.zeros(3), "a": np.zeros(2)})
    assert names(dsd("ls", tmp_path / "c", "--json", "--sort", "size")) == ["c", "a", "b"]
    assert names(dsd("ls", tmp_path / "c", "--json", "--sort", "name")) == ["a", "b", "c"]


def test_json_rows_of_several_batches_are_one_array(dsd, step10, monkeypatch):
    monkeypatch.setattr(render, "_BATCH", 1)
    assert len(names(dsd("ls", step10, "--json"))) == 3


@pytest.fixture
def second_fails(monkeypatch):
    """The second tensor of a checkpoint has a defect that shows when it is met."""
    read = dsdformat.TensorEntry.shape.fget

    def fail(entry):
        if entry.index == 1:
            raise dsdformat.Problem("chunk_hole", "a hole").error()
        return read(entry)

    monkeypatch.setattr(dsdformat.TensorEntry, "shape", property(fail))


def test_rows_before_an_error_are_printed(dsd, step10, second_fails):
    result = dsd("ls", step10)
    assert result.code == 1
    assert [line.split()[0] for line in result.out.splitlines()] == ["name", "model/embed.weight"]
    assert result.err == "error[chunk_hole]: a hole\n"


def test_an_error_in_the_middle_ends_the_json_document(dsd, step10, second_fails):
    result = dsd("ls", step10, "--json")
    assert result.code == 1
    assert names(result) == ["model/embed.weight"]
    assert result.json["error"] == {"code": "chunk_hole", "message": "a hole", "hint": None}
    assert result.err == "error[chunk_hole]: a hole\n"


def test_an_error_at_the_first_tensor_leaves_an_empty_array(dsd, step10, second_fails):
    result = dsd("ls", step10, "model/norm.weight", "--json")
    assert result.json["tensors"] == []
    assert result.json["error"]["code"] == "chunk_hole"


def test_a_checkpoint_without_tensors_lists_nothing(dsd, tmp_path):
    dsdformat.numpy.save(tmp_path / "c", {"step": 1})
    result = dsd("ls", tmp_path / "c")
    assert (result.code, result.out, result.err) == (0, "", "note: there is nothing to list\n")
    assert dsd("ls", tmp_path / "c", "--json").json["tensors"] == []
