"""Digests: BLAKE3, root digests as text, and the content digest written out."""

from __future__ import annotations

import pytest
from blake3 import blake3

from dsdformat.format.digests import Hasher, digest, parse_digest, tensor_content_digest
from dsdformat.limits import MIB

# The first one is the empty input of BLAKE3's own test vectors.
KNOWN = [
    (b"", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
    (b"abc", "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"),
]


@pytest.mark.parametrize(("data", "text"), KNOWN)
def test_the_digest_is_blake3(data, text):
    assert digest(data).hex() == text


@pytest.mark.parametrize("step", [1000, MIB, 3 * MIB])
def test_pieces_hash_as_the_whole_does(step, rng):
    data = rng.randbytes(4 * MIB)
    hasher = Hasher()
    for at in range(0, len(data), step):
        hasher.update(data[at : at + step])
    assert hasher.digest() == digest(data)


@pytest.mark.parametrize("text", ["0F" * 32, "0f" * 32])
def test_a_root_digest_is_64_digits_in_any_case(text):
    assert parse_digest(text) == b"\x0f" * 32


@pytest.mark.parametrize(
    "text",
    ["", "0f" * 31, "0f" * 33, "0g" * 32, "0f " * 32, " " + "0f" * 31 + "0"],
    ids=repr,
)
def test_anything_else_is_no_root_digest(text):
    assert parse_digest(text) is None


def test_the_content_digest_is_that_of_a_msgpack_array():
    leaf = digest(b"abcd")
    packed = b"\x94" + b"\xaddsd-content-1" + b"\xa5uint8" + b"\x92\x02\x02" + b"\xc4\x20" + leaf
    assert tensor_content_digest("uint8", (2, 2), [leaf]) == blake3(packed).digest()


def test_the_content_digest_of_an_empty_tensor_has_no_leaves():
    packed = b"\x94\xaddsd-content-1\xa5uint8\x91\x00\xc4\x00"
    assert tensor_content_digest("uint8", (0,), []) == blake3(packed).digest()
