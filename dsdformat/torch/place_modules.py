"""Load modules in place: their parameters and buffers are read into, and never replaced.

What a module's state dict holds beside its own tensors is handed to its `load_state_dict`.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dsdformat.errors import MismatchError
from dsdformat.format.paths import render_path
from dsdformat.torch.buffers import OWN_CLASSES
from dsdformat.torch.compat import needs_loader
from dsdformat.torch.flat_find import find_flats
from dsdformat.torch.flatten import derived_tensors
from dsdformat.torch.fqn import holds_meta, named_tensors, stray_tensors, unwrapped
from dsdformat.torch.live_model import Entry, LiveModel, has_extra, is_placed
from dsdformat.torch.placing import Plan, same_content
from dsdformat.torch.stored import Path, Stored, describe, display

__all__ = ["place_modules"]

_RUN_MIN = 32  # entries that are looked at one by one where not all are plain
_RUN_MAX = 1024  # that are looked at together: all that is asked of them finds them in the cache


def place_modules(plan: Plan, modules: Sequence[nn.Module], stored: Any, path: Path) -> None:
    """Plan to load one model, which may be in several parts."""
    if not isinstance(stored, dict) or any(type(key) is not str for key in stored):
        plan.mismatch(display(path), "kind", describe(stored), "the state dict of a module")
        return
    _Placement(plan, stored, path).run(modules)


class _Placement:
    def __init__(self, plan: Plan, stored: dict[str, Any], path: Path) -> None:
        self.plan = plan
        self.stored = stored
        self.path = path
        self.prefix = f"{display(path)}/" if path else ""
        self.wanted: set[str] = set()
        self.parts: list[tuple[LiveModel, list[Entry]]] = []
        self.fits: dict[int, bool] = {}  # id of a tensor -> whether it will be loaded

    def run(self, modules: Sequence[nn.Module]) -> None:
        self.parts = [(live, _live_entries(live)) for live in map(LiveModel, modules)]
        if len(self.parts) > 1:
            self._check_apart()
        for _, entries in self.parts:
            self.wanted.update([name for _, name, _ in entries])
        for model, entries in self.parts:
            self._place(model, entries)
        for name in [name for name in self.stored if name not in self.wanted]:
            self.plan.unexpected(self.stored[name], (*self.path, name), values=True)
        for module in modules:
            self._find_uninitialized(module)
            self._check_flats(module)

    @functools.cached_property
    def tied(self) -> dict[int, list[str]]:
        """The names that each tensor has in all parts, by its id."""
        tied: dict[int, list[str]] = {}
        for model, entries in self.parts:
            for _, name, value in entries:
                if is_placed(name, value):
                    tied.setdefault(id(value), []).append(name)
            for name, tensor in model.tensors.items():
                names = tied.setdefault(id(tensor), [])
                if name not in names:
                    names.append(name)
        return tied

    def _check_apart(self) -> None:
        """Check that parts of a model that have one name have one tensor there.

        Raises:
            MismatchError: `state_conflict`.
        """
        first: dict[str, Any] = {}
        for _, entries in self.parts:
            for _, name, value in entries:
                if first.setdefault(name, value) is not value:
                    place = render_path([*self.path, name])
                    raise MismatchError(
                        f"{place}: two parts of the model have this name", code="state_conflict"
                    )

    @functools.cached_property
    def _has_ties(self) -> bool:
        """Whether some tensor may have several names: seldom, and seen by columns."""
        if len(self.parts) > 1:
            return True
        model, entries = self.parts[0]
        values = [value for *_, value in entries]
        own = map(model.tensors.get, [name for _, name, _ in entries])
        counts = {len(set(map(id, values))), len(values), len(model.tensors)}
        return len(counts) > 1 or not all(map(operator.is_, own, values))

    def _place(self, model: LiveModel, entries: Sequence[Entry]) -> None:
        live: dict[str, Any] = {}
        new: dict[str, tuple[Any, Path]] = {}
        at, size = 0, _RUN_MAX
        while at < len(entries):  # in their order, in runs that are all plain, and one by one
            run = entries[at : at + size]
            if self._place_plain(run):
                live.update((key, value) for key, _, value in run)
                at, size = at + size, min(2 * size, _RUN_MAX)
            elif size > _RUN_MIN:
                size = _RUN_MIN
            else:
                self._place_each(model, run, live, new)
                at += size
        self.plan.installs.append(self._installer(model, live, new))

    def _place_plain(self, entries: Sequence[Entry]) -> bool:
        """Plan some entries if all are plain tensors that have one name and are stored so."""
        names, values = [name for _, name, _ in entries], [value for *_, value in entries]
        stored: list[Any] = list(map(self.stored.get, names))
        if (
            not self.plan.selection.everything
            or set(map(type, stored)) != {Stored}
            or has_extra(names)
            or (self._has_ties and any(len(self.tied.get(id(one), ())) != 1 for one in values))
        ):
            return False
        return self.plan.place_plain(stored, values, lambda number: self._full(names[number]))

    def _place_each(
        self,
        model: LiveModel,
        entries: Sequence[Entry],
        live: dict[str, Any],
        new: dict[str, tuple[Any, Path]],
    ) -> None:
        for key, name, value in entries:
            if not self._is_selected(name):
                continue
            if is_placed(name, value):
                if id(value) not in self.fits:
                    self.fits[id(value)] = self._place_tensor(value)
                own = model.registered(name, value)
                if self.fits[id(value)] and own is not None:
                    live[key] = own
            elif name in self.stored:
                self.plan.builder.need(self.stored[name])
                new[key] = (self.stored[name], (*self.path, name))
            else:
                self.plan.report.missing.append(self._full(name))

    def _is_selected(self, name: str) -> bool:
        selection = self.plan.selection
        return selection.everything or self._full(name) in selection

    def _full(self, name: str) -> str:
        """Return the display name of an entry; its path is displayed once for all of them."""
        return self.prefix + display((name,))

    def _place_tensor(self, tensor: Any) -> bool:
        names = self.tied[id(tensor)]
        found = [name for name in names if name in self.stored and self._is_selected(name)]
        if not found:
            self.plan.report.missing.append(self._full(names[0]))
            return False
        first = self.stored[found[0]]
        for other in found[1:]:
            if not same_content(first, self.stored[other]):
                name = self._full(other)
                tied = f"the same as {found[0]}"
                return self.plan.mismatch(name, "tie", f"other data than {found[0]}", tied)
        return self.plan.place(first, tensor, self._full(found[0]))

    def _installer(
        self, model: LiveModel, live: dict[str, Any], new: dict[str, tuple[Any, Path]]
    ) -> Callable[[], None]:
        module = unwrapped(model.model)
        copies = False
        if self._has_ties or model.is_flat:  # else all are the model's own
            own = {id(tensor) for _, tensor in named_tensors(module)}
            copies = any(id(tensor) not in own for tensor in live.values())

        def install() -> None:
            if not new and not copies and not needs_loader(module):
                return
            entries: Any = OrderedDict(live)
            if model.versions is not None:  # what is handed over is as the module itself has it
                entries._metadata = model.versions
            for key, (value, place) in new.items():
                entries[key] = self.plan.builder.make(value, place)
            # Tensors are given as themselves, which copies nothing; hooks see all of them.
            model.hand_over(entries)

        return install

    def _find_uninitialized(self, module: nn.Module) -> None:
        """Report what is on meta and stays there (buffers that no state dict holds, and others)."""
        if not holds_meta(module):  # as mostly
            return
        reported = {*self.plan.report.missing, *(m.name for m in self.plan.report.mismatched)}
        seen = derived_tensors(module)
        others = stray_tensors(module)
        for name, tensor in (*named_tensors(module, persistent=False), *others):
            if not tensor.is_meta or self.plan.will_fill(tensor) or id(tensor) in seen:
                continue
            full = self._full(name)
            seen.add(id(tensor))
            if full in self.plan.selection and full not in reported:
                self.plan.report.uninitialized.append(full)

    def _check_flats(self, module: nn.Module) -> None:
        """Check that each flat parameter on meta gets all of its content, on one device.

        Raises:
            MismatchError: `state_mismatch`: it does not, and the report will not raise.
        """
        report = self.plan.report
        reported = {*report.missing, *(m.name for m in report.mismatched)}
        for flat in find_flats(module).values():
            devices: dict[str, str] = {}
            for name, one in flat.named_members().items():
                devices.setdefault(str(self.plan.device_of(one)), display((*self.path, name)))
            names = (display((*self.path, name)) for name in flat.layout.names)
            if len(devices) < 2 or any(one in reported and self.plan.strict(one) for one in names):
                continue
            each = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise MismatchError(
                f"{display((*self.path, flat.layout.name))} cannot get its content in parts: "
                f"there would be {each}",
                code="state_mismatch",
                hint="load all parameters in it, onto one device, or give the model memory first",
            )


def _live_entries(model: LiveModel) -> list[Entry]:
    """List the entries of a model; on meta, only the model's own tensors can get content."""
    entries = model.entries()
    values = [value for _, _, value in entries]
    if OWN_CLASSES.issuperset(map(type, values)) and {one.is_cpu for one in values} <= {True}:
        return entries  # as mostly
    return [
        (key, name, model.tensors.get(name, value) if _is_meta(value) else value)
        for key, name, value in entries
    ]


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_cpu and value.is_meta
