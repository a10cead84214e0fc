"""Load a state: open, compare, check, read, put in place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any, overload

import torch

from dsdformat.convert import Policy
from dsdformat.convert.opening import Paths, open_origin
from dsdformat.convert.reading import ForeignReader
from dsdformat.errors import MismatchError
from dsdformat.format.digests import digest as digest_of
from dsdformat.garbage import paused_gc, young_gc
from dsdformat.limits import GIB
from dsdformat.reader import Checkpoint
from dsdformat.renaming import renamed
from dsdformat.selection import Rename
from dsdformat.signing import Keys
from dsdformat.torch.alike import KEY_NBYTES, find_alike
from dsdformat.torch.background import settle
from dsdformat.torch.builder import Builder, Form
from dsdformat.torch.comm import Comm, fingerprint
from dsdformat.torch.fitting import fitted
from dsdformat.torch.introspect import as_mapping
from dsdformat.torch.loading import Loading
from dsdformat.torch.moves import fill
from dsdformat.torch.options import ByName, Device, LoadOptions
from dsdformat.torch.origin import Origin
from dsdformat.torch.per_rank import chosen
from dsdformat.torch.report import Loaded, LoadReport
from dsdformat.torch.stored import (
    Composite,
    Path,
    display,
    find_items,
    leaves,
    names_of,
    pruned,
    read_tree,
)

__all__ = ["load", "open_settled"]


@overload
def load(
    path: Paths,
    state: None = None,
    *,
    strict: bool | Mapping[str, bool] = ...,
    device: Device | ByName | None = ...,
    dtype: torch.dtype | ByName | None = ...,
    rename: Rename | None = ...,
    select: str | Iterable[str] | None = ...,
    mmap: bool = ...,
    types: Iterable[type] = ...,
    verify: bool = ...,
    digest: str | None = ...,
    pubkey: Keys | None = ...,
    threads: int | None = ...,
    unknown: Policy = ...,
) -> dict[str, Any]: ...


@overload
def load(
    path: Paths,
    state: Mapping[str, Any],
    *,
    strict: bool | Mapping[str, bool] = ...,
    device: Device | ByName | None = ...,
    dtype: torch.dtype | ByName | None = ...,
    rename: Rename | None = ...,
    select: str | Iterable[str] | None = ...,
    mmap: bool = ...,
    types: Iterable[type] = ...,
    verify: bool = ...,
    digest: str | None = ...,
    pubkey: Keys | None = ...,
    threads: int | None = ...,
    unknown: Policy = ...,
    group: Any = ...,
    alone: bool = ...,
    share_reads: bool = ...,
) -> Loaded: ...


# long: the options and their documentation
def load(  # noqa: PLR0913
    path: Paths,
    state: Mapping[str, Any] | None = None,
    *,
    strict: bool | Mapping[str, bool] = True,
    device: Device | ByName | None = None,
    dtype: torch.dtype | ByName | None = None,
    rename: Rename | None = None,
    select: str | Iterable[str] | None = None,
    mmap: bool = False,
    types: Iterable[type] = (),
    verify: bool = True,
    digest: str | None = None,
    pubkey: Keys | None = None,
    threads: int | None = None,
    unknown: Policy = "refuse",
    group: Any = None,
    alone: bool = False,
    share_reads: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint into modules, optimizers and tensors, or as a plain nested state.

    With a state, everything is compared first: names, shapes, dtypes. Only then are tensors read,
    into the memory that the state's own tensors have; parameters stay the objects that optimizers
    and others hold, tied ones stay tied. Without one, new tensors are made.

    On several ranks, all of them load into a state together, however it was saved: of DTensors, and
    of what lies in flat shards of FSDP1, each rank reads the bytes of its own shard.

    Foreign checkpoints are loaded in the same way, with the same options: a safetensors file, a
    Hugging Face folder, a file of `torch.save`, a folder of DCP, an npz file. Nothing in them is
    executed. Where no root key is one of the state and the checkpoint is a state dict, it is that
    of the state's only module. What an optimizer keeps under numbers belongs to the parameters
    that the live one has at these places of its groups.

    Args:
        path: The checkpoint's folder, or a foreign file or folder; or a mapping from root keys to
            foreign ones, as `{"model": "hf-folder", "optimizer": "optimizer.pt"}`.
        state: What to load into, in the form that `save` takes. Plain values in it are not
            changed: what is stored in their place is returned, whatever it is; so
            `{"rng": None}` asks for all that is stored under `rng`. None for the plain nested
            state.
        strict: Whether names that are missing or unexpected, and tensors that differ in shape or
            dtype, are errors; else what fits is loaded. Of globs: a mapping to either. On several
            ranks a name is unexpected if none of them wants it.
        device: Where new tensors are made, and parameters on the meta device materialized; the
            CPU if None. One device, a mapping from globs to devices, or a function of the name.
        dtype: The dtype that floating tensors may be, or are, converted to: one, a mapping from
            globs, or a function of the name. Never applies to the state of optimizers.
        rename: What entries of the checkpoint are called in the state: a mapping of names, pairs
            of prefixes, or a function from a name to another or to None, which leaves it out.
            Entries of optimizers follow the parameters they belong to.
        select: Globs: the entries that are meant. Others are neither read nor wanted, and their
            files need not be there.
        mmap: Whether new tensors are maps of the file instead of copies, where they are on the
            CPU and stored raw in one piece. Copy-on-write: the file never changes.
        types: Tensor subclasses that may be made, of those with `__tensor_flatten__`.
        verify: Whether to compare data with its digests; also for maps, which are read once then.
            What a foreign checkpoint has checksums of (`torch.save`, DCP) is compared as a whole
            before anything is changed, a part by each of the ranks; safetensors has none.
        digest: The root digest that the checkpoint must have. A foreign one has none.
        pubkey: An Ed25519 key that must have signed the checkpoint; see `dsdformat.open`. A foreign
            one has no signatures.
        threads: How many threads read; up to 8 if None.
        unknown: What to do with objects of a foreign checkpoint that are no plain values: `refuse`
            it, `drop` them, or `record` their names and parts as plain values.
        group: The process group of the ranks that load together; the default one if None.
        alone: Whether this rank loads by itself, as others do not make this call.
        share_reads: Whether ranks that want the same boxes, as replicas do, read each of them
            once: one rank reads and verifies it, and passes it on. It is one that has written it,
            where as many ranks read as have written. The same is done with blocks of which they
            want parts, as columns of what is stored by rows, where each would read much more than
            it wants. False for each to read by itself.

    Names are display names, as `dsd ls` prints them: `model/layers.0.weight`. In a glob, `*` also
    matches `/`, and the name of a branch means all that is below it.

    Returns:
        With a state: a `Loaded`, the values that have no place in it, with a `report`.
        Without: the nested state.

    Raises:
        MismatchError: `state_mismatch`, with a `report`; nothing was changed.
        EntryNotFoundError: `select` or `rename` name nothing that is there.
        UnsupportedValueError: a dtype that this torch lacks, or a type that is not in `types`.
        ConvertError: a foreign checkpoint is damaged, or of no kind that is known, or holds
            objects that are no plain values.
        FormatError: the checkpoint is damaged, or not signed; see `dsdformat.open`. After
            `checksum_mismatch`, tensors of the state may hold part of what was read.
        DistributedError: `rank_failed`, on every rank, with the cause of each rank that failed.
            `ranks_absent`: a rank has ended, hangs, or makes another call, as far as the group can
            tell; `failures` has those of which nothing is heard.
        RankDisagreementError: `ranks_disagree`: ranks load different checkpoints, or disagree
            about `share_reads`.

    Ranks: collective over the group with a state; local without one, and if `alone`.
    Memory: new tensors, and one block per thread; 32 MiB more where tensors of the state are not
    contiguous, not on the CPU or of another dtype; up to 64 MiB to share reads.
    """
    options = LoadOptions.of(strict, device, dtype, rename, select, mmap, types)

    opened = functools.partial(
        open_settled,
        path,
        verify=verify,
        digest=digest,
        pubkey=pubkey,
        threads=threads,
        unknown=unknown,
    )
    if state is None:
        with young_gc(), paused_gc() as resume, contextlib.closing(opened()) as origin:
            if not _is_short(origin):
                resume()
            tree, _ = renamed(read_tree(origin), options.renames)
            options.selection.check_used([display(place) for place, _ in leaves(tree)])
            if isinstance(origin, ForeignReader):
                origin.prepare((), verify=verify)
            return _load_plain(origin, tree, options)
    comm = Comm.alone() if alone else Comm(group)
    with young_gc(), paused_gc() as resume, contextlib.ExitStack() as stack:
        with comm.together("load") as step:
            origin = stack.enter_context(contextlib.closing(opened()))
            what = [_named(origin), f"share_reads={share_reads}"]
            step.told = fingerprint(what)
        comm.check_told(step.heard, what, "what is loaded")
        with comm.together("load") as step:
            template = as_mapping(state)
            tree, moved = renamed(read_tree(origin), options.renames)
            hint = None
            if isinstance(origin, ForeignReader):
                tree, hint = fitted(tree, template, origin.name)
            tree, template, fresh = chosen(tree, template, comm.rank)
            loading = Loading(origin, tree, template, options, moved)
            loading.plan.report.fresh += fresh
            if options.selection.everything and comm.rank == 0 and isinstance(origin, Checkpoint):
                origin.check_files()  # what is gone is told, though nothing in it may be wanted
            step.told = bool(loading.plan.report.unexpected)
        if all(step.heard):
            _leave_to_others(comm, loading.plan.report)
        else:  # what one rank lacks among these, it wants
            loading.plan.report.unexpected.clear()
        with comm.together("load"):
            _check(loading, hint)
            if isinstance(origin, ForeignReader):
                origin.prepare(loading.wanted(), verify=verify, part=comm.rank, of=comm.world_size)
        loading.prepare()
        if not _is_short(origin):
            resume()
        return loading.run(comm, share_reads=share_reads)


