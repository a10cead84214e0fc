"""Every dtype of torch: each bit pattern comes back by each route, or the dtype is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="the runtime needs ml_dtypes")

from exact import assert_same, assert_same_tensor  # noqa: E402

import dsdformat.numpy  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import DsdError, MismatchError, UnsupportedValueError  # noqa: E402

pytestmark = [
    # What torch says when a test makes a quantized tensor.
    pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

FLOATS = ("float16", "bfloat16", "float32", "float64")
SMALL_FLOATS = (
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
COMPLEX = ("complex32", "complex64", "complex128")
INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
SMALL_INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
STORED = ("bool", *FLOATS, *SMALL_FLOATS, *COMPLEX, *INTS, *SMALL_INTS)
BITS = ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
QUANTIZED = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")

# What older versions of torch lack.
MISSING = {name for name in (*STORED, *BITS, *QUANTIZED) if not hasattr(torch, name)}
STORED_HERE = [name for name in STORED if name not in MISSING]

# Of numpy, through ml_dtypes; torch has nothing of these names.
NUMPY_ONLY = ("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float6_e2m3fn", "float4_e2m1fn")


def every_pattern(dtype: str) -> Any:
    """All values of one or two bytes; random ones and odd floats where there are more."""
    kind = getattr(torch, dtype)
    width = kind.itemsize
    if width <= 2:
        count = 256**width
        numbers = np.arange(count, dtype=f"<u{width}")
        return torch.from_numpy(numbers.view(np.uint8)).view(kind)
    odd = [0, 1, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0xFFC0_1234, 0x8000_0000, 0x7FFF_FFFF]
    odd_64 = [0x7FF0_0000_0000_0001, 0xFFF8_0000_0000_BEEF, 1 << 63, 0x7FF << 52, 1]
    odd_16 = [0x7C01, 0xFE12, 0x8000, 0x7C00, 1, 0, 0xFC00, 0x3C00]
    special = b"".join(
        np.array(values, kind).tobytes()
        for values, kind in ((odd, "<u4"), (odd_64 + odd_64[:3], "<u8"), (odd_16, "<u2"))
    )
    noise = np.random.default_rng(5).bytes(16 * 64)
    return torch.frombuffer(bytearray(special + noise), dtype=torch.uint8).view(kind)


def row_major(tensor: Any) -> bytes:
    """The bytes of a strided tensor in row-major order, without the help of torch's kernels."""
    width = tensor.element_size()
    if tensor.numel() == 0:
        return b""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    whole = storage.numpy()[tensor.storage_offset() * width :]
    flat = whole[: len(whole) // width * width].view(f"V{width}")
    steps = [step * width for step in tensor.stride()]
    return np.lib.stride_tricks.as_strided(flat, tuple(tensor.shape), steps).tobytes()


def assert_bits(found: Any, wanted: Any) -> None:
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert row_major(found) == row_major(wanted)


def filled(tensor: Any) -> Any:
    """A tensor like this one, dense in the same order, of bytes 0xA5."""
    return torch.full((tensor.numel() * tensor.element_size(),), 0xA5, dtype=torch.uint8).view(
        tensor.dtype
    )


@pytest.fixture(scope="module")
def patterns(tmp_path_factory) -> Path:
    """One checkpoint with every pattern of every dtype, under the dtype's name."""
    path = tmp_path_factory.mktemp("dtypes") / "c"
    dsd.save(path, {dtype: every_pattern(dtype) for dtype in STORED_HERE})
    return path


@pytest.fixture(scope="module", params=["zstd", "planes+zstd"])
def compressed(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("dtypes") / "c"
    state = {dtype: every_pattern(dtype) for dtype in STORED_HERE}
    dsd.save(path, state, codec=request.param)
    return path


# The table.


def test_every_dtype_of_this_torch_is_stored_or_known_to_be_refused():
    """Fails where a new version of torch has a dtype that nobody has decided about."""
    found = {value for name in dir(torch) if type(value := getattr(torch, name)) is torch.dtype}
    names = {str(dtype).removeprefix("torch.") for dtype in found}
    assert names == {*STORED, *BITS, *QUANTIZED} - MISSING


def test_the_logical_names_in_the_file_are_those_of_torch(patterns):
    with dsdformat.open(patterns) as checkpoint:
        assert {entry.name: entry.dtype for entry in checkpoint} == dict(
            zip(STORED_HERE, STORED_HERE, strict=True)
        )


@pytest.mark.parametrize("dtype", [name for name in BITS if name not in MISSING])
def test_a_dtype_of_bare_bits_is_refused_with_its_place(tmp_path, dtype):
    tensor = torch.empty(4, dtype=getattr(torch, dtype))
    with pytest.raises(UnsupportedValueError, match=rf"\$\.a\.w.*torch\.{dtype}") as caught:
        dsd.save(tmp_path / "c", {"a": {"w": tensor}})
    assert caught.value.code == "unsupported_dtype"
    assert caught.value.path_in_tree == "$.a.w"
    assert list(tmp_path.iterdir()) == []


def quantized(dtype: str) -> Any:
    kind = getattr(torch, dtype)
    return torch._empty_affine_quantized([4], scale=1.0, zero_point=0, dtype=kind)


@pytest.mark.parametrize("dtype", [name for name in QUANTIZED if name not in MISSING])
def test_a_quantized_tensor_is_refused_with_its_place(tmp_path, dtype):
    with pytest.raises(UnsupportedValueError, match=r"\$\.a\.w.*quantized.*int_repr") as caught:
        dsd.save(tmp_path / "c", {"a": {"w": quantized(dtype)}})
    assert caught.value.path_in_tree == "$.a.w"
    assert list(tmp_path.iterdir()) == []


def test_the_code_for_a_quantized_tensor_is_that_of_dtypes(tmp_path):
    with pytest.raises(UnsupportedValueError) as caught:
        dsd.save(tmp_path / "c", {"w": quantized("qint8")})
    assert caught.value.code == "unsupported_dtype"


# Each bit pattern, by each route.


def load_new(path: Path, name: str, _: Any) -> Any:
    return dsd.load(path, select=name)[name]


def load_mapped(path: Path, name: str, _: Any) -> Any:
    return dsd.load(path, select=name, mmap=True)[name]


def load_unverified(path: Path, name: str, _: Any) -> Any:
    return dsd.load(path, select=name, verify=False)[name]


def load_into(path: Path, name: str, into: Any) -> Any:
    dsd.load(path, {name: into}, select=name)
    return into


def load_in_place(path: Path, name: str, saved: Any) -> Any:
    return load_into(path, name, filled(saved))


def load_in_place_strided(path: Path, name: str, saved: Any) -> Any:
    twice = torch.cat([filled(saved).view(torch.uint8)] * 2).view(saved.dtype)
    return load_into(path, name, twice.as_strided((len(saved),), (2,)))


def load_on_meta(path: Path, name: str, saved: Any) -> Any:
    return load_into(path, name, torch.empty(saved.shape, dtype=saved.dtype, device="meta"))


ROUTES = {
    "new": load_new,
    "mapped": load_mapped,
    "unverified": load_unverified,
    "in place": load_in_place,
    "in place, every second": load_in_place_strided,
    "materialized": load_on_meta,
}


@pytest.mark.parametrize("dtype", STORED_HERE)
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_every_bit_pattern_comes_back(patterns, route, dtype):
    tensor = every_pattern(dtype)
    assert_bits(route(patterns, dtype, tensor), tensor)


@pytest.mark.parametrize("dtype", STORED_HERE)
def test_every_bit_pattern_comes_back_from_compression(compressed, dtype):
    assert_bits(dsd.load(compressed, select=dtype)[dtype], every_pattern(dtype))


@pytest.mark.parametrize("dtype", STORED_HERE)
def test_every_bit_pattern_comes_back_in_a_snapshot(dtype):
    tensor = every_pattern(dtype)
    assert_bits(dsd.snapshot({"w": tensor})["w"], tensor)


class Buffers(torch.nn.Module):
    """A module with a buffer of each dtype."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        for dtype in STORED_HERE:
            self.register_buffer(f"of_{dtype}", make(dtype))


def test_every_bit_pattern_of_buffers_of_a_module_comes_back(tmp_path):
    dsd.save(tmp_path / "c", {"model": Buffers(every_pattern)})
    loaded = Buffers(lambda dtype: filled(every_pattern(dtype)))
    dsd.load(tmp_path / "c", {"model": loaded})
    for name, buffer in loaded.named_buffers():
        assert_bits(buffer, every_pattern(name.removeprefix("of_")))


VIEWS: dict[str, Callable[[Any], Any]] = {
    "no dims": lambda a: a[3:4].reshape(()),
    "no elements": lambda a: a[:0],
    "no elements in the middle": lambda a: a[:0].reshape(3, 0, 2),
    "one element": lambda a: a[5:6],
    "odd sizes": lambda a: a[:35].reshape(5, 7),
    "transposed": lambda a: a[:35].reshape(5, 7).t(),
    "every third": lambda a: a[1:40:3],
    "expanded": lambda a: a[2:5].reshape(3, 1).expand(3, 4),
    "one element expanded": lambda a: a[6:7].expand(9),
    "permuted": lambda a: a[:30].reshape(2, 3, 5).permute(2, 0, 1),
    "middle columns": lambda a: a[:35].reshape(5, 7)[:, 2:5],
}


@pytest.fixture(scope="module")
def views(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("dtypes") / "c"
    state = {
        name: {dtype: view(every_pattern(dtype)) for dtype in STORED_HERE}
        for name, view in VIEWS.items()
    }
    dsd.save(path, state)
    return path


@pytest.mark.parametrize("dtype", STORED_HERE)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_every_dtype_come_back(views, view, dtype):
    loaded = dsd.load(views, select=f"{view}/{dtype}")[view][dtype]
    assert_bits(loaded, VIEWS[view](every_pattern(dtype)))


@pytest.mark.parametrize("dtype", [name for name in COMPLEX if name not in MISSING])
@pytest.mark.parametrize("view", ["conj", "imag of conj", "conj of conj", "conj transposed"])
def test_conj_and_neg_views_are_stored_as_what_they_show(tmp_path, dtype, view):
    whole = every_pattern(dtype)[:12].reshape(3, 4)
    tensor = {
        "conj": whole.conj,
        "imag of conj": lambda: whole.conj().imag,
        "conj of conj": lambda: whole.conj().conj(),
        "conj transposed": lambda: whole.mH,
    }[view]()
    dsd.save(tmp_path / "c", {"w": tensor})
    loaded = dsd.load(tmp_path / "c")["w"]
    assert (loaded.is_conj(), loaded.is_neg()) == (False, False)
    assert loaded.dtype == tensor.dtype
    assert row_major(loaded) == row_major(tensor.resolve_conj().resolve_neg())


def test_a_view_with_a_flag_and_its_base_are_two_tensors(tmp_path):
    base = torch.tensor([1 + 2j, 3 - 4j])
    dsd.save(tmp_path / "c", {"base": base, "conj": base.conj()})
    loaded = dsd.load(tmp_path / "c")
    assert_same_tensor(loaded["base"], base)
    assert_same_tensor(loaded["conj"], base.conj().resolve_conj())


# Packed and exponent-only types (B066).


@pytest.mark.skipif("float4_e2m1fn_x2" in MISSING, reason="this torch has no such dtype")
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 4), (0, 4), (3, 0)], ids=str)
def test_packed_fours_keep_the_shape_that_torch_shows(tmp_path, shape):
    count = int(np.prod(shape))
    tensor = every_pattern("float4_e2m1fn_x2")[:count].reshape(shape)
    dsd.save(tmp_path / "c", {"w": tensor})
    with dsdformat.open(tmp_path / "c") as checkpoint:
        assert checkpoint.tensor("w").shape == shape
        assert checkpoint.tensor("w").nbytes == count
    assert_bits(dsd.load(tmp_path / "c")["w"], tensor)


@pytest.mark.skipif("float4_e2m1fn_x2" in MISSING, reason="this torch has no such dtype")
def test_packed_fours_are_twice_as_many_in_the_eyes_of_safetensors(tmp_path):
    dsd.save(tmp_path / "c", {"w": every_pattern("float4_e2m1fn_x2")[:8].reshape(2, 4)})
    data = (tmp_path / "c" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert (header["w"]["dtype"], header["w"]["shape"]) == ("F4", [2, 8])


@pytest.mark.parametrize(
    "dtype", [name for name in ("float4_e2m1fn_x2", "float8_e8m0fnu") if name not in MISSING]
)
def test_a_slice_of_packed_bytes_is_stored_alone(tmp_path, dtype):
    whole = every_pattern(dtype).reshape(16, 16)
    dsd.save(tmp_path / "c", {"rows": whole[3:5], "columns": whole[:, 3:6]})
    loaded = dsd.load(tmp_path / "c")
    assert_bits(loaded["rows"], whole[3:5])
    assert_bits(loaded["columns"], whole[:, 3:6])


# Nothing is cast unless asked for (B062).

PAIRS = [
    *(("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32")),
    *(("bfloat16", "float32"), ("float16", "bfloat16"), ("float8_e4m3fn", "bfloat16")),
    *(("int64", "int32"), ("int32", "int64"), ("int32", "uint32"), ("bool", "uint8")),
    *(("int8", "uint8"), ("int32", "float32"), ("float32", "int32"), ("float32", "bool")),
    *(("complex64", "complex128"), ("complex64", "float32"), ("float32", "complex64")),
    *(("float8_e4m3fn", "float8_e5m2"), ("float8_e4m3fn", "float8_e4m3fnuz"), ("uint4", "uint8")),
]


def named(pairs: Sequence[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*pair, id=f"{pair[0]} to {pair[1]}") for pair in pairs]


def tensor_of(dtype: str, *shape: int) -> Any:
    """Values that each dtype has: 0 and 1."""
    count = int(np.prod(shape))
    values = (torch.arange(count) % 2).reshape(shape)
    if dtype in SMALL_INTS:
        return values.to(torch.uint8).view(getattr(torch, dtype))
    return values.to(getattr(torch, dtype))


@pytest.mark.parametrize(("stored", "wanted"), named(PAIRS))
def test_a_destination_of_another_dtype_is_refused_and_both_are_named(tmp_path, stored, wanted):
    dsd.save(tmp_path / "c", {"w": tensor_of(stored, 4, 3), "other": torch.ones(2)})
    state = {"w": tensor_of(wanted, 4, 3), "other": torch.zeros(2)}
    with pytest.raises(MismatchError, match=rf"w: dtype {stored} .*, {wanted} wanted") as caught:
        dsd.load(tmp_path / "c", state)
    (found,) = caught.value.report.mismatched
    assert (found.name, found.what, found.stored, found.wanted) == ("w", "dtype", stored, wanted)
    assert_same(state, {"w": tensor_of(wanted, 4, 3), "other": torch.zeros(2)})


def test_the_error_says_how_to_ask_for_a_cast(tmp_path):
    dsd.save(tmp_path / "c", {"w": torch.rand(4, 3) * 100})
    with pytest.raises(MismatchError) as caught:
        dsd.load(tmp_path / "c", {"w": torch.zeros(4, 3, dtype=torch.bfloat16)})
    assert "dtype=" in caught.value.hint


CASTS = [pair for pair in PAIRS if all(name.startswith(("float", "bfloat")) for name in pair)]


@pytest.mark.parametrize("layout", ["packed", "transposed"])
@pytest.mark.parametrize(("stored", "wanted"), named(CASTS))
def test_a_cast_on_request_gives_what_torch_gives_and_is_reported(tmp_path, stored, wanted, layout):
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)) * 30
    saved = values.to(getattr(torch, stored))
    kind = getattr(torch, wanted)
    into = torch.zeros(4, 3, dtype=kind) if layout == "packed" else torch.zeros(3, 4).to(kind).t()
    dsd.save(tmp_path / "c", {"w": saved})
    loaded = dsd.load(tmp_path / "c", {"w": into}, dtype=kind)
    assert_bits(into.contiguous(), saved.to(kind))
    (cast,) = loaded.report.casts
    assert (cast.name, cast.stored, cast.loaded) == ("w", stored, wanted)
    assert not loaded.report


def test_a_cast_that_was_asked_for_is_to_the_dtype_of_the_destination_only(tmp_path):
    dsd.save(tmp_path / "c", {"w": torch.rand(3)})
    state = {"w": torch.zeros(3, dtype=torch.float16)}
    with pytest.raises(MismatchError, match="float32 in the checkpoint, float16 wanted"):
        dsd.load(tmp_path / "c", state, dtype=torch.bfloat16)


OTHERS = [pair for pair in PAIRS if pair not in CASTS]


@pytest.mark.parametrize(("stored", "wanted"), named(OTHERS))
def test_a_request_for_a_dtype_casts_floats_alone(tmp_path, stored, wanted):
    dsd.save(tmp_path / "c", {"w": tensor_of(stored, 4, 3)})
    state = {"w": tensor_of(wanted, 4, 3)}
    kind = state["w"].dtype if state["w"].is_floating_point() else torch.float32
    with pytest.raises(MismatchError, match=rf"dtype {stored} .*, {wanted} wanted"):
        dsd.load(tmp_path / "c", state, dtype=kind)
    assert_same(state, {"w": tensor_of(wanted, 4, 3)})


@pytest.mark.parametrize("dtype", ["bool", *INTS, *SMALL_INTS, "complex64", "complex128"])
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
def test_a_new_tensor_that_is_no_float_is_never_cast(patterns, dtype):
    if dtype in MISSING:
        pytest.skip("this torch has no such dtype")
    loaded = dsd.load(patterns, select=[dtype, "float32"], dtype=torch.bfloat16)
    assert loaded["float32"].dtype == torch.bfloat16
    assert_bits(loaded[dtype], every_pattern(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e4m3fn"])
def test_a_new_tensor_is_cast_on_request_as_torch_casts_it(tmp_path, dtype):
    saved = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    dsd.save(tmp_path / "c", {"w": saved, "t": saved.t()})
    loaded = dsd.load(tmp_path / "c", dtype=getattr(torch, dtype))
    assert_bits(loaded["w"], saved.to(getattr(torch, dtype)))
    assert_bits(loaded["t"], saved.t().to(getattr(torch, dtype)))
    assert loaded["t"].stride() == (1, 40)


@pytest.mark.skipif("float4_e2m1fn_x2" in MISSING, reason="this torch has no such dtype")
@pytest.mark.parametrize("direction", ["to", "from"])
def test_a_cast_that_torch_cannot_do_is_refused_before_anything_is_changed(tmp_path, direction):
    fours = every_pattern("float4_e2m1fn_x2")[:4]
    saved, into = (torch.ones(4), fours) if direction == "to" else (fours, torch.ones(4))
    dsd.save(tmp_path / "c", {"b": torch.ones(3), "w": saved})
    state = {"b": torch.zeros(3), "w": into}
    with pytest.raises(DsdError):
        dsd.load(tmp_path / "c", state, dtype={"w": into.dtype})
    assert_same_tensor(state["b"], torch.zeros(3))


@pytest.mark.skipif("float4_e2m1fn_x2" in MISSING, reason="this torch has no such dtype")
@pytest.mark.parametrize("direction", ["to", "from"])
def test_a_new_tensor_that_torch_cannot_cast_is_refused_by_name(tmp_path, direction):
    fours = every_pattern("float4_e2m1fn_x2")[:4]
    saved, kind = (torch.ones(4), fours.dtype) if direction == "to" else (fours, torch.float32)
    dsd.save(tmp_path / "c", {"w": saved})
    with pytest.raises(DsdError, match="w"):
        dsd.load(tmp_path / "c", dtype=kind)


def test_the_state_of_an_optimizer_is_not_cast_with_its_model(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = optimizer.state[model.weight]["exp_avg"].clone()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})

    plain = dsd.load(tmp_path / "c", dtype=torch.bfloat16)
    assert plain["model"]["weight"].dtype == torch.bfloat16
    assert_same_tensor(plain["optimizer"]["state"]["weight"]["exp_avg"], saved)

    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    report = dsd.load(tmp_path / "c", state, dtype=torch.bfloat16).report
    assert sorted(cast.name for cast in report.casts) == ["model/bias", "model/weight"]
    assert_same_tensor(optimizer.state[model.weight]["exp_avg"], saved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_an_array_of_numpy_stays_as_it_is_where_tensors_are_cast(tmp_path, dtype):
    array = np.linspace(0, 1, 5, dtype=np.float32)
    dsd.save(tmp_path / "c", {"array": array, "tensor": torch.rand(3)})
    loaded = dsd.load(tmp_path / "c", dtype=dtype)
    assert loaded["tensor"].dtype == dtype
    assert_same(loaded["array"], array)


# Other readers, and what they have that torch lacks (B072).

READ_WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not here")

sys.meta_path.insert(0, NoTorch())
import dsdformat, dsdformat.numpy

with dsdformat.open(sys.argv[1]) as checkpoint:
    for entry in checkpoint:
        print(entry.name, entry.dtype, list(entry.shape), bytes(entry.read()).hex())
loaded = dsdformat.numpy.load(sys.argv[1])
for name, array in sorted(loaded.items()):
    print(name, array.dtype, list(array.shape), array.tobytes().hex())
assert "torch" not in sys.modules
"""


def test_a_process_without_torch_reads_every_dtype(tmp_path, run_python):
    tensors = {name: every_pattern(name)[:6].reshape(2, 3) for name in STORED_HERE}
    dsd.save(tmp_path / "c", tensors)
    result = run_python(READ_WITHOUT_TORCH, tmp_path / "c")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    listed, loaded = lines[: len(tensors)], lines[len(tensors) :]
    wanted = {name: row_major(tensor).hex() for name, tensor in tensors.items()}
    assert sorted(listed) == sorted(f"{n} {n} [2, 3] {data}" for n, data in wanted.items())
    assert [(x.split()[0], x.split()[-1]) for x in loaded] == sorted(wanted.items())
    kinds = {line.split()[0]: line.split()[1] for line in loaded}
    assert kinds["bfloat16"] == "bfloat16"
    assert kinds["float8_e5m2"] == "float8_e5m2"


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2fnuz", "int4", "uint2", "complex64"]
)
def test_an_array_that_numpy_saved_is_a_tensor_of_the_same_bits_where_torch_has_the_dtype(
    tmp_path, dtype
):
    if dtype in MISSING:
        pytest.skip("this torch has no such dtype")
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    array = np.frombuffer(bytes(range(64)), np.uint8)[:64].view(kind)
    dsdformat.numpy.save(tmp_path / "c", {"w": array})
    loaded = dsd.load(tmp_path / "c")["w"]
    assert loaded.dtype == getattr(torch, dtype)
    assert row_major(loaded) == array.tobytes()


def only_numpy(dtype: str) -> Any:
    return np.arange(8, dtype=np.uint8).view(getattr(ml_dtypes, dtype))


@pytest.mark.parametrize("dtype", NUMPY_ONLY)
def test_a_stored_dtype_that_torch_lacks_is_refused_by_name(tmp_path, dtype):
    dsdformat.numpy.save(tmp_path / "c", {"a": {"w": only_numpy(dtype)}, "b": np.ones(2)})
    with pytest.raises(UnsupportedValueError, match=f"a/w: torch .* has no dtype {dtype}") as got:
        dsd.load(tmp_path / "c")
    assert got.value.code == "unsupported_dtype"
    assert "select=" in got.value.hint


def test_a_stored_dtype_that_torch_lacks_changes_nothing_in_place(tmp_path):
    dsdformat.numpy.save(tmp_path / "c", {"a": np.ones(8), "w": only_numpy("float8_e3m4")})
    state = {"a": torch.zeros(8, dtype=torch.float64), "w": torch.zeros(8)}
    with pytest.raises(DsdError, match="float8_e3m4"):
        dsd.load(tmp_path / "c", state)
    assert_same_tensor(state["a"], torch.zeros(8, dtype=torch.float64))


def test_the_rest_is_loaded_where_the_dtype_that_torch_lacks_is_not_selected(tmp_path):
    dsdformat.numpy.save(tmp_path / "c", {"a": np.ones(2), "w": only_numpy("float8_e3m4")})
    assert_same(dsd.load(tmp_path / "c", select="a"), {"a": torch.ones(2).double()})


@pytest.mark.parametrize("dtype", NUMPY_ONLY)
def test_an_array_of_a_dtype_that_torch_lacks_comes_back_as_an_array(tmp_path, dtype):
    dsd.save(tmp_path / "c", {"w": only_numpy(dtype)})
    assert_same(dsd.load(tmp_path / "c"), {"w": only_numpy(dtype)})


@pytest.mark.parametrize("dtype", NUMPY_ONLY)
def test_a_scalar_of_a_dtype_that_torch_lacks_comes_back_as_a_scalar(tmp_path, dtype):
    dsd.save(tmp_path / "c", {"w": only_numpy(dtype)[3]})
    assert_same(dsd.load(tmp_path / "c"), {"w": only_numpy(dtype)[3]})


# Dtypes as values.


def test_dtypes_as_values_come_back_as_themselves(tmp_path):
    state = {
        name: getattr(torch, name) for name in (*STORED, *BITS, *QUANTIZED) if name not in MISSING
    }
    dsd.save(tmp_path / "c", {"dtypes": state})
    assert dsd.load(tmp_path / "c") == {"dtypes": state}


def test_a_dtype_as_a_value_that_torch_lacks_stays_an_inert_name(tmp_path):
    state = {"dtype": dsdformat.Named("torch.dtype", "float3_e1m1")}
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add(state)
    assert dsd.load(tmp_path / "c") == state
