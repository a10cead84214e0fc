"""Tensors and storages that lie about dtype, size, stride or place: refused, and soon (B135).

In both forms of torch.save. Nothing is allocated for a tensor before it is sure that it is there.
"""

from __future__ import annotations

from typing import Any

import pytest
from forge import MAGIC, SIX, Tensor, call, name, pickled, plain, torch_stream, torch_zip

from dsdformat import ConvertError
from dsdformat.convert import open_foreign
from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.tensor import ForeignTensor
from dsdformat.convert.torch_stream import is_torch_stream, read_torch_stream
from dsdformat.convert.torch_zip import read_torch_archive

V3 = name("torch._utils", "_rebuild_tensor_v3")
UNTYPED = name("torch.storage", "UntypedStorage")
PARAMETER = name("torch._utils", "_rebuild_parameter")
SPARSE = name("torch._utils", "_rebuild_sparse_tensor")
LAYOUT = call(name("torch.serialization", "_get_layout"), "torch.sparse_coo")
SIZE = call(name("torch", "Size"), (2, 3))


def lie(code: str, **fields: Any) -> tuple[bytes, str]:
    return Tensor(**fields).opcodes(), code


BAD: dict[str, tuple[bytes, str]] = {
    "offset-beyond-the-storage": lie("storage_out_of_bounds", offset=1),
    "offset-of-2-to-the-62": lie("storage_out_of_bounds", offset=2**62),
    "offset-below-zero": lie("storage_out_of_bounds", offset=-1),
    "offset-that-is-a-float": lie("pickle_value", offset=b"G" + bytes(8)),
    "offset-that-is-a-flag": lie("pickle_value", offset=True),
    "size-beyond-the-storage": lie("storage_out_of_bounds", size=(3, 3)),
    "size-of-2-to-the-62": lie("storage_out_of_bounds", size=(2**62,), stride=(1,)),
    "size-of-2-to-the-100": lie("storage_out_of_bounds", size=(2**100,), stride=(1,)),
    "size-below-zero": lie("storage_out_of_bounds", size=(-2, -3)),
    "sizes-that-overflow": lie("storage_out_of_bounds", size=(2**40, 2**40), stride=(0, 0)),
    "sizes-that-overflow-without-elements": lie(
        "storage_out_of_bounds", size=(0, 2**62, 2**62), stride=(1, 1, 1)
    ),
    "sizes-that-are-a-string": lie("pickle_value", size="ab"),
    "sizes-without-strides": lie("pickle_value", stride=()),
    "65-dims": lie("pickle_value", size=(1,) * 65, stride=(1,) * 65),
    "stride-beyond-the-storage": lie("storage_out_of_bounds", stride=(4, 1)),
    "stride-of-2-to-the-62": lie("storage_out_of_bounds", stride=(2**62, 1)),
    "stride-below-zero": lie("storage_out_of_bounds", offset=5, stride=(-3, -1)),
    "expanded-to-a-tebibyte": lie("foreign_too_large", size=(2**38,), stride=(0,)),
    "storage-of-another-length": lie("storage_mismatch", numel=5),
    "storage-of-2-to-the-62": lie("storage_mismatch", numel=2**62),
    "storage-below-zero": lie("storage_mismatch", numel=-1),
    "storage-with-a-length-that-is-none": lie("storage_mismatch", numel="6"),
    "storage-of-a-wider-dtype": lie("storage_mismatch", kind=name("torch", "DoubleStorage")),
    "storage-of-a-narrower-dtype": lie("storage_mismatch", kind=name("torch", "HalfStorage")),
    "storage-that-is-a-number": (plain(((1, 2, 3, 4, 5),))[1:-1] + b"Q", "pickle_malformed"),
    "storage-with-a-key-that-is-none": lie("pickle_malformed", key=0),
    "storage-with-a-location-that-is-none": lie("pickle_malformed", location=0),
    "dtype-beyond-the-storage": lie(
        "storage_out_of_bounds",
        kind=UNTYPED,
        numel=24,
        function=V3,
        more=(name("torch", "complex64"),),
    ),
    "dtype-that-is-none": lie(
        "pickle_value", kind=UNTYPED, numel=24, function=V3, more=(name("torch", "Tensor"),)
    ),
    "dtype-that-is-a-string": lie(
        "pickle_value", kind=UNTYPED, numel=24, function=V3, more=("float32",)
    ),
    "dtype-of-another-module": lie(
        "pickle_value", kind=UNTYPED, numel=24, function=V3, more=(name("os", "float32"),)
    ),
    "too-few-arguments": (call(name("torch._utils", "_rebuild_tensor_v2"), 1), "pickle_value"),
    "too-many-arguments": lie("pickle_value", more=(None, 1)),
    "a-flag-that-is-none": lie("pickle_value", requires_grad=1),
    "bits-that-are-not-known": lie("pickle_value", more=({"fake": True},)),
    "bits-that-are-no-dict": lie("pickle_value", more=([1],)),
    "no-storage": (
        call(name("torch._utils", "_rebuild_tensor_v2"), 1, 0, (2,), (1,), False, b"}"),
        "pickle_value",
    ),
    "a-parameter-of-a-number": (call(PARAMETER, 5, True, b"}"), "pickle_value"),
    "a-sparse-tensor-of-numbers": (call(SPARSE, LAYOUT, (1, 2, SIZE, True)), "pickle_value"),
    "a-sparse-tensor-without-a-size": (
        call(SPARSE, LAYOUT, (Tensor().opcodes(), Tensor().opcodes(), (2, 3), True)),
        "pickle_value",
    ),
    "a-sparse-tensor-of-two-components": (
        call(SPARSE, LAYOUT, (Tensor().opcodes(), Tensor().opcodes())),
        "pickle_value",
    ),
    "a-size-of-2-to-the-64": (call(name("torch", "Size"), (2**64,)), "pickle_value"),
    "two-dtypes-of-one-storage": (
        plain([Tensor().opcodes(), Tensor(kind=name("torch", "IntStorage")).opcodes()]),
        "storage_mismatch",
    ),
}


