"""`dsd ls`: the tensors of a checkpoint, one a line; its values too where asked for."""

from __future__ import annotations

import contextlib
import enum
import fnmatch
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import dsdformat
from dsdformat import Checkpoint, TensorEntry
from dsdformat.cli.entries import (
    distinct,
    nbytes_of,
    placements_json,
    placements_text,
    summary_text,
)
from dsdformat.cli.escapes import fit, unescape
from dsdformat.cli.opening import is_ours, open_source
from dsdformat.cli.options import Json, Source
from dsdformat.cli.render import NAME_WIDTH, Column, Output, format_size
from dsdformat.cli.values import iter_values, name_of, short_text, type_name, value_json
from dsdformat.convert import AnyTensor, Foreign
from dsdformat.entries import ChunkInfo

__all__ = ["HELP", "ls"]

HELP = """List the tensors of a checkpoint.

GLOB is a name, the name of a container, or a pattern in which * stands for any characters
(slashes too), ? for one, and [abc] for one of some. A tied tensor is found by any of its names.
Long names are shortened to the width of a terminal; in a pipe only beyond 200 characters.

\b
Examples:
  dsd ls step-1000 'model/layers.0.*' --long
  dsd ls step-1000 --sort size | head
  dsd ls step-1000 optimizer/param_groups --values

\b
--json prints an object with
  checkpoint, root (null for another kind of file)
  tensors    name, dtype, shape, nbytes; with --long also aliases, and of
             a folder of ours codecs, files, stored_nbytes,
             placements (mesh, placements; or null),
             content_digest (null where data would have to be read),
             chunks (offset, shape, file, byte_offset, nbytes,
             stored_nbytes, codec)
  values     with --values: name, type, value (in the form of "dsd show")
  error      code, message, hint; only where the listing was cut short
"""

FILES_SHOWN = 2
_COLUMNS = (
    Column("name", flexible=True),
    Column("dtype"),
    Column("shape"),
    Column("size", right=True),
)
_VALUE_COLUMNS = (Column("name", flexible=True), Column("type"), Column("value", flexible=True))

