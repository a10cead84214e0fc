"""What of a pickle may be a key of a dict or an element of a set.

Hashing is the first thing that Python does with a value from a file, so it is prepared: a tuple
in a tuple in a tuple would overflow the stack, shared ones would take for ever, and numbers can
be chosen so that they all meet.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from dsdformat.format.values import Size

__all__ = ["ValueFault", "checked_key", "distinct"]

_PARTS_MAX = 256
_INT_BITS = 64
_COLLISIONS_MAX = 64


class ValueFault(Exception):  # noqa: N818 -- never leaves `resolve`
    """What is wrong with the arguments of a known name."""

    def __init__(self, message: str, code: str = "pickle_value") -> None:
        super().__init__(message)
        self.code = code


def checked_key(value: Any) -> Any:
    """Return a value that may be hashed.

    Raises:
        ValueFault: it may not.
    """
    if type(value) is not str and not _is_key(value, [_PARTS_MAX]):
        raise ValueFault("a key that is no plain value", "pickle_malformed")
    return value


def _is_key(value: Any, budget: list[int]) -> bool:
    budget[0] -= 1
    if budget[0] < 0:
        return False
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() <= _INT_BITS)
    if kind in (tuple, frozenset, Size):
        return len(value) <= budget[0] and all(_is_key(item, budget) for item in value)
    return not isinstance(value, (list, dict, set, bytearray, deque))


def distinct(keys: list[Any]) -> set[Any]:
    """Return keys as a set.

    Raises:
        ValueFault: a key occurs twice, or too many have one hash.
    """
    if any(type(key) is not str for key in keys):
        hashes = {hash(key) for key in keys}
        if len(keys) - len(hashes) > _COLLISIONS_MAX:
            raise ValueFault("too many keys have one hash", "foreign_too_large")
    unique = set(keys)
    if len(unique) != len(keys):
        raise ValueFault("a key occurs twice", "pickle_malformed")
    return unique
