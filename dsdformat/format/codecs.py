"""Codecs on one block: raw, zstd, planes+zstd (spec section 12, registry/codecs.md).

Needs zstandard only where something is compressed. Byte planes use whole-block integer and slice
operations of the standard library, so that the core stays free of numpy.
"""

from __future__ import annotations

import functools
import importlib.util
import struct
import threading
from types import ModuleType
from typing import Any, NoReturn

from dsdformat.errors import DependencyError, Problem
from dsdformat.format.dtypes import Dtype
from dsdformat.limits import WINDOW_NBYTES_MAX

__all__ = ["CODECS", "PLANES", "RAW", "ZSTD", "compress_piece", "decode_block", "encode_block"]

RAW, ZSTD, PLANES = 0, 1, 2
CODECS: dict[int, str] = {RAW: "raw", ZSTD: "zstd", PLANES: "planes+zstd"}

LEVEL = 1
_SAVING = 0.05
_FRAME_BLOCK_MAX = 128 * 1024  # of a zstd frame (RFC 8878, 3.1.1.2.4)
_FRAME_RAW, _FRAME_REPEATED = 0, 1
_local = threading.local()

Buffer = bytes | bytearray | memoryview


def can_compress() -> bool:
    """Whether zstandard is installed."""
    return importlib.util.find_spec("zstandard") is not None


def encode_block(block: Buffer, codec: int, dtype: Dtype) -> bytes:
    """Return the stored bytes of one block of a compressed chunk."""
    if codec == ZSTD:
        return compress_piece(block)
    word = dtype.word
    planes = [compress_piece(plane) for plane in _split(block, word, rotate=dtype.rotate)]
    lengths = struct.pack(f"<{word}I", *map(len, planes))
    return lengths + b"".join(planes)


def decode_block(stored: Buffer, codec: int, dtype: Dtype, nbytes: int) -> bytes:
    """Return the `nbytes` decoded bytes of one block.

    Raises:
        FormatError: `bad_compressed_data`.

    Memory: at most twice `nbytes`, whatever the stored bytes say.
    """
    if codec == ZSTD:
        return decompress_piece(stored, nbytes)
    word = dtype.word
    count = nbytes // word
    view = memoryview(stored)
    if len(view) < 4 * word:
        _fail(f"{len(view)} bytes cannot hold {word} plane lengths")
    lengths = struct.unpack_from(f"<{word}I", view)
    if sum(lengths) != len(view) - 4 * word or not all(0 < n <= count for n in lengths):
        _fail(f"plane lengths {list(lengths)} do not fit {len(view)} stored bytes")
    planes = []
    at = 4 * word
    for length in lengths:
        planes.append(decompress_piece(view[at : at + length], count))
        at += length
    return _join(planes, word, rotate=dtype.rotate)


def compress_piece(data: Buffer) -> bytes:
    """Return a zstd frame of the data, or the data where that saves less than 5 %."""
    packed: bytes = _compressor().compress(data)
    return packed if len(packed) <= len(data) * (1 - _SAVING) else bytes(data)


def decompress_piece(stored: Buffer, nbytes: int) -> bytes:
    """Decode a piece that is raw when it has `nbytes` bytes, and one zstd frame when fewer.

    Raises:
        FormatError: `bad_compressed_data` (R-12.1).
    """
    if len(stored) == nbytes:
        return bytes(stored)
    zstandard = _zstandard()
    try:
        frame = zstandard.get_frame_parameters(stored)
        if bytes(stored[:4]) != zstandard.FRAME_HEADER:
            _fail("not a zstd frame")
        if frame.content_size != nbytes:
            _fail(f"a zstd frame declares {frame.content_size} bytes, expected {nbytes}")
        if frame.dict_id or frame.window_size > WINDOW_NBYTES_MAX:
            _fail("a zstd frame needs a dictionary or a larger window than is allowed")
        most = min(frame.window_size, _FRAME_BLOCK_MAX)
        _check_frame_blocks(memoryview(stored), zstandard.frame_header_size(stored), most)
        data: bytes = _decompressor().decompress(
            stored, max_output_size=nbytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        _fail(f"zstd: {error}")
    if len(data) != nbytes:
        _fail(f"a zstd frame decodes to {len(data)} bytes, expected {nbytes}")
    return data


def _check_frame_blocks(frame: memoryview, at: int, most: int) -> None:
    """Refuse raw and repeated blocks over the limit of their frame: the library takes them.

    What is cut short is left to the library.
    """
    while at + 3 <= len(frame):
        head = int.from_bytes(frame[at : at + 3], "little")
        kind, size = head >> 1 & 3, head >> 3
        if kind in (_FRAME_RAW, _FRAME_REPEATED) and size > most:
            _fail(f"a block of a zstd frame has {size} bytes, at most {most} are allowed")
        if head & 1:
            return
        at += 3 + (1 if kind == _FRAME_REPEATED else size)


def _split(block: Buffer, word: int, *, rotate: bool) -> list[bytes]:
    data = _rotate(bytes(block), word, left=1) if rotate else bytes(block)
    return [data[plane::word] for plane in range(word)]


def _join(planes: list[bytes], word: int, *, rotate: bool) -> bytes:
    out = bytearray(len(planes[0]) * word)
    for index, plane in enumerate(planes):
        out[index::word] = plane
    return _rotate(out, word, left=8 * word - 1) if rotate else bytes(out)


_SLICE = 64 * 1024  # the whole-slice integers below stay in the cache


def _rotate(data: bytes | bytearray, word: int, *, left: int) -> bytes:
    """Rotate each word of `word` bytes left by `left` bits."""
    out = []
    for at in range(0, len(data), _SLICE):
        piece = data[at : at + _SLICE]
        high, low = _masks(len(piece) // word, word, left)
        number = int.from_bytes(piece, "little")
        turned = ((number << left) & high) | ((number >> (8 * word - left)) & low)
        out.append(turned.to_bytes(len(piece), "little"))
    return b"".join(out)


@functools.lru_cache(maxsize=64)
def _masks(count: int, word: int, left: int) -> tuple[int, int]:
    bits = 8 * word
    low = (1 << left) - 1
    high = ((1 << bits) - 1) ^ low
    return tuple(  # type: ignore[return-value]
        int.from_bytes(mask.to_bytes(word, "little") * count, "little") for mask in (high, low)
    )


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise DependencyError(
            "zstandard is needed to read or write compressed data and is not installed",
            code="missing_dependency",
            hint="pip install 'dsdformat[zstd]'",
        ) from None
    return zstandard


def _compressor() -> Any:
    if not hasattr(_local, "compressor"):
        _local.compressor = _zstandard().ZstdCompressor(level=LEVEL, write_content_size=True)
    return _local.compressor


def _decompressor() -> Any:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = _zstandard().ZstdDecompressor(max_window_size=WINDOW_NBYTES_MAX)
    return _local.decompressor


def _fail(message: str) -> NoReturn:
    raise Problem("bad_compressed_data", f"compressed data is malformed: {message}").error()
