"""Which parameters of a module are flattened together: found by walking, named, checked.

Nothing is changed here. A flat parameter can hold one dtype, one device and one answer to whether
it needs a gradient. Where the user names no groups, there is one for each kind that the module has,
so that a mixed model needs no thought; a group of the user's is never cut in two behind his back,
since he will give its flat parameter to an optimizer.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from dsdformat.errors import ArgumentError, shorten
from dsdformat.flat_layout import FlatLayout
from dsdformat.torch.compat import find_wrapped, is_lazy
from dsdformat.torch.dtypes import dtype_name

__all__ = ["INNER", "Group", "Groups", "Slot", "kind_of_parameter", "plan_groups", "say_kind"]

# The name under which a flattening wrapper registers the module that it wraps.
INNER = "_flat_module"
PREFIX = "flat_param_"

Members = Iterable[nn.Parameter | str]
Groups = Mapping[str, Members] | Iterable[Members] | Members


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a module where a parameter is.

    Attributes:
        owner: The module that has it.
        name: What it is called there.
        fqn: What it is called in the wrapped module.
    """

    owner: nn.Module
    name: str
    fqn: str


@dataclass(frozen=True, slots=True)
class Group:
    """What becomes one flat parameter.

    Attributes:
        layout: Names and shapes.
        parameters: In the order of the layout.
        slots: Where each one is: one place, or several if it is tied.
    """

    layout: FlatLayout
    parameters: list[nn.Parameter]
    slots: list[list[Slot]]


def plan_groups(module: nn.Module, groups: Groups | None) -> list[Group]:
    """Decide which flat parameters a module gets.

    Args:
        module: Whose parameters. Those that a wrapper inside has flattened already stay there.
        groups: Parameters or their FQNs: one group, several, or several with names. None for all
            parameters, one group for each kind.

    Raises:
        ArgumentError: `bad_argument`: parameters of other modules, in two groups, of several
            kinds in one group, or that cannot be flattened; names that cannot be used.
    """
    found = _Found(module)
    if groups is None:
        listed: list[tuple[str | None, list[int]]] = [(None, one) for one in found.by_kind()]
    else:
        listed = [(name, found.members(name, one)) for name, one in _named(groups)]
    _check_apart(listed, found)
    names = _names([name for name, one in listed if one], _taken(module))
    sets = [set(one) for _, one in listed if one]
    return [found.group(name, one) for name, one in zip(names, sets, strict=True)]


def kind_of_parameter(parameter: torch.Tensor) -> tuple[torch.dtype, torch.device, bool]:
    """Return what all parameters in one flat parameter have in common."""
    return parameter.dtype, parameter.device, parameter.requires_grad


