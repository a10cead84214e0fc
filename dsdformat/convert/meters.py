"""How far a conversion has come, for callers who show it."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Meter", "Progress"]

# Is called with bytes done and bytes in all.
Progress = Callable[[int, int], None]


class Meter:
    """Counts bytes that are done, from any thread, and tells a callback.

    Attributes:
        total: How many there are in all; set when that is known.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.total = 0
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count some more."""
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self.total)
