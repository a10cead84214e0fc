"""Optimizer state by name: from live optimizers to the layout that is stored.

The layout is `state.<fqn>.<name>` and `param_groups.<fqn of the first parameter>.<key>`; the
latter is an OrderedDict in the order of the groups, in which a group without parameters is filed
under its number. `params` of a group lists names. Entries of parameters that an optimizer keeps
outside of its parameters go to `shared_state`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from dsdformat.errors import MismatchError, UnsupportedValueError, shorten
from dsdformat.format.paths import render_path
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
        self.live: list[dict[str, Any]] = optimizer.param_groups
        self.kind = type(optimizer).__name__
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
                    self._add((STATE, keys[key]), value)
            else:
                self._add((SHARED, self.lead, key), value)
        for key, value in self.raw.items():
            if key not in (STATE, GROUPS):
                self._add((OWN, self.lead, key), value)

    def _add_groups(self) -> dict[Any, str]:
        """File the groups; return the names of the keys that the entries of parameters have."""
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
        keys: dict[Any, str] = {}
        for number, (group, live) in enumerate(zip(groups, self.live, strict=True)):
            fqns = [self.names.first(parameter) for parameter in live["params"]]
            keys.update(zip(group["params"], fqns, strict=True))
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
            f"{render_path(self.place)}: state_dict() of this {self.kind} does not list the "
            f"groups that it has: {shorten(self.raw)}",
            path_in_tree=render_path(self.place),
            hint="store its state_dict() as a plain value, in place of the optimizer",
        )
