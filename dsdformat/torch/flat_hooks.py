"""What `state_dict` and `load_state_dict` of torch call, so that a flat module looks plain to them.

As hooks, and not as methods, they also work where the wrapper is somewhere inside of the module
that is saved or loaded. Before the modules inside are visited, they are given their parameters;
afterwards these are flat again. So hooks of the user's see what they see in the plain module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from dsdformat.errors import ArgumentError, MismatchError
from dsdformat.flat_layout import FlatLayout
from dsdformat.torch.flat_groups import INNER

__all__ = ["register_hooks", "with_versions"]

LAYOUTS = "flat_layouts"
_STEP = f"{INNER}."


def register_hooks(wrapper: Any) -> None:
    """Register the hooks of one `FlattenParams`."""
    wrapper.register_state_dict_pre_hook(_before_saving)
    wrapper.register_state_dict_post_hook(_after_saving)
    wrapper.register_load_state_dict_pre_hook(_before_loading)
    wrapper.register_load_state_dict_post_hook(_after_loading)


def with_versions(wrapper: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict that has the versions of modules also under their names in the wrapper.

    State dicts carry a version for each module, under its name in the plain module.
    """
    versions = getattr(state, "_metadata", None)
    if not isinstance(versions, Mapping):
        return state
    known = dict(versions)
    for path, _ in wrapper.named_modules():
        plain = ".".join(step for step in path.split(".") if step != INNER)
        if path not in known and plain in versions:
            known[path] = versions[plain]
    result: OrderedDict[str, Any] = OrderedDict(state)
    result._metadata = known  # type: ignore[attr-defined]
    return result


def _before_saving(wrapper: Any, *_: Any) -> None:
    if wrapper.is_flattened and not wrapper._flat_form:
        wrapper._open()
        wrapper._pending = True


def _after_saving(wrapper: Any, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    inner = prefix + _STEP
    for key in [key for key in state if key.startswith(prefix)]:
        # Each is put at the end again, so that the order stays.
        value = state.pop(key)
        state[prefix + key[len(inner) :] if key.startswith(inner) else key] = value
    if wrapper._flat_form:
        metadata[LAYOUTS] = [layout.to_value() for layout in wrapper.layouts]
        return
    versions = getattr(state, "_metadata", {})
    for path in [path for path in versions if f"{path}.".startswith(inner)]:
        versions[(prefix + path[len(inner) :]).removesuffix(".")] = versions.pop(path)
    wrapper._undo_pending()


def _before_loading(
    wrapper: Any,
    state: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *rest: Any,
) -> None:
    wrapper._undo_pending()
    wrapper._loading = (prefix, rest[-1])  # the list of errors, whose names are to be made plain
    names = [layout.name for layout in wrapper.layouts]
    old = f"{prefix}flat_param"  # as the first versions of fairscale had it
    if old in state and f"{old}_0" in {prefix + name for name in names}:
        state[f"{old}_0"] = state.pop(old)
    flat = [prefix + name for name in names if prefix + name in state]
    if flat:
        _check_layouts(wrapper, metadata, prefix)
    elif names and wrapper.is_flattened:
        wrapper._open()
        wrapper._pending = True
    for key in [key for key in state if key.startswith(prefix) and key not in flat]:
        state[prefix + _STEP + key[len(prefix) :]] = state.pop(key)


def _after_loading(wrapper: Any, found: Any) -> None:
    prefix, errors = wrapper.__dict__.pop("_loading")
    inner = prefix + _STEP
    for keys in (found.missing_keys, found.unexpected_keys):
        keys[:] = [prefix + key[len(inner) :] if key.startswith(inner) else key for key in keys]
    errors[:] = [error.replace(inner, prefix) for error in errors]
    wrapper._undo_pending()
    if wrapper.is_flattened:
        wrapper._link()  # flat parameters may have been assigned


def _check_layouts(wrapper: Any, metadata: Mapping[str, Any], prefix: str) -> None:
    if not wrapper.is_flattened:
        raise ArgumentError(
            f"{prefix}{wrapper.layouts[0].name} is of a flat state dict, which cannot be loaded "
            "inside of unflatten_params()",
            code="bad_argument",
        )
    stored = metadata.get(LAYOUTS)
    if stored is None:
        return  # of a file that keeps tensors only
    theirs = {layout.name: layout for layout in map(FlatLayout.of_value, stored)}
    for layout in wrapper.layouts:
        other = theirs.get(layout.name)
        if other is None or (other.names, other.shapes) != (layout.names, layout.shapes):
            raise MismatchError(
                f"{prefix}{layout.name} is of another layout: {_difference(other, layout)}",
                code="state_mismatch",
                hint="load a state dict that is not flat; it fits any layout",
            )


def _difference(stored: FlatLayout | None, wanted: FlatLayout) -> str:
    if stored is None:
        return "the state dict lacks it"
    ours = dict(zip(wanted.names, wanted.shapes, strict=True))
    theirs = dict(zip(stored.names, stored.shapes, strict=True))
    for name in dict.fromkeys([*theirs, *ours]):
        a, b = theirs.get(name), ours.get(name)
        if a != b:
            shapes = ["no" if one is None else str(list(one)) for one in (a, b)]
            return f"it has {shapes[0]} {name}, and {shapes[1]} is wanted"
    return f"its parameters are in the order {', '.join(stored.names[:10])}"
