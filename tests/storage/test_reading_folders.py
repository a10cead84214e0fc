"""Storages for reading: what both kinds do alike, and what a file system can play on us."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

import dsdformat
from dsdformat.errors import DsdError, FormatError, StorageError
from dsdformat.storage import local
from dsdformat.storage.local import LocalStorage
from dsdformat.storage.memory import CountingStorage, MemoryStorage

FILES = {"a.bin": bytes(range(256)), "b.bin": b"", "c.bin": b"xyz"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, data in FILES.items():
        (tmp_path / label).write_bytes(data)
    return tmp_path


@pytest.fixture(params=["local", "memory", "counting"])
def storage(request, folder):
    made = LocalStorage(folder) if request.param == "local" else MemoryStorage(FILES)
    made = CountingStorage(made) if request.param == "counting" else made
    yield made
    made.close()


# Alike


def test_labels_are_in_ascending_order(storage):
    assert storage.labels() == ["a.bin", "b.bin", "c.bin"]


@pytest.mark.parametrize("label", FILES)
def test_a_file_has_its_length(storage, label):
    assert storage.nbytes(label) == len(FILES[label])


@pytest.mark.parametrize(
    ("byte_offset", "lengths", "count"),
    [
        (0, [], 0),
        (0, [256], 256),
        (3, [0, 1, 0, 2, 50, 0], 53),
        (250, [3, 3], 6),
        (250, [3, 4], 6),  # it ends there
        (250, [7, 3], 6),
        (256, [1, 1], 0),
        (300, [1], 0),
        (2, [0, 0], 0),
    ],
)
def test_buffers_are_filled_one_after_another(storage, byte_offset, lengths, count):
    data = FILES["a.bin"][byte_offset : byte_offset + sum(lengths)]
    into = [memoryview(bytearray(nbytes)) for nbytes in lengths]
    assert storage.read_into_many("a.bin", byte_offset, into) == count
    assert b"".join(into) == data.ljust(sum(lengths), b"\0")
    if isinstance(storage, CountingStorage):
        assert storage.reads == [("a.bin", byte_offset, sum(lengths))]


def test_more_buffers_are_filled_than_one_call_takes(tmp_path, monkeypatch):
    data = bytes(range(256)) * 20
    (tmp_path / "a.bin").write_bytes(data)
    storage = LocalStorage(tmp_path)
    into = [memoryview(bytearray(number % 4)) for number in range(3000)]
    count = sum(map(len, into))
    assert storage.read_into_many("a.bin", 7, into) == count
    assert b"".join(into) == data[7 : 7 + count]
    storage.close()


def test_buffers_are_filled_by_calls_that_stop_anywhere(tmp_path, monkeypatch):
    data = bytes(range(256))
    (tmp_path / "a.bin").write_bytes(data)
    kept, counts = local._File.read, iter([1, 3, 2, 5, 1, 1, 8, 100, 4])

    def read(self, byte_offset, into):
        short = memoryview(bytearray(min(next(counts), sum(map(len, into)))))
        done = kept(self, byte_offset, [short])
        at = 0
        for piece in into:
            some = short[at : at + len(piece)]
            piece[: len(some)] = some
            at += len(piece)
        return done

    monkeypatch.setattr(local._File, "read", read)
    storage = LocalStorage(tmp_path)
    into = [memoryview(bytearray(nbytes)) for nbytes in (1, 2, 0, 4, 3, 10, 90, 15)]
    assert storage.read_into_many("a.bin", 5, into) == 125
    assert b"".join(into) == data[5:130]
    storage.close()


def test_buffers_are_filled_where_the_system_has_no_preadv(folder, monkeypatch):
    monkeypatch.delattr(os, "preadv")
    storage = LocalStorage(folder)
    into = [memoryview(bytearray(nbytes)) for nbytes in (0, 3, 0, 4)]
    assert storage.read_into_many("a.bin", 250, into) == 6
    assert b"".join(into) == FILES["a.bin"][250:] + b"\0"
    storage.close()


@pytest.mark.parametrize(
    ("byte_offset", "nbytes", "count"),
    [
        pytest.param(0, 256, 256, id="all"),
        pytest.param(10, 20, 20, id="middle"),
        pytest.param(250, 20, 6, id="over-the-end"),
        pytest.param(256, 20, 0, id="at-the-end"),
        pytest.param(1000, 20, 0, id="behind-the-end"),
        pytest.param(0, 0, 0, id="nothing"),
    ],
)
def test_a_read_fills_the_buffer_as_far_as_the_file_goes(storage, byte_offset, nbytes, count):
    buffer = bytearray(b"\xff" * nbytes)
    assert storage.read_into("a.bin", byte_offset, memoryview(buffer)) == count
    assert buffer[:count] == FILES["a.bin"][byte_offset : byte_offset + count]
    assert buffer[count:] == b"\xff" * (nbytes - count)


@pytest.mark.parametrize("label", FILES)
def test_a_map_holds_the_file_and_cannot_be_written(storage, label):
    view = storage.map(label)
    assert bytes(view) == FILES[label]
    assert view.readonly


@pytest.mark.parametrize("call", ["nbytes", "map", "read_into"])
def test_a_file_that_is_not_there_is_a_missing_file(storage, call):
    arguments = (0, memoryview(bytearray(1))) if call == "read_into" else ()
    with pytest.raises(FormatError, match=r"d\.bin") as error:
        getattr(storage, call)("d.bin", *arguments)
    assert (error.value.code, error.value.where) == ("missing_file", "d.bin")


def test_a_storage_can_be_closed_twice(storage):
    storage.close()
    storage.close()


def test_a_counting_storage_keeps_the_reads_in_order():
    storage = CountingStorage(MemoryStorage(FILES))
    storage.read_into("c.bin", 1, memoryview(bytearray(2)))
    storage.read_into("a.bin", 0, memoryview(bytearray(5)))
    assert storage.reads == [("c.bin", 1, 2), ("a.bin", 0, 5)]


# What is not a regular file (spec)


def link_inside(path: Path) -> None:
    path.symlink_to("a.bin")


def link_outside(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


SPECIAL = [link_inside, link_outside, link_to_nothing, link_to_itself, os.mkfifo, Path.mkdir]


@pytest.mark.parametrize("make", SPECIAL)
def test_what_is_not_a_regular_file_is_refused_without_reading_it(folder, make):
    make(folder / "odd.bin")
    storage = LocalStorage(folder)
    with pytest.raises(FormatError, match=r"odd\.bin") as error:
        storage.nbytes("odd.bin")
    assert (error.value.code, error.value.where) == ("not_regular_file", "odd.bin")
    storage.close()


@pytest.mark.parametrize("make", SPECIAL)
@pytest.mark.parametrize("label", ["manifest.dsd", "model.safetensors", "config.json"])
def test_no_file_of_a_checkpoint_may_be_anything_else(small_folder, make, label):
    (small_folder / label).unlink()
    make(small_folder / label)
    assert {problem.code for problem in dsdformat.verify(small_folder).problems} == {
        "not_regular_file"
    }


def test_refused_files_leave_no_descriptor_open(folder, count_descriptors):
    os.mkfifo(folder / "odd.bin")
    before = count_descriptors()
    for _ in range(20):
        storage = LocalStorage(folder)
        with pytest.raises(FormatError):
            storage.nbytes("odd.bin")
        storage.close()
    assert count_descriptors() == before


# Folders


@pytest.mark.parametrize("kind", ["missing", "file", "dangling-link"])
def test_what_is_not_a_folder_is_no_checkpoint(tmp_path, kind):
    path = tmp_path / "c"
    if kind == "file":
        path.write_bytes(b"")
    elif kind == "dangling-link":
        path.symlink_to("nothing")
    with pytest.raises(FormatError) as error:
        LocalStorage(path)
    assert error.value.code == "no_manifest"


def test_a_link_to_a_folder_is_followed(small_folder, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(small_folder)
    assert dsdformat.verify(link).ok


def test_a_name_that_is_too_long_is_a_storage_error():
    with pytest.raises(DsdError):
        dsdformat.open("x" * 300)


def test_a_name_with_nul_is_no_checkpoint():
    with pytest.raises(FormatError):
        dsdformat.open("a\0b")


def test_files_are_opened_in_the_folder_that_was_opened(tmp_path):
    """A folder that takes the name meanwhile is never mixed with the one that was opened."""
    old, path = tmp_path / "old", tmp_path / "c"
    path.mkdir()
    (path / "a.bin").write_bytes(b"old")
    storage = LocalStorage(path)
    path.rename(old)
    path.mkdir()
    (path / "a.bin").write_bytes(b"new")
    buffer = bytearray(3)
    storage.read_into("a.bin", 0, memoryview(buffer))
    assert bytes(buffer) == b"old"
    storage.close()


# The system


def test_short_reads_are_continued(folder, monkeypatch):
    read = os.preadv

    def at_most_seven(fd: int, buffers: list[memoryview], byte_offset: int) -> int:
        return read(fd, [buffers[0][:7]], byte_offset)

    monkeypatch.setattr(os, "preadv", at_most_seven)
    storage = LocalStorage(folder)
    buffer = bytearray(256)
    assert storage.read_into("a.bin", 0, memoryview(buffer)) == 256
    assert bytes(buffer) == FILES["a.bin"]
    storage.close()


def test_a_read_error_is_a_storage_error_that_names_the_file(folder, monkeypatch):
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    storage = LocalStorage(folder)
    with pytest.raises(StorageError, match=r"a\.bin.*Input/output error") as error:
        storage.read_into("a.bin", 0, memoryview(bytearray(1)))
    assert (error.value.code, error.value.errno) == ("io_error", errno.EIO)
    assert isinstance(error.value.__cause__, OSError)
    storage.close()


@pytest.mark.parametrize("call", [dsdformat.open, dsdformat.verify])
def test_a_failed_open_or_verify_leaves_no_descriptor_open(
    small_folder, monkeypatch, count_descriptors, call
):
    """A read error while the manifest is read: both close what they opened."""

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    before = count_descriptors()
    for _ in range(10):
        with pytest.raises(StorageError):
            call(small_folder)
    assert count_descriptors() == before


def test_only_so_many_files_stay_open(tmp_path, monkeypatch, count_descriptors):
    monkeypatch.setattr(local, "OPEN_FILES_MAX", 8)
    labels = [f"{number:03}.bin" for number in range(50)]
    for label in labels:
        (tmp_path / label).write_bytes(label.encode())
    before = count_descriptors()
    storage = LocalStorage(tmp_path)
    for label in labels * 2:
        buffer = bytearray(7)
        storage.read_into(label, 0, memoryview(buffer))
        assert buffer == label.encode()
    assert count_descriptors() <= before + 9
    storage.close()
    assert count_descriptors() == before


def test_many_threads_read_while_files_are_closed_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "OPEN_FILES_MAX", 2)
    labels = [f"{number}.bin" for number in range(8)]
    for label in labels:
        (tmp_path / label).write_bytes(label.encode() * 100)
    storage = LocalStorage(tmp_path)
    wrong: list[str] = []

    def read() -> None:
        for label in labels * 40:
            buffer = bytearray(500)
            storage.read_into(label, 0, memoryview(buffer))
            if buffer != label.encode() * 100:
                wrong.append(label)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storage.close()
    assert wrong == []


def test_maps_stay_valid_when_the_storage_is_closed_and_the_file_is_gone(folder):
    storage = LocalStorage(folder)
    view = storage.map("a.bin")
    storage.close()
    (folder / "a.bin").unlink()
    assert bytes(view) == FILES["a.bin"]
