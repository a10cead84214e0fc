"""Safetensors files of whole tensors, as Hugging Face lays out a model: planned, not written.

Pure: from names, dtypes and shapes alone follows which file each tensor is in, where in it, and
every byte that is no tensor's. So each of many ranks can plan for itself, and write its own bytes.
Tied names that are left out are recorded in `__metadata__`, and tied again by our readers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsdformat.errors import ArgumentError, UnsupportedValueError, listed, printable, shorten
from dsdformat.format.codecs import RAW
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.payload import (
    HeaderEntry,
    emit_header,
    header_json,
    header_nbytes,
    size_class,
)

__all__ = [
    "HF_METADATA",
    "INDEX_LABEL",
    "MAX_SHARD_NBYTES",
    "TIES_KEY",
    "FileTensor",
    "ModelFile",
    "Ties",
    "by_use",
    "check_tensors",
    "index_json",
    "parse_size",
    "parse_ties",
    "plan_file",
    "plan_files",
]

# What becomes of the further names of a tied tensor: left out and recorded, or written too.
Ties = Literal["drop", "duplicate"]

TIES_KEY = "dsdformat.ties"
HF_METADATA = {"format": "pt"}
INDEX_LABEL = "model.safetensors.index.json"
MAX_SHARD_NBYTES = 5 * 10**9  # as in huggingface_hub
_METADATA_KEY = "__metadata__"
_HEADER_NBYTES_MAX = 100_000_000  # what the safetensors library reads
_SINGLE = "model.safetensors"
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}
_UNITS |= {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", 1)}
# These lie in a file of ours as bytes of another type, which a reader of the file alone would give.
_LACKING = {
    name
    for name, row in DTYPES.items()
    if row.shape_rule == "s+[2]" or (row.stored_as == "U8" and name != "uint8")
}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file.

    Attributes:
        name: Its key.
        dtype: Logical name.
        shape: In elements.
        ties: Names that are left out, and mean this tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ties: tuple[str, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Length of its bytes."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file to be written: its header, and where each tensor's bytes go.

    Attributes:
        label: Its name.
        header: Its first bytes.
        places: Where each tensor begins, by name, in the order of the file.
        nbytes: Length of the file.
    """

    label: str
    header: bytes
    places: Mapping[str, int]
    nbytes: int


def by_use(names: Iterable[str]) -> list[str]:
    """Order the names of a tied tensor: first the one that loaders look for.

    They take the weight of an output layer from the embedding, which is there for sure, and many
    skip the former's name. A checkpoint of ours does not know which of the two a model defines.
    """
    return sorted(names, key=_use)


def check_tensors(tensors: Iterable[FileTensor]) -> None:
    """Check that a file can hold each of these as it is.

    Raises:
        UnsupportedValueError: `unsupported_dtype` or `unsupported_value`, with all names.
    """
    lacking = [one for one in tensors if not _has_type(one)]
    if lacking:
        dtypes = listed(sorted({one.dtype for one in lacking}))
        names = listed([printable(one.name) for one in lacking])
        raise UnsupportedValueError(
            f"safetensors has no type for {dtypes}: {names}",
            code="unsupported_dtype",
            path_in_tree=lacking[0].name,
            hint="leave them out, or store them in another dtype first",
        )
    bad = [one.name for one in tensors for name in (one.name, *one.ties) if not _is_key(name)]
    if bad:
        raise UnsupportedValueError(
            f"safetensors cannot have a tensor called {listed(list(map(printable, bad)))}",
            path_in_tree=bad[0],
        )


