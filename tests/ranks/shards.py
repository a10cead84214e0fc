"""DTensors of any dtype and placements, cut with plain indexing, and whole tensors to compare with.

torch's own `distribute_tensor` sends tensors over gloo, which refuses several dtypes; what is made
here needs no message.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dsdformat.torch.dtypes import logical_dtype

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and logical_dtype(value) is not None
    },
    key=str,
)
DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}

SHAPES = [(), (0,), (1,), (3,), (7,), (1, 17), (5, 7), (0, 4), (3, 0, 2), (2, 3, 5)]
SHAPE_IDS = ["x".join(map(str, shape)) or "no-dims" for shape in SHAPES]


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, the same on all ranks; of bool, what is true or false."""
    generator = torch.Generator().manual_seed(1000 * seed + len(shape))
    count = dtype.itemsize
    for size in shape:
        count *= size
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count,), generator=generator, dtype=torch.uint8)
    if not count:
        return typed(torch.empty(tuple(shape), dtype=_CARRIERS[dtype.itemsize]), dtype)
    return typed(raw.view(_CARRIERS[dtype.itemsize]).view(tuple(shape)), dtype)


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their width, which torch can index."""
    carrier = torch.empty(0, dtype=_CARRIERS[tensor.element_size()])
    return carrier.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def typed(carrier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers as elements of a dtype of their width."""
    if dtype is torch.complex32:
        return carrier.view(dtype)
    made = torch.empty(0, dtype=dtype)
    return made.set_(
        carrier.untyped_storage(), carrier.storage_offset(), carrier.shape, carrier.stride()
    )


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of all ranks; one only, since each has process groups, which have threads."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """What this rank holds of a tensor: cut along each axis of the mesh in turn."""
    local, coordinate = carried(whole), mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        count, index = mesh.size(axis), coordinate[axis]
        parts = chunks(local, getattr(placement, "split_factor", 1), placement.dim)
        local = torch.cat(
            [chunks(one, count, placement.dim)[index] for one in parts], placement.dim
        )
    return typed(local.clone(), whole.dtype)


def chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    step = -(-tensor.shape[dim] // count)
    size = tensor.shape[dim]
    return [
        tensor.narrow(dim, min(i * step, size), max(0, min(size - i * step, step)))
        for i in range(count)
    ]


def spread(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A DTensor of a whole tensor that all ranks have."""
    return dtensor(cut(whole, mesh, placements), mesh, placements, whole.shape)


def blank(like: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A DTensor in the form of a whole tensor, with other bits in it."""
    local = cut(like, mesh, placements)
    return dtensor(typed(carried(local).fill_(0), like.dtype), mesh, placements, like.shape)


def dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, mesh, tuple(placements), run_check=False, shape=torch.Size(shape), stride=stride
    )


def local_bits(tensor: torch.Tensor) -> list[Any]:
    """The bits that this rank has, to compare or to send."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return carried(local.detach()).clone().contiguous().view(-1).tolist()


ONE_AXIS = {"shard0": (Shard(0),), "shard1": (Shard(1),), "replicate": (Replicate(),)}
TWO_AXES = {
    f"{a}-{b}": pair
    for (a, b), pair in zip(
        itertools.product(["shard0", "shard1", "replicate"], repeat=2),
        itertools.product([Shard(0), Shard(1), Replicate()], repeat=2),
        strict=True,
    )
}
STRIDED = {
    "strided0-shard0": (_StridedShard(0, split_factor=2), Shard(0)),
    "strided1-shard1": (_StridedShard(1, split_factor=2), Shard(1)),
    "strided0-replicate": (_StridedShard(0, split_factor=2), Replicate()),
    "strided0-by-3": (_StridedShard(0, split_factor=3), Replicate()),
    "shard0-strided0": (Shard(0), _StridedShard(0, split_factor=2)),
    "strided1-shard0": (_StridedShard(1, split_factor=3), Shard(0)),
}


def world() -> int:
    return distributed.get_world_size()
