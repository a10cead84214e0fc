"""`dsd diff`: what differs between two checkpoints, whatever files they lie in."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dsdformat.numpy
import dsdformat.torch as dsd_torch
from dsdformat import TensorSource
from dsdformat.convert import convert, diff
from tests.convert.samples import NO_DIST

GOLDEN = """\
different
  a        one
  b        two
  tensors  3 compared, 2 differ
  values   2 compared, 2 differ
  read     no data: digests say it all

only in a
old

only in b
new

changed  what   a             b
betas    type   tuple (0.9,)  list [0.9]
lr       value  0.1           0.2
model/b  shape  float32 [2]   float32 [3]
model/w  data   float32 [4]   float32 [4]
"""


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """`pair(a, b)` saves two states as the checkpoints `one` and `two`, in the current folder."""
    monkeypatch.chdir(tmp_path)

    def pair(a, b, **options):
        dsdformat.numpy.save("one", a, overwrite=True)
        dsdformat.numpy.save("two", b, overwrite=True, **options)

    return pair


def f32(*numbers):
    return np.array(numbers, np.float32)


def numbers(dsd, *arguments):
    (change,) = dsd("diff", "one", "two", "--stats", "--json", *arguments).json["changes"]
    return change["numbers"]


def test_equal_checkpoints_end_with_0(dsd, pair):
    pair({"w": f32(1, 2), "n": math.nan}, {"w": f32(1, 2), "n": math.nan}, codec="planes+zstd")
    result = dsd("diff", "one", "two")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("equal\n")


def test_all_that_differs_is_told_and_ends_with_1(dsd, pair):
    same = f32(7)
    pair(
        {"model": {"w": f32(1, 2, 3, 4), "b": f32(0, 0), "s": same}, "old": 1, "lr": 0.1}
        | {"betas": (0.9,)},
        {"model": {"w": f32(1, 2, 3, 5), "b": f32(0, 0, 0), "s": same}, "new": 1, "lr": 0.2}
        | {"betas": [0.9]},
    )
    result = dsd("diff", "one", "two")
    assert (result.code, result.err) == (1, "")
    assert result.out == GOLDEN


def test_ranks_chunks_and_codecs_are_no_difference(dsd, sharded, tmp_path):
    state = dsdformat.numpy.load(sharded)
    dsdformat.numpy.save(tmp_path / "whole", state)
    result = dsd("diff", sharded, tmp_path / "whole", "--json")
    assert (result.code, result.json["equal"], result.json["tensors"]) == (0, True, 2)
    assert result.json["nbytes_read"] == 16384  # of the one whose digest no manifest gives
    state["model"]["weight"][2047, 1] += 1
    dsdformat.numpy.save(tmp_path / "other", state)
    document = dsd("diff", sharded, tmp_path / "other", "--stats", "--json").json
    (change,) = document["changes"]
    assert (change["name"], change["numbers"]["first"]) == ("model/weight", [2047, 1])


def write_kinds(tmp_path, state):
    dsd_torch.save(tmp_path / "dsd", state)
    save_file({name: one.contiguous() for name, one in state.items()}, tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "m.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    dcp.save(state, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file({name: one.contiguous() for name, one in state.items()}, folder / "model.safetensors")
    return ["dsd", "m.safetensors", "m.pt", "old.pt", "dcp", "hub"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_kinds_of_files_are_no_difference(dsd, tmp_path):
    torch.manual_seed(0)
    state = {
        "a.weight": torch.randn(3, 5).t(),
        "b": torch.arange(4).to(torch.float8_e4m3fn),
        "c": torch.randn(7).to(torch.bfloat16),
        "d": torch.tensor(True),
    }
    kinds = write_kinds(tmp_path, state)
    digests = {dsd("digest", tmp_path / kind, "--content").out for kind in kinds}
    assert len(digests) == 1
    for kind in kinds[1:]:
        result = dsd("diff", tmp_path / "dsd", tmp_path / kind)
        assert (kind, result.code) == (kind, 0)
    state["c"] = state["c"] + 1
    torch.save(state, tmp_path / "m.pt")
    for kind in ["dsd", "dcp", "m.safetensors"]:
        document = dsd("diff", tmp_path / kind, tmp_path / "m.pt", "--json").json
        assert [(one["name"], one["what"]) for one in document["changes"]] == [("c", "data")]


def test_a_branch_is_compared_with_a_file_that_has_no_such_branch(dsd, tmp_path):
    weights = {"w": np.ones(3, np.float32), "v": np.zeros(2, np.float32)}
    dsdformat.numpy.save(tmp_path / "step", {"model": weights, "step": 1})
    np.savez(tmp_path / "weights.npz", **weights)
    arguments = ["diff", tmp_path / "step", tmp_path / "weights.npz"]
    assert dsd(*arguments).code == 1
    assert dsd(*arguments, "--branch-a", "model").code == 0
    assert dsd(*arguments, "--branch-a", "nothing").code == 2


def test_an_optimizer_is_compared_with_its_values(dsd, tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for name in ("one", "two"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        dsd_torch.save(tmp_path / name, {"model": model, "optimizer": optimizer})
        optimizer.param_groups[0]["lr"] = 0.2
    arguments = ["diff", tmp_path / "one", tmp_path / "two", "--select", "optimizer", "--json"]
    changes = dsd(*arguments).json["changes"]
    assert {one["name"]: one["what"] for one in changes} == {
        "optimizer/param_groups/weight/lr": "value",
        **{
            f"optimizer/state/{name}/{kept}": "data"
            for name in ("weight", "bias")
            for kept in ("exp_avg", "exp_avg_sq", "step")
        },
    }


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """One training in each form of an optimizer that files have."""
    folder = tmp_path_factory.mktemp("forms")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    dsd_torch.save(folder / "ours", {"model": model, "optimizer": optimizer, "step": 3})
    numbered = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(numbered, folder / "numbered.pt")
    convert(folder / "ours", folder / "listed", to="dcp")
    return folder


@pytest.mark.parametrize("pair", ["ours numbered.pt", "listed ours", "numbered.pt listed"])
def test_optimizers_by_numbers_and_by_names_are_compared_by_names(dsd, forms, pair):
    a, b = (forms / name for name in pair.split())
    result = dsd("diff", a, b, "--json")
    assert (result.code, result.json["equal"]) == (0, True)
    group = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]  # newer ones have more in it
    assert (result.json["tensors"], result.json["values"]) == (16, 1 + len(group))


def test_what_differs_in_an_optimizer_of_another_form_has_the_name_of_its_parameter(
    dsd, forms, tmp_path
):
    state = torch.load(forms / "numbered.pt")
    state["optimizer"]["state"][1]["exp_avg"][0] += 1
    state["optimizer"]["param_groups"][0]["lr"] = 0.5
    torch.save(state, tmp_path / "other.pt")
    result = dsd("diff", forms / "ours", tmp_path / "other.pt", "--json")
    assert (result.code, result.json["only_a"], result.json["only_b"]) == (1, [], [])
    assert [(one["name"], one["what"]) for one in result.json["changes"]] == [
        ("optimizer/param_groups/0.weight/lr", "value"),
        ("optimizer/state/0.bias/exp_avg", "data"),
    ]


def test_an_optimizer_whose_names_nothing_tells_is_compared_as_it_is(dsd, forms, tmp_path):
    state = torch.load(forms / "numbered.pt")
    del state["model"]
    torch.save(state, tmp_path / "other.pt")
    result = dsd("diff", forms / "ours", tmp_path / "other.pt", "--select", "optimizer/*", "--json")
    assert result.code == 1
    assert "optimizer/state/0.bias/exp_avg" in result.json["only_a"]
    assert "optimizer/state/@1/exp_avg" in result.json["only_b"]


def test_tied_tensors_are_read_and_counted_once(dsd, tmp_path):
    weight = torch.arange(6.0)
    state = {"embed": weight, "head": weight, "alone": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    document = dsd("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json").json
    assert (document["equal"], document["tensors"]) == (True, 3)
    assert document["nbytes_read"] == 2 * (24 + 8)


def test_names_that_are_tied_in_one_alone_are_a_difference(dsd, pair):
    one = f32(1, 2)
    pair({"a": one, "b": one, "c": f32(3)}, {"a": one, "b": one.copy(), "c": f32(3)})
    result = dsd("diff", "one", "two", "--json")
    assert result.code == 1
    assert result.json["changes"] == []
    assert result.json["ties"] == [
        {"name": "a", "a": ["b"], "b": []},
        {"name": "b", "a": ["a"], "b": []},
    ]
    assert "tied  a       b\na     with b  alone\n" in dsd("diff", "one", "two").out
    assert dsd("diff", "one", "two", "--no-ties").code == 0


def test_the_order_of_keys_counts_only_when_asked_for(dsd, tmp_path):
    from collections import OrderedDict

    for name, keys in (("one", "ab"), ("two", "ba")):
        state = {"d": OrderedDict((key, f32(1)) for key in keys)}
        dsdformat.numpy.save(tmp_path / name, state)
    dsdformat.numpy.save(tmp_path / "plain", {"d": {"a": f32(1), "b": f32(1)}})
    one, two, plain = tmp_path / "one", tmp_path / "two", tmp_path / "plain"
    assert dsd("diff", one, two).code == dsd("diff", one, plain).code == 0
    assert [c["what"] for c in dsd("diff", one, two, "--order", "--json").json["changes"]] == [
        "order"
    ]
    assert [c["what"] for c in dsd("diff", one, plain, "--order", "--json").json["changes"]] == [
        "type"
    ]


NUMBERS = {
    "float32": (f32(1, 2, 3), f32(1, 2.5, 1), 2, 2.0),
    "bfloat16": (
        np.array([1, 2], ml_dtypes.bfloat16),
        np.array([1, 2.5], ml_dtypes.bfloat16),
        1,
        0.5,
    ),
    "float8_e4m3fn": (
        np.array([448, -448], ml_dtypes.float8_e4m3fn),
        np.array([-448, -448], ml_dtypes.float8_e4m3fn),
        1,
        896.0,
    ),
    "complex64": (np.array([3 + 4j, 1], "c8"), np.array([0, 1], "c8"), 1, 5.0),
    "complex128": (np.array([3 + 4j, 1], "c16"), np.array([3 + 4j, 1 - 2j], "c16"), 1, 2.0),
    "int64": (np.array([-(2**63), 5]), np.array([2**63 - 1, 5]), 1, 2**64 - 1),
    "uint64": (np.array([2**64 - 1], "u8"), np.array([0], "u8"), 1, 2**64 - 1),
    "int8": (np.array([-128, 1], "i1"), np.array([127, 1], "i1"), 1, 255),
    "int4": (np.array([-8], ml_dtypes.int4), np.array([7], ml_dtypes.int4), 1, 15),
    "bool": (np.array([True, False]), np.array([False, False]), 1, 1),
    "infinite": (f32(math.inf, -math.inf), f32(math.inf, math.inf), 1, "Infinity"),
    "negative-zero": (f32(0.0), f32(-0.0), 1, 0.0),
}


@pytest.mark.parametrize(("a", "b", "differing", "most"), NUMBERS.values(), ids=NUMBERS)
def test_elements_that_differ_are_counted_and_measured(dsd, pair, a, b, differing, most):
    pair({"w": a}, {"w": b})
    found = numbers(dsd)
    assert (found["elements"], found["differing"]) == (len(a), differing)
    assert (found["max_abs"], found["nan"]) == (most, 0)


def test_nan_is_equal_to_the_same_bits_alone(dsd, pair):
    quiet, other = (np.array([bits], "u4").view("f4")[0] for bits in (0x7FC00000, 0xFFC00001))
    pair({"w": f32(quiet, 1, 2)}, {"w": f32(quiet, 1, 2)})
    assert dsd("diff", "one", "two", "--stats").code == 0
    pair({"w": f32(quiet, 1, 2, 3)}, {"w": f32(other, quiet, 2.5, 3)})
    found = numbers(dsd)
    assert (found["differing"], found["nan"], found["max_abs"]) == (3, 2, 0.5)
    assert (found["first"], found["a"], found["b"]) == ([0], "NaN", "NaN")


def test_dtypes_that_differ_are_compared_as_numbers(dsd, pair):
    exact = f32(1, -2, math.nan, 1 + 2**-12)
    pair({"w": exact}, {"w": exact.astype(ml_dtypes.bfloat16)})
    found = numbers(dsd)
    assert (found["differing"], found["max_abs"], found["first"]) == (1, 2**-12, [3])
    line = dsd("diff", "one", "two", "--stats").out.splitlines()[-1].split()
    assert line == ["w", "dtype:", "float32,", "bfloat16", "1", "of", "4", "0.0002441"]
    pair({"w": np.array([2**53 + 1])}, {"w": np.array([2**53 + 1], "u8")})
    assert numbers(dsd)["differing"] == 0


def test_a_dtype_without_numbers_has_differing_elements_alone(dsd, tmp_path):
    for name, data in (("one", b"\x1f\xa0"), ("two", b"\x1f\xa1")):
        with dsdformat.create(tmp_path / name) as writer:
            writer.add({"w": TensorSource.of("float4_e2m1fn_x2", (2,), data)})
    result = dsd("diff", tmp_path / "one", tmp_path / "two", "--stats", "--json")
    (change,) = result.json["changes"]
    assert (change["numbers"]["differing"], change["numbers"]["max_abs"]) == (1, None)


def test_random_arrays_differ_as_numpy_says(tmp_path):
    rng = np.random.default_rng(0)
    for shape in ((), (5,), (3, 4), (2, 0), (7, 3, 2)):
        a = rng.standard_normal(shape).astype("f4")
        b = np.where(rng.random(shape) < 0.3, a + rng.standard_normal(shape).astype("f4"), a)
        dsdformat.numpy.save(tmp_path / "a", {"w": a}, overwrite=True)
        dsdformat.numpy.save(tmp_path / "b", {"w": b.astype("f4")}, overwrite=True)
        found = diff(tmp_path / "a", tmp_path / "b", stats=True)
        differ = a != b
        assert found.equal == (not differ.any())
        for change in found.changes:
            assert change.numbers.differing == differ.sum()
            assert change.numbers.max_abs == np.abs(a.astype("f8") - b.astype("f8")).max()
            assert change.numbers.first == tuple(np.argwhere(differ)[0])


def test_what_is_compared_can_be_chosen(dsd, pair):
    pair({"a": f32(1), "b": f32(1)}, {"a": f32(1), "b": f32(2)})
    assert dsd("diff", "one", "two", "--select", "a").code == 0
    assert dsd("diff", "one", "two", "--select", "b").code == 1
    result = dsd("diff", "one", "two", "--select", "nothing*")
    assert result.code == 2
    assert result.err.startswith("error[entry_not_found]: ")


def test_damage_is_told_with_the_checkpoint_and_the_place(dsd, sharded, tmp_path, damage):
    dsdformat.numpy.save(tmp_path / "whole", dsdformat.numpy.load(sharded))
    damage(sharded / "model-00001-of-00002.safetensors", -1)
    result = dsd("diff", tmp_path / "whole", sharded)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"error[stored_checksum_mismatch]: {sharded}: ")
    assert "model/weight" in result.err


def test_data_that_has_digests_is_not_read(dsd, pair, monkeypatch):
    pair({"w": f32(1, 2)}, {"w": f32(1, 3)})
    monkeypatch.setattr(dsdformat.TensorEntry, "read", None)
    document = dsd("diff", "one", "two", "--json").json
    assert (document["equal"], document["nbytes_read"]) == (False, 0)
