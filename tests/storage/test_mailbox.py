"""Words that writers leave for each other, who is seen to live, and what is left of a mailbox."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsdformat.errors import StorageError
from dsdformat.storage import mailbox
from dsdformat.storage.mailbox import Mailbox
from dsdformat.storage.target import LocalTarget

JOIN = """
import os, signal, sys
from dsdformat.storage.mailbox import Mailbox
box = Mailbox.join(sys.argv[1], 1)
box.leave(b"I am here")
print("there", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def joined(first: Mailbox) -> subprocess.Popen[str]:
    """Another process that joins as rank 1, and kills itself when it is told to."""
    other = subprocess.Popen(
        [sys.executable, "-c", JOIN, str(first.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "there\n"
    return other


def kill(other: subprocess.Popen[str]) -> None:
    other.communicate("\n", timeout=30)
    assert other.returncode == -signal.SIGKILL


def test_words_are_read_by_all_and_each_has_one(tmp_path: Path) -> None:
    first = Mailbox.begin(tmp_path / "c")
    second = Mailbox.join(str(first.folder), 1)
    assert (second.words(), second.word(0)) == (set(), None)
    first.leave(b"")
    second.leave(b"one")
    second.leave(b"two")
    assert first.words() == second.words() == {0, 1}
    assert [first.word(0), first.word(1), second.word(1)] == [b"", b"two", b"two"]
    first.close()
    assert second.word(0) == b""
    second.close()
    assert os.listdir(tmp_path) == []


def test_the_last_one_that_leaves_removes_it(tmp_path: Path) -> None:
    boxes = [Mailbox.begin(tmp_path / "c")]
    boxes += [Mailbox.join(str(boxes[0].folder), rank) for rank in (1, 2, 3)]
    for number, box in enumerate(boxes):
        box.leave(b"word")
        box.close()
        assert len(os.listdir(tmp_path)) == (0 if number == 3 else 1)


def test_who_is_there_lives_and_who_was_killed_does_not(tmp_path: Path) -> None:
    first = Mailbox.begin(tmp_path / "c")
    other = joined(first)
    assert first.is_alive(0)
    assert first.is_alive(1)
    assert not first.is_alive(2)
    kill(other)
    assert not first.is_alive(1)
    assert not first.is_alive(1)  # to look is not to take the lock
    assert first.word(1) == b"I am here"
    first.bury(1)
    first.close()
    assert os.listdir(tmp_path) == []


def test_nobody_on_another_machine_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Mailbox.begin(tmp_path / "c")
    kill(joined(first))
    monkeypatch.setattr(mailbox, "_machine", lambda: b"another")
    assert first.is_alive(1)
    monkeypatch.undo()
    monkeypatch.setattr(mailbox, "locks", lambda: None)
    assert first.is_alive(1)
    first.close()


def test_who_has_no_lock_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Mailbox.begin(tmp_path / "c")
    with monkeypatch.context() as changed:
        changed.setattr(mailbox, "locks", lambda: None)
        second = Mailbox.join(str(first.folder), 1)
    assert first.is_alive(1)
    second.close()
    assert not first.is_alive(1)
    first.close()


def test_the_next_writer_removes_what_killed_ones_left_and_nothing_else(tmp_path: Path) -> None:
    living, abandoned = Mailbox.begin(tmp_path / "c"), Mailbox.begin(tmp_path / "c")
    kill(joined(abandoned))
    abandoned.close()
    assert len(os.listdir(tmp_path)) == 2
    LocalTarget(tmp_path / "c").abort()
    assert os.listdir(tmp_path) == [living.folder.name]
    living.close()
    assert os.listdir(tmp_path) == []


def test_a_mailbox_that_is_gone_is_an_error_to_join_and_empty_to_read(tmp_path: Path) -> None:
    first = Mailbox.begin(tmp_path / "c")
    folder = str(first.folder)
    first.close()
    with pytest.raises(StorageError):
        Mailbox.join(folder, 1)
    assert (first.words(), first.word(0), first.is_alive(0)) == (set(), None, False)
    first.close()


def test_a_word_of_a_full_disk_goes_where_there_was_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Mailbox.begin(tmp_path / "c")
    real = os.pwritev

    def full(fd: int, pieces: list[memoryview], byte_offset: int) -> int:
        """Take what lies in room that is taken, and no byte more."""
        room = max(os.fstat(fd).st_size - byte_offset, 0)
        data = b"".join(pieces)[:room]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, [memoryview(data)], byte_offset)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError) as error:
        box.leave(bytes(5000))
    assert error.value.errno == errno.ENOSPC
    assert box.words() == set()
    box.leave(b"full")
    assert box.word(0) == b"full"
    box.close()
    assert os.listdir(tmp_path) == []
