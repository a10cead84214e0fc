"""Optimizer state of FSDP1's flat shards, by the names of the parameters in them, and back.

Without `use_orig_params` an optimizer has flat parameters, each with one state for all that is in
it; with it, the optimizer has the parameters, of which most ranks hold no element and have no
state. Both are read as shards of whole state tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsdformat.errors import UnsupportedValueError, shorten
from dsdformat.torch.buffers import bytes_of, empty
from dsdformat.torch.comm import Comm
from dsdformat.torch.dtypes import torch_dtype
from dsdformat.torch.fsdp1 import Member, Unit
from dsdformat.torch.optim import GROUPS, PARAMS, STATE
from dsdformat.torch.sharding import FlatShard

__all__ = ["Joined", "expanded", "joined", "members_of"]

STEP = "step"


@dataclass(frozen=True)
class Joined:
    """Tensors of the parameters in a flat one, which are one tensor of the flat parameter.

    Attributes:
        parts: For each parameter that has one.
        dtype: Of the tensor.
    """

    parts: tuple[tuple[Member, Any], ...]
    dtype: torch.dtype


def members_of(units: Sequence[Unit]) -> dict[int, Member]:
    """Return the parameters that optimizers have one by one, by their ids."""
    return {
        id(member.parameter): member
        for unit in units
        for member in unit.members
        if member.parameter is not None
    }


def _flat_names(units: Sequence[Unit], names: Mapping[int, Sequence[str]]) -> dict[str, Unit]:
    """Return the units whose flat parameter an optimizer has, by the name that it has there."""
    return {names[id(unit.flat)][0]: unit for unit in units if id(unit.flat) in names}


def expanded(
    nested: Mapping[str, Any],
    units: Sequence[Unit],
    names: Mapping[int, Sequence[str]],
    comm: Comm,
) -> dict[str, Any]:
    """Return a state of live parameters as one of original parameters.

    Args:
        nested: `state` and `param_groups`, a list, as the optimizer has them on this rank.
        units: All flat parameters of the model.
        names: Of the optimizers' parameters, by id.
        comm: The ranks that hold the model together.

    Raises:
        DistributedError: `rank_failed`: an entry cannot be cut into what each parameter has.

    Ranks: collective over the group.
    """
    flats = _flat_names(units, names)
    alone = {names[key][0]: member for key, member in members_of(units).items() if key in names}
    with comm.together("reading the optimizer"):
        states: dict[str, Any] = {}
        for name, state in nested[STATE].items():
            if name in flats:
                states.update(_cut(flats[name], state))
            else:
                states[name] = _as_shards(alone[name], state) if name in alone else state
    groups = []
    for group in nested[GROUPS]:
        fqns = [
            fqn
            for name in group[PARAMS]
            for fqn in ([m.names[0] for m in flats[name].members] if name in flats else [name])
        ]
        groups.append({**group, PARAMS: fqns})
    if alone:
        states = _completed(states, alone, comm)
    return {STATE: states, GROUPS: groups}


def _cut(unit: Unit, state: Mapping[Any, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    for member in unit.members:
        parts = {}
        for key, value in state.items():
            if _is_cut(key, value, unit.piece.numel()):
                _check_numel(member, key, value, unit.piece.numel())
                parts[key] = member.shard_of(value)
            else:
                parts[key] = value
        yield member.names[0], parts


def _as_shards(member: Member, state: Mapping[Any, Any]) -> dict[Any, Any]:
    result = {}
    for key, value in state.items():
        if _is_cut(key, value, member.stop - member.start):
            _check_numel(member, key, value, member.stop - member.start)
            result[key] = member.as_shard(value)
        else:
            result[key] = value
    return result


def _is_cut(key: Any, value: Any, numel: int) -> bool:
    """Whether an entry has an element for each of this rank's; else it is a number."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or key == STEP:
        return False
    return value.numel() == numel or value.numel() != 1


def _check_numel(member: Member, key: Any, value: torch.Tensor, numel: int) -> None:
    if value.numel() != numel:
        raise UnsupportedValueError(
            f"{shorten(key)} of {member.names[0]} has shape {list(value.shape)}, and not one "
            f"element for each of the {numel} of this rank's flat shard",
            hint="FSDP1 works with optimizers that work element by element",
        )


