"""Arrays as people hold them: in any memory order, shared, mapped, of no elements, of no dims."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from sameness import array_bytes, assert_same

import dsdformat
import dsdformat.numpy


def counted(*shape: int) -> Any:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def window(array: Any) -> Any:
    return np.lib.stride_tricks.sliding_window_view(array, 3)


LAYOUTS = {
    "packed": counted(3, 4, 5),
    "fortran": np.asfortranarray(counted(3, 4, 5)),
    "transposed": counted(3, 4, 5).transpose(1, 2, 0),
    "negative strides": counted(3, 4, 5)[::-1, :, ::-2],
    "every second": counted(6, 8)[::2, 1::3],
    "broadcast": np.broadcast_to(counted(4, 1), (3, 4, 5)),
    "one number everywhere": np.broadcast_to(np.float32(7), (2, 3)),
    "sliding windows": window(counted(9)),
    "no dims": np.array(3.5, np.float32),
    "no dims of a view": counted(5)[3:4].reshape(()),
    "no elements": np.zeros((3, 0, 2), np.float32),
    "no elements, strided": counted(4, 6)[:, 5:2],
    "one element": counted(1, 1, 1),
    "read-only": np.frombuffer(b"12345678", np.float32),
    "64 dims": np.zeros((1,) * (dsdformat.numpy._NDIM_MAX - 1) + (2,), np.float32),
    "unaligned": np.frombuffer(b"x" + bytes(range(40)), np.float32, offset=1),
}
BIG_LAYOUTS = {
    "rows": lambda a: a[::-1],
    "columns": lambda a: a.T,
    "one long row": lambda a: a.reshape(1, -1)[:, ::2],
    "wide rows": lambda a: np.asfortranarray(a[:1710].reshape(2, -1)),
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "big-endian": lambda a: a.astype(">f4"),
}


@pytest.mark.parametrize("array", LAYOUTS.values(), ids=LAYOUTS)
def test_an_array_in_any_memory_order_comes_back(round_trip, array):
    assert_same({"w": array}, round_trip({"w": array}))


@pytest.mark.parametrize("codec", ["raw", "planes+zstd"])
@pytest.mark.parametrize("layout", BIG_LAYOUTS.values(), ids=BIG_LAYOUTS)
def test_an_array_that_is_packed_slab_by_slab_comes_back(round_trip, layout, codec):
    array = layout(counted(1711, 1303))  # 8.9 MB: several slabs, several blocks
    assert_same({"w": array}, round_trip({"w": array}, codec=codec))


@pytest.mark.parametrize("array", LAYOUTS.values(), ids=LAYOUTS)
def test_saving_changes_nothing_of_an_array(round_trip, array):
    before = (array.flags.writeable, array.strides, array.dtype, array_bytes(array))
    round_trip({"w": array})
    assert (array.flags.writeable, array.strides, array.dtype, array_bytes(array)) == before


def test_saving_changes_nothing_of_the_state(round_trip):
    state = {"b": [counted(3)], "a": {2: counted(2), "x": None}}
    inner, keys = state["a"], list(state)
    round_trip(state)
    assert list(state) == keys
    assert state["a"] is inner
    assert list(inner) == [2, "x"]


def test_a_mapped_array_comes_back_as_an_array(round_trip, tmp_path):
    mapped = np.memmap(tmp_path / "raw", np.float32, "w+", shape=(300, 40))
    mapped[:] = counted(300, 40)
    part = mapped[10:200:3]
    loaded = round_trip({"whole": mapped, "part": part})
    assert_same({"whole": np.asarray(mapped), "part": np.asarray(part)}, loaded)


def test_loaded_arrays_are_writable_and_independent_of_the_file_and_of_each_other(tmp_path):
    path = tmp_path / "checkpoint"
    root = dsdformat.numpy.save(path, {"a": counted(10), "b": counted(10)})
    first, second = dsdformat.numpy.load(path), dsdformat.numpy.load(path)
    first["a"][:] = -1
    assert_same({"a": counted(10), "b": counted(10)}, second)
    assert first["b"].tolist() == counted(10).tolist()
    assert dsdformat.verify(path, digest=root).ok
    for label in os.listdir(path):
        (path / label).unlink()
    assert second["a"].sum() == counted(10).sum()


# Shared memory


def stored(tmp_path: Any, state: Any) -> tuple[Any, int, int]:
    """The loaded state, the number of tensors that were stored, and their bytes."""
    path = tmp_path / "checkpoint"
    dsdformat.numpy.save(path, state)
    with dsdformat.open(path) as checkpoint:
        tensors, nbytes = len(checkpoint), sum(entry.nbytes for entry in checkpoint)
    return dsdformat.numpy.load(path), tensors, nbytes


def test_an_array_at_two_places_is_stored_once_and_loaded_as_one(tmp_path):
    weight = counted(4, 3)
    state = {"model": {"emb": weight, "head": weight}, "list": [weight]}
    loaded, tensors, nbytes = stored(tmp_path, state)
    assert (tensors, nbytes) == (1, weight.nbytes)
    assert loaded["model"]["emb"] is loaded["model"]["head"] is loaded["list"][0]
    assert_same(state, loaded)


def test_two_views_of_the_same_memory_are_one_tensor(tmp_path):
    base = counted(10, 4)
    loaded, tensors, _ = stored(tmp_path, {"a": base[2:5], "b": base[2:5]})
    assert tensors == 1
    assert loaded["a"] is loaded["b"]
    assert_same({"w": base[2:5]}, {"w": loaded["a"]})


def test_the_manifest_lists_all_names_of_a_tied_tensor(tmp_path):
    weight = counted(4, 3)
    dsdformat.numpy.save(tmp_path / "checkpoint", {"a": {"x": weight}, "b": weight})
    with dsdformat.open(tmp_path / "checkpoint") as checkpoint:
        entry = checkpoint.tensor("b")
        assert entry.paths == [("a", "x"), ("b",)]
        assert bytes(checkpoint.read("a/x")) == bytes(checkpoint.read("b")) == weight.tobytes()


VIEWS = {
    "disjoint rows": lambda base: (base[:3], base[3:]),
    "disjoint columns": lambda base: (base[:, :2], base[:, 2:]),
    "overlapping rows": lambda base: (base[:6], base[2:]),
    "a part of the other": lambda base: (base, base[2:4]),
    "its first row": lambda base: (base, base[0]),
    "its transpose": lambda base: (base, base.T),
    "another shape": lambda base: (base, base.reshape(5, 8)),
    "another dtype": lambda base: (base, base.view(np.int32)),
    "the same reversed": lambda base: (base, base[::-1]),
    "other strides from the same place": lambda base: (base.ravel()[:5], base.ravel()[:10:2]),
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_views_of_one_buffer_that_are_not_the_same_tensor_are_stored_whole(tmp_path, views):
    a, b = views(counted(10, 4))
    loaded, tensors, nbytes = stored(tmp_path, {"a": a, "b": b})
    assert (tensors, nbytes) == (2, a.nbytes + b.nbytes)
    assert_same({"a": a, "b": b}, loaded)
    assert not np.shares_memory(loaded["a"], loaded["b"])


def test_a_small_view_of_a_large_base_is_small_at_rest(tmp_path):
    base = np.zeros(5_000_000, np.float32)
    _, _, nbytes = stored(tmp_path, {"w": base[100:110]})
    assert nbytes == 40
    assert (tmp_path / "checkpoint" / "model.safetensors").stat().st_size < 10_000


def test_equal_arrays_in_different_memory_are_two_tensors(tmp_path):
    loaded, tensors, _ = stored(tmp_path, {"a": counted(3), "b": counted(3)})
    assert tensors == 2
    assert loaded["a"] is not loaded["b"]


def test_an_array_without_elements_is_tied_to_itself_alone(tmp_path):
    one, other = np.zeros((2, 0)), np.zeros((2, 0))
    loaded, tensors, _ = stored(tmp_path, {"a": one, "b": one, "c": other, "d": np.zeros(0)})
    assert tensors == 3
    assert loaded["a"] is loaded["b"]
    assert loaded["a"] is not loaded["c"]


def test_arrays_that_are_made_while_the_state_is_read_are_not_taken_for_each_other(tmp_path):
    class Fresh(dict):
        """Not a type of the format; only here to show that nothing calls its methods."""

    with pytest.raises(dsdformat.UnsupportedValueError, match="Fresh"):
        stored(tmp_path, {"a": Fresh()})
