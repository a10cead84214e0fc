"""Every private name of torch that this package uses, one function each, with the versions seen.

Checked on torch 2.6.0 and 2.13.0. Nothing here imports a part of torch that is not loaded yet:
an object of a class whose module was never imported cannot exist.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn

__all__ = [
    "FlatParameterInfo",
    "GatheredFsdp2",
    "coo_components",
    "default_store",
    "exact_states",
    "fairscale_flats",
    "find_gathered_fsdp2",
    "find_wrapped",
    "fsdp1_buffer_dtypes",
    "fsdp1_info",
    "fsdp1_mesh",
    "fsdp1_replicas",
    "group_timeout",
    "has_load_hooks",
    "is_lazy",
    "is_replicated",
    "known_seqlens",
    "needs_loader",
    "plain_functions",
    "root_mesh",
    "spec_of_local",
    "swap_content",
    "without_fsdp1_hooks",
]

# Module, class, and the name under which the class registers the module that it wraps.
_WRAPPERS = (
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    ("fairscale.nn.misc.flatten_params_wrapper", "FlattenParamsWrapper", "_fpw_module"),
    ("dsdformat.torch.flatten", "FlattenParams", "_flat_module"),
)


def find_wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the module that a wrapper of torch holds, and the name it has there.

    Wrappers are those that add a name of their own to all names below them: DataParallel, DDP,
    FSDP1, `torch.compile`, activation checkpointing and offloading. None for any other module,
    whatever its attributes are called.
    """
    kind: Any = type(module)
    child = _child_of(kind)
    inner = None if child is None else module._modules.get(child)
    return None if child is None or inner is None else (child, inner)


@functools.lru_cache(maxsize=1024)
def _child_of(kind: type) -> str | None:
    """Return under which name a class of wrappers has its module; None for any other class.

    Asked once for each class: the wrapper that it derives from was loaded before it was made.
    """
    for place, name, child in _WRAPPERS:
        wrapper = getattr(sys.modules.get(place), name, None)
        if wrapper is not None and issubclass(kind, wrapper):
            return child
    return None


def needs_loader(module: nn.Module) -> bool:
    """Whether a module, or one in it, does more when it loads a state dict than copy tensors."""
    return any(_has_loader(one) for one in module.modules())


def _has_loader(module: nn.Module) -> bool:
    kind = type(module)
    own = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    # Normalisation only adds a counter that old state dicts lack.
    known = (
        own and kind._load_from_state_dict is nn.modules.batchnorm._NormBase._load_from_state_dict
    )
    return (
        (own and not known)
        or kind.load_state_dict is not nn.Module.load_state_dict
        or "load_state_dict" in vars(module)
        or bool(getattr(module, "_load_state_dict_pre_hooks", None))
        or bool(getattr(module, "_load_state_dict_post_hooks", None))
    )


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a parameter or buffer of a lazy module has no shape yet."""
    if type(tensor) in (nn.Parameter, torch.Tensor):  # what follows asks a metaclass
        return False
    return isinstance(
        tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
    )


def swap_content(live: torch.Tensor, content: torch.Tensor) -> None:
    """Exchange what two tensor objects hold: memory, device, layout, history.

    `torch.utils.swap_tensors` does so too, but refuses tensors to which there are weak references,
    as the weights of recurrent modules, or views. Objects, classes, attributes and hooks stay.
    """
    hooks = live._backward_hooks, getattr(live, "_post_accumulate_grad_hooks", None)
    torch._C._swap_tensor_impl(live, content)
    if hooks[0]:
        live._backward_hooks = hooks[0]
    if hooks[1]:
        live._post_accumulate_grad_hooks = hooks[1]


@contextmanager
def exact_states() -> Iterator[None]:
    """Let `Optimizer.load_state_dict` take state tensors as they are, in this block.

    It casts them to the dtype and device of their parameter, and knows no way not to.
    """
    kind: Any = torch.optim.Optimizer
    name = "_process_value_according_to_param_policy"
    with _EXACT:
        original = kind.__dict__[name]
        setattr(kind, name, staticmethod(_unchanged))
        try:
            yield
        finally:
            setattr(kind, name, original)


_EXACT = threading.RLock()


def _unchanged(_param: Any, value: Any, *_args: Any, **_options: Any) -> Any:
    return value


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of the user's run when the optimizer loads a state."""
    names: Sequence[str] = (
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    )
    hooks: list[Any] = [getattr(optimizer, name, None) for name in names]
    return any(hooks)


