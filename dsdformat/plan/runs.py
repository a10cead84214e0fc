"""Carry equal runs of bytes, evenly spaced along a few levels, from one buffer to another.

Decides who does it: numpy where the program has loaded it, since it needs neither a step of Python
for each run nor the interpreter's lock; else views of memory, a run, or a word of many runs, at a
time. Both give the same bytes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["Level", "move_runs"]

_WORDS: dict[int, Literal["Q", "I", "H", "B"]] = {8: "Q", 4: "I", 2: "H", 1: "B"}
_ROWS_PER_WORD = 8  # below it, rows are moved one by one
_RUNS_MIN = 16  # below it, numpy is not worth its call
_LEVELS_MAX = 31  # numpy before 2.0 has 32 dims


class Level(NamedTuple):
    """`times` equal things, `src_step` bytes apart in the source and `dst_step` in the place."""

    times: int
    src_step: int
    dst_step: int


def move_runs(
    levels: Sequence[Level], run: int, data: memoryview, src: int, into: memoryview, dst: int
) -> None:
    """Carry those runs, or parts of runs, that lie in `data`.

    Args:
        levels: The outermost first. Where not all runs lie in `data`, each step in the source is
            at least as long as what lies within it.
        run: Bytes of each run.
        data: Where they come from.
        src: Of the first run in `data`; it may lie before it, and the last behind it.
        into: Where they go; all places are inside.
        dst: Of the first run there.
    """
    extent = run + sum((level.times - 1) * level.src_step for level in levels)
    if src >= 0 and src + extent <= len(data):
        _move_all(levels, run, data, src, into, dst)
        return
    if not levels:
        low, high = max(src, 0), min(src + run, len(data))
        if low < high:
            into[dst + low - src : dst + high - src] = data[low:high]
        return
    (count, src_step, dst_step), *inner = levels
    extent -= (count - 1) * src_step
    first = max(0, -((src + extent - 1) // src_step)) if src < 0 else 0
    last = min(count, -((src - len(data)) // src_step))
    for index in sorted({first, last - 1}) if first < last else ():
        move_runs(inner, run, data, src + index * src_step, into, dst + index * dst_step)
    if last - first > 2:  # the ends may lie there in part, what is between them does not
        middle = Level(last - first - 2, src_step, dst_step)
        at = first + 1
        move_runs([middle, *inner], run, data, src + at * src_step, into, dst + at * dst_step)


def _move_all(
    levels: Sequence[Level], run: int, data: memoryview, src: int, into: memoryview, dst: int
) -> None:
    if not levels:
        into[dst : dst + run] = data[src : src + run]
        return
    array = _loaded_array()
    worth = math.prod(level.times for level in levels) >= _RUNS_MIN
    if array is not None and worth and len(levels) <= _LEVELS_MAX:
        word = math.gcd(run, 8)
        shape = [*(level.times for level in levels), run // word]
        target = array(shape, f"u{word}", into, dst, [*(one.dst_step for one in levels), word])
        source = array(shape, f"u{word}", data, src, [*(one.src_step for one in levels), word])
        target[...] = source
        return
    longest = max(levels, key=lambda level: level.times)
    others = [level for level in levels if level is not longest]
    for steps in itertools.product(*(range(level.times) for level in others)):
        pairs = list(zip(steps, others, strict=True))
        begin = src + sum(step * level.src_step for step, level in pairs)
        at = dst + sum(step * level.dst_step for step, level in pairs)
        _move_rows(longest, run, data[begin:], into[at:])


def _loaded_array() -> Callable[..., Any] | None:
    """Return numpy's class of arrays, or None where nobody has imported it, or it is half so."""
    return getattr(sys.modules.get("numpy"), "ndarray", None)


def _move_rows(level: Level, run: int, data: memoryview, into: memoryview) -> None:
    """Carry many short runs a word of each at a time, others one by one."""
    rows, src_step, dst_step = level
    word = math.gcd(run, src_step, dst_step, 8)
    if not src_step:  # one run for all
        data, src_step = memoryview(bytes(data[:run]) * rows), run
        word = math.gcd(run, dst_step, 8)
    if rows < _ROWS_PER_WORD * (run // word):
        for row in range(rows):
            begin, at = row * src_step, row * dst_step
            into[at : at + run] = data[begin : begin + run]
        return
    form = _WORDS[word]
    source = data[: (rows - 1) * src_step + run].cast(form)
    place = into[: (rows - 1) * dst_step + run].cast(form)
    for index in range(run // word):
        place[index :: dst_step // word] = source[index :: src_step // word]
