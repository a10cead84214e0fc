"""Load modules in place: their parameters and buffers are read into, and never replaced.

What a module's state dict holds beside its own tensors is handed to its `load_state_dict`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dsdformat.torch.capture import module_entries
from dsdformat.torch.fqn import EXTRA_STATE, named_tensors, unwrapped
from dsdformat.torch.placing import Plan
from dsdformat.torch.stored import Path, Stored, display

__all__ = ["place_modules"]


def place_modules(plan: Plan, modules: Sequence[nn.Module], stored: Any, path: Path) -> None:
    """Plan to load one model, which may be in several parts."""
    if not isinstance(stored, dict) or any(type(key) is not str for key in stored):
        plan.mismatch(display(path), "kind", "something else", "the state dict of a module")
        return
    _Placement(plan, stored, path).run(modules)


class _Placement:
    def __init__(self, plan: Plan, stored: dict[str, Any], path: Path) -> None:
        self.plan = plan
        self.stored = stored
        self.path = path
        self.wanted: set[str] = set()
        self.tied: dict[int, list[str]] = {}  # id of a tensor -> its names, of all parts
        self.fits: dict[int, bool] = {}  # id of a tensor -> whether it will be loaded

    def run(self, modules: Sequence[nn.Module]) -> None:
        parts = [(module, _live_entries(module)) for module in modules]
        for module, entries in parts:
            for _, name, value in entries:
                self.wanted.add(name)
                if _is_placed(name, value):
                    self.tied.setdefault(id(value), []).append(name)
            for name, tensor in named_tensors(module):
                names = self.tied.setdefault(id(tensor), [])
                if name not in names:
                    names.append(name)
        for module, entries in parts:
            self._place(module, entries)
        for name, value in self.stored.items():
            if name not in self.wanted:
                self.plan.unexpected(value, (*self.path, name))
        for module in modules:
            self._find_uninitialized(module)

    def _place(self, module: nn.Module, entries: Sequence[tuple[str, str, Any]]) -> None:
        live: dict[str, Any] = {}
        new: dict[str, tuple[Any, Path]] = {}
        for key, name, value in entries:
            place = (*self.path, name)
            if display(place) not in self.plan.selection:
                continue
            if _is_placed(name, value):
                if id(value) not in self.fits:
                    self.fits[id(value)] = self._place_tensor(value)
                if self.fits[id(value)]:
                    live[key] = value
            elif name in self.stored:
                self.plan.builder.need(self.stored[name])
                new[key] = (self.stored[name], place)
            else:
                self.plan.report.missing.append(display(place))
        self.plan.installs.append(self._installer(unwrapped(module), live, new))

    def _place_tensor(self, tensor: torch.Tensor) -> bool:
        names = self.tied[id(tensor)]
        found = [name for name in names if name in self.stored]
        if not found:
            self.plan.report.missing.append(display((*self.path, names[0])))
            return False
        first = self.stored[found[0]]
        for other in found[1:]:
            if not _same(first, self.stored[other]):
                name = display((*self.path, other))
                tied = f"the same as {found[0]}"
                return self.plan.mismatch(name, "tie", f"other data than {found[0]}", tied)
        return self.plan.place(first, tensor, display((*self.path, found[0])))

    def _installer(
        self, module: nn.Module, live: dict[str, Any], new: dict[str, tuple[Any, Path]]
    ) -> Callable[[], None]:
        def install() -> None:
            entries: OrderedDict[str, Any] = OrderedDict(live)
            for key, (value, place) in new.items():
                entries[key] = self.plan.builder.make(value, place)
            # Tensors are given as themselves, which copies nothing; hooks see all of them.
            module.load_state_dict(entries, strict=False)

        return install

    def _find_uninitialized(self, module: nn.Module) -> None:
        """Report what is on meta and stays there (buffers that no state dict holds, and others)."""
        reported = set(self.plan.report.missing)
        seen: set[int] = set()
        for name, tensor in named_tensors(module, persistent=False):
            full = display((*self.path, name))
            if not tensor.is_meta or self.plan.will_fill(tensor) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if full in self.plan.selection and full not in reported and name not in self.stored:
                self.plan.report.uninitialized.append(full)


def _live_entries(module: nn.Module) -> list[tuple[str, str, Any]]:
    """List the entries of a module; on meta, only the module's own tensors can get content."""
    own = dict(named_tensors(module))
    return [
        (key, name, own.get(name, value) if _is_meta(value) else value)
        for key, name, value in module_entries(module)
    ]


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _is_placed(name: str, value: Any) -> bool:
    """Whether an entry is read in place; extra state may change its shape, and is made anew."""
    return isinstance(value, torch.Tensor) and name.rsplit(".", 1)[-1] != EXTRA_STATE


def _same(one: Any, other: Any) -> bool:
    """Whether two stored tensors hold the same."""
    if not (isinstance(one, Stored) and isinstance(other, Stored)):
        return bool(one == other)
    if one.index == other.index:
        return True
    a, b = one.entry, other.entry
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.content_digest() == b.content_digest()
