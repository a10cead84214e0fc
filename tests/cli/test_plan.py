"""`dsd plan`: what ranks would read, and what differs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

import dsdformat.numpy

WEIGHTS = {"a.weight": np.ones((8, 4), np.float32), "a.bias": np.ones(8, np.float32)}
MOMENTS = {
    name: {"exp_avg": np.zeros_like(one), "step": np.float32(3)} for name, one in WEIGHTS.items()
}


@pytest.fixture
def step(tmp_path):
    state = {"model": WEIGHTS, "optimizer": {"state": MOMENTS, "param_groups": {}}}
    dsdformat.numpy.save(tmp_path / "step", state)
    return tmp_path / "step"


@pytest.fixture
def weights(tmp_path):
    save_file(WEIGHTS, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_each_rank_has_a_row_and_ranks_that_are_alike_share_one(dsd, step):
    result = dsd("plan", step, "--mesh", "fsdp=4,tp=2", "--shard", "*.weight=1@tp")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[1:3] == ["  mesh     fsdp 4, tp 2: 8 ranks", "  tensors  4"]
    assert lines[-3].split() == ["ranks", "wanted", "read", "ratio", "memory"]
    # Two rows of two columns, and two elements of the bias; for the moments the same. Ranks of one
    # row want the same two elements, so one of them reads those of the weights' bias. All want some
    # of both blocks of the weights, which two ranks read.
    assert lines[3:5] == ["  wanted   384 B", "  needed   320 B"]
    assert lines[-2].startswith("0 to 1    48 B  160 B  3.333")
    assert lines[-1].startswith("2 to 7    48 B   32 B  0.667")


def test_ranks_that_read_by_themselves_have_more_to_read(dsd, step):
    arguments = ("plan", step, "--mesh", "fsdp=4,tp=2", "--shard", "*.weight=1@tp")
    lines = dsd(*arguments, "--no-share-reads").out.splitlines()
    assert lines[4] == "  needed   384 B"
    assert lines[-1].startswith("0 to 7    48 B  320 B  6.667")
    shared, alone = (dsd(*arguments, *more, "--json").json for more in ((), ("--no-share-reads",)))
    assert shared["read_nbytes"] == alone["read_nbytes"] - 8 * 32 - 7 * 2 * 128
    assert (shared["needed_nbytes"], alone["needed_nbytes"]) == (320, 384)


def test_numbers_are_exact_in_json(dsd, step):
    document = dsd("plan", step, "--mesh", "fsdp=3", "--no-verify", "--json").json
    assert document["mesh"] == {"fsdp": 3}
    assert document["tensors"] == 4
    held = [row["held_nbytes"] for row in document["ranks"]]
    assert held == [2 * 4 * (3 * 4 + 3)] * 2 + [2 * 4 * (2 * 4 + 2)]
    assert document["wanted_nbytes"] == document["read_nbytes"] == sum(held) == 320
    assert document["over_read"] == 1.0
    assert document["missing"] is document["unexpected"] is document["different"] is None
    peaks = [row["peak_nbytes"] for row in document["ranks"]]
    assert document["peak_nbytes"] == max(peaks)


def test_what_an_optimizer_keeps_is_cut_as_its_parameter(dsd, step):
    rules = ("--shard", "model/a.weight=1@tp")
    rows = dsd("plan", step, "--mesh", "tp=2", *rules, "--json").json["ranks"]
    assert [row["held_nbytes"] for row in rows] == [2 * (8 * 2 * 4 + 8 * 4)] * 2


def test_a_foreign_checkpoint_is_planned_alike(dsd, weights):
    document = dsd("plan", weights, "--mesh", "fsdp=2", "--json").json
    assert [row["read_nbytes"] for row in document["ranks"]] == [80, 80]


def test_a_model_that_fits_is_told_so(dsd, step, weights):
    result = dsd("plan", step, "--mesh", "fsdp=2", "--like", weights, "--select", "model")
    assert result.code == 0
    assert result.out.endswith("\nit fits\n")
    turned = dsd("plan", weights, "--mesh", "fsdp=2", "--like", step, "--json")
    missing = {name.rpartition("/")[0] for name in turned.json["missing"]}
    assert missing == {"optimizer/state/a.bias", "optimizer/state/a.weight"}
    assert turned.json["unexpected"] == []


@pytest.mark.parametrize("form", ["json", "header"])
def test_what_differs_from_a_model_is_listed(dsd, weights, tmp_path, form):
    model = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [8, 5]},
        "b.bias": {"dtype": "bfloat16", "shape": []},
    }
    text = json.dumps(model).encode()
    path = tmp_path / "model"
    path.write_bytes(text if form == "json" else len(text).to_bytes(8, "little") + text)
    result = dsd("plan", weights, "--mesh", "fsdp=2", "--model-meta", path)
    assert result.code == 1
    assert "missing: 1\n  b.bias\n" in result.out
    assert "unexpected: 1\n  a.bias\n" in result.out
    different = "different: 1\n  a.weight: float32 [8, 4], float32 [8, 5] wanted\n"
    assert result.out.endswith(different)
    document = dsd("plan", weights, "--mesh", "fsdp=2", "--model-meta", path, "--json").json
    assert document["different"][0]["wanted"] == {"dtype": "float32", "shape": [8, 5]}
    assert document["tensors"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "fsdp"], "--mesh 'fsdp' is not as fsdp=4,tp=2"),
        (["--mesh", "fsdp=2,fsdp=3"], "is not as fsdp=4,tp=2"),
        (["--mesh", "fsdp=0"], "a mesh has sizes by the names of its axes"),
        (["--mesh", "fsdp=2", "--shard", "*=0"], "is not as '*.wq.weight=0@tp'"),
        (["--mesh", "fsdp=2", "--shard", "*=0@tp"], "with an axis of fsdp"),
        (["--mesh", "fsdp=2", "--shard", "*=7@fsdp"], "dims, and the rule '*' cuts dim 7"),
        (["--mesh", "fsdp=2", "--select", "nothing"], "nothing matches 'nothing'"),
        (["--mesh", "fsdp=2", "--like", "x", "--model-meta", "y"], "give either --like or"),
        ([], "Missing option '--mesh'"),
    ],
)
def test_what_is_not_understood_is_told(dsd, step, arguments, message):
    result = dsd("plan", step, *arguments)
    assert result.code == 2
    assert message in result.err


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [-1]}}',
        b'{"a": {"dtype": "F33", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [1]}, "a": {"dtype": "F32", "shape": [1]}}',
        b"\xff" * 64,
    ],
)
def test_a_model_that_is_malformed_is_refused(dsd, weights, tmp_path, content):
    (tmp_path / "model.json").write_bytes(content)
    meta = tmp_path / "model.json"
    result = dsd("plan", weights, "--mesh", "fsdp=2", "--model-meta", meta)
    assert result.code == 1
    assert re.match(r"error\[(header_malformed|unknown_kind)\]", result.err)


def test_the_keys_of_the_document_are_documented(dsd, step):
    help_text = dsd("plan", "--help").out
    document = dsd("plan", step, "--mesh", "fsdp=2", "--json").json
    keys = {*document, *document["ranks"][0]}
    assert {key for key in keys if not re.search(rf"\b{key}\b", help_text)} == set()
