"""The command line of the compare program."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import compare
from compare.case import Case
from compare.cases import SUBJECTS, choose_cases
from compare.runs import LIMIT_S, RIGHT, Row, run_all
from compare.tables import markdown, shorten, terminal

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return an exit code: 1 if ours is not right, 2 for wrong usage."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        cases = choose_cases(options.only)
    except LookupError as error:
        parser.error(str(error.args[0]))
    if options.list:
        print(listing(cases))
        return 0
    rows = run_all(cases, limit_s=options.limit, jobs=options.jobs, tell=tell)
    version = importlib.metadata.version("torch")
    print(markdown(rows, version) if options.markdown else terminal(rows))
    if options.json is not None:
        write_json(rows, version, Path(options.json))
    return 1 if any(row.ours != RIGHT for row in rows) else 0


def build_parser() -> argparse.ArgumentParser:
    """Describe the arguments."""
    parser = argparse.ArgumentParser(prog="compare", description=compare.__doc__)
    parser.add_argument("--only", metavar="GLOB,...", help="names of cases; all if not given")
    parser.add_argument("--list", action="store_true", help="list cases, and run none")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README")
    parser.add_argument("--json", metavar="FILE", help="also write every outcome to a file")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help="after which a scenario hangs (default %(default)g)",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="cases at a time (default %(default)d)"
    )
    return parser


def listing(cases: Sequence[Case]) -> str:
    """List cases by subject, with what is right and who says so."""
    lines = []
    for subject in SUBJECTS:
        chosen = [case for case in subject.cases if case in cases]
        lines += [f"{subject.title}"] if chosen else []
        lines += [f"    {case.name}: {case.wanted} ({case.source})" for case in chosen]
    return "\n".join(lines)


def write_json(rows: Sequence[Row], version: str, path: Path) -> None:
    """Write what came of each case."""
    document = {
        "torch": version,
        "rows": [
            {
                "case": row.case.name,
                "wanted": row.case.wanted,
                "source": row.case.source,
                "library": row.case.pair.peer.label,
                "torch": row.peer,
                "dsdformat": row.ours,
            }
            for row in rows
        ],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def tell(row: Row) -> None:
    """Tell of progress, apart from the table."""
    text = f"{row.case.name}: {shorten(row.peer)} | {shorten(row.ours)}"
    print(text, file=sys.stderr, flush=True)
