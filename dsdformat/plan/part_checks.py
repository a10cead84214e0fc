"""Whether a part that came from elsewhere is as a part must be; nothing in it is believed.

Pure. Columns are looked at as a whole and not row by row, since a thousand ranks send millions of
rows; a piece of a tree that many parts have is looked at once. That chunks tile their tensors, and
that writers agree, is found out when parts are merged.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from typing import Any

from dsdformat.errors import FormatError, Problem, raise_problems, shorten
from dsdformat.format.codecs import CODECS, RAW
from dsdformat.format.decoding import decode_tree
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.manifest import Body, ChunkRows, Columns
from dsdformat.format.packing import parse

__all__ = [
    "PieceChecks",
    "check_carried",
    "check_counts",
    "check_layouts",
    "check_rows",
    "check_tensors",
]

_KEYS = {"counts", "layouts", "tree"}
_PLACE = "$.extensions.part"


def check_carried(carried: Any, files: int) -> None:
    """Check what a part carries in another form than a manifest: all but the pieces of the tree.

    Args:
        carried: As it was parsed.
        files: How many data files the part has.

    Raises:
        FormatError: `bad_body`.
    """
    if type(carried) is not dict or carried.keys() != _KEYS:
        raise _bad_body(_PLACE, carried)
    if type(carried["layouts"]) is not bytes:
        raise _bad_body(f"{_PLACE}.layouts", carried["layouts"])
    counts = carried["counts"]
    fits = type(counts) is list and len(counts) == files
    if not fits or not all(type(pair) is list and len(pair) == 2 for pair in counts):
        raise _bad_body(f"{_PLACE}.counts", counts)
    if any(type(count) is not int or count < 0 for pair in counts for count in pair):
        raise _bad_body(f"{_PLACE}.counts", counts)


def check_layouts(layouts: Any) -> None:
    """Check that meshes and layouts are carried, and nothing else; what they are is not checked.

    Raises:
        FormatError: `bad_body`.
    """
    if type(layouts) is not dict or layouts.keys() != {"layouts", "meshes"}:
        raise _bad_body(f"{_PLACE}.layouts", layouts)


def check_counts(counts: list[list[int]], columns: Columns) -> None:
    """Check that the blocks and frames of all files are those in the tables.

    Raises:
        FormatError: `bad_body`.
    """
    blocks, frames = (sum(pair[number] for pair in counts) for number in (0, 1))
    if (blocks, frames) != (columns.blocks, columns.frames):
        raise _bad_body(f"{_PLACE}.counts", counts)


def check_tensors(body: Body, columns: Columns) -> None:
    """Check that numbers in the columns of tensors refer to what is there.

    Raises:
        FormatError: `bad_reference` or `unknown_dtype`.
    """
    problems = [
        *_beyond("dtype", columns.dtype, len(body.dtypes)),
        *_beyond("layout", columns.layout, len(body.layouts) + 1),
    ]
    for name in set(body.dtypes) - DTYPES.keys():
        message = f"the dtype {shorten(name)} is not known"
        problems.append(Problem("unknown_dtype", message, path="$.dtypes"))
    raise_problems(problems)


def check_rows(body: Body, columns: Columns, rows: ChunkRows) -> None:
    """Check that numbers in the columns of chunks refer to what is there, and are possible.

    Raises:
        FormatError: `bad_reference`, `unknown_codec` or `shape_overflow`.
    """
    problems = [
        *_beyond("data file", rows.file, len(body.files)),
        *_beyond("block", rows.first_block, columns.blocks + 1),
        *_beyond("frame", rows.first_frame, columns.frames + 1),
    ]
    codecs = {RAW} if _is_even(rows.codec, RAW) else set(rows.codec)
    for codec in codecs - CODECS.keys():
        problems.append(Problem("unknown_codec", f"codec {codec} is not known"))
    if _goes_beyond_int63(rows.numbers):
        message = f"a box reaches to {max(rows.numbers)}"
        problems.append(Problem("shape_overflow", message))
    raise_problems(problems)


def _beyond(what: str, numbers: array[int], end: int) -> Iterator[Problem]:
    """Complain if a number in a column is not below an end."""
    if not numbers or (numbers[0] < end and _is_even(numbers, numbers[0])):
        return
    if max(numbers) >= end:
        yield Problem("bad_reference", f"{what} {max(numbers)} is not in the table of a part")


def _is_even(column: array[int], number: int) -> bool:
    """Whether a column has one number throughout; a hundred times as fast as to look at each."""
    return column == array(column.typecode, [number]) * len(column)


def _goes_beyond_int63(column: array[int]) -> bool:
    """Whether a number of 64 bits has its highest one."""
    width = column.itemsize
    return not column.tobytes()[width - 1 if sys.byteorder == "little" else 0 :: width].isascii()


class PieceChecks:
    """Checks the pieces of trees, each distinct one once."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def check(self, piece: Any) -> None:
        """Check a tree as it is carried: bytes, or a map from its keys to pieces.

        Raises:
            FormatError: the first piece that is none, or the values in it that are none.
        """
        if type(piece) is dict:
            for part in piece.values():
                self.check(part)
            return
        if type(piece) is not bytes:
            raise _bad_body(f"{_PLACE}.tree", piece)
        if piece not in self._seen:
            raise_problems(decode_tree({"piece": parse(piece)}).problems)
            self._seen.add(piece)


def _bad_body(place: str, value: Any) -> FormatError:
    return Problem("bad_body", f"{place}: this is of no part: {shorten(value)}", path=place).error()
