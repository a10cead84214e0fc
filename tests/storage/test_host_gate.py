"""The gate of processes of one machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dsdformat.storage.host_gate import HostGate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pipes are found through /proc")

FORKS = multiprocessing.get_context("fork")
LIMIT_S = 20.0


@pytest.fixture
def team() -> Iterator[Callable[..., list[Any]]]:
    """`team(*works)` runs each in a process that has joined; returns what they return."""
    begun = []

    def run(*works: Callable[[HostGate, int], Any]) -> list[Any]:
        ends = [FORKS.Pipe() for _ in works]

        def work(own: int) -> None:
            gate, (_, end) = HostGate(), ends[own]
            end.send(gate.place)
            gate.join(end.recv(), own)
            end.send(None)
            end.recv()  # all have joined
            try:
                end.send(works[own](gate, own))
            except OSError as error:
                end.send(str(error))

        for own in range(len(works)):
            begun.append(FORKS.Process(target=work, args=(own,)))
            begun[-1].start()
        heads = [head for head, _ in ends]
        places = [head.recv() for head in heads]
        for message in (places, None):
            for head in heads:
                head.send(message)
            if message is not None:
                assert [head.recv() for head in heads] == [None] * len(heads)
        for process in begun:
            process.join(LIMIT_S)
        return [head.recv() if head.poll() else "nothing" for head in heads]

    yield run
    for process in begun:
        process.kill()
        process.join()


def meet(gate: HostGate, number: int) -> list[int] | None:
    gate.tell(number)
    return gate.hear(LIMIT_S)


def test_all_hear_what_all_have_told_in_each_round(team):
    def work(gate: HostGate, own: int) -> list[Any]:
        return [meet(gate, 1000 * own + number) for number in range(300)]

    rounds = [[number, 1000 + number, 2000 + number] for number in range(300)]
    assert team(work, work, work) == [rounds] * 3


def test_nobody_goes_on_before_the_last_has_come(team):
    def first(gate: HostGate, own: int) -> Any:
        gate.tell(1)
        early = gate.hear(0.05)  # the other waits for this number, and tells none
        gate.tell(2)
        return early, gate.hear(LIMIT_S), gate.hear(LIMIT_S)

    def last(gate: HostGate, own: int) -> Any:
        while len(gate._heard[0]) < 2:
            gate._wait([0], LIMIT_S)
        return meet(gate, 3), meet(gate, 4)

    rounds = [1, 3], [2, 4]
    assert team(first, last) == [(None, *rounds), rounds]


def test_one_that_has_left_is_missed_in_the_round_that_it_has_not_told(team):
    def leaves(gate: HostGate, own: int) -> Any:
        found = meet(gate, 7)
        gate.close()
        return found

    def stays(gate: HostGate, own: int) -> Any:
        assert meet(gate, 8) == [7, 8, 9]
        return meet(gate, 8)

    def waits(gate: HostGate, own: int) -> Any:
        assert meet(gate, 9) == [7, 8, 9]
        return gate.hear(LIMIT_S)

    found = team(leaves, stays, waits)
    assert found[0] == [7, 8, 9]
    assert found[1] in ("process 0 has left the gate", "[Errno 32] Broken pipe")
    assert found[2] == "process 0 has left the gate"


def test_one_that_is_killed_is_missed_by_those_that_wait(team):
    def dies(gate: HostGate, own: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def waits(gate: HostGate, own: int) -> Any:
        return gate.hear(LIMIT_S)

    assert team(waits, waits, dies)[:2] == ["process 2 has left the gate"] * 2


def test_what_one_has_told_before_it_left_is_heard(team):
    def leaves(gate: HostGate, own: int) -> Any:
        gate.tell(7)
        gate.close()
        return "left"

    def waits(gate: HostGate, own: int) -> Any:
        while not gate._gone:
            gate._wait([0], LIMIT_S)
        gate._heard[own].append(8)  # not told, as nobody reads it
        return gate.hear(LIMIT_S)

    assert team(leaves, waits) == ["left", [7, 8]]
