"""Pause Python's garbage collector while a million objects are made that all stay alive.

Without it, each generation is walked again and again while a large manifest is built or decoded,
which takes as long as the work itself.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["paused_gc"]


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the collector, and leave it as it was. Reference counts go on as ever.

    Only in the main thread: from another, what is put back could be what that has changed since.
    """
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
