"""What `load` found when it compared a checkpoint with a state."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsdformat.errors import MismatchError, printable

__all__ = ["Cast", "LoadReport", "Loaded", "Mismatch"]

_SHOWN = 10
_COMPARED = 3000


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An entry that both have, and that differs.

    Attributes:
        name: Display name.
        what: `shape`, `dtype`, `kind`, `value` or `tie`.
        stored: What the checkpoint has, for people.
        wanted: What the state has, for people.
        castable: Whether `dtype` would convert it.
    """

    name: str
    what: str
    stored: str
    wanted: str
    castable: bool = False

    def __str__(self) -> str:
        there = f"{self.what} {printable(self.stored)} in the checkpoint"
        return f"{printable(self.name)}: {there}, {printable(self.wanted)} wanted"


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor that was converted on request.

    Attributes:
        name: Display name.
        stored, loaded: Logical dtypes.
    """

    name: str
    stored: str
    loaded: str

    def __str__(self) -> str:
        return f"{printable(self.name)}: {self.stored} to {self.loaded}"


@dataclass
class LoadReport:
    """What was not as the state wants it, and what was done about it.

    Attributes:
        missing: Names that the state wants and the checkpoint does not have.
        unexpected: Names of tensors that the checkpoint has and the state does not want.
        mismatched: Entries that both have, and that differ.
        uninitialized: Parameters and buffers on the meta device that stay there, since the
            checkpoint does not hold them: buffers that are not persistent, for one.
        replaced: Entries of an optimizer that were of another shape or dtype, and now are as
            they were stored. Only with `strict=False`.
        casts: Tensors that were converted, as `dtype` asked for.
        fresh: What is marked with `PerRank` and was not saved by this rank: it is as it was.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    uninitialized: list[str] = field(default_factory=list)
    replaced: list[Mismatch] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything differs; casts and `PerRank` were asked for, and do not count."""
        return bool(
            self.missing
            or self.unexpected
            or self.mismatched
            or self.uninitialized
            or self.replaced
        )

    def __str__(self) -> str:
        """List at most ten entries of each kind, with names that are spelled alike."""
        lines: list[str] = []
        for title, items in self._lists():
            if items:
                lines.append(f"{title}: {len(items)}")
                shown = (printable(i) if isinstance(i, str) else str(i) for i in items[:_SHOWN])
                lines.extend(f"  {item}" for item in shown)
                if len(items) > _SHOWN:
                    lines.append(f"  … and {len(items) - _SHOWN} more")
        return "\n".join(lines) if lines else "everything matches"

    def check(self, strict: Callable[[str], bool]) -> None:
        """Raise if something differs where the comparison is strict.

        Raises:
            MismatchError: `state_mismatch`, with this report.
        """
        names = [*self.missing, *self.unexpected, *self.uninitialized]
        names += [item.name for item in self.mismatched]
        if any(strict(name) for name in names):
            raise MismatchError(
                f"the checkpoint does not fit the state; nothing was changed\n{self}",
                code="state_mismatch",
                hint=self._hint(),
                report=self,
            )

    def _lists(self) -> list[tuple[str, Sequence[Any]]]:
        return [
            ("missing in the checkpoint", _with_close(self.missing, self.unexpected)),
            ("unexpected in the checkpoint", self.unexpected),
            ("different", self.mismatched),
            ("left on the meta device", self.uninitialized),
            ("replaced", self.replaced),
            ("cast", self.casts),
            ("of no rank that has saved", self.fresh),
        ]

    def _hint(self) -> str:
        kinds = {item.what for item in self.mismatched}
        if self.uninitialized and not (self.missing or self.unexpected or kinds):
            return (
                "the checkpoint does not hold these; build the module where its buffers get their "
                "values, with only the parameters on meta, or pass strict=False and initialize "
                "them yourself"
            )
        castable = self.mismatched and all(item.castable for item in self.mismatched)
        if castable and not (self.missing or self.unexpected):
            return "pass dtype=... to convert tensors of a model while loading"
        if self.missing and self.unexpected:
            return "pass rename=... if names have changed, or strict=False to load what fits"
        if self.unexpected and not self.mismatched:
            root = printable(self.unexpected[0].split("/", 1)[0])
            return (
                f"name what you want back, as in {{{root!r}: None}}, or leave it out with "
                "select=... or strict=False"
            )
        return "pass strict=False to load what fits"


class Loaded(dict[str, Any]):
    """What `load` did not place: plain values, as `{"step": 10}`.

    Attributes:
        report: What was compared and found.
    """

    def __init__(self, values: dict[str, Any], report: LoadReport) -> None:
        super().__init__(values)
        self.report = report


def _with_close(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """Add to names that are missing those that are spelled alike."""
    pool = unexpected[:_COMPARED]
    lines = list(missing)
    for index, name in enumerate(missing[:_SHOWN]):
        close = difflib.get_close_matches(name, pool, n=1)
        if close:
            lines[index] = f"{printable(name)} (is it {printable(close[0])}?)"
    return lines
