"""Optimizers of torch with all that can be switched in them, and small models to train with them.

Each case trains with gradients that depend on the weights, so that runs that differ once go on to
differ. The gradients of a step depend on the number of the step alone beside that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

__all__ = [
    "CASES",
    "Case",
    "faulty",
    "listed",
    "mlp",
    "noise",
    "optimizer_classes",
    "state_of",
    "train",
]


def faulty(reason: str) -> pytest.MarkDecorator:
    """Mark a test of what must hold, and does not yet."""
    return pytest.mark.xfail(strict=True, reason=reason)


def listed(cases: Mapping[str, Any], faults: Mapping[str, str] | None = None) -> list[Any]:
    """Turn named cases into parameters of a test; those of which a fault is told must fail."""
    faults = faults or {}
    assert faults.keys() <= cases.keys()
    marks = {name: [faulty(reason)] for name, reason in faults.items()}
    return [pytest.param(v, id=name, marks=marks.get(name, [])) for name, v in cases.items()]


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that leave the global generator alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(module: nn.Module, seed: int) -> nn.Module:
    """Give a module parameters that depend on the seed alone."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            kind = torch.complex64 if parameter.is_complex() else torch.float32
            parameter.copy_(0.3 * noise(1000 * seed + index, *parameter.shape, dtype=kind))
    return module


def mlp(seed: int = 0, *, sizes: Iterable[int] = (4, 6, 3), bias: bool = True) -> nn.Sequential:
    """Linear layers with GELU between them; names `0.weight`, `0.bias`, `2.weight`, …"""
    sizes = list(sizes)
    layers: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after, bias=bias), nn.GELU()]
    return seeded(nn.Sequential(*layers[:-1]), seed)  # type: ignore[return-value]


