"""Files that other tools wrote, which are not here to write them again.

`tools/make_foreign.py` made them. What torch, safetensors and transformers write is written by the
tests of each kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsdformat.torch as dsd
from dsdformat.convert import Kind, convert, open_foreign
from tests.torch_runtime.exact import assert_same

FOREIGN = Path(__file__).resolve().parents[1] / "foreign"
LIGHTNING = FOREIGN / "lightning-2.6.6.ckpt"
PARAMETERS = ["net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias", "net.2.weight"]
PARAMETERS += ["net.2.bias"]


@pytest.fixture
def wanted() -> dict[str, Any]:
    """What the trainer saved, as torch reads it."""
    loaded: dict[str, Any] = torch.load(LIGHTNING, weights_only=True)
    return loaded


def test_all_that_a_trainer_of_lightning_saved_is_read_as_it_is(wanted):
    with open_foreign(LIGHTNING) as opened:
        assert opened.kind is Kind.TORCH_ZIP
        assert opened.findings == ()
        assert opened.tree["pytorch-lightning_version"] == "2.6.6"
        for name in ("loops", "lr_schedulers", "hyper_parameters", "epoch", "global_step"):
            assert_same(opened.tree[name], wanted[name])


def test_a_checkpoint_of_lightning_comes_back_with_its_optimizer(wanted, tmp_path):
    assert convert(LIGHTNING, tmp_path / "ours", to="dsd").findings == ()
    (optimizer,) = dsd.load(tmp_path / "ours")["optimizer_states"]
    assert set(optimizer["state"]) == set(PARAMETERS)
    assert optimizer["param_groups"]["net.0.weight"]["lr"] == 0.45225424859373686
    convert(tmp_path / "ours", tmp_path / "again.ckpt")
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    for group in again["optimizer_states"][0]["param_groups"]:
        del group["param_names"]
    assert_same(again, wanted)


def test_a_module_and_its_optimizer_go_on_from_a_checkpoint_of_lightning(wanted):
    model = nn.ModuleDict(
        {"net": nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))}
    )
    vectors = [one for one in model.parameters() if one.dim() < 2]
    matrices = [one for one in model.parameters() if one.dim() > 1]
    groups = [{"params": vectors, "lr": 1.0}, {"params": matrices}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    dsd.load(
        LIGHTNING,
        {"state_dict": model, "optimizer_states": [optimizer]},
        select=["state_dict", "optimizer_states"],
    )
    assert_same(dict(model.state_dict()), dict(wanted["state_dict"]))
    assert_same(optimizer.state_dict(), wanted["optimizer_states"][0])
