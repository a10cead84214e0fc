"""What it means that a loaded value is the saved one: exact types, and tensors bit for bit."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.properties.sameness import MAPPINGS, array_bytes, identity, native

__all__ = ["assert_same", "assert_same_tensor", "bits"]

_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a strided tensor's elements in row-major order, on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.numel():
        return torch.empty(0).byte()
    # One element may have any stride, and is contiguous.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def assert_same_tensor(found: Any, wanted: Any) -> None:
    """Compare dtype, shape, device and bits; of sparse, nested and wrapping tensors, the parts."""
    difference = next(_tensors(found, wanted, "the tensor"), None)
    assert difference is None, difference


def assert_same(found: Any, wanted: Any) -> None:
    """Compare nested values: exact types, tensors and arrays bit for bit, order where it counts.

    Whether a tensor is a parameter, its strides and its history are not compared.
    """
    difference = next(_values(found, wanted, "$"), None)
    assert difference is None, difference


def _values(a: Any, b: Any, at: str) -> Iterator[str]:
    if isinstance(b, torch.Tensor):
        yield from _tensors(a, b, at)
    elif isinstance(b, np.ndarray):
        yield from _arrays(a, b, at)
    elif type(a) is not type(b):
        yield f"{at}: {type(a).__qualname__} {_short(a)} for {type(b).__qualname__} {_short(b)}"
    elif type(b) in MAPPINGS:
        yield from _mappings(a, b, at)
    elif isinstance(b, (list, tuple, deque)):
        if len(a) != len(b):
            yield f"{at}: {len(a)} items for {len(b)}"
        if isinstance(b, deque) and a.maxlen != b.maxlen:
            yield f"{at}: maxlen {a.maxlen} for {b.maxlen}"
        for index, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from _values(one, other, f"{at}[{index}]")
    elif isinstance(b, (set, frozenset)):
        yield from _keys(a, b, at)
    elif identity(a) != identity(b):
        yield f"{at}: {_short(a)} for {_short(b)}"


def _tensors(a: Any, b: Any, at: str) -> Iterator[str]:
    if not isinstance(a, torch.Tensor):
        yield f"{at}: {type(a).__qualname__} {_short(a)} for a tensor"
        return
    for what in ("dtype", "device", "layout"):
        if getattr(a, what) != getattr(b, what):
            yield f"{at}: {what} {getattr(a, what)} for {getattr(b, what)}"
    if a.is_nested != b.is_nested:
        yield f"{at}: nested {a.is_nested} for {b.is_nested}"
    elif b.is_nested:
        yield from _values(list(a.detach().unbind()), list(b.detach().unbind()), at)
    elif a.shape != b.shape:
        yield f"{at}: shape {list(a.shape)} for {list(b.shape)}"
    elif hasattr(type(b), "__tensor_flatten__"):
        yield from _subclasses(a, b, at)
    elif b.layout in _SPARSE:
        if b.layout is torch.sparse_coo and a.is_coalesced() != b.is_coalesced():
            yield f"{at}: coalesced {a.is_coalesced()} for {b.is_coalesced()}"
        for name in _SPARSE[b.layout]:
            one, other = getattr(a.detach(), name)(), getattr(b.detach(), name)()
            yield from _tensors(one, other, f"{at}.{name}")
    elif not torch.equal(bits(a), bits(b)):
        yield f"{at}: other bits"


def _subclasses(a: Any, b: Any, at: str) -> Iterator[str]:
    if type(a) is not type(b):
        yield f"{at}: {type(a).__qualname__} for {type(b).__qualname__}"
        return
    (names, context), (others, other_context) = a.__tensor_flatten__(), b.__tensor_flatten__()
    yield from _values([list(names), context], [list(others), other_context], at)
    for name in others:
        yield from _tensors(getattr(a, name), getattr(b, name), f"{at}.{name}")


def _arrays(a: Any, b: Any, at: str) -> Iterator[str]:
    if type(a) is not np.ndarray:
        yield f"{at}: {type(a).__qualname__} for an array"
    elif a.dtype != native(b.dtype) or a.shape != b.shape:
        yield f"{at}: {a.dtype} {a.shape} for {b.dtype} {b.shape}"
    elif array_bytes(a) != array_bytes(b):
        yield f"{at}: other bytes"


def _mappings(a: Any, b: Any, at: str) -> Iterator[str]:
    yield from _keys(a, b, at)
    if type(b) is OrderedDict and list(a) != list(b):
        yield f"{at}: other order"
    for key in b:
        yield from _values(a[key], b[key], f"{at}[{_short(key)}]")


def _keys(a: Any, b: Any, at: str) -> Iterator[str]:
    # True, 1 and 1.0 are one key, so equality is not enough.
    held = {key: key for key in a}
    if len(a) != len(b) or any(key not in held for key in b):
        yield f"{at}: keys {_short(list(a))} for {_short(list(b))}"
        return
    for key in b:
        yield from _values(held[key], key, f"{at}, key {_short(key)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"
