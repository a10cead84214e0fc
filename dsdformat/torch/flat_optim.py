"""The optimizer's state of a flat parameter, cut into what each parameter in it has, and joined.

An optimizer that works element by element holds, for a flat parameter, tensors of its shape and
single numbers, as the step. The former are cut as the parameter is, the latter given to each. What
is neither belongs to no parameter alone, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from dsdformat.errors import ArgumentError, MismatchError, UnsupportedValueError, shorten
from dsdformat.format.paths import render_path
from dsdformat.torch.buffers import as_bits
from dsdformat.torch.flat_find import find_layouts
from dsdformat.torch.flat_layout import FlatLayout, pack
from dsdformat.torch.sharding import tensors_in

__all__ = ["cut_state", "find_layouts", "holds_large", "is_cut", "join_state"]

STEP = "step"  # a number, also where a parameter is one


def cut_state(
    layout: FlatLayout, state: Mapping[Any, Any], place: Sequence[Any] = ()
) -> dict[str, dict[Any, Any]]:
    """Return the entries that each parameter in a flat one has in an optimizer's state.

    Args:
        layout: Of the flat parameter.
        state: What the optimizer has for it: `optimizer.state[flat_parameter]`.
        place: Where it lies in a state that is saved, for messages.

    Returns:
        For each of `layout.names` its entries: views of the tensors in `state`, and copies of the
        rest, so that no two parameters share a step. Aliases are not among the names.

    Raises:
        UnsupportedValueError: an entry holds tensors and cannot be cut, as history of LBFGS or
            statistics of rows, columns or blocks.

    Ranks: local.
    Memory: that of single numbers.
    """
    result: dict[str, dict[Any, Any]] = {name: {} for name in layout.names}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and key != STEP and value.shape == (layout.numel,):
            parts: list[Any] = layout.cut(value.detach().contiguous())
        elif not holds_large(value):
            parts = [copy.deepcopy(value) for _ in layout.names]
        else:
            _refuse(layout, key, value, place)
        for name, part in zip(layout.names, parts, strict=True):
            result[name][key] = part
    return result


def join_state(
    layout: FlatLayout,
    states: Mapping[str, Mapping[Any, Any]],
    like: Mapping[Any, Any] | None = None,
) -> dict[Any, Any]:
    """Return the entries of a flat parameter, from those of the parameters in it.

    Args:
        layout: Of the flat parameter.
        states: By name; names that the layout lacks are ignored. A tied parameter may have any
            one of its names. Empty, or without any of the names: the flat one has no state.
        like: The state that the flat parameter has now. Where every parameter has one element, a
            number cannot be told from a tensor of its shape, and this decides.

    Raises:
        MismatchError: `state_mismatch`: some parameters lack entries that others have, have them
            in other dtypes or shapes, or differ in what is one for the flat parameter.

    Ranks: local.
    Memory: the result.
    """
    entries = _entries(layout, states)
    if not any(entries.values()):
        return {}
    keys = dict.fromkeys(key for state in entries.values() for key in state)
    result = {}
    for key in keys:
        lacking = [name for name, state in entries.items() if key not in state]
        if lacking:
            has = next(name for name, state in entries.items() if key in state)
            _mismatch(layout, f"{lacking[0]} has no {shorten(key)}, and {has} has")
        values = {name: state[key] for name, state in entries.items()}
        result[key] = _joined(layout, key, values, (like or {}).get(key))
    return result


def _entries(
    layout: FlatLayout, states: Mapping[str, Mapping[Any, Any]]
) -> dict[str, Mapping[Any, Any]]:
    found = {}
    for name, aliases in layout.all_names().items():
        found[name] = next((states[alias] for alias in aliases if states.get(alias)), {})
        if not isinstance(found[name], Mapping):
            raise ArgumentError(f"the state of {name} is no mapping", code="bad_argument")
    return found


def _joined(layout: FlatLayout, key: Any, values: Mapping[str, Any], like: Any) -> Any:
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    first_name, first = next(iter(values.items()))
    if is_cut(layout, key, values, like):
        kinds = {(value.dtype, value.device): name for name, value in values.items()}
        if len(kinds) > 1:
            each = ", ".join(f"{name}: {kind[0]} on {kind[1]}" for kind, name in kinds.items())
            _mismatch(layout, f"{shorten(key)} is not of one kind: {each}")
        return pack(list(values.values()))
    if any(map(holds_large, values.values())):
        for name, value in values.items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else shorten(value)
            if shape != shapes[name]:
                _mismatch(layout, f"{shorten(key)} of {name} is {shape}, not {shapes[name]}")
    for name, value in values.items():
        if not _equal(value, first):
            _mismatch(
                layout,
                f"{shorten(key)} is {shorten(first)} for {first_name}, {shorten(value)} for {name}",
            )
    return copy.deepcopy(first)


def is_cut(layout: FlatLayout, key: Any, values: Mapping[str, Any], like: Any = None) -> bool:
    """Whether values of parameters in a flat one are parts of one tensor of its shape.

    Args:
        layout: Of the flat parameter.
        key: What the values are called.
        values: By the names of parameters.
        like: What the flat one has, or will have; see `join_state`.
    """
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    if key == STEP or not all(
        isinstance(value, torch.Tensor) and tuple(value.shape) == shapes[name]
        for name, value in values.items()
    ):
        return False
    if isinstance(like, torch.Tensor) and all(numel == 1 for numel in layout.numels):
        return like.shape == (layout.numel,)
    return True


def holds_large(value: Any) -> bool:
    """Whether a value holds a tensor that is more than a number, or none."""
    return any(tensor.numel() != 1 for tensor in tensors_in(value))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(as_bits(one.cpu()), as_bits(other.cpu()))
    return type(one) is type(other) and bool(one == other)


def _refuse(layout: FlatLayout, key: Any, value: Any, place: Sequence[Any]) -> NoReturn:
    what = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shorten(value)
    path = render_path([*place, layout.name, key])
    raise UnsupportedValueError(
        f"{path}: {shorten(key)} of {layout.name} is {what}, which cannot be cut into what its "
        f"{len(layout.names)} parameters have",
        path_in_tree=path,
        hint="use an optimizer that works element by element, or one over parameters that are "
        "not flat",
    )


def _mismatch(layout: FlatLayout, message: str) -> NoReturn:
    raise MismatchError(
        f"states cannot be joined into that of {layout.name}: {message}",
        code="state_mismatch",
        hint="parameters in one flat parameter are stepped together; group them accordingly",
    )
