"""`dsd cp`: a checkpoint, copied byte for byte and verified."""

from __future__ import annotations

import time
from pathlib import Path

import typer

import dsdformat
from dsdformat import ArgumentError
from dsdformat.cli.opening import is_ours
from dsdformat.cli.options import Ckpt, Destination, Digest, Json, Overwrite, Pubkey
from dsdformat.cli.progress import progress_bar
from dsdformat.cli.render import Output, format_pace
from dsdformat.convert import copy

__all__ = ["HELP", "cp"]

HELP = """Copy a checkpoint of ours, and verify the copy before it appears.

Every byte is copied: ranks, placements, chunks, codecs and the root digest
stay as they are, with the signatures over it. Files that do not belong to the
checkpoint are left behind.
Damage is told with its place, and then nothing is made.

\b
Examples:
  dsd cp step-1000 /backup/step-1000
  dsd cp step-1000 copy --digest "$(cat step-1000.root)"
  dsd cp step-1000 copy --pubkey key.pub

\b
--json prints an object with
  source, destination  as they were given
  root                 the root digest
  files, nbytes        how many files there are, and their length
  seconds              that it took
"""


def cp(
    ctx: typer.Context,
    src: Ckpt,
    dst: Destination,
    digest: Digest = None,
    pubkey: Pubkey = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Copy a checkpoint, and print its root digest."""
    out: Output = ctx.obj
    began = time.perf_counter()
    _check_ours(src)
    with progress_bar(out, "copying") as progress:
        root = copy(src, dst, digest=digest, pubkey=pubkey, overwrite=overwrite, progress=progress)
    with dsdformat.open(dst) as checkpoint:
        lengths = [*checkpoint.data_files.values(), *checkpoint.side_files.values()]
        nbytes, files = sum(lengths) + checkpoint.manifest_nbytes, len(lengths) + 1
    seconds = time.perf_counter() - began
    if json:
        out.document(
            {
                "source": str(src),
                "destination": str(dst),
                "root": root,
                "files": files,
                "nbytes": nbytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    out.title(str(dst))
    size = format_pace(nbytes, seconds)
    out.pairs([("root", root), ("files", f"{files:,}"), ("size", size)])


def _check_ours(src: Path) -> None:
    if not is_ours(src):
        raise ArgumentError(
            f"{src} is not a checkpoint of ours",
            code="bad_argument",
            hint="dsd convert makes one of it; cp copies a file as it is",
        )
