"""Composite tensors: the parts stand for the tensor bit for bit, and hostile parts are refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from dsdformat.errors import MismatchError, UnsupportedValueError  # noqa: E402
from dsdformat.format.dtypes import DTYPES  # noqa: E402
from dsdformat.torch.composites import (  # noqa: E402
    find_kind,
    inner_tensors,
    put_together,
    refusal,
    take_apart,
    type_name,
)

pytestmark = [
    # What torch says when a test makes a tensor; `test_no_warning_of_torch_shows` minds ours.
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, :UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

PLACE = ("model", "w")
# Of the integers of less than a byte, all alike to torch, those of 4 bits are enough.
ODD = {f"{sign}int{width}" for sign in ("", "u") for width in (1, 2, 3, 5, 6, 7)}
STORABLE = [name for name in DTYPES if hasattr(torch, name) and name not in ODD]


# Subclasses of the kinds that people write.


class Wrapper(torch.Tensor):
    """What the wrapping subclasses share: each operation goes to the components."""

    @staticmethod
    def __new__(
        cls, first: Any, *rest: Any, dtype: Any = None, size: Any = None, note: Any = None
    ) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            first.size() if size is None else size,
            strides=first.stride() if size is None else None,
            dtype=dtype or first.dtype,
            device=first.device,
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(func)
        names, context = args[0].__tensor_flatten__()
        inner = {name: getattr(args[0], name).detach() for name in names}
        return cls.__tensor_unflatten__(inner, context, args[0].size(), args[0].stride())


class Pair(Wrapper):
    """Flat: two tensors of one shape, and nothing else."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Pair(inner["a"], inner["b"])


class Scaled(Wrapper):
    """Quantized: codes of another shape, a scale, and the dtype that it shows."""

    def __init__(self, codes: Any, scale: Any, *, dtype: Any, size: Any, note: Any = None) -> None:
        self.codes, self.scale, self.note = codes, scale, note

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], {"dtype": self.dtype, "note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(
            inner["codes"],
            inner["scale"],
            dtype=context["dtype"],
            size=size,
            note=context["note"],
        )


class Broken(Pair):
    """Its `__tensor_flatten__` and `__tensor_unflatten__` do what `how` says."""

    how = "raise"

    def __tensor_flatten__(self) -> Any:
        if self.how == "raise":
            raise KeyError("gone")
        return {"names": ["a", "nothing"], "none": ["missing"], "empty": []}[self.how], None

    nothing = None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        if context == "raise":
            raise KeyError("gone")
        return {"none": None, "plain": torch.ones(2), "size": Broken(torch.ones(3), None)}[context]


class Opaque(torch.Tensor):
    """Has a dispatch of its own, and does not say what it is made of."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Marked(torch.nn.Parameter):
    """Only Python around a plain parameter; its operations are checked for who calls them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} went through the subclass")


TYPES = {type_name(kind): kind for kind in (Pair, Scaled, Broken)}


# Comparing and storing.


def packed(tensor: Any) -> Any:
    """Copy a tensor row-major, also one of a dtype that torch does not copy."""
    if tensor.dtype.is_complex:
        return tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
    if tensor.element_size() > 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    raw = tensor.view(torch.uint8).clone(memory_format=torch.contiguous_format)
    return raw.view(tensor.dtype)


def bits(tensor: Any) -> Any:
    """Dtype, shape and bytes of a plain tensor."""
    raw = packed(tensor.detach()).reshape(-1)
    return (
        raw.dtype,
        tuple(tensor.shape),
        bytes(raw.view(torch.uint8).tolist()) if len(raw) else b"",
    )


