"""State dicts by canonical names: a drop-in for `torch.distributed.checkpoint.state_dict`.

The same names and signatures; one import line changes. Nothing here takes a step, makes gradients,
changes the dicts it is given, or names a parameter by its wrappers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from dsdformat.errors import ArgumentError
from dsdformat.garbage import young_gc
from dsdformat.torch.fqn import unwrapped
from dsdformat.torch.fsdp2 import shown_as_shards
from dsdformat.torch.introspect import PATCHED
from dsdformat.torch.live_model import LiveModel
from dsdformat.torch.model_state import IncompatibleKeys, get_model, plan_model
from dsdformat.torch.optim_state import get_optimizers, plan_optimizers
from dsdformat.torch.slots import initial_state

__all__ = [
    "DictValueType",
    "FQNS_T",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "patch_model_state_dict",
    "patch_optimizer_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

FQNS_T = set[str]
PrimitiveType = torch.Tensor | int | float | str
ValueType = PrimitiveType | list[Any] | tuple[Any, ...] | dict[str, Any]
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
OptimizerStateType = dict[str, DictValueType | ListDictValueType]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclass
class StateDictOptions:
    """What is in a state dict, and how it is set.

    Attributes:
        full_state_dict: Whether tensors are whole; else each rank has its shards.
        cpu_offload: Whether tensors are copied to host memory. Of whole ones, only rank 0 of the
            group gets any; the dicts of others are empty.
        ignore_frozen_params: Whether parameters that need no gradient are left out.
        keep_submodule_prefixes: With `submodules`, whether names keep the submodule's; deprecated.
        strict: Whether names that are missing or unexpected are errors when a state is set.
        broadcast_from_rank0: Whether rank 0 of the group has the whole state, and gives each rank
            its parts. Needs `full_state_dict`.
        flatten_optimizer_state_dict: Whether an optimizer's state is one flat dict of dotted names.
        dsd_fqn_modifiers: Kept for compatibility: names are those of the model's own `state_dict`.
        process_group: The ranks that hold the state together, the first of which gets a state on
            the host, and gives the state that is broadcast. If None, those of the meshes of the
            model's DTensors, of its FSDP1 modules, or of DDP; all ranks for any other model.
        timeout: How long a rank waits for the others to make the same call, before it raises an
            error that names those that did not; if None, as long as the group waits.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"
    process_group: Any = None
    timeout: timedelta | None = None


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, ValueType]:
    """Return the state of a model under canonical names.

    Args:
        model: Plain, or wrapped by DDP, FSDP1, FSDP2, tensor parallelism, `torch.compile` and
            activation checkpointing, in any order.
        submodules: Deprecated: return the parts of these modules alone.
        options: See `StateDictOptions`.

    Returns:
        Tensors and extra state; tensors are the model's own, unless `cpu_offload`.

    Ranks: collective over the group with `full_state_dict`, and with FSDP1; else local.
    Memory: none; with `full_state_dict` the result and one bucket of 256 MiB.
    """
    options = _checked(options)
    with young_gc(), shown_as_shards([model]):
        live = _live(model, options)
        entries = get_model(live, full=options.full_state_dict, offload=options.cpu_offload)
    if submodules:
        entries = _only(entries, model, submodules, keep=options.keep_submodule_prefixes)
    if options.ignore_frozen_params:
        for name in live.frozen():
            entries.pop(name, None)
    return entries


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> OptimizerStateType:
    """Return the state of optimizers, by canonical names of the parameters.

    Nothing is stepped. For an optimizer that has no state at all, entries have zeros in the form
    of what the first step will make, and `step` 0, so that programs can load into them; setting
    such an entry leaves its parameter without state. A parameter that has none in an optimizer
    that has some has an empty entry.

    Args:
        model: See `get_model_state_dict`.
        optimizers: One or several that work on the model.
        submodules: Deprecated.
        options: See `StateDictOptions`.

    Returns:
        `state` and `param_groups`, a list; or a flat dict of dotted names.

    Raises:
        UnsupportedValueError: `optimizer_without_module`: a parameter is not of the model.
        MismatchError: `state_conflict`: two optimizers hold one parameter.

    Ranks: collective over the group with `full_state_dict`, and with FSDP1; else local.
    Memory: as `get_model_state_dict`.
    """
    options = _checked(options)
    _warn_of(submodules)
    with young_gc(), shown_as_shards([model]):
        return get_optimizers(
            _live(model, options),
            _as_tuple(optimizers),
            full=options.full_state_dict,
            offload=options.cpu_offload,
            flat=options.flatten_optimizer_state_dict,
        )


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """Return the states of a model and of its optimizers; see the two functions for one each."""
    model_state = get_model_state_dict(model, submodules=submodules, options=options)
    optimizers = _as_tuple(optimizers)
    if not optimizers:
        return model_state, {}
    return model_state, get_optimizer_state_dict(model, optimizers, options=options)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, ValueType] | Mapping[nn.Module, Mapping[str, ValueType]],
    *,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Set the state of a model from one under canonical names.

    Args:
        model: See `get_model_state_dict`. Parameters stay the objects that they are; those on the
            meta device get memory.
        model_state_dict: Tensors, whole or sharded. It is not changed.
        options: See `StateDictOptions`.

    Returns:
        `missing_keys` and `unexpected_keys`.

    Raises:
        StateDictMismatchError: a RuntimeError: names with `strict`, or shapes; nothing was changed.

    Ranks: collective over the group with `broadcast_from_rank0`, and with FSDP1; else local.
    Memory: none; with `broadcast_from_rank0` one bucket of 256 MiB on rank 0, its part on others.
    """
    options = _checked(options)
    given = _by_name(model, model_state_dict)
    with young_gc():
        return _plan_model(model, given, options)()


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Set the state of optimizers from one by canonical names, nested or flat.

    Args:
        model: See `get_model_state_dict`.
        optimizers: One or several that work on the model; each takes what is of its parameters.
        optim_state_dict: Tensors, whole or sharded. It is not changed.
        options: See `StateDictOptions`.

    Raises:
        StateDictMismatchError: a RuntimeError; nothing was changed.

    Ranks: collective over the group with `broadcast_from_rank0`, and with FSDP1; else local.
    Memory: the state, where there is none yet.
    """
    options = _checked(options)
    with young_gc():
        _plan_optimizers(model, optimizers, optim_state_dict, options)()


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, ValueType],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Set the states of a model and of its optimizers; see the two functions for one each."""
    options = _checked(options)
    given = _by_name(model, model_state_dict)
    with young_gc():
        set_model = _plan_model(model, given, options)
        _plan_optimizers(model, optimizers, optim_state_dict, options)()
        return set_model()


def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make `model.state_dict()` and `model.load_state_dict(…)` those of this module."""

    def state_dict() -> dict[str, ValueType]:
        return get_model_state_dict(model, options=options)

    def load_state_dict(state_dict: Mapping[str, ValueType]) -> None:
        set_model_state_dict(model, state_dict, options=options)

    _patch(model, state_dict, load_state_dict)


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Make the `state_dict()` and `load_state_dict(…)` of optimizers those of all together."""
    parts = _as_tuple(optimizers)

    def state_dict() -> OptimizerStateType:
        return get_optimizer_state_dict(model, parts, options=options)

    def load_state_dict(state_dict: Mapping[str, Any]) -> None:
        set_optimizer_state_dict(model, parts, state_dict, options=options)

    for optimizer in parts:
        _patch(optimizer, state_dict, load_state_dict)


def _init_optim_state(optim: torch.optim.Optimizer) -> None:
    """Give an optimizer without state the entries of its first step, as zeros; take no step."""
    if not optim.state:
        optim.state.update(initial_state(optim))


# The names that torch has for these.
_patch_model_state_dict = patch_model_state_dict
_patch_optimizer_state_dict = patch_optimizer_state_dict


def _patch(owner: Any, state_dict: Callable[..., Any], load_state_dict: Callable[..., Any]) -> None:
    for name, function in (("state_dict", state_dict), ("load_state_dict", load_state_dict)):
        setattr(function, PATCHED, True)
        setattr(owner, name, function)


def _checked(options: StateDictOptions | None) -> StateDictOptions:
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ArgumentError(
            "full_state_dict must be True when broadcast_from_rank0 is True.", code="bad_argument"
        )
    return options


def _plan_model(
    model: nn.Module, given: Mapping[str, Any], options: StateDictOptions
) -> Callable[[], IncompatibleKeys]:
    with shown_as_shards([model]):
        return plan_model(
            _live(model, options),
            given,
            full=options.full_state_dict,
            strict=options.strict,
            from_first=options.broadcast_from_rank0,
        )


def _plan_optimizers(
    model: nn.Module,
    optimizers: Optimizers,
    given: Mapping[str, Any] | None,
    options: StateDictOptions,
) -> Callable[[], None]:
    with shown_as_shards([model]):
        return plan_optimizers(
            _live(model, options),
            _as_tuple(optimizers),
            given or {},
            full=options.full_state_dict,
            strict=options.strict,
            from_first=options.broadcast_from_rank0,
        )


def _live(model: nn.Module, options: StateDictOptions) -> LiveModel:
    return LiveModel(model, options.process_group, options.timeout)


def _as_tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    one = isinstance(optimizers, torch.optim.Optimizer)
    return (optimizers,) if one else tuple(optimizers)  # type: ignore[arg-type, return-value]


def _warn_of(submodules: set[nn.Module] | None) -> None:
    if submodules:
        warnings.warn(
            "Getting submodules only model/optim state_dict is deprecated: pick names out of the "
            "whole state dict instead",
            FutureWarning,
            stacklevel=3,
        )


def _only(
    entries: dict[str, Any], model: nn.Module, submodules: set[nn.Module], *, keep: bool
) -> dict[str, Any]:
    _warn_of(submodules)
    result = {}
    for prefix in _prefixes(model, submodules):
        for name, value in entries.items():
            if name.startswith(prefix):
                result[name if keep else name[len(prefix) :]] = value
    return result


def _prefixes(model: nn.Module, wanted: set[nn.Module]) -> list[str]:
    inner = {unwrapped(module) for module in wanted}
    return [prefix for module, prefix in _walk(unwrapped(model), "") if module in inner]


def _walk(module: nn.Module, prefix: str) -> Iterable[tuple[nn.Module, str]]:
    yield module, prefix
    for name, child in module.named_children():
        yield from _walk(unwrapped(child), f"{prefix}{name}.")


def _by_name(model: nn.Module, given: Mapping[Any, Any] | None) -> dict[str, Any]:
    """Return a flat dict, also for one of submodules, which is deprecated."""
    given = given or {}
    if not any(isinstance(key, nn.Module) for key in given):
        return dict(given)
    warnings.warn(
        "Passing model_state_dict as a dict of modules is deprecated: use names of the whole model",
        FutureWarning,
        stacklevel=3,
    )
    return {
        f"{prefix}{name}": value
        for module, values in given.items()
        for prefix in _prefixes(model, {module})
        for name, value in values.items()
    }
