"""Tell all ranks the state that one rank has: its structure and values, and forms for tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import UnsupportedValueError
from dsdformat.format.decoding import Hooks, decode_tree
from dsdformat.format.packing import emit, parse
from dsdformat.format.paths import render_path
from dsdformat.format.values import Named, Scalar, encode
from dsdformat.torch.broadcast import fill_from_first
from dsdformat.torch.comm import Comm
from dsdformat.torch.dtypes import find_named, find_value, torch_dtype
from dsdformat.torch.redistribute import has_no_data
from dsdformat.torch.routes import Form
from dsdformat.torch.sharding import is_tensor
from dsdformat.torch.sources import numpy_side
from dsdformat.torch.stored import find_items, rebuilt

__all__ = ["Told"]

_FORM = "dsdformat.form"  # stands for a tensor: its number, dtype and shape


class Told:
    """What rank 0 of a group has, as all ranks see it.

    Attributes:
        state: With tensors on meta in the place of tensors.
    """

    def __init__(self, comm: Comm, call: str, given: Callable[[], Mapping[str, Any]]) -> None:
        """Tell it.

        Args:
            comm: The group.
            call: What is called, for messages.
            given: Gives the state of rank 0; not called on others.

        Raises:
            DistributedError: `rank_failed`, on every rank: it cannot be told.

        Ranks: collective over the group.
        """
        self._comm = comm
        self._tensors: list[Any] = []
        self._meta: list[str] = []
        raw = b""
        with comm.together(call):
            if comm.is_coordinator:
                raw = emit(encode(dict(given()), leaf=self._leaf))
                self._check_data()
        self._forms: list[torch.Tensor] = []
        told = comm.tell_bytes(raw)
        hooks = Hooks(named=self._named, scalar=_scalar, size=torch.Size)
        self.state: dict[str, Any] = decode_tree(parse(told), hooks).root
        self._numbers = {id(form): number for number, form in enumerate(self._forms)}

    def _check_data(self) -> None:
        if self._meta:
            more = f" and {len(self._meta) - 10} more" if len(self._meta) > 10 else ""
            raise UnsupportedValueError(
                f"{', '.join(self._meta[:10])}{more} are on the meta device and have no data",
                path_in_tree=self._meta[0],
            )

    def fill(self, pairs: Mapping[str, tuple[Any, Any]]) -> None:
        """Fill tensors from those of rank 0.

        Args:
            pairs: A tensor of `state`, and what is filled, in the same order on all ranks.

        Ranks: collective over the group.
        """
        forms: dict[str, Form] = {
            key: (tuple(form.shape), form.dtype) for key, (form, _) in pairs.items()
        }
        into = {key: target for key, (_, target) in pairs.items()}
        whole = {}
        if self._comm.is_coordinator:
            whole = {
                key: self._tensors[self._numbers[id(form)]] for key, (form, _) in pairs.items()
            }
        fill_from_first(self._comm, whole, into, forms)

    def whole(self, value: Any) -> Any:
        """Return a part of the state with whole tensors of all ranks in the place of forms.

        Ranks: collective over the group, if there is a tensor in it.
        """
        pairs: dict[str, tuple[Any, Any]] = {}

        def made(part: Any) -> Any:
            if is_tensor(part):
                new = torch.empty(part.shape, dtype=part.dtype, device=self._comm.device)
                pairs[str(len(pairs))] = part, new
                return new
            items = find_items(part)
            return rebuilt(part, [(key, made(one)) for key, one in items]) if items else part

        result = made(value)
        if pairs:
            self.fill(pairs)
        return result

    def _leaf(self, value: Any, place: Sequence[Any]) -> Any:
        if is_tensor(value):
            if has_no_data(value):
                self._meta.append(render_path(place))
            self._tensors.append(value)
            dtype = str(value.dtype).removeprefix("torch.")
            return Named(
                _FORM, "/".join([str(len(self._tensors) - 1), dtype, *map(str, value.shape)])
            )
        named = find_named(value)
        if named is not None:
            return named
        return numpy_side().value_of(value, place) if "numpy" in sys.modules else NotImplemented

    def _named(self, value: Named) -> Any:
        if value.kind != _FORM:
            found = find_value(value)
            return (
                numpy_side().named_of(value) if found is value and "numpy" in value.kind else found
            )
        number, dtype, *shape = value.name.split("/")
        form = torch.empty([int(size) for size in shape], dtype=torch_dtype(dtype), device="meta")
        while len(self._forms) <= int(number):
            self._forms.append(form)
        self._forms[int(number)] = form
        return form


def _scalar(value: Scalar) -> Any:
    return numpy_side().scalar_of(value)
