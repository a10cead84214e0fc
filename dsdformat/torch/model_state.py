"""A model's state dict under canonical names: read from any wrapping, and set into any.

Drives the public functions of `state_dict.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dsdformat.errors import MismatchError
from dsdformat.torch import fsdp1
from dsdformat.torch.broadcast import broadcast
from dsdformat.torch.capture import module_entries
from dsdformat.torch.comm import Comm
from dsdformat.torch.dtypes import torch_dtype
from dsdformat.torch.fqn import EXTRA_STATE, named_tensors, unwrapped
from dsdformat.torch.gather import gather
from dsdformat.torch.introspect import own_method
from dsdformat.torch.placing import replace_content
from dsdformat.torch.redistribute import copy_into, group_of, host_copy, materialized
from dsdformat.torch.report import LoadReport, Mismatch
from dsdformat.torch.sharding import is_dtensor, local_of

__all__ = ["IncompatibleKeys", "StateDictMismatchError", "get_model", "set_model"]


class StateDictMismatchError(MismatchError, RuntimeError):
    """Report a state dict that does not fit; a RuntimeError, as `load_state_dict` raises."""


class IncompatibleKeys(NamedTuple):
    """What a state dict lacks, and what it has too much."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def get_model(model: nn.Module, *, full: bool, offload: bool) -> dict[str, Any]:
    """Return the state dict; of whole tensors on the host, only rank 0 of the group gets any.

    Ranks: collective over the group, if `full` or with FSDP1; else local.
    """
    if fsdp1.fsdp_modules(model):
        entries = fsdp1.model_entries(model, full=full, first_only=full and offload)
    else:
        entries = {name: value for _, name, value in module_entries(model)}
    return finished(entries, full=full, offload=offload)


def finished(entries: dict[str, Any], *, full: bool, offload: bool) -> dict[str, Any]:
    """Gather and copy the tensors of a flat dict, as options ask."""
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    result = {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in entries.items()
    }
    if full:
        comm = group_of(tensors)
        spread = {name: value for name, value in tensors.items() if is_dtensor(value)}
        if spread:
            device = torch.device("cpu") if offload else None
            result.update(gather(spread, to=0 if offload else None, device=device))
        if offload and not comm.is_coordinator:
            return {}
        done = set(spread)
        return {
            name: host_copy(value) if offload and name not in done else value
            for name, value in result.items()
        }
    return {name: host_copy(value) for name, value in result.items()} if offload else result


def set_model(
    model: nn.Module, given: Mapping[str, Any], *, full: bool, strict: bool, from_first: bool
) -> IncompatibleKeys:
    """Set the state of a model.

    Args:
        model: Any module.
        given: Values by canonical names; only rank 0 has them if `from_first`.
        full: Whether they are whole.
        strict: Whether names that are missing or unexpected are errors.
        from_first: Whether rank 0 of the group gives other ranks their parts.

    Raises:
        StateDictMismatchError: on every rank that takes part; nothing was changed.

    Ranks: collective over the group if `from_first`, or with FSDP1; else local.
    """
    entries = module_entries(model) if not fsdp1.fsdp_modules(model) else []
    if not entries:
        return _set_fsdp1(model, given, full=full, strict=strict, from_first=from_first)
    comm = group_of([value for _, _, value in entries]) if from_first else None
    values = _announced(comm, given) if comm is not None else dict(given)
    report, keys = _compared(model, entries, values)
    if comm is None:
        _check(report, keys, strict=strict)
    else:
        with comm.together("set_model_state_dict"):
            _check(report, keys, strict=strict)
    live = _targets(model, entries, values)
    with torch.no_grad():
        if comm is not None:
            _broadcast(comm, given, live)
        else:
            for name, tensor in live.items():
                copy_into(values[name], tensor)
        _hand_over(model, entries, values)
    return keys


