"""Codecs of one block: round trips, the planes written out, the 1 % rule, hostile pieces."""

from __future__ import annotations

import random
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard

from dsdformat.errors import DependencyError, FormatError
from dsdformat.format import codecs
from dsdformat.format.codecs import (
    CODECS,
    PLANES,
    ZSTD,
    compress_piece,
    decode_block,
    decompress_piece,
    encode_block,
)
from dsdformat.format.dtypes import DTYPES

WIDE = [name for name, row in DTYPES.items() if row.itemsize > 1]
CASES = [
    pytest.param(codec, name, id=f"{CODECS[codec]}-{name}")
    for codec in (ZSTD, PLANES)
    for name in DTYPES
    if codec == ZSTD or name in WIDE
]
COUNTS = [1, 2, 3, 255, 1023, 1024]


def contents(kind: str, nbytes: int) -> bytes:
    if kind == "zeros":
        return bytes(nbytes)
    if kind == "noise":
        return random.Random(nbytes).randbytes(nbytes)
    return bytes(index % 7 for index in range(nbytes))


# Round trips


@pytest.mark.parametrize("kind", ["zeros", "noise", "pattern"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("codec", "name"), CASES)
def test_a_block_decodes_to_what_was_encoded(codec, name, count, kind):
    dtype = DTYPES[name]
    block = contents(kind, count * dtype.itemsize)
    stored = encode_block(block, codec, dtype)
    assert decode_block(stored, codec, dtype, len(block)) == block
    assert len(stored) <= len(block) + (4 * dtype.word if codec == PLANES else 0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("codec", [ZSTD, PLANES])
def test_any_buffer_can_be_encoded_and_decoded(codec, kind):
    block = contents("pattern", 4000)
    stored = encode_block(kind(block), codec, DTYPES["float32"])
    assert decode_block(kind(stored), codec, DTYPES["float32"], 4000) == block


def test_a_block_longer_than_a_slice_is_rotated_whole():
    block = contents("noise", 200_000)
    stored = encode_block(block, PLANES, DTYPES["bfloat16"])
    assert decode_block(stored, PLANES, DTYPES["bfloat16"], len(block)) == block


@pytest.mark.parametrize("codec", [ZSTD, PLANES])
def test_many_threads_encode_and_decode_at_once(codec):
    dtype = DTYPES["float32"]
    blocks = [contents("pattern", 4 * count) for count in range(1, 200)]

    def round_trip(block: bytes) -> bytes:
        return decode_block(encode_block(block, codec, dtype), codec, dtype, len(block))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, blocks)) == blocks


# Planes, written out


def test_planes_of_integers_are_their_bytes_lowest_first():
    block = struct.pack("<2I", 0x11223344, 0x55667788)
    lengths = bytes.fromhex("02000000" * 4)
    assert encode_block(block, PLANES, DTYPES["uint32"]) == lengths + bytes.fromhex(
        "4488 3377 2266 1155"
    )


def test_planes_of_floats_have_the_sign_bit_lowest():
    block = struct.pack("<2f", 1.0, -2.0)  # 3f800000, c0000000; rotated 7f000000, 80000001
    lengths = bytes.fromhex("02000000" * 4)
    assert encode_block(block, PLANES, DTYPES["float32"]) == lengths + bytes.fromhex(
        "0001 0000 0000 7f80"
    )


def test_planes_of_complex_numbers_are_those_of_their_real_numbers():
    block = struct.pack("<2e", 1.0, -2.0)  # 3c00, c000; rotated 7800, 8001
    lengths = bytes.fromhex("02000000" * 2)
    stored = encode_block(block, PLANES, DTYPES["complex32"])
    assert stored == lengths + bytes.fromhex("0001 7880")


# The 1 % rule (spec)


def piece_that_compresses_to(share: float) -> bytes:
    """Noise and zeros, of which zstd saves about `1 - share`."""
    noisy = int(10_000 * share)
    return random.Random(1).randbytes(noisy) + bytes(10_000 - noisy)


@pytest.mark.parametrize(
    "share", [0.5, 0.9, 0.95, 0.97, 0.98, 0.985, 0.987, 0.989, 0.99, 0.992, 0.999]
)
def test_a_piece_is_compressed_only_if_that_saves_one_percent(share):
    data = piece_that_compresses_to(share)
    frame = zstandard.ZstdCompressor(level=codecs.LEVEL).compress(data)
    stored = compress_piece(data)
    assert stored == (frame if len(frame) * 100 <= len(data) * 99 else data)


