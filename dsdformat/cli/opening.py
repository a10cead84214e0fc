"""Opening what a command is given: a checkpoint of ours, or of a kind that can be read.

Decides how errors read: what is of no kind at all is told as one of ours that is missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import dsdformat
from dsdformat import ConvertError
from dsdformat.cli.render import Output
from dsdformat.convert import Foreign, Kind, find_kind, open_any
from dsdformat.limits import MANIFEST_LABEL

__all__ = ["Unknown", "is_ours", "open_source", "tell_findings"]

Unknown = Literal["refuse", "drop", "record"]
_SHOWN = 5


def is_ours(path: Path) -> bool:
    """Whether a path is to be opened as a checkpoint of ours, be it only for its error.

    Raises:
        ConvertError: it is of a kind that is not read.
    """
    if os.path.lexists(path / MANIFEST_LABEL) or not path.exists():
        return True
    try:
        return find_kind(path) is Kind.DSD
    except ConvertError as error:
        if path.is_dir() and error.code == "unknown_kind" and error.hint is None:
            return True
        raise


def open_source(
    path: Path,
    unknown: Unknown = "record",
    *,
    digest: str | None = None,
    pubkey: list[str] | None = None,
) -> Foreign:
    """Open a checkpoint of any kind; if asked for, one of ours of a digest, or signed by a key.

    Raises:
        ArgumentError: a digest or a signature is asked of a foreign file.
        ConvertError: a foreign file is malformed, or of a kind that is not read.
        FormatError: a checkpoint of ours is damaged, or there is none.
    """
    if is_ours(path) and not os.path.lexists(path / MANIFEST_LABEL):
        dsdformat.open(path).close()  # raises what is wrong
    return open_any(path, unknown=unknown, digest=digest, pubkey=pubkey)


def tell_findings(out: Output, *sources: Foreign) -> None:
    """Tell the person what of some files is not read, or not as it was."""
    for source in sources:
        lost = [str(one) for one in source.findings if one.lost]
        if lost:
            more = f" and {len(lost) - _SHOWN:,} more" if len(lost) > _SHOWN else ""
            out.note(f"not all of {source.name} is read: {'; '.join(lost[:_SHOWN])}{more}")
