"""Optimizer states in a tree that number their parameters, as `Optimizer.state_dict` gives them.

Finds them, and tells what is known of each number: its group, its name where torch kept it, the
shapes of what is kept for it. Which parameter of a model a number is, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdformat.convert.foreign import AnyTensor

__all__ = ["NumberedOptimizer", "NumberedParameter", "find_optimizers"]

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class NumberedParameter:
    """What an optimizer's state says of one parameter.

    Attributes:
        number: As the state has it.
        group: Index of its group.
        name: As torch kept it, from named parameters; or None.
        shapes: Shapes of the tensors that are kept for it, by their names.
    """

    number: int
    group: int
    name: str | None
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class NumberedOptimizer:
    """An optimizer's state.

    Attributes:
        path: Where it lies in the tree.
        parameters: In the order of the groups, which is that of the module's parameters where
            one group was made of `module.parameters()`.
    """

    path: Path
    parameters: tuple[NumberedParameter, ...]


def find_optimizers(tree: Any, path: Path = ()) -> Iterator[NumberedOptimizer]:
    """Yield the optimizer states in a tree, in its order."""
    if isinstance(tree, dict):
        found = _optimizer(tree, path)
        if found is not None:
            yield found
            return
        for key, item in tree.items():
            yield from find_optimizers(item, (*path, key))
    elif type(tree) in (list, tuple):
        for index, item in enumerate(tree):
            yield from find_optimizers(item, (*path, index))


def _optimizer(tree: dict[Any, Any], path: Path) -> NumberedOptimizer | None:
    state, groups = tree.get("state"), tree.get("param_groups")
    if not isinstance(state, dict) or type(groups) is not list:
        return None
    parameters: list[NumberedParameter] = []
    for index, group in enumerate(groups):
        numbers = group.get("params") if isinstance(group, dict) else None
        if type(numbers) is not list or any(type(number) is not int for number in numbers):
            return None
        names = group.get("param_names")
        named = type(names) is list and len(names) == len(numbers)
        for place, number in enumerate(numbers):
            name = names[place] if named and type(names[place]) is str else None
            shapes = _shapes(state.get(number))
            parameters.append(NumberedParameter(number, index, name, shapes))
    return NumberedOptimizer(path, tuple(parameters))


def _shapes(kept: Any) -> dict[str, tuple[int, ...]]:
    items = kept.items() if isinstance(kept, dict) else ()
    return {
        key: value.shape
        for key, value in items
        if type(key) is str and isinstance(value, AnyTensor)
    }
