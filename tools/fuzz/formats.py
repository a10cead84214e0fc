"""What says of a format how it is fed; `targets` makes targets of these."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Change", "Codes", "Format"]

Change = Callable[[bytes, random.Random, Sequence[bytes]], bytes]
Codes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """A format; see `targets.Target`."""

    name: str
    what: str
    read: Callable[[bytes], Codes]
    seeds: Callable[[], list[bytes]]
    mutate: Change
    smoke: int
