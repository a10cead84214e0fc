"""How far long work is, on stderr: a bar with the rate and the time that remains.

Shown where stderr is a terminal that moves its cursor, and gone when the work is done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dsdformat.cli.render import Output

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["progress_bar"]

_REFRESH_SECONDS = 0.1


@contextlib.contextmanager
def progress_bar(out: Output, doing: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar while something is done.

    Args:
        out: Where the command prints.
        doing: What is done, in a word: `verifying`.

    Yields:
        What takes bytes done and bytes in all, from any thread; None where nothing can be shown.
    """
    console = out.progress_console
    if console is None:
        yield None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, doing)


class _Bar:
    """Draws a few times a second, however often it is called."""

    def __init__(self, progress: Progress, doing: str) -> None:
        self._progress = progress
        self._task = progress.add_task(doing, total=None)
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REFRESH_SECONDS
            self._progress.update(self._task, completed=done, total=total)
