"""Every raw data file is a safetensors file, whatever the dtype, the shape and the name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize, safe_open

import dsdformat
import dsdformat.numpy
from dsdformat.format.dtypes import DTYPES
from dsdformat.numpy import _DTYPES

# As section 10 and the registry of dtypes say: type and shape in a header, for a box of [3, 4].
PAYLOAD = {
    **{name: ("U8", [3, 4]) for name in DTYPES},
    "bool": ("BOOL", [3, 4]),
    "float16": ("F16", [3, 4]),
    "bfloat16": ("BF16", [3, 4]),
    "float32": ("F32", [3, 4]),
    "float64": ("F64", [3, 4]),
    "complex32": ("F16", [3, 4, 2]),
    "complex64": ("C64", [3, 4]),
    "complex128": ("F64", [3, 4, 2]),
    **{f"int{n}": (f"I{n}", [3, 4]) for n in (8, 16, 32, 64)},
    **{f"uint{n}": (f"U{n}", [3, 4]) for n in (8, 16, 32, 64)},
    "float8_e4m3fn": ("F8_E4M3", [3, 4]),
    "float8_e5m2": ("F8_E5M2", [3, 4]),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", [3, 4]),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", [3, 4]),
    "float8_e8m0fnu": ("F8_E8M0", [3, 4]),
    "float4_e2m1fn_x2": ("F4", [3, 8]),
}
PAIRS = ("complex32", "complex128")  # of real numbers in the file
# Those that the safetensors library of Python reads without torch, and what it makes of them.
NUMPY_READS = {
    "bool", "float16", "float32", "float64", "complex64", "complex128", "complex32",
    *(f"{kind}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)),
}  # fmt: skip

NAMES = {
    "empty": "",
    "dots": "layers.0.weight",
    "a slash": "a/b",
    "a leading slash": "/a",
    "two slashes": "//",
    "metadata": "__metadata__",
    "nearly metadata": "__metadata__x",
    "percent": "50%",
    "an escape": "%2F",
    "an at": "a@b",
    "a suffix": "w@[0:1]",
    "a codec": "w@zstd",
    "NUL": "\0",
    "all control characters": "".join(map(chr, range(32))),
    "delete": "\x7f",
    "quotes": "a\"b'c",
    "backslashes": "a\\b\\",
    "a line separator": "a\u2028b",
    "beyond the basic plane": "😀",
    "accents, decomposed": "e\u0301",
    "accents, composed": "\u00e9",
    "not a character": "\uffff",
    "right to left": "\u202eabc",
    "spaces": "  ",
    "a path upwards": "../../etc/passwd",
    "70 kB": "x" * 70_000,
}


def array_of(name: str, shape: tuple[int, ...] = (3, 4)) -> Any:
    count = int(np.prod(shape)) * DTYPES[name].itemsize
    data = np.arange(count, dtype=np.uint8) % (2 if name == "bool" else 251)
    return data.view(_DTYPES[name]).reshape(shape)


def bits(array: Any) -> bytes:
    return array.reshape(-1).view(np.uint8).tobytes() if array.size else b""


def header_of(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", raw[:8])
    assert (8 + nbytes) % 4096 == 0
    return json.loads(raw[8 : 8 + nbytes])


def save(tmp_path: Path, state: Any, **options: Any) -> Path:
    path = tmp_path / "checkpoint"
    dsdformat.numpy.save(path, state, **options)
    assert dsdformat.verify(path).problems == ()
    return path


@pytest.mark.parametrize("name", DTYPES)
def test_safetensors_reads_a_file_of_each_dtype(tmp_path, name):
    arrays = {"w": array_of(name), "none": array_of(name, (0, 4)), "one": array_of(name, (1,))}
    path = save(tmp_path, arrays) / "model.safetensors"
    kind, shape = PAYLOAD[name]
    assert header_of(path)["w"]["dtype"] == kind
    assert header_of(path)["w"]["shape"] == shape
    found = dict(deserialize(path.read_bytes()))
    assert set(found) == set(arrays)
    for key, array in arrays.items():
        assert bytes(found[key]["data"]) == bits(array)
    assert found["w"]["shape"] == shape
    assert found["w"]["dtype"] == kind


@pytest.mark.parametrize("name", sorted(NUMPY_READS))
def test_numpy_users_of_safetensors_get_the_numbers(tmp_path, name):
    array = array_of(name)
    path = save(tmp_path, {"w": array}) / "model.safetensors"
    with safe_open(path, "np") as opened:
        found = opened.get_tensor("w")
    assert bits(found) == bits(array)
    if name not in PAIRS:
        assert found.dtype == array.dtype


@pytest.mark.parametrize("name", DTYPES)
def test_torch_users_of_safetensors_get_the_numbers(tmp_path, name):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    from safetensors.torch import load_file

    array = array_of(name)
    path = save(tmp_path, {"w": array}) / "model.safetensors"
    found = load_file(path)["w"]
    assert found.contiguous().view(torch.uint8).numpy().tobytes() == bits(array)
    if PAYLOAD[name][0] != "U8" and name not in PAIRS:
        assert found.dtype == getattr(torch, name)


def test_a_file_holds_all_dtypes_and_shapes_at_once(tmp_path):
    shapes = [(), (0,), (1,), (3, 0, 2), (5,), (3, 4), (2, 1, 3, 1), (257,), (64, 64), (33, 97)]
    arrays = {
        f"{name}.{index}": array_of(name, shape)
        for name in DTYPES
        for index, shape in enumerate(shapes)
    }
    path = save(tmp_path, arrays) / "model.safetensors"
    found = dict(deserialize(path.read_bytes()))
    assert {key: bytes(row["data"]) for key, row in found.items()} == {
        key: bits(array) for key, array in arrays.items()
    }


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_safetensors_reads_a_file_with_an_odd_name(tmp_path, name):
    array = array_of("float32")
    path = save(tmp_path, {name: array})
    with safe_open(path / "model.safetensors", "np") as opened:
        (key,) = opened.keys()
        assert bits(opened.get_tensor(key)) == bits(array)
    escaped = name.replace("%", "%25").replace("@", "%40")
    escaped = "%2F" + escaped[1:] if escaped.startswith("/") else escaped
    assert key == ("%5F_metadata__" if name == "__metadata__" else escaped)
    assert dsdformat.numpy.load(path)[name].tobytes() == array.tobytes()


def test_odd_names_in_one_file_keep_apart(tmp_path):
    arrays = {name: np.full(3, index) for index, name in enumerate(NAMES.values())}
    path = save(tmp_path, arrays)
    with safe_open(path / "model.safetensors", "np") as opened:
        keys = opened.keys()
        assert sorted(opened.get_tensor(key)[0] for key in keys) == list(range(len(arrays)))
    loaded = dsdformat.numpy.load(path)
    assert {name: array[0] for name, array in loaded.items()} == {
        name: array[0] for name, array in arrays.items()
    }


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_section_of_an_odd_name_has_a_file_of_a_plain_one(tmp_path, name):
    array = array_of("float32")
    path = save(tmp_path, {name: {"w": array, name: array[:1]}, "model": {"w": array[:2]}})
    labels = sorted(child.name for child in path.glob("*.safetensors"))
    assert len(labels) == 2
    assert all(label.isascii() and "/" not in label and len(label) <= 200 for label in labels)
    for label in labels:
        with safe_open(path / label, "np") as opened:
            assert "w" in set(opened.keys())
    loaded = dsdformat.numpy.load(path)
    assert loaded[name][name].tobytes() == array[:1].tobytes()


def test_sections_whose_names_differ_in_case_or_escape_alike_have_files_of_their_own(tmp_path):
    names = ["Model", "model", "MODEL", "a b", "a/b", "a_b", "a_b-2", "", ".", "-", "_."]
    state = {name: {"w": np.full(2, index)} for index, name in enumerate(names)}
    path = save(tmp_path, state)
    labels = [child.name.lower() for child in path.glob("*.safetensors")]
    assert len(set(labels)) == len(labels) == len(names)
    loaded = dsdformat.numpy.load(path)
    assert [int(loaded[name]["w"][0]) for name in names] == list(range(len(names)))


def test_a_section_that_is_called_like_a_part_of_another_has_a_file_of_its_own(
    tmp_path, monkeypatch
):
    from dsdformat import part_writer
    from dsdformat.file_plans import plan_files

    monkeypatch.setattr(
        part_writer, "plan_files", lambda *args, **kw: plan_files(*args, **kw, chunks_max=1)
    )
    state = {
        "model": {"a": np.zeros(1), "b": np.ones(1)},
        "model-00001-of-00002": {"c": np.full(1, 2.0)},
    }
    loaded = dsdformat.numpy.load(save(tmp_path, state))
    assert loaded["model-00001-of-00002"]["c"][0] == 2


def test_metadata_is_what_the_writer_was_given(tmp_path):
    path = tmp_path / "checkpoint"
    metadata = {"format": "np", "a": "\u00e9\n", "": "empty"}
    source = dsdformat.TensorSource.of("float32", (2,), bytes(8))
    with dsdformat.create(path, metadata=metadata) as made:
        made.add({"w": source})
    with safe_open(path / "model.safetensors", "np") as opened:
        assert opened.metadata() == metadata
    with dsdformat.create(tmp_path / "none", metadata={}) as made:
        made.add({"w": source})
    assert list(header_of(tmp_path / "none" / "model.safetensors")) == ["w"]


def test_keys_of_parts_of_a_tensor_name_their_boxes(tmp_path):
    array = array_of("float32", (4, 6))
    chunks = [
        (dsdformat.Box((0, 0), (4, 2)), bits(array[:, :2].copy())),
        (dsdformat.Box((0, 2), (4, 4)), bits(array[:, 2:].copy())),
    ]
    source = dsdformat.TensorSource("float32", (4, 6), chunks)
    with dsdformat.create(tmp_path / "checkpoint") as made:
        made.add({"model": {"w": source}, "opt": {"state": {3: [source]}}})
    with safe_open(tmp_path / "checkpoint" / "model.safetensors", "np") as opened:
        assert sorted(opened.keys()) == ["w@[0:4,0:2]", "w@[0:4,2:6]"]
        assert bits(opened.get_tensor("w@[0:4,2:6]")) == chunks[1][1]
    assert not (tmp_path / "checkpoint" / "opt.safetensors").exists(), "a tied tensor, stored twice"
