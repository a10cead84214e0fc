"""Checkpoints that were written once and are never written again load for ever (B116).

`tests/compat/1.0` was written by version 0.1.0 of this library: a training by one process, raw and
compressed, and by two ranks. Its bytes are pinned here; whoever changes a reader sees what breaks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsdformat
import dsdformat.torch as dsd
from tests.torch_runtime.exact import assert_same

COMPAT = Path(__file__).resolve().parents[1] / "compat"
FROZEN = {
    "1.0/raw": "95ddec195679a8ea549e4e89481b51d123f38dd6bae3b7756dd0f3054c042471",
    "1.0/compressed": "786c2767d8f1ac703ed23e38355c6dfbbc609b1dbae3455a70b4e4bf67331858",
    "1.0/two-ranks": "898fba62141932e6669da8660aabbf3d0a3315d03335af88c297fd41a85c44b6",
}
CONTENT = "39c0ab470c702d0b9eff20f0f0632d2053dc2810ef2f83056245db5a2edf47cf"


def model_of(start: float) -> nn.Sequential:
    """Numbers without a random one among them."""
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))
    with torch.no_grad():
        for number, one in enumerate([*model.parameters(), *model.buffers()]):
            one.copy_((torch.arange(one.numel()).view(one.shape) + number) * start)
    return model


def training_of(model: nn.Module, start: float) -> dict[str, Any]:
    """What a training has around a model."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.5,
        betas=(0.25, 0.75),
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        for parameter in model.parameters():
            kept = optimizer.state[parameter]
            kept["step"].fill_(start * 8)
            kept["exp_avg"].copy_(parameter * 2)
            kept["exp_avg_sq"].copy_(parameter * 4)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "half": torch.arange(7).to(torch.bfloat16) * start,
        "epoch": 3,
        "loss": 0.1,
        "history": [(1, 2.5), {"a": None, 4: b"x"}, {"s"}, 2**70],
    }


def test_the_frozen_checkpoints_are_all_there():
    assert {str(one.parent.relative_to(COMPAT)) for one in COMPAT.glob("*/*/manifest.dsd")} == set(
        FROZEN
    )


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_checkpoint_is_whole_and_what_it_was(name):
    assert dsdformat.verify(COMPAT / name, digest=FROZEN[name]).ok
    with dsdformat.open(COMPAT / name) as checkpoint:
        assert checkpoint.content_digest() == CONTENT


# What torch adds to options of optimizers and schedulers from version to version is left out below.


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_checkpoint_is_loaded_in_place(name):
    wanted = training_of(model_of(1.0), 1.0)
    state = training_of(model_of(0.5), 0.5)
    state["optimizer"].param_groups[0]["lr"] = 9.0
    state.update(dsd.load(COMPAT / name, {**state, "epoch": None, "loss": None, "history": None}))
    assert_same(state["model"].state_dict(), wanted["model"].state_dict())
    found, right = (one["optimizer"].state_dict() for one in (state, wanted))
    assert_same(found["state"], right["state"])
    for group, other in zip(found["param_groups"], right["param_groups"], strict=True):
        for key in ("lr", "betas", "eps", "weight_decay", "initial_lr", "params"):
            assert_same(group[key], other[key])
    assert state["scheduler"].last_epoch == 1
    for key in ("half", "epoch", "loss", "history"):
        assert_same(state[key], wanted[key])


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_checkpoint_is_what_is_saved_today(name, tmp_path):
    dsd.save(tmp_path / "today", training_of(model_of(1.0), 1.0))
    old, new = dsd.load(COMPAT / name), dsd.load(tmp_path / "today")
    for one in (old, new):
        del one["scheduler"], one["optimizer"]["param_groups"]
    assert_same(old, new)
