"""Names of the parameters that optimizers hold: found by identity among the leaves of a state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dsdformat.errors import UnsupportedValueError
from dsdformat.format.paths import emit_name, render_path
from dsdformat.format.values import encoded_key
from dsdformat.limits import DEPTH_MAX
from dsdformat.torch.flat_find import FlatParam, find_flats
from dsdformat.torch.fqn import named_tensors
from dsdformat.torch.fsdp1 import Member, Unit, find_units
from dsdformat.torch.introspect import Kind, find_children, kind_of

__all__ = ["Namer", "ParamNames", "modules_in"]

Path = tuple[Any, ...]
# For each parameter in one (itself, or those that a flat one holds) its names, the first one first.
Parts = Sequence[Sequence[str]]
UnitsOf = Callable[[nn.Module], Sequence[Unit]]
_Part = tuple[int, int]  # the id of a parameter, and the number of one in it
_TOGETHER = (
    'put the module that the optimizer works on into the same state, as in {"model": model, '
    '"optimizer": optimizer}'
)
_FLATTENED = "make the optimizer after the model is flattened, with the parameters it has then"


@dataclass(frozen=True)
class _Owner:
    """A leaf of the state that has named tensors."""

    path: Path
    parts: Mapping[int, Parts]  # by the id of a tensor
    flats: Mapping[int, FlatParam] = field(default_factory=dict)
    shards: Mapping[int, Unit | Member] = field(default_factory=dict)

    def displayed(self, one: int) -> list[list[str]]:
        """The names of a parameter with that of this leaf before them."""
        return [
            [emit_name((*self.path, name), encoded_key) for name in names]
            for names in self.parts[one]
        ]


@dataclass(frozen=True)
class ParamNames:
    """The names of the parameters of one optimizer.

    Attributes:
        path: Of the module in which the names are FQNs; None if they lie in several leaves, and
            each name is a display name.
        names: For the id of a parameter, all its names; an optimizer's entry has the first.
            Those of a flat one are the names of all parameters in it.
        flats: For the id of a flat parameter, what it holds, under these names.
        shards: For the id of a parameter that lies in flat shards of FSDP1, or of what is one,
            where they have it.
        parts: For the id of a parameter, the names of it, or of each that is in a flat one.
    """

    path: Path | None
    names: Mapping[int, Sequence[str]]
    flats: Mapping[int, FlatParam] = field(default_factory=dict)
    shards: Mapping[int, Unit | Member] = field(default_factory=dict)
    parts: Mapping[int, Parts] = field(default_factory=dict)

    def first(self, parameter: torch.Tensor) -> str:
        """The name under which a parameter's entry is filed; the first of a flat one's."""
        return self.names[id(parameter)][0]

    def filed(self, parameter: torch.Tensor) -> Sequence[str]:
        """The names under which entries are filed: one, or that of each parameter in a flat one."""
        return [names[0] for names in self.parts[id(parameter)]]


class Namer:
    """Finds the names of optimizers' parameters in one state."""

    def __init__(self, state: Mapping[str, Any], units_of: UnitsOf = find_units) -> None:
        """Look at a state.

        Args:
            state: Live modules and tensors, nested.
            units_of: Lists the flat parameters of FSDP1 in a module, if somebody knows them.

        Ranks: see `fsdp1.find_units`.
        """
        self._state = state
        self._units = {id(module): units_of(module) for module in modules_in(state)}

    @functools.cached_property
    def _owners(self) -> list[_Owner]:
        """The leaves with names; looked for where there are optimizers."""
        return list(_owners(self._state, (), lambda module: self._units[id(module)]))

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
            if all(one in owner.parts for one in wanted):
                return self._named(owner.path, {one: owner.parts[one] for one in wanted})
        spread: dict[int, list[list[str]]] = {}
        for owner in self._owners:
            for one in wanted.keys() & owner.parts.keys():
                shown = owner.displayed(one)
                known = spread.setdefault(one, [[] for _ in shown])
                for names, more in zip(known, shown, strict=True):
                    names.extend(more)
        nameless = [parameter for one, parameter in wanted.items() if one not in spread]
        if nameless:
            hint = _FLATTENED if any(map(self._is_member, nameless)) else _TOGETHER
            raise _nameless(nameless, len(wanted), place, hint)
        return self._named(None, spread)

    def _is_member(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter lies in a flat one, which optimizers should have in its place."""
        flats = (flat for owner in self._owners for flat in owner.flats.values())
        return any(parameter is member for flat in flats for member in flat.members)

    def _named(self, path: Path | None, found: Mapping[int, Parts]) -> ParamNames:
        parts = {
            one: [[*names, *self._others((one, n), names)] for n, names in enumerate(those)]
            for one, those in found.items()
        }
        flats = {
            one: replace(flat, layout=flat.layout.named(parts[one]))
            for owner in self._owners
            for one, flat in owner.flats.items()
            if one in parts
        }
        names = {one: list(itertools.chain(*those)) for one, those in parts.items()}
        shards = {
            one: shard
            for owner in self._owners
            for one, shard in owner.shards.items()
            if one in parts
        }
        return ParamNames(path, names, flats, shards, parts)

    def _others(self, part: _Part, first: Sequence[str]) -> list[str]:
        """List names that a parameter may have in the file of a state with other sections."""
        return [name for name in self._unique.get(part, ()) if name not in first]

    @functools.cached_property
    def _unique(self) -> dict[_Part, list[str]]:
        """List for each parameter the names that it alone could be filed under."""
        found: dict[str, set[_Part]] = {}
        for owner in self._owners:
            for one, those in owner.parts.items():
                pairs = zip(those, owner.displayed(one), strict=True)
                for number, (names, shown) in enumerate(pairs):
                    for form in itertools.chain(*zip(names, shown, strict=True)):
                        found.setdefault(form, set()).add((one, number))
        unique: dict[_Part, list[str]] = {}
        for name, owners in found.items():
            if len(owners) == 1:
                unique.setdefault(next(iter(owners)), []).append(name)
        return unique


def modules_in(state: Mapping[str, Any]) -> list[nn.Module]:
    """List the modules of a state."""
    return [module for _, modules in _modules(state, (), {}) for module in modules]


def _owners(value: Any, path: Path, units_of: UnitsOf) -> Iterator[_Owner]:
    """List modules first, in the order of the state, then all tensors that stand alone."""
    alone: dict[int, list[str]] = {}
    held: set[int] = set()  # flat parameters of modules
    for where, module in _modules(value, path, alone):
        flats: dict[int, FlatParam] = {}
        names: dict[int, list[str]] = {}
        for part in module:
            flats.update(find_flats(part))
            for name, tensor in named_tensors(part):
                names.setdefault(id(tensor), []).append(name)
        parts: dict[int, Parts] = {one: [those] for one, those in names.items()}
        parts.update((one, list(flat.layout.all_names().values())) for one, flat in flats.items())
        shards, shard_parts = _shards(itertools.chain.from_iterable(map(units_of, module)))
        parts.update(shard_parts)
        held.update(flats, shards)
        yield _Owner(where, parts, flats, shards)
    yield _Owner((), {one: [names] for one, names in alone.items() if one not in held})


def _shards(units: Iterable[Unit]) -> tuple[dict[int, Unit | Member], dict[int, Parts]]:
    """Return the parameters that lie in flat shards of FSDP1, by id, and their names."""
    shards: dict[int, Unit | Member] = {}
    parts: dict[int, Parts] = {}
    for unit in units:
        for member in unit.members:
            if member.parameter is not None:
                shards[id(member.parameter)] = member
                parts[id(member.parameter)] = [list(member.names)]
        if id(unit.flat) not in shards and all(one.parameter is None for one in unit.members):
            shards[id(unit.flat)] = unit
            parts[id(unit.flat)] = [list(member.names) for member in unit.members]
    return shards, parts


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
    parameters: Sequence[torch.Tensor], count: int, place: Sequence[Any], hint: str
) -> UnsupportedValueError:
    shapes = ", ".join(str(list(parameter.shape)) for parameter in parameters[:3])
    more = ", …" if len(parameters) > 3 else ""
    return UnsupportedValueError(
        f"{render_path(place)}: {len(parameters)} of the optimizer's {count} parameters "
        f"(of shape {shapes}{more}) are in no module of the state, so their entries have no names",
        code="optimizer_without_module",
        path_in_tree=render_path(place),
        hint=hint,
    )
