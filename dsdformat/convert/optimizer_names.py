"""Which parameter of a model each number of an optimizer's state is.

An optimizer numbers its parameters in the order of its groups. Their names are what torch kept
beside the numbers, or what the caller gives; else they follow from a model in the same file, whose
state dict has its parameters in the order of `parameters()`: where the shapes leave exactly one
way to lay the groups over it in this order, that is the answer, and where they leave several, there
is none. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsdformat.convert.foreign import AnyTensor, is_mapping
from dsdformat.convert.optimizers import NumberedOptimizer, NumberedParameter
from dsdformat.errors import printable
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key

__all__ = ["ModelSection", "find_models", "kept_names", "names_in"]

Path = tuple[Any, ...]

_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_EXTRA_STATE = "_extra_state"
_WORK_MAX = 5_000_000  # numbers in all positions of the search; what needs more has several ways
# What optimizers of torch keep in the shape of the parameter.
_LIKE_PARAMETER = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
    *("grad_avg", "acc_delta", "sum", "prev", "step_size", "ax", "mu_product_buffer"),
}


@dataclass(frozen=True, slots=True)
class ModelSection:
    """A state dict of a module.

    Attributes:
        path: Where it lies.
        shapes: Shapes of what may be its parameters, by name, in its order.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]


def find_models(tree: Any, path: Path = ()) -> Iterator[ModelSection]:
    """Yield the state dicts in a tree: dicts of nothing but tensors by names."""
    if not is_mapping(tree):
        items: Any = enumerate(tree) if type(tree) in (list, tuple) else ()
        for index, item in items:
            yield from find_models(item, (*path, index))
        return
    if isinstance(tree.get("state"), dict) and "param_groups" in tree:
        return
    tensors = {key: item for key, item in tree.items() if not _is_extra(key)}
    if tensors and all(map(_is_named_tensor, tensors.items())):
        yield ModelSection(path, _parameters(tensors))
        return
    for key, item in tree.items():
        yield from find_models(item, (*path, key))


def kept_names(optimizer: NumberedOptimizer) -> list[str] | None:
    """Return the names that torch kept beside the numbers, if it kept all."""
    names = [one.name for one in optimizer.parameters if one.name is not None]
    whole = len(names) == len(optimizer.parameters) == len(set(names))
    return names if whole else None


def names_in(
    optimizer: NumberedOptimizer, models: Sequence[ModelSection]
) -> tuple[list[str] | None, str]:
    """Return the names of an optimizer's parameters in one of these models.

    Returns:
        The names, and where they are from; or None, and why there are none.
    """
    if not models:
        return None, "there is no model in the file"
    found: dict[tuple[str, ...], str] = {}
    several = ""
    for model in models:
        ways = _ways(optimizer, model)
        place = printable(emit_name(model.path, encoded_key)) or "the root"
        if ways is None:
            several = several or f"there are several ways to lay it over {place}"
        elif ways:
            found.setdefault(tuple(ways), place)
    if len(found) == 1:
        names, place = next(iter(found.items()))
        return list(names), place
    if found:
        return None, f"it fits {' and '.join(found.values())}"
    return None, several or "it fits no model in the file"


def _ways(optimizer: NumberedOptimizer, model: ModelSection) -> list[str] | None:
    """Return the only order-preserving assignment; [] if there is none, None if there are more."""
    groups: dict[int, list[NumberedParameter]] = {}
    for parameter in optimizer.parameters:
        groups.setdefault(parameter.group, []).append(parameter)
    queues = list(groups.values())
    entries = list(model.shapes.items())
    spare = len(entries) - len(optimizer.parameters)
    if spare < 0 or not queues:
        return []
    # Positions in the groups -> how many ways lead there (2 for more), and the steps of one.
    front: dict[tuple[int, ...], tuple[int, Any]] = {(0,) * len(queues): (1, None)}
    work = 0
    for place, (_, shape) in enumerate(entries):
        work += len(front) * len(queues) ** 2
        if work > _WORK_MAX:
            return None
        after: dict[tuple[int, ...], tuple[int, Any]] = {}
        for at, (count, steps) in front.items():
            if place - sum(at) < spare:
                _arrive(after, at, count, steps)
            for group, queue in enumerate(queues):
                if at[group] < len(queue) and _fits(queue[at[group]], shape):
                    there = (*at[:group], at[group] + 1, *at[group + 1 :])
                    _arrive(after, there, count, (place, group, at[group], steps))
        front = after
    count, steps = front.get(tuple(map(len, queues)), (0, None))
    if count != 1:
        return None if count else []
    return _names(queues, entries, steps)


def _arrive(front: dict[tuple[int, ...], tuple[int, Any]], at: Any, count: int, steps: Any) -> None:
    before = front.get(at)
    front[at] = (count, steps) if before is None else (2, steps)


def _names(
    queues: Sequence[Sequence[NumberedParameter]], entries: Sequence[tuple[str, Any]], steps: Any
) -> list[str]:
    names = [[""] * len(queue) for queue in queues]
    while steps is not None:
        place, group, index, steps = steps
        names[group][index] = entries[place][0]
    return [name for queue in names for name in queue]


def _fits(parameter: NumberedParameter, shape: tuple[int, ...]) -> bool:
    """Whether what is kept for a parameter is of this shape, as far as that is known."""
    known = [one for name, one in parameter.shapes.items() if name in _LIKE_PARAMETER]
    return all(one == shape for one in known)


def _is_extra(key: Any) -> bool:
    return type(key) is str and key.rpartition(".")[2] == _EXTRA_STATE


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    key, value = item
    return type(key) is str and isinstance(value, AnyTensor)


def _parameters(tensors: Mapping[str, AnyTensor]) -> dict[str, tuple[int, ...]]:
    """Return what may be parameters: no further names of tied ones, no buffers that are known."""
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        siblings = (f"{stem}.{one}" if stem else one for one in _NORM_BUFFERS)
        norm = last in _NORM_BUFFERS and all(one in tensors for one in siblings)
        if norm or not _is_real(tensor.dtype) or (tensor.nbytes and tensor.identity in seen):
            continue
        seen.add(tensor.identity)
        shapes[name] = tuple(tensor.shape)
    return shapes


def _is_real(dtype: str) -> bool:
    return "float" in dtype or dtype.startswith("complex")
