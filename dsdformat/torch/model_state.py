"""A model's state dict under canonical names: read from any wrapping, and set into any.

Drives the public functions of `state_dict.py`.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dsdformat.errors import DsdPrecisionWarning, MismatchError, UnsupportedValueError, listed
from dsdformat.torch import fsdp1
from dsdformat.torch.buffers import as_bits, digest_of
from dsdformat.torch.comm import Comm
from dsdformat.torch.fsdp2 import reshard_fsdp2
from dsdformat.torch.gather import gather, gather_on
from dsdformat.torch.live_model import Entry, LiveModel, is_placed
from dsdformat.torch.placing import replace_content
from dsdformat.torch.redistribute import (
    as_dtensors,
    copy_all,
    has_no_data,
    host_copy,
    materialized,
    must_move,
)
from dsdformat.torch.report import LoadReport, Mismatch
from dsdformat.torch.sharding import is_spread, is_tensor, local_of
from dsdformat.torch.told import Told

__all__ = [
    "IncompatibleKeys",
    "StateDictMismatchError",
    "check_alike",
    "finished",
    "get_model",
    "is_nothing",
    "plan_model",
]


class StateDictMismatchError(MismatchError, RuntimeError):
    """Report a state dict that does not fit; a RuntimeError, as `load_state_dict` raises."""


class IncompatibleKeys(NamedTuple):
    """What a state dict lacks, and what it has too much."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def get_model(live: LiveModel, *, full: bool, offload: bool) -> dict[str, Any]:
    """Return the state dict; of whole tensors on the host, only rank 0 of the group gets any.

    Raises:
        RankDisagreementError: `ranks_disagree`: parameters that are no DTensors differ between
            ranks that hold a model together, so that no state dict has all of it.

    Ranks: collective over the group, if `full` or with FSDP1; else local.
    """
    comm = live.comm(Comm())
    collective = live.is_spread and (full or bool(live.units))
    if collective:
        live.meet(comm, "get_model_state_dict")
    with (comm if collective else Comm.alone()).together("get_model_state_dict"):
        entries = {name: value for _, name, value in live.entries()}
        if full or offload:
            _check_data(entries)
    if full and any(is_spread(value) for value in entries.values()):
        _check_same(comm, entries)
    return finished(entries, comm, full=full, offload=offload)


def _check_data(entries: Mapping[str, Any]) -> None:
    """Refuse tensors that have no data, all of them at once."""
    meta = [name for name, value in entries.items() if is_tensor(value) and has_no_data(value)]
    if meta:
        raise UnsupportedValueError(
            f"{listed(meta)} are on the meta device and have no data",
            hint="materialize the model first, as with to_empty(device=...), or load a state",
        )


def _check_same(comm: Comm, entries: Mapping[str, Any]) -> None:
    """Check that parameters which are not spread, as experts that are not, are equal on ranks."""
    sums = []
    for name, value in entries.items():
        if isinstance(value, nn.Parameter) and not is_spread(value) and not value.is_meta:
            sums.append([name, sum_of(value)])
    if comm.world_size > 1 and sums:
        comm.check_agreement(sums, "a parameter that is not sharded")


def finished(
    entries: Mapping[Any, Any], comm: Comm, *, full: bool, offload: bool
) -> dict[Any, Any]:
    """Gather and copy the tensors of a flat dict, as options ask.

    Args:
        entries: By names or paths.
        comm: Whose rank 0 gets whole tensors on the host.
        full: Whether tensors are whole.
        offload: Whether they are copied to host memory.
    """
    result = {key: value.detach() if is_tensor(value) else value for key, value in entries.items()}
    if not full:
        result = as_dtensors(result)
        return {key: host_copy(value) for key, value in result.items()} if offload else result
    keys = [key for key, value in entries.items() if is_spread(value)]
    shown = _shown(keys)
    spread = {shown[key]: entries[key] for key in keys}
    if not offload:
        whole = gather(spread)
        return {key: whole.get(shown[key]) if key in shown else v for key, v in result.items()}
    whole = gather_on(spread, comm.ranks[0], torch.device("cpu"))
    if not comm.is_coordinator:
        return {}
    return {
        key: whole.get(shown[key]) if key in shown else host_copy(value)
        for key, value in result.items()
    }


