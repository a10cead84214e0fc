"""Columns of numbers as one long number each: what is done to it is done to all of them at once.

Pure, and of the standard library. A step of Python for each number takes 40 ns, and a step of a
long number 5 to 10 for each in it.
"""

from __future__ import annotations

import sys
from array import array

__all__ = ["column_of", "long_of", "shifted"]


def long_of(column: array[int]) -> int:
    """Return the numbers of a column as the digits of one number."""
    return int.from_bytes(column.tobytes(), sys.byteorder)


def column_of(number: int, code: str, count: int) -> array[int]:
    """Return so many digits of a number as a column with this type code."""
    column = array(code)
    column.frombytes(number.to_bytes(column.itemsize * count, sys.byteorder))
    return column


def shifted(column: array[int], by: int) -> array[int]:
    """Add a number to each of a column; the sums must have a place in it."""
    if by < 0:  # would be borrowed from the next one where one is less
        return array(column.typecode, [number + by for number in column])
    ones = array(column.typecode, [1]) * len(column)
    return column_of(long_of(column) + by * long_of(ones), column.typecode, len(column))
