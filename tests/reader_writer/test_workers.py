"""Tasks in threads: all are done, the first error is raised, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from dsdformat.errors import ArgumentError
from dsdformat.workers import Workers


def helpers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "dsdformat"]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("tasks", [0, 1, 2, 500])
def test_each_task_is_done_once(count: int, tasks: int) -> None:
    workers, done = Workers(count), []
    for _ in range(2):
        workers.run((lambda number=number: done.append(number)) for number in range(tasks))
    workers.close()
    assert sorted(done) == sorted([*range(tasks)] * 2)


def test_tasks_run_side_by_side_and_not_in_more_threads_than_are_allowed() -> None:
    meeting = threading.Barrier(3, timeout=20)
    names = set()

    def meet() -> None:
        meeting.wait()  # passes only if three are here at once
        names.add(threading.get_ident())

    workers = Workers(3)
    workers.run([meet] * 30)
    workers.close()
    assert len(names) == 3
    assert threading.get_ident() in names


def test_few_tasks_are_taken_before_they_are_done() -> None:
    taken = done = most = 0
    lock = threading.Lock()

    def task() -> None:
        nonlocal done
        with lock:
            done += 1

    def tasks() -> Any:
        nonlocal taken, most
        for _ in range(300):
            with lock:
                taken += 1
                most = max(most, taken - done)
            yield task

    workers = Workers(4)
    workers.run(tasks())
    workers.close()
    assert done == 300
    assert most <= 2 * 4 + 2


@pytest.mark.parametrize("count", [1, 4])
def test_an_error_ends_the_run_and_is_raised_and_the_workers_go_on(count: int) -> None:
    workers, done = Workers(count), []

    def fail() -> None:
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        workers.run([lambda: done.append(0), fail, *[lambda: done.append(1)] * 5000])
    assert len(done) < 5000
    workers.run([lambda: done.append(2)] * 2)
    assert done[-2:] == [2, 2]
    workers.close()


def test_an_error_where_tasks_are_made_is_raised_when_those_begun_have_ended() -> None:
    workers, done = Workers(3), []

    def tasks() -> Any:
        yield lambda: done.append(0)
        yield lambda: done.append(1)
        raise KeyError("made")

    with pytest.raises(KeyError, match="made"):
        workers.run(tasks())
    workers.close()


def test_what_is_cancelled_begins_no_more_tasks() -> None:
    workers, done = Workers(2), []

    def cancel() -> None:
        done.append(0)
        workers.cancel()

    with pytest.raises(ArgumentError) as caught:
        workers.run([cancel] * 1000)
    assert caught.value.code == "closed"
    assert len(done) < 10
    with pytest.raises(ArgumentError):
        workers.run([cancel])
    workers.close()


def test_no_thread_is_left_when_they_are_closed_or_forgotten() -> None:
    gc.collect()
    before = set(helpers())
    closed, forgotten = Workers(4), Workers(4)
    for workers in (closed, forgotten):
        workers.run([lambda: None] * 100)
    started = set(helpers()) - before
    assert len(started) == 6
    closed.close()
    del closed, forgotten, workers
    gc.collect()
    for thread in started:
        thread.join(20)
    assert not set(helpers()) - before


def test_several_threads_may_run_tasks_at_once() -> None:
    workers, done = Workers(3), []

    def run() -> None:
        workers.run([lambda: done.append(0)] * 200)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    workers.close()
    assert len(done) == 800


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_that_was_forked_does_all_by_itself() -> None:
    script = """
import os, sys
from dsdformat.workers import Workers
workers = Workers(4)
workers.run([lambda: None] * 100)
pid = os.fork()
done = []
workers.run([lambda: done.append(0)] * 100)
workers.close()
assert len(done) == 100
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


def test_tasks_are_done_when_the_interpreter_ends() -> None:
    script = """
import atexit
from dsdformat.workers import Workers
def last():
    done = []
    workers = Workers(4)
    workers.run([lambda: done.append(0)] * 100)
    workers.close()
    print(len(done))
atexit.register(last)
"""
    out = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert (out.stdout, out.stderr) == ("100\n", "")
