"""Give the optimizers of a state the form that a kind of checkpoint has them in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dsdformat.convert.files import Folder, read_bytes
from dsdformat.convert.foreign import Foreign
from dsdformat.convert.kinds import open_any
from dsdformat.convert.optimizer_forms import (
    flat_to_named,
    has_lists,
    is_flat,
    is_named,
    listed,
    mapped_optimizers,
    named,
    named_order,
    numbered,
)
from dsdformat.convert.optimizer_names import ModelSection, find_models, kept_names, names_in
from dsdformat.convert.optimizers import NumberedOptimizer, find_optimizers
from dsdformat.convert.outputs import OptimizerForm
from dsdformat.convert.settling import Finding, Settled
from dsdformat.errors import ArgumentError, ConvertError, shorten
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key
from dsdformat.limits import JSON_NBYTES_MAX

__all__ = ["Names", "with_optimizers"]

Path = tuple[Any, ...]
# Names of parameters in the order of an optimizer's groups; by display name of the optimizer,
# where there are several; or the path of a JSON file with either, or of a checkpoint.
Names = Sequence[str] | Mapping[str, Sequence[str]] | str | os.PathLike[str]


def with_optimizers(
    opened: Foreign, form: OptimizerForm, names: Names | None = None, *, source: Foreign
) -> tuple[Foreign, tuple[Finding, ...]]:
    """Return a checkpoint whose optimizers have a form, as far as the names are known.

    Args:
        opened: What there is; it stays open, and is what is read.
        form: The form to give: to numbers only what has the form of ours.
        names: Names for numbers, where the file does not tell them.
        source: What `opened` was chosen from, where the models are that tell names.

    Returns:
        The checkpoint, and optimizers that keep their numbers, with the reason.

    Raises:
        ArgumentError: `bad_argument`: the names are no names, or not as many as the numbers.
        UnsupportedValueError: an optimizer of ours has state that the form cannot hold.
    """
    given = _given(names)
    notes: list[Finding] = []
    tree = opened.tree
    if form != "numbered":
        models = list(find_models(tree))
        if source is not opened:
            models += find_models(source.tree)
        tree = _Naming(tree, given, models, notes).run()
    if form == "listed":
        tree = mapped_optimizers(
            tree, lambda one, path: listed(one, path) if is_named(one) else None
        )
    if form == "numbered":
        tree = mapped_optimizers(
            tree, lambda one, path: numbered(one, path) if is_named(one) else None
        )
    if tree is opened.tree:
        return opened, tuple(notes)
    settled = Settled(tree, list(opened.findings), opened.attributes)
    return Foreign(opened.kind, opened.name, settled, metadata=opened.metadata), tuple(notes)


@dataclass(frozen=True, slots=True)
class _Given:
    """Names that the caller gave.

    Attributes:
        one: For the only numbered optimizer.
        by_name: By display name of the optimizer.
        models: Of another checkpoint.
    """

    one: tuple[str, ...] | None = None
    by_name: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: tuple[ModelSection, ...] = ()


class _Naming:
    def __init__(
        self, tree: Any, given: _Given, models: Sequence[ModelSection], notes: list[Finding]
    ) -> None:
        self.tree = tree
        self.given = given
        self.notes = notes
        self.found = {one.path: one for one in find_optimizers(tree)}
        self.models = [*models, *given.models]

    def run(self) -> Any:
        places = {_display(one.path) for one in self.found.values() if one.parameters}
        unknown = set(self.given.by_name) - places
        if self.given.one is not None and len(places) != 1 and unknown == set(self.given.by_name):
            _bad(
                f"names are given for one optimizer, and {len(places)} have numbers",
                "give a dict of lists, by the names of the optimizers",
            )
        if unknown and self.given.one is None and not self.given.models:
            _bad(f"no numbered optimizer is called {shorten(min(unknown))}")
        return mapped_optimizers(self.tree, self.changed)

    def changed(self, tree: Any, path: Path) -> Any | None:
        if has_lists(tree, str):
            return named(tree, named_order(tree))
        if is_flat(tree):
            return flat_to_named(tree)
        optimizer = self.found.get(path)
        if optimizer is None or not has_lists(tree, int):
            return None
        names, reason = self.names_of(optimizer)
        result = None if names is None else named(tree, names)
        if result is None:
            reason = reason or "it keeps no dict for each parameter"
            self.notes.append(Finding(path, "the numbers of an optimizer", reason, lost=False))
            return tree
        return result

    def names_of(self, optimizer: NumberedOptimizer) -> tuple[Sequence[str] | None, str]:
        given = self.given.by_name.get(_display(optimizer.path), self.given.one)
        if given is not None:
            if len(given) != len(optimizer.parameters):
                _bad(
                    f"{_display(optimizer.path) or 'the optimizer'} has "
                    f"{len(optimizer.parameters)} parameters, and {len(given)} names are given"
                )
            return given, ""
        kept = kept_names(optimizer)
        if kept is not None:
            return kept, ""
        found, reason = names_in(optimizer, self.models)
        return found, "" if found is not None else f"{reason}; give their names"


def _display(path: Path) -> str:
    return emit_name(path, encoded_key)


# What the caller gives


def _given(names: Names | None) -> _Given:
    if names is None:
        return _Given()
    if isinstance(names, (str, os.PathLike)):
        return _given_file(os.fspath(names))
    return _given_value(names, "names")


def _given_value(names: Any, what: str) -> _Given:
    if isinstance(names, Mapping):
        return _Given(by_name={str(key): _checked(one, what) for key, one in names.items()})
    return _Given(one=_checked(names, what))


def _checked(names: Any, what: str) -> tuple[str, ...]:
    if not isinstance(names, (list, tuple)) or any(type(name) is not str for name in names):
        _bad(f"{what} is no list of names: {shorten(names)}")
    if len(set(names)) != len(names):
        _bad(f"{what} has a name twice")
    return tuple(names)


def _given_file(path: str) -> _Given:
    """Read names from a JSON file, or from another checkpoint."""
    if path.endswith(".json"):
        parent, name = os.path.split(os.path.abspath(path))
        folder = Folder(parent)
        try:
            source = folder.file(name)
            data = read_bytes(source, 0, min(source.nbytes, JSON_NBYTES_MAX))
        finally:
            folder.close()
        try:
            return _given_value(json.loads(data), path)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ArgumentError):
                raise
            _bad(f"{path} is no JSON")
    with open_any(path, unknown="drop") as other:
        return _of_checkpoint(other)


def _of_checkpoint(other: Foreign) -> _Given:
    """Take the order of named optimizers, by where they lie, and the models in it."""
    orders: dict[str, tuple[str, ...]] = {}

    def note(tree: Any, path: Path) -> Any | None:
        if is_named(tree):
            orders[_display(path)] = tuple(
                name for group in tree["param_groups"].values() for name in group["params"]
            )
        elif has_lists(tree, str):
            orders[_display(path)] = tuple(named_order(tree))
        else:
            return None
        return tree

    mapped_optimizers(other.tree, note)
    models = () if other.checkpoint is not None else tuple(find_models(other.tree))
    if not orders and not models:
        raise ConvertError(
            f"{other.name} has no names of parameters in the order of a model",
            code="unknown_kind",
            hint="give a checkpoint with a model's state dict, or a JSON list",
            where=other.name,
        )
    only = next(iter(orders.values())) if len(orders) == 1 else None
    return _Given(only, orders, models)


def _bad(message: str, hint: str | None = None) -> NoReturn:
    raise ArgumentError(message, code="bad_argument", hint=hint)
