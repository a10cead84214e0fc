"""What a writer stores as one tensor: dtype, global shape, and where the bytes come from."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from dsdformat.boxes import Box, whole
from dsdformat.errors import ArgumentError, MismatchError, UnsupportedValueError, shorten
from dsdformat.format.bodies import find_layout_fault
from dsdformat.format.dtypes import DTYPES, Dtype
from dsdformat.format.manifest import Mesh
from dsdformat.limits import INT63_MAX, NDIM_MAX
from dsdformat.storage.base import Buffer

__all__ = [
    "Data",
    "Reference",
    "RunAdapter",
    "RunMember",
    "SourceRun",
    "TensorSource",
    "bytes_view",
    "copy_into",
    "is_bytes",
    "iter_blocks",
    "source_of",
]

# The packed row-major bytes of a box: a contiguous buffer, or a function that makes an iterable
# of buffers when the writer gets there.
Data = Any | Callable[[], Iterable[Any]]


_NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """A leaf of the state that a writer stores. The same object at two places is a tied tensor.

    Attributes:
        dtype: Logical name, as `bfloat16`.
        shape: Global shape.
        chunks: The boxes that this writer stores, with their bytes.
        codec: Name of a codec, or None for the writer's choice.
        attributes: Hints stored with the reference.
        layout: Provenance: a mesh and one placement per axis.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[tuple[Box, Data]]
    codec: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=lambda: _NO_ATTRIBUTES)
    layout: tuple[Mesh, tuple[str, ...]] | None = None

    def __post_init__(self) -> None:
        row = DTYPES.get(self.dtype)
        if row is None:
            raise UnsupportedValueError(
                f"{shorten(self.dtype)} is not a dtype of the format",
                code="unsupported_dtype",
                hint="see spec/registry/dtypes.md",
            )
        shape = self.shape
        nbytes = math.prod(filter(None, shape)) * row.itemsize
        if shape and (min(shape) < 0 or nbytes > INT63_MAX or len(shape) > NDIM_MAX):
            raise ArgumentError(f"bad shape {list(shape)}", code="bad_argument")
        if self.layout is not None:
            fault = find_layout_fault(*self.layout)
            if fault:
                raise ArgumentError(fault, code="bad_argument")
        for box, _ in self.chunks:
            if not box.fits(shape):
                raise ArgumentError(
                    f"box {box} is not inside of the shape {list(self.shape)}",
                    code="box_out_of_bounds",
                )

    @classmethod
    def of_sound(
        cls,
        dtype: str,
        shape: tuple[int, ...],
        chunks: Sequence[tuple[Box, Data]],
        layout: tuple[Mesh, tuple[str, ...]] | None,
    ) -> TensorSource:
        """Make a source of some boxes of which all is known to be right: nothing is checked.

        As `Box.of_unsigned`, for those of which there may be a million.
        """
        source = object.__new__(cls)
        assign = object.__setattr__
        assign(source, "dtype", dtype)
        assign(source, "shape", shape)
        assign(source, "chunks", chunks)
        assign(source, "codec", None)
        assign(source, "attributes", _NO_ATTRIBUTES)
        assign(source, "layout", layout)
        return source

    @property
    def row(self) -> Dtype:
        """The row of the dtype table."""
        return DTYPES[self.dtype]

    @staticmethod
    def of(dtype: str, shape: Sequence[int], data: Data, **options: Any) -> TensorSource:
        """Make a source of a whole tensor."""
        shape = tuple(shape)
        return TensorSource(dtype, shape, [(whole(shape), data)], **options)


