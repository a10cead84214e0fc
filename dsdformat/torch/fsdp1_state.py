"""Optimizer state of FSDP1's flat shards as shards of whole tensors, one for each parameter.

Without `use_orig_params` an optimizer has flat parameters, each with one state for all that is in
it; with it, the optimizer has the parameters. And back: whole tensors, or shards of them, as one
tensor in the form that the optimizer has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsdformat.errors import MismatchError, UnsupportedValueError, shorten
from dsdformat.torch.fsdp1 import Member, Unit
from dsdformat.torch.routes import Form
from dsdformat.torch.sharding import FlatShard, tensors_in

__all__ = ["STEP", "Joined", "as_shards", "cut_unit", "join_member", "join_unit"]

STEP = "step"
FormOf = Callable[[Any], Form | None]
Same = Callable[[Any, Any], bool]


def cut_unit(unit: Unit, state: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
    """Yield what each parameter in a flat one has of its state.

    Raises:
        UnsupportedValueError: an entry is neither a number nor of one element for each.
    """
    for member in unit.members:
        parts: dict[Any, Any] = {}
        for key, value in state.items():
            if _is_cut(member.names[0], key, value, unit.piece.numel()):
                _check_numel(member, key, value, unit.piece.numel())
                parts[key] = member.shard_of(value)
            else:
                parts[key] = copy.deepcopy(value)  # each has a number of its own
        yield parts


def as_shards(member: Member, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of a parameter as shards of whole tensors.

    Raises:
        UnsupportedValueError: as `cut_unit`.
    """
    result = {}
    for key, value in state.items():
        if _is_cut(member.names[0], key, value, member.stop - member.start):
            _check_numel(member, key, value, member.stop - member.start)
            result[key] = member.as_shard(value)
        else:
            result[key] = value
    return result


def _is_cut(name: str, key: Any, value: Any, numel: int) -> bool:
    """Whether an entry has an element for each of this rank's; else it is a number."""
    if not isinstance(value, torch.Tensor):
        if any(tensor.dim() > 0 for tensor in tensors_in(value)):
            raise UnsupportedValueError(
                f"{shorten(key)} of {name} holds tensors in a {type(value).__name__}, which lie in "
                "FSDP1's flat shards and cannot be joined",
                hint="FSDP1 works with optimizers that keep tensors of a parameter by themselves",
            )
        return False
    if value.dim() == 0 or key == STEP:
        return False
    return value.numel() == numel or value.numel() != 1


def _check_numel(member: Member, key: Any, value: torch.Tensor, numel: int) -> None:
    if value.numel() != numel:
        raise UnsupportedValueError(
            f"{shorten(key)} of {member.names[0]} has shape {list(value.shape)}, and not one "
            f"element for each of the {numel} of this rank's flat shard",
            hint="FSDP1 works with optimizers that work element by element",
        )


@dataclass(frozen=True)
class Joined:
    """Whole tensors, of which this rank's elements lie in one tensor of an optimizer's state.

    Attributes:
        like: What has the form of that tensor.
        dtype: Of the tensor.
        parts: Whole tensors, and what of that tensor each is for.
    """

    like: torch.Tensor
    dtype: torch.dtype
    parts: tuple[tuple[Callable[[torch.Tensor], FlatShard], Any], ...]

    def on_meta(self) -> torch.Tensor:
        """Return the form of the tensor, without memory."""
        return torch.empty_like(self.like, dtype=self.dtype, device="meta")

    def own(self, live: Any) -> torch.Tensor:
        """Return the tensor there is if it is alike, else a new one of zeros."""
        wanted = self.like.shape, self.dtype
        if (
            isinstance(live, torch.Tensor)
            and not live.is_meta
            and (live.shape, live.dtype) == wanted
        ):
            return live
        return torch.zeros_like(self.like, dtype=self.dtype)


def join_member(
    member: Member, key: Any, value: Any, parameter: torch.Tensor, form_of: FormOf
) -> Any:
    """Return a value of the state of one parameter for the shard of it that this rank has."""
    form = form_of(value)
    if form is None or not _fits(member, key, form):
        return value
    return Joined(parameter.detach(), form[1], ((member.as_shard, value),))


def join_unit(
    unit: Unit, entries: Sequence[tuple[Member, Mapping[Any, Any]]], form_of: FormOf, is_same: Same
) -> dict[Any, Any]:
    """Return the states of parameters in a flat one as its state.

    Args:
        unit: The flat parameter.
        entries: Parameters in it and their states.
        form_of: Gives shape and dtype of a tensor, None for anything else.
        is_same: Whether two numbers are equal.

    Raises:
        MismatchError: `state_mismatch`: they have different numbers, of which there is one.
    """
    result: dict[Any, Any] = {}
    for key in dict.fromkeys(key for _, entry in entries for key in entry):
        values = [(member, entry[key]) for member, entry in entries if key in entry]
        forms = [form_of(value) for _, value in values]
        cut = [
            form is not None and _fits(member, key, form)
            for form, (member, _) in zip(forms, values, strict=True)
        ]
        _check_shapes(key, values, forms)
        if all(cut):
            parts = tuple((member.shard_of, value) for member, value in values)
            dtype = next(form[1] for form in forms if form is not None)
            result[key] = Joined(unit.piece, dtype, parts)
            continue
        (first, result[key]), others = values[0], values[1:]
        for member, other in others:
            if not is_same(result[key], other):
                raise MismatchError(
                    f"{shorten(key)} of {member.names[0]} is not that of {first.names[0]}; both "
                    "lie in one flat parameter, which has one",
                    code="state_mismatch",
                    hint="wrap the model with use_orig_params=True",
                )
    return result


def _check_shapes(
    key: Any, values: Sequence[tuple[Member, Any]], forms: Sequence[Form | None]
) -> None:
    for (member, _), form in zip(values, forms, strict=True):
        if form is not None and form[0] and not _fits(member, key, form):
            raise MismatchError(
                f"{shorten(key)} of {member.names[0]} has shape {list(form[0])}, "
                f"{list(member.sharding.shape)} wanted",
                code="state_mismatch",
            )


def _fits(member: Member, key: Any, form: Form) -> bool:
    return form[0] == member.sharding.shape and len(form[0]) > 0 and key != STEP
