"""Names of the parameters that optimizers hold: found by identity among the leaves of a state."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsdformat.errors import UnsupportedValueError
from dsdformat.format.paths import emit_name, render_path
from dsdformat.format.values import encoded_key
from dsdformat.limits import DEPTH_MAX
from dsdformat.torch.fqn import named_tensors
from dsdformat.torch.introspect import Kind, find_children, kind_of

__all__ = ["Namer", "ParamNames"]

Path = tuple[Any, ...]


@dataclass(frozen=True)
class _Owner:
    """A leaf of the state that has named tensors."""

    path: Path
    names: Mapping[int, Sequence[str]]  # id of a tensor -> its FQNs, the first one first


@dataclass(frozen=True)
class ParamNames:
    """The names of the parameters of one optimizer.

    Attributes:
        path: Of the module in which the names are FQNs; None if they lie in several leaves, and
            each name is a display name.
        names: For the id of a parameter, all its names; an optimizer's entry has the first.
    """

    path: Path | None
    names: Mapping[int, Sequence[str]]

    def first(self, parameter: torch.Tensor) -> str:
        """The name under which a parameter's entry is filed."""
        return self.names[id(parameter)][0]


class Namer:
    """Finds the names of optimizers' parameters in one state."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._owners = list(_owners(state, ()))

    def names_of(
        self, optimizers: Sequence[torch.optim.Optimizer], place: Sequence[Any]
    ) -> ParamNames:
        """Return the names of all parameters of the parts of one optimizer.

        Raises:
            UnsupportedValueError: `optimizer_without_module`, with what has no name.
        """
        wanted = {
            id(parameter): parameter
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for owner in self._owners:
            if all(one in owner.names for one in wanted):
                return ParamNames(owner.path, self._with_others(wanted, owner))
        spread: dict[int, list[str]] = {}
        for owner in self._owners:
            for one in wanted.keys() & owner.names.keys():
                names = [emit_name((*owner.path, name), encoded_key) for name in owner.names[one]]
                spread.setdefault(one, []).extend(names)
        spread = {one: [*names, *self._others(one, names)] for one, names in spread.items()}
        nameless = [parameter for one, parameter in wanted.items() if one not in spread]
        if nameless:
            raise _nameless(nameless, len(wanted), place)
        return ParamNames(None, spread)

    def _with_others(self, wanted: Iterable[int], owner: _Owner) -> dict[int, Sequence[str]]:
        names = {one: owner.names[one] for one in wanted}
        return {one: [*first, *self._others(one, first)] for one, first in names.items()}

    def _others(self, one: int, first: Sequence[str]) -> list[str]:
        """List names that a parameter may have in the file of a state with other sections."""
        return [name for name in self._unique.get(one, ()) if name not in first]

    @functools.cached_property
    def _unique(self) -> dict[int, list[str]]:
        """List for each parameter the names that it alone could be filed under."""
        found: dict[str, set[int]] = {}
        for owner in self._owners:
            for one, names in owner.names.items():
                for name in names:
                    for form in (name, emit_name((*owner.path, name), encoded_key)):
                        found.setdefault(form, set()).add(one)
        unique: dict[int, list[str]] = {}
        for name, owners in found.items():
            if len(owners) == 1:
                unique.setdefault(next(iter(owners)), []).append(name)
        return unique


def _owners(value: Any, path: Path) -> Iterator[_Owner]:
    """List modules first, in the order of the state, then all tensors that stand alone."""
    alone: dict[int, list[str]] = {}
    for where, module in _modules(value, path, alone):
        names: dict[int, list[str]] = {}
        for part in module:
            for name, tensor in named_tensors(part):
                names.setdefault(id(tensor), []).append(name)
        yield _Owner(where, names)
    yield _Owner((), alone)


def _modules(
    value: Any, path: Path, alone: dict[int, list[str]]
) -> Iterator[tuple[Path, Sequence[nn.Module]]]:
    kind = kind_of(value)
    if kind is Kind.MODULE:
        yield path, [value]
    elif kind is Kind.MODULES:
        yield path, value
    elif kind is Kind.TENSOR:
        alone.setdefault(id(value), []).append(emit_name(path, encoded_key))
    children = find_children(value) if kind is Kind.OTHER and len(path) < DEPTH_MAX else None
    for key, item in children or ():
        yield from _modules(item, (*path, key), alone)


def _nameless(
    parameters: Sequence[torch.Tensor], count: int, place: Sequence[Any]
) -> UnsupportedValueError:
    shapes = ", ".join(str(list(parameter.shape)) for parameter in parameters[:3])
    more = ", …" if len(parameters) > 3 else ""
    return UnsupportedValueError(
        f"{render_path(place)}: {len(parameters)} of the optimizer's {count} parameters "
        f"(of shape {shapes}{more}) are in no module of the state, so their entries have no names",
        code="optimizer_without_module",
        path_in_tree=render_path(place),
        hint='put the module that the optimizer works on into the same state, as in {"model": '
        'model, "optimizer": optimizer}',
    )
