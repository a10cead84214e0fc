"""Changes of bytes that know nothing of what they mean: bits, bytes, numbers, pieces, lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

__all__ = ["NUMBERS", "NBYTES_MAX", "mutated"]

NBYTES_MAX = 64 * 1024  # of an input; a change that would make it longer is cut
_BITS = (0, 3, 7, 8, 12, 15, 16, 31, 32, 63, 64)
NUMBERS = sorted({2**bits + step for bits in _BITS for step in (-1, 0, 1)})
_PIECE_MAX = 64
_WIDTHS = (1, 2, 4, 8)

Change = Callable[[bytearray, int, random.Random, Sequence[bytes]], None]


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """The bytes with one to four changes.

    Args:
        data: What is changed.
        rng: Decides everything.
        others: Inputs of the same kind, of which pieces are taken.
    """
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = int(rng.random() * (len(changed) + 1))
        _CHANGES[int(rng.random() * len(_CHANGES))](changed, at, rng, others)
    return bytes(changed[:NBYTES_MAX])


def _flip(data: bytearray, at: int, rng: random.Random, _others: Sequence[bytes]) -> None:
    if at < len(data):
        data[at] ^= 1 << int(rng.random() * 8)


def _set(data: bytearray, at: int, rng: random.Random, _others: Sequence[bytes]) -> None:
    if at < len(data):
        data[at] = int(rng.random() * 256)


def _step(data: bytearray, at: int, rng: random.Random, _others: Sequence[bytes]) -> None:
    """Make a number a little greater or less."""
    width, order = rng.choice(_WIDTHS), rng.choice(("little", "big"))
    piece = data[at : at + width]
    number = int.from_bytes(piece, order) + rng.choice((-4, -2, -1, 1, 2, 4))
    data[at : at + width] = (number % 256 ** len(piece)).to_bytes(len(piece), order)


def _number(data: bytearray, at: int, rng: random.Random, _others: Sequence[bytes]) -> None:
    """Put a number there that is the last or the first of its kind."""
    width, order = rng.choice(_WIDTHS), rng.choice(("little", "big"))
    data[at : at + width] = (rng.choice(NUMBERS) % 256**width).to_bytes(width, order)


def _insert(data: bytearray, at: int, rng: random.Random, _others: Sequence[bytes]) -> None:
    data[at:at] = rng.randbytes(1 + int(rng.random() * 8))


def _remove(data: bytearray, at: int, rng: random.Random, _others: Sequence[bytes]) -> None:
    del data[at : at + 1 + int(rng.random() * rng.choice((4, _PIECE_MAX)))]


def _repeat(data: bytearray, at: int, rng: random.Random, _others: Sequence[bytes]) -> None:
    start = int(rng.random() * (len(data) + 1))
    data[at:at] = data[start : start + 1 + int(rng.random() * _PIECE_MAX)]


def _move(data: bytearray, at: int, rng: random.Random, _others: Sequence[bytes]) -> None:
    """Write a piece over another."""
    start = int(rng.random() * (len(data) + 1))
    piece = data[start : start + 1 + int(rng.random() * _PIECE_MAX)]
    data[at : at + len(piece)] = piece


def _splice(data: bytearray, at: int, rng: random.Random, others: Sequence[bytes]) -> None:
    """Take a piece of another input."""
    if not others:
        return
    other = rng.choice(others)
    start = int(rng.random() * (len(other) + 1))
    piece = other[start : start + 1 + int(rng.random() * _PIECE_MAX)]
    data[at : at + (len(piece) if rng.random() < 0.5 else 0)] = piece


def _cut(data: bytearray, at: int, rng: random.Random, _others: Sequence[bytes]) -> None:
    if rng.random() < 0.3:
        del data[at:]
    else:
        _flip(data, at, rng, _others)


_CHANGES: tuple[Change, ...] = (
    *(_flip, _set, _step, _number, _insert, _remove, _repeat, _move, _splice, _cut),
)
