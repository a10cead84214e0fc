"""Convert a checkpoint of any kind into one of another: open, choose, hand to a writer.

`OUTPUTS` lists the kinds that can be written, each with the function that writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any

from dsdformat.convert.choosing import choose
from dsdformat.convert.flat_shards import joined
from dsdformat.convert.foreign import Foreign, Kind
from dsdformat.convert.kinds import open_any
from dsdformat.convert.optimizer_naming import with_optimizers
from dsdformat.convert.outputs import Job, Meter, OutputKind, Progress
from dsdformat.convert.settling import Finding, Policy
from dsdformat.convert.teams import ALONE, DOING, Team
from dsdformat.convert.write_dcp import write_dcp
from dsdformat.convert.write_dsd import write_dsd
from dsdformat.convert.write_npz import write_npz
from dsdformat.convert.write_safetensors import write_huggingface, write_safetensors
from dsdformat.convert.write_torch import write_torch
from dsdformat.errors import ArgumentError, shorten
from dsdformat.garbage import young_gc
from dsdformat.modelfiles import HF_METADATA
from dsdformat.signing import Keys

__all__ = [
    "OUTPUTS",
    "Converted",
    "Request",
    "as_ours",
    "convert",
    "convert_as",
    "find_output",
]

PathLike = str | os.PathLike[str]

_THREADS_MAX = 4

OUTPUTS: dict[str, OutputKind] = {
    kind.name: kind
    for kind in (
        OutputKind(
            "dsd",
            "a dsdformat checkpoint",
            write_dsd,
            options=("codec", "names"),
            metadata=True,
            optimizers="named",
            shared=True,
        ),
        OutputKind(
            "safetensors",
            "a safetensors file",
            write_safetensors,
            suffixes=(".safetensors",),
            options=("ties",),
            folder=False,
            metadata=True,
            shared=True,
        ),
        OutputKind(
            "huggingface",
            "a Hugging Face folder of safetensors files",
            write_huggingface,
            options=("ties", "max_shard_bytes"),
            metadata=True,
            shared=True,
        ),
        OutputKind(
            "torch",
            "a file of torch.save",
            write_torch,
            suffixes=(".pt", ".pth", ".bin", ".ckpt"),
            options=("weights_only", "form"),
            folder=False,
            optimizers="numbered",
            shared=True,
        ),
        OutputKind(
            "npz",
            "an .npz file of numpy",
            write_npz,
            suffixes=(".npz",),
            options=("ties",),
            folder=False,
        ),
        OutputKind(
            "dcp",
            "a folder of torch.distributed.checkpoint",
            write_dcp,
            options=("max_chunk_bytes", "max_file_bytes", "names"),
            optimizers="listed",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Converted:
    """What was converted.

    Attributes:
        kind: What the source is.
        to: Name of the kind that was written.
        tensors: How many tensors were written, each name counted.
        nbytes: Of their data.
        files: Names of the files that were written, below the folder if it is one.
        left_out: Display names of values that were left out, as `drop_values` asked.
        lost_metadata: Keys of free strings for which the new kind has no room.
        findings: What is not in the result as it was in the source, as `unknown` asked; and
            optimizers that keep their numbers, since no names are known.
        root: The root digest, of a checkpoint of ours.
    """

    kind: Kind
    to: str
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    lost_metadata: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    root: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What `convert` is asked for; its arguments say what each means."""

    src: PathLike | Sequence[PathLike]
    dst: PathLike
    to: str | None = None
    overwrite: bool = False
    select: str | Iterable[str] | None = None
    drop_values: bool = False
    unknown: Policy = "refuse"
    with_side_files: bool = False
    verify: bool = False
    digest: str | None = None
    pubkey: Keys | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        src: PathLike | Sequence[PathLike], dst: PathLike, arguments: Mapping[str, Any]
    ) -> Request:
        """Make one of the keyword arguments of `convert`."""
        known = {one.name for one in fields(Request)} - {"src", "dst", "options"}
        own = {name: value for name, value in arguments.items() if name in known}
        if not isinstance(own.get("select"), (str, NoneType)):
            own["select"] = list(own["select"])
        rest = {name: value for name, value in arguments.items() if name not in known}
        return Request(src, dst, options=rest, **own)

    def told(self) -> list[Any]:
        """Return what processes that convert together compare: values of the format."""
        sources = [self.src] if isinstance(self.src, (str, os.PathLike)) else self.src
        paths = [os.fspath(path) for path in (*sources, self.dst)]
        rest = [getattr(self, one.name) for one in fields(self)[2:-1]]
        # A function has another address in each process; what it chooses is compared later.
        plain = [(name, "" if callable(one) else one) for name, one in self.options.items()]
        return [*paths, *map(repr, (*rest, sorted(plain)))]

    def check(self, world_size: int) -> OutputKind:
        """Return the kind to write.

        Raises:
            ArgumentError: `bad_argument`: it has no such option, or cannot be written so.
        """
        kind = find_output(self.dst, self.to)
        extra = sorted(self.options.keys() - set(kind.options))
        if extra:
            raise ArgumentError(
                f"{kind.name} has no option {extra[0]}",
                code="bad_argument",
                hint=f"it has {', '.join(kind.options)}" if kind.options else None,
            )
        if self.with_side_files and not kind.folder:
            raise ArgumentError(
                f"{kind.what} has no room for other files",
                code="bad_argument",
                hint="convert to a folder, as to='huggingface'",
            )
        if world_size > 1 and not kind.shared:
            raise ArgumentError(
                f"{kind.what} is written by one process",
                code="bad_argument",
                hint="call dsdformat.convert.convert in one of them",
            )
        return kind


