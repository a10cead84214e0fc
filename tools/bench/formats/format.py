"""How a library is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["Format"]

Save = Callable[[Path, "State"], object]
Load = Callable[[Path, "State"], object]
ReadOne = Callable[[Path, "State", int], object]


@dataclass(frozen=True, slots=True)
class Format:
    """The calls of one library, each as its users write it.

    Attributes:
        needs: Modules that must be installed.
        save: Writes a state to a path that does not exist yet.
        loads: Ways to load into an existing state, by the contender's name.
        read_ones: Ways to open a checkpoint and read one parameter, given by its number, into the
            parameter of an existing state.
        is_durable: Whether `save` returns only when all is on the disk.
        has_optimizers: Whether it stores optimizers, or tensors alone.
        save_takes, load_takes: New memory that a call takes, page cache included, over the bytes of
            the state; so much is made ready before it is timed.
    """

    name: str
    needs: tuple[str, ...]
    save: Save
    loads: Mapping[str, Load]
    read_ones: Mapping[str, ReadOne] = field(default_factory=dict)
    is_durable: bool = False
    has_optimizers: bool = True
    save_takes: float = 1.25
    load_takes: float = 1.25