CODES = {code for _, code in BAD.values()} | {"stream_malformed", "foreign_truncated"}


def read_zip(value: bytes) -> Any:
    return read_torch_archive(MemoryBytes(torch_zip(pickled(value), {"0": SIX}))).tree


def in_stream(value: bytes) -> bytes:
    """The same in the stream form, where an id has one part more."""
    return value.replace(b"tQ", b"NtQ")


def read_stream(value: bytes, **lies: Any) -> Any:
    data = torch_stream(pickled(in_stream(value)), {"0": SIX}, **lies)
    return read_torch_stream(MemoryBytes(data))


@pytest.mark.parametrize("read", [read_zip, read_stream], ids=["zip", "stream"])
def test_the_tensor_that_the_lies_start_from_is_read(read):
    tensor = read(Tensor().opcodes())
    assert (tensor.dtype, tensor.shape, bytes(tensor.read())) == ("float32", (2, 3), SIX)


@pytest.mark.parametrize("case", BAD)
def test_a_tensor_that_lies_is_refused_with_its_code(refused, case):
    value, code = BAD[case]
    assert refused(lambda: read_zip(value)) == code


@pytest.mark.parametrize("case", BAD)
def test_a_tensor_that_lies_is_refused_in_the_stream_form(refused, case):
    value, _ = BAD[case]
    keys = None if b"torch\n" in value and b"Storage" in value else []
    assert refused(lambda: read_stream(value, keys=keys)) in CODES


def test_many_views_of_one_storage_are_not_more_than_a_file_may_hold(refused):
    """Each is stored for itself, so a small file could ask for a full disk."""
    views = [Tensor(size=(2**28, n), stride=(0, 1)).opcodes() for n in (1, 2)]
    assert refused(lambda: read_zip(plain(views))) == "foreign_too_large"


def test_a_tensor_without_elements_reads_nothing():
    tensor = read_zip(Tensor(offset=6, size=(0, 2**40), stride=(1, 1)).opcodes())
    assert bytes(tensor.read()) == b""


NOT_READ = {
    "quantized": (
        Tensor(
            kind=name("torch", "QInt8Storage"),
            numel=24,
            function=name("torch._utils", "_rebuild_tensor_v2"),
        ).opcodes(),
        "torch.qint8",
    ),
    "qtensor": (call(name("torch._utils", "_rebuild_qtensor"), 1), "torch._utils._rebuild_qtensor"),
    "bits": (
        Tensor(kind=UNTYPED, numel=24, function=V3, more=(name("torch", "bits8"),)).opcodes(),
        "torch.bits8",
    ),
    "meta": (
        call(
            name("torch._utils", "_rebuild_meta_tensor_no_storage"),
            name("torch", "float32"),
            (2,),
            (1,),
            False,
        ),
        "torch._utils._rebuild_meta_tensor_no_storage",
    ),
    "storage": (
        plain(("storage", name("torch", "FloatStorage"), "0", "cpu", 6)) + b"Q",
        "torch.UntypedStorage",
    ),
    "subclass": (
        call(
            name("torch._tensor", "_rebuild_from_type_v2"),
            name("torch._utils", "_rebuild_tensor_v2"),
            name("torchao.dtypes", "AffineQuantizedTensor"),
            (1,),
            {},
        ),
        "torchao.dtypes.AffineQuantizedTensor",
    ),
    "unknown-storage": (
        Tensor(kind=name("torch", "FutureStorage")).opcodes(),
        "torch.FutureStorage",
    ),
}


