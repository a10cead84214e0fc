"""Help texts, and the command without arguments."""

from __future__ import annotations

import re

import numpy as np
import pytest

import dsdformat.numpy
from dsdformat import FORMAT_VERSION, __version__
from dsdformat.cli import (
    cast,
    convert,
    cp,
    diff,
    digest,
    extract,
    info,
    ls,
    merge,
    plan,
    rename,
    show,
    sign,
    stats,
    tree,
    verify,
)

COMMANDS = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        *(info, ls, show, tree, stats, plan, verify, sign, digest, diff),
        *(cp, extract, merge, rename, cast, convert),
    )
}


def test_the_command_alone_prints_help(dsd):
    alone, asked = dsd(), dsd("--help")
    assert (alone.code, alone.err) == (0, "")
    assert alone.out == asked.out == dsd("-h").out
    assert alone.out.startswith("Usage: dsd ")
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", alone.out, re.MULTILINE)


def test_the_version_is_printed(dsd):
    major, minor = FORMAT_VERSION
    assert dsd("--version").out == f"dsdformat {__version__}, format {major}.{minor}\n"
    assert dsd("--version").code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_tells_of_json(dsd, command):
    result = dsd(command, "--help")
    assert (result.code, result.err) == (0, "")
    assert f"\n    dsd {command} " in result.out or f"\n  dsd {command} " in result.out
    assert "--json prints an object with" in result.out


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_into_eighty_columns(dsd, command):
    result = dsd(*filter(None, [command]), "--help")
    assert max(map(len, result.out.splitlines())) <= 80
    assert not any(line.endswith("-") for line in result.out.splitlines())  # in `--an-option`


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_has_whole_sentences(dsd, command):
    first = COMMANDS[command].HELP.partition("\n")[0]
    assert re.search(rf"^  {command} +{re.escape(first)}$", dsd().out, re.MULTILINE)


DOCUMENTS = {
    "info": [],
    "ls": [],
    "tree": [],
    "stats": ["*"],
    "digest": ["model"],
    "diff": ["other", "--stats"],
    "cp": ["new"],
    "extract": ["new", "--select", "model"],
    "rename": ["new", "--map", "step=steps"],
    "cast": ["new", "--dtype", "float16"],
}


@pytest.mark.parametrize(("command", "more"), DOCUMENTS.items(), ids=DOCUMENTS)
def test_the_keys_of_the_json_document_are_documented(dsd, step10, command, more):
    if "other" in more:
        dsdformat.numpy.save("other", {"model": {"embed.weight": np.ones((4, 3), np.float32)}})
    help_text = dsd(command, "--help").out
    document = dsd(command, step10, *more, "--json").json
    rows = [row for value in document.values() if isinstance(value, list) for row in value]
    rows = [row for row in rows if isinstance(row, dict)]
    inner = [row[key] for row in rows for key in ("numbers", "histogram") if row.get(key)]
    keys = {*document, *(key for row in [*rows, *inner] for key in row)}
    assert {key for key in keys if not re.search(rf"\b{key}\b", help_text)} == set()


def test_the_keys_of_a_report_are_documented(dsd, tmp_path):
    help_text = dsd("verify", "--help").out
    document = dsd("verify", tmp_path, "--json").json
    keys = {*document, *document["problems"][0]}
    assert {key for key in keys if not re.search(rf"\b{key}\b", help_text)} == set()
