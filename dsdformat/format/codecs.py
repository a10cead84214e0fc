"""Codecs on one block: raw, zstd, planes+zstd (spec section 12, registry/codecs.md).

Needs zstandard only where something is compressed.
"""

from __future__ import annotations

import importlib.util
import struct
import threading
from types import ModuleType
from typing import Any, NoReturn

from dsdformat.errors import DependencyError, Problem
from dsdformat.format.dtypes import Dtype
from dsdformat.format.planes import join_planes, split_planes
from dsdformat.limits import WINDOW_NBYTES_MAX

__all__ = ["CODECS", "PLANES", "RAW", "ZSTD", "compress_piece", "decode_block", "encode_block"]

RAW, ZSTD, PLANES = 0, 1, 2
CODECS: dict[int, str] = {RAW: "raw", ZSTD: "zstd", PLANES: "planes+zstd"}

LEVEL = 1
_SAVING = 0.01
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
    # Planes of floats are noise, those of integers may hold any pattern.
    compressor = _noise_compressor() if dtype.rotate else _compressor()
    split = split_planes(block, word, rotate=dtype.rotate)
    planes = [_shorter(compressor, plane) for plane in split]
    lengths = struct.pack(f"<{word}I", *map(len, planes))
    return b"".join([lengths, *planes])


def decode_block(
    stored: Buffer, codec: int, dtype: Dtype, nbytes: int, into: memoryview | None = None
) -> Buffer:
    """Return the `nbytes` decoded bytes of one block.

    Args:
        stored: What `encode_block` returned.
        codec, dtype: As there.
        nbytes: Of the block.
        into: Writable, `nbytes` long, and then what is returned; allocated here if None.

    Raises:
        FormatError: `bad_compressed_data`; what `into` holds is then undefined.

    Memory: at most twice `nbytes`, whatever the stored bytes say.
    """
    if codec == ZSTD:
        data = decompress_piece(stored, nbytes)
        if into is None:
            return data
        into[:] = data
        return into
    word = dtype.word
    count = nbytes // word
    view = memoryview(stored)
    if len(view) < 4 * word:
        _fail(f"{len(view)} bytes cannot hold {word} plane lengths")
    lengths = struct.unpack_from(f"<{word}I", view)
    if sum(lengths) != len(view) - 4 * word or not all(0 < n <= count for n in lengths):
        _fail(f"plane lengths {list(lengths)} do not fit {len(view)} stored bytes")
    planes: list[Buffer] = []
    at = 4 * word
    for length in lengths:
        piece = view[at : at + length]
        planes.append(piece if length == count else decompress_piece(piece, count))
        at += length
    return join_planes(planes, word, rotate=dtype.rotate, into=into)


def compress_piece(data: Buffer) -> bytes:
    """Return a zstd frame of the data, or the data where that saves less than 1 %."""
    return bytes(_shorter(_compressor(), data))


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


def _shorter(compressor: Any, data: Buffer) -> Buffer:
    packed: bytes = compressor.compress(data)
    return packed if len(packed) <= len(data) * (1 - _SAVING) else data


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
        _local.compressor = _zstandard().ZstdCompressor(level=LEVEL)
    return _local.compressor


def _noise_compressor() -> Any:
    if not hasattr(_local, "noise_compressor"):
        zstandard = _zstandard()
        params = _entropy_only(zstandard)
        _local.noise_compressor = zstandard.ZstdCompressor(compression_params=params)
    return _local.noise_compressor


def _entropy_only(zstandard: ModuleType) -> Any:
    """Return parameters that leave little more than the Huffman coder.

    Short matches in noise cost more than they save: without most of them the exponents of weights
    get 10 % shorter than at level 1, and twice as fast both ways. Runs are found still. A smaller
    window would find even fewer, but a zstd block is no longer than it, and each has its table.
    """
    return zstandard.ZstdCompressionParameters(
        window_log=17,
        hash_log=6,
        min_match=7,
        strategy=zstandard.STRATEGY_FAST,
        write_content_size=True,
    )


def _decompressor() -> Any:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = _zstandard().ZstdDecompressor(max_window_size=WINDOW_NBYTES_MAX)
    return _local.decompressor


def _fail(message: str) -> NoReturn:
    raise Problem("bad_compressed_data", f"compressed data is malformed: {message}").error()
