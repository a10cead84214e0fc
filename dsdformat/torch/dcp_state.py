"""What a rank stores of a plan of DCP: its tensors' boxes and its values, as a nested state.

The planner pickles what is no tensor before a writer would see it; so values are taken as the
objects that they are, with `lookup_object`. Nothing here reads a tensor's data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dsdformat.boxes import Box, whole
from dsdformat.errors import MismatchError, UnsupportedValueError
from dsdformat.format.manifest import Mesh
from dsdformat.format.paths import render_path
from dsdformat.plan.sharding import MeshSharding
from dsdformat.sources import Data, Reference, TensorSource, source_of
from dsdformat.torch.buffers import data_of
from dsdformat.torch.comm import is_distributed
from dsdformat.torch.dcp_nesting import ABSENT, Path, completed, find_path, has_index, nested
from dsdformat.torch.dcp_values import ValueAdapter
from dsdformat.torch.dtypes import logical_dtype
from dsdformat.torch.sharding import is_dtensor, is_tensor, sharding_of

__all__ = ["planned_nbytes", "planned_state"]

Layout = tuple[Mesh, tuple[str, ...]]


def planned_state(
    plan: SavePlan, planner: SavePlanner, adapter: ValueAdapter, world_size: int
) -> dict[str, Any]:
    """Return what this rank stores of a plan, for a `PartWriter`.

    Args:
        plan: The final plan of this rank.
        planner: Whose plan it is.
        adapter: Of the writer.
        world_size: Number of writers.

    Raises:
        UnsupportedValueError: a planner that does not give its objects, a shard of a tensor that
            is not one strided block.
        MismatchError: `state_conflict`: the plan and the tensors do not agree.

    Ranks: local.
    Memory: none, but where the planner transforms tensors: one of these at a time.
    """
    shards: dict[str, list[WriteItem]] = {}
    leaves: dict[Path, Any] = {}
    for item in plan.items:
        path = find_path(plan.planner_data, item.index.fqn)
        if item.type == WriteItemType.BYTE_IO:
            leaves[path] = _value(planner, item, path)
        else:
            shards.setdefault(item.index.fqn, []).append(item)
    makes = _Leaves(planner, adapter, world_size)
    for fqn, items in shards.items():
        path = find_path(plan.planner_data, fqn)
        leaves[path] = makes.leaf(path, items)
    if world_size > 1 and isinstance(plan.planner_data, Mapping) and any(map(has_index, leaves)):
        others = {find_path(plan.planner_data, name): name for name in plan.planner_data}
        leaves = completed(leaves, others, lambda path: _stand_in(planner, others[path]))
    return nested(leaves)


def planned_nbytes(plan: SavePlan) -> int:
    """Return how many bytes of tensors a plan has."""
    return sum(
        _box(item).numel * item.tensor_data.properties.dtype.itemsize
        for item in plan.items
        if item.tensor_data is not None
    )


@dataclass(frozen=True)
class _Leaves:
    """Makes what stands in the state for a tensor of the plan."""

    planner: SavePlanner
    adapter: ValueAdapter
    world_size: int

    def leaf(self, path: Path, items: Sequence[WriteItem]) -> Any:
        """Return the source of the boxes of one tensor."""
        shape = _shape(items[0])
        lone = len(items) == 1 and _box(items[0]) == whole(shape)
        direct = _is_direct(self.planner)
        if lone and direct and self.world_size == 1:
            return self._resolved(items[0], path)  # the writer makes its hints, and ties it
        chunks: list[tuple[Box, Data]] = []
        dtypes, hints = set(), {}
        for item in items:
            tensor = self._resolved(item, path)
            adapted = (self.adapter if direct else ValueAdapter())(tensor, path)
            if not isinstance(adapted, (Reference, TensorSource)):
                if lone:
                    return tensor  # in components, whole
                raise _no_block(path)
            source = source_of(adapted)
            assert isinstance(source, TensorSource)  # no run was asked for yet
            data = source.chunks[0][1] if direct else _anew(self.planner, item)
            chunks += _chunks(_box(item), shape, data)
            dtypes.add(source.dtype)
            hints = dict(adapted.attributes)
        if len(dtypes) > 1:
            raise _conflict(path, f"its shards are {' and '.join(sorted(dtypes))}")
        layout = self._layout(items)
        made = TensorSource(dtypes.pop(), shape, chunks, layout=layout)
        # Of a shard a hint would be another one than those of other ranks.
        return Reference(made, hints if lone and not has_index(path) else {})

    def _resolved(self, item: WriteItem, path: Path) -> torch.Tensor:
        tensor = self.planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise _conflict(path, f"the planner gives a {type(tensor).__name__} for a tensor")
        if tuple(tensor.shape) != _box(item).shape:
            shapes = f"{list(tensor.shape)}, planned are {list(_box(item).shape)}"
            raise _conflict(path, f"the planner gives a tensor of shape {shapes}")
        return tensor

    def _layout(self, items: Sequence[WriteItem]) -> Layout | None:
        """Return where a DTensor of all ranks is on them, if its placements are what is stored."""
        tensor = _known_object(self.planner, items[0].index.fqn)
        if not is_dtensor(tensor):
            return None
        sharding = sharding_of(tensor)  # refuses partial sums
        everywhere = is_distributed() and distributed.get_world_size() == self.world_size
        if not isinstance(sharding, MeshSharding) or not everywhere:
            return None
        if len(items) != 1 or len(sharding.ranks) != self.world_size:
            return None
        held = sharding.held(sharding.ranks.index(distributed.get_rank()))
        if [one.outer for one in held] != [_box(items[0])]:
            return None
        names = tensor.device_mesh.mesh_dim_names
        axes = tuple(names or (f"axis{index}" for index in range(tensor.device_mesh.ndim)))
        mesh = Mesh(axes, tuple(sharding.mesh_shape), tuple(sharding.ranks))
        return mesh, tuple(str(one) for one in sharding.placements)


def _value(planner: SavePlanner, item: WriteItem, path: Path) -> Any:
    """Return the object that the planner would pickle."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise UnsupportedValueError(
            f"{render_path(path)}: {type(planner).__name__} gives what is no tensor only as bytes "
            "that it has pickled",
            path_in_tree=render_path(path),
            hint="derive the planner from DefaultSavePlanner, whose lookup_object gives objects",
        )
    return lookup(item.index)


