"""`dsd show`: the numbers of a tensor or of a box of it, a value, or what a container holds."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import dsdformat
from dsdformat import ArgumentError, Box, Checkpoint, EntryNotFoundError, TensorEntry
from dsdformat.cli.arrays import SHOWN_MAX, find_edge, has_numpy, read_box, read_edges
from dsdformat.cli.entries import check_dtype, distinct, nbytes_of, summary_text
from dsdformat.cli.escapes import unescape
from dsdformat.cli.grids import element_json, element_text, grid_lines, nested
from dsdformat.cli.opening import is_ours, open_source
from dsdformat.cli.options import Json, Source
from dsdformat.cli.render import Column, Output, format_count
from dsdformat.cli.values import (
    is_branch,
    is_tensor,
    iter_children,
    name_of,
    short_text,
    type_name,
    value_json,
)
from dsdformat.convert import AnyTensor, Foreign, Summary, find_summary
from dsdformat.entries import box_of
from dsdformat.errors import shorten

__all__ = ["HELP", "show"]

HELP = """Print a tensor, a box of it, a value, or what a container holds.

NAME is as "dsd ls" prints it. A box is given by integers and slices of step 1, one for each dim
from the first on. Only the blocks that meet the box are read, and each is verified. Numbers need
numpy; without it an element is the hexadecimal digits of its bytes.

\b
Examples:
  dsd show step-1000 'model/layers.0.weight[0:2,:4]'
  dsd show step-1000 optimizer/param_groups

\b
--json prints an object with checkpoint, name, kind and, by kind,
  tensor     dtype, shape, nbytes: of the whole tensor
             box: offset, shape
             elements: nested lists, without the dims that have an integer;
             null where there are more than 65,536
             stats: min, max, mean of the finite elements, and how many are
             nan or infinite; null where there are no numbers
  value      type, value
  container  type, children: of each name, kind and, by kind, dtype, shape,
             nbytes; type, value; type, length

\b
In it, a special float is "NaN", "Infinity" or "-Infinity", a complex element
a pair, and an element without a number a string of hexadecimal digits.
Values that JSON lacks are objects, whose first key tells the type:
  {"$tuple": [1, 2]}, and so $set, $frozenset, $size
  {"$deque": [1, 2], "maxlen": 3}
  {"$dict": [[key, value], ...]}, and so $odict, $counter, $defaultdict
  {"$bytes": "00ff"}
  {"$int": "36893488147419103232"}
  {"$complex": [0.5, 1.0]}
  {"$scalar": "float32", "value": 0.5, "bytes": "0000003f"}
  {"$name": "float32", "kind": "torch.dtype"}
  {"$path": "/data/run", "kind": "posix"}
  {"$datetime": "2026-11-30T12:00:00+01:00", "fold": 0}
  {"$date": "2026-11-30"}
  {"$timedelta": [days, seconds, microseconds]}
"""

JSON_ELEMENTS_MAX = 65_536
WHOLE_MAX = 64  # elements of a tensor that is shown whole; of a box that was asked for, more
_PIPED_WIDTH = 80
_STATS_DIGITS = 8
_SLICED = re.compile(r"(?P<name>.*)\[(?P<steps>[^\[\]]*)\]", re.DOTALL)
_STEP = re.compile(r"(?P<index>-?\d{1,19})|(?P<start>-?\d{1,19})?\s*:\s*(?P<stop>-?\d{1,19})?")
_COLUMNS = (Column("name", flexible=True), Column("type"), Column("value", flexible=True))

Step = int | slice


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to show, or a box of it.

    Attributes:
        entry: The tensor.
        box: What to show of it.
        shape: Of the box, without the dims that an integer took away.
    """

    entry: TensorEntry | AnyTensor
    box: Box
    shape: tuple[int, ...]


def show(
    ctx: typer.Context,
    ckpt: Source,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name, or NAME[slices].", show_default=False),
    ],
    json: Json = False,
) -> None:
    """Print one entry of a checkpoint."""
    out: Output = ctx.obj
    with _open(ckpt) as checkpoint:
        found = _find_tensor(checkpoint, name) or _find_value(checkpoint, name)
        if json:
            out.document({"checkpoint": str(ckpt), "name": name} | _json(found, name))
        elif isinstance(found, _Tensor):
            _print_tensor(out, name, found)
        elif is_branch(found):
            out.table(_COLUMNS, (_child_cells(*child) for child in _children(found, name)))
        else:
            out.line(short_text(found, sys.maxsize))


class _OtherKind(contextlib.AbstractContextManager["_OtherKind"]):
    """A checkpoint of another kind, with what this command uses of one of ours."""

    def __init__(self, source: Foreign) -> None:
        self._source = source
        self._tensors = dict(source)

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> AnyTensor:
        return self._tensors[name]

    def value(self, name: str) -> Any:
        node: Any = self._source.tree
        for part in name.split("/") if name else ():
            children = (child for step, child in iter_children(node) if name_of((step,)) == part)
            node = next(children, _ABSENT)
            if node is _ABSENT:
                close = difflib.get_close_matches(name, list(self._tensors)[:3000], n=3)
                raise EntryNotFoundError(
                    f"no entry {shorten(name)} in {self._source.name}",
                    name=name,
                    close_matches=close,
                )
        return node


_ABSENT: Any = object()
_Opened = Checkpoint | _OtherKind


def _open(ckpt: Path) -> _Opened:
    return dsdformat.open(ckpt) if is_ours(ckpt) else _OtherKind(open_source(ckpt))


