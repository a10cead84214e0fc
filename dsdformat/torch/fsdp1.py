"""FullyShardedDataParallel (FSDP1): where its flat shards have the original parameters.

FSDP1's own state dicts gather whole modules, and on the CPU of torch 2.13 the tensors that they
give share one buffer. Nothing of them is used here: the layout of a flat parameter says which of
its elements are whose, so that shards are read, sent and filled where they lie.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from dsdformat.boxes import Box
from dsdformat.errors import UnsupportedValueError
from dsdformat.plan.sharding import BoxSharding, FlatSharding, Held, MeshSharding, Sharding
from dsdformat.torch.comm import Comm
from dsdformat.torch.compat import (
    FlatParameterInfo,
    fsdp1_buffer_dtypes,
    fsdp1_info,
    fsdp1_mesh,
    fsdp1_replicas,
    root_mesh,
    spec_of_local,
    without_fsdp1_hooks,
)
from dsdformat.torch.fqn import named_modules
from dsdformat.torch.sharding import FlatShard, ranks_of_mesh, sharding_of_placements

__all__ = [
    "Member",
    "Unit",
    "buffer_dtypes",
    "find_units",
    "fsdp_modules",
    "plain_hooks",
    "reshard",
]


def fsdp_modules(module: nn.Module) -> list[Any]:
    """List the FSDP1 modules in a module. Loads nothing of torch."""
    package = sys.modules.get("torch.distributed.fsdp")
    if package is None:
        return []
    found: list[Any] = package.FullyShardedDataParallel.fsdp_modules(module)
    return found


@dataclass(frozen=True)
class Member:
    """An original parameter in a flat one.

    Attributes:
        names: All its canonical names.
        sharding: Over the ranks that have pieces of it.
        start, stop: Where the local piece of the flat parameter has this rank's elements.
        parameter: The parameter itself, if the model still has it.
        requires_grad: Of it, or of the flat parameter.
        group: The process group of the ranks of the sharding, if it is one.
        mesh, placements: Of the DTensor that stands for it outside.
    """

    names: tuple[str, ...]
    sharding: Sharding
    start: int
    stop: int
    parameter: torch.Tensor | None
    requires_grad: bool
    group: Any
    mesh: Any
    placements: tuple[Any, ...]

    def shard_of(self, piece: torch.Tensor) -> FlatShard:
        """Return what belongs to this parameter of a tensor in the form of the local piece."""
        return self.as_shard(piece.detach().view(-1)[self.start : self.stop])

    def as_shard(self, own: torch.Tensor) -> FlatShard:
        """Return this rank's elements of this parameter, or of a tensor of its form."""
        return FlatShard(
            self.sharding,
            own.detach().view(-1),
            self.group,
            self.mesh,
            self.placements,
            self.requires_grad,
        )


@dataclass(frozen=True)
class Unit:
    """A flat parameter, and the parameters in it.

    Attributes:
        flat: The flat parameter, which an optimizer has unless `use_orig_params`.
        piece: This rank's piece of it, with padding.
        members: The parameters in it, in their order.
    """

    flat: torch.Tensor
    piece: torch.Tensor
    members: tuple[Member, ...]


def find_units(model: nn.Module) -> list[Unit]:
    """List the flat parameters of all FSDP1 modules in a model.

    Ranks: local; collective where ranks of hybrid sharding have no device mesh, and where
        parameters are DTensors.
    """
    modules = fsdp_modules(model)
    if not modules:
        return []
    prefixes: dict[int, list[str]] = {}
    for prefix, module in named_modules(model):
        prefixes.setdefault(id(module), []).append(prefix)
    infos = [(module, fsdp1_info(module)) for module in modules]
    return [_unit(module, info, prefixes) for module, info in infos if info is not None]


