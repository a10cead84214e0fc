"""Optimizers' state dicts by canonical names: read from any wrapping, and set into any.

Drives the public functions of `state_dict.py`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dsdformat.errors import MismatchError
from dsdformat.torch import dotted, fsdp1
from dsdformat.torch.broadcast import broadcast
from dsdformat.torch.comm import Comm
from dsdformat.torch.install_optim import Installer, Maker
from dsdformat.torch.model_state import StateDictMismatchError, finished, form_of, from_form
from dsdformat.torch.names import Namer, ParamNames
from dsdformat.torch.optim import GROUPS, STATE, capture_optimizers
from dsdformat.torch.place_optim import place_optimizers
from dsdformat.torch.placing import Plan
from dsdformat.torch.redistribute import copy_into, group_of, like_parameter
from dsdformat.torch.selection import Selection
from dsdformat.torch.sharding import as_dtensor, is_dtensor, local_of
from dsdformat.torch.slots import initial_state
from dsdformat.torch.stored import Path

__all__ = ["get_optimizers", "set_optimizers"]

PARAMS = "params"
_PLACE = ("optimizer",)

Optimizers = Sequence[torch.optim.Optimizer]


def get_optimizers(
    model: nn.Module, optimizers: Optimizers, *, full: bool, offload: bool, flat: bool
) -> dict[str, Any]:
    """Return the state of optimizers by names, nested or flat.

    Ranks: collective over the group, if `full` or with FSDP1; else local.
    """
    nested: dict[str, Any] = {STATE: {}, GROUPS: []}
    if fsdp1.fsdp_modules(model):
        for optimizer in optimizers:
            first = full and offload
            part = fsdp1.optimizer_entries(model, optimizer, full=full, first_only=first)
            nested[STATE].update(part.get(STATE, {}))
            nested[GROUPS].extend(part.get(GROUPS, []))
        if full and offload and not nested[GROUPS]:
            return {}
    else:
        names = Namer({"model": model}).names_of(optimizers, _PLACE)
        captured = capture_optimizers(optimizers, names, _PLACE)
        nested[GROUPS] = [dict(group) for group in captured[GROUPS].values()]
        nested[STATE] = _with_slots(optimizers, names, captured[STATE])
    if full or offload:
        leaves: dict[Any, Any] = dict(_leaves(nested, ()))
        leaves = finished(leaves, full=full, offload=offload)
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
            name = names.first(parameter)
            if name in states:
                result[name] = dict(states[name])
            elif parameter in initial:
                result[name] = initial[parameter]
            elif optimizer.state and parameter.requires_grad:
                result[name] = {}  # says that there is none yet
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
    model: nn.Module,
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

    Ranks: collective over the group if `from_first`, or with FSDP1; else local.
    """
    if fsdp1.fsdp_modules(model):
        _set_fsdp1(model, optimizers, given, full=full, strict=strict, from_first=from_first)
        return
    names = Namer({"model": model}).names_of(optimizers, _PLACE)
    live = [
        [names.first(parameter) for parameter in group[PARAMS]]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    comm = group_of(p for o in optimizers for p in _parameters(o)) if from_first else None
    if comm is None:
        plan = _planned(optimizers, names, _nested(given, live), strict)
    else:
        with comm.together("set_optimizer_state_dict"):
            nested = _nested(given, live) if comm.is_coordinator else {}
        nested = _received(comm, nested, names, optimizers)
        with comm.together("set_optimizer_state_dict"):
            plan = _planned(optimizers, names, nested, strict)
    with torch.no_grad():
        plan.finish()


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
    optimizers: Optimizers, names: ParamNames, nested: Mapping[str, Any], strict: bool
) -> Plan:
    """Plan to set; everything that can be wrong is found here."""
    states = nested[STATE]
    if strict and states:
        _check_states(optimizers, names, nested)
    groups: OrderedDict[Any, Any] = OrderedDict()
    leads = [_lead(optimizer, names) for optimizer in optimizers if _has_empty(optimizer)]
    for group in nested[GROUPS]:
        lead = leads[0] if leads else ""
        groups[group[PARAMS][0] if group[PARAMS] else (lead, len(groups))] = dict(group)
    stored = {STATE: {name: _stepped(state) for name, state in states.items()}, GROUPS: groups}
    plan = Plan(
        None,  # type: ignore[arg-type]  # nothing is read from a file
        Selection(None),
        dtype=lambda _: None,
        device=lambda _: torch.device("cpu"),
        strict=lambda _: strict,
    )
    place_optimizers(plan, optimizers, names, stored, _PLACE, fit=_fit)
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
            mine = names.names[id(parameter)]
            entry = any(name in nested[STATE] for name in mine)
            if parameter.requires_grad and known.intersection(mine) and not entry:
                raise StateDictMismatchError(
                    f"Missing optimizer state of parameter {mine[0]}",
                    code="state_mismatch",
                    hint="pass StateDictOptions(strict=False) to leave it without state",
                )


