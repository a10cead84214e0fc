"""What an optimizer of fairscale's flat parameters keeps, to the parameters in them.

Each rank has the optimizer's `state_dict`: under the number of a flat parameter, tensors as long
as the rank's shard of it, padding included, and what has no elements, as a step. The numbers count
the flat parameters in the order of the weights, which is the order of `parameters()`. What is not
of this form, or leaves a choice, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsdformat.convert.foreign import AnyTensor, is_mapping
from dsdformat.convert.optimizer_forms import GROUPS, PARAMS, STATE, has_lists
from dsdformat.convert.tensor import ForeignTensor
from dsdformat.errors import shorten
from dsdformat.flat_joining import Pieces, differ
from dsdformat.flat_layout import FlatLayout
from dsdformat.flat_metadata import clean_path, parse_metadata

__all__ = ["has_numbers_of_flat", "join_optimizers"]

Same = Callable[[Any, Any], bool]


@dataclass(frozen=True, slots=True)
class _Flat:
    """A flat parameter, in the order of the weights.

    Attributes:
        key: In the weights.
        names: Of the parameters in it, in the whole model.
        layout: Of those.
        shapes: Of each rank's shard: one dim, padding included; as it is if there is one rank.
        paddings: Of those, how many elements at the end of each mean nothing.
    """

    key: str
    names: tuple[str, ...]
    layout: FlatLayout
    shapes: tuple[tuple[int, ...], ...]
    paddings: tuple[int, ...]


def has_numbers_of_flat(value: Any) -> bool:
    """Whether a value is an optimizer's state by number."""
    return is_mapping(value) and has_lists(value, int)


def join_optimizers(
    optimizers: Sequence[Mapping[Any, Any]],
    weights: Sequence[Mapping[str, Any]],
    metadata: Sequence[Any],
    pieces: Pieces,
    same: Same,
) -> dict[Any, Any]:
    """Return the state of the optimizer by names of parameters, with groups as lists of those.

    Args:
        optimizers, weights, metadata: Of each rank; the last two have been joined before.
        pieces: What joins tensors.
        same: Whether two values of two files are the same.

    Raises:
        MismatchError: `state_mismatch`: it is not the state of these flat parameters, or what it
            keeps is not for each element.
    """
    first = optimizers[0]
    flats = _flats(weights, metadata)
    order = [number for group in first[GROUPS] for number in group[PARAMS]]
    if len(first[GROUPS]) > 1:
        differ(
            "the optimizer has several groups, and nothing says which flat parameter is in which"
        )
    if order != list(range(len(flats))):
        differ(f"the optimizer has {len(order)} parameters, the weights {len(flats)} flat ones")
    for rank, other in enumerate(optimizers):
        if not same(first[GROUPS], other[GROUPS]) or set(other[STATE]) != set(first[STATE]):
            differ(
                f"the optimizer of rank {rank} has other groups, or other parameters, than rank 0"
            )
    state: dict[str, dict[Any, Any]] = {}
    for number, flat in enumerate(flats):
        if number in first[STATE]:
            kept = [one[STATE][number] for one in optimizers]
            state.update(zip(flat.names, _split(flat, kept, pieces, same), strict=True))
    names = [name for flat in flats for name in flat.names]
    rest = {key: value for key, value in first.items() if key not in (STATE, GROUPS)}
    for key, value in rest.items():
        if not all(same(value, one.get(key)) for one in optimizers):
            differ(f"{shorten(key)} of the optimizer differs on the ranks")
    return {STATE: state, GROUPS: [{**first[GROUPS][0], PARAMS: names}], **rest}


def _flats(weights: Sequence[Mapping[str, Any]], metadata: Sequence[Any]) -> list[_Flat]:
    parsed = [parse_metadata(one, f"rank {rank}") for rank, one in enumerate(metadata)]
    cleaned = [{clean_path(key): value for key, value in one.items()} for one in weights]
    found: dict[str, _Flat] = {}
    for index, instance in enumerate(parsed[0].instances):
        for number, part in enumerate(instance.parts):
            key = next((key for key in part.keys if key in cleaned[0]), None)
            if key is None:
                continue
            if instance.is_alone and len(weights) > 1:
                differ(f"{shorten(key)} has other parameters on each rank")
            found[key] = _Flat(
                key,
                tuple(map(instance.full, part.layout.names)),
                part.layout,
                tuple(tuple(one[key].shape) for one in cleaned),
                tuple(one.instances[index].parts[number].padding for one in parsed),
            )
    return [found[key] for key in cleaned[0] if key in found]


def _split(flat: _Flat, kept: Sequence[Any], pieces: Pieces, same: Same) -> list[dict[Any, Any]]:
    """Return what is kept for each of the parameters in a flat one."""
    if any(not is_mapping(one) or set(one) != set(kept[0]) for one in kept):
        differ(f"the optimizer keeps other things for {shorten(flat.key)} on some ranks")
    result: list[dict[Any, Any]] = [{} for _ in flat.names]
    for key in kept[0]:
        values = [one[key] for one in kept]
        what = f"{shorten(key)} of {shorten(flat.key)}"
        if isinstance(values[0], AnyTensor) and values[0].shape:
            each = _cut(flat, values, what, pieces)
        elif all(same(values[0], one) for one in values):
            each = [_alone(values[0]) for _ in flat.names]
        else:
            differ(f"{what} differs on the ranks")
        for one, value in zip(result, each, strict=True):
            one[key] = value
    return result


def _cut(flat: _Flat, values: Sequence[Any], what: str, pieces: Pieces) -> list[Any]:
    shards = []
    for rank, value in enumerate(values):
        shard, shape = pieces.flat(value, what, rank), flat.shapes[rank]
        if tuple(value.shape) != shape:
            differ(
                f"{what} has shape {list(value.shape)} on rank {rank}, and the flat parameter "
                f"{list(shape)}: it is not kept for each element"
            )
        shards.append(pieces.head(shard, pieces.numel(shard) - flat.paddings[rank]))
    if len({pieces.dtype(shard) for shard in shards}) > 1:
        differ(f"{what} has different dtypes on the ranks")
    return pieces.cut(shards, flat.layout)


def _alone(value: Any) -> Any:
    """Return a tensor that is tied to no other; what is no tensor as it is."""
    if not isinstance(value, ForeignTensor):
        return value
    return ForeignTensor(value.dtype, value.shape, list(value.parts), value.attributes)
