"""Load optimizers in place, by the names of their parameters.

A state tensor that is there already, with the stored shape and dtype, is read into; any other is
made anew with the stored dtype: nothing is cast to the dtype of the parameter.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import MismatchError, shorten
from dsdformat.format.packing import emit
from dsdformat.format.paths import render_path
from dsdformat.format.values import Encoded, Named, encode
from dsdformat.torch.buffers import overlaps_itself
from dsdformat.torch.builder import Form, stored_dtype
from dsdformat.torch.dtypes import find_named
from dsdformat.torch.install_optim import Installer, Maker, is_overridden, takes_more
from dsdformat.torch.names import ParamNames
from dsdformat.torch.optim import GROUPS, OWN, OWN_KEYS, PARAMS, SHARED, STATE, check_owners
from dsdformat.torch.placing import Plan
from dsdformat.torch.report import Mismatch
from dsdformat.torch.stored import (
    Composite,
    Path,
    Stored,
    describe,
    display,
    find_items,
    leaves,
    rebuilt,
)
from dsdformat.torch.stored_optim import StoredOptimizer, find_fault

__all__ = ["place_optimizers"]

# From a value, what is there already or None, the path, a device and a parameter or None.
Fit = Callable[[Any, Any, Path, torch.device | None, torch.Tensor | None], Maker]


def place_optimizers(
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    names: ParamNames,
    stored: Any,
    path: Path,
    renamed: Callable[[str], str | None] = str,
    fit: Fit | None = None,
) -> None:
    """Plan to load one optimizer, or several that work on parts of one model.

    Args:
        plan: What is added to.
        optimizers: The live ones.
        names: The names of all their parameters.
        stored: What the checkpoint has.
        path: Where it lies.
        renamed: What a stored FQN is called now, or None if it is left out.
        fit: Plans where one value goes; values are read from a file if None.
    """
    fault = find_fault(stored)
    if fault:
        plan.mismatch(display(path), "kind", fault, "the state of an optimizer by names")
        return
    check_owners(optimizers, names, path)
    placement = _Placement(
        plan, names, StoredOptimizer(stored, renamed), path, fit or _FromFile(plan)
    )
    for optimizer in optimizers:
        placement.add(optimizer)
    placement.find_unexpected()


class _Placement:
    def __init__(
        self, plan: Plan, names: ParamNames, file: StoredOptimizer, path: Path, fit: Fit
    ) -> None:
        self.plan = plan
        self.fit = fit
        self.names = names
        self.file = file
        self.path = path
        self.used: set[str] = set()
        self.empty = {lead: list(keys) for lead, keys in file.empty.items()}
        self.leads: set[str] = set()  # first names of optimizers that are found

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Plan to load one live optimizer."""
        states: dict[torch.Tensor, dict[Any, Maker] | None] = {}
        groups: list[dict[Any, Maker]] = []
        mine = self._leads_of(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            groups.append(self._group(group, number, mine))
            for parameter in group["params"]:
                found = self._name(parameter)
                if found is None:
                    name = self.names.first(parameter)
                    self._missing(name)
                elif id(parameter) in self.plan.refused:
                    self._refused(found, parameter)
                elif self._is_selected(found):
                    state = self.file.states.get(found)
                    states[parameter] = (
                        None if not state else self._state(optimizer, group, parameter, found)
                    )
        shared, own = (
            {
                key: self._fit(value, None, (section, lead, key))
                for lead in mine
                for key, value in kept.get(lead, {}).items()
                if self._selects((section, lead, key))
            }
            for section, kept in ((SHARED, self.file.shared), (OWN, self.file.own))
        )
        count = sum(len(group[PARAMS]) for group in optimizer.param_groups)
        clash = [key for key in shared if type(key) is int and 0 <= key < count]
        if clash:  # in a state dict of torch, numbers are those of parameters
            name = display((*self.path, SHARED))
            self.plan.mismatch(name, "kind", f"an entry {clash[0]}", "none with such a number")
        if not takes_more(optimizer):
            for lead in mine:
                self._report_unwanted(self.file.own.get(lead, {}), (OWN, lead))
            own = {}
        self.leads.update(mine)
        if not is_overridden(optimizer, "load_state_dict"):
            self._rehearse(optimizer, states)
        installer = Installer(optimizer, states, groups, shared, own)
        self.plan.installs.append(installer.run)

    def _rehearse(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]
    ) -> None:
        """Let a copy of the optimizer take the state, with tensors on meta.

        Raises:
            MismatchError: `state_mismatch`: its own code raises.
        """
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for parameter in parameters:
            name = self._name(parameter)
            state[parameter] = _on_meta(self.file.states.get(name or "", {}))
        twin = copy.copy(optimizer)
        try:
            twin.__setstate__({STATE: state, GROUPS: [dict(g) for g in optimizer.param_groups]})
        except Exception as error:
            raise MismatchError(
                f"{render_path(self.path)}: {type(optimizer).__name__} cannot take this state: "
                f"{type(error).__name__}: {error}",
                code="state_mismatch",
                hint="is it the state of another kind of optimizer?",
            ) from error

    def _leads_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """List the first names of stored optimizers whose first parameter is in this one."""
        known = {*self.file.empty, *self.file.shared, *self.file.own}
        parameters = [one for group in optimizer.param_groups for one in group[PARAMS]]
        names = (name for one in parameters for name in self.names.names[id(one)])
        found = [name for name in dict.fromkeys(names) if name in known]
        return found or ([""] if not parameters else [])

    def _refused(self, name: str, parameter: torch.Tensor) -> None:
        """Report the entries of a parameter that differs itself; they would not fit."""
        for key, value in self.file.states.get(name, {}).items():
            if (
                isinstance(value, Stored)
                and value.entry.shape
                and self._selects((STATE, name, key))
            ):
                full = display((*self.path, STATE, name, key))
                shapes = str(list(value.entry.shape)), str(list(parameter.shape))
                self.plan.mismatch(full, "shape", *shapes)

    def _report_unwanted(self, value: Any, path: Path) -> None:
        for place, _ in leaves(value, (*self.path, *path)):
            if place != (*self.path, *path) and display(place) in self.plan.selection:
                self.plan.report.unexpected.append(display(place))

    def find_unexpected(self) -> None:
        """Report what the checkpoint has and no live optimizer wants."""
        for name in self.file.names():
            if name not in self.used and self._is_selected(name):
                self.plan.report.unexpected.append(display((*self.path, STATE, name)))
        for keys in self.empty.values():
            for key in keys:
                if self._selects((GROUPS, key)):
                    self.plan.report.unexpected.append(display((*self.path, GROUPS, key)))
        for section, kept in ((SHARED, self.file.shared), (OWN, self.file.own)):
            for lead, values in kept.items():
                if lead not in self.leads:
                    self._report_unwanted(values, (section, lead))

    def _missing(self, name: str) -> None:
        full = display((*self.path, STATE, name))
        if self._is_selected(name):
            self.plan.report.missing.append(full)

    def _is_selected(self, name: str) -> bool:
        if self.plan.selection.everything:
            return True
        place = (*self.path, STATE, name)
        keys = self.file.states.get(name, {})
        return any(display(p) in self.plan.selection for p in (place, *((*place, k) for k in keys)))

    def _name(self, parameter: torch.Tensor) -> str | None:
        """Return the name under which the checkpoint has a parameter; a tied one has several."""
        for name in self.names.names[id(parameter)]:
            if name in self.file.groups or name in self.file.states:
                self.used.add(name)
                return name
        return None

    def _state(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        parameter: torch.Tensor,
        name: str,
    ) -> dict[Any, Maker]:
        # One that shows its state in another form gets it in that form.
        shown = not is_overridden(optimizer, "state_dict")
        live = (optimizer.state.get(parameter) or {}) if shown else {}
        device = self.plan.device_of(parameter)
        on_device = bool(group.get("capturable") or group.get("fused"))
        result: dict[Any, Maker] = {}
        for key, value in self.file.states[name].items():
            if not self._selects((STATE, name, key)):
                if key in live:
                    result[key] = functools.partial(live.get, key)
                continue
            # A step is counted on the host, unless a kernel on the device counts it.
            place = torch.device("cpu") if key == "step" and not on_device else device
            result[key] = self._fit(value, live.get(key), (STATE, name, key), place, parameter)
        return result

    def _group(self, group: dict[str, Any], number: int, leads: Sequence[str]) -> dict[Any, Maker]:
        key = self._group_key(group, number, leads)
        if key is None:
            return {}
        return {
            name: self._fit(value, group.get(name), (GROUPS, key, name))
            for name, value in self.file.values[key].items()
            if name not in OWN_KEYS and self._selects((GROUPS, key, name))
        }

    def _fit(
        self,
        value: Any,
        live: Any,
        place: Path,
        device: torch.device | None = None,
        parameter: torch.Tensor | None = None,
    ) -> Maker:
        return self.fit(value, live, (*self.path, *place), device, parameter)

    def _selects(self, path: Path) -> bool:
        return display((*self.path, *path)) in self.plan.selection

    def _group_key(self, group: dict[str, Any], number: int, leads: Sequence[str]) -> Any:
        """Return the key of the stored group whose values a live group gets, or None."""
        if not group["params"]:
            for lead in leads:
                if self.empty.get(lead):
                    return self.empty[lead].pop(0)
            name = display((*self.path, GROUPS, number))
            if name in self.plan.selection:
                self.plan.report.missing.append(name)
            return None
        keys: list[Any] = []
        for parameter in group["params"]:
            for name in self.names.names[id(parameter)]:
                if name in self.file.groups and self.file.groups[name] not in keys:
                    keys.append(self.file.groups[name])
        if not keys:
            self._without_group(group["params"])
        for other in keys[1:]:
            self._compare(keys[0], other)
        return keys[0] if keys else None

    def _without_group(self, parameters: Sequence[torch.Tensor]) -> None:
        """Report that the checkpoint has entries of a group's parameters and not the group."""
        known = [name for one in parameters if (name := self._name(one)) is not None]
        if known and self._selects((GROUPS, known[0])):
            self.plan.report.missing.append(display((*self.path, GROUPS, known[0])))

    def _compare(self, one: Any, other: Any) -> None:
        """Check that two stored groups, which are one group now, say the same."""
        a, b = self.file.values[one], self.file.values[other]
        for key in dict.fromkeys([*a, *b]):
            if key in OWN_KEYS or not self._selects((GROUPS, other, key)):
                continue
            if key not in a or key not in b or not _equal(a[key], b[key]):
                name = display((*self.path, GROUPS, other, key))
                wanted = f"{_shown(a, key)}, as {one} of the same group has"
                self.plan.mismatch(name, "value", _shown(b, key), wanted)


