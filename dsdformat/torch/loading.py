"""One load into a state: pair its leaves with the checkpoint's tree, plan, check, read, install."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from dsdformat.garbage import paused_gc
from dsdformat.plan.load_plan import Wanted
from dsdformat.renaming import Moved
from dsdformat.torch.builder import Builder, Form
from dsdformat.torch.comm import Comm
from dsdformat.torch.fsdp1 import reshard
from dsdformat.torch.fsdp2 import reshard_fsdp2, shown_as_shards
from dsdformat.torch.introspect import Kind, holds_leaves, kind_of
from dsdformat.torch.memory import Memory
from dsdformat.torch.names import Namer, modules_in
from dsdformat.torch.numbered import OrderUnknownError, is_of_torch, named_state
from dsdformat.torch.options import LoadOptions
from dsdformat.torch.origin import Origin
from dsdformat.torch.place_modules import place_modules
from dsdformat.torch.place_optim import place_optimizers
from dsdformat.torch.placing import Plan
from dsdformat.torch.report import Loaded
from dsdformat.torch.shared_reads import fill_together
from dsdformat.torch.sources import numpy_side
from dsdformat.torch.stored import (
    ABSENT,
    Live,
    Path,
    Stored,
    as_array,
    describe,
    display,
    find_items,
    leaves,
    names_of,
    pruned,
    rebuilt,
    without_tensors,
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


def _with_live(value: Any) -> Any:
    if isinstance(value, Live):
        return value.value
    if type(value) in (dict, OrderedDict, list, tuple):
        items = find_items(value) or []
        return rebuilt(value, [(key, _with_live(item)) for key, item in items])
    return value


class Loading:
    """Loads a tree into a state: compared when made, carried out by `check` and `run`."""

    def __init__(
        self,
        checkpoint: Origin,
        tree: dict[str, Any],
        state: Mapping[str, Any],
        options: LoadOptions,
        moved: Moved | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._options = options
        self._moved = moved or Moved()
        selected = not options.selection.everything
        self._names = [display(path) for path, _ in leaves(tree)] if selected else []
        state = dict(state)
        self._modules = modules_in(state)
        # No collection meanwhile: one of all that torch has imported takes as long as this.
        with torch.no_grad(), paused_gc(), shown_as_shards(self._modules):
            self._compare(state, tree)

    def _compare(self, state: dict[str, Any], tree: dict[str, Any]) -> None:
        """Plan what is read into what, and note what does not fit."""
        options = self._options
        self._tasks: dict[Kind, list[_Task]] = {kind: [] for kinds in _ORDER for kind in kinds}
        self._namer = Namer(state)
        builder = Builder(
            self._checkpoint,
            mmap=options.mmap,
            types=options.types,
            form=lambda name: Form(None, options.device(name)),
            names=functools.cache(functools.partial(names_of, tree)),
        )
        # Of optimizers: where the module of the names is, and what is stored by names.
        self.sections: list[tuple[Path | None, Any]] = []
        self.plan = Plan(
            builder,
            options.selection,
            dtype=options.dtype,
            device=options.device,
            strict=options.strict,
            memory=Memory(state),
        )
        self._rest = self._walk_dict(state, tree, ())
        for kinds in _ORDER:
            for kind in kinds:
                for task in self._tasks[kind]:
                    self._place(kind, task)

    def check(self) -> None:
        """Raise if something does not fit; nothing was changed.

        Raises:
            MismatchError: `state_mismatch`.
            EntryNotFoundError: nothing is selected.

        Ranks: local.
        """
        if not self.plan.selection.met:
            self.plan.selection.check_used(self._names)
        self.plan.report.check(self._options.strict)

    def prepare(self) -> None:
        """Let go of parameters of FSDP1 and FSDP2 that are gathered at the moment.

        Ranks: collective over the process groups of FSDP1, if there are any.
        """
        for module in self._modules:
            reshard(module)
            reshard_fsdp2(module)

    def wanted(self) -> list[Wanted]:
        """List what will be read into tensors that are in use."""
        return [move.wanted() for move in self.plan.in_place]

    def run(self, comm: Comm, *, share_reads: bool) -> Loaded:
        """Read what was checked, and put everything in its place.

        Ranks: collective over the group.
        """
        for moves in (self.plan.moves_of_new, self.plan.moves_in_place):
            fill_together(comm, self._checkpoint, moves, share_reads=share_reads)
        with comm.together("load"):
            self.plan.finish()
            return Loaded(_with_live(self.plan.builder.make(self._rest, ())), self.plan.report)

    def _walk(self, live: Any, stored: Any, path: Path, *, whole: bool = False) -> Any:
        """Return what of the stored has no place, or `_PLACED`.

        In a sequence, of which all or nothing is returned, dicts are whole too.
        """
        kind = kind_of(live)
        if kind is not Kind.OTHER:
            self._tasks[kind].append(_Task(live, stored, path))
            return _PLACED
        if not holds_leaves(live):
            return self._value(stored, path)
        if isinstance(live, Mapping):
            if not isinstance(stored, Mapping):
                self.plan.mismatch(display(path), "kind", describe(stored), "a dict")
                return _PLACED
            return self._walk_dict(live, stored, path, whole=whole) or _PLACED
        if type(stored) not in (list, tuple) or len(stored) != len(live):
            found = f"{type(stored).__name__} of {len(stored)}" if find_items(stored) else "no list"
            self.plan.mismatch(display(path), "kind", found, f"{len(live)} items")
            return _PLACED
        items = [
            self._walk(a, b, (*path, i), whole=True)
            for i, (a, b) in enumerate(zip(live, stored, strict=True))
        ]
        if all(item is _PLACED for item in items):
            return _PLACED
        # What has a place is in it, so that the sequence is whole.
        pairs = zip(items, live, strict=True)
        return type(stored)(Live(own) if item is _PLACED else item for item, own in pairs)

    def _walk_dict(
        self, live: Mapping[Any, Any], stored: Mapping[Any, Any], path: Path, *, whole: bool = False
    ) -> Any:
        rest: dict[Any, Any] = OrderedDict() if type(stored) is OrderedDict else {}
        for key, value in live.items():
            place = (*path, key)
            if key not in stored:
                self.plan.missing(value, place)
                continue
            left = self._walk(value, stored[key], place, whole=whole)
            if left is not _PLACED:
                rest[key] = left
            elif whole:
                rest[key] = Live(value)
        for key, value in stored.items():
            if key not in live:
                left = self._unwanted(value, (*path, key))
                if left is not _PLACED:
                    rest[key] = left
        if whole and all(isinstance(item, Live) for item in rest.values()):
            return {}
        return rest

    def _unwanted(self, stored: Any, path: Path) -> Any:
        """Report the tensors of what the state has no place for; return values."""
        stored = pruned(stored, self.plan.selection, path)
        if stored is ABSENT:
            return _PLACED
        self.plan.unexpected(stored, path)
        plain = without_tensors(stored)
        return _PLACED if plain is ABSENT else self._value(plain, path)

    def _is_selected(self, stored: Any, path: Path) -> bool:
        return any(display(place) in self.plan.selection for place, _ in leaves(stored, path))

    def _value(self, stored: Any, path: Path) -> Any:
        stored = pruned(stored, self.plan.selection, path)
        if stored is ABSENT:
            return _PLACED
        self.plan.builder.need(stored, path)
        return stored

    def _place(self, kind: Kind, task: _Task) -> None:
        live, stored, path = task.live, task.stored, task.path
        if kind in (Kind.MODULE, Kind.MODULES):
            place_modules(self.plan, [live] if kind is Kind.MODULE else live, stored, path)
        elif kind in (Kind.OPTIMIZER, Kind.OPTIMIZERS):
            parts = [live] if kind is Kind.OPTIMIZER else live
            self._place_optimizers(parts, stored, path)
        elif not self._is_selected(stored, path):
            return
        elif kind is Kind.TENSOR:
            self.plan.place(stored, live, display(path))
        elif kind is Kind.ARRAY:
            self._place_array(live, stored, path)
        else:
            if isinstance(live.state_dict(), Mapping) and not isinstance(stored, Mapping):
                found = type(stored).__name__
                self.plan.mismatch(
                    display(path), "kind", f"a {found}", "a dict, as of state_dict()"
                )
                return
            self.plan.builder.need(stored, path)
            make = self.plan.builder.make
            self.plan.installs.append(lambda: live.load_state_dict(make(stored, path)))

    def _place_optimizers(self, parts: Sequence[Optimizer], stored: Any, path: Path) -> None:
        if not is_of_torch(stored) and not self._is_selected(stored, path):
            return
        names = self._namer.names_of(parts, path)
        renamed = self._moved.of(names.path)
        if is_of_torch(stored):
            try:
                stored, renamed = named_state(stored, parts, names, renamed), str
            except OrderUnknownError as fault:
                if self._is_selected(stored, path):
                    self.plan.mismatch(display(path), "kind", *fault.args)
                return
        if self._is_selected(stored, path):
            self.sections.append((names.path, stored))
            place_optimizers(self.plan, parts, names, stored, path, renamed)

    def _place_array(self, live: Any, stored: Any, path: Path) -> None:
        name = display(path)
        wanted = numpy_side().name_of(live.dtype), live.shape
        if type(stored) is not Stored or (stored.entry.dtype, stored.entry.shape) != wanted:
            found = str(stored) if type(stored) is Stored else f"a {type(stored).__name__}"
            self.plan.mismatch(name, "array", found, f"{live.dtype} {list(live.shape)}")
            return
        if not live.flags.writeable:
            self.plan.mismatch(name, "array", str(stored), "an array that can be written to")
            return

        self.plan.builder.need(as_array(stored), path)

        def install() -> None:
            live[...] = self.plan.builder.make(as_array(stored), path)

        self.plan.installs.append(install)
