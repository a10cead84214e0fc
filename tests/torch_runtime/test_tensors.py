"""What people put into a state: tensors of any layout, arrays, values; and what is refused."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import functools
import math
import pathlib
import signal
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from exact import assert_same, assert_same_tensor  # noqa: E402
from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import DsdError, MismatchError, UnsupportedValueError  # noqa: E402
from dsdformat.torch import buffers, moves  # noqa: E402

CHANNELS_LAST = {"memory_format": torch.channels_last}


@pytest.fixture
def round_trip(tmp_path) -> Callable[..., Any]:
    """`round_trip(state, **options)` saves, verifies and loads."""

    def round_trip(state: Any, **options: Any) -> Any:
        root = dsd.save(tmp_path / "c", state, overwrite=True)
        assert dsdformat.verify(tmp_path / "c", digest=root).ok
        return dsd.load(tmp_path / "c", **options)

    return round_trip


@pytest.fixture
def load_into(tmp_path) -> Callable[..., Any]:
    """`load_into(saved, state, **options)` saves one state and loads it into another."""

    def load_into(saved: Any, state: Any, **options: Any) -> Any:
        dsd.save(tmp_path / "c", saved, overwrite=True)
        return dsd.load(tmp_path / "c", state, **options)

    return load_into


def counted(*shape: int) -> Any:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def in_inference_mode(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


# Layouts (B111).

LAYOUTS: dict[str, Callable[[], Any]] = {
    "no dims": lambda: torch.tensor(3.5),
    "no dims, a view": lambda: counted(5)[3],
    "no elements": lambda: counted(0),
    "no elements in the middle": lambda: torch.zeros(3, 0, 2),
    "no elements, strided": lambda: counted(4, 6)[:, 5:2],
    "one element": lambda: counted(1),
    "one element, many dims": lambda: counted(1, 1, 1, 1),
    "64 dims": lambda: torch.zeros((1,) * 62 + (2, 3)),
    "odd": lambda: counted(3, 5, 7),
    "transposed": lambda: counted(3, 5).t(),
    "permuted": lambda: counted(2, 3, 5).permute(2, 0, 1),
    "expanded": lambda: counted(3, 1).expand(3, 4),
    "expanded from one": lambda: torch.tensor(2.5).expand(3, 4),
    "new dim of stride 0": lambda: counted(3).unsqueeze(0).expand(5, 3),
    "every second": lambda: counted(10)[1::2],
    "every second of both dims": lambda: counted(6, 8)[::2, 1::3],
    "columns": lambda: counted(6, 8)[:, 2:5],
    "diagonal": lambda: counted(5, 5).diagonal(),
    "sliding windows": lambda: counted(9).unfold(0, 3, 1),
    "channels last": lambda: counted(2, 3, 4, 5).to(**CHANNELS_LAST),
    "channels last, batch of one": lambda: counted(1, 3, 4, 4).to(**CHANNELS_LAST),
    "channels last, one channel": lambda: counted(2, 1, 4, 4).to(**CHANNELS_LAST),
    "channels last, a slice": lambda: counted(4, 3, 4, 5).to(**CHANNELS_LAST)[1:3],
    "channels last 3d": lambda: counted(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "offset": lambda: counted(20)[7:],
    "parameter": lambda: nn.Parameter(counted(3, 4)),
    "transposed parameter": lambda: nn.Parameter(counted(3, 4).t()),
    "leaf": lambda: counted(3, 4).requires_grad_(),
    "result with a history": lambda: counted(3, 4).requires_grad_() * 2,
    "inference": lambda: in_inference_mode(lambda: counted(3, 4)),
    "inference, transposed": lambda: in_inference_mode(lambda: counted(3, 4).t()),
    "shared memory": lambda: counted(3, 4).share_memory_(),
    "shared memory, every second": lambda: counted(12).share_memory_()[::2],
    "over an array of numpy": lambda: torch.from_numpy(np.arange(6, dtype=np.float32)),
    "over bytes at an odd address": lambda: torch.frombuffer(
        bytearray(range(41)), dtype=torch.uint8, offset=1
    ),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_a_tensor_of_any_layout_comes_back(round_trip, make):
    tensor = make()
    loaded = round_trip({"w": tensor})["w"]
    assert_same_tensor(loaded, tensor.detach())
    assert type(loaded) is torch.Tensor
    assert not loaded.requires_grad


DENSE = {
    name: LAYOUTS[name]
    for name in (
        *("odd", "transposed", "permuted", "channels last", "channels last 3d"),
        *("channels last, batch of one", "transposed parameter", "inference, transposed"),
    )
}


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
def test_the_memory_order_of_a_dense_tensor_comes_back(round_trip, make):
    tensor = make()
    assert round_trip({"w": tensor})["w"].stride() == tensor.stride()


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((1, 3, 4, 4), "channels_last"), ((2, 1, 4, 4), "channels_last")],
    ids=str,
)
def test_what_was_channels_last_still_is(round_trip, shape, memory_format):
    wanted = getattr(torch, memory_format)
    loaded = round_trip({"w": counted(*shape).to(memory_format=wanted)})["w"]
    assert loaded.is_contiguous(memory_format=wanted)


SPARSE_IN_MEMORY = {
    name: LAYOUTS[name]
    for name in ("expanded", "every second of both dims", "columns", "sliding windows", "diagonal")
}


@pytest.mark.parametrize("make", SPARSE_IN_MEMORY.values(), ids=SPARSE_IN_MEMORY)
def test_a_tensor_with_holes_or_overlaps_comes_back_packed(round_trip, make):
    loaded = round_trip({"w": make()})["w"]
    assert loaded.is_contiguous()
    assert loaded.untyped_storage().nbytes() == loaded.numel() * 4


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_saving_changes_nothing_of_a_tensor(tmp_path, make):
    tensor = make()
    before = tensor.detach().clone()
    facts = (tensor.stride(), tensor.data_ptr(), tensor.requires_grad, tensor.grad_fn)
    version = None if tensor.is_inference() else tensor._version
    dsd.save(tmp_path / "c", {"w": tensor})
    assert_same_tensor(tensor.detach(), before)
    assert (tensor.stride(), tensor.data_ptr(), tensor.requires_grad, tensor.grad_fn) == facts
    assert version is None or tensor._version == version


def test_a_small_view_of_a_large_base_is_small_at_rest_and_in_memory(tmp_path):
    base = torch.zeros(5_000_000)
    dsd.save(tmp_path / "c", {"w": base[100:110]})
    assert (tmp_path / "c" / "model.safetensors").stat().st_size < 10_000
    assert dsd.load(tmp_path / "c")["w"].untyped_storage().nbytes() == 40


def test_a_tensor_that_is_expanded_is_stored_at_its_full_size(tmp_path):
    dsd.save(tmp_path / "c", {"w": torch.tensor(1.0).expand(100, 10)})
    with dsdformat.open(tmp_path / "c") as checkpoint:
        assert checkpoint.tensor("w").nbytes == 4000


def test_a_loaded_tensor_is_independent_of_the_file_and_of_other_loads(tmp_path):
    dsd.save(tmp_path / "c", {"a": counted(3), "b": counted(3)})
    first, second = dsd.load(tmp_path / "c"), dsd.load(tmp_path / "c")
    first["a"].fill_(-1)
    assert_same(second, {"a": counted(3), "b": counted(3)})
    assert_same_tensor(first["b"], counted(3))
    assert_same(dsd.load(tmp_path / "c"), {"a": counted(3), "b": counted(3)})


# Ties.

TIED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "one object": lambda w: (w, w),
    "detached": lambda w: (w, w.detach()),
    "a parameter and its data": lambda w: ((p := nn.Parameter(w)), p.data),
    "two equal views": lambda w: (w[1:3], w[1:3]),
    "two equal transposes": lambda w: (w.t(), w.t()),
    "two equal conj views": lambda w: (w.to(torch.complex64).conj(),) * 2,
}


@pytest.mark.parametrize("make", TIED.values(), ids=TIED)
def test_the_same_memory_in_the_same_form_is_one_tensor(tmp_path, make):
    a, b = make(counted(4, 3))
    dsd.save(tmp_path / "c", {"x": {"a": a}, "y": [b]})
    with dsdformat.open(tmp_path / "c") as checkpoint:
        assert len(checkpoint) == 1
    loaded = dsd.load(tmp_path / "c")
    assert loaded["x"]["a"] is loaded["y"][0]
    assert_same_tensor(loaded["x"]["a"], a.detach())


UNTIED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "equal values": lambda w: (w, w.clone()),
    "its transpose": lambda w: (w, w.t()),
    "another shape": lambda w: (w, w.reshape(3, 4)),
    "a part": lambda w: (w, w[:2]),
    "overlapping rows": lambda w: (w[:3], w[1:]),
    "another dtype": lambda w: (w, w.view(torch.int32)),
    "a step": lambda w: (w.reshape(-1)[:6], w.reshape(-1)[::2]),
    "no elements": lambda w: (w[:0], w[:0].clone()),
    "conj": lambda w: ((c := torch.complex(w, w)), c.conj()),
    "neg": lambda w: ((c := torch.complex(w, w)).imag, c.conj().imag),
    "real and imag": lambda w: ((c := torch.complex(w, -w)).real, c.imag),
}


@pytest.mark.parametrize("make", UNTIED.values(), ids=UNTIED)
def test_other_memory_or_another_form_is_another_tensor(tmp_path, make):
    a, b = make(counted(4, 3))
    dsd.save(tmp_path / "c", {"a": a, "b": b})
    with dsdformat.open(tmp_path / "c") as checkpoint:
        assert len(checkpoint) == 2
    loaded = dsd.load(tmp_path / "c")
    assert_same(loaded, {"a": a.resolve_conj().resolve_neg(), "b": b.resolve_conj().resolve_neg()})
    loaded["a"].fill_(9)
    assert_same_tensor(loaded["b"], b.resolve_conj().resolve_neg())


def test_tied_destinations_of_any_form_all_get_the_stored_tensor(load_into):
    tensor = counted(3)
    state = {
        "packed": torch.zeros(3),
        "strided": torch.zeros(6)[::2],
        "other": torch.zeros(3),
        "other strided": torch.zeros(9)[::3],
    }
    load_into(dict.fromkeys(state, tensor), state)
    assert_same(state, dict.fromkeys(state, tensor))


def test_tied_destinations_may_be_cast_each_in_its_way(load_into):
    tensor = counted(3) + 1 / 3
    wanted = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16, "d": torch.bfloat16}
    state = {name: torch.zeros(3, dtype=dtype) for name, dtype in wanted.items()}
    load_into(dict.fromkeys(state, tensor), state, dtype=wanted)
    assert_same(state, {name: tensor.to(dtype) for name, dtype in wanted.items()})


def test_a_destination_at_two_names_is_not_given_two_different_tensors(load_into):
    one = torch.zeros(2)
    with pytest.raises(MismatchError):
        load_into({"a": torch.ones(2), "b": torch.full((2,), 2.0)}, {"a": one, "b": one})
    assert_same_tensor(one, torch.zeros(2))


def test_two_models_that_share_a_layer_now_are_not_given_two_different_layers(load_into):
    def saved() -> Any:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    shared = nn.Linear(2, 2)
    state = {
        "actor": nn.Sequential(shared, nn.Linear(2, 1)),
        "critic": nn.Sequential(shared, nn.Linear(2, 1)),
    }
    before = shared.weight.detach().clone()
    with pytest.raises(MismatchError):
        load_into({"actor": saved(), "critic": saved()}, state)
    assert_same_tensor(shared.weight.detach(), before)


def test_a_destination_at_two_names_is_given_equal_tensors(load_into):
    one = torch.zeros(2)
    load_into({"a": torch.ones(2), "b": torch.ones(2)}, {"a": one, "b": one})
    assert_same_tensor(one, torch.ones(2))


# Destinations.

DESTINATIONS: dict[str, Callable[[], Any]] = {
    "packed": lambda: torch.zeros(4, 6),
    "transposed": lambda: torch.zeros(6, 4).t(),
    "every second": lambda: torch.zeros(8, 12)[::2, ::2],
    "columns": lambda: torch.zeros(4, 20)[:, 3:9],
    "at an offset": lambda: torch.zeros(30)[5:29].view(4, 6),
    "parameter": lambda: nn.Parameter(torch.zeros(4, 6)),
    "transposed parameter": lambda: nn.Parameter(torch.zeros(6, 4).t()),
    "leaf": lambda: torch.zeros(4, 6, requires_grad=True),
    "view of a leaf": lambda: torch.zeros(5, 6, requires_grad=True)[1:],
    "result with a history": lambda: torch.zeros(4, 6, requires_grad=True) * 1,
    "inference": lambda: in_inference_mode(lambda: torch.zeros(4, 6)),
    "inference, transposed": lambda: in_inference_mode(lambda: torch.zeros(6, 4).t()),
    "shared memory": lambda: torch.zeros(4, 6).share_memory_(),
    "shared memory, transposed": lambda: torch.zeros(6, 4).share_memory_().t(),
    "over an array of numpy": lambda: torch.from_numpy(np.zeros((4, 6), np.float32)),
    "over a fortran array": lambda: torch.from_numpy(np.zeros((4, 6), np.float32, order="F")),
}


@pytest.mark.parametrize("make", DESTINATIONS.values(), ids=DESTINATIONS)
def test_a_destination_of_any_layout_is_read_into_where_it_lies(load_into, make):
    tensor, source = make(), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    facts = (tensor.data_ptr(), tensor.stride(), tensor.requires_grad, tensor.is_leaf, type(tensor))
    view = tensor.detach()
    load_into({"w": source}, {"w": tensor})
    assert_same_tensor(tensor.detach(), source)
    assert_same_tensor(view, source)
    assert facts == (
        *(tensor.data_ptr(), tensor.stride(), tensor.requires_grad, tensor.is_leaf, type(tensor)),
    )


@pytest.mark.parametrize("make", DESTINATIONS.values(), ids=DESTINATIONS)
def test_a_destination_of_any_layout_is_cast_into_on_request(load_into, make):
    tensor = make()
    source = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    load_into({"w": source}, {"w": tensor}, dtype=torch.float32)
    assert_same_tensor(tensor.detach(), source.float())


@pytest.mark.parametrize("name", ["every second", "columns", "at an offset", "view of a leaf"])
def test_the_memory_around_a_destination_stays_as_it_was(load_into, name):
    tensor = DESTINATIONS[name]().detach()
    whole = torch.empty(0).set_(tensor.untyped_storage())
    whole.fill_(7)
    load_into({"w": torch.ones(4, 6)}, {"w": tensor})
    assert int((whole == 1).sum()) == 24
    assert int((whole == 7).sum()) == whole.numel() - 24


def test_gradients_stay_as_they_were(load_into):
    leaf = nn.Parameter(torch.zeros(3))
    leaf.grad = grad = torch.ones(3)
    load_into({"w": counted(3)}, {"w": leaf})
    assert leaf.grad is grad
    assert_same_tensor(grad, torch.ones(3))


def test_a_dense_destination_keeps_its_own_memory_order(load_into):
    images = torch.zeros(2, 3, 4, 5).to(**CHANNELS_LAST)
    load_into({"w": counted(2, 3, 4, 5)}, {"w": images})
    assert images.is_contiguous(**CHANNELS_LAST)
    assert_same_tensor(images, counted(2, 3, 4, 5))


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_a_destination_with_a_conj_or_neg_flag_is_read_into(load_into, view):
    base = torch.zeros(3, dtype=torch.complex64).conj()
    tensor = base if view == "conj" else base.imag
    source = torch.complex(counted(3), counted(3)) if view == "conj" else counted(3) + 1
    assert tensor.is_conj() or tensor.is_neg()
    load_into({"w": source}, {"w": tensor})
    assert_same_tensor(tensor.resolve_conj().resolve_neg(), source)


def test_a_tied_destination_with_a_conj_flag_is_read_into(load_into):
    source = torch.complex(counted(3), counted(3))
    state = {"a": torch.zeros(3, dtype=torch.complex64), "b": torch.zeros(3).cfloat().conj()}
    load_into({"a": source, "b": source}, state)
    assert_same_tensor(state["b"].resolve_conj(), source)


def test_an_expanded_destination_is_refused_before_anything_is_changed(load_into):
    state = {"a": torch.zeros(2), "w": torch.zeros(1, 3).expand(4, 3)}
    with pytest.raises(DsdError, match="w"):
        load_into({"a": torch.ones(2), "w": counted(4, 3)}, state)
    assert_same_tensor(state["a"], torch.zeros(2))


def test_a_destination_that_overlaps_itself_gets_what_was_stored_or_is_refused(load_into):
    windows = torch.zeros(6).unfold(0, 3, 1)
    with contextlib.suppress(DsdError):
        load_into({"w": counted(4, 3)}, {"w": windows})
        assert_same_tensor(windows, counted(4, 3))


def test_autograd_notices_that_a_saved_tensor_was_read_into(load_into):
    """Else a backward pass takes the new values for those of the forward pass."""
    weight = torch.full((3,), 2.0, requires_grad=True)
    loss = (weight * weight).sum()
    load_into({"w": torch.ones(3)}, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Where other things of torch hold.


def test_a_state_is_saved_and_loaded_in_inference_mode(tmp_path):
    model, state = nn.Linear(3, 2), {"w": torch.zeros(4, 3).t()}
    with torch.inference_mode():
        dsd.save(tmp_path / "c", {"model": model, "w": counted(3, 4)})
        dsd.load(tmp_path / "c", {"model": model, **state})
        loaded = dsd.load(tmp_path / "c")
    assert_same_tensor(state["w"], counted(3, 4))
    assert_same_tensor(loaded["w"].clone(), counted(3, 4))


def test_a_default_device_changes_nothing_for_what_is_saved(tmp_path):
    """As `torch.set_default_device("cuda")`, for a model on the CPU."""
    tensors = {"w": counted(3, 4), "t": counted(3, 4).t()}
    with torch.device("meta"):
        dsd.save(tmp_path / "c", tensors)
    assert_same(dsd.load(tmp_path / "c"), tensors)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_a_default_device_changes_nothing_for_what_is_loaded_anew(tmp_path, mmap):
    tensors = {"w": counted(3, 4), "t": counted(3, 4).t(), "none": torch.zeros(0)}
    dsd.save(tmp_path / "c", {**tensors, "zip": torch.ones(9)}, codec="zstd")
    with torch.device("meta"):
        loaded = dsd.load(tmp_path / "c", mmap=mmap)
    assert_same(loaded, {**tensors, "zip": torch.ones(9)})


def test_a_default_device_changes_nothing_for_what_is_loaded_in_place(tmp_path):
    dsd.save(tmp_path / "c", {"w": counted(3, 4), "t": counted(3, 4)})
    state = {"w": torch.zeros(3, 4), "t": torch.zeros(4, 3).t()}
    with torch.device("meta"):
        dsd.load(tmp_path / "c", state)
    assert_same(state, {"w": counted(3, 4), "t": counted(3, 4)})


def test_a_default_device_changes_nothing_for_a_snapshot():
    tensors = {"w": counted(3, 4), "t": counted(3, 4).t()}
    with torch.device("meta"):
        copy = dsd.snapshot(tensors)
    assert_same(copy, tensors)


def test_a_default_dtype_changes_nothing(tmp_path):
    dsd.save(tmp_path / "c", {"w": counted(3, 4)})
    torch.set_default_dtype(torch.float64)
    try:
        loaded = dsd.load(tmp_path / "c")["w"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_tensor(loaded, counted(3, 4))


# Bounded buffers: what is not packed goes through slabs.


@pytest.fixture
def small_slabs(monkeypatch) -> None:
    monkeypatch.setattr(moves, "GROUP_NBYTES", 64)
    monkeypatch.setattr(buffers, "SLAB_NBYTES", 48)


SLABS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda shape: torch.zeros(2 * shape[0], *shape[1:], dtype=torch.float32)[::2],
    "columns": lambda shape: torch.zeros(*shape[:-1], 2 * shape[-1])[..., 1::2],
    "reversed dims": lambda shape: torch.zeros(*reversed(shape)).permute(
        *reversed(range(len(shape)))
    ),
}
SHAPES = [(1,), (40,), (3, 5), (1, 40), (40, 1), (5, 17), (2, 3, 11), (1, 2, 40), (2, 0, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", SLABS.values(), ids=SLABS)
@pytest.mark.usefixtures("small_slabs")
def test_what_is_larger_than_a_slab_comes_back(load_into, round_trip, layout, shape):
    source, into = layout(shape), layout(shape)
    source.copy_(counted(*shape) + 1)
    load_into({"w": source}, {"w": into})
    assert_same_tensor(into, counted(*shape) + 1)
    assert_same(round_trip({"w": source}), {"w": counted(*shape) + 1})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("small_slabs")
def test_what_is_larger_than_a_slab_is_cast(load_into, shape):
    source, into = counted(*shape).double() / 3, torch.zeros(*shape)
    load_into({"w": source}, {"w": into}, dtype=torch.float32)
    assert_same_tensor(into, source.float())


@pytest.mark.usefixtures("small_slabs")
def test_many_small_tensors_are_read_in_groups(load_into):
    sizes = [1, 7, 8, 9, 15, 16, 17, 0, 3, 30, 2, 8, 8, 8]
    saved = {f"{i}": counted(n) + i for i, n in enumerate(sizes)}
    state = {f"{i}": torch.zeros(2 * n)[::2] for i, n in enumerate(sizes)}
    load_into(saved, state)
    assert_same(state, saved)


LARGE: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda base: base.t(),
    "every second column": lambda base: base[:, ::2],
    "one long row": lambda base: base.view(1, -1)[:, ::2],
}


@pytest.mark.parametrize("view", LARGE.values(), ids=LARGE)
def test_a_strided_tensor_of_more_than_32_mib_comes_back_in_place(load_into, view):
    base = torch.arange(9 * 2**21, dtype=torch.int32).view(4608, 4096)
    into = view(torch.zeros_like(base))
    load_into({"w": view(base)}, {"w": into})
    assert torch.equal(into, view(base))


def test_a_tensor_of_more_than_32_mib_is_cast_in_place(load_into):
    source = torch.randn(9 * 2**20, generator=torch.Generator().manual_seed(0))
    into = torch.zeros(9 * 2**20, dtype=torch.bfloat16)
    load_into({"w": source}, {"w": into}, dtype=torch.bfloat16)
    assert torch.equal(into.view(torch.int16), source.bfloat16().view(torch.int16))


# Arrays and scalars of numpy.

NP_DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
ARRAYS: dict[str, Callable[[], Any]] = {
    **{dtype: functools.partial(np.ones, (2, 3), dtype) for dtype in NP_DTYPES},
    "big-endian": lambda: np.arange(6, dtype=">f4"),
    "big-endian, strided": lambda: np.arange(12, dtype=">i2")[::2],
    "fortran": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "reversed": lambda: np.arange(12.0)[::-1],
    "every second": lambda: np.arange(12.0)[::2],
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (4, 3)),
    "no dims": lambda: np.array(3.5),
    "no elements": lambda: np.zeros((3, 0, 2)),
    "read-only": lambda: np.frombuffer(b"12345678", np.float32),
    "at an odd address": lambda: np.frombuffer(b"x" + bytes(range(40)), np.float32, offset=1),
    "NaNs with payloads": lambda: np.array([0x7F800001, 0xFFC01234], np.uint32).view(np.float32),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_an_array_comes_back_as_an_array(round_trip, make):
    loaded = round_trip({"a": {"w": make()}})["a"]["w"]
    assert_same(loaded, make())
    assert loaded.flags.writeable


def test_a_mapped_array_comes_back_as_an_array(round_trip, tmp_path):
    mapped = np.memmap(tmp_path / "raw", np.float32, "w+", shape=(30, 4))
    mapped[:] = np.arange(120).reshape(30, 4)
    assert_same(round_trip({"w": mapped}), {"w": np.array(mapped)})


ARRAY_TARGETS: dict[str, Callable[[], Any]] = {
    "packed": lambda: np.zeros((3, 4)),
    "fortran": lambda: np.zeros((3, 4), order="F"),
    "every second": lambda: np.zeros((6, 8))[::2, ::2],
    "reversed": lambda: np.zeros((3, 4))[::-1, ::-1],
}


@pytest.mark.parametrize("make", ARRAY_TARGETS.values(), ids=ARRAY_TARGETS)
def test_an_array_is_read_into_where_it_lies(load_into, make):
    target = make()
    view = target[...]
    load_into({"w": np.arange(12.0).reshape(3, 4)}, {"w": target})
    assert_same(view.copy(), np.arange(12.0).reshape(3, 4))


def test_an_array_without_dims_is_read_into(load_into):
    target = np.array(0.0)
    load_into({"w": np.array(3.5)}, {"w": target})
    assert target[()] == 3.5


def test_a_big_endian_array_is_read_into(load_into):
    target = np.zeros(3, ">f4")
    load_into({"w": np.arange(3, dtype=">f4")}, {"w": target})
    assert target.tolist() == [0, 1, 2]


BAD_TARGETS = {
    "another dtype": (np.zeros(3, np.float32), r"float64 \[3\] .*float32 \[3\] wanted"),
    "another shape": (np.zeros(4), r"float64 \[3\] .*float64 \[4\] wanted"),
    "no array but a tensor": (torch.zeros(3), "dtype float64 .*float32 wanted"),
}


@pytest.mark.parametrize(("target", "words"), BAD_TARGETS.values(), ids=BAD_TARGETS)
def test_an_array_that_does_not_fit_is_refused_before_anything_is_changed(load_into, target, words):
    first = np.zeros(2)
    with pytest.raises(MismatchError, match=words):
        load_into({"a": np.ones(2), "w": np.arange(3.0)}, {"a": first, "w": target})
    assert first.tolist() == [0, 0]
    assert not target.any()


def test_an_array_that_is_read_only_is_refused_before_anything_is_changed(load_into):
    target = np.zeros(3)
    target.flags.writeable = False
    first = np.zeros(2)
    with pytest.raises(MismatchError, match="can be written to"):
        load_into({"a": np.ones(2), "w": np.arange(3.0)}, {"a": first, "w": target})
    assert first.tolist() == [0, 0]


def test_an_array_and_a_tensor_load_into_each_other(load_into):
    tensor, array = torch.zeros(3, dtype=torch.float64), np.zeros(2, np.float32)
    load_into({"a": np.arange(3.0), "b": torch.ones(2)}, {"a": tensor, "b": array})
    assert_same_tensor(tensor, torch.arange(3.0).double())
    assert array.tolist() == [1, 1]


def test_an_array_and_the_tensor_over_it_are_stored_once_and_keep_their_types(tmp_path):
    array = np.arange(6.0)
    dsd.save(tmp_path / "c", {"a": array, "b": torch.from_numpy(array)})
    with dsdformat.open(tmp_path / "c") as checkpoint:
        assert len(checkpoint) == 1
    loaded = dsd.load(tmp_path / "c")
    assert_same(loaded, {"a": array, "b": torch.from_numpy(array)})
    assert np.shares_memory(loaded["a"], loaded["b"].numpy())


def test_an_array_at_two_names_shares_its_memory_after_loading(round_trip):
    array = np.arange(6.0)
    loaded = round_trip({"a": array, "b": [array]})
    assert np.shares_memory(loaded["a"], loaded["b"][0])


def test_an_array_at_two_names_is_one_object_as_a_tensor_is(round_trip):
    array = np.arange(6.0)
    loaded = round_trip({"a": array, "b": [array]})
    assert loaded["a"] is loaded["b"][0]


def test_two_byte_orders_over_the_same_memory_are_two_tensors(round_trip):
    little = np.arange(4, dtype="<f4")
    big = little.view(">f4")
    loaded = round_trip({"a": little, "b": big})
    assert_same(loaded, {"a": little, "b": big})


SCALARS = [
    *(np.dtype(code).type(1) for code in NP_DTYPES),
    *(np.float64("nan"), np.float32("-inf"), np.float64(-0.0), np.int64(-(2**63))),
    *(np.uint64(2**64 - 1), np.complex64(1 - 2j), np.bool_(False), np.float16(6e-8)),
]


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_a_scalar_of_numpy_comes_back_with_its_type(round_trip, scalar):
    assert_same(round_trip({"a": [scalar]}), {"a": [scalar]})


def test_the_state_of_a_generator_of_numpy_comes_back(round_trip):
    state = {
        "legacy": np.random.RandomState(3).get_state(),
        "new": np.random.default_rng(3).bit_generator.state,
    }
    loaded = round_trip(state)
    assert_same(loaded, state)
    other = np.random.RandomState(4)
    other.set_state(loaded["legacy"])
    assert other.rand() == np.random.RandomState(3).rand()


# Values (B007, B137).

UTC = datetime.UTC
VALUES: dict[str, Any] = {
    "None": None,
    "bools and ints": [True, 1, False, 0, -1, 2**63, -(2**63), 2**64, 10**100, -(10**100)],
    "floats": [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308],
    "complex": [1j, complex(-0.0, math.inf), complex(math.nan, 0)],
    "strings": ["", "a", "ä日本🙂", "a\0b", "\n", "x" * 100_000, "$.a[0]", "@1", "%2F", "/"],
    "bytes": [b"", b"\0\xff", bytes(range(256)), b"x" * 100_000],
    "empty containers": [[], (), {}, set(), frozenset(), OrderedDict(), Counter(), deque()],
    "tuples and lists": [(1, [2, (3,)]), [(), [()]], ((),)],
    "lists of dicts": [{"x": 1}, {"y": 2}],
    "ordered dict": OrderedDict([("z", 1), ("a", 2), ("m", 3)]),
    "default dict": defaultdict(None, {"a": [1]}),
    "counter": Counter({"a": 3, "b": -1, "c": 0}),
    "deques": [deque([1, 2], maxlen=2), deque([1]), deque([], maxlen=0)],
    "sets": [{1, 2, "a"}, frozenset({1.5, None, b"x"}), {(1, "a"), frozenset({2})}, {True, 0}],
    "keys": {1: "int", "1": "str", None: 0, 1.5: 0, b"1": 0, (1, "a"): 0, frozenset({1}): 0},
    "key True": {True: 1},
    "negative and large keys": {-1: 1, 2**70: 2, -(2**70): 3},
    "sizes": [torch.Size([]), torch.Size([0]), torch.Size([2, 3])],
    "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
    "layouts": [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged],
    "memory formats": [torch.channels_last, torch.contiguous_format, torch.preserve_format],
    "numpy dtypes": [np.dtype("float32"), np.dtype("int8"), np.dtype("bool")],
    "dates": [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)],
    "times": [
        datetime.datetime(2026, 2, 3, 4, 5, 6, 7),
        datetime.datetime(2026, 2, 3, 4, 5, tzinfo=UTC, fold=1),
        datetime.datetime(2026, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=-5.5))),
        datetime.timedelta(days=-1, seconds=5, microseconds=3),
    ],
    "paths": [
        Path("runs") / "a b" / "ä",
        Path("/abs/x"),
        Path(),
        pathlib.PurePosixPath("x/y"),
        pathlib.PureWindowsPath(r"C:\x\y"),
    ],
    "mixed with tensors": {"a": [(1, torch.ones(2)), deque([torch.zeros(1), None])], 3: {4: (5,)}},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_comes_back_with_its_type(round_trip, value):
    assert_same(round_trip({"a": {"v": value}}), {"a": {"v": value}})


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_comes_back_where_the_state_has_none(load_into, value):
    assert_same(dict(load_into({"v": value, "x": 1}, {"v": None})), {"v": value, "x": 1})


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_comes_back_in_a_snapshot(value):
    assert_same(dsd.snapshot({"v": value}), {"v": value})


def test_one_state_holds_all_that_trainers_keep_beside_tensors(tmp_path):
    """B137: what is saved can be loaded; what cannot is refused at save, with its key."""
    state = {
        "loss": np.float64(0.25),
        "count": np.int32(7),
        "numpy": np.random.RandomState(1).get_state(),
        "generator": np.random.default_rng(1).bit_generator.state,
        "torch": torch.get_rng_state(),
        "path": Path("runs") / "3",
        "started": datetime.datetime(2026, 3, 29, 2, 30, fold=1),
        "order": OrderedDict([("z", 1), ("a", 2)]),
        "seen": {1, 2, 3},
    }
    dsd.save(tmp_path / "c", state)
    loaded = dsd.load(tmp_path / "c")
    assert_same(dict(loaded), state)
    assert type(loaded["loss"]) is np.float64
    torch.set_rng_state(loaded["torch"])
    with pytest.raises(UnsupportedValueError, match=r"^\$\.mode: .*Mode") as caught:
        dsd.save(tmp_path / "d", {**state, "mode": Mode.FAST})
    assert caught.value.path_in_tree == "$.mode"
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("live", [[], [{"z": 0}], None, {}, 5, "text", ()], ids=repr)
def test_a_list_is_a_value_and_not_a_structure_of_keys(load_into, live):
    """A fresh program whose list is still empty gets the list that has grown."""
    loaded = load_into({"k": [{"x": 1}, {"y": 2}]}, {"k": live})
    assert_same(dict(loaded), {"k": [{"x": 1}, {"y": 2}]})


def test_the_plain_values_of_a_state_are_not_changed_by_a_load(load_into):
    state = {"history": [1, 2], "config": {"lr": 0.1, "nested": {"a": 1}}, "step": 3}
    kept = {"history": [1, 2], "config": {"lr": 0.1, "nested": {"a": 1}}, "step": 3}
    loaded = load_into({"history": [9], "config": {"lr": 9.0}, "step": 9}, state)
    assert_same(state, kept)
    assert_same(dict(loaded), {"history": [9], "config": {"lr": 9.0}, "step": 9})


def test_the_factory_of_a_default_dict_is_not_stored(round_trip):
    loaded = round_trip({"v": defaultdict(list, {"a": [1]})})["v"]
    assert type(loaded) is defaultdict
    assert loaded.default_factory is None


def test_loaded_containers_are_new_each_time(tmp_path):
    dsd.save(tmp_path / "c", {"v": {"a": [1]}})
    first = dsd.load(tmp_path / "c")
    first["v"]["a"].append(2)
    assert_same(dsd.load(tmp_path / "c"), {"v": {"a": [1]}})


# What is refused, before anything is written.

Named = collections.namedtuple("Named", "a b")


class Mode(enum.Enum):
    FAST = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    pass


class Options(dict):
    pass


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Halves:
    """An object of the user's that only knows how to give its state."""

    def state_dict(self) -> dict[str, Any]:
        return {}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: len, "a function"),
    "lambda": (lambda: lambda step: step, "a function"),
    "partial": (lambda: functools.partial(len), "functools.partial"),
    "class": (lambda: nn.Linear, "a class"),
    "class of numpy": (lambda: np.float32, "a class"),
    "Python module": (lambda: torch, "module"),
    "generator of torch": (torch.Generator, "Generator"),
    "generator of numpy": (lambda: np.random.default_rng(0), "Generator"),
    "storage": (lambda: torch.ones(1).untyped_storage(), "UntypedStorage"),
    "finfo": (lambda: torch.finfo(torch.float32), "torch.finfo"),
    "named tuple": (lambda: Named(1, 2), "Named"),
    "named tuple of tensors": (lambda: Named(torch.ones(1), nn.Linear(1, 1)), "Named"),
    "result of max": (lambda: torch.max(torch.ones(2, 2), 0), "return_types.max"),
    "enum": (lambda: Mode.FAST, "Mode"),
    "int enum": (lambda: Level.LOW, "Level"),
    "subclass of str": (lambda: Text("x"), "Text"),
    "subclass of dict": (lambda: Options(a=1), "Options"),
    "dataclass": (Config, "Config"),
    "object with half of the protocol": (Halves, "Halves"),
    "mapping proxy": (lambda: types.MappingProxyType({}), "mappingproxy"),
    "user dict": (collections.UserDict, "UserDict"),
    "namespace": (types.SimpleNamespace, "SimpleNamespace"),
    "range": (lambda: range(3), "range"),
    "slice": (lambda: slice(1), "slice"),
    "ellipsis": (lambda: ..., "ellipsis"),
    "bytearray": (lambda: bytearray(b"x"), "bytearray"),
    "decimal": (lambda: decimal.Decimal(1), "Decimal"),
    "iterator": (lambda: iter([1]), "iterator"),
    "exception": (lambda: ValueError("x"), "ValueError"),
    "time of day": (lambda: datetime.time(1), "datetime.time"),
    "lone surrogate": (lambda: "\ud800", "surrogate"),
    "masked array": (lambda: np.ma.masked_array([1.0], [0]), "MaskedArray"),
    "record array": (lambda: np.zeros(2, "i4,f4"), "dtype"),
    "object array": (lambda: np.array([None]), "dtype"),
    "array of strings": (lambda: np.array(["a"]), "dtype"),
    "string of numpy": (lambda: np.str_("x"), "numpy.str_"),
    "date of numpy": (lambda: np.datetime64("2026-01-01"), "dtype"),
    "key of numpy": (lambda: {np.int64(1): 2}, "int64"),
    "key NaN": (lambda: {math.nan: 1}, "NaN"),
    "key that is a tensor": (lambda: {torch.ones(1): 1}, "Tensor"),
    "key that is a dtype": (lambda: {torch.float32: 1}, "dtype"),
    "set of dtypes": (lambda: {torch.float32}, "dtype"),
    "set of modules": (lambda: {nn.Linear(1, 1)}, "Linear"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_refused_with_its_path_and_nothing_is_written(
    tmp_path, make, words
):
    with pytest.raises(UnsupportedValueError, match=rf"^\$\.run\.odd: .*{words}") as caught:
        dsd.save(tmp_path / "c", {"model": nn.Linear(2, 2), "run": {"odd": make(), "ok": 1}})
    assert caught.value.path_in_tree == "$.run.odd"
    assert list(tmp_path.iterdir()) == []


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "root": (lambda odd: odd, "$.x"),
    "list": (lambda odd: [1, odd], "$.x[1]"),
    "tuple": (lambda odd: (torch.ones(1), odd), "$.x[1]"),
    "dict of ints": (lambda odd: {7: odd}, "$.x[7]"),
    "odd key": (lambda odd: {"a/b c": odd}, "$.x['a/b c']"),
    "ordered dict": (lambda odd: OrderedDict(a=odd), "$.x.a"),
    "default dict": (lambda odd: defaultdict(list, a=odd), "$.x.a"),
    "deque": (lambda odd: deque([odd]), "$.x[0]"),
    "counter": (lambda odd: Counter({"a": odd}), "$.x.a"),
    "deep": (lambda odd: {"a": [{"b": ({"c": odd},)}]}, "$.x.a[0].b[0].c"),
}


