"""How to build a model again, as plain values: the name of a function and its arguments.

The name means what the caller's registry says. Nothing is imported or looked up by it.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dsdformat.errors import (
    ArgumentError,
    EntryNotFoundError,
    UnsupportedValueError,
    shorten,
)
from dsdformat.format.paths import render_path
from dsdformat.torch.introspect import Kind, kind_of
from dsdformat.torch.stored import Composite, Stored, find_items, leaves

__all__ = ["RECIPES", "Recipe", "build", "recipe_values"]

# Root key of a state under which the recipes of its models are filed.
RECIPES = "recipes"
_NAME, _KWARGS = "name", "kwargs"


class Recipe:
    """What builds a model: a name in a registry, and keyword arguments.

    Attributes:
        name: Of the function or class, as registries of those who load will have it.
        kwargs: Its keyword arguments: values of the format.

    Example:
        >>> Recipe("mlp", hidden=128, activation="gelu")
        Recipe('mlp', hidden=128, activation='gelu')
    """

    def __init__(self, name: str, /, **kwargs: Any) -> None:
        if type(name) is not str or not name:
            raise ArgumentError(
                f"a recipe's name is a string, got {shorten(name)}", code="bad_argument"
            )
        self.name = name
        self.kwargs = kwargs

    def __repr__(self) -> str:
        words = [repr(self.name), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        return f"Recipe({', '.join(words)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recipe):
            return NotImplemented
        return (self.name, self.kwargs) == (other.name, other.kwargs)

    __hash__ = None  # type: ignore[assignment]


def recipe_values(recipes: Mapping[str, Recipe], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values that are stored.

    Args:
        recipes: For a root key of the state, the recipe of the model there.
        state: The state.
    """
    if RECIPES in state:
        raise ArgumentError(
            f"the state has a key {RECIPES!r} of its own",
            code="bad_argument",
            hint="recipes are filed under this key; call yours something else",
        )
    if not isinstance(recipes, Mapping):
        raise ArgumentError(
            f"recipes is a mapping from keys of the state, got {shorten(recipes)}",
            code="bad_argument",
        )
    for key, recipe in recipes.items():
        if key not in state or not isinstance(recipe, Recipe):
            raise ArgumentError(
                f"recipes map keys of the state to Recipe, got {shorten(key)}: {shorten(recipe)}",
                code="bad_argument",
            )
        _check_plain(recipe.kwargs, [RECIPES, key, _KWARGS])
    return {key: {_NAME: one.name, _KWARGS: one.kwargs} for key, one in recipes.items()}


def _check_plain(value: Any, path: list[Any]) -> None:
    """Refuse tensors and arrays among the arguments of a recipe."""
    if kind_of(value) in (Kind.TENSOR, Kind.ARRAY):
        raise UnsupportedValueError(
            f"{render_path(path)}: the arguments of a recipe are plain values, got a "
            f"{type(value).__name__}",
            path_in_tree=render_path(path),
            hint="make it in the function that builds the model",
        )
    for key, item in find_items(value) or ():
        _check_plain(item, [*path, key])


def find_recipe(stored: Any, model: str, place: str) -> Recipe:
    """Return the recipe of one model from what is stored under `recipes`."""
    raw = stored.get(model) if isinstance(stored, Mapping) else None
    if raw is None:
        names = sorted(map(str, stored)) if isinstance(stored, Mapping) else []
        raise EntryNotFoundError(
            f"{place} has no recipe for {shorten(model)}",
            name=model,
            close_matches=names[:3],
        )
    name = raw.get(_NAME) if isinstance(raw, Mapping) else None
    kwargs = raw.get(_KWARGS) if isinstance(raw, Mapping) else None
    if type(name) is not str or type(kwargs) is not dict or any(type(k) is not str for k in kwargs):
        raise ArgumentError(
            f"{place}: what is stored as the recipe of {shorten(model)} is none: {shorten(raw)}",
            code="bad_argument",
        )
    if any(isinstance(leaf, (Stored, Composite)) for _, leaf in leaves(kwargs)):
        raise ArgumentError(
            f"{place}: the arguments of the recipe of {shorten(model)} hold a tensor",
            code="bad_argument",
        )
    return Recipe(name, **kwargs)


def build(recipe: Recipe, registry: Mapping[str, Callable[..., nn.Module]]) -> nn.Module:
    """Call the registry's function of a recipe.

    Raises:
        EntryNotFoundError: the registry has no such name.
        ArgumentError: what it has does not build a module.
    """
    if recipe.name not in registry:
        known = sorted(map(str, registry))
        raise EntryNotFoundError(
            f"the registry has no {shorten(recipe.name)}; it has {shorten(known)}",
            name=recipe.name,
            close_matches=difflib.get_close_matches(recipe.name, known, n=3),
        )
    module = registry[recipe.name](**copy.deepcopy(recipe.kwargs))
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            f"the registry's {recipe.name} gave no module but {shorten(module)}",
            code="bad_argument",
        )
    return module
