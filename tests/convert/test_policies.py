"""Checkpoints of trainers: what is on the closed list is converted, the rest told by its name.

The files have the shape that Lightning, and others, write; their classes are stood in for.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import sys
import types
from collections import OrderedDict, namedtuple
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from exactly import assert_exact, saved
from torch import nn

from dsdformat import ConvertError
from dsdformat.convert import ForeignTensor, open_foreign


class Stage(enum.Enum):
    FIT = "fit"


class Attributes(dict[str, Any]):
    """As Lightning's AttributeDict."""


Point = namedtuple("Point", "x y")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that exists while a file is written, and not when it is read."""
    module = types.ModuleType("lightning_like")
    for kind in (Stage, Attributes, Point):
        monkeypatch.setattr(kind, "__module__", module.__name__)
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def lightning(**extra: Any) -> dict[str, Any]:
    """What `Trainer.save_checkpoint` writes."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {
        "epoch": 1,
        "global_step": 10,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": OrderedDict(model.state_dict()),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 2}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {
                "best_model_score": torch.tensor(0.5),
                "best_k_models": {"/tmp/a.ckpt": torch.tensor(0.5)},
                "dirpath": "/tmp",
            }
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "sizes": (1, 2), "when": datetime.date(2026, 1, 1)},
        "MixedPrecision": {"scale": 65536.0, "_growth_tracker": 0},
        **extra,
    }


def test_a_checkpoint_of_lightning_is_read_exactly(tmp_path):
    assert_exact(saved(lightning(), tmp_path / "x.ckpt"), tmp_path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_classes_of_a_trainer_are_refused_by_place_and_name(tmp_path, module, protocol):
    state = lightning(
        hyper_parameters=Attributes(lr=0.1),
        stage=Stage.FIT,
        args=argparse.Namespace(lr=0.1),
        point=Point(1, torch.ones(2)),
        loss=nn.MSELoss(),
        callback=print,
    )
    path = saved(state, tmp_path / "x.ckpt", protocol=protocol)
    with pytest.raises(ConvertError) as caught:
        open_foreign(path)
    assert caught.value.names == (
        "lightning_like.Attributes",
        "lightning_like.Stage",
        "argparse.Namespace",
        "lightning_like.Point",
        "torch.nn.modules.loss.MSELoss",
        "builtins.print",
    )
    assert "$.args: argparse.Namespace" in str(caught.value)


def test_what_is_dropped_is_gone_from_dicts_and_none_in_lists(tmp_path, module):
    state = {
        "a": Stage.FIT,
        "b": [1, Stage.FIT, 2],
        "c": (Stage.FIT,),
        "d": {Stage.FIT: 1, "x": 2},
        "e": {"f": Stage.FIT},
        "s": {1, Stage.FIT},
        "w": torch.ones(2),
    }
    with open_foreign(saved(state, tmp_path / "x.pt"), unknown="drop") as foreign:
        assert type(foreign.tree.pop("w")) is ForeignTensor
        assert foreign.tree == {
            "b": [1, None, 2],
            "c": (None,),
            "d": {"x": 2},
            "e": {},
            "s": {1},
        }
        places = [finding.path for finding in foreign.findings]
    assert places == [("a",), ("b", 1), ("c", 0), ("d",), ("e", "f"), ("s",)]


def test_what_is_recorded_has_its_name_and_its_parts(tmp_path, module):
    state = {
        "args": argparse.Namespace(lr=0.1, data=PurePosixPath("/d"), w=torch.ones(2)),
        "attributes": Attributes(lr=0.1),
        "point": Point(1, 2),
        "stage": Stage.FIT,
    }
    path = saved(state, tmp_path / "x.pt")
    with open_foreign(path, unknown="record") as foreign:
        tree = foreign.tree
        assert bytes(foreign.read("args/state/w")) == torch.ones(2).numpy().tobytes()
    assert tree["args"]["name"] == "argparse.Namespace"
    assert tree["args"]["state"]["data"] == PurePosixPath("/d")
    assert tree["attributes"] == {
        "name": "lightning_like.Attributes",
        "pairs": [["lr", 0.1]],
    }
    assert tree["point"] == {"name": "lightning_like.Point", "args": (1, 2)}
    assert tree["stage"] == {"name": "lightning_like.Stage", "args": ("fit",)}


def test_a_whole_module_is_refused_and_recorded_with_its_parameters(tmp_path):
    path = saved(nn.Linear(2, 3), tmp_path / "x.pt")
    with pytest.raises(ConvertError) as caught:
        open_foreign(path)
    assert caught.value.names == ("torch.nn.modules.linear.Linear",)
    with open_foreign(path, unknown="record") as foreign:
        assert foreign.tensor("state/_parameters/weight").shape == (3, 2)


def test_values_that_the_format_does_not_have_are_told(tmp_path):
    state = {
        "bytearray": bytearray(b"x"),
        "range": range(3),
        "time": datetime.time(1),
        "zone": datetime.UTC,
        "str": np.str_("x"),
        "strings": np.array(["x"]),
        "big": np.dtype(">f4"),
        "moment": np.datetime64("2020-01-01"),
        "generator": np.random.default_rng(0),
    }
    path = saved(state, tmp_path / "x.pt", protocol=4)
    with open_foreign(path, unknown="drop") as foreign:
        assert foreign.tree == {}
        assert len(foreign.findings) == len(state)
    with open_foreign(path, unknown="record") as foreign:
        foreign.state()


def test_python_2_names_and_strings_are_read(tmp_path):
    from forge import EMPTY_DICT, SETITEM, call, name, pickled, torch_zip

    short = b"U\x03abc"
    value = call(name("__builtin__", "set"), [1, 2])
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip(pickled(EMPTY_DICT, short, value, SETITEM)))
    with open_foreign(path) as foreign:
        assert foreign.tree == {"abc": {1, 2}}
