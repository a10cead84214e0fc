"""Saves that go on while training does: their handles, and the one that is in flight.

A process has one background save in flight at most; every later save waits for it, and so does a
load of the same path. What it reads is a copy in host memory, so nothing that is done to the state
after the call reaches the checkpoint. Its thread takes part in no collective.

Where all cores are busy, training pays for what the thread takes of them. So it writes past the
page cache, which saves half of its work, and at a lower priority: otherwise two threads of torch,
which wait for each other many times in a step, may share one core, each for milliseconds in turn.

An error is raised by `SaveHandle.wait`. If nobody waits, the next save raises it in place of
saving; if there is none, it is told on stderr when the interpreter ends, whose exit status stays
as it is. The interpreter waits for what is in flight; Ctrl-C there ends it, and leaves nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dsdformat.errors import ArgumentError, DsdError, TimeLimitError, shorten
from dsdformat.folders import PathLike
from dsdformat.garbage import paused_gc
from dsdformat.torch.apart import Limit, write_apart
from dsdformat.torch.staging import HostBuffer, stage
from dsdformat.torch.unfinished import Unfinished
from dsdformat.workers import Workers
from dsdformat.writer import PartWriter

__all__ = [
    "Background",
    "SaveHandle",
    "begin",
    "free_staging",
    "settle",
    "spare_threads",
]

_LAST_RESORT = 1.5  # times the limit: when a thread is given up that itself keeps to the limit
_CANCEL_S = 10.0
_NICE_MAX = 19


@dataclass(frozen=True, slots=True)
class Background:
    """How a save in the background goes on.

    Attributes:
        limit: How long the whole save may take. Ranks of which nothing was heard by then have
            failed. On one machine, the death of a rank is seen at once.
        nice: How much lower the priority of the threads that write is, from 0 to 19. It matters
            where training keeps all cores busy: at 5 they get a quarter of one then, at 10 a tenth,
            so the save takes longer, and training is slowed down less. Linux only.
    """

    limit: timedelta = timedelta(minutes=30)
    nice: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.limit, timedelta) or self.limit <= timedelta(0):
            raise ArgumentError(
                f"limit is {self.limit!r}, expected a timedelta above 0", code="bad_argument"
            )
        if type(self.nice) is not int or not 0 <= self.nice <= _NICE_MAX:
            raise ArgumentError(
                f"nice is {shorten(self.nice)}, expected 0 to {_NICE_MAX}", code="bad_argument"
            )


class SaveHandle:
    """A save that goes on in the background.

    Attributes:
        path: The checkpoint's folder, as it was given.
    """

    def __init__(self, path: PathLike, options: Background) -> None:
        """Be made by `save`."""
        self.path = path
        self._seconds = options.limit.total_seconds()
        self._nice = options.nice
        self._limit = Limit(self._seconds)
        self._process = os.getpid()
        self._events: list[Any] = []
        self._writer: PartWriter | None = None
        self._save: Unfinished | None = None
        self._planned, self._ended = threading.Event(), threading.Event()
        self._root = ""
        self._error: BaseException | None = None
        self._asked = False

    def __repr__(self) -> str:
        ended = ("failed" if self._error else "saved") if self.done() else "going on"
        return f"<SaveHandle of {os.fspath(self.path)}: {ended}>"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait_staged(self) -> None:
        """Wait until the state is copied.

        On the CPU that is so when `save` has returned. Copies from CUDA devices may go on then;
        work on the stream that was current in the call waits for them by itself, what is queued on
        others must not change the state before this returns.

        Ranks: local.
        """
        self._check_process()
        for event in self._events:
            event.synchronize()

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint exists.

        Args:
            timeout: Seconds; the limit of the save if None. When they are over it goes on.

        Returns:
            The root digest, the same on all ranks.

        Raises:
            TimeLimitError: `timed_out`: it has not ended yet.
            DistributedError: `rank_failed`, on every rank, with the cause of each rank that
                failed, was killed, or was not heard of in time. What was there is whole.
            StorageError: and others of `save`, on one process.

        Ranks: local; each rank may wait when it likes, or not at all.
        """
        self._check_process()
        self._await(timeout)
        self._asked = True
        if self._error is not None:
            raise self._error
        return self._root

    def _await(self, timeout: float | None = None) -> None:
        left = self._left()
        seconds = left if timeout is None else min(timeout, left)
        if not self._ended.wait(max(0.0, seconds)):
            over = seconds == left
            limit = f"the {self._seconds:g} s that it may take" if over else f"{timeout:g} s"
            raise TimeLimitError(
                f"the save to {os.fspath(self.path)} has not ended in {limit}",
                code="timed_out",
                hint="its storage may hang" if over else "wait again, it goes on",
            )

    def _left(self) -> float:
        save = self._save
        alone = save is None or save.mailbox is None
        return self._limit.left(1.0 if alone else _LAST_RESORT)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ArgumentError("this save goes on in another process", code="closed")

    # In the call of `save`

    def _stage(self, writer: PartWriter, threads: int | None) -> None:
        """Plan, copy, and have a thread ready, so that nothing can fail later than here."""
        self._limit = Limit(self._seconds)  # the save before this one may have been waited for
        workers = Workers(threads)
        try:
            self._events = stage(writer.plan(), _state.buffer, workers)
        finally:
            workers.close()
        writer.spare_cache()
        self._writer = writer
        # A daemon: `_at_exit` decides how long it is waited for.
        threading.Thread(target=self._run, name="dsdformat-save", daemon=True).start()

    def _go(self, save: Unfinished | None) -> None:
        """Let the thread write, or end it."""
        self._save = save
        self._planned.set()

    # In the thread

    def _run(self) -> None:
        lower_priority(self._nice)
        self._planned.wait()
        try:
            if self._save is not None:
                for event in self._events:
                    event.synchronize()
                self._root = write_apart(self._save, self._limit)
        except BaseException as error:
            _forget_frames(error)
            self._error = error
        finally:
            self._save = self._writer = None
            self._events = []
            self._ended.set()

    def _cancel(self) -> None:
        writer = self._writer
        if writer is not None:
            writer.cancel()
        self._limit.stop()


