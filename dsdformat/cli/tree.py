"""`dsd tree`: what takes how much room, module by module."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from dsdformat.cli.opening import open_source
from dsdformat.cli.options import Json, Source
from dsdformat.cli.render import Column, Output, format_size
from dsdformat.convert import AnyTensor, Foreign
from dsdformat.convert.foreign import walk_tree
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key

__all__ = ["HELP", "tree"]

HELP = """Show what takes how much room, module by module.

Names are cut at slashes and dots, which is where modules lie in modules.
Tied tensors count once, under their first name.

\b
Examples:
  dsd tree step-1000
  dsd tree model.safetensors --depth 4

\b
--json prints an object with
  checkpoint, nbytes
  rows     depth, name (from the root on), tensors, elements, nbytes, share
           (of all), in the order of the tree
"""

CHILDREN_SHOWN = 40
DEPTH_MAX = 64
_BAR_WIDTH = 10
_PART = re.compile(r"[^/.]*[/.]?")


@dataclass(slots=True)
class _Node:
    """A module: what lies below it, added up."""

    name: str
    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
    children: dict[str, _Node] = field(default_factory=dict)


def tree(
    ctx: typer.Context,
    ckpt: Source,
    depth: Annotated[
        int, typer.Option(metavar="N", min=1, max=DEPTH_MAX, help="How many levels to show.")
    ] = 3,
    json: Json = False,
) -> None:
    """Print sizes as a tree."""
    out: Output = ctx.obj
    with open_source(ckpt) as source:
        root = _sums(source, depth)
    if json:
        rows = _rows_json(root, root.nbytes)
        out.document({"checkpoint": str(ckpt), "nbytes": root.nbytes, "rows": rows})
        return
    columns = [
        Column(str(ckpt), flexible=True),
        *(Column(title, right=True) for title in ("tensors", "size", "share")),
        Column(""),
    ]
    lines = itertools.chain([("total", root)], _lines(root, "", drawn=out.drawable))
    out.table(columns, (_cells(text, node, root.nbytes, out) for text, node in lines))


def _sums(source: Foreign, depth: int) -> _Node:
    root = _Node("")
    met: set[int] = set()
    for path, leaf in walk_tree(source.tree):
        if not isinstance(leaf, AnyTensor) or leaf.identity in met:
            continue
        met.add(leaf.identity)
        elements = 1
        for size in leaf.shape:
            elements *= size
        node = root
        _add(node, elements, leaf.nbytes)
        for part in itertools.islice(_parts(path), depth):
            node = node.children.setdefault(part, _Node(node.name + part))
            _add(node, elements, leaf.nbytes)
    return root


def _add(node: _Node, elements: int, nbytes: int) -> None:
    node.tensors += 1
    node.elements += elements
    node.nbytes += nbytes


def _parts(path: tuple[Any, ...]) -> Iterator[str]:
    """Cut a name at slashes and dots, which stay at the ends of parts."""
    name = emit_name(path, encoded_key)
    return (found[0] for found in _PART.finditer(name) if found[0])


def _lines(node: _Node, indent: str, *, drawn: bool) -> Iterator[tuple[str, _Node]]:
    """Lay out what lies below a node; children beyond the first ones are added up."""
    branch, last, bar = ("├─ ", "└─ ", "│  ") if drawn else ("|- ", "`- ", "|  ")
    shown = list(node.children.items())[:CHILDREN_SHOWN]
    others = list(node.children.values())[CHILDREN_SHOWN:]
    if others:
        more = _Node("")
        for other in others:
            more.tensors += other.tensors
            more.elements += other.elements
            more.nbytes += other.nbytes
        shown.append((f"and {len(others):,} more; --json lists all", more))
    for number, (part, child) in enumerate(shown, 1):
        end = number == len(shown)
        text = part[:-1] if part[-1:] in "/." and child.children else part
        yield indent + (last if end else branch) + text, child
        yield from _lines(child, indent + ("   " if end else bar), drawn=drawn)


def _cells(text: str, node: _Node, total: int, out: Output) -> tuple[str, ...]:
    share = node.nbytes / total if total else 0.0
    bar = ("█" if out.drawable else "#") * round(share * _BAR_WIDTH)
    return text, f"{node.tensors:,}", format_size(node.nbytes), f"{share:.1%}", bar


def _rows_json(node: _Node, total: int, depth: int = 1) -> Iterator[dict[str, Any]]:
    for child in node.children.values():
        yield {
            "depth": depth,
            "name": child.name,
            "tensors": child.tensors,
            "elements": child.elements,
            "nbytes": child.nbytes,
            "share": child.nbytes / total if total else 0.0,
        }
        yield from _rows_json(child, total, depth + 1)
