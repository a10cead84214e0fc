"""Elements in nested brackets, as array libraries print them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dsdformat.cli.values import float_json

__all__ = ["element_json", "element_text", "grid_lines", "nested"]


def element_text(element: Any, digits: int = 5) -> str:
    """Return a number in so many significant digits; what is no float is returned whole."""
    if type(element) is float:
        return f"{element:.{digits}g}"
    if type(element) is complex:
        return f"{element.real:.{digits}g}{element.imag:+.{digits}g}j"
    return str(element)


def element_json(element: Any) -> Any:
    """Return an element as JSON has it: complex numbers are pairs, special floats strings."""
    if type(element) is complex:
        return [float_json(element.real), float_json(element.imag)]
    return float_json(element) if type(element) is float else element


def nested(elements: Iterator[Any], shape: Sequence[int]) -> Any:
    """Return elements in row-major order as nested lists, `[]` if there are none."""
    if not shape:
        return next(elements)
    if 0 in shape:  # another dim of an empty tensor may be of any size
        return []
    return [nested(elements, shape[1:]) for _ in range(shape[0])]


def grid_lines(texts: Sequence[str], shape: Sequence[int], edge: int, width: int) -> list[str]:
    """Lay out elements in row-major order.

    Args:
        texts: The elements that are shown.
        shape: Of the box.
        edge: How many elements are shown at either end of a longer dim; 0 if all are.
        width: Of a line, in characters; what does not fit goes on in the next.
    """
    if 0 in shape:
        return ["[]"]
    longest = max(map(len, texts))
    padded = iter([f"{text:>{longest}}" for text in texts])
    return _block(padded, shape, edge, max(longest, width - 2 * len(shape)))


def _block(texts: Iterator[str], shape: Sequence[int], edge: int, width: int) -> list[str]:
    if not shape:
        return [next(texts)]
    size, rest = shape[0], shape[1:]
    cut = edge and size > 2 * edge
    blocks = [_block(texts, rest, edge, width) for _ in range(2 * edge if cut else size)]
    if cut:
        blocks.insert(edge, ["…"])
    lines = [line for block in blocks for line in block]
    if not rest:
        lines = _wrapped(lines, width)
    lines = [("[" if number == 0 else " ") + line for number, line in enumerate(lines)]
    lines[-1] += "]"
    return lines


def _wrapped(texts: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for text in texts:
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append(text)
        else:
            lines[-1] += (" " if lines[-1] else "") + text
    return lines
