"""Write a checkpoint of ours: any state that can be read at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from dsdformat.convert.files import Bytes, read_bytes
from dsdformat.convert.foreign import state_of
from dsdformat.convert.outputs import Job, Meter, Written
from dsdformat.convert.teams import TeamTarget
from dsdformat.errors import ArgumentError
from dsdformat.limits import MIB
from dsdformat.sources import TensorSource
from dsdformat.storage.local import storage_errors
from dsdformat.storage.target import LocalTarget
from dsdformat.writer import Codec, PartWriter, Writer

__all__ = ["counted", "write_dsd"]

_SIDE_NBYTES_MAX = 64 * MIB


def write_dsd(job: Job, *, codec: Codec = "raw") -> Written:
    """Write a folder with a manifest; free strings of the source become user metadata.

    Raises:
        UnsupportedValueError: a value is nested too deep.
        StorageError: `already_exists`, `not_replaceable`, or the medium failed.

    Ranks: collective over the team.
    Memory: names and values; 4 MiB of a tensor, or 40 MiB of one that is not contiguous.
    """
    team, nbytes = job.team, sum(_distinct(job).values())
    job.meter.total = nbytes
    with TeamTarget(team, partial(LocalTarget, job.path, overwrite=job.overwrite)) as target:
        writer: PartWriter | None = None
        with target.together():
            writer = _planned(job, target, codec)
        assert writer is not None
        if isinstance(writer, Writer):
            writer.write()
        else:
            writer.finish()
        root, files = "", []
        with target.together():
            if isinstance(writer, Writer):
                root = writer.commit()
                with storage_errors(job.path):
                    files = sorted(os.listdir(job.path))
    root, files = team.tell([root, files])
    return Written(sum(1 for _ in job.opened), nbytes, tuple(files), root)


def _planned(job: Job, target: TeamTarget, codec: Codec) -> PartWriter:
    """Return a writer that has planned: the coordinator's, or one that writes a share with it."""
    options: dict[str, Any] = {"codec": codec, "threads": job.threads}
    if job.team.world_size > 1:
        options["write_files"] = partial(target.write_files, meter=job.meter)
    if isinstance(target.own, LocalTarget):
        coordinator = Writer(target.own, user=job.opened.metadata, **options)
        for name, source in job.sides.items():
            coordinator.add_file(name, _whole(name, source))
        writer: PartWriter = coordinator
    else:
        writer = PartWriter(target.joined, **options)
    writer.add(state_of(job.opened.tree, lambda one: counted(one.source(), job.meter)))
    writer.plan()
    return writer


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
