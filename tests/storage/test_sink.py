"""Files that are written: the disk begins early, and what it says is told at the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dsdformat.errors import StorageError
from dsdformat.limits import MIB
from dsdformat.storage import sink
from dsdformat.storage.base import all_completed
from dsdformat.storage.sink import FileSink
from dsdformat.workers import Workers


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int, int]]:
    """Arguments of the calls that let the disk begin."""
    calls: list[tuple[int, int, int, int]] = []

    def start(*arguments: int) -> int:
        calls.append(arguments)  # type: ignore[arg-type]
        return -1  # as where the file system has no such call

    monkeypatch.setattr(sink, "_sync_file_range", lambda: start)
    return calls


def test_the_disk_begins_each_time_8_mib_are_written(
    tmp_path: Path, started: list[tuple[int, int, int, int]]
) -> None:
    file = FileSink(tmp_path / "a")
    for number, expected in enumerate([0, 1, 1, 2]):
        file.write_at(4 * MIB * number, [bytes(2 * MIB), bytes(2 * MIB)])
        assert len(started) == expected
    assert {arguments[1:] for arguments in started} == {(0, 0, 2)}  # all of the file, no wait
    file.close()
    assert (tmp_path / "a").stat().st_size == 16 * MIB


def test_a_small_file_is_left_to_the_flush_at_the_end(
    tmp_path: Path, started: list[tuple[int, int, int, int]]
) -> None:
    file = FileSink(tmp_path / "a")
    file.write_at(0, [bytes(8 * MIB - 1)])
    file.close()
    assert started == []


def test_a_system_without_such_a_call_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "_sync_file_range", lambda: None)
    file = FileSink(tmp_path / "a")
    file.write_at(0, [b"ab", memoryview(b"cd"), bytearray(9 * MIB)])
    file.close()
    assert (tmp_path / "a").read_bytes()[:5] == b"abcd\0"


def test_what_goes_wrong_on_the_disk_is_told_when_the_file_is_closed(
    tmp_path: Path,
    started: list[tuple[int, int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = FileSink(tmp_path / "a")
    file.write_at(0, [bytes(8 * MIB)])
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError) as caught:
        file.close()
    assert len(started) == 1
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("threads", [1, 2])
def test_files_that_are_flushed_together_are_all_closed_when_one_cannot_be(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with all_completed(Workers(threads).run) as files:
        files.extend(FileSink(tmp_path / f"good-{number}") for number in range(3))
    assert len(os.listdir("/proc/self/fd")) == before

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with (
        pytest.raises(StorageError, match=r"bad-\d: "),
        all_completed(Workers(threads).run) as files,
    ):
        files.extend(FileSink(tmp_path / f"bad-{number}") for number in range(5))
    assert len(os.listdir("/proc/self/fd")) == before
