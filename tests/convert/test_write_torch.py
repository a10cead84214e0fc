"""Files of torch.save that we write: torch loads them, with weights_only and mmap, bit for bit."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from forge import PAYLOAD, pickled, torch_zip
from samples import VALUES, trained
from test_torch_files import ARRAYS, DTYPES, LAYOUTS, SPARSE, bits
from torch import nn

import dsdformat
import dsdformat.torch as dsd
from dsdformat.convert import convert, open_foreign
from dsdformat.convert.archive import read_archive
from dsdformat.convert.archive_writing import ArchiveWriter
from dsdformat.convert.files import MemoryBytes

SAFE = [name for name in VALUES if name not in ("default", "deques", "sets", "times", "keys")]
SAFE = [name for name in SAFE if name not in ("paths", "windows")]
UNTYPED = DTYPES[5:6] + DTYPES[13:]


@pytest.fixture
def trip(tmp_path):
    """`trip(state)` writes a state as ours, then as torch's, and gives what torch loads of it.

    Compares on the way: what torch loads, and what we read again, make the same checkpoint.
    """

    def trip(state: Any, *, weights_only: bool = True, form: str = "zip") -> Any:
        root = dsd.save(tmp_path / "ours", state, threads=1)
        options = {"weights_only": weights_only, "form": form}
        convert(tmp_path / "ours", tmp_path / "x.pt", **options)
        loaded = torch.load(tmp_path / "x.pt", weights_only=weights_only, mmap=form == "zip")
        assert dsd.save(tmp_path / "loaded", loaded, threads=1) == root
        assert convert(tmp_path / "x.pt", tmp_path / "again", to="dsd").root == root
        return loaded

    return trip


@pytest.mark.parametrize("form", ["zip", "stream"])
def test_a_training_state_is_loaded_with_weights_only(trip, form):
    state = trip(trained(), form=form)
    assert type(state["optimizer"]["param_groups"][1]["betas"]) is tuple
    assert state["epoch"] == 3


@pytest.mark.parametrize("what", SAFE)
def test_plain_values_are_loaded_with_weights_only(trip, what):
    if what == "constants" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        pytest.skip("this torch takes torch.int4 for no plain value")
    assert repr(trip({what: VALUES[what]})[what]) == repr(VALUES[what])


@pytest.mark.parametrize("form", ["zip", "stream"])
@pytest.mark.parametrize("what", VALUES)
def test_every_value_is_loaded_without_weights_only(trip, what, form):
    loaded = trip({what: VALUES[what]}, weights_only=False, form=form)[what]
    assert type(loaded) is type(VALUES[what])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_loaded_bit_for_bit(trip, dtype):
    trip({"w": bits(dtype, 3, 4), "none": bits(dtype, 0, 4), "one": bits(dtype, 1)})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_loaded_exactly_and_dense_ones_as_they_lay(trip, layout):
    tensor = LAYOUTS[layout]
    loaded = trip({"w": tensor})["w"]
    if layout in ("transposed", "permuted", "channels-last"):
        assert loaded.stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_tensors_are_loaded(trip, kind):
    tensor = SPARSE[kind](torch.eye(4))
    loaded = trip({"w": tensor})["w"]
    assert loaded.layout == tensor.layout
    assert torch.equal(loaded.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_and_scalars_of_numpy_are_loaded_without_weights_only(trip, what):
    trip({what: ARRAYS[what]}, weights_only=False)


def test_dtypes_that_all_share_are_not_changed_by_loading(trip):
    trip({"a": np.arange(3).astype(ml_dtypes.bfloat16)}, weights_only=False)
    dtype = np.dtype(ml_dtypes.bfloat16)
    assert (dtype.itemsize, dtype.alignment, dtype.flags) == (2, 2, 64)


def test_tied_tensors_share_one_storage(trip, tmp_path):
    tied, array = torch.randn(100, 100), np.ones(3)
    loaded = trip({"a": tied, "b": tied, "c": tied.clone()})
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() != loaded["c"].data_ptr()
    assert (tmp_path / "x.pt").stat().st_size < 3 * tied.nbytes
    convert_again = {"a": array, "b": [array]}
    dsd.save(tmp_path / "arrays", convert_again)
    convert(tmp_path / "arrays", tmp_path / "arrays.pt", weights_only=False)
    loaded = torch.load(tmp_path / "arrays.pt", weights_only=False)
    assert loaded["a"] is loaded["b"][0]


def test_what_python_keeps_on_a_state_dict_is_kept_from_file_to_file(tmp_path):
    state = nn.BatchNorm1d(2).state_dict()
    torch.save({"model": state}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt")["model"]
    assert type(loaded) is OrderedDict
    assert loaded._metadata == state._metadata == {"": {"version": 2}}
    fresh = nn.BatchNorm1d(2)
    fresh.load_state_dict(loaded)
    assert torch.equal(fresh.weight, state["weight"])


@pytest.mark.parametrize("piece", [40, 1000, 4096])
def test_long_tensors_are_written_in_pieces_in_every_order(trip, monkeypatch, piece):
    for module in ("copying", "packed"):
        monkeypatch.setattr(f"dsdformat.convert.{module}.PIECE_NBYTES", piece)
    images = torch.rand(3, 5, 7, 11)
    state = {
        "plain": images,
        "last": images.contiguous(memory_format=torch.channels_last),
        "turned": torch.randn(37, 41, dtype=torch.complex128).t(),
        "halves": torch.randn(13, 17).half().t(),
    }
    loaded = trip(state)
    assert all(torch.equal(loaded[name], one) for name, one in state.items())
    assert all(loaded[name].stride() == one.stride() for name, one in state.items())


def test_the_file_is_built_as_torch_builds_it(tmp_path):
    dsd.save(tmp_path / "ours", {"a": torch.ones(3), "b": torch.zeros(0), "c": torch.ones(70)})
    convert(tmp_path / "ours", tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [
            *("archive/data.pkl", "archive/.format_version", "archive/.storage_alignment"),
            *("archive/byteorder", "archive/data/0", "archive/data/1", "archive/data/2"),
            "archive/version",
        ]
    source = MemoryBytes((tmp_path / "x.pt").read_bytes())
    assert all(entry.byte_offset % 64 == 0 for entry in read_archive(source).entries.values())
    assert torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "x.pt") == []


def test_the_same_state_makes_the_same_file(tmp_path):
    dsd.save(tmp_path / "ours", trained())
    for name in ("x.pt", "y.pt"):
        convert(tmp_path / "ours", tmp_path / name)
    assert (tmp_path / "x.pt").read_bytes() == (tmp_path / "y.pt").read_bytes()


def test_numbers_of_many_gigabytes_are_in_wide_fields(monkeypatch):
    monkeypatch.setattr("dsdformat.convert.archive_writing._WIDE", 1000)
    file = io.BytesIO()
    archive = ArchiveWriter(file.write)
    data = {"a": b"x" * 10, "b": b"y" * 1500, "c": b"z" * 20}
    for name, content in data.items():
        archive.add(name, len(content), [content])
    archive.end()
    with zipfile.ZipFile(file) as opened:
        assert {name: opened.read(name) for name in opened.namelist()} == data
        assert [len(entry.extra) for entry in opened.infolist()] == [0, 20, 12]
    ours = read_archive(MemoryBytes(file.getvalue()))
    assert {name: entry.nbytes for name, entry in ours.entries.items()} == {
        "a": 10,
        "b": 1500,
        "c": 20,
    }


REFUSED: dict[str, tuple[Any, str, str]] = {
    "defaultdict": (defaultdict(None, a=1), "$.v", "unsupported_value"),
    "frozenset": ({"k": frozenset([1])}, "$.v.k", "unsupported_value"),
    "frozenset as a key": ({(1, frozenset([1])): 1}, "$.v", "unsupported_value"),
    "huge int": ([2**3000], "$.v[0]", "unsupported_value"),
    "array": ([0, np.ones(3)], "$.v[1]", "unsupported_value"),
    "numpy scalar": (np.float32(1), "$.v", "unsupported_value"),
    "numpy dtype": (np.dtype("f4"), "$.v", "unsupported_value"),
    "memory format": (torch.channels_last, "$.v", "unsupported_value"),
    **{
        name: (VALUES[name], f"$.v[{at}]", "unsupported_value")
        for name, at in (("deques", 0), ("times", 0), ("paths", 0))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_weights_only_does_not_load_is_refused_with_its_place(tmp_path, case):
    value, place, code = REFUSED[case]
    dsd.save(tmp_path / "ours", {"v": value, "w": torch.ones(2)})
    with pytest.raises(dsdformat.UnsupportedValueError) as caught:
        convert(tmp_path / "ours", tmp_path / "x.pt")
    assert caught.value.code == code
    assert str(caught.value.path_in_tree).startswith(place)
    assert "weights_only=False" in str(caught.value.hint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]
    convert(tmp_path / "ours", tmp_path / "x.pt", weights_only=False)
    torch.load(tmp_path / "x.pt", weights_only=False)


NEVER: dict[str, Any] = {
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("case", NEVER)
def test_what_has_no_form_in_torch_files_is_refused(tmp_path, case):
    dsd.save(tmp_path / "ours", {"v": NEVER[case]()})
    with pytest.raises(dsdformat.UnsupportedValueError, match=r"\$\.v"):
        convert(tmp_path / "ours", tmp_path / "x.pt", weights_only=False)
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("dtype", ["float8_e3m4", "float6_e2m3fn"])
def test_a_dtype_that_torch_does_not_have_is_refused(tmp_path, dtype):
    with dsdformat.create(tmp_path / "ours") as writer:
        writer.add_tensor("w", b"abcd", dtype=dtype, shape=[4])
        writer.commit()
    with pytest.raises(dsdformat.UnsupportedValueError) as caught:
        convert(tmp_path / "ours", tmp_path / "x.pt", weights_only=False)
    assert (caught.value.code, caught.value.path_in_tree) == ("unsupported_dtype", "$.w")


@pytest.mark.parametrize("dtype", UNTYPED)
def test_a_dtype_that_the_stream_form_does_not_have_is_refused(tmp_path, dtype):
    dsd.save(tmp_path / "ours", {"w": bits(dtype, 4)})
    with pytest.raises(dsdformat.UnsupportedValueError) as caught:
        convert(tmp_path / "ours", tmp_path / "x.pt", form="stream")
    assert (caught.value.code, caught.value.path_in_tree) == ("unsupported_dtype", "$.w")


def test_a_file_is_replaced_only_if_that_is_wanted(tmp_path):
    dsd.save(tmp_path / "ours", {"w": torch.ones(2)})
    target = tmp_path / "x.pt"
    target.write_bytes(b"mine")
    with pytest.raises(dsdformat.StorageError) as caught:
        convert(tmp_path / "ours", target)
    assert caught.value.code == "already_exists"
    assert target.read_bytes() == b"mine"
    convert(tmp_path / "ours", target, overwrite=True)
    assert torch.equal(torch.load(target)["w"], torch.ones(2))


def test_a_form_that_is_not_known_is_refused(tmp_path):
    dsd.save(tmp_path / "ours", {"w": torch.ones(2)})
    with pytest.raises(dsdformat.ArgumentError, match="zip"):
        convert(tmp_path / "ours", tmp_path / "x.pt", form="tar")


def test_nothing_is_left_where_reading_fails(tmp_path):
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "a.pt")
    with open_foreign(tmp_path / "a.pt") as foreign:
        assert foreign.tensor("w").nbytes == 4000
    dsd.save(tmp_path / "ours", {"w": torch.arange(1000.0)})
    data = next((tmp_path / "ours").glob("*.safetensors"))
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(dsdformat.ChecksumError):
        convert(tmp_path / "ours", tmp_path / "x.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "ours"]


def test_roots_that_are_no_dict_of_names_keep_their_form(tmp_path: Path):
    torch.save([torch.ones(2), {"a": 1}], tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt")
    assert type(loaded) is list
    assert loaded[1] == {"a": 1}


@pytest.mark.parametrize("to", ["torch", "dcp", "dsd"])
def test_a_hostile_file_is_converted_to_nothing(tmp_path, to):
    archive = torch_zip(pickled(PAYLOAD))
    (tmp_path / "x.pt").write_bytes(archive)
    with pytest.raises(dsdformat.ConvertError) as caught:
        convert(tmp_path / "x.pt", tmp_path / "out", to=to)
    assert caught.value.code == "unknown_global"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.pt"]