@pytest.mark.parametrize("case", NOT_READ)
def test_a_tensor_that_the_format_does_not_have_is_refused_by_name_or_left_out(tmp_path, case):
    value, dotted = NOT_READ[case]
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip(pickled(plain({"w": value, "step": 5})), {"0": SIX}))
    with pytest.raises(ConvertError) as caught:
        open_foreign(path)
    assert (caught.value.code, caught.value.names) == ("unknown_global", (dotted,))
    with open_foreign(path, unknown="drop") as foreign:
        assert foreign.tree == {"step": 5}
        assert [(one.path, one.name) for one in foreign.findings] == [(("w",), dotted)]


# The stream form

GOOD = pickled(in_stream(Tensor().opcodes()))
STREAMS: dict[str, tuple[bytes, str]] = {
    "another-magic": (torch_stream(GOOD, {"0": SIX}, magic=MAGIC + 1), "stream_malformed"),
    "another-version": (torch_stream(GOOD, {"0": SIX}, version=1002), "stream_malformed"),
    "no-keys": (torch_stream(GOOD, {"0": SIX}, keys=[]), "stream_malformed"),
    "keys-that-are-none": (torch_stream(GOOD, {"0": SIX}, keys=5), "stream_malformed"),
    "a-key-twice": (torch_stream(GOOD, {"0": SIX}, keys=["0", "0"]), "stream_malformed"),
    "a-key-too-many": (torch_stream(GOOD, {"0": SIX}, keys=["0", "1"]), "stream_malformed"),
    "another-key": (torch_stream(GOOD, {"0": SIX}, keys=["1"]), "stream_malformed"),
    "a-longer-storage": (torch_stream(GOOD, {"0": SIX}, numel={"0": 7}), "storage_mismatch"),
    "a-storage-below-zero": (torch_stream(GOOD, {"0": SIX}, numel={"0": -1}), "storage_mismatch"),
    "a-storage-cut-short": (torch_stream(GOOD, {"0": SIX})[:-1], "foreign_truncated"),
    "no-storage": (torch_stream(GOOD, {}, keys=["0"]), "foreign_truncated"),
    "bytes-behind": (torch_stream(GOOD, {"0": SIX}, after=b"x"), "stream_malformed"),
    "a-second-file-behind": (
        torch_stream(GOOD, {"0": SIX}, after=torch_stream(GOOD, {"0": SIX})),
        "stream_malformed",
    ),
    "a-zip-file-behind": (
        torch_stream(GOOD, {"0": SIX}, after=torch_zip(pickled(b"N"))),
        "stream_malformed",
    ),
    "a-view-beyond-its-storage": (
        torch_stream(pickled(Tensor(view=(("1", 4, 6),)).opcodes()), {"0": SIX}),
        "storage_out_of_bounds",
    ),
    "a-view-below-zero": (
        torch_stream(pickled(Tensor(view=(("1", -1, 6),)).opcodes()), {"0": SIX}),
        "pickle_malformed",
    ),
    "a-view-of-two": (
        torch_stream(pickled(Tensor(view=(("1", 1),)).opcodes()), {"0": SIX}),
        "pickle_malformed",
    ),
    "a-class-of-a-module": (
        torch_stream(pickled(plain(("module", name("os", "system"), "f", "s")) + b"Q"), {}),
        "unknown_global",
    ),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_that_lies_is_refused_with_its_code(tmp_path, refused, case):
    data, code = STREAMS[case]
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    if case == "another-magic":
        assert not is_torch_stream(MemoryBytes(data))
        code = "unsupported_kind"
    assert refused(lambda: open_foreign(path)) == code


def test_a_view_of_a_storage_is_read():
    """As torch wrote them before 0.4: a part of another storage, in elements."""
    tensor = Tensor(size=(2,), stride=(1,), view=(("1", 3, 2),)).opcodes()
    read = read_torch_stream(MemoryBytes(torch_stream(pickled(tensor), {"0": SIX})))
    assert type(read) is ForeignTensor
    assert bytes(read.read()) == SIX[12:20]


def test_every_truncation_of_a_stream_is_refused():
    data = torch_stream(GOOD, {"0": SIX})
    read_torch_stream(MemoryBytes(data))
    for end in range(len(data)):
        with pytest.raises(ConvertError):
            read_torch_stream(MemoryBytes(data[:end]))
