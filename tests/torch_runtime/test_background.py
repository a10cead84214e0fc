"""Saves in the background: what they hold, who is told of errors, and what is left of them."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from exact import assert_same  # noqa: E402
from state_kinds import STATES, train, training  # noqa: E402
from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import ArgumentError, StorageError, TimeLimitError  # noqa: E402
from dsdformat.storage import sink  # noqa: E402
from dsdformat.storage.direct import DirectFile  # noqa: E402
from dsdformat.storage.target import FileSink  # noqa: E402
from dsdformat.torch import background, staging  # noqa: E402
from dsdformat.torch.buffers import Slabs  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 30


@pytest.fixture(autouse=True)
def _nothing_in_flight() -> Iterator[None]:
    yield
    last, background._state.last = background._state.last, None
    if last is not None:
        assert last._ended.wait(WAIT_S)


def is_file(fd: int) -> bool:
    """Whether it is no folder: those above a checkpoint are flushed in the call of `save`."""
    return stat.S_ISREG(os.fstat(fd).st_mode)


class Gate:
    """Holds writers of files up at the disk until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def fsync(self, fd: int) -> None:
        if is_file(fd):
            self.reached.set()
            assert self._open.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(os, "fsync", gate.fsync)
    yield gate
    gate.open()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let every write fail; a call of it lets them pass again."""
    kept = os.pwritev

    def pwritev(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", pwritev)
    return lambda: monkeypatch.setattr(os, "pwritev", kept)


def wreck(value: Any) -> None:
    """Overwrite, shrink and empty all that a state is made of."""
    if isinstance(value, nn.Module):
        wreck([*value.parameters(), *value.buffers()])
        value.__dict__["_modules"].clear()
    elif isinstance(value, torch.optim.Optimizer):
        wreck(list(value.state.values()))
        value.param_groups.clear()
    elif isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_nested:
            value.detach().untyped_storage().fill_(255)
            if value.untyped_storage().resizable():
                value.detach().untyped_storage().resize_(0)
    elif isinstance(value, np.ndarray):
        value.fill(7)
    elif isinstance(value, dict):
        wreck(list(value.values()))
        value.clear()
    elif isinstance(value, list):
        for item in value:
            wreck(item)
        value.clear()


# What is saved


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
@pytest.mark.parametrize("codec", ["raw", "planes+zstd"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_it_is_the_state_at_the_call_whatever_is_done_to_that_right_after(
    tmp_path, make, codec, gate
):
    state = make()
    handle = dsd.save(tmp_path / "later", state, background=True, codec=codec)
    wreck(state)
    gate.open()
    assert handle.wait() == dsd.save(tmp_path / "plain", make(), codec=codec)
    assert dsdformat.verify(tmp_path / "later").ok


def test_tensors_of_every_size_and_place_are_staged(tmp_path):
    sizes = [0, 1, 63, 64, 65, 65_535, 65_536, (8 << 20) - 1, (8 << 20) + 1, 20 << 20]
    base = torch.arange(40 << 20, dtype=torch.int32).view(torch.uint8)
    state: dict[str, Any] = {f"{size}": base[7 * size : 8 * size] for size in sizes}
    state["strided"] = base.view(8, -1)[:, ::3]
    state["array"] = base.view(1 << 10, -1).numpy()[::2, :99]
    handle = dsd.save(tmp_path / "a", state, background=True)
    assert handle.wait() == dsd.save(tmp_path / "b", state)


def test_what_is_staged_lies_in_its_pages_as_in_its_file_and_is_written_past_the_page_cache(
    tmp_path, monkeypatch
):
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system has no O_DIRECT")
    done: list[int] = []
    write = DirectFile.write

    def noting(self: DirectFile, byte_offset: int, piece: memoryview) -> range:
        pages = write(self, byte_offset, piece)
        done.append(len(pages))
        return pages

    monkeypatch.setattr(sink, "takes_direct", lambda _: True)
    monkeypatch.setattr(DirectFile, "write", noting)
    state = {
        name: torch.rand((3 << 18) + more) for name, more in zip("abc", [0, 1, 7], strict=True)
    }
    both = {"model": state, "other": {name: one.clone() for name, one in state.items()}}
    both["other"]["small"] = torch.ones(3)
    handle = dsd.save(tmp_path / "a", both, background=True)
    root = handle.wait()
    assert len(done) == 6
    if any(done):  # or the file system does not take it so
        assert min(done) >= (3 << 20) - 2 * mmap.PAGESIZE
    assert dsdformat.verify(tmp_path / "a", digest=root).ok
    assert root == dsd.save(tmp_path / "b", both)


def test_the_thread_that_writes_gives_way_to_training(tmp_path, monkeypatch):
    if sys.platform != "linux":
        pytest.skip("elsewhere threads have no priority of their own")
    found: list[tuple[int, int]] = []
    fsync = os.fsync

    def noting(fd: int) -> None:
        thread = threading.get_native_id()
        found.append((thread, os.getpriority(os.PRIO_PROCESS, thread)))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for nice, expected in [(None, 5), (0, 0), (19, 19)]:
        found.clear()
        how = True if nice is None else dsd.Background(nice=nice)
        dsd.save(tmp_path / "a", {"a": torch.ones(3)}, background=how, overwrite=True).wait()
        others = {one for thread, one in found if thread != threading.get_native_id()}
        assert others == {min(19, mine + expected)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


@pytest.mark.parametrize("nice", [-1, 20, 1.0, True, None])
def test_a_priority_that_is_none_is_refused(nice):
    with pytest.raises(ArgumentError, match="expected 0 to 19"):
        dsd.Background(nice=nice)


def test_training_may_go_on_and_change_its_structure(tmp_path, gate):
    state, twin = training(), training()
    handle = dsd.save(tmp_path / "a", state, background=True)
    assert gate.reached.wait(WAIT_S)
    train(state)
    state["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 3.0})
    state["model"].more = nn.Linear(2, 2)
    state["history"].append(3)
    handle.wait_staged()
    gate.open()
    assert handle.wait() == dsd.save(tmp_path / "b", twin)


def test_a_state_in_any_wrapping_has_the_digest_of_a_plain_save(tmp_path):
    model = dsd.FlattenParams(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "own": dsd.PerRank({"a": torch.ones(2)})}
    options: dict[str, Any] = {
        "user": {"run": "7"},
        "recipes": {"model": dsd.Recipe("mlp", hidden=3)},
        "threads": 2,
    }
    handle = dsd.save(tmp_path / "a", state, background=True, **options)
    assert handle.wait() == dsd.save(tmp_path / "b", state, **options)


def test_host_tensors_that_are_overwritten_at_once_are_what_they_were(tmp_path):
    # pytorch#145408
    ones, shared = torch.ones(200_000), torch.ones(1000).share_memory_()
    state = {"a": ones, "nested": {"b": [shared], "c": np.float32(1)}}
    handle = dsd.save(tmp_path / "a", state, background=True)
    ones.fill_(7)
    shared.fill_(7)
    state["nested"]["c"] = np.float32(7)
    handle.wait()
    found = dsd.load(tmp_path / "a")
    assert_same(found["a"], torch.ones(200_000))
    assert_same(found["nested"], {"b": [torch.ones(1000)], "c": np.float32(1)})


def test_the_state_is_not_kept_alive_while_it_is_written(tmp_path, gate):
    class Kept(nn.Module):
        pass

    module = Kept()
    module.weight = nn.Parameter(torch.ones(10))
    alive = weakref.ref(module), weakref.ref(module.weight.untyped_storage())
    handle = dsd.save(tmp_path / "a", {"model": module}, background=True)
    assert gate.reached.wait(WAIT_S)
    del module
    gc.collect()
    assert alive[0]() is None
    assert not handle.done()
    gate.open()
    handle.wait()


# The call


def test_the_call_makes_no_files_and_all_of_them_are_few(tmp_path, monkeypatch, gate):
    # orbax#179
    made: list[tuple[str, bool]] = []
    kept = FileSink.__init__

    def noting(self: FileSink, path: Path, **options: bool) -> None:
        made.append((path.name, threading.current_thread() is threading.main_thread()))
        kept(self, path, **options)

    monkeypatch.setattr(FileSink, "__init__", noting)
    state = {"model": {f"w{number}": torch.ones(3) for number in range(400)}}
    handle = dsd.save(tmp_path / "a", state, background=True)
    assert not handle.done()
    gate.open()
    handle.wait()
    assert made == [("model.safetensors", False), ("manifest.dsd", False)]


@pytest.mark.parametrize(
    "save",
    [
        lambda path: dsd.save(path / "a", {"f": [print]}, background=True),
        lambda path: dsd.save(path / "a", {"m": torch.ones(2, device="meta")}, background=True),
        lambda path: dsd.save(path / "a", [1], background=True),
        lambda path: dsd.save(path / "there", {"a": 1}, background=True),
        lambda path: dsd.save(path / "plain", {"a": 1}, background=True, overwrite=True),
        lambda path: dsd.save(path / "a", {"a": torch.ones(1)}, background=True, codec="lzma"),
        lambda path: dsd.save(path / "a", {"a": 1}, background=True, user={"a": 1}),
        lambda path: dsd.save(path / "a", {"a": 1}, background=True, threads=0),
    ],
    ids=["value", "meta", "state", "exists", "no checkpoint", "codec", "user", "threads"],
)
def test_what_can_be_refused_is_refused_by_the_call(tmp_path, save):
    root = dsd.save(tmp_path / "there", {"a": 2})
    (tmp_path / "plain").write_text("mine")
    with pytest.raises(dsdformat.DsdError):
        save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["plain", "there"]
    assert dsdformat.open(tmp_path / "there").root == root
    assert dsd.save(tmp_path / "next", {"a": 2}, background=True).wait() == root


@pytest.mark.parametrize("limit", [timedelta(0), timedelta(seconds=-1), 30])
def test_a_limit_is_a_time_above_zero(limit):
    with pytest.raises(ArgumentError, match="limit"):
        dsd.Background(limit=limit)


def test_a_checkpoint_is_replaced_when_the_new_one_is_complete(tmp_path, gate):
    gate.open()
    first = dsd.save(tmp_path / "a", {"a": 1})
    held = Gate()
    os.fsync, kept = held.fsync, os.fsync
    try:
        handle = dsd.save(tmp_path / "a", {"a": torch.ones(2)}, background=True, overwrite=True)
        assert held.reached.wait(WAIT_S)
        assert dsdformat.open(tmp_path / "a").root == first
    finally:
        held.open()
        os.fsync = kept
    second = handle.wait()
    assert dsdformat.open(tmp_path / "a").root == second != first


# Handles


def test_a_handle_says_where_and_how_it_is(tmp_path, gate):
    handle = dsd.save(tmp_path / "a", {"a": torch.ones(2)}, background=True)
    assert handle.path == tmp_path / "a"
    assert not handle.done()
    assert repr(handle) == f"<SaveHandle of {tmp_path / 'a'}: going on>"
    with pytest.raises(TimeLimitError, match=r"has not ended in 0 s[^$]*it goes on") as caught:
        handle.wait(0)
    assert caught.value.code == "timed_out"
    assert isinstance(caught.value, TimeoutError)
    gate.open()
    assert handle.wait(WAIT_S) == handle.wait() == dsdformat.open(tmp_path / "a").root
    assert handle.done()
    assert repr(handle).endswith(": saved>")


def test_a_save_that_hangs_is_told_of_at_its_limit_and_holds_up_nothing_for_ever(tmp_path, gate):
    limit = dsd.Background(limit=timedelta(seconds=0.1))
    handle = dsd.save(tmp_path / "a", {"a": torch.ones(2)}, background=limit)
    with pytest.raises(TimeLimitError, match=r"0\.1 s that it may take"):
        handle.wait()
    with pytest.raises(TimeLimitError):
        dsd.save(tmp_path / "b", {"a": torch.ones(2)})
    gate.open()
    assert handle._ended.wait(WAIT_S)
    dsd.save(tmp_path / "b", {"a": torch.ones(2)})
    assert dsdformat.verify(tmp_path / "a").ok


def test_one_save_at_most_is_in_flight(tmp_path, monkeypatch, gate):
    first = dsd.save(tmp_path / "a", {"a": torch.ones(2)}, background=True)
    assert gate.reached.wait(WAIT_S)
    waits = background.SaveHandle._await

    def opening(self: Any, *args: Any) -> None:
        assert not first.done()
        gate.open()
        waits(self, *args)

    monkeypatch.setattr(background.SaveHandle, "_await", opening)
    second = dsd.save(tmp_path / "b", {"a": torch.zeros(2)}, background=True)
    assert first.done()
    monkeypatch.undo()
    assert first.wait() != second.wait()


def test_threads_that_save_at_once_take_turns(tmp_path):
    roots: dict[int, str] = {}

    def save(number: int) -> None:
        state = {"a": torch.full((1000,), number)}
        roots[number] = dsd.save(tmp_path / f"{number}", state, background=True).wait()

    threads = [threading.Thread(target=save, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(set(roots.values())) == 6
    for number in range(6):
        assert_same(dsd.load(tmp_path / f"{number}")["a"], torch.full((1000,), number))


@pytest.mark.parametrize("load", [dsd.load, lambda path: dsd.load(path, {"a": torch.zeros(2)})])
def test_loading_what_is_being_saved_waits_for_it(tmp_path, monkeypatch, gate, load):
    # torchtitan#930
    dsd.save(tmp_path / "a", {"a": torch.ones(2)}, background=True)
    assert gate.reached.wait(WAIT_S)
    waits = background.SaveHandle._await
    monkeypatch.setattr(
        background.SaveHandle, "_await", lambda self, *args: (gate.open(), waits(self, *args))
    )
    load(tmp_path / "." / "a")
    assert dsdformat.verify(tmp_path / "a").ok


def test_loading_something_else_does_not_wait(tmp_path, monkeypatch):
    dsd.save(tmp_path / "a", {"a": torch.ones(2)})
    gate = Gate()
    monkeypatch.setattr(os, "fsync", gate.fsync)
    handle = dsd.save(tmp_path / "b", {"a": torch.zeros(2)}, background=True)
    assert gate.reached.wait(WAIT_S)
    assert_same(dsd.load(tmp_path / "a")["a"], torch.ones(2))
    assert not handle.done()
    gate.open()
    handle.wait()


# Errors


def test_an_error_is_raised_by_wait_and_by_nothing_else(tmp_path, full_disk):
    handle = dsd.save(tmp_path / "a", {"a": torch.ones(2)}, background=True)
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            handle.wait()
        assert caught.value.errno == errno.ENOSPC
    assert repr(handle).endswith(": failed>")
    assert os.listdir(tmp_path) == []
    full_disk()
    dsd.save(tmp_path / "a", {"a": torch.ones(2)})


@pytest.mark.parametrize("later", [True, False])
def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save_once(tmp_path, full_disk, later):
    dsd.save(tmp_path / "a", {"a": torch.ones(2)}, background=True)._ended.wait(WAIT_S)
    full_disk()
    with pytest.raises(StorageError) as caught:
        dsd.save(tmp_path / "b", {"a": torch.ones(2)}, background=later)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.__notes__ == [
        f"This is what became of the background save to {tmp_path / 'a'}."
    ]
    assert os.listdir(tmp_path) == []
    dsd.save(tmp_path / "b", {"a": torch.ones(2)}, background=True).wait()


def test_an_error_is_raised_by_a_load_of_what_was_not_saved(tmp_path, full_disk):
    dsd.save(tmp_path / "a", {"a": torch.ones(2)}, background=True)
    with pytest.raises(StorageError, match="No space"):
        dsd.load(tmp_path / "a")
    with pytest.raises(dsdformat.NotACheckpointError):
        dsd.load(tmp_path / "a")


def test_a_checkpoint_that_another_made_meanwhile_is_kept(tmp_path, gate):
    handle = dsd.save(tmp_path / "a", {"a": torch.ones(2)}, background=True)
    assert gate.reached.wait(WAIT_S)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "manifest.dsd").write_bytes(b"of another")
    gate.open()
    with pytest.raises(StorageError) as caught:
        handle.wait()
    assert caught.value.code == "already_exists"
    assert os.listdir(tmp_path) == ["a"]


# What is left


def test_memory_is_kept_until_it_is_freed_and_nothing_else_is(tmp_path, full_disk):
    full_disk()
    dsd.free_staging()
    state = {"a": torch.ones(1 << 20), "b": [torch.ones(3)]}
    dsd.save(tmp_path / "0", state, background=True).wait()
    buffer = background._state.buffer
    assert buffer._memory is not None
    place, nbytes = buffer._memory.data_ptr(), buffer.nbytes
    gc.collect()  # files that others have left open
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        dsd.save(tmp_path / "0", state, background=True, overwrite=True)
    background.settle()
    gc.collect()
    assert (buffer._memory.data_ptr(), buffer.nbytes) == (place, nbytes) == (place, (4 << 20) + 12)
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() <= threads
    assert not [one for one in threading.enumerate() if one.name.startswith("dsdformat-save")]
    assert len([one for one in gc.get_objects() if type(one) is background.SaveHandle]) == 0
    dsd.free_staging()
    assert buffer.nbytes == 0
    dsd.save(tmp_path / "1", state, background=True).wait()


def huge_pages_at(address: int) -> bool:
    """Whether a mapping of this process has this address, and is to be in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span is not None:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="needs huge pages of Linux"
)
def test_much_memory_is_asked_for_in_huge_pages_and_given_back_when_it_is_freed():
    buffer = staging.HostBuffer()
    room = buffer.room(8 << 20)
    room[:] = bytes(range(256)) * (len(room) // 256)
    assert buffer._memory is not None
    place = buffer._memory.data_ptr()
    assert place % 4096 == 0
    assert huge_pages_at(place)
    buffer.free()
    assert room[255] == 255  # who has it keeps it
    del room
    assert not huge_pages_at(place)


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 62])
def test_a_copy_that_there_is_no_memory_for_is_an_error_that_says_how_much(nbytes):
    buffer = staging.HostBuffer()
    with pytest.raises(MemoryError, match=f"takes {nbytes} bytes"):
        buffer.room(nbytes)
    assert buffer.nbytes == 0
    assert len(buffer.room(10)) == 10


