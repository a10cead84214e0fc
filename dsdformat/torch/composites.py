"""Tensors that are not one strided block: taken apart, and put together again.

Decides which parts stand for a sparse, nested or wrapping tensor: other tensors, which may be
composites themselves, and values of the format. How those are stored is decided elsewhere.

Parts that are put together may come from a hostile file: all are checked first, and a class is
only looked up among those that the caller allows. The parts of sparse and jagged tensors are
checked when they are taken apart too, so that what was saved can be loaded. It is long, for each
kind is taken apart, checked and put together side by side.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dsdformat.errors import MismatchError, UnsupportedValueError, shorten
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.paths import render_path
from dsdformat.format.values import find_key_fault
from dsdformat.limits import DEPTH_MAX
from dsdformat.torch.buffers import OWN_CLASSES
from dsdformat.torch.compat import coo_components, known_seqlens, plain_functions
from dsdformat.torch.dtypes import torch_dtype

__all__ = [
    "find_kind",
    "inner_tensors",
    "plain_address",
    "plain_addresses",
    "put_together",
    "refusal",
    "take_apart",
    "type_name",
]

Parts = Mapping[str, Any]

_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
# Of each compressed layout: what torch calls its indices.
_COMPRESSED = {
    torch.sparse_csr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_bsc: _COLUMNS,
}
_LAYOUTS = {str(layout): layout for layout in (torch.sparse_coo, *_COMPRESSED)}
_KINDS = {layout: kind for kind, layout in _LAYOUTS.items()}

# What the parts must be: a plain tensor, one of these dtypes, or a value of exactly this type.
_INDEX = (torch.int32, torch.int64)
_JAGGED_OPTIONAL = {"lengths": _INDEX, "min_seqlen": int, "max_seqlen": int}
_JAGGED = {"values": object, "offsets": _INDEX, "jagged_dim": int, **_JAGGED_OPTIONAL}
_SUBCLASS = {"type": str, "tensors": dict, "context": object, "size": torch.Size, "stride": tuple}

_CONTEXT_ATOMS = {
    *(type(None), bool, int, float, str),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
}
_CONTEXT_HINT = (
    "let __tensor_flatten__ return a context of None, bool, int, float, str, tuple, list, dict, "
    "torch.Size, torch.dtype, torch.device, torch.layout and torch.memory_format"
)
_PROTOTYPE_WARNINGS = (
    "Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state",
    "The PyTorch API of nested tensors is in prototype stage",
)


# Complex ones may be conjugated in name only.
_PLAIN_DTYPES = frozenset(
    dtype for dtype in map(torch_dtype, DTYPES) if dtype is not None and not dtype.is_complex
)


_OFFSETS_END = 1 << 44  # bytes, more than any storage has; addresses are mostly above


class _Fault(Exception):  # noqa: N818 -- never leaves this module
    """What is wrong with parts; the public functions add the place."""

    def __init__(self, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.hint = hint


def find_kind(tensor: torch.Tensor) -> str | None:
    """Name how a tensor is composed, or return None for one strided block (or a DTensor)."""
    if type(tensor) in OWN_CLASSES and not tensor.is_nested:
        return _KINDS.get(tensor.layout)
    with plain_functions():
        if tensor.is_nested:
            return "torch.jagged" if tensor.layout is torch.jagged else "torch.nested"
        if _is_flattenable(tensor):
            return None if _is_dtensor(tensor) else "torch.subclass"
        return _KINDS.get(tensor.layout)


def plain_address(tensor: torch.Tensor) -> int:
    """Return where a tensor begins that is at first sight a block of host memory, row-major.

    Most are. Neither `refusal` nor `find_kind` has anything to say of them, and this takes a tenth
    of the time. 0 for any other: it is to be looked at closely.
    """
    if not (
        type(tensor) in OWN_CLASSES
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in _PLAIN_DTYPES
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
    ):
        return 0
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a wrapper inside torch
        return 0
    # Without elements it is 0; without memory it is where the tensor begins in its storage.
    return address if address != tensor.storage_offset() * tensor.itemsize else 0


def plain_addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return where tensors begin if each is as `plain_address` wants it, else None.

    In a third of the time, as whole columns are asked for.
    """
    if not OWN_CLASSES.issuperset(map(type, tensors)):
        return None
    try:
        others = [
            one
            for one in tensors
            if one.is_nested or not one.is_cpu or one.is_neg() or not one.is_contiguous()
        ]
        layouts, dtypes = {one.layout for one in tensors}, {one.dtype for one in tensors}
        if others or layouts != {torch.strided} or not dtypes <= _PLAIN_DTYPES:
            return None
        addresses = [one.data_ptr() for one in tensors]
    except RuntimeError:  # a wrapper inside torch
        return None
    if min(addresses, default=0) < _OFFSETS_END:  # may be an offset, in no memory
        starts = [one.storage_offset() * one.itemsize for one in tensors]
        return None if any(map(operator.eq, addresses, starts)) else addresses
    return addresses