def _known_object(planner: SavePlanner, name: str) -> Any:
    """Return what the state of a default planner has under a flat name, or `ABSENT`."""
    state = getattr(planner, "state_dict", None)
    return state.get(name, ABSENT) if isinstance(state, Mapping) else ABSENT


def _stand_in(planner: SavePlanner, name: str) -> Any:
    """Return what a rank files of an item of a list that another rank stores."""
    value = _known_object(planner, name)
    if not is_tensor(value):
        return value
    dtype = logical_dtype(value.dtype)
    return ABSENT if dtype is None else TensorSource(dtype, tuple(value.size()), [])


def _is_direct(planner: SavePlanner) -> bool:
    """Whether the planner gives the state's own tensors, so that asking costs no memory."""
    return all(
        getattr(type(planner), name, None) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "transform_object", "lookup_object")
    )


def _anew(planner: SavePlanner, item: WriteItem) -> Data:
    """Return a function that resolves a tensor again, when the writer gets there."""

    def blocks() -> Iterator[Any]:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        data = data_of(tensor.detach())
        yield from data() if callable(data) else [data]

    return blocks


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))


def _shape(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(map(int, item.tensor_data.size))


def _chunks(box: Box, shape: tuple[int, ...], data: Data) -> list[tuple[Box, Data]]:
    """Return what is stored of a box: of a tensor without elements the first one, as the whole."""
    if 0 not in shape:
        return [(box, data)]
    return [] if any(box.offset) else [(whole(shape), data)]


def _no_block(path: Path) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"{render_path(path)}: a shard that is not one strided block cannot be stored",
        path_in_tree=render_path(path),
    )


def _conflict(path: Path, what: str) -> MismatchError:
    return MismatchError(f"{render_path(path)}: {what}", code="state_conflict")