class _Found:
    """The parameters of a module that can be flattened, in the order of the module."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[int, nn.Parameter] = {}
        self.slots: dict[int, list[Slot]] = {}
        self.by_name: dict[str, int] = {}
        self.flat: dict[int, str] = {}  # those of wrappers inside
        for slot, parameter in _walk(module, "", self.flat):
            self.parameters[id(parameter)] = parameter
            self.slots.setdefault(id(parameter), []).append(slot)
            self.by_name[slot.fqn] = id(parameter)

    def name(self, one: int) -> str:
        return self.slots[one][0].fqn

    def by_kind(self) -> list[list[int]]:
        kinds: dict[Any, list[int]] = {}
        for one, parameter in self.parameters.items():
            self._check(parameter, self.name(one))
            kinds.setdefault(kind_of_parameter(parameter), []).append(one)
        return list(kinds.values())

    def members(self, group: str | None, members: Members) -> list[int]:
        title = "a group" if group is None else f"the group {shorten(group)}"
        if isinstance(members, (str, torch.Tensor)) or not isinstance(members, Iterable):
            _refuse(f"{title} lists parameters or their names, got {shorten(members)}")
        ones = list(dict.fromkeys(self._find(member, title) for member in members))
        kinds = {kind_of_parameter(self.parameters[one]): one for one in ones}
        for one in ones:
            self._check(self.parameters[one], self.name(one))
        if len(kinds) > 1:
            each = "; ".join(f"{self.name(one)}: {say_kind(kind)}" for kind, one in kinds.items())
            _refuse(
                f"{title} has parameters of {len(kinds)} kinds, and a flat parameter has one: "
                f"{each}",
                hint="make a group of each kind, or pass groups=None, which does that",
            )
        return ones

    def group(self, name: str, members: set[int]) -> Group:
        ones = [one for one in self.parameters if one in members]
        slots = [self.slots[one] for one in ones]
        layout = FlatLayout(
            name,
            tuple(places[0].fqn for places in slots),
            tuple(tuple(self.parameters[one].shape) for one in ones),
            tuple((slot.fqn, places[0].fqn) for places in slots for slot in places[1:]),
        )
        return Group(layout, [self.parameters[one] for one in ones], slots)

    def _find(self, member: Any, title: str) -> int:
        if isinstance(member, str):
            if member not in self.by_name:
                close = difflib.get_close_matches(member, self.by_name, n=3)
                _refuse(
                    f"{title} names {shorten(member)}, which is no parameter of the module",
                    hint=f"did you mean {', '.join(close)}?" if close else None,
                )
            return self.by_name[member]
        if id(member) in self.flat:
            _refuse(f"{title} has {self.flat[id(member)]}, which is a flat parameter already")
        if id(member) not in self.parameters:
            what = f"of shape {list(member.shape)}" if isinstance(member, torch.Tensor) else ""
            _refuse(f"{title} has {what or shorten(member)}, which is no parameter of the module")
        return id(member)

    def _check(self, parameter: nn.Parameter, name: str) -> None:
        if is_lazy(parameter):
            _refuse(f"{name} has no shape yet", hint="call the module once before flattening it")
        data = parameter.data
        if type(data) is not torch.Tensor or data.layout != torch.strided or data.is_quantized:
            what = type(data).__name__ if type(data) is not torch.Tensor else str(data.layout)
            _refuse(
                f"{name} is not a plain tensor but a {what}, and cannot be part of a flat one",
                hint="list the parameters to be flattened in groups=..., without this one",
            )


def _walk(
    module: nn.Module, prefix: str, flat: dict[int, str]
) -> Iterator[tuple[Slot, nn.Parameter]]:
    inner = _step_in(module, prefix, flat)
    while inner is not None:
        module = inner
        inner = _step_in(module, prefix, flat)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Slot(module, name, prefix + name), parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.", flat)


def _step_in(module: nn.Module, prefix: str, flat: dict[int, str]) -> nn.Module | None:
    """Return the module in a wrapper, and note the flat parameters that it has."""
    if isinstance(module, torch.jit.ScriptModule):
        _refuse(
            f"{prefix.removesuffix('.') or 'the module'} is scripted: its parameters cannot "
            "become views",
            hint="flatten the modules beside it, each in a wrapper of its own",
        )
    inner = module._modules.get(INNER)
    if inner is None:
        wrapped = find_wrapped(module)
        return None if wrapped is None else wrapped[1]
    for name, parameter in module._parameters.items():
        flat[id(parameter)] = prefix + name
    return inner


def _taken(module: nn.Module) -> set[str]:
    """List what stands beside the flat parameters in a state dict."""
    taken: set[str] = set()
    inner: nn.Module | None = module
    while inner is not None:
        module = inner
        for table in (module._parameters, module._buffers, module._modules):
            taken.update(table)
        inner = _step_in(module, "", {})
    return taken


def _named(groups: Groups) -> list[tuple[str | None, Members]]:
    if isinstance(groups, Mapping):
        return list(groups.items())
    if isinstance(groups, (str, torch.Tensor)) or not isinstance(groups, Iterable):
        _refuse(f"groups lists parameters or their names, got {shorten(groups)}")
    listed: list[Any] = list(groups)
    if listed and all(isinstance(one, (str, torch.Tensor)) for one in listed):
        return [(None, listed)]
    return [(None, one) for one in listed]


def _check_apart(listed: Sequence[tuple[str | None, list[int]]], found: _Found) -> None:
    seen: set[int] = set()
    for _, ones in listed:
        for one in ones:
            if one in seen:
                names = " and ".join(slot.fqn for slot in found.slots[one])
                _refuse(
                    f"{names} cannot be in two groups", hint="tied names are one parameter, in one"
                )
        seen.update(ones)


def _names(wanted: Sequence[str | None], taken: set[str]) -> list[str]:
    result: list[str] = []
    for name in wanted:
        if name is None:
            number = len(result)
            while f"{PREFIX}{number}" in taken:
                number += 1
            full = f"{PREFIX}{number}"
        elif type(name) is not str or not name or "." in name:
            _refuse(f"the name of a group is not empty and has no dot, got {shorten(name)}")
        else:
            full = PREFIX + name
            if full in taken:
                _refuse(f"the module has something that is called {full} already")
        taken.add(full)
        result.append(full)
    return result


def say_kind(kind: tuple[torch.dtype, torch.device, bool]) -> str:
    """Render what `kind_of_parameter` returns."""
    dtype, device, grad = kind
    return f"{dtype_name(dtype)} on {device}, {'' if grad else 'not '}trainable"


def _refuse(message: str, hint: str | None = None) -> NoReturn:
    raise ArgumentError(message, code="bad_argument", hint=hint)