def plan_file(
    tensors: Sequence[FileTensor], metadata: Mapping[str, str], label: str = _SINGLE
) -> ModelFile:
    """Lay out one file: the tensors of the largest alignment first, else in the order given.

    Raises:
        UnsupportedValueError: as `check_tensors`, or a header of more than 100 MB.
    """
    check_tensors(tensors)
    ordered = sorted(tensors, key=lambda one: -size_class(one.nbytes))
    ties = {name: one.name for one in tensors for name in one.ties}
    text = header_json(map(_header_entry, ordered), {**metadata, **_tie_record(ties)})
    begin = header_nbytes(len(text))
    if begin - 8 > _HEADER_NBYTES_MAX:
        raise UnsupportedValueError(
            f"{label}: {len(tensors)} tensors need a header of {begin} bytes, "
            f"and readers take {_HEADER_NBYTES_MAX}",
            hint="write several files, with a lower max_shard_bytes",
        )
    header = emit_header(text, begin)
    assert header is not None
    places: dict[str, int] = {}
    for one in ordered:
        places[one.name] = begin
        begin += one.nbytes
    return ModelFile(label, header, places, begin)


def plan_files(
    tensors: Sequence[FileTensor], metadata: Mapping[str, str], max_shard_bytes: int
) -> list[ModelFile]:
    """Lay out a folder, with the files and names that huggingface_hub would choose.

    Raises:
        UnsupportedValueError: as `plan_file`.
    """
    groups = list(_split(tensors, max_shard_bytes)) or [[]]
    if len(groups) == 1:
        return [plan_file(groups[0], metadata)]
    labels = (
        f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number in range(1, len(groups) + 1)
    )
    return [plan_file(group, metadata, label) for group, label in zip(groups, labels, strict=True)]


def index_json(files: Sequence[ModelFile]) -> bytes | None:
    """Return the index of several files; None for one, which needs none."""
    if len(files) < 2:
        return None
    keys = {name: file.label for file in files for name in file.places}
    total = sum(file.nbytes - len(file.header) for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(keys.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def parse_ties(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return what each left-out name means, as the `__metadata__` of a file records it.

    What is no record of ours is none.
    """
    try:
        ties: Any = json.loads(metadata.get(TIES_KEY, "{}"))
    except (ValueError, RecursionError):
        return {}
    if type(ties) is not dict or any(type(kept) is not str for kept in ties.values()):
        return {}
    return ties


def parse_size(size: int | str) -> int:
    """Return a number of bytes given as one, or as text: `5GB`, `512 MiB`.

    Raises:
        ArgumentError: `bad_argument`.
    """
    if type(size) is str:
        digits = size.rstrip("BKMGTIbkmgti ")
        unit = _UNITS.get(size[len(digits) :].strip().upper())
        if unit is not None and digits.isascii() and digits.isdigit() and int(digits):
            return int(digits) * unit
    elif type(size) is int and size > 0:
        return size
    raise ArgumentError(
        f"{shorten(size)} is no number of bytes", code="bad_argument", hint="as 5GB or 512MiB"
    )


def _split(tensors: Sequence[FileTensor], most: int) -> Iterator[list[FileTensor]]:
    """Fill one file after another; one tensor that is longer than a file is one by itself.

    The order of files is that of huggingface_hub: such a tensor comes before the file that was
    being filled when it was met.
    """
    group: list[FileTensor] = []
    total = 0
    for one in tensors:
        if one.nbytes > most:
            yield [one]
            continue
        if group and total + one.nbytes > most:
            yield group
            group, total = [], 0
        group.append(one)
        total += one.nbytes
    if group:
        yield group


def _use(name: str) -> int:
    parts = name.lower().split(".")
    if "shared" in parts:
        return 0
    if any("embed" in part for part in parts):
        return 1
    return 3 if any("head" in part for part in parts) else 2


def _has_type(one: FileTensor) -> bool:
    """Whether a reader of the file alone gets this dtype and shape back."""
    pairs = DTYPES[one.dtype].shape_rule == "s·2"
    return one.dtype not in _LACKING and not (pairs and not one.shape)


def _header_entry(one: FileTensor) -> HeaderEntry:
    return HeaderEntry(one.name, DTYPES[one.dtype], one.shape, RAW, one.nbytes)


def _tie_record(ties: Mapping[str, str]) -> dict[str, str]:
    if not ties:
        return {}
    return {TIES_KEY: json.dumps(dict(sorted(ties.items())), ensure_ascii=False)}


def _is_key(name: str) -> bool:
    surrogates = any("\ud800" <= char <= "\udfff" for char in name)
    return name != _METADATA_KEY and not surrogates
