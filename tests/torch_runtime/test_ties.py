"""Ties: what is one tensor is stored once and is one tensor again; what only looks so is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat.errors import DsdError, MismatchError  # noqa: E402
from tests.torch_runtime.exact import assert_same, assert_same_tensor, bits  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where this test's checkpoint goes."""
    return tmp_path / "saved"


def stored_paths(path: Path) -> list[list[str]]:
    """For each tensor that is stored, all the places that refer to it."""
    with dsdformat.open(path) as checkpoint:
        return sorted(
            sorted("/".join(map(str, place)) for place in entry.paths) for entry in checkpoint
        )


def data_nbytes(path: Path) -> int:
    with dsdformat.open(path) as checkpoint:
        return sum(checkpoint.data_files.values())


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Pair(nn.Module):
    """An embedding and a head, each with a weight and a buffer; tied or not."""

    def __init__(self, tied: bool = True, first: str = "emb") -> None:
        super().__init__()
        names = ["emb", "head"] if first == "emb" else ["head", "emb"]
        for name in names:
            part = nn.Embedding(4, 3) if name == "emb" else nn.Linear(3, 4, bias=False)
            part.register_buffer("scale", torch.randn(5))
            setattr(self, name, part)
        if tied:
            self.tie()

    def tie(self) -> Pair:
        self.head.weight = self.emb.weight
        self.head.scale = self.emb.scale
        return self

    def check_tied(self) -> None:
        assert self.head.weight is self.emb.weight
        assert self.head.scale is self.emb.scale
        assert len(list(self.parameters())) == 1
        assert len(list(self.buffers())) == 1


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


PLACES: dict[str, Callable[[Callable[[], nn.Module]], nn.Module]] = {
    "cpu": lambda make: make(),
    "meta": on_meta,
}
each_place = pytest.mark.parametrize("place", PLACES)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An AdamW over the model that has taken a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


# What is tied when it is saved


def same_parameter() -> list[Any]:
    weight = nn.Parameter(torch.randn(3))
    return [weight, weight]


def parameters_over_one_memory() -> list[Any]:
    weight = nn.Parameter(torch.randn(3))
    return [weight, nn.Parameter(weight.data)]


def detached() -> list[Any]:
    weight = nn.Parameter(torch.randn(3))
    return [weight, weight.detach()]


def aliased_view() -> list[Any]:
    weight = torch.randn(2, 3)
    return [weight, weight.view(3, 2).view(2, 3)]


def same_part_of_a_base() -> list[Any]:
    base = torch.randn(10)
    return [base[2:5], base[1:6][1:4]]


def same_transposed_view() -> list[Any]:
    base = torch.randn(3, 3)
    return [base.t(), base.t()]


def conjugated_twice() -> list[Any]:
    value = torch.randn(3, dtype=torch.complex64)
    return [value, value.conj().conj()]


def tensor_and_array() -> list[Any]:
    array = np.arange(3, dtype=np.float32)
    return [array, torch.from_numpy(array)]


def two_views_of_an_array() -> list[Any]:
    array = np.arange(6, dtype=np.int16)
    return [array[2:4], array[:4][2:]]


def one_row_by_other_strides() -> list[Any]:
    base = torch.randn(1, 4)
    return [base, base.as_strided((1, 4), (77, 1))]


TIED = [
    same_parameter,
    parameters_over_one_memory,
    detached,
    aliased_view,
    same_part_of_a_base,
    same_transposed_view,
    conjugated_twice,
    tensor_and_array,
    two_views_of_an_array,
    one_row_by_other_strides,
]


@pytest.mark.parametrize("make", TIED, ids=lambda make: make.__name__)
def test_the_same_memory_in_the_same_form_is_stored_once(
    path: Path, make: Callable[[], list[Any]]
) -> None:
    a, b = make()
    dsd.save(path, {"a": a, "b": b})
    assert stored_paths(path) == [["a", "b"]]
    assert_same(dsd.load(path), {"a": a, "b": b})


@pytest.mark.parametrize("make", TIED[:7], ids=lambda make: make.__name__)
def test_tied_names_are_one_tensor_after_loading(path: Path, make: Callable[[], list[Any]]) -> None:
    dsd.save(path, dict(zip("ab", make(), strict=True)))
    state = dsd.load(path)
    assert state["a"] is state["b"]


@pytest.mark.parametrize("make", TIED[:7], ids=lambda make: make.__name__)
def test_tied_names_are_one_tensor_in_a_snapshot(make: Callable[[], list[Any]]) -> None:
    copy = dsd.snapshot(dict(zip("ab", make(), strict=True)))
    assert copy["a"] is copy["b"]


@pytest.mark.parametrize("make", TIED, ids=lambda make: make.__name__)
def test_what_was_loaded_is_saved_again_digest_for_digest(
    tmp_path: Path, make: Callable[[], list[Any]]
) -> None:
    first = dsd.save(tmp_path / "first", dict(zip("ab", make(), strict=True)))
    assert dsd.save(tmp_path / "second", dsd.load(tmp_path / "first")) == first


