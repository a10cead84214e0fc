"""Write folders of `torch.distributed.checkpoint`, which `dcp.load` reads on any mesh.

Tensors are cut into chunks of rows, so that each rank reads little more than it needs. A tied
tensor is stored once, and each of its names says so; torch reads it for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from dsdformat.boxes import Box, whole
from dsdformat.convert.archive_writing import ALIGNMENT
from dsdformat.convert.boxed import BoxTensor
from dsdformat.convert.dcp import METADATA_NAME
from dsdformat.convert.dcp_emitting import emit_metadata
from dsdformat.convert.dcp_flat import FlatItem, flat_items, is_torch_tensor
from dsdformat.convert.dcp_metadata import ChunkPlace, DcpEntry
from dsdformat.convert.dcp_names import CHANNELS_LAST, Info
from dsdformat.convert.foreign import AnyTensor, rooted
from dsdformat.convert.outputs import Job, Meter, Written, folder_guard, write_sides
from dsdformat.convert.plain_emitting import refuse, refuse_dtype
from dsdformat.convert.storages import torch_dtype_name
from dsdformat.convert.torch_emitting import dim_order_of
from dsdformat.convert.torch_plans import TorchPlan
from dsdformat.convert.write_torch import SinkWriter
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import GIB, MIB
from dsdformat.modelfiles import parse_size
from dsdformat.storage.target import LocalTarget

__all__ = ["write_dcp"]

CHUNK_NBYTES = 64 * MIB
FILE_NBYTES = 4 * GIB

_SUFFIX = ".distcp"


def write_dcp(
    job: Job,
    *,
    max_chunk_bytes: int | str = CHUNK_NBYTES,
    max_file_bytes: int | str = FILE_NBYTES,
) -> Written:
    """Write a folder with the state of the job, flattened as torch flattens it.

    Args:
        job: What to write.
        max_chunk_bytes: How long a chunk of a tensor is at most, if it has several rows.
        max_file_bytes: How long a file is at most, unless one item alone is longer.

    Raises:
        UnsupportedValueError: the folder cannot hold something; nothing was written.
        StorageError: `already_exists`, `not_replaceable`, or the medium failed.

    Ranks: local.
    Memory: names and values, 16 MiB, and what reading the tensors needs.
    """
    most = parse_size(max_chunk_bytes), parse_size(max_file_bytes)
    plan = _Plan(flat_items(rooted(job.opened.tree)), job, most[0])
    job.meter.total = plan.nbytes
    names = [METADATA_NAME, *job.sides]
    target = LocalTarget(job.path, overwrite=job.overwrite, guard=folder_guard(names))
    try:
        with _Files(target, most[1], job.meter) as files:
            entries = plan.write(files)
        with SinkWriter(target.create(METADATA_NAME)) as sink:
            emit_metadata(entries, sink.write)
        write_sides(target, job.sides)
        target.commit()
    except BaseException:
        target.abort()
        raise
    return Written(len(plan.tensors), plan.nbytes, (*files.names, *names))


class _Plan:
    """What will be written: checked as a whole before anything is.

    Attributes:
        tensors: The items that are tensors, and those in values.
        nbytes: Of all data.
    """

    def __init__(self, items: Sequence[FlatItem], job: Job, chunk_nbytes: int) -> None:
        self.items = items
        self.tensors = [name for name, _ in job.opened]
        self.nbytes = 0
        self.chunk_nbytes = chunk_nbytes
        self.plans: dict[str, TorchPlan] = {}
        attributes = job.opened.attributes
        seen: set[int] = set()
        for item in items:
            if is_torch_tensor(item.value):
                self._check_tensor(item)
                if item.value.identity not in seen:
                    self.nbytes += item.value.nbytes
                seen.add(item.value.identity)
        for item in items:
            if not is_torch_tensor(item.value):
                plan = self.plans[item.name] = TorchPlan.of(
                    item.value, attributes=attributes, weights_only=False, path=item.path
                )
                self.nbytes += plan.nbytes
                inner = {stored.tensor.identity for stored in plan.storages}
                if inner & seen:
                    refuse(item.path, "a value with a tensor that is tied to others")
                seen |= inner

    def _check_tensor(self, item: FlatItem) -> None:
        dtype = item.value.dtype
        if torch_dtype_name(dtype) is None:
            refuse_dtype(item.path, f"a tensor of {dtype}, which torch does not have")

    def write(self, files: _Files) -> list[DcpEntry]:
        """Write all items; return what the metadata say of them."""
        places: dict[int, tuple[ChunkPlace, ...]] = {}
        entries = []
        for item in self.items:
            plan = self.plans.get(item.name)
            if plan is not None:
                entries.append(DcpEntry(item.name, item.path, info=files.write(plan)))
                continue
            tensor = item.value
            if tensor.identity not in places:
                places[tensor.identity] = tuple(self._chunks(tensor, files))
            entries.append(
                DcpEntry(
                    item.name,
                    item.path,
                    tensor.dtype,
                    "strided",
                    tuple(tensor.shape),
                    places[tensor.identity],
                    channels_last=dim_order_of(tensor) == CHANNELS_LAST,
                )
            )
        return entries

    def _chunks(self, tensor: AnyTensor, files: _Files) -> Iterator[ChunkPlace]:
        for box in _cut(tensor, self.chunk_nbytes):
            chunk = tensor if box == whole(tensor.shape) else BoxTensor(tensor, box)
            yield ChunkPlace(box, files.write(TorchPlan.of(chunk)))


class _Files(AbstractContextManager["_Files"]):
    """The data files, one after another; a context manager.

    Attributes:
        names: Of those that were begun.
    """

    def __init__(self, target: LocalTarget, max_nbytes: int, meter: Meter) -> None:
        self.names: list[str] = []
        self._target = target
        self._max_nbytes = max_nbytes
        self._meter = meter
        self._sink: SinkWriter | None = None

    def write(self, plan: TorchPlan) -> Info:
        """Write an item, and return where it is."""
        sink = self._sink_for(plan.nbytes)
        sink.write(bytes(-sink.at % ALIGNMENT))
        begin = sink.at
        plan.write_zip(sink.write, self._meter)
        return Info(self.names[-1], begin, sink.at - begin, ())

    def _sink_for(self, nbytes: int) -> SinkWriter:
        """Return the file that the next item goes to."""
        sink = self._sink
        if sink is not None and sink.at + nbytes > self._max_nbytes:
            sink.close()
            sink = None
        if sink is None:
            self.names.append(f"__0_{len(self.names)}{_SUFFIX}")
            sink = self._sink = SinkWriter(self._target.create(self.names[-1]))
        return sink

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._sink is not None:
            self._sink.__exit__(kind)


def _cut(tensor: AnyTensor, nbytes: int) -> Iterator[Box]:
    """Cut a tensor into ranges of rows of at most so many bytes, one row at least."""
    shape = tuple(tensor.shape)
    row = math.prod(shape[1:]) * DTYPES[tensor.dtype].itemsize
    if not shape or tensor.nbytes <= nbytes:
        yield whole(shape)
        return
    step = max(1, nbytes // row)
    for start in range(0, shape[0], step):
        size = min(step, shape[0] - start)
        yield Box((start, *[0] * (len(shape) - 1)), (size, *shape[1:]))
