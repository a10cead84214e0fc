"""Storages of a torch file: what its persistent ids name, and which dtypes they have.

Several tensors may lie in one storage. Its dtype here is a name of torch without `torch.`; the
names of quantized dtypes are known too, so that what is refused is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsdformat.convert.files import Bytes
from dsdformat.convert.pickles.keys import ValueFault
from dsdformat.convert.pickles.nodes import Global
from dsdformat.convert.pickles.resolving import Unknown, renamed
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import INT63_MAX

__all__ = [
    "Storage",
    "StorageId",
    "itemsize_of",
    "parse_storage_id",
    "storage_type_of",
    "torch_dtype_name",
]

# fmt: off
_TYPES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "QInt8Storage": "qint8", "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
_ODD = {
    "qint8": 1, "qint32": 4, "quint8": 1, "quint4x2": 1, "quint2x4": 1,
    "bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
}
_ALIASES = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32",
    "short": "int16", "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32",
}
# fmt: on
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items() if name != "UntypedStorage"}
_MODULES = ("torch", "torch.storage", "torch.cuda")
_ONLY_NUMPY = {
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
    *("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
}


def torch_dtype_name(name: str) -> str | None:
    """Return the name of a dtype of torch, or None if torch has none of this name."""
    name = _ALIASES.get(name, name)
    return name if name in _ODD or (name in DTYPES and name not in _ONLY_NUMPY) else None


def storage_type_of(dtype: str) -> str | None:
    """Return the class of storages of a dtype; None for newer ones, whose storages are of bytes."""
    return _TYPE_NAMES.get(dtype)


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element of a dtype of torch."""
    return _ODD.get(dtype) or DTYPES[dtype].itemsize


@dataclass(frozen=True, slots=True)
class StorageId:
    """What a persistent id says.

    Attributes:
        key: Name of the storage.
        dtype: Of its elements; uint8 for one without.
        numel: How many there are.
        untyped: Whether it has no dtype of its own.
        view: For a part of another one: its key, the first element and the number of elements.
    """

    key: str
    dtype: str
    numel: int
    untyped: bool
    view: tuple[str, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.numel * itemsize_of(self.dtype)


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage, and where its bytes lie.

    Attributes:
        id: What its persistent id says.
        source: Its bytes.
        big: Whether they are big-endian.
    """

    id: StorageId
    source: Bytes
    big: bool = False


def parse_storage_id(pid: Any) -> StorageId | Unknown | Global:
    """Read a persistent id as `torch.save` writes it.

    Returns:
        The id of a storage; the class of a module, which the old form keeps with its source; or
        an `Unknown` for a storage of a type that is not known.

    Raises:
        ValueFault: it is no such id.
    """
    if type(pid) is not tuple or len(pid) < 4:
        raise ValueFault("a persistent id that is not one of torch", "pickle_malformed")
    if pid[0] == "module" and type(pid[1]) is Global:
        return pid[1]
    if pid[0] != "storage" or len(pid) not in (5, 6):
        raise ValueFault("a persistent id that is not one of torch", "pickle_malformed")
    _, kind, key, location, numel = pid[:5]
    if type(kind) is not Global or type(key) is not str or type(location) is not str:
        raise ValueFault("a persistent id that is not one of torch", "pickle_malformed")
    if type(numel) is not int or not 0 <= numel <= INT63_MAX // 16:
        raise ValueFault("a storage with a length that is none", "storage_mismatch")
    kind = renamed(kind)
    dtype = _TYPES.get(kind.name) if kind.module in _MODULES else None
    if dtype is None:
        return Unknown(kind.dotted, "a storage")
    view = _view(pid[5]) if len(pid) == 6 else None
    return StorageId(key, dtype, numel, kind.name == "UntypedStorage", view)


def _view(view: Any) -> tuple[str, int, int] | None:
    if view is None:
        return None
    if type(view) is not tuple or len(view) != 3:
        raise ValueFault("a view of a storage that is none", "pickle_malformed")
    key, offset, numel = view
    whole = all(type(one) is int and 0 <= one <= INT63_MAX // 16 for one in (offset, numel))
    if type(key) is not str or not whole:
        raise ValueFault("a view of a storage that is none", "pickle_malformed")
    return key, offset, numel


# Gives the storage of an id, or raises what is wrong with it.
FindStorage = Callable[[StorageId], Storage]
