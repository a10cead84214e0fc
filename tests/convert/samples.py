"""States that trainers have, values of every type, and checkpoints of every kind."""

from __future__ import annotations

import datetime
import inspect
import pathlib
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import dsdformat.torch as dsd
from dsdformat.convert import Kind
from tests.convert.exactly import saved


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": [*model[1:].parameters()], "lr": 0.5}],
        amsgrad=True,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "epoch": 3,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
    }


VALUES = {
    "ordered": OrderedDict(b=1, a=OrderedDict()),
    "counter": Counter("aab"),
    "default": defaultdict(list, {1: [2]}),
    "deques": [deque([1, 2], 5), deque([1]), deque()],
    "sets": [{1, "a", (1, 2)}, frozenset([1]), set()],
    "numbers": [1 + 2j, 2**100, -(2**70), 2**31, -1, 255, 256, 1e300, float("inf"), -0.0, True],
    "bytes": [b"\x00\xff", b"", b"x" * 300],
    "strings": ["é\U0001f600", "", "x" * 300, "a\nb\\u0041"],
    "nothing": None,
    "tuples": (1, (2, ()), [], {}),
    "times": [
        datetime.timedelta(1, 2, 3),
        datetime.datetime(2020, 1, 2, 3, 4, 5, 6, fold=1),
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))),
        datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
        datetime.date(2020, 1, 1),
    ],
    "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("a/../b"), pathlib.Path()],
    "windows": [pathlib.PureWindowsPath("c:\\x")],
    "constants": [torch.float8_e5m2, torch.device("cuda", 1), torch.sparse_coo, torch.int4],
    "sizes": [torch.Size([1, 2]), torch.Size([])],
    "keys": {(1, "a"): 1, None: 2, 1.5: 3, True: 4, b"x": 5, -7: 6, frozenset([1]): 7},
}

# What torch 2.6 does not have yet.
NO_DIST = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
FORMS: Any = getattr(filesystem, "SerializationFormat", None)
needs_forms = pytest.mark.skipif(FORMS is None, reason="this torch writes DCP in one form only")


def written(state: Any, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DefaultSavePlanner(flatten_state_dict=options.pop("flatten", True))
        writer = FileSystemWriter(folder, sync_files=False, **options)
        dcp.save(state, storage_writer=writer, planner=planner, **NO_DIST)
    return folder


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    return folder


def dcp_folder(folder: Path) -> Path:
    return written({"w": torch.ones(2)}, folder)


def ours(folder: Path) -> Path:
    dsd.save(folder, {"w": torch.ones(2)})
    return folder


def npz(path: Path) -> Path:
    with path.open("wb") as file:
        np.savez(file, w=np.ones(2, np.float32))
    return path


def safetensors(path: Path) -> Path:
    save_file({"w": torch.ones(2)}, path)
    return path


KINDS: dict[Kind, Callable[[Path], Path]] = {
    Kind.TORCH_ZIP: lambda path: saved({"w": torch.ones(2)}, path),
    Kind.TORCH_STREAM: lambda path: saved({"w": torch.ones(2)}, path, zipped=False),
    Kind.DCP: dcp_folder,
    Kind.SAFETENSORS: safetensors,
    Kind.SAFETENSORS_FOLDER: model_folder,
    Kind.NPZ: npz,
    Kind.DSD: ours,
}
