"""Where the ranks of a mesh would hold tensors, by a few rules; `survey` counts what that costs."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dsdformat.errors import ArgumentError, shorten
from dsdformat.plan.mesh import Placement, Replicate, Shard

__all__ = ["Rule", "check_mesh", "place"]

# Axes along which parameters are cut by rows unless a rule says otherwise, as FSDP2 does.
_SHARDING = ("fsdp", "shard", "dp_shard", "dp_shard_cp")
_WORLD_SIZE_MAX = 1 << 20


class Rule(NamedTuple):
    """How tensors are placed along one axis of a mesh.

    Attributes:
        glob: Of display names; `*` also matches `/` and `.`.
        dim: The dim that is cut, from the end if negative; None for replicas.
        axis: Name of the axis.
    """

    glob: str
    dim: int | None
    axis: str


def check_mesh(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the axes of a mesh.

    Raises:
        ArgumentError: `bad_argument`.
    """
    fine = isinstance(mesh, Mapping) and all(
        type(name) is str and type(size) is int and size >= 1 for name, size in mesh.items()
    )
    if not fine or math.prod(mesh.values()) > _WORLD_SIZE_MAX:
        raise ArgumentError(
            f"a mesh has sizes by the names of its axes, and up to {_WORLD_SIZE_MAX:,} ranks; "
            f"got {shorten(mesh)}",
            code="bad_argument",
        )
    return dict(mesh)


def place(
    name: str,
    shape: Sequence[int],
    mesh: Mapping[str, int],
    rules: Iterable[Rule] = (),
    *,
    by_rows: bool = True,
) -> tuple[Placement, ...]:
    """Return the placements of a tensor: of the first rule for each axis that has its name.

    Args:
        name: Display name.
        shape: Global shape.
        mesh: Sizes of the axes by name.
        rules: What is said of some.
        by_rows: Whether axes called `fsdp`, `shard` or `dp_shard` cut what has no rule by rows,
            after the other axes have cut it, as FSDP2 does; else there are replicas.

    Raises:
        ArgumentError: `bad_argument`: a rule with a dim that the tensor does not have.
    """
    dims: dict[str, int | None] = dict.fromkeys(mesh)
    ruled: set[str] = set()
    for rule in rules:
        if rule.axis in dims and rule.axis not in ruled and fnmatch.fnmatchcase(name, rule.glob):
            ruled.add(rule.axis)
            dims[rule.axis] = _dim(rule, name, len(shape))
    cut = by_rows and bool(shape)
    late = [axis for axis in mesh if cut and axis in _SHARDING and axis not in ruled]
    dims.update(dict.fromkeys(late, 0))
    axes = list(mesh)
    placements: list[Placement] = []
    for number, axis in enumerate(axes):
        dim = dims[axis]
        if dim is None:
            placements.append(Replicate())
            continue
        after = [one for one in axes[number + 1 :] if one not in late and dims[one] == dim]
        factor = math.prod(mesh[one] for one in after) if axis in late else 1
        placements.append(Shard(dim, factor))
    return tuple(placements)


def _dim(rule: Rule, name: str, ndim: int) -> int | None:
    if rule.dim is None or ndim == 0:
        return None
    if not -ndim <= rule.dim < ndim:
        raise ArgumentError(
            f"{shorten(name)} has {ndim} dims, and the rule {shorten(rule.glob)} cuts dim "
            f"{rule.dim} along {rule.axis}",
            code="bad_argument",
        )
    return rule.dim % ndim
