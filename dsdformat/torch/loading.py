"""One load into a state: pair its leaves with the checkpoint's tree, plan, check, read, install."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsdformat.errors import shorten
from dsdformat.reader import Checkpoint
from dsdformat.torch.builder import Builder, Form
from dsdformat.torch.introspect import Kind, holds_leaves, kind_of
from dsdformat.torch.moves import fill
from dsdformat.torch.names import Namer
from dsdformat.torch.options import LoadOptions
from dsdformat.torch.place_modules import place_modules
from dsdformat.torch.place_optim import place_optimizers
from dsdformat.torch.placing import Plan
from dsdformat.torch.report import Loaded
from dsdformat.torch.sources import numpy_side
from dsdformat.torch.stored import (
    Composite,
    Path,
    Stored,
    as_array,
    display,
    find_items,
    leaves,
    unescaped,
)

__all__ = ["Loading"]


@dataclass
class _Task:
    """A leaf of the state, and what the checkpoint has for it."""

    live: Any
    stored: Any
    path: Path


_PLACED = object()
# Modules first: the device of a parameter decides where its optimizer's state goes.
_ORDER = (
    (Kind.MODULE, Kind.MODULES, Kind.TENSOR, Kind.ARRAY),
    (Kind.OPTIMIZER, Kind.OPTIMIZERS),
    (Kind.STATEFUL,),
)


class Loading:
    """Loads a tree into a state: compared when made, carried out by `run`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tree: dict[str, Any],
        state: Mapping[str, Any],
        options: LoadOptions,
    ) -> None:
        self._checkpoint = checkpoint
        self._options = options
        self._namer = Namer(state)
        self._tasks: dict[Kind, list[_Task]] = {kind: [] for kinds in _ORDER for kind in kinds}
        builder = Builder(
            checkpoint,
            mmap=options.mmap,
            types=options.types,
            form=lambda name: Form(None, options.device(name)),
        )
        self.plan = Plan(
            builder,
            options.selection,
            dtype=options.dtype,
            device=options.device,
            strict=options.strict,
        )
        self._rest = self._walk_dict(state, tree, ())
        for kinds in _ORDER:
            for kind in kinds:
                for task in self._tasks[kind]:
                    self._place(kind, task)

    def run(self) -> Loaded:
        """Check, read, and put everything in its place."""
        self.plan.report.check(self._options.strict)
        for moves in self.plan.moves():
            fill(self._checkpoint, moves)
        self.plan.finish()
        return Loaded(self.plan.builder.make(self._rest, ()), self.plan.report)

    def _walk(self, live: Any, stored: Any, path: Path) -> Any:
        """Return what of the stored has no place, or `_PLACED`."""
        kind = kind_of(live)
        if kind is not Kind.OTHER:
            self._tasks[kind].append(_Task(live, stored, path))
            return _PLACED
        if not holds_leaves(live):
            return self._value(stored, path)
        if isinstance(live, Mapping):
            if not isinstance(stored, Mapping):
                self.plan.mismatch(display(path), "kind", type(stored).__name__, "a dict")
                return _PLACED
            return self._walk_dict(live, stored, path) or _PLACED
        if type(stored) not in (list, tuple) or len(stored) != len(live):
            found = f"{type(stored).__name__} of {len(stored)}" if find_items(stored) else "no list"
            self.plan.mismatch(display(path), "kind", found, f"{len(live)} items")
            return _PLACED
        items = [
            self._walk(a, b, (*path, i)) for i, (a, b) in enumerate(zip(live, stored, strict=True))
        ]
        if all(item is _PLACED for item in items):
            return _PLACED
        return [None if item is _PLACED else item for item in items]

    def _walk_dict(self, live: Mapping[Any, Any], stored: Mapping[Any, Any], path: Path) -> Any:
        rest = {}
        for key, value in live.items():
            place = (*path, key)
            if key not in stored:
                self.plan.missing(value, place)
                continue
            left = self._walk(value, stored[key], place)
            if left is not _PLACED:
                rest[key] = left
        for key, value in stored.items():
            if key not in live:
                self.plan.unexpected(value, (*path, key))
                if not any(isinstance(leaf, (Stored, Composite)) for _, leaf in leaves(value)):
                    left = self._value(value, (*path, key))
                    if left is not _PLACED:
                        rest[key] = left
        return rest

    def _is_selected(self, stored: Any, path: Path) -> bool:
        return any(display(place) in self.plan.selection for place, _ in leaves(stored, path))

    def _value(self, stored: Any, path: Path) -> Any:
        if not self._is_selected(stored, path):
            return _PLACED
        self.plan.builder.need(stored)
        return stored

    def _place(self, kind: Kind, task: _Task) -> None:
        live, stored, path = task.live, task.stored, task.path
        if kind in (Kind.MODULE, Kind.MODULES):
            place_modules(self.plan, [live] if kind is Kind.MODULE else live, stored, path)
        elif kind in (Kind.OPTIMIZER, Kind.OPTIMIZERS):
            parts = [live] if kind is Kind.OPTIMIZER else live
            names = self._namer.names_of(parts, path)
            place_optimizers(self.plan, parts, names, stored, path, self._renamed(names.path))
        elif not self._is_selected(stored, path):
            return
        elif kind is Kind.TENSOR:
            self.plan.place(stored, live, display(path))
        elif kind is Kind.ARRAY:
            self._place_array(live, stored, path)
        else:
            self.plan.builder.need(stored)
            make = self.plan.builder.make
            self.plan.installs.append(lambda: live.load_state_dict(make(stored, path)))

    def _place_array(self, live: Any, stored: Any, path: Path) -> None:
        name = display(path)
        dtype = numpy_side().dtype_of(stored.entry.dtype) if type(stored) is Stored else None
        if dtype != live.dtype or stored.entry.shape != live.shape:
            found = str(stored) if type(stored) is Stored else shorten(stored)
            self.plan.mismatch(name, "array", found, f"{live.dtype} {list(live.shape)}")
            return
        if not live.flags.writeable:
            self.plan.mismatch(name, "array", str(stored), "an array that can be written to")
            return

        self.plan.builder.need(stored)

        def install() -> None:
            live[...] = self.plan.builder.make(as_array(stored), path)

        self.plan.installs.append(install)

    def _renamed(self, module: Path | None) -> Callable[[str], str | None]:
        """Return what FQNs of an optimizer are called now: what the module's entries are called."""
        renames = self._options.renames
        if not renames:
            return lambda name: name
        prefix = f"{display(module)}/" if module else ""

        def wanted(name: str) -> str | None:
            full = renames.name(display((*(module or ()), name)) if module else name)
            if full is None or not full.startswith(prefix):
                return None
            return unescaped(full[len(prefix) :]) if module else full

        return wanted
