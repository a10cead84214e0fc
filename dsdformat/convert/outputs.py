"""What all writers of checkpoints share: what they are given, what they tell, how they are listed.

A writer is a function `write(job, **options)`. It looks at everything first and refuses what its
kind cannot hold before a byte is written; then it writes beside the final name, makes it durable,
and renames. Whatever ends it, nothing half-made stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dsdformat.convert.files import Bytes, read_exactly
from dsdformat.convert.foreign import Foreign
from dsdformat.convert.meters import Meter, Progress
from dsdformat.convert.teams import ALONE, Team
from dsdformat.limits import MIB
from dsdformat.storage.base import completed
from dsdformat.storage.guards import folder_guard
from dsdformat.storage.target import LocalTarget

__all__ = [
    "Job",
    "Meter",
    "OptimizerForm",
    "OutputKind",
    "Progress",
    "Written",
    "folder_guard",
    "write_sides",
]

# By FQN and in the order of ours, by FQN in lists, or by number; see `optimizer_forms`.
OptimizerForm = Literal["named", "listed", "numbered"]

_SLAB_NBYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Job:
    """What a writer is given.

    Attributes:
        opened: The source, with what was chosen of it.
        path: Where to write.
        overwrite: Whether to replace what is there, once the new one is complete.
        meter: Its `total` is set by the writer, which then counts the bytes that it has written.
        sides: Files to put beside the data, by plain name; empty where the kind is one file.
        threads: How many threads may read and write.
        team: The processes that write it together, with equal jobs.
    """

    opened: Foreign
    path: str
    overwrite: bool = False
    meter: Meter = field(default_factory=Meter)
    sides: Mapping[str, Bytes] = field(default_factory=dict)
    threads: int = 1
    team: Team = ALONE


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer has written.

    Attributes:
        tensors: How many, each name that is written counted.
        nbytes: Of their data.
        files: Names of the files, below the folder if it is one.
        root: The root digest, for a checkpoint of ours.
    """

    tensors: int
    nbytes: int
    files: tuple[str, ...]
    root: str | None = None


@dataclass(frozen=True, slots=True)
class OutputKind:
    """A kind of checkpoint that can be written.

    Attributes:
        name: As `to=` has it.
        what: What it is, for people.
        write: The writer.
        suffixes: Endings of paths that mean it.
        options: Names of the writer's options.
        folder: Whether it is a folder, and has room for other files.
        metadata: Whether it has room for free strings.
        optimizers: The form of optimizers' states in it; as they are if None.
        shared: Whether several processes can write it together.
    """

    name: str
    what: str
    write: Callable[..., Written]
    suffixes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    folder: bool = True
    metadata: bool = False
    optimizers: OptimizerForm | None = None
    shared: bool = False


def write_sides(target: LocalTarget, sides: Mapping[str, Bytes]) -> None:
    """Copy files into a folder that is being made.

    Memory: 4 MiB.
    """
    for name, source in sides.items():
        with completed(target.create(name)) as sink:
            buffer = memoryview(bytearray(min(_SLAB_NBYTES, source.nbytes)))
            for at in range(0, source.nbytes, _SLAB_NBYTES):
                piece = buffer[: min(_SLAB_NBYTES, source.nbytes - at)]
                read_exactly(source, at, piece)
                sink.write_at(at, [piece])
