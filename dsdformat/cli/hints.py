"""Hints of the library, said as the command has them. Pure."""

from __future__ import annotations

import re
import shlex

__all__ = ["as_options"]

# An argument of the library, but not of a call that the hint writes out.
_PYTHON = re.compile(r"(?<![(\w])([a-z_]+)=('[^']*'|True|False)")
_SELECT = re.compile(r"\bwith select\b(?!=)")
_NAMED = ("drop_values", "lossy", "names", "overwrite", "select", "ties", "to", "unknown")
_OPTIONS = {
    **{name: name.replace("_", "-") for name in (*_NAMED, "weights_only")},
    "max_shard_bytes": "max-shard-size",
    "max_file_bytes": "max-shard-size",
}


def as_options(hint: str | None) -> str | None:
    """Return a hint with options of the command in the place of those of a call."""

    def option(match: re.Match[str]) -> str:
        name, value = match.groups()
        flag = _OPTIONS.get(name)
        if flag is None:  # of another library
            return match.group()
        if value in ("True", "False"):
            return f"--{flag}" if value == "True" else f"--no-{flag}"
        return f"--{flag} {shlex.quote(value[1:-1])}"

    return hint and _SELECT.sub("with --select", _PYTHON.sub(option, hint))
