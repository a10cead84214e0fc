"""`dsd extract`: a part of a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

import dsdformat
import dsdformat.numpy


def test_a_part_has_what_matches_under_its_own_names(dsd, step10):
    assert dsd("extract", step10, "new", "--select", "model/*.weight", "--select", "step").code == 0
    old, new = dsdformat.numpy.load(step10), dsdformat.numpy.load("new")
    assert (set(new), new["step"]) == ({"model", "step"}, 10)
    assert new["model"]["head.weight"] is new["model"]["embed.weight"]
    assert new["model"]["norm.weight"].tobytes() == old["model"]["norm.weight"].tobytes()


def test_a_list_is_taken_whole(dsd, step10):
    groups = dsdformat.numpy.load(step10)["optimizer"]["param_groups"]
    assert dsd("extract", step10, "new", "--select", "*/lr").code == 0
    assert dsdformat.numpy.load("new") == {"optimizer": {"param_groups": groups}}


def test_a_glob_that_matches_nothing_ends_with_2_and_a_suggestion(dsd, step10):
    result = dsd("extract", step10, "new", "--select", "model", "--select", "modl/embed.weight")
    assert (result.code, Path("new").exists()) == (2, False)
    assert "did you mean model/embed.weight" in result.err
    assert dsd("extract", step10, "new").code == 2


def test_a_part_of_a_torch_file_is_a_checkpoint_of_ours(dsd, tmp_path):
    state = {"model": OrderedDict(w=torch.arange(6.0).reshape(2, 3).t()), "epoch": 3}
    torch.save(state, tmp_path / "m.pt")
    assert dsd("extract", tmp_path / "m.pt", tmp_path / "c", "--select", "model").code == 0
    loaded = dsdformat.numpy.load(tmp_path / "c")
    assert loaded["model"]["w"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert list(loaded) == ["model"]


def test_a_name_can_be_typed_as_it_was_printed(dsd, tmp_path):
    dsdformat.numpy.save(tmp_path / "c", {"a\x1b[2J": np.ones(1), "b": np.ones(2)})
    assert dsd("extract", tmp_path / "c", tmp_path / "d", "--select", "a\\x1b[2J").code == 0
    assert list(dsdformat.numpy.load(tmp_path / "d")) == ["a\x1b[2J"]
