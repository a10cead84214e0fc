"""Plan where one stored value of an optimizer goes: into what is there, or into something new."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dsdformat.format.values import Named
from dsdformat.torch.buffers import overlaps_itself
from dsdformat.torch.builder import Form, stored_dtype
from dsdformat.torch.dtypes import form_text
from dsdformat.torch.fsdp1_state import Joined
from dsdformat.torch.install_optim import Maker
from dsdformat.torch.moves import Move
from dsdformat.torch.placing import Plan, moves_into
from dsdformat.torch.report import Mismatch
from dsdformat.torch.sharding import as_dtensor, is_dtensor, local_of
from dsdformat.torch.stored import Composite, Path, Stored, describe, display, find_items, rebuilt

__all__ = ["Fit", "FromFile"]

# From a value, what is there already or None, the path, a device and a parameter or None.
Fit = Callable[[Any, Any, Path, torch.device | None, torch.Tensor | None], Maker]


class FromFile:
    """Plans where stored values go: into live tensors that are alike, else into new ones."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __call__(self, value: Any, live: Any, path: Path, device: Any, parameter: Any) -> Maker:
        """Plan one value; see `Fit`."""
        plan = self._plan
        if isinstance(value, Joined):
            return self._fit_joined(value, live)
        spread = isinstance(value, Stored) and is_dtensor(parameter)
        if spread and value.entry.shape and value.entry.shape == tuple(parameter.shape):
            return self._fit_spread(value, live, path, parameter)
        if type(value) is Stored and isinstance(live, torch.Tensor):
            if self._is_alike(value, live, path):
                plan.place(value, live, display(path), cast=False)
                return lambda: live
            device = device if live.is_meta else live.device
        elif isinstance(live, torch.Tensor) and isinstance(value, (str, dict, list, Named)):
            self._plan.other_form(Mismatch(display(path), "kind", describe(value), "a tensor"))
        items = None if type(value) is Composite else find_items(value)
        if items and any(type(item) in (Stored, Composite) for item in _nested(value)):
            makers = [
                (key, self(item, _child(live, key), (*path, key), device, parameter))
                for key, item in items
            ]
            return lambda: rebuilt(value, [(key, make()) for key, make in makers])
        form = Form() if device is None else Form(None, device)
        plan.builder.need(value, path, form)
        return lambda: plan.builder.make(value, path, form)

    def _fit_joined(self, value: Joined, live: Any) -> Maker:
        """Plan to read this rank's elements of tensors into one that is there, or a new one."""
        made: list[torch.Tensor] = []

        def moves() -> Iterator[Move]:
            made.append(value.own(live))
            for shard_of, part in value.parts:
                yield from moves_into(part, shard_of(made[0]))

        self._plan.later.append(moves)
        return lambda: made[0]

    def _fit_spread(self, value: Stored, live: Any, path: Path, parameter: Any) -> Maker:
        """Plan to read this rank's shard, spread as the parameter is, or as what is there."""
        alike = is_dtensor(live) and not live.is_meta
        if alike and (tuple(live.shape), live.dtype) == (value.entry.shape, stored_dtype(value)):
            self._plan.place(value, live, display(path), cast=False)
            return lambda: live
        made: list[torch.Tensor] = []

        def moves() -> Iterator[Move]:
            local = local_of(parameter)
            device = self._plan.device_of(parameter)
            shard = torch.empty_like(local, dtype=stored_dtype(value), device=device)
            made.append(as_dtensor(shard, parameter, value.entry.shape))
            yield from moves_into(value, made[0])

        self._plan.later.append(moves)
        return lambda: made[0]

    def _is_alike(self, stored: Stored, live: torch.Tensor, path: Path) -> bool:
        """Whether a live tensor can be read into; report one that is of another kind."""
        shape, dtype = stored.entry.shape, stored_dtype(stored)
        if live.is_meta or live.layout != torch.strided or type(live) is not torch.Tensor:
            return False
        if shape != tuple(live.shape) or dtype != live.dtype:
            what = "dtype" if shape == tuple(live.shape) else "shape"
            self._plan.other_form(Mismatch(display(path), what, str(stored), form_text(live)))
            return False
        odd = live.is_conj() or live.is_neg() or overlaps_itself(live) or live.requires_grad
        return not odd and self._plan.memory.claim(live, stored.index)


def _nested(value: Any) -> Iterator[Any]:
    yield value
    for _, item in find_items(value) or ():
        yield from _nested(item)


def _child(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    if type(live) in (list, tuple) and type(key) is int and key < len(live):
        return live[key]
    return None