def _embedding(seed: int) -> nn.Module:
    return seeded(nn.Embedding(7, 3, sparse=True), seed)


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    if isinstance(model, nn.Embedding):
        rows = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(step))
        return (model(rows) - noise(step, 5, 3)).square().sum()
    first = next(model.parameters())
    inputs = noise(step, 5, 4, dtype=torch.float64).to(first.dtype)
    outputs = model(inputs)
    return (outputs - 1).abs().square().float().sum()


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Train as users do."""
    for step in steps:
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()


def _train_by_closure(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def _train_by_hand(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Set gradients, since `differentiable` cannot change leaves that require them."""
    for step in steps:
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(False)
            parameter.grad = 0.1 * parameter + noise(100 * step + index, *parameter.shape)
        optimizer.step()


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        kind: Class of the optimizer.
        options: Its options; functions are called, so that no tensor is shared.
        model: Makes a model from a seed.
        train: Trains model and optimizer for some steps.
    """

    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[int], nn.Module] = mlp
    train: Callable[[nn.Module, Optimizer, Iterable[int]], None] = train

    def make(self, seed: int = 0) -> tuple[nn.Module, Optimizer]:
        """Make model and optimizer, alike but for the values of the parameters."""
        model = self.model(seed)
        options = {key: v() if callable(v) else v for key, v in self.options.items()}
        return model, self.kind(model.parameters(), **options)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Everything that must be equal: parameters by name, the optimizer's own state dict."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {"model": parameters, "optimizer": optimizer.state_dict()}


def optimizer_classes() -> list[type[Optimizer]]:
    """The optimizers of this torch."""
    found = [getattr(torch.optim, name) for name in dir(torch.optim)]
    return [c for c in found if inspect.isclass(c) and issubclass(c, Optimizer) and c != Optimizer]


def _matrices(seed: int) -> nn.Module:
    return mlp(seed, bias=False)


def _conv(seed: int) -> nn.Module:
    layers = (nn.Conv2d(1, 3, 1), nn.Conv2d(3, 2, 2), nn.Flatten())
    model = seeded(nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers), seed)
    return model.to(memory_format=torch.channels_last)


def _complex(seed: int) -> nn.Module:
    layers = [nn.Linear(4, 6, dtype=torch.complex64), nn.Tanh()]
    return seeded(nn.Sequential(*layers, nn.Linear(6, 3, dtype=torch.complex64)), seed)


def _of(dtype: torch.dtype) -> Callable[[int], nn.Module]:
    return lambda seed: mlp(seed).to(dtype)


_MODELS: dict[str, Callable[[int], nn.Module]] = {"SparseAdam": _embedding, "Muon": _matrices}
# What each optimizer has beside the switches that several have.
_OWN: dict[str, dict[str, dict[str, Any]]] = {
    "SGD": {
        "momentum": {"momentum": 0.9},
        "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "dampening": {"momentum": 0.9, "dampening": 0.3},
        "momentum-fused": {"momentum": 0.9, "fused": True},
        "momentum-foreach": {"momentum": 0.9, "foreach": True},
    },
    # Older ones have AdamW alone for this.
    "Adam": {"decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1}}
    if "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
    else {},
    "NAdam": {"decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1}},
    "RAdam": {"decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1}},
    "Adagrad": {"accumulator": {"initial_accumulator_value": 0.5, "lr_decay": 0.01}},
    "Adafactor": {"eps": {"eps": (1e-4, 1e-2), "weight_decay": 0.1}},
    "ASGD": {"averaging": {"t0": 2.0, "lambd": 0.01}},
    "RMSprop": {
        "centered": {"centered": True},
        "centered-momentum": {"centered": True, "momentum": 0.9},
        "centered-momentum-foreach": {"centered": True, "momentum": 0.9, "foreach": True},
    },
    "LBFGS": {
        "line-search": {"line_search_fn": "strong_wolfe", "max_iter": 4},
        "short-history": {"history_size": 2, "max_iter": 3},
        "short-history-line-search": {
            "history_size": 2,
            "max_iter": 3,
            "line_search_fn": "strong_wolfe",
        },
    },
    "Muon": {
        "no-nesterov": {"nesterov": False},
        "adjusted": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    },
}
for _name in ("Adam", "AdamW"):
    _OWN.setdefault(_name, {}).update(
        {
            "amsgrad": {"amsgrad": True},
            "amsgrad-fused": {"amsgrad": True, "fused": True},
            "amsgrad-foreach-maximize": {"amsgrad": True, "foreach": True, "maximize": True},
            "tensor-lr": {"lr": lambda: torch.tensor(0.01)},
            "tensor-lr-fused": {"lr": lambda: torch.tensor(0.01), "fused": True},
            "float64-lr": {"lr": lambda: torch.tensor(0.01, dtype=torch.float64)},
            "tensor-betas": {
                "betas": lambda: (torch.tensor(0.8), torch.tensor(0.9)),
                "lr": lambda: torch.tensor(0.01),
                "foreach": False,
            },
            "tiny-betas": {"betas": (0.0, 1e-3), "eps": 1e-3},
        }
    )
_SWITCHES: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "weight_decay": {"weight_decay": 0.1},
}


def _cases() -> Iterable[tuple[str, Case]]:
    for kind in optimizer_classes():
        name = kind.__name__
        model = _MODELS.get(name, mlp)
        drive = _train_by_closure if name == "LBFGS" else train
        known = inspect.signature(kind).parameters
        common = {"max_iter": 4} if name == "LBFGS" else {}
        yield name, Case(kind, common, model, drive)
        for label, options in _SWITCHES.items():
            if all(key in known for key in options):
                yield f"{name}-{label}", Case(kind, options, model, drive)
        for label, options in _OWN.get(name, {}).items():
            yield f"{name}-{label}", Case(kind, options, model, drive)
        if "differentiable" in known:
            options = {"differentiable": True}
            yield f"{name}-differentiable", Case(kind, options, model, _train_by_hand)
        if "lr" in known and name not in ("Adam", "AdamW", "Muon"):
            options = {"lr": lambda: torch.tensor(0.01), **common}
            yield f"{name}-tensor-lr", Case(kind, options, model, drive)
        if name in _MODELS:
            continue
        yield f"{name}-double", Case(kind, common, _of(torch.float64), drive)
        yield f"{name}-bfloat16", Case(kind, common, _of(torch.bfloat16), drive)
        if name != "LBFGS":  # it cannot flatten such gradients
            yield f"{name}-channels-last", Case(kind, common, _conv, drive)
        if name != "Adafactor":
            yield f"{name}-complex", Case(kind, common, _complex, drive)


CASES: dict[str, Case] = dict(_cases())
