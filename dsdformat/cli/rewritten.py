"""What the commands that write have in common: the writing, and what is said of it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsdformat.cli.progress import progress_bar
from dsdformat.cli.render import Column, Output, format_size
from dsdformat.convert import AnyTensor, Foreign, write
from dsdformat.convert.content import tensors_of
from dsdformat.convert.foreign import walk_tree
from dsdformat.renaming import display

__all__ = ["Rewritten", "print_written", "rewrite", "written_json"]

_COLUMNS = (
    Column("name", flexible=True),
    Column("dtype"),
    Column("shape"),
    Column("size", right=True),
)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What was written, or would be.

    Attributes:
        root: The root digest; None if nothing was written.
        tensors, nbytes: How many tensors, and the length of their data; tied ones count once.
        seconds: That it took.
    """

    root: str | None
    tensors: int
    nbytes: int
    seconds: float


def rewrite(
    out: Output,
    tree: Any,
    dst: Path,
    doing: str,
    *,
    like: Foreign | None,
    overwrite: bool,
    dry_run: bool,
    user: Mapping[str, str] | None = None,
) -> Rewritten:
    """Write a tree, with a bar while that lasts; or only count, in a dry run."""
    began = time.perf_counter()
    tensors = tensors_of(tree)
    root = None
    if not dry_run:
        with progress_bar(out, doing) as progress:
            root = write(tree, dst, like=like, user=user, overwrite=overwrite, progress=progress)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return Rewritten(root, len(tensors), nbytes, time.perf_counter() - began)


def print_written(
    out: Output, dst: Path, done: Rewritten, tree: Any, more: Mapping[str, str] | None = None
) -> None:
    """Print what was written; in a dry run, each tensor that would be."""
    if done.root is None:
        leaves = ((display(path), leaf) for path, leaf in walk_tree(tree))
        out.table(
            _COLUMNS,
            (
                (name, leaf.dtype, str(list(leaf.shape)), format_size(leaf.nbytes))
                for name, leaf in leaves
                if isinstance(leaf, AnyTensor)
            ),
        )
        out.note(f"nothing was written to {shlex.quote(str(dst))}")
        return
    rate = format_size(int(done.nbytes / max(done.seconds, 1e-9)))
    out.title(str(dst))
    out.pairs(
        [
            ("root", done.root),
            ("tensors", f"{done.tensors:,}"),
            ("size", f"{format_size(done.nbytes)} in {done.seconds:.1f} s, {rate}/s"),
            *(more or {}).items(),
        ]
    )


def written_json(dst: Path, done: Rewritten) -> dict[str, Any]:
    """Return what all these commands tell programs of what was written."""
    return {
        "destination": str(dst),
        "root": done.root,
        "tensors": done.tensors,
        "nbytes": done.nbytes,
        "seconds": round(done.seconds, 3),
    }