def type_name(kind: type) -> str:
    """Return the name under which a tensor subclass is stored, `module.qualname`."""
    return f"{kind.__module__}.{kind.__qualname__}"


def refusal(tensor: torch.Tensor) -> str | None:
    """Say why a tensor cannot be stored at all, or return None.

    Meta tensors and uninitialized parameters are judged elsewhere. A subclass that has no
    `__torch_dispatch__` of its own is a plain tensor.
    """
    with plain_functions():
        if not _is_flattenable(tensor) and _dispatches(type(tensor)):
            return (
                f"a tensor of type {type_name(type(tensor))} cannot be stored: store the plain "
                "tensors in it, or give its type __tensor_flatten__ and __tensor_unflatten__"
            )
        if find_kind(tensor) is not None or _is_dtensor(tensor):
            return None
        if tensor.is_quantized:
            return "a quantized tensor cannot be stored: store int_repr(), scale and zero point"
        if tensor.layout is not torch.strided:
            return f"a tensor of layout {tensor.layout} cannot be stored: store to_dense() of it"
        if not _has_memory(tensor):
            return (
                "a tensor without memory cannot be stored: its storage was freed, or it belongs "
                "to a transform of torch.func that still runs"
            )
    return None


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the component tensors of a `torch.subclass` by name: those that it lives on.

    Raises:
        UnsupportedValueError: its `__tensor_flatten__` breaks the protocol.
    """
    try:
        return _flatten(tensor)[0]
    except _Fault as fault:
        raise _unsupported(type_name(type(tensor)), fault, ()) from fault.__cause__


def take_apart(tensor: torch.Tensor, place: Sequence[Any]) -> dict[str, Any]:
    """Return the parts of a composite: tensors, at least one, and values of the format.

    The tensors share the composite's memory, need no gradient, and may be composites.

    Args:
        tensor: One for which `find_kind` gives a kind.
        place: Where it lies in the state, for errors.

    Raises:
        UnsupportedValueError: its parts cannot be stored, or do not make a valid tensor.

    Ranks: local.
    Memory: what torch needs to check the indices of a sparse tensor.
    """
    kind = find_kind(tensor)
    assert kind is not None
    take = _TAKERS.get(kind, _take_sparse)
    try:
        with torch.no_grad(), _quiet(), _faults("torch does not give its parts"):
            return take(tensor)
    except _Fault as fault:
        name = type_name(type(tensor)) if kind == "torch.subclass" else kind
        raise _unsupported(name, fault, place) from fault.__cause__


def put_together(
    kind: str, parts: Parts, types: Mapping[str, type], place: Sequence[Any]
) -> torch.Tensor:
    """Make a tensor of the parts that `take_apart` gave; trust none of them.

    Args:
        kind: As `find_kind` names it.
        parts: The tensors in it are put together already. The new tensor shares their memory,
            except one of kind `torch.nested`.
        types: The tensor subclasses that may be made, by `type_name`.
        place: Where the tensor lies in the state, for errors.

    Raises:
        MismatchError: `bad_components`; the parts do not make a tensor of this kind.
        UnsupportedValueError: the tensor's type is not among `types`.

    Ranks: local.
    Memory: what torch needs to check indices; for `torch.nested`, the tensors once more.
    """
    where = render_path(place)
    try:
        with _quiet(), _faults("torch refuses them"):
            if kind in _LAYOUTS:
                return _sparse(kind, parts)
            if kind == "torch.jagged":
                _check_jagged(parts)
                return torch.nested.nested_tensor_from_jagged(**parts)
            if kind == "torch.nested":
                return _nested(parts)
            if kind == "torch.subclass":
                return _subclass(parts, types, where)
            raise _Fault("this kind is not known")
    except _Fault as fault:
        raise MismatchError(
            f"{where}: the parts of a tensor of kind {shorten(kind)} do not fit: {fault}",
            code="bad_components",
        ) from fault.__cause__


def _unsupported(name: str, fault: _Fault, place: Sequence[Any]) -> UnsupportedValueError:
    where = render_path(place)
    text = f"{where}: a tensor of type {name} cannot be stored: {fault}"
    return UnsupportedValueError(text, path_in_tree=where, hint=fault.hint)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        for start in _PROTOTYPE_WARNINGS:
            warnings.filterwarnings("ignore", start, UserWarning)
        yield


@contextmanager
def _faults(doing: str) -> Iterator[None]:
    """Turn what torch, or the code of a subclass, raises into a fault."""
    try:
        yield
    except (_Fault, UnsupportedValueError, MemoryError, torch.OutOfMemoryError, Warning):
        raise
    except Exception as error:
        text = str(error).partition("\n")[0][:200]
        raise _Fault(f"{doing}: {type(error).__name__}: {text}") from error


# What a tensor is.


def _is_flattenable(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # where it is not loaded, none exists
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def _dispatches(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", 0) is not getattr(
        torch.Tensor, "__torch_dispatch__", 0
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0 or not (tensor.is_cpu or tensor.is_cuda):
        return True
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a wrapper inside torch
        return False


# What parts must be.


def _check(parts: Any, schema: Mapping[str, Any], optional: Iterable[str] = ()) -> None:
    if not isinstance(parts, Mapping) or not (
        schema.keys() - set(optional) <= set(parts) <= set(schema)
    ):
        got = list(parts) if isinstance(parts, Mapping) else parts
        raise _Fault(f"expected {', '.join(schema)}, got {shorten(got)}")
    for name, value in parts.items():
        _check_part(name, value, schema[name])


def _check_part(name: str, value: Any, wanted: Any) -> None:
    if wanted is torch.Tensor or type(wanted) is tuple:
        plain = isinstance(value, torch.Tensor) and find_kind(value) is None
        if not plain or value.layout is not torch.strided:
            raise _Fault(f"{name}: expected a plain tensor, got {_describe(value)}")
        if type(wanted) is tuple and value.dtype not in wanted:
            raise _Fault(f"{name}: expected {' or '.join(map(str, wanted))}, got {value.dtype}")
    elif wanted is not object and type(value) is not wanted:
        raise _Fault(f"{name}: expected {wanted.__name__}, got {_describe(value)}")
    elif wanted is torch.Size and any(n < 0 for n in value):
        raise _Fault(f"{name}: expected no negative length, got {shorten(value)}")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):  # whose repr could fail, and would be long
        return f"a tensor of kind {find_kind(value) or value.layout}"
    return shorten(value)


# Sparse tensors.


def _take_sparse(tensor: torch.Tensor) -> dict[str, Any]:
    with plain_functions():  # else subclasses of Tensor make more of them
        plain = tensor.detach()
        parts: dict[str, Any] = {"size": plain.size()}
        if plain.layout is torch.sparse_coo:
            parts["indices"], parts["values"] = coo_components(plain)
            parts["coalesced"] = plain.is_coalesced()
        else:
            names = (*_COMPRESSED[plain.layout], "values")
            parts |= {name: getattr(plain, name)() for name in names}
    _sparse(_KINDS[plain.layout], parts)
    return parts


def _sparse(kind: str, parts: Parts) -> torch.Tensor:
    layout, common = _LAYOUTS[kind], {"size": torch.Size, "values": torch.Tensor}
    if layout is torch.sparse_coo:
        _check(parts, {"indices": (torch.int64,), "coalesced": bool, **common})
    else:
        _check(parts, {**dict.fromkeys(_COMPRESSED[layout], _INDEX), **common})
    values, size = parts["values"], parts["size"]
    # A default device would take the place of the tensors' own, were it not named.
    options = {"device": values.device, "check_invariants": not values.is_meta}
    if layout is torch.sparse_coo:
        coalesced = parts["coalesced"]
        return torch.sparse_coo_tensor(
            parts["indices"], values, size, is_coalesced=coalesced, **options
        )
    compressed, others = (parts[name] for name in _COMPRESSED[layout])
    _check_bounds(_COMPRESSED[layout][0], compressed, others)
    _check_blocks(layout, compressed.dim(), values.shape, size)
    return torch.sparse_compressed_tensor(
        compressed, others, values, size, layout=layout, **options
    )


# torch trusts what these two check, even if told to check: it would read or divide out of bounds.


def _check_bounds(name: str, bounds: torch.Tensor, indices: torch.Tensor) -> None:
    if 0 in (bounds.dim(), indices.dim()) or bounds.shape[-1] == 0:
        raise _Fault(f"{name}: expected rows, got shape {list(bounds.shape)}")
    end = indices.shape[-1]
    outside = (bounds < 0) | (bounds > end)
    if not bounds.is_meta and (bool(outside.any()) or bool((bounds.diff() < 0).any())):
        raise _Fault(f"{name}: expected ascending numbers from 0 to {end}")


def _check_blocks(layout: torch.layout, start: int, shape: torch.Size, size: torch.Size) -> None:
    end = start + (2 if layout in (torch.sparse_bsr, torch.sparse_bsc) else 0)
    if 0 in shape[start:end] or shape[end:] != size[start + 1 :]:
        raise _Fault(f"values: a tensor of size {list(size)} has none of shape {list(shape)}")


# Nested tensors.


def _take_jagged(tensor: Any) -> dict[str, Any]:
    parts = {
        "values": tensor.values().detach(),
        "offsets": tensor.offsets(),
        "jagged_dim": [isinstance(n, torch.SymInt) for n in tensor.shape].index(True),
        "lengths": tensor.lengths(),
    }
    parts["min_seqlen"], parts["max_seqlen"] = known_seqlens(tensor)
    parts = {name: value for name, value in parts.items() if value is not None}
    _check_jagged(parts)
    return parts


def _check_jagged(parts: Parts) -> None:
    _check(parts, _JAGGED, _JAGGED_OPTIONAL)
    values, offsets, lengths = parts["values"], parts["offsets"], parts.get("lengths")
    if not isinstance(values, torch.Tensor) or find_kind(values) not in (None, "torch.subclass"):
        raise _Fault(f"values: expected a strided tensor, got {_describe(values)}")
    if not 1 <= parts["jagged_dim"] <= values.dim():
        raise _Fault(f"jagged_dim: expected 1 to {values.dim()}, got {parts['jagged_dim']}")
    if offsets.dim() != 1 or len(offsets) == 0:
        raise _Fault(f"offsets: expected at least one in a row, got shape {list(offsets.shape)}")
    if lengths is not None and lengths.shape != (len(offsets) - 1,):
        raise _Fault(f"lengths: expected {len(offsets) - 1}, got shape {list(lengths.shape)}")
    if any(part.device != values.device for part in (offsets, lengths) if part is not None):
        raise _Fault("offsets and lengths must be on the device of the values")
    if not values.is_meta:
        _check_rows(parts, offsets.long(), None if lengths is None else lengths.long())


def _check_rows(parts: Parts, offsets: torch.Tensor, lengths: torch.Tensor | None) -> None:
    """Check that each row lies within the values, and that each is as long as is said."""
    end = parts["values"].shape[parts["jagged_dim"] - 1]
    if bool(((offsets < 0) | (offsets > end)).any()):
        raise _Fault(f"offsets: expected 0 to {end}")
    if lengths is None:
        lengths = offsets.diff()
    elif bool((lengths > end - offsets[:-1]).any()):
        raise _Fault("lengths: a row ends after the values do")
    if bool((lengths < 0).any()):
        raise _Fault("a row has a negative length")
    least, most = map(int, lengths.aminmax()) if len(lengths) else (0, 0)
    if not 0 <= parts.get("min_seqlen", 0) <= least:
        raise _Fault(f"min_seqlen: expected 0 to {least}, got {parts['min_seqlen']}")
    if not most <= parts.get("max_seqlen", most) < 2**63:
        raise _Fault(f"max_seqlen: expected {most} or more, got {shorten(parts['max_seqlen'])}")


def _take_nested(tensor: torch.Tensor) -> dict[str, Any]:
    with plain_functions():
        tensors = list(tensor.detach().unbind())
    if not tensors:
        raise _Fault("it holds no tensors", "leave it out, or store an empty list")
    return {"tensors": tensors}


def _nested(parts: Parts) -> torch.Tensor:
    _check(parts, {"tensors": list})
    tensors = parts["tensors"]
    if not tensors:
        raise _Fault("tensors: expected at least one")
    for index, tensor in enumerate(tensors):
        _check_part(f"tensors[{index}]", tensor, torch.Tensor)
        for what in ("dtype", "device", "ndim"):  # torch would convert them
            one, other = getattr(tensors[0], what), getattr(tensor, what)
            if one != other:
                raise _Fault(f"tensors[{index}]: expected {what} {one}, got {other}")
    # Of bytes first: there are dtypes of which torch makes no nested tensor from a list.
    shapes = [torch.empty(t.shape, dtype=torch.uint8, device=t.device) for t in tensors]
    frame = torch.nested.nested_tensor(shapes, device=tensors[0].device)
    nested = torch.empty_like(frame, dtype=tensors[0].dtype)
    form = torch.uint8 if nested.element_size() == 1 else nested.dtype  # some have no copy_
    for pair in zip(nested.unbind(), tensors, strict=True):
        target, source = (one.view(form) for one in pair)
        target.copy_(source)
    return nested


# Subclasses that wrap other tensors.


def _flatten(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    with _faults("__tensor_flatten__ fails"):
        names, context = tensor.__tensor_flatten__()
        tensors = {name: getattr(tensor, name) for name in names}
    _check_components(tensors)
    return tensors, context


def _check_components(tensors: dict[Any, Any]) -> None:
    if not tensors:
        raise _Fault("it has no component tensors")
    for name, inner in tensors.items():
        if type(name) is not str or not isinstance(inner, torch.Tensor):
            raise _Fault(f"its component {shorten(name)} is of type {type_name(type(inner))}")


def _take_subclass(tensor: torch.Tensor) -> dict[str, Any]:
    tensors, context = _flatten(tensor)
    _check_context(context)
    size, stride = torch.Size(tensor.size()), tuple(tensor.stride())
    if any(type(n) is not int for n in (*size, *stride)):
        raise _Fault(f"its size is not known: {shorten(size)}")
    if tensor.layout is torch.strided:  # as packed as its components will be
        stride = torch.empty_like(torch.empty_strided(size, stride, device="meta")).stride()
    with plain_functions():
        plain = {id(one): one.detach() if one.requires_grad else one for one in tensors.values()}
    return {
        "type": type_name(type(tensor)),
        "tensors": {name: plain[id(one)] for name, one in tensors.items()},  # ties stay
        "context": context,
        "size": size,
        "stride": stride,
    }


def _subclass(parts: Parts, types: Mapping[str, type], where: str) -> torch.Tensor:
    _check(parts, _SUBCLASS)
    name, size, stride = parts["type"], parts["size"], parts["stride"]
    kind: Any = types.get(name)
    if kind is None:
        raise UnsupportedValueError(
            f"{where}: a tensor of type {shorten(name)} cannot be made: the type is not allowed",
            path_in_tree=where,
            hint="pass the class in types=[...], if you trust it with the contents of this file",
        )
    _check_components(parts["tensors"])
    _check_context(parts["context"])
    if len(stride) != len(size) or any(type(n) is not int or n < 0 for n in stride):
        raise _Fault(f"stride: expected {len(size)} numbers, got {shorten(stride)}")
    with _faults(f"{type_name(kind)} refuses them"):
        tensor = kind.__tensor_unflatten__(dict(parts["tensors"]), parts["context"], size, stride)
        if not isinstance(tensor, kind) or not isinstance(tensor, torch.Tensor):
            raise _Fault(f"{type_name(kind)} made a {type_name(type(tensor))} of them")
        if tensor.size() != size:
            raise _Fault(f"size: expected {list(size)}, got {list(tensor.size())}")
    return tensor


def _check_context(value: Any, path: tuple[Any, ...] = ()) -> None:
    kind, where = type(value), "its context" + render_path(path)[1:]
    if kind in _CONTEXT_ATOMS:
        return
    if kind not in (tuple, list, dict):
        raise _Fault(f"{where} is of type {type_name(kind)}", _CONTEXT_HINT)
    if len(path) >= DEPTH_MAX:
        raise _Fault(f"its context is nested more than {DEPTH_MAX} deep", _CONTEXT_HINT)
    for key, item in value.items() if kind is dict else enumerate(value):
        fault = find_key_fault(key)
        if fault:
            raise _Fault(f"{where} has {fault} as a key", _CONTEXT_HINT)
        _check_context(item, (*path, key))


_TAKERS: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "torch.jagged": _take_jagged,
    "torch.nested": _take_nested,
    "torch.subclass": _take_subclass,
}
