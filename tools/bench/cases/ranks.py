"""What does it cost four ranks to save and to load the state that they hold together?

All talk over gloo on this machine, as many ranks as there may be cores; a table's figures are
those of the slowest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bench import files
from bench.case import Case, Contender, Scene, Trial
from bench.formats.on_ranks import RANK_FORMATS, Call
from bench.formats.whole import BROADCASTS, GATHERS, Ready, whole_file

if TYPE_CHECKING:
    from bench.sharded import ShardedState

__all__ = [
    "RANKS_BROADCAST",
    "RANKS_GATHER",
    "RANKS_LOAD",
    "RANKS_LOAD_2_OF_4",
    "RANKS_LOAD_4_OF_2",
    "RANKS_LOAD_COLUMNS",
    "RANKS_SAVE",
]

RANKS = 4
NEEDS = ("torch", "dsdformat.torch")


def build(scene: Scene, *, columns: bool = False) -> ShardedState:
    """Build the state, on all ranks."""
    from bench.sharded import build_sharded

    return build_sharded(scene.size, columns=columns)


def arrange_save(save: Call, scene: Scene) -> Trial:
    """Save; all is on the disk then."""
    state = build(scene)
    path = scene.folder / "checkpoint"

    def check() -> None:
        if files.stored_nbytes(path) < state.nbytes():
            raise ValueError("less was stored than the state has")

    return Trial(lambda: save(path, state), state.nbytes(), check=check)


def arrange_load(load: Call, columns: bool, scene: Scene) -> Trial:
    """Load into a state that is there, with other contents."""
    state = build(scene, columns=columns)
    state.blank()
    return Trial(
        lambda: load(scene.fixture, state),
        state.nbytes(),
        takes_nbytes=state.nbytes() // 4,
        settle=lambda: files.warm(scene.fixture),
        check=state.check,
    )


def write_fixture(save: Call, columns: bool, scene: Scene) -> None:
    """Save the state that is to be loaded."""
    save(scene.fixture, build(scene, columns=columns))


def load_contenders(ranks: int, saved_by: int, *, columns: bool = False) -> tuple[Contender, ...]:
    """Let each load what some ranks have saved by rows; `raw` reads what was written as it is."""
    found = []
    for form in RANK_FORMATS:
        writers = saved_by if form.is_for_any else ranks
        as_read = columns and not form.is_for_any
        kind = f"ranks/{writers}{'-columns' if as_read else ''}/{form.name}"
        found += [
            Contender(
                name,
                partial(arrange_load, load, columns),
                needs=NEEDS,
                fixture=kind,
                prepare=partial(write_fixture, form.save, as_read),
                ranks=ranks,
                saved_by=writers,
            )
            for name, load in form.loads.items()
        ]
    return tuple(found)


def arrange_gather(ready: Ready, scene: Scene) -> Trial:
    """Write all whole tensors to a file; `takes_nbytes` is for two copies of them."""
    state = build(scene)
    path = scene.folder / "whole"

    def check() -> None:
        if files.stored_nbytes(path) < state.nbytes() - RANKS:
            raise ValueError("less was stored than the state has")

    nbytes = state.nbytes()
    return Trial(ready(path, state), nbytes, takes_nbytes=nbytes * 9 // 4, check=check)


def arrange_broadcast(ready: Ready, fills: bool, scene: Scene) -> Trial:
    """Fill the shards from a file that rank 0 alone opens; plain calls fill other memory."""
    state = build(scene)
    if fills:
        state.blank()
    return Trial(
        ready(scene.fixture, state),
        state.nbytes(),
        takes_nbytes=state.nbytes() // 2,
        settle=lambda: files.warm(scene.fixture),
        check=state.check,
    )


def write_whole(scene: Scene) -> None:
    """Write the file that is to be loaded."""
    whole_file(scene.fixture, build(scene))


FLUSHED = "Seconds until all is on the disk. `raw`: each rank writes what it has to its own file."
READ = (
    "`raw`: each rank reads what it wants from a file of its own, in the order of its tensors. "
    "*read / data*: what all ranks read from files, over the bytes of the state."
)
RANKS_SAVE = Case(
    "ranks-save",
    "save a model of FSDP2 and its AdamW on four ranks, durable",
    tuple(
        Contender(form.name, partial(arrange_save, form.save), needs=NEEDS, ranks=RANKS)
        for form in RANK_FORMATS
    ),
    note=FLUSHED,
)
RANKS_LOAD = Case(
    "ranks-load",
    "load it on four ranks, page cache warm",
    load_contenders(RANKS, RANKS),
    note=READ,
)
RANKS_LOAD_2_OF_4 = Case(
    "ranks-load-2-of-4",
    "load on two ranks what four have saved, page cache warm",
    load_contenders(2, RANKS),
    baseline="dcp",
    note=READ,
)
RANKS_LOAD_4_OF_2 = Case(
    "ranks-load-4-of-2",
    "load on four ranks what two have saved, page cache warm",
    load_contenders(RANKS, 2),
    baseline="dcp",
    note=READ,
)
RANKS_LOAD_COLUMNS = Case(
    "ranks-load-columns",
    "load on four ranks what they have saved by rows, of each matrix some columns, page cache warm",
    load_contenders(RANKS, RANKS, columns=True),
    baseline="dcp",
    note=READ,
)
RANKS_GATHER = Case(
    "ranks-gather",
    "write a file of whole tensors from the shards of four ranks, durable",
    tuple(
        Contender(name, partial(arrange_gather, ready), needs=NEEDS, ranks=RANKS)
        for name, ready in GATHERS.items()
    ),
    note="`raw` sends pieces of 64 MiB to rank 0, which writes each. `dsdformat (export)` writes "
    "one safetensors file from all ranks; the others get whole state dicts on rank 0.",
)
RANKS_BROADCAST = Case(
    "ranks-broadcast",
    "fill the shards of four ranks from a file of whole tensors that rank 0 opens",
    tuple(
        Contender(
            name,
            partial(arrange_broadcast, ready, not name.startswith("raw")),
            needs=NEEDS,
            fixture="ranks/whole",
            prepare=write_whole,
            ranks=RANKS,
            saved_by=RANKS,
        )
        for name, ready in BROADCASTS.items()
    ),
    note="The file is of torch.save, and cached. `raw` sends each rank as much as its shards have, "
    "in pieces of 64 MiB, out of memory that is touched.",
)