def plain_functions() -> AbstractContextManager[Any]:
    """Return a context in which functions of torch see tensor subclasses as plain tensors."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


def coo_components(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse COO tensor; the public ones want a coalesced one."""
    return tensor._indices(), tensor._values()


def known_seqlens(tensor: Any) -> tuple[int | None, int | None]:
    """Return the least and greatest length of a jagged tensor's rows where they are known."""
    return tensor._maybe_min_seqlen, tensor._maybe_max_seqlen


# FullyShardedDataParallel (FSDP1)


@dataclass(frozen=True)
class FlatParameterInfo:
    """What a flat parameter of FSDP1 says of itself.

    Attributes:
        flat: The parameter.
        shard: This rank's piece of it, with padding, in full precision.
        is_sharded: Whether ranks have pieces of it; else each has all.
        is_whole: Whether it is gathered at the moment.
        owners: For each original parameter, its module and its name there.
        shapes: Of the original parameters; of their local tensors if they are DTensors.
        starts: Where the flat tensor has them.
        strides: Of those that are not row-major, else None.
        specs: For each, what describes a DTensor; None if it is none.
        tied: Further owners: module, name, and the owner that has the same parameter.
        parameters: The original parameters, if the model still has them.
    """

    flat: torch.Tensor
    shard: torch.Tensor
    is_sharded: bool
    is_whole: bool
    owners: tuple[tuple[nn.Module, str], ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    specs: tuple[Any, ...]
    tied: tuple[tuple[nn.Module, str, tuple[nn.Module, str]], ...]
    parameters: tuple[torch.Tensor, ...] | None


def fsdp1_info(module: Any) -> FlatParameterInfo | None:
    """Return the flat parameter of an FSDP1 module; None if it manages none."""
    handle = module._handle
    if handle is None:
        return None
    flat = handle.flat_param
    starts, at = [], 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            starts.append(at)
        at += numel
    shard = getattr(flat, "_local_shard", flat).detach()
    return FlatParameterInfo(
        flat,
        shard,
        bool(handle.uses_sharded_strategy),
        bool(handle.uses_sharded_strategy) and flat.numel() != shard.numel(),
        tuple((info.module, info.param_name) for info in flat._param_infos),
        tuple(tuple(shape) for shape in flat._shapes),
        tuple(starts),
        tuple(
            None if packed else tuple(stride)
            for stride, packed in zip(flat._strides, flat._contiguities, strict=True)
        ),
        tuple(flat._param_extensions),
        tuple(
            (info.module, info.param_name, (info.prim_module, info.prim_param_name))
            for info in flat._shared_param_infos
        ),
        None if flat._params is None else tuple(flat._params),
    )


def fsdp1_replicas(module: Any) -> Any:
    """Return the process group of the ranks that have the same piece; None if there is none."""
    return getattr(module, "_inter_node_pg", None)


def fsdp1_mesh(module: Any) -> Any:
    """Return the device mesh that an FSDP1 module was given, or None."""
    return module._device_mesh


def fsdp1_buffer_dtypes(module: Any) -> dict[str, torch.dtype]:
    """Return the dtypes that buffers had before mixed precision cast them, by FSDP1's names."""
    dtypes: dict[str, torch.dtype] = module._buffer_name_to_orig_dtype
    return dtypes


@contextmanager
def without_fsdp1_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let these modules give and take state dicts as if FSDP1 had no hooks, in this block."""
    names = (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    kept: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in modules:
            for name in names:
                hooks = getattr(module, name)
                kept.append((module, name, hooks))
                others = {key: one for key, one in hooks.items() if not _is_of_fsdp1(one)}
                setattr(module, name, OrderedDict(others))
        yield
    finally:
        for module, name, hooks in kept:
            setattr(module, name, hooks)


def _is_of_fsdp1(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps some
    function = getattr(function, "func", function)
    return getattr(function, "__module__", "") == "torch.distributed.fsdp._state_dict_utils"


@dataclass(frozen=True, slots=True)
class GatheredFsdp2:
    """Parameters that FSDP2 has gathered together, as it knows them.

    Attributes:
        parameters: Modules that show one, its name there, and the shard of it: a DTensor.
        hooks: Modules that reshard all of them before they give a state dict, and the number of
            the hook.
    """

    parameters: tuple[tuple[nn.Module, str, Any], ...]
    hooks: tuple[tuple[nn.Module, int], ...]


def find_gathered_fsdp2(module: Any) -> Iterator[GatheredFsdp2]:
    """Yield what an FSDP2 module has gathered at the moment, without its submodules of FSDP2."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.6 has one
    for group in (state._fsdp_param_group,) if groups is None else groups:
        if group is None or group.is_sharded:
            continue
        shown = []
        for parameter in group.fsdp_params:
            info, shard = parameter._module_info, parameter.sharded_param
            shown.append((info.module, info.param_name, shard))
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            shown.extend((owner, name, shard) for owner, name in shared)
        handles = group._module_to_pre_save_state_dict_hook_handle.items()
        yield GatheredFsdp2(tuple(shown), tuple((owner, one.id) for owner, one in handles))


def root_mesh(mesh: Any) -> Any:
    """Return the device mesh that a mesh was cut out of."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    return sys.modules["torch.distributed.device_mesh"]._mesh_resources.get_root_mesh(mesh)


def spec_of_local(spec: Any) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """Return mesh, placements and global shape of a DTensor that FSDP1 has flattened."""
    return spec.mesh, tuple(spec.placements), tuple(spec.shape)


def fairscale_flats(
    module: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, list[str], list[Any], list[tuple[str, str]]]]:
    """List the flat parameters of a `FlattenParamsWrapper` of fairscale; none of other modules.

    Checked on fairscale 0.4.13. Names are those of `named_parameters()` of the wrapper.

    Returns:
        For each its name and itself; names and shapes of the parameters in it; further names of
        tied ones, each with the name that it means.
    """
    place = sys.modules.get("fairscale.nn.misc.flatten_params_wrapper")
    kind = getattr(place, "FlattenParamsWrapper", None)
    if kind is None or not isinstance(module, kind):
        return
    for name, flat in module._parameters.items():
        if flat is not None and hasattr(flat, "_param_infos"):
            names, shapes, _ = flat.metadata()
            ties = [
                (f"{path}.{own}".removeprefix("."), f"{first_path}.{first}".removeprefix("."))
                for path, first_path, _, own, _, first in flat._shared_param_infos
            ]
            yield name, flat, list(names), list(shapes), ties


def is_replicated(module: nn.Module) -> bool:
    """Whether `replicate` was applied to a module."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    registry = None if contract is None else contract._get_registry(module)
    return registry is not None and "replicate" in registry


def default_store() -> Any:
    """Return the store with which the default process group was made."""
    return torch.distributed.distributed_c10d._get_default_store()


def group_timeout(group: Any) -> timedelta:
    """Return how long a process group, the default one if None, waits for a rank."""
    group = group or torch.distributed.group.WORLD
    try:
        options = group._get_backend(torch.device("cpu")).options
        return cast("timedelta", options._timeout)
    except (AttributeError, RuntimeError):  # a backend that has none
        return torch.distributed.constants.default_pg_timeout
