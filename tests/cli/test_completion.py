"""Completion for shells: scripts are printed, and commands and options completed."""

from __future__ import annotations

import os
import subprocess

import pytest


def run(dsd_process, *arguments, **environment):
    process = dsd_process(
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    out, err = process.communicate(timeout=120)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_a_shell(dsd_process, shell):
    code, out, err = run(
        dsd_process, "--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert (code, err) == (0, "")
    assert "_DSD_COMPLETE" in out


def test_a_script_is_installed_for_a_shell(dsd_process, tmp_path):
    options = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    code, out, err = run(dsd_process, "--install-completion", "bash", **options)
    assert (code, err, "bash completion installed" in out) == (0, "", True)
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "_DSD_COMPLETE" in script.read_text()


def test_commands_and_options_are_completed(dsd_process):
    completing = {"_DSD_COMPLETE": "complete_bash"}
    code, out, _ = run(dsd_process, **completing, COMP_WORDS="dsd di", COMP_CWORD="1")
    assert (code, out.split()) == (0, ["digest", "diff"])
    code, out, _ = run(dsd_process, **completing, COMP_WORDS="dsd diff a b --st", COMP_CWORD="4")
    assert (code, out.split()) == (0, ["--stats"])
