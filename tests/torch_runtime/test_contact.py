"""Which ranks are silent: marks in a store, by ranks that are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed  # noqa: E402

from dsdformat.torch import contact  # noqa: E402
from dsdformat.torch.failures import lost_contact  # noqa: E402

Asked = Callable[..., dict[int, list[int]]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store that all have, with the process of each rank told apart by its thread."""
    one = distributed.HashStore()
    monkeypatch.setattr(contact, "default_store", lambda: one)
    monkeypatch.setattr(contact, "_found", {})
    monkeypatch.setattr(contact, "_PATIENCE_S", 0.05)
    return one


def asked(by: Iterable[int], world_size: int, group: str = "") -> dict[int, list[int]]:
    """What these ranks find, all at once."""
    found: dict[int, list[int]] = {}

    def ask(rank: int) -> None:
        key, silent = f"lost{group}", []
        contact._ask(contact.default_store(), key, range(world_size), rank, silent)
        found[rank] = silent

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, by))
    return found


def test_ranks_that_leave_no_mark_are_silent(store):
    assert asked([0, 2], 4) == {0: [1, 3], 2: [1, 3]}


def test_nobody_is_silent_where_all_have_noticed_and_nobody_waits(store, monkeypatch):
    monkeypatch.setattr(contact, "_PATIENCE_S", 3600.0)
    assert asked([0, 1, 2], 3) == {0: [], 1: [], 2: []}


def test_one_of_thousands_is_found_in_few_questions(store):
    class Counted:
        def __init__(self) -> None:
            self.asked = 0

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            return "k/3000" not in keys

    counted = Counted()
    assert contact._unmarked(counted, "k", range(4096)) == [3000]
    assert counted.asked == 25


def test_marks_of_one_group_are_none_of_another(store):
    assert asked([0], 2, "a") == {0: [1]}
    assert asked([1], 2, "b") == {1: [0]}


def test_contact_that_was_lost_is_not_waited_for_twice(store, monkeypatch):
    assert contact.find_silent((0, 1, 5), 0) == [1, 5]
    monkeypatch.setattr(contact, "_ask", None)
    assert contact.find_silent((0, 1, 5), 0) == [1, 5]


def test_without_a_store_nobody_is_named(monkeypatch):
    assert contact.find_silent((0, 1), 0) == []  # there is no process group


def test_a_store_that_has_died_names_nobody(store, monkeypatch):
    class Dead:
        def set(self, *_: object) -> None:
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(contact, "default_store", Dead)
    assert contact.find_silent((0, 1), 0) == []


def test_a_store_that_does_not_answer_is_not_waited_for(store, monkeypatch):
    over = threading.Event()

    class Hanging:
        def set(self, *_: object) -> None:
            over.wait()

    monkeypatch.setattr(contact, "default_store", Hanging)
    monkeypatch.setattr(contact, "_ANSWER_S", 0.05)
    assert contact.find_silent((0, 1), 0) == []
    over.set()


class Work:
    """A collective that ends, or fails, when it is waited for the n-th time."""

    def __init__(
        self, waits: float, error: str = "", pause: Callable[[], object] = lambda: None
    ) -> None:
        self.left, self.error, self.pause = waits, error, pause

    def is_completed(self) -> bool:
        return self.left <= 0

    def wait(self, limit: timedelta | None = None) -> None:
        self.left -= 1
        if not self.is_completed():
            self.pause()
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture
def looking(store, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(contact, "_LOOK_S", 0.001)
    return store


@pytest.mark.parametrize("waits", [1, 2, 50])
def test_a_collective_is_waited_for_until_it_ends(looking, waits):
    contact.finish(Work(waits), (0, 1, 2))
    with pytest.raises(RuntimeError, match="Connection closed"):
        contact.finish(Work(waits, "Connection closed by peer"), (0, 1, 2))


class Message:
    """One that is waited for without a limit."""

    def __init__(self, error: str = "", never: threading.Event | None = None) -> None:
        self.error, self.never = error, never

    def wait(self) -> None:
        if self.never is not None:
            self.never.wait()
        if self.error:
            raise RuntimeError(self.error)


def test_messages_are_waited_for_until_they_end(looking):
    contact.finish_messages([Message(), Message()], (0, 1, 2))
    with pytest.raises(RuntimeError, match="Connection closed"):
        contact.finish_messages([Message(), Message("Connection closed by peer")], (0, 1, 2))


def test_a_mark_of_another_ends_the_wait(looking):
    looking.add(contact._key((0, 1, 2), "g"), 1)
    with pytest.raises(RuntimeError, match="another rank that waits with this one has lost"):
        contact.finish(Work(float("inf")), (0, 1, 2), "g")
    never = threading.Event()
    with pytest.raises(RuntimeError, match="another rank that waits with this one has lost"):
        contact.finish_messages([Message(never=never)], (0, 1, 2), "g")
    never.set()


def test_marks_of_all_and_of_other_groups_end_no_wait(looking, monkeypatch):
    looked = threading.Semaphore(1)  # for the first wait, after which a lookout begins

    class Seen:
        def check(self, keys: list[str]) -> bool:
            looked.release()
            return looking.check(keys)

        def add(self, key: str, number: int) -> int:
            return looking.add(key, number)

    monkeypatch.setattr(contact, "default_store", Seen)
    looking.add(contact._key((0, 1, 2), ""), 3)
    looking.add(contact._key((0, 1), ""), 1)
    looking.add(contact._key((0, 1, 2), "other"), 1)
    contact.finish(Work(9, pause=looked.acquire), (0, 1, 2))


def test_a_store_that_is_gone_or_does_not_answer_ends_no_wait(looking, monkeypatch):
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    class Hanging:
        def check(self, keys: list[str]) -> bool:
            return ended.wait()

    ended = threading.Event()
    for kind in (Gone, Hanging):
        monkeypatch.setattr(contact, "default_store", kind)
        contact.finish(Work(50), (0, 1))
    ended.set()


@pytest.mark.parametrize(
    ("silent", "text", "which"),
    [
        ([], "rank 0 has lost contact with other ranks: broken", "one of them"),
        ([3], "rank 0 has lost contact with rank 3: broken", "it"),
        ([1, 2], "rank 0 has lost contact with ranks 1, 2: broken", "each"),
        (
            list(range(1, 13)),
            "rank 0 has lost contact with ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …: broken",
            "each",
        ),
    ],
    ids=["unknown", "one", "two", "twelve"],
)
def test_the_error_names_the_silent_ranks(silent, text, which):
    error = lost_contact(0, silent, RuntimeError("broken"))
    assert error.message == text
    assert error.hint is not None
    assert error.hint.startswith(f"{which} has ended, hangs, or makes another call")
    assert list(error.failures) == silent