def _stepped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry; an empty one if it is that of before the first step."""
    step = state.get("step")
    zero = isinstance(step, torch.Tensor) and step.numel() == 1 and not local_of(step).any()
    return {} if zero or (type(step) in (int, float) and step == 0) else dict(state)


def _fit(
    value: Any,
    live: Any,
    path: Path,
    device: torch.device | None,
    parameter: torch.Tensor | None,
) -> Maker:
    """Plan where a value goes: into a live tensor that is alike, else into a new one."""
    if isinstance(value, torch.Tensor):
        alike = isinstance(live, torch.Tensor) and (live.shape, live.dtype) == (
            value.shape,
            value.dtype,
        )
        if alike and not live.is_meta:
            return lambda: _filled(live, value)
        return lambda: like_parameter(value, parameter, device)
    if isinstance(value, Mapping):
        makers = {
            key: _fit(
                v, live.get(key) if isinstance(live, Mapping) else None, path, device, parameter
            )
            for key, v in value.items()
        }
        return lambda: {key: make() for key, make in makers.items()}
    if type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) for v in value):
        items = [_fit(item, None, path, device, parameter) for item in value]
        return lambda: type(value)(make() for make in items)
    return lambda: copy.deepcopy(value)


def _filled(live: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if live is not value:
        copy_into(value, live)
    return live


def _received(
    comm: Comm, nested: dict[str, Any], names: ParamNames, optimizers: Optimizers
) -> dict[str, Any]:
    """Give all ranks what rank 0 has: values, and their parts of tensors."""
    leaves = dict(_leaves(nested, ())) if comm.is_coordinator else {}
    rows = [
        [list(path), form_of(value) if isinstance(value, torch.Tensor) else [value]]
        for path, value in leaves.items()
    ]
    told = comm.gather_values(rows)[0]
    parameters = {
        name: parameter
        for optimizer in optimizers
        for parameter in _parameters(optimizer)
        for name in names.names[id(parameter)]
    }
    found: dict[Path, Any] = {tuple(path): from_form(row) for path, row in told}
    targets = {
        repr(path): _target(form, parameters.get(path[1]) if path[0] == STATE else None, comm)
        for path, form in found.items()
        if isinstance(form, torch.Tensor)
    }
    whole = (
        {repr(path): leaves[path] for path in found if repr(path) in targets} if leaves else None
    )
    broadcast(whole, targets, group=comm.group)
    result: dict[str, Any] = {STATE: {}, GROUPS: []}
    for path, form in found.items():
        _set(result, path, targets.get(repr(path), form))
    return result


def _target(form: torch.Tensor, parameter: torch.Tensor | None, comm: Comm) -> torch.Tensor:
    """Make what a tensor that is sent is received into."""
    if parameter is not None and is_dtensor(parameter) and parameter.shape == form.shape:
        shard = torch.empty_like(local_of(parameter), dtype=form.dtype)
        return as_dtensor(shard, parameter, form.shape)
    return torch.empty_like(form, device=comm.device)


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


def _set_fsdp1(
    model: nn.Module,
    optimizers: Optimizers,
    given: Mapping[str, Any],
    *,
    full: bool,
    strict: bool,
    from_first: bool,
) -> None:
    for optimizer in optimizers:
        live = fsdp1.group_names(model, optimizer)
        nested = _nested(given, live)
        if given:
            nested = _own_part(nested, live, optimizer)
        if strict and given and not from_first:
            _check_flat(live, nested)
        entries = fsdp1.optimizer_to_load(
            model, optimizer, nested, full=full, first_only=from_first
        )
        parameters = list(_parameters(optimizer))
        keys = [key for group in entries[GROUPS] for key in group[PARAMS]]
        states: dict[torch.Tensor, Any] = {}
        for parameter, key in zip(parameters, keys, strict=True):
            state = entries[STATE].get(key)
            states[parameter] = _makers(state, optimizer, parameter) if state else None
        groups = [
            {key: _constant(value) for key, value in group.items() if key != PARAMS}
            for group in entries[GROUPS]
        ]
        Installer(optimizer, states, groups, {}, {}).run()


def _own_part(
    nested: Mapping[str, Any], live: Sequence[Sequence[str]], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return what is of the parameters of one optimizer, in the groups that it has."""
    groups = []
    empty = [group for group in nested[GROUPS] if not group[PARAMS]]
    for names, own in zip(live, optimizer.param_groups, strict=True):
        found = [group for group in nested[GROUPS] if set(group[PARAMS]).intersection(names)]
        if not names:
            found = [empty.pop(0)] if empty else []
        groups.append({**(found[0] if found else own), PARAMS: list(names)})
    members = {name for names in live for name in names}
    states = {name: state for name, state in nested[STATE].items() if name in members and state}
    return {STATE: states, GROUPS: groups}


def _check_flat(live: Sequence[Sequence[str]], nested: Mapping[str, Any]) -> None:
    missing = [name for names in live for name in names if name not in nested[STATE]]
    if nested[STATE] and missing:
        raise StateDictMismatchError(
            f"Missing optimizer state of parameter {missing[0]}", code="state_mismatch"
        )


def _makers(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> dict[Any, Maker]:
    live = optimizer.state.get(parameter) or {}
    return {
        key: _fit(value, live.get(key), (), None if key == "step" else parameter.device, None)
        for key, value in state.items()
    }


def _constant(value: Any) -> Maker:
    return lambda: copy.deepcopy(value)
