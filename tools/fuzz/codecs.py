"""Compressed blocks as inputs: which codec, dtype and length, and the stored bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from vectors import defects, samples, zstd

from dsdformat.format.codecs import PLANES, ZSTD, encode_block
from dsdformat.format.dtypes import DTYPES
from fuzz.bytewise import mutated

__all__ = ["Block", "is_coded", "mutate", "number_of", "seeds", "unpacked"]

_HEAD = struct.Struct("<BBI")
_NAMES = sorted(DTYPES)
_WIDE = [name for name in _NAMES if DTYPES[name].itemsize > 1]
_NBYTES_MAX = 1 << 20
_FRAME_MAGIC = zstd.MAGIC
_RAW_BLOCK, _RLE_BLOCK = 0, 1


@dataclass(frozen=True, slots=True)
class Block:
    """A block as it is stored, and what it is to decode to."""

    codec: int
    dtype: str
    nbytes: int
    stored: bytes


def unpacked(data: bytes) -> Block:
    """The block of an input: any bytes are one that a manifest may declare."""
    number, dtype, nbytes = _HEAD.unpack_from(data.ljust(_HEAD.size, b"\0"))
    codec = (ZSTD, PLANES)[number % 2]
    names = _WIDE if codec == PLANES else _NAMES
    name = names[dtype % len(names)]
    itemsize = DTYPES[name].itemsize
    nbytes = max(1, nbytes % _NBYTES_MAX // itemsize) * itemsize
    return Block(codec, name, nbytes, data[_HEAD.size :] or b"\0")


def number_of(dtype: str) -> int:
    """The index of a dtype among all names in ascending order."""
    return _NAMES.index(dtype)


def packed(codec: int, dtype: str, nbytes: int, stored: bytes) -> bytes:
    """The input of a block."""
    names = _WIDE if codec == PLANES else _NAMES
    return _HEAD.pack((ZSTD, PLANES).index(codec), names.index(dtype), nbytes) + stored


def seeds() -> list[bytes]:
    """Blocks as writers make them, and zstd pieces with a defect each."""
    found = []
    for dtype in ("float32", "bfloat16", "complex64", "int64", "uint16", "complex128"):
        data = samples.mixed(200, DTYPES[dtype].itemsize)
        for codec in (ZSTD, PLANES):
            stored = encode_block(data, codec, DTYPES[dtype])
            found.append(packed(codec, dtype, len(data), stored))
    text = b"abcdefgh" * 40 + bytes(100)
    found += [packed(ZSTD, "uint8", len(text), piece) for piece, _ in defects.frames(text).values()]
    found.append(packed(ZSTD, "uint8", len(text), zstd.hand_frame(text)))
    found.append(packed(ZSTD, "uint8", len(text), zstd.checksummed(text)))
    return found


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """An input with its stored bytes changed, and of planes one plane with right lengths."""
    block = unpacked(data)
    if rng.random() < 0.2:
        return mutated(data, rng, others)
    stored = block.stored
    if block.codec == PLANES and rng.random() < 0.8:
        stored = _plane_changed(block, rng)
    elif rng.random() < 0.2:
        stored = _by_hand(rng, block.nbytes)
    else:
        stored = mutated(stored, rng, others)
    return data[: _HEAD.size].ljust(_HEAD.size, b"\0") + stored


def _plane_changed(block: Block, rng: random.Random) -> bytes:
    word = DTYPES[block.dtype].word
    if len(block.stored) < 4 * word:
        return mutated(block.stored, rng)
    lengths = struct.unpack_from(f"<{word}I", block.stored)
    at, planes = 4 * word, []
    for length in lengths:
        planes.append(block.stored[at : at + length])
        at += length
    which = int(rng.random() * word)
    if rng.random() < 0.3:
        planes[which] = _by_hand(rng, block.nbytes // word)
    else:
        planes[which] = mutated(planes[which], rng) or b"\0"
    return struct.pack(f"<{word}I", *map(len, planes)) + b"".join(planes)


def _by_hand(rng: random.Random, nbytes: int) -> bytes:
    """A frame of raw and repeated blocks, which every decoder must take alike."""
    header = zstd.header(
        rng.choice((nbytes, nbytes, nbytes, nbytes + 1, None)),
        **rng.choice(({}, {}, {"window": rng.randrange(256)}, {"reserved": True})),
    )
    blocks, left = b"", nbytes + rng.choice((0, 0, 0, 0, 1, -1))
    while left > 0 and len(blocks) < 4096:
        length = min(left, 1 + int(rng.random() * rng.choice((8, 300, 131_072))))
        left -= length
        last = left <= 0
        if rng.random() < 0.6 or length > 2000:
            blocks += zstd.rle_block(rng.randrange(256), length, last=last)
        else:
            blocks += zstd.raw_block(rng.randbytes(length), last=last)
    return (header + blocks) or b"\0"


def is_coded(stored: bytes) -> bool:
    """Whether some frame in stored bytes has an entropy-coded block, where decoders may differ.

    Errs on that side: what does not look like a frame of raw and repeated blocks counts.
    """
    at = stored.find(_FRAME_MAGIC)
    while at >= 0:
        if _has_coded_block(stored, at):
            return True
        at = stored.find(_FRAME_MAGIC, at + 1)
    return False


def _has_coded_block(stored: bytes, at: int) -> bool:
    if at + 6 > len(stored):
        return False
    descriptor = stored[at + 4]
    single = bool(descriptor & 0x20)
    flag = descriptor >> 6
    at += 5 + (not single) + (0, 1, 2, 4)[descriptor & 3] + ((1 << flag) if flag else single)
    while at + 3 <= len(stored):
        head = int.from_bytes(stored[at : at + 3], "little")
        kind = head >> 1 & 3
        if kind not in (_RAW_BLOCK, _RLE_BLOCK):
            return kind == 2
        at += 3 + (1 if kind == _RLE_BLOCK else head >> 3)
        if head & 1:
            return False
    return False
