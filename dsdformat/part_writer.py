"""Write the data files of one rank: collect its part of a state, plan its files, write them.

What it wrote, as bytes, is for the coordinator, whose `Writer` makes the checkpoint exist.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsdformat.boxes import Box
from dsdformat.datafiles import FileWriter, write_files
from dsdformat.errors import ArgumentError, MismatchError, shorten
from dsdformat.file_plans import FilePlan, plan_files
from dsdformat.format.manifest import DataFile
from dsdformat.format.paths import render_path
from dsdformat.format.values import Leaf
from dsdformat.garbage import paused_gc
from dsdformat.labels import file_labels
from dsdformat.limits import BLOCK_NBYTES_DEFAULT, BLOCK_NBYTES_MAX, BLOCK_NBYTES_MIN
from dsdformat.parts import Part, part_of
from dsdformat.sources import Data, TensorSource
from dsdformat.state_plan import Codec, StatePlan, plan_state
from dsdformat.storage.base import Target
from dsdformat.workers import Workers

__all__ = ["PartWriter", "text_map"]

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
        self._metadata = text_map(_HF_METADATA if metadata is None else metadata)
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

    def plan(self) -> list[FilePlan]:
        """Encode what was added, and plan the data files; `write`, `finish` or `commit` goes on.

        Of the state the writer keeps no more than the `data` of the chunks, which may be replaced
        by the same bytes elsewhere: what is done to the state then is not seen.

        Returns:
            The files that will be written.

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
            self._plans = plan_files(self._planned.chunks, self._metadata, self._block_nbytes)
        self._state, self._adapt = {}, None
        return self._plans

    def spare_cache(self) -> None:
        """Write large pieces past the page cache, where that is known to be done well.

        It takes less of the processors, and longer if nothing else is to be done.
        """
        self._target.past_cache = True

    @property
    def planned_nbytes(self) -> int:
        """How many bytes of chunks are planned, before they are compressed."""
        return sum(sum(plan.lengths) for plan in self._plans)

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
                planned.chunks,
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


def text_map(values: Mapping[str, str]) -> dict[str, str]:
    """Check that user metadata maps strings to strings."""
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
