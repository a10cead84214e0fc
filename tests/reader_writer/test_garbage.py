"""The pause of the garbage collector."""

from __future__ import annotations

import gc
import threading

import pytest

from dsdformat.garbage import paused_gc


def test_the_collector_rests_in_the_block_and_goes_on_behind_it() -> None:
    with paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_can_end_early() -> None:
    with paused_gc() as resume:
        resume()
        assert gc.isenabled()
    assert gc.isenabled()


def test_an_inner_pause_ends_no_outer_one() -> None:
    with paused_gc():
        with paused_gc() as resume:
            resume()
            assert not gc.isenabled()
        assert not gc.isenabled()


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(KeyError), paused_gc():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_rests_already_is_left_so() -> None:
    gc.disable()
    try:
        with paused_gc() as resume:
            resume()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_another_thread_pauses_nothing() -> None:
    seen: list[bool] = []

    def look() -> None:
        with paused_gc():
            seen.append(gc.isenabled())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [True]
