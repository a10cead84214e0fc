"""The command line of the bench program."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bench
from bench.case import Case, Contender
from bench.cases import CASES, choose_cases
from bench.machine import describe
from bench.rows import Row
from bench.runs import Run
from bench.summary import summary_section
from bench.tables import case_section, machine_section

__all__ = ["main"]

Chosen = list[tuple[Case, list[Contender]]]

EXAMPLES = """examples:
  python tools/bench limits                       what the machine does at most
  python tools/bench save load --only dsd,safe    two cases, two libraries and the baseline
  python tools/bench --json rows.json             everything; takes an hour or two
  python tools/bench --from rows.json             its tables again, the summary last

Tables are Markdown, and go to the standard output; progress goes to the other. The exit code is 1
if something failed. Peers that are not installed are left out with a line that says so; they come
with pip install '.[bench]'. NOTES.md tells what to mind when measuring, and what stands
between the figures and the limits."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return an exit code: 1 if a contender failed, 2 for wrong usage."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.list:
        print(listing())
        return 0
    if options.read:
        try:
            return show(options.read)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"these are no rows of this program: {error}")
    if not hasattr(os, "posix_fadvise") or not Path("/proc/self/clear_refs").exists():
        parser.error("this needs Linux: peaks of memory are read from /proc")
    try:
        chosen = choose(options.cases, options.only)
    except LookupError as error:
        parser.error(str(error.args[0]))
    folder = Path(options.folder)
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder")
    with tempfile.TemporaryDirectory(prefix="dsd-bench-", dir=folder) as place:
        run = Run(
            folder=Path(place),
            size=options.size,
            repetitions=options.n,
            realtime=options.realtime,
            tell=tell,
        )
        return report(chosen, run, options.json)


def build_parser() -> argparse.ArgumentParser:
    """Describe the arguments."""
    parser = argparse.ArgumentParser(
        prog="bench",
        description=bench.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", help="names of cases, or their beginnings; all if none")
    parser.add_argument("--list", action="store_true", help="list cases and contenders")
    parser.add_argument(
        "--only", metavar="NAME,...", help="contenders by their beginnings; the baseline stays"
    )
    parser.add_argument("-n", type=positive_int, default=5, help="repetitions (default 5)")
    parser.add_argument(
        "--size", type=positive_float, default=1.0, help="scale of the states (default 1)"
    )
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="on the file system to measure"
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="schedule what is measured before all else (SCHED_RR), on a machine that is busy",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every row to a file")
    parser.add_argument(
        "--from",
        dest="read",
        metavar="FILE",
        action="append",
        help="measure nothing: print the tables of what --json wrote, of several files together",
    )
    return parser


def choose(names: Sequence[str], only: str | None) -> Chosen:
    """Choose cases by name, and of their contenders those that are asked for."""
    wanted = tuple(only.split(",")) if only else ("",)
    chosen = [
        (
            case,
            [
                one
                for one in case.contenders
                if one.name == case.baseline or one.name.startswith(wanted)
            ],
        )
        for case in choose_cases(names)
    ]
    if not any(one.name.startswith(wanted) for _, contenders in chosen for one in contenders):
        raise LookupError(f"no contender of these cases begins with {only}")
    return chosen


def report(chosen: Chosen, run: Run, json_path: str | None) -> int:
    """Run the cases; print a table as soon as its case is done."""
    machine = describe(run.folder)
    if run.realtime:
        machine["priority"] = "SCHED_RR, before all ordinary processes"
    machine["command"] = command_line()
    print(machine_section(machine, run.size))
    rows: list[Row] = []
    for case, contenders in chosen:
        found = list(run.rows(case, contenders))
        print("\n" + case_section(case, found), flush=True)
        rows += found
        if json_path is not None:  # after each case, so that none is lost with a later one
            write_rows(Path(json_path), machine, run.size, rows)
    print("\n" + summary_section([case for case, _ in chosen], rows))
    return 1 if any(row.error for row in rows) else 0


def write_rows(path: Path, machine: dict[str, str], size: float, rows: Sequence[Row]) -> None:
    """Write what `show` reads."""
    document = {"machine": machine, "size": size, "rows": [one.to_dict() for one in rows]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def show(paths: Sequence[str]) -> int:
    """Print the tables of rows that were written before."""
    rows: list[Row] = []
    for path in paths:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        print(machine_section(document["machine"], document["size"]) + "\n")
        rows += [Row(**row) for row in document["rows"]]
    names = {row.case for row in rows}
    cases = [case for case in CASES if case.name in names]
    for case in cases:
        print(case_section(case, [row for row in rows if row.case == case.name]) + "\n")
    print(summary_section(cases, rows))
    return 1 if any(row.error for row in rows) else 0


def command_line() -> str:
    """Return what this was called with."""
    return " ".join(["python tools/bench", *map(shlex.quote, sys.argv[1:])])


def listing() -> str:
    """List cases and contenders."""
    lines = []
    for case in CASES:
        lines.append(f"{case.name}: {case.title}")
        for contender in case.contenders:
            missing = contender.missing()
            lines.append(f"    {contender.name}" + (f" (needs {missing[0]})" if missing else ""))
    return "\n".join(lines)


def tell(line: str) -> None:
    """Tell of progress, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


def positive_int(text: str) -> int:
    """Parse a count."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def positive_float(text: str) -> float:
    """Parse a scale."""
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError(text)
    return value
