"""Names of numpy and ml_dtypes that a pickle may call, and the arrays and scalars they stand for.

A closed table; neither package is needed. Arrays of strings, objects, records and dates are not
read, nor are subclasses of arrays.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from dsdformat.boxes import whole
from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.pickles.keys import ValueFault
from dsdformat.convert.pickles.nodes import ABSENT, Global
from dsdformat.convert.pickles.resolving import Made, Maker, Unknown
from dsdformat.convert.tensor import ForeignTensor, Part, View, packed_strides
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.values import Scalar
from dsdformat.limits import INT63_MAX, NDIM_MAX

__all__ = ["NUMPY_NAMES", "NumpyDtype", "array_of", "parse_typestr", "typestr_of"]

# fmt: off
_TYPES = {
    "b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64",
    "c8": "complex64", "c16": "complex128", "i1": "int8", "i2": "int16", "i4": "int32",
    "i8": "int64", "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64",
}
# fmt: on
_TYPESTRS = {name: text for text, name in _TYPES.items()}
_ML_DTYPES = {
    name
    for name in DTYPES
    if name not in _TYPES.values() and not name.endswith("_x2") and name != "complex32"
}
_TYPESTR = re.compile(r"[<>|=]?([a-zA-Z][0-9]+)\Z")
_STATE_LENGTHS = (8, 9)


@dataclass(frozen=True, slots=True)
class NumpyDtype:
    """A dtype of numpy.

    Attributes:
        name: Logical name.
        big: Whether its values are big-endian.
    """

    name: str
    big: bool = False


def parse_typestr(text: str) -> NumpyDtype | None:
    """Return the dtype that a string such as `<f4` stands for, or None if it is not held."""
    match = _TYPESTR.match(text)
    name = _TYPES.get(match[1]) if match else None
    if name is None:
        return None
    return NumpyDtype(name, text.startswith(">") and DTYPES[name].itemsize > 1)


def typestr_of(dtype: str) -> str | None:
    """Return what numpy calls a dtype of its own; None for those of ml_dtypes."""
    return _TYPESTRS.get(dtype)


def array_of(dtype: NumpyDtype, shape: tuple[int, ...], data: Any, order: str) -> ForeignTensor:
    """Return an array over bytes in memory.

    Raises:
        ValueFault: the bytes are not as many as the shape needs.
    """
    itemsize = DTYPES[dtype.name].itemsize
    if len(shape) > NDIM_MAX or math.prod(shape) * itemsize > INT63_MAX:
        raise ValueFault("a shape that is too large", "storage_mismatch")
    if len(data) != math.prod(shape) * itemsize:
        raise ValueFault(f"{len(data)} bytes for {list(shape)} of {dtype.name}", "storage_mismatch")
    strides = packed_strides(shape)
    if order == "F":
        strides = packed_strides(shape[::-1])[::-1]
    view = View(MemoryBytes(data, "an array"), 0, strides, dtype.big)
    return ForeignTensor(
        dtype.name, shape, [Part(whole(shape), lambda: view)], {"flavour": "numpy"}
    )


def _dtype(made: Made) -> Any:
    """`numpy.dtype(name, False, True)` and its state: version, byte order, and fields."""
    state, made.state = made.state, ABSENT
    args = made.bare()
    if len(args) != 3 or any(type(arg) not in (bool, int) for arg in args[1:]):
        raise ValueFault("arguments that are no dtype's")
    found = _named(args[0])
    if found is None:
        return Unknown(made.name, f"the numpy dtype {_shown(args[0])}", made)
    if state is ABSENT:
        return found
    if type(state) is not tuple or len(state) not in _STATE_LENGTHS:
        raise ValueFault("a state that is no dtype's")
    order, fields = state[1], state[2:5]
    if order not in ("<", ">", "|", "=") or any(field is not None for field in fields):
        raise ValueFault("a state that is no plain dtype's")
    return NumpyDtype(found.name, order == ">" and DTYPES[found.name].itemsize > 1)


def _named(name: Any) -> NumpyDtype | None:
    if type(name) is str:
        return parse_typestr(name)
    if type(name) is Global and name.module == "ml_dtypes" and name.name in _ML_DTYPES:
        return NumpyDtype(name.name)
    return None


def _shown(name: Any) -> str:
    text = name.dotted if type(name) is Global else str(name)
    return text[:40] if text.isprintable() else ascii(text)[:40]


def _empty(made: Made) -> Any:
    """`_reconstruct(ndarray, (0,), b"b")`, whose state is the array."""
    state, made.state = made.state, ABSENT
    args = made.bare()
    kind = args[0] if len(args) == 3 else None
    if type(kind) is not Global or args[1] != (0,) or args[2] != b"b":
        raise ValueFault("arguments that are no array's")
    if kind != Global("numpy", "ndarray"):
        return Unknown(kind.dotted, "an array of a class of its own", made)
    if type(state) is not tuple or len(state) != 5:
        raise ValueFault("a state that is no array's")
    _, shape, dtype, fortran, data = state
    if type(dtype) is Unknown:
        return Unknown(made.name, f"an array: {dtype.reason}", made)
    if type(data) not in (bytes, bytearray) or type(fortran) not in (bool, int):
        raise ValueFault("a state that is no array's")
    return _checked(dtype, shape, data, "F" if fortran else "C")


def _frombuffer(made: Made) -> Any:
    """An array as protocol 5 writes it, with its bytes in the pickle."""
    args = made.bare()
    if len(args) != 4 or args[3] not in ("C", "F"):
        raise ValueFault("arguments that are no array's")
    data, dtype, shape, order = args[:4]
    if type(dtype) is Unknown:
        return Unknown(made.name, f"an array: {dtype.reason}", made)
    if type(data) is Unknown and data.made is not None and data.made.args:
        data = data.made.args[0]  # a bytearray of an older protocol
    if type(data) not in (bytes, bytearray):
        raise ValueFault("arguments that are no array's")
    return _checked(dtype, shape, data, order)


def _checked(dtype: Any, shape: Any, data: Any, order: str) -> ForeignTensor:
    whole_numbers = type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape)
    if type(dtype) is not NumpyDtype or not whole_numbers:
        raise ValueFault("a shape or dtype that is none")
    return array_of(dtype, shape, data, order)


def _scalar(made: Made) -> Any:
    args = made.bare()
    if len(args) != 2:
        raise ValueFault("arguments that are no scalar's")
    dtype, data = args
    if type(dtype) is Unknown:
        return Unknown(made.name, f"a scalar: {dtype.reason}", made)
    if type(dtype) is not NumpyDtype or type(data) is not bytes:
        raise ValueFault("arguments that are no scalar's")
    row = DTYPES[dtype.name]
    if len(data) != row.itemsize:
        raise ValueFault(f"{len(data)} bytes for a {dtype.name}")
    if dtype.big:
        words = (data[at : at + row.word] for at in range(0, len(data), row.word))
        data = b"".join(word[::-1] for word in words)
    return Scalar(dtype.name, data)


NUMPY_NAMES: dict[tuple[str, str], Maker] = {("numpy", "dtype"): _dtype}
for _core in ("numpy.core", "numpy._core"):
    NUMPY_NAMES[f"{_core}.multiarray", "_reconstruct"] = _empty
    NUMPY_NAMES[f"{_core}.multiarray", "scalar"] = _scalar
    NUMPY_NAMES[f"{_core}.numeric", "_frombuffer"] = _frombuffer
