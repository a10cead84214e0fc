"""Optimizer states as torch has them, in the layout that ours are stored in, by names.

A state dict of torch numbers parameters in the order of the optimizer's groups. Which parameter a
number is, the live optimizer knows that the state is loaded into: its groups have that order.
States by names, nested or flat, are those of `torch.distributed.checkpoint.state_dict`.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import MismatchError, shorten
from dsdformat.torch.dotted import unflatten
from dsdformat.torch.names import ParamNames
from dsdformat.torch.optim import GROUPS, OWN, OWN_KEYS, PARAMS, SHARED, STATE
from dsdformat.torch.stored import Stored

__all__ = ["OrderUnknownError", "is_of_torch", "named_state"]

_NAMES = "param_names"
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
Optimizer = torch.optim.Optimizer


class OrderUnknownError(Exception):
    """Says why numbers cannot be told: what the checkpoint has, and what is wanted."""


def is_of_torch(stored: Any) -> bool:
    """Whether a value is the state of an optimizer as torch has it, or a list of such."""
    if type(stored) in (list, tuple):
        return bool(stored) and all(type(one) is dict and is_of_torch(one) for one in stored)
    if not isinstance(stored, dict):
        return False
    if STATE in stored:
        return isinstance(stored[STATE], dict) and type(stored.get(GROUPS)) in (list, tuple)
    dotted = (f"{STATE}.", f"{GROUPS}.")
    return bool(stored) and all(type(key) is str and key.startswith(dotted) for key in stored)


def named_state(
    stored: Any,
    optimizers: Sequence[Optimizer],
    names: ParamNames,
    renamed: Callable[[str], str | None],
) -> dict[str, Any]:
    """Return a state in the stored layout, under the names that it has now.

    Args:
        stored: Of which `is_of_torch` holds.
        optimizers: What it is loaded into: one, or several that work on parts of one model.
        names: The names of all their parameters.
        renamed: What a stored name of a parameter is called now, or None if it is left out.

    Raises:
        OrderUnknownError: which parameters are meant cannot be told.
        MismatchError: `state_mismatch`: a flat state that is none.
    """
    states = list(stored) if type(stored) in (list, tuple) else [stored]
    if len(states) == len(optimizers):
        pairs = [(one, [optimizer]) for one, optimizer in zip(states, optimizers, strict=True)]
    elif len(states) == 1:
        pairs = [(states[0], list(optimizers))]
    else:
        raise OrderUnknownError(f"{len(states)} states", f"{len(optimizers)} optimizers")
    result: dict[str, Any] = {STATE: {}, GROUPS: OrderedDict()}
    for one, live in pairs:
        _State(one, live, names, renamed).add_to(result)
    return result


class _State:
    """One state of torch, and the live groups that it is for."""

    def __init__(
        self,
        stored: Mapping[Any, Any],
        optimizers: Sequence[Optimizer],
        names: ParamNames,
        renamed: Callable[[str], str | None],
    ) -> None:
        live = [group[PARAMS] for optimizer in optimizers for group in optimizer.param_groups]
        self.live = [[name for one in group for name in names.filed(one)] for group in live]
        # Of flat parameters among others, the order of those in them is not told.
        self.ordered = all(
            len(group) == 1 or len(group) == len(filed)
            for group, filed in zip(live, self.live, strict=True)
        )
        # Of those that are no part of something flat, which has a shape of its own.
        self.shapes = {
            names.first(one): tuple(one.shape)
            for one in itertools.chain.from_iterable(live)
            if id(one) not in names.flats and id(one) not in names.shards
        }
        self.known = {name for every in names.names.values() for name in every}
        self.renamed = renamed
        flat = STATE not in stored
        self.stored = unflatten(stored, self.live) if flat else stored
        self.groups: Sequence[Mapping[str, Any]] = self.stored[GROUPS]
        self.keys = self._keys()

    def _keys(self) -> dict[Any, str | None]:
        """Return the name of each key of a parameter, or None for one that is left out."""
        keys = [key for group in self.groups for key in _params_of(group)]
        if keys and all(type(key) is str for key in keys):
            return {key: self.renamed(key) for key in keys}
        lists = [group.get(_NAMES) for group in self.groups]
        told = [name for one in lists if type(one) is list for name in one]
        if len(told) == len(keys) and all(type(name) is str for name in told):
            now = [self.renamed(name) for name in told]
            if all(name is None or name in self.known for name in now):
                return dict(zip(keys, now, strict=True))
        return dict(zip(keys, self._in_order(), strict=True))

    def _in_order(self) -> list[str]:
        """Return the names of the live parameters, where the groups are as long as the stored."""
        stored, live = [len(_params_of(group)) for group in self.groups], list(map(len, self.live))
        if stored != live:
            raise OrderUnknownError(_sizes(stored) + " by number", _sizes(live))
        if not self.ordered:
            raise OrderUnknownError(
                _sizes(stored) + " by number", "names, as some parameters are flat"
            )
        found = [name for group in self.live for name in group]
        numbers = [key for group in self.groups for key in _params_of(group)]
        for number, name in zip(numbers, found, strict=True):
            self._check_shape(number, name)
        return found

    def _check_shape(self, number: Any, name: str) -> None:
        """Check that what is kept for a number is not shaped like another parameter."""
        kept = self.stored[STATE].get(number)
        values = kept.values() if isinstance(kept, dict) else ()
        shapes = {one.entry.shape for one in values if isinstance(one, Stored) and one.entry.shape}
        wanted = self.shapes.get(name)
        if len(shapes) == 1 and wanted is not None and wanted not in shapes:
            (shape,) = shapes
            if shape in self.shapes.values():
                wanted_text = f"{list(wanted)}, as {name} at its place in the groups is"
                raise OrderUnknownError(f"number {number} of shape {list(shape)}", wanted_text)

    def _number(self, key: Any) -> Any:
        """Return the number that a key is; DCP makes strings of numbers."""
        if type(key) is str and key not in self.keys and _NUMBER.fullmatch(key):
            return int(key) if int(key) in self.keys else key
        return key

    def add_to(self, result: dict[str, Any]) -> None:
        """File groups and states, each under a name."""
        lead = next((name for name in self.keys.values() if name is not None), "")
        for number, group in enumerate(self.groups):
            stored = _params_of(group)
            params = [name for key in stored if (name := self.keys[key]) is not None]
            if stored and not params:
                continue
            values = {key: value for key, value in group.items() if key not in OWN_KEYS}
            _add(
                result,
                (GROUPS, params[0] if params else (lead, number)),
                {PARAMS: params, **values},
            )
        for stored_key, state in self.stored[STATE].items():
            key = self._number(stored_key)
            if key not in self.keys and key in self.known:
                found = f"an entry {shorten(key)} of a parameter that is in no group"
                raise OrderUnknownError(found, "one that is in a group")
            if key not in self.keys:
                _add(result, (SHARED, lead, key), state)
            elif self.keys[key] is not None and state != {}:
                _add(result, (STATE, self.keys[key]), state)
        for key, value in self.stored.items():
            if key not in (STATE, GROUPS):
                _add(result, (OWN, lead, key), value)


def _params_of(group: Any) -> list[Any]:
    params = group.get(PARAMS) if isinstance(group, dict) else None
    if type(params) is not list or any(type(key) not in (int, str) for key in params):
        raise OrderUnknownError(
            "a group without a list of parameters", "the groups of an optimizer"
        )
    return params


def _sizes(counts: Sequence[int]) -> str:
    return f"groups of {', '.join(map(str, counts))} parameters" if counts else "no groups"


def _add(result: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    node = result
    for step in path[:-1]:
        node = node.setdefault(step, {})
    if path[-1] in node:
        raise MismatchError(
            f"{path[-1]} is in two groups, or in two states of the optimizer",
            code="state_mismatch",
        )
    node[path[-1]] = value
