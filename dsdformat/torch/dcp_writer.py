"""A StorageWriter of `torch.distributed.checkpoint` that writes an ordinary checkpoint.

DCP moves what ranks tell each other: each rank writes its data files into the coordinator's
unfinished folder and returns what it wrote as one `WriteResult`; `finish` merges that, writes the
manifest, and makes the checkpoint exist. There are no collectives here, so it works in the thread
or process of `async_save`.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dsdformat.errors import ArgumentError, StorageError
from dsdformat.folders import PathLike
from dsdformat.storage.beside import BesideTarget
from dsdformat.storage.target import LocalTarget
from dsdformat.torch.comm import is_distributed
from dsdformat.torch.dcp_assignment import Assignment, current_assignment
from dsdformat.torch.dcp_options import check_options, is_checkpoint_id
from dsdformat.torch.dcp_staging import staged
from dsdformat.torch.dcp_state import planned_nbytes, planned_state
from dsdformat.torch.dcp_values import ValueAdapter
from dsdformat.writer import Codec, Writer

__all__ = ["DsdStorageWriter", "FileSystemWriter"]

_COORDINATOR = "coordinator"


class DsdStorageWriter(StorageWriter, AsyncStager):
    """Writes what `dcp.save` or `dcp.async_save` gives it as one checkpoint.

    The checkpoint has the nested state that was passed to `dcp.save`, with tensors of global
    shape; `dsd.load`, `dsdformat.open`, `dsd ls` and the rest read it as any other. No pickle is
    stored: values are stored as themselves, and what the format does not have is refused.

    Attributes:
        path: The checkpoint's folder.
        save_id: Names a save; once it is complete, on the coordinator, the root digest.
    """

    _synchronize_after_execute = False  # `stage` returns when the copy is made
    _target_type: type[LocalTarget] = LocalTarget

    def __init__(
        self,
        path: PathLike,
        *,
        overwrite: bool = False,
        codec: Codec = "raw",
        user: Mapping[str, str] | None = None,
        threads: int | None = None,
        **torch_options: Any,
    ) -> None:
        """Say where and how to write; nothing is done yet.

        Args:
            path: The checkpoint's folder; `checkpoint_id` of `dcp.save` is used instead if given.
            overwrite: Whether to replace a checkpoint that is there, once the new one is complete.
            codec: `raw`, `zstd` or `planes+zstd`, or a function from a tensor's name to one.
            user: User metadata: strings.
            threads: How many threads hash and write on each rank; up to 8 if None.
            torch_options: What torch's FileSystemWriter takes. `thread_count` stands for
                `threads`; the others concern files that are not written here.

        Raises:
            ArgumentError: `_extensions`, or an option that torch does not have either.
        """
        super().__init__()
        self.path = Path(path)
        self.overwrite = overwrite
        self.save_id = _new_id()
        self._codec = codec
        self._user = user
        self._threads = check_options(torch_options, threads)
        self._is_coordinator = False
        self._rank: int | None = None
        self._save: _Save | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_save": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where it writes."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path on a file system."""
        return is_checkpoint_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Return what planners are told of the save."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    # Of AsyncStager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state to host memory; what is done to the state later does not change the copy.

        Ranks: local.
        Memory: the copy.
        """
        return staged(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: the copy was made when `stage` returned."""

    # Of StorageWriter, in the order of the calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, somewhere else if that is told."""
        self._abandon()
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self.save_id = _new_id()

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:
        """Note the role of this rank.

        Raises:
            ArgumentError: several ranks, each of which would write a checkpoint of its own.
        """
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank")
        alone = not is_distributed() or distributed.get_world_size() == 1
        if not alone and not kwargs.get("use_collectives", True):
            raise ArgumentError(
                "use_collectives=False: each rank would write a checkpoint of its own to one path",
                code="bad_argument",
                hint="leave use_collectives as it is: the plan is all that is sent",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Mark the coordinator's plan, by which `prepare_global_plan` knows it."""
        self._abandon()
        mark = _COORDINATOR if self._is_coordinator else None
        return dataclasses.replace(plan, storage_data=mark)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the checkpoint, and tell each rank where to write.

        Raises:
            StorageError: `already_exists`, `not_replaceable` or `io_error`.

        Ranks: coordinator only.
        """
        own = self._own_place(plans)
        adapter = ValueAdapter()
        writer = self._begin(len(plans), adapter)
        told = [
            Assignment(str(self.path), writer.staging, rank, len(plans))
            for rank in _swapped(range(len(plans)), own)
        ]
        self._save = _Save(writer, adapter, told[own], own)
        return [
            dataclasses.replace(plan, storage_data=one)
            for plan, one in zip(plans, told, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the data files of this rank; they are durable when the future is done.

        Raises:
            UnsupportedValueError: a value that the format does not have, by its path; nothing
                was written on this rank.
            StorageError: the medium failed.

        Ranks: local.
        Memory: two blocks per thread; none for packed tensors in host memory.
        """
        save = self._save
        told = save.told if save else current_assignment(plan.storage_data, str(self.path))
        try:
            part = self._write(plan, planner, told)
        except BaseException:
            if told.world_size == 1:  # else others still write into the folder
                self._abandon()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), planned_nbytes(plan), part)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merge what all ranks wrote, and make the checkpoint exist.

        Raises:
            MismatchError: `state_conflict` or `chunks_incomplete`; nothing is made visible.
            StorageError: the medium failed, or the target exists by now.

        Ranks: coordinator only.
        Memory: the merged chunk tables.
        """
        save = self._save
        if save is None:
            raise ArgumentError("there is no save to be finished", code="closed")
        try:
            parts = [_part_of(result) for result in _swapped(results, save.own)]
            self.save_id = save.writer.commit(parts[1:])
        finally:
            self._abandon()
        metadata.storage_meta = self.storage_meta()

    def _own_place(self, plans: Sequence[SavePlan]) -> int:
        """Return which plan is that of this rank."""
        marked = [index for index, plan in enumerate(plans) if plan.storage_data == _COORDINATOR]
        return marked[0] if len(marked) == 1 else self._rank or 0

    def _begin(self, world_size: int, adapter: ValueAdapter) -> Writer:
        try:
            target = self._target_type(self.path, overwrite=self.overwrite)
        except StorageError as error:
            if error.code != "already_exists":
                raise
            raise StorageError(
                f"Checkpoint already exists: {self.path}", code=error.code, hint=error.hint
            ) from error
        try:
            return Writer(
                target,
                codec=self._codec,
                user=self._user,
                world_size=world_size,
                threads=self._threads,
                adapt=adapter,
            )
        except BaseException:
            target.abort()
            raise

    def _write(self, plan: SavePlan, planner: SavePlanner, told: Assignment) -> bytes:
        save = self._save
        adapter = save.adapter if save else ValueAdapter()
        state = planned_state(plan, planner, adapter, told.world_size)
        if save is not None:
            save.writer.add(state)
            save.writer.write()
            return b""
        part = Writer.join(
            told.staging,
            rank=told.rank,
            world_size=told.world_size,
            codec=self._codec,
            threads=self._threads,
            adapt=adapter,
        )
        part.add(state)
        return part.finish()

    def _abandon(self) -> None:
        """Remove what a save that did not end has left."""
        save, self._save = self._save, None
        if save is not None:
            save.abandon()


class FileSystemWriter(DsdStorageWriter):
    """The same under torch's name, and with its defaults.

    A checkpoint that is there is replaced, and one is made beside the other files of a folder;
    not both at once, since these files would be lost.
    """

    _target_type = BesideTarget

    def __init__(self, path: PathLike, *, overwrite: bool = True, **options: Any) -> None:
        """Say where and how to write; see `DsdStorageWriter`."""
        super().__init__(path, overwrite=overwrite, **options)


class _Save:
    """What the coordinator holds while a save goes on.

    Attributes:
        writer: Of this rank's data, and of the manifest.
        adapter: Of the writer.
        told: What this rank has to know.
        own: Which plan and which result is that of this rank.
    """

    def __init__(self, writer: Writer, adapter: ValueAdapter, told: Assignment, own: int) -> None:
        self.writer = writer
        self.adapter = adapter
        self.told = told
        self.own = own
        # DCP does not tell the coordinator that another rank has failed.
        self.abandon = weakref.finalize(self, _abort, writer, os.getpid())


def _abort(writer: Writer, process: int) -> None:
    if os.getpid() == process:  # else this is a copy in a process that was forked
        writer.abort()


def _part_of(results: Sequence[WriteResult]) -> bytes:
    if len(results) == 1 and type(results[0].storage_data) is bytes:
        return results[0].storage_data
    raise ArgumentError(
        "a rank sent another result than that of this writer's write_data", code="bad_argument"
    )


def _swapped(items: Sequence[Any], own: int) -> list[Any]:
    """Return the items in the order of writers: the coordinator's is the first."""
    result = list(items)
    result[0], result[own] = result[own], result[0]
    return result


def _new_id() -> str:
    return str(uuid.uuid4())
