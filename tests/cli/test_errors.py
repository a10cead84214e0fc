"""Errors: exit codes, where they are printed, and in which form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dsdformat
from dsdformat.cli.main import main
from dsdformat.storage.local import LocalStorage


def test_a_checkpoint_that_is_none_ends_with_1(dsd, tmp_path):
    result = dsd("info", tmp_path)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error[no_manifest]: ")


def test_a_truncated_manifest_ends_with_1(dsd, step10):
    manifest = Path("step-10/manifest.dsd")
    manifest.write_bytes(manifest.read_bytes()[:100])
    for command in (["info"], ["ls"], ["show", "step"]):
        result = dsd(command[0], step10, *command[1:])
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("error[truncated]: ")


def test_a_damaged_block_that_is_shown_ends_with_1(dsd, step10, damage):
    damage("step-10/model.safetensors", -1)
    result = dsd("show", step10, "model/norm.weight")
    assert result.code == 1
    assert result.err.startswith("error[checksum_mismatch]: ")
    assert "\n\nhint: " in result.err


def test_a_name_that_is_not_there_ends_with_2_and_a_suggestion(dsd, step10):
    result = dsd("show", step10, "model/embd.weight")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "error[entry_not_found]: no entry 'model/embd.weight' in step-10\n\n"
        "hint: did you mean model/embed.weight, model/head.weight, model/norm.weight?\n"
    )


USAGE = {
    "no-argument": (["ls"], "dsd ls --help"),
    "no-such-option": (["ls", "c", "--lnog"], "dsd ls --help"),
    "no-such-command": (["list", "c"], "dsd --help"),
    "one-argument-too-many": (["info", "a", "b"], "dsd info --help"),
    "no-number": (["verify", "c", "--threads", "many"], "dsd verify --help"),
    "no-such-choice": (["ls", "c", "--sort", "age"], "dsd ls --help"),
}


@pytest.mark.parametrize(("arguments", "hint"), USAGE.values(), ids=USAGE)
def test_usage_errors_end_with_2_and_name_the_help(dsd, arguments, hint):
    result = dsd(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error[usage]: ")
    assert result.err.endswith(f"\n\nhint: {hint}\n")


def test_a_path_that_the_system_refuses_ends_with_3(dsd):
    result = dsd("info", "x" * 5000)
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("error[io_error]: xxx")
    assert len(result.err) < 2500


def test_a_medium_that_fails_ends_with_3(dsd, step10, monkeypatch):
    def fail(self, label, byte_offset, into):
        raise dsdformat.StorageError(f"{label}: Input/output error", errno=5)

    monkeypatch.setattr(LocalStorage, "read_into", fail)
    for command in ("info", "ls", "verify"):
        result = dsd(command, step10)
        assert result.code == 3
        assert result.err == "error[io_error]: manifest.dsd: Input/output error\n"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_a_file_that_may_not_be_read_ends_with_3(dsd, step10):
    os.chmod("step-10/manifest.dsd", 0)
    assert dsd("info", step10).code == 3


def test_a_fault_of_the_command_itself_ends_with_70_and_no_traceback(dsd, step10, monkeypatch):
    def fail(path):
        raise RuntimeError("boom")

    monkeypatch.setattr(dsdformat, "open", fail)
    result = dsd("info", step10)
    assert result.code == 70
    assert result.err == (
        "error[internal]: RuntimeError: boom\n\nhint: run it again with --debug, and report it\n"
    )


@pytest.mark.parametrize("place", [0, 2], ids=["before-the-command", "after-it"])
def test_debug_shows_the_traceback_wherever_it_stands(dsd, tmp_path, place):
    arguments = ["info", str(tmp_path)]
    arguments.insert(place, "--debug")
    result = dsd(*arguments)
    assert result.code == 1
    assert result.err.startswith("Traceback (most recent call last):\n")
    assert "error[no_manifest]: " in result.err


def test_an_interrupt_ends_with_130_and_silence(dsd, step10, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(dsdformat, "open", interrupt)
    result = dsd("info", step10)
    assert (result.code, result.out, result.err) == (130, "", "")


JSON = {
    "format": (["info", "nothing", "--json"], "no_manifest"),
    "usage": (["ls", "--json"], "usage"),
    "argument": (["verify", "c", "--json", "--digest", "1"], "bad_argument"),
    "system": (["info", "x" * 5000, "--json"], "io_error"),
}


@pytest.mark.parametrize(("arguments", "code"), JSON.values(), ids=JSON)
def test_with_json_an_error_is_an_object_on_stdout_too(dsd, arguments, code):
    result = dsd(*arguments)
    assert list(result.json) == ["error"]
    assert list(result.json["error"]) == ["code", "message", "hint"]
    assert result.json["error"]["code"] == code
    assert result.err.startswith(f"error[{code}]: ")


def test_json_as_a_name_is_no_option(dsd, tmp_path):
    assert dsd("show", tmp_path, "--", "--json").out == ""


def test_all_problems_of_a_manifest_are_told(dsd, step10, monkeypatch):
    def fail(path):
        problems = [dsdformat.Problem("bad_body", text) for text in ("$.a: no", "$.b: no")]
        raise dsdformat.ManifestError(problems)

    monkeypatch.setattr(dsdformat, "open", fail)
    assert dsd("info", step10).err == "error[bad_body]: $.a: no\n  $.b: no\n"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_an_extra_one_line_says_what_to_install(capsys, monkeypatch, package):
    for module in [name for name in sys.modules if name.startswith("dsdformat.cli.")]:
        if module != "dsdformat.cli.main":
            monkeypatch.delitem(sys.modules, module)
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["info", "c"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"error[missing_dependency]: dsd needs {package}, which is not installed; "
        "pip install 'dsdformat[cli]'\n"
    )


def test_without_the_extra_the_process_ends_with_2(run_python):
    source = (
        "import sys; sys.modules['typer'] = None\n"
        "from dsdformat.cli.main import main; sys.exit(main())"
    )
    done = run_python(source)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "pip install 'dsdformat[cli]'" in done.stderr


def test_a_full_disk_behind_stdout_ends_with_3(dsd_process, step10):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        process = dsd_process("ls", Path(step10).absolute(), stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert err.startswith(b"error[io_error]: ")
    assert err.count(b"\n") == 1
