"""What the leaves of a plain state are to the writer: sources of bytes, ties, hints, constants."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from dsdformat.boxes import whole_box
from dsdformat.errors import DependencyError, UnsupportedValueError
from dsdformat.format.paths import render_path
from dsdformat.format.values import Named
from dsdformat.sources import Reference, TensorSource
from dsdformat.torch.buffers import bytes_of, data_of, memory_order
from dsdformat.torch.compat import is_lazy
from dsdformat.torch.composites import find_kind, plain_address, refusal, take_apart
from dsdformat.torch.dtypes import find_named, logical_dtype
from dsdformat.torch.introspect import is_array, local_tensor
from dsdformat.torch.sharding import FlatShard, held_view

__all__ = [
    "COMPOSITE",
    "FLAVOUR",
    "NUMPY",
    "ORDER",
    "Adapter",
    "array_identity",
    "numpy_side",
    "tensor_identity",
    "value_of",
]

# Attributes of references, as the spec lists them.
FLAVOUR, ORDER = "flavour", "dim_order"
NUMPY = "numpy"
# Kind of the name before the components of a tensor that is not one strided block.
COMPOSITE = "torch.composite"

_HOST = torch.device("cpu")


class Adapter:
    """Turns what a state holds beside plain values into what the writer stores.

    Tensors are tied that are the same memory in the same shape, order and dtype.
    """

    def __init__(self) -> None:
        self._sources: dict[Any, TensorSource] = {}
        self._alive: list[Any] = []  # so that nothing else gets the memory or id of a source

    def __call__(self, value: Any, place: Sequence[Any]) -> Any:
        """Return a reference to a source, a value of the format, or NotImplemented."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, FlatShard):
            return self._tensor(_whole(value, place), place)
        if is_array(value):
            return self._array(value, place)
        return value_of(value, place)

    def _tensor(self, tensor: torch.Tensor, place: Sequence[Any]) -> Any:
        self._alive.append(tensor)
        address = plain_address(tensor)
        if address:
            return self._plain(tensor, address)
        reason = refusal(tensor)
        if is_lazy(tensor):
            reason = "a parameter of a lazy module has no shape yet: call the module once"
        elif reason is None and tensor.is_meta:
            reason = "a tensor on the meta device has no data"
        if reason is not None:
            raise UnsupportedValueError(
                f"{render_path(place)}: {reason}",
                code="unsupported_dtype" if tensor.is_quantized else "unsupported_value",
                path_in_tree=render_path(place),
            )
        kind = find_kind(tensor)
        if kind is not None:
            return (Named(COMPOSITE, kind), take_apart(tensor, place))
        local = local_tensor(tensor, place)
        if logical_dtype(local.dtype) is None:
            raise UnsupportedValueError(
                f"{render_path(place)}: the dtype {local.dtype} cannot be stored",
                code="unsupported_dtype",
                path_in_tree=render_path(place),
                hint="view it as a dtype of the same width first",
            )
        order, source = memory_order(local), self._source(local, tensor)
        return source if order is None else Reference(source, {ORDER: order})

    def _plain(self, tensor: torch.Tensor, address: int) -> TensorSource:
        """Return `_source` of a plain tensor, whose identity has little in it."""
        shape, name = tuple(tensor.shape), logical_dtype(tensor.dtype)
        assert name is not None
        identity = address, _HOST, shape, None, name, (False, False)
        source = self._sources.get(identity)
        if source is None:
            source = TensorSource.of_sound(name, shape, whole_box(shape), bytes_of(tensor))
            self._sources[identity] = source
        return source

    def _source(self, local: torch.Tensor, tensor: torch.Tensor) -> TensorSource:
        """Return the source of a tensor, which is that of all that are tied to it.

        Args:
            local: What holds the bytes.
            tensor: What the state has.
        """
        identity = tensor_identity(local, tensor)
        source = self._sources.get(identity)
        if source is None:
            shape, name = tuple(local.shape), logical_dtype(local.dtype)
            assert name is not None
            source = TensorSource(name, shape, [(whole_box(shape), data_of(local))])
            self._sources[identity] = source
            self._alive.append(local)
        return source

    def _array(self, array: Any, place: Sequence[Any]) -> Any:
        source = numpy_side().source_of(array, place)
        self._alive.append(array)
        identity = array_identity(array, source.dtype)
        return Reference(self._sources.setdefault(identity, source), {FLAVOUR: NUMPY})


def value_of(value: Any, place: Sequence[Any]) -> Any:
    """Return what stands for a value of torch or numpy; NotImplemented for anything else."""
    named = find_named(value)
    if named is not None:
        return named
    return numpy_side().value_of(value, place) if "numpy" in sys.modules else NotImplemented


def _whole(value: FlatShard, place: Sequence[Any]) -> torch.Tensor:
    """Return the tensor that lies in the flat shard of the only rank."""
    count = len(value.sharding.ranks)
    if count > 1:
        raise UnsupportedValueError(
            f"{render_path(place)}: a tensor in flat shards of {count} ranks cannot be stored by "
            "one of them",
            path_in_tree=render_path(place),
        )
    if 0 in value.shape:
        return value.shard.new_empty(value.shape)
    (held,) = value.sharding.held(0)
    return held_view(held, held.outer, value.shard)


def tensor_identity(local: torch.Tensor, tensor: torch.Tensor) -> Any:
    """Return what is equal for tensors, and arrays, that are the same memory seen the same way.

    Args:
        local: What holds the bytes.
        tensor: What the state has; an empty one is only itself.
    """
    address = local.data_ptr() if local.numel() else id(tensor)
    strides = None
    if not local.is_contiguous():  # else the shape says it, but for dims of one element
        strides = tuple(step * local.element_size() for step in local.stride())
    name, flags = logical_dtype(local.dtype), (local.is_conj(), local.is_neg())
    return address, local.device, tuple(local.shape), strides, name, flags


def array_identity(array: Any, name: str) -> Any:
    """Return what `tensor_identity` gives, for a numpy array of this logical dtype."""
    address = array.__array_interface__["data"][0] if array.size else id(array)
    strides = None if array.flags.c_contiguous else array.strides
    flags = (False, False) if array.dtype.isnative else "swapped"
    return address, _HOST, array.shape, strides, name, flags


def numpy_side() -> Any:
    """Import the side that knows arrays, and the scalars and dtypes of numpy.

    Raises:
        DependencyError: numpy or ml_dtypes is not installed.
    """
    try:
        from dsdformat import numpy
    except ImportError as error:
        raise DependencyError(
            f"numpy arrays and scalars need {error.name}",
            code="missing_dependency",
            hint="pip install 'dsdformat[numpy]'",
        ) from error
    return numpy
