"""Blocks, their digests, and compressed bytes (sections 9 and 12)."""

import struct
from collections.abc import Callable, Iterator

from vectors import defects, zstd
from vectors.cases import Case, invalid
from vectors.chunks import join_planes, planes, store_block
from vectors.declare import Checkpoint, StoredChunk
from vectors.hooks import Columns, block_stored, edited, flip, place
from vectors.invalid.files import DATA
from vectors.samples import compressed, mixed, one, tensor
from vectors.wire import digest, dtypes, noise

BLOCK = 4096
HEADER = 128  # of the raw cases
BOMB_NBYTES = 32_768

RAW = (
    ("flip-first-bit", flip(HEADER), "The first bit of the first block is flipped."),
    ("flip-middle", flip(HEADER + BLOCK + 7, 4), "A bit of the second block is flipped."),
    ("flip-last-bit", flip(-1, 7), "The last bit of the last block is flipped."),
    (
        "swapped",
        lambda data: (
            data[:HEADER]
            + data[HEADER + BLOCK : HEADER + 2 * BLOCK]
            + data[HEADER : HEADER + BLOCK]
            + data[HEADER + 2 * BLOCK :]
        ),
        "Two blocks have changed places.",
    ),
    (
        "zeroed",
        lambda data: data[: HEADER + BLOCK] + bytes(BLOCK) + data[HEADER + 2 * BLOCK :],
        "A block is all zeros, as a disk leaves it that lost a page.",
    ),
)


def cases() -> Iterator[Case]:
    yield from raw_cases()
    yield from compressed_cases()
    yield from zstd_cases()
    yield from plane_cases()
    yield from plane_order_cases()


def raw_cases() -> Iterator[Case]:
    rule, code, base = "R-9.14", "checksum_mismatch", one("uint8", (10_000,))
    for name, change, note in RAW:
        yield invalid(f"raw-{name}", rule, code, note, base, files=edited(DATA, change))
    note = "A digest in the manifest is not that of the block."
    yield invalid("raw-digest", rule, code, note, base, columns=last_digest)
    tensors = [tensor("uint8", (64,)), tensor("uint8", (64,), "b")]
    pair = Checkpoint(tensors, {"a": ["tensor", 0], "b": ["tensor", 1]})
    note = "The bytes of two tensors of one shape have changed places."
    swapped = edited(DATA, lambda data: data[:-128] + data[-64:] + data[-128:-64])
    yield invalid("raw-tensors-swapped", rule, code, note, pair, files=swapped)


def last_digest(columns: Columns) -> None:
    columns["digests"][-1] = flip(0)(columns["digests"][-1])


def last_stored_digest(columns: Columns) -> None:
    columns["frame_digests"][-1] = flip(0)(columns["frame_digests"][-1])


def flip_first_stored(data: bytes) -> bytes:
    header = 8 + int.from_bytes(data[:8], "little")
    return flip(header)(data)


def other_content(chunks: list[StoredChunk]) -> None:
    """Store the first block with one bit of its content flipped."""
    chunk = chunks[0]
    block = chunk.blocks[0]
    other = store_block(flip(10)(block.decoded), chunk.chunk, dtypes()[chunk.tensor.dtype])
    block.stored, block.stored_digest = other.stored, other.stored_digest
    place(chunks)


STORED = (
    (
        "flip-first-block",
        "A bit of the first stored block is flipped",
        {"files": edited(DATA, flip_first_stored)},
    ),
    (
        "flip-last-block",
        "The last bit of the last stored block is flipped",
        {"files": edited(DATA, flip(-1, 7))},
    ),
    (
        "stored-digest",
        "A stored digest in the manifest is another",
        {"columns": last_stored_digest},
    ),
)
DECODED = (
    (
        "decoded-digest",
        "The stored digest is right, the decoded one is not",
        {"columns": last_digest},
    ),
    (
        "other-content",
        "A block holds other bytes of the same length, with their digest",
        {"chunks": other_content},
    ),
)


def squeezed(codec: int = 1) -> Checkpoint:
    """One compressed tensor of two blocks."""
    if codec == 1:
        return compressed(bytes(3000) + noise(200) + bytes(2800))
    return compressed(mixed(1500, 4), codec=2, dtype="float32")


def compressed_cases() -> Iterator[Case]:
    stored, decoded = "stored_checksum_mismatch", "checksum_mismatch"
    for codec, name in ((1, "zstd"), (2, "planes")):
        for rule, code, rows in (("R-9.15", stored, STORED), ("R-9.14", decoded, DECODED)):
            for fault, what, hooks in rows:
                note = f"{what}, codec {codec}."
                yield invalid(f"{name}-{fault}", rule, code, note, squeezed(codec), **hooks)
    base = compressed(noise(BLOCK))
    note, change = "A bit of a raw block of a zstd chunk is flipped.", edited(DATA, flip(-1))
    yield invalid("zstd-raw-block-flip", "R-9.15", stored, note, base, files=change)
    note = "The decoded digest of a raw block of a zstd chunk is another."
    case_id = "zstd-raw-block-decoded-digest"
    yield invalid(case_id, "R-9.14", decoded, note, base, columns=last_digest)


