"""A checkpoint that is read while another takes its name (B113)."""

from __future__ import annotations

from pathlib import Path

import pytest

import dsdformat
from dsdformat import IncompleteError, TensorSource
from dsdformat.storage import renames

OLD, NEW = b"o" * 50_000, b"n" * 50_000


@pytest.fixture(params=["exchange", "no-exchange"])
def path(request, tmp_path, monkeypatch) -> Path:
    """An old checkpoint, on a system with and without an exchange of names."""
    if request.param == "no-exchange":
        monkeypatch.setattr(renames, "exchange", lambda *_: False)
    save(tmp_path / "c", OLD)
    return tmp_path / "c"


def save(path: Path, data: bytes, **options: object) -> None:
    with dsdformat.create(path, **options) as writer:
        for section in ("model", "optimizer"):
            source = TensorSource.of("uint8", (len(data),), data)
            writer.add({section: {"w": source}})


def test_a_file_that_was_read_before_is_read_on(path):
    with dsdformat.open(path) as checkpoint:
        checkpoint.read("model/w")
        save(path, NEW, overwrite=True)
        assert bytes(checkpoint.read("model/w")) == OLD


def test_a_file_that_was_not_read_before_never_gives_the_new_bytes(path):
    with dsdformat.open(path) as checkpoint:
        save(path, NEW, overwrite=True)
        try:
            data = bytes(checkpoint.read("optimizer/w"))
        except IncompleteError as error:
            data = OLD if error.code == "missing_file" else b""
        assert data == OLD


def test_a_map_stays_valid(path):
    with dsdformat.open(path) as checkpoint:
        view = checkpoint.tensor("model/w").map()
        save(path, NEW, overwrite=True)
        assert bytes(view) == OLD
    assert bytes(view) == OLD


def test_a_checkpoint_can_be_saved_from_itself_to_its_own_path(path):
    """Sources that read, when the writer gets there, from the checkpoint that is replaced."""
    with dsdformat.open(path) as checkpoint:
        with dsdformat.create(path, overwrite=True, user={"edited": "yes"}) as writer:
            for entry in checkpoint:
                lazy = TensorSource.of(entry.dtype, entry.shape, lambda e=entry: [e.read()])
                writer.add_value(entry.path, lazy)
        kept = {name: bytes(checkpoint.read(name)) for name in ("model/w", "optimizer/w")}
    assert kept == {"model/w": OLD, "optimizer/w": OLD}
    assert dsdformat.verify(path).ok
    with dsdformat.open(path) as checkpoint:
        assert checkpoint.user == {"edited": "yes"}
        assert bytes(checkpoint.read("optimizer/w")) == OLD


def test_a_reader_that_opens_after_sees_the_new_checkpoint(path):
    with dsdformat.open(path):
        save(path, NEW, overwrite=True)
        with dsdformat.open(path) as checkpoint:
            assert bytes(checkpoint.read("model/w")) == NEW
