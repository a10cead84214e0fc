"""A state as `torch.distributed.checkpoint` takes it apart: names, paths, tensors and values.

Dicts are taken apart by their keys, lists where something in them is a tensor or a dict, as torch
does it; all else is a value, kept whole. What torch would not put together again as it was is kept
whole as well: dicts that are empty, that have other keys than strings, or that are ordered and hold
no tensor. An ordered dict of tensors, as `state_dict()` gives it, becomes a dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsdformat.convert.foreign import AnyTensor, is_mapping, walk_tree
from dsdformat.convert.plain_emitting import refuse
from dsdformat.errors import UnsupportedValueError, shorten
from dsdformat.format.paths import render_path
from dsdformat.limits import DEPTH_MAX

__all__ = ["FlatItem", "flat_items", "is_torch_tensor"]

Path = tuple[Any, ...]

_HINT = "if this is an optimizer, say which parameters its numbers are, with names='names.json'"


@dataclass(frozen=True, slots=True)
class FlatItem:
    """Something that has a name of its own in the folder.

    Attributes:
        name: The steps of the path, joined by dots.
        path: Where it lies in the state.
        value: A tensor, or a value that is stored whole.
    """

    name: str
    path: Path
    value: Any


def flat_items(tree: dict[str, Any]) -> list[FlatItem]:
    """Take a state apart, in its order.

    Raises:
        UnsupportedValueError: two things have one name, or a tensor lies where it has none.
    """
    items: list[FlatItem] = []
    places: dict[str, Path] = {}
    for path, value in _walk(tree, ()):
        name = ".".join(map(str, path))
        if name in places:
            place = render_path(path)
            raise UnsupportedValueError(
                f"{place} and {render_path(places[name])} are both {shorten(name)} in a folder of "
                "torch.distributed.checkpoint",
                path_in_tree=place,
                hint="rename one of them",
            )
        if len(path) >= DEPTH_MAX:
            refuse(path[:3], "what is nested so deep")
        places[name] = path
        items.append(FlatItem(name, path, value))
    return items


def is_torch_tensor(value: Any) -> bool:
    """Whether a value is a tensor, and not an array of numpy."""
    return isinstance(value, AnyTensor) and value.attributes.get("flavour") != "numpy"


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if not path or _is_open_dict(value):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif type(value) is list and _is_open_list(value):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))
    else:
        if is_mapping(value) and _holds_tensors(value):
            what = f"a {type(value).__name__} of tensors by other keys than strings"
            refuse(path, what, _HINT if path[-1] == "state" else None)
        yield path, value


def _is_open_dict(value: Any) -> bool:
    """Whether a value is a dict that has an item for each of its own names."""
    if type(value) not in (dict, OrderedDict) or not value:
        return False
    named = all(type(key) is str for key in value)
    return named and (type(value) is dict or _holds_tensors(value))


def _holds_tensors(value: Any) -> bool:
    return any(is_torch_tensor(leaf) for _, leaf in walk_tree(value))


def _is_open_list(value: list[Any]) -> bool:
    """Whether torch takes a list apart."""
    return any(
        is_torch_tensor(item) or is_mapping(item) or (type(item) is list and _is_open_list(item))
        for item in value
    )
