"""Names, dtypes and shapes of a model, from a safetensors file, its header, or a JSON of that form.

Of a safetensors file the header alone is read, and the data need not be there.
"""

from __future__ import annotations

import os
from typing import Any

from dsdformat.convert.faults import fault
from dsdformat.convert.files import Folder
from dsdformat.convert.safetensors_header import KINDS, parse_json
from dsdformat.errors import printable, shorten
from dsdformat.folders import PathLike
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import INT63_MAX, JSON_NBYTES_MAX, NDIM_MAX

__all__ = ["read_model_meta"]

_METADATA = "__metadata__"


def read_model_meta(path: PathLike) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return logical dtype and shape of each tensor, by its name.

    Raises:
        ConvertError: `header_malformed` or `unknown_kind`.
        FormatError: `missing_file` or `not_regular_file`.
        StorageError: the operating system reported an error.

    Memory: the JSON, several times.
    """
    folder_name, name = os.path.split(os.path.abspath(path))
    folder = Folder(folder_name)
    try:
        source = folder.file(name)
        head = memoryview(bytearray(9))
        count = source.read_into(0, head)
        nbytes = int.from_bytes(head[:8], "little")
        framed = count == 9 and head[8] == ord("{") and nbytes + 8 <= source.nbytes
        begin, length = (8, nbytes) if framed else (0, source.nbytes)
        if length > JSON_NBYTES_MAX:
            raise fault("unknown_kind", source.name, f"is no JSON: {length} bytes")
        rows = parse_json(source, begin, length)
        return {key: _form(source.name, key, row) for key, row in rows.items() if key != _METADATA}
    finally:
        folder.close()


def _form(where: str, name: str, row: Any) -> tuple[str, tuple[int, ...]]:
    dtype, shape = (row.get("dtype"), row.get("shape")) if type(row) is dict else (None, None)
    if type(dtype) is str:
        dtype = KINDS.get(dtype, dtype)
    if type(dtype) is not str or dtype not in DTYPES:
        message = f"{printable(name)} has the dtype {shorten(dtype)}, which is not known"
        raise fault("header_malformed", where, message)
    sizes: list[Any] = shape if type(shape) is list and len(shape) <= NDIM_MAX else [None]
    if any(type(size) is not int or not 0 <= size <= INT63_MAX for size in sizes):
        raise fault("header_malformed", where, f"{printable(name)} has a shape that is none")
    return dtype, tuple(sizes)