def open_settled(path: Paths, **options: Any) -> Checkpoint | ForeignReader:
    """Open what is loaded, once a save to it has ended that is in flight."""
    settle(path)
    return open_origin(path, **options)


def _is_short(origin: Checkpoint | ForeignReader) -> bool:
    """Whether all of it is read within about a second, so that garbage can wait for the end.

    What is made for a load is garbage by then, and would be walked after each step of it.
    """
    return isinstance(origin, Checkpoint) and sum(origin.data_files.values()) <= GIB


def _named(origin: Checkpoint | ForeignReader) -> str:
    """Return what is equal on ranks that load the same."""
    if isinstance(origin, ForeignReader):
        return f"{len(origin)} tensors of {origin.name}"
    return f"root {origin.root}"


def _leave_to_others(comm: Comm, report: LoadReport) -> None:
    """Take off what this rank does not want and another one does, as stages of a pipeline.

    Ranks: collective over the group.
    """
    if comm.world_size == 1:
        return
    names = list(dict.fromkeys(report.unexpected))
    keys = [digest_of(name.encode("utf-8", "surrogatepass"))[:KEY_NBYTES] for name in names]
    holders = zip(names, find_alike(comm, keys), strict=True)
    report.unexpected[:] = [name for name, ranks in holders if len(ranks) == comm.world_size]


