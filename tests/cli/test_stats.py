"""`dsd stats`: the numbers of tensors."""

from __future__ import annotations

import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch

import dsdformat.numpy
from dsdformat import TensorSource
from dsdformat.convert import numbers

GOLDEN = """\
w
  dtype     float32
  shape     [6]
  min       0
  max       4
  mean      1.75
  std       1.4790199
  zeros     1
  left out  1 NaN, 1 infinite

  0 to 2  2  ████████████████████████████████████████
  2 to 4  2  ████████████████████████████████████████
"""


@pytest.fixture
def saved(tmp_path):
    """`saved(array)` saves an array as `w`, and returns the path."""

    def saved(array):
        dsdformat.numpy.save(tmp_path / "saved", {"w": array}, overwrite=True)
        return tmp_path / "saved"

    return saved


def row(result):
    (found,) = result.json["tensors"]
    return found


def test_statistics_print_this(dsd, saved):
    path = saved(np.array([0, 1, 2, 4, math.nan, -math.inf], np.float32))
    assert dsd("stats", path, "w", "--bins", 2).out == GOLDEN


ARRAYS = {
    "float32": np.random.default_rng(0).standard_normal(1000).astype("f4"),
    "float64": np.random.default_rng(1).standard_normal((10, 30)) + 1e6,
    "bfloat16": np.random.default_rng(2).standard_normal(500).astype(ml_dtypes.bfloat16),
    "float16": np.linspace(-1, 1, 77).astype("f2"),
    "float8_e5m2": np.linspace(0, 60, 50).astype(ml_dtypes.float8_e5m2),
    "float8_e4m3fn": np.linspace(-9, 9, 50).astype(ml_dtypes.float8_e4m3fn),
    "int64": np.array([-(2**62), 0, 2**62, 17]),
    "uint8": np.arange(256, dtype="u1"),
    "int4": np.array([-8, -1, 0, 7], ml_dtypes.int4),
    "bool": np.array([True, False, True]),
    "scalar": np.array(2.5),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_statistics_are_those_of_numpy(dsd, saved, array, monkeypatch):
    monkeypatch.setattr(numbers, "PIECE_NBYTES", 64)
    found = row(dsd("stats", saved(array), "w", "--json", "--bins", 7))
    wide = array.astype("f8" if array.dtype.kind not in "iub" else array.dtype)
    assert (found["min"], found["max"]) == (wide.min().item(), wide.max().item())
    wide = wide.astype("f8")
    assert found["mean"] == pytest.approx(wide.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(wide.std(), rel=1e-9, abs=1e-12)
    assert (found["zeros"], found["elements"]) == ((wide == 0).sum(), array.size)
    assert sum(found["histogram"]["counts"]) == array.size
    if wide.max() > wide.min():
        assert found["histogram"]["counts"] == np.histogram(wide, 7)[0].tolist()


def test_complex_numbers_have_a_mean_and_a_spread_and_no_order(dsd, saved):
    array = np.array([1 - 2j, 3, 0], np.complex64)
    found = row(dsd("stats", saved(array), "w", "--json"))
    assert (found["min"], found["histogram"], found["zeros"]) == (None, None, 1)
    assert found["mean"] == pytest.approx([4 / 3, -2 / 3])
    assert found["std"] == pytest.approx(array.std(), rel=1e-6)


def test_a_range_of_all_doubles_has_a_histogram(dsd, saved):
    path = saved(np.array([-1.7e308, 1.7e308, 0.0, 5e-324]))
    found = row(dsd("stats", path, "w", "--json", "--bins", 2))
    assert found["histogram"]["counts"] == [1, 3]
    assert dsd("stats", path, "w", "--bins", 2).code == 0


def test_tensors_without_numbers_or_elements_are_told_so(dsd, saved, tmp_path):
    found = row(dsd("stats", saved(np.zeros((0, 3), np.float32)), "w", "--json"))
    assert (found["min"], found["mean"], found["zeros"], found["histogram"]) == (
        None,
        None,
        0,
        None,
    )
    found = row(dsd("stats", saved(np.full(3, math.nan)), "w", "--json"))
    assert (found["nan"], found["std"]) == (3, None)
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add({"w": TensorSource.of("float4_e2m1fn_x2", (2,), b"\x1f\xa0")})
    assert row(dsd("stats", tmp_path / "c", "w", "--json"))["zeros"] is None
    assert "none: elements of this dtype are bytes" in dsd("stats", tmp_path / "c", "w").out


def test_torch_files_and_globs_are_summed_up_too(dsd, tmp_path):
    state = {"a": torch.arange(4.0), "b": {"c": torch.ones(2, dtype=torch.bfloat16)}}
    torch.save(state, tmp_path / "m.pt")
    document = dsd("stats", tmp_path / "m.pt", "*", "--json", "--bins", 0).json
    assert [(one["name"], one["mean"]) for one in document["tensors"]] == [("a", 1.5), ("b/c", 1)]
    assert dsd("stats", tmp_path / "m.pt", "d").code == 2


def test_statistics_of_a_large_tensor_take_little_memory(dsd, tmp_path):
    with open(tmp_path / "w.safetensors", "wb") as file:
        header = b'{"w":{"dtype":"BF16","shape":[8,4194304],"data_offsets":[0,67108864]}}'
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 67_108_864)
    tracemalloc.start()
    found = row(dsd("stats", tmp_path / "w.safetensors", "w", "--json", "--bins", 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found["zeros"] == 8 * 4194304
    assert peak < 90 * 2**20  # of one that is 256 MiB as float64


def test_a_damaged_block_ends_with_1_and_its_place(dsd, step10, damage):
    damage("step-10/model.safetensors", -1)
    result = dsd("stats", step10, "model/norm.weight")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error[checksum_mismatch]: ")
    assert "model.safetensors, bytes 4144..4148" in result.err
