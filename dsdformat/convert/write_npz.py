"""Write `.npz` files of numpy: a zip of `.npy` files, stored. Arrays of numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from dsdformat.convert.archive import find_name_fault
from dsdformat.convert.archive_writing import ArchiveWriter
from dsdformat.convert.flat import flat_tensors
from dsdformat.convert.foreign import AnyTensor
from dsdformat.convert.npz import NPY_SUFFIX
from dsdformat.convert.numpy_names import typestr_of
from dsdformat.convert.outputs import Job, Meter, Written
from dsdformat.convert.packed import packed_blocks
from dsdformat.convert.write_torch import SinkWriter
from dsdformat.errors import ArgumentError, UnsupportedValueError, listed, printable, shorten
from dsdformat.format.dtypes import DTYPES
from dsdformat.storage.target import FileTarget

__all__ = ["write_npz"]

_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64
_NDIM_MAX = 32  # of numpy before 2.0


def write_npz(job: Job, *, ties: Literal["duplicate"] | None = None) -> Written:
    """Write one file that `numpy.load` reads without pickle.

    Args:
        job: What to write.
        ties: `duplicate` allows tied tensors, each written under every name; they are not tied
            again, so that they are refused without it.

    Raises:
        UnsupportedValueError: the file cannot hold something; nothing was written.
        StorageError: as `FileTarget`.

    Ranks: local.
    Memory: as `packed_blocks`.
    """
    if ties not in (None, "duplicate"):
        raise ArgumentError(
            f"ties={shorten(ties)}: an .npz file has no room for a record of them",
            code="bad_argument",
            hint="pass ties='duplicate'",
        )
    tensors = flat_tensors(job.opened, "an .npz file")
    _check(tensors, tied_allowed=ties is not None)
    job.meter.total = sum(tensor.nbytes for tensor in tensors.values())
    target = FileTarget(job.path, overwrite=job.overwrite)
    try:
        with SinkWriter(target.sink()) as sink:
            archive = ArchiveWriter(sink.write)
            for name, tensor in tensors.items():
                head = _header(tensor)
                blocks = _blocks(head, tensor, job.meter)
                archive.add(name + NPY_SUFFIX, len(head) + tensor.nbytes, blocks)
            archive.end()
        target.commit()
    except BaseException:
        target.abort()
        raise
    return Written(len(tensors), job.meter.total, (target.label,))


def _check(tensors: Mapping[str, AnyTensor], *, tied_allowed: bool) -> None:
    """Refuse what the file cannot hold as it is, all of a kind at once."""
    dtypes = {name: one.dtype for name, one in tensors.items() if typestr_of(one.dtype) is None}
    if dtypes:
        raise UnsupportedValueError(
            f"numpy has no {listed(sorted(set(dtypes.values())))} of its own: {_names(dtypes)}",
            code="unsupported_dtype",
            path_in_tree=next(iter(dtypes)),
            hint="leave them out, or store them in another dtype first",
        )
    deep = [name for name, one in tensors.items() if len(one.shape) > _NDIM_MAX]
    if deep:
        _refuse(deep, f"numpy has no arrays of more than {_NDIM_MAX} dims")
    bad = [name for name in tensors if find_name_fault(name + NPY_SUFFIX) is not None]
    if bad:
        _refuse(bad, "no names of files in a zip")
    first: dict[int, str] = {}
    tied = [name for name, one in tensors.items() if first.setdefault(one.identity, name) != name]
    if tied and not tied_allowed:
        _refuse(
            tied,
            "an .npz file does not know that tensors are tied",
            "pass ties='duplicate' to write them under each name",
        )


def _refuse(names: list[str], why: str, hint: str | None = None) -> None:
    raise UnsupportedValueError(f"{why}: {_names(names)}", path_in_tree=names[0], hint=hint)


def _names(names: Iterable[str]) -> str:
    return listed(list(map(printable, names)))


def _header(tensor: AnyTensor) -> bytes:
    """Return what stands before the data in an `.npy` file, as numpy writes it."""
    typestr = typestr_of(tensor.dtype)
    order = "<" if DTYPES[tensor.dtype].itemsize > 1 else "|"
    sizes = "".join(f"{size}, " for size in tensor.shape)
    shape = f"({sizes.removesuffix(' ') if len(tensor.shape) == 1 else sizes.removesuffix(', ')})"
    text = f"{{'descr': '{order}{typestr}', 'fortran_order': False, 'shape': {shape}, }}"
    room = -(len(_MAGIC) + 2 + len(text) + 1) % _ALIGNMENT
    body = text.encode() + b" " * room + b"\n"
    return _MAGIC + len(body).to_bytes(2, "little") + body


def _blocks(head: bytes, tensor: AnyTensor, meter: Meter) -> Iterator[bytes | memoryview]:
    yield head
    for block in packed_blocks(tensor):
        yield block
        meter.add(len(block))