def test_memory_grows_by_a_quarter_at_least_and_never_shrinks_by_itself(tmp_path):
    dsd.free_staging()
    sizes = []
    for count in (1000, 1001, 10, 1200, 5000):
        state = {"a": torch.ones(64 * count, dtype=torch.uint8)}
        dsd.save(tmp_path / f"{count}", state, background=True).wait()
        sizes.append(background._state.buffer.nbytes // 64)
    assert sizes == [1000, 1250, 1250, 1250, 5000]


def test_an_error_keeps_no_part_of_the_buffer(tmp_path, full_disk):
    handle = dsd.save(tmp_path / "a", {"a": torch.ones(1 << 10)}, background=True)
    handle._ended.wait(WAIT_S)
    memory = weakref.ref(background._state.buffer._memory.untyped_storage())
    dsd.free_staging()
    gc.collect()
    assert memory() is None
    with pytest.raises(StorageError):
        handle.wait()


def test_many_small_tensors_need_few_files_at_once(tmp_path):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = {f"w{number}": torch.full((3,), number) for number in range(3000)}
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        root = dsd.save(tmp_path / "a", state, background=True).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert dsdformat.open(tmp_path / "a").root == root


# The end of the interpreter


def run(script: str, path: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that has saved in the background."""
    head = f"""
        import os, signal, stat, sys, threading
        import torch
        import dsdformat.torch as dsd
        from dsdformat.torch import background
        path = {str(path)!r}
        state = {{"a": torch.ones(1000), "b": {{"c": torch.zeros(1000)}}}}
        def fail(*args):
            raise OSError(28, "No space left on device")
    """
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(head) + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_interpreter_waits_for_what_is_in_flight(tmp_path):
    out = run(
        """
        import atexit
        going = threading.Event()
        kept = os.fsync
        def fsync(fd):
            if stat.S_ISREG(os.fstat(fd).st_mode):
                going.wait(30)
            kept(fd)
        os.fsync = fsync
        dsd.save(path, state, background=True)
        atexit.register(going.set)  # so all is written when the interpreter has begun to end
        """,
        tmp_path / "a",
    )
    assert (out.returncode, out.stdout, out.stderr) == (0, "", "")
    assert dsdformat.verify(tmp_path / "a").ok
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("status", [0, 3])
def test_an_error_that_nobody_asked_for_is_told_at_the_end_once(tmp_path, status):
    out = run(
        f"os.pwritev = fail; dsd.save(path, state, background=True); sys.exit({status})",
        tmp_path / "a",
    )
    assert out.returncode == status
    assert out.stderr == (
        f"dsdformat: the background save to {tmp_path / 'a'} failed: StorageError: "
        f"{next(iter(out.stderr.split('StorageError: ')[1:]))}"
    )
    assert "No space left on device" in out.stderr
    assert out.stderr.count("failed") == 1
    assert os.listdir(tmp_path) == []


def test_an_error_that_was_asked_for_is_not_told_again(tmp_path):
    out = run(
        """
        os.pwritev = fail
        handle = dsd.save(path, state, background=True)
        try:
            handle.wait()
        except OSError as error:
            print(error.errno)
        """,
        tmp_path / "a",
    )
    assert (out.returncode, out.stdout, out.stderr) == (0, "28\n", "")


def test_ctrl_c_at_the_end_leaves_nothing(tmp_path):
    out = run(
        """
        ending = threading.Event()
        waits = background.SaveHandle._await
        def await_(self, *args):
            ending.set()
            waits(self, *args)
        background.SaveHandle._await = await_
        cancel = background.SaveHandle._cancel
        cancelled = threading.Event()
        def cancel_(self):
            cancel(self)
            cancelled.set()
        background.SaveHandle._cancel = cancel_
        def fsync(fd):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return
            ending.wait(30)
            if not cancelled.is_set():
                os.kill(os.getpid(), signal.SIGINT)
            cancelled.wait(30)
        os.fsync = fsync
        dsd.save(path, state, background=True)
        """,
        tmp_path / "a",
    )
    assert out.returncode == 0
    assert out.stderr == (
        f"dsdformat: the background save to {tmp_path / 'a'} failed: ArgumentError: "
        "it was cancelled\n"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_that_is_forked_has_nothing_in_flight(tmp_path):
    out = run(
        """
        going = threading.Event()
        kept = os.fsync
        def fsync(fd):
            if stat.S_ISREG(os.fstat(fd).st_mode):
                going.wait(30)
            kept(fd)
        os.fsync = fsync
        handle = dsd.save(path, state, background=True)
        pid = os.fork()
        if pid == 0:
            os.fsync = kept
            try:
                handle.wait()
            except dsd.background.ArgumentError as error:
                print(error)
            print(dsd.save(path + "-child", state, background=True).wait() != "")
            sys.exit()
        os.waitpid(pid, 0)
        going.set()
        handle.wait()
        """,
        tmp_path / "a",
    )
    assert (out.returncode, out.stderr) == (0, "")
    assert out.stdout == "this save goes on in another process\nTrue\n"
    assert sorted(os.listdir(tmp_path)) == ["a", "a-child"]
    assert dsdformat.verify(tmp_path / "a").ok


def test_a_process_that_is_killed_leaves_what_the_next_save_removes(tmp_path):
    root = dsd.save(tmp_path / "a", {"old": 1})
    out = run(
        """
        from dsdformat.storage.target import FileSink
        FileSink.close = lambda sink: os.kill(os.getpid(), signal.SIGKILL)
        dsd.save(path, state, background=True, overwrite=True).wait()
        """,
        tmp_path / "a",
    )
    assert out.returncode == -signal.SIGKILL
    assert dsdformat.open(tmp_path / "a").root == root
    assert len(os.listdir(tmp_path)) == 2
    dsd.save(tmp_path / "a", {"new": 1}, overwrite=True, background=True).wait()
    assert os.listdir(tmp_path) == ["a"]


# On a CUDA device


class Copied:
    """Stands for the event behind the copies from a device."""

    def __init__(self, device: Any, copies: Any) -> None:
        for tensor, into in copies:
            staging._copy_tensor(tensor, into)
        self.device, self.shapes, self.waits = device, [tuple(one.shape) for one, _ in copies], 0

    def synchronize(self) -> None:
        self.waits += 1


def test_what_lies_on_devices_is_copied_apart_from_the_rest(tmp_path, monkeypatch):
    """Strided tensors of the host stand for those of a device."""
    events: list[Copied] = []

    def copy(device: Any, copies: Any) -> Copied:
        events.append(Copied(device, copies))
        return events[-1]

    monkeypatch.setattr(staging, "_is_on_device", lambda data: type(data) is Slabs)
    monkeypatch.setattr(staging, "_copy_from_device", copy)
    monkeypatch.setattr(staging, "_pin", lambda memory: False)
    state = {
        "host": torch.arange(9),
        "strided": torch.arange(35.0).view(5, 7).t(),
        "more": {"empty": torch.ones(0, 3), "expanded": torch.ones(1, 4).expand(3, 4)},
    }
    root = dsd.save(tmp_path / "plain", state)
    handle = dsd.save(tmp_path / "a", state, background=True)
    state["strided"].fill_(7)
    handle.wait_staged()
    assert handle.wait() == root
    assert [(str(one.device), one.shapes) for one in events] == [("cpu", [(7, 5), (3, 4)])]
    assert events[0].waits == 2
    dsd.free_staging()


@pytest.fixture
def cuda() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.mark.gpu
def test_tensors_on_a_device_may_be_overwritten_on_the_stream_of_the_call(tmp_path, cuda):
    state = {
        "large": torch.arange(64 << 20, dtype=torch.int32, device=cuda),
        "strided": torch.arange(1 << 20, device=cuda).view(1 << 10, -1).t(),
        "half": torch.ones(3, dtype=torch.bfloat16, device=cuda),
        "host": torch.arange(9),
    }
    root = dsd.save(tmp_path / "plain", state)
    handle = dsd.save(tmp_path / "a", state, background=True)
    for one in state.values():
        one.fill_(7)
    freed = state.pop("large")
    del freed
    other = torch.zeros(64 << 20, dtype=torch.int32, device=cuda)
    handle.wait_staged()
    assert handle.wait() == root
    assert not other.any()
    assert background._state.buffer._pinned
    dsd.free_staging()
    assert background._state.buffer.nbytes == 0


@pytest.mark.gpu
def test_pinned_memory_that_others_take_and_free_is_not_that_of_a_save(tmp_path, cuda):
    # Megatron-LM#2288
    state = {
        f"w{number}": torch.full((1 << 20,), float(number), device=cuda) for number in range(9)
    }
    root = dsd.save(tmp_path / "plain", state)
    for turn in range(5):
        handle = dsd.save(tmp_path / f"{turn}", state, background=True)
        for _ in range(50):
            torch.zeros(1 << 18).pin_memory().to(cuda, non_blocking=True)
        assert handle.wait() == root
