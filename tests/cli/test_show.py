"""`dsd show`: numbers, boxes, values, containers."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import dsdformat.numpy
from dsdformat import TensorSource
from dsdformat.cli import arrays, show
from dsdformat.convert import numbers
from dsdformat.storage.local import LocalStorage

GOLDEN_TENSOR = """\
model/embed.weight
  dtype  float32
  shape  [4, 3]
  min    0
  max    1.375
  mean   0.6875

[[    0 0.125  0.25]
 [0.375   0.5 0.625]
 [ 0.75 0.875     1]
 [1.125  1.25 1.375]]
"""
GOLDEN_BOX = """\
model/embed.weight[1:3,-1]
  dtype  float32
  shape  [2] of [4, 3]
  min    0.625
  max    1
  mean   0.8125

[0.625     1]
"""
GOLDEN_CONTAINER = """\
name                    type  value
optimizer/param_groups  list  1 entry
optimizer/state         dict  1 entry
"""
GOLDEN_LARGE = """\
w
  dtype  int32
  shape  [100, 100]
  min    0
  max    9999
  mean   4999.5

[[   0    1    2 …   97   98   99]
 [ 100  101  102 …  197  198  199]
 [ 200  201  202 …  297  298  299]
 …
 [9700 9701 9702 … 9797 9798 9799]
 [9800 9801 9802 … 9897 9898 9899]
 [9900 9901 9902 … 9997 9998 9999]]
"""


@pytest.fixture
def saved(tmp_path):
    """`saved(name=array, …)` saves arrays, and returns the checkpoint's path."""

    def saved(**state):
        path = tmp_path / "saved"
        dsdformat.numpy.save(path, state, overwrite=True)
        return path

    return saved


def grid(result):
    return result.out.split("\n\n", 1)[1]


def test_a_tensor_prints_this(dsd, step10):
    result = dsd("show", step10, "model/embed.weight")
    assert (result.code, result.out, result.err) == (0, GOLDEN_TENSOR, "")


def test_a_box_of_a_tensor_prints_this(dsd, step10):
    assert dsd("show", step10, "model/embed.weight[1:3,-1]").out == GOLDEN_BOX


def test_a_large_tensor_is_shortened_and_its_statistics_are_of_all(dsd, saved):
    path = saved(w=np.arange(10_000, dtype=np.int32).reshape(100, 100))
    assert dsd("show", path, "w").out == GOLDEN_LARGE


def test_a_tied_tensor_is_shown_by_any_of_its_names(dsd, step10):
    out = dsd("show", step10, "model/head.weight").out
    assert grid(dsd("show", step10, "model/embed.weight")) in out


def test_a_value_prints_itself_alone(dsd, step10):
    assert dsd("show", step10, "step").out == "10\n"
    assert dsd("show", step10, "optimizer/param_groups/@0/betas").out == "(0.9, 0.999)\n"


def test_a_container_lists_what_it_holds(dsd, step10):
    assert dsd("show", step10, "optimizer").out == GOLDEN_CONTAINER
    assert dsd("show", step10, "model").out.splitlines()[1] == (
        "model/embed.weight  tensor  float32 [4, 3], 48 B"
    )


BOXES = {
    "all": ("[:]", np.s_[:]),
    "one-slice": ("[1:3]", np.s_[1:3]),
    "two-slices": ("[0:2,:2]", np.s_[0:2, :2]),
    "open-ends": ("[2:,:-1]", np.s_[2:, :-1]),
    "integer": ("[1]", np.s_[1]),
    "integers": ("[-1,0]", np.s_[-1, 0]),
    "spaces": ("[ 0 : 2 , 1 ]", np.s_[0:2, 1]),
    "step-1": ("[0:3:1,::]", np.s_[0:3, :]),
    "empty": ("[2:1]", np.s_[2:1, :0]),
    "beyond-the-end": ("[0:99]", np.s_[0:99]),
}


@pytest.mark.parametrize(("box", "index"), BOXES.values(), ids=BOXES)
def test_a_box_is_what_numpy_takes(dsd, step10, box, index):
    expected = (np.arange(12, dtype=np.float32).reshape(4, 3) / 8)[index].tolist()
    document = dsd("show", step10, f"model/embed.weight{box}", "--json").json
    assert document["elements"] == expected


BAD_BOXES = {
    "step-2": ("[0:4:2]", "bad_argument"),
    "negative-step": ("[::-1]", "bad_argument"),
    "float": ("[0.5]", "bad_argument"),
    "ellipsis": ("[...]", "bad_argument"),
    "nothing": ("[]", "bad_argument"),
    "name": ("[a]", "bad_argument"),
    "endless-digits": ("[" + "1" * 5000 + "]", "bad_argument"),
    "too-many": ("[0,0,0]", "box_out_of_bounds"),
    "behind-the-end": ("[4]", "box_out_of_bounds"),
}


