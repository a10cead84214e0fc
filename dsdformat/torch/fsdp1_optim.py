"""Optimizer state of FSDP1 that some ranks do not have, told by those that do.

With `use_orig_params` most ranks hold no element of a parameter, and have no state for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from dsdformat.torch.buffers import bytes_of, empty
from dsdformat.torch.comm import Comm, group_order
from dsdformat.torch.dtypes import dtype_name, torch_dtype
from dsdformat.torch.fsdp1 import Member, Unit
from dsdformat.torch.sharding import FlatShard

__all__ = ["completed"]


def completed(
    states: dict[str, Any], units: Sequence[Unit], names: Mapping[int, Sequence[str]]
) -> dict[str, Any]:
    """Give ranks that hold no element of a parameter the entries that others have.

    Args:
        states: By the names of parameters.
        units: All flat parameters of the model.
        names: Of the optimizers' parameters, by id.

    Ranks: collective over the ranks of each flat parameter whose parameters an optimizer has one
        by one; local if there are none.
    """
    members = {
        names[id(member.parameter)][0]: member
        for unit in units
        for member in unit.members
        if id(member.parameter) in names
    }
    groups: dict[tuple[int, ...], dict[str, Member]] = {}
    for name, member in members.items():
        groups.setdefault(tuple(sorted(member.sharding.ranks)), {})[name] = member
    told: dict[str, Any] = {}
    for ranks in sorted(groups, key=group_order):
        told.update(_told(states, groups[ranks], ranks))
    result: dict[str, Any] = {}
    for name in dict.fromkeys([*states, *members]):
        if name not in members:
            result[name] = states[name]
        elif name in told:
            member = members[name]
            mine = states.get(name, {}) if member.stop > member.start else {}
            result[name] = {
                key: mine[key] if key in mine else _made(form, member) for key, form in told[name]
            }
    return result


def _told(
    states: Mapping[str, Any], members: Mapping[str, Member], ranks: tuple[int, ...]
) -> dict[str, Any]:
    """Return the forms of the entries of parameters, each told by the first rank that has some."""
    comm = Comm.of_ranks(ranks, [next(iter(members.values())).group or distributed.group.WORLD])
    rows = {
        name: [[key, _form(value)] for key, value in states[name].items()]
        for name, member in members.items()
        if name in states and _teller(member) == comm.ranks[comm.rank]
    }
    told: dict[str, Any] = {}
    for row in comm.gather_values(rows):
        told.update(row)
    return told


def _teller(member: Member) -> int:
    """Return the first rank that holds any of a parameter."""
    sharding = member.sharding
    holders = (p for p in range(len(sharding.ranks)) if sharding.held(p))
    return sharding.ranks[next(holders, 0)]


def _form(value: Any) -> Any:
    if isinstance(value, FlatShard):
        return {"dtype": dtype_name(value.dtype)}
    if isinstance(value, torch.Tensor):
        raw = bytes(bytes_of(value.detach().cpu().contiguous()))
        return {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "bytes": raw}
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
