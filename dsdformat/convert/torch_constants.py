"""Constants of torch that a pickle may name or call: sizes, devices, layouts, dtypes."""

from __future__ import annotations

from typing import Any

from dsdformat.convert.pickles.keys import ValueFault
from dsdformat.convert.pickles.nodes import Global
from dsdformat.convert.pickles.resolving import Made, Maker, Unknown
from dsdformat.convert.storages import torch_dtype_name
from dsdformat.format.values import Named, Size
from dsdformat.limits import INT63_MAX

__all__ = ["TORCH_CONSTANTS", "named_constant"]

_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
_DEVICE_MAX = 64


def _size(made: Made) -> Any:
    args = made.bare()
    numbers: Any = args[0] if len(args) == 1 else None
    if type(numbers) not in (tuple, list) or any(
        type(n) is not int or not 0 <= n <= INT63_MAX for n in numbers
    ):
        raise ValueFault("sizes that are none")
    return Size(numbers)


def _device(made: Made) -> Any:
    args = made.bare()
    if len(args) not in (1, 2) or type(args[0]) is not str or len(args[0]) > _DEVICE_MAX:
        raise ValueFault("a device that is none")
    if len(args) == 2 and (type(args[1]) is not int or not 0 <= args[1] < 2**15):
        raise ValueFault("a device that is none")
    return Named("torch.device", ":".join(map(str, args)))


def _layout(made: Made) -> Any:
    args = made.bare()
    name = args[0] if len(args) == 1 else None
    if type(name) is not str or name.removeprefix("torch.") not in _LAYOUTS:
        return Unknown(made.name, "a layout that is not known", made)
    return Named("torch.layout", name.removeprefix("torch."))


def named_constant(name: Global) -> Named | None:
    """Return the constant of torch that a name stands for, or None if it is none."""
    if name.module != "torch":
        return None
    dtype = torch_dtype_name(name.name)
    if dtype is not None:
        return Named("torch.dtype", dtype)
    return Named("torch.memory_format", name.name) if name.name in _FORMATS else None


TORCH_CONSTANTS: dict[tuple[str, str], Maker] = {
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
}
