"""Modules and optimizers to save, filled with a pattern that tells each tensor from the others.

The pattern is 64 MiB of normally distributed numbers; tensor `index` begins at its own place in
it. So a state needs no second copy to be checked against, and two processes agree on it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

__all__ = ["State", "build_state", "large_shapes", "pieces", "small_shapes", "take_step"]

PATTERN_NUMEL = 16 << 20
PATTERN_STEP = 7919 * 16
LAYER_TENSORS = 10
STAGE_LAYERS = 20

Shapes = list[tuple[int, ...]]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class State:
    """What is saved, or loaded into."""

    module: nn.Module
    optimizer: Optimizer | None = None

    def tensors(self) -> list[Tensor]:
        """List all tensors: the parameters, then per parameter what the optimizer keeps of it."""
        parameters = [parameter.detach() for parameter in self.module.parameters()]
        return [*parameters, *self.moments()]

    def moments(self) -> list[Tensor]:
        """List the tensors of the optimizer by name, its 0-d step counters included."""
        if self.optimizer is None:
            return []
        kept = (self.optimizer.state.get(one, {}) for one in self.module.parameters())
        return [state[name] for state in kept for name in sorted(state)]

    def nbytes(self) -> int:
        """Count the bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def name(self, index: int) -> str:
        """Return the name of a parameter."""
        return [name for name, _ in self.module.named_parameters()][index]

    def fill(self) -> None:
        """Give each tensor its part of the pattern; step counters stay."""
        for index, flat in self._patterned():
            for piece, wanted in pieces(flat, index):
                piece.copy_(wanted)

    def blank(self) -> None:
        """Touch each tensor, and take away what it held."""
        for _, flat in self._patterned():
            flat.fill_(1)

    def check(self) -> None:
        """Raise if a tensor does not hold its part of the pattern."""
        for index, flat in self._patterned():
            if not all(torch.equal(piece, wanted) for piece, wanted in pieces(flat, index)):
                raise ValueError(f"tensor {index} of the state is not what was saved")

    def _patterned(self) -> Iterator[tuple[int, Tensor]]:
        for index, tensor in enumerate(self.tensors()):
            if tensor.ndim:
                yield index, tensor.view(-1)


def large_shapes(size: float, count: int = 200) -> Shapes:
    """Tensors of 5 MiB at full size: 200 of them make 1 GiB."""
    return [(max(1, round(1310 * size)), 1024)] * count


def small_shapes(size: float) -> Shapes:
    """20,000 tensors of 1 to 16 KiB at full size; the size changes their number."""
    some = random.Random(7)
    return [(some.randint(256, 4096),) for _ in range(max(20, round(20_000 * size)))]


def build_state(shapes: Shapes, *, optimizer: bool = False, stepped: bool = False) -> State:
    """Make a model of float32 parameters, and an AdamW over it if asked.

    Its names are like `stages.3.layers.7.weight2`: no module has thousands of children, which is
    what `load_state_dict` of torch takes quadratic time for.

    Args:
        shapes: Of the parameters.
        optimizer: Whether to make an optimizer.
        stepped: Whether it has taken a step, so that it keeps two moments per parameter.
    """
    layers = [build_layer(some) for some in cut(shapes, LAYER_TENSORS)]
    stages = [nn.ModuleDict({"layers": nn.ModuleList(some)}) for some in cut(layers, STAGE_LAYERS)]
    module = nn.ModuleDict({"stages": nn.ModuleList(stages)})
    state = State(module, AdamW(module.parameters()) if optimizer else None)
    if stepped:
        take_step(state)
    state.fill()
    return state


def build_layer(shapes: Shapes) -> nn.Module:
    """Make a module of some parameters."""
    layer = nn.Module()
    for place, shape in enumerate(shapes):
        layer.register_parameter(f"weight{place}", nn.Parameter(torch.empty(shape)))
    return layer


def cut(items: list[Item], count: int) -> list[list[Item]]:
    """Cut a list into runs of some length, the last one shorter."""
    return [items[start : start + count] for start in range(0, len(items), count)]


def take_step(state: State) -> None:
    """Let the optimizer make its moments."""
    assert state.optimizer is not None
    for group in state.optimizer.param_groups:
        group["foreach"] = False  # one tensor at a time, so that few pages are left over
    for parameter in state.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


@functools.cache
def pattern() -> Tensor:
    """Return the numbers that all states are filled from."""
    return torch.randn(PATTERN_NUMEL, generator=torch.Generator().manual_seed(0))


def pieces(flat: Tensor, index: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a flat tensor where the pattern wraps; yield each piece with its part of the pattern.

    Args:
        flat: A tensor, or a part of one.
        index: Of the tensor.
        first: Number of the part's first element.
    """
    source = pattern()
    begin, place = 0, (index * PATTERN_STEP + first) % PATTERN_NUMEL
    while begin < flat.numel():
        count = min(flat.numel() - begin, PATTERN_NUMEL - place)
        yield flat[begin : begin + count], source[place : place + count]
        begin, place = begin + count, 0
