"""The pause of the garbage collector."""

from __future__ import annotations

import gc
import threading

import pytest

from dsdformat.garbage import paused_gc, young_gc


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


def test_young_objects_alone_are_collected_for_a_while() -> None:
    before = gc.get_threshold()
    walked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            walked.append(info["generation"])

    gc.callbacks.append(note)
    try:
        gc.set_threshold(10, 1, 1)
        with young_gc():
            kept = [[] for _ in range(10_000)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert len(kept) == 10_000
    assert set(walked) == {0, 1}


def test_an_inner_one_lets_the_outer_go_on() -> None:
    before = gc.get_threshold()
    with young_gc():
        with young_gc():
            pass
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before


def test_a_threshold_that_was_set_meanwhile_stays() -> None:
    before = gc.get_threshold()
    try:
        with young_gc():
            gc.set_threshold(500, 5, 5)
        assert gc.get_threshold() == (500, 5, 5)
    finally:
        gc.set_threshold(*before)


def test_another_thread_holds_nothing_back() -> None:
    before = gc.get_threshold()
    seen: list[tuple[int, int, int]] = []

    def look() -> None:
        with young_gc():
            seen.append(gc.get_threshold())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_save_and_a_load_walk_over_no_more_than_what_is_young(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    dsd = pytest.importorskip("dsdformat.torch")
    state = {"w": torch.arange(4)}
    seen: list[int] = []

    class Looking:
        """Takes part in a save and a load."""

        def state_dict(self) -> dict[str, int]:
            seen.append(gc.get_threshold()[2])
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            seen.append(gc.get_threshold()[2])

    before = gc.get_threshold()[2]
    dsd.save(tmp_path / "c", {**state, "own": Looking()})
    dsd.load(tmp_path / "c", {**state, "own": Looking()})
    assert min(seen) > before
    assert gc.get_threshold()[2] == before