@pytest.mark.parametrize(("put", "path"), PLACES.values(), ids=PLACES)
def test_a_function_is_refused_wherever_it_lies(tmp_path, put, path):
    with pytest.raises(UnsupportedValueError, match="a function cannot be stored") as caught:
        dsd.save(tmp_path / "c", {"x": put(print), "w": torch.ones(3)})
    assert caught.value.path_in_tree == path
    assert list(tmp_path.iterdir()) == []


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"f": print}

    def set_extra_state(self, state: Any) -> None:
        pass


class Keeper:
    """An object with the whole protocol, whose state holds a function."""

    def state_dict(self) -> dict[str, Any]:
        return {"f": print}

    def load_state_dict(self, state: Any) -> None:
        pass


def optimizer_with_function() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["f"] = print
    return {"model": model, "x": optimizer}


INSIDE = {
    "extra state": (lambda: {"x": Extra()}, "$.x._extra_state.f"),
    "stateful": (lambda: {"x": [Keeper()]}, "$.x[0].f"),
    "param group": (optimizer_with_function, "$.x.param_groups.weight.f"),
}


@pytest.mark.parametrize(("make", "path"), INSIDE.values(), ids=INSIDE)
def test_a_function_inside_of_an_objects_state_is_refused_with_its_path(tmp_path, make, path):
    with pytest.raises(UnsupportedValueError, match="a function cannot be stored") as caught:
        dsd.save(tmp_path / "c", make())
    assert caught.value.path_in_tree == path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["named tuple", "named tuple of tensors", "result of max"])
