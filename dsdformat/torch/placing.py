"""Compare one stored tensor with one live tensor, and plan how it gets there.

Nothing is read and nothing changed until the whole plan was made and checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dsdformat.errors import ArgumentError, shorten
from dsdformat.torch.buffers import as_bits, empty, memory_order
from dsdformat.torch.builder import Builder, Form, stored_dtype
from dsdformat.torch.composites import find_kind, inner_tensors, take_apart
from dsdformat.torch.introspect import local_tensor
from dsdformat.torch.moves import Move
from dsdformat.torch.report import Cast, LoadReport, Mismatch
from dsdformat.torch.selection import Selection
from dsdformat.torch.stored import Composite, Path, Stored, display, leaves

__all__ = ["Plan"]


class Plan:
    """What one load will do.

    Attributes:
        builder: What makes new tensors and values.
        report: What was found on the way.
        selection: The entries that are meant.
        installs: What to call once everything is read, in this order.
    """

    def __init__(
        self,
        builder: Builder,
        selection: Selection,
        *,
        dtype: Callable[[str], torch.dtype | None],
        device: Callable[[str], torch.device],
        strict: Callable[[str], bool],
    ) -> None:
        self.builder = builder
        self.report = LoadReport()
        self.selection = selection
        self.strict = strict
        self.installs: list[Callable[[], None]] = []
        self._dtype = dtype
        self._device = device
        self._moves: list[Move] = []
        self._fills: list[tuple[torch.Tensor, Stored, Form]] = []  # meta tensors, and their content
        self._devices: dict[int, torch.device] = {}  # of meta tensors, by id

    def place(self, stored: Any, live: torch.Tensor, name: str, *, cast: bool = True) -> bool:
        """Plan to read a stored tensor into a live one; report what does not fit.

        Args:
            stored: What the checkpoint has at the name.
            live: A tensor, of any kind, on any device.
            name: Display name.
            cast: Whether the `dtype` that was asked for counts here.

        Returns:
            Whether it fits.
        """
        kind = find_kind(live)
        if kind is not None or type(stored) is Composite:
            return self._place_composite(stored, live, kind, name)
        if type(stored) is not Stored:
            return self.mismatch(name, "kind", _kind(stored), "a tensor")
        if stored.entry.shape != tuple(live.shape):
            shape = list(stored.entry.shape), list(live.shape)
            return self.mismatch(name, "shape", str(shape[0]), str(shape[1]))
        dtype = stored_dtype(stored)
        if dtype != live.dtype:
            if not (cast and self._may_cast(name, dtype, live.dtype)):
                return self.mismatch(name, "dtype", stored.entry.dtype, _dtype_name(live.dtype))
            self.report.casts.append(Cast(name, stored.entry.dtype, _dtype_name(live.dtype)))
        if live.is_meta:
            return self._place_on_meta(stored, live, name)
        self._moves.append(Move(stored.index, dtype, local_tensor(live, (name,))))
        return True

    def mismatch(self, name: str, what: str, stored: str, wanted: str) -> bool:
        """Report an entry that differs; return False."""
        self.report.mismatched.append(Mismatch(name, what, stored, wanted))
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

    def unexpected(self, stored: Any, path: Path) -> None:
        """Report the tensors that the checkpoint has at a path and the state does not."""
        for place, leaf in leaves(stored, path):
            if isinstance(leaf, (Stored, Composite)) and display(place) in self.selection:
                self.report.unexpected.append(display(place))

    def device_of(self, live: torch.Tensor) -> torch.device:
        """Return the device on which a tensor will be when this plan is done."""
        return self._devices.get(id(live), live.device)

    def will_fill(self, live: torch.Tensor) -> bool:
        """Whether a tensor on meta gets its content."""
        return id(live) in self._devices

    def moves(self) -> Iterator[Sequence[Move]]:
        """List what is to be read: first what nobody sees yet, then what is read in place."""
        yield list(self.builder.moves())
        yield self._moves

    def finish(self) -> None:
        """Put everything that was read in its place."""
        for live, stored, form in self._fills:
            content = self.builder.make(stored, (stored.name,), form)
            replace_content(live, _ordered(content, memory_order(live)))
        for install in self.installs:
            install()

    def _may_cast(self, name: str, stored: torch.dtype, live: torch.dtype) -> bool:
        floats = stored.is_floating_point and live.is_floating_point
        return floats and self._dtype(name) == live

    def _place_on_meta(self, stored: Stored, live: torch.Tensor, name: str) -> bool:
        if weakref.getweakrefs(live):
            raise ArgumentError(
                f"{name} cannot be materialized: something holds a weak reference to it",
                code="bad_argument",
                hint="load before the model is compiled or wrapped",
            )
        form = Form(live.dtype, self._device(name))
        self._devices[id(live)] = form.device
        self.builder.need(stored, form)
        self._fills.append((live, stored, form))
        return True

    def _place_composite(
        self, stored: Any, live: torch.Tensor, kind: str | None, name: str
    ) -> bool:
        if type(stored) is not Composite or stored.kind != kind:
            wanted = kind.removeprefix("torch.") if kind else "strided"
            return self.mismatch(name, "kind", _kind(stored), f"a {wanted} tensor")
        if kind != "torch.subclass":
            self.builder.need(stored)

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
            return self.mismatch(name, "kind", _kind(kept), f"the tensors {sorted(inner)}")
        fits = [
            self.place(kept[key], one, f"{name}/{key}", cast=False) for key, one in inner.items()
        ]
        return all(fits)


def replace_content(live: torch.Tensor, content: torch.Tensor) -> None:
    """Give a tensor other content, device and layout; the object stays the one that others hold."""
    if isinstance(live, nn.Parameter):
        content = nn.Parameter(content, requires_grad=live.requires_grad)
    elif live.requires_grad:
        content = content.requires_grad_()
    if type(content) is not type(live):
        content = content.as_subclass(type(live))  # a buffer, or a kind of the user's
    content.__dict__.update(live.__dict__)
    torch.utils.swap_tensors(live, content)  # type: ignore[no-untyped-call]


def _ordered(content: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """Return a tensor whose dims lie in memory in this order."""
    if order is None or memory_order(content) == order:
        return content
    result = empty(content.shape, content.dtype, content.device, order)
    as_bits(result).copy_(as_bits(content))
    return result


def _kind(stored: Any) -> str:
    if isinstance(stored, (Stored, Composite)):
        return str(stored) if type(stored) is Composite else f"a tensor, {stored}"
    return f"a value, {shorten(stored)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
