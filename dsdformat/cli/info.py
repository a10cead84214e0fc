"""`dsd info`: what a checkpoint holds, in sums."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

import dsdformat
from dsdformat import Checkpoint
from dsdformat.cli.entries import mesh_json, mesh_text
from dsdformat.cli.opening import is_ours, open_source, tell_findings
from dsdformat.cli.options import Json, Source
from dsdformat.cli.render import Column, Output, format_count, format_size
from dsdformat.cli.sums import (
    Codecs,
    Stored,
    Sum,
    TensorSums,
    ValueSums,
    add_chunks,
    add_foreign_tensors,
    add_tensors,
    add_tree_values,
    add_values,
)
from dsdformat.cli.values import short_text, type_name, value_json
from dsdformat.convert import Foreign
from dsdformat.format.paths import render_path

__all__ = ["HELP", "info"]

HELP = """Show what a checkpoint holds, in sums.

What codecs are used is told by the chunk tables, which are not read where there are more than
50,000 chunks, unless --chunks asks for it.

\b
Example:
  dsd info step-1000

\b
--json prints an object with
  checkpoint, root, format_version, features, world_size
  block_nbytes, manifest_nbytes
  tensors, tied            tied: names beyond the first one of each tensor
  elements, nbytes         of all tensors
  stored_nbytes            of all data files, their headers included
  sections                 by top-level key: name, tensors, elements, nbytes,
                           values; name is null for tensors at the top
  dtypes                   dtype, tensors, elements, nbytes
  data_files, side_files   label, nbytes
  user                     the user metadata
  values                   top-level entries without a tensor: name, type,
                           value (in the form of "dsd show")
  placements               mesh (axes, shape, ranks), placements (one for
                           each axis), tensors, elements, nbytes
  codecs                   codec, chunks, nbytes, stored_nbytes; null where
                           the chunk tables were not read
and of another kind of file with checkpoint, kind, tensors, tied, elements,
nbytes, sections, dtypes, user, values, and
  findings                 what is not read: path, name, reason