def _completed(states: dict[str, Any], members: Mapping[str, Member], comm: Comm) -> dict[str, Any]:
    """Give ranks that hold no element of a parameter the entries that others have."""
    own = comm.ranks[comm.rank]
    rows = {
        name: [[key, _form(value)] for key, value in states[name].items()]
        for name, member in members.items()
        if name in states and _teller(member) == own
    }
    told: dict[str, Any] = {}
    for row in comm.gather_values(rows):
        told.update(row)
    result = {}
    for name in [*(one for one in states if one not in members), *members]:
        if name not in members:
            result[name] = states[name]
        elif name in told:
            mine = states.get(name, {}) if members[name].stop > members[name].start else {}
            result[name] = {
                key: mine[key] if key in mine else _made(form, members[name])
                for key, form in told[name]
            }
    return result


def _teller(member: Member) -> int:
    """Return the first rank that holds any of a parameter."""
    sharding = member.sharding
    holders = (p for p in range(len(sharding.ranks)) if sharding.held(p))
    return sharding.ranks[next(holders, 0)]


def _form(value: Any) -> Any:
    if isinstance(value, FlatShard):
        return {"dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        raw = bytes(bytes_of(value.detach().cpu().contiguous()))
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "bytes": raw}
    return [value]


def _made(form: Any, member: Member) -> Any:
    if isinstance(form, list):
        return form[0]
    dtype = torch_dtype(form["dtype"])
    assert dtype is not None  # it came from a tensor
    if "shape" not in form:
        return member.as_shard(empty((0,), dtype))
    value = empty(form["shape"], dtype)
    bytes_of(value)[:] = form["bytes"]
    return value


def joined(
    nested: Mapping[str, Any],
    units: Sequence[Unit],
    names: Mapping[int, Sequence[str]],
) -> tuple[dict[str, Any], list[str]]:
    """Return a state of original parameters as one of live parameters.

    Args:
        nested: `state` and `param_groups`, a list, by names of original parameters.
        units: All flat parameters of the model.
        names: Of the optimizers' parameters, by id.

    Returns:
        The state, with `Joined` in the place of what is one tensor; and the names of parameters
        in flat ones that have no entry, though others of the same flat one have.

    Raises:
        UnsupportedValueError: parameters in one flat parameter have different numbers.
    """
    flats = _flat_names(units, names)
    where: dict[str, str] = {}
    for flat, unit in flats.items():
        for member in unit.members:
            where.update(dict.fromkeys(member.names, flat))
    states = {name: state for name, state in nested[STATE].items() if name not in where}
    missing: list[str] = []
    for flat, unit in flats.items():
        entries = [(m, _entry_of(m, nested[STATE])) for m in unit.members]
        there = [(member, entry) for member, entry in entries if entry is not None]
        if there:
            states[flat] = _join(flat, [(m, e) for m, e in there if e])
            missing.extend(m.names[0] for m, e in entries if e is None and m.requires_grad)
    groups = []
    for group in nested[GROUPS]:
        live = dict.fromkeys(where.get(name, name) for name in group[PARAMS])
        groups.append({**group, PARAMS: list(live)})
    return {STATE: states, GROUPS: groups}, missing


def _entry_of(member: Member, states: Mapping[str, Any]) -> Mapping[Any, Any] | None:
    found: Mapping[Any, Any] | None = next(
        (states[name] for name in member.names if name in states), None
    )
    return found


def _join(flat: str, entries: Sequence[tuple[Member, Mapping[Any, Any]]]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key in dict.fromkeys(key for _, entry in entries for key in entry):
        values = [(member, entry[key]) for member, entry in entries if key in entry]
        if all(_fits(member, value) and key != STEP for member, value in values):
            dtypes = {value.dtype for _, value in values}
            result[key] = Joined(tuple(values), next(iter(dtypes)))
            continue
        (first, value), others = values[0], values[1:]
        for member, other in others:
            if not _equal(value, other):
                raise UnsupportedValueError(
                    f"{shorten(key)} of {first.names[0]} is {shorten(value)}, and of "
                    f"{member.names[0]} it is {shorten(other)}; both lie in {flat}, which has one",
                    hint="wrap the model with use_orig_params=True",
                )
        result[key] = value
    return result


def _fits(member: Member, value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return shape is not None and tuple(shape) == member.sharding.shape and len(shape) > 0


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_meta or other.is_meta:
            return one.shape == other.shape and one.dtype == other.dtype
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
