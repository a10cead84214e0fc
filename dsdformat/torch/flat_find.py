"""The flat parameters of a model: those of `FlattenParams`, and of fairscale's wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from dsdformat.flat_layout import FlatLayout
from dsdformat.torch.compat import fairscale_flats
from dsdformat.torch.flatten import FlattenParams
from dsdformat.torch.fqn import canonical_name, named_modules

__all__ = ["FlatParam", "find_flats", "find_layouts"]


@dataclass(frozen=True, slots=True)
class FlatParam:
    """A flat parameter of a model.

    Attributes:
        layout: What it holds, with FQNs in the model.
        members: The parameters that a checkpoint is read into, whose memory is that of the flat
            one; none with fairscale's wrapper, which makes them anew each time.
    """

    layout: FlatLayout
    members: tuple[nn.Parameter, ...] = ()

    def named_members(self) -> dict[str, nn.Parameter]:
        """Return the parameters in it by name, a tied one under each of its names."""
        parts = zip(self.layout.all_names().values(), self.members, strict=False)
        return {name: member for names, member in parts for name in names}


def find_flats(module: nn.Module) -> dict[int, FlatParam]:
    """Return all flat parameters of a model by their ids, also of wrappers unflattened now.

    Those that fairscale's FSDP has sharded are not among them: what lies in one is not whole.
    """
    result: dict[int, FlatParam] = {}
    for prefix, one in named_modules(module):
        for flat, found in _own_flats(one, prefix):
            known = result.get(id(flat))
            result[id(flat)] = found if known is None else _united(known, found)
    return result


def find_layouts(module: nn.Module) -> dict[int, FlatLayout]:
    """Return the layouts of all flat parameters of a model by their ids."""
    return {one: flat.layout for one, flat in find_flats(module).items()}


def _own_flats(module: nn.Module, prefix: str) -> Iterator[tuple[torch.Tensor, FlatParam]]:
    if isinstance(module, FlattenParams):
        parts = zip(module.flat_params, module.layouts, module.original_params, strict=True)
        for flat, layout, members in parts:
            yield flat, FlatParam(layout.under(prefix), members)
    for name, flat, names, shapes, ties in fairscale_flats(module):
        aliases = [(canonical_name(module, a), canonical_name(module, b)) for a, b in ties]
        layout = FlatLayout(
            name,
            tuple(canonical_name(module, one) for one in names),
            tuple(map(tuple, shapes)),
            tuple(aliases),
        )
        if flat.shape == (layout.numel,):
            yield flat, FlatParam(layout.under(prefix))


def _united(one: FlatParam, other: FlatParam) -> FlatParam:
    """Return a flat parameter of a wrapper that is at two places, with the names of both."""
    pairs = zip(one.layout.all_names().values(), other.layout.all_names().values(), strict=True)
    return replace(one, layout=one.layout.named([[*a, *b] for a, b in pairs]))