class _State:
    """What a process has of background saves.

    Attributes:
        turn: Held while a background save is begun.
        last: The last background save, unless it has ended and somebody was told how.
        buffer: Of the last one.
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.last: SaveHandle | None = None
        self.buffer = HostBuffer()


_state = _State()


def begin(
    path: PathLike,
    options: Background,
    threads: int | None,
    plan: Callable[[Callable[[PartWriter], None]], Unfinished],
) -> SaveHandle:
    """Begin a save in the background.

    Args:
        path: The checkpoint's folder.
        options: How it goes on.
        threads: How many copy; up to 8 if None.
        plan: Plans the save; calls what it is given when this rank's data files are planned.

    Ranks: as `plan`.
    Memory: the bytes that this rank writes, in a buffer that is kept.
    """
    with _state.turn:
        handle = SaveHandle(path, options)
        save: Unfinished | None = None
        try:
            with paused_gc():
                save = plan(lambda writer: handle._stage(writer, threads))
        finally:
            handle._go(save)
        _state.last = handle
        return handle


def lower_priority(nice: int) -> None:
    """Let this thread, and those that it will start, give way to others, where the system can."""
    if nice and sys.platform == "linux":  # elsewhere this would be the whole process
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            now = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(_NICE_MAX, now + nice))


def spare_threads() -> int:
    """Return how many threads write if nobody says: few, as training goes on and nobody waits."""
    return max(1, min(4, (os.cpu_count() or 1) // 4))


def settle(path: PathLike | Mapping[str, PathLike] | None = None) -> None:
    """Wait for the background save in flight, and raise its error if nobody was told.

    Args:
        path: Do so only if it saves there, or to one of these.

    Raises:
        TimeLimitError: `timed_out`: it has not ended within its limit.
        DistributedError, StorageError: its error.

    Ranks: local.
    """
    handle = _state.last
    paths = path.values() if isinstance(path, Mapping) else [path]
    if handle is None or not any(one is None or _is_same(one, handle.path) for one in paths):
        return
    handle._await()
    if _state.last is handle:
        _state.last = None
    error = handle._error
    if error is not None and not handle._asked:
        handle._asked = True
        error.add_note(f"This is what became of the background save to {os.fspath(handle.path)}.")
        raise error


def free_staging() -> None:
    """Give back the host memory that background saves keep; the next one takes new memory.

    Waits for the save in flight. Its error is kept for who asks.

    Raises:
        TimeLimitError: `timed_out`: it has not ended within its limit.

    Ranks: local.
    """
    with _state.turn:
        if _state.last is not None:
            _state.last._await()
        _state.buffer.free()


def _is_same(path: PathLike, other: PathLike) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _forget_frames(error: BaseException) -> None:
    """Let go of the buffer, of which the frames of a traceback have views.

    An error of ours says by itself what went wrong.
    """
    known = isinstance(error, DsdError)
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
        if known:
            one.__traceback__ = None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """List an error and those that it came of."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += [one.__cause__, one.__context__]


@atexit.register
def _at_exit() -> None:
    """Wait for the save in flight, and tell of an error that nobody was told of."""
    handle = _state.last
    if handle is None:
        return
    try:
        handle._await()
    except TimeLimitError as late:
        handle._error = late
    except KeyboardInterrupt:
        handle._cancel()
        with contextlib.suppress(KeyboardInterrupt):
            handle._ended.wait(_CANCEL_S)
    if handle._error is not None and not handle._asked:
        handle._asked = True
        print(
            f"dsdformat: the background save to {os.fspath(handle.path)} failed: "
            f"{type(handle._error).__name__}: {handle._error}",
            file=sys.stderr,
        )


def _forget() -> None:
    """Begin anew in a process that was forked: the thread is not in it."""
    global _state  # noqa: PLW0603 -- locks cannot be made anew in place
    _state = _State()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
