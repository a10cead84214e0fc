"""Every private name of torch that this package uses, one function each, with the versions seen.

Checked on torch 2.6.0 and 2.13.0. Nothing here imports a part of torch that is not loaded yet:
an object of a class whose module was never imported cannot exist.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

__all__ = [
    "coo_components",
    "exact_states",
    "find_wrapped",
    "has_load_hooks",
    "is_lazy",
    "known_seqlens",
    "needs_loader",
    "plain_functions",
    "swap_content",
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
)


def find_wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the module that a wrapper of torch holds, and the name it has there.

    Wrappers are those that add a name of their own to all names below them: DataParallel, DDP,
    FSDP1, `torch.compile`, activation checkpointing and offloading. None for any other module,
    whatever its attributes are called.
    """
    for kind, child in _loaded_wrappers():
        if isinstance(module, kind):
            inner = module._modules.get(child)
            return None if inner is None else (child, inner)
    return None


def _loaded_wrappers() -> tuple[tuple[type, str], ...]:
    """Return the wrapper classes that are loaded, and under which name each has its module."""
    loaded = tuple(place in sys.modules for place, _, _ in _WRAPPERS)
    return _wrappers(loaded)


@functools.cache
def _wrappers(loaded: tuple[bool, ...]) -> tuple[tuple[type, str], ...]:
    found = []
    for there, (place, name, child) in zip(loaded, _WRAPPERS, strict=True):
        kind = getattr(sys.modules[place], name, None) if there else None
        if kind is not None:
            found.append((kind, child))
    return tuple(found)


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
