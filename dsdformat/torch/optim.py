"""Optimizer state by name: from live optimizers to the layout that is stored.

The layout is `state.<fqn>.<name>` and `param_groups.<fqn of the first parameter>.<key>`; the
latter is an OrderedDict in the order of the groups, in which a group without parameters is filed
under its number. `params` of a group lists names. Entries of parameters that an optimizer keeps
outside of its parameters go to `shared_state`. A flat parameter has the names and the entries of
the parameters in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from dsdformat.errors import MismatchError, UnsupportedValueError, shorten
from dsdformat.format.paths import render_path
from dsdformat.torch.flat_optim import cut_state
from dsdformat.torch.fsdp1 import Unit
from dsdformat.torch.fsdp1_state import as_shards, cut_unit
from dsdformat.torch.introspect import own_method
from dsdformat.torch.names import ParamNames

__all__ = [
    "GROUPS",
    "OWN",
    "OWN_KEYS",
    "PARAMS",
    "SHARED",
    "STATE",
    "capture_optimizers",
    "check_owners",
    "entries_of",
    "is_whole",
]

STATE, GROUPS, SHARED, OWN, PARAMS = (
    "state",
    "param_groups",
    "shared_state",
    "own_keys",
    "params",
)
# What a group says of its parameters, which the live optimizer knows itself.
OWN_KEYS = frozenset({"params", "param_names"})


def capture_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], names: ParamNames, place: Sequence[Any]
) -> dict[str, Any]:
    """Return the state of one optimizer, or of several that work on parts of one model.

    Calls `state_dict` and nothing else: no step, no gradients, no new state. Tensors in the
    result are those of the optimizers.

    Raises:
        MismatchError: `state_conflict`: two optimizers hold one parameter, or one thing twice.
        UnsupportedValueError: what it keeps for a flat parameter cannot be cut.
    """
    check_owners(optimizers, names, place)
    result: dict[str, Any] = {STATE: {}, GROUPS: OrderedDict()}
    for optimizer in optimizers:
        _Capture(optimizer, names, place, result).run()
    return result


def check_owners(
    optimizers: Sequence[torch.optim.Optimizer], names: ParamNames, place: Sequence[Any]
) -> None:
    """Check that no parameter is in two optimizers.

    Raises:
        MismatchError: `state_conflict`, with its name.
    """
    seen: set[int] = set()
    for optimizer in optimizers:
        own = {id(one): one for group in optimizer.param_groups for one in group[PARAMS]}
        for parameter in own.values():
            if id(parameter) in seen:
                raise MismatchError(
                    f"{render_path([*place, GROUPS])}: {names.first(parameter)} is in two "
                    "optimizers",
                    code="state_conflict",
                    hint="give optimizers that share parameters names of their own, in a dict",
                )
        seen.update(own)


def is_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps for its first parameter what belongs to all of them."""
    return isinstance(optimizer, torch.optim.LBFGS)


def entries_of(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    state: Any,
    names: ParamNames,
    place: Sequence[Any],
) -> dict[str, Any]:
    """Return what an optimizer has for a parameter, by name.

    Args:
        optimizer: What keeps the state.
        parameter: One of its parameters.
        state: The state of the parameter. That of a flat one is cut into views.
        names: The names of the optimizer's parameters.
        place: Where the optimizer lies, for messages.

    Raises:
        UnsupportedValueError: the state of a flat parameter cannot be cut.
    """
    shard = names.shards.get(id(parameter))
    if isinstance(shard, Unit):
        return dict(zip(names.filed(parameter), cut_unit(shard, state), strict=True))
    if shard is not None:
        return {names.first(parameter): as_shards(shard, state)}
    flat = names.flats.get(id(parameter))
    if flat is None:
        return {names.first(parameter): state}
    if state and is_whole(optimizer):
        raise UnsupportedValueError(
            f"{render_path([*place, STATE])}: {type(optimizer).__name__} keeps one history for all "
            f"parameters, which cannot be cut into what those in {flat.layout.name} have",
            path_in_tree=render_path([*place, STATE]),
            hint="give it the parameters of a model that is not flat",
        )
    return cut_state(flat.layout, state, [*place, STATE])


class _Capture:
    """Adds one optimizer to a result."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: ParamNames,
        place: Sequence[Any],
        result: dict[str, Any],
    ) -> None:
        self.names = names
        self.place = place
        self.result = result
        self.optimizer = optimizer
        self.live: list[dict[str, Any]] = optimizer.param_groups
        self.raw: Mapping[str, Any] = {}
        try:
            self.raw = own_method(optimizer, "state_dict")()
        except (KeyError, TypeError):  # state of a parameter that is in no group any more
            self._refuse()

    def run(self) -> None:
        parameters = (one for group in self.live for one in group[PARAMS])
        self.lead = next(map(self.names.first, parameters), "")
        keys = self._add_groups()
        for key, value in self.raw[STATE].items():
            if key in keys and not isinstance(value, Mapping):
                self._refuse()
            if key in keys:
                if value != {}:  # an entry that was only touched holds nothing
                    self._add_state(keys[key], value)
            else:
                self._add((SHARED, self.lead, key), value)
        for key, value in self.raw.items():
            if key not in (STATE, GROUPS):
                self._add((OWN, self.lead, key), value)

    def _add_state(self, parameter: torch.Tensor, state: Any) -> None:
        entries = entries_of(self.optimizer, parameter, state, self.names, self.place)
        for name, entry in entries.items():
            self._add((STATE, name), entry)

    def _add_groups(self) -> dict[Any, torch.Tensor]:
        """File the groups; return the parameters whose entries have these keys."""
        groups = self.raw.get(GROUPS) if isinstance(self.raw, Mapping) else None
        if not isinstance(groups, list) or not isinstance(self.raw.get(STATE), Mapping):
            self._refuse()
        counts = [
            len(group[PARAMS])
            if isinstance(group, Mapping) and isinstance(group.get(PARAMS), list)
            else -1
            for group in groups
        ]
        if counts != [len(group[PARAMS]) for group in self.live]:
            self._refuse()
        keys: dict[Any, torch.Tensor] = {}
        for number, (group, live) in enumerate(zip(groups, self.live, strict=True)):
            fqns = [name for parameter in live[PARAMS] for name in self.names.filed(parameter)]
            keys.update(zip(group[PARAMS], live[PARAMS], strict=True))
            stored = {key: value for key, value in group.items() if key not in OWN_KEYS}
            key = fqns[0] if fqns else (self.lead, number)
            self._add((GROUPS, key), {"params": fqns, **stored})
        return keys

    def _add(self, path: tuple[Any, ...], value: Any) -> None:
        node = self.result
        for step in path[:-1]:
            node = node.setdefault(step, {})
        if path[-1] in node and path[0] != STATE:
            where = render_path([*self.place, *path])
            raise MismatchError(
                f"{where}: two optimizers hold this",
                code="state_conflict",
                hint="give optimizers that share parameters names of their own, in a dict",
            )
        node[path[-1]] = value

    def _refuse(self) -> NoReturn:
        raise UnsupportedValueError(
            f"{render_path(self.place)}: state_dict() of this {type(self.optimizer).__name__} does "
            f"not list the groups that it has: {shorten(self.raw)}",
            path_in_tree=render_path(self.place),
            hint="store its state_dict() as a plain value, in place of the optimizer",
        )
