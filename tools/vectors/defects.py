"""zstd pieces with one defect each, for pages, blocks and planes (R-12.1)."""

import struct

from vectors import zstd

BOMB_BLOCKS = 6400  # of 128 KiB: 800 MiB
BOMB_NBYTES = BOMB_BLOCKS * zstd.BLOCK_MAX


def frames(data: bytes) -> dict[str, tuple[bytes, str]]:
    """Broken pieces that are to decode to the data, by name, each with a note."""
    n, good, body = len(data), zstd.hand_frame(data), zstd.blocks(data)
    skippable = zstd.SKIPPABLE_MAGIC + struct.pack("<I", 3) + b"abc"
    half = n // 2
    empty = zstd.hand_frame(b"")
    return {
        "not-zstd": (b"\0" + good[1:], "no zstd magic."),
        "too-much": (
            zstd.header(n) + zstd.blocks(data + b"\0\1"),
            "more bytes than the frame declares.",
        ),
        "too-little": (
            zstd.header(n) + zstd.blocks(data[:-1]),
            "fewer bytes than the frame declares.",
        ),
        "declares-more": (
            zstd.header(n + 1) + body,
            "the frame declares a byte more than it holds.",
        ),
        "a-byte-more": (
            zstd.header(n + 1) + zstd.blocks(data + b"\1"),
            "declares and holds a byte too much.",
        ),
        "a-byte-less": (
            zstd.header(n - 1) + zstd.blocks(data[:-1]),
            "declares and holds a byte too little.",
        ),
        "size-not-declared": (zstd.header(None, window=0x50) + body, "the frame declares no size."),
        "two-frames": (
            zstd.hand_frame(data[:half]) + zstd.hand_frame(data[half:]),
            "two frames, a half each.",
        ),
        "empty-frame-after": (good + empty, "an empty frame follows."),
        "empty-frame-before": (empty + good, "an empty frame comes before."),
        "skippable-after": (good + skippable, "a skippable frame follows."),
        "skippable-before": (skippable + good, "a skippable frame comes before."),
        "skippable-only": (skippable, "a skippable frame and nothing else."),
        "trailing-byte": (good + b"\0", "a byte follows the frame."),
        "dictionary": (zstd.header(n, dictionary=7) + body, "the frame names a dictionary."),
        "reserved-bit": (
            zstd.header(n, reserved=True) + body,
            "the reserved bit of the frame header is set.",
        ),
        "reserved-block-type": (
            zstd.header(n) + (n << 3 | 3 << 1 | 1).to_bytes(3, "little") + b"\0",
            "a block of the reserved type.",
        ),
        "cut": (good[:-1], "the last byte of the frame is missing."),
        "cut-in-header": (good[:5], "the frame ends inside its header."),
        "no-last-block": (zstd.header(n) + _without_last(body), "no block is marked as the last."),
        "window-too-large": (
            zstd.header(n, window=zstd.WINDOW_64_MIB + 1) + body,
            "a window of 72 MiB.",
        ),
        "window-huge": (zstd.header(n, window=0xF8) + body, "a window of 2 TiB."),
        "checksum": (_wrong_checksum(data), "the content checksum is wrong."),
        "declares-2-63": (zstd.header(1 << 63) + body, "the frame declares 2^63 bytes."),
        "declares-nothing": (empty, "the frame declares and holds no bytes."),
    }


def bombs(nbytes: int) -> dict[str, tuple[bytes, str]]:
    """Frames of 25 KiB that decode to 800 MiB."""
    full = zstd.rle_block(0, zstd.BLOCK_MAX, last=False)
    many = full * (BOMB_BLOCKS - 1) + zstd.rle_block(0, zstd.BLOCK_MAX, last=True)
    return {
        "bomb": (
            zstd.header(nbytes, window=0x50) + many,
            "declares the right size, and holds 800 MiB.",
        ),
        "bomb-declared": (zstd.header(BOMB_NBYTES) + many, "declares and holds 800 MiB."),
    }


def page_frames(data: bytes) -> dict[str, tuple[bytes, str]]:
    return frames(data) | bombs(len(data))


def _without_last(body: bytes) -> bytes:
    """The blocks, the last one not marked as such: it must be an RLE block, of four bytes."""
    return body[:-4] + bytes([body[-4] & ~1]) + body[-3:]


def _wrong_checksum(data: bytes) -> bytes:
    frame = zstd.checksummed(data)
    return frame[:-1] + bytes([frame[-1] ^ 1])
