"""Writing a folder: names, modes, targets that exist, a full disk, and the order of flushes."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dsdformat
from dsdformat import StorageError, TensorSource
from dsdformat.errors import DsdError
from dsdformat.storage import partials, renames, target
from dsdformat.storage.memory import MemoryTarget
from dsdformat.storage.target import FileSink, LocalTarget

DATA = bytes(range(256)) * 40
Save = Callable[..., str]


@pytest.fixture
def save_folder() -> Save:
    """`save_folder(path, "old")` saves a checkpoint that says `old`; gives its root digest."""

    def save_folder(path: str | os.PathLike[str], word: str = "new", **options: object) -> str:
        with dsdformat.create(path, user={"word": word}, **options) as writer:
            writer.add({"model": {"w": TensorSource.of("uint8", (len(DATA),), DATA)}})
        assert writer.root
        return writer.root

    return save_folder


def word_of(path: str | os.PathLike[str]) -> str:
    """What the checkpoint at a path says, after every byte of it was checked."""
    dsdformat.verify(path).raise_if_bad()
    with dsdformat.open(path) as checkpoint:
        return checkpoint.user["word"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that cannot exchange two names."""
    monkeypatch.setattr(renames, "exchange", lambda *_: False)


@pytest.fixture(params=["exchange", "no-exchange"])
def either_way(request: pytest.FixtureRequest) -> None:
    if request.param == "no-exchange":
        request.getfixturevalue("no_exchange")


# Names


def test_nothing_but_the_checkpoint_is_left_beside_it(tmp_path, save_folder):
    save_folder(tmp_path / "c")
    assert names_in(tmp_path) == ["c"]
    assert names_in(tmp_path / "c") == ["manifest.dsd", "model.safetensors"]


# spec
def test_the_name_does_not_exist_before_the_commit(tmp_path):
    writer = dsdformat.create(tmp_path / "c")
    writer.add({"w": TensorSource.of("uint8", (4,), b"abcd")})
    assert not (tmp_path / "c").exists()
    writer.commit()
    assert word_of_any(tmp_path / "c") == {}


def word_of_any(path: Path) -> dict[str, str]:
    with dsdformat.open(path) as checkpoint:
        return checkpoint.user


# spec
def test_the_place_before_the_commit_is_a_hidden_folder_beside_the_name(tmp_path):
    writer = dsdformat.create(tmp_path / "c")
    (name,) = names_in(tmp_path)
    assert name.startswith(".c.dsd-partial-")
    assert Path(writer.staging) == tmp_path / name
    writer.abort()
    assert names_in(tmp_path) == []