def _shown(keys: Sequence[Any]) -> dict[Any, str]:
    """Return a name for each name or path, for messages; all differ."""
    result: dict[Any, str] = {}
    used: set[str] = set()
    for number, key in enumerate(keys):
        name = key if isinstance(key, str) else ".".join(map(str, key))
        result[key] = name if name not in used else f"{name}#{number}"
        used.add(result[key])
    return result


def plan_model(
    live: LiveModel,
    given: Mapping[str, Any],
    *,
    full: bool,
    strict: bool,
    from_first: bool,
) -> Callable[[], IncompatibleKeys]:
    """Compare a state with a model, and return what sets it.

    Args:
        live: The model.
        given: Values by canonical names; only rank 0 has them if `from_first`.
        full: Whether they are whole.
        strict: Whether names that are missing or unexpected are errors.
        from_first: Whether rank 0 of the group gives other ranks their parts.

    Raises:
        StateDictMismatchError: on every rank that takes part.
        RankDisagreementError: `ranks_disagree`: ranks were given different whole states.

    Ranks: collective over the group if `full`, or if given shards are spread in another way;
        else local. So is the result.
    """
    comm = live.comm(Comm() if from_first else Comm.alone())
    if full:
        live.meet(comm, "set_model_state_dict")
    group = comm if full else Comm.alone()
    with group.together("set_model_state_dict"):
        entries = live.entries()
    if entries and is_nothing(group, given, from_first=from_first):
        return lambda: IncompatibleKeys([], [])
    told = Told(comm, "set_model_state_dict", lambda: given) if from_first else None
    values = dict(given) if told is None else told.state
    moves = not from_first and any(
        must_move(value, live.tensors[name])
        for name, value in values.items()
        if name in live.tensors
    )
    group = comm if full or moves else Comm.alone()
    with group.together("set_model_state_dict"):
        report, keys = _compared(live, entries, values)
        if not from_first or comm.is_coordinator:
            _compare_data(live, given, report)
        _check(report, keys, strict=strict)
    if full and not from_first:
        check_alike(comm, values)
    if group.is_coordinator:
        _warn_of_rounding(live, values)

    def install() -> IncompatibleKeys:
        fsdp1.reshard(live.model)
        reshard_fsdp2(live.model)
        _set(live, entries, values, told, group)
        return keys

    return install


def _set(
    live: LiveModel,
    entries: Sequence[Entry],
    values: dict[str, Any],
    told: Told | None,
    group: Comm,
) -> None:
    targets = _targets(live, entries, values)
    with torch.no_grad():
        if told is None:
            copy_all(values, targets)
        else:
            told.fill({name: (values[name], target) for name, target in targets.items()})
            placed = {name for _, name, value in entries if is_placed(name, value)}
            rest = {name: value for name, value in values.items() if name not in placed}
            values = {**values, **told.whole(rest)}
        with group.together("set_model_state_dict"):
            _hand_over(live, entries, values)


def check_alike(comm: Comm, values: Mapping[Any, Any]) -> None:
    """Check that all ranks were given the same whole tensors, of which each takes its part.

    Raises:
        RankDisagreementError: `ranks_disagree`, with a name.

    Ranks: collective over the group.
    """
    if comm.world_size == 1:
        return
    with comm.together("comparing what is set"):
        sums = [
            [key if isinstance(key, str) else ".".join(map(str, key)), sum_of(value)]
            for key, value in values.items()
            if isinstance(value, torch.Tensor) and not is_spread(value)
        ]
    comm.check_agreement(sums, "what is set")


def sum_of(tensor: torch.Tensor) -> str:
    """Return the digest of a strided tensor's bytes as text, and no text for another one."""
    return digest_of(tensor).hex() if tensor.layout == torch.strided else ""


def _compared(
    live: LiveModel, entries: Sequence[Entry], values: Mapping[str, Any]
) -> tuple[LoadReport, IncompatibleKeys]:
    """Compare names and shapes. A tied tensor is there if one of its names is."""
    report = LoadReport()
    wanted = set()
    for _, name, value in entries:
        wanted.add(name)
        if name not in values:
            others = live.names.get(id(live.tensors.get(name)), ())
            if not any(other in values for other in others):
                report.missing.append(name)
        elif is_placed(name, value):
            stored = values[name]
            if not is_tensor(stored) or stored.shape != value.shape:
                found = list(stored.shape) if is_tensor(stored) else type(stored)
                report.mismatched.append(
                    Mismatch(name, "shape", str(found), str(list(value.shape)))
                )
    report.unexpected.extend(name for name in values if name not in wanted)
    keys = IncompatibleKeys(list(report.missing), list(report.unexpected))
    # Those on meta that no state dict holds, as buffers that are not persistent.
    hidden = (name for name in live.hidden() if name not in wanted)
    report.uninitialized.extend(hidden)
    return report, keys


