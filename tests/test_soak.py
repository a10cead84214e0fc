"""tools/soak.py, each of its runs for a moment; and `latest`, which one of them times."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soak

import dsdformat
import dsdformat.numpy
from dsdformat.errors import ChecksumError, FormatError, StorageError

SaveAll = Callable[..., Path]


def test_readers_beside_a_writer_see_no_torn_state(tmp_path):
    figures = soak.run_readers(tmp_path, seconds=2, readers=3)
    assert figures["faults"] == []
    assert figures["saves"] > 1
    assert figures["read"] >= 3


def test_a_torn_state_would_be_seen():
    state = soak.state_of(4)
    assert soak.number_of(state) == 4
    state["optimizer"]["moment"] = soak.state_of(9)["optimizer"]["moment"]
    with pytest.raises(AssertionError):
        soak.number_of(state)


def test_saves_and_loads_leak_neither_memory_nor_descriptors_nor_threads(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    figures = soak.run_leaks(tmp_path, rounds=60, warm=20)
    assert figures["faults"] == []
    assert (figures["descriptors"], figures["threads"]) == (0, 0)


def test_a_leak_would_be_seen(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(
        soak, "round_of", lambda path: lambda: kept.extend(bytes(99) for _ in "abcde")
    )
    (fault,) = soak.run_leaks(tmp_path, rounds=60, warm=1)["faults"]
    assert 150 <= int(fault.split()[0]) < 180
    assert "blocks more in the second half" in fault


def test_the_run_with_many_names_finds_the_checkpoint(tmp_path):
    assert soak.run_names(tmp_path, count=300)["faults"] == []


# latest


@pytest.fixture
def saved(tmp_path: Path) -> SaveAll:
    """`saved("step-1", …)` saves a checkpoint of each name in a folder, and gives the folder."""

    def saved(*names: str) -> Path:
        for name in names:
            dsdformat.numpy.save(tmp_path / name, {"w": np.ones(2)})
        return tmp_path

    return saved


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (["step-999", "step-1000"], "step-1000"),
        (["9", "10", "08"], "10"),
        (["epoch=1-step=900", "epoch=2-step=5"], "epoch=2-step=5"),
        (["step-7", "step-7-v2"], "step-7-v2"),
        (["a-3", "b-3"], "b-3"),
        (["final", "step-1"], "step-1"),
        (["step-" + "9" * 30, "step-1"], "step-" + "9" * 30),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_latest_checkpoint_is_the_one_of_the_highest_numbers(saved, names, newest):
    folder = saved(*names)
    assert dsdformat.latest(folder) == folder / newest
    assert dsdformat.latest(str(folder)) == folder / newest


def test_names_that_count_can_be_chosen(saved):
    folder = saved("step-5", "best-900")
    assert dsdformat.latest(folder, name="step-*") == folder / "step-5"
    assert dsdformat.latest(folder, name="other-*") is None


@pytest.mark.parametrize("names", [[], ["final"]])
def test_without_numbered_checkpoints_there_is_no_latest(saved, names):
    assert dsdformat.latest(saved(*names)) is None


def test_before_the_first_save_there_is_no_latest(tmp_path):
    assert dsdformat.latest(tmp_path / "missing") is None
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        dsdformat.latest(tmp_path / "file")


def test_what_is_no_complete_checkpoint_is_passed_over(saved):
    folder = saved("step-1", "step-2")
    (folder / "step-9").mkdir()
    (folder / "step-8").write_bytes(b"")
    (folder / "step-7").symlink_to("nothing")
    (folder / "step-6").mkdir()
    (folder / "step-6" / "manifest.dsd").write_bytes(b"")
    manifest = folder / "step-2" / "manifest.dsd"
    dsdformat.create(folder / "step-10")
    assert dsdformat.latest(folder) == folder / "step-2"
    manifest.write_bytes(manifest.read_bytes()[:-1])  # a copy that is under way
    assert dsdformat.latest(folder) == folder / "step-1"


def test_latest_opens_and_looks_at_as_much_among_many_names_as_among_few(saved, monkeypatch):
    """All of it that grows is one listing, in which the kind of each name is told."""
    folder = saved("step-1", "step-20", "step-100")

    def calls() -> Counter[str]:
        found = Counter[str]()
        with monkeypatch.context() as patch:
            for name in ("open", "stat", "lstat", "scandir", "listdir"):
                real = getattr(os, name)

                def counted(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
                    found[name] += 1
                    return real(*args, **options)

                patch.setattr(os, name, counted)
                if name in ("open", "stat"):
                    patch.setattr(os, "supports_dir_fd", {*os.supports_dir_fd, counted})
            assert dsdformat.latest(folder) == folder / "step-100"
        return found

    few = calls()
    for number in range(3000):
        (folder / f"log-{number}.txt").touch()
    for number in range(300):
        (folder / f".hidden-{number}").mkdir()
        (folder / f"notes-{number}-of-a-run").touch()
    assert calls() == few
    assert (few["scandir"], few["listdir"]) == (1, 0)
    assert few["open"] == 2  # its folder, and its manifest
    assert sum(few.values()) < 10


def test_a_latest_that_is_damaged_is_an_error_and_never_an_older_one(saved):
    folder = saved("step-1", "step-2")
    manifest = folder / "step-2" / "manifest.dsd"
    data = bytearray(manifest.read_bytes())
    data[data.index(b"body")] ^= 1
    manifest.write_bytes(data)
    with pytest.raises(ChecksumError):
        dsdformat.latest(folder)


def test_a_link_to_a_checkpoint_counts(saved):
    folder = saved("step-1")
    (folder / "step-3").symlink_to("step-1")
    assert dsdformat.latest(folder) == folder / "step-3"


def test_a_checkpoint_whose_replacement_was_cut_off_is_the_latest(saved):
    folder = saved("step-1", "step-2")
    (folder / "step-2").rename(folder / ".step-2.dsd-replaced")
    assert dsdformat.latest(folder) == folder / "step-2"
    assert dsdformat.verify(folder / "step-2").ok


# A reader that comes while a checkpoint takes its name


class Turned:
    """Replaces a checkpoint just before the n-th file is opened."""

    def __init__(self, path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.path, self.open = at, path, os.open
        monkeypatch.setattr(os, "open", self)
        monkeypatch.setattr(os, "supports_dir_fd", {*os.supports_dir_fd, self})

    def __call__(self, path: object, flags: int, *args: int, **options: int) -> int:
        self.left -= 1
        if self.left == 0:
            dsdformat.numpy.save(self.path, {"w": np.zeros(3)}, overwrite=True)
        return self.open(path, flags, *args, **options)


@pytest.mark.parametrize("at", [1, 2])
def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_opened_anew(saved, monkeypatch, at):
    path = saved("c") / "c"
    Turned(path, at, monkeypatch)
    with dsdformat.open(path) as checkpoint:
        assert checkpoint.tensor("w").shape == (3,)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_checkpoint_that_is_replaced_while_it_is_verified_is_verified_anew(
    saved, monkeypatch, at
):
    path = saved("c") / "c"
    Turned(path, at, monkeypatch)
    assert dsdformat.verify(path).ok


def test_a_checkpoint_that_is_replaced_while_it_is_read_says_so(saved, monkeypatch):
    path = saved("c") / "c"
    with dsdformat.open(path) as checkpoint:
        Turned(path, 1, monkeypatch)
        with pytest.raises(FormatError) as error:
            checkpoint.read("w")
    assert error.value.code == "missing_file"
    assert error.value.hint == "the checkpoint was replaced while it was read; open it again"
