"""Load optimizers in place, by the names of their parameters.

A state tensor that is there already, with the stored shape and dtype, is read into; any other is
made anew with the stored dtype: nothing is cast to the dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import shorten
from dsdformat.torch.builder import Form, stored_dtype
from dsdformat.torch.compat import has_load_hooks
from dsdformat.torch.introspect import own_method
from dsdformat.torch.names import ParamNames
from dsdformat.torch.optim import GROUPS, OWN_KEYS, SHARED, STATE
from dsdformat.torch.placing import Plan
from dsdformat.torch.report import Mismatch
from dsdformat.torch.stored import Composite, Path, Stored, display, find_items, rebuilt

__all__ = ["Installer", "Maker", "place_optimizers"]

Maker = Callable[[], Any]
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
    if not (
        isinstance(stored, dict)
        and isinstance(stored.get(STATE), dict)
        and isinstance(stored.get(GROUPS), dict)
        and all(isinstance(group, dict) for group in stored[GROUPS].values())
        and all(isinstance(state, dict) for state in stored[STATE].values())
    ):
        hint = "the state of an optimizer by names of parameters"
        plan.mismatch(display(path), "kind", "something else", hint)
        return
    placement = _Placement(plan, names, _File(stored, renamed), path, fit or _FromFile(plan))
    for optimizer in optimizers:
        placement.add(optimizer)
    placement.find_unexpected()


class _File:
    """What the checkpoint has of an optimizer, under the names that it has now."""

    def __init__(self, stored: dict[Any, Any], renamed: Callable[[str], str | None]) -> None:
        self.states: dict[str, dict[Any, Any]] = {}
        for old, state in stored[STATE].items():
            name = renamed(old)
            if name is not None:
                self.states[name] = state
        self.groups: dict[str, Any] = {}  # name of a parameter -> key of its group
        self.values: dict[Any, dict[Any, Any]] = stored[GROUPS]
        self.empty: list[Any] = []
        for key, group in self.values.items():
            params = group.get("params")
            for old in params if isinstance(params, list) else ():
                name = renamed(old)
                if name is not None:
                    self.groups[name] = key
            if params == []:
                self.empty.append(key)
        self.shared: dict[Any, Any] = stored.get(SHARED, {})
        self.rest = {k: v for k, v in stored.items() if k not in (STATE, GROUPS, SHARED)}

    def names(self) -> Iterator[str]:
        """List the parameters that the checkpoint knows."""
        yield from dict.fromkeys([*self.groups, *self.states])


class _Placement:
    def __init__(self, plan: Plan, names: ParamNames, file: _File, path: Path, fit: Fit) -> None:
        self.plan = plan
        self.fit = fit
        self.names = names
        self.file = file
        self.path = path
        self.used: set[str] = set()
        self.empty = list(file.empty)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Plan to load one live optimizer."""
        states: dict[torch.Tensor, dict[Any, Maker] | None] = {}
        groups: list[dict[Any, Maker]] = []
        for number, group in enumerate(optimizer.param_groups):
            groups.append(self._group(group, number))
            for parameter in group["params"]:
                found = self._name(parameter)
                if found is None:
                    name = self.names.first(parameter)
                    self._missing(name)
                elif self._is_selected(found):
                    state = self.file.states.get(found)
                    states[parameter] = (
                        None if not state else self._state(optimizer, group, parameter, found)
                    )
        shared = {
            key: self._fit(v, None, (SHARED, key), None) for key, v in self.file.shared.items()
        }
        rest = {key: self._fit(value, None, (key,), None) for key, value in self.file.rest.items()}
        installer = Installer(optimizer, states, groups, shared, rest)
        self.plan.installs.append(installer.run)

    def find_unexpected(self) -> None:
        """Report what the checkpoint has and no live optimizer wants."""
        for name in self.file.names():
            if name not in self.used and self._is_selected(name):
                self.plan.report.unexpected.append(display((*self.path, STATE, name)))
        for key in self.empty:
            self.plan.report.unexpected.append(display((*self.path, GROUPS, key)))

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
        live = optimizer.state.get(parameter) or {}
        device = self.plan.device_of(parameter)
        on_device = bool(group.get("capturable") or group.get("fused"))
        result = {}
        for key, value in self.file.states[name].items():
            # A step is counted on the host, unless a kernel on the device counts it.
            place = torch.device("cpu") if key == "step" and not on_device else device
            result[key] = self._fit(value, live.get(key), (STATE, name, key), place, parameter)
        return result

    def _group(self, group: dict[str, Any], number: int) -> dict[Any, Maker]:
        key = self._group_key(group, number)
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

    def _group_key(self, group: dict[str, Any], number: int) -> Any:
        """Return the key of the stored group whose values a live group gets, or None."""
        if not group["params"]:
            if self.empty:
                return self.empty.pop(0)
            name = display((*self.path, GROUPS, number))
            if name in self.plan.selection:
                self.plan.report.missing.append(name)
            return None
        keys: list[Any] = []
        for parameter in group["params"]:
            for name in self.names.names[id(parameter)]:
                if name in self.file.groups and self.file.groups[name] not in keys:
                    keys.append(self.file.groups[name])
        for other in keys[1:]:
            self._compare(keys[0], other)
        return keys[0] if keys else None

    def _compare(self, one: Any, other: Any) -> None:
        """Check that two stored groups, which are one group now, say the same."""
        a, b = (
            {k: v for k, v in self.file.values[key].items() if k not in OWN_KEYS}
            for key in (one, other)
        )
        for key in dict.fromkeys([*a, *b]):
            if not _equal(a.get(key), b.get(key)):
                name = display((*self.path, GROUPS, other, key))
                if name in self.plan.selection:
                    wanted = f"{shorten(a.get(key))}, as {one} of the same group has"
                    self.plan.mismatch(name, "value", shorten(b.get(key)), wanted)