PATHS = [
    pytest.param("c", id="relative"),
    pytest.param("c/", id="trailing-slash"),
    pytest.param("././c", id="dots"),
    pytest.param("missing/parents/c", id="missing-parents"),
    pytest.param(Path("c"), id="path-object"),
    pytest.param("with space é", id="odd-characters"),
    pytest.param(".hidden", id="hidden"),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_checkpoint_is_saved_and_replaced_at_any_form_of_path(
    tmp_path, monkeypatch, save_folder, path
):
    monkeypatch.chdir(tmp_path)
    save_folder(path, "old")
    save_folder(path, "new", overwrite=True)
    assert word_of(path) == "new"
    assert len(list(Path(path).resolve().parent.iterdir())) == 1


def test_the_place_is_fixed_when_the_writer_begins(tmp_path, monkeypatch):
    """Whoever changes the working directory meanwhile does not move the checkpoint."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    with dsdformat.create("c", user={"word": "new"}):
        monkeypatch.chdir(second)
    assert word_of(first / "c") == "new"
    assert names_in(second) == []


def test_a_name_that_is_too_long_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError) as error:
        dsdformat.create(tmp_path / ("x" * 250))
    assert error.value.errno == errno.ENAMETOOLONG
    assert names_in(tmp_path) == []


def test_a_name_with_nul_is_refused_with_a_code(tmp_path):
    with pytest.raises(DsdError):
        dsdformat.create(str(tmp_path / "a\0b"))


def test_files_and_folder_have_the_modes_that_the_umask_leaves(tmp_path, save_folder):
    before = os.umask(0o027)
    try:
        save_folder(tmp_path / "c")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o750
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").iterdir()}
    assert modes == {0o640}


# Targets that exist (spec, B114)


def test_a_checkpoint_is_not_replaced_unless_asked(tmp_path, save_folder):
    save_folder(tmp_path / "c", "old")
    with pytest.raises(StorageError, match="overwrite=True") as error:
        save_folder(tmp_path / "c", "new")
    assert error.value.code == "already_exists"
    assert word_of(tmp_path / "c") == "old"
    assert names_in(tmp_path) == ["c"]


def test_a_checkpoint_is_replaced_when_asked(tmp_path, save_folder, either_way):
    save_folder(tmp_path / "c", "old")
    save_folder(tmp_path / "c", "new", overwrite=True)
    assert word_of(tmp_path / "c") == "new"
    assert names_in(tmp_path) == ["c"]


def test_no_file_of_the_old_checkpoint_is_left_in_the_new_one(tmp_path, save_folder, either_way):
    save_folder(tmp_path / "c", "old")
    (tmp_path / "c" / "__7_0.safetensors").write_bytes(b"stale")
    save_folder(tmp_path / "c", "new", overwrite=True)
    assert names_in(tmp_path / "c") == ["manifest.dsd", "model.safetensors"]


def test_overwrite_needs_nothing_to_overwrite(tmp_path, save_folder):
    save_folder(tmp_path / "c", overwrite=True)
    assert word_of(tmp_path / "c") == "new"


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_folder_is_used(tmp_path, save_folder, overwrite):
    (tmp_path / "c").mkdir()
    save_folder(tmp_path / "c", overwrite=overwrite)
    assert word_of(tmp_path / "c") == "new"


def make_file(path: Path) -> None:
    path.write_bytes(b"mine")


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_bytes(b"mine")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", [make_file, make_folder])
def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path, save_folder, make, overwrite):
    make(tmp_path / "c")
    with pytest.raises(StorageError) as error:
        save_folder(tmp_path / "c", overwrite=overwrite)
    assert error.value.code == "not_replaceable"
    kept = tmp_path / "c" if make is make_file else tmp_path / "c" / "mine.txt"
    assert kept.read_bytes() == b"mine"
    assert names_in(tmp_path) == ["c"]


def test_a_link_is_kept_and_what_it_leads_to_is_replaced(tmp_path, save_folder, either_way):
    save_folder(tmp_path / "real" / "c", "old")
    (tmp_path / "latest").symlink_to(tmp_path / "real" / "c")
    save_folder(tmp_path / "latest", "new", overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert word_of(tmp_path / "real" / "c") == "new"
    assert names_in(tmp_path / "real") == ["c"]


def test_a_link_to_nothing_gets_what_it_leads_to(tmp_path, save_folder):
    (tmp_path / "latest").symlink_to(tmp_path / "c")
    save_folder(tmp_path / "latest")
    assert word_of(tmp_path / "c") == "new"


def test_a_checkpoint_that_appeared_meanwhile_is_not_replaced(tmp_path, save_folder):
    slow = dsdformat.create(tmp_path / "c")
    save_folder(tmp_path / "c", "fast")
    with pytest.raises(StorageError) as error:
        slow.commit()
    assert error.value.code == "already_exists"
    assert word_of(tmp_path / "c") == "fast"
    assert names_in(tmp_path) == ["c"]


def test_of_two_writers_that_may_overwrite_the_last_one_wins(tmp_path, save_folder, either_way):
    slow = dsdformat.create(tmp_path / "c", overwrite=True, user={"word": "slow"})
    save_folder(tmp_path / "c", "fast", overwrite=True)
    slow.commit()
    assert word_of(tmp_path / "c") == "slow"
    assert names_in(tmp_path) == ["c"]


def test_where_the_second_rename_fails_the_old_checkpoint_gets_its_name_back(
    tmp_path, save_folder, no_exchange, monkeypatch
):
    save_folder(tmp_path / "c", "old")
    rename = os.rename

    def only_the_old_one(src: Path, dst: Path) -> None:
        if ".dsd-partial-" in str(src):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(src, dst)

    monkeypatch.setattr(os, "rename", only_the_old_one)
    with pytest.raises(StorageError):
        save_folder(tmp_path / "c", "new", overwrite=True)
    assert word_of(tmp_path / "c") == "old"
    assert names_in(tmp_path) == ["c"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP], ids=os.strerror)
def test_a_file_system_without_exchange_is_noticed(tmp_path, save_folder, monkeypatch, code):
    save_folder(tmp_path / "c", "old")
    fail_exchange(monkeypatch, code)
    save_folder(tmp_path / "c", "new", overwrite=True)
    assert word_of(tmp_path / "c") == "new"


def test_another_failure_of_the_exchange_is_an_error(tmp_path, save_folder, monkeypatch):
    save_folder(tmp_path / "c", "old")
    fail_exchange(monkeypatch, errno.EIO)
    with pytest.raises(StorageError) as error:
        save_folder(tmp_path / "c", "new", overwrite=True)
    assert error.value.errno == errno.EIO
    assert word_of(tmp_path / "c") == "old"
    assert names_in(tmp_path) == ["c"]


def fail_exchange(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    import ctypes

    def renameat2(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(renames, "_renameat2", lambda: renameat2)


def test_a_system_without_the_call_is_noticed(tmp_path, save_folder, monkeypatch):
    save_folder(tmp_path / "c", "old")
    monkeypatch.setattr(renames, "_renameat2", lambda: None)
    save_folder(tmp_path / "c", "new", overwrite=True)
    assert word_of(tmp_path / "c") == "new"


def test_the_system_call_is_looked_up_once(tmp_path, save_folder, monkeypatch):
    """Each look-up leaks some memory in ctypes, which a long training would feel."""
    import ctypes

    save_folder(tmp_path / "c", "old")
    save_folder(tmp_path / "c", "new", overwrite=True)
    monkeypatch.setattr(ctypes, "CDLL", None)
    save_folder(tmp_path / "c", "new", overwrite=True)


# What a writer finds beside the name (spec)


def test_the_old_checkpoint_is_read_while_its_name_is_missing(tmp_path, save_folder):
    save_folder(tmp_path / "c", "old")
    (tmp_path / "c").rename(tmp_path / ".c.dsd-replaced")
    assert word_of(tmp_path / "c") == "old"


def test_the_next_writer_puts_the_old_checkpoint_back(tmp_path, save_folder):
    save_folder(tmp_path / "c", "old")
    (tmp_path / "c").rename(tmp_path / ".c.dsd-replaced")
    with pytest.raises(StorageError) as error:
        save_folder(tmp_path / "c", "new")
    assert error.value.code == "already_exists"
    assert names_in(tmp_path) == ["c"]
    assert word_of(tmp_path / "c") == "old"


def test_the_next_writer_removes_an_old_checkpoint_that_was_replaced(tmp_path, save_folder):
    save_folder(tmp_path / "c", "new")
    save_folder(tmp_path / "d", "old")
    (tmp_path / "d").rename(tmp_path / ".c.dsd-replaced")
    dsdformat.create(tmp_path / "c", overwrite=True).abort()
    assert names_in(tmp_path) == ["c"]
    assert word_of(tmp_path / "c") == "new"


def test_an_old_checkpoint_is_kept_while_its_name_holds_none(tmp_path, save_folder):
    """An empty folder that somebody made does not cost the last checkpoint."""
    save_folder(tmp_path / "c", "old")
    (tmp_path / "c").rename(tmp_path / ".c.dsd-replaced")
    (tmp_path / "c").mkdir()
    dsdformat.create(tmp_path / "c").abort()
    assert word_of(tmp_path / ".c.dsd-replaced") == "old"


def test_folders_of_other_names_are_left_alone(tmp_path, save_folder):
    others = [".d.dsd-partial-00000000", ".cc.dsd-partial-00000000", ".c.dsd-other", "c.partial"]
    for name in others:
        (tmp_path / name).mkdir()
    save_folder(tmp_path / "c")
    assert names_in(tmp_path) == sorted([*others, "c"])


def test_a_folder_of_a_dead_writer_is_removed(tmp_path, save_folder):
    (tmp_path / ".c.dsd-partial-00000000").mkdir()
    (tmp_path / ".c.dsd-partial-00000000" / "model.safetensors").write_bytes(b"half")
    save_folder(tmp_path / "c")
    assert names_in(tmp_path) == ["c"]


WAIT = """
import sys
import dsdformat
writer = dsdformat.create(sys.argv[1])
print(writer.staging, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_writer(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A writer to `c` in another process, and its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, str(tmp_path / "c")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_the_folder_of_a_writer_that_lives_is_left_alone(tmp_path, other_writer, save_folder):
    _, staging = other_writer
    save_folder(tmp_path / "c")
    assert names_in(tmp_path) == sorted([staging.name, "c"])


def test_the_folder_of_a_writer_that_was_killed_is_removed(tmp_path, other_writer, save_folder):
    process, staging = other_writer
    process.kill()
    process.wait()
    assert staging.is_dir()
    save_folder(tmp_path / "c")
    assert names_in(tmp_path) == ["c"]


def test_a_writer_of_the_same_process_lives_too(tmp_path, save_folder):
    writer = dsdformat.create(tmp_path / "c", overwrite=True, user={"word": "slow"})
    save_folder(tmp_path / "c", "fast")
    assert Path(writer.staging).is_dir()
    writer.abort()
    assert names_in(tmp_path) == ["c"]


def test_a_file_system_without_locks_can_be_written(tmp_path, save_folder, monkeypatch):
    calls = itertools.count()

    def unsupported(*_: object) -> None:
        assert next(calls) < 20, "the writer tries for ever"
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    save_folder(tmp_path / "c")
    assert word_of(tmp_path / "c") == "new"


# The medium fails


def full_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Let this many writes pass, and then the disk be full."""
    write, count = os.pwritev, itertools.count()

    def limited(*arguments: object) -> int:
        if next(count) >= calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", limited)


@pytest.mark.parametrize("calls", range(3), ids=["data", "header", "manifest"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_nothing_and_says_so(
    tmp_path, save_folder, monkeypatch, calls, overwrite
):
    if overwrite:
        save_folder(tmp_path / "c", "old")
    full_after(monkeypatch, calls)
    with pytest.raises(StorageError, match="No space left on device") as error:
        save_folder(tmp_path / "c", "new", overwrite=overwrite)
    assert (error.value.code, error.value.errno) == ("io_error", errno.ENOSPC)
    assert "free some space" in (error.value.hint or "")
    assert names_in(tmp_path) == (["c"] if overwrite else [])
    if overwrite:
        assert word_of(tmp_path / "c") == "old"


def entries_are_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the flushes of the folders above, which come once a process."""
    monkeypatch.setattr(target, "sync_entries", lambda path: None)


@pytest.mark.parametrize("calls", range(4), ids=["data", "manifest", "folder", "parent"])
def test_a_flush_that_fails_is_an_error(tmp_path, save_folder, monkeypatch, calls):
    entries_are_durable(monkeypatch)
    flush, count = os.fsync, itertools.count()

    def limited(fd: int) -> None:
        if next(count) >= calls:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(fd)

    monkeypatch.setattr(os, "fsync", limited)
    with pytest.raises(StorageError) as error:
        save_folder(tmp_path / "c")
    assert error.value.errno == errno.EIO
    assert not any(name.startswith(".") for name in names_in(tmp_path))


def test_a_side_file_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    writer = dsdformat.create(tmp_path / "c")
    full_after(monkeypatch, 0)
    with pytest.raises(StorageError) as error:
        writer.add_file("config.json", b"{}")
    assert error.value.errno == errno.ENOSPC
    writer.abort()


def test_failed_saves_leave_no_descriptor_open(
    tmp_path, save_folder, monkeypatch, count_descriptors
):
    before = count_descriptors()
    full_after(monkeypatch, 0)
    for _ in range(10):
        with pytest.raises(StorageError):
            save_folder(tmp_path / "c")
    assert count_descriptors() == before


def test_short_writes_are_continued(tmp_path, save_folder, monkeypatch):
    write = os.pwrite

    def at_most_99(fd: int, buffers: list[memoryview], byte_offset: int) -> int:
        return write(fd, buffers[0][:99], byte_offset)

    monkeypatch.setattr(os, "pwritev", at_most_99)
    save_folder(tmp_path / "c")
    assert word_of(tmp_path / "c") == "new"


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_any_number_of_pieces_is_written_one_after_another(tmp_path, count):
    sink = FileSink(tmp_path / "a")
    pieces = [bytes([number % 251]) * (number % 3) for number in range(count)]
    sink.write_at(5, pieces)
    sink.close()
    assert (tmp_path / "a").read_bytes() == (b"\0" * 5 if any(pieces) else b"") + b"".join(pieces)


def test_a_file_is_never_written_over(tmp_path):
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(StorageError) as error:
        FileSink(tmp_path / "a")
    assert error.value.errno == errno.EEXIST
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_signals_do_not_disturb_a_save_or_a_read(tmp_path, save_folder):
    rings: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rings.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        while len(rings) < 20:
            save_folder(tmp_path / "c", overwrite=True)
            assert word_of(tmp_path / "c") == "new"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# The order of flushes (spec)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to files and folders, in order; tokens of partial folders left out."""
    found: list[str] = []

    def name(path: object) -> str:
        return Path(str(path)).name.split("-partial-")[0]

    def watch(owner: object, attribute: str, describe: Callable[..., str]) -> None:
        inner = getattr(owner, attribute)

        def call(*arguments: object, **options: object) -> object:
            result = inner(*arguments, **options)
            found.append(describe(*arguments))
            return result

        monkeypatch.setattr(owner, attribute, call)

    entries_are_durable(monkeypatch)
    watch(os, "fsync", lambda fd: f"flush {name(os.readlink(f'/proc/self/fd/{fd}'))}")
    watch(os, "rename", lambda a, b: f"rename {name(a)} {name(b)}")
    watch(renames, "exchange", lambda a, b: f"exchange {name(a)} {name(b)}")
    watch(partials.shutil, "rmtree", lambda path, *_: f"remove {name(path)}")
    return found


def save_two_sections(path: Path, **options: object) -> None:
    with dsdformat.create(path, **options) as writer:
        writer.add_file("config.json", b"{}")
        source = TensorSource.of("uint8", (4,), b"abcd")
        writer.add({"model": {"w": source}, "optimizer": {"m": source, "n": source}})
        writer.add({"optimizer": {"o": TensorSource.of("uint8", (1,), b"a")}})


def ordered(events: list[str]) -> list[str]:
    """Put the flushes of the two data files, which are at work together, in one order."""
    return [*events[:1], *sorted(events[1:3]), *events[3:]]


FILES_FLUSHED = [
    "flush config.json",
    "flush model.safetensors",
    "flush optimizer.safetensors",
    "flush manifest.dsd",
    "flush .c.dsd",
]


def test_a_new_checkpoint_is_durable_before_it_has_its_name(tmp_path, events):
    save_two_sections(tmp_path / "c")
    assert ordered(events) == [*FILES_FLUSHED, "rename .c.dsd c", f"flush {tmp_path.name}"]


def test_a_checkpoint_that_replaces_another_by_two_renames_is_durable_before(
    tmp_path, save_folder, events, no_exchange
):
    save_folder(tmp_path / "c", "old")
    events.clear()
    save_two_sections(tmp_path / "c", overwrite=True)
    assert ordered(events) == [
        *FILES_FLUSHED,
        "rename c .c.dsd-replaced",
        "rename .c.dsd c",
        f"flush {tmp_path.name}",
        "remove .c.dsd-replaced",
    ]


def test_a_checkpoint_that_replaces_another_by_an_exchange_is_durable_before(
    tmp_path, save_folder, events
):
    save_folder(tmp_path / "c", "old")
    events.clear()
    save_two_sections(tmp_path / "c", overwrite=True)
    if not any(event.startswith("exchange") for event in events):
        pytest.skip("this file system has no exchange")
    assert ordered(events) == [
        *FILES_FLUSHED,
        "exchange .c.dsd c",
        f"flush {tmp_path.name}",
        "remove .c.dsd",
    ]


def test_a_save_that_fails_flushes_nothing_that_it_removes(tmp_path, events):
    def broken() -> Iterator[bytes]:
        yield b"ab"
        raise RuntimeError

    with pytest.raises(RuntimeError), dsdformat.create(tmp_path / "c") as writer:
        writer.add({"w": TensorSource.of("uint8", (4,), broken)})
    assert [event for event in events if event.startswith("flush")] == []


def test_the_folders_above_a_checkpoint_are_durable_too_and_flushed_once(tmp_path, monkeypatch):
    """Whoever made them may have flushed nothing."""
    flushed: list[str] = []
    flush = renames.sync_folder
    monkeypatch.setattr(renames, "sync_folder", lambda one: (flushed.append(str(one)), flush(one)))
    (tmp_path / "runs" / "one").mkdir(parents=True)
    above = [str(tmp_path), str(tmp_path / "runs")]
    LocalTarget(tmp_path / "runs" / "one" / "c").abort()
    assert [one for one in flushed if one in above] == above[::-1]
    flushed.clear()
    LocalTarget(tmp_path / "runs" / "one" / "c").abort()
    assert flushed == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_file_system_that_flushes_no_folders_can_be_written(
    tmp_path, save_folder, monkeypatch, code
):
    flush = os.fsync

    def files_only(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        flush(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    save_folder(tmp_path / "c")
    assert word_of(tmp_path / "c") == "new"


# Memory


def test_memory_that_is_not_empty_is_not_replaced_unless_asked():
    with pytest.raises(StorageError) as error:
        MemoryTarget({"a": bytearray()})
    assert error.value.code == "already_exists"


def test_memory_is_replaced_at_the_commit():
    files = {"a": bytearray(b"old")}
    made = MemoryTarget(files, overwrite=True)
    sink = made.create("b")
    sink.write_at(2, [b"new"])
    sink.close()
    assert files == {"a": b"old"}
    made.commit()
    assert files == {"b": b"\0\0new"}


def test_memory_is_as_it_was_after_an_abort():
    files = {"a": bytearray(b"old")}
    made = MemoryTarget(files, overwrite=True)
    made.create("b").write_at(0, [b"new"])
    made.abort()
    assert files == {"a": b"old"}


def test_memory_refuses_a_second_file_of_a_name_as_a_folder_does():
    made = MemoryTarget({})
    made.create("a")
    with pytest.raises(StorageError):
        made.create("a")


def test_a_local_target_that_was_aborted_leaves_its_parent(tmp_path):
    made = LocalTarget(tmp_path / "x" / "c")
    made.abort()
    assert names_in(tmp_path) == ["x"]
