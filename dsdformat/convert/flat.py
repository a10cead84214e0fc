"""The tensors of a state that is a flat dict of them, for kinds of files that hold nothing else."""

from __future__ import annotations

from typing import Any

from dsdformat.convert.foreign import AnyTensor, Foreign, children, is_mapping
from dsdformat.errors import UnsupportedValueError, listed, shorten
from dsdformat.format.paths import emit_name, render_path
from dsdformat.format.values import encoded_key

__all__ = ["flat_tensors"]


def flat_tensors(opened: Foreign, what: str) -> dict[str, AnyTensor]:
    """Return the tensors by name, or refuse all that is no tensor at the root.

    Args:
        opened: What is converted.
        what: What it becomes, for messages.

    Raises:
        UnsupportedValueError: `unsupported_value`, with the places and what to choose.
    """
    items = children(opened.tree) if is_mapping(opened.tree) else None
    if items is None:
        raise UnsupportedValueError(
            f"$: {what} holds tensors by name, and this is {_kind_of(opened.tree)}",
            hint=_hint([]),
        )
    bad = [(key, item) for key, item in items if not (_is_named(key) and _is_tensor(item))]
    if bad:
        shown = listed([f"{render_path((key,))}: {_kind_of(item)}" for key, item in bad])
        raise UnsupportedValueError(
            f"{what} holds tensors by name alone, and not {shown}",
            path_in_tree=render_path((bad[0][0],)),
            hint=_hint(bad),
        )
    return dict(items)


def _is_named(key: Any) -> bool:
    return type(key) is str


def _is_tensor(item: Any) -> bool:
    return isinstance(item, AnyTensor)


def _kind_of(item: Any) -> str:
    if _is_tensor(item):
        return "a tensor under a key that is no string"
    items = children(item)
    if not items:
        return shorten(item) if len(repr(item)) < 40 else f"a {type(item).__name__}"
    return f"a {'section' if is_mapping(item) else 'list'} of {len(items)}"


def _hint(bad: list[tuple[Any, Any]]) -> str:
    """Say what to choose: the first section that would do, or to drop values."""
    for key, item in bad:
        inner = children(item) if is_mapping(item) else None
        if inner and all(_is_named(name) and _is_tensor(one) for name, one in inner):
            return f"choose one section, as with select={emit_name((key,), encoded_key)!r}"
    if all(not children(item) for _, item in bad):
        return "leave out what is no tensor, with drop_values=True, or choose with select"
    return "choose what to convert with select, and leave out other values with drop_values=True"
