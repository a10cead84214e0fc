"""A StorageReader of `torch.distributed.checkpoint` for checkpoints of any writer.

It reads any box of a tensor, so planners are told of one chunk each, and a rank reads each of its
shards at once, whatever the layout in which it was saved.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dsdformat import folders
from dsdformat.boxes import Box
from dsdformat.errors import MismatchError, NotACheckpointError, Problem, shorten
from dsdformat.folders import PathLike
from dsdformat.limits import MIB
from dsdformat.reader import Checkpoint
from dsdformat.signing import Keys
from dsdformat.torch.builder import stored_dtype
from dsdformat.torch.composites import type_name
from dsdformat.torch.dcp_contents import Contents
from dsdformat.torch.dcp_options import is_checkpoint_id
from dsdformat.torch.dcp_values import value_stream
from dsdformat.torch.moves import Move, fill
from dsdformat.torch.stored import Stored

__all__ = ["DsdStorageReader", "FileSystemReader"]

GROUP_NBYTES = 256 * MIB


class DsdStorageReader(StorageReader):
    """Reads a checkpoint into what `dcp.load` gives it.

    Any checkpoint will do, of `dcp.save` or of `dsd.save`. Nothing of it is unpickled.

    Attributes:
        path: The checkpoint's folder.
        load_id: Names a load.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        verify: bool = True,
        digest: str | None = None,
        pubkey: Keys | None = None,
        threads: int | None = None,
        types: Iterable[type] = (),
        cast: bool = True,
        _extension_registry: Any = None,
    ) -> None:
        """Say where and how to read; nothing is done yet.

        Args:
            path: The checkpoint's folder; `checkpoint_id` of `dcp.load` is used instead if given.
            verify: Whether to compare data with its digests.
            digest: The root digest that the checkpoint must have.
            pubkey: An Ed25519 key that must have signed the checkpoint; see `dsdformat.open`.
            threads: How many threads read on each rank; up to 8 if None.
            types: Tensor subclasses that may be made, of those with `__tensor_flatten__`.
            cast: Whether a tensor of another dtype than the stored one is filled all the same, as
                torch's reader does; else that is an error.
            _extension_registry: As torch's FileSystemReader takes it; of no effect.
        """
        super().__init__()
        self.path = Path(path)
        self.load_id = _new_id()
        self._verify = verify
        self._digest = digest
        self._pubkey = pubkey
        self._threads = threads
        self._types = {type_name(kind): kind for kind in types}
        self._cast = cast
        self._opened: _Opened | None = None
        self._failure: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_failure": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where it reads."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path on a file system."""
        return is_checkpoint_id(checkpoint_id)

    # In the order of the calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, somewhere else if that is told."""
        self._close()
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self.load_id = _new_id()

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint, and return what is in it.

        Newer versions of DCP ask once more, for a rank, when this fails, and would then tell of
        the failure in words only; so what failed comes out in `set_up_storage_reader` then.

        Raises:
            NotACheckpointError: `no_manifest` or `bad_magic`.
            FormatError: the manifest breaks the spec, or is another one than `digest` says.
            StorageError: the operating system reported an error.

        Ranks: local.
        Memory: the tree of the checkpoint.
        """
        if "rank" in kwargs and self._failure is not None:
            return _Unreadable(self._failure)
        self._close()
        try:
            opened = self._open()
        except Exception as error:
            self._failure = error
            raise
        metadata = opened.contents.metadata()
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.path, save_id=opened.checkpoint.root, load_id=self.load_id
        )
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002
        is_coordinator: bool,  # noqa: ARG002
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        """Raise what `read_metadata` could not; else do nothing: it is open already."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan wants; all of it is there when this returns.

        Raises:
            ChecksumError: `checksum_mismatch`; tensors may hold part of what was read.
            MismatchError: `state_mismatch`: a tensor does not fit.
            UnsupportedValueError: a dtype that this torch lacks, or a type not in `types`.

        Ranks: local.
        Memory: 32 MiB where tensors are not on the CPU or of another dtype; one value at a time.
        """
        try:
            opened = self._opened or self._open()
            tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
            for items in _groups(tensors, opened):
                self._read_tensors(opened, items, planner)
            for item in plan.items:
                if item.type != LoadItemType.TENSOR:
                    self._read_value(opened, item, planner)
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_tensors(
        self, opened: _Opened, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> None:
        targets = [planner.resolve_tensor(item).detach() for item in items]
        moves = []
        for item, target in zip(items, targets, strict=True):
            stored, box = opened.stored(item), _box(item)
            self._check(item, stored, box, target)
            moves.append(Move(stored.index, stored_dtype(stored), target, box))
        fill(opened.checkpoint, moves)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    def _check(self, item: ReadItem, stored: Stored, box: Box, target: torch.Tensor) -> None:
        name, dtype = item.dest_index.fqn, stored_dtype(stored)
        if tuple(target.shape) != box.shape or target.is_meta:
            raise MismatchError(
                f"{name}: {list(box.shape)} elements are to be read into a tensor of shape "
                f"{list(target.shape)} on {target.device}",
                code="state_mismatch",
            )
        if target.dtype != dtype and not self._cast:
            raise MismatchError(
                f"{name}: {dtype} in the checkpoint, {target.dtype} in the state",
                code="state_mismatch",
                hint="pass cast=True to convert it",
            )

    def _read_value(self, opened: _Opened, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        path, value = opened.contents.value(name)
        if opened.contents.is_branch(name) and _is_tensor(planner, item):
            raise MismatchError(
                f"{name}: a {type(value).__name__} in the checkpoint, a tensor in the state",
                code="state_mismatch",
            )
        planner.load_bytes(item, value_stream(opened.checkpoint, value, path, self._types))

    def _open(self) -> _Opened:
        try:
            checkpoint = folders.open(
                self.path,
                verify=self._verify,
                digest=self._digest,
                pubkey=self._pubkey,
                threads=self._threads,
            )
        except NotACheckpointError as error:
            if (self.path / ".metadata").is_file():
                raise _foreign(self.path) from error
            raise
        with contextlib.ExitStack() as stack:
            stack.callback(checkpoint.close)
            self._opened = _Opened(checkpoint)
            stack.pop_all()
        return self._opened

    def _close(self) -> None:
        """Close what is open, and forget what failed."""
        self._failure = None
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


class FileSystemReader(DsdStorageReader):
    """The same under torch's name."""


