"""Memory of this process: its peak during a call, and free pages for the call to take.

Linux only: everything is read from /proc.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["Meter", "Usage", "prime", "tidy"]

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_SECONDS = 0.005
PRIME_PIECE = bytes(range(256)) * (16 << 10)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a call used, in bytes above what was there, and in seconds.

    Attributes:
        peak_nbytes: Rise of the resident set: anonymous memory and mapped file pages.
        anon_nbytes: Rise of the anonymous part; sampled, so that a short peak may be missed.
        file_nbytes: Rise of the mapped file pages; sampled too.
        cpu_s: Processor time of this process.
        read_nbytes: What this process asked the system to read from files, cached or not.
        other: Share of all processors that other processes and the kernel's own threads used.
    """

    peak_nbytes: int
    anon_nbytes: int
    file_nbytes: int
    cpu_s: float
    read_nbytes: int
    other: float


class Meter:
    """Watches the memory of this process from entering to leaving; then has `usage`."""

    usage: Usage

    def __enter__(self) -> Meter:
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._began, self._cpu, self._busy = time.perf_counter(), time.process_time(), busy_s()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self._resident = status_nbytes("VmRSS")
        self._read = read_nbytes()
        self._first = self._most = resident_parts()
        self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        peak, read = status_nbytes("VmHWM"), read_nbytes() - self._read
        self._stop.set()
        self._sampler.join()
        self._take_sample()
        cpu = time.process_time() - self._cpu
        span = max(time.perf_counter() - self._began, 1e-9) * (os.cpu_count() or 1)
        anon, file = (most - first for most, first in zip(self._most, self._first, strict=True))
        other = max(0.0, busy_s() - self._busy - cpu) / span
        self.usage = Usage(max(0, peak - self._resident), anon, file, cpu, read, min(other, 1.0))

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._take_sample()

    def _take_sample(self) -> None:
        anon, file = resident_parts()
        self._most = max(self._most[0], anon), max(self._most[1], file)


def tidy() -> None:
    """Give back what this process holds and does not use, so that a later rise is seen."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def prime(folder: Path, nbytes: int) -> None:
    """Leave free pages behind that the next call can take at once.

    A virtual machine may hand pages that have been free for seconds back to its host; taking
    them again costs a second a GiB, at random, to whoever comes first. Pages of a file that was
    just removed are free and still there. Anonymous memory that was just unmapped does not do:
    a write into the page cache wants larger pieces than it leaves.
    """
    path = folder / "prime"
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-nbytes // len(PRIME_PIECE))):
            file.write(PRIME_PIECE)
    path.unlink()


def status_nbytes(field: str) -> int:
    """Read one size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {field}")


def read_nbytes() -> int:
    """Return how much all threads of this process have read by system calls, sockets left out."""
    first = Path("/proc/self/io").read_text().splitlines()[0]
    return int(first.removeprefix("rchar:"))


def resident_parts() -> tuple[int, int]:
    """Return how much is resident: anonymous memory, and file pages."""
    with open("/proc/self/statm", "rb") as file:
        resident, shared = map(int, file.read().split()[1:3])
    return (resident - shared) * PAGE_NBYTES, shared * PAGE_NBYTES


def busy_s() -> float:
    """Return how long all processors together have been busy since the machine started."""
    with open("/proc/stat", "rb") as file:
        ticks = list(map(int, file.readline().split()[1:9]))
    idle = ticks[3] + ticks[4]
    return float(sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
