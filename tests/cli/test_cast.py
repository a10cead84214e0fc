"""`dsd cast`: other dtypes, rounded as torch rounds, and never lossy without a word."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import dsdformat
import dsdformat.numpy
import dsdformat.torch as dsd_torch
from dsdformat.convert.casting import CAST_DTYPES

FLOATS = [name for name in CAST_DTYPES if "float" in name]


def sample(name):
    """All values of a dtype of at most 16 bits; random bits, ties and limits of a wider one."""
    dtype = getattr(torch, name)
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    torch.manual_seed(0)
    edges = [0.0, -0.0, 1e39, 65519, 65520, 448, 464, 465, 57344, 61440, 1 + 2**-8, 1 + 3 * 2**-8]
    numbers = torch.cat([torch.randn(3000), torch.randn(3000) * 1e-7, torch.randn(3000) * 3e4])
    bits = torch.randint(-(2**62), 2**62, (6000,)).view(dtype)
    ties = (torch.randn(3000).bfloat16().double() + 2.0**-9 + 2.0**-40).to(dtype)
    return torch.cat([numbers.to(dtype), bits, ties, torch.tensor(edges, dtype=dtype)])


def rounded(tensor, dtype):
    """As torch rounds; older ones made NaN of what is too large for float8_e4m3fn."""
    result = tensor.to(dtype)
    if dtype == torch.float8_e4m3fn:
        large = tensor.double().abs() > 448
        result.view(torch.uint8)[large] = 0x7E + 0x80 * (tensor.double()[large] < 0).byte()
    return result


@pytest.mark.parametrize("old", FLOATS)
def test_floats_are_rounded_as_torch_rounds_them(dsd, tmp_path, old):
    tensor = sample(old)
    dsd_torch.save(tmp_path / "old", {"w": tensor})
    for new in FLOATS:
        result = dsd("cast", tmp_path / "old", tmp_path / new, "--dtype", new, "--json")
        assert (result.code, len(result.json["cast"])) == (0, int(new != old))
        found, expected = dsd_torch.load(tmp_path / new)["w"], rounded(tensor, getattr(torch, new))
        nan = torch.isnan(expected.double())
        assert torch.equal(torch.isnan(found.double()), nan)
        one, other = (tensor.double()[~nan] for tensor in (found, expected))
        assert torch.equal(one, other)
        assert torch.equal(torch.signbit(one), torch.signbit(other))


def test_what_is_too_large_is_counted_and_told(dsd, tmp_path):
    state = {"w": np.array([1, 65520, -1e30, np.inf, np.nan], "f4"), "v": np.ones(2, "f4")}
    dsdformat.numpy.save(tmp_path / "c", state)
    result = dsd("cast", tmp_path / "c", tmp_path / "d", "--dtype", "float16")
    assert (result.code, result.err) == (0, "note: w: 2 elements too large for float16\n")
    rows = dsd("cast", tmp_path / "c", tmp_path / "e", "--dtype", "float16", "--json").json["cast"]
    assert rows == [
        {"name": "v", "from": "float32", "overflows": 0},
        {"name": "w", "from": "float32", "overflows": 2},
    ]


def test_all_floats_are_cast_but_those_of_optimizers(dsd, step10):
    assert dsd("cast", step10, "new", "--dtype", "float64").code == 0
    state = dsdformat.numpy.load("new")
    assert {a.dtype.name for a in state["model"].values()} == {"float64"}
    assert state["model"]["head.weight"] is state["model"]["embed.weight"]
    assert state["optimizer"]["state"]["embed.weight"]["exp_avg"].dtype == "float32"
    assert state["step"] == 10


SELECTED = {
    "everything-is-not-the-optimizer": ("*", "float32"),
    "its-name-is": ("optimizer/*", "float16"),
    "its-branch-is": ("optimizer", "float16"),
}


@pytest.mark.parametrize(("glob", "dtype"), SELECTED.values(), ids=SELECTED)
def test_an_optimizer_is_cast_only_by_its_name(dsd, step10, glob, dtype):
    assert dsd("cast", step10, "new", "--dtype", "float16", "--select", glob).code == 0
    state = dsdformat.numpy.load("new")
    assert state["optimizer"]["state"]["embed.weight"]["exp_avg"].dtype == dtype
    assert state["model"]["norm.weight"].dtype == ("float16" if glob == "*" else "bfloat16")


def test_it_is_told_where_nothing_is_cast(dsd, step10):
    result = dsd("cast", step10, "new", "--dtype", "float16", "--select", "*exp_avg")
    assert (result.code, result.err.startswith("note: nothing was cast: ")) == (0, True)


def test_components_of_a_sparse_tensor_are_left(dsd, tmp_path):
    dsd_torch.save(tmp_path / "c", {"s": torch.eye(3).to_sparse(), "w": torch.ones(1)})
    assert dsd("cast", tmp_path / "c", tmp_path / "d", "--dtype", "float16").code == 0
    loaded = dsd_torch.load(tmp_path / "d")
    assert (loaded["s"].dtype, loaded["w"].dtype) == (torch.float32, torch.float16)


EXACT = {
    "int-to-float": (np.array([2**24, -3]), "float32"),
    "int-to-bfloat16": (np.array([255, -256], "i4"), "bfloat16"),
    "int-to-narrower": (np.array([-128, 127]), "int8"),
    "int-to-unsigned": (np.array([0, 255]), "uint8"),
    "uint64": (np.array([2**63], "u8"), "float64"),
    "float-to-int": (np.array([3.0, -4.0]), "int16"),
    "bool-to-int": (np.array([True, False]), "int64"),
    "int-to-bool": (np.array([0, 1]), "bool"),
    "int-to-complex": (np.array([7]), "complex64"),
    "int4": (np.array([-8, 7], ml_dtypes.int4), "float8_e4m3fn"),
    "empty": (np.zeros((0, 2), "i8"), "int8"),
}
INEXACT = {
    "int-to-float": (np.array([5, 2**24 + 1]), "float32", True),
    "int-to-bfloat16": (np.array([257], "i4"), "bfloat16", True),
    "int-to-narrower": (np.array([128]), "int8", False),
    "int-to-unsigned": (np.array([-1]), "uint64", False),
    "uint64-to-int64": (np.array([2**63], "u8"), "int64", False),
    "large-int64": (np.array([2**63 - 1]), "float64", True),
    "half": (np.array([0.5]), "int64", True),
    "nan": (np.array([np.nan]), "int64", False),
    "negative-zero": (np.array([-0.0]), "int8", True),
    "beyond-int64": (np.array([2.0**63]), "int64", False),
    "int-to-bool": (np.array([2]), "bool", True),
    "too-large": (np.array([100_000]), "float16", False),
}


@pytest.mark.parametrize(("array", "dtype"), EXACT.values(), ids=EXACT)
def test_integers_are_cast_where_each_stays_the_same_number(dsd, tmp_path, array, dtype):
    dsdformat.numpy.save(tmp_path / "c", {"w": array})
    arguments = ["cast", tmp_path / "c", tmp_path / "d", "--select", "w", "--dtype", dtype]
    assert dsd(*arguments).code == 0
    found = dsdformat.numpy.load(tmp_path / "d")["w"]
    assert found.dtype.name == dtype
    assert found.astype("c16").tolist() == array.astype("c16").tolist()


@pytest.mark.parametrize(("array", "dtype", "possible"), INEXACT.values(), ids=INEXACT)
def test_others_are_refused_or_cast_where_it_is_asked_for(dsd, tmp_path, array, dtype, possible):
    dsdformat.numpy.save(tmp_path / "c", {"w": array})
    arguments = ["cast", tmp_path / "c", tmp_path / "d", "--select", "w", "--dtype", dtype]
    result = dsd(*arguments)
    assert (result.code, (tmp_path / "d").exists()) == (1, False)
    assert result.err.startswith("error[inexact_cast]: w: ")
    assert "--lossy" in result.err
    result = dsd(*arguments, "--lossy")
    assert result.code == (0 if possible else 1)
    if possible:
        found = dsdformat.numpy.load(tmp_path / "d")["w"]
        expected = torch.from_numpy(array).to(getattr(torch, dtype))
        assert found.astype("f8").tolist() == expected.double().tolist()


REFUSED = {
    "no-dtype": ["--dtype", "float7"],
    "no-numbers": ["--dtype", "float8_e8m0fnu"],
    "floats-to-int-unnamed": ["--dtype", "int8"],
    "complex-to-real": ["--dtype", "float32", "--select", "c"],
    "nothing-matches": ["--dtype", "float32", "--select", "nothing"],
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_asked_for_ends_with_2(dsd, tmp_path, options):
    dsdformat.numpy.save(tmp_path / "c", {"c": np.ones(1, "c8"), "w": np.ones(1)})
    assert dsd("cast", tmp_path / "c", tmp_path / "d", *options).code == 2
    assert not (tmp_path / "d").exists()


def test_a_torch_file_is_cast_into_a_checkpoint(dsd, tmp_path):
    weight = torch.randn(4, 6).t()
    torch.save({"w": weight, "tied": weight}, tmp_path / "m.pt")
    arguments = ["cast", tmp_path / "m.pt", tmp_path / "c", "--dtype", "bfloat16"]
    assert dsd(*arguments).code == 0
    loaded = dsd_torch.load(tmp_path / "c")
    assert torch.equal(loaded["w"], weight.bfloat16())
    assert loaded["w"] is loaded["tied"]
    assert Path(tmp_path / "m.pt").exists()
