"""`dsd merge`: several checkpoints as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dsdformat
import dsdformat.numpy


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save(name, state, **options):
    dsdformat.numpy.save(name, state, **options)


def test_dicts_are_united_and_ties_stay_within_each(dsd):
    one, two = np.ones(2, np.float32), np.zeros(3, np.float32)
    save("a", {"model": {"x": one, "y": one}, "step": 3})
    save("b", {"model": {"z": two}, "extra": {"w": two}, "step": 3})
    np.savez("c.npz", more=np.arange(3))
    assert dsd("merge", "a", "b", "c.npz", "all").code == 0
    state = dsdformat.numpy.load("all")
    assert (set(state), state["step"]) == ({"model", "step", "extra", "more"}, 3)
    assert state["model"]["x"] is state["model"]["y"]
    assert state["model"]["z"] is state["extra"]["w"]
    assert state["model"]["x"].tolist() == [1, 1]
    assert state["model"]["z"].tolist() == [0, 0, 0]


CONFLICTS = {
    "tensor": ({"m": {"x": np.ones(2)}}, {"m": {"x": np.ones(2)}}, "m/x"),
    "value": ({"step": 1}, {"step": 2}, "step"),
    "type": ({"step": 1}, {"step": 1.0}, "step"),
    "list": ({"l": [1]}, {"l": [2]}, "l"),
    "dict-and-tensor": ({"m": {"x": np.ones(1)}}, {"m": np.ones(1)}, "m"),
}


@pytest.mark.parametrize(("a", "b", "name"), CONFLICTS.values(), ids=CONFLICTS)
def test_what_both_have_is_refused_by_name(dsd, a, b, name):
    save("a", a)
    save("b", b)
    result = dsd("merge", "a", "b", "all")
    assert (result.code, Path("all").exists()) == (2, False)
    assert result.err.startswith(f"error[state_conflict]: several have {name}\n")


def test_many_conflicts_are_cut_short_and_counted(dsd):
    save("a", {f"x{n:03}": n for n in range(100)})
    save("b", {f"x{n:03}": -n for n in range(1, 100)})
    assert "x010 and 89 more\n" in dsd("merge", "a", "b", "all").err


def test_user_metadata_is_united_or_refused_by_key(dsd):
    save("a", {"x": 1}, user={"run": "1", "host": "h"})
    save("b", {"y": 1}, user={"run": "2", "host": "h", "more": "m"})
    result = dsd("merge", "a", "b", "all")
    assert (result.code, "differs in run\n" in result.err) == (2, True)
    assert dsd("merge", "a", "b", "all", "--no-user").code == 0
    assert dsdformat.open("all").user == {}
    save("c", {"z": 1}, user={"other": "o"})
    assert dsd("merge", "b", "c", "both").code == 0
    assert dsdformat.open("both").user == {"run": "2", "host": "h", "more": "m", "other": "o"}


def test_one_checkpoint_is_nothing_to_merge(dsd):
    assert dsd("merge", "a", "all").code == 2
    assert dsd("merge", "a").code == 2
