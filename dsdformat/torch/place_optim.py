"""Load optimizers in place, by the names of their parameters: groups, states, and the rest.

What becomes of the state of one parameter is decided in `place_state`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import MismatchError, shorten
from dsdformat.format.paths import render_path
from dsdformat.torch.fit_stored import Fit, FromFile
from dsdformat.torch.install_optim import Installer, Maker, is_overridden, takes_more
from dsdformat.torch.names import ParamNames
from dsdformat.torch.optim import GROUPS, OWN, OWN_KEYS, PARAMS, SHARED, STATE, check_owners
from dsdformat.torch.place_state import StatePlacement, is_same
from dsdformat.torch.placing import Plan
from dsdformat.torch.stored import Composite, Path, Stored, display, leaves
from dsdformat.torch.stored_optim import StoredOptimizer, find_fault

__all__ = ["place_optimizers"]


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
        plan, names, StoredOptimizer(stored, renamed), path, fit or FromFile(plan)
    )
    for optimizer in optimizers:
        placement.add(optimizer)
    placement.find_unexpected()


class _Placement:
    def __init__(
        self, plan: Plan, names: ParamNames, file: StoredOptimizer, path: Path, fit: Fit
    ) -> None:
        self.plan = plan
        self.states = StatePlacement(plan, names, file, path, fit)
        self.names = names
        self.file = file
        self.path = path
        self.empty = {lead: list(keys) for lead, keys in file.empty.items()}
        self.leads: set[str] = set()  # first names of optimizers that are found

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Plan to load one live optimizer."""
        states: dict[torch.Tensor, dict[Any, Maker] | None] = {}
        forms: dict[torch.Tensor, Mapping[Any, Any]] = {}  # the same on meta
        groups: list[dict[Any, Maker]] = []
        mine = self._leads_of(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            groups.append(self._group(group, number, mine))
            for parameter in group["params"]:
                planned = self.states.plan(optimizer, group, parameter)
                if planned is not None:
                    states[parameter], forms[parameter] = planned
        shared, own = (
            {
                key: self.states.fit(value, None, (section, lead, key))
                for lead in mine
                for key, value in kept.get(lead, {}).items()
                if self.states.selects((section, lead, key))
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
            self._rehearse(optimizer, forms)
        installer = Installer(optimizer, states, groups, shared, own)
        self.plan.installs.append(installer.run)

    def _rehearse(
        self, optimizer: torch.optim.Optimizer, forms: Mapping[torch.Tensor, Any]
    ) -> None:
        """Let a copy of the optimizer take the state, with tensors on meta.

        Raises:
            MismatchError: `state_mismatch`: its own code raises.
        """
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict, forms)
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

    def _report_unwanted(self, value: Any, path: Path) -> None:
        for place, _ in leaves(value, (*self.path, *path)):
            if place != (*self.path, *path) and display(place) in self.plan.selection:
                self.plan.report.unexpected.append(display(place))

    def find_unexpected(self) -> None:
        """Report what the checkpoint has and no live optimizer wants."""
        for name in self.file.names():
            if name not in self.states.used and self.states.selects_any(name):
                self.plan.report.unexpected.append(display((*self.path, STATE, name)))
        for keys in self.empty.values():
            for key in keys:
                if self.states.selects((GROUPS, key)):
                    self.plan.report.unexpected.append(display((*self.path, GROUPS, key)))
        for section, kept in ((SHARED, self.file.shared), (OWN, self.file.own)):
            for lead, values in kept.items():
                if lead not in self.leads:
                    self._report_unwanted(values, (section, lead))

    def _group(self, group: dict[str, Any], number: int, leads: Sequence[str]) -> dict[Any, Maker]:
        key = self._group_key(group, number, leads)
        if key is None:
            return {}
        return {
            name: self.states.fit(value, group.get(name), (GROUPS, key, name))
            for name, value in self.file.values[key].items()
            if name not in OWN_KEYS and self.states.selects((GROUPS, key, name))
        }

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
        known = [name for one in parameters if (name := self.states.name(one)) is not None]
        if known and self.states.selects((GROUPS, known[0])):
            self.plan.report.missing.append(display((*self.path, GROUPS, known[0])))

    def _compare(self, one: Any, other: Any) -> None:
        """Check that two stored groups, which are one group now, say the same."""
        a, b = self.file.values[one], self.file.values[other]
        for key in dict.fromkeys([*a, *b]):
            if key in OWN_KEYS or not self.states.selects((GROUPS, other, key)):
                continue
            if key not in a or key not in b or not is_same(a[key], b[key]):
                name = display((*self.path, GROUPS, other, key))
                wanted = f"{_shown(a, key)}, as {one} of the same group has"
                self.plan.mismatch(name, "value", _shown(b, key), wanted)


def _shown(group: Mapping[Any, Any], key: Any) -> str:
    value = group.get(key)
    tensor = isinstance(value, (Stored, Composite))
    return "nothing" if key not in group else str(value) if tensor else shorten(value)
