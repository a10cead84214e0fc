"""Optimizers' state dicts by canonical names: read from any wrapping, and set into any.

Drives the public functions of `state_dict.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import MismatchError, listed
from dsdformat.selection import Selection
from dsdformat.torch import dotted
from dsdformat.torch.comm import Comm
from dsdformat.torch.fills import Fills
from dsdformat.torch.fsdp1_optim import completed
from dsdformat.torch.live_model import LiveModel
from dsdformat.torch.model_state import (
    StateDictMismatchError,
    check_alike,
    finished,
    is_nothing,
)
from dsdformat.torch.names import Namer, ParamNames
from dsdformat.torch.optim import GROUPS, STATE, capture_optimizers, entries_of
from dsdformat.torch.place_optim import place_optimizers
from dsdformat.torch.placing import Plan
from dsdformat.torch.redistribute import has_no_data, must_move
from dsdformat.torch.sharding import is_spread, is_tensor, local_of
from dsdformat.torch.slots import initial_state
from dsdformat.torch.stored import Path
from dsdformat.torch.told import Told

__all__ = ["get_optimizers", "plan_optimizers"]

PARAMS = "params"
_PLACE = ("optimizer",)

Optimizers = Sequence[torch.optim.Optimizer]


def get_optimizers(
    live: LiveModel, optimizers: Optimizers, *, full: bool, offload: bool, flat: bool
) -> dict[str, Any]:
    """Return the state of optimizers by names, nested or flat.

    Ranks: collective over the group, if `full` or with FSDP1; else local.
    """
    comm = live.comm(Comm())
    collective = live.is_spread and (full or bool(live.units))
    if collective:
        live.meet(comm, "get_optimizer_state_dict")
    namer = Namer({"model": live.model}, lambda _: live.units)
    with (comm if collective else Comm.alone()).together("get_optimizer_state_dict"):
        names = namer.names_of(optimizers, _PLACE)
        captured = capture_optimizers(optimizers, names, _PLACE)
        nested: dict[str, Any] = {
            STATE: _with_slots(optimizers, names, captured[STATE]),
            GROUPS: [dict(one) for one in captured[GROUPS].values()],
        }
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
    elif type(value) in (list, tuple) and any(is_tensor(v) or isinstance(v, dict) for v in value):
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


def plan_optimizers(
    live: LiveModel,
    optimizers: Optimizers,
    given: Mapping[str, Any],
    *,
    full: bool,
    strict: bool,
    from_first: bool,
) -> Callable[[], None]:
    """Compare a nested or flat state by names with optimizers, and return what sets it.

    A stored dtype is kept; nothing is stepped. An entry that is that of before the first step
    leaves its parameter as it is then.

    Raises:
        StateDictMismatchError: `strict`, and names or forms differ.

    Ranks: collective over the group if `full`, with FSDP1, or if given shards are spread in
        another way; else local. So is the result.
    """
    names = Namer({"model": live.model}, lambda _: live.units).names_of(optimizers, _PLACE)
    groups = _live_groups(optimizers, names)
    comm = live.comm(Comm() if from_first else Comm.alone())
    if full or live.units:
        live.meet(comm, "set_optimizer_state_dict")
    if groups and is_nothing(comm if full else Comm.alone(), given, from_first=from_first):
        return lambda: None
    told, nested = None, {}
    if from_first:
        told = Told(comm, "set_optimizer_state_dict", lambda: _begun(_nested(given, groups)))
        nested = told.state
    else:
        with (comm if full else Comm.alone()).together("set_optimizer_state_dict"):
            nested = _begun(_nested(given, groups))
            _check_data(nested)
    moves = bool(live.units) or _moves(nested, optimizers, names)
    group = comm if full or from_first or moves else Comm.alone()
    plan = _empty_plan(strict)
    fills = Fills(plan.other_form)
    with group.together("set_optimizer_state_dict"):
        _plan(plan, fills, live, optimizers, names, nested, strict)
    if full and not from_first:
        check_alike(comm, dict(_leaves(nested[STATE], ())))

    def install() -> None:
        with torch.no_grad():
            if told is None:
                fills.run()
            else:
                fills.run_told(told)
            plan.finish()

    return install


def _check_data(nested: Mapping[str, Any]) -> None:
    meta = [
        ".".join(map(str, path))
        for path, value in _leaves(nested[STATE], ())
        if is_tensor(value) and has_no_data(value)
    ]
    if meta:
        raise StateDictMismatchError(
            f"{listed(meta)} are on the meta device and have no data",
            code="state_mismatch",
        )


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


def _empty_plan(strict: bool) -> Plan:
    return Plan(
        None,  # type: ignore[arg-type]  # nothing is read from a file
        Selection(None),
        dtype=lambda _: None,
        device=lambda _: torch.device("cpu"),
        strict=lambda _: strict,
    )


def _plan(
    plan: Plan,
    fills: Fills,
    live: LiveModel,
    optimizers: Optimizers,
    names: ParamNames,
    nested: dict[str, Any],
    strict: bool,
) -> None:
    """Plan to set; everything that can be wrong is found here."""
    states = _unstepped_left_out(optimizers, names, nested[STATE])
    if strict and states:
        _check_states(live, optimizers, names, {**nested, STATE: states})
    leads = _leads_of_empty(optimizers, names, nested[GROUPS])
    groups: OrderedDict[Any, Any] = OrderedDict()
    for number, group in enumerate(nested[GROUPS]):
        groups[group[PARAMS][0] if group[PARAMS] else (leads[number], number)] = dict(group)
    place_optimizers(
        plan, optimizers, names, {STATE: states, GROUPS: groups}, _PLACE, fit=fills.fit
    )
    plan.report.unexpected.clear()  # state of optimizers that are set elsewhere
    if not strict:
        plan.report.missing.clear()
    try:
        plan.report.check(lambda _: True)
    except MismatchError as error:
        raise StateDictMismatchError(
            error.message, code=error.code, hint=error.hint, report=error.report
        ) from None


def _leads_of_empty(
    optimizers: Optimizers, names: ParamNames, groups: Sequence[Mapping[str, Any]]
) -> dict[int, str]:
    """Say of each empty group, by its number, the first name of the optimizer that it is of.

    It is one with an empty group of the same options, if there is one.
    """
    free = [
        (_lead(optimizer, names), set(group))
        for optimizer in optimizers
        for group in optimizer.param_groups
        if not group[PARAMS]
    ]
    result: dict[int, str] = {}
    for number, group in enumerate(groups):
        if not group[PARAMS]:
            alike = (one for one in free if one[1] == set(group))
            found = next(alike, free[0] if free else None)
            result[number] = found[0] if found else ""
            if found:
                free.remove(found)
    return result


def _unstepped_left_out(
    optimizers: Optimizers, names: ParamNames, states: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entries, without those of before the first step that would make state."""
    kept = {
        name
        for optimizer in optimizers
        for parameter in _parameters(optimizer)
        if optimizer.state.get(parameter)
        for name in names.names[id(parameter)]
    }
    return {
        name: dict(state) if name in kept or not _is_unstepped(state) else {}
        for name, state in states.items()
    }


