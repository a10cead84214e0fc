"""FSDP2's modules that are gathered: shown as shards to who reads, and let go of by who sets.

A module that was unsharded, by hand or because it is kept so after forward, still has its shards;
they are what optimizers step, so what is gathered is never newer.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dsdformat.torch.compat import GatheredFsdp2, find_gathered_fsdp2

__all__ = ["reshard_fsdp2", "shown_as_shards"]


@contextmanager
def shown_as_shards(models: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules show the shards of what is gathered, in this block; it stays gathered.

    Ranks: local.
    Memory: none.
    """
    kept: list[tuple[nn.Module, str, Any]] = []
    try:
        for model in models:
            for _, gathered in _gathered(model):
                for owner, name, shard in gathered.parameters:
                    kept.append((owner, name, owner._parameters[name]))
                    owner._parameters[name] = shard
                for owner, number in gathered.hooks:
                    hooks = owner._state_dict_pre_hooks
                    kept.append((owner, "", hooks))
                    others = {key: hook for key, hook in hooks.items() if key != number}
                    owner._state_dict_pre_hooks = OrderedDict(others)
        yield
    finally:
        for owner, name, value in reversed(kept):
            if name:
                owner._parameters[name] = value
            else:
                owner._state_dict_pre_hooks = value


def reshard_fsdp2(model: nn.Module) -> None:
    """Let go of parameters that are gathered, which are not those that a state is set into.

    Ranks: local.
    """
    for module, _ in _gathered(model):
        module.reshard()


def _gathered(model: nn.Module) -> Iterator[tuple[Any, GatheredFsdp2]]:
    package = sys.modules.get("torch.distributed.fsdp")
    if package is None:
        return
    for module in model.modules():
        if isinstance(module, package.FSDPModule):
            for gathered in find_gathered_fsdp2(module):
                yield module, gathered
