"""Where in a state the tree of a foreign checkpoint belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from dsdformat.errors import MismatchError, printable
from dsdformat.limits import DEPTH_MAX
from dsdformat.torch.introspect import Kind, find_children, kind_of
from dsdformat.torch.stored import Composite, Path, Stored, display

__all__ = ["fitted", "modules_in"]

_SHOWN = 5


def fitted(
    tree: dict[str, Any], state: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], str | None]:
    """Return the tree of a foreign checkpoint with root keys of a state.

    Args:
        tree: Of `Stored` and values, renamed.
        state: What it is loaded into.
        name: How messages call the checkpoint.

    Returns:
        The tree: as it is where any of its root keys is one of the state; under the state's only
        module where it is the state dict of one; and what may help if it does not fit, or None.

    Raises:
        MismatchError: `state_mismatch`: it is a state dict, and the state has several modules.
    """
    if not tree or tree.keys() & state.keys():
        return tree, None
    places = [path for path, _ in modules_in(state)]
    if not any(isinstance(value, (Stored, Composite)) for value in tree.values()):
        return tree, _rename_hint(tree, state, places)
    if len(places) > 1:
        shown = ", ".join(map(display, places[:_SHOWN]))
        raise MismatchError(
            f"{printable(name)} is the state dict of one module, and the state has several: "
            f"{printable(shown)}",
            code="state_mismatch",
            hint=f"say which one it is, as in rename=[('', '{display(places[0])}/')]",
        )
    if not places or any(type(step) is not str for step in places[0]):
        return tree, f"say where it belongs, as in rename=[('', '{next(iter(state), 'model')}/')]"
    for step in reversed(places[0]):
        tree = {step: tree}
    return tree, None


def modules_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Sequence[nn.Module]]]:
    """List the models in a state, each in one part or several."""
    kind = kind_of(value)
    if kind is Kind.MODULE:
        yield path, [value]
    elif kind is Kind.MODULES:
        yield path, value
    children = find_children(value) if kind is Kind.OTHER and len(path) < DEPTH_MAX else None
    for key, item in children or ():
        yield from modules_in(item, (*path, key))


def _rename_hint(
    tree: Mapping[str, Any], state: Mapping[str, Any], places: Sequence[Path]
) -> str | None:
    """Say what to rename, where the checkpoint's root keys are others than the state's."""
    found = [key for key, value in tree.items() if isinstance(value, dict)]
    if not found or not state:
        return None
    wanted = display(places[0]) if places else next(iter(state))
    pair = f"{display((found[0],))}/", f"{wanted}/"
    keys = ", ".join(display((key,)) for key in list(tree)[:_SHOWN])
    return f"its root keys are {printable(keys)}: pass rename=[{printable(str(pair))}, …]"