Match = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class OtherTensor:
    """A tensor of another kind of file, with all paths that lead to it."""

    tensor: AnyTensor
    paths: list[tuple[Any, ...]]

    @property
    def dtype(self) -> str:
        """The logical dtype."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        """Length of the packed bytes."""
        return self.tensor.nbytes


# A tensor under the name by which it was found.
Found = tuple[str, TensorEntry | OtherTensor]


class Sort(enum.StrEnum):
    """What tensors are sorted by."""

    name = "name"
    size = "size"


def ls(
    ctx: typer.Context,
    ckpt: Source,
    glob: Annotated[
        str | None, typer.Argument(metavar="GLOB", help="What to list.", show_default="everything")
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="Tell chunks, codecs, files, placements, digests too.")
    ] = False,
    sort: Annotated[Sort | None, typer.Option(help="By name, or the largest first.")] = None,
    values: Annotated[bool, typer.Option("--values", help="List what is no tensor too.")] = False,
    json: Json = False,
) -> None:
    """Print one line for each tensor, as it is met."""
    out: Output = ctx.obj
    match = _matcher(glob)
    with contextlib.ExitStack() as stack:
        if is_ours(ckpt):
            checkpoint = stack.enter_context(dsdformat.open(ckpt))
            met, root = _find(checkpoint, match), checkpoint.root
            listed = _find_values(checkpoint.tree, match) if values else iter(())
        else:
            source = stack.enter_context(open_source(ckpt))
            met, root = _find_in(source, match), None
            listed = _find_values(lambda: source.tree, match) if values else iter(())
        found = _sorted(met, sort)
        if json:
            fields: dict[str, Any] = {"checkpoint": str(ckpt), "root": root}
            fields["tensors"] = (_json(name, entry, long=long) for name, entry in found)
            if values:
                fields["values"] = itertools.starmap(_value_json, listed)
            out.document(fields)
            return
        count = _print_long(out, found) if long else _print_short(out, found)
        count += _print_values(out, listed, after=count > 0)
        if count == 0:
            out.note("there is nothing to list" if glob is None else f"nothing matches {glob}")


def _matcher(glob: str | None) -> Match:
    """Return what tells whether a name is meant: itself, below it, or of its pattern."""
    if glob is None:
        return lambda _: True
    globs = distinct([glob, unescape(glob)])
    branches = tuple(glob.rstrip("/") + "/" for glob in globs)
    patterns = [re.compile(fnmatch.translate(glob)) for glob in globs]

    def match(name: str) -> bool:
        return (
            name in globs
            or name.startswith(branches)
            or any(pattern.match(name) for pattern in patterns)
        )

    return match


def _find(checkpoint: Checkpoint, match: Match) -> Iterator[Found]:
    for entry in checkpoint:
        name = entry.name
        names = [name] if match(name) else filter(match, _other_names(entry))
        for one in names:
            yield one, entry
            break


def _find_in(source: Foreign, match: Match) -> Iterator[Found]:
    """Find tensors of another kind of file: each under the first of its names that matches."""
    met: set[int] = set()
    for name, tensor in source:
        if tensor.identity not in met and match(name):
            met.add(tensor.identity)
            yield name, OtherTensor(tensor, source.paths(tensor))


def _find_values(tree: Callable[[], Any], match: Match) -> Iterator[tuple[str, Any]]:
    return (pair for pair in iter_values(tree()) if match(pair[0]))


def _sorted(found: Iterator[Found], sort: Sort | None) -> Iterable[Found]:
    if sort is None:
        return found
    if sort is Sort.name:
        return sorted(found, key=lambda pair: pair[0])
    return sorted(found, key=lambda pair: -_nbytes(pair[1]))


def _nbytes(entry: TensorEntry | OtherTensor) -> int:
    return entry.nbytes if isinstance(entry, OtherTensor) else nbytes_of(entry)


def _other_names(entry: TensorEntry | OtherTensor, but: str | None = None) -> list[str]:
    """List the names of a tied tensor, but for one."""
    paths = entry.paths
    return [] if len(paths) == 1 else [name for name in map(name_of, paths) if name != but]


def _print_short(out: Output, found: Iterable[Found]) -> int:
    rows = (
        (name, entry.dtype, str(list(entry.shape)), format_size(_nbytes(entry)))
        for name, entry in found
    )
    return out.table(_COLUMNS, rows)


def _print_long(out: Output, found: Iterable[Found]) -> int:
    count = 0
    for count, (name, entry) in enumerate(found, 1):
        if count > 1:
            out.line()
        out.title(name)
        out.pairs(_long_pairs(name, entry), width=len("content"))
    return count


def _long_pairs(name: str, entry: TensorEntry | OtherTensor) -> list[tuple[str, str]]:
    tied = ", ".join(fit(other, NAME_WIDTH) for other in _other_names(entry, name))
    if isinstance(entry, OtherTensor):
        return [("tensor", summary_text(entry.tensor)), ("tied", tied)]
    chunks, placements = entry.chunks, entry.placements
    codecs = distinct(chunk.codec for chunk in chunks)
    return [
        ("tensor", summary_text(entry)),
        ("chunks", f"{len(chunks):,}, {', '.join(codecs)}{_stored_text(entry, chunks)}"),
        ("files", _files_text(distinct(chunk.file for chunk in chunks))),
        ("placed", "" if placements is None else placements_text(placements)),
        ("tied", tied),
        ("content", entry.known_content_digest() or ""),
    ]


def _stored_text(entry: TensorEntry, chunks: Iterable[ChunkInfo]) -> str:
    stored = sum(chunk.stored_nbytes for chunk in chunks)
    return "" if stored == entry.nbytes else f", stored in {format_size(stored)}"


def _files_text(files: list[str]) -> str:
    if len(files) <= FILES_SHOWN:
        return ", ".join(files)
    return f"{files[0]} and {len(files) - 1:,} more"


def _print_values(out: Output, listed: Iterator[tuple[str, Any]], *, after: bool) -> int:
    first = next(listed, None)
    if first is None:
        return 0
    if after:
        out.line()
    pairs = itertools.chain([first], listed)
    return out.table(
        _VALUE_COLUMNS, ((name, type_name(value), short_text(value)) for name, value in pairs)
    )


def _json(name: str, entry: TensorEntry | OtherTensor, *, long: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "nbytes": _nbytes(entry),
    }
    if not long:
        return fields
    fields["aliases"] = _other_names(entry, name)
    if isinstance(entry, OtherTensor):
        return fields
    chunks = entry.chunks
    return fields | {
        "codecs": distinct(chunk.codec for chunk in chunks),
        "files": distinct(chunk.file for chunk in chunks),
        "stored_nbytes": sum(chunk.stored_nbytes for chunk in chunks),
        "placements": placements_json(entry.placements),
        "content_digest": entry.known_content_digest(),
        "chunks": list(map(_chunk_json, chunks)),
    }


def _chunk_json(chunk: ChunkInfo) -> dict[str, Any]:
    return {
        "offset": list(chunk.box.offset),
        "shape": list(chunk.box.shape),
        "file": chunk.file,
        "byte_offset": chunk.byte_offset,
        "nbytes": chunk.nbytes,
        "stored_nbytes": chunk.stored_nbytes,
        "codec": chunk.codec,
    }


def _value_json(name: str, value: Any) -> dict[str, Any]:
    return {"name": name, "type": type_name(value), "value": value_json(value)}
