"""What ranks leave for the one that merges: their parts of a save, and their words in a mailbox.

Parts come over the network or from a folder that others can write to. They are read and merged as
the coordinator does, up to the manifest; no rank and no torch is needed for that.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

from dsdformat.boxes import Box
from dsdformat.errors import DsdError
from dsdformat.format.manifest import Mesh
from dsdformat.format.packing import emit
from dsdformat.format.values import encode
from dsdformat.reader import Checkpoint
from dsdformat.sources import TensorSource
from dsdformat.storage.memory import MemoryStorage, MemoryTarget
from dsdformat.writer import PartWriter, Writer
from fuzz.bytewise import mutated
from fuzz.folders import packed, unpacked
from fuzz.formats import Codes, Format
from fuzz.manifests import cut, joined, mutated_manifest
from fuzz.rules import BrokenRuleError
from fuzz.values import changed_value, emitted, mutated_values, parsed

__all__ = ["FORMATS"]

_RANKS = 3
_MESH = Mesh(("dp",), (_RANKS,), tuple(range(_RANKS)))


def _state(rank: int, values: Any) -> dict[str, Any]:
    """What a rank has: a row of a tensor, a tensor of its own, and values."""
    shape = (_RANKS, 4)
    row = [(Box((rank, 0), (1, 4)), bytes(range(16)))]
    layout = (_MESH, ("shard(0)",))
    own = TensorSource.of("int8", (5,), bytes(5), codec=("raw", "zstd", "planes+zstd")[rank])
    return {
        "model": {"w": TensorSource("float32", shape, row, layout=layout), f"own{rank}": own},
        "optimizer": {f"tied{rank}": own, "values": values},
        "step": 3,
    }


def _options(rank: int) -> dict[str, Any]:
    return {"rank": rank, "world_size": _RANKS, "threads": 1, "block_nbytes": 4096}


def _part(rank: int, values: Any) -> bytes:
    writer = PartWriter(MemoryTarget({}), **_options(rank))
    writer.add(_state(rank, values))
    return writer.finish()


# Of the tree, so large that it is carried in pieces; and one that is carried whole.
_VALUES = ({"a": [1, (2.5, None)], "b": {"x", 3}}, {f"k{n}": "v" * 90 for n in range(60)})


@functools.cache
def _parts(number: int) -> tuple[bytes, ...]:
    return tuple(_part(rank, _VALUES[number]) for rank in range(1, _RANKS))


def part_seeds() -> list[bytes]:
    """The parts of two ranks that fit the third, with few values and with many."""
    both = [_parts(number) for number in range(len(_VALUES))]
    mixed = (both[0][0], both[1][1])
    return [packed(dict(zip("12", parts, strict=True))) for parts in (*both, mixed)]


def read_part(data: bytes) -> Codes:
    """Parts of two ranks, merged with the coordinator's own; the manifest of all must open."""
    files, made = unpacked(data), {}
    writer = Writer(MemoryTarget(made), **_options(0))
    writer.add(_state(0, _VALUES[0]))
    try:
        writer.commit([files[label] for label in sorted(files)[: _RANKS - 1]])
    finally:
        writer.abort()
    try:
        Checkpoint(MemoryStorage(made), threads=1).close()
    except DsdError as error:
        raise BrokenRuleError(f"committed, and not opened: {error.code}: {error}") from error
    return ()


def mutated_part(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Parts of which one is changed as a manifest is, or in what only parts have."""
    files = unpacked(data)
    if rng.random() < 0.05 or not files:
        return mutated(data, rng, others)
    label = rng.choice(sorted(files))
    if rng.random() < 0.4:
        theirs = list(unpacked(rng.choice(others)).values()) if others else []
        files[label] = mutated_manifest(files[label], rng, theirs)
    else:
        files[label] = _carried_changed(files[label], rng)
    return packed(files)


def _carried_changed(part: bytes, rng: random.Random) -> bytes:
    """Change what is carried in the body of a part: counts, layouts, and pieces of the tree."""
    parts = cut(part)
    body = parsed(parts.sections[0].data) if parts is not None and parts.sections else None
    extensions = body.get("extensions") if isinstance(body, dict) else None
    carried = extensions.get("part") if isinstance(extensions, dict) else None
    if parts is None or not isinstance(carried, dict) or not carried:
        return mutated_manifest(part, rng)
    key = rng.choice(sorted(carried))
    if isinstance(carried[key], bytes) and rng.random() < 0.7:
        carried[key] = mutated_values(carried[key], rng)
    elif isinstance(carried[key], dict) and carried[key] and rng.random() < 0.7:
        _change_piece(carried[key], rng)
    else:
        body["extensions"] = changed_value(body["extensions"], rng)
    parts.sections[0].data = emitted(body)
    return joined(parts)


def _change_piece(pieces: dict[str, Any], rng: random.Random) -> None:
    """Change one of the pieces of a tree, which are encoded each for itself."""
    key = rng.choice(sorted(pieces))
    if isinstance(pieces[key], bytes):
        pieces[key] = mutated_values(pieces[key], rng)
    elif isinstance(pieces[key], dict) and pieces[key]:
        _change_piece(pieces[key], rng)


# Words


def word_seeds() -> list[bytes]:
    """Words of each kind, behind how many ranks there are."""
    import dsdformat.torch.words  # noqa: F401 -- before memory is limited

    row = {"kind": "OSError", "code": "io_error", "hint": None, "message": "the disk is full"}
    rows = [None, row, {**row, "kind": "KeyError", "code": None, "hint": "wait"}]
    words = [b"p" + b"part", b"r" + b"0a" * 32, b"f" + emit(encode(row)), b"f" + emit(encode(rows))]
    return [bytes([_RANKS - 1]) + word for word in words]


def read_words(data: bytes) -> Codes:
    """A word that a rank has left in a mailbox: its part, its error, or the verdict."""
    from dsdformat.torch.failures import check_rows
    from dsdformat.torch.words import read_part_word, read_verdict

    ranks = range(1 + (data[0] if data else 0) % 8)
    part, verdict = read_part_word(data[1:]), read_verdict(data[1:], len(ranks))
    if not isinstance(part, bytes):
        check_rows("save", [0], [part], (0, None))
    if not isinstance(verdict, str):
        check_rows("save", ranks, verdict, (0, None))
    return ()


def mutated_word(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A word with its values changed, or its bytes."""
    if rng.random() < 0.3:
        return mutated(data, rng, others)
    return data[:2] + mutated_values(data[2:], rng, [one[2:] for one in others[:8]])


FORMATS = (
    Format(
        "part",
        "parts of a save, as ranks send them to the one that merges",
        read_part,
        part_seeds,
        mutated_part,
        3000,
    ),
    Format("word", "what ranks tell in a mailbox", read_words, word_seeds, mutated_word, 10_000),
)