def everything(value: Any) -> Any:
    """All that a tensor, or a tree of parts, consists of, as values that can be compared."""
    if isinstance(value, torch.Tensor):
        kind = find_kind(value)
        return (kind, bits(value) if kind is None else everything(take_apart(value, PLACE)))
    if isinstance(value, dict):
        return {key: everything(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(everything, value))
    return (type(value), value)


def stored(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Do to a tree of parts what a file does: tensors are packed and new, ties stay."""
    memo = {} if memo is None else memo
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            kind = find_kind(value)
            memo[id(value)] = (
                packed(value)
                if kind is None
                else put_together(kind, stored(take_apart(value, PLACE), memo), TYPES, PLACE)
            )
        return memo[id(value)]
    if isinstance(value, dict):
        return {key: stored(item, memo) for key, item in value.items()}
    return [stored(item, memo) for item in value] if type(value) is list else value


def round_trip(tensor: Any) -> Any:
    """Take apart, store, and put together again; check that all is as before."""
    before = everything(tensor)
    again = stored(tensor)
    assert everything(again) == before
    assert again is not tensor
    assert not again.requires_grad
    assert type(again) is type(tensor) or isinstance(tensor, torch.nn.Parameter)
    assert (again.dtype, again.device) == (tensor.dtype, tensor.device)
    if not again.is_nested:
        assert again.shape == tensor.shape
    return again


def make(dtype: str, *shape: int) -> Any:
    """A tensor of random bytes."""
    kind = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.rand(shape) < 0.5
    width = DTYPES[dtype].itemsize
    raw = torch.randint(0, 256, (*shape, width), dtype=torch.uint8)
    return raw.view(kind).reshape(shape)


def coo(values: Any, indices: Any = ((0, 2, 0, 2), (1, 0, 1, 3)), size: Any = (3, 4)) -> Any:
    return torch.sparse_coo_tensor(
        torch.tensor(indices, dtype=torch.int64), values, size, check_invariants=True
    )


def compressed(kind: str, values: Any, size: Any, bounds: Any = (0, 2, 3), at: Any = (0, 2, 1)):
    return torch.sparse_compressed_tensor(
        torch.tensor(bounds),
        torch.tensor(at, dtype=torch.int64),
        values,
        size,
        layout=getattr(torch, f"sparse_{kind}"),
        check_invariants=True,
    )


def jagged(values: Any, offsets: Any = (0, 2, 2, 5), **options: Any) -> Any:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), **options)


def nested(*tensors: Any) -> Any:
    """A strided nested tensor of any dtype: torch makes few of them from a list."""
    result = torch.nested.nested_tensor([torch.zeros(tensor.shape) for tensor in tensors])
    result = torch.empty_like(result, dtype=tensors[0].dtype)
    for pair in zip(result.unbind(), tensors, strict=True):
        width = torch.uint8 if result.element_size() == 1 else result.dtype
        target, source = (one.view(width) for one in pair)
        target.copy_(source)
    return result


def scaled(codes: Any) -> Any:
    return Scaled(codes, torch.rand(3, 1), dtype=torch.bfloat16, size=torch.Size((3, 8)))


BUILDERS: dict[str, Callable[[str], Any]] = {
    "coo": lambda dtype: coo(make(dtype, 4)),
    "coo_hybrid": lambda dtype: coo(make(dtype, 4, 2, 3), size=(3, 4, 2, 3)),
    "coo_without_sparse_dims": lambda dtype: torch.sparse_coo_tensor(
        torch.zeros(0, 2, dtype=torch.int64), make(dtype, 2, 3), (3,)
    ),
    "coo_empty": lambda dtype: coo(make(dtype, 0), ((), ()), (3, 4)).coalesce(),
    "csr": lambda dtype: compressed("csr", make(dtype, 3), (2, 3)),
    "csr_hybrid": lambda dtype: compressed("csr", make(dtype, 3, 2), (2, 3, 2)),
    "csr_batched": lambda dtype: compressed(
        "csr", make(dtype, 2, 3), (2, 2, 3), ((0, 2, 3), (0, 1, 3)), ((0, 2, 1), (2, 0, 1))
    ),
    "csr_empty": lambda dtype: compressed("csr", make(dtype, 0), (2, 0), (0, 0, 0), ()),
    "csc": lambda dtype: compressed("csc", make(dtype, 3), (3, 2)),
    "bsr": lambda dtype: compressed("bsr", make(dtype, 3, 2, 5), (4, 15)),
    "bsr_empty": lambda dtype: compressed("bsr", make(dtype, 0, 2, 5), (4, 15), (0, 0, 0), ()),
    "bsc": lambda dtype: compressed("bsc", make(dtype, 3, 2, 5), (6, 10)),
    "jagged": lambda dtype: jagged(make(dtype, 5, 3)),
    "jagged_dim_2": lambda dtype: jagged(make(dtype, 3, 5, 2), jagged_dim=2),
    "jagged_with_holes": lambda dtype: jagged(
        make(dtype, 5), lengths=torch.tensor([1, 0, 2]), min_seqlen=0, max_seqlen=2
    ),
    "jagged_without_rows": lambda dtype: jagged(make(dtype, 0, 3), (0,)),
    "nested": lambda dtype: nested(make(dtype, 2, 3), make(dtype, 0, 1), make(dtype, 3, 5)),
    "nested_scalars": lambda dtype: nested(make(dtype), make(dtype)),
    "pair": lambda dtype: Pair(make(dtype, 2, 3), make(dtype, 2, 3)),
    "pair_of_scalars": lambda dtype: Pair(make(dtype), make(dtype)),
    "scaled": lambda dtype: scaled(make(dtype, 3, 4)),
    "pair_of_scaled": lambda dtype: Pair(scaled(make(dtype, 3, 4)), scaled(make(dtype, 3, 4))),
    "pair_of_pairs": lambda dtype: Pair(*(Pair(make(dtype, 2), make(dtype, 2)) for _ in "ab")),
}
KINDS = {
    "coo": "sparse_coo",
    "csr": "sparse_csr",
    "csc": "sparse_csc",
    "bsr": "sparse_bsr",
    "bsc": "sparse_bsc",
    "jagged": "jagged",
    "nested": "nested",
    "pair": "subclass",
    "scaled": "subclass",
}


@pytest.mark.parametrize("dtype", STORABLE)
@pytest.mark.parametrize("build", BUILDERS)
def test_a_composite_is_the_same_bit_for_bit_after_a_round_trip(build: str, dtype: str) -> None:
    tensor = BUILDERS[build](dtype)
    assert find_kind(tensor) == f"torch.{KINDS[build.partition('_')[0]]}"
    assert refusal(tensor) is None
    round_trip(tensor)


@pytest.mark.parametrize("build", BUILDERS)
def test_the_parts_of_a_composite_share_its_memory(build: str) -> None:
    tensor = BUILDERS[build]("float32")
    one, other = take_apart(tensor, PLACE), take_apart(tensor, PLACE)
    for key, part in one.items():
        if isinstance(part, torch.Tensor) and find_kind(part) is None:
            assert part.data_ptr() == other[key].data_ptr(), key


@pytest.mark.parametrize("build", [name for name in BUILDERS if not name.startswith("nested")])
def test_what_is_put_together_shares_the_memory_of_its_parts(build: str) -> None:
    tensor = BUILDERS[build]("float32")
    parts = take_apart(tensor, PLACE)
    again = take_apart(put_together(find_kind(tensor) or "", parts, TYPES, PLACE), PLACE)
    for key, part in parts.items():
        if isinstance(part, torch.Tensor) and find_kind(part) is None:
            assert part.data_ptr() == again[key].data_ptr(), key


@pytest.mark.parametrize("build", BUILDERS)
def test_a_default_device_changes_nothing(build: str) -> None:
    tensor = BUILDERS[build]("float32")
    parts = stored(take_apart(tensor, PLACE))
    with torch.device("meta"):
        again = put_together(find_kind(tensor) or "", parts, TYPES, PLACE)
    assert everything(again) == everything(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Buffer(torch.ones(3)),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.ones(3, device="meta"),
        torch.ones(6).view(2, 3).t(),
        Marked(torch.ones(3)),
        torch.nn.LazyLinear(3).weight,
        torch.nn.LazyBatchNorm1d().running_mean,
        torch.ones(2, 0),
    ],
    ids=lambda tensor: type(tensor).__name__,
)
def test_one_strided_block_is_no_composite(tensor: Any) -> None:
    assert find_kind(tensor) is None
    assert refusal(tensor) is None


def test_a_dtensor_is_no_composite_and_is_judged_elsewhere() -> None:
    dtensor = pytest.importorskip("torch.distributed.tensor").DTensor
    fake = torch.ones(2).as_subclass(type("Sub", (dtensor,), {}))
    assert find_kind(fake) is None
    assert refusal(fake) is None


# Sparse tensors.


def test_entries_of_an_uncoalesced_tensor_keep_their_order() -> None:
    tensor = coo(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    again = round_trip(tensor)
    assert not again.is_coalesced()
    assert again._values().tolist() == [1, 2, 3, 4]
    assert round_trip(tensor.coalesce()).is_coalesced()


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("count", [0, 1])
def test_the_coalesced_flag_is_kept_where_it_makes_no_difference(
    count: int, coalesced: bool
) -> None:
    indices, values = torch.zeros(1, count, dtype=torch.int64), torch.ones(count)
    tensor = torch.sparse_coo_tensor(indices, values, (2,), is_coalesced=coalesced)
    assert tensor.is_coalesced() is coalesced
    assert round_trip(tensor).is_coalesced() is coalesced


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_coo_tensor_comes_back(data: st.DataObject) -> None:
    sparse = data.draw(st.lists(st.integers(1, 4), max_size=3))
    dense = data.draw(st.lists(st.integers(0, 3), max_size=2))
    count = data.draw(st.integers(0, 6))
    rows = [
        data.draw(st.lists(st.integers(0, n - 1), min_size=count, max_size=count)) for n in sparse
    ]
    indices = torch.tensor(rows, dtype=torch.int64).reshape(len(sparse), count)
    tensor = torch.sparse_coo_tensor(indices, torch.randn(count, *dense), (*sparse, *dense))
    round_trip(tensor.coalesce() if data.draw(st.booleans()) and sparse else tensor)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_keep_their_dtype(dtype: Any) -> None:
    bounds, at = torch.tensor([0, 1, 2], dtype=dtype), torch.tensor([1, 0], dtype=dtype)
    again = round_trip(torch.sparse_csr_tensor(bounds, at, torch.ones(2), (2, 2)))
    assert (again.crow_indices().dtype, again.col_indices().dtype) == (dtype, dtype)


@pytest.mark.parametrize("build", ["coo", "csr", "bsc"])
def test_a_sparse_parameter_loses_only_its_gradient(build: str) -> None:
    tensor = BUILDERS[build]("float32").requires_grad_()
    assert everything(stored(torch.nn.Parameter(tensor))) == everything(tensor.detach())


def test_a_python_subclass_of_a_sparse_tensor_is_taken_as_one() -> None:
    tensor = coo(torch.ones(4))
    marked = Marked(tensor)
    assert (find_kind(marked), refusal(marked)) == ("torch.sparse_coo", None)
    parts = take_apart(marked, PLACE)
    assert {type(part) for part in parts.values()} == {torch.Tensor, torch.Size, bool}
    assert everything(parts) == everything(take_apart(tensor, PLACE))


@pytest.mark.parametrize("build", ["coo", "csr", "bsr"])
def test_sparse_tensors_on_meta_are_taken_apart_unseen(build: str) -> None:
    parts = take_apart(BUILDERS[build]("float32"), PLACE)
    meta = {
        key: part.to("meta") if isinstance(part, torch.Tensor) else part
        for key, part in parts.items()
    }
    tensor = put_together(f"torch.{KINDS[build]}", meta, {}, PLACE)
    assert tensor.is_meta
    assert take_apart(tensor, PLACE)["size"] == parts["size"]


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_tensor_that_could_not_be_loaded_is_not_saved(layout: str) -> None:
    rows, values = torch.tensor([1, 0]), torch.ones(2)
    if layout == "coo":
        tensor = torch.sparse_coo_tensor(
            rows[None], values, (2,), is_coalesced=True, check_invariants=False
        )
    else:
        bounds = torch.tensor([0, 2])
        tensor = torch.sparse_csr_tensor(bounds, rows, values, (1, 2), check_invariants=False)
    with pytest.raises(UnsupportedValueError, match=r"^\$\.model\.w: a tensor of type torch.sp"):
        take_apart(tensor, PLACE)


# Nested tensors.


def test_the_rows_of_a_jagged_tensor_come_back() -> None:
    values = torch.arange(10.0).reshape(5, 2)
    again = round_trip(jagged(values, lengths=torch.tensor([2, 0, 1])))
    assert [row.tolist() for row in again.unbind()] == [[[0, 1], [2, 3]], [], [[4, 5]]]


def test_known_extremes_of_the_lengths_are_kept_and_none_is_computed() -> None:
    unknown = jagged(torch.ones(5))
    assert not {"lengths", "min_seqlen", "max_seqlen"} & take_apart(unknown, PLACE).keys()
    known = round_trip(jagged(torch.ones(5), min_seqlen=0, max_seqlen=9))
    parts = take_apart(known, PLACE)
    assert (parts["min_seqlen"], parts["max_seqlen"]) == (0, 9)
    unknown.unbind()
    unknown._get_max_seqlen()
    assert take_apart(unknown, PLACE)["max_seqlen"] == 3


def test_jagged_tensors_with_the_same_offsets_still_add_up() -> None:
    offsets = torch.tensor([0, 2, 5])
    pair = [torch.nested.nested_tensor_from_jagged(torch.ones(5), offsets) for _ in range(2)]
    parts = stored([take_apart(tensor, PLACE) for tensor in pair])
    one, other = (put_together("torch.jagged", part, {}, PLACE) for part in parts)
    assert (one + other).values().tolist() == [2] * 5


def test_jagged_tensors_as_torch_makes_them_come_back() -> None:
    rows = [torch.rand(n, 3) for n in (2, 0, 4)]
    round_trip(torch.nested.nested_tensor(rows, layout=torch.jagged))
    round_trip(torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True))
    round_trip(torch.nn.Parameter(torch.nested.nested_tensor(rows, layout=torch.jagged)))
    round_trip(torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2))
    base, starts, lengths = torch.rand(3, 10, 2), torch.tensor([9, 0, 4]), torch.tensor([1, 0, 6])
    round_trip(torch.nested.narrow(base, 1, starts, lengths, layout=torch.jagged))


def test_a_jagged_tensor_may_be_changed_in_place_after_loading() -> None:
    again = round_trip(jagged(torch.ones(5)))
    again.mul_(2)
    parameter = torch.nn.Parameter(round_trip(jagged(torch.ones(5))))
    with torch.no_grad():
        parameter.mul_(2)
    assert again.values().tolist() == parameter.values().tolist() == [2] * 5


def test_a_jagged_tensor_that_could_not_be_loaded_is_not_saved() -> None:
    with pytest.raises(UnsupportedValueError, match="max_seqlen: expected 3 or more, got 1"):
        take_apart(jagged(torch.ones(5), max_seqlen=1), PLACE)


def test_nested_tensors_as_torch_makes_them_come_back() -> None:
    rows = [torch.rand(n, 3) for n in (2, 0, 4)]
    round_trip(torch.nested.nested_tensor(rows))
    round_trip(torch.nested.nested_tensor(rows, requires_grad=True))
    again = round_trip(torch.nested.nested_tensor(rows).transpose(1, 2))
    assert [list(row.shape) for row in again.unbind()] == [[3, 2], [3, 0], [3, 4]]


def test_a_nested_tensor_of_nothing_is_not_saved() -> None:
    with pytest.raises(UnsupportedValueError, match=r"^\$\.model\.w: .* holds no tensors"):
        take_apart(torch.nested.nested_tensor([]), PLACE)


# Subclasses.


def test_the_parts_of_a_subclass_are_its_type_tensors_context_and_size() -> None:
    tensor = scaled(torch.ones(3, 4, dtype=torch.uint8))
    parts = take_apart(tensor, PLACE)
    assert list(parts) == ["type", "tensors", "context", "size", "stride"]
    assert parts["type"] == f"{__name__}.Scaled"
    assert parts["context"] == {"dtype": torch.bfloat16, "note": None}
    assert (type(parts["size"]), parts["size"]) == (torch.Size, (3, 8))
    assert parts["stride"] == (8, 1)
    assert inner_tensors(tensor) == {"codes": tensor.codes, "scale": tensor.scale}
    assert inner_tensors(tensor)["codes"] is tensor.codes


def test_components_that_are_one_tensor_stay_one() -> None:
    for shared in (torch.ones(2), torch.ones(2, requires_grad=True), coo(torch.ones(4))):
        if shared.layout is torch.strided:
            parts = take_apart(Pair(shared, shared), PLACE)
            assert parts["tensors"]["a"] is parts["tensors"]["b"]
            again = round_trip(Pair(shared, shared))
            assert again.a is again.b
    shared = torch.ones(2)
    again = round_trip(Pair(Pair(shared, torch.ones(2)), Pair(torch.ones(2), shared)))
    assert again.a.a is again.b.b
    assert again.a.b is not again.b.a


def test_components_need_no_gradient_and_parameters_become_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parts = take_apart(Pair(parameter, Marked(torch.ones(2))), PLACE)
    assert not any(part.requires_grad for part in parts["tensors"].values())
    assert parts["tensors"]["a"].data_ptr() == parameter.data_ptr()


def test_a_parameter_that_wraps_is_a_subclass() -> None:
    parameter = torch.nn.Parameter(Pair(torch.ones(2), torch.zeros(2)))
    assert find_kind(parameter) == "torch.subclass"
    again = stored(parameter)
    assert (type(again), again.b.tolist()) == (Pair, [0, 0])


@pytest.mark.parametrize(
    ("view", "stride"),
    [
        (lambda t: t, (6, 1)),
        (lambda t: t.t(), (1, 6)),
        (lambda t: t[:, :4], (4, 1)),
        (lambda t: t[:1].expand(4, 6), (6, 1)),
        (lambda t: t[:, :0], (1, 1)),
    ],
    ids=["packed", "transposed", "cut", "expanded", "empty"],
)
def test_the_stride_is_that_of_the_packed_tensor(view: Any, stride: Any) -> None:
    tensor = Pair(view(torch.rand(4, 6)), view(torch.rand(4, 6)))
    assert take_apart(tensor, PLACE)["stride"] == stride
    assert stored(tensor).shape == tensor.shape


CONTEXT = [
    *(None, True, -1, 2**80, 0.5, "text", (), [1, [2]], {"a": {1: ("b",)}}),
    *(torch.float8_e5m2, torch.device("cuda", 1), torch.Size([2]), torch.strided),
    torch.channels_last,
]


@pytest.mark.parametrize("note", [*CONTEXT, tuple(CONTEXT)], ids=repr)
def test_a_context_of_plain_values_is_kept(note: Any) -> None:
    tensor = Scaled(torch.ones(2), torch.ones(1), dtype=torch.half, size=(2,), note=note)
    again = round_trip(tensor)
    assert (again.dtype, again.note) == (torch.half, note)


class Kernel:
    def __repr__(self) -> str:
        return "a secret"


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (lambda: 0, "its context.note is of type builtins.function"),
        (Kernel, "its context.note is of type builtins.type"),
        ([1, {"k": Kernel()}], f"its context.note[1].k is of type {__name__}.Kernel"),
        (OrderedDict(), "its context.note is of type collections.OrderedDict"),
        (torch.ones(1), "its context.note is of type torch.Tensor"),
        ({Kernel(): 1}, "its context.note has a value of type Kernel as a key"),
        ({torch.half: 1}, "its context.note has a value of type dtype as a key"),
        (b"", "its context.note is of type builtins.bytes"),
    ],
    ids=["function", "class", "object", "odict", "tensor", "object key", "dtype key", "bytes"],
)
def test_a_context_of_other_values_is_refused_with_their_place(note: Any, words: str) -> None:
    tensor = Scaled(torch.ones(2), torch.ones(1), dtype=torch.half, size=(2,), note=note)
    with pytest.raises(UnsupportedValueError) as caught:
        take_apart(tensor, PLACE)
    error = caught.value
    assert (
        error.message == f"$.model.w: a tensor of type {__name__}.Scaled cannot be stored: {words}"
    )
    assert (error.code, error.path_in_tree) == ("unsupported_value", "$.model.w")
    assert "__tensor_flatten__" in (error.hint or "")


def test_a_context_that_holds_itself_is_refused() -> None:
    note: list[Any] = []
    note.append(note)
    tensor = Scaled(torch.ones(2), torch.ones(1), dtype=torch.half, size=(2,), note=note)
    with pytest.raises(UnsupportedValueError, match="nested more than 128 deep"):
        take_apart(tensor, PLACE)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "__tensor_flatten__ fails: KeyError: 'gone'"),
        ("names", "its component 'nothing' is of type builtins.NoneType"),
        ("none", "__tensor_flatten__ fails: AttributeError"),
        ("empty", "it has no component tensors"),
    ],
)
def test_a_subclass_that_breaks_the_protocol_is_refused(how: str, words: str) -> None:
    tensor = Broken(torch.ones(2), None)
    tensor.how = how
    with pytest.raises(UnsupportedValueError, match=rf"^\$\.model\.w: .*{words}"):
        take_apart(tensor, PLACE)
    with pytest.raises(UnsupportedValueError, match=words):
        inner_tensors(tensor)


def test_a_type_that_is_not_allowed_is_refused_by_its_name() -> None:
    parts = take_apart(Pair(torch.ones(2), torch.ones(2)), PLACE)
    with pytest.raises(UnsupportedValueError) as caught:
        put_together("torch.subclass", parts, {}, PLACE)
    assert f"$.model.w: a tensor of type '{__name__}.Pair'" in caught.value.message
    assert "types=[...]" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ("raise", "Broken refuses them: KeyError: 'gone'"),
        ("none", "Broken made a builtins.NoneType of them"),
        ("plain", "Broken made a torch.Tensor of them"),
        ("size", r"size: expected \[2\], got \[3\]"),
    ],
)
def test_a_class_that_makes_something_else_is_an_error(context: str, words: str) -> None:
    parts = take_apart(Pair(torch.ones(2), torch.ones(2)), PLACE)
    parts |= {"type": f"{__name__}.Broken", "context": context}
    with pytest.raises(MismatchError, match=words) as caught:
        put_together("torch.subclass", parts, TYPES, PLACE)
    assert caught.value.code == "bad_components"


# What cannot be stored.


def freed(tensor: Any) -> Any:
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "int_repr()"),
        (lambda: torch.ones(3).to_mkldnn(), "layout torch._mkldnn"),
        (lambda: torch.masked.masked_tensor(torch.ones(1), torch.ones(1) > 0), ".MaskedTensor "),
        (lambda: torch.ones(3).as_subclass(Opaque), f"{__name__}.Opaque "),
        (lambda: torch._to_functional_tensor(torch.ones(3)), "torch.func"),
        (lambda: freed(torch.ones(3)), "freed"),
        (fake, "torch._subclasses.fake_tensor.FakeTensor "),
    ],
    ids=["quantized", "mkldnn", "masked", "opaque", "functional", "freed", "fake"],
)
def test_a_tensor_that_cannot_be_stored_is_refused_with_a_reason(make: Any, words: str) -> None:
    tensor = make()
    assert words in (refusal(tensor) or "")
    find_kind(tensor)


def test_a_tensor_inside_a_transform_is_refused() -> None:
    reasons = []

    def look(tensor: Any) -> Any:
        reasons.append(refusal(tensor))
        return tensor.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert all("torch.func" in (reason or "") for reason in reasons)


# Hostile parts.

INT = torch.int64
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "coo_index_negative": ("coo", {"indices": torch.tensor([[0, -1, 0, 0]] * 2)}, "negative"),
    "coo_index_too_large": ("coo", {"indices": torch.tensor([[0, 9, 0, 0]] * 2)}, "index 9"),
    "coo_indices_of_floats": ("coo", {"indices": torch.zeros(2, 4)}, "indices: expected torch.i"),
    "coo_more_indices": ("coo", {"indices": torch.zeros(2, 5, dtype=INT)}, "same nnz"),
    "coo_indices_of_one_dim": ("coo", {"indices": torch.zeros(4, dtype=INT)}, "indices"),
    "coo_falsely_coalesced": ("coo", {"coalesced": True}, "is_coalesced"),
    "coo_flag_is_an_int": ("coo", {"coalesced": 1}, "coalesced: expected bool"),
    "coo_size_negative": ("coo", {"size": torch.Size([3, -4])}, "no negative length"),
    "coo_size_overflows": ("coo", {"size": torch.Size([2**62, 2**62])}, "overflow"),
    "coo_size_is_a_tuple": ("coo", {"size": (3, 4)}, "size: expected Size"),
    "coo_size_of_more_dims": ("coo", {"size": torch.Size([3, 4, 5])}, "size|dimensions"),
    "coo_values_sparse": (
        "coo",
        {"values": lambda: coo(torch.ones(4))},
        "values: expected a plain tensor",
    ),
    "coo_values_jagged": ("coo", {"values": lambda: jagged(torch.ones(5))}, "kind torch.jagged"),
    "coo_values_missing": ("coo", {"values": ...}, "expected indices, coalesced, size, values"),
    "coo_one_part_more": ("coo", {"more": 1}, "got "),
    "csr_bounds_not_ascending": ("csr", {"crow_indices": torch.tensor([0, 4, 3])}, "crow_indices"),
    "csr_bounds_start_late": ("csr", {"crow_indices": torch.tensor([1, 2, 3])}, "crow_indices"),
    "csr_bounds_end_late": ("csr", {"crow_indices": torch.tensor([0, 2, 4])}, "crow_indices"),
    "csr_one_bound": ("csr", {"crow_indices": torch.tensor([0])}, "crow_indices"),
    "csr_no_bounds": ("csr", {"crow_indices": torch.tensor([], dtype=INT)}, "crow_indices"),
    "csr_bound_alone": ("csr", {"crow_indices": torch.tensor(0)}, "crow_indices"),
    "csr_index_too_large": ("csr", {"col_indices": torch.tensor([0, 3, 1])}, "col_indices"),
    "csr_index_twice": ("csr", {"col_indices": torch.tensor([2, 2, 1])}, "col_indices"),
    "csr_index_of_int32": (
        "csr",
        {"col_indices": torch.tensor([0, 2, 1], dtype=torch.int32)},
        "dtype",
    ),
    "csr_size_negative": ("csr", {"size": torch.Size([2, -3])}, "no negative length"),
    "csr_size_of_one_dim": ("csr", {"size": torch.Size([2])}, "dimensionality"),
    "csr_dense_dims_differ": ("csr_hybrid", {"size": torch.Size([2, 3, 5])}, "has none of shape"),
    "bsr_values_of_one_dim": ("bsr", {"values": torch.ones(3)}, "dimensionality"),
    "bsr_size_not_divisible": ("bsr", {"size": torch.Size([5, 15])}, "divisible"),
    "bsr_block_of_nothing": (
        "bsr_empty",
        {"values": torch.ones(0, 0, 5), "size": torch.Size([0, 15])},
        r"values: a tensor of size \[0, 15\] has none of shape \[0, 0, 5\]",
    ),
    "jagged_offset_negative": ("jagged", {"offsets": torch.tensor([0, -1, 5])}, "offsets: exp"),
    "jagged_offset_too_large": ("jagged", {"offsets": torch.tensor([0, 2, 6])}, "expected 0 to 5"),
    "jagged_offsets_descend": ("jagged", {"offsets": torch.tensor([0, 3, 1])}, "negative length"),
    "jagged_no_offsets": ("jagged", {"offsets": torch.tensor([], dtype=INT)}, "at least one"),
    "jagged_offsets_of_floats": ("jagged", {"offsets": torch.tensor([0.0])}, "offsets: expected"),
    "jagged_offsets_of_two_dims": ("jagged", {"offsets": torch.zeros(1, 1, dtype=INT)}, "in a row"),
    "jagged_dim_0": ("jagged", {"jagged_dim": 0}, "jagged_dim: expected 1 to 2, got 0"),
    "jagged_dim_3": ("jagged", {"jagged_dim": 3}, "jagged_dim"),
    "jagged_dim_is_a_bool": ("jagged", {"jagged_dim": True}, "jagged_dim: expected int"),
    "jagged_lengths_short": ("jagged", {"lengths": torch.tensor([1])}, "lengths: expected 3"),
    "jagged_length_negative": ("jagged", {"lengths": torch.tensor([1, -1, 1])}, "negative length"),
    "jagged_length_too_large": ("jagged", {"lengths": torch.tensor([1, 4, 1])}, "ends after"),
    "jagged_length_overflows": (
        "jagged",
        {"lengths": torch.tensor([1, 2**63 - 1, 1])},
        "ends after",
    ),
    "jagged_min_too_large": ("jagged", {"min_seqlen": 1}, "min_seqlen: expected 0 to 0, got 1"),
    "jagged_min_negative": ("jagged", {"min_seqlen": -1}, "min_seqlen"),
    "jagged_max_too_small": ("jagged", {"max_seqlen": 2}, "max_seqlen: expected 3"),
    "jagged_max_too_large": ("jagged", {"max_seqlen": 2**63}, "max_seqlen"),
    "jagged_values_sparse": (
        "jagged",
        {"values": lambda: coo(torch.ones(4))},
        "values: expected a strided",
    ),
    "jagged_values_jagged": (
        "jagged",
        {"values": lambda: jagged(torch.ones(5))},
        "values: expected",
    ),
    "jagged_other_device": (
        "jagged",
        {"offsets": torch.zeros(1, dtype=INT, device="meta")},
        "device",
    ),
    "nested_of_nothing": ("nested", {"tensors": []}, "at least one"),
    "nested_tuple": ("nested", {"tensors": (torch.ones(1),)}, "tensors: expected list"),
    "nested_of_dtypes": ("nested", {"tensors": [torch.ones(1), torch.ones(1).half()]}, "dtype"),
    "nested_of_dims": ("nested", {"tensors": [torch.ones(1), torch.ones(1, 1)]}, "ndim"),
    "nested_of_ints": ("nested", {"tensors": [1, 2]}, r"tensors\[0\]: expected a plain tensor"),
    "nested_of_sparse": ("nested", {"tensors": lambda: [coo(torch.ones(4))]}, "torch.sparse_coo"),
    "pair_without_tensors": ("pair", {"tensors": {}}, "no component tensors"),
    "pair_of_ints": ("pair", {"tensors": {"a": 1, "b": 2}}, "component 'a' is of type"),
    "pair_of_one": ("pair", {"tensors": {"a": torch.ones(2, 3)}}, "refuses them: KeyError"),
    "pair_of_another_size": ("pair", {"size": torch.Size([3, 2])}, "size: expected"),
    "pair_stride_short": ("pair", {"stride": (1,)}, "stride: expected 2 numbers"),
    "pair_stride_negative": ("pair", {"stride": (-3, 1)}, "stride"),
    "pair_stride_of_text": ("pair", {"stride": ("a", "b")}, "stride"),
    "pair_context": ("pair", {"context": [{1, 2}]}, r"its context\[0\] is of type builtins.set"),
    "pair_type_is_a_list": ("pair", {"type": []}, "type: expected str"),
}


def hostile(build: str, changes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    tensor = BUILDERS[build]("float32")
    parts = take_apart(tensor, PLACE) | changes
    kept = {
        key: part() if callable(part) and not isinstance(part, torch.Tensor) else part
        for key, part in parts.items()
        if part is not ...
    }
    return find_kind(tensor) or "", kept


@pytest.mark.parametrize("case", CASES)
def test_parts_that_do_not_fit_are_refused(case: str) -> None:
    build, changes, words = CASES[case]
    kind, parts = hostile(build, changes)
    with pytest.raises(MismatchError, match=words) as caught:
        put_together(kind, parts, TYPES, PLACE)
    error = caught.value
    assert error.code == "bad_components"
    assert error.message.startswith(f"$.model.w: the parts of a tensor of kind '{kind}' do not fit")
    assert "\n" not in error.message


JUNK: list[Any] = [
    *(None, True, 0, -1, 2**70, 0.5, float("nan"), "", "x" * 10_000, b"", (), [], {}, {1: 2}),
    *(torch.Size([]), torch.Size([0]), torch.Size([2**62, 2**62]), torch.Size([1] * 70)),
    *(torch.float32, object(), (1, 2), (2**70, 1), [torch.ones(2)], {"a": torch.ones(2)}),
    *(torch.tensor(1), torch.tensor([]), torch.ones(2, 3, 4), torch.ones(4, dtype=torch.bool)),
    *(torch.zeros(2, 4, dtype=INT), torch.full((2, 4), 2**62), torch.full((3,), -(2**63))),
    *(torch.ones(4, device="meta"), torch.zeros(3, dtype=INT, device="meta")),
    *(torch.ones(4, requires_grad=True), torch.ones(4, dtype=torch.complex64).conj()),
    *(torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=INT).expand(2, 4), torch.ones(0, 0)),
]


@pytest.mark.parametrize("build", BUILDERS)
def test_junk_in_the_place_of_a_part_never_crashes(build: str) -> None:
    composites = [coo(torch.ones(4)), jagged(torch.ones(5)), nested(torch.ones(2))]
    composites += [BUILDERS[name]("int64") for name in ("csr", "bsr", "pair")]
    kind, parts = hostile(build, {})
    for key in [*parts, "more"]:
        for junk in [*JUNK, *composites, ...]:
            changed = {k: v for k, v in {**parts, key: junk}.items() if v is not ...}
            check_harmless(kind, changed)


@pytest.mark.parametrize("build", BUILDERS)
def test_junk_in_the_place_of_all_parts_never_crashes(build: str) -> None:
    kind, _ = hostile(build, {})
    for junk in JUNK:
        check_harmless(kind, junk)


@pytest.mark.parametrize("build", [n for n in BUILDERS if not n.startswith(("nested", "pair"))])
def test_random_indices_never_crash(build: str) -> None:
    kind, parts = hostile(build, {})
    numbers = torch.tensor([-(2**63), -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 2**31, 2**63 - 1])
    names = [key for key, part in parts.items() if getattr(part, "dtype", None) is INT]
    for _ in range(100 if names else 0):
        changed = dict(parts)
        for key in names:
            some = numbers[torch.randint(0, len(numbers), parts[key].shape)]
            changed[key] = torch.where(torch.rand(some.shape) < 0.3, some, parts[key])
        check_harmless(kind, changed)


def check_harmless(kind: str, parts: Any) -> None:
    """Either the parts are refused, or they make a tensor that can be used."""
    try:
        tensor = put_together(kind, parts, TYPES, PLACE)
    except (MismatchError, UnsupportedValueError) as error:
        caught = error
    else:
        assert find_kind(tensor) == kind
        use(tensor)
        return
    code = "bad_components"
    if isinstance(caught, UnsupportedValueError):
        assert kind == "torch.subclass"
        code = "unsupported_value"
    assert caught.code == code
    assert len(caught.message) < 1000


def use(tensor: Any) -> None:
    kind = find_kind(tensor)
    if tensor.is_meta or kind == "torch.subclass":
        return
    if kind == "torch.nested":
        list(tensor.unbind())
    elif kind == "torch.jagged":
        starts, lengths = tensor.offsets()[:-1].tolist(), tensor.lengths()
        lengths = tensor.offsets().diff() if lengths is None else lengths
        for start, length in zip(starts, lengths.tolist(), strict=True):
            row = tensor.values().movedim(tensor._ragged_idx - 1, 0)[start : start + length]
            assert len(row) == length
    elif tensor.numel() < 10_000:
        tensor.to_dense()


@pytest.mark.parametrize(
    "kind", ["", "torch.dense", "torch.sparse_coo ", "builtins.eval", None, []]
)
def test_a_kind_that_is_not_known_is_refused(kind: Any) -> None:
    with pytest.raises(MismatchError, match=r"^\$: the parts of a tensor of kind") as caught:
        put_together(kind, {"tensors": [torch.ones(1)]}, TYPES, ())
    assert caught.value.code == "bad_components"


# Warnings.

QUIET = """
import warnings

warnings.simplefilter("error")
import torch
from dsdformat.torch.composites import put_together, take_apart

i, v, n = torch.tensor([0, 1]), torch.ones(1), torch.Size([1, 1])
j = torch.tensor([0])
parts = {
    "torch.sparse_coo": {"indices": j[None], "values": v, "size": n[:1], "coalesced": False},
    "torch.sparse_csr": {"crow_indices": i, "col_indices": j, "values": v, "size": n},
    "torch.sparse_bsc": {"ccol_indices": i, "row_indices": j, "values": v[None, None], "size": n},
    "torch.nested": {"tensors": [v]},
    "torch.jagged": {"offsets": i, "values": v, "jagged_dim": 1},
}
for kind, part in parts.items():
    take_apart(put_together(kind, part, {}, ()), ())
"""


def test_no_warning_of_torch_shows(run_python: Callable[..., Any]) -> None:
    result = run_python(QUIET)
    assert result.returncode == 0, result.stderr


@pytest.fixture(autouse=True)
def _seed(rng: Any) -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(rng.randrange(2**32))
    yield
    torch.set_rng_state(state)