class _Opened:
    """A checkpoint that is open between `read_metadata` and `read_data`; it closes with this."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.contents = Contents(checkpoint)
        self.close = weakref.finalize(self, checkpoint.close)

    def stored(self, item: ReadItem) -> Stored:
        """Return the tensor that an item reads from."""
        _, leaf = self.contents.value(item.storage_index.fqn)
        if not isinstance(leaf, Stored):
            raise MismatchError(
                f"{shorten(item.storage_index.fqn)} is no tensor in the checkpoint",
                code="state_mismatch",
            )
        return leaf


class _Unreadable(Metadata):
    """Stands for metadata that could not be read: whoever looks into it is told why."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta"):
            raise object.__getattribute__(self, "_failure")
        return object.__getattribute__(self, name)


def _groups(items: Sequence[ReadItem], opened: _Opened) -> Iterator[list[ReadItem]]:
    """Cut items into groups that are read together, in the order of the checkpoint."""
    group: list[ReadItem] = []
    held = 0
    for item in sorted(items, key=lambda item: (opened.stored(item).index, _box(item).offset)):
        nbytes = _box(item).numel * stored_dtype(opened.stored(item)).itemsize
        if group and held + nbytes > GROUP_NBYTES:
            yield group
            group, held = [], 0
        group.append(item)
        held += nbytes
    if group:
        yield group


def _box(item: ReadItem) -> Box:
    """Return the box of the tensor that an item reads, in elements of the tensor."""
    lengths = tuple(map(int, item.lengths))
    base = item.storage_index.offset or (0,) * len(lengths)
    offsets = zip(base, item.storage_offsets, strict=True)
    return Box(tuple(int(a) + int(b) for a, b in offsets), lengths)


def _is_tensor(planner: LoadPlanner, item: ReadItem) -> bool:
    state = getattr(planner, "state_dict", None)
    return isinstance(state, dict) and isinstance(state.get(item.dest_index.fqn), torch.Tensor)


def _foreign(path: Path) -> NotACheckpointError:
    problem = Problem(
        "no_manifest",
        f"{path} was written by torch.distributed.checkpoint's own storage",
        hint="read it with torch's FileSystemReader",
    )
    return NotACheckpointError([problem])


def _new_id() -> str:
    return str(uuid.uuid4())
