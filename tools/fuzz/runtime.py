"""Checkpoints as the runtimes load them: into tensors and arrays, into a live state, and converted.

The values are changed most, since a runtime makes of them what the core only hands on: sparse and
nested tensors, states of generators and of optimizers, arrays, recipes.
"""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsdformat.errors import DsdError
from dsdformat.limits import MANIFEST_LABEL
from fuzz.folders import mutated_folder, packed, unpacked
from fuzz.foreign import scratch, scratch_parent
from fuzz.formats import Codes, Format
from fuzz.manifests import Cut, cut, joined
from fuzz.values import changed_value, emitted, parsed

__all__ = ["FORMATS"]

_CONVERTED_ONE_OF = 16
_OUTPUTS = ("x.pt", "x.safetensors", "x.npz", "x-dcp")


@functools.cache
def _live() -> dict[str, Any]:
    """A training that inputs are loaded into, again and again."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "step": 1,
    }


def _states() -> list[dict[str, Any]]:
    """What is saved: each kind of what a runtime puts together, in a small state of its own."""
    import numpy as np
    import torch

    import dsdformat.torch as dsd

    random.seed(8)  # so that the state that is saved is the same each time
    np.random.seed(8)
    square = torch.eye(3)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    arrays = {"a": np.arange(6.0).reshape(2, 3), "s": np.float32(1), "b": np.arange(3, dtype=">i2")}
    sparse = [square.to_sparse(), square.to_sparse_csr(), square.to_sparse_csc()]
    blocks = [torch.eye(4).to_sparse_bsr((2, 2)), torch.eye(4).to_sparse_bsc((2, 2))]
    lasting = torch.zeros(2, 2, 2, 2).to(memory_format=torch.channels_last)
    values = [torch.float16, torch.Size([1]), torch.device("cpu"), torch.strided, 1 + 2j, {1, 2}]
    return [
        _live(),
        {"rng": dsd.rng_state()},
        {"numpy": np.random.default_rng(0).bit_generator.state, **arrays},
        *({"t": one} for one in (*sparse, *blocks, jagged, nested)),
        {
            "conj": torch.ones(2, dtype=torch.complex64).conj(),
            "last": lasting,
            "tied": [square] * 2,
        },
        {"values": values, "f8": torch.zeros(2).to(torch.float8_e4m3fn)},
        {"f4": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
    ]


def load_seeds() -> list[bytes]:
    """Checkpoints of those states, raw, and some compressed."""
    import dsdformat.torch as dsd

    warnings.simplefilter("ignore")  # torch tells of prototypes and conversions
    found = []
    with tempfile.TemporaryDirectory(dir=scratch_parent()) as folder:
        for number, state in enumerate(_states()):
            place = Path(folder) / str(number)
            dsd.save(place, state, codec="zstd" if number % 5 == 3 else "raw", threads=1)
            found.append(packed({path.name: path.read_bytes() for path in place.iterdir()}))
    for data in found[:1]:
        for _ in range(2):  # imports are done before memory is limited
            with contextlib.suppress(DsdError):
                _convert(_placed(data), number=_)
            read_load(data)
    return found


def _placed(data: bytes) -> Path:
    place = scratch() / "load"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for label, content in list(unpacked(data).items())[:8]:
        if label and "/" not in label and label.isprintable() and label.isascii():
            (place / label[:100]).write_bytes(content)
    return place


def read_load(data: bytes) -> Codes:
    """A checkpoint, loaded by each runtime, then into a live state; some of these converted."""
    import dsdformat.numpy
    import dsdformat.torch as dsd

    place = _placed(data)
    with contextlib.suppress(DsdError):
        dsdformat.numpy.load(place, threads=1)
    state = dsd.load(place, threads=1)
    with contextlib.suppress(DsdError):
        dsd.set_rng_state(state.get("rng", state))
    with contextlib.suppress(DsdError):
        dsd.load(place, _live(), strict=False, threads=1)
    with contextlib.suppress(DsdError):
        dsd.load(place, mmap=True, threads=1)
    chosen = zlib.crc32(data) % _CONVERTED_ONE_OF
    if chosen < len(_OUTPUTS):
        _convert(place, chosen)
    return ()


def _convert(place: Path, number: int) -> None:
    from dsdformat.convert import convert

    target = scratch() / _OUTPUTS[number]
    to = "dcp" if _OUTPUTS[number].endswith("dcp") else None
    with contextlib.suppress(DsdError):
        convert(place, target, **({"to": to} if to else {}))  # type: ignore[arg-type]
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)


def mutated_load(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A checkpoint with values of its tree changed, or by chance anything of it."""
    files = unpacked(data)
    parts = cut(files.get(MANIFEST_LABEL, b"")) if rng.random() < 0.8 else None
    body = _body(parts)
    if parts is None or not isinstance(body, dict) or "tree" not in body:
        return mutated_folder(data, rng, others)
    donor = None
    if others and rng.random() < 0.3:
        other = _body(cut(unpacked(rng.choice(others)).get(MANIFEST_LABEL, b"")))
        donor = other.get("tree") if isinstance(other, dict) else None
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body["tree"] = changed_value(body["tree"], rng, donor)
    parts.sections[0].data = emitted(body)
    return packed({**files, MANIFEST_LABEL: joined(parts)})


def _body(parts: Cut | None) -> Any:
    return parsed(parts.sections[0].data) if parts is not None and parts.sections else None


FORMATS = (
    Format(
        "load",
        "checkpoints, as torch and numpy load them",
        read_load,
        load_seeds,
        mutated_load,
        1000,
    ),
)
