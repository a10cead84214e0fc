"""Arguments and options that several commands share, and those of `dsd` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsdformat import FORMAT_VERSION, __version__
from dsdformat.cli.opening import Unknown

__all__ = [
    "Ckpt",
    "Destination",
    "Digest",
    "DryRun",
    "Json",
    "Overwrite",
    "Pubkey",
    "Source",
    "UnknownOption",
    "dsd",
]

Ckpt = Annotated[
    Path, typer.Argument(metavar="CKPT", help="The checkpoint's folder.", show_default=False)
]
Source = Annotated[
    Path,
    typer.Argument(metavar="CKPT", help="A checkpoint of any kind.", show_default=False),
]
Destination = Annotated[
    Path, typer.Argument(metavar="DST", help="The folder to make.", show_default=False)
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST, once the new one is complete.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and end.")]
UnknownOption = Annotated[
    Unknown, typer.Option(help="What to do with objects of classes that are not known.")
]
Digest = Annotated[
    str | None, typer.Option(metavar="HEX", help="The root digest that it must have.")
]
# Given again, it is one more: an option of which the last one counts would drop a demand.
Pubkey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="A key that must have signed it: a PEM file, or hex. Several must all have.",
        callback=lambda keys: list(keys) if keys else None,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        major, minor = FORMAT_VERSION
        typer.echo(f"dsdformat {__version__}, format {major}.{minor}")
        raise typer.Exit


def dsd(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where in the code an error came from.")
    ] = False,
) -> None:
    """Take the options of `dsd` itself; `main` looks for --debug before anything is parsed."""
    del version, debug
