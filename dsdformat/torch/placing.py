"""Compare one stored tensor with one live tensor, and plan how it gets there.

Nothing is read and nothing changed until the whole plan was made and checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dsdformat.errors import shorten
from dsdformat.selection import Selection
from dsdformat.torch.buffers import as_bits, empty, memory_order, overlaps_itself
from dsdformat.torch.builder import Builder, Form, stored_dtype
from dsdformat.torch.comm import global_rank
from dsdformat.torch.compat import swap_content
from dsdformat.torch.composites import find_kind, inner_tensors, plain_addresses, take_apart
from dsdformat.torch.dtypes import dtype_name, torch_dtype
from dsdformat.torch.memory import Memory
from dsdformat.torch.moves import Move, Moves, can_cast
from dsdformat.torch.plain_tensors import Run
from dsdformat.torch.redistribute import materialized
from dsdformat.torch.report import Cast, LoadReport, Mismatch
from dsdformat.torch.sharding import held_view, is_dtensor, is_spread, local_of, sharding_of
from dsdformat.torch.stored import Composite, Path, Stored, as_tensor, describe, display, leaves

__all__ = ["Plan", "moves_into", "replace_content", "same_content"]

# A display name, or what makes it when somebody asks.
_Name = str | Callable[[], str]


class Plan:
    """What one load will do.

    Attributes:
        builder: What makes new tensors and values.
        report: What was found on the way.
        selection: The entries that are meant.
        installs: What to call once everything is read, in this order.
        memory: What live tensors lie in, so that nothing is read over something else.
        refused: Ids of live tensors that are not loaded, since they differ.
        later: What makes new shards, and lists what is to be read into them.
    """

    def __init__(
        self,
        builder: Builder,
        selection: Selection,
        *,
        dtype: Callable[[str], torch.dtype | None],
        device: Callable[[str], torch.device],
        strict: Callable[[str], bool],
        memory: Memory | None = None,
    ) -> None:
        self.memory = memory or Memory({})
        self.builder = builder
        self.report = LoadReport()
        self.selection = selection
        self.strict = strict
        self.installs: list[Callable[[], None]] = []
        self.later: list[Callable[[], Iterator[Move]]] = []
        self._dtype = dtype
        self._device = device
        self._moves = Moves()
        self._runs: list[Run] = []  # of plain tensors; not yet among what was placed
        self._starts: set[int] = set()  # of the memory that was placed one by one
        self.refused: set[int] = set()  # ids of live tensors that differ
        self._placed: dict[Any, tuple[Stored, _Name]] = {}  # memory -> what it gets, and as which
        self._fills: list[tuple[torch.Tensor, Stored, Form]] = []  # meta tensors, and their content
        self._devices: dict[int, torch.device] = {}  # of meta tensors, by id
        self._shards: list[tuple[Any, Stored, torch.device]] = []  # DTensors on meta
        self._made: list[tuple[Any, torch.Tensor]] = []  # what they will be

    def place(self, stored: Any, live: Any, name: str, *, cast: bool = True) -> bool:
        """Plan to read a stored tensor into a live one; report what does not fit.

        Args:
            stored: What the checkpoint has at the name.
            live: A tensor, of any kind, on any device. Of one that is spread over ranks, what this
                rank holds is read.
            name: Display name.
            cast: Whether the `dtype` that was asked for counts here.

        Returns:
            Whether it fits.
        """
        fits = self._place(stored, live, name, cast=cast)
        if not fits:
            self.refused.add(id(live))
        return fits

    def place_plain(
        self,
        stored: Sequence[Stored],
        live: Sequence[torch.Tensor],
        name: Callable[[int], str],
    ) -> bool:
        """Plan as `place` some that are all plain, alike, and in memory of their own.

        Most are. By columns they take a fifth of the time.

        Args:
            stored, live: As in `place`, of each.
            name: Gives the display name of one of them, by its number here.

        Returns:
            False if any is not so: nothing was planned, and `place` says what each is.
        """
        addresses = plain_addresses(live)
        if addresses is None:
            return False
        indexes = [one.entry.index for one in stored]
        shapes, names = self.builder.origin.forms(indexes)
        known = {name: torch_dtype(name) for name in set(names)}
        dtypes = [one.dtype for one in live]
        if shapes != [one.shape for one in live] or [known[name] for name in names] != dtypes:
            return False
        run = Run(stored, indexes, live, addresses, shapes, dtypes, name)
        if not self._starts.isdisjoint(addresses) or not self._moves.plain.add(run):
            return False
        self._runs.append(run)
        self.memory.assign(live, indexes)
        return True

    def _place(self, stored: Any, live: Any, name: str, *, cast: bool) -> bool:
        kind = None if is_spread(live) else find_kind(live)
        if kind is not None or type(stored) is Composite:
            return self._place_composite(stored, live, kind, name)
        if type(stored) is not Stored:
            return self.mismatch(name, "kind", describe(stored), "a tensor")
        if stored.entry.shape != tuple(live.shape):
            shape = list(stored.entry.shape), list(live.shape)
            return self.mismatch(name, "shape", str(shape[0]), str(shape[1]))
        if not self._dtype_fits(stored, live, name, cast=cast):
            found, wanted = stored.entry.dtype, dtype_name(live.dtype)
            return self.mismatch(name, "dtype", found, wanted, castable=cast)
        local = local_of(live)
        record = stored, name
        first = self._recorded(_memory_of(live, local), record)
        if first is not record:
            return self._is_same(first, stored, name)
        if live.is_meta:
            return self._place_on_meta(stored, live, name)
        if overlaps_itself(local):
            return self.mismatch(name, "kind", str(stored), "a tensor whose elements share memory")
        self.memory.assign([live], [stored.index])
        self._moves.others.extend(moves_into(stored, live))
        return True

    def _recorded(self, memory: Any, record: tuple[Stored, _Name]) -> tuple[Stored, _Name]:
        """Note what some memory gets, and return what it got first."""
        for run in self._runs:
            names = [functools.partial(run.name, number) for number in range(len(run.stored))]
            records = zip(run.stored, names, strict=True)
            self._placed.update(zip(run.memories(), records, strict=True))
        self._runs.clear()
        if type(memory) is tuple:  # else it has none
            self._starts.add(memory[0])
        return self._placed.setdefault(memory, record)

    def _is_same(self, first: tuple[Stored, _Name], stored: Stored, name: str) -> bool:
        """Compare what the same memory gets under two names."""
        other, known = first
        if same_content(other, stored):
            return True
        known = known if isinstance(known, str) else known()
        return self.mismatch(name, "tie", f"other data than {known}", f"the same as {known}")

    def _dtype_fits(self, stored: Stored, live: Any, name: str, *, cast: bool) -> bool:
        dtype = stored_dtype(stored)
        if dtype == live.dtype:
            return True
        floats = dtype.is_floating_point and live.dtype.is_floating_point
        if not (
            cast and floats and self._dtype(name) == live.dtype and can_cast(dtype, live.dtype)
        ):
            return False
        self.report.casts.append(Cast(name, stored.entry.dtype, dtype_name(live.dtype)))
        return True

    def mismatch(
        self, name: str, what: str, stored: str, wanted: str, *, castable: bool = False
    ) -> bool:
        """Report an entry that differs; return False."""
        self.report.mismatched.append(Mismatch(name, what, stored, wanted, castable))
        return False

    def other_form(self, found: Mismatch) -> None:
        """Report an entry of an optimizer that is of another form than the one there is."""
        strict = self.strict(found.name)
        (self.report.mismatched if strict else self.report.replaced).append(found)

    def missing(self, value: Any, path: Path) -> None:
        """Report what the state has at a path and the checkpoint does not."""
        for place, _ in leaves(value, path):
            name = display(place)
            if name in self.selection:
                self.report.missing.append(name)

    def unexpected(self, stored: Any, path: Path, *, values: bool = False) -> None:
        """Report the tensors, and the values, that the checkpoint has and the state does not."""
        for place, leaf in leaves(stored, path):
            counts = values or isinstance(leaf, (Stored, Composite))
            if counts and display(place) in self.selection:
                self.report.unexpected.append(display(place))

    def device_of(self, live: torch.Tensor) -> torch.device:
        """Return the device on which a tensor will be when this plan is done."""
        return self._devices.get(id(live), live.device)

    def will_fill(self, live: torch.Tensor) -> bool:
        """Whether a tensor on meta gets its content."""
        return id(live) in self._devices

    def moves_of_new(self) -> list[Move]:
        """Make what is new, which nobody sees yet, and list what is to be read into it."""
        later = [move for moves in self.later for move in moves()]
        return [*self.builder.moves(), *self._shard_moves(), *later]

    def moves_in_place(self) -> Moves:
        """List what is to be read into what there is, once everything new is there."""
        self.builder.compose()
        return self._moves

    def targets(self) -> Iterator[tuple[int, torch.dtype]]:
        """List the tensors that will be read, as which dtypes, without making any of them."""
        plain = self._moves.plain
        yield from zip(plain.indexes, (one.dtype for one in plain.tensors), strict=True)
        yield from ((move.index, move.into.dtype) for move in self._moves.others)
        yield from self.builder.targets()
        for live, stored, _ in self._shards:
            yield stored.index, live.dtype

    @property
    def in_place(self) -> Sequence[Move]:
        """What is read into tensors that others see, last of all."""
        return self._moves

    def _shard_moves(self) -> Iterator[Move]:
        """Make the shards of tensors on meta, and list what is to be read into them."""
        for live, stored, device in self._shards:
            made = materialized(live, device)
            self._made.append((live, made))
            yield from moves_into(stored, made)

    def finish(self) -> None:
        """Put everything that was read in its place."""
        used: set[tuple[int, Form]] = set()
        for live, stored, form in self._fills:
            content = self.builder.make(stored, (stored.name,), form)
            if (stored.index, form) in used:  # tied in the file, and two tensors here
                content = content.clone()
            used.add((stored.index, form))
            replace_content(live, _ordered(content, memory_order(live)))
        for live, made in self._made:
            replace_content(live, made)
        for install in self.installs:
            install()

    def _place_on_meta(self, stored: Stored, live: torch.Tensor, name: str) -> bool:
        form = Form(live.dtype, self._device(name))
        self._devices[id(live)] = form.device
        if is_spread(live):
            self._shards.append((live, stored, form.device))
            return True
        stored = as_tensor(stored)
        self.builder.need(stored, (name,), form)
        self._fills.append((live, stored, form))
        return True

    def _place_composite(
        self, stored: Any, live: torch.Tensor, kind: str | None, name: str
    ) -> bool:
        if type(stored) is not Composite or stored.kind != kind:
            wanted = kind.removeprefix("torch.") if kind else "strided"
            return self.mismatch(name, "kind", describe(stored), f"a {wanted} tensor")
        if kind != "torch.subclass":
            fault = _composite_fault(stored, live)
            if fault:
                return self.mismatch(name, *fault)
            self.builder.need(stored, (name,))

            def install() -> None:
                replace_content(live, self.builder.make(stored, (name,)))

            self.installs.append(install)
            return True
        parts = take_apart(live, (name,))
        for key in ("type", "context", "size"):
            if stored.parts.get(key) != parts[key]:
                both = shorten(stored.parts.get(key)), shorten(parts[key])
                return self.mismatch(name, key, *both)
        inner, kept = inner_tensors(live), stored.parts.get("tensors")
        if not isinstance(kept, dict) or kept.keys() != inner.keys():
            return self.mismatch(name, "kind", describe(kept), f"the tensors {sorted(inner)}")
        fits = [
            self.place(kept[key], one, f"{name}/{key}", cast=False) for key, one in inner.items()
        ]
        return all(fits)


def replace_content(live: torch.Tensor, content: torch.Tensor) -> None:
    """Give a tensor other content, device and layout; the object stays the one that others hold."""
    requires_grad = live.requires_grad
    in_attributes = find_kind(content) in ("torch.jagged", "torch.subclass") or is_dtensor(content)
    if in_attributes:  # what it holds
        if isinstance(live, nn.Parameter):
            content = nn.Parameter(content, requires_grad=requires_grad)
        torch.utils.swap_tensors(live, content)  # type: ignore[no-untyped-call]
        return
    # An object of its own: the one that is given keeps its content.
    swap_content(live, content.detach())
    live.requires_grad_(requires_grad)


def _composite_fault(stored: Composite, live: torch.Tensor) -> tuple[str, str, str] | None:
    """Say in what a sparse or nested tensor differs from the one it is for, or None."""
    size, values = stored.parts.get("size"), stored.parts.get("values")
    if size is not None and tuple(size) != tuple(live.shape):
        return "shape", str(list(size)), str(list(live.shape))
    if isinstance(values, Stored) and stored_dtype(values) != live.dtype:
        return "dtype", values.entry.dtype, dtype_name(live.dtype)
    return None


def _ordered(content: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """Return a tensor whose dims lie in memory in this order."""
    if order is None or memory_order(content) == order:
        return content
    result = empty(content.shape, content.dtype, content.device, order)
    as_bits(result).copy_(as_bits(content))
    return result


def moves_into(stored: Stored, live: Any) -> Iterator[Move]:
    """List what is to be read into a tensor; of one that is spread, the boxes of this rank."""
    dtype, local = stored_dtype(stored), local_of(live)
    if not is_spread(live):
        yield Move.of_all(stored.index, dtype, local)
        return
    sharding, rank = sharding_of(live), global_rank()
    if rank in sharding.ranks:
        for held in sharding.held(sharding.ranks.index(rank)):
            into = held_view(held, held.outer, local)
            yield Move(stored.index, dtype, into, held.outer)


def _memory_of(live: Any, local: torch.Tensor) -> Any:
    """Return what tensors share that are the same memory seen in the same way."""
    if live.is_meta or local.numel() == 0:
        return id(live)
    strides = None if local.is_contiguous() else local.stride()
    return local.data_ptr(), local.device, tuple(live.shape), strides, local.dtype


def same_content(one: Any, other: Any) -> bool:
    """Whether two stored tensors hold the same."""
    if not (isinstance(one, Stored) and isinstance(other, Stored)):
        return bool(one == other)
    if one.index == other.index:
        return True
    a, b = one.entry, other.entry
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.content_digest() == b.content_digest()
