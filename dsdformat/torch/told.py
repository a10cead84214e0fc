"""Tell all ranks the state that one rank has: its structure and values, and forms for tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsdformat.errors import UnsupportedValueError, listed
from dsdformat.format.decoding import decode_tree
from dsdformat.format.packing import emit, parse
from dsdformat.format.paths import render_path
from dsdformat.format.values import Named, encode
from dsdformat.torch.broadcast import fill_from_first
from dsdformat.torch.comm import Comm
from dsdformat.torch.dtypes import dtype_name, torch_dtype
from dsdformat.torch.redistribute import has_no_data
from dsdformat.torch.routes import Form
from dsdformat.torch.sharding import is_tensor
from dsdformat.torch.sources import value_of
from dsdformat.torch.stored import VALUES, find_items, named_value, rebuilt

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
        hooks = replace(VALUES, named=self._named)
        self.state: dict[str, Any] = decode_tree(parse(told), hooks).root
        self._numbers = {id(form): number for number, form in enumerate(self._forms)}

    def _check_data(self) -> None:
        if self._meta:
            raise UnsupportedValueError(
                f"{listed(self._meta)} are on the meta device and have no data",
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
            number = str(len(self._tensors) - 1)
            return Named(_FORM, "/".join([number, dtype_name(value.dtype), *map(str, value.shape)]))
        return value_of(value, place)

    def _named(self, value: Named) -> Any:
        if value.kind != _FORM:
            return named_value(value)
        number, dtype, *shape = value.name.split("/")
        form = torch.empty([int(size) for size in shape], dtype=torch_dtype(dtype), device="meta")
        while len(self._forms) <= int(number):
            self._forms.append(form)
        self._forms[int(number)] = form
        return form
