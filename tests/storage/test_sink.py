"""Files that are written: the disk begins early, what it says is told, the page cache is spared."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import mmap
import os
import random
from pathlib import Path

import pytest

from dsdformat.errors import StorageError
from dsdformat.limits import MIB
from dsdformat.storage import sink
from dsdformat.storage.base import all_completed
from dsdformat.storage.direct import DirectFile, takes_direct
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


# Past the page cache


PIECE = 3 * MIB + 5


@pytest.fixture
def direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Places and lengths of what was written past the page cache, on any file system."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system has no O_DIRECT")
    written: list[tuple[int, int]] = []
    write = DirectFile.write

    def noting(self: DirectFile, byte_offset: int, piece: memoryview) -> range:
        done = write(self, byte_offset, piece)
        written.append((byte_offset + done.start, len(done)))
        return done

    monkeypatch.setattr(sink, "takes_direct", lambda _: True)
    monkeypatch.setattr(DirectFile, "write", noting)
    return written


def page_view(nbytes: int, at: int) -> memoryview:
    """Return random bytes that begin so many bytes behind the beginning of a page."""
    view = memoryview(mmap.mmap(-1, at + nbytes))[at:]
    view[:] = random.Random(nbytes).randbytes(nbytes)
    return view


@pytest.mark.parametrize("at", [0, 1, 4095])
def test_whole_pages_of_large_pieces_are_written_past_the_page_cache(
    tmp_path: Path, direct: list[tuple[int, int]], at: int
) -> None:
    page = mmap.PAGESIZE
    piece = page_view(PIECE, at)
    file = FileSink(tmp_path / "a", past_cache=True)
    file.write_at(8 * page + at, [piece])
    file.write_at(0, [b"head", page_view(page, 0)])  # several pieces, and small ones, are not
    file.close()
    found = (tmp_path / "a").read_bytes()
    assert found[8 * page + at :] == piece
    assert found[:4] == b"head"
    ((begin, nbytes),) = direct
    if nbytes:  # or the file system does not take it so
        first = 8 * page + -(-at // page) * page
        assert (begin, nbytes) == (first, (8 * page + at + PIECE) // page * page - first)


def test_memory_that_lies_otherwise_than_the_file_is_written_as_ever(
    tmp_path: Path, direct: list[tuple[int, int]]
) -> None:
    piece = page_view(PIECE, 1)
    with contextlib.closing(FileSink(tmp_path / "a", past_cache=True)) as file:
        file.write_at(0, [piece])
        file.write_at(PIECE, [piece])
    assert (tmp_path / "a").read_bytes() == bytes(piece) * 2
    assert sum(nbytes for _, nbytes in direct) in (0, 2 * (PIECE // mmap.PAGESIZE * mmap.PAGESIZE))


def test_a_mount_that_refuses_it_is_written_as_ever(
    tmp_path: Path, direct: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refusing(path: Path, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refusing)
    with contextlib.closing(FileSink(tmp_path / "a", past_cache=True)) as file:
        file.write_at(0, [page_view(MIB, 0)])
        file.write_at(MIB, [page_view(MIB, 0)])
    assert direct == []
    assert (tmp_path / "a").read_bytes() == bytes(page_view(MIB, 0)) * 2


def test_what_was_written_past_the_page_cache_is_flushed_with_the_rest(
    tmp_path: Path, direct: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, flush, calls = os.pwritev, os.fsync, list[tuple[str, int]]()

    def writing(fd: int, *args: object) -> int:
        calls.append(("write", os.fstat(fd).st_ino))
        return write(fd, *args)  # type: ignore[arg-type]

    def flushing(fd: int) -> None:
        calls.append(("flush", os.fstat(fd).st_ino))
        flush(fd)

    monkeypatch.setattr(os, "pwritev", writing)
    monkeypatch.setattr(os, "fsync", flushing)
    with contextlib.closing(FileSink(tmp_path / "a", past_cache=True)) as file:
        file.write_at(1, [page_view(PIECE, 1)])
    number = (tmp_path / "a").stat().st_ino
    assert len(direct) == 1
    assert len(calls) >= 3
    assert calls == [("write", number)] * (len(calls) - 1) + [("flush", number)]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_past_the_page_cache_is_told_of(
    tmp_path: Path, direct: list[tuple[int, int]], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = FileSink(tmp_path / "a", past_cache=True)
    file.write_at(0, [page_view(MIB, 0)])

    def failing(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(StorageError) as caught:
        file.write_at(MIB, [page_view(MIB, 0)])
    file.discard()
    assert caught.value.errno == code


def test_a_disk_that_takes_a_part_is_asked_again(
    tmp_path: Path, direct: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, counts = os.pwritev, iter([3 * mmap.PAGESIZE + 7, 100, 5])

    def partly(fd: int, views: list[memoryview], byte_offset: int) -> int:
        most = next(counts, None)
        return write(fd, [bytes(views[0][:most])] if most else views, byte_offset)

    piece = page_view(PIECE, 0)
    with contextlib.closing(FileSink(tmp_path / "a", past_cache=True)) as file:
        # Bytes of another place are not taken past the cache, so this goes through it.
        monkeypatch.setattr(os, "O_DIRECT", 0)
        monkeypatch.setattr(os, "pwritev", partly)
        file.write_at(0, [piece])
    assert direct == [(0, 3 * mmap.PAGESIZE)]
    assert (tmp_path / "a").read_bytes() == piece


def test_threads_write_one_file_past_the_page_cache_and_through_it(
    tmp_path: Path, direct: list[tuple[int, int]]
) -> None:
    sizes = [MIB + 100, 77, 2 * MIB, 5, 3 * MIB + 4000, 4096, MIB + 1]
    places = [0, *itertools.accumulate(sizes)]
    view = page_view(places[-1], 0)
    with contextlib.closing(FileSink(tmp_path / "a", past_cache=True)) as file:
        Workers(4).run(
            functools.partial(file.write_at, at, [view[at:end]])
            for at, end in itertools.pairwise(places)
        )
    assert (tmp_path / "a").read_bytes() == view


def test_only_file_systems_that_are_known_are_written_past_the_page_cache(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        pytest.skip("needs /proc")
    with (tmp_path / "a").open("wb") as file:
        number = os.fstat(file.fileno()).st_dev
        kinds = {
            line.partition(" - ")[2].split()[0]
            for line in mounts.read_text().splitlines()
            if line.split()[2] == f"{os.major(number)}:{os.minor(number)}"
        }
        assert takes_direct(file.fileno()) == bool(kinds & {"ext4", "xfs"})
    with mounts.open("rb") as file:
        assert not takes_direct(file.fileno())


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