@pytest.mark.parametrize(
    "make",
    [
        *TIED[:7],
        *(
            pytest.param(
                make,
            )
            for make in TIED[7:]
        ),
    ],
    ids=lambda make: make.__name__,
)
def test_a_snapshot_is_saved_as_the_state_is_digest_for_digest(
    tmp_path: Path, make: Callable[[], list[Any]]
) -> None:
    state = dict(zip("ab", make(), strict=True))
    first = dsd.save(tmp_path / "first", state)
    assert dsd.save(tmp_path / "second", dsd.snapshot(state)) == first


def test_a_model_without_ties_is_stored_with_each_tensor_of_its_own(path: Path) -> None:
    dsd.save(path, {"model": Pair(tied=False)})
    assert stored_paths(path) == [
        ["model/emb.scale"],
        ["model/emb.weight"],
        ["model/head.scale"],
        ["model/head.weight"],
    ]


def test_all_names_of_a_tied_tensor_are_listed(path: Path) -> None:
    dsd.save(path, {"model": Pair()})
    assert stored_paths(path) == [
        ["model/emb.scale", "model/head.scale"],
        ["model/emb.weight", "model/head.weight"],
    ]


def test_three_names_of_a_tensor_are_listed(path: Path) -> None:
    model = Triple()
    dsd.save(path, {"model": model})
    assert stored_paths(path) == [["model/a.weight", "model/b.weight", "model/c.weight"]]


def test_a_module_that_two_modules_hold_is_stored_once(path: Path) -> None:
    shared = nn.BatchNorm1d(3)
    dsd.save(path, {"model": nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])})
    assert len(stored_paths(path)) == 5


def test_a_layer_that_is_repeated_is_stored_once(path: Path) -> None:
    layer = nn.Linear(2, 2)
    dsd.save(path, {"model": nn.Sequential(*[layer] * 6)})
    assert [len(places) for places in stored_paths(path)] == [6, 6]


