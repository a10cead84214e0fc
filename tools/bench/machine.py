"""What a reader of the figures must know of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

__all__ = ["describe"]

LIBRARIES = (
    *("dsdformat", "torch", "safetensors", "numpy", "blake3", "zstandard"),
    *("torch_checkpointing", "torchsnapshot", "tensorizer", "ztensor", "zipnn"),
)


def describe(folder: Path) -> dict[str, str]:
    """Describe this machine, and the file system of a folder."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": f"{len(os.sched_getaffinity(0))} cores, {processor()}",
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "priority": f"nice {os.nice(0)}",
        "file system": file_system(folder),
        "libraries": ", ".join([f"Python {platform.python_version()}", *versions()]),
    }


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder."""
    real = folder.resolve()
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        place, its_kind = line.split()[1:3]
        if real.is_relative_to(place) and len(place) >= len(best):
            best, kind = place, its_kind
    return kind


def versions() -> list[str]:
    """Return each library with its version."""
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
