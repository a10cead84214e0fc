"""What the commands that write a tree anew have in common: the writing, and what is said of it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsdformat.cli.opening import tell_findings
from dsdformat.cli.progress import progress_bar
from dsdformat.cli.render import Column, Output, format_pace, format_size
from dsdformat.convert import AnyTensor, Foreign, write
from dsdformat.convert.content import tensors_of
from dsdformat.convert.foreign import walk_tree
from dsdformat.renaming import display

__all__ = ["Writing"]

_COLUMNS = (
    Column("name", flexible=True),
    Column("dtype"),
    Column("shape"),
    Column("size", right=True),
)


@dataclass(frozen=True, slots=True)
class Writing:
    """What such a command was asked for.

    Attributes:
        out: Where is told what was written.
        dst: The folder to make.
        overwrite, dry_run, json: The options.
    """

    out: Output
    dst: Path
    overwrite: bool
    dry_run: bool
    json: bool

    def write(
        self,
        tree: Any,
        doing: str,
        *sources: Foreign,
        user: Mapping[str, str] | None = None,
        fields: Mapping[str, Any] | None = None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Write a tree, with a bar while that lasts, and tell of it; in a dry run, only tell.

        Args:
            tree: What is written.
            doing: What the bar says.
            sources: What it came from, open. What one alone has beside its tree is kept.
            user: User metadata, in place of that.
            fields: What programs are told too.
            more: What people are told too.
        """
        began = time.perf_counter()
        tensors = tensors_of(tree)
        root = None if self.dry_run else self._written(tree, doing, sources, user)
        tell_findings(self.out, *sources)
        nbytes, seconds = sum(tensor.nbytes for tensor in tensors), time.perf_counter() - began
        if self.json:
            document = {
                "destination": str(self.dst),
                "root": root,
                "tensors": len(tensors),
                "nbytes": nbytes,
                "seconds": round(seconds, 3),
            }
            self.out.document({**document, **(fields or {})})
        elif root is None:
            self._print_planned(tree)
        else:
            size = ("size", format_pace(nbytes, seconds))
            pairs = [("root", root), ("tensors", f"{len(tensors):,}"), size]
            self.out.title(str(self.dst))
            self.out.pairs([*pairs, *(more or {}).items()])

    def _written(
        self, tree: Any, doing: str, sources: Sequence[Foreign], user: Mapping[str, str] | None
    ) -> str:
        like = sources[0] if len(sources) == 1 else None
        with progress_bar(self.out, doing) as progress:
            return write(
                *(tree, self.dst),
                like=like,
                user=user,
                overwrite=self.overwrite,
                progress=progress,
            )

    def _print_planned(self, tree: Any) -> None:
        leaves = ((display(path), leaf) for path, leaf in walk_tree(tree))
        self.out.table(
            _COLUMNS,
            (
                (name, leaf.dtype, str(list(leaf.shape)), format_size(leaf.nbytes))
                for name, leaf in leaves
                if isinstance(leaf, AnyTensor)
            ),
        )
        self.out.note(f"nothing was written to {shlex.quote(str(self.dst))}")
