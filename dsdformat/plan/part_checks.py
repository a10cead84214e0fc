"""Whether a part that came from elsewhere is as a part must be; nothing in it is believed.

Pure. Columns are looked at as a whole and not row by row, since a thousand ranks send millions of
rows; a piece of a tree that many parts have is looked at once. That chunks tile their tensors, and
that writers agree, is found out when parts are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsdformat.errors import FormatError, Problem, raise_problems, shorten
from dsdformat.format.codecs import CODECS
from dsdformat.format.decoding import decode_tree
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.manifest import Body, ChunkRows, Columns
from dsdformat.format.packing import parse
from dsdformat.limits import INT63_MAX

__all__ = ["PieceChecks", "check_carried", "check_columns", "check_counts", "check_layouts"]

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


def check_columns(body: Body, columns: Columns, rows: ChunkRows) -> None:
    """Check that numbers in the columns refer to what is there, and that shapes are possible.

    Raises:
        FormatError: `bad_reference`, `unknown_dtype`, `unknown_codec` or `shape_overflow`.
    """
    raise_problems(list(_column_problems(body, columns, rows)))


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


def _column_problems(body: Body, columns: Columns, rows: ChunkRows) -> Iterator[Problem]:
    for what, numbers, end in (
        ("dtype", columns.dtype, len(body.dtypes)),
        ("layout", columns.layout, len(body.layouts) + 1),
        ("data file", rows.file, len(body.files)),
        ("block", rows.first_block, columns.blocks + 1),
        ("frame", rows.first_frame, columns.frames + 1),
    ):
        if numbers and max(numbers) >= end:
            yield Problem("bad_reference", f"{what} {max(numbers)} is not in the table of a part")
    for name in set(body.dtypes) - DTYPES.keys():
        yield Problem("unknown_dtype", f"the dtype {shorten(name)} is not known", path="$.dtypes")
    for codec in set(rows.codec) - CODECS.keys():
        yield Problem("unknown_codec", f"codec {codec} is not known")
    if rows.numbers and max(rows.numbers) > INT63_MAX:
        yield Problem("shape_overflow", f"a box reaches to {max(rows.numbers)}")


def _bad_body(place: str, value: Any) -> FormatError:
    return Problem("bad_body", f"{place}: this is of no part: {shorten(value)}", path=place).error()
