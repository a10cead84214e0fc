"""Save and load nested states of numpy arrays and plain values.

Decides which numpy dtype stands for which logical dtype, which arrays are tied, and how arrays
that are not packed, or not little-endian, become packed bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from dsdformat import folders
from dsdformat.errors import UnsupportedValueError, printable, shorten
from dsdformat.format.decoding import Hooks
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.paths import render_path
from dsdformat.format.values import Named, Scalar
from dsdformat.limits import MIB
from dsdformat.signing import Keys
from dsdformat.sources import TensorSource
from dsdformat.writer import Codec

__all__ = ["load", "save"]

PathLike = str | os.PathLike[str]
_NATIVE = {
    "bool",
    *(f"float{bits}" for bits in (16, 32, 64)),
    *(f"complex{bits}" for bits in (64, 128)),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
}
_SLAB_NBYTES = 4 << 20


def _numpy_dtypes() -> dict[str, np.dtype[Any]]:
    """Map each logical dtype to a numpy dtype.

    One that neither numpy nor ml_dtypes has becomes a structured dtype with one field of its
    name, so that its bytes and its name survive a round trip.
    """
    table: dict[str, np.dtype[Any]] = {}
    for name, row in DTYPES.items():
        if name in _NATIVE:
            table[name] = np.dtype(name)
        elif hasattr(ml_dtypes, name):
            table[name] = np.dtype(getattr(ml_dtypes, name))
        else:
            table[name] = np.dtype([(name, f"u{row.itemsize}")])
    return table


_DTYPES = _numpy_dtypes()
_NDIM_MAX = 64 if int(np.__version__.split(".")[0]) >= 2 else 32
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ADDED = 2  # `isbuiltin` of dtypes that numpy is given by others
_TYPES = {dtype.type: name for dtype, name in _NAMES.items() if dtype.isbuiltin == _ADDED}


def name_of(dtype: Any) -> str | None:
    """Return the logical name of a numpy dtype, or None for one that the format does not have."""
    try:
        return _exact_name_of(dtype if dtype.names else dtype.newbyteorder("="))
    except TypeError:  # a dtype of the new style, such as StringDType
        return None


def _exact_name_of(dtype: Any) -> str | None:
    """Return the logical name of a dtype in the byte order of this machine."""
    # Not by the dtype where it is of ml_dtypes: numpy 1 changes its hash when it reads a pickle.
    return _TYPES.get(dtype.type) if dtype.isbuiltin == _ADDED else _NAMES.get(dtype)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a logical dtype, as `load` gives it."""
    return _DTYPES[name]


