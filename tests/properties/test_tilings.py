"""A tensor in any tiling, by any number of writers, in any codec, is read as numpy slices it."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from strategies import boxes_in, tilings

from dsdformat import Box, Checkpoint, PartWriter, TensorSource, Writer
from dsdformat.errors import MismatchError
from dsdformat.format.digests import digest
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.packing import emit
from dsdformat.numpy import _DTYPES
from dsdformat.storage.memory import CountingStorage, MemoryStorage, MemoryTarget
from dsdformat.verify import verify_storage

CODECS = ["raw", "zstd", "planes+zstd"]
LEAF = 4 << 20


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))


def part(array: Any, box: Box) -> Any:
    return array[(*slices(box), ...)]  # an array, and no scalar, whatever the box


def packed(array: Any) -> bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def values_of(name: str, shape: tuple[int, ...], seed: int) -> Any:
    """Numbers that a codec can shorten, and noise that it cannot."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64)) * DTYPES[name].itemsize
    data = rng.integers(0, 256 if seed % 2 else 2, count, dtype=np.uint8)
    return data.view(_DTYPES[name]).reshape(shape)


def write(
    array: Any, name: str, boxes: list[Box], owners: list[int], **options: Any
) -> dict[str, bytearray]:
    """Write an array in boxes; each owner is a writer, and the first one the coordinator."""
    files: dict[str, bytearray] = {}
    target = MemoryTarget(files)
    world_size = max(owners, default=0) + 1
    options = {"threads": 1, "world_size": world_size, **options}
    ranks: list[Any] = [Writer(target, **options)]
    ranks += [PartWriter(target, rank=rank, **options) for rank in range(1, world_size)]
    for rank, writer in enumerate(ranks):
        own = [box for box, owner in zip(boxes, owners, strict=True) if owner == rank]
        chunks = [(box, packed(part(array, box))) for box in own]
        writer.add({"model": {"w": TensorSource(name, array.shape, chunks)}, "step": 7})
    ranks[0].commit([writer.finish() for writer in ranks[1:]])
    return files


def content_digest(array: Any, name: str) -> str:
    """R-13.1, from the text."""
    data = packed(array)
    leaves = b"".join(digest(data[at : at + LEAF]) for at in range(0, len(data), LEAF))
    return digest(emit(["dsd-content-1", name, list(array.shape), leaves])).hex()


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(st.lists(st.integers(1, 12), max_size=4).map(tuple))
    array = values_of(name, shape, draw(st.integers(0, 99)))
    boxes = draw(st.permutations(draw(tilings(shape, max_cuts=8))))
    owners = draw(st.lists(st.integers(0, 3), min_size=len(boxes), max_size=len(boxes)))
    return {
        "array": array,
        "name": name,
        "boxes": boxes,
        "owners": owners,
        "codec": draw(st.sampled_from(CODECS)),
        "block_nbytes": 4096 << draw(st.integers(0, 2)),
    }


@settings(max_examples=250)
@given(cases(), st.data())
def test_each_box_that_is_read_is_what_numpy_slices(case, data):
    array = case["array"]
    event(f"{len(case['boxes'])} chunks")
    files = write(**case)
    assert verify_storage(MemoryStorage(files), threads=1).problems == ()
    with Checkpoint(MemoryStorage(files), threads=1) as checkpoint:
        entry = checkpoint.tensor("model/w")
        assert bytes(entry.read()) == packed(array)
        assert entry.content_digest() == content_digest(array, case["name"])
        for _ in range(4):
            box = data.draw(boxes_in(array.shape))
            wanted = packed(part(array, box))
            assert bytes(entry.read(box)) == wanted
            assert bytes(entry.read(box, verify=False)) == wanted
            assert bytes(entry[slices(box)].read()) == wanted


@settings(max_examples=30)
@given(st.data())
def test_boxes_of_tensors_of_many_blocks_are_what_numpy_slices(data):
    # Rows of 20,000 bytes: blocks begin and end in the middle of rows.
    array = values_of("float32", (31, 5, 1000), data.draw(st.integers(0, 99)))
    boxes = data.draw(tilings(array.shape, max_cuts=4))
    codec = data.draw(st.sampled_from(CODECS))
    threads = data.draw(st.integers(1, 3))
    owners = [0] * len(boxes)
    files = write(array, "float32", boxes, owners, codec=codec, block_nbytes=4096, threads=threads)
    with Checkpoint(MemoryStorage(files), threads=threads) as checkpoint:
        entry = checkpoint.tensor("model/w")
        assert bytes(entry.read()) == packed(array)
        for _ in range(6):
            box = data.draw(boxes_in(array.shape))
            into = np.full(part(array, box).nbytes, 0xAA, np.uint8)
            entry.read(box, into=into)
            assert into.tobytes() == packed(part(array, box))


