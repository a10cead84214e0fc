"""Which numpy dtype stands for which logical dtype: total both ways, and exact."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from sameness import array_bytes, assert_same

import dsdformat
import dsdformat.numpy
from dsdformat.errors import UnsupportedValueError
from dsdformat.format.dtypes import DTYPES
from dsdformat.numpy import _DTYPES

# Written out, so that a change of the table is seen here.
NUMPY = {
    "bool": "?", "float16": "f2", "float32": "f4", "float64": "f8",
    "complex64": "c8", "complex128": "c16",
    "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8",
    "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8",
}  # fmt: skip
ML_DTYPES = {
    "bfloat16", "complex32", "int1", "int2", "int4", "uint1", "uint2", "uint4",
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn",
}  # fmt: skip
STAND_INS = {
    "float4_e2m1fn_x2": "u1",
    "int3": "u1", "int5": "u1", "int6": "u1", "int7": "u1",
    "uint3": "u1", "uint5": "u1", "uint6": "u1", "uint7": "u1",
}  # fmt: skip
SWAPPABLE = [name for name in NUMPY if DTYPES[name].itemsize > 1]


def expected_dtype(name: str) -> np.dtype:
    if name in NUMPY:
        return np.dtype(NUMPY[name])
    if name in STAND_INS:
        return np.dtype([(name, STAND_INS[name])])
    # Older releases of ml_dtypes lack some.
    stand_in = np.dtype([(name, f"u{DTYPES[name].itemsize}")])
    return np.dtype(getattr(ml_dtypes, name, stand_in))


def every_bit_pattern(name: str) -> np.ndarray:
    """All elements of a dtype of one or two bytes, many of a wider one."""
    itemsize = DTYPES[name].itemsize
    if itemsize <= 2:
        data = np.arange(256**itemsize, dtype=f"<u{itemsize}").view(np.uint8)
    else:
        data = np.random.default_rng(1).integers(0, 256, 4096 * itemsize, dtype=np.uint8)
    return data.view(_DTYPES[name])


def test_the_table_names_each_dtype_of_the_format_once():
    assert set(NUMPY) | ML_DTYPES | set(STAND_INS) == set(DTYPES)
    assert len(NUMPY) + len(ML_DTYPES) + len(STAND_INS) == len(DTYPES)


@pytest.mark.parametrize("name", DTYPES)
def test_a_logical_dtype_has_one_numpy_dtype_and_back(name):
    assert _DTYPES[name] == expected_dtype(name)
    assert _DTYPES[name].itemsize == DTYPES[name].itemsize
    assert [other for other, dtype in _DTYPES.items() if dtype == _DTYPES[name]] == [name]


def test_each_dtype_of_ml_dtypes_can_be_stored():
    kinds = [
        kind
        for kind in map(ml_dtypes.__dict__.get, dir(ml_dtypes))
        if isinstance(kind, type) and issubclass(kind, np.generic)
    ]
    assert len(kinds) >= 10
    left_out = {np.dtype(kind).name for kind in kinds} - {dtype.name for dtype in _DTYPES.values()}
    assert left_out <= {"bcomplex32"}  # the registry has no pair of bfloat16


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes+zstd"])
@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_pattern_of_a_dtype_comes_back(round_trip, name, codec):
    array = every_bit_pattern(name)
    loaded = round_trip({"w": array}, codec=codec)["w"]
    assert loaded.dtype == _DTYPES[name]
    assert array_bytes(loaded) == array_bytes(array)


@pytest.mark.parametrize("name", DTYPES)
def test_the_manifest_names_the_logical_dtype(tmp_path, name):
    path = tmp_path / "checkpoint"
    dsdformat.numpy.save(path, {"w": every_bit_pattern(name)})
    with dsdformat.open(path) as checkpoint:
        assert checkpoint.tensor("w").dtype == name
        assert bytes(checkpoint.read("w")) == array_bytes(every_bit_pattern(name))


@pytest.mark.parametrize("name", DTYPES)
def test_a_scalar_of_a_dtype_comes_back_as_that_scalar(round_trip, name):
    scalar = every_bit_pattern(name)[1]
    state = {"value": scalar, "list": [scalar, every_bit_pattern(name)[-1]]}
    assert_same(state, round_trip(state))


@pytest.mark.parametrize("name", DTYPES)
def test_a_numpy_dtype_is_a_value(round_trip, name):
    state = {"dtype": _DTYPES[name], "dtypes": (_DTYPES[name], _DTYPES["float32"])}
    assert_same(state, round_trip(state))


@pytest.mark.parametrize("name", SWAPPABLE)
def test_a_big_endian_array_is_stored_little_endian(round_trip, tmp_path, name):
    array = every_bit_pattern(name)
    swapped = array.byteswap().view(array.dtype.newbyteorder(">"))
    assert_same({"w": array}, round_trip({"w": swapped}))
    payload = (tmp_path / "checkpoint" / "model.safetensors").read_bytes()
    assert payload.endswith(array_bytes(array))


@pytest.mark.parametrize("name", SWAPPABLE)
def test_a_big_endian_scalar_is_stored_little_endian(round_trip, name):
    array = every_bit_pattern(name)[:1]
    swapped = array.byteswap().view(array.dtype.newbyteorder(">"))
    loaded = round_trip({"value": swapped[0], "other": np.asarray(swapped[0])})
    assert loaded["value"].tobytes() == array.tobytes()
    assert loaded["other"].tobytes() == array.tobytes()


def test_a_big_endian_dtype_as_a_value_is_not_taken_for_another(round_trip):
    dtype = np.dtype(">f4")
    try:
        loaded = round_trip({"dtype": dtype})["dtype"]
    except UnsupportedValueError:
        return
    assert loaded == dtype


def test_a_complex_number_of_half_precision_is_read_by_its_parts(round_trip):
    halves = np.array([1.5, -2.0, 0.0, np.inf], np.float16)
    loaded = round_trip({"w": halves.view(_DTYPES["complex32"])})["w"]
    assert loaded.shape == (2,)
    assert loaded.view(np.float16).tolist() == halves.tolist()
