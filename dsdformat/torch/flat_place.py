"""Where the state of a flat parameter comes from: the entries of the parameters in it.

Forms are compared first. What is cut is read into parts of one tensor, the live one or a new one,
so that nothing is there twice. What is one for all parameters must be the same for each. Knows
nothing of files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from dsdformat.errors import shorten
from dsdformat.torch.buffers import empty
from dsdformat.torch.dtypes import dtype_name
from dsdformat.torch.flat_layout import FlatLayout, pack
from dsdformat.torch.flat_optim import STEP, holds_large, is_cut
from dsdformat.torch.install_optim import Maker

__all__ = ["FlatPlacement", "Misfit"]

State = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Misfit:
    """An entry that cannot be part of the state of a flat parameter.

    Attributes:
        name: Which parameter's, as the layout has it.
        key: What it is called there.
        what: `shape`, `dtype` or `kind`.
        found, wanted: For people.
    """

    name: str
    key: Any
    what: str
    found: str
    wanted: str


class FlatPlacement:
    """Plans the state of one flat parameter; nothing is changed, and only memory is made.

    Attributes:
        lacking: Names and keys of entries that are not there, and are of other parameters.
        misfits: Entries that cannot be joined with those of other parameters.
        common: Keys of what is one for all parameters; the caller compares.
    """

    def __init__(
        self,
        layout: FlatLayout,
        forms: Mapping[str, State],
        live: State,
        device: torch.device,
        like: State,
    ) -> None:
        """Compare forms.

        Args:
            layout: Of the flat parameter.
            forms: For each of its names what there is to load. Tensors may be on meta.
            live: The state that the flat parameter has.
            device: Where new tensors are made.
            like: A state of the form that the optimizer keeps; only needed where all parameters
                have one element.
        """
        self.lacking: list[tuple[str, Any]] = []
        self.misfits: list[Misfit] = []
        self.common: list[Any] = []
        self._layout = layout
        self._live = live
        self._device = device
        self._forms: dict[Any, Any] = {}
        self._targets: dict[Any, torch.Tensor] = {}
        self._views: dict[Any, list[torch.Tensor]] = {}
        for key in dict.fromkeys(key for form in forms.values() for key in form):
            values = {name: form[key] for name, form in forms.items() if key in form}
            self.lacking.extend((name, key) for name in layout.names if name not in values)
            if is_cut(layout, key, values, like.get(key)):
                self._add_cut(key, values)
            elif any(map(holds_large, values.values())):
                self.misfits.extend(self._find_misfits(key, values))
            else:
                self.common.append(key)
                self._forms[key] = next(iter(values.values()))

    def has_place(self, key: Any) -> bool:
        """Whether parts of a live tensor can be read while others stay."""
        if key not in self._targets:
            return False
        target, form = self._targets[key], self._forms[key]
        return target is self._live.get(key) and bool(target.dtype == form.dtype)

    def forms(self) -> dict[Any, Any]:
        """Return the state that there will be: what is loaded on meta, beside what stays."""
        return {**self._live, **self._forms}

    def lives(self) -> list[dict[Any, Any]]:
        """Return what each parameter in the flat one has: views of what its part is read into."""
        shape, cut = (self._layout.numel,), self._forms.keys() - set(self.common)
        others = {
            key: value
            for key, value in self._live.items()
            if key not in self._views and not (key in cut and _has_shape(value, shape))
        }
        return [
            {**others, **{key: views[number] for key, views in self._views.items()}}
            for number in range(len(self._layout.names))
        ]

    def joined(self, makers: Sequence[Mapping[Any, Maker]]) -> dict[Any, Maker]:
        """Return what makes the state, from what makes that of each parameter.

        Args:
            makers: In the order of the layout; made with `lives`. Of what is one for all
                parameters the first counts.
        """
        result: dict[Any, Maker] = {}
        for key in dict.fromkeys(key for those in makers for key in those):
            if key in self.common:
                result[key] = makers[0][key]
            elif key in self._forms:
                own = [those.get(key) for those in makers]
                result[key] = functools.partial(self._made, key, own)
            else:  # it is not loaded
                result[key] = functools.partial(self._live.get, key)
        return result

    def _made(self, key: Any, makers: Sequence[Maker | None]) -> torch.Tensor:
        views: Sequence[Any] = self._views.get(key, [None] * len(makers))
        parts = [view if make is None else make() for make, view in zip(makers, views, strict=True)]
        if all(part is view for part, view in zip(parts, views, strict=True)):
            return self._targets[key]
        return pack(parts)

    def _add_cut(self, key: Any, values: Mapping[str, torch.Tensor]) -> None:
        first_name, first = next(iter(values.items()))
        for name, value in values.items():
            if value.dtype != first.dtype:
                wanted = f"{dtype_name(first.dtype)}, as {first_name} has"
                self.misfits.append(Misfit(name, key, "dtype", dtype_name(value.dtype), wanted))
        shape = (self._layout.numel,)
        self._forms[key] = torch.empty(shape, dtype=first.dtype, device="meta")
        target = self._live.get(key)
        if target is None and not self.lacking and not self.misfits:
            target = empty(shape, first.dtype, self._device)
        if _has_shape(target, shape) and target.is_contiguous():
            self._targets[key] = target
            self._views[key] = self._layout.cut(target)

    def _find_misfits(self, key: Any, values: Mapping[str, Any]) -> Iterator[Misfit]:
        shapes = dict(zip(self._layout.names, self._layout.shapes, strict=True))
        for name, value in values.items():
            wanted = "a number" if key == STEP else f"{list(shapes[name])}, as the parameter has"
            if not isinstance(value, torch.Tensor):
                found = f"a {type(value).__name__}, {shorten(value)}"
                yield Misfit(name, key, "kind", found, wanted)
            elif key == STEP or value.shape != shapes[name]:
                yield Misfit(name, key, "shape", str(list(value.shape)), wanted)


def _has_shape(value: Any, shape: tuple[int, ...]) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.shape == shape
