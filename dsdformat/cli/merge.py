"""`dsd merge`: several checkpoints as one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from dsdformat import ArgumentError
from dsdformat.cli.opening import open_source
from dsdformat.cli.options import DryRun, Json, Overwrite, Pubkey, UnknownOption
from dsdformat.cli.rewritten import Writing
from dsdformat.convert import merge as merge_trees
from dsdformat.convert import united_user

__all__ = ["HELP", "merge"]

HELP = """Write several checkpoints as one.

Dicts are united, key by key. What several have is refused by name, but for
values that are equal; rename or extract first. Chunks and codecs are kept,
and user metadata is united too; side files and placements are left behind.

\b
Examples:
  dsd merge encoder decoder model
  dsd merge part-1.safetensors part-2.safetensors whole

\b
--json prints an object with
  sources, destination  as they were given
  root                  the root digest; null in a dry run
  tensors, nbytes       how many, and the length of their data
  seconds               that it took
"""


def merge(
    ctx: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="CKPT CKPT... DST",
            help="Checkpoints of any kind, and the folder to make.",
            show_default=False,
        ),
    ],
    no_user: Annotated[
        bool, typer.Option("--no-user", help="Leave user metadata out, where it differs.")
    ] = False,
    pubkey: Pubkey = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    unknown: UnknownOption = "refuse",
    json: Json = False,
) -> None:
    """Write several checkpoints as one."""
    *ckpts, dst = paths
    if len(ckpts) < 2:
        raise ArgumentError(
            "merge takes two checkpoints or more, and the folder to make", code="bad_argument"
        )
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(open_source(ckpt, unknown, pubkey=pubkey)) for ckpt in ckpts]
        Writing(ctx.obj, dst, overwrite, dry_run, json).write(
            merge_trees([source.tree for source in sources]),
            "merging",
            *sources,
            user={} if no_user else united_user(sources),
            fields={"sources": [str(ckpt) for ckpt in ckpts]},
        )