def test_for_a_named_tuple_the_hint_names_the_way_out(tmp_path, name):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", {"x": REFUSED[name][0]()})
    assert "plain tuple or dict" in caught.value.hint


@pytest.mark.parametrize(
    "put", [lambda m: deque([m]), lambda m: Counter(a=m)], ids=["deque", "counter"]
)
def test_a_module_where_no_module_is_looked_for_is_refused_with_a_hint(tmp_path, put):
    with pytest.raises(UnsupportedValueError, match="Linear") as caught:
        dsd.save(tmp_path / "c", {"x": put(nn.Linear(2, 2))})
    assert "state_dict()" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_module_is_not_called_a_function(tmp_path):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", {"x": deque([nn.Linear(2, 2)])})
    assert "a function" not in caught.value.message


def test_a_refused_save_leaves_an_older_checkpoint_as_it_was(tmp_path):
    root = dsd.save(tmp_path / "c", {"w": torch.ones(3)})
    with pytest.raises(UnsupportedValueError):
        dsd.save(tmp_path / "c", {"w": torch.zeros(3), "f": print}, overwrite=True)
    assert dsdformat.verify(tmp_path / "c", digest=root).ok
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


META: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.ones(2, device="meta"),
    "in a list": lambda: [torch.ones(2, device="meta")],
    "parameter": lambda: nn.Parameter(torch.ones(2, device="meta")),
    "module": lambda: nn.Linear(2, 2, device="meta"),
}


