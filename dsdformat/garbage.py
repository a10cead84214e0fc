"""Pause Python's garbage collector while a million objects are made that all stay alive.

Without it, each generation is walked again and again while a large manifest is built or decoded,
which takes as long as the work itself.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_gc"]


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the collector, and leave it as it was. Reference counts go on as ever."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
