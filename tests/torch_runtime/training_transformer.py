"""Train a small transformer on bytes, with all that has state in a real run.

Dropout, a shuffled order of the data, AdamW, two schedules in sequence, a gradient scaler, and an
exponential moving average of the weights, whose embedding is tied to the head as the model's own.
Run by test_training_runs.py; `training_crashes.Run` tells the options.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_crashes import Run, read_text

import dsdformat.torch as dsd

CONTEXT, BATCH = 32, 8


class Transformer(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) / 50)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(text) + self.positions, mask=self.mask)
        scores: Tensor = self.head(hidden)
        return scores


class Batches:
    """Windows of a text, shuffled anew in each epoch; where it stands is its state."""

    def __init__(self, text: Tensor, seed: int) -> None:
        self._text = text
        self._random = np.random.default_rng(seed)
        self._order = np.empty(0, np.int64)
        self._position = 0

    def next(self) -> Tensor:
        if self._position + BATCH > len(self._order):
            self._order = self._random.permutation(len(self._text) // CONTEXT - 1) * CONTEXT
            self._position = 0
        starts = self._order[self._position : self._position + BATCH]
        self._position += BATCH
        return torch.stack([self._text[start : start + CONTEXT + 1] for start in starts])

    def state_dict(self) -> dict[str, Any]:
        return {
            "random": self._random.bit_generator.state,
            "order": self._order,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]
        self._order = state["order"]
        self._position = state["position"]


def main() -> None:
    run = Run()
    run.settle()
    text = torch.tensor(list(read_text().encode()[:2000]))

    model = Transformer()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=5)
    scheduler = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, 40)], milestones=[5])
    scaler = torch.amp.GradScaler("cpu", init_scale=256, growth_interval=4)
    batches = Batches(text, run.seed)
    state = {
        "model": model,
        "average": average,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "batches": batches,
    }

    step = 0
    if run.path.exists():
        rest = dsd.load(run.path, {**state, "step": 0, "rng": None})
        step = rest["step"]
        if run.leave_out != "rng":
            dsd.set_rng_state(rest["rng"])

    while step < run.steps:
        batch = batches.next()
        scores = model(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        step += 1
        run.log(step, loss.item())
        if run.saves_at(step):
            now = {**state, "step": step, "rng": dsd.rng_state()}
            dsd.save(run.path, now, overwrite=True)
        run.may_die(step)

    print(dsd.save(run.path, {**state, "step": step, "rng": dsd.rng_state()}, overwrite=True))


if __name__ == "__main__":
    main()
