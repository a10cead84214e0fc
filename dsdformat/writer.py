"""Write a checkpoint: collect a state, write data files, commit once.

One writer, or several with one coordinator: each `PartWriter` writes the data files of its rank
into the same unfinished folder and returns what it wrote as bytes; the coordinator's `Writer`
merges that, writes the manifest, and makes the checkpoint exist.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dsdformat.boxes import Box
from dsdformat.datafiles import ChunkJob, FilePlan, FileWriter, plan_files, write_files
from dsdformat.errors import ArgumentError, MismatchError, UnsupportedValueError, shorten
from dsdformat.format.bodies import is_label
from dsdformat.format.codecs import can_compress
from dsdformat.format.digests import digest
from dsdformat.format.frame import emit_manifest
from dsdformat.format.manifest import DataFile, SideFile, emit_body
from dsdformat.format.paths import render_path
from dsdformat.format.values import Leaf
from dsdformat.garbage import paused_gc
from dsdformat.labels import file_labels
from dsdformat.limits import (
    BLOCK_NBYTES_DEFAULT,
    BLOCK_NBYTES_MAX,
    BLOCK_NBYTES_MIN,
    BODY_NBYTES_MAX,
    MANIFEST_LABEL,
    MIB,
    SIGNATURES_LABEL,
)
from dsdformat.parts import (
    Part,
    check_complete,
    emit_sections,
    merge_parts,
    needed_features,
    part_of,
    read_parts,
)
from dsdformat.sources import Data, TensorSource
from dsdformat.state_plan import Codec, StatePlan, plan_state
from dsdformat.storage.base import Target, completed
from dsdformat.storage.target import JoinedTarget
from dsdformat.workers import Workers

__all__ = ["Codec", "PartWriter", "Writer"]

_COMPRESS_PAGES_FROM = MIB
_HF_METADATA = {"format": "pt"}


class PartWriter:
    """Writes the data files of one rank.

    Nothing is read from the sources, and nothing written, until `finish`; `plan` comes before it.
    """

    def __init__(
        self,
        target: Target,
        *,
        rank: int = 0,
        world_size: int = 1,
        codec: Codec = "raw",
        block_nbytes: int = BLOCK_NBYTES_DEFAULT,
        threads: int | None = None,
        metadata: Mapping[str, str] | None = None,
        adapt: Leaf | None = None,
        write_files: FileWriter = write_files,
    ) -> None:
        _check_options(rank, world_size, block_nbytes)
        self._target = target
        self._rank, self._world_size = rank, world_size
        self._codec = codec
        self._block_nbytes = block_nbytes
        self._metadata = _text_map(_HF_METADATA if metadata is None else metadata)
        self._workers = Workers(threads)
        self._state: Mapping[str, Any] = {}
        self._plans: list[FilePlan] = []
        self._adapt = adapt
        self._write_files = write_files
        self._planned: StatePlan | None = None
        self._done = False

    def add(self, state: Mapping[str, Any]) -> None:
        """Add a part of the state; dicts are united with what was added before.

        Args:
            state: Nested values of the format, with a `TensorSource` at each tensor.

        Raises:
            MismatchError: `state_conflict`: a path has two values.
        """
        self._check_open()
        if type(state) not in (dict, OrderedDict) or any(type(key) is not str for key in state):
            raise ArgumentError(
                f"a state is a dict with string keys, got {shorten(state)}", code="bad_argument"
            )
        self._state = _united(self._state, state, []) if self._state else state

    def add_tensor(
        self,
        path: str | Sequence[Any],
        data: Data,
        *,
        dtype: str,
        shape: Sequence[int],
        box: Box | None = None,
        codec: str | None = None,
    ) -> TensorSource:
        """Add a tensor, or one box of it.

        Args:
            path: Keys from the root of the state; a string is one key.
            data: Packed row-major little-endian bytes: a contiguous buffer, kept until the
                checkpoint is written, or a function that gives an iterable of buffers then.
            dtype: Logical dtype, as `bfloat16`.
            shape: Global shape.
            box: What `data` holds, in elements; the whole tensor if None.
            codec: Name of a codec; the writer's choice if None.

        Returns:
            The source; add it at another path too, with `add`, to tie the two.
        """
        shape = tuple(shape)
        boxes = [(Box((0,) * len(shape), shape) if box is None else box, data)]
        source = TensorSource(dtype, shape, boxes, codec=codec)
        self.add_value(path, source)
        return source

    def add_value(self, path: str | Sequence[Any], value: Any) -> None:
        """Add a value of the format at a path; a string is one key."""
        steps = [path] if isinstance(path, str) else list(path)
        if not steps:
            raise ArgumentError("a path has at least one key", code="bad_argument")
        for step in reversed(steps):
            value = {step: value}
        self.add(value)

    def plan(self) -> list[ChunkJob]:
        """Encode what was added, and plan the data files; `write`, `finish` or `commit` goes on.

        Of the state the writer keeps no more than the `data` of what is returned, which may be
        replaced by the same bytes elsewhere: what is done to the state then is not seen.

        Returns:
            The chunks that will be written, in the order of the files.

        Raises:
            UnsupportedValueError: and whatever else is wrong with the state.

        Ranks: local.
        """
        self._check_open()
        self._done = True
        with paused_gc():
            self._planned = plan_state(
                self._state, codec=self._codec, world_size=self._world_size, adapt=self._adapt
            )
            self._plans = plan_files(self._planned.jobs, self._metadata, self._block_nbytes)
        self._state, self._adapt = {}, None
        return [job for plan in self._plans for job in plan.jobs]

    @property
    def planned_nbytes(self) -> int:
        """How many bytes of chunks are planned, before they are compressed."""
        return sum(job.nbytes for plan in self._plans for job in plan.jobs)

    def cancel(self) -> None:
        """Let what writes now, in another thread, end with an error soon."""
        self._workers.cancel()

    def finish(self) -> bytes:
        """Write the data files, make them durable, and return the part for the coordinator.

        Raises:
            UnsupportedValueError: before anything is written.
            StorageError: the medium failed; the coordinator aborts.

        Ranks: local.
        Memory: two blocks per thread, and none for raw tensors that are buffers.
        """
        return self._write().to_bytes()

    def _write(self) -> Part:
        if self._planned is None:
            self.plan()
        assert self._planned is not None
        planned, self._planned = self._planned, None
        plans = self._plans
        labels = file_labels([plan.prefix for plan in plans], self._rank, self._world_size)
        try:
            for plan, label in zip(plans, labels, strict=True):
                plan.label = label
            self._write_files(plans, self._target, self._block_nbytes, self._workers)
        finally:
            self._workers.close()
        ordered = sorted(plans, key=lambda plan: plan.label)
        with paused_gc():
            return part_of(
                planned.jobs,
                ordered,
                planned.tensors,
                tree=planned.tree,
                files=[self._data_file(plan) for plan in ordered],
                block_nbytes=self._block_nbytes,
                world_size=self._world_size,
            )

    def _data_file(self, plan: FilePlan) -> DataFile:
        return DataFile(
            plan.label, plan.nbytes, plan.header_nbytes, plan.prefix, plan.metadata, self._rank
        )

    def _check_open(self) -> None:
        if self._done:
            raise ArgumentError("the writer has finished", code="closed")


class Writer(PartWriter):
    """Writes a checkpoint, alone or as the coordinator of several writers.

    A context manager: leaving it commits; leaving it by an exception commits nothing, and
    removes what was written.
    """

    def __init__(
        self, target: Target, *, user: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__(target, **options)
        self._user = _text_map(user or {})
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
        for job in plan.jobs:
            keys[job.key] = plan.label
            total += job.stored_nbytes
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(keys.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _check_options(rank: int, world_size: int, block_nbytes: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise ArgumentError(f"rank {rank} of {world_size}", code="bad_argument")
    power = type(block_nbytes) is int and block_nbytes & (block_nbytes - 1) == 0
    if not power or not BLOCK_NBYTES_MIN <= block_nbytes <= BLOCK_NBYTES_MAX:
        raise ArgumentError(
            f"block_nbytes is {shorten(block_nbytes)}, "
            "expected a power of two from 4 KiB to 64 MiB",
            code="bad_argument",
        )


def _text_map(values: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(values, Mapping):
        raise ArgumentError(f"expected a mapping, got {shorten(values)}", code="bad_argument")
    for key, value in values.items():
        if not (_is_text(key) and _is_text(value)):
            raise ArgumentError(
                f"user metadata maps strings to strings, got {shorten(key)}: {shorten(value)}",
                code="bad_argument",
                hint="other values belong into the state",
            )
    return dict(values)


def _is_text(value: object) -> bool:
    return type(value) is str and not any("\ud800" <= char <= "\udfff" for char in value)


def _united(old: Any, new: Any, path: list[Any]) -> Any:
    """Unite two states: dicts key by key, the rest must not meet."""
    if type(old) is dict and type(new) is dict:
        result = dict(old)
        for key, value in new.items():
            path.append(key)
            result[key] = _united(old[key], value, path) if key in old else value
            path.pop()
        return result
    if isinstance(old, TensorSource) and isinstance(new, TensorSource):
        same = (old.dtype, old.shape, old.codec) == (new.dtype, new.shape, new.codec)
        if same and old is not new:
            return replace(old, chunks=[*old.chunks, *new.chunks])
    raise MismatchError(f"{render_path(path)} was added twice", code="state_conflict")
