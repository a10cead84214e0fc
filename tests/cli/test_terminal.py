"""What appears on a terminal and in a pipe, and what a hostile name can do there: nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import dsdformat
import dsdformat.numpy
from dsdformat import TensorSource
from dsdformat.cli.escapes import cells

HOSTILE = {
    "clear-screen": "\x1b[2J\x1b[H",
    "title": "\x1b]0;owned\x07",
    "c1": "\x9b31m",
    "newline": "a\nmodel/fake  float32  [1]  4 B",
    "carriage-return": "real\rfake",
    "backspace": "real\b\b\b\bfake",
    "nul": "a\0b",
    "right-to-left": "abc\u202efed",
    "isolate": "a\u2066b\u2069",
    "zero-width": "a\u200bb",
    "markup": "[bold]a[/bold] :smile:",
}
STYLES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def hostile(request, tmp_path):
    """A name, and a checkpoint that has it everywhere."""
    name = request.param
    path = tmp_path / "hostile"
    user = {name: name}
    with dsdformat.create(path, user=user) as writer:
        tensor = TensorSource.of("uint8", (1,), b"\1")
        writer.add({"model": {name: tensor, "tied": tensor}, name: {name: name}})
    return name, path


COMMANDS = {
    "info": ["info"],
    "ls": ["ls", "--values"],
    "ls-long": ["ls", "--long"],
    "show": ["show", "model"],
    "verify": ["verify"],
    "tree": ["tree"],
    "stats": ["stats", "model"],
    "digest": ["digest", "model"],
    "dry-run": ["extract", "new", "--select", "*", "--dry-run"],
}


def test_a_hostile_name_that_differs_is_escaped(dsd, hostile, tmp_path):
    name, path = hostile
    dsdformat.numpy.save(tmp_path / "other", {"model": {name: np.zeros(1, np.uint8)}, "x": name})
    for options in ([], ["--stats"]):
        result = dsd("diff", path, tmp_path / "other", *options)
        assert (result.code, result.err) == (1, "")
        assert all(line.isprintable() for line in result.out.splitlines())


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_hostile_name_prints_no_character_that_drives_a_terminal(dsd, hostile, command, damage):
    _, path = hostile
    damage(path / "model.safetensors", -1)
    result = dsd(command[0], path, *command[1:])
    assert all(line.isprintable() for line in (result.out + result.err).splitlines())
    assert result.out.count("\n") == len((result.out).splitlines())


def test_a_hostile_name_is_one_row_of_a_table(dsd, hostile):
    assert len(dsd("ls", hostile[1]).out.splitlines()) == 2


def test_a_hostile_name_is_whole_in_json(dsd, hostile):
    name, path = hostile
    result = dsd("ls", path, "--json", "--long", "--values")
    assert result.out.isascii()
    escaped = name.replace("%", "%25").replace("@", "%40").replace("/", "%2F")
    (row,) = result.json["tensors"]
    assert [row["name"], *row["aliases"]] in (
        [f"model/{escaped}", "model/tied"],
        ["model/tied", f"model/{escaped}"],
    )
    assert result.json["values"] == [{"name": f"{escaped}/{escaped}", "type": "str", "value": name}]
    assert dsd("info", path, "--json").json["user"] == {name: name}


def test_a_hostile_name_can_be_typed_as_it_was_printed(dsd, hostile):
    _, path = hostile
    listing = dsd("show", path, "model").out.splitlines()[1:]
    for line in listing:
        name = re.split("  +tensor", line)[0]
        assert dsd("show", path, name, "--json").json["elements"] == [1]
        assert len(dsd("ls", path, name).out.splitlines()) == 2


def test_a_hostile_name_in_an_error_is_escaped(dsd, tmp_path):
    result = dsd("show", tmp_path / "\x1b[2J\n", "x")
    assert "\x1b" not in result.err
    assert result.err.count("\n") == 1
    assert "\x1b" not in dsd("ls", "c", "--\x1b[2J").err


def test_a_name_of_ten_thousand_characters_is_short_in_tables_and_whole_in_json(dsd, tmp_path):
    name = "x" * 10_000
    dsdformat.numpy.save(tmp_path / "c", {name: np.zeros(1)})
    out = dsd("ls", tmp_path / "c").out
    assert max(map(len, out.splitlines())) < 250
    assert "…" in out
    assert dsd("ls", tmp_path / "c", "--json").json["tensors"][0]["name"] == name


# A terminal of 80 columns


@pytest.fixture
def wide(tmp_path):
    """A checkpoint whose lines would not fit into 80 columns."""
    name = "layers.10.self_attention.query_projection.weight"
    state = {"state": {name: {"exp_avg": np.zeros((64, 64))}, "größe/重み" * 9: np.zeros(3)}}
    path = tmp_path / "wide"
    dsdformat.numpy.save(path, {"optimizer": state, "note": "y" * 300}, user={"k": "z" * 300})
    return path


WIDTHS = {
    "info": ["info"],
    "ls": ["ls", "--values"],
    "show-tensor": [
        "show",
        "optimizer/state/layers.10.self_attention.query_projection.weight/exp_avg",
    ],
    "show-container": ["show", "optimizer/state"],
    "verify": ["verify"],
}


@pytest.mark.parametrize("command", WIDTHS.values(), ids=WIDTHS)
def test_lines_fit_into_eighty_columns(run_in_terminal, wide, command):
    if command[0] == "show":
        command = [*command[:1], wide, *command[1:]]
    else:
        command = [*command[:1], wide, *command[1:]]
    shown = STYLES.sub("", run_in_terminal(*command))
    body = [
        line for line in shown.splitlines() if str(wide) not in line and "verifying" not in line
    ]
    body = [
        line for line in body if not line.startswith("optimizer/state/layers.10.self_attention.q")
    ]
    assert body
    assert max(map(cells, body)) <= 80


def test_a_long_name_keeps_both_its_ends_on_a_terminal(run_in_terminal, wide):
    shown = run_in_terminal("ls", wide, "*exp_avg")
    assert re.search(
        r"^optimizer/state/layers\S*…\S*weight/exp_avg  float64  \[64, 64\]", shown, re.M
    )


def test_headings_are_dim_on_a_terminal(run_in_terminal, wide):
    assert run_in_terminal("ls", wide).startswith("\x1b[2mname")


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb-terminal"]
)
def test_no_style_is_printed_where_none_is_wanted(run_in_terminal, wide, environment):
    for command in (["ls", wide], ["info", wide], ["info", wide / "nothing"]):
        assert "\x1b" not in run_in_terminal(*command, **environment)


def test_no_style_is_printed_into_a_pipe(dsd_process, wide):
    process = dsd_process("info", wide, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert b"\x1b" not in out


def test_an_encoding_without_the_characters_escapes_them(dsd_process, wide, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = dsd_process("ls", wide, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert b"gr\\xf6\\xdfe" in out


# A pipe that is closed


@pytest.fixture
def many(tmp_path):
    """A checkpoint whose listing does not fit into a pipe."""
    state = {f"layers.{number}.{'x' * 80}": np.zeros(1, np.uint8) for number in range(4000)}
    dsdformat.numpy.save(tmp_path / "many", state)
    return tmp_path / "many"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_goes_away_is_no_error(dsd_process, many, form):
    process = dsd_process("ls", many, *form, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), err) == (0, b"")


def test_a_reader_that_goes_away_does_not_make_a_bad_checkpoint_good(dsd_process, many, damage):
    damage(many / "model.safetensors", -1)
    process = dsd_process("verify", many, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), err) == (1, b"")


# Processes


def test_the_command_runs_as_a_process(dsd_process, step10):
    path = Path(step10).absolute()
    process = dsd_process("show", path, "step", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.decode().split(), err) == (0, ["10"], b"")


LIGHT = """
import sys
from dsdformat.cli.main import main
code = main(sys.argv[2:])
loaded = [name for name in sys.argv[1].split(",") if name in sys.modules]
sys.exit(f"{code} {loaded}" if code or loaded else 0)
"""


@pytest.mark.parametrize(
    "command",
    [
        ["info"],
        ["ls", "--long"],
        ["show", "step"],
        ["verify"],
        ["tree"],
        ["digest", "--content"],
        ["diff", "step-10"],
        ["cp", "new"],
        ["extract", "new", "--select", "model"],
        ["rename", "new", "--map", "step=steps"],
    ],
    ids=lambda c: c[0],
)
def test_no_array_library_is_loaded_but_for_numbers(run_python, step10, command):
    path = Path(step10).absolute()
    places = {"step-10": path, "new": path.with_name("new")}
    more = [places.get(word, word) for word in command[1:]]
    done = run_python(LIGHT, "torch,numpy,ml_dtypes", command[0], path, *more)
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_load_numpy_and_no_torch(run_python, step10):
    path = Path(step10).absolute()
    done = run_python(LIGHT, "torch", "show", path, "model/norm.weight")
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_library_or_main_loads_no_extra(run_python):
    done = run_python(
        "import sys, dsdformat.cli.main\n"
        "sys.exit(str([n for n in ('typer', 'rich', 'numpy') if n in sys.modules] or '') or 0)"
    )
    assert (done.returncode, done.stderr) == (0, "")
