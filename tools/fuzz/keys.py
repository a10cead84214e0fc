"""Keys as PEM files, public and private: what `pubkey=` and `dsd sign --key` are given."""

from __future__ import annotations

import base64
import binascii
import random
from collections.abc import Sequence

from dsdformat.errors import ArgumentError
from dsdformat.signing import public_keys, sign_root
from fuzz.bytewise import mutated
from fuzz.formats import Codes, Format

__all__ = ["FORMATS"]


def key_seeds() -> list[bytes]:
    """A private and a public Ed25519 key, and keys of other kinds."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    found = []
    for kind in (Ed25519PrivateKey, X25519PrivateKey):
        key = kind.from_private_bytes(bytes(range(32)))
        found.append(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        found.append(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return found


def read_key(data: bytes) -> Codes:
    """A file of a key, taken as either kind: refused as one, it may still be the other."""
    try:
        public_keys(data)
    except ArgumentError:
        sign_root(bytes(32), data)
    return ()


def mutated_key(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A key with the bytes changed that its text stands for, or the text."""
    head, *lines = data.split(b"\n")
    tail = lines[-2:]
    try:
        inner = base64.b64decode(b"".join(lines[:-2]))
    except binascii.Error:
        inner = b""
    if not inner or rng.random() < 0.3:
        return mutated(data, rng, others)
    return b"\n".join((head, base64.b64encode(mutated(inner, rng)), *tail))


FORMATS = (Format("key", "keys as PEM files", read_key, key_seeds, mutated_key, 5000),)
