"""Figures as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.case import Case
from bench.rows import Row, Spread, Summary, summarize

__all__ = ["case_section", "machine_section"]

MIB = 1 << 20
SHARE_SECONDS = 0.2  # the kernel counts in hundredths
WORDS = (
    "Seconds are medians (least to most) of n repetitions, each in a fresh process, contenders in "
    "turn. *x raw*: over the plain system call for the same bytes in the same run. *peak*: rise of "
    "the resident set above what was there before the call, state included; mapped file pages "
    "count. *anonymous*, *mapped*: its parts, sampled. *others*: share of all cores that other "
    "processes and the kernel's own threads used meanwhile. GB are 10^9 bytes, MiB 2^20."
)


def machine_section(machine: Mapping[str, str], size: float) -> str:
    """Say what the figures were measured on, and what their words mean."""
    lines = [f"- {name}: {text}" for name, text in machine.items()]
    if size != 1:
        lines.append(f"- size: {size:g} of the full size")
    return "\n".join([*lines, "", WORDS])


def case_section(case: Case, rows: Sequence[Row]) -> str:
    """Show a case: heading, table, and who was left out or failed."""
    found = summarize(rows, case.baseline)
    parts = [heading(case, found)]
    if found:
        parts.append(table(found, case.baseline))
    if case.note:
        parts.append(case.note)
    if left_out := remarks(rows):
        parts.append("\n".join(left_out))
    return "\n\n".join(parts)


def heading(case: Case, found: Sequence[Summary]) -> str:
    """Name the case, and say how much data it moves."""
    size = f" ({amount(found[0].nbytes)})" if found else ""
    return f"## {case.name}: {case.title}{size}"


def table(found: Sequence[Summary], baseline: str) -> str:
    """Lay out medians, a line for each contender."""
    shows_call = any(one.call_s != one.total_s for one in found)
    extra = list(dict.fromkeys(name for one in found for name in one.columns))
    head = ["contender", "n", "seconds", "GB/s", f"x {baseline}"]
    head += ["call s"] if shows_call else []
    head += ["peak MiB", "anonymous", "mapped", "others", *extra]
    lines = [cells(one, extra, shows_call=shows_call) for one in found]
    return "\n".join(map(line, [head, ["---"] * len(head), *lines]))


def cells(one: Summary, extra: Sequence[str], *, shows_call: bool) -> list[str]:
    """Return one contender's line."""
    total = one.total_s
    found = [
        one.contender,
        str(one.count),
        f"{seconds(total.median)} ({seconds(total.least)}-{seconds(total.most)})",
        f"{one.nbytes / total.median / 1e9:.2f}",
        "-" if one.ratio is None else f"{one.ratio:.2f}",
    ]
    found += [seconds(one.call_s.median)] if shows_call else []
    found += [mib(one.peak_nbytes), mib(one.anon_nbytes), mib(one.file_nbytes)]
    found += [share(one.other) if total.median >= SHARE_SECONDS else "-"]
    return found + [f"{one.columns[name]:.3f}" if name in one.columns else "-" for name in extra]


def remarks(rows: Sequence[Row]) -> list[str]:
    """Say who was left out, and who failed, once each."""
    skipped = [f"- {row.contender}: skipped, {row.skipped}" for row in rows if row.skipped]
    failed = [f"- {row.contender}: FAILED, {row.error}" for row in rows if row.error]
    return list(dict.fromkeys(skipped + failed))


def line(found: Sequence[str]) -> str:
    """Join the cells of one line."""
    return "| " + " | ".join(found) + " |"


def seconds(value: float) -> str:
    """Show a time; short ones with more digits."""
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def mib(spread: Spread) -> str:
    """Show an amount of memory."""
    return f"{spread.median / MIB:.0f}"


def share(spread: Spread) -> str:
    """Show a share of the processors."""
    return f"{spread.median:.0%}"


def amount(nbytes: int) -> str:
    """Show an amount of data."""
    return f"{nbytes / MIB:,.0f} MiB" if nbytes >= 10 * MIB else f"{nbytes / MIB:.2f} MiB"
