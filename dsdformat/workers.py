"""Threads that carry out tasks beside the caller, which works too.

Nothing here needs a helper: where none can be started, as when the interpreter ends, and in a
process that was forked, the caller does all by itself. That is why this is no executor of
`concurrent.futures`, which refuses tasks once the interpreter ends.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from dsdformat.errors import ArgumentError, shorten

__all__ = ["Task", "Workers"]

Task = Callable[[], None]


class Workers:
    """Threads that start when first needed.

    Attributes:
        count: How many work, the caller among them; 1 runs everything in the caller's thread.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is not None and (type(count) is not int or count < 1):
            raise ArgumentError(
                f"threads is {shorten(count)}, expected 1 or more", code="bad_argument"
            )
        self.count = count or min(8, os.cpu_count() or 1)
        self._queue: SimpleQueue[_Run | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._cancelled = False
        self._finalizer = weakref.finalize(self, _stop, self._queue, self._threads)
        self._finalizer.atexit = False

    def run(self, tasks: Iterable[Task]) -> None:
        """Run tasks; at most twice as many as there are threads are taken but not done.

        Raises:
            ArgumentError: `closed`: it was cancelled.
            The first exception of a task, after those that were begun have ended.
        """
        todo = iter(tasks)
        first = list(itertools.islice(todo, 2))
        if self.count == 1 or len(first) < 2:
            for task in itertools.chain(first, todo):
                self.check()
                task()
            return
        run = _Run()
        self._start()
        try:
            for task in itertools.chain(first, todo):
                self.check()
                if run.error is not None:
                    break
                run.pending.append(task)
                if self._threads:
                    self._queue.put(run)
                if len(run.pending) > self.count:
                    run.do_one()
            while run.do_one():
                pass
        finally:
            run.end()
        if run.error is not None:
            raise run.error

    def cancel(self) -> None:
        """Begin no more tasks: what runs, and what is run later, raises. From any thread."""
        self._cancelled = True

    def close(self) -> None:
        """Stop the threads."""
        with self._lock:
            threads = list(self._threads)
            _stop(self._queue, self._threads)
        for thread in threads:
            thread.join()

    def check(self) -> None:
        """Check that it was not cancelled.

        Raises:
            ArgumentError: `closed`.
        """
        if self._cancelled:
            raise ArgumentError("it was cancelled", code="closed")

    def _start(self) -> None:
        with self._lock:
            while len(self._threads) < self.count - 1:
                # A thread that is left over keeps no interpreter from ending.
                helper = threading.Thread(
                    target=_help, args=(self._queue,), name="dsdformat", daemon=True
                )
                try:
                    helper.start()
                except RuntimeError:
                    return
                self._threads.append(helper)


class _Run:
    """Tasks of one call of `run`.

    Attributes:
        pending: Those that nobody has begun.
        error: The first exception of a task.
    """

    def __init__(self) -> None:
        self.pending: deque[Task] = deque()
        self.error: BaseException | None = None
        self._busy = 0
        self._changed = threading.Condition()

    def do_one(self) -> bool:
        """Do a task; return False if there is none."""
        with self._changed:
            if not self.pending:
                return False
            task = self.pending.popleft()
            self._busy += 1
        try:
            task()
        except BaseException as error:
            self.pending.clear()
            self.error = self.error or error
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
        return True

    def end(self) -> None:
        """Drop what nobody has begun, and wait for the rest."""
        self.pending.clear()
        with self._changed:
            while self._busy:
                self._changed.wait()


def _help(queue: SimpleQueue[_Run | None]) -> None:
    while True:
        run = queue.get()
        if run is None:
            return
        run.do_one()
        del run  # it may be the last to know a task, and what that holds


def _stop(queue: SimpleQueue[_Run | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        queue.put(None)
    threads.clear()
