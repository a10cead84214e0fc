"""What `convert` writes as `.npz`: read by numpy without pickle, byte for byte, or refused."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dsdformat
import dsdformat.numpy
import dsdformat.torch as dsd
from dsdformat.convert import convert, open_any

DTYPES = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
DTYPES += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    state = {
        f"{name}.w": rng.integers(0, 2, (3, 5)).astype(name).reshape(shape)
        for name in DTYPES
        for shape in ((3, 5), (15,), (5, 1, 3))
    }
    return {**state, "scalar": np.array(2, np.float32), "empty": np.zeros((0, 4), np.int16)}


def test_numpy_reads_each_dtype_and_shape_without_pickle(tmp_path):
    state = arrays()
    dsdformat.numpy.save(tmp_path / "a", state)
    done = convert(tmp_path / "a", tmp_path / "b.npz")
    assert (done.to, done.files, done.tensors) == ("npz", ("b.npz",), len(state))
    with np.load(tmp_path / "b.npz", allow_pickle=False) as found:
        assert set(found.files) == set(state)
        for name, array in state.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes()
    with zipfile.ZipFile(tmp_path / "b.npz") as file:
        assert file.testzip() is None


def test_headers_are_those_of_numpy(tmp_path):
    state = arrays()
    dsdformat.numpy.save(tmp_path / "a", state)
    convert(tmp_path / "a", tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", **state)
    with zipfile.ZipFile(tmp_path / "b.npz") as ours, zipfile.ZipFile(tmp_path / "c.npz") as theirs:
        for name in state:
            assert ours.read(f"{name}.npy")[:64] == theirs.read(f"{name}.npy")[:64]


def test_it_comes_back_as_the_file_that_it_was(tmp_path):
    dsdformat.numpy.save(tmp_path / "a", arrays())
    convert(tmp_path / "a", tmp_path / "b.npz")
    root = convert(tmp_path / "b.npz", tmp_path / "c").root
    convert(tmp_path / "c", tmp_path / "d.npz")
    assert (tmp_path / "d.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert convert(tmp_path / "d.npz", tmp_path / "e").root == root
    with open_any(tmp_path / "b.npz") as opened:
        opened.verify()


def test_what_numpy_lacks_is_refused_with_all_names(tmp_path):
    dsd.save(tmp_path / "a", {"x": torch.ones(2).bfloat16(), "y": torch.ones(1)})
    with pytest.raises(
        dsdformat.UnsupportedValueError, match="no bfloat16 of its own: x"
    ) as caught:
        convert(tmp_path / "a", tmp_path / "b.npz")
    assert caught.value.code == "unsupported_dtype"
    assert not (tmp_path / "b.npz").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a\\b", "c:x", "nul\0", "n" * 5000, ".."])
def test_names_that_lead_out_of_a_folder_are_refused(tmp_path, name):
    dsd.save(tmp_path / "a", {name: torch.ones(1)})
    if name == "..":  # "...npy" is a plain name
        convert(tmp_path / "a", tmp_path / "b.npz")
        return
    with pytest.raises(dsdformat.UnsupportedValueError, match="no names of files"):
        convert(tmp_path / "a", tmp_path / "b.npz")


def test_names_below_folders_are_kept(tmp_path):
    dsd.save(tmp_path / "a", {"a/b": torch.ones(1), "é": torch.zeros(1), "": torch.ones(2)})
    convert(tmp_path / "a", tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as found:
        assert set(found.files) == {"a/b", "é", ""}


def test_tied_arrays_are_written_twice_only_if_asked(tmp_path):
    weight = torch.ones(3)
    dsd.save(tmp_path / "a", {"x": weight, "y": weight})
    with pytest.raises(dsdformat.UnsupportedValueError, match="tied: y") as caught:
        convert(tmp_path / "a", tmp_path / "b.npz")
    assert "ties='duplicate'" in caught.value.hint
    with pytest.raises(dsdformat.ArgumentError, match="no room for a record"):
        convert(tmp_path / "a", tmp_path / "b.npz", ties="drop")
    convert(tmp_path / "a", tmp_path / "b.npz", ties="duplicate")
    with np.load(tmp_path / "b.npz") as found:
        assert found["x"].tobytes() == found["y"].tobytes()


def test_free_strings_for_which_there_is_no_room_are_told(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors", {"format": "pt", "who": "me"})
    assert convert(tmp_path / "a.safetensors", tmp_path / "b.npz").lost_metadata == ("who",)
    assert convert(tmp_path / "a.safetensors", tmp_path / "c").lost_metadata == ()


def test_a_deflated_file_is_converted_in_order(tmp_path):
    state = {"w": np.arange(3_000_000), "v": np.ones(4)}
    np.savez_compressed(tmp_path / "a.npz", **state)
    convert(tmp_path / "a.npz", tmp_path / "b")
    back = dsdformat.numpy.load(tmp_path / "b")
    assert all(np.array_equal(back[name], state[name]) for name in state)
    convert(tmp_path / "b", tmp_path / "c.npz")
    with np.load(tmp_path / "c.npz") as found:
        assert np.array_equal(found["w"], state["w"])
