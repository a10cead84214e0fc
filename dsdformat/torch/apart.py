"""Write and commit a planned save without collectives, so that training may go on meanwhile.

Each rank leaves one word in the mailbox: what it wrote, or its error. Rank 0 hears all of them,
commits or gives up, and leaves the verdict as its own word. A rank that has died, or of which
nothing is heard in time, has failed; if that is rank 0, the others see it for themselves.

A process group of its own was the other way. It has to be made by all ranks, which need to reach
each other over another network than NCCL's; it goes with `destroy_process_group`, under a thread
that uses it; one dead rank breaks it for all saves that follow; and who died is not told. Files
need nothing but the folder that all ranks write to in any case. Their price is a poll: up to half
a second, and more where a network's file system is slow to show what others have written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from dsdformat.errors import ArgumentError, StorageError
from dsdformat.storage.mailbox import Mailbox
from dsdformat.torch.failures import Row, check_rows, error_row
from dsdformat.torch.unfinished import Unfinished
from dsdformat.torch.words import (
    failed_word,
    part_word,
    read_part_word,
    read_verdict,
    root_word,
)

__all__ = ["Limit", "write_apart"]

_POLL_S, _POLL_MAX_S, _LIVES_S = 0.005, 0.5, 1.0


class Limit:
    """How long a save may take, and whether it was told to stop.

    Attributes:
        seconds: From when this was made.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begun = time.monotonic()
        self._stopped = threading.Event()

    def left(self, factor: float = 1.0) -> float:
        """Return how many seconds are left of so many times the limit."""
        return self._begun + factor * self.seconds - time.monotonic()

    def stop(self) -> None:
        """End what waits."""
        self._stopped.set()

    def pause(self, seconds: float) -> None:
        """Wait a little.

        Raises:
            ArgumentError: `closed`: it was stopped.
        """
        if self._stopped.wait(seconds):
            raise ArgumentError("it was cancelled", code="closed")


def write_apart(save: Unfinished, limit: Limit) -> str:
    """Write, and make the checkpoint exist; return the root digest.

    Raises:
        DistributedError: `rank_failed`, on every rank that lives, with the cause of each.

    Ranks: all of the group, each in its own time; no collectives.
    Memory: as `Unfinished.write`.
    """
    if save.mailbox is None:
        return save.write()
    try:
        ended = _lead if save.coordinator is not None else _follow
        return ended(save, save.mailbox, limit)
    finally:
        save.abort()  # what is committed stays


def _lead(save: Unfinished, mailbox: Mailbox, limit: Limit) -> str:
    """Hear all ranks, and commit or give up."""
    coordinator = save.coordinator
    assert coordinator is not None
    rows: list[Row | None] = [None] * save.comm.world_size
    error: Exception | None = None
    root = ""
    try:
        save.write_part()
    except Exception as caught:
        error = caught
    parts: dict[int, bytes] = {}
    try:
        for rank, word in _heard(mailbox, range(1, len(rows)), limit).items():
            told = read_part_word(word)
            if isinstance(told, bytes):
                parts[rank] = told
            else:
                rows[rank] = told
        if error is None and not any(rows):
            root = coordinator.commit([parts[rank] for rank in sorted(parts)])
    except Exception as caught:
        error = error or caught
    if root:
        mailbox.leave(root_word(root))
        return root
    rows[0] = None if error is None else error_row(error)
    coordinator.abort()
    mailbox.leave(failed_word(rows))
    check_rows("save", save.comm.ranks, rows, (save.comm.rank, error))
    raise AssertionError("some rank has failed")


def _follow(save: Unfinished, mailbox: Mailbox, limit: Limit) -> str:
    """Tell rank 0 how it went here, and hear how it went."""
    error: Exception | None = None
    try:
        word = part_word(save.write_part())
    except Exception as caught:
        error, word = caught, failed_word(error_row(caught))
    try:
        mailbox.leave(word)
    except StorageError as full:
        if error is not None:
            raise
        error = full
        mailbox.leave(failed_word(error_row(full)))  # for which there is room
    # Longer than rank 0 waits, so that its verdict comes first.
    verdict = _heard(mailbox, [0], limit, factor=1.25)[0]
    told = read_verdict(verdict, save.comm.world_size)
    if isinstance(told, str):
        return told
    check_rows("save", save.comm.ranks, told, (save.comm.rank, error))
    raise AssertionError("some rank has failed")


def _heard(
    mailbox: Mailbox, ranks: Iterable[int], limit: Limit, factor: float = 1.0
) -> dict[int, bytes]:
    """Wait for the words of ranks; of those that give none, return that they failed."""
    words: dict[int, bytes] = {}
    waiting, pause, looked = set(ranks), _POLL_S, time.monotonic()

    def take(rank: int, otherwise: Callable[[], Row] | None = None) -> None:
        word = mailbox.word(rank)
        if word is None and otherwise is not None:
            word = failed_word(otherwise())
            mailbox.bury(rank)
        if word is not None:
            words[rank] = word
            waiting.discard(rank)

    while waiting:
        for rank in waiting & mailbox.words() if len(waiting) > 1 else set(waiting):
            take(rank)
        if waiting and limit.left(factor) <= 0:
            for rank in list(waiting):
                take(rank, lambda: _late(limit.seconds))
        elif waiting:
            limit.pause(pause)
            pause = min(2 * pause, _POLL_MAX_S)
        if time.monotonic() - looked > _LIVES_S:
            for rank in [rank for rank in waiting if not mailbox.is_alive(rank)]:
                take(rank, _dead)  # unless it left a word meanwhile
            looked = time.monotonic()
    return words


def _dead() -> Row:
    text = "the process has ended before the save was done"
    return {"kind": "ProcessLookupError", "code": None, "hint": None, "message": text}


def _late(seconds: float) -> Row:
    text = f"nothing was heard of it in {seconds:g} s"
    return {"kind": "TimeoutError", "code": None, "hint": None, "message": text}
