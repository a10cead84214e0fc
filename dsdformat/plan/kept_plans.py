"""Plans of saves, kept while what is saved is spread as it was: a repeated save looks one up.

A plan depends on nothing but what it is made of: on each rank, how its tensors are spread, in
order. So a rank looks its own plan up by that alone, and needs no word of the others: ranks whose
plans would agree have plans that agree, kept or made anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsdformat.plan.save_plan import plan_save
from dsdformat.plan.sharding import Held, Sharding

__all__ = ["KeptPlans"]

_PLANS = 2  # so that who saves two states in turn finds both
_TENSORS = 65_536  # some 25 MiB; to write more takes so long that a plan does not matter

_Spreads = list[tuple[Sharding, int]]
_Plan = Sequence[Sequence[Held]]


class KeptPlans:
    """The last plans, and what they were made of. Threads may share one."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[int, _Spreads, _Plan], ...] = ()

    def plan(self, tensors: Sequence[tuple[Sharding, int]], rank: int) -> _Plan:
        """Choose what a rank writes, as `plan_save` does, or as it did.

        Args:
            tensors, rank: As in `plan_save`.

        Ranks: local. All holders of a box must call it alike.
        Complexity: linear in the tensors, which are compared.
        """
        spreads = list(tensors)
        for one, known, plan in self._kept:
            if one == rank and known == spreads:
                return plan
        made = plan_save(spreads, rank)
        if len(spreads) <= _TENSORS:
            self._kept = ((rank, spreads, made), *self._kept)[:_PLANS]
        return made
