"""A case: what it declares, what a runner must find, and how it is written down."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vectors.builder import Built, Hook, build
from vectors.chunks import first_paths
from vectors.declare import Checkpoint, Tensor
from vectors.wire import is_decimal, pack, state_content, tensor_content

DATA_NBYTES_MAX = 4096


@dataclass
class Case:
    id: str
    rules: list[str]
    note: str
    checkpoint: Checkpoint
    code: str | None = None
    setup: list[dict[str, str]] = field(default_factory=list)
    digest: str | None = None
    hooks: dict[str, Hook] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"{'invalid' if self.code else 'valid'}/{self.id}"


def valid(
    case_id: str,
    rules: str,
    note: str,
    checkpoint: Checkpoint,
    *,
    setup: list[dict[str, str]] | None = None,
    digest: str | None = None,
    **hooks: Hook,
) -> Case:
    """A checkpoint that every verifier accepts; `digest` "root" states the right root digest."""
    return Case(case_id, rules.split(), note, checkpoint, None, setup or [], digest, hooks)


def invalid(
    case_id: str,
    rules: str,
    code: str,
    note: str,
    checkpoint: Checkpoint,
    *,
    setup: list[dict[str, str]] | None = None,
    digest: str | None = None,
    **hooks: Hook,
) -> Case:
    """A checkpoint with one fault, and the code that names it."""
    return Case(case_id, rules.split(), note, checkpoint, code, setup or [], digest, hooks)


def write_case(case: Case, root: Path) -> None:
    """Write a case into `root/valid` or `root/invalid`."""
    built = build(case.checkpoint, **case.hooks)
    folder = root / case.folder
    (folder / "checkpoint").mkdir(parents=True)
    for label, data in built.files.items():
        (folder / "checkpoint" / label).write_bytes(data)
    (folder / "case.json").write_text(case_text(case, built), encoding="utf-8", newline="\n")


def case_text(case: Case, built: Built) -> str:
    document: dict[str, object] = {"id": case.id, "rules": case.rules, "note": case.note}
    if case.setup:
        document["setup"] = case.setup
    if case.digest:
        document["options"] = {"digest": built.root.hex() if case.digest == "root" else case.digest}
    document["expect"] = {"code": case.code} if case.code else expectation(case.checkpoint, built)
    return emit(document) + "\n"


def expectation(checkpoint: Checkpoint, built: Built) -> dict[str, object]:
    contents = [tensor_content(t.dtype, t.shape, t.data) for t in checkpoint.tensors]
    paths = first_paths(checkpoint.tree)
    return {
        "root": built.root.hex(),
        "state": state_content(checkpoint.tree, contents).hex(),
        "tensors": [
            expected_tensor(item, paths[index], contents[index])
            for index, item in enumerate(checkpoint.tensors)
        ],
        "features": built.features,
        "user": checkpoint.user,
    }


def expected_tensor(item: Tensor, path: list[object], content: bytes) -> dict[str, object]:
    expected: dict[str, object] = {
        "path": [path_part(part) for part in path],
        "dtype": item.dtype,
        "shape": list(item.shape),
        "chunks": len(item.chunks),
        "content": content.hex(),
    }
    if len(item.data) <= DATA_NBYTES_MAX:
        expected["data"] = item.data.hex()
    return expected


def path_part(part: object) -> object:
    return part if isinstance(part, str) or is_decimal(part) else {"key": pack(part).hex()}


def emit(document: dict[str, object]) -> str:
    """JSON with a line for each member, and for each tensor."""
    return "{\n" + ",\n".join(_emit_members(document, "  ")) + "\n}"


def _emit_members(members: dict[str, object], indent: str) -> Iterator[str]:
    for key, value in members.items():
        if key == "expect":
            inner = ",\n".join(_emit_members(value, indent * 2))
            yield f'{indent}"{key}": {{\n{inner}\n{indent}}}'
        elif key == "tensors" and value:
            lines = ",\n".join(f"{indent}  {json.dumps(item)}" for item in value)
            yield f'{indent}"{key}": [\n{lines}\n{indent}]'
        else:
            yield f'{indent}"{key}": {json.dumps(value)}'
