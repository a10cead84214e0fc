"""A module whose parameters lie in one flat parameter, or in a few: `FlattenParams`.

Optimizers, collectives and foreach kernels then see few large tensors in place of many small ones,
while the module computes with views, and its state dict is that of the plain module. What lies
where is a `FlatLayout`, a plain value. `consolidate` joins what fairscale's FSDP has sharded. It is
long by what a module promises its users, in one class with its documentation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from dsdformat.errors import ArgumentError, MismatchError, shorten
from dsdformat.torch.flat_groups import INNER, Groups, plan_groups
from dsdformat.torch.flat_hooks import register_hooks, with_versions
from dsdformat.torch.flat_layout import FlatLayout, pack
from dsdformat.torch.flat_members import FlatMembers
from dsdformat.torch.flat_shards import consolidate

__all__ = [
    "FlatLayout",
    "FlattenParams",
    "consolidate",
    "derived_tensors",
    "flat_form",
    "without_views",
]


class FlattenParams(nn.Module):
    """Wraps a module, and flattens its parameters.

    The modules inside have views of the flat parameters, made anew in each forward pass. A state
    dict is that of the module without this wrapper, and can be loaded into either; so can a flat
    one, of `flat_state_dict`, into a wrapper of the same layout. Attributes that this class lacks
    are those of the wrapped module.

    A parameter that the loss does not depend on has a gradient of zeros here, since its neighbours
    have one. A parameter that a module outside of the wrapper is tied to must not be flattened.

    Example:
        >>> model = FlattenParams(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
        >>> [tuple(parameter.shape) for parameter in model.parameters()]
        [(58,)]
        >>> list(model.state_dict())
        ['0.weight', '0.bias', '1.weight', '1.bias']
        >>> with model.unflatten_params():
        ...     tuple(model.module[1].weight.shape)
        (2, 8)
    """

    def __init__(self, module: nn.Module, groups: Groups | None = None) -> None:
        """Flatten the parameters of a module.

        Args:
            module: It is changed: its parameters become views.
            groups: Which parameters become one flat parameter, as parameters or FQNs: a list, a
                list of lists, or a mapping of names to lists, which gives `flat_param_<name>`.
                What is in no group stays a parameter of its own. None for all, one group for each
                dtype, device and `requires_grad` that there is.

        Raises:
            ArgumentError: `bad_argument`: parameters of other modules, in two groups, of several
                kinds in one group, or that cannot be flattened. The module is as it was.

        Memory: the parameters of the largest group once more.
        """
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"{shorten(module)} is not a module", code="bad_argument")
        plan = plan_groups(module, groups)
        super().__init__()
        self._members = [FlatMembers(group) for group in plan]
        self._kept: dict[str, nn.Parameter] = {}  # flat parameters while the module is plain
        self._plain = False
        self._pending = False  # whether a hook made it plain, and another is to undo that
        self._flat_form = False  # whether a state dict is wanted flat
        self.add_module(INNER, module)
        for members in self._members:
            first = members.parameters[0]
            flat = nn.Parameter(pack(members.parameters), requires_grad=first.requires_grad)
            members.write_grad(flat)
            members.remove_parameters()
            members.point(flat, trainable=flat.requires_grad)
            self._parameters[members.layout.name] = flat
        self._link()
        register_hooks(self)

    # What it holds

    @property
    def module(self) -> nn.Module:
        """The wrapped module; its views are fit for use."""
        self._set_views()
        module = self._modules[INNER]
        assert module is not None
        return module

    @property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """What lies where, for each flat parameter."""
        return tuple(members.layout for members in self._members)

    @property
    def flat_params(self) -> tuple[nn.Parameter, ...]:
        """The flat parameters, also while the module is unflattened."""
        names = [layout.name for layout in self.layouts]
        found = [self._kept.get(name, self._parameters.get(name)) for name in names]
        return tuple(one for one in found if one is not None)

    @property
    def flat_param(self) -> nn.Parameter:
        """The one flat parameter.

        Raises:
            ArgumentError: `bad_argument`: there are several, or none.
        """
        if len(self._members) != 1:
            raise ArgumentError(
                f"there are {len(self._members)} flat parameters",
                code="bad_argument",
                hint="use flat_params",
            )
        return self.flat_params[0]

    @property
    def original_params(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """For each flat parameter the parameters in it, as objects: state dicts have these."""
        return tuple(tuple(members.parameters) for members in self._members)

    @property
    def is_flattened(self) -> bool:
        """Whether the modules inside have views, and not parameters."""
        return not self._plain

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        self._undo_pending()
        self._set_views()
        return self._modules[INNER](*args, **kwargs)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module, where this one has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.__dict__.get("_modules", {}).get(INNER) is None:
                raise
        return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self.module[key]  # type: ignore[index]

    def extra_repr(self) -> str:
        """Say what lies where."""
        return "\n".join(
            f"{layout.name}: {len(layout.names)} parameters, {layout.numel} elements"
            for layout in self.layouts
        )

    # Plain and flat

    @contextmanager
    def unflatten_params(
        self,
        *,
        recurse: bool = True,
        writeback: bool = True,
        values: Sequence[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Have the modules inside hold their parameters, the objects of before, for a while.

        Their data and gradients are the memory of the flat ones. What was replaced, moved or
        converted meanwhile is copied back at the end. If the module is plain already, so it stays.

        Args:
            recurse: Whether wrappers inside are unflattened too.
            writeback: Whether changes are kept. If not, the parameters are copies.
            values: Flat tensors, one for each flat parameter, which the parameters are parts of
                instead. Changes go to them, and the flat parameters stay as they are.

        Raises:
            ArgumentError: `bad_argument`: `values` of a module that is plain already, or not one
                for each flat parameter.
            MismatchError: `state_mismatch`: `values` of other shapes; or, at the end, parameters
                that no longer fit, and the flat parameters are as they were.

        Ranks: local.
        Memory: none; with `writeback=False`, that of the parameters and gradients.
        """
        self._undo_pending()
        if values is not None:
            self._check_values(values)
        with ExitStack() as stack:
            for wrapper in _wrappers(self) if recurse else [self]:
                if wrapper.is_flattened:
                    own = values if wrapper is self else None
                    stack.enter_context(wrapper._unflattened(writeback, own))
            yield

    @contextmanager
    def _unflattened(
        self, writeback: bool, values: Sequence[torch.Tensor] | None
    ) -> Iterator[None]:
        self._open(values, copies=not writeback)
        if values is None:
            for members, flat in zip(self._members, self.flat_params, strict=True):
                grad = flat.grad
                members.set_grads(grad if grad is None or writeback else grad.clone())
        try:
            yield
        finally:
            self._close(writeback=writeback and values is None, grads=True)

    def _check_values(self, values: Sequence[torch.Tensor]) -> None:
        if self._plain or len(values) != len(self._members):
            raise ArgumentError(
                "values are for a module that is flat"
                if self._plain
                else f"{len(values)} values for {len(self._members)} flat parameters",
                code="bad_argument",
            )
        for members, value in zip(self._members, values, strict=True):
            members.layout.cut(value)

    def _open(self, values: Sequence[torch.Tensor] | None = None, *, copies: bool = False) -> None:
        """Make the module plain."""
        flats = self.flat_params
        sources = list(flats if values is None else values)
        self._check_views()
        for members, flat, source in zip(self._members, flats, sources, strict=True):
            data = source.detach().clone() if copies else source
            members.remove_views()
            members.point(data, trainable=flat.requires_grad, keep=values is None and not copies)
            members.set_parameters()
            delattr(self, members.layout.name)
            self._kept[members.layout.name] = flat
        for members in self._members:
            members.set_order()
        self._plain = True

    def _close(self, *, writeback: bool = True, grads: bool = False) -> None:
        """Make the module flat."""
        flats = self.flat_params
        both = list(zip(self._members, flats, strict=True))
        try:
            if writeback:
                found = [members.find_all() for members in self._members]
                for (members, flat), parameters in zip(both, found, strict=True):
                    members.write(flat, parameters)
                    if grads:
                        members.write_grad(flat)
        finally:
            for members, flat in both:
                members.remove_parameters()
                if grads:
                    members.clear_grads()
                self._parameters[members.layout.name] = flat
            self._kept.clear()
            self._plain = self._pending = False
            self._link()

    def _undo_pending(self) -> None:
        """Become flat again if a hook's work was cut short by an exception."""
        if self._pending:
            self._close()

    def _link(self) -> None:
        """Tie views and parameters to the memory that the flat parameters have now."""
        for members, flat in zip(self._members, self.flat_params, strict=True):
            members.point(flat, trainable=flat.requires_grad)
        self._set_views()

    def _check_views(self) -> None:
        for members in self._members:
            members.check_views()

    def _set_views(self) -> None:
        if not self._plain:
            for members in self._members:
                flat = self._parameters.get(members.layout.name)
                if flat is not None:
                    members.set_views(flat)

    # State dicts

    def flat_state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the state dict with the flat parameters, here and in wrappers inside.

        Args:
            prefix, keep_vars: As in `state_dict`.

        Raises:
            ArgumentError: `bad_argument`: inside of `unflatten_params`.
        """
        with flat_form(self):
            result: dict[str, Any] = self.state_dict(prefix=prefix, keep_vars=keep_vars)
            return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of the plain module, or a flat one.

        As with any module, what fits is copied before an error is raised.

        Args:
            state_dict: It is not changed.
            strict: Whether missing and unexpected names are errors.
            assign: Buffers, and parameters that are not flat, become the tensors given; into flat
                parameters they are copied, and these take over their dtype and device.

        Returns:
            `missing_keys` and `unexpected_keys`, as the plain module names them.

        Raises:
            MismatchError: `state_mismatch`: names or shapes differ, or a flat state dict is of
                another layout.
        """
        try:
            return super().load_state_dict(with_versions(self, state_dict), strict, assign)
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):
                raise
            raise MismatchError(str(error), code="state_mismatch") from error
        finally:
            for wrapper in _wrappers(self):
                wrapper._undo_pending()

    # Moves and copies

    def _apply(self, fn: Any, recurse: bool = True) -> FlattenParams:
        """Move or convert; torch calls this in `to`, `half`, `cuda` and others (2.6 to 2.13)."""
        self._undo_pending()
        if self._plain:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        self._check_views()
        for members in self._members:
            members.remove_views()  # none outlives its memory
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._link()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> FlattenParams:
        """Say whether all parameters need gradients."""
        super().requires_grad_(requires_grad)
        for wrapper in _wrappers(self):
            if not wrapper._plain:
                wrapper._link()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenParams:
        """Copy the flat parameters; the copy's views are views of its own."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with ExitStack() as stack:
            if not self._plain:
                self._check_views()
                for members in self._members:
                    members.release()
                stack.callback(self._link)
            twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin

    def __setstate__(self, state: Any) -> None:
        """Make views of the flat parameters that a copy has."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._plain:
            self._close()
        else:
            self._link()


