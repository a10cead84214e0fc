"""`dsd diff`: how two checkpoints differ."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from dsdformat.cli.choice import names_in, typed_globs, typed_name
from dsdformat.cli.grids import element_json, element_text
from dsdformat.cli.opening import open_source, tell_findings
from dsdformat.cli.options import Json, Source
from dsdformat.cli.progress import progress_bar
from dsdformat.cli.render import Column, Output, format_seconds, format_size
from dsdformat.cli.values import is_tensor, short_text, type_name, value_json
from dsdformat.convert import Change, Difference
from dsdformat.convert import diff as compare
from dsdformat.convert.differing import NumbersDiffer
from dsdformat.selection import Selection

__all__ = ["HELP", "diff"]

HELP = """Compare two checkpoints: names, dtypes, shapes, values and data.

They may be of any kinds that are read, and laid out in any way. Data that
has digests in both is not read; "dsd verify" checks that it has them. NaN is
equal to the same NaN, and -0.0 is not equal to 0.0. Exits with 1 if something
differs. What was written by other ranks, or compressed, is no difference, and
neither is an optimizer by numbers in one, by names in the other.

\b
Examples:
  dsd diff step-1000 step-2000
  dsd diff step-1000 step-2000 --select 'model/*' --stats
  dsd diff step-1000 step-1000.pt
  dsd diff step-1000 pytorch_model.bin --branch-a model

\b
--json prints an object with
  a, b             as they were given
  equal            whether nothing differs
  tensors, values  how many were compared
  only_a, only_b   names that the other lacks
  changes          name, what (type, dtype, shape, data, value, order), a, b:
                   dtype and shape, or type and value (as "dsd show" has it);
                   numbers, with --stats: elements, differing, max_abs, nan,
                   first (its place), a, b; or null
  ties             name, a, b: the names that it is one tensor with
  nbytes_read      of data, on both sides
  seconds          that it took