def save(
    path: PathLike,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    codec: Codec = "raw",
    user: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> str:
    """Save a nested state of arrays and plain values.

    Arrays that are the same memory, with the same shape, strides and dtype, are tied: stored
    once, and one array again after loading. Arrays need not be contiguous; values are stored in
    row-major order. The caller's arrays are read while this runs, and never changed.

    Args:
        path: The checkpoint's folder; parents are made.
        state: Dicts, lists, tuples and the other values of the format, with arrays anywhere in
            them; its own keys are strings.
        overwrite: Whether to replace a checkpoint that is there, once the new one is complete.
        codec: `raw`, `zstd` or `planes+zstd`, or a function from a tensor's name to one.
        user: User metadata: strings.
        threads: How many threads hash and write; up to 8 if None.

    Returns:
        The root digest.

    Raises:
        UnsupportedValueError: a value or dtype cannot be stored; nothing was written.
        StorageError: `already_exists`, or the medium failed; the target is as it was.

    Ranks: local.
    Memory: two blocks per thread; none for packed arrays.
    """
    sources: dict[Any, TensorSource] = {}

    def adapt(value: Any, place: Sequence[Any]) -> Any:
        if isinstance(value, np.ndarray):
            return sources.setdefault(identity_of(value), source_of(value, place))
        return value_of(value, place)

    with folders.create(
        path, overwrite=overwrite, codec=codec, user=user, threads=threads, adapt=adapt
    ) as writer:
        writer.add(state)
        return writer.commit()


def value_of(value: Any, place: Sequence[Any]) -> Any:
    """Return what stands for a numpy scalar or dtype; NotImplemented for anything else."""
    if isinstance(value, np.generic) and not isinstance(value, (np.str_, np.bytes_)):
        return _scalar(value, place)
    if isinstance(value, np.dtype):
        name = _exact_name_of(value)
        if name is None:
            raise _unsupported_dtype(value, place)
        return Named("numpy.dtype", name)
    return NotImplemented


def load(
    path: PathLike,
    *,
    verify: bool = True,
    digest: str | None = None,
    pubkey: Keys | None = None,
    threads: int | None = None,
) -> Any:
    """Load a whole checkpoint as a nested state of new arrays.

    Args:
        path: The checkpoint's folder.
        verify: Whether to compare data with its digests.
        digest: The root digest that the checkpoint must have.
        pubkey: An Ed25519 key that must have signed the checkpoint; see `dsdformat.open`.
        threads: How many threads read; up to 8 if None.

    Returns:
        The state, with a writable array at each tensor. Tied tensors are one array. A dtype
        that numpy lacks is a structured dtype with one field of its name.

    Raises:
        FormatError: the checkpoint is damaged, or not signed; see `dsdformat.open`.
        UnsupportedValueError: a tensor has more than 32 dims, with numpy 1.

    Ranks: local.
    Memory: the arrays, and one block per thread.
    """
    with folders.open(
        path, verify=verify, digest=digest, pubkey=pubkey, threads=threads
    ) as checkpoint:
        for entry in checkpoint:
            _check_ndim(entry.shape, entry.name)
            if not 0 < entry.nbytes < MIB:
                entry.check()  # that there is so much, before it is allocated
        arrays = [np.empty(entry.shape, _DTYPES[entry.dtype]) for entry in checkpoint]
        checkpoint.read_all([_bytes_of(array) for array in arrays])
        return checkpoint.tree(_hooks(arrays))


def _hooks(arrays: list[Any]) -> Hooks:
    return Hooks(
        named=named_of,
        scalar=scalar_of,
        tensor=lambda ref: arrays[ref.index],
    )


def _check_ndim(shape: Sequence[int], name: str) -> None:
    if len(shape) > _NDIM_MAX:
        raise UnsupportedValueError(
            f"{printable(name)} has {len(shape)} dims, more than this numpy has: {_NDIM_MAX}",
            path_in_tree=name,
            hint="use numpy 2, which has as many as the format",
        )


def array_over(view: memoryview, dtype: str, shape: Sequence[int]) -> Any:
    """Return the array of these packed bytes, which it shares and keeps alive.

    Raises:
        UnsupportedValueError: it has more than 32 dims, with numpy 1.
    """
    _check_ndim(shape, "a tensor")
    if not len(view):
        return np.empty(shape, dtype_of(dtype))
    return np.frombuffer(view, _little(dtype_of(dtype))).reshape(shape)


def scalar_of(value: Scalar) -> Any:
    """Return the numpy scalar that was stored."""
    return np.frombuffer(value.data, _little(_DTYPES[value.dtype]))[0]


def named_of(value: Named) -> Any:
    """Return the numpy dtype that a name stands for, or the name where it stands for another."""
    return _DTYPES.get(value.name, value) if value.kind == "numpy.dtype" else value


def identity_of(array: Any) -> Any:
    """Return what two arrays share that are the same tensor; an empty array is only itself."""
    if array.size == 0:
        return id(array)
    address = array.__array_interface__["data"][0]
    return address, array.shape, array.strides, array.dtype


def source_of(array: Any, place: Sequence[Any]) -> TensorSource:
    """Return the source of an array.

    Raises:
        UnsupportedValueError: a subclass of an array, or a dtype that the format lacks.
    """
    if type(array) not in (np.ndarray, np.memmap):
        raise UnsupportedValueError(
            f"{render_path(place)}: an array of type {type(array).__name__} cannot be stored",
            path_in_tree=render_path(place),
            hint="store its parts as plain arrays",
        )
    name = _name(array.dtype, place)
    packed = array.flags.c_contiguous and array.dtype == _little(array.dtype)
    data: Any = _bytes_of(array) if packed else _slabs(array)
    return TensorSource.of(name, array.shape, data)


def _slabs(array: Any) -> Callable[[], Iterator[Any]]:
    """Pack an array a few megabytes at a time."""
    return lambda: map(_bytes_of, _pack(array))


def _pack(array: Any) -> Iterator[Any]:
    if array.nbytes <= _SLAB_NBYTES or array.ndim == 0:
        yield _packed(array)
        return
    rows = _SLAB_NBYTES * len(array) // array.nbytes
    if rows == 0:  # even one is too large
        for row in array:
            yield from _pack(row)
        return
    for start in range(0, len(array), rows):
        yield _packed(array[start : start + rows])


def _packed(array: Any) -> Any:
    return np.ascontiguousarray(array, dtype=_little(array.dtype))


def _bytes_of(array: Any) -> memoryview:
    if array.size == 0:
        return memoryview(bytearray())
    return memoryview(array.reshape(-1).view(np.uint8))


def _scalar(value: Any, place: Sequence[Any]) -> Scalar:
    name = _name(value.dtype, place)
    return Scalar(name, np.asarray(value, dtype=_little(value.dtype)).tobytes())


def _name(dtype: Any, place: Sequence[Any]) -> str:
    name = name_of(dtype)
    if name is None:
        raise _unsupported_dtype(dtype, place)
    return name


def _unsupported_dtype(dtype: Any, place: Sequence[Any]) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"{render_path(place)}: the numpy dtype {shorten(dtype)} cannot be stored",
        code="unsupported_dtype",
        path_in_tree=render_path(place),
        hint="convert it to numbers first, as with astype or view",
    )


def _little(dtype: Any) -> Any:
    return dtype.newbyteorder("<") if sys.byteorder == "big" or dtype.byteorder == ">" else dtype
