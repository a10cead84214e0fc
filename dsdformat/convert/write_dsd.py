"""Write a checkpoint of ours: any state that can be read at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dsdformat import folders
from dsdformat.convert.files import Bytes, read_bytes
from dsdformat.convert.foreign import state_of
from dsdformat.convert.outputs import Job, Meter, Written
from dsdformat.errors import ArgumentError
from dsdformat.limits import MIB
from dsdformat.sources import TensorSource
from dsdformat.writer import Codec

__all__ = ["counted", "write_dsd"]

_SIDE_NBYTES_MAX = 64 * MIB


def write_dsd(job: Job, *, codec: Codec = "raw") -> Written:
    """Write a folder with a manifest; free strings of the source become user metadata.

    Raises:
        UnsupportedValueError: a value is nested too deep.
        StorageError: `already_exists`, `not_replaceable`, or the medium failed.

    Memory: names and values; 4 MiB of a tensor, or 40 MiB of one that is not contiguous.
    """
    job.meter.total = sum(_distinct(job).values())
    sides = {name: _whole(name, source) for name, source in job.sides.items()}
    with folders.create(
        job.path,
        overwrite=job.overwrite,
        codec=codec,
        user=job.opened.metadata,
        threads=job.threads,
    ) as writer:
        writer.add(state_of(job.opened.tree, lambda one: counted(one.source(), job.meter)))
        for name, data in sides.items():
            writer.add_file(name, data)
        root = writer.commit()
    files = tuple(sorted(os.listdir(job.path)))
    return Written(sum(1 for _ in job.opened), job.meter.total, files, root)


def _distinct(job: Job) -> dict[int, int]:
    """Return the length of each tensor, by identity."""
    return {tensor.identity: tensor.nbytes for _, tensor in job.opened}


def counted(source: TensorSource, meter: Meter) -> TensorSource:
    """Return a source that counts what is taken of it."""
    return replace(source, chunks=[(box, _metered(data, meter)) for box, data in source.chunks])


def _metered(data: Any, meter: Meter) -> Any:
    if not callable(data):
        return data
    make: Callable[[], Iterator[Any]] = data

    def pieces() -> Iterator[Any]:
        for piece in make():
            nbytes = len(piece)
            yield piece
            meter.add(nbytes)

    return pieces


def _whole(name: str, source: Bytes) -> bytes:
    if source.nbytes > _SIDE_NBYTES_MAX:
        raise ArgumentError(
            f"{name} has {source.nbytes} bytes, too many for a side file", code="bad_argument"
        )
    return read_bytes(source, 0, source.nbytes)