def is_nothing(comm: Comm, given: Mapping[str, Any], *, from_first: bool) -> bool:
    """Whether no rank gives anything, which asks for nothing, as in torch.

    Raises:
        StateDictMismatchError: those that should give nothing, and others do; on every rank.

    Ranks: collective over the group.
    """
    gives = comm.gather_values(bool(given))
    if all(gives) or (from_first and gives[0]):
        return False
    if not any(gives) and not from_first:
        return True
    ranks = ", ".join(map(str, comm.ranks[:8])) + (", …" if comm.world_size > 8 else "")
    if from_first:
        raise StateDictMismatchError(
            f"rank {comm.ranks[0]} has no state dict to give; it is the first of ranks {ranks}, "
            "which hold the model together",
            code="state_mismatch",
            hint="pass the state dict on this rank, or StateDictOptions(process_group=...) with "
            "the group whose first rank has it",
        )
    raise StateDictMismatchError(
        f"the state dict is empty on rank {comm.ranks[gives.index(False)]}",
        code="state_mismatch",
        hint=f"pass it on each of the ranks {ranks}, or set broadcast_from_rank0=True if only the "
        "first of them has it",
    )


def _compare_data(live: LiveModel, values: Mapping[str, Any], report: LoadReport) -> None:
    """Report tensors without data, and different ones for the names of a tied tensor."""
    firsts: dict[int, str] = {}
    for name, value in values.items():
        if not is_tensor(value):
            continue
        if has_no_data(value):
            report.mismatched.append(Mismatch(name, "data", "none, on the meta device", "data"))
        elif name in live.tensors:
            first = firsts.setdefault(id(live.tensors[name]), name)
            if first != name and not _are_same(values[first], value):
                there = f"other data than {first}"
                report.mismatched.append(Mismatch(name, "tie", there, f"the same as {first}"))


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    a, b = local_of(one), local_of(other)
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout) or a.is_meta:
        return False
    return a.layout != torch.strided or torch.equal(as_bits(a), as_bits(b))


def _check(report: LoadReport, keys: IncompatibleKeys, *, strict: bool) -> None:
    wrong = keys.missing_keys or keys.unexpected_keys or report.uninitialized
    if report.mismatched or (strict and wrong):
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


def _warn_of_rounding(live: LiveModel, values: Mapping[str, Any]) -> None:
    """Say which parameters and buffers cannot hold what they are given; as torch, it is rounded."""
    narrowed = [
        f"{name} ({value.dtype} given, {own.dtype} in the model)"
        for name, value in values.items()
        if (own := live.tensors.get(name)) is not None
        and is_tensor(value)
        and _is_rounded(value.dtype, own.dtype)
    ]
    if narrowed:
        warnings.warn(
            f"values are rounded to the dtypes of the model: {listed(narrowed)}; convert the model "
            "or the state dict first, so that it is said where it happens",
            DsdPrecisionWarning,
            stacklevel=5,
        )


def _is_rounded(given: torch.dtype, own: torch.dtype) -> bool:
    """Whether a dtype cannot hold all values of another one."""
    try:
        return torch.promote_types(given, own) != own
    except RuntimeError:  # floats of 8 bits, to which torch promotes nothing
        return given != own


def _targets(
    live: LiveModel, entries: Sequence[Entry], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the live tensors to be filled, each once; those on meta get memory first."""
    devices = {local_of(one).device for one in live.tensors.values() if not one.is_meta}
    result: dict[str, Any] = {}
    seen: set[int] = set()
    for _, name, value in entries:
        if name not in values or not is_placed(name, value):
            continue
        tensor: Any = live.tensors.get(name, value)
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.is_meta:
            device = next(iter(devices), live.comm(Comm()).device)
            replace_content(tensor, materialized(tensor, device))
        result[name] = tensor.detach()
    return result


def _hand_over(live: LiveModel, entries: Sequence[Entry], values: Mapping[str, Any]) -> None:
    raw: OrderedDict[str, Any] = OrderedDict()
    for key, name, value in entries:
        if name in values:
            own = live.registered(name, live.tensors.get(name, value))
            raw[key] = own if is_placed(name, value) else values[name]
    live.hand_over(OrderedDict((key, value) for key, value in raw.items() if value is not None))
