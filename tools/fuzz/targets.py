"""What is fed with inputs, and what must then hold.

A target gives what became of an input: the codes of what is wrong, none if it is accepted. It
raises `DsdError`, or `BrokenRuleError` where two ways of reading do not agree; whatever else it
raises is a fault of a reader.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.safetensors_header import read_header
from dsdformat.errors import DsdError, FormatError
from dsdformat.format.codecs import decode_block
from dsdformat.format.decoding import Hooks, decode_tree
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.packing import emit, parse
from dsdformat.format.values import TensorRef, encode
from dsdformat.limits import MANIFEST_LABEL, MIB, SIGNATURES_MAX
from dsdformat.reader import Checkpoint
from dsdformat.signing import emit_signatures, parse_signatures
from dsdformat.storage.memory import MemoryStorage
from dsdformat.verify import Report, verify_storage
from fuzz import beside, codecs, folders, foreign, keys, parts, runtime
from fuzz.bytewise import mutated
from fuzz.folders import Files, unpacked
from fuzz.manifests import mutated_manifest
from fuzz.rules import BrokenRuleError
from fuzz.values import mutated_values, value_seeds

__all__ = ["TARGETS", "Target", "choose_targets"]

READ_NBYTES_MAX = 4 * MIB  # a tensor that is longer is not read: files may declare terabytes
_ENTRY = ("name", "path", "paths", "dtype", "shape", "nbytes", "placements", "chunks")
_USED_ONE_OF = 3
# What a manifest alone cannot have.
_ABSENT = frozenset({"missing_file"})

Codes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """One reader that is fed.

    Attributes:
        name: On the command line, and in tables.
        what: What it reads, for people.
        read: Reads an input; gives the codes of what is wrong with it.
        seeds: Makes good and bad inputs to begin with.
        mutate: Makes an input of another one, with others at hand.
        peer: Whether the JavaScript reader reads the same; see `peer.py`.
        ignored: Codes that are no fault of an input.
        smoke: How many inputs the smoke run feeds.
    """

    name: str
    what: str
    read: Callable[[bytes], Codes]
    seeds: Callable[[], list[bytes]]
    mutate: Callable[[bytes, random.Random, Sequence[bytes]], bytes] = mutated
    peer: bool = False
    smoke: int = 1000
    ignored: frozenset[str] = frozenset()


def choose_targets(names: Sequence[str]) -> list[Target]:
    """Targets by their names; all if none are given."""
    by_name = {target.name: target for target in TARGETS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"no such target: {unknown[0]}\n\nhint: one of {', '.join(by_name)}")
    return [by_name[name] for name in names] or list(TARGETS)


# Checkpoints of ours


def read_manifest(data: bytes) -> Codes:
    """A manifest without its files: that these are missing is no fault of it."""
    files = {MANIFEST_LABEL: data}
    report = verify_storage(MemoryStorage(files), threads=1)
    codes = _codes(report)
    good = not set(codes) - _ABSENT
    if good or _is_chosen(data):
        _use(files, report, good=good)
    return tuple(code for code in codes if code not in _ABSENT)


def read_folder(data: bytes) -> Codes:
    """A whole checkpoint: verified, listed, and all of it read."""
    files = unpacked(data)
    report = verify_storage(MemoryStorage(files), threads=1)
    if report.ok or _is_chosen(data):
        _use(files, report, good=report.ok)
    if report.ok:
        _check_data_files(files)
    return _codes(report)


def _is_chosen(data: bytes) -> bool:
    """Whether a checkpoint that was refused is used all the same: some are, as it takes long."""
    return zlib.crc32(data) % _USED_ONE_OF == 0


def _codes(report: Report) -> Codes:
    return tuple(sorted({problem.code for problem in report.problems}))


def _use(files: Files, report: Report, *, good: bool) -> None:
    """Do what a user may do with a checkpoint; one that was verified must open and be readable."""
    try:
        checkpoint = Checkpoint(MemoryStorage(files), threads=1)
    except FormatError as error:
        if good:
            raise BrokenRuleError(f"verified, and not opened: {error.code}") from error
        return
    whole = report.ok
    with checkpoint:
        for entry in checkpoint:
            for name in _ENTRY:
                _attempt(lambda entry=entry, name=name: getattr(entry, name), must=good)
            repr(entry)
            if _attempt(lambda entry=entry: entry.nbytes <= READ_NBYTES_MAX, must=good):
                _attempt(entry.read, must=whole)
                _attempt(entry.map, must=False)
        _attempt(checkpoint.tree, must=good)
        _attempt(lambda: checkpoint.tensor("no such name"), must=False)
        if whole and all(entry.nbytes <= READ_NBYTES_MAX for entry in checkpoint):
            checkpoint.content_digest()


def _attempt(call: Callable[[], Any], *, must: bool) -> Any:
    """What a call gives; None if it fails with an error of ours, which it must not if `must`."""
    try:
        return call()
    except DsdError as error:
        if must:
            raise BrokenRuleError(f"verified, and not readable: {error.code}: {error}") from error
        return None


def _check_data_files(files: Files) -> None:
    """What a verifier accepts has data files that readers of safetensors accept."""
    with Checkpoint(MemoryStorage(files), threads=1) as checkpoint:
        labels = list(checkpoint.data_files)
    for label in labels:
        if len(files[label]) > 8 and files[label][8:9] == b"{":
            read_header(MemoryBytes(files[label], label))
            foreign.check_library(files[label])


def read_values(data: bytes) -> Codes:
    """A tree of values; what is accepted is encoded again to the same bytes."""
    attributes: list[TensorRef] = []

    def keep(ref: TensorRef) -> TensorRef:
        if ref.attributes:
            attributes.append(ref)
        return ref

    raw = parse(data)
    tree = decode_tree({"v": raw}, Hooks(tensor=keep))
    codes = tuple(sorted({problem.code for problem in tree.problems}))
    if not codes and not tree.disorder and b"\x93\xa6tensor" not in data:
        again = emit(encode(tree.root["v"], leaf=lambda value, _: value))
        if again != data:
            raise BrokenRuleError(f"encoded again, it is {again.hex()}")
    return codes


def read_codec(data: bytes) -> Codes:
    """One block: a codec, a dtype and a length, then the stored bytes."""
    block = codecs.unpacked(data)
    found = decode_block(block.stored, block.codec, DTYPES[block.dtype], block.nbytes)
    if len(found) != block.nbytes:
        raise BrokenRuleError(f"decoded to {len(found)} bytes, not {block.nbytes}")
    return ()


def read_signatures(data: bytes) -> Codes:
    """A file of signatures; what is accepted is written again with the same lines."""
    found = parse_signatures(data)
    again = emit_signatures(found)
    if sorted(again.splitlines()) != sorted(data.splitlines()):
        raise BrokenRuleError("written again, it has other lines")
    return ()


def signature_seeds() -> list[bytes]:
    """Files of no, one and three signatures."""
    rng = random.Random(8)
    pairs = [(rng.randbytes(32), rng.randbytes(64)) for _ in range(3)]
    return [emit_signatures(dict(pairs[:count])) for count in (0, 1, 3)]


def mutated_signatures(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Signatures with whole lines or digits changed, or by chance with their bytes changed."""
    if rng.random() < 0.4:
        return mutated(data, rng, others)
    lines = data.split(b"\n")
    at, kind = int(rng.random() * len(lines)), int(rng.random() * 6)
    if kind == 0:
        lines.insert(at, rng.choice(lines))
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        first = rng.getrandbits(200)
        more = range(first, first + rng.choice((1, 1, 1, 1, SIGNATURES_MAX + 1)))
        lines[at:at] = [b"ed25519 %064x %0128x" % (number, number) for number in more]
    elif kind == 3 and lines[at]:
        place = int(rng.random() * len(lines[at]))
        lines[at] = lines[at][:place] + rng.choice(_DIGITS) + lines[at][place + 1 :]
    elif kind == 4:
        lines[at] = rng.choice(
            (lines[at].upper(), lines[at] + b" ", b" " + lines[at], lines[at] + b"\r")
        )
    else:
        lines[at] = lines[at].replace(b"ed25519", rng.choice((b"ed448", b"ed25519ph", b"", b"rsa")))
    return b"\n".join(lines)


