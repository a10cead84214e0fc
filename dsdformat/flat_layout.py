"""The layout of a flat parameter: which parameters lie in it, and where. Plain values alone.

A flat parameter has one dim. The parameters in it lie one after another, each in row-major order,
without padding; a tied parameter lies there once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dsdformat.errors import ArgumentError, MismatchError, shorten
from dsdformat.limits import INT63_MAX, NDIM_MAX

__all__ = ["FlatLayout"]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Which parameters a flat parameter holds.

    Attributes:
        name: What the flat parameter itself is called.
        names: FQNs of the parameters in it, in the order in which they lie there.
        shapes: Their shapes.
        aliases: Further names of tied parameters, each with the name in `names` that it means.
        numels: How many elements each parameter has.
    """

    name: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    numels: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes) or not self.names:
            _refuse(f"{shorten(self.name)} has {len(self.names)} names, {len(self.shapes)} shapes")
        for shape in self.shapes:
            if any(type(size) is not int or size < 0 for size in shape):
                _refuse(f"{shorten(shape)} is not a shape")
            if len(shape) > NDIM_MAX or math.prod(size or 1 for size in shape) > INT63_MAX:
                _refuse(f"{shorten(shape)} is too large for a tensor")
        every = [self.name, *self.names, *(alias for alias, _ in self.aliases)]
        if any(type(name) is not str for name in [*every, *(name for _, name in self.aliases)]):
            _refuse(f"names are strings, got {shorten(every)}")
        if len(set(every[1:])) < len(every) - 1:
            _refuse(f"{shorten(self.name)} has a name twice: {shorten(every[1:])}")
        if not {name for _, name in self.aliases} <= set(self.names):
            _refuse(f"{shorten(self.name)} has aliases of others: {shorten(self.aliases)}")
        object.__setattr__(self, "numels", tuple(math.prod(shape) for shape in self.shapes))

    @property
    def numel(self) -> int:
        """How many elements the flat parameter has."""
        return sum(self.numels)

    def all_names(self) -> dict[str, list[str]]:
        """Map each name to itself and its aliases."""
        result = {name: [name] for name in self.names}
        for alias, name in self.aliases:
            result[name].append(alias)
        return result

    def cut(self, flat: Any) -> list[Any]:
        """Return the views of a flat tensor of torch that are the parameters in it.

        Raises:
            MismatchError: `state_mismatch`: it has another shape than this layout.
        """
        if flat.shape != (self.numel,):
            raise MismatchError(
                f"{self.name} has the shape {list(flat.shape)}, and {[self.numel]} is wanted for "
                f"its {len(self.names)} parameters",
                code="state_mismatch",
            )
        # One split, not many narrows: its gradient is one concatenation.
        parts = flat.split(list(self.numels))
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def under(self, prefix: str) -> FlatLayout:
        """Return this layout with all names under a prefix, which ends in a dot or is empty."""
        names = [[prefix + name for name in names] for names in self.all_names().values()]
        return self.named(names, prefix + self.name)

    def named(self, names: Sequence[Sequence[str]], name: str | None = None) -> FlatLayout:
        """Return this layout with other names.

        Args:
            names: For each parameter its name, and its aliases.
            name: Of the flat parameter; as it is if None.

        Raises:
            ArgumentError: `bad_argument`: a name is there twice.
        """
        return FlatLayout(
            self.name if name is None else name,
            tuple(one[0] for one in names),
            self.shapes,
            tuple((alias, one[0]) for one in names for alias in one[1:]),
        )

    def to_value(self) -> dict[str, Any]:
        """Return this layout as a plain value: what JSON and the format can hold."""
        return {
            "name": self.name,
            "names": list(self.names),
            "shapes": [list(shape) for shape in self.shapes],
            "numels": list(self.numels),
            "aliases": dict(self.aliases),
        }

    @staticmethod
    def of_value(value: Any) -> FlatLayout:
        """Make a layout of a plain value that need not be trusted.

        Raises:
            ArgumentError: `bad_argument`: it is not what `to_value` gives.
        """
        names, shapes, aliases = (_get(value, key) for key in ("names", "shapes", "aliases"))
        if (
            not isinstance(names, (list, tuple))
            or not isinstance(shapes, (list, tuple))
            or not all(isinstance(shape, (list, tuple)) for shape in shapes)
            or not isinstance(aliases, Mapping)
        ):
            _refuse(f"this is not the value of a layout: {shorten(value)}")
        layout = FlatLayout(
            _get(value, "name"), tuple(names), tuple(map(tuple, shapes)), tuple(aliases.items())
        )
        numels = _get(value, "numels")
        counts = numels if isinstance(numels, (list, tuple)) else ()
        if any(type(count) is not int for count in counts) or tuple(counts) != layout.numels:
            _refuse(f"{shorten(numels)} are not the numbers of elements of {shorten(shapes)}")
        return layout


def _get(value: Any, key: str) -> Any:
    if not isinstance(value, Mapping) or key not in value:
        _refuse(f"the value of a layout has {key!r}, got {shorten(value)}")
    return value[key]


def _refuse(message: str) -> NoReturn:
    raise ArgumentError(message, code="bad_argument")