@pytest.mark.parametrize(("box", "code"), BAD_BOXES.values(), ids=BAD_BOXES)
def test_other_boxes_are_usage_errors(dsd, step10, box, code):
    result = dsd("show", step10, f"model/embed.weight{box}")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error[{code}]: ")
    assert len(result.err) < 500


def test_a_value_has_no_slices(dsd, step10):
    result = dsd("show", step10, "step[0]")
    assert result.code == 2
    assert result.err == (
        "error[bad_argument]: step[0]: only tensors have slices, and this is of type int\n"
    )


def test_a_name_that_ends_in_brackets_is_a_name_first(dsd, tmp_path):
    state = {"w": np.zeros((2, 2)), "w[0]": np.ones(3), "step[0]": 7}
    dsdformat.numpy.save(tmp_path / "c", state)
    assert dsd("show", tmp_path / "c", "w[0]", "--json").json["elements"] == [1, 1, 1]
    assert dsd("show", tmp_path / "c", "w[0][:2]", "--json").json["elements"] == [1, 1]
    assert dsd("show", tmp_path / "c", "step[0]").out == "7\n"


def test_only_blocks_that_meet_the_box_are_read(dsd, tmp_path, damage):
    data = bytes(range(256)) * 64
    with dsdformat.create(tmp_path / "c", block_nbytes=4096) as writer:
        writer.add({"w": TensorSource.of("uint8", (4, 4096), data)})
    damage(tmp_path / "c" / "model.safetensors", -1)
    assert dsd("show", tmp_path / "c", "w[0:3]").code == 0
    assert dsd("show", tmp_path / "c", "w[3]").code == 1


def test_statistics_read_a_bounded_piece_at_a_time(dsd, saved, monkeypatch):
    path = saved(w=np.arange(4096, dtype=np.float64).reshape(16, 256))
    monkeypatch.setattr(numbers, "PIECE_NBYTES", 1024)
    longest, read = 0, dsdformat.TensorEntry.read

    def measured(entry, box=None, **options):
        nonlocal longest
        longest = max(longest, box.numel * 8)
        return read(entry, box, **options)

    monkeypatch.setattr(dsdformat.TensorEntry, "read", measured)
    assert "mean   2047.5\n" in dsd("show", path, "w").out
    assert longest <= 1024


def test_special_floats_are_counted_and_left_out_of_the_statistics(dsd, saved):
    path = saved(w=np.array([math.nan, -math.inf, math.inf, 1, 3], np.float32))
    out = dsd("show", path, "w").out
    assert "  max       3\n  mean      2\n  left out  1 NaN, 2 infinite\n" in out
    document = dsd("show", path, "w", "--json").json
    assert document["elements"] == ["NaN", "-Infinity", "Infinity", 1, 3]
    assert document["stats"] == {"min": 1, "max": 3, "mean": 2, "nan": 1, "infinite": 2}


def test_an_empty_tensor_has_no_elements_and_no_statistics(dsd, saved):
    path = saved(w=np.zeros((3, 0), np.float32))
    assert grid(dsd("show", path, "w")) == "[]\n"
    document = dsd("show", path, "w", "--json").json
    assert (document["elements"], document["shape"]) == ([], [3, 0])
    assert document["stats"] == {"min": None, "max": None, "mean": None, "nan": 0, "infinite": 0}


def test_an_empty_tensor_with_a_vast_dim_is_shown_at_once(dsd, tmp_path):
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add({"w": TensorSource.of("float32", (2**40, 0, 2**20), b"")})
    assert grid(dsd("show", tmp_path / "c", "w")) == "[]\n"
    assert dsd("show", tmp_path / "c", "w", "--json").json["elements"] == []


def test_a_tensor_without_dims_is_one_number(dsd, saved):
    path = saved(w=np.array(2.5))
    assert grid(dsd("show", path, "w")) == "2.5\n"
    assert dsd("show", path, "w", "--json").json["elements"] == 2.5


def test_a_tensor_of_too_many_dims_asks_for_a_slice(dsd, saved):
    path = saved(w=np.zeros((3,) * 10, np.uint8))
    assert grid(dsd("show", path, "w")) == "too many dims to print; give a slice\n"


DTYPES = {
    "bool": (np.array([True, False]), "[ True False]"),
    "bfloat16": (np.array([1, -2.5], ml_dtypes.bfloat16), "[   1 -2.5]"),
    "float8_e4m3fn": (np.array([0.5, 448], ml_dtypes.float8_e4m3fn), "[0.5 448]"),
    "float64": (np.array([1e-300, 2 / 3]), "[ 1e-300 0.66667]"),
    "complex64": (np.array([1 - 2j], np.complex64), "[1-2j]"),
    "int4": (np.array([-8, 7], ml_dtypes.int4), "[-8  7]"),
    "int64": (np.array([-(2**63), 2**63 - 1]), "[-9223372036854775808  9223372036854775807]"),
    "uint64": (np.array([2**64 - 1], np.uint64), "[18446744073709551615]"),
}