"""

ROWS_SHOWN = 30
CHUNKS_READ_MAX = 50_000  # which takes about half a second
_TENSORS = Column("tensors", right=True)
_ELEMENTS = Column("elements", right=True)
_SIZE = Column("size", right=True)


def info(
    ctx: typer.Context,
    ckpt: Source,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="Read the chunk tables, however large.")
    ] = False,
    json: Json = False,
) -> None:
    """Print what a checkpoint holds."""
    out: Output = ctx.obj
    if not is_ours(ckpt):
        with open_source(ckpt) as source:
            _print_other(out, str(ckpt), source, json=json)
        return
    with dsdformat.open(ckpt) as checkpoint:
        tensors, values = add_tensors(checkpoint), add_values(checkpoint)
        few = checkpoint.chunk_count <= CHUNKS_READ_MAX
        codecs = add_chunks(checkpoint) if chunks or few else None
        if json:
            out.document(_document(str(ckpt), checkpoint, tensors, values, codecs))
            return
        out.title(str(ckpt))
        out.pairs(_head(checkpoint, tensors, codecs))
        _print_sections(out, tensors, values)
        _print_files(out, checkpoint)
        _print_placements(out, tensors)
        _print_values(out, checkpoint.user, values)


def _print_other(out: Output, ckpt: str, source: Foreign, *, json: bool) -> None:
    """Print what a checkpoint of another kind holds."""
    tensors, values = add_foreign_tensors(source), add_tree_values(source.tree)
    if json:
        out.document(_other_document(ckpt, source, tensors, values))
        return
    out.title(ckpt)
    total = tensors.total
    tied = f", and {format_count(tensors.tied, 'tied name')}" if tensors.tied else ""
    out.pairs(
        [
            ("kind", source.kind.value),
            ("tensors", f"{total.tensors:,}{tied}"),
            ("elements", f"{total.elements:,}"),
            ("size", format_size(total.nbytes)),
        ]
    )
    _print_sections(out, tensors, values)
    _print_values(out, source.metadata, values)
    tell_findings(out, source)


def _head(
    checkpoint: Checkpoint, tensors: TensorSums, codecs: Codecs | None
) -> list[tuple[str, str]]:
    features = "".join(f", {feature}" for feature in checkpoint.features)
    tied = f", and {format_count(tensors.tied, 'tied name')}" if tensors.tied else ""
    nbytes, in_files = tensors.total.nbytes, sum(checkpoint.data_files.values())
    share = f", {in_files / nbytes:.0%}" if in_files < nbytes else ""
    return [
        ("root", checkpoint.root),
        ("format", _version(checkpoint) + features),
        ("written by", format_count(checkpoint.world_size, "rank")),
        ("tensors", f"{tensors.total.tensors:,}{tied}"),
        ("elements", f"{tensors.total.elements:,}"),
        ("size", f"{format_size(nbytes)}, in files {format_size(in_files)}{share}"),
        ("codecs", _codecs_text(checkpoint, codecs)),
    ]


def _version(checkpoint: Checkpoint) -> str:
    return ".".join(map(str, checkpoint.format_version))


def _codecs_text(checkpoint: Checkpoint, codecs: Codecs | None) -> str:
    if codecs is not None:
        return ", ".join(itertools.starmap(_codec_text, codecs.items()))
    # Without the feature, every chunk is raw (spec ).
    return "not read; --chunks reads them" if "zstd" in checkpoint.features else "raw"


def _codec_text(codec: str, stored: Stored) -> str:
    text = f"{codec} {format_count(stored.chunks, 'chunk')}"
    if stored.stored_nbytes == stored.nbytes:
        return text
    return f"{text} (to {stored.stored_nbytes / stored.nbytes:.0%})"


def _print_sections(out: Output, tensors: TensorSums, values: ValueSums) -> None:
    sections = (
        ("(top level)" if name is None else name, *_cells(sums), f"{values.counts.get(name, 0):,}")
        for name, sums in tensors.sections.items()
    )
    name, count = Column("section", flexible=True), Column("values", right=True)
    out.first_rows(
        [name, _TENSORS, _ELEMENTS, _SIZE, count], sections, len(tensors.sections), ROWS_SHOWN
    )
    dtypes = ((name, *_cells(sums)) for name, sums in tensors.dtypes.items())
    columns = [Column("dtype"), _TENSORS, _ELEMENTS, _SIZE]
    out.first_rows(columns, dtypes, len(tensors.dtypes), ROWS_SHOWN)


def _print_files(out: Output, checkpoint: Checkpoint) -> None:
    for title, files in (
        ("data file", checkpoint.data_files),
        ("side file", checkpoint.side_files),
    ):
        rows = ((label, format_size(nbytes)) for label, nbytes in files.items())
        out.first_rows([Column(title, flexible=True), _SIZE], rows, len(files), ROWS_SHOWN)


def _print_placements(out: Output, tensors: TensorSums) -> None:
    rows = (
        (mesh_text(mesh), ", ".join(placements), f"{sums.tensors:,}", format_size(sums.nbytes))
        for (mesh, placements), sums in tensors.placements.items()
    )
    mesh, placements = Column("mesh", flexible=True), Column("placements", flexible=True)
    out.first_rows([mesh, placements, _TENSORS, _SIZE], rows, len(tensors.placements), ROWS_SHOWN)


def _print_values(out: Output, user: Mapping[str, str], values: ValueSums) -> None:
    rows = ((name, type_name(value), short_text(value)) for name, value in values.top.items())
    columns = [Column("value", flexible=True), Column("type"), Column("", flexible=True)]
    out.first_rows(columns, rows, len(values.top), ROWS_SHOWN)
    columns = [Column("user metadata", flexible=True), Column("", flexible=True)]
    out.first_rows(columns, user.items(), len(user), ROWS_SHOWN)


def _cells(sums: Sum) -> tuple[str, str, str]:
    return f"{sums.tensors:,}", f"{sums.elements:,}", format_size(sums.nbytes)


def _document(
    ckpt: str,
    checkpoint: Checkpoint,
    tensors: TensorSums,
    values: ValueSums,
    codecs: Codecs | None,
) -> dict[str, Any]:
    return {
        "checkpoint": ckpt,
        "root": checkpoint.root,
        "format_version": _version(checkpoint),
        "features": list(checkpoint.features),
        "world_size": checkpoint.world_size,
        "block_nbytes": checkpoint.block_nbytes,
        "manifest_nbytes": checkpoint.manifest_nbytes,
        "tensors": tensors.total.tensors,
        "tied": tensors.tied,
        "elements": tensors.total.elements,
        "nbytes": tensors.total.nbytes,
        "stored_nbytes": sum(checkpoint.data_files.values()),
        **_sections_json(tensors, values),
        "data_files": _files_json(checkpoint.data_files.items()),
        "side_files": _files_json(checkpoint.side_files.items()),
        "user": checkpoint.user,
        "values": _values_json(values),
        "placements": [
            {"mesh": mesh_json(mesh), "placements": list(placements), **dataclasses.asdict(sums)}
            for (mesh, placements), sums in tensors.placements.items()
        ],
        "codecs": None if codecs is None else _codecs_json(codecs),
    }


def _other_document(
    ckpt: str, source: Foreign, tensors: TensorSums, values: ValueSums
) -> dict[str, Any]:
    return {
        "checkpoint": ckpt,
        "kind": source.kind.value,
        "tensors": tensors.total.tensors,
        "tied": tensors.tied,
        "elements": tensors.total.elements,
        "nbytes": tensors.total.nbytes,
        **_sections_json(tensors, values),
        "user": source.metadata,
        "values": _values_json(values),
        "findings": [
            {"path": render_path(one.path), "name": one.name, "reason": one.reason}
            for one in source.findings
        ],
    }


def _sections_json(tensors: TensorSums, values: ValueSums) -> dict[str, Any]:
    return {
        "sections": [
            {"name": name, **dataclasses.asdict(sums), "values": values.counts.get(name, 0)}
            for name, sums in tensors.sections.items()
        ],
        "dtypes": [
            {"dtype": name, **dataclasses.asdict(sums)} for name, sums in tensors.dtypes.items()
        ],
    }


def _values_json(values: ValueSums) -> list[dict[str, Any]]:
    return [
        {"name": name, "type": type_name(value), "value": value_json(value)}
        for name, value in values.top.items()
    ]


def _files_json(files: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"label": label, "nbytes": nbytes} for label, nbytes in files]


def _codecs_json(codecs: Codecs) -> list[dict[str, Any]]:
    return [{"codec": name, **dataclasses.asdict(stored)} for name, stored in codecs.items()]
