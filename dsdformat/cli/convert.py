"""`dsd convert`: make a checkpoint of one kind of one of another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dsdformat.cli.options import Digest, Json, Overwrite, Pubkey
from dsdformat.cli.progress import progress_bar
from dsdformat.cli.render import Output, format_count, format_pace
from dsdformat.convert import OUTPUTS, Converted
from dsdformat.convert import convert as convert_checkpoint
from dsdformat.format.paths import render_path

__all__ = ["HELP", "convert"]

HELP = """Make a checkpoint of one kind of one of another.

What SRC is, is seen from its content. What it holds and the new kind cannot
is refused before anything is written, unless --select, --drop-values or
--unknown say what to do with it. DST appears when it is complete.

\b
Kinds to write, for --to:
  dsd          a folder of ours; where DST does not say otherwise
  safetensors  one file of tensors; where DST ends in .safetensors
  huggingface  a folder of safetensors files, with an index if several
  torch        a file of torch.save; where DST ends in .pt, .pth, .bin, .ckpt
  dcp          a folder of torch.distributed.checkpoint, which dcp.load reads
  npz          a file of numpy.savez; where DST ends in .npz

\b
Optimizers get the names of their parameters where the source tells which is
which, or --names does; files of torch.save get numbers and names. A folder of
files that ranks of fairscale's FSDP saved becomes a whole model.

\b
Examples:
  dsd convert step-1000 model --to huggingface --select model
  dsd convert hub/model step-0 --with-side-files
  dsd convert pytorch_model.bin model.safetensors
  dsd convert dcp-1000 out --to huggingface --max-shard-size 2GB
  dsd convert last.ckpt step-0 --names names.json
  dsd convert step-1000 step-1000.pt

\b
--json prints an object with
  source, destination  as they were given
  kind, to             what the source is, and what was written
  tensors, nbytes      how many, and the length of their data
  files                names of the files that were written
  left_out             values that --drop-values left out
  lost_metadata        keys of free strings that the new kind has no room for
  findings             what --unknown dropped or recorded, and optimizers that
                       keep their numbers: path, name, reason
  root                 the root digest, of a folder of ours
  seconds              that it took
"""

_SHOWN = 5

Source = Annotated[Path, typer.Argument(metavar="SRC", help="What there is.", show_default=False)]
Destination = Annotated[
    Path, typer.Argument(metavar="DST", help="What to make.", show_default=False)
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="What to convert, by name; the branch in common becomes the root. May be repeated.",
    ),
]


# long: the options and their help
def convert(  # noqa: PLR0913, PLR0917  the options of a command are its parameters
    ctx: typer.Context,
    src: Source,
    dst: Destination,
    to: Annotated[str | None, typer.Option(metavar="KIND", help="What to write.")] = None,
    select: Select = None,
    drop_values: Annotated[
        bool, typer.Option("--drop-values", help="Leave out what is no tensor.")
    ] = False,
    ties: Annotated[
        Literal["drop", "duplicate"] | None,
        typer.Option(help="Write a tied tensor once, and record its names; or under each name."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most bytes of a file, as 5GB or 512MiB.")
    ] = None,
    codec: Annotated[
        Literal["raw", "zstd", "planes+zstd"] | None,
        typer.Option(help="How data are compressed in a folder of ours."),
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Names of an optimizer's numbers: a JSON list, or a checkpoint that has them.",
        ),
    ] = None,
    weights_only: Annotated[
        bool | None,
        typer.Option(help="Write for torch only what torch.load(weights_only=True) reads."),
    ] = None,
    with_side_files: Annotated[
        bool, typer.Option("--with-side-files", help="Carry config.json and the like along.")
    ] = False,
    unknown: Annotated[
        Literal["refuse", "drop", "record"],
        typer.Option(help="What to do with objects of classes that are not known."),
    ] = "refuse",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the source with its checksums first.")
    ] = False,
    digest: Digest = None,
    pubkey: Pubkey = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> int:
    """Convert, and print what was written."""
    out: Output = ctx.obj
    began = time.perf_counter()
    given = {
        "ties": ties,
        "max_file_bytes" if to == "dcp" else "max_shard_bytes": max_shard_size,
        "codec": codec,
        "names": names,
        "weights_only": weights_only,
    }
    options: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
    with progress_bar(out, "converting") as progress:
        result = convert_checkpoint(
            src,
            dst,
            to=to,
            overwrite=overwrite,
            select=select or None,
            drop_values=drop_values,
            unknown=unknown,
            with_side_files=with_side_files,
            verify=verify,
            digest=digest,
            pubkey=pubkey,
            progress=progress,
            **options,
        )
    seconds = time.perf_counter() - began
    if json:
        out.document(_document(src, dst, result, seconds))
    else:
        _print(out, dst, result, seconds)
    return 0


def _print(out: Output, dst: Path, result: Converted, seconds: float) -> None:
    out.line(f"{dst}: {OUTPUTS[result.to].what}", "bold")
    out.pairs(
        [
            ("from", result.kind.value),
            ("tensors", f"{result.tensors:,}"),
            ("size", format_pace(result.nbytes, seconds)),
            ("files", _some(result.files) if result.files != (dst.name,) else ""),
            ("root", result.root or ""),
            ("left out", _some(result.left_out)),
            ("lost", _some([f"metadata {key}" for key in result.lost_metadata])),
        ]
    )
    if result.findings:
        found = format_count(len(result.findings), "thing")
        out.note(f"{found} not kept as in the source: {_some(list(map(str, result.findings)))}")


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _document(src: Path, dst: Path, result: Converted, seconds: float) -> dict[str, Any]:
    return {
        "source": str(src),
        "destination": str(dst),
        "kind": result.kind.value,
        "to": result.to,
        "tensors": result.tensors,
        "nbytes": result.nbytes,
        "files": list(result.files),
        "left_out": list(result.left_out),
        "lost_metadata": list(result.lost_metadata),
        "findings": [
            {"path": render_path(one.path), "name": one.name, "reason": one.reason}
            for one in result.findings
        ],
        "root": result.root,
        "seconds": round(seconds, 3),
    }
