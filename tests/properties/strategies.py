"""Hypothesis strategies: values of the format, arrays as people hold them, tilings of a tensor."""

from __future__ import annotations

import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, timedelta, timezone
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dsdformat import Box, Named, Size
from dsdformat.format.dtypes import DTYPES
from dsdformat.numpy import _DTYPES

__all__ = ["arrays", "boxes_in", "key_values", "np_scalars", "root_states", "shapes", "tilings"]

NAMES = sorted(DTYPES)
Draw = Callable[[st.SearchStrategy[Any]], Any]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ints = st.one_of(
    st.integers(-200, 200),
    st.integers(),
    st.sampled_from([63, 64, 127, 128, 1000]).flatmap(
        lambda bits: st.sampled_from([s * 2**bits + d for s in (1, -1) for d in (-1, 0, 1)])
    ),
)
key_floats = st.floats(allow_nan=False)
complexes = st.builds(complex, st.floats(), st.floats())
plain_keys = st.one_of(
    st.none(), st.booleans(), ints, key_floats, texts, st.binary(max_size=6),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
key_values = st.recursive(
    plain_keys,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)
    ),
    max_leaves=4,
)

offsets = st.timedeltas(timedelta(hours=-24, microseconds=1), timedelta(hours=24, microseconds=-1))
datetimes = st.builds(
    lambda moment, fold: moment.replace(fold=fold),
    st.datetimes(timezones=st.none() | st.just(UTC) | offsets.map(timezone)),
    st.integers(0, 1),
)

posix_parts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=6
)
windows_parts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters='/\\:\0"<>|?*'),
    min_size=1,
    max_size=6,
)
windows_anchors = st.sampled_from(["", "\\", "C:", "z:\\", "\\\\server\\share\\"])
paths = st.one_of(
    st.builds(
        lambda kind, anchor, parts: kind(anchor + "/".join(parts)),
        st.sampled_from([pathlib.PurePosixPath, pathlib.Path]),
        st.sampled_from(["", "/", "//"]),
        st.lists(posix_parts, max_size=3),
    ),
    st.builds(
        lambda anchor, parts: pathlib.PureWindowsPath(anchor + "\\".join(parts)),
        windows_anchors,
        st.lists(windows_parts, max_size=3),
    ),
)


