"""Name the ranks that are silent when others have lost contact.

A backend tells that a connection broke or that time was over, not which rank it was. So a rank
that has lost contact leaves a mark in the store of the default process group, and waits a moment
for the marks of others: those that live see it too. What is left are ranks that have ended, hang,
or wait for somebody else.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from dsdformat.torch.compat import default_store

__all__ = ["find_silent"]

_PATIENCE_S = 5.0
_ANSWER_S = 5.0  # for a store that may be gone with the rank that serves it
_PAUSE_S, _PAUSE_MAX_S = 0.02, 0.5

# What was found, for each store and group; with the store, so that no other one gets its id.
# Contact that was lost once is not found again.
_found: dict[tuple[int, str], tuple[Any, list[int]]] = {}


def find_silent(ranks: Sequence[int], own: int, group: str = "") -> list[int]:
    """Return which ranks do not notice that contact was lost.

    Args:
        ranks: Global ranks of the group.
        own: The one of this process.
        group: Name of the group, the same on all of them.

    Returns:
        Global ranks; none where all have noticed, and where the store does not answer.

    Ranks: local; each that has lost contact calls it.
    """
    try:
        store = default_store()
    except (RuntimeError, ValueError):
        return []
    digest = hashlib.sha256(repr((group, tuple(ranks))).encode()).hexdigest()[:16]
    key = f"dsdformat/lost/{digest}"
    place = id(store), key
    if place not in _found:
        _found[place] = store, []
        asking = threading.Thread(
            target=_ask,
            args=(store, key, ranks, own, _found[place][1]),
            name="dsdformat-ask",
            daemon=True,
        )
        asking.start()
        asking.join(_PATIENCE_S + _ANSWER_S)
    return list(_found[place][1])


def _ask(store: Any, key: str, ranks: Sequence[int], own: int, silent: list[int]) -> None:
    """Fill the list of ranks that are silent."""
    end, pause = time.monotonic() + _PATIENCE_S, _PAUSE_S
    try:
        store.set(f"{key}/{own}", "")
        count = store.add(key, 1)
        while count < len(ranks) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_MAX_S)
            count = store.add(key, 0)
        if count < len(ranks):
            silent += _unmarked(store, key, ranks)
    except Exception:  # each store has kinds of its own; without one nobody can be named
        return


def _unmarked(store: Any, key: str, ranks: Sequence[int]) -> list[int]:
    """List ranks without a mark, by halves: most have one, and there may be thousands."""
    if store.check([f"{key}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return [*_unmarked(store, key, ranks[:half]), *_unmarked(store, key, ranks[half:])]
