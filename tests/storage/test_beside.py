"""A checkpoint put into a folder of other files: beside them, not over them (spec R-15.5)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dsdformat
from dsdformat import NotACheckpointError, StorageError, TensorSource
from dsdformat.storage import beside, renames
from dsdformat.storage.beside import BesideTarget
from dsdformat.writer import Writer

FILES = ["manifest.dsd", "model.safetensors", "optimizer.safetensors"]


def save(path: Path, word: str = "new", *, overwrite: bool = False) -> None:
    with Writer(BesideTarget(path, overwrite=overwrite), user={"word": word}, threads=1) as writer:
        for section in ("model", "optimizer"):
            writer.add({section: {"w": TensorSource.of("uint8", (3,), b"abc")}})


def word_of(path: Path) -> str:
    dsdformat.verify(path).raise_if_bad()
    with dsdformat.open(path) as checkpoint:
        return checkpoint.user["word"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a person's files, and of a folder."""
    made = tmp_path / "c"
    (made / "logs").mkdir(parents=True)
    (made / "model.pt").write_bytes(b"mine")
    return made


def test_other_files_stay_as_they_are(folder):
    inode = (folder / "model.pt").stat().st_ino
    save(folder)
    assert word_of(folder) == "new"
    assert names_in(folder) == ["logs", *FILES[:1], "model.pt", *FILES[1:]]
    assert (folder / "model.pt").stat().st_ino == inode
    assert names_in(folder.parent) == ["c"]


def test_where_there_is_nothing_else_it_is_a_save_like_any_other(tmp_path):
    save(tmp_path / "c", "old")
    with pytest.raises(StorageError) as error:
        save(tmp_path / "c")
    assert error.value.code == "already_exists"
    save(tmp_path / "c", overwrite=True)
    assert word_of(tmp_path / "c") == "new"
    assert names_in(tmp_path / "c") == FILES
    assert names_in(tmp_path) == ["c"]


def test_a_checkpoint_beside_other_files_is_not_replaced(folder):
    save(folder, "old")
    with pytest.raises(StorageError, match=r"holds logs, model\.pt, which is not written") as error:
        save(folder, overwrite=True)
    assert error.value.code == "not_replaceable"
    assert word_of(folder) == "old"
    assert (folder / "model.pt").read_bytes() == b"mine"


def test_a_file_of_the_name_of_a_data_file_is_not_written_over(folder):
    (folder / "optimizer.safetensors").write_bytes(b"mine too")
    with pytest.raises(StorageError, match=r"holds optimizer\.safetensors") as error:
        save(folder)
    assert error.value.code == "not_replaceable"
    assert (folder / "optimizer.safetensors").read_bytes() == b"mine too"
    assert names_in(folder) == ["logs", "model.pt", "optimizer.safetensors"]
    assert names_in(folder.parent) == ["c"]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", range(7))
def test_a_writer_that_is_killed_at_a_step_leaves_none_and_the_next_one_cleans_up(
    folder, monkeypatch, step
):
    calls = 0

    def counted(call):
        def step_of(*arguments):
            nonlocal calls
            if calls == step:
                raise Killed
            calls += 1
            return call(*arguments)

        return step_of

    with monkeypatch.context() as patch:
        patch.setattr(beside, "rename_new", counted(renames.rename_new))
        patch.setattr(beside, "sync_folder", counted(renames.sync_folder))
        patch.setattr(beside, "remove_folder", counted(beside.remove_folder))
        patch.setattr(Path, "unlink", lambda _: None)  # nobody cleans up
        patch.setattr(BesideTarget, "abort", BesideTarget._unlock)  # as the system does
        with pytest.raises(Killed):
            save(folder)
    (left,) = [name for name in names_in(folder.parent) if name != "c"]
    assert left.startswith(".c.dsd-partial-")
    if (folder / "manifest.dsd").exists():  # the last steps flush, and remove what is not needed
        assert step >= 5
        assert word_of(folder) == "new"
        return
    with pytest.raises(NotACheckpointError):
        dsdformat.open(folder)
    save(folder, "next")
    assert word_of(folder) == "next"
    assert names_in(folder.parent) == ["c"]


def test_a_step_that_fails_is_undone(folder, monkeypatch):
    def full(source: object, name: Path) -> None:
        if name.name == "manifest.dsd":
            raise OSError(28, os.strerror(28))
        renames.rename_new(source, name)

    monkeypatch.setattr(beside, "rename_new", full)
    with pytest.raises(StorageError, match="No space left"):
        save(folder)
    assert names_in(folder) == ["logs", "model.pt"]
    assert names_in(folder.parent) == ["c"]


def test_a_file_system_without_links_can_be_written(folder, monkeypatch):
    def no_links(*_: object) -> None:
        raise OSError(1, os.strerror(1))

    monkeypatch.setattr(os, "link", no_links)
    save(folder)
    assert word_of(folder) == "new"
    assert names_in(folder.parent) == ["c"]