def _find_tensor(checkpoint: _Opened, name: str) -> _Tensor | None:
    """Find a tensor by its name, as it is or as it was printed, with or without slices."""
    for text in distinct([name, unescape(name)]):
        if text in checkpoint:
            return _cut(checkpoint.tensor(text), ())
        sliced = _SLICED.fullmatch(text)
        if sliced and sliced["name"] in checkpoint:
            return _cut(checkpoint.tensor(sliced["name"]), _parse_steps(sliced["steps"]))
    return None


def _find_value(checkpoint: _Opened, name: str) -> Any:
    """Find what is no tensor."""
    names = distinct([name, unescape(name)])
    for text in names:
        with contextlib.suppress(EntryNotFoundError):
            return checkpoint.value(text)
    sliced = _SLICED.fullmatch(name)
    try:
        value = checkpoint.value(sliced["name"] if sliced else names[-1])
    except EntryNotFoundError as error:
        error.hint = error.hint or "dsd ls CKPT --values lists what there is"
        raise
    message = f"{name}: only tensors have slices, and this is of type {type_name(value)}"
    raise ArgumentError(message, code="bad_argument")


def _cut(entry: TensorEntry | AnyTensor, steps: tuple[Step, ...]) -> _Tensor:
    check_dtype(entry)
    box = box_of(entry.shape, steps)
    kept = [size for size, step in itertools.zip_longest(box.shape, steps) if type(step) is not int]
    return _Tensor(entry, box, tuple(kept))


def _parse_steps(text: str) -> tuple[Step, ...]:
    """Parse what stands in the brackets: integers and slices, in between commas."""
    return tuple(_parse_step(part.strip()) for part in text.split(","))


def _parse_step(text: str) -> Step:
    text = re.sub(r":\s*1?\s*\Z", "", text) if text.count(":") == 2 else text
    found = _STEP.fullmatch(text)
    if found is None:
        raise ArgumentError(
            f"{shorten(text)} is neither an integer nor a slice of step 1",
            code="bad_argument",
            hint="write a box as in NAME[0:2,:4], or NAME[7]",
        )
    if found["index"]:
        return int(found["index"])
    start, stop = (int(end) if end else None for end in found.group("start", "stop"))
    return slice(start, stop)


def _print_tensor(out: Output, name: str, found: _Tensor) -> None:
    entry, box = found.entry, found.box
    shape = str(list(found.shape))
    stats = find_summary(entry, box) if has_numpy() else None
    edge = find_edge(box.shape, WHOLE_MAX if box.shape == entry.shape else SHOWN_MAX)
    out.title(name)
    out.pairs(
        [
            ("dtype", entry.dtype),
            ("shape", shape if box.shape == entry.shape else f"{shape} of {list(entry.shape)}"),
            *_stats_pairs(stats or Summary()),
        ]
    )
    out.line()
    if edge is None:
        out.line("too many dims to print; give a slice")
    else:
        texts = list(map(element_text, read_edges(entry, box, edge)))
        for line in grid_lines(texts, found.shape, edge, out.width or _PIPED_WIDTH):
            out.line(line)
    if not has_numpy():
        out.note("these are bytes; for numbers, pip install 'dsdformat[numpy]'")


def _stats_pairs(stats: Summary) -> list[tuple[str, str]]:
    left_out = [
        f"{n:,} {what}" for n, what in ((stats.nan, "NaN"), (stats.infinite, "infinite")) if n
    ]
    return [
        ("min", "" if stats.low is None else element_text(stats.low, _STATS_DIGITS)),
        ("max", "" if stats.high is None else element_text(stats.high, _STATS_DIGITS)),
        ("mean", "" if stats.mean is None else element_text(stats.mean, _STATS_DIGITS)),
        ("left out", ", ".join(left_out)),
    ]


def _children(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    return ((f"{name}/{name_of((step,))}", child) for step, child in iter_children(node))


def _child_cells(name: str, child: Any) -> tuple[str, str, str]:
    if is_tensor(child):
        return name, "tensor", summary_text(child)
    if is_branch(child):
        return name, type_name(child), format_count(len(child), "entry", "entries")
    return name, type_name(child), short_text(child)


def _json(found: Any, name: str) -> dict[str, Any]:
    if isinstance(found, _Tensor):
        return _tensor_json(found.entry) | _box_json(found)
    if is_branch(found):
        children = itertools.starmap(_child_json, _children(found, name))
        return {"kind": "container", "type": type_name(found), "children": children}
    return {"kind": "value", "type": type_name(found), "value": value_json(found)}


def _tensor_json(entry: TensorEntry | AnyTensor) -> dict[str, Any]:
    return {
        "kind": "tensor",
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "nbytes": nbytes_of(entry),
    }


def _box_json(found: _Tensor) -> dict[str, Any]:
    elements = None
    if found.box.numel <= JSON_ELEMENTS_MAX:
        flat = map(element_json, read_box(found.entry, found.box))
        elements = nested(flat, found.shape)
    return {
        "box": {"offset": list(found.box.offset), "shape": list(found.box.shape)},
        "elements": elements,
        "stats": _stats_json(find_summary(found.entry, found.box) if has_numpy() else None),
    }


def _stats_json(stats: Summary | None) -> dict[str, Any] | None:
    if stats is None:
        return None
    return {
        "min": element_json(stats.low),
        "max": element_json(stats.high),
        "mean": element_json(stats.mean),
        "nan": stats.nan,
        "infinite": stats.infinite,
    }


def _child_json(name: str, child: Any) -> dict[str, Any]:
    if is_tensor(child):
        return {"name": name} | _tensor_json(child)
    if is_branch(child):
        return {"name": name, "kind": "container", "type": type_name(child), "length": len(child)}
    return {"name": name, "kind": "value", "type": type_name(child), "value": value_json(child)}
