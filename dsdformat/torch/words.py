"""The words that ranks leave in a mailbox: their part of a save, their error, or the verdict.

Whoever can write to the folder can write a word. So a word of which not all is as it must be is
the failure of the rank that should have left it, and nothing else comes of it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsdformat.errors import FormatError, Problem, raise_problems, shorten
from dsdformat.format.decoding import decode_tree
from dsdformat.format.digests import parse_digest
from dsdformat.format.packing import emit, parse
from dsdformat.format.values import encode
from dsdformat.torch.failures import Row, error_row

__all__ = ["failed_word", "part_word", "read_part_word", "read_verdict", "root_word"]

_PART, _FAILED, _ROOT = b"p", b"f", b"r"
_TEXT, _MAYBE = (str,), (str, type(None))
_FIELDS = {"kind": _TEXT, "code": _MAYBE, "hint": _MAYBE, "message": _TEXT}


def part_word(part: bytes) -> bytes:
    """Return the word of a rank that has written its part."""
    return _PART + part


def failed_word(told: Row | Sequence[Row | None]) -> bytes:
    """Return the word of a rank that has failed, or the verdict: what each rank has told."""
    return _FAILED + emit(encode(told if isinstance(told, dict) else list(told)))


def root_word(root: str) -> bytes:
    """Return the verdict that the checkpoint exists, with its root digest."""
    return _ROOT + root.encode()


def read_part_word(word: bytes) -> bytes | Row:
    """Return what a rank has told rank 0: its part, or its error."""
    if word[:1] == _PART:
        return word[1:]
    try:
        return _row(_told(word))
    except FormatError as error:
        return error_row(error)


def read_verdict(word: bytes, world_size: int) -> str | list[Row | None]:
    """Return what rank 0 has told: the root digest, or of each rank its error, or None."""
    try:
        if word[:1] == _ROOT:
            return _root(word[1:].decode("ascii", "replace"))
        told = _told(word)
        if type(told) is list:
            return _rows(told, world_size)
        rank_0 = _row(told)  # it has not told of all ranks
    except FormatError as error:
        rank_0 = error_row(error)
    return [rank_0, *[None] * (world_size - 1)]


def _told(word: bytes) -> Any:
    if word[:1] != _FAILED:
        raise _malformed(word[:1])
    tree = decode_tree({"told": parse(word[1:])})
    raise_problems(tree.problems)
    return tree.root["told"]


def _root(text: str) -> str:
    if parse_digest(text) is None:
        raise _malformed(text)
    return text


def _rows(told: list[Any], world_size: int) -> list[Row | None]:
    rows = [None if one is None else _row(one) for one in told]
    if len(rows) != world_size or not any(rows):
        raise _malformed(told)
    return rows


def _row(value: Any) -> Row:
    fits = type(value) is dict and value.keys() == _FIELDS.keys()
    if not fits or any(type(value[key]) not in kinds for key, kinds in _FIELDS.items()):
        raise _malformed(value)
    row: Row = value
    return row


def _malformed(what: Any) -> FormatError:
    return Problem("bad_value", f"this is no word of a rank: {shorten(what)}").error()