class _FromFile:
    """Plans where stored values go: into live tensors that are alike, else into new ones."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __call__(self, value: Any, live: Any, path: Path, device: Any, parameter: Any) -> Maker:
        plan = self._plan
        if type(value) is Stored and isinstance(live, torch.Tensor):
            if self._is_alike(value, live, path):
                plan.place(value, live, display(path), cast=False)
                return lambda: live
            device = device if live.is_meta else live.device
        elif isinstance(live, torch.Tensor) and isinstance(value, (str, dict, list, Named)):
            self._plan.other_form(Mismatch(display(path), "kind", describe(value), "a tensor"))
        items = None if type(value) is Composite else find_items(value)
        if items and any(type(item) in (Stored, Composite) for item in _flat(value)):
            makers = [
                (key, self(item, _child(live, key), (*path, key), device, parameter))
                for key, item in items
            ]
            return lambda: rebuilt(value, [(key, make()) for key, make in makers])
        form = Form() if device is None else Form(None, device)
        plan.builder.need(value, path, form)
        return lambda: plan.builder.make(value, path, form)

    def _is_alike(self, stored: Stored, live: torch.Tensor, path: Path) -> bool:
        """Whether a live tensor can be read into; report one that is of another kind."""
        shape, dtype = stored.entry.shape, stored_dtype(stored)
        if live.is_meta or live.layout != torch.strided or type(live) is not torch.Tensor:
            return False
        if shape != tuple(live.shape) or dtype != live.dtype:
            what = "dtype" if shape == tuple(live.shape) else "shape"
            wanted = f"{str(live.dtype).removeprefix('torch.')} {list(live.shape)}"
            self._plan.other_form(Mismatch(display(path), what, str(stored), wanted))
            return False
        odd = live.is_conj() or live.is_neg() or overlaps_itself(live) or live.requires_grad
        return not odd and self._plan.memory.claim(live, stored.index)


def _on_meta(value: Any) -> Any:
    """Return a stored value with tensors that have no memory."""
    if isinstance(value, Stored):
        return torch.empty(value.entry.shape, dtype=stored_dtype(value), device="meta")
    if isinstance(value, Composite):
        return None
    items = find_items(value)
    return value if items is None else rebuilt(value, [(k, _on_meta(v)) for k, v in items])


def _equal(one: Any, other: Any) -> bool:
    """Whether two stored values are the same, of the same types."""

    def leaf(value: Any, _path: Any) -> Any:
        if isinstance(value, Stored):
            return Encoded(["tensor", value.entry.content_digest()])
        if isinstance(value, torch.Tensor):
            return Encoded(["tensor", str(value.dtype), value.tolist()])
        named = find_named(value)
        return Encoded(["other", shorten(value)]) if named is None else named

    return emit(encode(one, leaf=leaf)) == emit(encode(other, leaf=leaf))


def _shown(group: Mapping[Any, Any], key: Any) -> str:
    value = group.get(key)
    tensor = isinstance(value, (Stored, Composite))
    return "nothing" if key not in group else str(value) if tensor else shorten(value)


def _flat(value: Any) -> Iterator[Any]:
    yield value
    for _, item in find_items(value) or ():
        yield from _flat(item)


def _child(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    if type(live) in (list, tuple) and type(key) is int and key < len(live):
        return live[key]
    return None
