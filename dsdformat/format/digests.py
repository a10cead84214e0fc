"""BLAKE3 of blocks, pages and heads; content digests (spec section 13)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blake3 import blake3

from dsdformat.format.packing import emit
from dsdformat.limits import MIB

__all__ = ["DIGEST_NBYTES", "Hasher", "digest", "digests", "parse_digest", "tensor_content_digest"]

DIGEST_NBYTES = 32
CONTENT_DOMAIN = "dsd-content-1"

Buffer = bytes | bytearray | memoryview


def digest(data: Buffer) -> bytes:
    """Return the 32-byte BLAKE3 digest of some bytes."""
    return blake3(data).digest()


def digests(pieces: Iterable[Buffer]) -> list[bytes]:
    """Return the digest of each piece; all are made in the same memory."""
    state, found = blake3(), []
    for piece in pieces:
        found.append(state.update(piece).digest())
        state.reset()
    return found


class Hasher:
    """Hash bytes that come in pieces."""

    def __init__(self) -> None:
        self._state = blake3()

    def update(self, data: Buffer) -> None:
        """Go on with these bytes."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), MIB):
            self._state.update(view[at : at + MIB])

    def digest(self) -> bytes:
        """Return the digest of all bytes so far."""
        return self._state.digest()


def parse_digest(text: str) -> bytes | None:
    """Read a root digest: 64 hexadecimal digits, in any case; None if it is not that."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    return raw if len(raw) == DIGEST_NBYTES and len(text) == 2 * DIGEST_NBYTES else None


def tensor_content_digest(dtype: str, shape: Sequence[int], leaves: Iterable[bytes]) -> bytes:
    """Return the content digest of a tensor from the digests of its 4 MiB leaves (R-13.1)."""
    return digest(emit([CONTENT_DOMAIN, dtype, list(shape), b"".join(leaves)]))
