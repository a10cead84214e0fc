"""Optimizers' state dicts by canonical names: read from any wrapping, and set into any.

Drives the public functions of `state_dict.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import MismatchError
from dsdformat.torch import dotted
from dsdformat.torch.comm import Comm
from dsdformat.torch.fills import Fills
from dsdformat.torch.fsdp1_optim import completed
from dsdformat.torch.live_model import LiveModel
from dsdformat.torch.model_state import (
    StateDictMismatchError,
    finished,
    form_of,
    from_form,
    is_nothing,
)
from dsdformat.torch.names import Namer, ParamNames
from dsdformat.torch.optim import GROUPS, STATE, capture_optimizers, entries_of
from dsdformat.torch.place_optim import place_optimizers
from dsdformat.torch.placing import Plan
from dsdformat.torch.redistribute import must_move
from dsdformat.torch.selection import Selection
from dsdformat.torch.sharding import is_spread, is_tensor, local_of
from dsdformat.torch.slots import initial_state
from dsdformat.torch.stored import Path

__all__ = ["get_optimizers", "set_optimizers"]

PARAMS = "params"
_PLACE = ("optimizer",)

Optimizers = Sequence[torch.optim.Optimizer]


def get_optimizers(
    live: LiveModel, optimizers: Optimizers, *, full: bool, offload: bool, flat: bool
) -> dict[str, Any]:
    """Return the state of optimizers by names, nested or flat.

    Ranks: collective over the group, if `full` or with FSDP1; else local.
    """
    names = Namer({"model": live.model}).names_of(optimizers, _PLACE)
    captured = capture_optimizers(optimizers, names, _PLACE)
    nested: dict[str, Any] = {
        STATE: _with_slots(optimizers, names, captured[STATE]),
        GROUPS: [dict(one) for one in captured[GROUPS].values()],
    }
    comm = live.comm(Comm())
    if live.is_spread and (full or live.units):
        live.meet(comm, "get_optimizer_state_dict")
    nested[STATE] = completed(nested[STATE], live.units, names.names)
    if full or offload or live.units:
        leaves = finished(dict(_leaves(nested, ())), comm, full=full, offload=offload)
        if not leaves:
            return {}
        nested = _replaced(nested, (), leaves)
    return dotted.flatten(nested) if flat else nested


def _with_slots(
    optimizers: Optimizers, names: ParamNames, states: dict[str, Any]
) -> dict[str, Any]:
    """Order the states by parameter; add what an optimizer without any will keep."""
    result: dict[str, Any] = {}
    for optimizer in optimizers:
        initial = {} if optimizer.state else initial_state(optimizer)
        for parameter in _parameters(optimizer):
            filed = names.filed(parameter)
            if any(name in states for name in filed):
                result.update((name, dict(states[name])) for name in filed if name in states)
            elif parameter in initial:
                result.update(entries_of(optimizer, parameter, initial[parameter], names, _PLACE))
            elif optimizer.state and parameter.requires_grad:
                result.update((name, {}) for name in filed)  # says that there is none yet
    return result if any(result.values()) else {}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group[PARAMS]


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif type(value) in (list, tuple) and any(isinstance(v, (torch.Tensor, dict)) for v in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _replaced(value: Any, path: Path, leaves: Mapping[Any, Any]) -> Any:
    if path in leaves:
        return leaves[path]
    if isinstance(value, Mapping):
        return {key: _replaced(item, (*path, key), leaves) for key, item in value.items()}
    return type(value)(_replaced(v, (*path, i), leaves) for i, v in enumerate(value))


def set_optimizers(
    live: LiveModel,
    optimizers: Optimizers,
    given: Mapping[str, Any],
    *,
    full: bool,
    strict: bool,
    from_first: bool,
) -> None:
    """Set the state of optimizers from a nested or flat one by names.

    A stored dtype is kept; nothing is stepped. An entry whose `step` is 0 leaves its parameter
    without state, as it is before the first step.

    Raises:
        StateDictMismatchError: `strict`, and a parameter has no entry; nothing was changed.

    Ranks: collective over the group if `full`, with FSDP1, or if given shards are spread in
        another way; else local.
    """
    names = Namer({"model": live.model}).names_of(optimizers, _PLACE)
    groups = _live_groups(optimizers, names)
    comm = live.comm(Comm() if from_first else Comm.alone())
    if full or live.units:
        live.meet(comm, "set_optimizer_state_dict")
    if groups and is_nothing(comm if full else Comm.alone(), given, from_first=from_first):
        return
    fills = Fills()
    if from_first:
        nested, leaves = _told(comm, lambda: _nested(given, groups))
    else:
        nested, leaves = _nested(given, groups), {}
    moves = bool(live.units) or _moves(nested, optimizers, names)
    with (comm if full or from_first or moves else Comm.alone()).together(
        "set_optimizer_state_dict"
    ):
        plan = _planned(optimizers, names, nested, strict, fills)
    with torch.no_grad():
        if from_first:
            fills.run_from_first(comm, leaves)
        else:
            fills.run()
        plan.finish()


def _live_groups(optimizers: Optimizers, names: ParamNames) -> list[list[str]]:
    """List the names in each live group; of a flat parameter, those of what is in it."""
    return [
        [name for one in group[PARAMS] for name in names.filed(one)]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _moves(nested: Mapping[str, Any], optimizers: Optimizers, names: ParamNames) -> bool:
    """Whether a shard is given for a parameter that is spread in another way."""
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            for name in names.names[id(parameter)]:
                for value in nested[STATE].get(name, {}).values():
                    alike = is_spread(value) and value.shape == parameter.shape
                    if alike and must_move(value, parameter):
                        return True
    return False


def _told(comm: Comm, given: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[int, Any]]:
    """Return what rank 0 has, with tensors on meta for tensors; and its own tensors by their ids.

    Ranks: collective over the group.
    """
    rows: list[Any] = []
    leaves: dict[Path, Any] = {}
    with comm.together("set_optimizer_state_dict"):
        if comm.is_coordinator:
            leaves = dict(_leaves(given(), ()))
            rows = [
                [list(path), form_of(value) if is_tensor(value) else [value]]
                for path, value in leaves.items()
            ]
    found: dict[Path, Any] = {tuple(path): from_form(row) for path, row in comm.tell(rows)}
    nested: dict[str, Any] = {STATE: {}, GROUPS: []}
    for path, value in found.items():
        if len(path) > 1 or value:
            _set(nested, path, value)
    return nested, {id(form): leaves[path] for path, form in found.items() if path in leaves}


def _nested(given: Mapping[str, Any], live: Sequence[Sequence[str]]) -> dict[str, Any]:
    if not given:
        return {STATE: {}, GROUPS: []}
    if not (STATE in given and isinstance(given.get(GROUPS), list)):
        unflattened: dict[str, Any] = dotted.unflatten(given, live)
        return unflattened
    states, groups = given[STATE], given[GROUPS]
    members = [one for group in groups for one in group[PARAMS]]
    if members and all(type(one) is int for one in members):
        return _named(states, groups, live)
    return {STATE: dict(states), GROUPS: list(groups)}


def _named(
    states: Mapping[int, Any], groups: Sequence[Mapping[str, Any]], live: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Give names to the parameters of a state dict that numbers them."""
    counts = [len(group[PARAMS]) for group in groups], [len(names) for names in live]
    if counts[0] != counts[1]:
        raise StateDictMismatchError(
            f"groups of {counts[0]} parameters in the state dict, of {counts[1]} in the optimizer",
            code="state_mismatch",
        )
    names: dict[int, str] = {}
    for group, fqns in zip(groups, live, strict=True):
        names.update(zip(group[PARAMS], fqns, strict=True))
    renamed = [{**group, PARAMS: [names[n] for n in group[PARAMS]]} for group in groups]
    return {STATE: {names[n]: state for n, state in states.items()}, GROUPS: renamed}