def test_a_tensor_in_several_sections_is_stored_once(path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["master"] = model.weight.data
    dsd.save(
        path,
        {"model": model, "optimizer": optimizer, "copy": [model.weight, {"x": model.weight}]},
    )
    assert sorted(len(places) for places in stored_paths(path)) == [1, 4]


def test_a_buffer_that_is_a_parameter_elsewhere_is_stored_once(path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("alias", model.weight.data)
    dsd.save(path, {"model": model})
    assert stored_paths(path) == [["model/alias", "model/weight"], ["model/bias"]]


# What is not tied, though it shares memory


def flat_and_shaped() -> list[Any]:
    base = torch.randn(6)
    return [base, base.view(2, 3)]


def square_and_transposed() -> list[Any]:
    base = torch.randn(3, 3)
    return [base, base.t()]


def with_a_dim_more() -> list[Any]:
    base = torch.randn(4)
    return [base, base[None]]


def other_dtype_of_the_same_width() -> list[Any]:
    base = torch.randn(4)
    return [base, base.view(torch.int32)]


def other_dtype_of_another_width() -> list[Any]:
    base = torch.randn(4)
    return [base, base.view(torch.uint8)]


def float_and_bfloat_of_one_memory() -> list[Any]:
    base = torch.randn(4).half()
    return [base, base.view(torch.bfloat16)]


def number_and_conjugate() -> list[Any]:
    base = torch.randn(4, dtype=torch.complex64)
    return [base, base.conj()]


def number_and_its_parts() -> list[Any]:
    base = torch.randn(4, dtype=torch.complex64)
    return [base, torch.view_as_real(base)]


def imaginary_part_and_negative() -> list[Any]:
    base = torch.randn(4, dtype=torch.complex64)
    return [base.imag, base.conj().imag]


def disjoint_halves() -> list[Any]:
    base = torch.randn(8)
    return [base[:4], base[4:]]


def interleaved() -> list[Any]:
    base = torch.randn(8)
    return [base[::2], base[1::2]]


def overlapping() -> list[Any]:
    base = torch.randn(8)
    return [base[:6], base[2:]]


def head_of_a_longer_one() -> list[Any]:
    base = torch.randn(8)
    return [base, base[:4]]


def same_start_other_step() -> list[Any]:
    base = torch.randn(8)
    return [base[:4], base[::2]]


def diagonal_and_row() -> list[Any]:
    base = torch.randn(3, 3)
    return [base[0], base.diagonal()]


def expanded_and_dense() -> list[Any]:
    base = torch.randn(4)
    return [base, base[:1].expand(4)]


def windows() -> list[Any]:
    base = torch.randn(8)
    return [base.unfold(0, 3, 1), base.unfold(0, 3, 2)]


def array_of_another_shape() -> list[Any]:
    base = np.arange(6, dtype=np.float32)
    return [base, torch.from_numpy(base.reshape(2, 3))]


def array_of_another_dtype() -> list[Any]:
    base = np.arange(6, dtype=np.float32)
    return [torch.from_numpy(base), base.view(np.int32)]


def array_backwards() -> list[Any]:
    base = np.arange(6, dtype=np.float32)
    return [torch.from_numpy(base), base[::-1]]


NOT_TIED = [
    flat_and_shaped,
    square_and_transposed,
    with_a_dim_more,
    other_dtype_of_the_same_width,
    other_dtype_of_another_width,
    float_and_bfloat_of_one_memory,
    number_and_conjugate,
    number_and_its_parts,
    imaginary_part_and_negative,
    disjoint_halves,
    interleaved,
    overlapping,
    head_of_a_longer_one,
    same_start_other_step,
    diagonal_and_row,
    expanded_and_dense,
    windows,
    array_of_another_shape,
    array_of_another_dtype,
    array_backwards,
]


@pytest.mark.parametrize("swapped", [False, True], ids=["in order", "swapped"])
@pytest.mark.parametrize("make", NOT_TIED, ids=lambda make: make.__name__)
def test_other_views_of_one_memory_are_stored_each_in_full(
    path: Path, make: Callable[[], list[Any]], swapped: bool
) -> None:
    a, b = make()[::-1] if swapped else make()
    dsd.save(path, {"a": a, "b": b})
    assert stored_paths(path) == [["a"], ["b"]]
    state = dsd.load(path)
    assert_same(state, {"a": a, "b": b})
    one, other = torch.as_tensor(state["a"]), torch.as_tensor(state["b"])
    assert not share_memory(one, other)


@pytest.mark.parametrize("make", NOT_TIED, ids=lambda make: make.__name__)
def test_a_snapshot_of_other_views_of_one_memory_has_each_in_full(
    make: Callable[[], list[Any]],
) -> None:
    a, b = make()
    copy = dsd.snapshot({"a": a, "b": b})
    assert_same(copy, {"a": a, "b": b})
    assert not share_memory(torch.as_tensor(copy["a"]), torch.as_tensor(copy["b"]))


def test_parameters_in_a_flat_buffer_are_stored_each_in_full(path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    flat = torch.cat([parameter.data.reshape(-1) for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    dsd.save(path, {"model": model})
    assert_same(dsd.load(path)["model"], dict(model.state_dict()))
    assert data_nbytes(path) < flat.nbytes + 4096 + 1024


def test_a_flat_buffer_of_parameters_is_loaded_in_place(path: Path) -> None:
    source = nn.Linear(3, 4)
    dsd.save(path, {"model": source})
    model, flat = nn.Linear(3, 4), torch.zeros(16)
    model.weight.data, model.bias.data = flat[:12].view(4, 3), flat[12:]
    dsd.load(path, {"model": model})
    assert_same_tensor(flat, torch.cat([source.weight.detach().reshape(-1), source.bias.detach()]))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_view_of_a_large_base_costs_what_it_shows(path: Path, codec: str) -> None:
    base = torch.randn(1 << 20)
    dsd.save(path, {"a": base[100:104], "b": base[:: 1 << 18]}, codec=codec)
    assert data_nbytes(path) < 8192 + 1024
    assert_same(dsd.load(path), {"a": base[100:104], "b": base[:: 1 << 18]})


def test_a_snapshot_of_a_view_of_a_large_base_holds_what_it_shows() -> None:
    copy = dsd.snapshot({"a": torch.randn(1 << 20)[100:104]})
    assert copy["a"].untyped_storage().nbytes() == 16


def test_a_tensor_that_is_loaded_holds_no_more_memory_than_it_needs(path: Path) -> None:
    dsd.save(path, {"a": torch.randn(1000)[:10], "b": torch.randn(1000)})
    assert dsd.load(path)["a"].untyped_storage().nbytes() == 40


def two_empty_ones() -> list[Any]:
    return [torch.empty(0), torch.empty(0)]


def empty_slices_of_one_place() -> list[Any]:
    base = torch.randn(4)
    return [base[2:2], base[2:2]]


def empty_parameters() -> list[Any]:
    return [nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0, 3))]


def empty_and_full_of_one_place() -> list[Any]:
    base = torch.randn(4)
    return [base[:0], base]


def empty_array_and_tensor() -> list[Any]:
    array = np.empty(0, dtype=np.float32)
    return [array, torch.from_numpy(array)]


EMPTY = [
    two_empty_ones,
    empty_slices_of_one_place,
    empty_parameters,
    empty_and_full_of_one_place,
    empty_array_and_tensor,
]


@pytest.mark.parametrize("make", EMPTY, ids=lambda make: make.__name__)
def test_empty_tensors_are_tied_to_no_others(path: Path, make: Callable[[], list[Any]]) -> None:
    a, b = make()
    dsd.save(path, {"a": a, "b": b})
    assert stored_paths(path) == [["a"], ["b"]]
    state = dsd.load(path)
    assert state["a"] is not state["b"]
    assert_same(state, {"a": a, "b": b})


@pytest.mark.parametrize("make", EMPTY[:4], ids=lambda make: make.__name__)
def test_empty_tensors_are_tied_to_no_others_in_a_snapshot(make: Callable[[], list[Any]]) -> None:
    copy = dsd.snapshot(dict(zip("ab", make(), strict=True)))
    assert copy["a"] is not copy["b"]


class Fresh:
    """A stateful object whose state dict is made anew at each call."""

    def __init__(self, number: int, array: bool) -> None:
        self.number, self.array = number, array

    def state_dict(self) -> dict[str, Any]:
        value = torch.full((64,), float(self.number))
        return {"value": value.numpy() if self.array else value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = int(state["value"][0])


@pytest.mark.parametrize("array", [False, True], ids=["tensors", "arrays"])
def test_memory_that_is_free_again_ties_nothing(path: Path, array: bool) -> None:
    state = {f"s{number}": Fresh(number, array) for number in range(50)}
    dsd.save(path, state)
    loaded = dsd.load(path)
    assert [int(loaded[name]["value"][0]) for name in state] == list(range(50))
    assert len(stored_paths(path)) == 50


def test_extra_states_that_are_made_anew_are_not_tied(path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def get_extra_state(self) -> torch.Tensor:
            return torch.full((64,), self.number)

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.number = int(state[0])

    dsd.save(path, {"model": nn.ModuleList([Counting(number) for number in range(50)])})
    other = nn.ModuleList([Counting(-1) for _ in range(50)])
    dsd.load(path, {"model": other})
    assert [one.number for one in other] == list(range(50))


def test_equal_content_in_different_memory_is_no_tie(path: Path) -> None:
    dsd.save(path, {"a": torch.ones(3), "b": torch.ones(3)})
    state = dsd.load(path)
    assert stored_paths(path) == [["a"], ["b"]]
    assert not share_memory(state["a"], state["b"])


# Arrays and tensors


def test_an_array_and_a_tensor_that_are_tied_share_memory_again(path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    dsd.save(path, {"array": array, "tensor": torch.from_numpy(array)})
    state = dsd.load(path)
    assert type(state["array"]) is np.ndarray
    state["array"][0, 0] = 7
    assert state["tensor"][0, 0] == 7


def test_two_arrays_that_are_tied_share_memory_again(path: Path) -> None:
    array = np.arange(6, dtype=np.float32)
    dsd.save(path, {"a": array, "b": array})
    state = dsd.load(path)
    assert np.shares_memory(state["a"], state["b"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("array", "tensor"),
        pytest.param(
            "tensor",
            "array",
        ),
    ],
    ids=["array first", "tensor first"],
)
@pytest.mark.parametrize("shape", [(2, 3), (1, 4, 3), (2, 3, 4)], ids=str)
def test_a_tied_array_whose_dims_are_permuted_keeps_its_values(
    path: Path, first: str, second: str, shape: tuple[int, ...]
) -> None:
    array = np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape).T
    both = {"array": array, "tensor": torch.from_numpy(array)}
    dsd.save(path, {"a": both[first], "b": both[second]})
    assert_same(dsd.load(path), {"a": both[first], "b": both[second]})


def test_a_tensor_that_is_tied_to_an_array_keeps_its_order_of_dims(path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    dsd.save(path, {"array": array, "tensor": torch.from_numpy(array)})
    assert dsd.load(path)["tensor"].stride() == (1, 3)


@pytest.mark.parametrize("name", ["a", "z"])
def test_a_live_array_that_is_tied_to_a_new_tensor_gets_its_values(path: Path, name: str) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    dsd.save(path, {"m": array, name: torch.from_numpy(array)})
    live = np.zeros_like(array)
    rest = dsd.load(path, {"m": live, name: None})
    assert_same(live, array)
    assert_same_tensor(rest[name], torch.from_numpy(array))


@pytest.mark.parametrize(
    "order",
    ["C", pytest.param("F")],
)
def test_a_tied_array_and_tensor_load_into_live_ones_that_are_not(path: Path, order: str) -> None:
    array = np.asarray(np.arange(6, dtype=np.float32).reshape(2, 3), order=order)
    dsd.save(path, {"array": array, "tensor": torch.from_numpy(array)})
    live = {"array": np.zeros((2, 3), np.float32), "tensor": torch.zeros(2, 3)}
    dsd.load(path, live)
    assert_same(live, {"array": array, "tensor": torch.from_numpy(array)})
    live["array"][0, 0] = 7
    assert live["tensor"][0, 0] == 0


def test_a_live_array_and_tensor_that_share_memory_get_what_was_tied(path: Path) -> None:
    array = np.arange(6, dtype=np.float32)
    dsd.save(path, {"array": array, "tensor": torch.from_numpy(array)})
    live = np.zeros(6, np.float32)
    dsd.load(path, {"array": live, "tensor": torch.from_numpy(live)})
    assert_same(live, array)


# Ties in the model and in the file


@each_place
def test_a_tied_model_is_tied_after_loading(path: Path, place: str) -> None:
    source = Pair()
    dsd.save(path, {"model": source})
    model = PLACES[place](Pair)
    weight, scale = model.emb.weight, model.head.scale
    dsd.load(path, {"model": model})
    model.check_tied()
    assert model.emb.weight is weight
    assert model.head.scale is scale
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


@each_place
@pytest.mark.parametrize("kept", ["emb", "head"])
def test_one_name_of_a_tied_tensor_is_enough(path: Path, place: str, kept: str) -> None:
    source = Pair()
    stored = {f"{kept}.weight": source.emb.weight, f"{kept}.scale": source.emb.scale}
    dsd.save(path, {"model": stored})
    model = PLACES[place](Pair)
    assert not dsd.load(path, {"model": model}).report
    model.check_tied()
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


@each_place
def test_no_name_of_a_tied_tensor_is_reported_once(path: Path, place: str) -> None:
    dsd.save(path, {"model": {"emb.scale": torch.zeros(5)}})
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": PLACES[place](Pair)})
    assert caught.value.report.missing == ["model/emb.weight"]
    assert not caught.value.report.uninitialized


@each_place
@pytest.mark.parametrize("first", ["emb", "head"])
def test_a_tied_model_loads_what_one_with_another_order_of_modules_saved(
    path: Path, place: str, first: str
) -> None:
    source = Pair(first=first)
    optimizer = stepped(source)
    dsd.save(path, {"model": source, "optimizer": optimizer})
    model = PLACES[place](lambda: Pair(first="head" if first == "emb" else "emb"))
    other = torch.optim.AdamW(model.parameters())
    assert not dsd.load(path, {"model": model, "optimizer": other}).report
    model.check_tied()
    assert_same(other.state[model.emb.weight], optimizer.state[source.emb.weight])


def test_a_tied_parameter_has_one_entry_in_the_optimizer(path: Path) -> None:
    model = Pair()
    dsd.save(path, {"model": model, "optimizer": stepped(model)})
    stored = dsd.load(path)["optimizer"]
    assert list(stored["state"]) == ["emb.weight"]
    assert [group["params"] for group in stored["param_groups"].values()] == [["emb.weight"]]


@each_place
def test_the_optimizer_of_a_tied_model_is_restored(path: Path, place: str) -> None:
    source = Pair()
    optimizer = stepped(source)
    dsd.save(path, {"model": source, "optimizer": optimizer})
    model = PLACES[place](Pair)
    other = torch.optim.AdamW(model.parameters())
    dsd.load(path, {"model": model, "optimizer": other})
    model.check_tied()
    assert list(other.state) == [model.emb.weight]
    assert_same(other.state[model.head.weight], optimizer.state[source.head.weight])
    assert other.param_groups[0]["params"][0] is model.head.weight


def test_a_model_that_is_not_tied_gets_both_from_a_file_where_they_are(path: Path) -> None:
    source = Pair()
    dsd.save(path, {"model": source})
    model = Pair(tied=False)
    dsd.load(path, {"model": model})
    assert_same(dict(model.state_dict()), dict(source.state_dict()))
    assert not share_memory(model.emb.weight, model.head.weight)
    assert not share_memory(model.emb.scale, model.head.scale)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
@pytest.mark.parametrize("what", ["weight", "scale"])
def test_meta_tensors_that_are_not_tied_stay_so_where_the_file_ties_them(
    path: Path, what: str, mmap: bool
) -> None:
    source = Pair()
    dsd.save(path, {"model": source})
    model = on_meta(lambda: Pair(tied=False))
    dsd.load(path, {"model": model}, mmap=mmap)
    one, other = getattr(model.emb, what), getattr(model.head, what)
    assert_same_tensor(one, getattr(source.emb, what))
    assert_same_tensor(other, getattr(source.emb, what))
    with torch.no_grad():
        one.zero_()
    assert_same_tensor(other, getattr(source.emb, what))


def test_no_buffer_of_a_tie_in_the_file_stays_on_meta(path: Path) -> None:
    dsd.save(path, {"model": Pair()})
    model = on_meta(lambda: Pair(tied=False))
    dsd.load(path, {"model": model})
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_an_optimizer_misses_the_second_of_two_parameters_that_the_file_ties(path: Path) -> None:
    source = Pair()
    dsd.save(path, {"model": source, "optimizer": stepped(source)})
    model = Pair(tied=False)
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert caught.value.report.missing == ["optimizer/state/head.weight"]


def test_an_optimizer_does_not_expect_the_second_of_two_entries_for_a_tied_parameter(
    path: Path,
) -> None:
    source = Pair(tied=False)
    source.head.load_state_dict(source.emb.state_dict())
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dsd.save(path, {"model": source, "optimizer": optimizer})
    model = Pair()
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": model, "optimizer": other})
    assert caught.value.report.unexpected == ["optimizer/state/head.weight"]


@each_place
def test_equal_tensors_load_into_a_tied_model(path: Path, place: str) -> None:
    source = Pair(tied=False)
    source.head.load_state_dict(source.emb.state_dict())
    dsd.save(path, {"model": source})
    model = PLACES[place](Pair)
    assert not dsd.load(path, {"model": model}).report
    model.check_tied()
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


@each_place
def test_different_tensors_do_not_load_into_a_tied_model(path: Path, place: str) -> None:
    dsd.save(path, {"model": Pair(tied=False)})
    model = PLACES[place](Pair)
    before = model.emb.weight.detach().clone()
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": model})
    found = {(item.name, item.what) for item in caught.value.report.mismatched}
    assert found == {("model/head.weight", "tie"), ("model/head.scale", "tie")}
    model.check_tied()
    if place == "cpu":
        assert_same_tensor(model.emb.weight, before)
    assert model.emb.weight.is_meta == (place == "meta")


@each_place
def test_different_tensors_leave_a_tied_one_as_it_was_where_that_is_allowed(
    path: Path, place: str
) -> None:
    source = Pair(tied=False)
    source.head.scale = source.emb.scale
    dsd.save(path, {"model": source})
    model = PLACES[place](Pair)
    before = model.emb.weight.detach().clone()
    report = dsd.load(path, {"model": model}, strict=False).report
    assert [item.name for item in report.mismatched] == ["model/head.weight"]
    model.check_tied()
    assert_same_tensor(model.head.scale, source.emb.scale)
    if place == "cpu":
        assert_same_tensor(model.emb.weight, before)


ALMOST = {
    "a zero with a sign": (torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])),
    "another dtype": (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
    "another shape": (torch.zeros(3), torch.zeros(1, 3)),
    "another payload of NaN": (
        torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32),
        torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
    ),
    "one bit in a million": (torch.zeros(1 << 20), torch.zeros(1 << 20).index_fill(
        0, torch.tensor([(1 << 20) - 1]), 1e-45
    )),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALMOST)
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_tensors_that_are_almost_equal_do_not_load_into_a_tied_model(
    path: Path, kind: str, codec: str
) -> None:
    a, b = ALMOST[kind]
    dsd.save(path, {"model": {"a": a, "b": b}}, codec=codec)
    model = nn.Module()
    model.register_buffer("a", torch.ones_like(a))
    model.register_buffer("b", model.a)
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": model})
    assert [item.name for item in caught.value.report.mismatched] == ["model/b"]
    assert_same_tensor(model.a, torch.ones_like(a))


def test_nans_of_equal_bits_load_into_a_tied_model(path: Path) -> None:
    nan = torch.tensor([float("nan"), 1.0])
    dsd.save(path, {"model": {"a": nan, "b": nan.clone()}})
    model = nn.Module()
    model.register_buffer("a", torch.ones(2))
    model.register_buffer("b", model.a)
    dsd.load(path, {"model": model})
    assert_same_tensor(model.b, nan)


def test_different_tensors_do_not_load_into_parameters_over_one_memory(path: Path) -> None:
    dsd.save(path, {"model": Pair(tied=False)})
    model = Pair(tied=False)
    model.head.weight = nn.Parameter(model.emb.weight.data)
    model.head.scale = model.emb.scale.detach()
    with pytest.raises(MismatchError):
        dsd.load(path, {"model": model})


def test_a_tie_of_two_parameters_over_one_memory_is_kept(path: Path) -> None:
    source = Pair()
    dsd.save(path, {"model": source})
    model = Pair(tied=False)
    model.head.weight = nn.Parameter(model.emb.weight.data)
    dsd.load(path, {"model": model})
    assert share_memory(model.head.weight, model.emb.weight)
    assert_same_tensor(model.head.weight, source.emb.weight)


class Triple(nn.Module):
    """Three linear layers with one weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Linear(2, 2, bias=False))
        if tied:
            self.b.weight = self.c.weight = self.a.weight


@each_place
@pytest.mark.parametrize("names", ["a", "b", "c", "ab", "bc", "ac", "abc"])
def test_some_of_three_names_are_enough(path: Path, place: str, names: str) -> None:
    weight = torch.randn(2, 2)
    dsd.save(path, {"model": {f"{name}.weight": weight for name in names}})
    model = PLACES[place](Triple)
    assert not dsd.load(path, {"model": model}).report
    assert model.a.weight is model.b.weight is model.c.weight
    assert_same_tensor(model.b.weight, weight)


@each_place
@pytest.mark.parametrize("odd", "abc")
def test_one_of_three_names_with_other_content_is_found(path: Path, place: str, odd: str) -> None:
    weight = torch.randn(2, 2)
    stored = {f"{name}.weight": weight + (name == odd) for name in "abc"}
    dsd.save(path, {"model": stored})
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": PLACES[place](Triple)})
    assert [item.what for item in caught.value.report.mismatched] == ["tie"]


def test_two_of_three_may_be_tied(path: Path) -> None:
    source = Triple(tied=False)
    source.c.weight = source.a.weight
    dsd.save(path, {"model": source})
    assert stored_paths(path) == [["model/a.weight", "model/c.weight"], ["model/b.weight"]]
    model = Triple(tied=False)
    model.b.weight = model.a.weight
    with pytest.raises(MismatchError):
        dsd.load(path, {"model": model})


def test_a_selected_name_of_a_tie_is_enough(path: Path) -> None:
    source = Pair()
    dsd.save(path, {"model": source})
    model = Pair()
    scale = model.emb.scale.clone()
    dsd.load(path, {"model": model}, select="model/head.weight")
    assert_same_tensor(model.emb.weight, source.emb.weight)
    assert_same_tensor(model.emb.scale, scale)


@pytest.mark.parametrize("kept", ["emb", "head"])
def test_a_selected_name_of_a_tie_alone_counts(path: Path, kept: str) -> None:
    source = Pair(tied=False)
    dsd.save(path, {"model": source})
    model = Pair()
    dsd.load(path, {"model": model}, select=f"model/{kept}.*")
    model.check_tied()
    assert_same_tensor(model.emb.weight, getattr(source, kept).weight)


@pytest.mark.parametrize("kept", ["emb", "head"])
def test_a_name_that_rename_leaves_out_does_not_count(path: Path, kept: str) -> None:
    source = Pair(tied=False)
    dsd.save(path, {"model": source})
    model = Pair()
    dsd.load(path, {"model": model}, rename=lambda name: name if f"/{kept}." in name else None)
    model.check_tied()
    assert_same_tensor(model.emb.weight, getattr(source, kept).weight)


@each_place
def test_a_tied_model_is_tied_after_a_cast(path: Path, place: str) -> None:
    source = Pair()
    dsd.save(path, {"model": source})
    model = PLACES[place](lambda: Pair().to(torch.bfloat16).tie())  # `to` unties buffers
    dsd.load(path, {"model": model}, dtype=torch.bfloat16)
    model.check_tied()
    assert_same_tensor(model.head.weight, source.head.weight.detach().to(torch.bfloat16))


@pytest.mark.parametrize(
    "options", [{"dtype": torch.bfloat16}, {"mmap": True}, {"select": "model/*.weight"}], ids=str
)
def test_tied_names_are_one_tensor_with_options_too(path: Path, options: dict[str, Any]) -> None:
    dsd.save(path, {"model": Pair()})
    stored = dsd.load(path, **options)["model"]
    assert stored["emb.weight"] is stored["head.weight"]


def test_a_tied_tensor_that_is_cast_at_one_name_only_has_two_dtypes(path: Path) -> None:
    model = Pair()
    dsd.save(path, {"model": model})
    stored = dsd.load(path, dtype={"model/*": torch.float64})["model"]
    assert {stored["emb.weight"].dtype, stored["head.weight"].dtype} == {torch.float64}


def test_tied_names_of_values_that_are_returned_are_one_tensor(path: Path) -> None:
    weight = torch.randn(2)
    dsd.save(path, {"a": weight, "b": weight, "list": [weight]})
    rest = dsd.load(path, {"a": None, "b": None, "list": None})
    assert rest["a"] is rest["b"] is rest["list"][0]


@each_place
def test_a_value_that_is_returned_has_the_content_of_the_parameter_it_is_tied_to(
    path: Path, place: str
) -> None:
    source = Pair()
    dsd.save(path, {"copy": [source.emb.weight, source.emb.scale], "model": source})
    model = PLACES[place](Pair)
    rest = dsd.load(path, {"copy": None, "model": model})
    assert_same(rest["copy"], [source.emb.weight, source.emb.scale])
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


# Ties across modules and sections


def sections(tied: bool = True) -> dict[str, Any]:
    """Two models that share an embedding, a buffer of it included."""
    a, b = Pair(), Pair()
    if tied:
        b.emb, b.head = a.emb, a.head
    return {"a": a, "b": b}


@pytest.mark.parametrize(
    "place",
    [
        "cpu",
        pytest.param(
            "meta",
        ),
    ],
)
def test_a_tie_across_sections_is_there_after_loading(path: Path, place: str) -> None:
    source = sections()
    dsd.save(path, source)
    with torch.device(place):
        state = sections()
    dsd.load(path, state)
    assert state["a"].emb.weight is state["b"].head.weight
    assert_same(dict(state["b"].state_dict()), dict(source["a"].state_dict()))
    assert_same(dict(state["a"].state_dict()), dict(source["a"].state_dict()))


@each_place
def test_different_sections_do_not_load_into_tied_ones(path: Path, place: str) -> None:
    dsd.save(path, sections(tied=False))
    with torch.device(place):
        state = sections()
    with pytest.raises(MismatchError):
        dsd.load(path, state)


def test_sections_that_are_not_tied_get_what_the_file_ties(path: Path) -> None:
    source = sections()
    dsd.save(path, source)
    state = sections(tied=False)
    dsd.load(path, state)
    assert_same(dict(state["a"].state_dict()), dict(source["a"].state_dict()))
    assert_same(dict(state["b"].state_dict()), dict(source["a"].state_dict()))
    assert not share_memory(state["a"].emb.weight, state["b"].emb.weight)


def test_sections_on_meta_that_are_not_tied_stay_so_where_the_file_ties_them(path: Path) -> None:
    dsd.save(path, sections())
    with torch.device("meta"):
        state = sections(tied=False)
    dsd.load(path, state)
    assert not share_memory(state["a"].emb.weight, state["b"].emb.weight)


def test_a_live_tensor_beside_its_model_gets_what_the_model_gets(path: Path) -> None:
    source = Pair()
    dsd.save(path, {"model": source, "table": source.emb.weight})
    model = Pair()
    weight = model.emb.weight
    dsd.load(path, {"model": model, "table": weight})
    assert model.emb.weight is weight
    assert_same_tensor(weight, source.emb.weight)


def test_a_tensor_beside_its_model_with_other_content_is_found(path: Path) -> None:
    dsd.save(path, {"model": Pair(), "table": torch.zeros(4, 3)})
    model = Pair()
    with pytest.raises(MismatchError):
        dsd.load(path, {"model": model, "table": model.emb.weight})


def test_live_views_that_overlap_get_what_overlapping_views_had(path: Path) -> None:
    base, live = torch.randn(8), torch.zeros(8)
    dsd.save(path, {"a": base[:6], "b": base[2:]})
    dsd.load(path, {"a": live[:6], "b": live[2:]})
    assert_same_tensor(live, base)


def test_a_live_tensor_with_elements_in_one_place_is_refused_before_anything_is_changed(
    path: Path,
) -> None:
    dsd.save(path, {"a": torch.ones(2), "b": torch.arange(4.0)})
    a, b = torch.zeros(2), torch.zeros(1).expand(4)
    with pytest.raises(DsdError):
        dsd.load(path, {"a": a, "b": b})
    assert_same_tensor(a, torch.zeros(2))


# Ties inside of an optimizer's state


def tied_optimizer(model: nn.Module, tied: bool) -> torch.optim.Optimizer:
    """One whose parameters count their steps in one tensor."""
    optimizer = stepped(model)
    if tied:
        first, *others = (optimizer.state[parameter] for parameter in model.parameters())
        for state in others:
            state["step"] = first["step"]
    return optimizer


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [optimizer.state[parameter]["step"] for parameter in model.parameters()]


def test_a_tensor_that_entries_of_an_optimizer_share_is_stored_once(path: Path) -> None:
    model = nn.Linear(2, 2)
    dsd.save(path, {"model": model, "optimizer": tied_optimizer(model, tied=True)})
    assert ["optimizer/state/bias/step", "optimizer/state/weight/step"] in stored_paths(path)


@pytest.mark.parametrize(
    "live",
    [
        "fresh",
        pytest.param(
            "tied",
        ),
    ],
)
def test_a_tensor_that_entries_of_an_optimizer_share_is_shared_after_loading(
    path: Path, live: str
) -> None:
    model = nn.Linear(2, 2)
    dsd.save(path, {"model": model, "optimizer": tied_optimizer(model, tied=True)})
    other = nn.Linear(2, 2)
    optimizer = (
        torch.optim.AdamW(other.parameters()) if live == "fresh" else tied_optimizer(other, True)
    )
    dsd.load(path, {"model": other, "optimizer": optimizer})
    steps = steps_of(other, optimizer)
    assert steps[0] is steps[1]


def test_entries_of_a_live_optimizer_that_share_a_tensor_get_each_what_was_saved(
    path: Path,
) -> None:
    model = nn.Linear(2, 2)
    source = tied_optimizer(model, tied=False)
    source.state[model.bias]["step"].fill_(5)
    dsd.save(path, {"model": model, "optimizer": source})
    other = nn.Linear(2, 2)
    optimizer = tied_optimizer(other, tied=True)
    dsd.load(path, {"model": other, "optimizer": optimizer})
    assert [float(step) for step in steps_of(other, optimizer)] == [1.0, 5.0]


def test_entries_of_a_live_optimizer_that_share_nothing_share_nothing_after_loading(
    path: Path,
) -> None:
    model = nn.Linear(2, 2)
    dsd.save(path, {"model": model, "optimizer": tied_optimizer(model, tied=True)})
    other = nn.Linear(2, 2)
    optimizer = tied_optimizer(other, tied=False)
    dsd.load(path, {"model": other, "optimizer": optimizer})
    steps = steps_of(other, optimizer)
    assert not share_memory(steps[0], steps[1])
    assert_same_tensor(steps[0], steps[1])


def test_moments_that_lie_in_one_flat_buffer_are_loaded_in_place(path: Path) -> None:
    model = nn.Linear(2, 2)
    source = stepped(model)
    dsd.save(path, {"model": model, "optimizer": source})
    other = nn.Linear(2, 2)
    optimizer, flat = stepped(other), torch.zeros(6)
    optimizer.state[other.weight]["exp_avg"] = flat[:4].view(2, 2)
    optimizer.state[other.bias]["exp_avg"] = flat[4:]
    dsd.load(path, {"model": other, "optimizer": optimizer})
    moments = [source.state[one]["exp_avg"].reshape(-1) for one in model.parameters()]
    assert torch.equal(bits(flat), bits(torch.cat(moments)))


@each_place
def test_a_parameter_that_its_own_entry_holds_is_restored(path: Path, place: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["master"] = model.weight.data
    dsd.save(path, {"model": model, "optimizer": optimizer})
    other = PLACES[place](lambda: nn.Linear(2, 2))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    if place == "cpu":
        optimizer.state[other.weight]["master"] = other.weight.data
    dsd.load(path, {"model": other, "optimizer": optimizer})
    assert_same_tensor(other.weight, model.weight)
    assert_same_tensor(optimizer.state[other.weight]["master"], model.weight)
    assert place == "meta" or share_memory(optimizer.state[other.weight]["master"], other.weight)


# Training goes on as one


def make_training() -> tuple[Pair, torch.optim.Optimizer]:
    model = Pair()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: Pair, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss = model.head(model.emb(torch.tensor([step % 4]))).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@each_place
def test_a_tied_model_trains_on_as_if_it_had_never_been_saved(path: Path, place: str) -> None:
    model, optimizer = make_training()
    train(model, optimizer, range(3))
    dsd.save(path, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 6))
    with torch.device(place):
        other, resumed = make_training()
    dsd.load(path, {"model": other, "optimizer": resumed})
    train(other, resumed, range(3, 6))
    assert_same(
        dsd.snapshot({"model": other, "optimizer": resumed}),
        dsd.snapshot({"model": model, "optimizer": optimizer}),
    )
