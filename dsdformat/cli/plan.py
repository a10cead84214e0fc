"""`dsd plan`: what ranks of a mesh would read of a checkpoint, and whether it fits a model."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dsdformat.cli.options import Json
from dsdformat.cli.render import Column, Output, format_count, format_size
from dsdformat.convert.model_meta import read_model_meta
from dsdformat.convert.numbers import need_numpy
from dsdformat.convert.opening import open_origin
from dsdformat.errors import ArgumentError, EntryNotFoundError, shorten
from dsdformat.format.dtypes import DTYPES
from dsdformat.plan.mesh import Placement

if TYPE_CHECKING:  # it loads numpy, which other commands do without
    from dsdformat.convert.reading import ForeignReader
    from dsdformat.plan.placing_rules import Rule
    from dsdformat.plan.survey import RankTable
    from dsdformat.reader import Checkpoint

__all__ = ["HELP", "plan"]

HELP = """Plan what the ranks of a mesh would read of a checkpoint.

Reads no data. CKPT is a checkpoint of dsdformat, a safetensors file, a Hugging Face folder, a
file of torch.save, a DCP folder or an npz file. Axes called fsdp, shard or dp_shard cut tensors
by rows, others replicate, unless --shard says otherwise: GLOB=DIM@AXIS, or GLOB=none@AXIS. What
an optimizer keeps for a parameter is placed as the parameter is.

\b
--like compares names, shapes and dtypes with another checkpoint, and
--model-meta with a safetensors file or its header, or with a JSON of that
form: {"name": {"dtype": "F32", "shape": [2, 3]}}. Exits with 1 if something
differs.

\b
Examples:
  dsd plan step-1000 --mesh fsdp=64,tp=8 --shard '*.wq.weight=0@tp'
  dsd plan hf-folder --mesh fsdp=4 --model-meta model.json

\b
--json prints an object with
  checkpoint, mesh      mesh: sizes of the axes by name
  tensors               how many are loaded
  missing, unexpected   names, where it was compared; else null
  different             of each: name, stored, wanted (dtype, shape); or null
  wanted_nbytes, read_nbytes
                        of all ranks
  needed_nbytes         what they have to read: what several want once, if
                        they share reads; of blocks what is wanted
  over_read             read_nbytes over needed_nbytes
  peak_nbytes           the most memory that a rank needs
  ranks                 of each: rank, wanted_nbytes, read_nbytes,
                        held_nbytes, peak_nbytes
