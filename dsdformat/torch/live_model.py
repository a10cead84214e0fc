"""A live model as state dicts see it, whatever wraps it: names, entries, and its ranks."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from dsdformat.torch import fsdp1
from dsdformat.torch.buffers import OWN_CLASSES
from dsdformat.torch.comm import Comm, is_distributed
from dsdformat.torch.compat import is_replicated
from dsdformat.torch.flat_find import find_flats
from dsdformat.torch.flatten import derived_tensors
from dsdformat.torch.fqn import EXTRA_STATE, named_modules, named_tensors, unwrapped
from dsdformat.torch.introspect import own_method
from dsdformat.torch.meeting import meet
from dsdformat.torch.module_entries import call_loader, versioned_entries
from dsdformat.torch.sharding import FlatShard, is_spread, is_tensor, process_groups, sharding_of

__all__ = ["Entry", "LiveModel", "has_extra", "is_extra", "is_placed"]

Entry = tuple[str, str, Any]  # key of the module's own state dict, canonical name, value


class LiveModel:
    """One model.

    Attributes:
        model: As it was given.
        units: Its flat parameters of FSDP1.
        is_flat: Whether it has any, or others; else all of its tensors are in its modules.
        tensors: Live tensors by canonical name, a tied one under each; shards of flat parameters
            under the names of what is in them.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Any = None,
        timeout: timedelta | None = None,
        units: Sequence[fsdp1.Unit] | None = None,
    ) -> None:
        """Look at a model.

        Args:
            model: Any module.
            group: The process group of the ranks that hold it together; found if None.
            timeout: How long they wait for each other; as long as the group does if None.
            units: Its flat parameters of FSDP1; found if None.

        Ranks: see `fsdp1.find_units`, unless they are given.
        """
        self.model = model
        self.versions: Any = None  # of its modules, as the last state dict had them
        self._group = group
        self._timeout = timeout
        modules = fsdp1.fsdp_modules(model)
        if modules and timeout is not None:  # some have to talk to find out what they have
            meet(Comm(modules[0].process_group), "a function of a state dict", timeout)
        self.units = fsdp1.find_units(model) if units is None else units
        self.tensors = self._tensors()
        self._parameters = {
            name: member.parameter
            for unit in self.units
            for member in unit.members
            for name in member.names
        }

    @functools.cached_property
    def names(self) -> dict[int, list[str]]:
        """The names of each live tensor, by its id."""
        result: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            result.setdefault(id(tensor), []).append(name)
        return result

    def _tensors(self) -> dict[str, Any]:
        flats = {id(unit.flat) for unit in self.units}
        held = {key: flat for key, flat in find_flats(self.model).items() if flat.members}
        self.is_flat = bool(flats or held)
        result: dict[str, Any] = {
            name: tensor
            for name, tensor in named_tensors(self.model)
            if id(tensor) not in flats and id(tensor) not in held
        }
        for flat in held.values():
            result.update(flat.named_members())
        for unit in self.units:
            for member in unit.members:
                result.update(dict.fromkeys(member.names, member.shard_of(unit.piece)))
        return result

    def entries(self) -> list[Entry]:
        """Return what the model's state dict has, in the order of an unwrapped model."""
        with fsdp1.plain_hooks(self.model):
            entries, self.versions = versioned_entries(self.model, self.tensors)
        if not self.units:
            return entries
        flats = {id(unit.flat) for unit in self.units}
        dtypes = fsdp1.buffer_dtypes(self.model)
        rows: dict[str, Entry] = {}
        for key, name, value in entries:
            if id(value) not in flats:
                rows[name] = (key, name, self._shown(name, value, dtypes))
        for name, tensor in self.tensors.items():
            if isinstance(tensor, FlatShard):
                rows.setdefault(name, (name, name, tensor))
        return sorted(rows.values(), key=self._order())

    def _shown(self, name: str, value: Any, dtypes: Mapping[str, torch.dtype]) -> Any:
        live = self.tensors.get(name)
        if isinstance(live, FlatShard):
            return live
        if isinstance(value, torch.Tensor) and value.dtype != dtypes.get(name, value.dtype):
            return value.to(dtypes[name])
        return value

    def _order(self) -> Any:
        """Order entries by module, and in each by kind: parameters, buffers, the rest."""
        places: dict[str, int] = {}
        for prefix, _ in named_modules(self.model):
            places.setdefault(prefix, len(places))
        buffers = {name for name, one in self.tensors.items() if not _is_parameter(one)}

        def order(entry: Entry) -> tuple[int, int]:
            name = entry[1]
            prefix = name[: name.rfind(".") + 1]
            kind = 2 if is_extra(name) else int(name in buffers)
            return places.get(prefix, len(places)), kind

        return order

    def buffers(self) -> list[str]:
        """List the names of buffers that state dicts have."""
        known = set(map(id, self.model.buffers()))
        return [name for name, one in self.tensors.items() if id(one) in known]

    def frozen(self) -> list[str]:
        """List the names of parameters that need no gradient."""
        return [
            name
            for name, tensor in self.tensors.items()
            if _is_parameter(tensor) and not tensor.requires_grad
        ]

    def hidden(self) -> list[str]:
        """List the names of what is on meta and in no state dict, as buffers may be."""
        known = derived_tensors(self.model)
        everything = named_tensors(self.model, persistent=False)
        return [
            name
            for name, one in everything
            if one.is_meta and name not in self.tensors and id(one) not in known
        ]

    def registered(self, name: str, value: Any) -> Any:
        """Return a value, or the parameter whose shard it is; None where that is a flat one's."""
        return self._parameters.get(name) if isinstance(value, FlatShard) else value

    def hand_over(self, raw: OrderedDict[str, Any]) -> None:
        """Let the model's own `load_state_dict` see what was set, for its hooks and extra state."""
        with fsdp1.plain_hooks(self.model):
            call_loader(own_method(unwrapped(self.model), "load_state_dict"), raw)

    @property
    def is_spread(self) -> bool:
        """Whether ranks have shards of it, so that reading all of it is collective."""
        return any(is_spread(tensor) for tensor in self.tensors.values())

    def comm(self, default: Comm) -> Comm:
        """Return the ranks that hold the model together: those of its meshes, or of DDP.

        Args:
            default: For a model of which nothing says so.

        Ranks: local.
        """
        if self._group is not None or not is_distributed():
            return Comm(self._group)
        spread = [tensor for tensor in self.tensors.values() if is_spread(tensor)]
        ranks = {rank for tensor in spread for rank in sharding_of(tensor).ranks}
        if ranks:
            return Comm.of_ranks(ranks, process_groups(spread))
        for module in self.model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                return Comm(module.process_group)
            if is_replicated(module):
                return Comm()
        return default

    def meet(self, comm: Comm, call: str) -> None:
        """Wait until all ranks make this call, if there is a limit to that; see `meet`."""
        if self._timeout is not None:
            meet(comm, call, self._timeout)


def is_extra(name: str) -> bool:
    """Whether an entry is extra state."""
    return name.endswith(EXTRA_STATE) and name.rsplit(".", 1)[-1] == EXTRA_STATE


def has_extra(names: Iterable[str]) -> bool:
    """Whether one of some entries may be extra state; see `is_extra`."""
    return EXTRA_STATE in "\0".join(names)


def _is_parameter(tensor: Any) -> bool:
    return isinstance(tensor, (nn.Parameter, FlatShard))


def is_placed(name: str, value: Any) -> bool:
    """Whether an entry is a tensor that is filled, and not handed over."""
    return (type(value) in OWN_CLASSES or is_tensor(value)) and not is_extra(name)
