"""Outcomes as a table, for a terminal or for Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from compare.case import HERE, Case
from compare.runs import RIGHT, Row

__all__ = ["head_cell", "markdown", "shorten", "terminal"]

TEXT_MAX = 100


def terminal(rows: Sequence[Row]) -> str:
    """Show each case in a few lines."""
    return "\n\n".join(map(lines_of, rows))


def lines_of(row: Row) -> str:
    """Show one case."""
    peer, ours = row.case.pair.libraries
    width = max(len(peer.label), len(ours.label))
    return "\n".join(
        [
            f"{row.case.name}: {row.case.wanted}",
            *(
                f"    {library.label:<{width}}  {text}"
                for library, text in ((peer, shorten(row.peer)), (ours, shorten(row.ours)))
            ),
        ]
    )


def markdown(rows: Sequence[Row], torch_version: str) -> str:
    """Lay out all cases in a table, a line for each."""
    lines = [f"| what is right | torch {torch_version} | dsdformat |", "|---|---|---|"]
    lines.extend(
        f"| {head_cell(row.case)} | {peer_cell(row)} | {cell(shorten(row.ours))} |" for row in rows
    )
    return "\n".join(lines)


def head_cell(case: Case) -> str:
    """Say what is right, and who reports that it is not."""
    return f"{case.wanted} ({link(case.source)})"


def link(source: str) -> str:
    """Link to a public issue or pull request."""
    if source == HERE:
        return source
    repository, number = source.split("#")
    name = repository.split("/")[1]
    return f"[{name}#{number}](https://github.com/{repository}/issues/{number})"


def peer_cell(row: Row) -> str:
    """Say who was asked, and what came of it."""
    return f"{row.case.pair.peer.label}: {cell(shorten(row.peer))}"


def shorten(outcome: str) -> str:
    """Keep the beginning of an outcome, in one line."""
    text = re.sub(r"\s+", " ", outcome.strip())
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1].rstrip()}…"


def cell(text: str) -> str:
    """Make a text fit to stand in a table."""
    return f"**{RIGHT}**" if text == RIGHT else text.replace("|", "\\|").replace("<", "&lt;")