"""

_ROWS = 24
_NAMES = 10
_RULE = re.compile(r"(?P<glob>.+)=(?P<dim>-?[0-9]{1,2}|none)@(?P<axis>[^@=]+)")
_AXIS = re.compile(r"(?P<name>[^=,@]+)=(?P<size>[0-9]{1,7})")
_COLUMNS = (
    Column("ranks"),
    Column("wanted", right=True),
    Column("read", right=True),
    Column("ratio", right=True),
    Column("memory", right=True),
)
_STATE = "state"  # of an optimizer: before the names of parameters
Form = tuple[str, tuple[int, ...]]  # dtype and shape


def plan(
    ctx: typer.Context,
    ckpt: Annotated[
        Path, typer.Argument(metavar="CKPT", help="The checkpoint.", show_default=False)
    ],
    mesh: Annotated[
        str,
        typer.Option(metavar="AXIS=N,...", help="Sizes of the mesh's axes.", show_default=False),
    ],
    shard: Annotated[
        list[str] | None, typer.Option(metavar="GLOB=DIM@AXIS", help="How tensors are cut.")
    ] = None,
    like: Annotated[Path | None, typer.Option(metavar="CKPT", help="What it must fit.")] = None,
    model_meta: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model that it must fit.")
    ] = None,
    select: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Plan for these names alone.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Whether data are compared with digests."),
    ] = True,
    share_reads: Annotated[
        bool,
        typer.Option(
            "--share-reads/--no-share-reads",
            help="Whether ranks that want the same read it once, and pass it on, as by default.",
            show_default=False,
        ),
    ] = True,
    json: Json = False,
) -> int:
    """Print what each rank reads and holds; return 1 if what was compared differs."""
    need_numpy()
    out: Output = ctx.obj
    axes = _parse_mesh(mesh)
    rules = [_parse_rule(text, axes) for text in shard or ()]
    model = _wanted_forms(like, model_meta)
    with contextlib.closing(open_origin(ckpt, verify=verify)) as origin:
        tensors = {entry.name: entry for entry in origin}
        stored = _selected(_forms(tensors.values()), select)
        if select and not stored:
            raise EntryNotFoundError(f"nothing matches {shorten(select[0])}", name=select[0])
        found = None
        if model is not None:
            model = _selected(_rooted(model, stored), select)
            found = _compare(stored, model)
        owners = _owners(tensors)
        wanted = {
            name: _placements(name, stored, owners, axes, rules)
            for name, form in stored.items()
            if model is None or model.get(name) == form
        }
        table = _survey(origin, axes, wanted, verify=verify, share_reads=share_reads)
    out.exit_code = 1 if found is not None and any(found) else 0
    if json:
        out.document(_document(str(ckpt), table, found))
    else:
        _print(out, str(ckpt), table, found)
    return out.exit_code


class _Found(NamedTuple):
    """In what a checkpoint and a model differ: names, and forms of those that both have."""

    missing: list[str]
    unexpected: list[str]
    different: list[tuple[str, Form, Form]]


def _parse_mesh(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or match["name"] in axes:
            raise ArgumentError(
                f"--mesh {shorten(text)} is not as fsdp=4,tp=2", code="bad_argument"
            )
        axes[match["name"]] = int(match["size"])
    from dsdformat.plan.placing_rules import check_mesh

    return check_mesh(axes)


def _parse_rule(text: str, mesh: Mapping[str, int]) -> Rule:
    match = _RULE.fullmatch(text)
    if match is None or match["axis"] not in mesh:
        raise ArgumentError(
            f"--shard {shorten(text)} is not as '*.wq.weight=0@tp', with an axis of "
            f"{', '.join(mesh)}",
            code="bad_argument",
        )
    from dsdformat.plan.placing_rules import Rule

    return Rule(match["glob"], None if match["dim"] == "none" else int(match["dim"]), match["axis"])


def _wanted_forms(like: Path | None, model_meta: Path | None) -> dict[str, Form] | None:
    if like is not None and model_meta is not None:
        raise ArgumentError("give either --like or --model-meta", code="bad_argument")
    if model_meta is not None:
        return read_model_meta(model_meta)
    if like is None:
        return None
    with contextlib.closing(open_origin(like)) as origin:
        return _forms(origin)


def _forms(entries: Iterable[Any]) -> dict[str, Form]:
    return {entry.name: (entry.dtype, entry.shape) for entry in entries}


def _selected(forms: dict[str, Form], globs: Sequence[str] | None) -> dict[str, Form]:
    """Return those whose name, or whose branch, matches a glob."""
    if not globs:
        return forms
    every = [one for glob in globs for one in (glob, f"{glob.rstrip('/')}/*")]
    match = re.compile("|".join(map(fnmatch.translate, every))).match
    return {name: form for name, form in forms.items() if match(name)}


def _rooted(model: dict[str, Form], stored: Mapping[str, Form]) -> dict[str, Form]:
    """Return a model's names as the checkpoint has them: either may have it under a root key."""
    if model.keys() & stored.keys():
        return model
    root = _find_root(stored, model)
    if root:
        return {f"{root}/{name}": form for name, form in model.items()}
    root = _find_root(model, stored)
    return {name.removeprefix(f"{root}/"): form for name, form in model.items()}


def _find_root(rooted: Iterable[str], flat: Iterable[str]) -> str:
    """Return the root key under which most of some names are; empty if none is."""
    names = set(flat)
    pairs = (name.partition("/") for name in rooted)
    met = Counter(root for root, _, name in pairs if name in names)
    return next((root for root, _ in met.most_common(1)), "")


def _compare(stored: Mapping[str, Form], model: Mapping[str, Form]) -> _Found:
    return _Found(
        [name for name in model if name not in stored],
        [name for name in stored if name not in model],
        [
            (name, stored[name], form)
            for name, form in model.items()
            if name in stored and stored[name] != form
        ],
    )


