"""What a rank holds by our arithmetic is what torch's DTensor gives it."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from dsdformat.torch.gather import gather
from dsdformat.torch.sharding import sharding_of
from tests.ranks.shards import STRIDED, dtensor, mesh_of
from tests.torch_runtime.exact import assert_same_tensor


def check_holds(tensor: DTensor, whole: torch.Tensor) -> None:
    """Compare boxes and shapes with the local tensor that torch has made."""
    sharding, local = sharding_of(tensor), tensor.to_local()
    position = sharding.ranks.index(distributed.get_rank())
    assert sharding.shape == tuple(whole.shape)
    assert sharding.shard_shape(position) == tuple(local.shape)
    held = torch.full_like(local, -1)
    for outer, inner, _ in sharding.held(position):
        outer_slices, inner_slices = (
            tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            for box in (outer, inner)
        )
        held[inner_slices] = whole[outer_slices]
    assert_same_tensor(held, local)


def check_layout(seed: int) -> None:
    some = random.Random(seed)
    mesh_shape = some.choice([(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2), (1, 2, 2)])
    shape = tuple(some.choice([0, 1, 2, 3, 4, 5, 7, 9]) for _ in range(some.randint(1, 3)))
    mesh = mesh_of(mesh_shape)
    placements = [
        some.choice([Replicate(), *(Shard(dim) for dim in range(-1, len(shape)))])
        for _ in mesh_shape
    ]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    tensor = distribute_tensor(whole, mesh, placements)
    check_holds(tensor, whole)
    assert_same_tensor(gather({"one": tensor})["one"], whole)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("seed", range(40))
def test_boxes_of_random_layouts_are_those_of_torch(seed):
    check_layout(seed)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placements", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (1, 17), (3, 2)], ids=str)
def test_strided_shards_are_those_of_torch(placements, shape):
    mesh = mesh_of((2, 2))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    local = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)):
            pieces, _ = placement._split_tensor(
                local, mesh.size(axis), with_padding=False, contiguous=True
            )
            local = pieces[mesh.get_local_rank(axis)]
    tensor = dtensor(local, mesh, placements, shape)
    check_holds(tensor, whole)
    assert_same_tensor(gather({"one": tensor})["one"], whole)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("style", ["columns", "rows"])
@pytest.mark.parametrize("sizes", [(4, 8), (17, 1), (7, 5), (5, 7), (3, 2)], ids=str)
def test_fsdp2_over_tensor_parallel_layers_is_understood(style, sizes):
    mesh = mesh_of((2, 2), ("dp", "tp"))
    plan = {"columns": ColwiseParallel(), "rows": RowwiseParallel()}[style]
    model = torch.nn.Sequential(torch.nn.Linear(*sizes))
    whole = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        whole[name] = torch.arange(parameter.numel()).view(parameter.shape) + 1000.0 * number
        with torch.no_grad():
            parameter.copy_(whole[name])
    parallelize_module(model, mesh["tp"], {"0": plan})
    fully_shard(model, mesh=mesh["dp"])
    for name, parameter in model.named_parameters():
        check_holds(parameter.detach(), whole[name])
        assert_same_tensor(gather({name: parameter})[name], whole[name])
        assert_same_tensor(parameter.full_tensor().detach(), whole[name])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", range(8))
def test_three_ranks_hold_what_torch_gives_them(dim, size):
    whole = torch.arange(size * size, dtype=torch.float32).view(size, size)
    tensor = distribute_tensor(whole, mesh_of((3,)), [Shard(dim)])
    check_holds(tensor, whole)


@pytest.mark.ranks(4)
def test_a_mesh_in_another_order_of_ranks_is_understood():
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])
    whole = torch.arange(35.0).view(5, 7)
    if "src_data_rank" not in inspect.signature(distribute_tensor).parameters:
        pytest.skip("this torch scatters over such a mesh in the order of ranks")
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    check_holds(tensor, whole)
    assert_same_tensor(gather({"one": tensor})["one"], whole)