@settings(max_examples=60)
@given(st.data())
def test_a_box_is_read_from_no_more_than_the_blocks_that_it_meets(data):
    array = values_of("uint16", (40, 500), 1)
    boxes = data.draw(tilings(array.shape, max_cuts=5))
    files = write(array, "uint16", boxes, [0] * len(boxes), block_nbytes=4096)
    box = data.draw(boxes_in(array.shape))
    storage = CountingStorage(MemoryStorage(files))
    with Checkpoint(storage, threads=1) as checkpoint:
        entry = checkpoint.tensor("model/w")
        chunks = entry.chunks
        del storage.reads[:]
        entry.read(box)
    allowed: set[tuple[int, int]] = set()
    for chunk in chunks:
        shared = chunk.box.intersect(box)
        if shared is None or not shared.numel:
            continue
        index = np.arange(chunk.box.numel).reshape(chunk.box.shape)
        offset = tuple(map(operator.sub, shared.offset, chunk.box.offset))
        inner = Box(offset, shared.shape)
        for block in np.unique(part(index, inner) * 2 // 4096):
            begin = chunk.byte_offset + int(block) * 4096
            allowed.add((begin, min(begin + 4096, chunk.byte_offset + chunk.nbytes)))
    reads = [(at, at + nbytes) for label, at, nbytes in storage.reads if label != "manifest.dsd"]
    assert all(any(low <= a and b <= high for low, high in allowed) for a, b in reads)
    assert sum(b - a for a, b in reads) <= sum(high - low for low, high in allowed)


@given(st.permutations([0, 1, 2, 0]).map(tuple), st.integers(0, 2), st.sampled_from(CODECS))
def test_a_tensor_without_elements_is_one_raw_chunk_whoever_wrote_it(shape, owner, codec):
    array = np.zeros(shape, np.float32)
    files = write(array, "float32", [Box((0,) * 4, shape)], [owner], codec=codec)
    assert verify_storage(MemoryStorage(files), threads=1).problems == ()
    with Checkpoint(MemoryStorage(files), threads=1) as checkpoint:
        entry = checkpoint.tensor("model/w")
        assert bytes(entry.read()) == b""
        assert [chunk.codec for chunk in entry.chunks] == ["raw"]
        assert entry.content_digest() == content_digest(array, "float32")


def test_a_tensor_without_elements_that_two_writers_have_never_makes_a_bad_checkpoint():
    whole = Box((0, 0), (3, 0))
    try:
        files = write(np.zeros((3, 0), np.float32), "float32", [whole, whole], [0, 1])
    except MismatchError:  # better than a header that the manifest does not imply
        return
    assert verify_storage(MemoryStorage(files), threads=1).problems == ()


def test_chunks_shorter_and_longer_than_a_block_keep_their_places():
    # Of one size class, and so next to each other in the file.
    shapes = [(1,), (4097,), (3,), (8191,), (5,), (70_001,), (7,)]
    arrays = {f"w{index}": np.arange(size, dtype=np.uint8) for index, (size,) in enumerate(shapes)}
    files: dict[str, bytearray] = {}
    with Writer(MemoryTarget(files), threads=1, block_nbytes=4096) as writer:
        writer.add({name: TensorSource.of("uint8", a.shape, a) for name, a in arrays.items()})
    with Checkpoint(MemoryStorage(files), threads=1) as checkpoint:
        assert {e.name: bytes(e.read()) for e in checkpoint} == {
            name: packed(array) for name, array in arrays.items()
        }


# Content digests over several leaves of 4 MiB

ROWS, COLUMNS = 2311, 1009  # 9,327,196 bytes of float32: no leaf ends where a row does
BIG = {
    "one chunk": [(0, ROWS, 0, COLUMNS)],
    "by rows": [(at, min(at + 300, ROWS), 0, COLUMNS) for at in range(0, ROWS, 300)],
    "by columns": [(0, ROWS, at, min(at + 200, COLUMNS)) for at in range(0, COLUMNS, 200)],
    "a grid": [
        (a, min(a + 1000, ROWS), b, min(b + 500, COLUMNS))
        for a, b in itertools.product(range(0, ROWS, 1000), range(0, COLUMNS, 500))
    ],
    "a flat range": [(0, 1100, 0, COLUMNS), (1100, 1101, 0, 37), (1100, 1101, 37, COLUMNS)]
    + [(1101, ROWS, 0, COLUMNS)],
}


@pytest.fixture(scope="module")
def big() -> Any:
    return values_of("float32", (ROWS, COLUMNS), 3)


@pytest.mark.parametrize("block_nbytes", [65_536, LEAF, 16 * LEAF], ids=["64k", "4m", "64m"])
@pytest.mark.parametrize("ranges", BIG.values(), ids=BIG)
def test_the_content_digest_of_a_tensor_is_the_same_for_every_chunking(big, ranges, block_nbytes):
    boxes = [Box((a, c), (b - a, d - c)) for a, b, c, d in ranges]
    owners = [index % 2 for index in range(len(boxes))]
    files = write(big, "float32", boxes, owners, block_nbytes=block_nbytes)
    with Checkpoint(MemoryStorage(files), threads=2) as checkpoint:
        assert checkpoint.tensor("model/w").content_digest() == content_digest(big, "float32")


def test_the_content_digest_of_a_state_is_the_same_for_every_chunking(big):
    digests = set()
    for ranges, codec in zip(BIG.values(), itertools.cycle(CODECS)):
        boxes = [Box((a, c), (b - a, d - c)) for a, b, c, d in ranges]
        files = write(big, "float32", boxes, [0] * len(boxes), codec=codec, threads=2)
        with Checkpoint(MemoryStorage(files), threads=2) as checkpoint:
            digests.add(checkpoint.content_digest())
    assert len(digests) == 1
