"""Paths in the tree: as a person reads them, and as payload keys (spec R-10.6, R-10.7)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from dsdformat.boxes import Box
from dsdformat.errors import shorten
from dsdformat.limits import INT_MAX, INT_MIN

__all__ = ["Path", "emit_key", "emit_keys", "emit_name", "parse_name", "parse_step", "render_path"]

# Dict keys and indices that lead from the root to a leaf.
Path = Sequence[Any]

_NUMBER = re.compile(r"@-?[0-9]{1,20}\Z")
_STEP_MAX = 80  # characters in an error, of which there may be one for each value below a key


def render_path(path: Path) -> str:
    """Render a path for an error: `$.model['layer.weight'][0]`."""
    return "$" + "".join(map(_render_step, path))


def emit_name(path: Path, encoded_key: Callable[[Any], bytes]) -> str:
    """Return the display name of a path: its parts, escaped, joined by `/`."""
    if len(path) == 1:
        return _part(path[0], encoded_key)
    return "/".join([_part(step, encoded_key) for step in path])


def parse_name(name: str) -> tuple[Any, ...]:
    """Return the path that has this display name, if there is one of strings and integers alone."""
    if "%" not in name and "@" not in name:  # as mostly
        return tuple(name.split("/"))
    return tuple(map(parse_step, name.split("/")))


def parse_step(part: str) -> str | int:
    """Return the step that is displayed so, if that is a string or an integer.

    Of any other text it is a step that is displayed in another way.
    """
    if _NUMBER.match(part):
        return int(part[1:])
    return part.replace("%2F", "/").replace("%40", "@").replace("%25", "%")


def emit_key(path: Path, encoded_key: Callable[[Any], bytes]) -> str:
    """Return the payload key of a whole raw tensor at this path below its file's prefix (R-10.6).

    Args:
        path: At least one part.
        encoded_key: Gives the canonical bytes of a dict key that is neither str nor int.
    """
    if len(path) > 1 or type(path[0]) is not str:
        return "/" + emit_name(path, encoded_key)
    name = _escape(path[0])
    if name.startswith("/"):
        return "%2F" + name[1:]
    return "%5F_metadata__" if name == "__metadata__" else name


def emit_keys(parent: Path, steps: Sequence[Any], encoded_key: Callable[[Any], bytes]) -> list[str]:
    """Return the payload keys of tensors in one container; see `emit_key`.

    Args:
        parent: The container's path below the file's prefix.
        steps: Keys of the tensors in it.
        encoded_key: As in `emit_key`.
    """
    if set(map(type, steps)) <= {str}:
        text = "\0".join(steps)
        if not ("%" in text or "@" in text or "/" in text or "__metadata__" in text):  # most
            head = f"/{emit_name(parent, encoded_key)}/" if parent else ""
            return [head + step for step in steps] if head else list(steps)
    return [emit_key((*parent, step), encoded_key) for step in steps]


def emit_key_suffix(box: Box | None, codec: str | None) -> str:
    """Return what follows the key of a part of a tensor, or of a compressed chunk (R-10.7)."""
    return (f"@{box}" if box is not None else "") + (f"@{codec}" if codec else "")


def _escape(text: str) -> str:
    if "%" not in text and "@" not in text:
        return text
    return text.replace("%", "%25").replace("@", "%40")


def _part(step: Any, encoded_key: Callable[[Any], bytes]) -> str:
    if type(step) is str:
        return step.replace("%", "%25").replace("@", "%40").replace("/", "%2F")
    if type(step) is int and INT_MIN <= step <= INT_MAX:
        return f"@{step}"
    return "@x" + encoded_key(step).hex()


def _render_step(step: Any) -> str:
    if type(step) is int and INT_MIN <= step <= INT_MAX:
        return f"[{step}]"
    if type(step) is str and len(step) <= _STEP_MAX and step.isidentifier():
        return f".{step}"
    text = shorten(step)
    return f"[{text if len(text) <= _STEP_MAX else text[: _STEP_MAX - 1] + '…'}]"