@contextmanager
def flat_form(module: nn.Module) -> Iterator[None]:
    """Have state dicts be flat, of a module with any number of wrappers inside, for a while.

    Raises:
        ArgumentError: `bad_argument`: inside of `unflatten_params`.
    """
    wrappers = _wrappers(module)
    if any(wrapper._plain and not wrapper._pending for wrapper in wrappers):
        raise ArgumentError(
            "there is no flat state dict inside of unflatten_params()", code="bad_argument"
        )
    try:
        for wrapper in wrappers:
            wrapper._undo_pending()
            wrapper._flat_form = True
        yield
    finally:
        for wrapper in wrappers:
            wrapper._flat_form = False


@contextmanager
def without_views(module: nn.Module) -> Iterator[None]:
    """Leave nothing but the flat parameters, whose content is to be replaced, for a while."""
    wrappers = _wrappers(module)
    with flat_form(module):
        try:
            for wrapper in wrappers:
                wrapper._check_views()
            for members in (members for wrapper in wrappers for members in wrapper._members):
                members.release()
            yield
        finally:
            for wrapper in wrappers:
                wrapper._link()


def derived_tensors(module: nn.Module) -> set[int]:
    """Return the ids of the flat parameters of a module, and of the views that it has of them.

    They get their content from the parameters, or give it to them: none is loaded for itself.
    """
    found: set[int] = set()
    for wrapper in _wrappers(module):
        found.update(map(id, wrapper.flat_params))
        for members in wrapper._members:
            found.update(map(id, members.views()))
    return found


def _wrappers(module: nn.Module) -> list[FlattenParams]:
    return [one for one in module.modules() if isinstance(one, FlattenParams)]
