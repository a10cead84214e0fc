"""Hold Python's garbage collector back while a state is saved or loaded.

Paused, while a million objects are made that all stay alive: else each generation is walked again
and again while a large manifest is built or decoded, which takes as long as the work itself. Where
what was made is alive still at the end, it is walked once then: 3 µs for a tensor that is saved.

Held to what is young, for the whole of a call: a walk over all that a process has with torch in it
takes 0.2 s, and on one of many ranks all others wait for it.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

__all__ = ["paused_gc", "young_gc"]

_NEVER = (1 << 31) - 1  # collections of the middle generation, until there is one of all


@contextlib.contextmanager
def paused_gc() -> Iterator[Callable[[], None]]:
    """Pause the collector, and leave it as it was. Reference counts go on as ever.

    Gives a function that ends the pause early.

    Only in the main thread: from another, what is put back could be what that has changed since.
    """
    if not gc.isenabled() or not _is_main():
        yield _do_nothing
        return
    gc.disable()
    try:
        yield gc.enable
    finally:
        gc.enable()


@contextlib.contextmanager
def young_gc() -> Iterator[None]:
    """Let the collector look at young objects only, and leave it as it was.

    Of use as a decorator too. Only in the main thread, as `paused_gc`.
    """
    young, middle, full = gc.get_threshold()
    if full == _NEVER or not _is_main():
        yield
        return
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        if gc.get_threshold() == (young, middle, _NEVER):  # else it is what somebody wants now
            gc.set_threshold(young, middle, full)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _do_nothing() -> None:
    """End no pause: it is another's, or there is none."""
