"""Tell all ranks of a group that contact was lost, and name those that are silent.

A backend tells that a connection broke or that time was over, not which rank it was, and tells
those ranks alone that wait for it. So a rank that has lost contact leaves a mark in the store of
the default process group, and waits a moment for the marks of others: those that live see it too,
by themselves or because they look for marks while they wait. What is left are ranks that have
ended, hang, or wait for somebody else.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from dsdformat.torch.compat import default_store

__all__ = ["find_silent", "finish", "finish_messages", "wait_until"]

_PATIENCE_S = 5.0
_ANSWER_S = 5.0  # for a store that may be gone with the rank that serves it
_PAUSE_S, _PAUSE_MAX_S = 0.02, 0.5
_LOOK_S = 1.0  # twice, and a rank that waits has left its mark before others lose their patience

# What was found, for each store and group; with the store, so that no other one gets its id.
# Contact that was lost once is not found again.
_found: dict[tuple[int, str], tuple[Any, list[int]]] = {}


def finish(work: Any, ranks: Sequence[int], group: str = "") -> None:
    """Wait for a collective to end, or for another rank to lose contact.

    Args:
        work: What a backend gave that takes a time limit of a wait, and goes on after it.
        ranks, group: As in `find_silent`.

    Raises:
        RuntimeError: what the backend says, or that another rank has lost contact. Then the
            collective may still go on, and keeps its tensors.

    Ranks: local; ends when others have come, or with the time-out of the group.
    """

    def has_ended(seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it has failed, or ended just now
        return True

    wait_until(has_ended, ranks, group)


def finish_messages(works: Sequence[Any], ranks: Sequence[int], group: str = "") -> None:
    """Wait for messages from one rank to another, as `finish` does.

    A time limit would break all messages of the rank, not the wait alone; so a thread waits.
    """
    ended = threading.Event()
    errors: list[RuntimeError] = []

    def wait() -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=wait, name="dsdformat-wait", daemon=True).start()
    wait_until(ended.wait, ranks, group)
    if errors:
        raise errors[0]


def wait_until(has_ended: Callable[[float], bool], ranks: Sequence[int], group: str = "") -> None:
    """Wait for others, or for another rank to lose contact.

    Args:
        has_ended: Waits for at most so many seconds; says whether others have come.
        ranks, group: As in `find_silent`.

    Raises:
        RuntimeError: another rank has lost contact; and what `has_ended` raises.
    """
    lookout = None
    try:
        while not has_ended(_LOOK_S):
            lookout = lookout or _Lookout(ranks, group)
            if lookout.has_seen:
                raise RuntimeError("another rank that waits with this one has lost contact")
    finally:
        if lookout is not None:
            lookout.close()


class _Lookout:
    """Looks for marks of a group, in a thread: a store may not answer."""

    def __init__(self, ranks: Sequence[int], group: str) -> None:
        self.has_seen = False
        self._ranks, self._group = ranks, group
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="dsdformat-look", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _look(self) -> None:
        key = _key(self._ranks, self._group)
        try:
            store = default_store()
            while not self.has_seen and not self._closed.wait(_LOOK_S):
                # Where all have a mark, all were told, and what goes on since is something else.
                self.has_seen = store.check([key]) and store.add(key, 0) < len(self._ranks)
        except Exception:  # as in `_ask`
            return


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
    key = _key(ranks, group)
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


def _key(ranks: Sequence[int], group: str) -> str:
    """Return under what a group leaves its marks."""
    digest = hashlib.sha256(repr((group, tuple(ranks))).encode()).hexdigest()[:16]
    return f"dsdformat/lost/{digest}"


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
