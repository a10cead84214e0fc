"""The commands on a checkpoint of very many tensors."""

from __future__ import annotations

import numpy as np

import dsdformat.numpy

COUNT = 20_000


def test_very_many_tensors_are_compared_and_listed(dsd, tmp_path):
    zeros = np.zeros(1, np.uint8)
    state = {f"layers.{number}.w": zeros.copy() for number in range(COUNT)}
    dsdformat.numpy.save(tmp_path / "a", {"model": state})
    state["layers.777.w"] = np.ones(1, np.uint8)
    dsdformat.numpy.save(tmp_path / "b", {"model": state})
    document = dsd("diff", tmp_path / "a", tmp_path / "b", "--stats", "--json").json
    assert document["tensors"] == COUNT
    assert [change["name"] for change in document["changes"]] == ["model/layers.777.w"]
    assert document["nbytes_read"] == 2
    lines = dsd("tree", tmp_path / "a").out.splitlines()
    assert "and 19,960 more; --json lists all" in lines[-1]
