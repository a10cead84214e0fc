"""Names of data files: readable, plain, and different without any talk between ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

__all__ = ["file_labels"]

ROOT_STEM, ROOT_STEM_TAKEN = "model", "tensors"
_STEM_MAX = 100
_NUMBERED = re.compile(r"-[0-9]{5}-of-[0-9]{5}(-part[0-9]+)?\Z")
_OUTSIDE = re.compile(r"[^A-Za-z0-9._-]")


def file_labels(prefixes: Sequence[tuple[str, ...]], rank: int, world_size: int) -> list[str]:
    """Name the data files of one writer.

    One writer: `model.safetensors`, or `model-00001-of-00002.safetensors` and so on, which
    loaders of Hugging Face folders expect. Several: `model-00000-of-00004.safetensors` for rank
    0, with `-part2` and so on where a rank has more than one.

    Args:
        prefixes: Of each file.
        rank: Of the writer.
        world_size: Number of writers.
    """
    stems = _stems(sorted(set(prefixes)))
    counts, seen = Counter(prefixes), Counter[tuple[str, ...]]()
    labels = []
    for prefix in prefixes:
        stem, count = stems[prefix], counts[prefix]
        seen[prefix] += 1
        number = seen[prefix]
        if world_size > 1:
            more = f"-part{number}" if number > 1 else ""
            labels.append(f"{stem}-{rank:05d}-of-{world_size:05d}{more}.safetensors")
        elif count > 1:
            labels.append(f"{stem}-{number:05d}-of-{count:05d}.safetensors")
        else:
            labels.append(f"{stem}.safetensors")
    return labels


def _stems(prefixes: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    stems: dict[tuple[str, ...], str] = {}
    taken: set[str] = set()
    for prefix in sorted(prefixes, key=lambda one: (not one, one)):  # named ones first
        plain = _OUTSIDE.sub("_", prefix[0])[:_STEM_MAX] if prefix else ROOT_STEM
        if not plain or plain[0] in ".-":
            plain = "_" + plain
        if _NUMBERED.search(plain):
            plain += "_"  # else it could be the label of a file of another section
        if not prefix and plain in taken:
            plain = ROOT_STEM_TAKEN
        stem, number = plain, 1
        while stem.lower() in taken:
            number += 1
            stem = f"{plain}-{number}"
        taken.add(stem.lower())
        stems[prefix] = stem
    return stems
