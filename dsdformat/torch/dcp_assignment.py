"""What the coordinator of a save tells each rank: where to write, and as which writer.

It travels as the plan's `storage_data`. A planner that caches plans gives its writer the plan of
an earlier save, with what was told then; so what arrives is also noted as it arrives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from dsdformat.errors import ArgumentError

__all__ = ["Assignment", "current_assignment"]


class Assignment:
    """What a rank has to know of one save; it is used once.

    Attributes:
        path: The checkpoint's folder, as the coordinator calls it.
        staging: The unfinished folder that the rank joins.
        rank: Number of the writer; the coordinator is 0.
        world_size: Number of writers.
    """

    def __init__(self, path: str, staging: str, rank: int, world_size: int) -> None:
        self.path = path
        self.staging = staging
        self.rank = rank
        self.world_size = world_size
        self.used = False

    def __reduce__(self) -> tuple[Callable[..., Assignment], tuple[Any, ...]]:
        return _arrived, (self.path, self.staging, self.rank, self.world_size)


# The last that arrived in this process for a path and a rank, as long as its plan is in use.
_ARRIVED: weakref.WeakValueDictionary[tuple[str, int], Assignment] = weakref.WeakValueDictionary()


def _arrived(path: str, staging: str, rank: int, world_size: int) -> Assignment:
    assignment = Assignment(path, staging, rank, world_size)
    _ARRIVED[path, rank] = assignment
    return assignment


def current_assignment(told: Any, path: str) -> Assignment:
    """Return what this rank was told for the save that goes on.

    Args:
        told: `storage_data` of the plan; of an earlier save where the planner caches plans.
        path: Where this rank's writer is to write.

    Raises:
        ArgumentError: the planner has put something else in its place.
    """
    found = told if isinstance(told, Assignment) else None
    if found is not None and found.used:
        found = _ARRIVED.get((path, found.rank))
    if found is None or found.used:
        raise ArgumentError(
            "the plan has lost what the writer's prepare_global_plan put into its storage_data",
            code="bad_argument",
            hint="a planner's finish_plan has to keep storage_data, as dataclasses.replace does",
        )
    found.used = True
    return found
