"""Check the structure of a manifest's body: keys, types, labels (spec sections 5, 7, 10, 14).

Pure. Reports all problems it finds; the tree's values are checked by `decoding`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dsdformat.errors import Problem, shorten
from dsdformat.format.digests import DIGEST_NBYTES
from dsdformat.limits import BLOCK_NBYTES_MAX, BLOCK_NBYTES_MIN, INT63_MAX, INT_MAX, MANIFEST_LABEL

__all__ = [
    "BODY_KEYS",
    "FILE_KEYS",
    "LAYOUT_KEYS",
    "MESH_KEYS",
    "SIDE_KEYS",
    "find_body_problems",
    "find_layout_fault",
    "is_label",
]

BODY_KEYS = (
    "block_nbytes",
    "dtypes",
    "extensions",
    "files",
    "layouts",
    "meshes",
    "sides",
    "tree",
    "user",
    "world_size",
)
FILE_KEYS = ("header_nbytes", "label", "metadata", "nbytes", "prefix", "rank")
SIDE_KEYS = ("digest", "label", "nbytes")
MESH_KEYS = ("axes", "ranks", "shape")
LAYOUT_KEYS = ("mesh", "placements")

_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\Z")
_NUMBER = "(0|[1-9][0-9]*)"
_PLACEMENT = re.compile(rf"(replicate|shard\({_NUMBER}\)|strided_shard\({_NUMBER},{_NUMBER}\))\Z")

Problems = Iterator[Problem]


def is_label(text: str) -> bool:
    """Whether a text may be the name of a file of a checkpoint (R-5.2)."""
    return bool(_LABEL.match(text))


def find_body_problems(raw: Any) -> list[Problem]:
    """List what breaks the spec in a body as `packing.parse` gave it, but for its tree."""
    if type(raw) is not dict:
        return [_bad("$", "the body is not a map")]
    problems = list(_keys("$", raw, BODY_KEYS))
    for key, check in _CHECKS.items():
        if key in raw:
            problems += check(raw[key])
    problems += _labels(raw)
    if not problems:
        problems += _references(raw)
    return problems


def _bad(path: str, message: str, code: str = "bad_body") -> Problem:
    return Problem(code, f"{path}: {message}", path=path)


def _keys(path: str, row: dict[str, Any], keys: tuple[str, ...]) -> Problems:
    for key in row:
        if key not in keys:
            yield _bad(f"{path}.{key[:80]}", "the key is not known", "unknown_key")
    for key in keys:
        if key not in row:
            yield _bad(path, f"the key {key} is missing")


def _rows(name: str, value: Any, keys: tuple[str, ...], check: Callable[..., Problems]) -> Problems:
    if type(value) is not list:
        yield _bad(f"$.{name}", "not an array")
        return
    for index, row in enumerate(value):
        path = f"$.{name}[{index}]"
        if type(row) is not dict:
            yield _bad(path, "not a map")
            continue
        faults = list(_keys(path, row, keys))
        yield from faults or check(path, row)


def _is_int(value: Any, low: int = 0, high: int = INT63_MAX) -> bool:
    return type(value) is int and low <= value <= high


def _is_list(value: Any, kind: type) -> bool:
    return type(value) is list and all(type(item) is kind for item in value)


def _is_text_map(value: Any) -> bool:
    return type(value) is dict and all(type(item) is str for item in value.values())


def _block_nbytes(value: Any) -> Problems:
    if not (_is_int(value, BLOCK_NBYTES_MIN, BLOCK_NBYTES_MAX) and value & (value - 1) == 0):
        yield _bad("$.block_nbytes", f"{shorten(value)} is not a power of two from 4096 to 2**26")


def _dtypes(value: Any) -> Problems:
    if not _is_list(value, str):
        yield _bad("$.dtypes", "not an array of strings")
        return
    if any(a >= b for a, b in zip(value, value[1:], strict=False)):
        yield _bad("$.dtypes", "not in ascending order")


def _extensions(value: Any) -> Problems:
    if type(value) is not dict:
        yield _bad("$.extensions", "not a map")


def _file(path: str, row: dict[str, Any]) -> Problems:
    if type(row["label"]) is not str:
        yield _bad(f"{path}.label", "not a string")
    if not _is_int(row["nbytes"]) or not _is_int(row["header_nbytes"], 8):
        yield _bad(path, "nbytes or header_nbytes is not a length below 2**63, or below 8")
    elif row["header_nbytes"] > row["nbytes"]:
        yield _bad(f"{path}.header_nbytes", f"more than the file's {row['nbytes']} bytes")
    if not _is_list(row["prefix"], str):
        yield _bad(f"{path}.prefix", "not an array of strings")
    if not _is_text_map(row["metadata"]):
        yield _bad(f"{path}.metadata", "not a map of strings")
    if not _is_int(row["rank"], 0, INT_MAX):
        yield _bad(f"{path}.rank", "not a rank")


def _side(path: str, row: dict[str, Any]) -> Problems:
    if type(row["label"]) is not str:
        yield _bad(f"{path}.label", "not a string")
    if not _is_int(row["nbytes"]):
        yield _bad(f"{path}.nbytes", "not a length")
    if type(row["digest"]) is not bytes or len(row["digest"]) != DIGEST_NBYTES:
        yield _bad(f"{path}.digest", "not a digest of 32 bytes")


def find_layout_fault(mesh: Any, placements: Sequence[str]) -> str | None:
    """Say what keeps a mesh and its placements from being stored (R-14.1), or None."""
    fault = _mesh_fault(list(mesh.axes), list(mesh.shape), list(mesh.ranks))
    if fault:
        return f"mesh: {fault}"
    if len(placements) != len(mesh.axes):
        return f"{len(placements)} placements for {len(mesh.axes)} axes"
    bad = [text for text in placements if type(text) is not str or not _PLACEMENT.match(text)]
    return f"{shorten(bad[0])} is not a placement" if bad else None


def _mesh(path: str, row: dict[str, Any]) -> Problems:
    fault = _mesh_fault(row["axes"], row["shape"], row["ranks"])
    if fault:
        yield _bad(path, fault)


def _mesh_fault(axes: Any, shape: Any, ranks: Any) -> str | None:
    if not _is_list(axes, str) or not _is_list(shape, int) or not _is_list(ranks, int):
        return "axes are not strings, or shape or ranks not integers"
    good = len(axes) == len(shape) and all(size >= 1 for size in shape)
    if not good or not _fills(shape, len(ranks)) or len(set(ranks)) < len(ranks):
        return "axes, shape and ranks do not fit each other"
    return None


def _fills(shape: list[int], count: int) -> bool:
    """Whether a mesh of this shape has so many ranks; a long shape is not multiplied to its end."""
    product = 1
    for size in shape:
        product *= size
        if product > count:
            return False
    return product == count


def _layout(path: str, row: dict[str, Any]) -> Problems:
    placements = row["placements"]
    if not _is_int(row["mesh"], 0, INT_MAX):
        yield _bad(f"{path}.mesh", "not an index")
    if not _is_list(placements, str) or not all(map(_PLACEMENT.match, placements)):
        yield _bad(f"{path}.placements", "not an array of placements")


def _user(value: Any) -> Problems:
    if not _is_text_map(value):
        yield _bad("$.user", "not a map of strings")


def _world_size(value: Any) -> Problems:
    if not _is_int(value, 1, INT_MAX):
        yield _bad("$.world_size", f"{shorten(value)} is not a number of ranks")


_CHECKS: dict[str, Callable[[Any], Problems]] = {
    "block_nbytes": _block_nbytes,
    "dtypes": _dtypes,
    "extensions": _extensions,
    "files": lambda value: _rows("files", value, FILE_KEYS, _file),
    "layouts": lambda value: _rows("layouts", value, LAYOUT_KEYS, _layout),
    "meshes": lambda value: _rows("meshes", value, MESH_KEYS, _mesh),
    "sides": lambda value: _rows("sides", value, SIDE_KEYS, _side),
    "user": _user,
    "world_size": _world_size,
}


def _labels(raw: dict[str, Any]) -> Problems:
    seen = {MANIFEST_LABEL: "the manifest"}
    for name in ("files", "sides"):
        rows = raw.get(name)
        labels = [_label(row) for row in rows] if type(rows) is list else []
        for index, label in enumerate(labels):
            path = f"$.{name}[{index}].label"
            if label is None:
                continue
            if not is_label(label):
                yield _bad(path, f"{shorten(label)} is not a plain file name", "bad_label")
            elif label.lower() in seen:
                yield _bad(path, f"{label} is also {seen[label.lower()]}", "duplicate_label")
            seen[label.lower()] = path
        known = [label for label in labels if label is not None]
        if any(a > b for a, b in zip(known, known[1:], strict=False)):
            yield _bad(f"$.{name}", "not in ascending order of labels")


def _label(row: Any) -> str | None:
    label = row.get("label") if type(row) is dict else None
    return label if type(label) is str else None


def _references(raw: dict[str, Any]) -> Problems:
    world_size = raw["world_size"]
    for index, row in enumerate(raw["files"]):
        if row["rank"] >= world_size:
            yield _bad(f"$.files[{index}].rank", f"{row['rank']} of {world_size} ranks")
    for index, row in enumerate(raw["meshes"]):
        if any(not 0 <= rank < world_size for rank in row["ranks"]):
            yield _bad(f"$.meshes[{index}].ranks", f"a rank is not below {world_size}")
    for index, row in enumerate(raw["layouts"]):
        meshes = raw["meshes"]
        if row["mesh"] >= len(meshes):
            yield _bad(f"$.layouts[{index}].mesh", "there is no such mesh")
        elif len(row["placements"]) != len(meshes[row["mesh"]]["axes"]):
            yield _bad(f"$.layouts[{index}].placements", "not one per axis of the mesh")
