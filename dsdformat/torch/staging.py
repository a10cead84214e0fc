"""Copy what a planned save will write into host memory that is kept from save to save.

One large buffer takes all chunks of a rank, each at a place of its own. Its pages are touched once:
memory that is new takes up to four times as long to fill. A chunk lies in its pages as it does in
those of its file, so that whole pages can be written from there past the page cache.

Where CUDA is in use the buffer is pinned, and what lies on a device is copied by a stream of its
own, behind what the current stream has to do; the current stream then waits for the copy before it
goes on, so that nothing that is queued on it later changes what is saved.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dsdformat.chunks import Chunks
from dsdformat.file_plans import FilePlan
from dsdformat.format.codecs import RAW
from dsdformat.limits import KIB, MIB
from dsdformat.sources import copy_into
from dsdformat.torch.buffers import Slabs, as_bits, tensor_over
from dsdformat.workers import Task, Workers

__all__ = ["HostBuffer", "stage"]

_ALIGNMENT = 64  # of what is compressed, whose place in the file is not known
_TASK_NBYTES = 8 * MIB
_HUGE_NBYTES = 4 * MIB  # from here on memory is taken in pages of 2 MiB
_LARGE_NBYTES = 64 * KIB  # from here on it pays to let other threads of Python go on


class HostBuffer:
    """Host memory that is kept, touched, until it is freed."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._for_devices = self._pinned = False

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return 0 if self._memory is None else self._memory.numel() - mmap.PAGESIZE

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
                self._memory = _new_memory(most + mmap.PAGESIZE)
            except (OSError, RuntimeError) as error:
                raise MemoryError(f"a copy of the state takes {nbytes} bytes: {error}") from error
            self._for_devices, self._pinned = pinned, pinned and _pin(self._memory)
        first = -self._memory.data_ptr() % mmap.PAGESIZE
        array: Any = self._memory[first : first + nbytes].numpy()
        return memoryview(array)

    def free(self) -> None:
        """Give the memory back."""
        memory, self._memory = self._memory, None
        if memory is not None and self._pinned:
            _cudart().cudaHostUnregister(memory.data_ptr())
        self._for_devices = self._pinned = False


def _new_memory(nbytes: int) -> torch.Tensor:
    """Return memory that is not touched yet: in huge pages, which takes a third of the time to.

    Raises:
        OSError, RuntimeError: there is not so much.
    """
    if sys.platform == "linux" and nbytes >= _HUGE_NBYTES:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def stage(plans: Sequence[FilePlan], buffer: HostBuffer, workers: Workers) -> list[Any]:
    """Copy the data of chunks into the buffer, and let the chunks have it there.

    Args:
        plans: The files in which they are written, in that order.
        buffer: In use until they are written.
        workers: Who copies what lies in host memory.

    Returns:
        Events of devices; the copy is complete once all of them have come.

    Raises:
        MemoryError: there is not enough.
        MismatchError: `data_mismatch`.

    Memory: the buffer; for what is neither packed nor on a CUDA device, one slab per thread.
    """
    if not plans:
        return []
    chunks, rows = plans[0].chunks, [row for plan in plans for row in plan.rows]
    places, end = _places(plans)
    device = {row for row, data in enumerate(chunks.data) if _is_on_device(data)}
    room = buffer.room(end, pinned=bool(device))
    copies = _Copies(chunks, room, dict(zip(rows, places, strict=True)))
    events = copies.from_devices([row for row in rows if row in device])
    workers.run(copies.tasks([row for row in rows if row not in device] if device else rows))
    for row, place in zip(rows, places, strict=True):
        chunks.data[row], chunks.start[row] = room, place
    return events


def _places(plans: Sequence[FilePlan]) -> tuple[list[int], int]:
    """Return where each chunk begins in the buffer, file by file, and the end."""
    places, end = [], 0
    for plan in plans:
        columns = zip(plan.codecs, plan.lengths, plan.byte_offset, strict=True)
        for codec, nbytes, byte_offset in columns:
            # Chunks of a file follow each other here too, so only its first leaves a gap.
            end += (byte_offset - end) % mmap.PAGESIZE if codec == RAW else -end % _ALIGNMENT
            places.append(end)
            end += nbytes
    return places, end


def _is_on_device(data: Any) -> bool:
    return type(data) is Slabs and data.tensor.is_cuda


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies of chunks, by their rows.

    Attributes:
        chunks: What is copied.
        room: The buffer.
        places: Where in it each goes.
    """

    chunks: Chunks
    room: memoryview
    places: Mapping[int, int]

    def into(self, row: int) -> memoryview:
        """Return the memory that a chunk goes to."""
        return self.room[self.places[row] : self.places[row] + self.chunks.nbytes[row]]

    def tasks(self, rows: Sequence[int]) -> Iterator[Task]:
        """Cut the copies into tasks of about one size."""
        datas, lengths = self.chunks.data, self.chunks.nbytes
        batch: list[int] = []
        held = 0
        for row in rows:
            if callable(datas[row]):
                yield functools.partial(self._pack, row)
            elif lengths[row] < _TASK_NBYTES:
                batch.append(row)
                held += lengths[row]
                if held >= _TASK_NBYTES:
                    yield functools.partial(self._copy, batch)
                    batch, held = [], 0
            else:
                source, into = self.chunks.view(row), self.into(row)
                for at in range(0, lengths[row], _TASK_NBYTES):
                    some = slice(at, at + _TASK_NBYTES)
                    yield functools.partial(_copy, source[some], into[some])
        if batch:
            yield functools.partial(self._copy, batch)

    def _copy(self, rows: Sequence[int]) -> None:
        room, places = self.room, self.places
        for row, source in zip(rows, self.chunks.views(rows), strict=True):
            if len(source) < _LARGE_NBYTES:
                at = places[row]
                room[at : at + len(source)] = source
            else:
                _copy(source, self.into(row))

    def _pack(self, row: int) -> None:
        data, into = self.chunks.data[row], self.into(row)
        if type(data) is Slabs and len(into):
            _copy_tensor(data.tensor, into)
        else:
            copy_into(data, into, self.chunks.name(row))

    def from_devices(self, rows: Sequence[int]) -> list[Any]:
        """Begin to copy what lies on devices; return an event of each device."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, memoryview]]] = {}
        for row in rows:
            data, into = self.chunks.data[row], self.into(row)
            if isinstance(data, Slabs) and len(into):
                by_device.setdefault(data.tensor.device, []).append((data.tensor, into))
        return [_copy_from_device(device, copies) for device, copies in by_device.items()]


def _copy(source: memoryview, into: memoryview) -> None:
    """Copy much, and let other threads of Python go on meanwhile."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def _copy_tensor(tensor: torch.Tensor, into: memoryview, **options: Any) -> None:
    target = tensor_over(into, tensor.dtype, tensor.shape)
    as_bits(target).copy_(as_bits(tensor), **options)


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
