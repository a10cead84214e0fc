"""Plan the state that an optimizer has for one parameter, or for all those in a flat one.

A state tensor that is there already, with the stored shape and dtype, is read into; any other is
made anew with the stored dtype: nothing is cast to the dtype of the parameter. The state of a flat
parameter is put together from those of the parameters in it: all of it, or it stays as it is.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dsdformat.errors import shorten
from dsdformat.format.packing import emit
from dsdformat.format.values import Encoded, encode
from dsdformat.limits import MIB
from dsdformat.torch.buffers import tensor_over
from dsdformat.torch.builder import stored_dtype
from dsdformat.torch.dtypes import find_named
from dsdformat.torch.fit_stored import Fit
from dsdformat.torch.flat_find import FlatParam
from dsdformat.torch.flat_place import FlatPlacement
from dsdformat.torch.fsdp1 import Unit
from dsdformat.torch.fsdp1_state import Joined, join_member, join_unit
from dsdformat.torch.install_optim import Maker, is_overridden
from dsdformat.torch.names import ParamNames
from dsdformat.torch.optim import STATE, is_whole
from dsdformat.torch.placing import Plan
from dsdformat.torch.routes import Form
from dsdformat.torch.sharding import is_tensor
from dsdformat.torch.stored import Composite, Path, Stored, display, find_items, rebuilt
from dsdformat.torch.stored_optim import StoredOptimizer

__all__ = ["Planned", "StatePlacement", "is_same"]

Optimizer = torch.optim.Optimizer
Group = Mapping[str, Any]
# What makes the state of a parameter, None for none; and the same with tensors on meta.
Planned = tuple[dict[Any, Maker] | None, Mapping[Any, Any]]


class StatePlacement:
    """Plans the states of parameters, one after another.

    Attributes:
        used: Names in the checkpoint that parameters have.
    """

    def __init__(
        self, plan: Plan, names: ParamNames, file: StoredOptimizer, path: Path, fit: Fit
    ) -> None:
        self.used: set[str] = set()
        self._plan = plan
        self._names = names
        self._file = file
        self._path = path
        self._fit = fit

    def plan(self, optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> Planned | None:
        """Plan the state of a parameter; None if it stays as it is."""
        flat = self._names.flats.get(id(parameter))
        if flat is not None:
            return self._plan_flat(optimizer, group, parameter, flat)
        shard = self._names.shards.get(id(parameter))
        if isinstance(shard, Unit):
            return self._plan_unit(optimizer, group, parameter, shard)
        found = self.name(parameter)
        if found is None:
            self._report_missing(self._names.first(parameter))
        elif id(parameter) in self._plan.refused:
            self._report_refused(found, parameter)
        elif self.selects_any(found):
            stored = self._file.states.get(found, {})
            if shard is not None:
                stored = {
                    key: join_member(shard, key, value, parameter, _form_of)
                    for key, value in stored.items()
                }
            live = _live_state(optimizer, parameter)
            makers = self._makers(stored, live, group, parameter, found) if stored else None
            return makers, _on_meta(stored)
        return None

    def name(self, parameter: torch.Tensor) -> str | None:
        """Return the name under which the checkpoint has a parameter; a tied one has several."""
        return self._found(self._names.names[id(parameter)])

    def fit(
        self,
        value: Any,
        live: Any,
        place: Path,
        device: torch.device | None = None,
        parameter: torch.Tensor | None = None,
    ) -> Maker:
        """Plan where a value of the optimizer goes."""
        return self._fit(value, live, (*self._path, *place), device, parameter)

    def selects(self, path: Path) -> bool:
        """Whether an entry of the optimizer is meant."""
        selection = self._plan.selection
        return selection.everything or display((*self._path, *path)) in selection

    def selects_any(self, name: str) -> bool:
        """Whether any entry of a parameter is meant."""
        if self._plan.selection.everything:
            return True
        keys = self._file.states.get(name, {})
        return any(map(self.selects, ((STATE, name), *((STATE, name, key) for key in keys))))

    def _found(self, names: Iterable[str]) -> str | None:
        for name in names:
            if name in self._file.groups or name in self._file.states:
                self.used.add(name)
                return name
        return None

    def _makers(
        self,
        stored: Mapping[Any, Any],
        live: Mapping[Any, Any],
        group: Group,
        parameter: torch.Tensor,
        name: str,
    ) -> dict[Any, Maker]:
        device = self._plan.device_of(parameter)
        # A load may have put anything there.
        on_device = any(group.get(flag) is True for flag in ("capturable", "fused"))
        result: dict[Any, Maker] = {}
        for key, value in stored.items():
            if not self.selects((STATE, name, key)):
                if key in live:
                    result[key] = functools.partial(live.get, key)
                continue
            # A step is counted on the host, unless a kernel on the device counts it.
            place = torch.device("cpu") if key == "step" and not on_device else device
            result[key] = self.fit(value, live.get(key), (STATE, name, key), place, parameter)
        return result

    # Flat shards of FSDP1

    def _plan_unit(
        self, optimizer: Optimizer, group: Group, parameter: torch.Tensor, unit: Unit
    ) -> Planned | None:
        """Plan the state of what is one parameter for all in it; what lacks an entry is zeros."""
        found = [(member, self._found(member.names)) for member in unit.members]
        for member, name in found:
            if name is None:
                self._report_missing(member.names[0])
        there = [(member, name) for member, name in found if name and self.selects_any(name)]
        if not there:
            return None
        entries = [(m, state) for m, name in there if (state := self._file.states.get(name))]
        if not entries:
            return None, {}
        stored = join_unit(unit, entries, _form_of, is_same)
        live = _live_state(optimizer, parameter)
        return self._makers(stored, live, group, parameter, there[0][1]), _on_meta(stored)

    # Flat parameters

    def _plan_flat(
        self, optimizer: Optimizer, group: Group, parameter: torch.Tensor, flat: FlatParam
    ) -> Planned | None:
        found = {one: self._found(names) for one, names in flat.layout.all_names().items()}
        missing = [one for one, name in found.items() if name is None and self._report_missing(one)]
        names = {one: name or one for one, name in found.items()}
        if missing or not any(map(self.selects_any, names.values())):
            return None
        if not any(self._file.states.get(name) for name in names.values()):
            return None, {}
        if any(id(member) in self._plan.refused for member in flat.members):
            fault = "that of parameters which differ"
        elif is_whole(optimizer):
            fault = "one history of all parameters"
        else:
            return self._join(optimizer, group, parameter, flat, names)
        first = display((*self._path, STATE, next(iter(names.values()))))
        self._plan.mismatch(first, "state", fault, f"that of each parameter in {flat.layout.name}")
        return None

    def _join(
        self,
        optimizer: Optimizer,
        group: Group,
        parameter: torch.Tensor,
        flat: FlatParam,
        names: Mapping[str, str],
    ) -> Planned | None:
        stored = {one: self._file.states.get(name, {}) for one, name in names.items()}
        chosen = {
            one: {k: v for k, v in state.items() if self.selects((STATE, names[one], k))}
            for one, state in stored.items()
        }
        for state in chosen.values():
            _check_extents(state)
        own = flat.members[0] if flat.members else parameter  # whose device is known
        placement = FlatPlacement(
            flat.layout,
            {one: _on_meta(state) for one, state in chosen.items()},
            _live_state(optimizer, parameter),
            self._plan.device_of(own),
            _like(optimizer, group, parameter, flat),
        )
        if self._report_misfits(placement, names, chosen):
            return None
        makers: list[dict[Any, Maker]] = []
        for (one, state), live in zip(stored.items(), placement.lives(), strict=True):
            # What is one for all is read once.
            own_state = {k: v for k, v in state.items() if not makers or k not in placement.common}
            makers.append(self._makers(own_state, live, group, own, names[one]))
        return placement.joined(makers), placement.forms()

    def _report_misfits(
        self,
        placement: FlatPlacement,
        names: Mapping[str, str],
        stored: Mapping[str, Mapping[Any, Any]],
    ) -> bool:
        """Report what keeps the states of parameters from being one; return whether any does."""
        report = self._plan.report
        before = len(report.missing), len(report.mismatched)

        def refuse(one: str, key: Any, what: str, found: str, wanted: str) -> None:
            name = display((*self._path, STATE, names[one], key))
            self._plan.mismatch(name, what, found, wanted)

        for one, key in placement.lacking:
            if self.selects((STATE, names[one], key)):
                report.missing.append(display((*self._path, STATE, names[one], key)))
            elif not placement.has_place(key):
                refuse(one, key, "state", "not selected", "that of each parameter in a flat one")
        for misfit in placement.misfits:
            refuse(misfit.name, misfit.key, misfit.what, misfit.found, misfit.wanted)
        for key in placement.common:
            having = [one for one, state in stored.items() if key in state]
            first = stored[having[0]][key]
            for one in having[1:]:
                if not is_same(first, stored[one][key]):
                    wanted = f"{_number(first)}, as {having[0]} has"
                    refuse(one, key, "value", _number(stored[one][key]), wanted)
        return before != (len(report.missing), len(report.mismatched))

    # Reports

    def _report_missing(self, name: str) -> bool:
        """Report a parameter that the checkpoint lacks, if it is meant; return whether it is."""
        selected = self.selects_any(name)
        if selected:
            self._plan.report.missing.append(display((*self._path, STATE, name)))
        return selected

    def _report_refused(self, name: str, parameter: torch.Tensor) -> None:
        """Report the entries of a parameter that differs itself; they would not fit."""
        for key, value in self._file.states.get(name, {}).items():
            if isinstance(value, Stored) and value.entry.shape and self.selects((STATE, name, key)):
                full = display((*self._path, STATE, name, key))
                shapes = str(list(value.entry.shape)), str(list(parameter.shape))
                self._plan.mismatch(full, "shape", *shapes)


def _form_of(value: Any) -> Form | None:
    """Return shape and dtype of a tensor that is stored or given."""
    if isinstance(value, Stored):
        return value.entry.shape, stored_dtype(value)
    return (tuple(value.shape), value.dtype) if is_tensor(value) else None


def _live_state(optimizer: Optimizer, parameter: torch.Tensor) -> Mapping[Any, Any]:
    """Return the state there is; one that is shown in another form cannot be read into."""
    shown = not is_overridden(optimizer, "state_dict")
    return (optimizer.state.get(parameter) or {}) if shown else {}


def _like(
    optimizer: Optimizer, group: Group, parameter: torch.Tensor, flat: FlatParam
) -> Mapping[Any, Any]:
    """Return a state as the optimizer keeps it, where shapes do not tell what is cut."""
    if any(numel != 1 for numel in flat.layout.numels):
        return {}
    return optimizer.state.get(parameter) or _rehearsed(optimizer, group, parameter)


def _rehearsed(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> Mapping[Any, Any]:
    """Return what a copy of an optimizer keeps for a small parameter after a step over zeros."""
    zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, requires_grad=True)
    zeros.grad = torch.zeros_like(zeros)
    plain = dict.fromkeys(("capturable", "differentiable", "fused"), False)
    options = {key: plain.get(key, value) for key, value in group.items()}
    twin = copy.copy(optimizer)
    states: defaultdict[torch.Tensor, dict[Any, Any]] = defaultdict(dict)
    twin.state = states
    twin.param_groups = [{**options, "params": [zeros]}]
    try:
        twin.step()
    except Exception:  # of a user's optimizer nothing is known then
        return {}
    return states[zeros]


def _check_extents(state: Mapping[Any, Any]) -> None:
    """Check that the data files have as much as tensors say, before memory is made for them."""
    for value in state.values():
        if isinstance(value, Stored) and value.entry.nbytes >= MIB:
            value.entry.check()


def is_same(one: Any, other: Any) -> bool:
    """Whether two stored values are the same, of the same types."""

    def leaf(value: Any, _path: Any) -> Any:
        if isinstance(value, Stored):
            return Encoded(["tensor", value.entry.content_digest()])
        if isinstance(value, torch.Tensor):  # one on meta stands for what another rank has
            known = None if value.is_meta else value.tolist()
            return Encoded(["tensor", str(value.dtype), known])
        named = find_named(value)
        return Encoded(["other", shorten(value)]) if named is None else named

    return emit(encode(one, leaf=leaf)) == emit(encode(other, leaf=leaf))


def _number(value: Any) -> str:
    """Render a number, also one in a tensor; it is read."""
    if isinstance(value, Stored):
        value = tensor_over(value.entry.read(), stored_dtype(value), value.entry.shape)
    return shorten(value.item() if isinstance(value, torch.Tensor) else value)


def _on_meta(value: Any) -> Any:
    """Return a stored value with tensors that have no memory."""
    if isinstance(value, Stored):
        return torch.empty(value.entry.shape, dtype=stored_dtype(value), device="meta")
    if isinstance(value, Joined):
        return value.on_meta()
    if isinstance(value, Composite):
        return torch.empty(0, device="meta")  # of some form
    items = find_items(value)
    return value if items is None else rebuilt(value, [(k, _on_meta(v)) for k, v in items])
