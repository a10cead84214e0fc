"""Trees made of trees, from Python: names, optimizers, digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import dsdformat
import dsdformat.numpy
import dsdformat.torch as dsd
from dsdformat import ArgumentError, EntryNotFoundError
from dsdformat.convert import (
    branch,
    content_digest,
    diff,
    extract,
    open_any,
    rename,
    rename_rules,
    write,
)


def test_numbers_of_parameters_keep_their_order_and_their_names_follow(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.named_parameters(), momentum=0.9, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "m.pt")
    with open_any(tmp_path / "m.pt") as opened:
        rules = rename_rules(opened.tree, {"model/1.*": "model/head.*"})
        tree = rename(opened.tree, rules)
        (group,) = tree["optim"]["param_groups"]
        assert group["params"] == [0, 1, 2, 3]
        assert group["param_names"] == ["0.weight", "0.bias", "head.weight", "head.bias"]
        assert list(tree["optim"]["state"]) == [0, 1, 2, 3]


def test_what_is_left_out_goes_with_what_the_optimizer_keeps_for_it(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dsd.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    with open_any(tmp_path / "a") as opened:
        tree = rename(opened.tree, lambda name: None if name.startswith("model/1.") else name)
        write(tree, tmp_path / "b", like=opened)
    state = dsd.load(tmp_path / "b")
    assert set(state["model"]) == set(state["optimizer"]["state"]) == {"0.weight", "0.bias"}
    assert state["optimizer"]["param_groups"]["0.weight"]["params"] == ["0.weight", "0.bias"]


def test_an_empty_group_and_other_state_follow_the_first_parameter(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": [], "lr": 0.5}])
    dsd.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    with open_any(tmp_path / "a") as opened:
        tree = rename(opened.tree, {"model/weight": "model/w"})
        assert list(tree["optimizer"]["param_groups"]) == ["w", ("w", 1)]


def test_names_that_meet_are_refused(tmp_path):
    dsdformat.numpy.save(tmp_path / "a", {"x": np.ones(1), "y": np.ones(2)})
    with open_any(tmp_path / "a") as opened:
        with pytest.raises(ArgumentError, match="'y' is the name of two entries"):
            rename(opened.tree, {"x": "y"})
        with pytest.raises(EntryNotFoundError, match="called 'z'"):
            rename(opened.tree, {"z": "y"})
        with pytest.raises(EntryNotFoundError):
            branch(opened.tree, "x/y")


def test_a_file_that_is_one_tensor_has_the_name_value(tmp_path):
    torch.save(torch.arange(3), tmp_path / "t.pt")
    with open_any(tmp_path / "t.pt") as opened:
        assert list(extract(opened.tree, "value")) == ["value"]
        write(opened.tree, tmp_path / "c")
        assert diff(opened, tmp_path / "c").equal
        with dsdformat.open(tmp_path / "c") as checkpoint:
            assert content_digest(opened.tree) == checkpoint.content_digest()


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes+zstd"])
def test_the_content_digest_is_that_of_the_reader(tmp_path, codec):
    state = {
        "w": np.random.default_rng(0).standard_normal((3, 700_001)),
        "empty": np.zeros((0, 2)),
        "values": [1, (2.5, None), {"x": np.float32(1)}],
    }
    dsdformat.numpy.save(tmp_path / "a", state, codec=codec)
    np.savez(tmp_path / "b.npz", w=state["w"])
    with open_any(tmp_path / "a") as opened, open_any(tmp_path / "b.npz") as other:
        assert opened.checkpoint is not None
        assert content_digest(opened.tree) == opened.checkpoint.content_digest()
        done = []
        digest = content_digest(other.tree, lambda *numbers: done.append(numbers))
        assert content_digest({"w": opened.tree["w"]}) == digest
    nbytes = 8 * 3 * 700_001
    assert done[-1] == (nbytes, nbytes)
    assert len(done) == 5  # leaves of 4 MiB
