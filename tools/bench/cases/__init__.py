"""What is measured: all cases, by name.

A name stands for its case, or else for all cases that begin with it: `optimizer` is four.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.case import Case
from bench.cases.background import BACKGROUND, BACKGROUND_FIRST, BACKGROUND_SMALL
from bench.cases.compressing import COMPRESS, DECOMPRESS
from bench.cases.converting import CONVERT
from bench.cases.limits import LIMITS
from bench.cases.loading import LOAD, LOAD_COLD, LOAD_SMALL
from bench.cases.metadata import METADATA_OPEN, METADATA_WRITE
from bench.cases.opening import OPEN_ONE
from bench.cases.optimizers import LOAD_FRESH, LOAD_STEPPED, SAVE_FRESH, SAVE_STEPPED
from bench.cases.planning import PLAN_LOAD, PLAN_MERGE, PLAN_MESH, PLAN_SAVE
from bench.cases.ranks import (
    RANKS_BROADCAST,
    RANKS_GATHER,
    RANKS_LOAD,
    RANKS_LOAD_2_OF_4,
    RANKS_LOAD_4_OF_2,
    RANKS_LOAD_COLUMNS,
    RANKS_SAVE,
)
from bench.cases.saving import SAVE, SAVE_SMALL

__all__ = ["CASES", "choose_cases", "find_case"]

CASES = (
    LIMITS,
    SAVE,
    SAVE_SMALL,
    BACKGROUND,
    BACKGROUND_FIRST,
    BACKGROUND_SMALL,
    LOAD,
    LOAD_COLD,
    LOAD_SMALL,
    OPEN_ONE,
    SAVE_FRESH,
    SAVE_STEPPED,
    LOAD_FRESH,
    LOAD_STEPPED,
    PLAN_SAVE,
    PLAN_MERGE,
    PLAN_LOAD,
    PLAN_MESH,
    METADATA_WRITE,
    METADATA_OPEN,
    CONVERT,
    *COMPRESS,
    *DECOMPRESS,
    RANKS_SAVE,
    RANKS_LOAD,
    RANKS_LOAD_2_OF_4,
    RANKS_LOAD_4_OF_2,
    RANKS_LOAD_COLUMNS,
    RANKS_GATHER,
    RANKS_BROADCAST,
)


def find_case(name: str) -> Case:
    """Return the case of a name."""
    return next(case for case in CASES if case.name == name)


def choose_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases that names stand for, in the order of `CASES`; all for no names.

    Raises:
        LookupError: a name stands for none.
    """
    chosen = set() if names else set(CASES)
    for name in names:
        exact = [case for case in CASES if case.name == name]
        found = exact or [case for case in CASES if case.name.startswith(f"{name}-")]
        if not found:
            known = ", ".join(case.name for case in CASES)
            raise LookupError(f"there is no case {name}; there are {known}")
        chosen.update(found)
    return [case for case in CASES if case in chosen]