@pytest.mark.parametrize("nbytes", [100 * number for number in range(1, 400, 7)])
def test_exactly_one_percent_is_enough(monkeypatch, nbytes):
    class Saving:
        def compress(self, data: bytes) -> bytes:
            return data[: len(data) * 99 // 100]

    monkeypatch.setattr(codecs, "_compressor", Saving)
    assert len(compress_piece(bytes(nbytes))) == nbytes * 99 // 100


def test_a_plane_that_does_not_get_shorter_is_stored_raw_beside_others_that_do():
    rng = random.Random(5)
    block = b"".join(bytes([0, 0, 0]) + rng.randbytes(1) for _ in range(1024))
    lengths = struct.unpack_from("<4I", encode_block(block, PLANES, DTYPES["int32"]))
    assert lengths[3] == 1024
    assert max(lengths[:3]) < 100


# Hostile pieces


def frame(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(data)


BAD_PIECES = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"\x00" * 10, id="no-frame"),
    pytest.param(frame(bytes(999)), id="declares-less"),
    pytest.param(frame(bytes(1001)), id="declares-more"),
    pytest.param(frame(bytes(1000)) + b"\x00", id="a-byte-behind"),
    pytest.param(frame(bytes(500)) + frame(bytes(500)), id="two-frames"),
    pytest.param(frame(bytes(1000))[:-1], id="cut"),
    pytest.param(frame(bytes(1000), write_content_size=False), id="size-not-declared"),
    pytest.param(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd", id="skippable"),
    pytest.param(b"\x50\x2a\x4d\x18\x00\x00\x00\x00" + frame(bytes(1000)), id="skippable-first"),
    pytest.param(frame(bytes(1000))[:4] + b"\xff" * 20, id="noise-behind-the-magic"),
]


@pytest.mark.parametrize("stored", BAD_PIECES)
def test_a_piece_that_is_not_one_frame_of_its_length_is_refused(stored):
    with pytest.raises(FormatError) as error:
        decompress_piece(stored, 1000)
    assert error.value.code == "bad_compressed_data"


def test_a_piece_as_long_as_its_contents_is_raw_even_if_it_looks_like_a_frame():
    stored = frame(bytes(1000))
    assert decompress_piece(stored, len(stored)) == stored


BAD_PLANES = [
    pytest.param(b"\x01\x00\x00", id="lengths-cut"),
    pytest.param(struct.pack("<4I", 0, 2, 2, 2) + bytes(6), id="a-plane-of-nothing"),
    pytest.param(struct.pack("<4I", 3, 2, 2, 1) + bytes(8), id="a-plane-too-long"),
    pytest.param(struct.pack("<4I", 2, 2, 2, 2) + bytes(7), id="a-byte-less"),
    pytest.param(struct.pack("<4I", 2, 2, 2, 2) + bytes(9), id="a-byte-more"),
    pytest.param(struct.pack("<4I", 2**32 - 1, 2, 2, 3) + bytes(8), id="lengths-that-wrap"),
    pytest.param(struct.pack("<4I", 1, 2, 2, 2) + bytes(7), id="a-plane-that-is-no-frame"),
]


@pytest.mark.parametrize("stored", BAD_PLANES)
def test_planes_that_do_not_add_up_are_refused(stored):
    with pytest.raises(FormatError) as error:
        decode_block(stored, PLANES, DTYPES["float32"], 8)
    assert error.value.code == "bad_compressed_data"


BOMB_NBYTES = 800 * 2**20


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """About 25 KB that inflate to 800 MiB of zeros."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=BOMB_NBYTES)
    step = bytes(2**23)
    pieces = [compressor.compress(step) for _ in range(BOMB_NBYTES // len(step))]
    return b"".join([*pieces, compressor.flush()])


def test_a_bomb_is_refused_by_what_it_declares(bomb, peak_nbytes):
    assert len(bomb) < 100_000
    assert peak_nbytes(lambda: refused(bomb, 4096)) < 1_000_000


def test_a_bomb_that_declares_little_is_stopped_at_what_it_declares(bomb, peak_nbytes):
    """The header says 4,096 bytes in the form that the frame had, the blocks hold 800 MiB."""
    header = zstandard.get_frame_parameters(bomb)
    assert header.content_size == BOMB_NBYTES
    at = bomb.index(struct.pack("<I", BOMB_NBYTES))
    lying = bomb[:at] + struct.pack("<I", 4096) + bomb[at + 4 :]
    assert zstandard.get_frame_parameters(lying).content_size == 4096
    assert peak_nbytes(lambda: refused(lying, 4096)) < 1_000_000


def refused(stored: bytes, nbytes: int) -> None:
    with pytest.raises(FormatError) as error:
        decompress_piece(stored, nbytes)
    assert error.value.code == "bad_compressed_data"


# Without zstandard


def test_without_zstandard_raw_pieces_are_read(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    assert decompress_piece(b"abc", 3) == b"abc"


def test_without_zstandard_compressed_pieces_are_an_error_that_says_what_to_install(monkeypatch):
    stored = frame(bytes(1000))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(DependencyError, match=r"pip install 'dsdformat\[zstd\]'") as error:
        decompress_piece(stored, 1000)
    assert error.value.code == "missing_dependency"


# Into memory that is there


@pytest.mark.parametrize("codec", [ZSTD, PLANES])
@pytest.mark.parametrize("kind", ["zeros", "noise", "pattern"])
def test_a_block_is_decoded_where_it_is_wanted(codec, kind):
    dtype = DTYPES["float32"]
    block = contents(kind, 40_000)
    stored = encode_block(block, codec, dtype)
    buffer = bytearray(b"#" * (len(block) + 2))
    assert decode_block(stored, codec, dtype, len(block), memoryview(buffer)[1:-1]) == block
    assert buffer == b"#" + block + b"#"


# How short


def floats(count: int) -> bytes:
    rng = random.Random(11)
    return struct.pack(f"<{count}f", *(rng.gauss(0, 0.02) for _ in range(count)))


@pytest.mark.parametrize(("name", "share"), [("float32", 0.835), ("bfloat16", 0.67)])
def test_weights_get_as_short_as_a_huffman_coder_of_exponents_makes_them(name, share):
    # Level 1 of zstd leaves more: it takes short matches, which cost more than they save.
    block = floats(1 << 18)
    if name == "bfloat16":
        block = b"".join(block[at + 2 : at + 4] for at in range(0, len(block), 4))
    assert len(encode_block(block, PLANES, DTYPES[name])) <= share * len(block)


def test_planes_of_integers_keep_their_patterns():
    block = struct.pack("<65536q", *range(65536))
    assert len(encode_block(block, PLANES, DTYPES["int64"])) < len(block) // 100
