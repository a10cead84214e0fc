"""Tensors of an optimizer's state that are to be filled: which, and from what.

While a state is compared, each tensor in it is given a live tensor that is alike, or a new one;
only when all fits, all of them are filled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsdformat.torch.dtypes import form_text
from dsdformat.torch.fsdp1_state import Joined
from dsdformat.torch.install_optim import Maker
from dsdformat.torch.redistribute import copy_all
from dsdformat.torch.report import Mismatch
from dsdformat.torch.sharding import (
    as_dtensor,
    is_dtensor,
    is_spread,
    is_tensor,
    local_of,
    tensors_in,
)
from dsdformat.torch.stored import display
from dsdformat.torch.told import Told

__all__ = ["Fills"]

Path = Sequence[Any]


class Fills:
    """Pairs of a tensor that is given and one that is filled."""

    def __init__(self, other_form: Callable[[Mismatch], None]) -> None:
        """Begin.

        Args:
            other_form: Called for state of another form than the one there is.
        """
        self._other_form = other_form
        self._values: dict[str, Any] = {}
        self._targets: dict[str, Any] = {}

    def fit(
        self,
        value: Any,
        live: Any,
        path: Path,
        device: torch.device | None,
        parameter: torch.Tensor | None,
    ) -> Maker:
        """Plan where a value goes: into a live tensor that is alike, else into a new one."""
        if isinstance(value, Joined):
            own = value.own(live)
            for shard_of, part in value.parts:
                self._add(part, shard_of(own))
            return lambda: own
        if is_tensor(value):
            self._compare(value, live, path)
            target = self._target(value, live, device, parameter)
            self._add(value, target)
            return lambda: target
        if isinstance(value, Mapping):
            makers = {
                key: self.fit(
                    v, live.get(key) if isinstance(live, Mapping) else None, path, device, parameter
                )
                for key, v in value.items()
            }
            return lambda: {key: make() for key, make in makers.items()}
        if type(value) in (list, tuple) and any(True for _ in tensors_in(value)):
            items = [self.fit(item, None, path, device, parameter) for item in value]
            return lambda: type(value)(make() for make in items)
        return lambda: copy.deepcopy(value)

    def run(self) -> None:
        """Fill all from what each rank has.

        Ranks: local, unless something moves; see `copy_all`.
        """
        copy_all(self._values, self._targets)

    def run_told(self, told: Told) -> None:
        """Fill all from what rank 0 has told of.

        Ranks: collective over the group.
        """
        told.fill({key: (value, self._targets[key]) for key, value in self._values.items()})

    def _compare(self, value: Any, live: Any, path: Path) -> None:
        """Report a tensor of another form than the one there is."""
        if is_tensor(live) and (live.shape, live.dtype) != (value.shape, value.dtype):
            what = "shape" if live.shape != value.shape else "dtype"
            found, wanted = form_text(value), form_text(live)
            self._other_form(Mismatch(display(tuple(path)), what, found, wanted))

    def _add(self, value: Any, target: Any) -> None:
        if value is not target:
            key = str(len(self._values))
            self._values[key] = value
            self._targets[key] = target

    def _target(
        self,
        value: Any,
        live: Any,
        device: torch.device | None,
        parameter: torch.Tensor | None,
    ) -> Any:
        """Return what a tensor is filled into: spread as the parameter is if it has its shape."""
        if _is_alike(live, value.shape, value.dtype):
            return live
        same = parameter is not None and value.dim() > 0 and value.shape == parameter.shape
        if same and is_dtensor(parameter):
            assert parameter is not None
            shard = torch.empty_like(local_of(parameter), dtype=value.dtype)
            return as_dtensor(shard, parameter, value.shape)
        if is_dtensor(value):
            shard = torch.empty_like(local_of(value), device=device or local_of(value).device)
            return as_dtensor(shard, value, value.shape)
        place = device or (torch.device("cpu") if value.is_meta else value.device)
        if is_spread(value):
            return torch.empty(value.shape, dtype=value.dtype, device=place)
        return torch.empty_like(value, device=place)


def _is_alike(live: Any, shape: torch.Size, dtype: torch.dtype) -> bool:
    return is_tensor(live) and not live.is_meta and (live.shape, live.dtype) == (shape, dtype)