def _check(loading: Loading, hint: str | None) -> None:
    """Raise if something does not fit, with a better hint if there is one."""
    try:
        loading.check()
    except MismatchError as error:
        if hint is None:
            raise
        raise MismatchError(
            error.message, code=error.code, hint=hint, report=error.report
        ) from None


def _load_plain(origin: Origin, tree: dict[str, Any], options: LoadOptions) -> dict[str, Any]:
    tree = pruned(tree, options.selection)
    kept = tuple(f"{display(path)}/" for path in _kept_dtypes(tree, ()))

    def form(name: str) -> Form:
        cast = None if name.startswith(kept) else options.dtype(name)
        return Form(cast, options.device(name))

    names = names_of(tree)
    builder = Builder(
        origin, mmap=options.mmap, types=options.types, form=form, names=lambda: names
    )
    builder.need(tree)
    fill(origin, list(builder.moves()))
    result: dict[str, Any] = builder.make(tree, ())
    return result


def _kept_dtypes(value: Any, path: Path) -> Iterable[Path]:
    """List the branches in which nothing is cast: states of optimizers, parts of a tensor."""
    if type(value) is Composite or (
        isinstance(value, dict) and path and "state" in value and "param_groups" in value
    ):
        yield path
        return
    for key, item in find_items(value) or ():
        yield from _kept_dtypes(item, (*path, key))