def _announced(comm: Comm, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rank 0 has, on all ranks: tensors on meta for tensors, and the values."""
    rows: dict[str, Any] = {}
    if comm.is_coordinator:
        for name, value in given.items():
            rows[name] = form_of(value) if isinstance(value, torch.Tensor) else [value]
    told: dict[str, Any] = comm.gather_values(rows)[0]
    return {name: from_form(row) for name, row in told.items()}


def form_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Describe a tensor in values of the format."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def from_form(row: Any) -> Any:
    """Return a tensor on meta for the description of one, or the value in a list."""
    if isinstance(row, list):
        return row[0]
    return torch.empty(row["shape"], dtype=torch_dtype(row["dtype"]), device="meta")


def _compared(
    model: nn.Module, entries: Sequence[tuple[str, str, Any]], values: Mapping[str, Any]
) -> tuple[LoadReport, IncompatibleKeys]:
    """Compare names and shapes. A tied tensor is there if one of its names is."""
    report = LoadReport()
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    wanted = set()
    for _, name, value in entries:
        wanted.add(name)
        if name not in values:
            if not any(other in values for other in names.get(id(value), ())):
                report.missing.append(name)
        elif isinstance(value, torch.Tensor) and not is_extra(name):
            stored = values[name]
            if not isinstance(stored, torch.Tensor) or stored.shape != value.shape:
                found = list(stored.shape) if isinstance(stored, torch.Tensor) else type(stored)
                report.mismatched.append(
                    Mismatch(name, "shape", str(found), str(list(value.shape)))
                )
    report.unexpected.extend(name for name in values if name not in wanted)
    return report, IncompatibleKeys(list(report.missing), list(report.unexpected))


def is_extra(name: str) -> bool:
    """Whether an entry is extra state."""
    return name.rsplit(".", 1)[-1] == EXTRA_STATE


def _check(report: LoadReport, keys: IncompatibleKeys, *, strict: bool) -> None:
    if report.mismatched or (strict and (keys.missing_keys or keys.unexpected_keys)):
        lines = []
        for title, found in (("Missing", keys.missing_keys), ("Unexpected", keys.unexpected_keys)):
            if found and strict:
                shown = ", ".join(found[:10]) + (" and more" if len(found) > 10 else "")
                lines.append(f"{title} {'keys' if len(found) > 1 else 'key'}: {shown}.")
        raise StateDictMismatchError(
            " ".join(["the state dict does not fit the model.", *lines]) + f"\n{report}",
            code="state_mismatch",
            report=report,
        )


def _targets(
    model: nn.Module, entries: Sequence[tuple[str, str, Any]], values: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the live tensors to be filled, each once; those on meta get memory first."""
    own = dict(named_tensors(model))
    devices = {local_of(tensor).device for tensor in own.values() if not tensor.is_meta}
    result: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for _, name, value in entries:
        if name not in values or not isinstance(value, torch.Tensor) or is_extra(name):
            continue
        tensor = own.get(name, value) if value.is_meta else value
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.is_meta:
            device = next(iter(devices), group_of([tensor]).device)
            replace_content(tensor, materialized(tensor, device))
        result[name] = tensor.detach()
    return result


def _broadcast(comm: Comm, given: Mapping[str, Any], live: Mapping[str, torch.Tensor]) -> None:
    whole = None
    if comm.is_coordinator:
        whole = {name: given[name].detach().to(tensor.dtype) for name, tensor in live.items()}
    broadcast(whole, live, group=comm.group)


def _hand_over(
    model: nn.Module,
    entries: Sequence[tuple[str, str, Any]],
    values: Mapping[str, Any],
) -> None:
    """Let the module's own `load_state_dict` see what was set, for its hooks and extra state."""
    module = unwrapped(model)
    own = dict(named_tensors(model))
    raw: OrderedDict[str, Any] = OrderedDict()
    for key, name, value in entries:
        if name in values:
            placed = isinstance(value, torch.Tensor) and not is_extra(name)
            raw[key] = own.get(name, value) if placed else values[name]
    own_method(module, "load_state_dict")(raw, strict=False)


def _set_fsdp1(
    model: nn.Module, given: Mapping[str, Any], *, full: bool, strict: bool, from_first: bool
) -> IncompatibleKeys:
    values = dict(given)
    if from_first:
        comm = Comm()
        forms = _announced(comm, given)
        targets = {
            name: torch.empty_like(form, device=comm.device)
            for name, form in forms.items()
            if isinstance(form, torch.Tensor)
        }
        _broadcast(comm, given, targets)
        values = {name: targets.get(name, form) for name, form in forms.items()}
    result = fsdp1.load_model(model, values, full=full, strict=strict)
    return IncompatibleKeys(list(result.missing_keys), list(result.unexpected_keys))
