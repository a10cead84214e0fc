"""`dsd cast`: tensors in another dtype."""

from __future__ import annotations

from typing import Annotated

import typer

from dsdformat.cli.choice import names_in, typed_globs
from dsdformat.cli.opening import open_source
from dsdformat.cli.options import (
    Destination,
    Digest,
    DryRun,
    Json,
    Overwrite,
    Pubkey,
    Source,
    UnknownOption,
)
from dsdformat.cli.render import Output, format_count
from dsdformat.cli.rewritten import Writing
from dsdformat.convert import cast as cast_tree

__all__ = ["HELP", "cast"]

HELP = """Write a checkpoint with tensors in another dtype.

Floats are rounded to nearest even, as torch does. What is too large becomes
infinite (NaN, or the greatest number, in dtypes without infinity); that is
counted and told. Integers are cast only if each stays the same number, unless
--lossy is given. What an optimizer keeps is left, unless a GLOB begins with
its name, as optimizer/*. Chunks, codecs, the block size, user metadata and
side files are kept; placements are not.

\b
Examples:
  dsd cast step-1000 half --dtype bfloat16
  dsd cast step-1000 half --dtype float16 --select 'model/*.weight'

\b
--json prints an object with
  source, destination  as they were given
  dtype                that was asked for
  cast                 name, from (its dtype), overflows (how many elements
                       were too large) of each tensor that was cast
  root                 the root digest; null in a dry run
  tensors, nbytes      how many, and the length of their data
  seconds              that it took
"""

_SHOWN = 5


def cast(  # noqa: PLR0913, PLR0917  the options of a command are its parameters
    ctx: typer.Context,
    ckpt: Source,
    dst: Destination,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="As bfloat16.")],
    select: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB", help="What to cast, by name; all floats if not given. May be repeated."
        ),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Let integers become other numbers.")
    ] = False,
    digest: Digest = None,
    pubkey: Pubkey = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    unknown: UnknownOption = "refuse",
    json: Json = False,
) -> None:
    """Write a checkpoint with tensors in another dtype."""
    writing = Writing(ctx.obj, dst, overwrite, dry_run, json)
    with open_source(ckpt, unknown, digest=digest, pubkey=pubkey) as source:
        globs = typed_globs(select, names_in(source.tree)) if select else None
        found = cast_tree(source.tree, dtype, select=globs, lossy=lossy)
        rows = (
            {"name": name, "from": old, "overflows": found.overflows.get(name, 0)}
            for name, old in found.dtypes.items()
        )
        cast_count = format_count(len(found.dtypes), "tensor")
        writing.write(
            *(found.tree, "casting", source),
            fields={"source": str(ckpt), "dtype": dtype, "cast": rows},
            more={"cast": f"{cast_count} to {dtype}"},
        )
        if json:
            return
        out: Output = ctx.obj
        if not found.dtypes:
            out.note(f"nothing was cast: what was asked for is {dtype}, or kept by an optimizer")
        for name, count in list(found.overflows.items())[:_SHOWN]:
            out.note(f"{name}: {format_count(count, 'element')} too large for {dtype}")
        if len(found.overflows) > _SHOWN:
            out.note(f"and in {len(found.overflows) - _SHOWN:,} more tensors; --json lists all")
