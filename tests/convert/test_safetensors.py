"""safetensors files: read exactly, for every type; headers that lie are refused (B128, B130)."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dsdformat import ConvertError
from dsdformat.convert import open_foreign
from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.safetensors_header import read_header

TYPES = {
    "bool": torch.bool,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
for newer in ("float8_e8m0fnu", "float4_e2m1fn_x2"):  # than the oldest torch
    if hasattr(torch, newer):
        TYPES[newer] = getattr(torch, newer)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_read_bit_for_bit(tmp_path, name):
    data = torch.arange(48, dtype=torch.uint8)
    data = data % 2 if name == "bool" else data
    tensor = data.view(TYPES[name]).reshape(3, -1)
    save_file({"w": tensor}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with open_foreign(tmp_path / "x.safetensors") as foreign:
        found = foreign.tensor("w")
        assert (found.dtype, found.shape) == (name, tuple(tensor.shape))
        assert bytes(found.read()) == data.numpy().tobytes()
        assert foreign.metadata == {"format": "pt"}


def framed(header: Any, data: bytes = bytes(8), nbytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if nbytes is None else nbytes) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "foreign_truncated"),
    "seven-bytes": (bytes(7), "foreign_truncated"),
    "header-of-2-to-the-63": (framed({}, nbytes=2**63 - 1), "foreign_too_large"),
    "header-of-2-to-the-64": (framed({}, nbytes=2**64 - 1), "foreign_too_large"),
    "header-of-100-mib": (framed({}, nbytes=100 << 20), "foreign_truncated"),
    "header-of-no-bytes": (framed(b""), "header_malformed"),
    "header-with-blanks-in-front": (framed(b" {}", b""), "header_malformed"),
    "header-that-is-a-list": (framed(b"[]"), "header_malformed"),
    "header-that-is-not-json": (framed(b"{x}"), "header_malformed"),
    "header-with-a-lone-surrogate": (
        framed(rb'{"__metadata__":{"a":"\ud800"}}'),
        "header_malformed",
    ),
    "header-that-is-not-utf-8": (framed(b'{"\xff": 1}'), "header_malformed"),
    "header-of-deep-lists": (
        framed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "header_malformed",
    ),
    "header-with-nan": (framed(b'{"a": NaN}'), "header_malformed"),
    "header-with-a-huge-number": (framed(b'{"a": ' + b"9" * 10_000 + b"}"), "header_malformed"),
    "a-name-twice": (
        framed(b'{"a": 1, "a": 1}'),
        "header_malformed",
    ),
    "a-field-twice": (
        framed(b'{"a": {"dtype": "F32", "dtype": "F32"}}'),
        "header_malformed",
    ),
    "a-tensor-twice": (
        framed(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)),
        "header_malformed",
    ),
    "metadata-twice": (
        framed(b'{"__metadata__":{},"__metadata__":{},"a":%s}' % json.dumps(entry()).encode()),
        "header_malformed",
    ),
    "metadata-of-numbers": (framed({"__metadata__": {"a": 1}}), "header_malformed"),
    "metadata-that-are-none": (framed({"__metadata__": 5}), "header_malformed"),
    "an-entry-that-is-none": (framed({"a": 5}), "header_malformed"),
    "an-entry-with-more": (framed({"a": {**entry(), "x": 1}}), "header_malformed"),
    "no-offsets": (framed({"a": entry(offsets=[])}), "header_malformed"),
    "one-offset": (framed({"a": entry(offsets=[0])}), "header_malformed"),
    "offsets-that-fall": (framed({"a": entry(offsets=[8, 0])}), "header_malformed"),
    "offsets-below-zero": (framed({"a": entry(offsets=[-8, 0])}), "header_malformed"),
    "offsets-that-are-floats": (framed({"a": entry(offsets=[0.0, 8.0])}), "header_malformed"),
    "offsets-that-are-strings": (framed({"a": entry(offsets=["0", "8"])}), "header_malformed"),
    "offsets-that-are-flags": (framed({"a": entry(offsets=[False, 8])}), "header_malformed"),
    "offsets-beyond-the-file": (
        framed({"a": entry(shape=(2**40,), offsets=(0, 2**42))}),
        "foreign_truncated",
    ),
    "a-hole": (framed({"a": entry(shape=(1,), offsets=(4, 8))}), "header_malformed"),
    "an-overlap": (
        framed({"a": entry(), "b": entry(shape=(1,), offsets=(4, 8))}),
        "header_malformed",
    ),
    "bytes-behind": (framed({"a": entry()}, bytes(9)), "header_malformed"),
    "a-shape-that-is-larger": (framed({"a": entry(shape=(3,))}), "header_malformed"),
    "a-shape-below-zero": (framed({"a": entry(shape=(-2,))}), "header_malformed"),
    "a-shape-of-2-to-the-70": (framed({"a": entry(shape=(2**70,))}), "header_malformed"),
    "a-shape-of-100-dims": (framed({"a": entry(shape=(1,) * 100)}), "header_malformed"),
    "a-dtype-that-is-none": (framed({"a": entry(dtype=5)}), "header_malformed"),
    "a-wider-dtype": (framed({"a": entry(dtype="F64")}), "header_malformed"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_lies_is_refused_with_its_code(refused, case):
    data, code = BAD[case]
    assert refused(lambda: read_header(MemoryBytes(data))) == code


@pytest.mark.parametrize("second", [(0, 8), (8, 16), (0, 16)], ids=repr)
def test_a_name_that_is_there_twice_is_told_whatever_its_range(second):
    """B130: what another parser would take, the first or the last, is nothing that this one has."""
    other = entry(shape=((second[1] - second[0]) // 4,), offsets=second)
    rows = [("a", entry()), ("b", entry("U8", (0,), (8, 8))), ("a", other)]
    header = ",".join(f'"{name}":{json.dumps(one)}' for name, one in rows)
    data = framed(f"{{{header}}}".encode(), bytes(second[1]))
    with pytest.raises(ConvertError, match="the key 'a' twice") as caught:
        read_header(MemoryBytes(data))
    assert caught.value.code == "header_malformed"


FIELDS = {
    "header-of-2-to-the-63": f"a header of {2**63 - 1} bytes",
    "header-of-2-to-the-64": f"a header of {2**64 - 1} bytes",
    "header-of-100-mib": "its JSON",
    "no-offsets": r"a has the data_offsets \[\]",
    "one-offset": r"a has the data_offsets \[0\]",
    "offsets-that-fall": r"a has the data_offsets \[8, 0\]",
    "offsets-below-zero": r"a has the data_offsets \[-8, 0\]",
    "offsets-that-are-floats": r"a has the data_offsets \[0.0, 8.0\]",
    "offsets-that-are-strings": r"a has the data_offsets \['0', '8'\]",
    "offsets-beyond-the-file": "ends before byte",
    "a-shape-that-is-larger": r"a has 8 bytes for \[3\] of F32",
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_number_that_lies_is_told_by_its_field_and_takes_no_memory(refused, case):
    """B128."""
    data, code = BAD[case]
    assert refused(lambda: read_header(MemoryBytes(data)), peak=1_000_000) == code
    with pytest.raises(ConvertError, match=FIELDS[case]):
        read_header(MemoryBytes(data))


def test_a_type_that_is_not_known_is_told_by_name(tmp_path, refused):
    path = tmp_path / "x.safetensors"
    path.write_bytes(framed({"a": entry(dtype="F6_E2M3"), "b": entry("U8", (0,), (8, 8))}))
    assert refused(lambda: open_foreign(path)) == "unknown_global"
    with open_foreign(path, unknown="drop") as foreign:
        assert list(foreign.tree) == ["b"]
