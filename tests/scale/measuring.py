"""Steps whose time and memory tests measure; each runs in a process of its own.

`python measuring.py STEP ARGUMENT…` prints a JSON object of figures: seconds, and MiB of resident
memory beyond what the process had before the step.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sparse import SparseTarget, marked_zeros

import dsdformat
import dsdformat.numpy
from dsdformat.format.frame import emit_manifest
from dsdformat.format.manifest import Body, DataFile, emit_body

MIB = 1 << 20
Figures = dict[str, float]


def rss() -> float:
    """Resident memory now, in MiB, of what this process itself holds."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * 4096 / MIB


def peak_rss() -> float:
    """The most resident memory since `forget_peak`, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


def forget_peak() -> float:
    """Begin a new peak; return what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss()


class Clock:
    def __init__(self) -> None:
        self.started = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        self.started, lap = now, now - self.started
        return lap


# 3,000,000 chunks: 3,000 tensors, each in 1,000 rows that 1,000 ranks wrote.

TENSORS, RANKS, COLUMNS = 3000, 1000, 1024
ROW_NBYTES = 4 * COLUMNS


def many_chunks_manifest() -> tuple[bytes, list[bytes]]:
    """The manifest of a checkpoint that is not there: rank r has row r of every tensor."""
    chunks = TENSORS * RANKS
    header, block = 1 << 20, np.arange(chunks, dtype=np.uint64)
    files = tuple(
        DataFile(
            f"model-{rank:05d}-of-{RANKS:05d}.safetensors",
            header + TENSORS * ROW_NBYTES,
            header,
            ("model",),
            {"format": "pt"},
            rank,
        )
        for rank in range(RANKS)
    )
    names = sorted(f"layers.{index}.weight" for index in range(TENSORS))
    tree = {"model": {name: ["tensor", index] for index, name in enumerate(names)}}
    body = Body(tree, 4 * MIB, ("float32",), files, world_size=RANKS)
    rank, tensor = block % RANKS, block // RANKS  # of each chunk, in the order of the tensors
    boxes = np.zeros((chunks, 4), "<u8")
    boxes[:, 0], boxes[:, 2], boxes[:, 3] = rank, 1, COLUMNS
    sections = [
        ("body", emit_body(body)),
        ("tensors", np.repeat(np.array([0, 2, RANKS, 0], "<u4"), TENSORS).tobytes()),
        ("shapes", np.tile(np.array([RANKS, COLUMNS], "<u8"), TENSORS).tobytes()),
        (
            "chunks",
            rank.astype("<u4").tobytes()
            + bytes(4 * chunks)
            + (header + tensor * ROW_NBYTES).astype("<u8").tobytes()
            + (rank * TENSORS + tensor).astype("<u8").tobytes()
            + bytes(8 * chunks),
        ),
        ("boxes", boxes.tobytes()),
        ("digests", np.random.default_rng(1).bytes(32 * chunks)),
        ("frames", b""),
    ]
    pieces = [(name, [content]) for name, content in sections]
    head, pages, _ = emit_manifest(pieces, (), compress=True)
    return head, pages


def make_many_chunks(path: str) -> Figures:
    clock = Clock()
    head, pages = many_chunks_manifest()
    Path(path).mkdir()
    with open(Path(path) / "manifest.dsd", "wb") as file:
        file.write(head)
        file.writelines(pages)
    nbytes = (Path(path) / "manifest.dsd").stat().st_size
    return {"seconds": clock.lap(), "manifest_mib": nbytes / MIB, "head_kib": len(head) / 1024}


