"""Byte planes: numpy and the standard library agree, and blocks come back where they are wanted."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from dsdformat.format import planes
from dsdformat.format.planes import join_planes, split_planes

np = pytest.importorskip("numpy")

WORDS = [1, 2, 4, 8]
SLICE = planes._SLICE
COUNTS = [1, 2, 3, 255, 1024, 70_001]


@pytest.fixture(params=["numpy", "stdlib"])
def engine(request, monkeypatch):
    """Each of the two that do the work."""
    if request.param == "stdlib":
        monkeypatch.setattr(planes, "_find_numpy", lambda nbytes: None)
    return request.param


def words_of(block: bytes, word: int) -> list[int]:
    return [int.from_bytes(block[at : at + word], "little") for at in range(0, len(block), word)]


def planes_of(block: bytes, word: int, *, rotate: bool) -> list[bytes]:
    """As the spec says it, a word at a time."""
    bits = 8 * word
    found = words_of(block, word)
    if rotate:
        found = [(one << 1 | one >> (bits - 1)) & ((1 << bits) - 1) for one in found]
    return [bytes(one >> 8 * plane & 255 for one in found) for plane in range(word)]


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("word", WORDS)
def test_planes_are_those_of_the_spec_and_give_the_block_back(engine, word, count, rotate):
    block = random.Random(count).randbytes(word * count)
    split = split_planes(block, word, rotate=rotate)
    assert [bytes(plane) for plane in split] == planes_of(block, word, rotate=rotate)
    assert join_planes(split, word, rotate=rotate) == block


@pytest.mark.parametrize("word", [2, 4, 8])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_blocks_around_a_slice_are_split_whole(word, over):
    block = random.Random(word).randbytes(2 * SLICE + word * over)
    split = split_planes(block, word, rotate=True)
    assert [bytes(plane) for plane in split] == planes_of(block, word, rotate=True)
    assert join_planes(split, word, rotate=True) == block


@pytest.mark.parametrize("word", WORDS)
def test_a_block_is_joined_where_it_is_wanted(engine, word):
    block = random.Random(3).randbytes(word * 1000)
    buffer = bytearray(b"#" * (len(block) + 2))
    into = memoryview(buffer)[1:-1]
    found = join_planes(split_planes(block, word, rotate=True), word, rotate=True, into=into)
    assert found.obj is buffer or np.shares_memory(found, into)
    assert buffer == b"#" + block + b"#"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_split_and_joined(engine, kind):
    block = random.Random(4).randbytes(4000)
    split = [kind(bytes(plane)) for plane in split_planes(kind(block), 4, rotate=True)]
    assert join_planes(split, 4, rotate=True) == block


def test_numpy_is_imported_only_where_there_is_much_to_do():
    program = """
import sys
from dsdformat.format.planes import _NUMPY_MIN, split_planes
split_planes(bytes(_NUMPY_MIN - 4), 4, rotate=True)
print("numpy" in sys.modules)
split_planes(bytes(_NUMPY_MIN), 4, rotate=True)
print("numpy" in sys.modules)
sys.modules["numpy"] = None  # as where it is not installed
print(len(split_planes(bytes(_NUMPY_MIN), 4, rotate=True)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["False", "True", "4"], done.stderr
