"""Files of torch.save, in both forms and all protocols: read exactly as torch reads them."""

from __future__ import annotations

import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch
from exactly import assert_exact, saved
from samples import VALUES, trained
from torch import nn

import dsdformat
from dsdformat.convert import ForeignTensor, Kind, find_kind, open_foreign
from dsdformat.convert.optimizers import find_optimizers
from dsdformat.torch.dtypes import torch_dtype

FORMS = {
    **{f"zip-{protocol}": (True, protocol) for protocol in (1, 2, 3, 4, 5)},
    **{f"stream-{protocol}": (False, protocol) for protocol in (2, 4)},
}
forms = pytest.mark.parametrize(("zipped", "protocol"), FORMS.values(), ids=FORMS)
DTYPES = [
    *("bool", "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
]
DTYPES = [name for name in DTYPES if hasattr(torch, name)]  # some are newer than the oldest torch


@forms
def test_a_training_state_is_read_exactly(tmp_path, zipped, protocol):
    path = saved(trained(), tmp_path / "x.pt", zipped=zipped, protocol=protocol)
    assert_exact(path, tmp_path)


@forms
@pytest.mark.parametrize("what", VALUES)
def test_values_are_read_exactly(tmp_path, zipped, protocol, what):
    path = saved({what: VALUES[what]}, tmp_path / "x.pt", zipped=zipped, protocol=protocol)
    assert_exact(path, tmp_path)


def bits(dtype: str, *shape: int) -> torch.Tensor:
    kind = torch_dtype(dtype)
    generator = torch.Generator().manual_seed(1)
    size = (*shape[:-1], shape[-1] * kind.itemsize)
    high = 2 if dtype == "bool" else 256
    return torch.randint(0, high, size, dtype=torch.uint8, generator=generator).view(kind)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_bit_for_bit(tmp_path, zipped, dtype):
    state = {"w": bits(dtype, 3, 4), "none": bits(dtype, 0, 4), "one": bits(dtype, 1)}
    path = saved(state, tmp_path / "x.pt", zipped=zipped)
    assert_exact(path, tmp_path, state=state)


BASE = torch.arange(48.0).reshape(2, 4, 6)
LAYOUTS = {
    "transposed": BASE.transpose(0, 2),
    "permuted": BASE.permute(1, 2, 0),
    "sliced": BASE[:, 1:3],
    "stepped": BASE[:, ::2, 1::3],
    "expanded": torch.arange(3.0)[:, None].expand(3, 4),
    "scalar-expanded": torch.tensor(7.0).expand(2, 3),
    "diagonal": torch.arange(16.0).reshape(4, 4).diagonal(),
    "windows": torch.arange(10.0).unfold(0, 4, 2),
    "channels-last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "view-of-large": torch.arange(1000.0)[500:510],
    "scalar": torch.tensor(3.5),
    "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
    "conjugate-transposed": torch.randn(3, 4, dtype=torch.complex128).mH,
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_exactly(tmp_path, zipped, layout):
    path = saved({"w": LAYOUTS[layout]}, tmp_path / "x.pt", zipped=zipped)
    assert_exact(path, tmp_path)


def uncoalesced(_: torch.Tensor) -> torch.Tensor:
    values = [1.0, 2.0]
    return torch.sparse_coo_tensor([[0, 0], [1, 1]], values, (2, 2), check_invariants=True)


SPARSE = {
    "coo": torch.Tensor.to_sparse,
    "uncoalesced": uncoalesced,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda tensor: tensor.to_sparse_bsr((2, 2)),
    "bsc": lambda tensor: tensor.to_sparse_bsc((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_tensors_are_read_by_their_components(tmp_path, kind):
    assert_exact(saved({"w": SPARSE[kind](torch.eye(4))}, tmp_path / "x.pt"), tmp_path)


def test_parameters_and_buffers_are_tensors(tmp_path):
    state = {"p": nn.Parameter(torch.ones(2)), "b": nn.Buffer(torch.ones(2))}
    state["l"] = [state["p"], nn.Parameter(torch.zeros(1), requires_grad=False)]
    assert_exact(saved(state, tmp_path / "x.pt"), tmp_path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_tied_tensors_stay_tied_and_views_of_one_storage_do_not(tmp_path, zipped):
    tied = nn.Embedding(4, 3)
    flat = torch.arange(12.0)
    state = {
        "emb": tied.state_dict()["weight"],
        "head": tied.state_dict()["weight"],
        "first": flat[:6],
        "second": flat[6:],
        "shaped": flat[:6].view(2, 3),
        "all": flat,
    }
    path = saved(state, tmp_path / "x.pt", zipped=zipped)
    with open_foreign(path) as foreign:
        assert len(foreign) == 5
        assert foreign.paths(foreign.tensor("head")) == [("emb",), ("head",)]
        assert foreign.tensor("head") is foreign.tensor("emb")
    assert_exact(path, tmp_path)


ARRAYS = {
    "plain": np.arange(6.0).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian": np.arange(3, dtype=">i4"),
    "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
    "float8": np.arange(3).astype(ml_dtypes.float8_e3m4),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 3)),
    "scalar-array": np.array(5),
    "complex": np.array([1 + 2j]),
    "scalars": [np.float64(1.5), np.bool_(True), ml_dtypes.bfloat16(2), np.complex64(1 + 2j)],
    "dtypes": [np.dtype("f4"), np.dtype(ml_dtypes.bfloat16)],
    "rng": np.random.RandomState(1).get_state(),
}


@forms
@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_and_scalars_of_numpy_are_read_exactly(tmp_path, zipped, protocol, what):
    path = saved({what: ARRAYS[what]}, tmp_path / "x.pt", zipped=zipped, protocol=protocol)
    assert_exact(path, tmp_path)


def test_what_python_keeps_on_a_state_dict_is_told(tmp_path):
    path = saved({"model": nn.BatchNorm1d(2).state_dict()}, tmp_path / "x.pt")
    with open_foreign(path) as foreign:
        assert foreign.attributes == {("model",): {"_metadata": {"": {"version": 2}}}}


def test_attributes_of_a_tensor_are_told_and_left_out(tmp_path):
    weight = nn.Parameter(torch.ones(2))
    weight.sequence_parallel = True
    with open_foreign(saved({"w": weight}, tmp_path / "x.pt")) as foreign:
        assert [(one.path, one.lost) for one in foreign.findings] == [(("w",), False)]
        assert foreign.tensor("w").extra == {"sequence_parallel": True}


@pytest.mark.parametrize(
    "root", [torch.ones(3), [1, torch.ones(2)], 5], ids=["tensor", "list", "int"]
)
def test_a_root_that_is_no_dict_lies_under_a_key(tmp_path, root):
    path = saved(root, tmp_path / "x.pt")
    assert_exact(path, tmp_path, state={"value": root})


def test_storages_without_checksums_are_read(tmp_path, monkeypatch):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved({"w": torch.ones(3)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with open_foreign(path) as foreign:
        foreign.verify()
    assert_exact(path, tmp_path)


def test_storages_at_large_alignments_are_read(tmp_path):
    name = "torch.utils.serialization"
    config = pytest.importorskip(name, reason="this torch aligns as it does").config
    with config.patch({"save.storage_alignment": 4096}):
        path = saved({"a": torch.ones(3), "b": torch.zeros(5)}, tmp_path / "x.pt")
    assert_exact(path, tmp_path)


def test_a_flipped_bit_is_found_by_verifying(tmp_path):
    path = saved({"w": torch.ones(3)}, tmp_path / "x.pt")
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(3).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with open_foreign(path) as foreign, pytest.raises(dsdformat.ConvertError) as caught:
        foreign.verify()
    assert caught.value.code == "foreign_checksum"


def test_big_endian_storages_are_swapped(tmp_path):
    state = {"h": torch.arange(3, dtype=torch.int16), "c": torch.tensor([1 + 2j])}
    path = saved(state, tmp_path / "x.pt")
    arrays = [tensor.numpy() for tensor in state.values()]
    swapped = {
        one.tobytes(): one.astype(one.dtype.newbyteorder(">")).tobytes() for one in arrays
    } | {b"little": b"big"}
    with zipfile.ZipFile(tmp_path / "big.pt", "w") as out, zipfile.ZipFile(path) as old:
        for info in old.infolist():
            body = old.read(info)
            out.writestr(info.filename, swapped.get(body, body))
    assert_exact(tmp_path / "big.pt", tmp_path, state=state)


def test_numbers_of_an_optimizer_are_listed_with_what_is_known_of_them(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"train": {"optimizers": [optimizer.state_dict()]}}
    with open_foreign(saved(state, tmp_path / "x.pt")) as foreign:
        (found,) = find_optimizers(foreign.tree)
    assert found.path == ("train", "optimizers", 0)
    known = [(one.number, one.group, one.name, one.shapes["exp_avg"]) for one in found.parameters]
    assert known == [(0, 0, "weight", (2, 3)), (1, 0, "bias", (2,))]


def test_both_forms_are_recognized_by_their_content(tmp_path):
    one = saved({"w": torch.ones(1)}, tmp_path / "any.name")
    two = saved({"w": torch.ones(1)}, tmp_path / "another", zipped=False, protocol=4)
    assert (find_kind(one), find_kind(two)) == (Kind.TORCH_ZIP, Kind.TORCH_STREAM)


def test_a_tensor_is_read_from_where_it_lies_when_it_is_asked_for(tmp_path):
    path = saved({"w": torch.arange(1000.0)}, tmp_path / "x.pt")
    with open_foreign(path) as foreign:
        tensor = foreign.tensor("w")
        assert type(tensor) is ForeignTensor
        box = dsdformat.Box((100,), (3,))
        assert bytes(foreign.read("w", box)) == torch.arange(100.0, 103.0).numpy().tobytes()
    with pytest.raises(dsdformat.ArgumentError):
        tensor.read()  # the file is closed