# long: the options and their documentation
def convert(  # noqa: PLR0913
    src: PathLike | Sequence[PathLike],
    dst: PathLike,
    *,
    to: str | None = None,
    overwrite: bool = False,
    select: str | Iterable[str] | None = None,
    drop_values: bool = False,
    unknown: Policy = "refuse",
    with_side_files: bool = False,
    verify: bool = False,
    digest: str | None = None,
    pubkey: Keys | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Converted:
    """Convert a checkpoint of any kind that is known into one of another kind.

    Tensors go from file to file in pieces, bit for bit. What of the state the new kind cannot
    hold is refused before anything is written, with its place. The result appears in one step,
    when it is complete and durable; where that fails, or is interrupted, everything is as it was.

    Args:
        src: A checkpoint of any kind that `open_any` opens; which one is seen from its content.
            Flat parameters of fairscale's FSDP become the parameters in them; what several ranks
            have saved is a folder, or a list of files in the order of the ranks.
        dst: What to make; folders above it are made.
        to: The kind to make: `dsd`, `safetensors`, `huggingface`, `torch`, `dcp`, as `OUTPUTS`
            lists them. By default what the ending of `dst` means, and else `dsd`.
        overwrite: Whether to replace what is at `dst`, once the new one is complete. A folder with
            files that are no checkpoint's is never replaced.
        select: What to convert: globs of names, as `dsdformat.torch.load` has them. The branch
            that they have in common becomes the root, so that `select="model"` gives what lies
            below `model`, under its own names.
        drop_values: Whether to leave out what is no tensor.
        unknown: What to do with values of classes that are not known; see `open_foreign`.
        with_side_files: Whether to carry `config.json`, files of a tokenizer and the like along,
            which lie beside the source.
        verify: Whether to compare the source with the checksums that it has first. Blocks of
            checkpoints of ours are always compared with their digests.
        digest, pubkey: Of a checkpoint of ours, the root digest that it must have, and a key that
            must have signed it; see `dsdformat.open`.
        progress: Called with bytes done and bytes in all, from several threads.
        options: Of the kind: `codec` (dsd), `ties="drop"` or `"duplicate"` (safetensors,
            huggingface), `max_shard_bytes` as a number or as `"5GB"` (huggingface);
            `weights_only=False` and `form="stream"` (torch); `max_chunk_bytes` and
            `max_file_bytes` (dcp); `names` (dsd, dcp) of parameters that an optimizer numbers,
            where the file does not tell which is which: a list in the order of the groups, a dict
            of lists by the names of the optimizers, or the path of a JSON file or a checkpoint
            that has them.

    Raises:
        ConvertError: the source is of no kind that is known, or is malformed.
        FormatError: the source is a checkpoint of ours that is damaged, or not the one that was
            asked for.
        UnsupportedValueError: the new kind cannot hold something.
        EntryNotFoundError: `select` matches nothing.
        StorageError: `already_exists`, `not_replaceable`, or the medium failed.

    Ranks: local.
    Memory: names and values, and per thread 8 MiB, or 64 MiB for tensors whose stored pieces are
        no ranges of rows; 40 MiB for `dsd`.
    """
    request = Request(
        *(src, dst, to, overwrite, select, drop_values, unknown, with_side_files),
        *(verify, digest, pubkey, options),
    )
    return convert_as(request, ALONE, progress)


def convert_as(request: Request, team: Team, progress: Progress | None = None) -> Converted:
    """Convert as one of the processes of a team, which all ask for the same.

    Raises:
        As `convert`; if that is on some ranks alone, what `team.together` raises on all.

    Ranks: collective over the team.
    Memory: as `convert`, on each.
    """
    with team.together(DOING):
        kind = request.check(team.world_size)
    with young_gc(), ExitStack() as stack:
        with team.together(DOING):
            opened = stack.enter_context(
                open_any(
                    request.src,
                    unknown=request.unknown,
                    digest=request.digest,
                    pubkey=request.pubkey,
                )
            )
        if request.verify:
            with team.together(DOING):
                opened.verify(team.rank, team.world_size)
        with team.together(DOING):
            chosen, left_out, notes = _chosen(opened, kind, request)
            job = Job(
                chosen,
                os.fspath(request.dst),
                request.overwrite,
                Meter(progress),
                opened.side_files() if request.with_side_files else {},
                _threads(opened),
                team,
            )
            identity = _identity(chosen) if team.world_size > 1 else ()
        team.check_agreement(identity, "what the source holds")
        options = {name: one for name, one in request.options.items() if name != "names"}
        written = kind.write(job, **options)
    return Converted(
        kind=opened.kind,
        to=kind.name,
        tensors=written.tensors,
        nbytes=written.nbytes,
        files=written.files,
        left_out=left_out,
        lost_metadata=() if kind.metadata else tuple(sorted(opened.metadata.keys() - HF_METADATA)),
        findings=(*chosen.findings, *notes),
        root=written.root,
    )


def _chosen(
    opened: Foreign, kind: OutputKind, request: Request
) -> tuple[Foreign, tuple[str, ...], tuple[Finding, ...]]:
    """Return what is converted, what was left out of it, and what is to be told."""
    chosen, left_out = choose(opened, request.select, drop_values=request.drop_values)
    chosen = joined(chosen, request.unknown)
    notes: tuple[Finding, ...] = ()
    if kind.optimizers is not None:
        names = request.options.get("names")
        chosen, notes = with_optimizers(chosen, kind.optimizers, names, source=opened)
    return chosen, left_out, notes


def as_ours(opened: Foreign) -> Foreign:
    """Return a checkpoint as `convert` makes it one of ours; it stays open, and is what is read.

    Raises:
        ConvertError: `flat_shards`: it is that of one of several ranks.

    Ranks: local.
    """
    if opened.checkpoint is not None:
        return opened
    return with_optimizers(joined(opened, "record"), "named", source=opened)[0]


def _identity(chosen: Foreign) -> list[Any]:
    """Return what processes that see the same source agree upon: values of the format."""
    tensors = [[name, one.dtype, list(one.shape)] for name, one in chosen]
    own = chosen.checkpoint
    return [chosen.kind.value, tensors, sorted(chosen.metadata.items()), own and own.root]


def find_output(path: PathLike, to: str | None) -> OutputKind:
    """Return the kind to write at a path.

    Raises:
        ArgumentError: `bad_argument`: there is no such kind.
    """
    if to is None:
        name = os.fspath(path)
        endings = (kind for kind in OUTPUTS.values() if name.endswith(kind.suffixes or "\0"))
        return next(endings, OUTPUTS["dsd"])
    kind = OUTPUTS.get(to)
    if kind is None:
        raise ArgumentError(
            f"{shorten(to)} is no kind that is written",
            code="bad_argument",
            hint="choose one of " + ", ".join(OUTPUTS),
        )
    return kind


def _threads(opened: Foreign) -> int:
    """Return how many threads copy: one where what is deflated has to be read in order."""
    return 1 if opened.kind is Kind.NPZ else min(_THREADS_MAX, os.cpu_count() or 1)
