"""`dsd rename`: other names, for entries and what optimizers keep for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dsdformat
import dsdformat.numpy
import dsdformat.torch as dsd_torch


class Net(nn.Module):
    def __init__(self, encoder, head):
        super().__init__()
        self.add_module(encoder, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        self.add_module(head, nn.Linear(3, 2))


def trained(encoder, head, *, step):
    torch.manual_seed(0)
    model = Net(encoder, head)
    groups = [{"params": list(m.parameters())} for m in model.children()]
    optimizer = torch.optim.AdamW([*groups, {"params": [], "lr": 0.5}], lr=0.1)
    if step:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, optimizer


def test_a_renamed_checkpoint_is_what_the_renamed_model_would_have_saved(dsd, tmp_path):
    model, optimizer = trained("encoder", "head", step=True)
    dsd_torch.save(tmp_path / "old", {"model": model, "optimizer": optimizer})
    arguments = ["rename", tmp_path / "old", tmp_path / "new", "--map"]
    result = dsd(*arguments, "model/encoder.*=model/backbone.*", "--json")
    assert (result.code, result.err) == (0, "")
    assert {"old": "model/encoder.0.bias", "new": "model/backbone.0.bias"} in result.json["renamed"]
    model, optimizer = trained("backbone", "head", step=True)
    dsd_torch.save(tmp_path / "expected", {"model": model, "optimizer": optimizer})
    assert dsd("diff", tmp_path / "expected", tmp_path / "new", "--order").code == 0
    model, optimizer = trained("backbone", "head", step=False)
    dsd_torch.load(tmp_path / "new", {"model": model, "optimizer": optimizer})
    assert optimizer.state[model.backbone[0].weight]["step"] == 1


def test_an_optimizer_of_stages_with_groups_of_their_own_follows_too(dsd, tmp_path):
    """Ranks that have different groups leave a dict of them, not an ordered one."""
    model, optimizer = trained("encoder", "head", step=True)
    dsd_torch.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
    state = dsd_torch.load(tmp_path / "one")
    state["optimizer"]["param_groups"] = {
        key: group for key, group in state["optimizer"]["param_groups"].items() if group["params"]
    }
    dsd_torch.save(tmp_path / "old", state)
    rule = "model/encoder.*=model/backbone.*"
    assert dsd("rename", tmp_path / "old", tmp_path / "new", "--map", rule).code == 0
    found = dsd_torch.load(tmp_path / "new")["optimizer"]
    names = ["backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias"]
    assert found["param_groups"]["backbone.0.weight"]["params"] == names
    assert sorted(found["state"]) == sorted([*names, "head.weight", "head.bias"])


def test_names_that_move_to_several_sections_take_them_along(dsd, tmp_path):
    model, optimizer = trained("encoder", "head", step=True)
    dsd_torch.save(tmp_path / "old", {"model": model, "optimizer": optimizer})
    rules = ["--map", "model/encoder.*=body/*", "--map", "model/head.*=top/*"]
    assert dsd("rename", tmp_path / "old", tmp_path / "new", *rules).code == 0
    parts = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 2)
    groups = [{"params": list(part.parameters())} for part in parts]
    again = torch.optim.AdamW([*groups, {"params": [], "lr": 0.5}])
    dsd_torch.load(tmp_path / "new", {"body": parts[0], "top": parts[1], "optimizer": again})
    assert torch.equal(parts[1].weight, model.head.weight)
    old, new = optimizer.state[model.head.weight], again.state[parts[1].weight]
    assert torch.equal(new["exp_avg"], old["exp_avg"])


def test_an_optimizer_by_name_in_a_torch_file_follows_too(dsd, tmp_path):
    state = {
        "model": {"a.w": torch.ones(2), "b.w": torch.zeros(1)},
        "optim": {
            "state": {"a.w": {"exp_avg": torch.ones(2)}},
            "param_groups": [{"lr": 0.1, "params": ["a.w", "b.w"]}],
        },
    }
    torch.save(state, tmp_path / "m.pt")
    arguments = ["rename", tmp_path / "m.pt", tmp_path / "c", "--map", "model/a.w=model/z.w"]
    assert dsd(*arguments).code == 0
    loaded = dsdformat.numpy.load(tmp_path / "c")
    assert set(loaded["model"]) == {"z.w", "b.w"}
    assert set(loaded["optim"]["state"]) == {"z.w"}
    assert loaded["optim"]["param_groups"][0]["params"] == ["z.w", "b.w"]


def test_a_name_of_two_models_must_be_renamed_alike(dsd, tmp_path):
    model, optimizer = trained("encoder", "head", step=True)
    state = {"model": model, "ema": model.state_dict(), "optimizer": optimizer}
    dsd_torch.save(tmp_path / "old", state)
    one = ["rename", tmp_path / "old", tmp_path / "new", "--map", "model/head.*=model/top.*"]
    result = dsd(*one)
    assert (result.code, (tmp_path / "new").exists()) == (2, False)
    assert "head.weight" in result.err
    assert dsd(*one, "--map", "ema/head.*=ema/top.*").code == 0
    state = dsdformat.numpy.load(tmp_path / "new")["optimizer"]["state"]
    assert "top.weight" in state


def test_names_can_be_exchanged_and_containers_renamed(dsd, step10):
    rules = ["--map", "model/embed.weight=model/norm.weight"]
    rules += ["--map", "model/norm.weight=model/embed.weight", "--map", "scheduler=plan"]
    assert dsd("rename", step10, "new", *rules).code == 0
    old, new = dsdformat.numpy.load(step10), dsdformat.numpy.load("new")
    assert new["model"]["norm.weight"].tolist() == old["model"]["embed.weight"].tolist()
    assert new["model"]["norm.weight"] is new["model"]["head.weight"]
    assert new["plan"] == old["scheduler"]
    assert "scheduler" not in new


def test_rules_are_read_from_a_file(dsd, step10):
    Path("names.json").write_text(json.dumps({"step": "steps", "scheduler/name": "scheduler/kind"}))
    assert dsd("rename", step10, "new", "--map", "names.json").code == 0
    state = dsdformat.numpy.load("new")
    assert (state["steps"], state["scheduler"]) == (10, {"kind": "cosine", "last_epoch": 3})


BAD = {
    "not-there": (["modl/embed.weight=x"], 2, "did you mean model/embed.weight"),
    "taken": (["step=scheduler/name"], 2, "is the name of two entries"),
    "twice": (["step=a", "step=b"], 2, "renamed twice"),
    "no-name": (["step="], 2, "lacks a name"),
    "no-file": (["nothing.json"], 3, "nothing.json"),
    "kept-by-an-optimizer": (["model/x*=model/y"], 2, "nothing is called"),
}


@pytest.mark.parametrize(("rules", "code", "text"), BAD.values(), ids=BAD)
def test_rules_that_cannot_be_kept_are_refused(dsd, step10, rules, code, text):
    options = [word for rule in rules for word in ("--map", rule)]
    result = dsd("rename", step10, "new", *options)
    assert (result.code, Path("new").exists()) == (code, False)
    assert text in result.err


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}', "{", '{"step": "a", "step": "b"}', "\x00"])
def test_a_file_of_other_things_is_refused(dsd, step10, text):
    Path("names.json").write_text(text)
    assert dsd("rename", step10, "new", "--map", "names.json").code == 2


def test_a_hostile_name_can_be_typed_as_it_was_printed(dsd, tmp_path):
    dsdformat.numpy.save(tmp_path / "c", {"a\x1b[2J": np.ones(1)})
    arguments = ["rename", tmp_path / "c", tmp_path / "d", "--map", "a\\x1b[2J=plain"]
    assert dsd(*arguments).code == 0
    assert list(dsdformat.numpy.load(tmp_path / "d")) == ["plain"]
