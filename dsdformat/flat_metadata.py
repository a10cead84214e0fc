"""What fairscale's `local_metadata_dict` says of one rank's shards: parsed, and nothing believed.

Both forms that fairscale has written are read: `params` by their backing parameter, and the older
`param_names`, of one flat parameter or of parameters that are not flat. The dicts come from files
of others, so that each field is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dsdformat.errors import ArgumentError, shorten
from dsdformat.flat_layout import FlatLayout

__all__ = ["Instance", "Metadata", "Part", "clean_path", "parse_metadata"]

# What fairscale's wrappers call the module inside.
_STEPS = {"_fsdp_wrapped_module", "_fpw_module"}
_OLD_FLAT = ("flat_param_0", "flat_param")


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter that was sharded, and what it holds.

    Attributes:
        keys: What it may be called in the weights, with its path.
        layout: Names (without the path) and shapes of what it holds.
        padding: How many elements at the end of this rank's shard mean nothing.
    """

    keys: tuple[str, ...]
    layout: FlatLayout
    padding: int


@dataclass(frozen=True, slots=True)
class Instance:
    """One FSDP wrapper.

    Attributes:
        path: Where it is in the model.
        parts: Its parameters.
        shared: Pairs of paths of tied parameters, relative to `path`, as they are written.
        is_alone: Whether each rank has parameters of its own here, as an expert, which are not
            sharded.
    """

    path: str
    parts: tuple[Part, ...]
    shared: tuple[tuple[str, str], ...]
    is_alone: bool

    def full(self, name: str) -> str:
        """Return the name in the whole model of a name in the wrapper."""
        return f"{self.path}.{name}" if self.path else name


@dataclass(frozen=True, slots=True)
class Metadata:
    """What one rank says."""

    instances: tuple[Instance, ...]
    buffers: tuple[str, ...]


def parse_metadata(value: Any, where: str) -> Metadata:
    """Parse one rank's metadata.

    Args:
        value: Need not be trusted.
        where: What messages call it.

    Raises:
        ArgumentError: `bad_argument`, with the place of what is wrong.
    """
    top = _mapping(value, where)
    instances = _list(_get(top, "param_metadata", where), f"{where}.param_metadata")
    buffers = _list(_get(top, "buffer_names", where), f"{where}.buffer_names")
    return Metadata(
        tuple(
            _instance(one, f"{where}.param_metadata[{index}]")
            for index, one in enumerate(instances)
        ),
        tuple(
            clean_path(_text(name, f"{where}.buffer_names[{index}]"))
            for index, name in enumerate(buffers)
        ),
    )


def clean_path(path: str) -> str:
    """Return a path without the names of fairscale's wrappers."""
    return ".".join(step for step in path.split(".") if step not in _STEPS)


def _instance(value: Any, where: str) -> Instance:
    fields = _mapping(value, where)
    path = clean_path(_text(_get(fields, "fsdp_path", where), f"{where}.fsdp_path"))
    alone = fields.get("no_broadcast_optim_state", False)
    if type(alone) is not bool:
        _refuse(f"{where}.no_broadcast_optim_state", "true or false", alone)
    if "params" in fields:
        params = _mapping(fields["params"], f"{where}.params")
        parts = [
            _part(path, _text(key, f"{where}.params"), one, f"{where}.params[{shorten(key)}]")
            for key, one in params.items()
        ]
    else:
        parts = _old_parts(path, fields, where)
    shared = _list(fields.get("shared_param_info", ()), f"{where}.shared_param_info")
    pairs = [
        _pair(pair, f"{where}.shared_param_info[{index}]") for index, pair in enumerate(shared)
    ]
    return Instance(path, tuple(parts), tuple(pairs), alone)


def _part(path: str, key: str, value: Any, where: str) -> Part:
    fields = _mapping(value, where)
    key = clean_path(key)
    names, shapes, numels = (
        _list(_get(fields, name, where), f"{where}.{name}")
        for name in ("names", "shapes", "numels")
    )
    padding = _get(fields, "padding", where)
    return _made(path, (key,), (names, shapes, numels), padding, where)


def _old_parts(path: str, fields: Mapping[Any, Any], where: str) -> list[Part]:
    names, shapes, numels, paddings = (
        _list(_get(fields, key, where), f"{where}.{key}")
        for key in ("param_names", "param_shapes", "param_numels", "num_padded")
    )
    is_flat = _get(fields, "is_flat", where)
    if type(is_flat) is not bool:
        _refuse(f"{where}.is_flat", "true or false", is_flat)
    if not names:
        return []
    wanted = 1 if is_flat else len(names)
    if len(paddings) != wanted or not len(names) == len(shapes) == len(numels):
        _refuse(where, "lists of the same length", [names, shapes, numels, paddings])
    if is_flat:
        return [_made(path, _OLD_FLAT, (names, shapes, numels), paddings[0], where)]
    return [
        _made(path, (clean_path(_text(name, where)),), ([name], [shape], [numel]), padding, where)
        for name, shape, numel, padding in zip(names, shapes, numels, paddings, strict=True)
    ]


def _made(
    path: str,
    keys: tuple[str, ...],
    lists: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
    padding: Any,
    where: str,
) -> Part:
    names, shapes, numels = lists
    if not _is_count(padding):
        _refuse(f"{where}.padding", "a number that is not negative", padding)
    value = {
        "name": keys[0],
        "names": [clean_path(_text(name, f"{where}.names")) for name in names],
        "shapes": [list(_list(shape, f"{where}.shapes")) for shape in shapes],
        "numels": list(numels),
        "aliases": {},
    }
    try:
        layout = FlatLayout.of_value(value)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error.message}", code=error.code) from None
    return Part(tuple(f"{path}.{key}" if path else key for key in keys), layout, padding)


def _pair(value: Any, where: str) -> tuple[str, str]:
    pair = _list(value, where)
    if len(pair) != 2:
        _refuse(where, "two names", value)
    return clean_path(_text(pair[0], where)), clean_path(_text(pair[1], where))


def _get(fields: Mapping[Any, Any], key: str, where: str) -> Any:
    if key not in fields:
        _refuse(where, f"something with {key!r}", list(fields))
    return fields[key]


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else _refuse(where, "a mapping", value)


def _list(value: Any, where: str) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else _refuse(where, "a list", value)


def _text(value: Any, where: str) -> str:
    return value if type(value) is str else _refuse(where, "a string", value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _refuse(where: str, wanted: str, got: Any) -> NoReturn:
    raise ArgumentError(f"{where} is not {wanted}: {shorten(got)}", code="bad_argument")
