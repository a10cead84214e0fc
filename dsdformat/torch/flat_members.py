"""The parameters in one flat parameter, and the modules that have them.

While the module is flat, its modules have views of the flat parameter in place of parameters.
Otherwise they have the parameters themselves, the same objects as before: their data are the flat
parameter's memory, so that what is written to them needs no copy back.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn

from dsdformat.errors import ArgumentError, MismatchError
from dsdformat.torch.buffers import as_bits
from dsdformat.torch.flat_groups import Group, kind_of_parameter, say_kind
from dsdformat.torch.flat_layout import FlatLayout, pack
from dsdformat.torch.placing import replace_content

__all__ = ["FlatMembers"]


class FlatMembers:
    """What one flat parameter holds.

    Attributes:
        layout: Names and shapes.
        parameters: The parameters in it.
    """

    def __init__(self, group: Group) -> None:
        self.layout: FlatLayout = group.layout
        self.parameters = list(group.parameters)
        self._slots = group.slots
        self._every_slot = list(dict.fromkeys(slot for slots in group.slots for slot in slots))
        owners = dict.fromkeys(slot.owner for slot in self._every_slot)
        self._orders = [(owner, tuple(owner._parameters)) for owner in owners]

    def check_views(self) -> None:
        """Check that the modules have no parameters in place of views.

        Raises:
            ArgumentError: `bad_argument`, with the name of one that has.
        """
        for slot in self._every_slot:
            if slot.name in slot.owner._parameters:
                raise ArgumentError(
                    f"{slot.fqn} was replaced by a parameter of its own while it was part of "
                    f"{self.layout.name}",
                    code="bad_argument",
                    hint="delete that, and replace parameters inside of unflatten_params()",
                )

    def remove_views(self) -> None:
        """Take the views away from the modules that have them."""
        for slot in self._every_slot:
            if slot.name in slot.owner.__dict__:
                delattr(slot.owner, slot.name)

    def remove_parameters(self) -> None:
        """Take the parameters, and what has replaced them, away from the modules."""
        for slot in self._every_slot:
            if slot.name in slot.owner._parameters or slot.name in slot.owner.__dict__:
                delattr(slot.owner, slot.name)

    def set_views(self, flat: torch.Tensor) -> None:
        """Give the modules views of the flat parameter, through which gradients reach it.

        Raises:
            ArgumentError: `bad_argument`: a module was given a parameter in place of a view.
        """
        with torch.inference_mode(False), torch.enable_grad():
            views = self.layout.cut(flat)
        self.check_views()
        for view, slots in zip(views, self._slots, strict=True):
            for slot in slots:
                setattr(slot.owner, slot.name, view)

    def views(self) -> list[torch.Tensor]:
        """Return the views that the modules have now."""
        found = [slot.owner.__dict__.get(slot.name) for slot in self._every_slot]
        return [one for one in found if isinstance(one, torch.Tensor)]

    def set_parameters(self) -> None:
        """Give the modules the parameters."""
        for parameter, slots in zip(self.parameters, self._slots, strict=True):
            for slot in slots:
                setattr(slot.owner, slot.name, parameter)

    def set_order(self) -> None:
        """Put the parameters of each module in the order of before."""
        for owner, names in self._orders:
            table = owner._parameters
            for name in [*names, *(name for name in table if name not in names)]:
                if name in table:
                    table[name] = table.pop(name)

    def point(self, flat: torch.Tensor, *, trainable: bool, keep: bool = False) -> None:
        """Make parts of a flat tensor the data of the parameters, without a copy.

        Args:
            flat: Of any dtype, on any device.
            trainable: Whether the parameters need gradients.
            keep: Whether parameters that have content stay as they are, if `flat` is on meta: a
                checkpoint was read into them, and `find_all` will find it.
        """
        for parameter, view in zip(self.parameters, self.layout.cut(flat.detach()), strict=True):
            if not (keep and view.is_meta) and not _shares(parameter, view):
                parameter.grad = None
                if parameter.is_meta == view.is_meta:
                    parameter.data = view
                else:
                    replace_content(parameter, view)
            parameter.requires_grad_(trainable)

    def release(self) -> None:
        """Let go of views and memory, so that a copy of these objects copies none."""
        for slot in self._every_slot:
            # Set, and not deleted: recurrent modules keep their weights in a list as well.
            setattr(slot.owner, slot.name, torch.empty(0))
        for parameter in self.parameters:
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)

    def set_grads(self, flat_grad: torch.Tensor | None) -> None:
        """Make parts of a flat gradient the gradients of the parameters."""
        if flat_grad is not None:
            parts = self.layout.cut(flat_grad)
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.grad = part

    def find_all(self) -> list[nn.Parameter]:
        """Return the parameters that the modules have now: some may have been replaced.

        Raises:
            MismatchError: `state_mismatch`: a parameter is gone, or is of another shape, or tied
                names differ, or the parameters are no longer of one kind.
        """
        found = [self._find(index) for index in range(len(self._slots))]
        names = self.layout.names
        seen: dict[int, str] = {}
        for name, parameter in zip(names, found, strict=True):
            if id(parameter) in seen:
                self._refuse(f"{name} and {seen[id(parameter)]} have become one parameter")
            seen[id(parameter)] = name
        kinds = {kind_of_parameter(p): name for p, name in zip(found, names, strict=True)}
        if len(kinds) > 1:
            each = "; ".join(f"{name}: {say_kind(kind)}" for kind, name in kinds.items())
            self._refuse(f"its parameters are of {len(kinds)} kinds now: {each}")
        return found

    def write(self, flat: nn.Parameter, parameters: list[nn.Parameter]) -> None:
        """Bring the flat parameter to what these parameters are; what shares its memory stays."""
        self.parameters = parameters
        first = self.parameters[0]
        flat.requires_grad_(first.requires_grad)
        if first.device != flat.device or first.dtype != flat.dtype:
            flat.grad = None
            data = pack(self.parameters)
            if flat.is_meta == data.is_meta:
                flat.data = data
            else:
                replace_content(flat, data)
            return
        views = self.layout.cut(flat.detach())
        moved = [
            (view, parameter)
            for view, parameter in zip(views, self.parameters, strict=True)
            if not _shares(parameter, view)
        ]
        if not moved or flat.is_meta:
            return
        memory = flat.untyped_storage().data_ptr()
        if any(p.untyped_storage().data_ptr() == memory for _, p in moved):
            as_bits(flat.detach()).copy_(as_bits(pack(self.parameters)))  # they changed places
            return
        for view, parameter in moved:
            as_bits(view).copy_(as_bits(parameter.detach()))

    def clear_grads(self) -> None:
        """Take the gradients away from the parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def write_grad(self, flat: nn.Parameter) -> None:
        """Bring the gradient of the flat parameter to what the parameters' gradients are."""
        grads = [parameter.grad for parameter in self.parameters]
        if all(grad is None for grad in grads):
            flat.grad = None
            return
        parts = None if flat.grad is None else self.layout.cut(flat.grad)
        if parts and all(
            grad is not None and grad.data_ptr() == part.data_ptr() and grad.is_contiguous()
            for grad, part in zip(grads, parts, strict=True)
        ):
            return
        flat.grad = pack(
            [
                torch.zeros_like(parameter) if grad is None else grad.to_dense().to(flat.dtype)
                for grad, parameter in zip(grads, self.parameters, strict=True)
            ]
        )

    def _find(self, index: int) -> nn.Parameter:
        """Return the parameter that the modules have at the names of one; the new one of two."""
        known, name = self.parameters[index], self.layout.names[index]
        held = [slot.owner._parameters.get(slot.name) for slot in self._slots[index]]
        others = [one for one in held if one is not known]
        if not others:
            return known
        new = others[0]
        if new is None or any(one is None for one in others):
            self._refuse(f"{name} is no parameter any more")
        shape = self.layout.shapes[index]
        if tuple(new.shape) != shape or type(new.data) is not torch.Tensor:
            self._refuse(f"{name} is {list(new.shape)}, and {list(shape)} is wanted")
        if not all(one is new or _equal(one, new) for one in others if one is not None):
            self._refuse(f"{name} has tied names that differ")
        return new

    def _refuse(self, message: str) -> NoReturn:
        raise MismatchError(
            f"{self.layout.name} cannot be put together again, and is as it was: {message}",
            code="state_mismatch",
            hint="change the module first, and flatten it then",
        )


def _shares(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a parameter is this part of a flat one already."""
    return (
        (parameter.dtype, parameter.device, parameter.shape)
        == (view.dtype, view.device, view.shape)
        and parameter.data_ptr() == view.data_ptr()
        and parameter.is_contiguous()
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
    return same and torch.equal(_raw(one), _raw(other))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return as_bits(tensor.detach()).contiguous().view(-1).view(torch.uint8)
