"""What the leaves of a plain state are to the writer: sources of bytes, ties, hints, constants."""

from __future__ import annotations

import bisect
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsdformat.boxes import whole_box
from dsdformat.errors import DependencyError, UnsupportedValueError
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.paths import render_path
from dsdformat.format.values import Named
from dsdformat.sources import Reference, RunMember, SourceRun, TensorSource
from dsdformat.torch.buffers import OWN_CLASSES, data_of, memory_order, memory_view
from dsdformat.torch.compat import is_lazy
from dsdformat.torch.composites import find_kind, plain_address, refusal, take_apart
from dsdformat.torch.dtypes import find_named, logical_dtype, torch_dtype
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
_NAMES = {dtype: name for name in DTYPES if (dtype := torch_dtype(name)) is not None}


@dataclass(slots=True)
class _Rows:
    """Plain tensors that are neighbours: where each lies, what it is, and what keeps it alive."""

    addresses: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)

    def run(self) -> SourceRun:
        """Return them as a run, in a view of all memory from the first to the last."""
        first, end = min(self.addresses), max(map(operator.add, self.addresses, self.nbytes))
        data = memory_view(first, end, self.storages)
        return SourceRun(self.dtypes, self.shapes, data, [at - first for at in self.addresses])


class Adapter:
    """Turns what a state holds beside plain values into what the writer stores.

    Tensors are tied that are the same memory in the same shape, order and dtype. Plain ones that
    are met the first time go in runs (see `RunAdapter`), all others one by one.
    """

    def __init__(self) -> None:
        self._sources: dict[Any, TensorSource] = {}  # by identity, of those that are in no run
        self._runs: list[SourceRun] = []
        self._firsts: list[int] = []  # of each run: how many tensors are in those before
        self._members: dict[int, int] = {}  # where a tensor of a run begins: its number among all
        self._taken: set[int] = set()  # where all of them begin
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
        if plain_address(tensor):
            return self._source(tensor, tensor)
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

    def _source(self, local: torch.Tensor, tensor: torch.Tensor) -> TensorSource | RunMember:
        """Return the source of a tensor, which is that of all that are tied to it.

        Args:
            local: What holds the bytes.
            tensor: What the state has.
        """
        identity = tensor_identity(local, tensor)
        source = self._known(identity)
        if source is None:
            shape, name = tuple(local.shape), logical_dtype(local.dtype)
            assert name is not None
            source = TensorSource(name, shape, [(whole_box(shape), data_of(local))])
            self._keep(identity, source)
            self._alive.append(local)
        return source

    def _array(self, array: Any, place: Sequence[Any]) -> Any:
        made = numpy_side().source_of(array, place)
        self._alive.append(array)
        identity = array_identity(array, made.dtype)
        source = self._known(identity)
        if source is None:
            self._keep(identity, made)
        return Reference(made if source is None else source, {FLAVOUR: NUMPY})

    def runs(self, values: Sequence[Any]) -> Iterator[tuple[int, SourceRun | None]]:
        """Part neighbours into runs of plain tensors, met the first time, and others."""
        if OWN_CLASSES.isdisjoint(map(type, values)) or sys.byteorder == "big":
            yield len(values), None
            return
        rows, others, taken = _Rows(), 0, self._taken
        for value in values:
            address = plain_address(value)
            if address and others:  # which may turn out to be this memory
                yield others, None
                others = 0
            if address and address not in taken:
                taken.add(address)
                rows.addresses.append(address)
                rows.nbytes.append(value.nbytes)
                rows.dtypes.append(_NAMES[value.dtype])
                rows.shapes.append(tuple(value.shape))
                rows.storages.append(value.untyped_storage())
                continue
            if rows.addresses:
                yield len(rows.addresses), self._run(rows)
                rows = _Rows()
            others += 1
        if rows.addresses:
            yield len(rows.addresses), self._run(rows)
        if others:
            yield others, None

    def _run(self, rows: _Rows) -> SourceRun:
        run = rows.run()
        first = len(self._members)
        self._runs.append(run)
        self._firsts.append(first)
        numbers = range(first, first + len(run))
        self._members.update(zip(rows.addresses, numbers, strict=True))
        return run

    def _known(self, identity: Any) -> TensorSource | RunMember | None:
        """Return the source of what has this identity, if there is one."""
        source = self._sources.get(identity)
        number = self._members.get(identity[0])
        if source is not None or number is None:
            return source
        at = bisect.bisect_right(self._firsts, number) - 1
        run, index = self._runs[at], number - self._firsts[at]
        plain = identity[0], _HOST, run.shapes[index], None, run.dtypes[index], (False, False)
        return RunMember(run, index) if identity == plain else None

    def _keep(self, identity: Any, source: TensorSource) -> None:
        self._sources[identity] = source
        self._taken.add(identity[0])


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
