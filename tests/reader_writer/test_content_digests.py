"""Content digests and equal bytes: what a checkpoint means, and what it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from dsdformat import Box, TensorSource
from dsdformat.boxes import flat_boxes
from dsdformat.limits import LEAF_NBYTES

SHAPE = (1100, 1000)  # more than one leaf of 4 MiB as int32


@pytest.fixture(scope="module")
def data() -> bytes:
    return b"".join((n * 7919 % 1000).to_bytes(4, "little") for n in range(math.prod(SHAPE)))


def in_one(data: bytes) -> list[tuple[Box, bytes]]:
    return [(Box((0, 0), SHAPE), data)]


def by_rows(data: bytes) -> list[tuple[Box, bytes]]:
    return [
        (Box((at, 0), (min(300, 1100 - at), 1000)), data[at * 4000 : (at + 300) * 4000])
        for at in range(0, 1100, 300)
    ]


def by_columns(data: bytes) -> list[tuple[Box, bytes]]:
    rows = [data[at : at + 4000] for at in range(0, len(data), 4000)]
    return [
        (
            Box((0, at), (1100, min(400, 1000 - at))),
            b"".join(r[at * 4 : (at + 400) * 4] for r in rows),
        )
        for at in range(0, 1000, 400)
    ]


def flat(data: bytes) -> list[tuple[Box, bytes]]:
    chunks, at = [], 0
    for start, stop in ((0, 333_333), (333_333, 700_001), (700_001, 1_100_000)):
        for box in flat_boxes(SHAPE, start, stop):
            chunks.append((box, data[at : at + box.numel * 4]))
            at += box.numel * 4
    return chunks


@pytest.mark.parametrize("codec", ["raw", "planes+zstd"])
@pytest.mark.parametrize("block_nbytes", [2**16, 2**22, 2**23])
@pytest.mark.parametrize("cut", [in_one, by_rows, by_columns, flat])
def test_the_content_digest_depends_on_the_content_alone(
    save, load, data, cut: Callable[[bytes], Any], block_nbytes, codec
):
    source = TensorSource("int32", SHAPE, cut(data), codec=codec)
    with load(save({"w": source, "a": 1}, block_nbytes=block_nbytes)) as checkpoint:
        leaves = b"".join(
            blake3(data[at : at + LEAF_NBYTES]).digest() for at in range(0, len(data), LEAF_NBYTES)
        )
        packed = b"\x94\xaddsd-content-1\xa5int32\x92\xcd\x04\x4c\xcd\x03\xe8\xc4\x40" + leaves
        tensor = blake3(packed).digest()
        assert checkpoint.tensor("w").content_digest() == tensor.hex()
        state = b"\x82\xa1a\x01\xa1w\x92\xa6tensor\xc4\x20" + tensor
        assert checkpoint.content_digest() == blake3(state).hexdigest()


def digests(save: Any, load: Any, state: dict[str, Any], **options: Any) -> tuple[str, str]:
    with load(save(state, **options)) as checkpoint:
        return checkpoint.root, checkpoint.content_digest()


def tensor(data: bytes = b"abcd", **options: Any) -> TensorSource:
    return TensorSource.of("uint8", (len(data),), data, **options)


SAME_CONTENT = [
    pytest.param({"w": tensor(codec="zstd")}, {}, id="codec"),
    pytest.param({"w": tensor(attributes={"flavour": "numpy"})}, {}, id="attributes"),
    pytest.param({"w": tensor()}, {"user": {"a": "b"}}, id="user-metadata"),
    pytest.param({"w": tensor()}, {"metadata": {}}, id="header-metadata"),
    pytest.param({"w": tensor()}, {"block_nbytes": 4096}, id="block-size"),
    pytest.param({"w": tensor()}, {"sides": {"a.txt": b""}}, id="side-file"),
]
OTHER_CONTENT = [
    pytest.param({"w": tensor(b"abce")}, id="bytes"),
    pytest.param({"w": TensorSource.of("int8", (4,), b"abcd")}, id="dtype"),
    pytest.param({"w": TensorSource.of("uint8", (2, 2), b"abcd")}, id="shape"),
    pytest.param({"v": tensor()}, id="name"),
    pytest.param({"w": tensor(), "a": None}, id="value"),
    pytest.param({"w": [tensor()]}, id="place"),
]


@pytest.mark.parametrize(("state", "options"), SAME_CONTENT)
def test_the_content_digest_is_the_same_for_another_layout(save, load, state, options):
    root, content = digests(save, load, {"w": tensor()})
    other_root, other_content = digests(save, load, state, **options)
    assert (other_content, other_root != root) == (content, True)


@pytest.mark.parametrize("state", OTHER_CONTENT)
def test_the_content_digest_differs_for_other_content(save, load, state):
    assert digests(save, load, state)[1] != digests(save, load, {"w": tensor()})[1]


def test_a_tie_is_content_too_only_by_what_it_holds(save, load):
    tied = tensor()
    one = digests(save, load, {"a": tied, "b": tied})
    two = digests(save, load, {"a": tensor(), "b": tensor()})
    assert one[1] == two[1]
    assert one[0] != two[0]


def test_the_content_digest_is_read_from_the_manifest_where_the_leaves_are_known(save, load):
    files = save({"w": tensor(bytes(5_000_000))})
    with load(files) as checkpoint:
        expected = checkpoint.tensor("w").content_digest()
    damaged = {**files, "model.safetensors": bytes(len(files["model.safetensors"]))}
    with load(damaged) as checkpoint:
        assert checkpoint.tensor("w").content_digest() == expected


# Equal input, equal bytes (spec, B108)

CHILD = """
import hashlib, json, sys
from pathlib import Path
import dsdformat
from dsdformat import TensorSource

path, threads, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def turned(items):
    items = list(items)
    return dict(items[step:] + items[:step])

def tensor(number, codec):
    data = bytes((number * at) % 200 for at in range(4 * (5000 + number)))
    return TensorSource.of("float32", (5000 + number,), data, codec=codec)

with dsdformat.create(
    path,
    threads=threads,
    block_nbytes=4096,
    user=turned((f"key {n}", str(n)) for n in range(16)),
    metadata=turned((f"meta {n}", str(n)) for n in range(16)),
) as writer:
    writer.add({
        section: turned((f"t{n}", tensor(n, codec)) for n in range(16))
        for section, codec in turned([("a", "raw"), ("b", "zstd"), ("c", "planes+zstd")]).items()
    })
    names = {f"e{n}" for n in range(16)}
    writer.add({"values": {"set": names, "dict": turned((n, n) for n in range(9))}})
files = sorted(Path(path).iterdir())
print(json.dumps({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}))
"""


def test_equal_state_gives_equal_bytes_in_any_process(tmp_path, run_python):
    found = set()
    for number, (seed, threads, step) in enumerate([(0, 1, 0), (1, 8, 3), (2, 2, 7), (3, 8, 15)]):
        done = run_python(
            CHILD, tmp_path / str(number), threads, step, env={"PYTHONHASHSEED": str(seed)}
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_compressed_pages_of_a_large_manifest_are_equal_too(save):
    state = {f"t{n:05}": n for n in range(150_000)}
    assert save(state) == save(dict(reversed(state.items())))
    assert len(save(state)["manifest.dsd"]) < 1_200_000
