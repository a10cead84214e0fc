"""What it means that a loaded state is the saved one, and no less."""

from __future__ import annotations

import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np

__all__ = ["MAPPINGS", "array_bytes", "assert_same", "identity", "native"]

MAPPINGS = (dict, OrderedDict, Counter, defaultdict)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that an array has after loading: arrays are little-endian at rest."""
    return dtype if dtype.names else dtype.newbyteorder("=")


def array_bytes(array: Any) -> bytes:
    """The bytes of an array's elements in row-major order, in native byte order."""
    packed = np.ascontiguousarray(array).astype(native(array.dtype), copy=False)
    return packed.reshape(-1).view(np.uint8).tobytes() if array.size else b""


def assert_same(saved: Any, loaded: Any) -> None:
    """Compare types, order and bits; say where the first difference is.

    The order of a plain dict and of a counter is not kept, nor are the strides of arrays, their
    byte order, and whether they were mapped.
    """
    difference = next(_differences(saved, loaded, "$"), None)
    assert difference is None, difference


def _differences(a: Any, b: Any, at: str) -> Iterator[str]:
    if isinstance(a, np.ndarray):
        yield from _array_differences(a, b, at)
    elif type(a) is not type(b):
        yield f"{at}: {type(a).__qualname__} became {type(b).__qualname__}"
    elif type(a) in MAPPINGS:
        yield from _mapping_differences(a, b, at)
    elif isinstance(a, (list, tuple, deque)):
        if len(a) != len(b):
            yield f"{at}: {len(a)} items became {len(b)}"
        if isinstance(a, deque) and a.maxlen != b.maxlen:
            yield f"{at}: maxlen {a.maxlen} became {b.maxlen}"
        for index, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from _differences(one, other, f"{at}[{index}]")
    elif isinstance(a, (set, frozenset)):
        yield from _key_differences(a, b, at)
    elif identity(a) != identity(b):
        yield f"{at}: {a!r} became {b!r}"


def identity(value: Any) -> Any:
    """Something that is equal only for values that cannot be told apart."""
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    if type(value) is float:
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if type(value) is complex:
        return identity(value.real), identity(value.imag)
    if type(value) is datetime:
        # Aware datetimes are equal if they are the same instant.
        return value.replace(tzinfo=None), value.fold, value.utcoffset()
    if isinstance(value, pathlib.PurePath):
        return value.drive, value.root, value.parts, str(value)
    return value


def _array_differences(a: Any, b: Any, at: str) -> Iterator[str]:
    if type(b) is not np.ndarray:
        yield f"{at}: an array became {type(b).__qualname__}"
    elif native(a.dtype) != b.dtype:
        yield f"{at}: dtype {a.dtype} became {b.dtype}"
    elif a.shape != b.shape:
        yield f"{at}: shape {a.shape} became {b.shape}"
    elif array_bytes(a) != array_bytes(b):
        yield f"{at}: other bytes"


def _mapping_differences(a: Any, b: Any, at: str) -> Iterator[str]:
    yield from _key_differences(a, b, at)
    if type(a) is OrderedDict and list(a) != list(b):
        yield f"{at}: other order"
    if type(a) is defaultdict and b.default_factory is not None:
        yield f"{at}: a factory came out of a file"
    for key in a:
        if key in b:
            yield from _differences(a[key], b[key], f"{at}[{key!r}]")


def _key_differences(a: Any, b: Any, at: str) -> Iterator[str]:
    # True, 1 and 1.0 are one key, so equality is not enough.
    found = {key: key for key in b}
    if len(a) != len(b):
        yield f"{at}: {len(a)} keys became {len(b)}"
    for key in a:
        if key not in found:
            yield f"{at}: the key {key!r} is gone"
        else:
            yield from _differences(key, found[key], f"{at}, key {key!r}")