"""

ROWS_SHOWN = 40
_TIED_SHOWN = 3


def diff(
    ctx: typer.Context,
    a: Source,
    b: Source,
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="What to compare, by name. May be repeated."),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Tell how many elements differ, and by how much.")
    ] = False,
    branch_a: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare what lies there in A.")
    ] = None,
    branch_b: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare what lies there in B.")
    ] = None,
    no_ties: Annotated[
        bool, typer.Option("--no-ties", help="Do not compare which names are one tensor.")
    ] = False,
    order: Annotated[
        bool, typer.Option("--order", help="Compare kinds of dicts and the order of keys too.")
    ] = False,
    json: Json = False,
) -> int:
    """Compare two checkpoints, print how they differ, and return 1 if they do."""
    out: Output = ctx.obj
    began = time.perf_counter()
    with open_source(a) as first, open_source(b) as second:
        chosen = select or branch_a or branch_b
        names = names_in(first.tree, second.tree) if chosen else []
        selection = Selection(typed_globs(select, names)) if select else Selection(None)
        branches = [name and typed_name(name, names) for name in (branch_a, branch_b)]
        with progress_bar(out, "comparing") as progress:
            found = compare(
                first,
                second,
                select=selection,
                stats=stats,
                ties=not no_ties,
                order=order,
                branch_a=branches[0],
                branch_b=branches[1],
                progress=progress,
            )
        if select and not selection.met:
            selection.check_used(names)
        tell_findings(out, first, second)
    seconds = time.perf_counter() - began
    out.exit_code = 0 if found.equal else 1
    if json:
        out.document(_document(str(a), str(b), found, seconds))
    else:
        _print(out, str(a), str(b), found, seconds)
    return out.exit_code


def _print(out: Output, a: str, b: str, found: Difference, seconds: float) -> None:
    out.title("equal" if found.equal else "different")
    read = f"{format_size(found.nbytes_read)} of data in {format_seconds(seconds)}"
    tensors = sum(is_tensor(change.a) and is_tensor(change.b) for change in found.changes)
    out.pairs(
        [
            ("a", a),
            ("b", b),
            ("tensors", _counts(found.tensors, tensors)),
            ("values", _counts(found.values, len(found.changes) - tensors)),
            ("read", read if found.nbytes_read else "no data: digests say it all"),
        ]
    )
    for title, names in (("only in a", found.only_a), ("only in b", found.only_b)):
        out.first_rows(
            [Column(title, flexible=True)], ((name,) for name in names), len(names), ROWS_SHOWN
        )
    _print_changes(out, found.changes)
    rows = ((name, _tied(one), _tied(other)) for name, one, other in found.ties)
    columns = [
        Column("tied", flexible=True),
        Column("a", flexible=True),
        Column("b", flexible=True),
    ]
    out.first_rows(columns, rows, len(found.ties), ROWS_SHOWN)


def _counts(compared: int, differing: int) -> str:
    return f"{compared:,} compared" + (f", {differing:,} differ" if differing else "")


def _tied(names: Sequence[str]) -> str:
    more = f" and {len(names) - _TIED_SHOWN:,} more" if len(names) > _TIED_SHOWN else ""
    return ("with " + ", ".join(names[:_TIED_SHOWN]) + more) if names else "alone"


def _print_changes(out: Output, changes: Sequence[Change]) -> None:
    columns = [Column("changed", flexible=True), Column("what")]
    if any(change.numbers for change in changes):
        columns += [Column("differing", right=True), Column("max abs", right=True)]
        rows: Iterator[tuple[str, ...]] = (
            (change.name, _what(change), *_number_cells(change.numbers)) for change in changes
        )
    else:
        columns += [Column("a", flexible=True), Column("b", flexible=True)]
        rows = ((change.name, change.what, *_side_texts(change)) for change in changes)
    out.first_rows(columns, rows, len(changes), ROWS_SHOWN)


def _what(change: Change) -> str:
    a, b = _side_texts(change)
    return change.what if change.what == "data" else f"{change.what}: {a}, {b}"


def _number_cells(numbers: NumbersDiffer | None) -> tuple[str, str]:
    if numbers is None:
        return "", ""
    nan = f", {numbers.nan:,} NaN" if numbers.nan else ""
    most = "" if numbers.max_abs is None else element_text(numbers.max_abs, 4)
    return f"{numbers.differing:,} of {numbers.elements:,}{nan}", most


def _side_texts(change: Change) -> tuple[str, str]:
    return _side_text(change, change.a), _side_text(change, change.b)


def _side_text(change: Change, side: Any) -> str:
    if change.what == "dtype":
        return str(side.dtype)
    if is_tensor(side):
        return f"{side.dtype} {list(side.shape)}"
    return f"{type_name(side)} {short_text(side)}" if change.what == "type" else short_text(side)


def _document(a: str, b: str, found: Difference, seconds: float) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "equal": found.equal,
        "tensors": found.tensors,
        "values": found.values,
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "changes": map(_change_json, found.changes),
        "ties": [
            {"name": name, "a": list(one), "b": list(other)} for name, one, other in found.ties
        ],
        "nbytes_read": found.nbytes_read,
        "seconds": round(seconds, 3),
    }


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "what": change.what,
        "a": _side_json(change.a),
        "b": _side_json(change.b),
        "numbers": None if change.numbers is None else _numbers_json(change.numbers),
    }


def _side_json(side: Any) -> dict[str, Any]:
    if is_tensor(side):
        return {"dtype": side.dtype, "shape": list(side.shape)}
    return {"type": type_name(side), "value": value_json(side)}


def _numbers_json(numbers: NumbersDiffer) -> dict[str, Any]:
    return {
        "elements": numbers.elements,
        "differing": numbers.differing,
        "max_abs": element_json(numbers.max_abs),
        "nan": numbers.nan,
        "first": None if numbers.first is None else list(numbers.first),
        "a": element_json(numbers.a),
        "b": element_json(numbers.b),
    }
