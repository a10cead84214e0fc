"""Write a checkpoint, alone or as the coordinator of several writers: merge, manifest, commit.

Each `PartWriter` writes the data files of its rank into the same unfinished folder and returns
what it wrote as bytes; the coordinator's `Writer`, which is one of them, merges that, writes the
manifest, and makes the checkpoint exist.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dsdformat.errors import ArgumentError, MismatchError, UnsupportedValueError, shorten
from dsdformat.file_plans import FilePlan
from dsdformat.format.bodies import is_label
from dsdformat.format.codecs import can_compress
from dsdformat.format.digests import digest
from dsdformat.format.frame import emit_manifest
from dsdformat.format.manifest import SideFile, emit_body
from dsdformat.garbage import paused_gc
from dsdformat.limits import BODY_NBYTES_MAX, MANIFEST_LABEL, MIB, SIGNATURES_LABEL
from dsdformat.part_writer import PartWriter, text_map
from dsdformat.parts import (
    Part,
    check_complete,
    emit_sections,
    merge_parts,
    needed_features,
    read_parts,
)
from dsdformat.state_plan import Codec
from dsdformat.storage.base import Target, completed
from dsdformat.storage.target import JoinedTarget

__all__ = ["Codec", "PartWriter", "Writer"]

_COMPRESS_PAGES_FROM = MIB


class Writer(PartWriter):
    """Writes a checkpoint, alone or as the coordinator of several writers.

    A context manager: leaving it commits; leaving it by an exception commits nothing, and
    removes what was written.
    """

    def __init__(
        self, target: Target, *, user: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__(target, **options)
        self._user = text_map(user or {})
        self._sides: list[SideFile] = []
        self._own: Part | None = None  # what `write` wrote
        self.root: str | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._done:
            self.commit()

    @property
    def staging(self) -> str:
        """The unfinished folder that other writers join."""
        staging = getattr(self._target, "staging", None)
        if staging is None:
            raise ArgumentError(f"{self._target.name} cannot be joined", code="bad_argument")
        return str(staging)

    @staticmethod
    def join(staging: str | os.PathLike[str], **options: Any) -> PartWriter:
        """Write for one rank into the unfinished folder of a coordinator.

        Args:
            staging: `Writer.staging` of the coordinator, on storage that both see.
            options: `rank`, `world_size`, and those of `dsdformat.create` that concern data.
        """
        return PartWriter(JoinedTarget(Path(staging)), **options)

    def add_file(self, label: str, data: bytes) -> None:
        """Add a side file, such as a `config.json`; the root digest covers it too.

        Args:
            label: `[A-Za-z0-9_][A-Za-z0-9._-]*`, at most 200 characters.
            data: Its contents.
        """
        self._check_open()
        taken = {MANIFEST_LABEL, SIGNATURES_LABEL, *(side.label.lower() for side in self._sides)}
        if not is_label(label) or label.lower() in taken or label.lower().endswith(".safetensors"):
            raise ArgumentError(
                f"{shorten(label)} cannot be the label of a side file", code="bad_argument"
            )
        self._add_side(label, data)

    def _add_side(self, label: str, data: bytes) -> None:
        self._write_whole(label, [data])
        self._sides.append(SideFile(label, len(data), digest(data)))

    def write(self) -> None:
        """Write the data files of this rank, while others write theirs; `commit` ends it.

        Raises:
            UnsupportedValueError: before anything is written.
            StorageError: the medium failed; call `abort`.

        Ranks: coordinator only.
        Memory: as `PartWriter.finish`.
        """
        self._own = self._write()

    def commit(self, parts: Sequence[bytes] = ()) -> str:
        """Write what was added if `write` did not, merge the parts, and make the checkpoint exist.

        Args:
            parts: What `PartWriter.finish` returned on the other ranks.

        Returns:
            The root digest.

        Raises:
            MismatchError: `state_conflict` or `chunks_incomplete`; nothing is made visible.
            UnsupportedValueError: more names and values than a reader takes.
            StorageError: the medium failed, or the target exists by now.

        Ranks: coordinator only.
        Memory: the merged chunk tables.
        """
        if self._own is None and self._planned is None:
            self._check_open()
        try:
            if len(parts) != self._world_size - 1:
                raise MismatchError(
                    f"{len(parts)} parts of other ranks, expected {self._world_size - 1}",
                    code="chunks_incomplete",
                )
            own = self._write() if self._own is None else self._own
            self._own = None
            self._add_indexes()
            with paused_gc():
                part = merge_parts([own, *read_parts(parts)])
                check_complete(part)
            self.root = self._write_manifest(part)
            self._workers.check()
            self._target.commit()
        except BaseException:
            self.root = None
            self.abort()
            raise
        return self.root

    def abort(self) -> None:
        """Remove what was written. The target is as it was."""
        self._done, self._own, self._planned = True, None, None
        self._workers.close()
        self._target.abort()

    def _write_manifest(self, part: Part) -> str:
        with paused_gc():
            body, sections = emit_sections(part)
        sides = tuple(sorted(self._sides, key=lambda side: side.label))
        body = replace(body, sides=sides, user=self._user)
        pieces = [(name, list(content)) for name, content in sections]
        nbytes = sum(len(piece) for _, content in pieces for piece in content)
        raw_body = emit_body(body)
        if len(raw_body) > BODY_NBYTES_MAX:
            raise UnsupportedValueError(
                f"names and values take {len(raw_body)} bytes, and readers take {BODY_NBYTES_MAX}",
                hint="store long values as tensors of uint8",
            )
        head, pages, root = emit_manifest(
            [("body", [raw_body]), *pieces],
            needed_features(part),
            compress=nbytes + len(raw_body) >= _COMPRESS_PAGES_FROM and can_compress(),
        )
        self._write_whole(MANIFEST_LABEL, [head, *pages])
        return root.hex()

    def _write_whole(self, label: str, pieces: Sequence[bytes]) -> None:
        with completed(self._target.create(label)) as sink:
            sink.write_at(0, pieces)

    def _add_indexes(self) -> None:
        """Add the index that loaders of Hugging Face folders want for a model of several files."""
        groups: dict[tuple[str, ...], list[FilePlan]] = {}
        for plan in self._plans:
            groups.setdefault(plan.prefix, []).append(plan)
        for plans in groups.values():
            if len(plans) > 1 and self._world_size == 1:
                stem = plans[0].label.rsplit("-00001-of-", 1)[0]
                self._add_side(f"{stem}.safetensors.index.json", _index_json(plans))


def _index_json(plans: Sequence[FilePlan]) -> bytes:
    keys: dict[str, str] = {}
    total = 0
    for plan in plans:
        keys.update(dict.fromkeys(plan.keys, plan.label))
        total += sum(plan.stored_nbytes)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(keys.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
