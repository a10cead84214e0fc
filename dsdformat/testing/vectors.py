"""Run the conformance vectors of the spec through this implementation.

A case is a folder with a `case.json` and a `checkpoint/`; its form is in `spec/vectors/README.md`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsdformat.entries import TensorEntry
from dsdformat.errors import DsdError
from dsdformat.format.digests import parse_digest
from dsdformat.format.packing import emit
from dsdformat.format.values import encode_key
from dsdformat.limits import INT_MAX, INT_MIN
from dsdformat.reader import Checkpoint
from dsdformat.storage.local import LocalStorage
from dsdformat.verify import Report, verify_storage

__all__ = ["Case", "find_cases", "run_case"]


@dataclass(frozen=True, slots=True)
class Case:
    """One vector.

    Attributes:
        folder: Where its `case.json` lies.
        spec: The decoded `case.json`.
    """

    folder: Path
    spec: dict[str, Any]

    @property
    def id(self) -> str:
        """The name of the case."""
        return str(self.spec["id"])

    @property
    def expect(self) -> dict[str, Any]:
        """What must come out."""
        expect: dict[str, Any] = self.spec["expect"]
        return expect


def find_cases(vectors: str | os.PathLike[str]) -> list[Case]:
    """List the cases below a folder, in the order of their names."""
    paths = sorted(Path(vectors).glob("**/case.json"))
    return [Case(path.parent, json.loads(path.read_text("utf-8"))) for path in paths]


def run_case(case: Case, scratch: Path) -> list[str]:
    """Return what is wrong with how this implementation takes a case; empty if nothing.

    Args:
        case: The vector.
        scratch: An empty folder for cases that need a copy.
    """
    checkpoint = _prepare(case, scratch)
    options = case.spec.get("options", {})
    digest = parse_digest(options["digest"]) if "digest" in options else None
    try:
        report = verify_storage(LocalStorage(checkpoint), expected_root=digest)
    except DsdError as error:
        codes = {error.code}
        report = Report(str(checkpoint))
    else:
        codes = {problem.code for problem in report.problems}
    if "code" in case.expect:
        wanted = {case.expect["code"]}
        return [] if codes == wanted else [f"expected {wanted}, got {codes}: {report.problems}"]
    if codes:
        return [f"expected a good checkpoint, got {codes}: {report.problems}"]
    with Checkpoint(LocalStorage(checkpoint), digest=digest) as opened:
        return list(_differences(opened, case.expect))


def _differences(checkpoint: Checkpoint, expect: dict[str, Any]) -> Iterator[str]:
    simple: dict[str, Any] = {
        "root": checkpoint.root,
        "state": checkpoint.content_digest(),
        "features": list(checkpoint.features),
        "user": checkpoint.user,
        "tensors": [_describe(entry) for entry in checkpoint],
    }
    for key, actual in simple.items():
        wanted = expect[key]
        if key == "tensors":
            for one, other in zip(wanted, actual, strict=False):
                data = one.get("data")
                if data is None:
                    other.pop("data")
                if one != other:
                    yield f"tensor: expected {one}, got {other}"
            if len(wanted) != len(actual):
                yield f"expected {len(wanted)} tensors, got {len(actual)}"
        elif wanted != actual:
            yield f"{key}: expected {wanted}, got {actual}"


def _describe(entry: TensorEntry) -> dict[str, Any]:
    return {
        "path": [_step(step) for step in entry.path],
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "chunks": len(entry.chunks),
        "content": entry.content_digest(),
        "data": bytes(entry.read()).hex() if entry.nbytes <= 4096 else None,
    }


def _step(step: Any) -> Any:
    if type(step) is str or (type(step) is int and INT_MIN <= step <= INT_MAX):
        return step
    return {"key": emit(encode_key(step)).hex()}


def _prepare(case: Case, scratch: Path) -> Path:
    setup = case.spec.get("setup", [])
    original = case.folder / "checkpoint"
    if not setup:
        return original
    copy = scratch / "checkpoint"
    shutil.copytree(original, copy)
    for step in setup:
        _SETUP[step["op"]](copy, step)
    return copy


def _symlink(folder: Path, step: dict[str, Any]) -> None:
    (folder / step["label"]).symlink_to(step["target"])


def _mkdir(folder: Path, step: dict[str, Any]) -> None:
    (folder / step["label"]).mkdir()


def _fifo(folder: Path, step: dict[str, Any]) -> None:
    os.mkfifo(folder / step["label"])


def _remove(folder: Path, step: dict[str, Any]) -> None:
    if step["label"]:
        (folder / step["label"]).unlink()
    else:
        shutil.rmtree(folder)


_SETUP: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "symlink": _symlink,
    "mkdir": _mkdir,
    "fifo": _fifo,
    "remove": _remove,
}