class _FromFile:
    """Plans where stored values go: into live tensors that are alike, else into new ones."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._claimed: dict[tuple[int, int], int] = {}  # live memory -> what it gets

    def __call__(self, value: Any, live: Any, path: Path, device: Any, parameter: Any) -> Maker:
        plan = self._plan
        if type(value) is Stored and isinstance(live, torch.Tensor):
            if self._is_alike(value, live, path):
                plan.place(value, live, display(path), cast=False)
                return lambda: live
            device = device if live.is_meta else live.device
        items = None if type(value) is Composite else find_items(value)
        if items and any(type(item) in (Stored, Composite) for item in _flat(value)):
            makers = [
                (key, self(item, _child(live, key), (*path, key), device, parameter))
                for key, item in items
            ]
            return lambda: rebuilt(value, [(key, make()) for key, make in makers])
        form = Form() if device is None else Form(None, device)
        plan.builder.need(value, form)
        return lambda: plan.builder.make(value, path, form)

    def _is_alike(self, stored: Stored, live: torch.Tensor, path: Path) -> bool:
        """Whether a live tensor can be read into; report one that is of another kind."""
        shape, dtype = stored.entry.shape, stored_dtype(stored)
        if live.is_meta or live.layout != torch.strided:
            return False
        if shape != tuple(live.shape) or dtype != live.dtype:
            what = "dtype" if shape == tuple(live.shape) else "shape"
            wanted = f"{str(live.dtype).removeprefix('torch.')} {list(live.shape)}"
            self._plan.other_form(Mismatch(display(path), what, str(stored), wanted))
            return False
        memory = live.untyped_storage().data_ptr(), int(live.storage_offset())
        return live.numel() == 0 or self._claimed.setdefault(memory, stored.index) == stored.index


class Installer:
    """Gives a live optimizer what was read for it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: dict[torch.Tensor, dict[Any, Maker] | None],
        groups: list[dict[Any, Maker]],
        shared: dict[Any, Maker],
        rest: dict[Any, Maker],
    ) -> None:
        self.optimizer = optimizer
        self.states = states
        self.groups = groups
        self.shared = shared
        self.rest = rest

    def run(self) -> None:
        states = {parameter: self._made(state) for parameter, state in self.states.items()}
        groups = [self._made(group) for group in self.groups]
        method = own_method(self.optimizer, "load_state_dict")
        own = getattr(method, "__func__", None) is torch.optim.Optimizer.load_state_dict
        if own and not self.rest and not has_load_hooks(self.optimizer):
            self._set(states, groups)
        else:
            self._hand_over(states, groups)

    def _made(self, makers: dict[Any, Maker] | None) -> dict[Any, Any]:
        return {} if makers is None else {key: make() for key, make in makers.items()}

    def _set(
        self, states: dict[torch.Tensor, dict[Any, Any]], groups: list[dict[Any, Any]]
    ) -> None:
        """Set state and groups, as `Optimizer.load_state_dict` does but for its casts."""
        live = self.optimizer.state
        for parameter, state in states.items():
            live.pop(parameter, None)
            if state:
                live[parameter] = state
        for key, make in self.shared.items():
            live[key] = make()
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(values)
        self.optimizer.__setstate__({STATE: live, GROUPS: self.optimizer.param_groups})

    def _hand_over(
        self, states: dict[torch.Tensor, dict[Any, Any]], groups: list[dict[Any, Any]]
    ) -> None:
        """Call the optimizer's own `load_state_dict`, and undo the casts that torch's makes."""
        entries = own_method(self.optimizer, "state_dict")()
        numbers: dict[torch.Tensor, Any] = {}
        for saved, live, values in zip(
            entries[GROUPS], self.optimizer.param_groups, groups, strict=True
        ):
            numbers.update(zip(live["params"], saved["params"], strict=True))
            saved.update(values)
        for parameter, state in states.items():
            entries[STATE].pop(numbers[parameter], None)
            if state:
                entries[STATE][numbers[parameter]] = state
        entries[STATE].update((key, make()) for key, make in self.shared.items())
        entries.update((key, make()) for key, make in self.rest.items())
        own_method(self.optimizer, "load_state_dict")(entries)
        for parameter, state in states.items():
            installed = self.optimizer.state.get(parameter)
            for key, value in state.items():
                if isinstance(installed, dict) and _was_cast(installed.get(key), value, parameter):
                    installed[key] = value


def _was_cast(live: Any, given: Any, parameter: torch.Tensor) -> bool:
    both = isinstance(live, torch.Tensor) and isinstance(given, torch.Tensor)
    return both and live.dtype != given.dtype and live.dtype == parameter.dtype


def _equal(one: Any, other: Any) -> bool:
    if type(one) is Stored and type(other) is Stored:
        return (
            one.index == other.index or one.entry.content_digest() == other.entry.content_digest()
        )
    return type(one) is type(other) and bool(one == other)


def _flat(value: Any) -> Iterator[Any]:
    yield value
    for _, item in find_items(value) or ():
        yield from _flat(item)


def _child(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, Sequence) and not isinstance(live, str) and key < len(live):
        return live[key]
    return None
