"""A state as plain nested values: every module, optimizer and stateful object by its state dict.

The result shares memory with what was captured; nothing is copied, and nothing changed.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dsdformat.errors import MismatchError, UnsupportedValueError, listed
from dsdformat.format.paths import emit_name, render_path
from dsdformat.format.values import encoded_key
from dsdformat.limits import DEPTH_MAX
from dsdformat.torch.fsdp1 import find_units
from dsdformat.torch.fsdp2 import shown_as_shards
from dsdformat.torch.introspect import (
    Kind,
    as_mapping,
    find_children,
    holds_leaves,
    kind_of,
)
from dsdformat.torch.live_model import LiveModel
from dsdformat.torch.names import Namer, modules_in
from dsdformat.torch.optim import capture_optimizers
from dsdformat.torch.stored import find_items, is_container

__all__ = ["capture", "capture_with_buffers", "check_acyclic"]

Path = tuple[Any, ...]


def capture(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with plain values in place of its objects.

    Raises:
        ArgumentError: `bad_argument`: not a mapping with string keys.
        UnsupportedValueError: an optimizer without its module; tensors without data.
        MismatchError: `state_conflict`: parts of one model or optimizer say different things.
    """
    return capture_with_buffers(state)[0]


def capture_with_buffers(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Return a state with plain values, as `capture`, and where in it are buffers of modules."""
    state = dict(as_mapping(state))
    check_acyclic(state)
    with shown_as_shards(modules_in(state)):
        walk = _Capture(state)
        plain: dict[str, Any] = walk.walk_items(state, ())
    check_acyclic(plain)
    _check_data(plain)
    return plain, walk.buffers


class _Capture:
    """Walks a state.

    Attributes:
        buffers: Where those of modules are, as far as they are tensors.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.buffers: list[Path] = []
        self._state = state
        self._units_of = functools.cache(find_units)
        for module in modules_in(state):  # on all ranks alike, whatever optimizers each has
            self._units_of(module)

    @functools.cached_property
    def _namer(self) -> Namer:
        return Namer(self._state, self._units_of)

    def walk(self, value: Any, path: Path) -> Any:
        kind = kind_of(value)
        if kind is Kind.TENSOR:
            return value
        if kind is Kind.MODULE:
            return self._modules([value], path)
        if kind is Kind.MODULES:
            return self._modules(value, path)
        if kind is Kind.OPTIMIZER or kind is Kind.OPTIMIZERS:
            parts = [value] if kind is Kind.OPTIMIZER else value
            names = self._namer.names_of(parts, path)
            return capture_optimizers(parts, names, path)
        if kind is Kind.STATEFUL:
            stored = value.state_dict()
            return stored if kind_of(stored) is Kind.STATEFUL else self.walk(stored, path)
        if kind is Kind.OTHER and len(path) < DEPTH_MAX and holds_leaves(value):
            return self._container(value, path)
        return value

    def walk_items(self, items: Mapping[Any, Any], path: Path) -> Any:
        walked = {key: self.walk(value, (*path, key)) for key, value in items.items()}
        if type(items) is defaultdict:
            return defaultdict(items.default_factory, walked)
        return OrderedDict(walked) if type(items) is OrderedDict else walked

    def _container(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return self.walk_items(value, path)
        items = [self.walk(item, (*path, index)) for index, item in find_children(value) or ()]
        return items if type(value) is list else tuple(items)

    def _modules(self, modules: Sequence[nn.Module], path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for module in modules:
            for name, value in self._entries(module, path):
                if name in result and result[name] is not value:
                    raise MismatchError(
                        f"{render_path([*path, name])}: two parts of the model have this name",
                        code="state_conflict",
                        hint="a list of modules is one model in parts; put several models into a "
                        "dict, each with a name of its own",
                    )
                plain = isinstance(value, torch.Tensor)  # most are
                result[name] = value if plain else self.walk(value, (*path, name))
        return result

    def _entries(self, module: nn.Module, path: Path) -> Iterator[tuple[str, Any]]:
        try:
            live = LiveModel(module, units=self._units_of(module))
            entries = live.entries()
        except UnsupportedValueError as error:
            raise UnsupportedValueError(
                f"{render_path(path)}: {error.message}",
                path_in_tree=render_path(path),
                hint=error.hint,
            ) from None
        self.buffers.extend((*path, name) for name in live.buffers())
        return ((name, value) for _, name, value in entries)


def check_acyclic(value: Any) -> None:
    """Refuse a container that contains itself.

    Raises:
        UnsupportedValueError: `value_too_deep`, with the path.
    """
    done: set[int] = set()
    way: dict[int, None] = {}

    def visit(node: Any, path: Path) -> None:
        if id(node) in way or len(path) > DEPTH_MAX:
            place = render_path(path[:3])
            raise UnsupportedValueError(
                f"{place}…: nested too deep to be stored, or contains itself",
                code="value_too_deep",
                path_in_tree=place,
            )
        items = find_items(node)
        if not items or id(node) in done:
            return
        way[id(node)] = None
        for key, item in items:
            if is_container(item):
                visit(item, (*path, key))
        del way[id(node)]
        done.add(id(node))

    visit(value, ())


def _check_data(plain: Any) -> None:
    """Refuse tensors on meta, all of them at once."""
    meta = list(_meta_names(plain, ()))
    if meta:
        raise UnsupportedValueError(
            f"{listed(meta)} are on the meta device and have no data",
            path_in_tree=render_path(()),
            hint="materialize them first, as with to_empty(device=...) and the initialisation of "
            "the model, or by loading a checkpoint",
        )


def _meta_names(value: Any, path: Path) -> Iterator[str]:
    for key, item in (find_items(value) if len(path) < DEPTH_MAX else None) or ():
        if isinstance(item, torch.Tensor):
            if item.is_meta:
                yield emit_name((*path, key), encoded_key)
        elif is_container(item):
            yield from _meta_names(item, (*path, key))
