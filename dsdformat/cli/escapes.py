"""Text that comes from a checkpoint, made fit for a terminal: escaped, shortened. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.cells import cell_len

__all__ = ["cells", "escape", "fit", "unescape"]

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPED = re.compile(
    r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U(000[0-9a-f]{5}|0010[0-9a-f]{4})|([nrt]))"
)


def escape(text: str) -> str:
    r"""Replace what a terminal would obey, or not show, as Python does: `\x1b`, `\u202e`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape_char(char) for char in text)


def unescape(text: str) -> str:
    """Undo `escape`, so that a name can be typed as it was printed."""
    return _ESCAPED.sub(lambda match: _unescape_char(*match.groups()), text)


def cells(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def fit(text: str, width: int) -> str:
    """Return text of at most `width` cells: where it is longer, its middle is left out."""
    # A character may take no cell, so the number of characters has a bound of its own.
    if len(text) <= 4 * width and cells(text) <= width:
        return text
    tail = _take(reversed(text), (width - 1) // 2)
    return _take(text, width - 1 - (width - 1) // 2) + "…" + tail[::-1]


def _take(text: Iterable[str], width: int) -> str:
    taken: list[str] = []
    for char in text:
        width -= max(1, cells(char))
        if width < 0:
            break
        taken.append(char)
    return "".join(taken)


def _escape_char(char: str) -> str:
    code = ord(char)
    if char in _SHORT:
        return _SHORT[char]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _unescape_char(byte: str | None, short: str | None, long: str | None, letter: str) -> str:
    digits = byte or short or long
    return chr(int(digits, 16)) if digits else {"n": "\n", "r": "\r", "t": "\t"}[letter]