@dataclass(frozen=True, slots=True, eq=False)
class SourceRun:
    """Neighbours in a container that are whole tensors in one buffer: a source each, as columns.

    Where there are many small ones, an object for each takes longer than to write it. The codec is
    the writer's choice, and they have no hints.

    Attributes:
        dtypes: Logical names.
        shapes: Global shapes.
        data: A buffer of bytes.
        starts: Where in it the packed row-major bytes of each tensor begin.
        nbytes: How many these are.
    """

    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    data: memoryview
    starts: Sequence[int]
    nbytes: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        unknown = set(self.dtypes) - DTYPES.keys()
        if unknown:
            raise UnsupportedValueError(
                f"{shorten(unknown.pop())} is not a dtype of the format",
                code="unsupported_dtype",
                hint="see spec/registry/dtypes.md",
            )
        widths = {name: DTYPES[name].itemsize for name in set(self.dtypes)}
        nbytes = [
            math.prod(shape) * widths[name]
            for name, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        object.__setattr__(self, "nbytes", nbytes)
        ends = map(operator.add, self.starts, nbytes)
        sizes = itertools.chain.from_iterable(self.shapes)
        if (
            len(self.starts) != len(nbytes)
            or min(sizes, default=1) < 1  # one without elements is no part of a run
            or max(map(len, self.shapes), default=0) > NDIM_MAX
            or min(self.starts, default=0) < 0
            or max(ends, default=0) > len(self.data)
            or not is_bytes(self.data)
        ):
            raise ArgumentError(
                "shapes and starts of a run do not fit its buffer", code="bad_argument"
            )

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class RunMember:
    """A leaf of the state that is tied to a tensor of a run, which was met before.

    Attributes:
        run: The run.
        index: Which tensor of it.
    """

    run: SourceRun
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A leaf of the state that is a source, with hints of its own.

    Two references to one source are a tied tensor, whatever their hints.

    Attributes:
        source: The tensor.
        attributes: Hints stored with this reference, in place of the source's.
    """

    source: TensorSource | RunMember
    attributes: Mapping[str, Any]


@runtime_checkable
class RunAdapter(Protocol):
    """What turns values into sources (see `dsdformat.create`), and some neighbours at once."""

    def __call__(self, value: Any, place: Sequence[Any]) -> Any:
        """Return what stands for one value."""

    def runs(self, values: Sequence[Any]) -> Iterator[tuple[int, SourceRun | None]]:
        """Part neighbours in a container into runs and others, in their order.

        Yields:
            How many values, and the run that they are; None if each is for `__call__`, which has
            happened when the next are asked for.
        """


def source_of(leaf: TensorSource | Reference | RunMember) -> TensorSource | RunMember:
    """Return the source that a leaf of the state is, or refers to."""
    return leaf.source if isinstance(leaf, Reference) else leaf


def iter_blocks(data: Data, nbytes: int, block_nbytes: int, name: str) -> Iterator[Buffer]:
    """Cut the bytes of a chunk into blocks.

    A buffer is cut into views, without a copy. Of an iterable, one block is held at a time; the
    block is new, and its owner is the caller.

    Raises:
        MismatchError: `data_mismatch` if there are more or fewer bytes than `nbytes`.
    """
    if not callable(data):
        view = bytes_view(data, nbytes, name)
        for at in range(0, nbytes, block_nbytes):
            yield view[at : at + block_nbytes]
        return
    done = 0
    block = bytearray(min(block_nbytes, nbytes))
    used = 0
    for piece in data():
        view = _bytes_view(piece, name)
        while len(view):
            if done + used >= nbytes:
                _mismatch(name, done + used + len(view), nbytes)
            count = min(len(view), len(block) - used)
            block[used : used + count] = view[:count]
            view, used = view[count:], used + count
            if used == len(block):
                yield block
                done, used = done + used, 0
                block = bytearray(min(block_nbytes, nbytes - done))
    if done != nbytes:
        _mismatch(name, done + used, nbytes)


def copy_into(data: Data, into: memoryview, name: str) -> None:
    """Copy the bytes of a chunk to another place.

    Raises:
        MismatchError: `data_mismatch` if they are more or fewer than there is room for.
    """
    if not callable(data):
        into[:] = bytes_view(data, len(into), name)
        return
    done = 0
    for piece in data():
        view = _bytes_view(piece, name)
        if done + len(view) > len(into):
            _mismatch(name, done + len(view), len(into))
        into[done : done + len(view)] = view
        done += len(view)
    if done != len(into):
        _mismatch(name, done, len(into))


def bytes_view(data: Any, nbytes: int, name: str) -> memoryview:
    """Return the bytes of a chunk that lie in memory as they are.

    Raises:
        MismatchError: `data_mismatch` if there are more or fewer than expected.
    """
    view = _bytes_view(data, name)
    if len(view) != nbytes:
        _mismatch(name, len(view), nbytes)
    return view


def is_bytes(view: memoryview) -> bool:
    """Whether a view is of single bytes, in a row."""
    return view.ndim == 1 and view.format == "B" and view.c_contiguous


def _bytes_view(data: Any, name: str) -> memoryview:
    try:
        view = memoryview(data)
    except TypeError:
        raise ArgumentError(
            f"{name}: data is neither a buffer nor a function that gives buffers: {shorten(data)}",
            code="bad_argument",
        ) from None
    if not view.c_contiguous:
        raise ArgumentError(f"{name}: the buffer is not contiguous", code="bad_argument")
    if is_bytes(view):
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def _mismatch(name: str, got: int, expected: int) -> None:
    raise MismatchError(
        f"{name}: the data has {'at least ' if got > expected else ''}{got} bytes, "
        f"its box and dtype need {expected}",
        code="data_mismatch",
    )
