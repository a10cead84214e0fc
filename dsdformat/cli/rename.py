"""`dsd rename`: entries under other names, and what an optimizer keeps with them."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer

from dsdformat import ArgumentError, EntryNotFoundError
from dsdformat.cli.escapes import unescape
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
from dsdformat.cli.render import format_count
from dsdformat.cli.rewritten import Writing
from dsdformat.convert import rename as rename_tree
from dsdformat.convert import rename_rules
from dsdformat.convert.foreign import rooted
from dsdformat.renaming import entry_names

__all__ = ["HELP", "rename"]

HELP = """Write a checkpoint with its entries under other names.

OLD is a name as "dsd ls" prints it; or that of a container, for all below it;
or a beginning and *, for all that begin so, where NEW ends with * too. What
an optimizer keeps follows the parameters. Chunks, codecs, the block size,
user metadata and side files are kept; placements are not.

\b
Examples:
  dsd rename step-1000 new --map model/head.weight=model/lm_head.weight
  dsd rename step-1000 new --map 'model/encoder.*=model/backbone.*'
  dsd rename step-1000 new --map names.json

\b
--map names.json reads an object {"OLD": "NEW", ...}.

\b
--json prints an object with
  source, destination  as they were given
  renamed              old, new: of each entry with another name
  root                 the root digest; null in a dry run
  tensors, nbytes      how many, and the length of their data
  seconds              that it took
"""


def rename(
    ctx: typer.Context,
    ckpt: Source,
    dst: Destination,
    map_: Annotated[
        list[str],
        typer.Option("--map", metavar="OLD=NEW", help="Or a JSON file. May be repeated."),
    ],
    digest: Digest = None,
    pubkey: Pubkey = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    unknown: UnknownOption = "refuse",
    json: Json = False,
) -> None:
    """Write a checkpoint with other names."""
    writing = Writing(ctx.obj, dst, overwrite, dry_run, json)
    rules = _read_rules(map_)
    with open_source(ckpt, unknown, digest=digest, pubkey=pubkey) as source:
        new_name = _rules_of(source.tree, rules)
        tree = rename_tree(source.tree, new_name)
        names = entry_names(rooted(source.tree))
        renamed = [(old, new) for old in names if (new := new_name(old)) != old]
        pairs = [{"old": old, "new": new} for old, new in renamed]
        writing.write(
            *(tree, "renaming", source),
            fields={"source": str(ckpt), "renamed": pairs},
            more={"renamed": format_count(len(renamed), "entry", "entries")},
        )


def _rules_of(tree: Any, rules: dict[str, str]) -> Any:
    """Return the function from old to new names; a name may be typed as it was printed."""
    try:
        return rename_rules(tree, rules)
    except EntryNotFoundError as error:
        plain = {unescape(old): new for old, new in rules.items()}
        if plain == rules:
            error.hint = error.hint or "dsd ls CKPT --values lists what there is"
            raise
        return rename_rules(tree, plain)


def _read_rules(options: list[str]) -> dict[str, str]:
    rules: dict[str, str] = {}
    for option in options:
        old, equals, new = option.partition("=")
        pairs = [(old, new)] if equals else _read_file(Path(option))
        for one, other in pairs:
            if not one or not other or rules.get(one, other) != other:
                raise ArgumentError(
                    f"{one!r} is renamed twice" if one and other else f"{option!r} lacks a name",
                    code="bad_argument",
                )
            rules[one] = other
    return rules


def _read_file(path: Path) -> list[tuple[str, str]]:
    """Read an object from old to new names; a name that stands there twice is not lost."""
    try:
        pairs = json_.loads(path.read_text("utf-8"), object_pairs_hook=list)
    except (UnicodeDecodeError, json_.JSONDecodeError, RecursionError) as error:
        raise ArgumentError(f"{path}: {error}", code="bad_argument") from None
    sound = isinstance(pairs, list) and all(
        isinstance(pair, tuple) and isinstance(pair[1], str) for pair in pairs
    )
    if not sound:
        raise ArgumentError(
            f"{path} is not a JSON object of names", code="bad_argument", hint='{"OLD": "NEW"}'
        )
    return [(str(old), new) for old, new in pairs]
