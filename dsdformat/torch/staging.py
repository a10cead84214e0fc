"""Copy what a planned save will write into host memory that is kept from save to save.

One large buffer takes all chunks of a rank, each at a place of its own. Its pages are touched once:
memory that is new takes four times as long to fill. A chunk lies in its pages as it does in those
of its file, so that whole pages can be written from there past the page cache.

Where CUDA is in use the buffer is pinned, and what lies on a device is copied by a stream of its
own, behind what the current stream has to do; the current stream then waits for the copy before it
goes on, so that nothing that is queued on it later changes what is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import PAGESIZE
from typing import Any

import numpy as np
import torch

from dsdformat.datafiles import ChunkJob
from dsdformat.format.codecs import RAW
from dsdformat.limits import KIB, MIB
from dsdformat.sources import copy_into
from dsdformat.torch.buffers import Slabs, as_bits, tensor_over
from dsdformat.workers import Task, Workers

__all__ = ["HostBuffer", "stage"]

_ALIGNMENT = 64  # of what is compressed, whose place in the file is not known
_TASK_NBYTES = 8 * MIB
_LARGE_NBYTES = 64 * KIB  # from here on it pays to let other threads of Python go on


class HostBuffer:
    """Host memory that is kept, touched, until it is freed."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._for_devices = self._pinned = False

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return 0 if self._memory is None else self._memory.numel() - PAGESIZE

    def room(self, nbytes: int, *, pinned: bool = False) -> memoryview:
        """Return memory of this length, from the beginning of a page; what it held is lost.

        Memory that has to grow grows by a quarter at least, so that a state which grows by a little
        each time does not take new memory each time.

        Raises:
            MemoryError: there is not so much.

        Memory: what is returned, once; it stays until `free`.
        """
        short = self.nbytes < nbytes
        if self._memory is None or short or (pinned and not self._for_devices):
            most = max(nbytes, self.nbytes * 5 // 4 if short else self.nbytes)
            self.free()
            try:
                self._memory = torch.empty(most + PAGESIZE, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:
                raise MemoryError(f"a copy of the state takes {nbytes} bytes: {error}") from error
            self._for_devices, self._pinned = pinned, pinned and _pin(self._memory)
        first = -self._memory.data_ptr() % PAGESIZE
        array: Any = self._memory[first : first + nbytes].numpy()
        return memoryview(array)

    def free(self) -> None:
        """Give the memory back."""
        memory, self._memory = self._memory, None
        if memory is not None and self._pinned:
            _cudart().cudaHostUnregister(memory.data_ptr())
        self._for_devices = self._pinned = False


def stage(jobs: Sequence[ChunkJob], buffer: HostBuffer, workers: Workers) -> list[Any]:
    """Copy the data of chunks into the buffer, and let the chunks have it there.

    Args:
        jobs: In the order in which they are written.
        buffer: In use until they are written.
        workers: Who copies what lies in host memory.

    Returns:
        Events of devices; the copy is complete once all of them have come.

    Raises:
        MemoryError: there is not enough.
        MismatchError: `data_mismatch`.

    Memory: the buffer; for what is neither packed nor on a CUDA device, one slab per thread.
    """
    places = _places(jobs)
    device = [job for job in jobs if type(job.data) is Slabs and job.data.tensor.is_cuda]
    room = buffer.room(places[-1], pinned=bool(device))
    pairs = [(job, room[at : at + job.nbytes]) for job, at in zip(jobs, places[:-1], strict=True)]
    remote = set(map(id, device))
    events = _copy_from_devices([pair for pair in pairs if id(pair[0]) in remote])
    workers.run(_tasks([pair for pair in pairs if id(pair[0]) not in remote]))
    for job, view in pairs:
        job.data = view
    return events


def _places(jobs: Sequence[ChunkJob]) -> list[int]:
    """Return where each chunk begins in the buffer, and the end."""
    places, end = [], 0
    for job in jobs:
        # Chunks of a file follow each other here too, so only its first leaves a gap.
        raw = job.codec == RAW
        end += (job.byte_offset - end) % PAGESIZE if raw else -end % _ALIGNMENT
        places.append(end)
        end += job.nbytes
    return [*places, end]


def _tasks(pairs: Sequence[tuple[ChunkJob, memoryview]]) -> Iterator[Task]:
    """Cut the copies into tasks of about one size."""
    batch: list[tuple[ChunkJob, memoryview]] = []
    held = 0
    for job, into in pairs:
        if callable(job.data):
            yield _packing(job, into)
        elif job.nbytes < _TASK_NBYTES:
            batch.append((job, into))
            held += job.nbytes
            if held >= _TASK_NBYTES:
                yield _batch(batch)
                batch, held = [], 0
        else:
            source = job.view()
            for at in range(0, job.nbytes, _TASK_NBYTES):
                yield _piece(source[at : at + _TASK_NBYTES], into[at : at + _TASK_NBYTES])
    if batch:
        yield _batch(batch)


def _batch(batch: list[tuple[ChunkJob, memoryview]]) -> Task:
    def copy() -> None:
        for job, into in batch:
            _copy(job.view(), into)

    return copy


def _piece(source: memoryview, into: memoryview) -> Task:
    return lambda: _copy(source, into)


def _copy(source: memoryview, into: memoryview) -> None:
    if len(source) < _LARGE_NBYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def _packing(job: ChunkJob, into: memoryview) -> Task:
    def copy() -> None:
        if type(job.data) is Slabs and job.nbytes:
            _copy_tensor(job.data.tensor, into)
        else:
            copy_into(job.data, into, job.name)

    return copy


def _copy_tensor(tensor: torch.Tensor, into: memoryview, **options: Any) -> None:
    target = tensor_over(into, tensor.dtype, tensor.shape)
    as_bits(target).copy_(as_bits(tensor), **options)


def _copy_from_devices(pairs: Sequence[tuple[ChunkJob, memoryview]]) -> list[Any]:
    by_device: dict[torch.device, list[tuple[torch.Tensor, memoryview]]] = {}
    for job, into in pairs:
        if isinstance(job.data, Slabs) and job.nbytes:
            by_device.setdefault(job.data.tensor.device, []).append((job.data.tensor, into))
    return [_copy_from_device(device, copies) for device, copies in by_device.items()]


def _copy_from_device(
    device: torch.device, copies: Sequence[tuple[torch.Tensor, memoryview]]
) -> Any:
    current: Any = torch.cuda.current_stream(device)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for tensor, into in copies:
            _copy_tensor(tensor, into, non_blocking=True)
            tensor.record_stream(stream)  # its memory is not given to others before it is copied
        event = stream.record_event()
    current.wait_event(event)
    return event


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory that is there, for all devices; torch's own pinned memory takes a power of two."""
    code = _cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 1)
    return int(code) == 0


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