def _planned(
    optimizers: Optimizers,
    names: ParamNames,
    nested: dict[str, Any],
    strict: bool,
    fills: Fills,
) -> Plan:
    """Plan to set; everything that can be wrong is found here."""
    nested = {
        STATE: {name: _stepped(state) for name, state in nested[STATE].items()},
        GROUPS: nested[GROUPS],
    }
    if strict and nested[STATE]:
        _check_states(optimizers, names, nested)
    groups: OrderedDict[Any, Any] = OrderedDict()
    leads = [_lead(optimizer, names) for optimizer in optimizers if _has_empty(optimizer)]
    for group in nested[GROUPS]:
        lead = leads[0] if leads else ""
        groups[group[PARAMS][0] if group[PARAMS] else (lead, len(groups))] = dict(group)
    plan = Plan(
        None,  # type: ignore[arg-type]  # nothing is read from a file
        Selection(None),
        dtype=lambda _: None,
        device=lambda _: torch.device("cpu"),
        strict=lambda _: strict,
    )
    stored = {STATE: nested[STATE], GROUPS: groups}
    place_optimizers(plan, optimizers, names, stored, _PLACE, fit=fills.fit)
    plan.report.unexpected.clear()  # state of optimizers that are set elsewhere
    if not strict:
        plan.report.missing.clear()
    try:
        plan.report.check(lambda _: True)
    except MismatchError as error:
        raise StateDictMismatchError(
            error.message, code=error.code, hint=error.hint, report=error.report
        ) from None
    return plan


def _lead(optimizer: torch.optim.Optimizer, names: ParamNames) -> str:
    return next(map(names.first, _parameters(optimizer)), "")


def _has_empty(optimizer: torch.optim.Optimizer) -> bool:
    return any(not group[PARAMS] for group in optimizer.param_groups)


def _check_states(optimizers: Optimizers, names: ParamNames, nested: Mapping[str, Any]) -> None:
    known = {name for group in nested[GROUPS] for name in group[PARAMS]}
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            for mine in names.parts[id(parameter)]:
                entry = any(name in nested[STATE] for name in mine)
                if parameter.requires_grad and known.intersection(mine) and not entry:
                    raise _lacks(mine[0])


def _lacks(name: str) -> StateDictMismatchError:
    return StateDictMismatchError(
        f"Missing optimizer state of parameter {name}",
        code="state_mismatch",
        hint="pass StateDictOptions(strict=False) to leave it without state",
    )


def _stepped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry; an empty one if it is that of before the first step."""
    step = state.get("step")
    zero = isinstance(step, torch.Tensor) and step.numel() == 1 and _is_zero(step)
    return {} if zero or (type(step) in (int, float) and step == 0) else dict(state)


def _is_zero(step: torch.Tensor) -> bool:
    local = local_of(step)
    return not local.is_meta and not local.any()


def _set(root: dict[str, Any], path: Path, value: Any) -> None:
    node: Any = root
    for step, following in zip(path, path[1:], strict=False):
        empty: Any = [] if type(following) is int and step in (GROUPS,) else {}
        if isinstance(node, list):
            while len(node) <= step:
                node.append({})
            node = node[step]
        else:
            node = node.setdefault(step, empty)
    node[path[-1]] = value
