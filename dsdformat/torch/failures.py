"""Errors of ranks: how one tells them to others, and the one error that all of them raise.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsdformat.errors import CODES, DistributedError, DsdError

__all__ = ["Row", "check_rows", "error_row", "lost_contact"]

# What ranks are told of an error: values of the format.
Row = dict[str, Any]


def check_rows(
    doing: str,
    ranks: Sequence[int],
    rows: Sequence[Row | None],
    own: tuple[int, Exception | None],
) -> None:
    """Raise if some rank failed.

    Args:
        doing: What failed.
        ranks: Global ranks.
        rows: Of each of them, an `error_row` or None.
        own: Which of them this rank is, and its error.

    Raises:
        DistributedError: `rank_failed`, with the cause of each rank that failed. Where all ranks
            failed alike, the cause itself.
    """
    place, error = own
    failures = {rank: _error(row) for rank, row in zip(ranks, rows, strict=True) if row is not None}
    if error is not None and all(row == rows[0] for row in rows):
        raise error
    if failures:
        if error is not None:
            failures[ranks[place]] = error
        raise _failed(doing, failures) from error


def error_row(error: Exception) -> Row:
    """Return what other ranks are told of an error: values of the format."""
    known = isinstance(error, DsdError)
    return {
        "kind": type(error).__name__,
        "code": error.code if known else None,  # type: ignore[attr-defined]
        "hint": error.hint if known else None,  # type: ignore[attr-defined]
        "message": _text(error.message if known else str(error)),  # type: ignore[attr-defined]
    }


def lost_contact(own: int, silent: Sequence[int], error: Exception) -> DistributedError:
    """Return the error of a rank that no longer reaches others.

    Args:
        own: This rank.
        silent: Ranks of which nothing is heard; none if nobody knows.
        error: What the backend says.
    """
    others, which = "other ranks", "one of them"
    if silent:
        shown = ", ".join(map(str, silent[:10])) + (", …" if len(silent) > 10 else "")
        others = f"rank{'s' * (len(silent) > 1)} {shown}"
        which = "it" if len(silent) == 1 else "each"
    return DistributedError(
        f"rank {own} has lost contact with {others}: {error}",
        code="ranks_absent",
        failures={rank: _TellableError("nothing is heard of it") for rank in silent},
        hint=f"{which} has ended, hangs, or makes another call: see what it has said last",
    )


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _error(row: Row) -> Exception:
    """Make an error of another rank again, as far as it is one of ours."""
    kind = CODES.get(row["code"])
    if kind is None or issubclass(kind, DistributedError):
        return _TellableError(f"{row['kind']}: {row['message']}")
    error = kind.__new__(kind)
    Exception.__init__(error, row["message"])
    error.message, error.code, error.hint = row["message"], row["code"], row["hint"]
    return error


class _TellableError(RuntimeError):
    """Stand for an error of another rank that is none of ours."""


def _shown(error: Exception) -> str:
    known = isinstance(error, (DsdError, _TellableError))
    return str(error) if known else f"{type(error).__name__}: {error}"


def _failed(doing: str, failures: dict[int, Exception]) -> DistributedError:
    first = min(failures)
    lines = [f"{doing} failed on rank {first}: {_shown(failures[first])}"]
    others = [str(rank) for rank in sorted(failures) if rank != first]
    if others:
        lines.append(f"it failed on ranks {', '.join(others)} too")
    return DistributedError("\n".join(lines), code="rank_failed", failures=dict(failures))
