"""Compressed chunks, and the forms of zstd frames that are allowed (section 12)."""

import struct
from collections.abc import Iterator

from vectors import zstd
from vectors.cases import Case, valid
from vectors.chunks import join_planes
from vectors.declare import Checkpoint, Chunk, Tensor
from vectors.hooks import block_stored
from vectors.samples import compressed, mixed, ranks, tensor
from vectors.wire import dtypes, noise

BEER = b"".join(b"%d bottles of beer on the wall, " % count for count in range(10_000))
PLANED = (
    ("float16", 100),
    ("bfloat16", 5000),
    ("float32", 1500),
    ("float64", 700),
    ("complex32", 300),
    ("complex64", 300),
    ("complex128", 300),
    ("int16", 300),
    ("int32", 300),
    ("int64", 700),
    ("uint16", 300),
    ("uint32", 300),
    ("uint64", 300),
)
RLE = zstd.rle_block(0, 3000, last=True)

# Frames that hold 3,000 zeros.
FRAMES = (
    ("rle", zstd.header(3000) + RLE, "One RLE block."),
    (
        "window-64-mib",
        zstd.header(3000, window=zstd.WINDOW_64_MIB) + RLE,
        "The largest window that is allowed.",
    ),
    (
        "window-1-kib",
        zstd.header(3000, window=0)
        + zstd.rle_block(0, 1024, last=False) * 2
        + zstd.rle_block(0, 952, last=True),
        "The least window, and the largest blocks that it allows.",
    ),
    (
        "long-size-field",
        zstd.MAGIC + b"\xe0" + struct.pack("<Q", 3000) + RLE,
        "A content size field of 8 bytes, where 2 would do.",
    ),
    (
        "empty-last-block",
        zstd.header(3000) + zstd.rle_block(0, 3000, last=False) + zstd.raw_block(b"", last=True),
        "The last block of the frame is empty.",
    ),
)


def cases() -> Iterator[Case]:
    yield from zstd_cases()
    yield from planes_cases()
    yield from mixed_cases()
    yield from frame_cases()


def zstd_cases() -> Iterator[Case]:
    rules, note = "R-12.1 R-9.15 R-6.12", "Three blocks, each one zstd frame."
    yield valid("zstd", rules, note, compressed(BEER[:9000]))
    note = "Of three blocks the second does not shrink, and is raw inside a zstd chunk."
    data = bytes(4096) + noise(4096) + bytes(1000)
    yield valid("zstd-raw-blocks", "R-12.1 R-12.3 R-9.15", note, compressed(data))
    note = "The second of three blocks shrinks by 3 %, and is compressed."
    data = noise(4096) + noise(3960, "most") + bytes(4096 - 3960) + noise(100)
    yield valid("zstd-little-saved", "R-12.1 R-12.3", note, compressed(data))
    note = "A chunk with codec 1 whose blocks are all raw."
    yield valid("zstd-all-raw", "R-12.1 R-6.12", note, compressed(noise(5000)))
    chunks = [
        Chunk((0, 0), (32, 8), 1, 1),
        Chunk((32, 0), (32, 4), 0, 0),
        Chunk((32, 4), (32, 4), 1, 1),
    ]
    matrix = Tensor("float32", (64, 8), bytes(1024) + noise(1024), chunks)
    note = "Compressed and raw chunks of one tensor, over two files."
    checkpoint = Checkpoint([matrix], {"w": ["tensor", 0]}, files=ranks(2), world_size=2)
    yield valid("zstd-chunks-of-a-matrix", "R-10.7 R-9.13", note, checkpoint)


def planed(dtype: str, count: int, **options) -> Checkpoint:
    width = dtypes()[dtype].width
    numbers = count * dtypes()[dtype].itemsize // width
    return compressed(mixed(numbers, width), codec=2, dtype=dtype, **options)


def planes_cases() -> Iterator[Case]:
    rules = "R-12.2 R-12.3 R-9.11 R-9.15 R-6.12"
    for dtype, count in PLANED:
        entry = dtypes()[dtype]
        turned = "rotated" if entry.rotate else "not rotated"
        note = f"Codec 2: {entry.width} planes, {turned}; some shrink, some are raw."
        yield valid(f"planes-{dtype}", rules, note, planed(dtype, count))
    note = "Codec 2 with raw planes only: stored longer than decoded."
    yield valid("planes-all-raw", "R-12.2", note, planed("int32", 300, piece=zstd.raw))
    note = "Codec 2 with raw planes only, four of a complex64: the longest that R-9.15 allows."
    checkpoint = planed("complex64", 300, piece=zstd.raw)
    yield valid("planes-all-raw-complex64", "R-9.15 R-12.2", note, checkpoint)
    low = noise(1960, "most") + bytes(88)
    data = b"".join(bytes(pair) for pair in zip(low, bytes(2048), strict=True))
    note = "The low plane shrinks by 3 %, and is compressed beside the high one."
    checkpoint = compressed(data, codec=2, dtype="int16")
    yield valid("planes-little-saved", "R-12.2 R-12.3", note, checkpoint)
    note = "Codec 2 on one element: planes of one byte."
    yield valid("planes-one-element", "R-12.2", note, planed("float64", 1))
    low, high = noise(700, "hand"), bytes(700)
    data = b"".join(bytes(pair) for pair in zip(low, high, strict=True))
    by_hand = join_planes([low, zstd.hand_frame(high)])
    yield valid(
        "planes-by-hand",
        "R-12.2",
        "The low plane raw, the high plane a frame without entropy coding.",
        compressed(data, codec=2, dtype="int16"),
        chunks=block_stored(0, lambda _: by_hand),
    )


def mixed_cases() -> Iterator[Case]:
    tensors = [
        Tensor("int16", (2100,), mixed(2100, 2), [Chunk((0,), (2100,), 0, 2)]),
        Tensor("uint8", (4500,), bytes(4500), [Chunk((0,), (4500,), 0, 1)]),
        tensor("int8", (10,)),
    ]
    yield valid(
        "codecs-all-in-one",
        "R-9.13 R-9.12",
        "Raw, zstd and planes in one file: first_frame counts compressed chunks only.",
        Checkpoint(tensors, {name: ["tensor", index] for index, name in enumerate("abc")}),
    )
    note = "1,821 frames: the section of frames has two pages."
    yield valid("frames-two-pages", "R-7.3 R-9.15", note, compressed(bytes(1821 * 4096)))


def frame_cases() -> Iterator[Case]:
    for name, frame, note in FRAMES:
        change = block_stored(0, lambda _, frame=frame: frame)
        case_id = f"zstd-frame-{name}"
        yield valid(case_id, "R-12.1", note, compressed(bytes(3000)), chunks=change)
    rules, note = "R-12.1 R-9.10", "A block of 320 KiB, whose frame has three blocks of its own."
    checkpoint = compressed(BEER[: 320 << 10], block_nbytes=1 << 19)
    yield valid("zstd-frame-three-blocks", rules, note, checkpoint)
    note = "A frame of the library's level 19."
    checkpoint = compressed(BEER[:4096], piece=zstd.strong)
    yield valid("zstd-frame-level-19", "R-12.1", note, checkpoint)
    note = "A frame that has the content checksum of RFC 8878."
    checkpoint = compressed(b"checksummed " * 100, piece=zstd.checksummed)
    yield valid("zstd-frame-checksum", "R-12.1", note, checkpoint)