@pytest.mark.parametrize(("array", "text"), DTYPES.values(), ids=DTYPES)
def test_numbers_of_a_dtype_read(dsd, saved, array, text):
    assert grid(dsd("show", saved(w=array), "w")) == text + "\n"


def test_complex_numbers_are_pairs_in_json_and_have_a_mean_only(dsd, saved):
    document = dsd("show", saved(w=np.array([1 - 2j, 3])), "w", "--json").json
    assert document["elements"] == [[1, -2], [3, 0]]
    assert document["stats"]["mean"] == [2, -1]
    assert document["stats"]["min"] is None


def test_integers_are_exact_in_json(dsd, saved):
    document = dsd("show", saved(w=np.array([2**63 - 1])), "w", "--json").json
    assert document["elements"] == [2**63 - 1]
    assert document["stats"]["max"] == 2**63 - 1


def test_a_dtype_without_numbers_shows_its_bytes(dsd, tmp_path):
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add({"w": TensorSource.of("float4_e2m1fn_x2", (2,), b"\x1f\xa0")})
    assert grid(dsd("show", tmp_path / "c", "w")) == "[1f a0]\n"
    document = dsd("show", tmp_path / "c", "w", "--json").json
    assert (document["elements"], document["stats"]) == (["1f", "a0"], None)


def test_without_numpy_bytes_are_shown_and_a_note_names_the_extra(dsd, step10, monkeypatch):
    monkeypatch.setattr(numbers, "find_numpy", lambda: None)
    monkeypatch.setattr(arrays, "find_numpy", lambda: None)
    result = dsd("show", step10, "model/norm.weight")
    assert grid(result) == "[803f 00c0]\n"
    assert result.err == "note: these are bytes; for numbers, pip install 'dsdformat[numpy]'\n"
    assert dsd("show", step10, "model/norm.weight", "--json").json["stats"] is None


def test_the_json_document_of_a_box_has_these_keys_and_values(dsd, step10):
    assert dsd("show", step10, "model/embed.weight[1:3,-1]", "--json").json == {
        "checkpoint": "step-10",
        "name": "model/embed.weight[1:3,-1]",
        "kind": "tensor",
        "dtype": "float32",
        "shape": [4, 3],
        "nbytes": 48,
        "box": {"offset": [1, 2], "shape": [2, 1]},
        "elements": [0.625, 1],
        "stats": {"min": 0.625, "max": 1, "mean": 0.8125, "nan": 0, "infinite": 0},
    }


def test_the_json_document_leaves_many_elements_out(dsd, saved, monkeypatch):
    monkeypatch.setattr(show, "JSON_ELEMENTS_MAX", 3)
    document = dsd("show", saved(w=np.arange(4)), "w", "--json").json
    assert document["elements"] is None
    assert document["stats"]["max"] == 3


def test_the_json_document_of_a_value(dsd, step10):
    assert dsd("show", step10, "optimizer/param_groups/@0/betas", "--json").json == {
        "checkpoint": "step-10",
        "name": "optimizer/param_groups/@0/betas",
        "kind": "value",
        "type": "tuple",
        "value": {"$tuple": [0.9, 0.999]},
    }


def test_the_json_document_of_a_container(dsd, step10):
    document = dsd("show", step10, "optimizer/param_groups/@0", "--json").json
    assert (document["kind"], document["type"]) == ("container", "dict")
    assert document["children"][1] == {
        "name": "optimizer/param_groups/@0/lr",
        "kind": "value",
        "type": "float",
        "value": 0.001,
    }
    tensor, *_ = dsd("show", step10, "model", "--json").json["children"]
    assert tensor["kind"] == "tensor"
    assert tensor["shape"] == [4, 3]
    group, state = dsd("show", step10, "optimizer", "--json").json["children"]
    assert group == {
        "name": "optimizer/param_groups",
        "kind": "container",
        "type": "list",
        "length": 1,
    }
    assert state["type"] == "dict"


def test_nothing_but_the_manifest_is_read_for_a_value(dsd, step10, monkeypatch):
    read = LocalStorage.read_into

    def checked(self, label, byte_offset, into):
        assert label == "manifest.dsd"
        return read(self, label, byte_offset, into)

    monkeypatch.setattr(LocalStorage, "read_into", checked)
    assert dsd("show", step10, "step").code == 0
    assert dsd("show", step10, "model").code == 0
