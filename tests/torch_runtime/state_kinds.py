"""States of every kind that `save` takes: a training, layouts, ties, dtypes, composites, arrays."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """Tied weights, buffers of both kinds, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.calls = [0]

    def forward(self, x: Any) -> Any:
        self.calls[0] += 1
        return self.head(self.norm(self.embed(x)))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "tensor": self.table[1:]}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(
        [{"params": [model.embed.weight], "lr": 0.1}, {"params": list(model.norm.parameters())}]
    )
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        "history": [1.5, {"best": 3}],
        "rng": {"torch": torch.get_rng_state(), "numpy": None},
        "step": 1,
    }
    train(state)
    return state


def train(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.arange(7)).square().sum().backward()
    state["optimizer"].step()
    state["scheduler"].step()


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "a training": training,
    "tied tensors": lambda: dict.fromkeys("ab", torch.ones(3)),
    "tied views": lambda: {"a": (w := torch.arange(9.0))[2:5], "b": w[2:5], "c": w[3:5]},
    "a parameter and its data": lambda: {"a": (w := nn.Parameter(torch.ones(3))), "b": w.data},
    "layouts": lambda: {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).expand(4, 3),
        "every second": torch.arange(10.0)[::2],
        "empty": torch.zeros(3, 0, 2),
        "scalar": torch.tensor(2),
    },
    "tied, channels last": lambda: dict.fromkeys(
        "ab", torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "tied, expanded": lambda: dict.fromkeys("ab", torch.arange(3.0).expand(4, 3)),
    "conj and neg": lambda: {
        "base": (w := torch.tensor([1 + 2j, 3 - 4j])),
        "conj": w.conj(),
        "again": w.conj(),
        "imag": w.conj().imag,
    },
    "dtypes": lambda: {
        name: torch.arange(4, dtype=torch.uint8).view(getattr(torch, name))
        for name in ("bool", "uint4", "float8_e4m3fn", "bfloat16", "complex32")
    },
    "sparse": lambda: {"coo": torch.eye(3).to_sparse(), "list": [torch.eye(2).to_sparse()]},
    "tied sparse": lambda: dict.fromkeys("ab", torch.eye(3).to_sparse()),
    "arrays": lambda: {
        "plain": np.arange(6.0),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big-endian": np.arange(3, dtype=">i4"),
        "no dims": np.array(1.5),
    },
    "a tied array": lambda: dict.fromkeys("ab", np.arange(6.0)),
    "values": lambda: {
        "list": [1, (2, {"x": None})],
        "ordered": OrderedDict(z=1, a=2),
        "others": [defaultdict(None, a=1), deque([1], maxlen=3), Counter("aab"), {1, 2}],
        "torch": [torch.float16, torch.Size([1, 2]), torch.device("cpu")],
        "numpy": [np.float32(1.5), np.int8(-1)],
    },
    "in a deque": lambda: {"d": deque([torch.ones(2), [torch.zeros(1)]])},
}
TIED_ARRAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "two equal views": lambda: {"a": (w := np.arange(12.0))[2:5], "b": w[2:5]},
    "a tensor over an array": lambda: {"a": (w := np.arange(3.0)), "b": torch.from_numpy(w)},
    "an array over a tensor": lambda: {"a": (w := torch.arange(3.0)), "b": w.numpy()},
    "two byte orders": lambda: {"a": (w := np.arange(3, dtype="<f4")), "b": w.view(">f4")},
}
STATES |= TIED_ARRAYS
