"""Indexes that somebody forged: code in their place, names that lead elsewhere (B124, B126)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from samples import NO_DIST

import dsdformat
import dsdformat.torch as dsd
from dsdformat import DsdError
from dsdformat.convert import convert, open_any

VECTORS = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "invalid"
OUTSIDE = [
    "../x.safetensors",
    "/etc/passwd",
    "a/../../x.safetensors",
    "C:\\x",
    "x\0",
    "",
    ".",
    "..",
]


class MakesFolder:
    """Makes a folder when it is unpickled; a fixture looks for it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("canary",)


def ours(folder: Path) -> Path:
    dsd.save(folder, {"model": {"w": torch.ones(2)}})
    return folder / "manifest.dsd"


def of_dcp(folder: Path) -> Path:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, **NO_DIST)
    return folder / ".metadata"


def of_models(folder: Path) -> Path:
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "one.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": "one.safetensors"}}))
    return path


def of_torch(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"w": torch.ones(2)}, folder / "one.bin")
    path = folder / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": {"w": "one.bin"}}))
    return path


INDEXES: dict[str, Callable[[Path], Path]] = {
    "ours": ours,
    "dcp": of_dcp,
    "safetensors": of_models,
    "torch": of_torch,
}


def calls(folder: Path) -> dict[str, Callable[[], Any]]:
    """All that reads a folder."""
    return {
        "open": lambda: dsdformat.open(folder),
        "verify": lambda: dsdformat.verify(folder).raise_if_bad(),
        "load": lambda: dsd.load(folder),
        "load-into": lambda: dsd.load(folder, {"w": torch.zeros(2)}),
        "load-casually": lambda: dsd.load(folder, verify=False, unknown="drop"),
        "open-any": lambda: open_any(folder, unknown="drop"),
        "convert": lambda: convert(folder, folder.with_name("out"), to="dsd", unknown="drop"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("kind", INDEXES)
def test_a_pickle_in_the_place_of_an_index_is_refused_by_all_and_does_nothing(
    tmp_path, kind, protocol
):
    folder = tmp_path / "c"
    index = INDEXES[kind](folder)
    index.write_bytes(pickle.dumps(MakesFolder(), protocol))
    before = sorted(tmp_path.rglob("*"))
    for name, call in calls(folder).items():
        with pytest.raises(DsdError):
            call()
        assert sorted(tmp_path.rglob("*")) == before, name
    pickle.loads(index.read_bytes())  # so the payload works
    (tmp_path / "canary").rmdir()


_watchers: list[list[str]] = []


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _watchers and isinstance(args[0], (str, bytes)):
        _watchers[-1].append(os.fsdecode(args[0]))


@contextmanager
def opened_paths() -> Iterator[list[str]]:
    """Note each path that Python opens, in this process."""
    if not hasattr(_note, "added"):
        sys.addaudithook(_note)  # for good: there is no way back
        _note.added = True  # type: ignore[attr-defined]
    _watchers.append([])
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()


@pytest.mark.parametrize("file", OUTSIDE, ids=repr)
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_name_in_an_index_that_leads_elsewhere_is_refused_before_it_is_opened(
    tmp_path, kind, file
):
    folder = tmp_path / "c"
    index = INDEXES[kind](folder)
    (folder / "a").mkdir()
    outside = tmp_path / "x.safetensors"
    save_file({"w": torch.full((2,), 7.0)}, outside)
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    foreign = {name: one for name, one in calls(folder).items() if name not in ("open", "verify")}
    with opened_paths() as paths:
        for call in foreign.values():
            with pytest.raises(DsdError) as caught:
                call()
            assert caught.value.code == "foreign_path"
    assert paths
    there = {os.path.realpath(folder / path) for path in paths if "\0" not in path}
    assert not there & {str(outside), "/etc/passwd"}


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_name_that_an_index_has_twice_is_told(tmp_path, kind):
    """B130."""
    index = INDEXES[kind](tmp_path / "c")
    file = json.loads(index.read_text())["weight_map"]["w"]
    index.write_text(f'{{"weight_map": {{"w": "{file}", "w": "{file}"}}}}')
    with pytest.raises(DsdError, match="the key 'w' twice"):
        open_any(tmp_path / "c")


LABELS = [
    path.name
    for path in sorted(VECTORS.glob("label-*"))
    if not path.name.endswith(("clash", "manifest", "manifest-case"))
]


@pytest.mark.parametrize("vector", LABELS)
def test_a_label_that_leads_elsewhere_is_refused_before_any_data_file_is_opened(tmp_path, vector):
    folder = tmp_path / "c"
    shutil.copytree(VECTORS / vector / "checkpoint", folder)
    for name, call in calls(folder).items():
        with opened_paths() as paths, pytest.raises(DsdError):
            call()
        assert {os.path.basename(path) for path in paths} <= {"c", "manifest.dsd"}, name
