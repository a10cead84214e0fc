"""Random changes of a checkpoint, sealed anew: whatever they say, only errors of our own come out.

The digests above a change are made right, so that what lies behind them is reached. Seeds are
fixed; a test that fails prints the seed and the change.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from blake3 import blake3
from vectors.builder import build
from vectors.declare import StoredChunk
from vectors.samples import compressed, mixed
from vectors.wire import digest

from dsdformat import Checkpoint, DsdError
from dsdformat.format.frame import emit_manifest, parse_head
from dsdformat.format.packing import emit, parse
from dsdformat.storage.memory import MemoryStorage
from dsdformat.verify import verify_storage

Files = dict[str, bytes]
ENTRY = ("name", "path", "paths", "dtype", "shape", "nbytes", "placements", "chunks")


def survive(files: Files) -> None:
    """Do what a user may do with a checkpoint; errors of dsdformat are fine, others are not."""
    verify_storage(MemoryStorage(files), threads=1)
    try:
        checkpoint = Checkpoint(MemoryStorage(files), threads=1)
    except DsdError:
        return
    with checkpoint:
        for entry in checkpoint:
            for name in ENTRY:
                attempt(lambda entry=entry, name=name: getattr(entry, name))
            attempt(lambda entry=entry: repr(entry))
            if attempt(lambda entry=entry: len(entry.chunks)):
                attempt(lambda entry=entry: entry.read())
                attempt(lambda entry=entry: entry.map())
        attempt(checkpoint.content_digest)
        attempt(lambda: checkpoint.tensor("no such name"))


def attempt(call: Callable[[], object]) -> bool:
    try:
        call()
    except DsdError:
        return False
    return True


def sections_of(manifest: bytes) -> dict[str, bytes]:
    head_nbytes = int.from_bytes(manifest[12:16], "little")
    head = parse_head(manifest[:head_nbytes], len(manifest))
    at = {name: head.page_offsets[one.first_page] for name, one in head.sections.items()}
    return {name: manifest[at[name] :][: one.nbytes] for name, one in head.sections.items()}


def sealed(files: Files, sections: dict[str, bytes]) -> Files:
    pieces = [(name, [data]) for name, data in sections.items()]
    head, pages, _ = emit_manifest(pieces, ["planes", "zstd"], compress=False)
    return {**files, "manifest.dsd": head + b"".join(pages)}


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, put in, taken out, or moved."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xDC, 0xFF))
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3:
            del changed[at : at + rng.randint(1, 8)]
        else:
            length = rng.randint(1, 8)
            changed[at : at + length] = (2 ** rng.randrange(64) - rng.randrange(2)).to_bytes(
                8, "little"
            )[:length]
    return bytes(changed)


SEEDS = range(25)
ROUNDS = 40


@pytest.mark.parametrize("seed", SEEDS)
def test_a_body_of_changed_bytes_gives_our_errors_alone(small_files, seed):
    rng = random.Random(seed)
    sections = sections_of(small_files["manifest.dsd"])
    for _ in range(ROUNDS):
        changed = {**sections, "body": mutated(sections["body"], rng)}
        survive(sealed(small_files, changed))


@pytest.mark.parametrize("seed", SEEDS)
def test_columns_of_changed_bytes_give_our_errors_alone(small_files, seed):
    rng = random.Random(seed)
    sections = sections_of(small_files["manifest.dsd"])
    columns = [name for name in sections if name != "body"]
    for _ in range(ROUNDS):
        changed = dict(sections)
        for name in rng.sample(columns, rng.choice((1, 1, 2))):
            changed[name] = mutated(sections[name], rng)
        survive(sealed(small_files, changed))


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_of_columns_that_are_changed_give_our_errors_alone(small_files, seed):
    """The lengths stay as they are, so that the numbers are looked at."""
    rng = random.Random(seed)
    sections = sections_of(small_files["manifest.dsd"])
    columns = [name for name in sections if name not in ("body", "digests")]
    odd = [0, 1, 2, 5, 255, 4096, 2**16, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    for _ in range(ROUNDS):
        changed = dict(sections)
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(columns)
            data = bytearray(changed[name])
            width = rng.choice((4, 8))
            at = rng.randrange(0, max(1, len(data) - width + 1), 4)
            data[at : at + width] = (rng.choice(odd) % 2 ** (8 * width)).to_bytes(width, "little")
            changed[name] = bytes(data[: len(changed[name])])
        survive(sealed(small_files, changed))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_head_of_changed_bytes_gives_our_errors_alone(small_files, seed):
    rng = random.Random(seed)
    manifest = small_files["manifest.dsd"]
    head_nbytes = int.from_bytes(manifest[12:16], "little")
    for _ in range(ROUNDS):
        head = manifest[:12] + mutated(manifest[12 : head_nbytes - 32], rng)
        files = {**small_files, "manifest.dsd": head + digest(head) + manifest[head_nbytes:]}
        survive(files)


# Values put into the places of others

HOSTILE = [
    *(None, True, 0, -1, 2**63, 2**64 - 1, 0.5, -0.0, float("inf"), "", "a", b"", b"\x01"),
    *([], {}, [[]], {"": {}}, ["list"], ["tensor"], ["tensor", 0], ["tensor", 1, {"a": []}]),
    *(["int", bytes(2000) + b"\x01"], ["int", b""], ["dict", [["int", bytes(2000) + b"\x01"], []]]),
    *(["dict", [1, ["bogus"]]], ["odict", ["a", 1], ["a", 2]], ["set", ["tuple", 1, ["list"]]]),
    *(["set", ["frozenset", ["tuple"]]], ["size", 2**63], ["scalar", "int8", b""], ["deque", 1, 2]),
    *(["name", "a", 1], ["datetime", *[2**64 - 1] * 8, None], ["date", 0, 0, 0]),
    *(
        ["timedelta", -(2**63), 0, 0],
        ["path", "windows", "\\\\a\\b\\", "c"],
        ["path", "posix", "/"],
    ),
    *(["complex", 1.0, 2.0], ["counter", ["a", {}]], ["defaultdict", [0.0, 1], [0, 1]]),
]


def replaced(value: object, rng: random.Random, chance: float) -> object:
    """The value with some of its parts, at any depth, replaced by hostile ones."""
    if rng.random() < chance:
        return rng.choice(HOSTILE)
    if isinstance(value, dict):
        return {key: replaced(item, rng, chance) for key, item in value.items()}
    return [replaced(item, rng, chance) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def body(small_files: Files) -> dict[str, object]:
    body = parse(sections_of(small_files["manifest.dsd"])["body"])
    body["tree"]["values"] = [
        "list",
        *(["odict", ["k", value]] for value in ("a", 1, None, ["tuple"])),
    ]
    return body


@pytest.mark.parametrize("seed", SEEDS)
def test_a_body_of_other_values_gives_our_errors_alone(small_files, body, seed):
    rng = random.Random(seed)
    sections = sections_of(small_files["manifest.dsd"])
    for _ in range(ROUNDS):
        changed = dict(body)
        keys = ["tree"] if rng.random() < 0.6 else rng.sample(list(body), 2)
        for key in keys:
            changed[key] = replaced(body[key], rng, 0.12)
        survive(sealed(small_files, {**sections, "body": emit(changed)}))


@pytest.mark.parametrize(
    "value",
    [pytest.param(value, id=f"{number}") for number, value in enumerate(HOSTILE)],
)
@pytest.mark.parametrize("outer", ["map", "list", "dict", "attribute", "key", "huge-key"])
def test_a_hostile_value_anywhere_gives_our_errors_alone(small_files, body, value, outer):
    wrapped = {
        "map": {"x": value},
        "list": ["list", 0, value],
        "dict": ["dict", [1, value]],
        "attribute": ["list", ["tensor", 0, {"flavour": value, "x": value}]],
        "key": ["dict", [value, 1]],
        "huge-key": ["dict", [["int", bytes(2000) + b"\x01"], value]],
    }[outer]
    sections = sections_of(small_files["manifest.dsd"])
    tree = {**body["tree"], "zz": wrapped}
    survive(sealed(small_files, {**sections, "body": emit({**body, "tree": tree})}))


# Stored bytes


@pytest.mark.parametrize("codec", [1, 2])
@pytest.mark.parametrize("seed", range(15))
def test_compressed_blocks_of_changed_bytes_give_our_errors_alone(codec, seed):
    rng = random.Random(seed)
    data = mixed(2500, 4)

    def change(chunks: list[StoredChunk]) -> None:
        for block in chunks[0].blocks:
            block.stored = (mutated(block.stored, rng) or b"\0")[: len(block.decoded)]
            block.stored_digest = digest(block.stored)

    for _ in range(10):
        files = build(compressed(data, codec=codec, dtype="float32"), chunks=change).files
        survive(files)


@pytest.mark.parametrize("seed", range(10))
def test_a_manifest_of_noise_gives_our_errors_alone(small_files, seed):
    rng = random.Random(seed)
    for _ in range(50):
        noise = rng.randbytes(rng.randrange(3000))
        head = small_files["manifest.dsd"][: rng.choice((0, 8, 12, 40))] + noise
        survive({**small_files, "manifest.dsd": head})
        survive({**small_files, "manifest.dsd": head + blake3(head).digest()})