_DIGITS = [b"%x" % digit for digit in range(16)] + [b"A", b"g", b" ", b"\xb2", b"\0"]


_FORMATS = (
    *foreign.FORMATS,
    *beside.FORMATS,
    *parts.FORMATS,
    *runtime.FORMATS,
    *keys.FORMATS,
)
TARGETS = (
    Target(
        "manifest",
        "`manifest.dsd`: head, pages, body, columns",
        read_manifest,
        folders.manifest_seeds,
        mutated_manifest,
        peer=True,
        smoke=8000,
        ignored=_ABSENT,
    ),
    Target(
        "folder",
        "a whole small checkpoint, any of its files changed",
        read_folder,
        folders.folder_seeds,
        folders.mutated_folder,
        peer=True,
        smoke=6000,
    ),
    Target("values", "the tree of values", read_values, value_seeds, mutated_values, True, 30_000),
    Target("codec", "one compressed block", read_codec, codecs.seeds, codecs.mutate, True, 30_000),
    Target(
        "signatures",
        "`manifest.dsd.sig`",
        read_signatures,
        signature_seeds,
        mutated_signatures,
        smoke=20_000,
    ),
    *(
        Target(one.name, one.what, one.read, one.seeds, one.mutate, smoke=one.smoke)
        for one in _FORMATS
    ),
)
