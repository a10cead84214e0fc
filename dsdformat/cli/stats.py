"""`dsd stats`: the numbers of tensors, summed up, with a histogram."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from dsdformat.cli.choice import names_in, typed_globs
from dsdformat.cli.grids import element_json, element_text
from dsdformat.cli.opening import open_source
from dsdformat.cli.options import Json, Source
from dsdformat.cli.progress import progress_bar
from dsdformat.cli.render import Output
from dsdformat.convert import AnyTensor, Summary, find_histogram, find_summary
from dsdformat.convert.foreign import walk_tree
from dsdformat.convert.numbers import has_numbers
from dsdformat.errors import EntryNotFoundError
from dsdformat.renaming import display
from dsdformat.selection import Selection

__all__ = ["HELP", "stats"]

HELP = """Sum up the numbers of tensors, with a histogram.

NAME is a name or a glob. Infinite elements and NaN are counted and left out
of the rest. The standard deviation divides by the number of elements. Tensors
are read a few megabytes at a time: once, and once more for the histogram,
unless there are --bins 0.

\b
Examples:
  dsd stats step-1000 model/embed.weight
  dsd stats model.safetensors '*.weight' --bins 0

\b
--json prints an object with
  checkpoint
  tensors     name, dtype, shape, elements, min, max, mean, std, zeros, nan,
              infinite, and histogram: low, high, counts of equal parts; null
              where there is no number or no order
"""

_DIGITS = 8
_BAR_WIDTH = 40


def stats(
    ctx: typer.Context,
    ckpt: Source,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Names or globs.", show_default=False)
    ],
    bins: Annotated[
        int, typer.Option(metavar="N", min=0, max=1000, help="Parts of the histogram.")
    ] = 10,
    json: Json = False,
) -> None:
    """Print the sums of tensors."""
    out: Output = ctx.obj
    with open_source(ckpt) as source, progress_bar(out, "reading") as progress:
        wanted = _find(source.tree, names)
        found = _summed(wanted, bins, _teller(wanted, bins, progress))
        if json:
            rows = (_json(*one) for one in found)
            out.document({"checkpoint": str(ckpt), "tensors": rows})
            return
        for number, one in enumerate(found):
            if number:
                out.line()
            _print(out, *one)


def _find(tree: Any, globs: list[str]) -> list[tuple[str, AnyTensor]]:
    names = names_in(tree)
    selection = Selection(typed_globs(globs, names))
    selection.check_used(names)
    leaves = [(display(path), leaf) for path, leaf in walk_tree(tree)]
    wanted = [(name, leaf) for name, leaf in leaves if name in selection]
    tensors = [(name, leaf) for name, leaf in wanted if isinstance(leaf, AnyTensor)]
    if not tensors:
        name = wanted[0][0]
        raise EntryNotFoundError(f"{name} is not a tensor", code="not_a_tensor", name=name)
    return tensors


def _teller(
    wanted: list[tuple[str, AnyTensor]], bins: int, progress: Callable[[int, int], None] | None
) -> Callable[[int], None] | None:
    if progress is None:
        return None
    passes = 2 if bins else 1
    total = passes * sum(leaf.nbytes for _, leaf in wanted)
    done = 0

    def told(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return told


_Found = tuple[str, AnyTensor, Summary | None, list[int] | None]


def _summed(
    wanted: list[tuple[str, AnyTensor]], bins: int, told: Callable[[int], None] | None
) -> Iterator[_Found]:
    for name, leaf in wanted:
        summary = find_summary(leaf, told=told) if has_numbers(leaf.dtype) else None
        counts = None
        if summary is not None and summary.low is not None and bins:
            counts = find_histogram(leaf, float(summary.low), float(summary.high), bins, told=told)
        yield name, leaf, summary, counts


def _print(
    out: Output, name: str, leaf: AnyTensor, summary: Summary | None, counts: list[int] | None
) -> None:
    out.title(name)
    pairs = [("dtype", leaf.dtype), ("shape", str(list(leaf.shape)))]
    if summary is None:
        out.pairs([*pairs, ("numbers", "none: elements of this dtype are bytes")])
        return
    left_out = [
        f"{n:,} {what}" for n, what in ((summary.nan, "NaN"), (summary.infinite, "infinite")) if n
    ]
    numbers = (
        ("min", summary.low),
        ("max", summary.high),
        ("mean", summary.mean),
        ("std", summary.std),
    )
    out.pairs(
        [
            *pairs,
            *((label, "" if n is None else element_text(n, _DIGITS)) for label, n in numbers),
            ("zeros", f"{summary.zeros:,}"),
            ("left out", ", ".join(left_out)),
        ]
    )
    if counts is not None and sum(counts) > 0:
        out.line()
        for line in _histogram_lines(summary, counts, "█" if out.drawable else "#"):
            out.line(line)


def _histogram_lines(summary: Summary, counts: list[int], block: str) -> Iterator[str]:
    low, high = float(summary.low), float(summary.high)
    if low == high:
        counts = [sum(counts)]
    ends = [low + (high - low) * (n / len(counts)) for n in range(len(counts) + 1)]
    if not all(map(math.isfinite, ends)):  # the range is wider than a double
        ends = [low * (1 - n / len(counts)) + high * (n / len(counts)) for n in range(len(ends))]
    texts = [element_text(end, 4) for end in ends]
    width = max(map(len, texts))
    digits = max(len(f"{count:,}") for count in counts)
    for number, count in enumerate(counts):
        bar = block * math.ceil(_BAR_WIDTH * count / max(counts))
        part = f"{texts[number]:>{width}} to {texts[number + 1]:>{width}}"
        yield f"  {part}  {count:>{digits},}  {bar}"


def _json(
    name: str, leaf: AnyTensor, summary: Summary | None, counts: list[int] | None
) -> dict[str, Any]:
    shown = summary or Summary()
    known = summary is not None
    low, high = element_json(shown.low), element_json(shown.high)
    return {
        "name": name,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "elements": math.prod(leaf.shape),
        "min": low,
        "max": high,
        "mean": element_json(shown.mean),
        "std": element_json(shown.std),
        "zeros": shown.zeros if known else None,
        "nan": shown.nan if known else None,
        "infinite": shown.infinite if known else None,
        "histogram": None if counts is None else {"low": low, "high": high, "counts": counts},
    }