def zstd_cases() -> Iterator[Case]:
    rule, code = "R-12.1", "bad_compressed_data"
    data = bytes(range(64)) + bytes(BLOCK - 64)
    base, large = compressed(data), compressed(bytes(BOMB_NBYTES), block_nbytes=BOMB_NBYTES)
    frames = [(base, name, *frame) for name, frame in defects.frames(data).items()]
    frames += [(large, name, *frame) for name, frame in defects.bombs(BOMB_NBYTES).items()]
    two_mib = zstd.header(BLOCK) + zstd.rle_block(0, (1 << 21) - 1, last=True)
    frames.append((base, "large-block", two_mib, "one zstd block of 2 MiB."))
    small = zstd.header(BLOCK, window=0) + zstd.blocks(data)
    frames.append((base, "block-over-window", small, "a window of 1 KiB, a zstd block of 4,032."))
    size = 1 << 18
    whole = zstd.header(size) + zstd.rle_block(0, size, last=True)
    wide = compressed(bytes(size), block_nbytes=size)
    frames.append((wide, "block-over-128-kib", whole, "one zstd block of 256 KiB."))
    frames.append((base, "one-byte", b"\0", "one byte."))
    for checkpoint, name, frame, what in frames:
        note, change = f"A block of codec 1: {what}", block_stored(0, lambda _, f=frame: f)
        yield invalid(f"block-zstd-{name}", rule, code, note, checkpoint, chunks=change)
    note = "The last byte of the second block's frame is missing."
    change = block_stored(1, lambda frame: frame[:-1])
    yield invalid("block-zstd-second", rule, code, note, squeezed(), chunks=change)


def plane_cases() -> Iterator[Case]:
    """A block of two planes: noise, which is stored raw, and zeros, which are a frame."""
    count = 1000
    low, high = noise(count), bytes(count)
    base = compressed(interleaved(low, high), codec=2, dtype="int16")
    good = zstd.hand_frame(high)
    faults = [(name, what, block, "R-12.2") for name, what, block in plane_faults(low, good)]
    for name, (frame, what) in defects.frames(high).items():
        block = join_planes([low, frame])
        faults.append((f"zstd-{name}", f"in a plane, {what}", block, "R-12.1"))
    for name, what, block, rule in faults:
        note, change = f"A block of codec 2: {what}", block_stored(0, lambda _, b=block: b)
        code = "bad_compressed_data"
        yield invalid(f"planes-{name}", rule, code, note, base, chunks=change)
    yield from plane_bomb_cases()


def interleaved(low: bytes, high: bytes) -> bytes:
    return b"".join(bytes(pair) for pair in zip(low, high, strict=True))


def plane_faults(low: bytes, good: bytes) -> list[tuple[str, str, bytes]]:
    """Lengths that are not those of the planes: R-12.2."""
    n, m = len(low), len(good)

    def lengths(*values: int) -> bytes:
        return struct.pack(f"<{len(values)}I", *values)

    return [
        ("length-zero", "a plane of no bytes.", lengths(n, 0) + low),
        (
            "length-more-than-plane",
            "a plane of one byte more than it decodes to.",
            lengths(n + 1, m) + low + b"\0" + good,
        ),
        (
            "lengths-more-than-stored",
            "the lengths add up to a byte more than is stored.",
            lengths(n, m + 1) + low + good,
        ),
        (
            "lengths-less-than-stored",
            "the lengths add up to a byte less than is stored.",
            lengths(n, m - 1) + low + good,
        ),
        (
            "length-max",
            "a plane of 2^32-1 bytes.",
            lengths(n, (1 << 32) - 1) + low + good,
        ),
        (
            "lengths-wrap",
            "lengths that add up to the stored length in 32-bit arithmetic.",
            lengths((1 << 32) - 100, n + m + 100) + low + good,
        ),
        ("trailing-byte", "a byte follows the last plane.", join_planes([low, good]) + b"\0"),
        (
            "cut-in-lengths",
            "seven bytes, which do not hold the lengths.",
            join_planes([low, good])[:7],
        ),
        ("lengths-only", "the lengths and nothing else.", lengths(n, m)),
    ]


def plane_bomb_cases() -> Iterator[Case]:
    low, high = noise(BOMB_NBYTES), bytes(BOMB_NBYTES)
    data = interleaved(low, high)
    base = compressed(data, codec=2, dtype="int16", block_nbytes=len(data))
    for name, (frame, what) in defects.bombs(BOMB_NBYTES).items():
        block = join_planes([low, frame])
        note = f"A block of codec 2: in a plane, {what}"
        change, code = block_stored(0, lambda _, b=block: b), "bad_compressed_data"
        yield invalid(f"planes-zstd-{name}", "R-12.1", code, note, base, chunks=change)


def plane_order_cases() -> Iterator[Case]:
    rule, code, base = "R-9.14", "checksum_mismatch", squeezed(codec=2)
    note = "The planes of a float are not rotated."
    yield invalid("planes-not-rotated", rule, code, note, base, chunks=planes_by(not_rotated))
    note, change = "The planes are in the order of the highest byte first.", planes_by(falling)
    yield invalid("planes-in-falling-order", rule, code, note, base, chunks=change)


def not_rotated(data: bytes) -> list[bytes]:
    return planes(data, dtypes()["int32"])


def falling(data: bytes) -> list[bytes]:
    return planes(data, dtypes()["float32"])[::-1]


def planes_by(cut: Callable[[bytes], list[bytes]]) -> Callable[[list[StoredChunk]], None]:
    """Store the planes that another way of cutting gives."""

    def hook(chunks: list[StoredChunk]) -> None:
        for block in chunks[0].blocks:
            block.stored = join_planes([zstd.smaller(plane) for plane in cut(block.decoded)])
            block.stored_digest = digest(block.stored)
        place(chunks)

    return hook
