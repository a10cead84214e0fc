"""Save a state: capture, adapt, write, commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from dsdformat.folders import PathLike
from dsdformat.garbage import paused_gc, young_gc
from dsdformat.limits import GIB
from dsdformat.torch.background import Background, SaveHandle, begin, settle, spare_threads
from dsdformat.torch.capture import capture_with_buffers, check_acyclic
from dsdformat.torch.comm import Comm
from dsdformat.torch.introspect import as_mapping
from dsdformat.torch.per_rank import Path, unmarked
from dsdformat.torch.recipes import RECIPES, Recipe, recipe_values
from dsdformat.torch.save_together import plan_together
from dsdformat.torch.sources import Adapter
from dsdformat.torch.unfinished import Unfinished, plan
from dsdformat.writer import Codec, PartWriter

__all__ = ["save"]


@overload
def save(
    path: PathLike,
    state: Mapping[str, Any],
    *,
    overwrite: bool = ...,
    codec: Codec = ...,
    user: Mapping[str, str] | None = ...,
    threads: int | None = ...,
    recipes: Mapping[str, Recipe] | None = ...,
    group: Any = ...,
    check_replicas: bool | None = ...,
    background: Literal[False] = ...,
) -> str: ...


@overload
def save(
    path: PathLike,
    state: Mapping[str, Any],
    *,
    overwrite: bool = ...,
    codec: Codec = ...,
    user: Mapping[str, str] | None = ...,
    threads: int | None = ...,
    recipes: Mapping[str, Recipe] | None = ...,
    group: Any = ...,
    check_replicas: bool | None = ...,
    background: Literal[True] | Background,
) -> SaveHandle: ...


# long: the options and their documentation
def save(
    path: PathLike,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    codec: Codec = "raw",
    user: Mapping[str, str] | None = None,
    threads: int | None = None,
    recipes: Mapping[str, Recipe] | None = None,
    group: Any = None,
    check_replicas: bool | None = None,
    background: bool | Background = False,
) -> str | SaveHandle:
    """Save modules, optimizers, schedulers, tensors and values as one checkpoint.

    On several ranks all of them call this, with states of which each has its own part: shards of
    DTensors and of FSDP1, stages of a pipeline, replicas. Nothing is gathered: a rank writes boxes
    of what it holds, and what several hold is written by one of them. Values and counters must be
    equal on all ranks that have them, unless they are marked with `PerRank`.

    A module is filed as its state dict under canonical FQNs, an optimizer by the FQNs of its
    parameters, an object with `state_dict` and `load_state_dict` as what its `state_dict` gives.
    Tensors that are the same memory are tied: stored once, and one tensor again after loading.
    Nothing of the state is changed, neither are the states of random generators.

    Args:
        path: The checkpoint's folder; parents are made.
        state: A mapping with string keys. Its leaves, at any depth of dicts, lists and tuples,
            are modules, optimizers, objects with `state_dict` and `load_state_dict`, tensors,
            numpy arrays and the values of the format. A list of modules is one model in parts,
            a list of optimizers one optimizer in parts.
        overwrite: Whether to replace a checkpoint that is there, once the new one is complete.
        codec: `raw`, `zstd` or `planes+zstd`, or a function from a tensor's name to one.
        user: User metadata: strings.
        threads: How many threads hash and write; up to 8 if None, and up to 4 in the background.
        recipes: For keys of the state, how `load_model` builds the model there.
        group: The process group of the ranks that save together; the default one if None.
        check_replicas: Whether to compare, by digests, the bytes of what several ranks hold. If
            None, of each tensor that is not spread over ranks a few hundred elements are compared,
            but of buffers of modules the first rank's are stored. False for nothing of either.
        background: Whether to return when the state is copied, and write while training goes on.
            All that can be refused is refused in the call. `Background(limit=…, nice=…)` says how
            long it may take, and how much it gives way to training. A save waits for the one in
            flight, and raises the error that nobody asked for.

    Returns:
        The root digest; a handle that gives it if the save goes on in the background.

    Raises:
        UnsupportedValueError: something cannot be stored: a function, a tensor without data, an
            optimizer whose parameters are in no module of the state. Nothing was written.
        MismatchError: `state_conflict`: parts of one model or optimizer share a name.
        StorageError: `already_exists`, or the medium failed; the target is as it was.
        RankDisagreementError: `ranks_disagree`: values, counters or replicas differ between ranks.
        DistributedError: `rank_failed`, on every rank, with the cause of each rank that failed.
            `ranks_absent`: a rank has ended, hangs, or makes another call, as far as the group can
            tell; `failures` has those of which nothing is heard.

    Ranks: collective over the group; rank 0 of it commits. All see the folder.
    Memory: two blocks per thread; none for packed tensors in host memory. In the background, the
        bytes that this rank writes, in a buffer that is kept: see `free_staging`.
    """
    comm = Comm(group)

    def captured() -> tuple[dict[str, Any], list[Path], list[Path]]:
        settle()
        check_acyclic(dict(as_mapping(state)))
        inner, own = unmarked(state, comm.rank)
        plain, buffers = capture_with_buffers(inner)
        if recipes:
            plain = {**plain, RECIPES: recipe_values(recipes, state)}
        return plain, buffers, own

    def planned(stage: Callable[[PartWriter], None] | None = None) -> Unfinished:
        options: dict[str, Any] = {
            "overwrite": overwrite,
            "user": user,
            "codec": codec,
            "threads": spare_threads() if background and threads is None else threads,
            "stage": stage,
        }
        if comm.world_size > 1:
            return plan_together(comm, path, captured, same=check_replicas, **options)
        return plan(comm, path, captured()[0], adapt=Adapter(), **options)

    if background:
        how = background if isinstance(background, Background) else Background()
        return begin(path, how, threads, planned)
    with young_gc(), paused_gc() as resume:
        return _write(planned(), resume)


def _write(unfinished: Unfinished, resume: Callable[[], None]) -> str:
    """Write; where that takes more than about a second, young garbage is collected meanwhile."""
    if unfinished.writer.planned_nbytes > GIB:
        resume()
    return unfinished.write()