def shapes(min_dims: int = 0, max_dims: int = 4, max_side: int = 5) -> st.SearchStrategy[Any]:
    """Global shapes; a dim may be 0."""
    return st.lists(st.integers(0, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def _packed(draw: Draw, name: str, shape: tuple[int, ...]) -> Any:
    """An array with any bits at all, in row-major order."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[name].itemsize
    seed = draw(st.integers(0, 2**32 - 1))
    data = np.random.default_rng(seed).bytes(nbytes)
    return np.frombuffer(data, np.uint8).copy().view(_DTYPES[name]).reshape(shape)


def _reversed(array: Any) -> Any:
    return np.flip(array) if array.ndim else array


def _every_second(array: Any) -> Any:
    wide = np.repeat(array, 2, axis=-1) if array.ndim else array
    return wide[..., ::2] if array.ndim else array


def _swapped(array: Any) -> Any:
    if array.dtype.names or array.dtype.kind not in "iufcb" or array.dtype.itemsize == 1:
        return array
    return array.byteswap().view(array.dtype.newbyteorder(">"))


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "packed": lambda array: array,
    "fortran": np.asfortranarray,
    "transposed": lambda array: array.T,
    "reversed": _reversed,
    "every second": _every_second,
    "broadcast": lambda array: np.broadcast_to(array, (2, *array.shape)),
    "inner broadcast": lambda array: np.broadcast_to(array[..., None], (*array.shape, 3)),
    "big-endian": _swapped,
    "big-endian reversed": lambda array: _reversed(_swapped(array)),
    "read-only": lambda array: np.broadcast_to(array, array.shape),
}


@st.composite
def arrays(draw: Draw, max_side: int = 5) -> Any:
    """Arrays of every dtype, with any bits, any shape, and any strides."""
    array = draw(_packed(draw(st.sampled_from(NAMES)), draw(shapes(max_side=max_side))))
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](array)


@st.composite
def np_scalars(draw: Draw) -> Any:
    """Scalars of every dtype, with any bits."""
    return draw(_packed(draw(st.sampled_from(NAMES)), (1,)))[0]


inert = st.one_of(
    st.lists(st.integers(0, 2**63 - 1), max_size=3).map(Size),
    st.builds(Named, st.sampled_from(["torch.dtype", "a.b_c"]), texts),
    st.sampled_from(NAMES).map(lambda name: _DTYPES[name]),
    np_scalars(),
)
plain_values = st.one_of(
    plain_keys, st.floats(), complexes, datetimes, st.dates(), st.timedeltas(), paths, inert,
)  # fmt: skip


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    text_dicts = st.dictionaries(texts, inner, max_size=3)
    dicts = st.dictionaries(key_values, inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        text_dicts,
        dicts,
        st.dictionaries(key_values, inner, dict_class=OrderedDict, max_size=3),
        dicts.map(Counter),
        dicts.map(lambda pairs: defaultdict(None, pairs)),
        st.builds(deque, items, st.none() | st.integers(3, 2**63 - 1)),
        st.sets(key_values, max_size=3),
        st.frozensets(key_values, max_size=3),
    )


def root_states(*, with_arrays: bool = True) -> st.SearchStrategy[Any]:
    """Whole states: a dict or an ordered dict of string keys, and anything below."""
    leaves = st.one_of(arrays(), plain_values) if with_arrays else plain_values
    values = st.recursive(leaves, _containers, max_leaves=10)
    return st.one_of(
        st.dictionaries(texts, values, max_size=4),
        st.dictionaries(texts, values, dict_class=OrderedDict, max_size=4),
    )


@st.composite
def boxes_in(draw: Draw, shape: tuple[int, ...], *, least: int = 0) -> Box:
    """A box inside of a shape."""
    offset, extent = [], []
    for size in shape:
        low = draw(st.integers(0, size - least if size >= least else 0))
        offset.append(low)
        extent.append(draw(st.integers(min(least, size - low), size - low)))
    return Box(tuple(offset), tuple(extent))


@st.composite
def tilings(draw: Draw, shape: tuple[int, ...], max_cuts: int = 6) -> list[Box]:
    """A tiling of a shape without empty dims: cuts from end to end, and pinwheels."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, max_cuts))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        boxes += draw(_cut(box))
    return boxes


@st.composite
def _cut(draw: Draw, box: Box) -> list[Box]:
    round_dims = [dim for dim, size in enumerate(box.shape) if size >= 3]
    if len(round_dims) >= 2 and draw(st.booleans()):
        return _pinwheel(box, *draw(st.permutations(round_dims))[:2])
    dims = [dim for dim, size in enumerate(box.shape) if size >= 2]
    if not dims:
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.shape[dim] - 1))
    return [_part(box, {dim: (0, at)}), _part(box, {dim: (at, box.shape[dim])})]


def _pinwheel(box: Box, a: int, b: int) -> list[Box]:
    """Five boxes that no cut from end to end takes apart."""
    n, m = box.shape[a], box.shape[b]
    return [
        _part(box, {a: (0, 1), b: (0, m - 1)}),
        _part(box, {a: (0, n - 1), b: (m - 1, m)}),
        _part(box, {a: (n - 1, n), b: (1, m)}),
        _part(box, {a: (1, n), b: (0, 1)}),
        _part(box, {a: (1, n - 1), b: (1, m - 1)}),
    ]


def _part(box: Box, ranges: dict[int, tuple[int, int]]) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    for dim, (low, high) in ranges.items():
        offset[dim], shape[dim] = box.offset[dim] + low, high - low
    return Box(tuple(offset), tuple(shape))
