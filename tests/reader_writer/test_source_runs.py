"""Tensors that come as runs: the same files as one by one, and what is no run is refused."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from dsdformat import ArgumentError, TensorSource, UnsupportedValueError
from dsdformat.sources import RunMember, SourceRun
from dsdformat.storage.memory import MemoryTarget
from dsdformat.writer import Writer


@dataclass(frozen=True, eq=False)
class Row:
    """A tensor of bytes in a buffer; one that is odd comes alone."""

    at: int
    shape: tuple[int, ...]
    dtype: str = "uint8"
    odd: bool = False


BUFFER = random.Random(3).randbytes(40_000)


class OneByOne:
    """Adapts rows, each to a source of its own."""

    def __init__(self) -> None:
        self.made: dict[Row, Any] = {}

    def __call__(self, value: Any, place: Sequence[Any]) -> Any:
        if not isinstance(value, Row):
            return NotImplemented
        if value not in self.made:
            width = {"uint8": 1, "float32": 4}[value.dtype]
            nbytes = width
            for size in value.shape:
                nbytes *= size
            data = BUFFER[value.at : value.at + nbytes]
            self.made[value] = TensorSource.of(value.dtype, value.shape, data)
        return self.made[value]


class InRuns(OneByOne):
    """Adapts rows, neighbours that are met the first time and not odd at once."""

    def runs(self, values: Sequence[Any]) -> Iterator[tuple[int, SourceRun | None]]:
        at = 0
        while at < len(values):
            rows: list[Row] = []
            for one in values[at:]:
                known = not isinstance(one, Row) or one.odd or one in self.made or one in rows
                if known:
                    break
                rows.append(one)
            if rows:
                run = SourceRun(
                    [row.dtype for row in rows],
                    [row.shape for row in rows],
                    memoryview(BUFFER),
                    [row.at for row in rows],
                )
                self.made.update((row, RunMember(run, n)) for n, row in enumerate(rows))
                yield len(rows), run
            else:
                yield 1, None
            at += max(1, len(rows))


def rows(count: int, **options: Any) -> dict[str, Row]:
    sizes = [(n * 7) % 30 + 1 for n in range(count)]
    return {f"r{n}": Row(n * 31, (size,), **options) for n, size in enumerate(sizes)}


SHARED = Row(7, (3, 4), "float32")
STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "neighbours": lambda: {"model": rows(200)},
    "at the root": lambda: dict(rows(20)),
    "of two dtypes": lambda: {"model": {**rows(9), "f": SHARED, "g": Row(5000, (2,))}},
    "scalars": lambda: {"a": Row(1, ()), "b": {"c": Row(2, (), "float32")}},
    "tied": lambda: {"a": SHARED, "b": {"x": SHARED, "y": Row(0, (2,)), "z": SHARED}},
    "tied in one": lambda: {"a": {"x": SHARED, "y": Row(0, (2,)), "z": SHARED}},
    "odd between": lambda: {"a": {**rows(9), "r4": Row(9, (5,), odd=True)}, "b": rows(3, odd=True)},
    "values between": lambda: {"a": {**rows(9), "r4": 3.5, "r6": [rows(3), None, SHARED]}},
    "keys of all kinds": lambda: {"a": {3: Row(1, (2,)), True: Row(2, (3,)), b"x": Row(4, (1,))}},
    "names with escapes": lambda: {"a": {"%": SHARED, "/b": Row(1, (2,)), "@": Row(2, (2,))}},
    "names at the root": lambda: {"__metadata__": SHARED, "/b": Row(1, (2,)), "a@": Row(2, (2,))},
    "names that are long": lambda: {"é" * 300: {"ü" * 400: SHARED, "x": Row(1, (2,))}},
    "containers": lambda: {"o": OrderedDict(b=SHARED, a=Row(1, (9,))), "t": (Row(2, (1,)), 4)},
    "large": lambda: {"a": {"l": Row(0, (10_000,), "uint8"), **rows(50), "p": Row(1, (4096,))}},
}


def files_of(state: Mapping[str, Any], adapt: OneByOne, **options: Any) -> dict[str, bytes]:
    files: dict[str, bytearray] = {}
    with Writer(MemoryTarget(files), adapt=adapt, block_nbytes=4096, **options) as writer:
        writer.add(state)
    return {label: bytes(data) for label, data in files.items()}


def by_length(name: str) -> str:
    return ("raw", "zstd", "planes+zstd")[len(name) % 3]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("codec", ["raw", "planes+zstd", by_length])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_files_are_those_of_tensors_one_by_one(state, codec, threads, problems_of):
    made = state()
    files = files_of(made, InRuns(), codec=codec, threads=threads)
    assert files == files_of(made, OneByOne(), codec=codec, threads=1)
    assert problems_of(files) == []


def test_a_codec_that_is_a_function_is_asked_for_each_name():
    asked: list[str] = []

    def codec(name: str) -> str:
        asked.append(name)
        return "raw"

    files_of({"model": rows(4), "b": {"/": SHARED}}, InRuns(), codec=codec)
    assert asked == ["b/%2F", "model/r0", "model/r1", "model/r2", "model/r3"]


BAD_RUNS = {
    "behind the buffer": (["uint8"], [(9,)], [40_000 - 8]),
    "before the buffer": (["uint8"], [(9,)], [-1]),
    "wider than the buffer": (["float32"], [(10_001,)], [0]),
    "no elements": (["uint8"], [(3, 0)], [0]),
    "negative": (["uint8", "uint8"], [(2,), (-3, -3)], [0, 0]),
    "too many dims": (["uint8"], [(1,) * 65], [0]),
    "one start too few": (["uint8", "uint8"], [(2,), (2,)], [0]),
}


@pytest.mark.parametrize("run", BAD_RUNS.values(), ids=BAD_RUNS)
def test_what_does_not_lie_in_the_buffer_is_no_run(run):
    dtypes, shapes, starts = run
    with pytest.raises(ArgumentError) as caught:
        SourceRun(dtypes, shapes, memoryview(BUFFER), starts)
    assert caught.value.code == "bad_argument"


def test_a_buffer_of_wider_items_is_no_run():
    with pytest.raises(ArgumentError):
        SourceRun(["float32"], [(2,)], memoryview(BUFFER).cast("f"), [0])


def test_a_run_of_an_unknown_dtype_is_refused():
    with pytest.raises(UnsupportedValueError) as caught:
        SourceRun(["uint8", "float33"], [(2,), (2,)], memoryview(BUFFER), [0, 2])
    assert caught.value.code == "unsupported_dtype"