@pytest.mark.parametrize("make", META.values(), ids=META)
def test_a_tensor_without_data_is_refused_with_a_hint(tmp_path, make):
    with pytest.raises(UnsupportedValueError, match=r"x.* are on the meta device") as caught:
        dsd.save(tmp_path / "c", {"x": make()})
    assert caught.value.code == "unsupported_value"
    assert "materialize" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


META_ELSEWHERE: dict[str, Any] = {
    "deque": lambda meta: deque([meta]),
    "counter": lambda meta: Counter(a=meta),
}


@pytest.mark.parametrize("put", META_ELSEWHERE.values(), ids=META_ELSEWHERE)
def test_a_tensor_without_data_is_refused_in_any_container(tmp_path, put):
    with pytest.raises(UnsupportedValueError, match="meta"):
        dsd.save(tmp_path / "c", {"x": put(torch.ones(2, device="meta"))})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    [nn.UninitializedParameter, nn.UninitializedBuffer, lambda: [nn.UninitializedParameter()]],
    ids=["parameter", "buffer", "in a list"],
)
def test_a_lazy_parameter_that_stands_alone_is_refused(tmp_path, make):
    with pytest.raises(UnsupportedValueError, match="x"):
        dsd.save(tmp_path / "c", {"x": make()})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def short_of_time() -> Iterator[None]:
    """Raise after two seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def loop_of_dict() -> Any:
    loop: Any = {}
    loop["again"] = loop
    return loop


def loop_of_list() -> Any:
    loop: Any = [torch.ones(1)]
    loop.append(loop)
    return loop


def tree_with_parents() -> Any:
    root: Any = {"children": []}
    root["children"] = [{"parent": root}, {"parent": root}]
    return root


LOOPS = {
    "dict": loop_of_dict,
    "list": loop_of_list,
    "tree with parents": tree_with_parents,
}


@pytest.mark.parametrize("make", LOOPS.values(), ids=LOOPS)
@pytest.mark.usefixtures("short_of_time")
def test_a_state_that_contains_itself_is_refused(tmp_path, make):
    with pytest.raises(UnsupportedValueError, match="contains itself") as caught:
        dsd.save(tmp_path / "c", {"x": make()})
    assert caught.value.code == "value_too_deep"
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_nested_too_deep_is_refused(tmp_path):
    state: Any = torch.ones(1)
    for _ in range(200):
        state = {"a": state}
    with pytest.raises(UnsupportedValueError, match="nested too deep"):
        dsd.save(tmp_path / "c", state)
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_a_hundred_levels_comes_back(round_trip):
    state: Any = torch.ones(1)
    for depth in range(100):
        state = {"a": state} if depth % 2 else [state]
    assert_same(round_trip({"x": state}), {"x": state})


STATES = {
    "a module": (lambda: nn.Linear(1, 1), "model"),
    "an optimizer": (lambda: torch.optim.SGD([torch.ones(1)]), "model"),
    "a list": (lambda: [torch.ones(1)], None),
    "a tensor": (lambda: torch.ones(1), None),
    "keys that are no strings": (lambda: {1: torch.ones(1)}, None),
    "None": (lambda: None, None),
}


@pytest.mark.parametrize(("make", "hint"), STATES.values(), ids=STATES)
def test_a_state_that_is_no_mapping_of_strings_is_refused(tmp_path, make, hint):
    with pytest.raises(dsdformat.ArgumentError, match="a mapping with string keys") as caught:
        dsd.save(tmp_path / "c", make())
    assert (hint is None) or hint in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_counter_of_tensors_comes_back_with_them(round_trip):
    state = {
        "a": Counter(x=torch.ones(2), y=torch.zeros(()), z=4),
        "b": [Counter(x=[torch.ones(1)])],
    }
    found = round_trip(state)
    assert_same(found, state)


def test_a_counter_that_a_state_has_no_place_for_comes_back_as_it_was(tmp_path):
    counts = Counter({"a": 3, ("b", 1): -2})
    dsd.save(tmp_path / "c", {"counts": counts, "w": torch.ones(2)})
    rest = dsd.load(tmp_path / "c", {"w": torch.zeros(2)})
    assert_same(dict(rest), {"counts": counts})
