"""All cases in one table, as README.md shows it, and which goals are met."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.case import Case
from bench.goals import Outcome, outcomes
from bench.rows import Row, Summary, summarize
from bench.tables import MIB, line

__all__ = ["summary_section"]

WORDS = (
    "Seconds over those of the baseline, and in brackets how far the resident set rises above the "
    "state, in MiB. Of several ways of a library the quickest is shown."
)


def begins(*names: str) -> Callable[[str], bool]:
    """Match contenders by their beginnings."""
    return lambda contender: contender.startswith(names)


# A column of the table, and whose figures it shows; the first column that matches.
COLUMNS: Mapping[str, Callable[[str], bool]] = {
    "unverified": begins("dsdformat (unverified"),
    "dsdformat": lambda contender: (
        contender.startswith("dsdformat") and contender != "dsdformat (zstd)"
    ),
    "safetensors": begins("safetensors"),
    "torch.save, torch.load": begins("torch.save", "torch.load"),
    "DCP-HF": begins("dcp-hf"),
    "DCP": begins("dcp"),
    "torch_checkpointing": begins("torch_checkpointing"),
    "torchsnapshot": begins("torchsnapshot"),
    "tensorizer": begins("tensorizer"),
    "zTensor": begins("ztensor"),
    "ZipNN": begins("zipnn"),
}
ORDER = ("dsdformat", "unverified")  # first in the table


def summary_section(cases: Sequence[Case], rows: Sequence[Row]) -> str:
    """Show the quickest of each library in each case, and the goals; empty if there is neither."""
    found = {
        case: summarize([row for row in rows if row.case == case.name], case.baseline)
        for case in cases
    }
    lines = {case: cells for case, one in found.items() if (cells := quickest(one))}
    parts = ["## Summary", ratios(lines), WORDS] if lines else []
    results = [one for case in cases for one in outcomes(case.name, found[case])]
    if results:
        parts.append(goals(results))
    return "\n\n".join(parts)


def ratios(lines: Mapping[Case, Mapping[str, Summary]]) -> str:
    """Lay out a line for each case, a column for each library that was measured."""
    ordered = dict.fromkeys([*ORDER, *COLUMNS])
    columns = [one for one in ordered if any(one in cells for cells in lines.values())]
    head = ["case", *columns]
    body = [
        [case.title, *(cell(cells[one]) if one in cells else "–" for one in columns)]
        for case, cells in lines.items()
    ]
    return "\n".join(map(line, [head, ["---"] * len(head), *body]))


def quickest(found: Sequence[Summary]) -> dict[str, Summary]:
    """Return the first, which is the quickest, for each column."""
    cells: dict[str, Summary] = {}
    for one in found:
        column = next((name for name, has in COLUMNS.items() if has(one.contender)), None)
        if column is not None and one.ratio is not None:
            cells.setdefault(column, one)
    return cells


def cell(one: Summary) -> str:
    """Show one figure."""
    assert one.ratio is not None
    return f"{one.ratio:.2f} ({one.peak_nbytes.median / MIB:.0f})"


def goals(results: Sequence[Outcome]) -> str:
    """List the goals that were measured, those missed first, and count them."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    counts = [f"{sum(one.met is state for one in results)} {word}" for state, word in words.items()]
    lines = [
        f"- {words[one.met]}: {one.case}, {one.goal.text()}: {one.value:.3g}"
        for one in sorted(results, key=lambda one: bool(one.met))
        if one.value is not None
    ]
    return "\n".join([f"Goals: {', '.join(counts)}.", "", *lines])
