"""All cases, by subject."""

from __future__ import annotations

from fnmatch import fnmatchcase

from compare.case import Case, Subject
from compare.cases.files import FILES
from compare.cases.modules import MODULE_STATES
from compare.cases.optimizers import OPTIMIZERS
from compare.cases.ranks import RANKS
from compare.cases.values import VALUES

__all__ = ["CASES", "SUBJECTS", "choose_cases"]

SUBJECTS: tuple[Subject, ...] = (MODULE_STATES, OPTIMIZERS, RANKS, VALUES, FILES)
CASES = tuple(case for subject in SUBJECTS for case in subject.cases)


def choose_cases(globs: str | None) -> list[Case]:
    """Return the cases whose names fit one of some globs, which commas part; all if None.

    Raises:
        LookupError: a glob fits none.
    """
    if globs is None:
        return list(CASES)
    chosen: set[str] = set()
    for glob in globs.split(","):
        found = {case.name for case in CASES if fnmatchcase(case.name, glob)}
        if not found:
            raise LookupError(f"no case is called {glob}")
        chosen |= found
    return [case for case in CASES if case.name in chosen]
