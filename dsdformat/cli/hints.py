"""Hints of the library, said as the command has them. Pure."""

from __future__ import annotations

import re
import shlex

__all__ = ["as_options"]

_PYTHON = re.compile(r"\b([a-z_]+)=('[^']*'|True|False)")
_OPTIONS = {"max_shard_bytes": "max-shard-size", "max_file_bytes": "max-shard-size"}


def as_options(hint: str | None) -> str | None:
    """Return a hint with options of the command in the place of those of a call."""

    def option(match: re.Match[str]) -> str:
        name, value = match.groups()
        flag = _OPTIONS.get(name, name.replace("_", "-"))
        if value in ("True", "False"):
            return f"--{flag}" if value == "True" else f"--no-{flag}"
        return f"--{flag} {shlex.quote(value[1:-1])}"

    return hint and _PYTHON.sub(option, hint)
