"""What torch's own constants are in the format: dtypes, devices, layouts, memory formats, sizes.

Closed tables: a name from a file is looked up here, never in torch.
"""

from __future__ import annotations

from typing import Any

import torch

from dsdformat.format.dtypes import DTYPES
from dsdformat.format.values import Named, Size

__all__ = [
    "dtype_name",
    "find_named",
    "find_value",
    "form_text",
    "logical_dtype",
    "torch_dtype",
]


def _constants(kind: type) -> dict[str, Any]:
    """Map the plain names of all constants of a kind that this torch has to the constants."""
    found = (getattr(torch, name) for name in dir(torch))
    return {str(value).removeprefix("torch."): value for value in found if type(value) is kind}


_DTYPES: dict[str, torch.dtype] = _constants(torch.dtype)
_CONSTANTS: dict[str, dict[str, Any]] = {
    "torch.dtype": _DTYPES,
    "torch.layout": _constants(torch.layout),
    "torch.memory_format": _constants(torch.memory_format),
}
_LOGICAL = {dtype: name for name, dtype in _DTYPES.items() if name in DTYPES}
_KINDS = {torch.dtype: "torch.dtype", torch.layout: "torch.layout"}
_KINDS[torch.memory_format] = "torch.memory_format"


def logical_dtype(dtype: torch.dtype) -> str | None:
    """Return the logical name of a dtype, or None for one that the format does not have."""
    return _LOGICAL.get(dtype)


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of a logical name, or None where this version of torch lacks it."""
    return _DTYPES.get(name) if name in DTYPES else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return what torch calls a dtype, as `float32`."""
    return str(dtype).removeprefix("torch.")


def form_text(tensor: Any) -> str:
    """Return dtype and shape of a tensor for people, as `float32 [3, 5]`."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def find_named(value: Any) -> Named | Size | None:
    """Return what stands for a constant or a size of torch, or None for anything else."""
    kind = _KINDS.get(type(value))
    if kind is not None:
        return Named(kind, str(value).removeprefix("torch."))
    if type(value) is torch.device:
        return Named("torch.device", str(value))
    return Size(value) if type(value) is torch.Size else None


def find_value(named: Named) -> Any:
    """Return the constant that a name stands for; the inert name where torch does not have it."""
    if named.kind == "torch.device":
        try:
            return torch.device(named.name)
        except RuntimeError:
            return named
    return _CONSTANTS.get(named.kind, {}).get(named.name, named)
