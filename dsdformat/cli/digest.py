"""`dsd digest`: the digests that name a checkpoint, its state, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from dsdformat import ArgumentError
from dsdformat.cli.choice import names_in, typed_globs
from dsdformat.cli.escapes import fit
from dsdformat.cli.opening import open_source, tell_findings
from dsdformat.cli.options import Json, Source
from dsdformat.cli.progress import progress_bar
from dsdformat.cli.render import NAME_WIDTH, Output
from dsdformat.convert import AnyTensor, Foreign, content_digest, tensor_digest
from dsdformat.convert.content import known_digest
from dsdformat.convert.converting import as_ours
from dsdformat.convert.foreign import walk_tree
from dsdformat.errors import EntryNotFoundError
from dsdformat.renaming import display
from dsdformat.selection import Selection

__all__ = ["HELP", "digest"]

HELP = """Print the digest of a checkpoint, or of what it holds.

The root digest names a folder of ours to the last byte. With --content it is
the digest of the state: the same in every layout, codec and kind of file that
holds all of it, for another kind is read as "dsd convert" makes it one of
ours. With NAMES, which may be globs, it is that of each tensor. Data that has
digests in the manifest is not read; "dsd verify" checks that it has them.

\b
Examples:
  dsd digest step-1000 > step-1000.root
  dsd digest step-1000 --content
  dsd digest model.safetensors '*.weight'

\b
--json prints an object with
  checkpoint, root  root: null for another kind of file
  content           digest of the state; null where it was not asked for
  tensors           with NAMES: name, dtype, shape, digest
"""


def digest(
    ctx: typer.Context,
    ckpt: Source,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAMES]...", help="Tensors.", show_default=False)
    ] = None,
    content: Annotated[
        bool, typer.Option("--content", help="Of the state, whatever file it lies in.")
    ] = False,
    json: Json = False,
) -> None:
    """Print digests."""
    out: Output = ctx.obj
    with open_source(ckpt) as source, progress_bar(out, "hashing") as progress:
        root = source.checkpoint.root if source.checkpoint else None
        if root is None and not content and not names and not json:
            raise ArgumentError(
                f"only a checkpoint of ours has a root digest, and not {source.kind.value}",
                code="bad_argument",
                hint="--content gives the digest of what it holds",
            )
        found = content_digest(as_ours(source).tree, progress) if content and not names else None
        rows = _rows(source, names or [], progress)
        if json:
            fields: dict[str, Any] = {"checkpoint": str(ckpt), "root": root, "content": found}
            if names:
                fields["tensors"] = (_json(name, tensor, hexes) for name, tensor, hexes in rows)
            out.document(fields)
        elif names:
            for name, _, hexes in rows:
                out.line(f"{hexes}  {fit(name, NAME_WIDTH)}")
        else:
            out.line(found or root or "")
        tell_findings(out, source)


def _rows(source: Foreign, globs: list[str], progress: Any) -> Iterator[tuple[str, AnyTensor, str]]:
    """Yield the tensors that are meant, with their digests."""
    if not globs:
        return
    names = names_in(source.tree)
    selection = Selection(typed_globs(globs, names))
    selection.check_used(names)
    leaves = ((display(path), leaf) for path, leaf in walk_tree(source.tree))
    wanted = [(name, leaf) for name, leaf in leaves if name in selection]
    tensors = [(name, leaf) for name, leaf in wanted if isinstance(leaf, AnyTensor)]
    if not tensors:
        name = wanted[0][0]
        raise EntryNotFoundError(f"{name} is not a tensor", code="not_a_tensor", name=name)
    total = sum(leaf.nbytes for _, leaf in tensors if known_digest(leaf) is None)
    done = 0

    def told(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    for name, leaf in tensors:
        yield name, leaf, tensor_digest(leaf, told).hex()


def _json(name: str, tensor: AnyTensor, hexes: str) -> dict[str, Any]:
    return {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "digest": hexes}
