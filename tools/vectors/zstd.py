"""zstd frames: from the library, frozen in `zstd_frames.json`; and made by hand, for any defect.

Two versions of the library may compress differently. A frame that was made once is therefore kept,
by the digest of what it holds, and the vectors are the same with each version.
"""

import json
from collections.abc import Callable
from pathlib import Path

from vectors.wire import digest

FROZEN = Path(__file__).with_name("zstd_frames.json")
MAGIC = bytes.fromhex("28b52ffd")
SKIPPABLE_MAGIC = bytes.fromhex("502a4d18")
WINDOW_64_MIB = 0x80
BLOCK_MAX = 128 * 1024

_frames: dict[str, str] = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
_used: set[str] = set()


def library_frame(data: bytes, *, level: int, checksum: bool) -> bytes:
    return _frozen(data, level, checksum, lambda: _compress(data, level, checksum))


def _frozen(data: bytes, level: int, checksum: bool, make: Callable[[], bytes]) -> bytes:
    key = f"{digest(data).hex()[:32]}-{level}{'c' if checksum else ''}"
    _used.add(key)
    if key not in _frames:
        _frames[key] = make().hex()
    return bytes.fromhex(_frames[key])


def _compress(data: bytes, level: int, checksum: bool) -> bytes:
    import zstandard

    compressor = zstandard.ZstdCompressor(
        level=level, write_checksum=checksum, write_content_size=True, write_dict_id=False
    )
    return compressor.compress(data)


def freeze() -> None:
    """Keep the frames that the vectors use, and no others."""
    kept = {key: _frames[key] for key in sorted(_used)}
    FROZEN.write_text(json.dumps(kept, indent=0) + "\n")


def smaller(data: bytes) -> bytes:
    """The piece that a writer stores: a frame where that saves 1 %, else the data (R-12.3)."""

    def frame_or_nothing() -> bytes:
        frame = _compress(data, 3, checksum=False)
        return frame if len(frame) * 100 <= len(data) * 99 else b""

    return _frozen(data, 3, False, frame_or_nothing) or data


def raw(data: bytes) -> bytes:
    return data


def checksummed(data: bytes) -> bytes:
    return library_frame(data, level=3, checksum=True)


def strong(data: bytes) -> bytes:
    return library_frame(data, level=19, checksum=False)


def raw_block(data: bytes, *, last: bool) -> bytes:
    return (len(data) << 3 | last).to_bytes(3, "little") + data


def rle_block(byte: int, length: int, *, last: bool) -> bytes:
    return (length << 3 | 1 << 1 | last).to_bytes(3, "little") + bytes([byte])


def header(
    content_size: int | None,
    *,
    window: int | None = None,
    dictionary: int | None = None,
    checksum: bool = False,
    reserved: bool = False,
) -> bytes:
    """A frame header (RFC 8878, 3.1.1.1); without `window`, of a single segment."""
    size, flag = b"", 0
    if content_size is not None:
        size, flag = _content_size(content_size, single=window is None)
    descriptor = flag << 6 | (window is None) << 5 | reserved << 3 | checksum << 2
    descriptor |= dictionary is not None
    parts = [bytes([descriptor])]
    parts += [bytes([window])] if window is not None else []
    parts += [bytes([dictionary])] if dictionary is not None else []
    return MAGIC + b"".join(parts) + size


def _content_size(size: int, *, single: bool) -> tuple[bytes, int]:
    if size < 256 and single:
        return size.to_bytes(1, "little"), 0
    if 256 <= size < 65536 + 256:
        return (size - 256).to_bytes(2, "little"), 1
    if size < 1 << 32:
        return size.to_bytes(4, "little"), 2
    return size.to_bytes(8, "little"), 3


def blocks(data: bytes) -> bytes:
    """Blocks that hold the data: runs of one byte as RLE blocks, the rest raw."""
    pieces, at = [], 0
    while at < len(data):
        end = _run_end(data, at)
        pieces.append((data[at:end], end - at >= 8))
        at = end
    merged: list[tuple[bytes, bool]] = []
    for piece, is_run in pieces:
        if merged and not is_run and not merged[-1][1]:
            merged[-1] = (merged[-1][0] + piece, False)
        else:
            merged.append((piece, is_run))
    if not merged:
        return raw_block(b"", last=True)
    return b"".join(
        rle_block(piece[0], len(piece), last=i == len(merged) - 1)
        if is_run
        else raw_block(piece, last=i == len(merged) - 1)
        for i, (piece, is_run) in enumerate(merged)
    )


def _run_end(data: bytes, at: int) -> int:
    run = data[at : at + BLOCK_MAX]
    return at + len(run) - len(run.lstrip(run[:1]))


def hand_frame(data: bytes) -> bytes:
    """A frame without entropy coding: what the defects are made from."""
    return header(len(data)) + blocks(data)


def zeros_only(data: bytes) -> bytes:
    """A frame where the data are zeros, else the data."""
    return data if any(data) else hand_frame(data)


def hand_frame_if_smaller(data: bytes) -> bytes:
    frame = hand_frame(data)
    return frame if len(frame) < len(data) else data
