"""Rows: one for each repetition, and their medians."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Row", "Spread", "Summary", "summarize"]


@dataclass(frozen=True, slots=True)
class Row:
    """One repetition of one contender, or why there is none.

    Attributes:
        call_s: Until the call returned.
        total_s: Until the result was durable, where the case asks for that; else `call_s`.
        peak_nbytes: Rise of the resident set during the call, less what the call has to make.
        anon_nbytes, file_nbytes: The parts of that rise, sampled; nothing is taken off.
        other: Share of all processors that others used meanwhile.
        columns: What the case adds.
        skipped: Why it cannot be measured here.
        error: Why it failed.
    """

    case: str
    contender: str
    repetition: int = 0
    nbytes: int = 0
    call_s: float = 0.0
    total_s: float = 0.0
    peak_nbytes: int = 0
    anon_nbytes: int = 0
    file_nbytes: int = 0
    cpu_s: float = 0.0
    other: float = 0.0
    columns: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
    error: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether there are figures."""
        return not (self.skipped or self.error)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as what JSON can hold."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some figures, and their ends."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Iterable[float]) -> Spread:
        """Take the median of at least one figure."""
        values = list(figures)
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Summary:
    """All repetitions of one contender."""

    contender: str
    count: int
    nbytes: int
    total_s: Spread
    call_s: Spread
    ratio: float | None  # to the baseline, of the medians
    peak_nbytes: Spread
    anon_nbytes: Spread
    file_nbytes: Spread
    other: Spread
    columns: Mapping[str, float]


def summarize(rows: Sequence[Row], baseline: str) -> list[Summary]:
    """Take medians per contender, the quickest first; rows without figures are left out."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.is_measured:
            groups.setdefault(row.contender, []).append(row)
    base = groups.get(baseline)
    base_s = statistics.median(row.total_s for row in base) if base else None
    found = [_summary(name, group, base_s) for name, group in groups.items()]
    return sorted(found, key=lambda one: one.total_s.median)


def _summary(name: str, group: list[Row], base_s: float | None) -> Summary:
    total = Spread.of(row.total_s for row in group)
    return Summary(
        contender=name,
        count=len(group),
        nbytes=group[0].nbytes,
        total_s=total,
        call_s=Spread.of(row.call_s for row in group),
        ratio=total.median / base_s if base_s else None,
        peak_nbytes=Spread.of(row.peak_nbytes for row in group),
        anon_nbytes=Spread.of(row.anon_nbytes for row in group),
        file_nbytes=Spread.of(row.file_nbytes for row in group),
        other=Spread.of(row.other for row in group),
        columns={
            key: statistics.median(row.columns[key] for row in group) for key in group[0].columns
        },
    )
