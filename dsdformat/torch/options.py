"""The options of `load`, checked before a file is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsdformat.errors import ArgumentError, shorten
from dsdformat.selection import Rename, Renames, Selection, by_name
from dsdformat.torch.composites import type_name

__all__ = ["ByName", "Device", "LoadOptions", "as_device"]

Device = str | torch.device
# A mapping from globs, or a function of the name.
ByName = Mapping[str, Any] | Callable[[str], Any]


@dataclass(frozen=True)
class LoadOptions:
    """What holds for each name.

    Attributes:
        strict, device, dtype: Functions of a display name.
        renames, selection: Of entries.
        mmap: Whether new tensors are maps.
        types: Tensor subclasses that may be made, by module and qualified name.
    """

    strict: Callable[[str], bool]
    device: Callable[[str], torch.device]
    dtype: Callable[[str], torch.dtype | None]
    renames: Renames
    selection: Selection
    mmap: bool
    types: Mapping[str, type]

    @staticmethod
    def of(
        strict: bool | Mapping[str, bool] = True,
        device: Device | ByName | None = None,
        dtype: torch.dtype | ByName | None = None,
        rename: Rename | None = None,
        select: str | Iterable[str] | None = None,
        mmap: bool = False,
        types: Iterable[type] = (),
    ) -> LoadOptions:
        """Check options; see `load`."""
        return LoadOptions(
            by_name(strict, True, as_flag),
            by_name(device, torch.device("cpu"), as_device),
            by_name(dtype, None, as_dtype),
            Renames(rename),
            Selection(select),
            mmap,
            _named_types(types),
        )


def as_device(value: Any) -> torch.device:
    """Return a device, or raise `bad_argument`."""
    try:
        device = torch.device(value)
        if device.type != "meta":
            torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(
            f"{shorten(value)} is not a device that is there: {error}", code="bad_argument"
        ) from None
    return device


def as_dtype(value: Any) -> torch.dtype:
    """Return a floating dtype, or raise `bad_argument`."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ArgumentError(
            f"dtype takes floating dtypes of torch, got {shorten(value)}", code="bad_argument"
        )
    return value


def as_flag(value: Any) -> bool:
    """Return a bool, or raise `bad_argument`."""
    if type(value) is not bool:
        raise ArgumentError(f"strict is True or False, got {shorten(value)}", code="bad_argument")
    return value


def _named_types(types: Any) -> dict[str, type]:
    kinds: list[Any] = list(types) if isinstance(types, Iterable) else [None]
    if not all(isinstance(kind, type) for kind in kinds):
        raise ArgumentError(f"types takes classes, got {shorten(types)}", code="bad_argument")
    return {type_name(kind): kind for kind in kinds}