def _begun(nested: dict[str, Any]) -> dict[str, Any]:
    """Leave out the entries of optimizers that count no steps, if all that they have is zero."""
    states = nested[STATE]
    tensors = [value for _, value in _leaves(states, ()) if is_tensor(value)]
    counted = any("step" in state for state in states.values())
    if tensors and not counted and all(map(_is_zero, tensors)):
        return {**nested, STATE: {name: {} for name in states}}
    return nested


def _lead(optimizer: torch.optim.Optimizer, names: ParamNames) -> str:
    return next(map(names.first, _parameters(optimizer)), "")


def _check_states(
    live: LiveModel, optimizers: Optimizers, names: ParamNames, nested: Mapping[str, Any]
) -> None:
    known = {name for group in nested[GROUPS] for name in group[PARAMS]}
    others = [name for name in nested[STATE] if name not in live.tensors]
    own = {name for some in names.names.values() for name in some}
    others = [name for name in others if name not in own]
    if others:
        raise StateDictMismatchError(
            f"Unexpected optimizer state of {', '.join(others[:10])}, of which the model has no "
            "parameter",
            code="state_mismatch",
            hint="pass StateDictOptions(strict=False) to leave it out",
        )
    for optimizer in optimizers:
        parts = [
            mine
            for parameter in _parameters(optimizer)
            if parameter.requires_grad
            for mine in names.parts[id(parameter)]
            if known.intersection(mine)
        ]
        lacking = [mine for mine in parts if not any(name in nested[STATE] for name in mine)]
        # One of which nothing is there may keep nothing.
        if lacking and (len(lacking) < len(parts) or optimizer.state or initial_state(optimizer)):
            raise _lacks(lacking[0][0])


def _lacks(name: str) -> StateDictMismatchError:
    return StateDictMismatchError(
        f"Missing optimizer state of parameter {name}",
        code="state_mismatch",
        hint="pass StateDictOptions(strict=False) to leave it without state",
    )


def _is_unstepped(state: Mapping[str, Any]) -> bool:
    """Whether an entry is that of before the first step."""
    step: Any = state.get("step")
    if is_tensor(step):
        return bool(step.numel() == 1 and _is_zero(step))
    return type(step) in (int, float) and step == 0


def _is_zero(tensor: Any) -> bool:
    local = local_of(tensor)
    return not local.is_meta and not local.any()