def open_many_chunks(path: str) -> Figures:
    """Open, read the chunk table of one tensor, then of all; memory grows with what is used."""
    before = rss()
    clock = Clock()
    checkpoint = dsdformat.open(path)
    figures = {"open_s": clock.lap(), "open_mib": rss() - before}
    (middle,) = [entry for entry in checkpoint if entry.index == TENSORS // 2]
    chunks = middle.chunks
    figures |= {"one_tensor_s": clock.lap(), "one_tensor_mib": rss() - before}
    assert len(chunks) == RANKS
    assert chunks[7].box == dsdformat.Box((7, 0), (1, COLUMNS))
    assert chunks[7].byte_offset == MIB + middle.index * ROW_NBYTES
    assert chunks[7].file == "model-00007-of-01000.safetensors"
    clock.lap()
    count = sum(len(entry.chunks) for entry in checkpoint)
    figures |= {"all_tensors_s": clock.lap(), "all_tensors_mib": rss() - before}
    assert count == TENSORS * RANKS
    checkpoint.close()
    return figures


# A state of many small tensors


def many_tensors(path: str, count: str) -> Figures:
    """Save, open, load and verify a state of `count` tensors of 16 bytes."""
    base = np.arange(4 * int(count), dtype=np.float32).reshape(-1, 4)
    state = {"model": {f"layers.{index}.weight": base[index] for index in range(len(base))}}
    clock = Clock()
    root = dsdformat.numpy.save(path, state)
    figures = {"save_s": clock.lap()}
    with dsdformat.open(path, digest=root) as checkpoint:
        figures["open_s"] = clock.lap()
        assert len(checkpoint) == len(base)
        assert len(checkpoint.data_files) == -(-len(base) // 65_536)
        one = bytes(checkpoint.read("model/layers.77.weight"))
        assert one == base[77].tobytes()
    figures["find_one_s"] = clock.lap()
    loaded = dsdformat.numpy.load(path)["model"]
    figures["load_s"] = clock.lap()
    assert len(loaded) == len(base)
    assert all(np.array_equal(loaded[name], array) for name, array in state["model"].items())
    clock.lap()
    assert dsdformat.verify(path).problems == ()
    return figures | {"verify_s": clock.lap()}


# Large tensors


def write_streamed(path: str, mib: str) -> Figures:
    """Write one tensor that is made while it is read."""
    nbytes = int(mib) * MIB
    _warm(path + "-warm")
    before = forget_peak()
    clock = Clock()
    with dsdformat.Writer(SparseTarget(path)) as writer:
        data = marked_zeros(nbytes, {nbytes - 1: b"x"})
        writer.add_tensor(["model", "w"], data, dtype="uint8", shape=(nbytes // 1024, 1024))
    return {"seconds": clock.lap(), "peak_mib": peak_rss() - before}


def read_into_buffers(path: str) -> Figures:
    """Read all tensors into memory that is there already."""
    _warm(path + "-warm")
    with dsdformat.open(path) as checkpoint:
        buffers = [np.ones(entry.nbytes, np.uint8) for entry in checkpoint]
        before = forget_peak()
        clock = Clock()
        checkpoint.read_all(buffers)
        figures = {"read_all_s": clock.lap(), "read_all_mib": peak_rss() - before}
        before = forget_peak()
        clock.lap()
        for entry, buffer in zip(checkpoint, buffers, strict=True):
            entry.read(into=buffer)
        figures |= {"read_s": clock.lap(), "read_mib": peak_rss() - before}
        assert buffers[0][-1] == ord("x")
    return figures


def save_strided(path: str, form: str, mib: str) -> Figures:
    """Save an array of `mib` that is not packed: of many rows, or of one long row."""
    _warm(path + "-warm")
    wide = np.ones(2 * int(mib) * MIB, np.uint8)
    array = wide.reshape(1024 if form == "rows" else 1, -1)[:, ::2]
    before = forget_peak()
    clock = Clock()
    dsdformat.numpy.save(path, {"w": array})
    return {"seconds": clock.lap(), "peak_mib": peak_rss() - before}


def verify_large(path: str) -> Figures:
    _warm(path + "-warm")
    before = forget_peak()
    clock = Clock()
    assert dsdformat.verify(path).problems == ()
    return {"seconds": clock.lap(), "peak_mib": peak_rss() - before}


def _warm(path: str) -> None:
    """Load what loads lazily: threads, libraries."""
    dsdformat.numpy.save(path, {"w": np.ones((4 * MIB,), np.uint8)}, overwrite=True)
    dsdformat.numpy.load(path)
    assert dsdformat.verify(path).ok


def _steps() -> Iterator[tuple[str, object]]:
    names = ("make_many_chunks", "open_many_chunks", "many_tensors", "write_streamed")
    for name in (*names, "read_into_buffers", "save_strided", "verify_large"):
        yield name, globals()[name]


if __name__ == "__main__":
    step = dict(_steps())[sys.argv[1]]
    print(json.dumps(step(*sys.argv[2:])))  # type: ignore[operator]
