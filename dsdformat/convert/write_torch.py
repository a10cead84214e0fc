"""Write files of `torch.save`, in the zip form and in the stream form of old versions.

What is written holds no code to run: `torch.load(weights_only=True)` reads it, unless
`weights_only=False` allows the other values of the format too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

from dsdformat.convert.archive_writing import ArchiveWriter
from dsdformat.convert.outputs import Job, Written
from dsdformat.convert.teams import DOING, TeamTarget
from dsdformat.convert.torch_plans import TorchPlan
from dsdformat.errors import ArgumentError, shorten
from dsdformat.storage.base import Sink
from dsdformat.storage.target import FileTarget

__all__ = ["SinkWriter", "TorchForm", "write_torch"]

TorchForm = Literal["zip", "stream"]
_FORMS = ("zip", "stream")


def write_torch(job: Job, *, weights_only: bool = True, form: TorchForm = "zip") -> Written:
    """Write a file of `torch.save`.

    Tied tensors share a storage, and tensors keep the order of their dims in memory.

    Args:
        job: What to write, and where.
        weights_only: Whether to refuse what `torch.load(weights_only=True)` does not read, as
            arrays of numpy and dates.
        form: `zip`, or `stream` as torch before 1.6 has it, which `mmap=True` does not read.

    Raises:
        UnsupportedValueError: `unsupported_value` or `unsupported_dtype`, with its place;
            nothing was written.
        StorageError: as `FileTarget`.

    Ranks: collective over the team.
    Memory: the pickle of the values, 16 MiB, and what reading the tensors needs.
    """
    if form not in _FORMS:
        raise ArgumentError(f"form={shorten(form)} is neither zip nor stream", code="bad_argument")
    if form == "stream" and job.team.world_size > 1:
        raise ArgumentError("the stream form is written by one process", code="bad_argument")
    opened = job.opened
    with job.team.together(DOING):
        plan = TorchPlan.of(
            opened.tree,
            attributes=opened.attributes,
            weights_only=weights_only,
            legacy=form == "stream",
        )
    with TeamTarget(job.team, partial(FileTarget, job.path, overwrite=job.overwrite)) as target:
        label = job.team.tell(target.own.label if isinstance(target.own, FileTarget) else "")
        target.begin([label])
        if form == "zip":
            _write_zip(job, plan, target, label)
        else:
            job.meter.total = plan.nbytes
            with target.opened(label) as sink:
                plan.write_stream(SinkWriter(sink).write, job.meter)
        target.commit()
    return Written(sum(1 for _ in opened), plan.nbytes, ())


def _write_zip(job: Job, plan: TorchPlan, target: TeamTarget, label: str) -> None:
    """Write this rank's share of the zip form, and the directory on the coordinator.

    Ranks: collective.
    """
    team = job.team
    job.meter.total = plan.share_nbytes(team.rank, team.world_size)

    def write(data: Any) -> None:
        sink.write_at(archive.nbytes, [data])

    archive = ArchiveWriter(write)
    with target.together(), target.opened(label) as sink:
        plan.write_share(archive, job.meter, part=team.rank, of=team.world_size)
    told = team.gather_values(archive.checksums)
    with target.together():
        if team.is_coordinator:
            with target.opened(label) as sink:
                archive.end([max(some) for some in zip(*told, strict=True)])


class SinkWriter(AbstractContextManager["SinkWriter"]):
    """Writes to a file in order; a context manager that closes it.

    Attributes:
        at: How much was written.
    """

    def __init__(self, sink: Sink) -> None:
        self.at = 0
        self._sink = sink

    def write(self, data: Any) -> None:
        """Write some bytes behind the others."""
        self._sink.write_at(self.at, [data])
        self.at += len(data)

    def close(self) -> None:
        """Make the file durable and close it."""
        self._sink.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._sink.discard()