def _unit(module: Any, info: FlatParameterInfo, prefixes: Mapping[int, Sequence[str]]) -> Unit:
    spread = _Spread.of(module, info)
    others: dict[tuple[int, str], list[tuple[nn.Module, str]]] = {}
    for owner, name, (first, first_name) in info.tied:
        others.setdefault((id(first), first_name), []).append((owner, name))
    axes = _Axes.of(info, spread)
    members = []
    for number, (owner, name) in enumerate(info.owners):
        owners = [(owner, name), *others.get((id(owner), name), ())]
        names = tuple(
            prefix + name for owner, name in owners for prefix in prefixes.get(id(owner), ())
        )
        members.append(_member(info, number, names, spread, axes))
    return Unit(info.flat, info.shard, tuple(members))


@dataclass(frozen=True)
class _Spread:
    """The ranks of a flat parameter, and which piece each has."""

    ranks: tuple[int, ...]
    pieces: tuple[int, ...]
    piece_numel: int
    piece: int  # of this rank
    group: Any
    device_type: str
    given_mesh: Any

    @staticmethod
    def of(module: Any, info: FlatParameterInfo) -> _Spread:
        group, replicas = module.process_group, fsdp1_replicas(module)
        ranks = tuple(distributed.get_process_group_ranks(group))
        pieces = tuple(range(len(ranks))) if info.is_sharded else (0,) * len(ranks)
        piece = distributed.get_rank(group) if info.is_sharded else 0
        mesh = fsdp1_mesh(module)
        if replicas is not None and mesh is not None:
            ranks = ranks_of_mesh(mesh)
            pieces = tuple(range(mesh.size(1))) * mesh.size(0)
        elif replicas is not None:
            rows = Comm(group).gather_values(distributed.get_process_group_ranks(replicas))
            places = sorted((rank, number) for number, row in enumerate(rows) for rank in row)
            ranks, pieces = tuple(r for r, _ in places), tuple(p for _, p in places)
        numel = info.shard.numel()
        return _Spread(ranks, pieces, numel, piece, group, info.shard.device.type, mesh)

    @property
    def position(self) -> int:
        """Of the first rank that has the piece that this one has."""
        return self.pieces.index(self.piece)

    def sharding(self, info: FlatParameterInfo, number: int) -> FlatSharding:
        """Return how an original parameter is spread, or the local tensor of one."""
        shape, stride = info.shapes[number], info.strides[number]
        order = None
        if stride is not None:
            order = tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))
        start = info.starts[number]
        return FlatSharding(shape, self.ranks, start, self.piece_numel, self.pieces, order)

    def shown(self, shape: Sequence[int]) -> tuple[Any, tuple[Any, ...]]:
        """Return mesh and placements of the DTensor that stands for a parameter."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, Shard

        mesh = self.given_mesh or DeviceMesh.from_group(self.group, self.device_type)
        cut: Any = Shard(0) if shape and len(set(self.pieces)) > 1 else Replicate()
        return mesh, (*[Replicate()] * (mesh.ndim - 1), cut)


def _member(
    info: FlatParameterInfo,
    number: int,
    names: tuple[str, ...],
    spread: _Spread,
    axes: _Axes | None,
) -> Member:
    local = spread.sharding(info, number)
    low, high = local.local_range(spread.position)
    start = max(0, info.starts[number] - spread.piece * spread.piece_numel) if high > low else 0
    parameter = info.parameters[number] if info.parameters is not None else None
    sharding: Sharding = local
    mesh, placements = spread.shown(local.shape)
    if axes is not None:
        sharding, placements = axes.shardings[number], (*placements, *axes.placements[number])
        mesh = axes.mesh
    alone = len(sharding.ranks) == len(distributed.get_process_group_ranks(spread.group))
    trainable = (info.flat if parameter is None else parameter).requires_grad
    return Member(
        names,
        sharding,
        start,
        start + high - low,
        parameter,
        trainable,
        spread.group if alone else None,
        mesh,
        placements,
    )


@dataclass(frozen=True)
class _Axes:
    """The second axis of a flat parameter in which DTensors are, or what each of its ranks has.

    Attributes:
        mesh: Of both axes.
        shardings: Of each original parameter, over the ranks of both.
        placements: Of each, on the second axis.
    """

    mesh: Any
    shardings: tuple[Sharding, ...]
    placements: tuple[tuple[Any, ...], ...]

    @staticmethod
    def of(info: FlatParameterInfo, spread: _Spread) -> _Axes | None:
        """Return None if no original parameter is a DTensor.

        Ranks: collective over the ranks of both axes, if one is.
        """
        specs = [spec_of_local(spec) for spec in info.specs if spec is not None]
        if not specs:
            return None
        from torch.distributed.tensor import Replicate

        mesh = specs[0][0]
        rows = Comm(spread.group).gather_values(list(ranks_of_mesh(mesh)))
        comm = Comm.of_ranks({rank for row in rows for rank in row})
        whole = (Replicate(),) * mesh.ndim
        shapes, placements, held = [], [], []
        with comm.together("looking at FSDP1's parameters"):
            for number, spec in enumerate(info.specs):
                local = spread.sharding(info, number)
                shape, cuts = local.shape, whole
                if spec is not None:
                    _, cuts, shape = spec_of_local(spec)
                outer = sharding_of_placements(shape, mesh, cuts)
                shapes.append(shape)
                placements.append(cuts)
                held.append(_combined(outer, local, spread.position))
        tables = comm.gather_values(
            [[[_numbers(one.outer), _numbers(one.inner)] for one in row] for row in held]
        )
        shardings = [
            _of_table(shape, comm.ranks, [table[number] for table in tables])
            for number, shape in enumerate(shapes)
        ]
        return _Axes(root_mesh(mesh), tuple(shardings), tuple(placements))


def _combined(outer: MeshSharding, local: FlatSharding, position: int) -> list[Held]:
    """Return what this rank holds of a DTensor whose local tensors lie in flat shards."""
    place = outer.ranks.index(distributed.get_rank())
    held = []
    for tensor_box, local_box, _ in outer.held(place):
        for box, piece, order in local.held(position):
            common = box.intersect(local_box)
            if common is None:
                continue
            if common != box or order is not None:
                raise UnsupportedValueError(
                    f"FSDP1 over a DTensor of placements {outer.describe()} cannot be read: it "
                    "has flattened local tensors that do not lie in rows",
                    hint="use a torch from 2.7 on, or FSDP2",
                )
            moved = zip(box.offset, local_box.offset, tensor_box.offset, strict=True)
            held.append(Held(Box(tuple(a - b + c for a, b, c in moved), box.shape), piece))
    return held


def _of_table(shape: tuple[int, ...], ranks: tuple[int, ...], table: Sequence[Any]) -> BoxSharding:
    return BoxSharding(
        shape,
        ranks,
        tuple(tuple(Held(_box(a), _box(b)) for a, b in row) for row in table),
        tuple((sum(_box(b).numel for _, b in row),) for row in table),
    )


def _numbers(box: Box) -> list[list[int]]:
    return [list(box.offset), list(box.shape)]


def _box(numbers: Sequence[Sequence[int]]) -> Box:
    return Box(tuple(numbers[0]), tuple(numbers[1]))


def plain_hooks(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which modules give and take state dicts without FSDP1's hooks."""
    return without_fsdp1_hooks(fsdp_modules(model))


def buffer_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes that buffers had before mixed precision, by canonical names."""
    result: dict[str, torch.dtype] = {}
    modules = {id(module) for module in fsdp_modules(model)}
    for prefix, module in named_modules(model):
        if id(module) in modules:
            for name, dtype in fsdp1_buffer_dtypes(module).items():
                result.setdefault(prefix + name, dtype)
    return result


def reshard(model: nn.Module) -> None:
    """Let go of flat parameters that are gathered at the moment, as after an evaluation.

    Ranks: collective over the process group of each such module.
    """
    for module in _gathered(model):
        with type(module).summon_full_params(module, recurse=False, writeback=False):
            pass


def _gathered(model: nn.Module) -> Iterator[Any]:
    for module in fsdp_modules(model):
        info = fsdp1_info(module)
        if info is not None and info.is_whole:
            yield module
