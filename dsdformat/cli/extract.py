"""`dsd extract`: a part of a checkpoint, as one of its own."""

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
from dsdformat.cli.rewritten import Writing
from dsdformat.convert import extract as extract_tree

__all__ = ["HELP", "extract"]

HELP = """Write a part of a checkpoint as a checkpoint of its own.

Names stay as they are, and tied tensors stay tied. A list is taken whole, or
not. Chunks, codecs, the block size, user metadata and side files are kept;
placements are not, for one process writes.

\b
Examples:
  dsd extract step-1000 weights --select model
  dsd extract step-1000 head --select 'model/head.*' --select step

\b
--json prints an object with
  source, destination  as they were given
  root                 the root digest; null in a dry run
  tensors, nbytes      how many, and the length of their data
  seconds              that it took
"""


def extract(
    ctx: typer.Context,
    ckpt: Source,
    dst: Destination,
    select: Annotated[
        list[str], typer.Option(metavar="GLOB", help="What to take, by name. May be repeated.")
    ],
    digest: Digest = None,
    pubkey: Pubkey = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    unknown: UnknownOption = "refuse",
    json: Json = False,
) -> None:
    """Write a part of a checkpoint."""
    writing = Writing(ctx.obj, dst, overwrite, dry_run, json)
    with open_source(ckpt, unknown, digest=digest, pubkey=pubkey) as source:
        tree = extract_tree(source.tree, typed_globs(select, names_in(source.tree)))
        writing.write(tree, "extracting", source, fields={"source": str(ckpt)})