def _owners(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return for what an optimizer keeps for a parameter the name of that, where it is there."""
    last: dict[Any, str] = {}
    for name, entry in tensors.items():
        if _STATE not in entry.path:
            last.setdefault(entry.path[-1], name)
    owners: dict[str, str] = {}
    for name, entry in tensors.items():
        path = entry.path
        if _STATE in path[:-2]:
            fqn = path[path.index(_STATE) + 1]
            owners[name] = last.get(fqn, str(fqn))
    return owners


def _placements(
    name: str,
    stored: Mapping[str, Form],
    owners: Mapping[str, str],
    mesh: Mapping[str, int],
    rules: Sequence[Rule],
) -> tuple[Placement, ...]:
    """Place a tensor; what an optimizer keeps as its parameter, if it is shaped like it."""
    shape = stored[name][1]
    owner = owners.get(name, name)
    of = stored[owner][1] if owner in stored else shape
    from dsdformat.plan.placing_rules import place

    return place(owner, shape if of == shape else (), mesh, rules)


def _survey(
    origin: Checkpoint | ForeignReader,
    mesh: Mapping[str, int],
    wanted: Mapping[str, tuple[Placement, ...]],
    *,
    verify: bool,
    share_reads: bool,
) -> RankTable:
    """Count what ranks read and hold of tensors, by their placements."""
    from dsdformat.convert.layouts import Layouts
    from dsdformat.plan.survey import WantedTensor, survey

    layouts = Layouts(origin, verify=verify)
    return survey(
        mesh,
        [
            WantedTensor(
                layouts.of(entry.index),
                entry.shape,
                DTYPES[entry.dtype].itemsize,
                wanted[entry.name],
            )
            for entry in origin
            if entry.name in wanted
        ],
        block_nbytes=layouts.block_nbytes,
        share_reads=share_reads,
        writers=layouts.writers(math.prod(mesh.values())),
    )


def _print(out: Output, ckpt: str, table: RankTable, found: _Found | None) -> None:
    read, wanted = int(table.read_nbytes.sum()), int(table.wanted_nbytes.sum())
    sizes = ", ".join(f"{name} {size:,}" for name, size in table.mesh.items())
    out.title(ckpt)
    out.pairs(
        [
            ("mesh", f"{sizes}: {format_count(table.world_size, 'rank')}"),
            ("tensors", f"{table.tensors:,}"),
            ("wanted", format_size(wanted)),
            ("needed", format_size(table.needed_nbytes)),
            ("read", f"{format_size(read)}, {table.over_read:.3f} of what is needed"),
            ("memory", f"at most {format_size(int(table.peak_nbytes.max()))} a rank"),
        ]
    )
    out.line()
    runs = list(table.alike())
    out.table(_COLUMNS, (_row(table, ranks) for ranks in runs[:_ROWS]))
    if len(runs) > _ROWS:
        more = table.world_size - runs[_ROWS][0]
        out.line(f"and {format_count(more, 'rank')} more; --json lists all")
    if found is not None:
        _print_found(out, found)


def _row(table: RankTable, ranks: range) -> Sequence[str]:
    first, last = ranks[0], ranks[-1]
    wanted, read = int(table.wanted_nbytes[first]), int(table.read_nbytes[first])
    return (
        f"{first}" if first == last else f"{first} to {last}",
        format_size(wanted),
        format_size(read),
        f"{read / wanted:.3f}" if wanted else "",
        format_size(int(table.peak_nbytes[first])),
    )


def _print_found(out: Output, found: _Found) -> None:
    out.line()
    if not any(found):
        out.line("it fits")
        return
    lists = (
        ("missing", found.missing),
        ("unexpected", found.unexpected),
        ("different", [f"{name}: {_text(a)}, {_text(b)} wanted" for name, a, b in found.different]),
    )
    for title, lines in lists:
        if lines:
            out.line(f"{title}: {len(lines):,}", "bold")
            for line in lines[:_NAMES]:
                out.paragraph(line)
            if len(lines) > _NAMES:
                out.paragraph(f"and {len(lines) - _NAMES:,} more; --json lists all")


def _text(form: Form) -> str:
    return f"{form[0]} {list(form[1])}"


def _document(ckpt: str, table: RankTable, found: _Found | None) -> dict[str, Any]:
    different = None
    if found is not None:
        different = [
            {"name": name, "stored": _form_json(stored), "wanted": _form_json(wanted)}
            for name, stored, wanted in found.different
        ]
    return {
        "checkpoint": ckpt,
        "mesh": dict(table.mesh),
        "tensors": table.tensors,
        "missing": None if found is None else found.missing,
        "unexpected": None if found is None else found.unexpected,
        "different": different,
        "wanted_nbytes": int(table.wanted_nbytes.sum()),
        "read_nbytes": int(table.read_nbytes.sum()),
        "needed_nbytes": table.needed_nbytes,
        "over_read": table.over_read,
        "peak_nbytes": int(table.peak_nbytes.max()),
        "ranks": _rank_rows(table),
    }


def _form_json(form: Form) -> dict[str, Any]:
    return {"dtype": form[0], "shape": list(form[1])}


def _rank_rows(table: RankTable) -> Iterator[dict[str, int]]:
    columns = (table.wanted_nbytes, table.read_nbytes, table.held_nbytes, table.peak_nbytes)
    for rank, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        names = ("wanted_nbytes", "read_nbytes", "held_nbytes", "peak_nbytes")
        yield {"rank": rank, **dict(zip(names, row, strict=True))}
